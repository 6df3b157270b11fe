"""What the simulated device costs: its options, the truth behind its clocks, and the time of its kernels.

The truth is of another make than the model that is fitted to it: compute and memory time overlap in part instead of in
quadrature, and a kernel's serial depth adds to its compute time. Nothing here knows of the predictor or the fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import NamedTuple

from latpred import runtimes
from latpred.errors import RuntimeRefusalError
from latpred.graph.graph import Calls, ModelGraph, Op, Schedule
from latpred.ops.families import lineage, nearest
from latpred.query import AMP

ITEMSIZE = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16"), 2),
    **dict.fromkeys(("float64", "int64", "complex64"), 8),
}


class OpWork(NamedTuple):
    """What one kernel does: multiply-adds, bytes by kind, and elements written."""

    macs: float
    weight_bytes: float
    read_bytes: float
    write_bytes: float
    outputs: float


@dataclass(frozen=True, slots=True)
class KernelCosts:
    """True cost of the kernels of one family."""

    floor_us: float  # time of a kernel that does nothing
    compute: float  # share of the device's multiply-adds per microsecond that a kernel reaches that fills it
    memory: float  # share of the device's bandwidth that it reaches


# Microseconds of dispatch in eager, and of a step of two other runtimes, by class of op ("*" is any other); of kernels,
# by family, microseconds of one that does nothing, and shares of multiply-adds and bandwidth that a large one reaches.
_TABLE = """
class               eager  torchscript  onnxruntime  floor  compute  memory
*                       5          2.6          1.7      -        -       -
view                  1.2          0.8            -      -        -       -
view.nested           0.8            -            -      -        -       -
factory               1.6            -            -    1.6      0.7     0.9
free                  0.7            -            -      -        -       -
sync                  2.4            -            -      -        -       -
gemm                  6.2          3.7          2.3    2.9     0.75    0.85
bmm                   6.8          3.9          2.5    3.1      0.6     0.8
conv                  9.5          5.6          4.4    4.2      0.6    0.75
conv_grouped            -            -            -    4.4     0.25     0.6
conv_depthwise          -            -            -      3     0.08    0.55
conv_transpose          -            -            -    4.8     0.45    0.65
attention              12          7.1          3.6    5.1      0.5     0.7
norm                  6.4          3.4          2.1    2.6      0.7     0.7
batch_norm              -            -            -    2.4      0.7    0.75
softmax               5.2            -            -    2.5      0.7     0.7
reduction             5.6            -            -    2.7      0.7    0.75
elementwise           4.6          2.4          1.5    1.8      0.7     0.9
elementwise.nested    3.7            -            -      -        -       -
copy                  4.9            -            -    1.9      0.7     0.8
cat                   6.6            -            -    2.2      0.7    0.75
index                 7.4            -            -    2.3      0.7     0.5
embedding               6          3.2            -    2.1      0.7     0.6
pooling               6.1            -            -    2.4      0.7    0.65
fft                     9            -            -      4      0.7     0.4
rnn                    42           31           24     30      0.2     0.5
sort                  8.3            -            -      6      0.7     0.2
generated               -            -            -      2      0.7    0.85
other                 5.5            -            -    2.2      0.7     0.6
interpreter             -          0.1            -      -        -       -
"""
_COLUMNS, *_ROWS = (line.split() for line in _TABLE.strip().splitlines())


def _told(column: str, prefix: str = "") -> dict[str, float]:
    """A column of the table, by the names of its rows behind a prefix."""
    cells = ((row[0], row[_COLUMNS.index(column)]) for row in _ROWS)
    return {"" if name == "*" else prefix + name: float(text) for name, text in cells if text != "-"}


DISPATCH_US: Mapping[str, float] = _told("eager")
_KERNEL = [_told(column) for column in ("floor", "compute", "memory")]
KERNEL_COSTS: Mapping[str, KernelCosts] = {
    family: KernelCosts(*(each[family] for each in _KERNEL)) for family in _KERNEL[0]
}


@dataclass(frozen=True, slots=True)
class RuntimeCosts:
    """True costs of a runtime other than eager."""

    call_us: float  # what a call costs the host before its first step: bindings, guards
    dispatch_us: Mapping[str, float] = field(default_factory=lambda: {"": 0.0})  # of a step by class; "" for all others
    factors: Mapping[str, float] = field(default_factory=lambda: {"": 1.0})  # kernel times over eager's, by family
    replay_us: float | None = None  # what launching a captured graph takes the host; None: every step is dispatched
    # How the classes of captured steps begin, where others may lie between them, each stretch a graph of its own; ""
    # where the whole forward pass is captured or nothing.
    between: str = ""

    def dispatch(self, host_class: str) -> float:
        return nearest(self.dispatch_us, host_class)

    def factor(self, family: str) -> float:
        return nearest(self.factors, family)


_COMPILE = {"": 4.2, "guards": 7.0, "kernel.extern": 5.0, "kernel.extern.conv": 7.2, "kernel.generated": 3.1}
_ONNX_FACTORS = {"": 1.0, "gemm": 0.96, "elementwise": 1.1, "norm": 0.9}

RUNTIMES: Mapping[str, RuntimeCosts] = {
    "torchscript": RuntimeCosts(4.5, _told("torchscript", "node.")),
    "onnxruntime": RuntimeCosts(11.0, _told("onnxruntime", "node."), _ONNX_FACTORS),
    "compile": RuntimeCosts(8.0, _COMPILE),
    "cuda-graphs": RuntimeCosts(0.0, replay_us=7.0),
    "onnxruntime-cuda-graphs": RuntimeCosts(5.0, factors=_ONNX_FACTORS, replay_us=7.5),
    "compile-reduce-overhead": RuntimeCosts(9.0, _COMPILE, replay_us=8.0, between="kernel."),
}


@dataclass(frozen=True, slots=True)
class TrueCosts:
    """Everything that sets the simulated device's time.

    `macs_per_us` is by precision; activations are read and written at `activation_bytes_per_us`, weights, which come
    from further away, at `weight_bytes_per_us`. `depth_us` is what a multiply-add costs the longest chain of them in
    one output when the device is empty, and `overlap` the share of the shorter of compute and memory that hides behind
    the longer. A replayed graph is one launch of `replay_us` with `node_gap_us` between its kernels. `runtimes` are
    all but eager, whose costs stand here.
    """

    dispatch_us: Mapping[str, float] = field(default_factory=lambda: dict(DISPATCH_US))
    module_call_us: float = 3.0
    python_call_us: float = 0.22
    attribute_read_us: float = 0.6
    forward_us: float = 6.0
    launch_us: float = 4.0
    gap_us: float = 1.2
    node_gap_us: float = 0.7
    replay_us: float = 7.0
    mark_us: float = 1.5
    sync_us: float = 3.0
    kernels: Mapping[str, KernelCosts] = field(default_factory=lambda: dict(KERNEL_COSTS))
    macs_per_us: Mapping[str, float] = field(
        default_factory=lambda: {"fp32": 9.0e6, "tf32": 3.5e7, "fp16": 7.0e7, "bf16": 7.0e7}
    )
    activation_bytes_per_us: float = 2.6e6
    weight_bytes_per_us: float = 1.4e6
    copy_bytes_per_us: float = 2.4e4
    depth_us: float = 4.0e-3
    overlap: float = 0.8
    runtimes: Mapping[str, RuntimeCosts] = field(default_factory=lambda: dict(RUNTIMES))

    def dispatch(self, host_class: str) -> float:
        """Host microseconds of an op of a class, looked up from special to general."""
        return nearest(self.dispatch_us, host_class)

    def calls_us(self, calls: Calls) -> list[float]:
        """Host microseconds of calls, kind by kind."""
        modules, functions, reads = calls
        return [modules * self.module_call_us, functions * self.python_call_us, reads * self.attribute_read_us]

    def kernel(self, family: str) -> KernelCosts:
        """Costs of a kernel family, looked up from special to general."""
        return next((self.kernels[name] for name in lineage(family) if name in self.kernels), self.kernels["other"])

    def kernel_us(self, family: str, work: OpWork, precision: str, share: float = 1.0) -> float:
        """Device microseconds of a kernel that does a share of some work."""
        costs = self.kernel(family)
        rate = self.macs_per_us[AMP.get(precision, precision)] * costs.compute
        depth = work.macs / work.outputs if work.outputs else 0.0
        compute = work.macs * share / rate + (depth * self.depth_us if work.macs else 0.0)
        activations = work.read_bytes + work.write_bytes
        memory = activations / self.activation_bytes_per_us + work.weight_bytes / self.weight_bytes_per_us
        memory *= share / costs.memory
        return costs.floor_us + max(compute, memory) + (1 - self.overlap) * min(compute, memory)


@dataclass(frozen=True, slots=True)
class SimulatedSpec:
    """Options of a simulated device."""

    seed: int = 0  # of all noise
    noise: float = 0.02  # standard deviation of the logarithm of every event's time
    spikes: float = 0.01  # share of events that take `spike_factor` times as long, half to one and a half times that
    spike_factor: float = 3.0
    drift: float = 5e-5  # by how much the device's clock runs faster than the host's
    queue: int = 1024  # launches the device holds before the host must wait
    clock_us: float = 0.03  # what reading the host's clock costs
    memory_bytes: int = 16 * 2**30
    multiprocessors: int = 108
    costs: TrueCosts = field(default_factory=TrueCosts)


def _op_work(op: Op, batch: int) -> OpWork:
    """Work of a graph's op at one batch size."""
    write = op.write_bytes.at(batch)
    return OpWork(
        op.macs.at(batch), op.weight_bytes.at(batch), op.read_bytes.at(batch), write, write / ITEMSIZE.get(op.dtype, 4)
    )


