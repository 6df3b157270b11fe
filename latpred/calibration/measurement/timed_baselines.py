"""Baselines that need a device: every op timed alone, and torch's own RuntimeEstimator.

They see the very models they are judged on; latpred's predictor does not. What they give becomes columns of the
measurement table, which `latpred.accuracy.baselines` judges like any other prediction.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from latpred import tables
from latpred.calibration.measurement.whole_models import Bench
from latpred.calibration.session import failure_of
from latpred.calibration.timing import timer
from latpred.calibration.workloads.suites import Workload
from latpred.errors import DeviceError, UsageError

PLAN = timer.Plan(least=3, most=15, precision=0.02, budget_s=0.03, warmup_s=0.01)
"""Effort of one op: it is one of a hundred, whose errors average out."""

Baseline = Callable[[Bench, Workload, int, str], float]
Announce = Callable[[str], bool]


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps every distinct call of a forward pass, and how often it came."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[Hashable, list[Any]] = {}  # the call again, and its count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        key = (func, _signature((args, named)))
        if key not in self.calls:
            self.calls[key] = [partial(func, *args, **named), 0]
        self.calls[key][1] += 1
        return func(*args, **named)


class _InParts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes composite ops apart, as autograd does: in inference mode they would reach other modes whole."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim" or not func._can_decompose():  # the former raises
            return func(*args, **kwargs or {})
        with self:
            return func.decompose(*args, **kwargs or {})


def isolated_ops(bench: Bench, workload: Workload, batch: int, precision: str) -> float:
    """Seconds of a forward pass as the sum of its ops, each timed in a loop of its own on the operands it had.

    This is how predictors that add up operators are built, with a perfect operator model: no op is interpolated.
    """
    forward = bench.call(workload, batch, "eager", precision)
    bench.device.use_precision(precision)
    with _Calls() as seen:
        forward()
    return math.fsum(timer.queued(bench.device, call, PLAN).median_s * count for call, count in seen.calls.values())


def runtime_estimator(bench: Bench, workload: Workload, batch: int, precision: str) -> float:
    """Seconds of a forward pass by torch's RuntimeEstimator, in its roofline mode, which asks CUDA what it can do."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator

    estimator = RuntimeEstimator()
    model, inputs = bench.model(workload, batch, precision)
    # On leaving, the estimator prints a line of its own. It knows the FLOPs of products, but of no composite op.
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.no_grad(),
        contextlib.redirect_stdout(io.StringIO()),
        estimator("operator-level-cost-model"),
        _InParts(),  # type: ignore[no-untyped-call]
    ):
        model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    return float(estimator.total_runtime) / 1e3


BASELINES: dict[str, Baseline] = {"isolated_ops": isolated_ops, "runtime_estimator": runtime_estimator}


def check_names(names: Sequence[str]) -> None:
    """Raise a `UsageError` for a baseline that there is not."""
    unknown = [name for name in names if name not in BASELINES]
    if unknown:
        raise UsageError(f"There is no baseline {unknown[0]!r} to measure. Use one of {', '.join(BASELINES)}.")


def with_baselines(
    table: pd.DataFrame, workloads: Sequence[Workload], bench: Bench, names: Sequence[str], announce: Announce
) -> tuple[pd.DataFrame, dict[str, str]]:
    """The table with a column for each baseline, and why one has none; `announce` says whether there is time.

    To be called within `conditions.stated`, as the models of the table were measured.
    """
    if bench.simulated:
        return table, dict.fromkeys(names, "the simulated device runs graphs, not ops")
    reasons = {name: "left out" for name in BASELINES if name not in names}
    out = table.copy()
    by_name = {workload.name: workload for workload in workloads}
    for name in names:
        values, reason = _column(table, by_name, bench, name, announce)
        if reason:
            reasons[name] = reason
        if any(math.isfinite(value) for value in values):
            out[f"{tables.BASELINE_PREFIX}{name}_s"] = values
    return out, reasons


def _column(
    table: pd.DataFrame, workloads: dict[str, Workload], bench: Bench, name: str, announce: Announce
) -> tuple[list[float], str]:
    """One value per row, and the first thing that went wrong; who fails at the first row is not asked again."""
    values, reason = [math.nan] * len(table), ""
    for position, cell in enumerate(table.to_dict("records")):
        if cell["status"] != tables.OK or cell["runtime"] != "eager":
            continue
        if not announce(f"{name}: {cell['model']} batch {cell['batch']}"):
            return values, reason or "the time budget was spent"
        workload, precision = workloads[cell["model"]], str(cell["precision"])
        bench.turn_to(workload, precision)  # a model is built once for all its batches
        try:
            with bench.device.errors():
                values[position] = BASELINES[name](bench, workload, int(cell["batch"]), precision)
        except DeviceError:  # no row would fare better
            raise
        except Exception as error:  # torch, a model or a device may refuse in any way; the report says how
            reason = reason or failure_of(error)
            if not any(math.isfinite(value) for value in values):
                return values, reason
    return values, reason


def _signature(call: Any) -> Hashable:
    leaves, structure = tree_flatten(call)
    return str(structure), tuple(
        (tuple(leaf.shape), leaf.stride(), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf)
        for leaf in leaves
    )
