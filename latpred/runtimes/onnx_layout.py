"""Channels in blocks: where onnxruntime lays them out so, shapes get back the channels that the model has.

On a CPU convolutions read and write channels in blocks as wide as a vector, 16 with AVX-512 and 8 without, and the last
block is filled up. What is filled up belongs to the machine and not to the model. Which nodes work on blocks is
onnxruntime's choice, and stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from latpred.runtimes.onnx_values import NCHWC, Value

_BLOCKED = re.compile(r"_nchwc(_token_\d+)?$")  # what follows, in the name of a node in blocks, its result's old name
_NORMALISED = "_bn"  # and comes before that where a normalisation became a convolution


class _Kernel(NamedTuple):
    """Weights of a convolution: their shape, and the number of groups."""

    shape: tuple[int, ...]
    groups: int


def in_blocks(proto: Any) -> bool:
    """Whether any node of a model works on blocks."""
    return any(node.domain == NCHWC for node in _nodes(proto.graph))


def unfilled(proto: Any, before: Any | None) -> Any:
    """A model with the weights of convolutions in the shapes, and groups, that they had before they lay in blocks."""
    if before is None:
        return proto
    kernels = _kernels(before.graph)
    shapes: dict[str, tuple[int, ...]] = {}
    changed = type(proto)()
    changed.CopyFrom(proto)
    for node in _nodes(changed.graph):
        kernel = kernels.get(_BLOCKED.sub("", node.name)) if (node.domain, node.op_type) == (NCHWC, "Conv") else None
        if kernel is None:
            continue
        shapes.update(zip(node.input[1:3], (kernel.shape, kernel.shape[:1]), strict=False))
        for attribute in node.attribute:
            if attribute.name == "group":
                attribute.i = kernel.groups
    for graph in _graphs(changed.graph):
        for tensor in graph.initializer:
            if tensor.name in shapes:
                tensor.dims[:] = shapes[tensor.name]
    return changed


class Blocks:
    """Tensors of one run that lie in blocks.

    Examples
    --------
    >>> from onnx import helper
    >>> blocks, x = Blocks(), Value((1, 20, 7, 7), "float")
    >>> node = helper.make_node("ReorderInput", ["x"], ["y"], domain=NCHWC)
    >>> (y,) = blocks.own(node, [x], [Value((1, 32, 7, 7), "float")])
    >>> y.shape
    (1, 20, 7, 7)
    >>> blocks.own(helper.make_node("Relu", ["y"], ["z"]), [y], [Value((1, 32, 7, 7), "float")]) == [y]
    True
    """

    def __init__(self) -> None:
        self._names: set[str] = set()

    def own(self, node: Any, inputs: Sequence[Value | None], outputs: Sequence[Value]) -> list[Value]:
        """Results of a node, with as many channels as the model has; nodes are given in the order of execution.

        Parameters
        ----------
        node : NodeProto
            With the weights that `unfilled` gives.
        inputs, outputs : sequence of Value
            Inputs as this gave them, outputs as they were executed.
        """
        read = [value for name, value in zip(node.input, inputs, strict=True) if name in self._names]
        if node.op_type == "ReorderOutput" or not (read or node.domain == NCHWC):
            return list(outputs)
        self._names.update(name for name in node.output if name)
        channels = _channels(node, inputs, read)
        # A block may be a dimension of its own, the last of five.
        return [
            value if channels is None else value._replace(shape=(value.shape[0], channels, *value.shape[2:4]))
            for value in outputs
        ]


def _channels(node: Any, inputs: Sequence[Value | None], read: Sequence[Value | None]) -> int | None:
    """Channels of what a node writes in blocks; `read` is what it reads in blocks. None where nothing tells."""
    if node.op_type == "Concat":
        return sum(value.shape[1] for value in read if value is not None)
    source = inputs[1 if node.op_type == "Conv" else 0]
    if source is None:
        return None
    if node.op_type == "Conv":
        return source.shape[0]
    last = node.op_type == "ReorderInput" and _number(node, "channels_last", 0)
    return source.shape[-1 if last else 1]


def _kernels(graph: Any) -> dict[str, _Kernel]:
    """Convolutions, and normalisations that may become some, by the name of their result."""
    shapes = {tensor.name: tuple(tensor.dims) for one in _graphs(graph) for tensor in one.initializer}
    found = {}
    for node in _nodes(graph):
        shape = shapes.get(node.input[1]) if len(node.input) > 1 else None
        if shape and node.op_type in ("Conv", "FusedConv"):
            found[node.output[0]] = _Kernel(shape, _number(node, "group", 1))
        elif shape and node.op_type == "BatchNormalization":
            found[node.output[0] + _NORMALISED] = _Kernel((shape[0], 1, 1, 1), shape[0])
    return found


def _graphs(graph: Any) -> Iterator[Any]:
    """A graph and those within it."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _graphs(attribute.g)


def _nodes(graph: Any) -> Iterator[Any]:
    return (node for one in _graphs(graph) for node in one.node)


def _number(node: Any, name: str, default: int) -> int:
    return next((int(one.i) for one in node.attribute if one.name == name), default)