PYTHON = "python::"  # ops that stand for the model's own Python, not for an op


class Step(NamedTuple):
    """One step: host events, kernels, synchronisations, and whether the kernels were captured into one graph."""

    host: tuple[float, ...]  # microseconds
    kernels: tuple[float, ...] = ()  # true device times in microseconds
    syncs: int = 0
    captured: bool = False


def program(costs: TrueCosts, graph: ModelGraph, batch: int, runtime: str) -> tuple[Step, ...]:
    """A graph's forward pass in a runtime, the first step being the call itself."""
    if runtime == "eager":
        return Step((costs.forward_us,)), *(step(costs, op, batch, graph.precision) for op in graph.at(batch))
    runtime_costs = costs.runtimes.get(runtime)
    if runtime_costs is None:
        return Step((costs.forward_us,)), *_scheduled(costs, runtimes.get(runtime).lower(graph, batch), graph, batch)
    parts = [(op, _runtime_step(costs, runtime_costs, op, batch, graph.precision)) for op in graph.at(batch)]
    return Step((runtime_costs.call_us,)), *_captured(runtime_costs, parts, graph.model)


def step(costs: TrueCosts, op: Op, batch: int, precision: str) -> Step:
    """Host events, kernels and synchronisations of an eager op."""
    host = costs.calls_us(op.calls)
    if not op.name.startswith(PYTHON):
        host.append(costs.dispatch(op.host_class))
    return Step(tuple(us for us in host if us), _kernels(costs, op, batch, precision), op.syncs)


