"""Host costs from tiny networks and tiny ops: what each class of op, module call and Python call takes.

In tiny networks next to nothing but dispatch takes time, and its cost in a network is what counts: in a loop of its own
an op finds its code in the nearest cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import lsq_linear, nnls

from latpred.calibration.inplace import calls
from latpred.graph import ModelGraph, Op
from latpred.ops.families import parent
from latpred.pricing import host_cost
from latpred.profile import DispatchFit

LEAST_US = 0.1  # no call from Python is cheaper


class NetworkRun(NamedTuple):
    """A network that was timed: its graph, batch, time of a forward pass and, where taken, the time of each call in it.

    `total_us` is the latency on a synchronous device and the time to issue the pass on an asynchronous one.
    """

    graph: ModelGraph
    batch: int
    total_us: float
    calls_us: tuple[float, ...] = ()

    @property
    def ops(self) -> tuple[Op, ...]:
        """The ops at this batch."""
        return self.graph.at(self.batch)


def fit_in_place(runs: Sequence[NetworkRun]) -> DispatchFit:
    """Costs from tiny networks whose calls were timed in place.

    A class costs what its calls take, corrected by the same amount for every call: the binding's time lies outside what
    is timed, the clock's inside. What is left of a forward pass goes to module and Python calls.
    """
    costs = class_costs(runs)
    counts = np.array([_counts(run.ops) for run in runs], dtype=float)
    between = np.array([run.total_us - sum(run.calls_us) for run in runs])
    totals = np.array([run.total_us for run in runs])
    cheapest = min(costs.values())
    solved = lsq_linear(
        counts / totals[:, None], between / totals, bounds=((-cheapest + LEAST_US, 0.0, 0.0), (np.inf, np.inf, np.inf))
    )
    per_call, per_module, per_python = solved.x.tolist()
    costs = {name: cost + (0.0 if ".nested." in name else per_call) for name, cost in costs.items()}
    return DispatchFit(
        costs_us=_with_parents(costs), module_call_us=per_module, python_call_us=per_python, fixed_us=0.0
    )


def fit_issued(costs: Mapping[str, float], runs: Sequence[NetworkRun]) -> DispatchFit:
    """Costs of classes timed in loops of their own, brought to what whole networks take to issue."""
    known = DispatchFit(_with_parents(dict(costs)), 0.0, 0.0, 0.0)
    ops = np.array([sum(host_cost(known, op.host_class) for op in run.ops) for run in runs])
    counts = np.array([_counts(run.ops)[1:] for run in runs], dtype=float)
    totals = np.array([run.total_us for run in runs])
    terms = np.column_stack((ops, counts))
    scale, per_module, per_python = nnls(terms / totals[:, None], np.ones(len(runs)))[0]
    scale = float(scale) or 1.0
    return DispatchFit(
        costs_us=known.costs_us,
        module_call_us=float(per_module) / scale,
        python_call_us=float(per_python) / scale,
        fixed_us=0.0,
        scale=scale,
    )


def class_costs(runs: Iterable[NetworkRun]) -> dict[str, float]:
    """Median time of each dispatch class; classes that only ever come inside another's call get what is left of it."""
    alone: dict[str, list[float]] = {}
    shared: list[tuple[list[str], float]] = []
    for run in runs:
        for group, taken in zip(calls(run.ops), run.calls_us, strict=True):
            names = [op.host_class for op in group]
            if len(names) == 1:
                alone.setdefault(names[0], []).append(taken)
            else:
                shared.append((names, taken))
    costs = {name: float(np.median(times)) for name, times in alone.items()}
    left: dict[str, list[float]] = {}
    for names, taken in shared:
        unknown = [name for name in names if name not in costs]
        rest = max(taken - sum(costs.get(name, 0.0) for name in names), 0.0)
        for name in unknown:
            left.setdefault(name, []).append(rest / len(unknown))
    return costs | {name: float(np.median(times)) for name, times in left.items()}


def _counts(ops: Sequence[Op]) -> tuple[int, int, int]:
    """Calls from Python, module calls and other Python calls of a forward pass."""
    return len(calls(ops)), sum(op.module_calls for op in ops), sum(op.python_calls for op in ops)


def _with_parents(costs: dict[str, float]) -> dict[str, float]:
    """Every more general class costs the median of what it stands for, and "" the median of all."""
    below: dict[str, list[float]] = {"": list(costs.values())}
    for name, cost in costs.items():
        above = parent(name)
        while above is not None:
            below.setdefault(above, []).append(cost)
            above = parent(above)
    general = {name: float(np.median(values)) for name, values in below.items()}
    return general | costs
