"""Host costs from raw samples: what each class of op takes in a loop of its own, and what a module call does.

A cell of several ops tells what the one it does not share with other cells costs. How much dearer it all is inside a
network is found from whole models, by `in_networks`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from latpred.calibration import rawcells
from latpred.calibration.dispatchfit import NetworkRun, with_parents
from latpred.calibration.rawfiles import OpRow, told
from latpred.errors import CalibrationError, TraceError
from latpred.graph import Op
from latpred.ops.families import root
from latpred.pricing import host_cost
from latpred.profile import DispatchFit
from latpred.units import US_PER_S

FEWEST_CLASSES = 8
FEWEST_MODELS = 2
CLOCK_CELLS = ("sync_idle",)


class Alone(NamedTuple):
    """One dispatch cell: its ops and its microseconds."""

    ops: tuple[Op, ...]
    us: float


def alone(rows: Iterable[OpRow], left_out: Counter[str]) -> dict[str, Alone]:
    """Dispatch cells by name, the median over precisions: issuing an op costs the same in all of them."""
    times: dict[str, list[float]] = {}
    for row in rows:
        if row.op not in CLOCK_CELLS:
            times.setdefault(row.op, []).append(row.median * US_PER_S)
    found = {}
    for name, taken in times.items():
        try:
            found[name] = Alone(rawcells.dispatched(name), float(np.median(taken)))
        except KeyError:
            left_out[f"dispatch cells of the unknown op {name}"] += len(taken)
        except TraceError:
            left_out[f"dispatch cells of {name}, which cannot be walked"] += len(taken)
    return found


def fit_alone(cells: dict[str, Alone], sync_us: float = 0.0) -> DispatchFit:
    """Costs of classes, module calls and Python calls, as they are in loops.

    A class costs the median of the cells that are about it alone; then cells with one new class tell about that one.
    The module cells fix a module call and a call of Python.

    Parameters
    ----------
    cells : dict of Alone
        By name.
    sync_us : float
        What waiting for an idle device takes. An op that waits costs what is left of its cell after that; where its
        own time hides behind the kernel it waits for, that is how long it is hidden.

    Raises
    ------
    CalibrationError
        When the cells are too few.
    """
    costs = _class_costs([cell for name, cell in cells.items() if name not in rawcells.MODULES], sync_us)
    if len(costs) < FEWEST_CLASSES:
        raise CalibrationError(
            f"dispatch.jsonl tells the cost of {len(costs)} classes of ops, too few for a profile. Sample the "
            "machine's dispatch part again."
        )
    fit = DispatchFit(with_parents(costs), 0.0, 0.0, 0.0)
    per_module, per_python = _call_costs([cells[name] for name in rawcells.MODULES if name in cells], fit)
    return DispatchFit(fit.costs_us, module_call_us=per_module, python_call_us=per_python, fixed_us=0.0)


def in_networks(fit: DispatchFit, runs: Sequence[NetworkRun], left_out: Mapping[str, int]) -> DispatchFit:
    """The same costs, brought to what whole models take to issue; what a Python call costs follows from them too.

    Parameters
    ----------
    fit : DispatchFit
        Of ops alone.
    runs : sequence of NetworkRun
        Whole models, with the host's own time for a forward pass.
    left_out : mapping
        What could not be used so far, to be named where too little is left.

    Raises
    ------
    CalibrationError
        When there are too few models to tell the two from each other.
    """
    if len({run.graph.model for run in runs}) < FEWEST_MODELS:
        raise CalibrationError(
            f"{len(runs)} whole models can be used to see what dispatch costs inside a network, and it takes "
            f"{FEWEST_MODELS} ({told(left_out)}). Sample more models in eager at batch 1; those held out for testing "
            "do not count."
        )
    known = [
        sum(host_cost(fit, op.host_class) + op.module_calls * fit.module_call_us for op in run.ops) for run in runs
    ]
    python = [sum(op.python_calls for op in run.ops) for run in runs]
    totals = np.array([run.total_us for run in runs])
    terms = np.column_stack((known, python)).astype(float)
    scale, per_python = nnls(terms / totals[:, None], np.ones(len(runs)))[0].tolist()
    if scale <= 0:
        raise CalibrationError(
            "whole models take no longer the more ops they issue, so their host times cannot be right. Sample the "
            "machine again when nothing else runs on it."
        )
    return DispatchFit(fit.costs_us, fit.module_call_us, python_call_us=per_python / scale, fixed_us=0.0, scale=scale)


def _class_costs(cells: Sequence[Alone], sync_us: float) -> dict[str, float]:
    """Cells about one class first, then those about the fewest that are still unknown."""
    costs: dict[str, float] = {}
    pending = [(_classes(cell), cell.us) for cell in cells]
    while pending:
        unknown = min(len(set(classes) - costs.keys()) for classes, _ in pending)
        now = [(classes, us) for classes, us in pending if len(set(classes) - costs.keys()) == unknown]
        pending = [item for item in pending if item not in now]
        if unknown:
            costs |= _rests(now, costs, sync_us)
    return costs


def _rests(cells: Sequence[tuple[list[str], float]], costs: dict[str, float], sync_us: float) -> dict[str, float]:
    """What is left of each cell for the classes it is the first to tell about."""
    rests: dict[str, list[float]] = {}
    views = [cost for name, cost in costs.items() if root(name) == "view"]
    for classes, us in cells:
        new = [name for name in classes if name not in costs]
        rest = us - sum(costs.get(name, 0.0) for name in classes)
        launching = [name for name in new if root(name) != "view"]
        if views and launching and launching != new:
            # Views cost much the same, so what another one leaves belongs to the op it was made for.
            rest -= float(np.median(views)) * (len(new) - len(launching))
            new = launching
        if any(name.startswith("sync") for name in new):
            rest -= sync_us
        for name in new:
            rests.setdefault(name, []).append(max(rest, 0.0) / len(new))
    return {name: float(np.median(values)) for name, values in rests.items()}


def _classes(cell: Alone) -> list[str]:
    return [op.host_class for op in cell.ops if op.name != "python::return"]


def _call_costs(cells: Sequence[Alone], fit: DispatchFit) -> tuple[float, float]:
    """A module call and a Python call, from calls of modules that do next to nothing else."""
    if not cells:
        return 0.0, 0.0
    counts = np.array([_counts(cell) for cell in cells], dtype=float)
    rests = np.array([max(cell.us - sum(host_cost(fit, name) for name in _classes(cell)), 0.0) for cell in cells])
    # A cell's error is a share of all of its time, and the dispatch in it may be most of that.
    certain = 1.0 / np.array([cell.us for cell in cells])
    per_module, per_python = nnls(counts * certain[:, None], rests * certain)[0].tolist()
    return per_module, per_python


def _counts(cell: Alone) -> tuple[int, int]:
    """Module calls, and Python calls where no walk of an op counts along with the model's own."""
    quiet = all(op.name == "python::return" for op in cell.ops)
    return sum(op.module_calls for op in cell.ops), sum(op.python_calls for op in cell.ops) if quiet else 0
