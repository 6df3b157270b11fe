"""OnnxCalibrator: generated ONNX graphs, timed whole and node by node, tell what onnxruntime takes.

    latency = fixed + Σ cost(class of the node) + Σ time of its kernel

On a CPU onnxruntime's own profiler says what every node of a generated graph takes; ordinary models, which are exported
in seconds, tell the gate how good the fit is. What a node takes when it has next to nothing to do belongs to its class;
what it takes beyond that in a larger graph is its kernel's. The profiler's clock counts whole microseconds and slows
what lies between two nodes, so the sum is brought to the time of graphs without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count, cycle
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from latpred import host
from latpred.calibration.cells import Cell
from latpred.calibration.devices import Device
from latpred.calibration.fitting import acceptance
from latpred.calibration.fitting.dispatch_fit import of_classes
from latpred.calibration.fitting.kernel_fit import (
    LEAST_SHARE,
    PASS_SHARE,
    KernelSample,
    fit_kernels,
    nearest_fit,
    row_of,
)
from latpred.calibration.fitting.linear_system import Column, System, of_kind
from latpred.calibration.runtime_calibration import onnx_workloads
from latpred.calibration.runtime_calibration.base import RuntimeCalibrator, rotating
from latpred.calibration.runtime_calibration.network_fit import too_few
from latpred.calibration.session import Row
from latpred.calibration.timing import visits
from latpred.calibration.timing.reference_speed import SpeedReading, taken_at_full_speed
from latpred.calibration.workloads import suites
from latpred.graph.graph import ZERO, Op
from latpred.host import Slowdown
from latpred.prediction.kernel_times import KernelModel, resident_share, slower_kernels
from latpred.prediction.pricing import host_cost
from latpred.profile.document import DeviceProfile, DispatchFit, KernelFit
from latpred.runtimes import get, lowering
from latpred.runtimes.onnx import onnx_graph, onnx_session
from latpred.runtimes.source import Source, tensors_of
from latpred.units import US_PER_S

NAME = "onnxruntime"
PRECISION = "fp32"  # of everything on a CPU
TINY_GRAPHS = 45
TURN = ("graph",) * 12 + ("model",)  # after the tiny graphs, again and again; an export takes as long as thirty graphs
GRAPH_EFFORT = (8, 0.08)  # forward passes, and seconds after which there are no more
TINY_EFFORT = (60, 0.1)
MODEL_EFFORT = (20, 0.3)
PROFILED = 5  # forward passes with the profiler on, after one that is not counted
LEAST_PROFILED = 2  # of them, kept however slow the moment was
PROFILED_S = 0.25  # beyond which there are fewer
COLD_EVERY = 2  # of the generated graphs, every second runs with its weights out of the cache
# What pushes them out, as other layers would: with 16 MiB read between passes products and convolutions of models of 5
# to 47 MB took 3 to 13 % longer than in passes that follow each other, with 64 MiB 7 to 33 %.
FILLER_BYTES = 16 << 20

FEWEST = 3  # tiny graphs, or nodes of a class in them, below which nothing can be told apart
HALF_US = 0.5  # what the profiler's clock cuts off on average
RULING = 0.5  # share of a graph's time from which its kernels rule it
ASTRAY = 2.0  # a graph that takes so much more or less than its nodes did tells nothing
MODEL_SIGMA = 0.05  # relative error of the sum above
# Priors.
NODE_US, NODE_SIGMA = 1.0, 1.0  # what a node costs
CLASS_SIGMA = 0.5  # how far a class may lie from the common cost, as a share of the guess
FIXED_US, FIXED_SIGMA_US = 4.0, 20.0
FIXED, NODE = ("fixed",), ("node",)

Feed = dict[str, Any]
NodeKernel = tuple[Op, float]  # the kernel's part of a profiled node, in microseconds


class TimedGraph(NamedTuple):
    """A generated graph that was timed: its nodes, latency with all that it needs in the cache, and time of each node.

    tiny : whether its nodes have next to nothing to do. resident : share of its weights that was in the cache when its
    nodes were timed. cold : whether nothing was.
    """

    ops: tuple[Op, ...]
    total_us: float
    nodes_us: tuple[float, ...]
    tiny: bool
    resident: float
    cold: bool = False

    def host_us(self, host: DispatchFit) -> float:
        return host.fixed_us + sum(host_cost(host, op.host_class) for op in self.ops)


class OnnxCalibrator(RuntimeCalibrator):
    """Calibrates onnxruntime on a CPU."""

    def __init__(self, runtime: str, device: Device) -> None:
        super().__init__(runtime, device)
        self._ops: dict[str, tuple[Op, ...]] = {}  # what the nodes of graphs do, by the cells of those
        # Ordinary models by name, which keep their exports: one of a slow moment is timed, not exported, again.
        self._models: dict[str, Source] = {}

    def cells_in(self, precisions: Sequence[str]) -> Iterator[Cell]:
        """Float32 alone: onnxruntime has next to no kernels for bfloat16 on a CPU."""
        return self.cells(PRECISION)

    def cells(self, precision: str) -> Iterator[Cell]:
        """Tiny graphs, then larger ones, and ordinary models among them."""
        for number in range(TINY_GRAPHS):
            yield graph_cell(number, precision, tiny=True)
        graphs = (graph_cell(number, precision) for number in count())
        suite = suites.get(suites.GATE)
        # One export serves both batches.
        models = (
            acceptance.model_cell(workload, batch, precision, self.runtime)
            for workload in suite.ready
            for batch in suite.batches
        )
        yield from rotating({"graph": graphs, "model": models}, cycle(TURN))

    def measure(self, cell: Cell) -> Row:
        """Time a graph or model whole, called again and again; a graph also node by node, its weights cold if asked.

        What a cold graph takes as a whole is timed warm like all others: out of the cache lie also onnxruntime's code
        and the results of the nodes, which a large model finds where it left them.
        """
        generated = cell.kind == "kernel"
        model, feed = _generated(cell) if generated else self._exported(cell)
        repeats, budget_s = TINY_EFFORT if cell.dims.get("tiny") else GRAPH_EFFORT if generated else MODEL_EFFORT
        forward = partial(onnx_session.session(model, target="cpu", threads=torch.get_num_threads()).run, None, feed)
        timing = self.timed(forward, repeats, budget_s)
        del forward  # with the session: its threads wait busily where those of the profiled one compute
        if not generated:
            return Row(cell, {"single": timing})
        times = max(2, min(PROFILED, int(PROFILED_S / timing.median_s)))
        return Row(cell, {"single": timing}, calls_us=self._nodes_us(cell, model, feed, times))

    def fit(self, rows: Sequence[Row], profile: DeviceProfile) -> DispatchFit:
        """Host costs by class and onnxruntime's own kernels."""
        minutes = visits.speed_of(rows).full_us
        slower = host.slowdown(profile.speed or minutes, minutes)
        graphs = [self._timed_graph(row, profile) for row in rows if row.calls_us]
        return fit_nodes([graph_at_profile_speed(graph, slower) for graph in graphs if graph is not None])

    def _nodes_us(self, cell: Cell, model: bytes | str, feed: Feed, times: int) -> tuple[float, ...]:
        """Median microseconds of every node, in the order of `_rank`; what the nodes do is kept for the fit."""
        readings: list[SpeedReading] = []
        filler = np.ones(FILLER_BYTES // 4 if cell.dims["cold"] else 0, np.float32)  # zeros share a page

        def between() -> None:
            readings.append(self._gauge.read())
            filler.sum()

        profiled = onnx_session.watch(
            model, [feed] * (times + 1), target="cpu", threads=torch.get_num_threads(), between=between
        )
        ops = onnx_graph.executed(profiled, feed)
        slow = self._gauge.between([*readings, self._gauge.read()])[1:]
        runs_us = [[[event.us for event in run]] for run in profiled.runs[1:]]
        counted, _ = taken_at_full_speed(runs_us, slow, LEAST_PROFILED)
        nodes_us = np.median(counted, axis=0).tolist()
        order = sorted(range(len(ops)), key=lambda node: _rank(ops[node]))
        self._ops[cell.key] = tuple(ops[node] for node in order)
        return tuple(nodes_us[node] for node in order)

    def _exported(self, cell: Cell) -> tuple[bytes | str, Feed]:
        """An ordinary model by one export, which traces it too and serves all its batches."""
        runtime: Any = get(NAME)
        if cell.name not in self._models:
            source = suites.gate_model(cell.name).source(PRECISION)
            built = source.model()
            self._models[cell.name] = replace(source, model=lambda: built)
        source = self._models[cell.name]
        model, inputs = runtime.exported(source.model(), source.inputs(2)).model, source.inputs(cell.dims["batch"])
        lowering.of_source(source, NAME, "cpu")  # takes the same export
        return model, onnx_session.feed_of(onnx_session.input_names(model), tensors_of(inputs))

    def _timed_graph(self, row: Row, profile: DeviceProfile) -> TimedGraph | None:
        """A graph as the fit takes it; None when its nodes are not those that were timed."""
        cell, ops = row.cell, self._graph_ops(row.cell)
        if len(ops) != len(row.calls_us):
            return None
        tiny, cold = bool(cell.dims["tiny"]), bool(cell.dims["cold"])
        weights = sum(op.weight_bytes.at(1) for op in ops)
        touched = weights + sum(op.read_bytes.at(1) + op.write_bytes.at(1) for op in ops)
        resident = 0.0 if cold else resident_share(max(weights, 1), touched, profile.device)
        total_us = row.timings["single"].median_s * US_PER_S
        return TimedGraph(ops, total_us, row.calls_us, tiny, resident, cold)

    def _graph_ops(self, cell: Cell) -> tuple[Op, ...]:
        if cell.key not in self._ops:
            model, feed = _generated(cell)
            watched = onnx_session.watch(model, [feed], target="cpu", threads=1)
            self._ops[cell.key] = tuple(sorted(onnx_graph.executed(watched, feed), key=_rank))
        return self._ops[cell.key]


def graph_cell(number: int, precision: str, *, tiny: bool = False) -> Cell:
    kinds = onnx_workloads.KINDS
    cold = 0 if tiny else number // len(kinds) % COLD_EVERY
    dims = {"seed": number, "cold": cold, "tiny": int(tiny)}
    return Cell("kernel", kinds[number % len(kinds)], dims, precision, NAME)


def graph_at_profile_speed(graph: TimedGraph, slower: Slowdown) -> TimedGraph:
    """A graph as the machine would have taken it while eager was measured, when it was so much slower or faster."""

    def longer(op: Op) -> float:
        computes = bool(op.launches) and not graph.tiny
        return float(slower_kernels(slower, op.family, np.array(row_of(op, 1)))) if computes else slower.dispatch

    nodes_us = tuple(us / longer(op) for op, us in zip(graph.ops, graph.nodes_us, strict=True))
    timed_us = sum(graph.nodes_us)
    total_us = graph.total_us * sum(nodes_us) / timed_us if timed_us else graph.total_us / slower.dispatch
    return graph._replace(nodes_us=nodes_us, total_us=total_us)


def _generated(cell: Cell) -> tuple[bytes | str, Feed]:
    return onnx_workloads.make(cell.name, cell.dims["seed"], tiny=bool(cell.dims["tiny"]))


def _rank(op: Op) -> bytes:
    """Where a node's time stands in a row: onnxruntime orders branches otherwise in another process."""
    unordered = msgspec.structs.replace(op, live_bytes=ZERO)  # what is alive depends on the order
    return msgspec.json.encode(unordered, order="sorted")


# -- the fit -------------------------------------------------------------------------------------------------------


def fit_nodes(graphs: Sequence[TimedGraph]) -> DispatchFit:
    """Host costs and kernels, from tiny graphs and larger ones. Cold graphs tell of weights only."""
    tiny, sized = [graph for graph in graphs if graph.tiny], [graph for graph in graphs if not graph.tiny]
    if len(tiny) < FEWEST or not sized:
        timed = f"{len(tiny)} tiny graphs and {len(sized)} larger ones were timed in {NAME}"
        raise too_few(timed, "its costs")
    host, idle = _host(tiny), _idle(graphs)
    kernels = [node_kernels(graph, idle) for graph in sized]
    profiler_us = _profiler_us(sized, kernels, host)
    samples: list[KernelSample] = []
    for graph, nodes in zip(sized, kernels, strict=True):
        unprofiled = [(op, us**2 / (us + profiler_us)) for op, us in nodes]
        factor = _factor(graph, unprofiled, host)
        if factor is not None:
            samples += node_samples(graph, unprofiled, factor, host)
    fits = fit_kernels(samples)
    return msgspec.structs.replace(host, kernels={PRECISION: summing_to(fits, sized, host)} if fits else {})


def _host(tiny: Sequence[TimedGraph]) -> DispatchFit:
    """Cost of each class of node and of a run, from graphs that do nothing else."""
    system = System()
    for graph in tiny:
        numbers = Counter(op.host_class for op in graph.ops)
        terms: dict[Column, float] = {FIXED: 1.0}
        terms |= {("class", name): float(number) for name, number in numbers.items()}
        system.measured(terms, graph.total_us, MODEL_SIGMA * graph.total_us)
    system.prior({FIXED: 1.0}, FIXED_US, FIXED_SIGMA_US)
    system.prior({NODE: 1.0}, NODE_US, NODE_SIGMA)
    for name in system.names("class"):
        system.prior({("class", name): 1.0, NODE: -1.0}, 0.0, CLASS_SIGMA * NODE_US)
    values = system.solve()
    costs = {name: round(us, 4) for name, us in of_kind(values, "class").items()}
    return msgspec.structs.replace(of_classes(costs), fixed_us=round(values[FIXED], 4))


def _idle(graphs: Sequence[TimedGraph]) -> DispatchFit:
    """What the profiler says of a node of each class that has next to nothing to do, as those in tiny graphs have.

    Few of them may all have met a slow moment: such a class takes no longer than the fastest of all its nodes.
    """
    tiny_us: dict[str, list[float]] = {}
    least_us: dict[str, float] = {}
    for graph in graphs:
        for op, us in zip(graph.ops, graph.nodes_us, strict=True):
            whole_us = us + HALF_US
            least_us[op.host_class] = min(whole_us, least_us.get(op.host_class, whole_us))
            if graph.tiny:
                tiny_us.setdefault(op.host_class, []).append(whole_us)
    return of_classes(
        {name: float(np.median(us)) if len(us) >= FEWEST else least_us[name] for name, us in tiny_us.items()}
    )


def node_kernels(graph: TimedGraph, idle: DispatchFit) -> list[NodeKernel]:
    """The kernel's part of every node that has one. One that cannot be told from an idle node is known to be short."""
    kernels = []
    for op, us in zip(graph.ops, graph.nodes_us, strict=True):
        if op.launches:
            whole_us = us + HALF_US
            kernels.append((op, max(whole_us - host_cost(idle, op.host_class), LEAST_SHARE * whole_us)))
    return kernels


def _profiler_us(sized: Sequence[TimedGraph], kernels: Sequence[Sequence[NodeKernel]], host: DispatchFit) -> float:
    """What the profiler adds to a kernel of some length, in the middle of the graphs that kernels rule."""
    added = []
    for graph, nodes in zip(sized, kernels, strict=True):
        profiled_us, rest_us = sum(us for _, us in nodes), graph.total_us - graph.host_us(host)
        if not graph.cold and profiled_us > RULING * graph.total_us and rest_us > 0:
            added.append(profiled_us / len(nodes) * (profiled_us / rest_us - 1.0))
    return max(float(np.median(added)), 0.0) if added else 0.0


def _factor(graph: TimedGraph, kernels: Sequence[NodeKernel], host: DispatchFit) -> float | None:
    """What a graph's kernels take in its own time over the sum of theirs, as far as they are what it takes.

    None where both disagree so much that the machine did something else in one of them.
    """
    summed_us = sum(us for _, us in kernels)
    if summed_us <= 0 or graph.cold:
        return 1.0
    share = min(1.0, summed_us / graph.total_us)
    own = max(graph.total_us - graph.host_us(host), 0.0) / summed_us
    if share > RULING and not 1 / ASTRAY <= own <= ASTRAY:
        return None
    return float(min(max(own, 1 / ASTRAY), ASTRAY) ** share)


def node_samples(
    graph: TimedGraph, kernels: Sequence[NodeKernel], factor: float, host: DispatchFit
) -> list[KernelSample]:
    """Kernels that a fit can learn from. An error of one counts as one of its node and of a share of the pass."""
    samples = []
    for op, us in kernels:
        if not op.estimated and (not graph.cold or _reads_weights(op)):
            node_us = host_cost(host, op.host_class)
            beside_us = node_us + PASS_SHARE * graph.total_us
            row = row_of(op, 1, resident=graph.resident)
            samples.append(KernelSample(op.family, row, factor * us, beside_us, node_us))
    return samples


def summing_to(fits: dict[str, KernelFit], graphs: Sequence[TimedGraph], host: DispatchFit) -> dict[str, KernelFit]:
    """The fits, by one factor so much slower that warm graphs which kernels rule take, in the middle, what they took.

    A fit of logarithms tells what a kernel takes in the middle, and most kernels take longer on average.
    """
    models = {family: KernelModel(fit) for family, fit in fits.items()}

    def priced_us(op: Op, resident: float) -> float:
        family = nearest_fit(fits, op.family) if op.launches else None
        if family is None:
            return 0.0
        row = np.array([row_of(op, 1, resident=resident)])
        return float(models[family].times(row, fits[family].leaf_scales.get(op.family, 1.0)).us[0])

    longer = []
    for graph in graphs:
        rest_us = graph.total_us - graph.host_us(host)
        if not graph.cold and rest_us > RULING * graph.total_us:
            summed_us = sum(priced_us(op, graph.resident) for op in graph.ops)
            longer += [rest_us / summed_us] if summed_us else []
    factor = float(np.median(longer)) if longer else 1.0
    return {family: msgspec.structs.replace(fit, scale=fit.scale * factor) for family, fit in fits.items()}


def _reads_weights(op: Op) -> bool:
    """Whether most of what a node moves is weights; in a cold graph all else is cold too, as it is in no model."""
    return op.weight_bytes.at(1) > op.read_bytes.at(1) + op.write_bytes.at(1)
