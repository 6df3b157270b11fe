"""Costs of a runtime from whole networks: what each kind of step takes, and how its kernels compare to eager's.

    latency = fixed + Σ steps · cost(class) + Σ scale(family) · time of the family's kernels by the eager profile

Networks are few and classes many, so what is known beforehand pulls with a stated weight: steps cost one common share
of what eager's ops of the same kind cost, and kernels take what they take in eager. Errors are relative and outliers
pull less. Kernels of families that the profile has no times of get a floor, a bandwidth and a throughput of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from latpred import runtimes
from latpred.calibration.dispatchfit import with_parents
from latpred.calibration.studies.ownkernels import Own, own_fits, own_work
from latpred.calibration.studies.runs import Run
from latpred.calibration.studies.solving import Column, System
from latpred.errors import CalibrationError
from latpred.ops.families import root
from latpred.pricing import PriceList, host_cost
from latpred.profile import DeviceProfile, DispatchFit
from latpred.schedule import Schedule

FEWEST = 6  # networks below which nothing can be told apart
FAMILY_RUNS = 5  # networks with a family of the runtime's own that earn it times of its own
MODEL_DOUBT = 0.05  # relative error of the law itself, beside that of a timing
CLASS_DOUBT = 0.5  # how far a class's share of eager's cost may lie from the common one
SCALE_DOUBT = 0.15  # how far a family's factor may lie from the common one
COMMON_DOUBT = 0.2  # how far the common factor may lie from 1
OWN_DOUBT = 5.0  # how far what a kernel of its own costs may lie from the guess, as a multiple of it
SHARE, SHARE_DOUBT = 0.5, 1.0  # of eager's cost, to begin with
FIXED_DOUBT_US = 20.0
DEVICE_BOUND = 1.3  # device time over host time from which a latency tells of kernels alone
MODULE, PYTHON = "module call", "Python call"  # stand for host classes of their own
_FIXED, _SHARE, _COMMON = ("fixed",), ("share",), ("scale", "")

UNITS = ("launch", "byte", "mac")


@dataclass(frozen=True)
class Parts:
    """One run taken apart.

    steps : how many of each class. kernel_us : time of each family by the eager profile. own : launches, bytes and
    multiply-adds of families that the profile has no times of. kernels : how many it launches.
    """

    run: Run
    steps: Counter[str]
    kernel_us: dict[str, float]
    own: dict[Own, tuple[float, float, float]] = field(default_factory=dict)
    kernels: int = 0


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
    if len(runs) < FEWEST:
        raise CalibrationError(
            f"{len(runs)} networks were timed in {runtime}, too few to tell its costs. "
            f"Give it more time: latpred calibrate --runtimes {runtime} --budget 3m"
        )
    parts = taken_apart(runs, profile, runtime)
    eager = profile.runtimes["eager"]
    if not profile.device.asynchronous:
        return _dispatch(_solved(parts, eager, lambda part: part.run.total_us), parts, eager, profile)
    issued = [part for part in parts if part.run.issue_us is not None] or [part for part in parts if part.run.tiny]
    host = _solved(issued, eager, _issue_us, kernels=False)
    fit = _dispatch(host, issued, eager, profile)
    return msgspec.structs.replace(fit, kernel_scales=_device_scales(parts, fit, profile, runtime))


def taken_apart(runs: Sequence[Run], profile: DeviceProfile, runtime: str) -> list[Parts]:
    """Steps and kernel times of every run."""
    bare = msgspec.structs.replace(profile, runtimes={**profile.runtimes, runtime: DispatchFit({}, 0.0, 0.0, 0.0)})
    prices, lower = PriceList(bare), runtimes.get(runtime).lower
    found = []
    for run in runs:
        schedule = lower(run.graph, run.batch)
        steps = Counter(schedule.host_class)
        steps[MODULE], steps[PYTHON] = int(schedule.module_calls.sum()), int(schedule.python_calls.sum())
        own = own_work(schedule, run.graph.precision, run.batch, profile)
        times = _family_us(schedule, run, prices, profile)
        found.append(Parts(run, +steps, times, own, len(schedule.kernel_op)))
    return _without_rare(found)


def _family_us(schedule: Schedule, run: Run, prices: PriceList, profile: DeviceProfile) -> dict[str, float]:
    resident = 0 < run.graph.parameter_bytes <= profile.device.cache_bytes
    priced = prices.price(schedule, run.graph.precision, resident=resident)
    us = priced.row_counts * priced.rows_at(np.array([float(run.batch)])).us[:, 0]
    names = dict.fromkeys(root(family) for family in schedule.kernel_family)
    return dict(zip(names, (priced.families @ us).tolist(), strict=True))


def _without_rare(parts: Sequence[Parts]) -> list[Parts]:
    """A family of the runtime's own that few networks have keeps the time that the profile guesses for it."""
    often = Counter(own for part in parts for own in part.own)
    return [
        replace(part, own={own: work for own, work in part.own.items() if often[own] >= FAMILY_RUNS}) for part in parts
    ]


