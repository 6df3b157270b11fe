"""Costs of a runtime from whole networks: what each kind of step takes, and how its kernels compare to eager's.

    latency = fixed + Σ steps · cost(class) + Σ scale(family) · time of the family's kernels by the eager profile

Networks are few and classes many, so what is known beforehand pulls with a stated weight: steps cost one common share
of what eager's ops of the same kind cost, and kernels take what they take in eager. Errors are relative and outliers
pull less. Kernels of families that the profile has no times of get a floor, a bandwidth and a throughput of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np

from latpred import runtimes
from latpred.calibration.fitting.dispatch_fit import with_parents
from latpred.calibration.fitting.linear_system import Column, System
from latpred.calibration.runtime_calibration.runs import Run
from latpred.errors import CalibrationError
from latpred.graph.features import Floats
from latpred.graph.graph import Op
from latpred.graph.schedule import Schedule
from latpred.ops.classes import kind_of
from latpred.ops.families import root
from latpred.prediction.kernel_times import resident_share
from latpred.prediction.pricing import ESTIMATED_SPREAD, SUBSTITUTES, Priced, PriceList, host_cost, precision_of
from latpred.profile.document import DeviceProfile, DispatchFit, KernelFit

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


FEWEST = 6  # networks below which nothing can be told apart
FAMILY_RUNS = 5  # networks with a family of the runtime's own that earn it times of its own
MODEL_SIGMA = 0.05  # relative error of the law itself, beside that of a timing
CLASS_SIGMA = 0.5  # how far a class's share of eager's cost may lie from the common one
SCALE_SIGMA = 0.15  # how far a family's factor may lie from the common one
COMMON_SIGMA = 0.2  # how far the common factor may lie from 1
OWN_SIGMA = 5.0  # how far what a kernel of its own costs may lie from the guess, as a multiple of it
SHARE, SHARE_SIGMA = 0.5, 1.0  # of eager's cost, to begin with
FIXED_SIGMA_US = 20.0
INTERPRETER_US = 0.3  # what stands for eager's cost of a step that an interpreter serves by itself; eager has none such
MODULE, PYTHON = "module call", "Python call"  # stand for host classes of their own
FIXED, _SHARE, _COMMON = ("fixed",), ("share",), ("scale", "")

UNITS = ("launch", "byte", "mac")


@dataclass(frozen=True)
class Parts:
    """One run taken apart.

    steps : how many of each class, of some none. kernel_us : time of each family by the eager profile. own : launches,
    bytes and multiply-adds of families that the profile has no times of. kernels : how many it launches. cold_us : what
    its steps take longer from cold caches.
    """

    run: Run
    steps: Counter[str]
    kernel_us: dict[str, float]
    own: dict[Own, tuple[float, float, float]] = field(default_factory=dict)
    kernels: int = 0
    cold_us: float = 0.0


def fit_runs(runs: Sequence[Run], profile: DeviceProfile, runtime: str) -> DispatchFit:
    """A runtime's costs from networks timed whole.

    Parameters
    ----------
    runs : sequence of Run
        Without those that judge.
    profile : DeviceProfile
        The same device's, with eager and the kernels fitted.
    runtime : str
        Name of the runtime.

    Raises
    ------
    CalibrationError
        When there are too few networks.
    """
    demand_enough(runs, runtime)
    parts = taken_apart(runs, profile, runtime)
    eager = profile.runtimes["eager"]
    if not profile.device.asynchronous:
        return _dispatch(_solved(parts, eager), parts, eager, profile)
    from latpred.calibration.runtime_calibration.async_fit import fit_queued

    return fit_queued(parts, profile)


def demand_enough(runs: Sequence[Run], runtime: str) -> None:
    """Refuse fewer networks than any fit takes.

    Raises
    ------
    CalibrationError
        When there are too few.
    """
    if len(runs) < FEWEST:
        raise CalibrationError(
            f"{len(runs)} networks were timed in {runtime}, too few to tell its costs. "
            f"Give it more time: latpred calibrate --runtimes {runtime} --budget 3m"
        )


def taken_apart(runs: Sequence[Run], profile: DeviceProfile, runtime: str) -> list[Parts]:
    """Steps and kernel times of every run."""
    free = DispatchFit({}, 0.0, 0.0, 0.0, **_cold(profile.runtimes["eager"]))
    bare = msgspec.structs.replace(profile, runtimes={**profile.runtimes, runtime: free})
    prices, here = PriceList(bare), runtimes.get(runtime)
    # What models take and no network need take gets the cost that is believed of it, not that of an ordinary step.
    sure = dict.fromkeys(getattr(here, "host_classes", ()), 0)
    found = []
    for run in runs:
        schedule = here.lower(run.graph, run.batch)
        steps = Counter(schedule.host_class)
        steps[MODULE], steps[PYTHON] = int(schedule.module_calls.sum()), int(schedule.python_calls.sum())
        own = own_work(schedule, run.graph.precision, run.batch, profile)
        resident = resident_share(run.graph.parameter_bytes, run.graph.bytes(run.batch), profile.device)
        priced = prices.price(schedule, run.graph.precision, resident=resident)
        batch = np.array([float(run.batch)])
        cold_us = 0.0 if priced.cold is None else float(priced.cold.at(batch).sum())
        times = _family_us(schedule, priced, batch)
        found.append(Parts(run, Counter(sure | dict(+steps)), times, own, len(schedule.kernel_op), cold_us))
    return _without_rare(found)


def _family_us(schedule: Schedule, priced: Priced, batch: Floats) -> dict[str, float]:
    us = priced.row_counts * priced.rows_at(batch).us[:, 0]
    names = dict.fromkeys(root(family) for family in schedule.kernel_family)
    return dict(zip(names, (priced.families @ us).tolist(), strict=True))


def _cold(eager: DispatchFit) -> dict[str, Any]:
    """What steps that dispatch PyTorch's own ops take longer from cold caches: the code is the same as eager's."""
    return {
        "cold_costs_us": {name: us for name, us in eager.cold_costs_us.items() if name},
        "cold_bytes": eager.cold_bytes,
    }


def _without_rare(parts: Sequence[Parts]) -> list[Parts]:
    """A family of the runtime's own that few networks have keeps the time that the profile guesses for it."""
    often = Counter(own for part in parts for own in part.own)
    return [
        replace(part, own={own: work for own, work in part.own.items() if often[own] >= FAMILY_RUNS}) for part in parts
    ]


