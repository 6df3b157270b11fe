"""From what onnxruntime executed to ops with counts: at one batch size, or affine in batch from batches 1, 2 and 3.

The nodes and the shapes of their results come from onnxruntime's profile, attributes and weights from the graph it
saved after optimising. What a node does is `onnx_formulas`' business. On a CPU channels may lie in blocks, the last of
which is filled up as far as its vectors are wide: here they are as many as the model has.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import prod
from typing import Any

import msgspec

from latpred.graph.graph import Affine, ModelGraph, Op
from latpred.ops.families import Work
from latpred.runtimes.base import ops_of, rereading
from latpred.runtimes.onnx.onnx_formulas import (
    CONTROL,
    HOST,
    NCHWC,
    OF_BYTES,
    TRANSFERS,
    VIEWS,
    Node,
    Value,
    class_of,
    work_of,
)
from latpred.runtimes.onnx.onnx_session import Event, Watched, graphs_within, installed, nodes_of, weights_of
from latpred.tracing.trace_pass import LEAST_WEIGHTS

_MOST_ON_HOST = 100  # elements of a weight that onnxruntime calls small
_NAMES = {"float": "float32", "double": "float64"}  # what onnxruntime calls otherwise
FLOAT = "float32"


class _OptimisedGraph:
    """The graph that onnxruntime made of a model: its nodes, those of the graphs within them, and weights, by name.

    single : the dtype of what is float32 in it, for a precision that the model was not exported in.
    """

    def __init__(self, watched: Watched, target: str, single: str) -> None:
        import onnx

        proto = _unfilled(watched.proto, watched.before)
        self._single, self._target = single, target
        self._nodes: dict[str, Any] = defaultdict(onnx.NodeProto)  # an empty one ran and is not in the graph
        self.weights: dict[str, Value] = {}
        self.parameter_bytes = 0
        self._outputs = frozenset(value.name for value in proto.graph.output)
        self._on_host = _on_host(proto.graph) if target == "cuda" else frozenset()
        unnamed: dict[str, deque[Any]] = defaultdict(deque)  # by type: bodies of functions, put in place of their nodes
        for graph in graphs_within(proto.graph):
            self._nodes |= {node.name: node for node in graph.node if node.name}
            for node in graph.node:
                if not node.name:
                    unnamed[node.op_type].append(node)
            own = self._weights(graph)
            self.weights = own | self.weights
            self.parameter_bytes += sum(value.nbytes for value in own.values())
        # The profiler names what has no name by a number that the graph does not hold. Both are in the same order.
        for event in chain.from_iterable(watched.runs):
            if event.name not in self._nodes and unnamed[event.op_type]:
                self._nodes[event.name] = unnamed[event.op_type].popleft()

    def _weights(self, graph: Any) -> dict[str, Value]:
        """The weights that a graph itself has."""
        import onnx

        numbers = [one for one in graph.initializer if one.data_type == onnx.TensorProto.INT64 and not one.dims]
        scalars = {one.name: int(onnx.numpy_helper.to_array(one)) for one in numbers}
        dtype_of = onnx.helper.tensor_dtype_to_np_dtype
        told = ((name, dtype_of(code).name, shape) for name, code, shape in weights_of(graph))
        return {name: self.value(dtype, shape, True, scalars.get(name)) for name, dtype, shape in told}

    def value(self, dtype: str, shape: Iterable[int], weight: bool = False, scalar: int | None = None) -> Value:
        """A tensor in the precision that it has in the model."""
        known = _NAMES.get(dtype, dtype)
        return Value(tuple(shape), self._single if known == FLOAT else known, weight, scalar)

    def fed(self, feed: Mapping[str, Any]) -> dict[str, Value]:
        """The inputs of one run."""
        return {name: self.value(str(array.dtype), array.shape) for name, array in feed.items()}

    def _inputs(self, event: Event, proto: Any, values: Mapping[str, Value]) -> list[Value | None]:
        """Inputs of a node, None under "", which stands for an absent one.

        What an iteration of a loop is given has no name that was met: the profile tells its shape.
        """
        told = deque(event.inputs)
        found: list[Value | None] = []
        for name in proto.input:
            value = values.get(name)
            if told and name and (value is None or value.shape == told[0][1]):
                dtype, shape = told.popleft()
                value = value or self.value(dtype, shape)
            found.append(value)
        return found

    def executed(self, events: Sequence[Event], feed: Mapping[str, Any]) -> tuple[Op, ...]:
        """The nodes of one run as ops."""
        values = self.weights | self.fed(feed)
        ops, results, read = [], [], []
        blocked: set[str] = set()
        for event in events:
            proto = self._nodes[event.name]
            inputs = self._inputs(event, proto, values)
            outputs = _in_model(blocked, proto, inputs, [self.value(*told) for told in event.outputs])
            results.append(dict(zip(filter(None, proto.output), outputs, strict=False)))
            values |= results[-1]
            ops.append(_op(event, proto, inputs, outputs, self.no_launch(event, proto)))
            read.append(self._read_by(ops[-1], proto))
        alive = self._alive(events, results, sum(value.nbytes for value in self.fed(feed).values()))
        living = [msgspec.structs.replace(op, live_bytes=Affine(size)) for op, size in zip(ops, alive, strict=True)]
        return rereading(living, read)

    def _read_by(self, op: Op, proto: Any) -> tuple[str, int] | None:
        """What tells a node's read of weights from others: the name of the largest; None of few.

        Nodes of one initializer read the same memory, packed or not. What GPUs keep of it nobody looked at.
        """
        size = op.weight_bytes.constant
        if self._target != "cpu" or size < LEAST_WEIGHTS:
            return None
        names = [name for name in proto.input if name in self.weights]
        return max(names, key=lambda name: self.weights[name].nbytes), size

    def no_launch(self, event: Event, proto: Any) -> str:
        """Which kind of node that launches nothing it is; "" for all others."""
        for kind, types in (("control", CONTROL), ("transfer", TRANSFERS), ("shape", HOST)):
            if event.op_type in types:
                return kind
        if not self._on_host.isdisjoint(proto.output):
            return "host"
        # What is a result of the model has memory of its own: there even a change of shape is a copy.
        return "view" if event.op_type in VIEWS and self._outputs.isdisjoint(proto.output) else ""

    def _alive(
        self, events: Sequence[Event], results: Sequence[Mapping[str, Value]], input_bytes: int
    ) -> Iterator[int]:
        """Bytes of activations just after each node, its inputs and outputs included; views share memory."""
        viewed: dict[str, str] = {}  # whose memory a view has, by its name
        last: dict[str, int] = {}
        for index, event in enumerate(events):
            proto = self._nodes[event.name]
            if proto.output and event.op_type in VIEWS and self.no_launch(event, proto):
                viewed[proto.output[0]] = viewed.get(proto.input[0], proto.input[0])
            last |= {viewed.get(name, name): index for name in (*proto.input, *proto.output)}
        last |= {viewed.get(name, name): len(events) for name in self._outputs}
        dying: dict[int, list[str]] = {}
        for name, index in last.items():
            dying.setdefault(index, []).append(name)
        sizes: dict[str, int] = {}
        now = input_bytes
        for index, made in enumerate(results):
            new = {name: value.nbytes for name, value in made.items() if name not in viewed and name not in sizes}
            sizes |= new
            now += sum(new.values())
            yield now
            now -= sum(sizes.get(name, 0) for name in dying.get(index, ()))


def executed(watched: Watched, feed: Mapping[str, Any]) -> tuple[Op, ...]:
    """What was executed on the CPU in the last run, whose inputs were `feed`."""
    return _OptimisedGraph(watched, "cpu", FLOAT).executed(watched.runs[-1], feed)


def graph_of(
    stub: ModelGraph,
    watched: Watched,
    feeds: Sequence[Mapping[str, Any]],
    target: str,
    single: str = FLOAT,
) -> ModelGraph:
    """A model's graph with what was executed of it: in runs at `BATCHES`, or at the one batch size that it takes."""
    optimised = _OptimisedGraph(watched, target, single)
    runs = [optimised.executed(run, feed) for run, feed in zip(watched.runs, feeds, strict=True)]
    sizes = [sum(value.nbytes for value in optimised.fed(feed).values()) for feed in feeds]
    ops, at_one, input_bytes = runs[0], None, Affine(sizes[0])
    if len(runs) > 1:
        ops, at_one = ops_of("onnxruntime", *runs)
        input_bytes = Affine.through((2, sizes[1]), (3, sizes[2]))
    return msgspec.structs.replace(
        stub,
        ops=ops,
        ops_at_one=at_one,
        input_bytes=input_bytes,
        parameter_bytes=optimised.parameter_bytes,
        stack={**stub.stack, **installed()},
        runtime="onnxruntime",
        target=target,
    )


