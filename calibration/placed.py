"""Kernel samples from networks whose calls were timed in place, on a synchronous device.

What is left of a call's time after its dispatch is its kernel's. Kernels also push the host's own code and data out of
the caches and leave memory to be given back, so that what follows takes longer than in a tiny network: the next call,
which is told from calls without a kernel, and the Python between them. That afterwork is fitted over whole networks, as
a function of a kernel's time, and counted as that kernel's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from latpred.calibration.dispatchfit import NetworkRun
from latpred.calibration.inplace import calls
from latpred.calibration.kernelfit import KernelSample, row_of
from latpred.graph import Op
from latpred.pricing import host_cost
from latpred.profile import DispatchFit

# Of a call's time that is taken for kernel at least. A kernel that cannot be told from its dispatch is known to be
# short: without such calls a family's floor would be that of its longer ones.
LEAST_SHARE = 0.02
# Of a pass, that counts as passing beside each of its kernels. In a large network a short kernel finds nothing in the
# caches and takes several times as long, which matters to no prediction; in a small one it does.
PASS_SHARE = 0.03
FEWEST_DELAYS, MOST_DELAY_US = 24, 30.0  # calls without a kernel that tell how calls delay each other, and by what
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
        Costs in tiny networks.
    watched : DispatchFit, optional
        The same as the clock around each call has it, which is a little longer; default: `dispatch`.
    """
    delays = _delays(runs, watched or dispatch)
    kernels = [_kernels(run, watched or dispatch, delays) for run in runs]
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


def host_us(run: NetworkRun, dispatch: DispatchFit) -> float:
    """Dispatch of a whole forward pass."""
    ops = sum(host_cost(dispatch, op.host_class) for op in run.ops)
    modules = dispatch.module_call_us * sum(op.module_calls for op in run.ops)
    python = dispatch.python_call_us * sum(op.python_calls for op in run.ops)
    return dispatch.fixed_us + dispatch.scale * (ops + modules + python)


def _kernels(run: NetworkRun, dispatch: DispatchFit, delays: Floats) -> list[Kernel]:
    """The launching calls of a run, without their dispatch and what the call before delays them by."""
    delay_us = _terms(np.array((0.0, *run.calls_us))) @ delays
    found = []
    for group, taken, delayed_us in zip(calls(run.ops), run.calls_us, delay_us[:-1], strict=True):
        if any(op.launches for op in group):
            cost = _dispatch_us(group, dispatch)
            us = max(taken - cost - float(delayed_us), LEAST_SHARE * taken)
            alone = len(group) == 1 and not group[0].estimated
            found.append(Kernel(group[0] if alone else None, us, cost))
    return found


def _dispatch_us(group: Sequence[Op], dispatch: DispatchFit) -> float:
    return sum(host_cost(dispatch, op.host_class) for op in group) * dispatch.scale


def _delays(runs: Sequence[NetworkRun], dispatch: DispatchFit) -> Floats:
    """Coefficients of `_terms` that explain what calls take longer after others.

    Calls that compute nothing tell: each takes its dispatch and the delay.
    """
    before, extra = [], []
    for run in runs:
        for (_, before_us), (group, taken) in pairwise(zip(calls(run.ops), run.calls_us, strict=True)):
            if not any(op.launches for op in group):
                before.append(before_us)
                extra.append(min(taken - _dispatch_us(group, dispatch), MOST_DELAY_US))
    if len(extra) < FEWEST_DELAYS:
        return np.zeros(3)
    coefficients: Floats = nnls(_terms(np.array(before)), np.array(extra))[0]
    return coefficients


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
