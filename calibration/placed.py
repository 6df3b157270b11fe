"""Kernel samples from networks whose calls were timed in place, on a synchronous device.

What is left of a call's time after its dispatch is its kernel's. Networks also push the host's code out of the caches,
so that dispatch takes longer than in a tiny one: how much is told from calls without a kernel (`with_cold`). And
kernels leave memory to be given back and Python's own data cold. That afterwork is fitted over whole networks, as a
function of a kernel's time, and counted as that kernel's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from latpred.calibration.dispatchfit import NetworkRun
from latpred.calibration.inplace import calls
from latpred.calibration.kernelfit import KernelSample, row_of
from latpred.cold_dispatch import ColdDispatch
from latpred.graph import Op
from latpred.pricing import host_cost
from latpred.profile import DispatchFit
from latpred.runtimes.eager import one_step_per_op

# Of a call's time that is taken for kernel at least. A kernel that cannot be told from its dispatch is known to be
# short: without such calls a family's floor would be that of its longer ones.
LEAST_SHARE = 0.02
# Of a pass, that counts as passing beside each of its kernels. In a large network a short kernel finds nothing in the
# caches and takes several times as long, which matters to no prediction; in a small one it does.
PASS_SHARE = 0.03
FEWEST_COLD, MOST_COLD_US = 24, 30.0  # calls without a kernel that tell what cold code takes, and the most of one
SHORT_US = 5.0  # a kernel so long leaves half of what the shortest ones that leave anything do

Floats = NDArray[np.float64]


class Kernel(NamedTuple):
    """One launching call: its op (None for several in one), its kernel's time, and its dispatch."""

    op: Op | None
    us: float
    dispatch_us: float


def placed_samples(
    runs: Sequence[NetworkRun], dispatch: DispatchFit, watched: DispatchFit | None = None
) -> list[KernelSample]:
    """Samples of every kernel that had a call of its own.

    Parameters
    ----------
    runs : sequence of NetworkRun
        Of one precision, with the times of their calls.
    dispatch : DispatchFit
        Costs in tiny networks, and how much longer dispatch takes from cold caches.
    watched : DispatchFit, optional
        The same as the clock around each call has it, which is a little longer; default: `dispatch`.
    """
    kernels = [_kernels(run, watched or dispatch, _cold_us(run, dispatch)) for run in runs]
    afterwork = _afterwork(runs, kernels, dispatch)
    samples = []
    for run, found in zip(runs, kernels, strict=True):
        for op, us, dispatch_us in found:
            if op is not None:
                after_us = float(_terms(np.array([us]))[0] @ afterwork)
                beside_us = dispatch_us + PASS_SHARE * run.total_us
                row = row_of(op, run.batch, resident=run.resident)
                each = 1.0 / op.launches
                samples.append(KernelSample(op.family, row, (us + after_us) * each, 1.0, beside_us * each))
    return samples


def with_cold(
    dispatch: DispatchFit, watched: DispatchFit, runs: Sequence[NetworkRun], half_bytes: float
) -> DispatchFit:
    """Dispatch with what it takes longer from cold caches: the same multiple, for every call, of what it takes warm.

    Calls that compute nothing tell: what one takes beyond its dispatch is cold code's.
    """
    if not half_bytes:
        return dispatch
    all_cold = msgspec.structs.replace(dispatch, cold_costs_us=watched.costs_us, cold_bytes=half_bytes)
    cold, extra = [], []
    for run in runs:
        for group, taken, cold_us in zip(calls(run.ops), run.calls_us, _cold_us(run, all_cold), strict=True):
            if not any(op.launches for op in group):
                cold.append(cold_us)
                extra.append(min(taken - _dispatch_us(group, watched), MOST_COLD_US))
    if len(cold) < FEWEST_COLD or not any(cold):
        return dispatch
    factor = max(float(np.dot(cold, extra) / np.dot(cold, cold)), 0.0)
    costs_us = {name: round(factor * cost, 4) for name, cost in watched.costs_us.items()}
    return msgspec.structs.replace(all_cold, cold_costs_us=costs_us)


def host_us(run: NetworkRun, dispatch: DispatchFit) -> float:
    """Dispatch of a whole forward pass."""
    cold = sum(_cold_us(run, dispatch))
    ops = sum(host_cost(dispatch, op.host_class) for op in run.ops)
    modules = dispatch.module_call_us * sum(op.module_calls for op in run.ops)
    python = dispatch.python_call_us * sum(op.python_calls for op in run.ops)
    return dispatch.fixed_us + dispatch.scale * (ops + modules + python) + cold


def _kernels(run: NetworkRun, dispatch: DispatchFit, cold_us: Sequence[float]) -> list[Kernel]:
    """The launching calls of a run, without their dispatch and what that takes longer from cold caches."""
    found = []
    for group, taken, longer_us in zip(calls(run.ops), run.calls_us, cold_us, strict=True):
        if any(op.launches for op in group):
            cost = _dispatch_us(group, dispatch) + longer_us
            us = max(taken - cost, LEAST_SHARE * taken)
            alone = len(group) == 1 and not group[0].estimated
            found.append(Kernel(group[0] if alone else None, us, cost))
    return found


def _dispatch_us(group: Sequence[Op], dispatch: DispatchFit) -> float:
    return sum(host_cost(dispatch, op.host_class) for op in group) * dispatch.scale


def _cold_us(run: NetworkRun, dispatch: DispatchFit) -> list[float]:
    """What each call's dispatch takes longer because its code has left the caches."""
    groups, ops = calls(run.ops), run.ops
    cold = ColdDispatch.of(one_step_per_op("eager", ops), dispatch)
    if cold is None:
        return [0.0] * len(groups)
    # What closes a pass belongs to no call and dispatches nothing; the others stand in order.
    ends = np.cumsum([len(group) for group in groups])
    total = np.concatenate(([0.0], np.cumsum(cold.at(np.array([float(run.batch)]))[:, 0])))
    longer: list[float] = np.diff(total[ends], prepend=0.0).tolist()
    return longer


def _afterwork(runs: Sequence[NetworkRun], kernels: Sequence[Sequence[Kernel]], dispatch: DispatchFit) -> Floats:
    """Coefficients of `_terms` that explain what networks take beyond their dispatch and their kernels."""
    totals = np.array([run.total_us for run in runs])
    explained = [host_us(run, dispatch) + sum(k.us for k in found) for run, found in zip(runs, kernels, strict=True)]
    left = totals - np.array(explained)
    terms = np.array([_terms(np.array([k.us for k in found])).sum(axis=0) for found in kernels])
    coefficients: Floats = nnls(terms / totals[:, None], left / totals)[0]
    return coefficients


def _terms(us: Floats) -> Floats:
    """What kernels leave behind: a constant part, but for the shortest ones, the root and a proportional part."""
    return np.column_stack((us / (us + SHORT_US), np.sqrt(us), us))
