"""What a forward pass is on the simulated device: host events, kernels and waits of each step, by runtime.

A runtime that latpred brings is simulated from its own graph of a model, with costs of its own; any other from the
schedule that it lowers the graph to, at the costs of eager ops. Nothing here knows of the predictor or of a fit.
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import numpy as np

from latpred import runtimes
from latpred.calibration.simulated_costs import RuntimeCosts, TrueCosts, op_work
from latpred.errors import RuntimeRefusalError, UsageError
from latpred.graph import ModelGraph, Op
from latpred.schedule import Schedule

PYTHON = "python::"  # ops that stand for the model's own Python, not for an op

Kernel = float  # its true device time in microseconds
Step = tuple[tuple[float, ...], tuple[Kernel, ...], int]  # host events, kernels, synchronisations


class Program(NamedTuple):
    """One forward pass: what calling it costs the host, its steps, and whether they were captured into one graph."""

    call_us: float
    steps: tuple[Step, ...]
    replayed: bool

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Every kernel, in order."""
        return tuple(chain.from_iterable(kernels for _, kernels, _ in self.steps))

    @property
    def host_us(self) -> float:
        """What the host does of it, waiting left out."""
        return self.call_us + (0.0 if self.replayed else sum(sum(host) for host, _, _ in self.steps))


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
        return Program(
            costs.forward_us, tuple(step(costs, op, batch, graph.precision) for op in graph.at(batch)), False
        )
    own = costs.runtimes.get(runtime)
    if own is None:
        return _scheduled(costs, runtimes.get(runtime).lower(graph, batch), graph, batch)
    if graph.runtime not in own.graphs:
        raise UsageError(
            f"this graph is what {graph.runtime} runs, and {runtime} is simulated from the graph of "
            f"{' or '.join(own.graphs)}. Walk it for that: latpred.runtimes.walking.walk(..., runtime={runtime!r})."
        )
    steps = tuple(_own_step(costs, own, op, batch, graph.precision) for op in graph.at(batch))
    if own.replay_us is None:
        return Program(own.call_us, steps, False)
    if any(syncs for _, _, syncs in steps):
        raise RuntimeRefusalError(
            f"a host synchronisation of {graph.model} cannot be captured into a graph. Ask for runtime='eager'."
        )
    return Program(own.call_us + own.replay_us, steps, True)


def step(costs: TrueCosts, op: Op, batch: int, precision: str) -> Step:
    """Host events, kernels and synchronisations of an eager op."""
    host = [op.module_calls * costs.module_call_us, op.python_calls * costs.python_call_us]
    if not op.name.startswith(PYTHON):
        host.append(costs.dispatch(op.host_class))
    return tuple(us for us in host if us), _kernels(costs, op, batch, precision), op.syncs


def _own_step(costs: TrueCosts, own: RuntimeCosts, op: Op, batch: int, precision: str) -> Step:
    host = () if op.name.startswith(PYTHON) else (own.dispatch(op.host_class),)
    factor = own.factor(op.family)
    return host, tuple(us * factor for us in _kernels(costs, op, batch, precision)), op.syncs


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
        steps.append((host, kernels, int(schedule.sync[index])))
    return Program(costs.forward_us, tuple(steps), False)