def _captured(costs: RuntimeCosts, parts: Sequence[tuple[Op, Step]], model: str) -> Iterator[Step]:
    """Steps with what can be captured made one of them wherever nothing else lies between."""
    if costs.replay_us is None:
        yield from (part for _, part in parts)
        return
    if not costs.between and any(part.syncs for _, part in parts):
        raise RuntimeRefusalError(
            f"a host synchronisation of {model} cannot be captured into a graph. Ask for runtime='eager'."
        )
    for inside, group in groupby(parts, key=lambda part: part[0].host_class.startswith(costs.between)):
        members = [part for _, part in group]
        if inside:
            yield Step((costs.replay_us,), tuple(chain.from_iterable(part.kernels for part in members)), 0, True)
        else:
            yield from members


def _runtime_step(costs: TrueCosts, runtime_costs: RuntimeCosts, op: Op, batch: int, precision: str) -> Step:
    host = () if op.name.startswith(PYTHON) else (runtime_costs.dispatch(op.host_class),)
    factor = runtime_costs.factor(op.family)
    return Step(host, tuple(us * factor for us in _kernels(costs, op, batch, precision)), op.syncs)


def _kernels(costs: TrueCosts, op: Op, batch: int, precision: str) -> tuple[float, ...]:
    share = 1 / op.launches if op.launches else 0.0
    return (costs.kernel_us(op.family, _op_work(op, batch), _format(op, precision), share),) * op.launches


def _format(op: Op, precision: str) -> str:
    """What an op computes in: under autocast some do in single precision."""
    return "fp32" if precision in AMP and op.dtype == "float32" else precision


def _scheduled(costs: TrueCosts, schedule: Schedule, graph: ModelGraph, batch: int) -> Iterator[Step]:
    """What a runtime that nothing is known of hands over, at the costs of eager ops."""
    kernels: list[list[float]] = [[] for _ in schedule.host_class]
    for index, op_index, family, share in zip(
        schedule.kernel_step, schedule.kernel_op, schedule.kernel_family, schedule.kernel_share, strict=True
    ):
        op = schedule.ops[int(op_index)]
        us = costs.kernel_us(family, _op_work(op, batch), _format(op, graph.precision), float(share))
        kernels[int(index)].append(us)
    for index, name in enumerate(schedule.host_class):
        host_us = *costs.calls_us(Calls(*schedule.calls[index].tolist())), costs.dispatch(name)
        yield Step(tuple(us for us in host_us if us), tuple(kernels[index]), int(schedule.sync[index]))
