"""Costs of a runtime on an asynchronous device, from whole networks: the host's apart from the device's.

    time to issue           = fixed + Σ steps · cost(class)
    time in a long queue    = Σ scale(family) · time of the family's kernels by the eager profile + gaps between them
    latency, device-bound   = the host's first step + launch + the device's time + synchronisation

Each network tells of one side at a time, so each side is a small linear system of its own. Where a runtime can only be
timed from outside, as one with a stream of its own, latencies have to do for both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from latpred.calibration.fitting.dispatch_fit import with_parents
from latpred.calibration.fitting.linear_system import Column, System
from latpred.calibration.runtime_calibration.whole_fit import (
    CLASS_SIGMA,
    FEWEST,
    FIXED,
    FIXED_SIGMA_US,
    MODULE,
    OWN_SIGMA,
    PYTHON,
    SHARE,
    SHARE_SIGMA,
    Parts,
    believe_in_scales,
    eager_us,
    kernel_terms,
    own_columns,
    own_fits,
    owns,
    rounded,
)
from latpred.prediction.pricing import host_cost
from latpred.profile.document import DeviceProfile, DispatchFit
from latpred.runtimes.cuda_graphs import REPLAY

ISSUE_SIGMA = 0.01  # relative error of the host's law, beside that of a timing
DEVICE_SIGMA = 0.03  # the same of kernel times
DEVICE_BOUND = 1.3  # device time over host time from which a latency tells of kernels alone
ALIKE_SIGMA = 0.2  # how far a class may lie from its like, as a share of what such a step usually costs
EDGE_SIGMA_US = 1.0  # of what lies before the first kernel and after the last
REPLAYED_SIGMA_US = 3.0  # of what a call costs beside the graphs it replays
ROUNDS = 3  # of taking the host from what is known of the device, and the other way round
_SHARE = ("share",)


def fit_queued(
    parts: Sequence[Parts], profile: DeviceProfile, gap_us: float | None = None, like: DispatchFit | None = None
) -> DispatchFit:
    """Host costs and kernel times of a runtime.

    Parameters
    ----------
    parts : sequence of Parts
        Networks that do not judge, taken apart.
    profile : DeviceProfile
        The same device's, with eager and the kernels fitted.
    gap_us : float, optional
        The gap between kernels of a replayed graph, where the runtime launches each forward pass as one.
    like : DispatchFit, optional
        Of a runtime with the same kernels: what is taken for granted of them where too few networks tell.
    """
    side = _Sides(profile, gap_us)
    fit = DispatchFit({}, 0.0, 0.0, 0.0, gap_us=gap_us)
    if like is not None:
        fit = msgspec.structs.replace(fit, kernels=like.kernels, kernel_scales=like.kernel_scales)
    for _ in range(ROUNDS):
        fit = side.with_host(fit, parts)
        fit = side.with_device(fit, parts)
    return fit


class _Sides:
    """The two sides of a runtime, each fitted with what is known of the other."""

    def __init__(self, profile: DeviceProfile, gap_us: float | None) -> None:
        self._profile, self._device, self._eager = profile, profile.device, profile.runtimes["eager"]
        self._gap_us, self._replayed = (self._device.gap_us, False) if gap_us is None else (gap_us, True)

    def with_host(self, fit: DispatchFit, parts: Sequence[Parts]) -> DispatchFit:
        """The fit with host costs."""
        system, issued = System(), any(part.run.issue_us is not None for part in parts)
        for part in parts:
            us = part.run.issue_us if issued else self._host_us(fit, part)
            if us is not None and us > 0:
                sigma = float(np.hypot(ISSUE_SIGMA, part.run.sigma)) * max(us, 0.1 * part.run.total_us)
                terms: dict[Column, float] = {("class", name): float(count) for name, count in part.steps.items()}
                system.measured({FIXED: 1.0, **terms}, us, sigma)
        if self._replayed:  # what a call takes is what its graphs take, unless networks of several say otherwise
            system.believed({FIXED: 1.0}, 0.0, REPLAYED_SIGMA_US)
        else:
            system.believed({FIXED: 1.0}, self._eager.fixed_us, FIXED_SIGMA_US)
        system.believed({_SHARE: 1.0}, SHARE, SHARE_SIGMA)
        self._believe_in_likes(system)
        return self._dispatch(fit, system.solve())

    def _believe_in_likes(self, system: System) -> None:
        """Steps cost what their like cost, and steps of all kinds one common share of what they cost in eager."""
        for name in system.names("class"):
            like, usual = _like(name), SHARE * eager_us(self._eager, name)
            if like is not None:
                system.believed({("class", name): 1.0, ("class", like): -1.0}, 0.0, ALIKE_SIGMA * usual)
        for name in {_like(name) or name for name in system.names("class")} - {REPLAY}:
            usual = eager_us(self._eager, name)
            system.believed({("class", name): 1.0, _SHARE: -usual}, 0.0, CLASS_SIGMA * SHARE * usual)

    def with_device(self, fit: DispatchFit, parts: Sequence[Parts]) -> DispatchFit:
        """The fit with factors on kernel times, and times of kernels that the profile lacks."""
        system, seen = System(), []
        for part in parts:
            us = self._device_us(fit, part)
            if us is not None:
                sigma_us = float(np.hypot(DEVICE_SIGMA, part.run.sigma)) * us
                system.measured(kernel_terms(part), us, float(np.hypot(sigma_us, EDGE_SIGMA_US)))
                seen.append(part)
        if len(seen) < FEWEST:
            return fit
        believe_in_scales(system)
        for own in owns(seen):
            for column, guess in zip(own_columns(own), own.guess_us, strict=True):
                system.believed({column: 1.0}, guess, OWN_SIGMA * guess)
        found = system.solve()
        rates = {own: tuple(found[column] for column in own_columns(own)) for own in owns(seen)}
        scales = {key[1]: value for key, value in found.items() if key[0] == "scale"}
        return msgspec.structs.replace(fit, kernels=own_fits(rates, self._profile), kernel_scales=rounded(scales))

    def _device_us(self, fit: DispatchFit, part: Parts) -> float | None:
        """What a network's kernels take together, where a timing tells."""
        device = self._device
        if not part.kernels:
            return None
        gaps_us = (part.kernels - 1) * self._gap_us
        if part.run.queued_us is not None:
            busy_us = part.run.queued_us - gaps_us - device.gap_us
            return busy_us if busy_us > 0 else None
        host_us, start_us = self._known_host_us(fit, part), self._start_us(fit, part)
        busy_us = part.run.total_us - start_us - gaps_us - device.launch_us - device.sync_us
        if busy_us <= 0 or (not self._replayed and busy_us + gaps_us < DEVICE_BOUND * host_us):
            return None
        return busy_us

    def _host_us(self, fit: DispatchFit, part: Parts) -> float | None:
        """What issuing a network takes, from its latency and what is known of the device."""
        device, busy_us = self._device, _busy_us(fit, part)
        if not part.run.tiny:
            return None
        rest_us = part.run.total_us - device.launch_us - device.sync_us
        if self._replayed:
            return rest_us - busy_us - (part.kernels - 1) * self._gap_us
        # Of a host-bound network the last kernel alone is waited for. Where the device is slower even here, this is
        # more than the host takes, but no more than keeps up with the device.
        return rest_us - busy_us / max(part.kernels, 1)

    def _known_host_us(self, fit: DispatchFit, part: Parts) -> float:
        return fit.fixed_us + sum(count * _step_us(fit, name) for name, count in part.steps.items())

    def _start_us(self, fit: DispatchFit, part: Parts) -> float:
        """What the host takes until the first kernel is launched."""
        if self._replayed:
            return self._known_host_us(fit, part)
        return fit.fixed_us + (self._known_host_us(fit, part) - fit.fixed_us) / max(part.kernels, 1)

    def _dispatch(self, fit: DispatchFit, found: Mapping[Column, float]) -> DispatchFit:
        costs = {key[1]: value for key, value in found.items() if key[0] == "class"}
        share = found[_SHARE] * self._eager.scale
        module_us = costs.pop(MODULE, share * self._eager.module_call_us)
        python_us = costs.pop(PYTHON, share * self._eager.python_call_us)
        return msgspec.structs.replace(
            fit,
            costs_us=rounded(with_parents(costs)),
            module_call_us=round(module_us, 5),
            python_call_us=round(python_us, 5),
            fixed_us=round(found[FIXED], 4),
        )


def _busy_us(fit: DispatchFit, part: Parts) -> float:
    """Time of a network's kernels by a fit."""
    times = {
        family: us * fit.kernel_scales.get(family, fit.kernel_scales.get("", 1.0))
        for family, us in part.kernel_us.items()
    }
    fitted = {own: found for own in part.own if (found := fit.kernels.get(own.precision, {}).get(own.family))}
    times |= dict.fromkeys((own.family for own in fitted), 0.0)
    for own, found in fitted.items():
        launches, moved, macs = part.own[own]
        width, rate = found.activation_bytes_per_us, found.macs_per_us
        times[own.family] += (
            launches * found.floor_us + (moved / width if width else 0.0) + (macs / rate if rate else 0.0)
        )
    return sum(times.values())


def _like(name: str) -> str | None:
    """The general class that stands for all of one kind: "node.gemm" for "node.gemm.MatMul"."""
    return ".".join(name.split(".")[:2]) if name.count(".") > 1 else None


def _step_us(fit: DispatchFit, name: str) -> float:
    calls = {MODULE: fit.module_call_us, PYTHON: fit.python_call_us}
    return calls[name] if name in calls else host_cost(fit, name)
