"""From what onnxruntime executed at batches 1, 2 and 3 to ops whose every count is affine in batch.

The nodes and the shapes of their results come from onnxruntime's profile, attributes and weights from the graph it
saved after optimising. What a node does is `onnx_nodes`' business, how many channels blocks hold `onnx_layout`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from latpred.errors import RuntimeRefusalError
from latpred.graph.graph import Affine, Op
from latpred.ops.registry import Work
from latpred.runtimes.base import ExecutedOp, is_affine, line, op_through, ops_exactly
from latpred.runtimes.onnx.onnx_formulas import CONTROL, HOST, TRANSFERS, VIEWS, Node, Value, class_of, work_of
from latpred.runtimes.onnx.onnx_session import Blocks, Event, Watched, unfilled

BATCHES = (1, 2, 3)
_DTYPES = {"float": "float32", "double": "float64"}
_TO_ONNX = {"float32": "float", "float64": "double"}
_INTEGERS = frozenset({"int64", "int32", "bool", "int8", "uint8", "int16", "uint16", "uint32", "uint64"})


class TracedOnnx(NamedTuple):
    """Ops for batches from 2 on, those of batch 1 where they differ, bytes of the inputs and of the weights."""

    ops: tuple[Op, ...]
    ops_at_one: tuple[Op, ...] | None
    input_bytes: Affine
    weight_bytes: int


@dataclass
class Topology:
    """The optimised graph by name: its nodes, those of the graphs within them, and their weights."""

    nodes: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Value] = field(default_factory=dict)
    outputs: frozenset[str] = frozenset()
    on_host: frozenset[str] = frozenset()

    @classmethod
    def of(cls, proto: Any, target: str, cast: Mapping[str, str]) -> Topology:
        """Read a model; `cast` renames dtypes, for a precision that the model was not exported in."""
        found = cls(outputs=frozenset(value.name for value in proto.graph.output))
        found._add(proto.graph, cast)
        if target == "cuda":
            found.on_host = _on_host(proto.graph)
        return found

    def _add(self, graph: Any, cast: Mapping[str, str]) -> None:
        import onnx

        for tensor in graph.initializer:
            name = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).name
            dtype = _TO_ONNX.get(name, name)
            scalar = int(onnx.numpy_helper.to_array(tensor)) if dtype == "int64" and not tensor.dims else None
            self.weights[tensor.name] = Value(tuple(tensor.dims), cast.get(dtype, dtype), True, scalar)
        for node in graph.node:
            self.nodes[node.name] = node
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    self._add(attribute.g, cast)


def walked(
    watched: Watched, feeds: Sequence[Mapping[str, Any]], target: str, *, cast: Mapping[str, str] | None = None
) -> TracedOnnx:
    """What was executed, as ops.

    Parameters
    ----------
    watched : Watched
        Runs at `BATCHES`, or at the one batch that a model takes.
    feeds : sequence of mappings
        The inputs of each run.
    target : str
        "cuda" leaves to the host what onnxruntime computes there: shapes and what is made of them.
    cast : mapping, optional
        Renames of dtypes, for a precision that the model was not exported in.

    Raises
    ------
    RuntimeRefusalError
        When other nodes run at batch 3 than at batch 2.
    """
    renamed = dict(cast or {})
    topology = Topology.of(unfilled(watched.proto, watched.before), target, renamed)
    inputs = [{name: _fed(array, renamed) for name, array in feed.items()} for feed in feeds]
    passes = [steps(topology, run, given, renamed) for run, given in zip(watched.runs, inputs, strict=True)]
    sizes = [sum(value.nbytes for value in given.values()) for given in inputs]
    held = sum(value.nbytes for value in topology.weights.values())
    if len(passes) == 1:
        return TracedOnnx(ops_exactly(passes[0]), None, Affine(sizes[0]), held)
    one, two, three = passes
    differing = next((step for step, other in zip(two, three, strict=False) if step.kind != other.kind), None)
    if differing is not None or len(two) != len(three):
        name = (differing or two[-1]).name
        raise RuntimeRefusalError(f"onnxruntime runs other nodes at batch 2 and 3, first at {name}")
    ops = tuple(op_through(a, b) for a, b in zip(two, three, strict=True))
    return TracedOnnx(ops, None if is_affine(ops, one) else ops_exactly(one), line(sizes[1], sizes[2]), held)


def steps(
    topology: Topology, run: Iterable[Event], feed: Mapping[str, Value], cast: Mapping[str, str]
) -> list[ExecutedOp]:
    """Executed nodes with what each of them does."""
    events = list(run)
    values: dict[str, Value] = {**topology.weights, **feed}
    alive, blocks = _Alive(topology, events, feed), Blocks()
    found = []
    for index, event in enumerate(events):
        proto = topology.nodes.get(event.name)
        names = [name for name in proto.output if name] if proto is not None else []
        inputs = [values.get(name) if name else None for name in proto.input] if proto is not None else []
        outputs = [Value(shape, cast.get(dtype, dtype)) for dtype, shape in event.outputs]
        outputs = blocks.own(proto, inputs, outputs) if proto is not None else outputs
        values.update(zip(names, outputs, strict=False))
        live = alive.after(index, names, outputs)
        found.append(_step(event, proto, inputs, outputs, topology, live))
    return found


def _step(
    event: Event, proto: Any, inputs: Sequence[Value | None], outputs: Sequence[Value], topology: Topology, live: int
) -> ExecutedOp:
    quiet = _quiet(event, proto, topology)
    name = f"ort::{event.op_type}"
    if quiet:
        syncs = int(event.op_type == "MemcpyToHost")
        return ExecutedOp(name, f"node.{quiet}.{event.op_type}", "", "", (), (0, 0, 0, 0, live), 0, syncs, False)
    node = Node(event.op_type, proto.domain, attributes(proto)) if proto is not None else Node(event.op_type, "", {})
    work = work_of(node, inputs, outputs)
    estimated = work is None
    if work is None:
        work = Work("other", {"numel": max((value.numel for value in outputs), default=0)})
    weight, read = _reads(work, inputs)
    written = work.writes if work.writes is not None else sum(value.nbytes for value in outputs)
    counts = (work.macs, weight, read, written, live, *work.dims.values())
    dtype = _computed_in(inputs, outputs)
    host_class = class_of(work.family, event.op_type)
    return ExecutedOp(name, host_class, work.family, dtype, tuple(work.dims), counts, work.launches, 0, estimated)


def _quiet(event: Event, proto: Any, topology: Topology) -> str:
    """Which kind of node that launches nothing it is; "" for all others."""
    if event.op_type in CONTROL:
        return "control"
    if event.op_type in TRANSFERS:
        return "transfer"
    if event.op_type in HOST:
        return "shape"
    names = proto.output if proto is not None else ()
    if topology.on_host and any(name in topology.on_host for name in names):
        return "host"
    # What is a result of the model has memory of its own: there even a change of shape is a copy.
    if event.op_type in VIEWS and not any(name in topology.outputs for name in names):
        return "view"
    return ""


def attributes(proto: Any) -> dict[str, Any]:
    """Attributes of a node that are numbers, texts or lists of numbers."""
    import onnx

    kinds = onnx.AttributeProto
    found: dict[str, Any] = {}
    for one in proto.attribute:
        if one.type == kinds.INT:
            found[one.name] = one.i
        elif one.type == kinds.INTS:
            found[one.name] = tuple(one.ints)
        elif one.type == kinds.STRING:
            found[one.name] = one.s.decode(errors="replace")
        elif one.type == kinds.FLOAT:
            found[one.name] = one.f
    return found


class _Alive:
    """Bytes of activations alive as the nodes run: views share the memory of what they look at."""

    def __init__(self, topology: Topology, events: Sequence[Event], feed: Mapping[str, Value]) -> None:
        self._roots: dict[str, str] = {}
        self._last: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self._dying: dict[int, list[str]] = {}
        self._now = sum(value.nbytes for value in feed.values())
        for index, event in enumerate(events):
            proto = topology.nodes.get(event.name)
            if proto is None:
                continue
            if event.op_type in VIEWS and _quiet(event, proto, topology):
                self._roots[proto.output[0]] = self._root(proto.input[0])
            for name in (*proto.input, *proto.output):
                self._last[self._root(name)] = index
        for name in topology.outputs:
            self._last[self._root(name)] = len(events)
        for name, index in self._last.items():
            self._dying.setdefault(index, []).append(name)

    def _root(self, name: str) -> str:
        return self._roots.get(name, name)

    def after(self, index: int, names: Sequence[str], outputs: Sequence[Value]) -> int:
        """Bytes alive just after a node, its inputs and outputs included."""
        for name, value in zip(names, outputs, strict=False):
            if self._root(name) == name and name not in self._sizes:
                self._sizes[name] = value.nbytes
                self._now += value.nbytes
        alive = self._now
        self._now -= sum(self._sizes.get(name, 0) for name in self._dying.get(index, ()))
        return alive


def _on_host(graph: Any) -> frozenset[str]:
    """Values that onnxruntime's CUDA provider leaves on the host: shapes, and whole numbers made of nothing else."""
    weights = {tensor.name for tensor in graph.initializer}
    found: set[str] = set()
    for node in graph.node:
        given = [name for name in node.input if name and name not in weights]
        of_shapes = bool(given) and all(name in found for name in given)
        if node.op_type in HOST or (of_shapes and node.op_type not in ("ConstantOfShape", "Expand")):
            found.update(node.output)
    return frozenset(found)


def _fed(array: Any, cast: Mapping[str, str]) -> Value:
    name = str(array.dtype)
    dtype = _TO_ONNX.get(name, name)
    return Value(tuple(array.shape), cast.get(dtype, dtype))


def _reads(work: Work, inputs: Sequence[Value | None]) -> tuple[int, int]:
    """Bytes read of weights and of activations."""
    weight = read = 0
    for index, value in enumerate(inputs):
        if value is None:
            continue
        taken = work.reads.get(index, value.nbytes)
        weight += taken if value.weight else 0
        read += 0 if value.weight else taken
    return weight, read


def _computed_in(inputs: Sequence[Value | None], outputs: Sequence[Value]) -> str:
    """The first floating-point dtype among inputs and outputs, else the first there is."""
    dtypes = [value.dtype for value in (*inputs, *outputs) if value is not None]
    chosen = next((dtype for dtype in dtypes if dtype not in _INTEGERS), dtypes[0] if dtypes else "float")
    return _DTYPES.get(chosen, chosen)