def _solved(parts: Sequence[Parts], eager: DispatchFit) -> Mapping[Column, float]:
    """Values of all unknowns."""
    system = System()
    for part in parts:
        terms: dict[Column, float] = {FIXED: 1.0}
        terms |= {("class", name): float(count) for name, count in part.steps.items()}
        us = part.run.total_us
        sigma = float(np.hypot(MODEL_SIGMA, part.run.sigma))
        system.measured(terms | kernel_terms(part), us - part.cold_us, us * sigma)
    system.believed({FIXED: 1.0}, eager.fixed_us, FIXED_SIGMA_US)
    system.believed({_SHARE: 1.0}, SHARE, SHARE_SIGMA)
    for name in system.names("class"):
        usual = eager_us(eager, name)
        system.believed({("class", name): 1.0, _SHARE: -usual}, 0.0, CLASS_SIGMA * SHARE * usual)
    believe_in_scales(system)
    for own in owns(parts):
        for column, guess in zip(own_columns(own), own.guess_us, strict=True):
            system.believed({column: 1.0}, guess, OWN_SIGMA * guess)
    return system.solve()


def kernel_terms(part: Parts) -> dict[Column, float]:
    """What a network's kernels add to its time."""
    own_families = {own.family for own in part.own}
    terms: dict[Column, float] = {
        ("scale", family): us for family, us in part.kernel_us.items() if family not in own_families
    }
    for own, work in part.own.items():
        terms |= zip(own_columns(own), work, strict=True)
    return terms


def believe_in_scales(system: System) -> None:
    """Kernels take what they take in eager, all a little more or less, and each family a little more or less again."""
    system.believed({_COMMON: 1.0}, 1.0, COMMON_SIGMA)
    for family in system.names("scale"):
        system.believed({("scale", family): 1.0, _COMMON: -1.0}, 0.0, SCALE_SIGMA)


def owns(parts: Sequence[Parts]) -> list[Own]:
    """Families that the profile has no times of."""
    return sorted({own for part in parts for own in part.own})


def own_columns(own: Own) -> tuple[Column, Column, Column]:
    """Unknowns of such a family: what a launch, a byte and a multiply-add take."""
    launch, byte, mac = (("own", own.precision, own.family, unit) for unit in UNITS)
    return launch, byte, mac


def _dispatch(
    found: Mapping[Column, float], parts: Sequence[Parts], eager: DispatchFit, profile: DeviceProfile
) -> DispatchFit:
    costs = {key[1]: value for key, value in found.items() if key[0] == "class"}
    share = found[_SHARE]
    module_us = costs.pop(MODULE, share * eager.scale * eager.module_call_us)
    python_us = costs.pop(PYTHON, share * eager.scale * eager.python_call_us)
    rates = {
        own: tuple(found[column] for column in own_columns(own)) for own in owns(parts) if own_columns(own)[0] in found
    }
    return DispatchFit(
        costs_us=rounded(with_parents(costs)),
        module_call_us=round(module_us, 5),
        python_call_us=round(python_us, 5),
        fixed_us=round(found[FIXED], 4),
        kernels=own_fits(rates, profile),
        kernel_scales=rounded({key[1]: value for key, value in found.items() if key[0] == "scale"}),
        **_cold(eager),
    )


def eager_us(eager: DispatchFit, name: str) -> float:
    """What eager pays for the same kind of step: "node.gemm" and "kernel.extern.gemm" are compared to its "gemm"."""
    if name == MODULE:
        return max(eager.module_call_us * eager.scale, 0.01)
    if name == PYTHON:
        return max(eager.python_call_us * eager.scale, 0.01)
    if kind_of(name) == "interpreter":
        return INTERPRETER_US
    rest = name
    while rest:
        if rest in eager.costs_us:
            return max(eager.costs_us[rest] * eager.scale, 0.01)
        rest = rest.partition(".")[2]
    return max(host_cost(eager, name) * eager.scale, 0.01)


def rounded(values: Mapping[str, float]) -> dict[str, float]:
    """Values to six digits."""
    return {name: float(f"{value:.6g}") for name, value in values.items()}
