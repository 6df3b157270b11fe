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


class Step(NamedTuple):
    """One step: host events, kernels, synchronisations, and whether the kernels were captured into one graph."""

    host: tuple[float, ...]  # microseconds
    kernels: tuple[float, ...]  # true device times in microseconds
    syncs: int = 0
    captured: bool = False


class Program(NamedTuple):
    """One forward pass: what calling it costs the host, and its steps."""

    call_us: float
    steps: tuple[Step, ...]

    @property
    def kernels(self) -> tuple[float, ...]:
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
    """A graph's forward pass in a runtime."""
    if runtime == "eager":
        return Program(costs.forward_us, tuple(step(costs, op, batch, graph.precision) for op in graph.at(batch)))
    runtime_costs = costs.runtimes.get(runtime)
    if runtime_costs is None:
        return _scheduled(costs, runtimes.get(runtime).lower(graph, batch), graph, batch)
    if graph.runtime not in runtime_costs.graphs:
        raise UsageError(
            f"this graph is what {graph.runtime} runs, and {runtime} is simulated from the graph of "
            f"{' or '.join(runtime_costs.graphs)}. Trace it for that: "
            f"latpred.runtimes.lowering.trace_for_runtime(..., runtime={runtime!r})."
        )
    parts = [(op, _runtime_step(costs, runtime_costs, op, batch, graph.precision)) for op in graph.at(batch)]
    if runtime_costs.replay_us is None:
        return Program(runtime_costs.call_us, tuple(part for _, part in parts))
    steps = _captured(runtime_costs.between, runtime_costs.replay_us, parts, graph.model)
    return Program(runtime_costs.call_us, tuple(steps))


def step(costs: TrueCosts, op: Op, batch: int, precision: str) -> Step:
    """Host events, kernels and synchronisations of an eager op."""
    host = [op.module_calls * costs.module_call_us, op.python_calls * costs.python_call_us]
    if not op.name.startswith(PYTHON):
        host.append(costs.dispatch(op.host_class))
    return Step(tuple(us for us in host if us), _kernels(costs, op, batch, precision), op.syncs)


def _captured(between: str, replay_us: float, parts: Sequence[tuple[Op, Step]], model: str) -> Iterator[Step]:
    """Steps with what can be captured made one of them wherever nothing else lies between."""
    if not between:
        if any(part.syncs for _, part in parts):
            raise RuntimeRefusalError(
                f"a host synchronisation of {model} cannot be captured into a graph. Ask for runtime='eager'."
            )
        yield Step((replay_us,), tuple(chain.from_iterable(part.kernels for _, part in parts)), 0, True)
        return
    for inside, group in groupby(parts, key=lambda part: part[0].host_class.startswith(between)):
        members = [part for _, part in group]
        if inside:
            yield Step((replay_us,), tuple(chain.from_iterable(part.kernels for part in members)), 0, True)
        else:
            yield from members


def _runtime_step(costs: TrueCosts, runtime_costs: RuntimeCosts, op: Op, batch: int, precision: str) -> Step:
    host = () if op.name.startswith(PYTHON) else (runtime_costs.dispatch(op.host_class),)
    factor = runtime_costs.factor(op.family)
    return Step(host, tuple(us * factor for us in _kernels(costs, op, batch, precision)), op.syncs)


def _kernels(costs: TrueCosts, op: Op, batch: int, precision: str) -> tuple[float, ...]:
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
