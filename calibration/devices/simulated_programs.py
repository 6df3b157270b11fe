"""What a forward pass is on the simulated device: host events, kernels and waits of each step, by runtime.

A runtime that latpred brings is simulated from its own graph of a model, with costs of its own; any other from the
schedule that it lowers the graph to, at the costs of eager ops. Nothing here knows of the predictor or of a fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from typing import NamedTuple

import numpy as np

from latpred import runtimes
from latpred.calibration.devices.simulated_costs import RuntimeCosts, TrueCosts, op_work
from latpred.errors import RuntimeRefusalError, UsageError
from latpred.graph.graph import ModelGraph, Op
from latpred.graph.schedule import Schedule

PYTHON = "python::"  # ops that stand for the model's own Python, not for an op

Kernel = float  # its true device time in microseconds


class Step(NamedTuple):
    """One step: host events, kernels, synchronisations, and whether the kernels were captured into one graph."""

    host: tuple[float, ...]
    kernels: tuple[Kernel, ...]
    syncs: int = 0
    captured: bool = False


class Program(NamedTuple):
    """One forward pass: what calling it costs the host, and its steps."""

    call_us: float
    steps: tuple[Step, ...]

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Every kernel, in order."""
        return tuple(chain.from_iterable(step.kernels for step in self.steps))

    @property
    def host_us(self) -> float:
        """What the host does of it, waiting left out."""
        return self.call_us + sum(sum(step.host) for step in self.steps)

    def device_us(self, gap_us: float, node_gap_us: float) -> float:
        """What the device does of it, with the gap before each kernel."""
        return sum(
            sum(one.kernels) + len(one.kernels) * (node_gap_us if one.captured else gap_us) for one in self.steps
        )


def program(costs: TrueCosts, graph: ModelGraph, batch: int, runtime: str) -> Program:
    """A graph's forward pass in a runtime.

    Raises
    ------
    UsageError
        When the graph is not what the runtime runs, or no runtime goes by the name.
    RuntimeRefusalError
        When the runtime captures its kernels and the graph holds a wait.
    """
    if runtime == "eager":
        return Program(costs.forward_us, tuple(step(costs, op, batch, graph.precision) for op in graph.at(batch)))
    own = costs.runtimes.get(runtime)
    if own is None:
        return _scheduled(costs, runtimes.get(runtime).lower(graph, batch), graph, batch)
    if graph.runtime not in own.graphs:
        raise UsageError(
            f"this graph is what {graph.runtime} runs, and {runtime} is simulated from the graph of "
            f"{' or '.join(own.graphs)}. Trace it for that: "
            f"latpred.runtimes.lowering.trace_for_runtime(..., runtime={runtime!r})."
        )
    parts = [(op, _own_step(costs, own, op, batch, graph.precision)) for op in graph.at(batch)]
    if own.replay_us is None:
        return Program(own.call_us, tuple(part for _, part in parts))
    return Program(own.call_us, tuple(_captured(own, own.replay_us, parts, graph.model)))


def step(costs: TrueCosts, op: Op, batch: int, precision: str) -> Step:
    """Host events, kernels and synchronisations of an eager op."""
    host = [op.module_calls * costs.module_call_us, op.python_calls * costs.python_call_us]
    if not op.name.startswith(PYTHON):
        host.append(costs.dispatch(op.host_class))
    return Step(tuple(us for us in host if us), _kernels(costs, op, batch, precision), op.syncs)


def _captured(own: RuntimeCosts, replay_us: float, parts: Sequence[tuple[Op, Step]], model: str) -> Iterator[Step]:
    """Steps with what can be captured made one of them wherever nothing else lies between.

    Raises
    ------
    RuntimeRefusalError
        When something else lies between and the runtime does not let it.
    """
    if not own.between:
        if any(part.syncs for _, part in parts):
            raise RuntimeRefusalError(
                f"a host synchronisation of {model} cannot be captured into a graph. Ask for runtime='eager'."
            )
        yield Step((replay_us,), tuple(chain.from_iterable(part.kernels for _, part in parts)), 0, True)
        return
    for inside, group in groupby(parts, key=lambda part: part[0].host_class.startswith(own.between)):
        members = [part for _, part in group]
        if inside:
            yield Step((replay_us,), tuple(chain.from_iterable(part.kernels for part in members)), 0, True)
        else:
            yield from members


def _own_step(costs: TrueCosts, own: RuntimeCosts, op: Op, batch: int, precision: str) -> Step:
    host = () if op.name.startswith(PYTHON) else (own.dispatch(op.host_class),)
    factor = own.factor(op.family)
    return Step(host, tuple(us * factor for us in _kernels(costs, op, batch, precision)), op.syncs)


def _kernels(costs: TrueCosts, op: Op, batch: int, precision: str) -> tuple[Kernel, ...]:
    share = 1 / op.launches if op.launches else 0.0
    return (costs.kernel_us(op.family, op_work(op, batch), precision, share),) * op.launches


def _scheduled(costs: TrueCosts, schedule: Schedule, graph: ModelGraph, batch: int) -> Program:
    """What a runtime that nothing is known of hands over, at the costs of eager ops."""
    first = np.searchsorted(schedule.kernel_step, np.arange(len(schedule.host_class) + 1)).tolist()
    steps: list[Step] = []
    for index, name in enumerate(schedule.host_class):
        calls = (
            int(schedule.module_calls[index]) * costs.module_call_us,
            int(schedule.python_calls[index]) * costs.python_call_us,
        )
        host = tuple(us for us in (*calls, costs.dispatch(name)) if us)
        kernels = tuple(
            costs.kernel_us(
                schedule.kernel_family[number],
                op_work(schedule.ops[int(schedule.kernel_op[number])], batch),
                graph.precision,
                float(schedule.kernel_share[number]),
            )
            for number in range(first[index], first[index + 1])
        )
        steps.append(Step(host, kernels, int(schedule.sync[index])))
    return Program(costs.forward_us, tuple(steps))
