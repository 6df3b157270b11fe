"""Kernels that only one runtime launches: families that the eager profile has no times of.

What is left of a network's time tells them no more than a floor, a bandwidth and a throughput, so that is all they get.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from latpred.graph import Op
from latpred.ops.families import root
from latpred.pricing import ESTIMATED_SPREAD, SUBSTITUTES, precision_of
from latpred.profile import DeviceProfile, KernelFit
from latpred.schedule import Schedule

SPREAD = ESTIMATED_SPREAD / 2  # log standard deviation of one such kernel's time


class Own(NamedTuple):
    """A family of a runtime's own in one precision, and what a launch, a byte and a multiply-add may cost it."""

    precision: str
    family: str
    guess_us: tuple[float, float, float]


def own_work(
    schedule: Schedule, precision: str, batch: int, profile: DeviceProfile
) -> dict[Own, tuple[float, float, float]]:
    """Launches, bytes and multiply-adds of each family that the profile has no times of."""
    known = {name: {root(family) for family in fits} | SUBSTITUTES.keys() for name, fits in profile.kernels.items()}
    found: dict[Own, tuple[float, float, float]] = {}
    for index, share, family in zip(
        schedule.kernel_op.tolist(), schedule.kernel_share.tolist(), schedule.kernel_family, strict=True
    ):
        op = schedule.ops[index]
        wanted = precision_of(op.dtype, precision, profile)
        if root(family) in known.get(wanted, SUBSTITUTES):
            continue
        own = Own(wanted, root(family), _guess_us(profile.kernels.get(wanted, {})))
        launches, moved, macs = found.get(own, (0.0, 0.0, 0.0))
        found[own] = (launches + 1, moved + share * _bytes(op, batch), macs + share * op.macs.at(batch))
    return found


def own_fits(rates: Mapping[Own, tuple[float, ...]], profile: DeviceProfile) -> dict[str, dict[str, KernelFit]]:
    """Fits, by precision and family, from what a launch, a byte and a multiply-add take in microseconds."""
    found: dict[str, dict[str, KernelFit]] = {}
    for own, (launch_us, byte_us, mac_us) in rates.items():
        rate = _rate(byte_us)
        found.setdefault(own.precision, {})[own.family] = KernelFit.plain(
            family=own.family,
            floor_us=round(launch_us, 5),
            macs_per_us=_rate(mac_us),
            weight_bytes_per_us=rate,
            activation_bytes_per_us=rate,
            multiprocessors=profile.device.multiprocessors,
            spread=SPREAD,
        )
    return found


def _bytes(op: Op, batch: int) -> int:
    return op.weight_bytes.at(batch) + op.read_bytes.at(batch) + op.write_bytes.at(batch)


def _guess_us(fits: Mapping[str, KernelFit]) -> tuple[float, float, float]:
    """Usual floor, byte and multiply-add of the families that were measured."""
    floors = [fit.floor_us for fit in fits.values()]
    moving = [fit.activation_bytes_per_us for fit in fits.values() if fit.activation_bytes_per_us]
    multiplying = [fit.macs_per_us for fit in fits.values() if fit.macs_per_us]
    return (
        float(np.median(floors)) if floors else 1.0,
        1.0 / float(np.median(moving)) if moving else 1e-4,
        1.0 / float(np.median(multiplying)) if multiplying else 1e-5,
    )


def _rate(us_per_unit: float) -> float:
    return float(f"{1.0 / us_per_unit:.6g}") if us_per_unit > 1e-15 else 0.0
