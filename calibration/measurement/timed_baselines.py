"""Baselines that need a device: every op timed alone, and torch's own RuntimeEstimator.

They see the very models they are judged on; latpred's predictor does not. What they give becomes columns of the
measurement table, which `latpred.accuracy.baselines` judges like any other prediction.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pandas as pd
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from latpred import tables
from latpred.calibration.devices import Device, conditions
from latpred.calibration.timing import timer
from latpred.calibration.workloads.base import Workload
from latpred.errors import UsageError

PLAN = timer.Plan(least=3, most=15, precision=0.02, budget_s=0.03, warmup_s=0.01)
"""Effort of one op: it is one of a hundred, whose errors average out."""

Rival = Callable[[Workload, int, str, Device], float]
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
            self.calls[key] = [_replay(func, args, named), 0]
        self.calls[key][1] += 1
        return func(*args, **named)


def isolated_ops(workload: Workload, batch: int, precision: str, device: Device) -> float:
    """Seconds of a forward pass as the sum of its ops, each timed in a loop of its own on the operands it had.

    This is how predictors that add up operators are built, with a perfect operator model: no op is interpolated.
    """
    model, inputs = workload.make(device.name, precision)
    given = inputs(batch, device.name)
    positional, named = ((), given) if isinstance(given, dict) else (given, {})
    with conditions.stated():
        device.use_precision(precision)
        with _Calls() as seen:
            model(*positional, **named)
        parts = [timer.queued(device, call, PLAN).median_s * count for call, count in seen.calls.values()]
    return math.fsum(parts)


def runtime_estimator(workload: Workload, batch: int, precision: str, device: Device) -> float:
    """Seconds of a forward pass by torch's RuntimeEstimator, in its roofline mode.

    Raises
    ------
    AssertionError
        By torch, where there is no CUDA: it asks CUDA what the device is capable of.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator

    estimator = RuntimeEstimator()
    model, inputs = workload.make(device.name, precision)
    given = inputs(batch, device.name)
    positional, named = ((), given) if isinstance(given, dict) else (given, {})
    # On leaving, the estimator prints a line of its own.
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.no_grad(),
        contextlib.redirect_stdout(io.StringIO()),
        estimator("operator-level-cost-model"),
    ):
        model(*positional, **named)
    return float(estimator.total_runtime) / 1e3


RIVALS: dict[str, Rival] = {"isolated_ops": isolated_ops, "runtime_estimator": runtime_estimator}


def with_rivals(
    table: pd.DataFrame, workloads: Sequence[Workload], device: Device, names: Sequence[str], announce: Announce
) -> tuple[pd.DataFrame, dict[str, str]]:
    """The table with a column for each rival, and why a rival has none.

    Parameters
    ----------
    table : DataFrame
        Measurements of the subjects in eager.
    workloads : sequence of Subject
        The models.
    device : Device
        Where they were measured.
    names : sequence of str
        Keys of `RIVALS`.
    announce : callable
        Told what comes next; False when there is no more time.

    Raises
    ------
    UsageError
        For an unknown rival.
    """
    unknown = [name for name in names if name not in RIVALS]
    if unknown:
        raise UsageError(f"There is no baseline {unknown[0]!r} to measure. Use one of {', '.join(RIVALS)}.")
    if device.info().kind == "simulated":
        return table, dict.fromkeys(names, "the simulated device runs graphs, not ops")
    reasons: dict[str, str] = {}
    out = table.copy()
    for name in names:
        # A model is built once for all its batches.
        built = {s.name: replace(s, make=lru_cache(maxsize=1)(s.make)) for s in workloads}
        values, reason = _column(table, built, device, name, announce)
        if reason:
            reasons[name] = reason
        if any(math.isfinite(value) for value in values):
            out[f"{tables.BASELINE_PREFIX}{name}_s"] = values
    return out, reasons


def _column(
    table: pd.DataFrame, workloads: dict[str, Workload], device: Device, name: str, announce: Announce
) -> tuple[list[float], str]:
    """One value per row, and the first thing that went wrong; a rival whose first answer fails is not asked again."""
    values, reason = [math.nan] * len(table), ""
    for position, cell in enumerate(table.to_dict("records")):
        if cell["status"] != tables.OK or cell["runtime"] != "eager":
            continue
        if not announce(f"{name}: {cell['model']} batch {cell['batch']}"):
            return values, reason or "the time budget was spent"
        try:
            values[position] = RIVALS[name](
                workloads[cell["model"]], int(cell["batch"]), str(cell["precision"]), device
            )
        except Exception as error:  # torch, a model or a device may refuse in any way; the report says how
            reason = reason or " ".join(f"{type(error).__name__}: {error}".split())
            if not any(math.isfinite(value) for value in values):
                return values, reason
    return values, reason


def _replay(func: Any, args: Any, named: Any) -> Callable[[], Any]:
    """The same call again; what indexes a table is copied, since the model may go on counting in it."""

    def keep(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, torch.Tensor) and not leaf.is_floating_point() else leaf

    kept_args, kept_named = tree_map(keep, (args, named))
    return lambda: func(*kept_args, **kept_named)


def _signature(call: Any) -> Hashable:
    leaves, structure = tree_flatten(call)
    return str(structure), tuple(_leaf(leaf) for leaf in leaves)


def _leaf(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype
    return repr(leaf)