def _op(event: Event, proto: Any, inputs: Sequence[Value | None], outputs: Sequence[Value], no_launch: str) -> Op:
    name = f"ort::{event.op_type}"
    if no_launch:
        syncs = int(event.op_type == "MemcpyToHost")
        return Op(name, "", f"node.{no_launch}.{event.op_type}", "", "", {}, syncs=syncs)
    known = work_of(Node(event.op_type, proto.domain, attributes(proto)), inputs, outputs)
    work = known or Work("other", {"numel": max((value.numel for value in outputs), default=0)})
    weight, read = _reads(work, inputs)
    written = work.writes if work.writes is not None else sum(value.nbytes for value in outputs)
    return Op(
        name=name,
        module="",
        host_class=class_of(work.family, event.op_type),
        family=work.family,
        dtype=_computed_in(inputs, outputs, ("int8", "uint8") if event.op_type in OF_BYTES else ("float", "bfloat")),
        dims={dim: Affine(size) for dim, size in work.dims.items()},
        macs=Affine(work.macs),
        weight_bytes=Affine(weight),
        read_bytes=Affine(read),
        write_bytes=Affine(written),
        launches=work.launches,
        estimated=known is None,
    )


def attributes(proto: Any) -> dict[str, Any]:
    """Attributes of a node that are numbers, texts or lists of numbers."""
    import onnx

    kinds = onnx.AttributeProto
    values = {}
    for one in proto.attribute:
        if one.type in (kinds.INT, kinds.INTS, kinds.STRING, kinds.FLOAT):
            value = onnx.helper.get_attribute_value(one)
            values[one.name] = value.decode(errors="replace") if isinstance(value, bytes) else value
    return values


