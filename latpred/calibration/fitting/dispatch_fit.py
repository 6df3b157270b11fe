"""Host costs from tiny networks and tiny ops: what each class of op, module call and Python call takes.

In tiny networks next to nothing but dispatch takes time, and its cost in a network is what counts: in a loop of its own
an op finds its code in the nearest cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
from scipy.optimize import lsq_linear, nnls

from latpred.calibration.timing.in_network import calls
from latpred.graph.graph import ModelGraph, Op
from latpred.host import SAME, Slowdown
from latpred.ops.families import lineage, parent
from latpred.prediction.pricing import host_cost
from latpred.profile.document import DispatchFit, call_prices

IDLE = 0.1  # quantile of the calls of a class that stands for those that have next to nothing to do
LEAST_US = 0.1  # no call from Python is cheaper
MOST_CLOCK_US = 5.0  # that a clock around a call adds to it: passing through it goes by a slower way into PyTorch
ALIKE = 0.01  # pull of a class towards the cost of its like; the cells that tell of it pull with 1 each
_SEVERAL = {"view.chunk", "view.split", "view.tensor_split", "view.unbind"}  # which take longer than one view
RETURN = "python"  # the step that stands for a forward's last Python: it dispatches nothing


class TimedNetwork(NamedTuple):
    """A network that was timed in a runtime: what that runs, and its latency with relative standard error `sigma`.

    calls_us : time of each call in it, where taken. resident : share of its weights that was in the cache already.
    issue_us : time to issue a forward pass without waiting, on an asynchronous device where that was taken. queued_us :
    device time of one, gaps included, where several were issued before the first could start. tiny : whether next to
    nothing but dispatch takes time. slowdown : the machine's then, against its full speed.
    """

    graph: ModelGraph
    batch: int
    total_us: float
    calls_us: tuple[float, ...] = ()
    resident: float = 0.0
    issue_us: float | None = None
    queued_us: float | None = None
    sigma: float = 0.0
    tiny: bool = False
    slowdown: Slowdown = SAME

    @property
    def ops(self) -> tuple[Op, ...]:
        return self.graph.at(self.batch)

    @property
    def issued_us(self) -> float:
        """Time to issue a pass: on a synchronous device, and where nothing else was taken, its latency."""
        return self.total_us if self.issue_us is None else self.issue_us


def call_costs(chains: Sequence[TimedNetwork]) -> DispatchFit:
    """Costs of module calls, other Python calls and the pass itself, from networks of few and many calls alone."""
    terms = np.array([(*_counts(run.ops)[1:], 1.0) for run in chains], dtype=float)
    totals = np.array([run.issued_us for run in chains])
    module_us, python_us, read_us, fixed_us = nnls(terms / totals[:, None], np.ones(len(chains)))[0].tolist()
    return DispatchFit({}, module_us, python_us, fixed_us, attribute_read_us=read_us)


def fit_in_place(runs: Sequence[TimedNetwork], called: DispatchFit) -> DispatchFit:
    """Costs from tiny networks whose calls were timed in place.

    A class costs what its calls take, corrected by the same amount for every call: the binding's time lies outside what
    is timed, the clock's inside. What a forward pass takes beside them is what module and Python calls cost in a
    network, where they are dearer than in a chain.
    """
    costs = class_costs(runs)
    counts = np.array([_counts(run.ops) for run in runs], dtype=float)
    between = np.array([run.total_us - sum(run.calls_us) for run in runs])
    totals = np.array([run.total_us for run in runs])
    terms = np.column_stack((counts[:, 0], counts[:, 1:] @ call_prices(called)))
    bounds = (-MOST_CLOCK_US, 0.5), (np.inf, 10.0)
    per_call, dearer = lsq_linear(terms / totals[:, None], between / totals, bounds=bounds).x.tolist()
    # A call that C++ makes passes through no binding and no clock.
    corrected = {name: cost if ".nested." in name else max(cost + per_call, LEAST_US) for name, cost in costs.items()}
    return DispatchFit(
        costs_us=with_parents(corrected),
        module_call_us=dearer * called.module_call_us,
        python_call_us=dearer * called.python_call_us,
        attribute_read_us=dearer * called.attribute_read_us,
        fixed_us=called.fixed_us,
    )


def fit_issued(costs: Mapping[str, float], runs: Sequence[TimedNetwork], called: DispatchFit) -> DispatchFit:
    """Costs of classes and calls timed in loops of their own, brought to what whole networks take to issue."""
    loops = msgspec.structs.replace(called, costs_us=with_parents(dict(costs)))
    alone = np.array([sum(steps_us(loops, run)) for run in runs])
    totals = np.array([run.issued_us for run in runs])
    return msgspec.structs.replace(loops, scale=float(np.median((totals - loops.fixed_us) / alone)))


def loop_costs(cells: Sequence[tuple[Sequence[str], float]]) -> dict[str, float]:
    """Cost of each class from ops in loops of their own: what one call of each dispatches, and its host microseconds.

    A cell prices the one class that no other has for itself. Those that only ever come together, issued from C++ by
    the same composite ops, are told apart by their general classes ("view.nested") as far as they come in different
    numbers, else by what their like costs when Python calls it.
    """
    costs = {names[0]: us for names, us in cells if len(names) == 1}
    shared: list[tuple[Counter[str], float]] = []
    for names, us in sorted(cells, key=lambda cell: len(cell[0])):
        unknown = [name for name in names if name not in costs]
        rest = max(us - sum(costs[name] for name in names if name in costs), 0.0)
        if len(unknown) == 1:
            costs[unknown[0]] = rest
        elif unknown:
            shared.append((Counter(parent(name) or name for name in unknown), rest))
    return costs | _told_apart(shared, of_classes(costs))


def _told_apart(shared: Sequence[tuple[Counter[str], float]], told: DispatchFit) -> dict[str, float]:
    """Costs of general classes that explain what cells leave for them, drawn weakly to what their like costs."""
    classes = list(dict.fromkeys(name for counts, _ in shared for name in counts))
    if not classes:
        return {}
    usual = np.array([host_cost(told, name) for name in classes])
    numbers = np.array([[counts[name] for name in classes] for counts, _ in shared], dtype=float)
    rests = np.array([rest for _, rest in shared])
    certain = 1.0 / np.maximum(numbers @ usual, LEAST_US)
    # Pulled so, classes that nothing tells apart are all as much cheaper or dearer than their like.
    pull = ALIKE * np.sqrt(numbers.sum(axis=0) / np.maximum(usual, LEAST_US) / usual.mean())
    terms = np.concatenate((numbers * certain[:, None], np.diag(pull)))
    costs_us = nnls(terms, np.concatenate((rests * certain, pull * usual)))[0]
    return dict(zip(classes, costs_us.tolist(), strict=True))


def steps_us(fit: DispatchFit, run: TimedNetwork) -> tuple[float, float]:
    """What a network's calls and its ops cost by a fit before its scale, without the cost of the pass itself."""
    calls_us = float(np.dot(_counts(run.ops)[1:], call_prices(fit)))
    return calls_us, sum(host_cost(fit, op.host_class) for op in run.ops)