def _issue_us(part: Parts) -> float:
    return part.run.total_us if part.run.issue_us is None else part.run.issue_us


def _solved(
    parts: Sequence[Parts], eager: DispatchFit, total_us: Callable[[Parts], float], *, kernels: bool = True
) -> Mapping[Column, float]:
    """Values of all unknowns."""
    system = System()
    for part in parts:
        terms: dict[Column, float] = {_FIXED: 1.0}
        terms |= {("class", name): float(count) for name, count in part.steps.items()}
        us = total_us(part)
        doubt = float(np.hypot(MODEL_DOUBT, part.run.doubt))
        system.measured(terms | (_kernel_terms(part) if kernels else {}), us, us * doubt)
    system.believed({_FIXED: 1.0}, eager.fixed_us, FIXED_DOUBT_US)
    system.believed({_SHARE: 1.0}, SHARE, SHARE_DOUBT)
    for name in system.names("class"):
        usual = _eager_us(eager, name)
        system.believed({("class", name): 1.0, _SHARE: -usual}, 0.0, CLASS_DOUBT * SHARE * usual)
    if kernels:
        _believe_in_scales(system)
        for own in _owns(parts):
            for column, guess in zip(_own_columns(own), own.guess_us, strict=True):
                system.believed({column: 1.0}, guess, OWN_DOUBT * guess)
    return system.solve()


def _kernel_terms(part: Parts) -> dict[Column, float]:
    own_families = {own.family for own in part.own}
    terms: dict[Column, float] = {
        ("scale", family): us for family, us in part.kernel_us.items() if family not in own_families
    }
    for own, work in part.own.items():
        terms |= zip(_own_columns(own), work, strict=True)
    return terms


def _believe_in_scales(system: System) -> None:
    system.believed({_COMMON: 1.0}, 1.0, COMMON_DOUBT)
    for family in system.names("scale"):
        system.believed({("scale", family): 1.0, _COMMON: -1.0}, 0.0, SCALE_DOUBT)


def _owns(parts: Sequence[Parts]) -> list[Own]:
    return sorted({own for part in parts for own in part.own})


def _own_columns(own: Own) -> tuple[Column, Column, Column]:
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
        own: tuple(found[column] for column in _own_columns(own))
        for own in _owns(parts)
        if _own_columns(own)[0] in found
    }
    return DispatchFit(
        costs_us=_rounded(with_parents(costs)),
        module_call_us=round(module_us, 5),
        python_call_us=round(python_us, 5),
        fixed_us=round(found[_FIXED], 4),
        kernels=own_fits(rates, profile),
        kernel_scales=_rounded({key[1]: value for key, value in found.items() if key[0] == "scale"}),
    )


def _device_scales(parts: Sequence[Parts], fit: DispatchFit, profile: DeviceProfile, runtime: str) -> dict[str, float]:
    """Factors on kernel times from networks whose latency the device sets; none where nothing speaks against 1."""
    device, system, seen = profile.device, System(), 0
    gap_us = device.gap_us if fit.gap_us is None else fit.gap_us
    for part in parts:
        host_us = fit.fixed_us + sum(count * _step_us(fit, name) for name, count in part.steps.items())
        waits_us = part.kernels * gap_us + device.launch_us + device.sync_us
        busy_us = sum(part.kernel_us.values())
        if part.own or not busy_us or busy_us + waits_us < DEVICE_BOUND * host_us:
            continue
        terms = {("scale", family): us for family, us in part.kernel_us.items()}
        system.measured(terms, max(part.run.total_us - waits_us, 0.0), MODEL_DOUBT * part.run.total_us)
        seen += 1
    if seen < FEWEST:
        return {}
    _believe_in_scales(system)
    return _rounded({key[1]: value for key, value in system.solve().items()})


def _step_us(fit: DispatchFit, name: str) -> float:
    calls = {MODULE: fit.module_call_us, PYTHON: fit.python_call_us}
    return calls[name] if name in calls else host_cost(fit, name)


def _eager_us(eager: DispatchFit, name: str) -> float:
    """What eager pays for the same kind of step: "node.gemm" and "kernel.extern.gemm" are compared to its "gemm"."""
    if name == MODULE:
        return max(eager.module_call_us * eager.scale, 0.01)
    if name == PYTHON:
        return max(eager.python_call_us * eager.scale, 0.01)
    rest = name
    while rest:
        if rest in eager.costs_us:
            return max(eager.costs_us[rest] * eager.scale, 0.01)
        rest = rest.partition(".")[2]
    return max(host_cost(eager, name) * eager.scale, 0.01)


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.6g}") for name, value in values.items()}