def _on_host(graph: Any) -> frozenset[str]:
    """Values that onnxruntime's CUDA provider leaves on the host: shapes, and what it makes of them and few weights."""
    weights = {name for name, _, shape in weights_of(graph) if prod(shape) <= _MOST_ON_HOST}
    on_host: set[str] = set()
    for node in graph.node:
        given = [name for name in node.input if name and name not in weights]
        of_shapes = bool(given) and all(name in on_host for name in given)
        if node.op_type in HOST or (of_shapes and node.op_type not in ("ConstantOfShape", "Expand")):
            on_host.update(node.output)
    return frozenset(on_host)


def _reads(work: Work, inputs: Sequence[Value | None]) -> tuple[int, int]:
    """Bytes read of weights and of activations."""
    read = [0, 0]
    for index, value in enumerate(inputs):
        if value is not None:
            read[value.weight] += work.reads.get(index, value.nbytes)
    return read[True], read[False]


def _computed_in(inputs: Sequence[Value | None], outputs: Sequence[Value], preferred: tuple[str, ...]) -> str:
    """The first dtype of a preferred kind among inputs and outputs, else the first there is."""
    dtypes = [value.dtype for value in (*inputs, *outputs) if value is not None]
    return next((dtype for dtype in dtypes if dtype.startswith(preferred)), dtypes[0] if dtypes else FLOAT)