def class_costs(runs: Sequence[TimedNetwork]) -> dict[str, float]:
    """Time of each dispatch class where it has least to do; classes that only come inside another's get what is left.

    Even in a tiny network some calls of a class have something to compute, and that is their kernels' time.
    """
    timed = [
        ([op.host_class for op in group], taken)
        for run in runs
        for group, taken in zip(calls(run.ops), run.calls_us, strict=True)
        if not any("calls" in op.dims for op in group)  # whose steps are calls of their own: none has little to do
    ]
    idle = partial(np.quantile, q=IDLE)
    costs = per_class(((names[0], taken) for names, taken in timed if len(names) == 1), idle)
    left: list[tuple[str, float]] = []
    for names, taken in timed:
        unknown = [name for name in names if name not in costs]
        rest = max(taken - sum(costs.get(name, 0.0) for name in names), 0.0)
        left += [(name, rest / len(unknown)) for name in unknown]
    costs |= per_class(left, idle)
    # Code that a pass runs once lies in farther caches than that of calls which come again and again, as views do in
    # most models: x.to() took 6.4 us behind a Fourier transform and 2.5 in attention, 2 of them the clock's.
    again = {name for run in runs for name, number in Counter(op.host_class for op in run.ops).items() if number > 1}
    views = {name: us for name, us in costs.items() if name.startswith("view.") and ".nested." not in name}
    most = max((us for name, us in views.items() if name in again and name not in _SEVERAL), default=np.inf)
    once = {name: min(us, most) for name, us in views.items() if name not in again | _SEVERAL}
    return costs | once


def per_class(times: Iterable[tuple[str, float]], statistic: Callable[[list[float]], Any]) -> dict[str, float]:
    """A statistic of the times of each class."""
    by_class: dict[str, list[float]] = {}
    for name, us in times:
        by_class.setdefault(name, []).append(us)
    return {name: float(statistic(several)) for name, several in by_class.items()}


def _counts(ops: Sequence[Op]) -> list[int]:
    """Ops that Python calls in a forward pass, then its `Calls`."""
    return [len(calls(ops)), *map(sum, zip(*(op.calls for op in ops), strict=True))]


def of_classes(costs: dict[str, float]) -> DispatchFit:
    """A fit that says what classes of ops cost, and nothing of calls or of the pass."""
    return DispatchFit(with_parents(costs), module_call_us=0.0, python_call_us=0.0, fixed_us=0.0)


def with_parents(costs: dict[str, float]) -> dict[str, float]:
    """Every more general class costs the median of what it stands for, and "" the median of all."""
    below = [("", cost) for cost in costs.values()]
    below += [(above, cost) for name, cost in costs.items() for above in lineage(parent(name) or "")]
    return per_class(below, np.median) | costs | {RETURN: 0.0}
