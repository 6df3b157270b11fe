"""Kernel samples from networks whose calls were timed in place, on a synchronous device.

What is left of a call's time after its dispatch is its kernel's. Kernels also push the host's own code and data out of
the caches and leave memory to be given back, so that the Python between them takes longer than in a tiny network: that
afterwork is fitted over whole networks, as a function of a kernel's time, and counted as the kernel's.
"""

from __future__ import annotations

from collections.abc import Sequence
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
LEAST_SHARE = 0.1
DISPATCH_DOUBT = 0.5  # relative doubt about the dispatch in a call, in units of the doubt about its time

Floats = NDArray[np.float64]


class Kernel(NamedTuple):
    """One launching call: its op (None for several in one), its kernel's time and that time's share of the call."""

    op: Op | None
    us: float
    share: float


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
    kernels = [_kernels(run, watched or dispatch) for run in runs]
    afterwork = _afterwork(runs, kernels, dispatch)
    samples = []
    for run, found in zip(runs, kernels, strict=True):
        for op, us, share in found:
            if op is not None:
                share = max(share, LEAST_SHARE)
                after_us = float(_terms(np.array([us]))[0] @ afterwork)
                weight = 1.0 / (1.0 + (DISPATCH_DOUBT * (1.0 - share) / share) ** 2)
                samples.append(
                    KernelSample(
                        op.family, row_of(op, run.batch, resident=run.resident), (us + after_us) / op.launches, weight
                    )
                )
    return samples


def host_us(run: NetworkRun, dispatch: DispatchFit) -> float:
    """Dispatch of a whole forward pass."""
    ops = sum(host_cost(dispatch, op.host_class) for op in run.ops)
    modules = dispatch.module_call_us * sum(op.module_calls for op in run.ops)
    python = dispatch.python_call_us * sum(op.python_calls for op in run.ops)
    return dispatch.fixed_us + dispatch.scale * (ops + modules + python)


def _kernels(run: NetworkRun, dispatch: DispatchFit) -> list[Kernel]:
    found = []
    for group, taken in zip(calls(run.ops), run.calls_us, strict=True):
        if any(op.launches for op in group):
            cost = sum(host_cost(dispatch, op.host_class) for op in group) * dispatch.scale
            us = max(taken - cost, LEAST_SHARE * taken)
            alone = len(group) == 1 and not group[0].estimated
            found.append(Kernel(group[0] if alone else None, us, us / taken))
    return found


def _afterwork(runs: Sequence[NetworkRun], kernels: Sequence[Sequence[Kernel]], dispatch: DispatchFit) -> Floats:
    """Coefficients of `_terms` that explain what networks take beyond their dispatch and their kernels."""
    totals = np.array([run.total_us for run in runs])
    explained = [host_us(run, dispatch) + sum(k.us for k in found) for run, found in zip(runs, kernels, strict=True)]
    left = totals - np.array(explained)
    terms = np.array([_terms(np.array([k.us for k in found])).sum(axis=0) for found in kernels])
    coefficients: Floats = nnls(terms / totals[:, None], left / totals)[0]
    return coefficients


def _terms(us: Floats) -> Floats:
    """Constant, root and proportional part of what kernels leave behind."""
    launched = (us > 0).astype(float)
    return np.column_stack((launched, np.sqrt(us), us))