_BLOCKED = re.compile(r"_nchwc(_token_\d+)?$")  # what follows, in the name of a node in blocks, its result's old name
_NORMALISED = "_bn"  # and comes before that where a normalisation became a convolution


def _unfilled(proto: Any, before: Any | None) -> Any:
    """A model with the weights of convolutions in the shapes, and groups, that they had before they lay in blocks."""
    if before is None:
        return proto
    kernels = _kernels(before)
    changed = type(proto)()
    changed.CopyFrom(proto)
    for graph in graphs_within(changed.graph):  # in each of which onnxruntime calls what it lays out anew alike
        shapes: dict[str, tuple[int, ...]] = {}
        for node in graph.node:
            original = _BLOCKED.sub("", node.name)
            if (node.domain, node.op_type) != (NCHWC, "Conv") or original not in kernels:
                continue
            shape, groups = kernels[original]
            shapes.update(zip(node.input[1:3], (shape, shape[:1]), strict=False))
            for attribute in node.attribute:
                if attribute.name == "group":
                    attribute.i = groups
        for tensor in graph.initializer:
            if tensor.name in shapes:
                tensor.dims[:] = shapes[tensor.name]
    return changed


def _in_model(
    blocked: set[str], node: Any, inputs: Sequence[Value | None], outputs: Sequence[Value]
) -> Sequence[Value]:
    """Results of a node as the model has them, from those that were executed; nodes come in order of execution.

    `node` has the weights that `_unfilled` gives, `inputs` are as this gave them. `blocked` are the names of all values
    so far that lie in blocks; those of this node are added.
    """
    read = [value for name, value in zip(node.input, inputs, strict=True) if name in blocked]
    if node.op_type == "ReorderOutput" or not (read or node.domain == NCHWC):
        return outputs
    blocked.update(name for name in node.output if name)
    channels = _channels(node, inputs, read)
    if channels is None:
        return outputs
    # A block may be a dimension of its own, the last of five.
    return [replace(value, shape=(value.shape[0], channels, *value.shape[2:4])) for value in outputs]


def _channels(node: Any, inputs: Sequence[Value | None], read: Sequence[Value | None]) -> int | None:
    """Channels of what a node writes in blocks; `read` is what it reads in blocks. None where nothing tells."""
    if node.op_type == "Concat":
        return sum(value.shape[1] for value in read if value is not None)
    source = inputs[1 if node.op_type == "Conv" else 0]
    if source is None:
        return None
    if node.op_type == "Conv":
        return source.shape[0]
    last = node.op_type == "ReorderInput" and attributes(node).get("channels_last", 0)
    return source.shape[-1 if last else 1]


def _kernels(proto: Any) -> dict[str, tuple[tuple[int, ...], int]]:
    """Shape of the weights and groups of convolutions, and of normalisations that may become some, by result."""
    shapes = {name: shape for graph in graphs_within(proto.graph) for name, _, shape in weights_of(graph)}
    kernels = {}
    for node in nodes_of(proto):
        shape = shapes.get(node.input[1]) if len(node.input) > 1 else None
        if shape and node.op_type in ("Conv", "FusedConv"):
            kernels[node.output[0]] = shape, int(attributes(node).get("group", 1))
        elif shape and node.op_type == "BatchNormalization":
            kernels[node.output[0] + _NORMALISED] = (shape[0], 1, 1, 1), shape[0]
    return kernels


def bends(graph: ModelGraph) -> bool:
    """Whether the work is not affine in batch: where nodes are the same, nothing else makes other work of batch 1."""
    one = graph.ops_at_one or ()
    pairs = [*zip(graph.ops, one, strict=True)] if [op.name for op in graph.ops] == [op.name for op in one] else []
    return any(op.macs.at(1) != at.macs.at(1) or op.write_bytes.at(1) != at.write_bytes.at(1) for op, at in pairs)
