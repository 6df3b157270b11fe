"""Generated ONNX graphs: chains of the nodes that exported networks are made of, at random sizes.

An export takes seconds and a graph written down takes milliseconds, so kernels are learned from these: each is a piece
of a network, whose nodes find their operands where a network leaves them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from latpred.calibration.cells import log_uniform

OPSET = 20
# Of what a kind and a seed mean, and of the order of a row's nodes; a journal of another version is not resumed.
VERSION = 8
# Drawn for each graph, so that there are many small ones and some large ones.
_ELEMENTS = (1 << 14, 1 << 22)  # of the largest activation
_MACS = (20_000_000, 6_000_000_000)  # of a layer of tokens
_LATE_MACS = (4_000_000, 400_000_000)  # of a convolution on small maps
_RECURRENT_MACS = (4_000_000, 400_000_000)  # of a recurrent layer
_GELU = ("Gelu", "Gelu", "tanh", "Relu", "Silu")
_ACTIVATIONS = ("Relu", "Relu", "Sigmoid", "HardSwish", "Clip", "Silu")
_UNARY = (
    *("Abs", "Neg", "Exp", "Sqrt", "Reciprocal", "Erf", "Tanh", "Sigmoid", "Relu", "Softplus", "Gelu", "Log"),
    *("HardSwish", "Cos", "Sin", "Floor", "LeakyRelu", "Elu", "Elu", "Selu", "HardSigmoid", "Softsign"),
)
_BINARY = ("Add", "Sub", "Mul", "Div", "Max", "Min")


class Graph:
    """A graph under construction: one input, nodes that follow each other, weights."""

    def __init__(self, rng: Draw, shape: tuple[int, ...], dtype: str = "float32") -> None:
        self.rng = rng
        self.input = ("x", shape, dtype)
        self.open_batch = False  # as an exporter leaves it; then fewer shapes are known, and fewer nodes fused
        self._nodes: list[Any] = []
        self._weights: dict[str, np.ndarray[Any, Any]] = {}
        self._draw = np.random.default_rng(rng.randrange(1 << 30))

    def weight(self, *shape: int, scale: float | None = None) -> str:
        """A random weight, of a size that keeps activations at theirs."""
        spread = (1.0 / max(1, prod(shape[1:]))) ** 0.5 if scale is None else scale
        return self.constant(self._draw.standard_normal(shape, dtype=np.float32) * np.float32(spread), np.float32)

    def constant(self, values: Any, dtype: Any = np.int64) -> str:
        name = f"w{len(self._weights)}"
        self._weights[name] = np.asarray(values, dtype=dtype)
        return name

    def scalar(self, value: float) -> str:
        return self.constant(value, np.float32)

    def add(self, op_type: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        """Append a node; gives the name of its (last) output."""
        from onnx import helper

        name = f"n{len(self._nodes)}"
        results = [f"{name}_{index}" for index in range(outputs)]
        self._nodes.append(helper.make_node(op_type, list(inputs), results, name=name, **attributes))
        return results[-1]

    def model(self, *results: str) -> bytes:
        from onnx import TensorProto, helper, numpy_helper

        name, shape, dtype = self.input
        kind = TensorProto.FLOAT if dtype == "float32" else TensorProto.INT64
        made = helper.make_graph(
            self._nodes,
            "generated",
            [helper.make_tensor_value_info(name, kind, ["batch" if self.open_batch else shape[0], *shape[1:]])],
            [helper.make_tensor_value_info(result, TensorProto.FLOAT, None) for result in results],
            [numpy_helper.from_array(values, key) for key, values in self._weights.items()],
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
        return bytes(helper.make_model(made, opset_imports=opsets, ir_version=9).SerializeToString())


class Draw(random.Random):
    """Draws sizes; those of a `tiny` graph are the smallest there are, so that its nodes have next to nothing to do."""

    tiny = False

    def between(self, low: int, high: int, step: int = 1) -> int:
        """A whole number, as likely between 10 and 20 as between 100 and 200."""
        return max(step, round(low / step) * step) if self.tiny else log_uniform(self, low, high, step)

    def one_of(self, sizes: Sequence[int]) -> int:
        """One of several sizes."""
        return min(sizes) if self.tiny else self.choice(sizes)

    def batch(self) -> int:
        return self.one_of((1, 1, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32))

    def room(self) -> int:
        """Elements of the largest activation."""
        return self.between(*_ELEMENTS)

    def side(self) -> int:
        """Pixels of an image."""
        return self.one_of((8, 32, 48, 64, 96, 112, 128, 160, 192, 224))


def _halved(number: int, work: int, most: int, over: int = 1) -> int:
    """A number of samples or rows, halved until their work is no more than the most."""
    while number > 1 and number * work // over > most:
        number //= 2
    return number


def make(kind: str, seed: int, *, tiny: bool = False) -> tuple[bytes, dict[str, Any]]:
    rng = Draw(f"{kind}/{seed}")
    rng.tiny = tiny
    graph, result = _MAKERS[kind](rng)
    _, shape, dtype = graph.input
    draw = np.random.default_rng(seed)
    values = draw.random(shape, dtype=np.float32) if dtype == "float32" else draw.integers(0, 1000, shape)
    return graph.model(result), {"x": values}


# -- layers --------------------------------------------------------------------------------------------------------


def _linear(graph: Graph, x: str, width: int, out: int, bias: bool = True) -> str:
    y = graph.add("MatMul", x, graph.weight(width, out, scale=width**-0.5))
    return graph.add("Add", y, graph.weight(out, scale=0.1)) if bias else y


def _normed(graph: Graph, x: str, width: int) -> str:
    return graph.add(
        "LayerNormalization", x, graph.weight(width, scale=1.0), graph.weight(width, scale=0.1), axis=-1, epsilon=1e-5
    )


def _activated(graph: Graph, x: str, kinds: Sequence[str]) -> str:
    """One of several activations, as exporters write it."""
    kind = graph.rng.choice(kinds)
    if kind == "Silu":
        return graph.add("Mul", x, graph.add("Sigmoid", x))
    if kind == "Clip":
        return graph.add("Clip", x, graph.scalar(0.0), graph.scalar(6.0))
    return graph.add("Gelu", x, approximate="tanh") if kind == "tanh" else graph.add(kind, x)


def _conv(
    graph: Graph, x: str, width: int, out: int, side: int, stride: int, *, groups: int = 1, active: bool = False
) -> str:
    """A convolution on a map, with as many pixels as before or, where its stride is its side, as it has windows."""
    y = _convolution(graph, x, (out, width, side, side), stride, side // 2 if stride < side else 0, group=groups)
    return _activated(graph, y, _ACTIVATIONS) if active else y


def _convolution(graph: Graph, x: str, sizes: tuple[int, ...], stride: int, pad: int, **group: int) -> str:
    (out, width, *window), groups = sizes, group.get("group", 1)
    weights = graph.weight(out, width // groups, *window), graph.weight(out, scale=0.1)
    strides, pads = (stride,) * len(window), (pad,) * 2 * len(window)
    return graph.add("Conv", x, *weights, strides=strides, pads=pads, kernel_shape=tuple(window), **group)


def _pooled(graph: Graph, x: str, side: int, stride: int) -> str:
    """The greatest or the mean of windows."""
    pads = (side // 2,) * 4 if side % 2 else (0,) * 4
    # As PyTorch's exporter writes them.
    kind, how = graph.rng.choice((("MaxPool", {}), ("AveragePool", {"count_include_pad": 1})))
    return graph.add(kind, x, kernel_shape=(side, side), strides=(stride, stride), pads=pads, **how)


def _attended(graph: Graph, x: str, length: int, heads: int, head: int) -> str:
    """Attention as PyTorch's exporter writes it: scaled queries and keys, products with a transposed one, softmax."""
    width = heads * head
    parts = []
    for _ in ("query", "key", "value"):
        y = _linear(graph, x, width, width, bias=graph.rng.random() < 0.8)
        y = graph.add("Reshape", y, graph.constant([-1, length, heads, head]))
        parts.append(graph.add("Transpose", y, perm=(0, 2, 1, 3)))
    key = graph.add("Reshape", parts[1], graph.constant([-1, length, head]))
    key = graph.add("Transpose", key, perm=(0, 2, 1))
    parts[1] = graph.add("Reshape", key, graph.constant([-1, heads, head, length]))
    scale = graph.scalar(head**-0.25)
    query, key = (graph.add("Mul", part, scale) for part in parts[:2])
    scores = graph.add("MatMul", query, key)
    if graph.rng.random() < 0.4:
        scores = graph.add("Add", scores, graph.weight(1, 1, length, length, scale=1.0))
    y = graph.add("MatMul", graph.add("Softmax", scores, axis=-1), parts[2])
    y = graph.add("Transpose", y, perm=(0, 2, 1, 3))
    y = graph.add("Reshape", y, graph.constant([-1, length, width]))
    return _linear(graph, y, width, width)


def _squeezed(graph: Graph, x: str, width: int) -> str:
    """Channels weighted by what is in them."""
    narrow = max(8, width // 4)
    pool = graph.rng.choice(("GlobalAveragePool", "ReduceMean"))
    y = graph.add(pool, x) if pool == "GlobalAveragePool" else graph.add(pool, x, graph.constant([2, 3]))
    y = graph.add("Relu", _conv(graph, y, width, narrow, 1, 1))
    return graph.add("Mul", x, graph.add("Sigmoid", _conv(graph, y, narrow, width, 1, 1)))


def _classified(graph: Graph, x: str, width: int) -> str:
    x = graph.add("Flatten", graph.add("GlobalAveragePool", x), axis=1)
    classes = graph.rng.one_of((10, 100, 1000))
    return graph.add("Gemm", x, graph.weight(width, classes), graph.weight(classes, scale=0.1))


def _residual(graph: Graph, x: str, width: int, wider: int, stride: int) -> str:
    """A block of one of the styles that networks of images have."""
    style = graph.rng.choice(("basic", "bottleneck", "grouped", "plain", "concatenated"))
    narrow = max(8, wider // 4)
    if style == "plain":
        return _conv(graph, x, width, wider, graph.rng.choice((3, 3, 5)), stride, active=True)
    if style == "concatenated":
        x = _conv(graph, x, width, wider, 1, stride, active=True)
        y = _conv(graph, x, wider, wider, 3, 1, active=True)
        return _conv(graph, graph.add("Concat", x, y, axis=1), 2 * wider, wider, 1, 1, active=True)
    if style == "basic":
        y = _conv(graph, x, width, wider, 3, stride, active=True)
        y = _conv(graph, y, wider, wider, 3, 1)
    else:
        groups = graph.rng.choice([g for g in (2, 4, 8) if narrow % g == 0] or [1]) if style == "grouped" else 1
        y = _conv(graph, x, width, narrow, 1, 1, active=True)
        y = _conv(graph, y, narrow, narrow, 3, stride, groups=groups, active=True)
        y = _conv(graph, y, narrow, wider, 1, 1)
    if stride > 1 or width != wider:
        x = _conv(graph, x, width, wider, 1, stride)
    return graph.add("Relu", graph.add("Add", x, y))


# -- kinds of graphs -----------------------------------------------------------------------------------------------


def _images(rng: Draw) -> tuple[Graph, str]:
    size, batch = rng.side(), rng.batch()
    width = rng.between(16, 128, rng.choice((8, 8, 8, 4)))
    side, stride = rng.choice(((3, 1), (3, 2), (7, 2), (4, 4), (8, 8)))
    graph = Graph(rng, (_halved(batch, width * size * size, rng.room(), stride**2), 3, size, size))
    x = _conv(graph, "x", 3, width, side, stride, active=True)
    size //= stride
    if size >= 32:
        x, size = _pooled(graph, x, rng.choice((2, 3)), 2), size // 2
    for stage in range(rng.choice((2, 3))):
        wider = width * (2 if stage else 1)
        x = _residual(graph, x, width, wider, 2 if stage and size > 7 else 1)
        width = wider
    return graph, _classified(graph, x, width)


def _mobile(rng: Draw) -> tuple[Graph, str]:
    size, batch = rng.side(), rng.batch()
    width = rng.between(8, 96, rng.choice((1, 8)))  # what is no multiple of 8 is not laid out in blocks
    graph = Graph(rng, (_halved(batch, width * size * size, rng.room()), 3, size, size))
    x = _conv(graph, "x", 3, width, 3, 2, active=True)
    side, squeezes, size = rng.choice((3, 3, 5, 7)), rng.random() < 0.5, size // 2
    for _ in range(rng.choice((2, 3))):
        stride, wider = (rng.choice((1, 2)) if size > 7 else 1), width + rng.choice((0, 8, 16))
        inner = width * rng.choice((1, 3, 4, 6))
        y = _conv(graph, x, width, inner, 1, 1, active=True)
        y = _conv(graph, y, inner, inner, side, stride, groups=inner, active=True)
        y = _squeezed(graph, y, inner) if squeezes else y
        y = _conv(graph, y, inner, wider, 1, 1)
        x = graph.add("Add", x, y) if stride == 1 and wider == width else y
        width, size = wider, size // stride
    return graph, _classified(graph, x, width)


def _late(rng: Draw) -> tuple[Graph, str]:
    """Blocks as networks of images end in: many channels on small maps."""
    size, batch = rng.one_of((1, 2, 3, 4, 4, 5, 6, 7, 8, 10, 12, 14, 16)), rng.batch()
    wide, narrow = rng.between(64, 1536, 8), rng.between(16, 384, 8)
    style, most = rng.choice(("bottleneck", "inverted", "plain")), rng.between(*_LATE_MACS)
    batch = _halved(batch, narrow * (9 * narrow if style == "plain" else wide) * size**2, most)
    width = wide if style == "bottleneck" else narrow
    graph, x = Graph(rng, (batch, width, size, size)), "x"
    for _ in range(rng.choice((2, 3))):
        if style == "plain":
            y = _conv(graph, x, narrow, narrow, 3, 1, active=True)
        elif style == "bottleneck":
            y = _conv(graph, x, wide, narrow, 1, 1, active=True)
            groups = rng.choice([g for g in (1, 1, 2, 4, 8, 16) if narrow % (8 * g) == 0])
            y = _conv(graph, y, narrow, narrow, 3, 1, groups=groups, active=True)
            y = _conv(graph, y, narrow, wide, 1, 1)
        else:
            y = _conv(graph, x, narrow, wide, 1, 1, active=True)
            y = _conv(graph, y, wide, wide, rng.choice((3, 5)), 1, groups=wide, active=True)
            y = _squeezed(graph, y, wide) if rng.random() < 0.5 else y
            y = _conv(graph, y, wide, narrow, 1, 1)
        x = graph.add("Add", x, y)
        x = _pooled(graph, x, 3, 1) if rng.random() < 0.2 else x
    return graph, _classified(graph, x, width)


def _grouped(rng: Draw) -> tuple[Graph, str]:
    """Convolutions over tokens, one wide, some of them in groups, as some encoders have in place of products."""
    groups, batch = rng.choice((1, 2, 4, 4, 8)), rng.batch()
    width, length = groups * rng.between(16, 256, 8), rng.between(4, 256)
    batch = _halved(batch, length * 4 * width**2, rng.between(*_LATE_MACS), groups)
    graph, x = Graph(rng, (batch, width, length)), "x"
    for _ in range(rng.choice((1, 2))):
        y = _activated(graph, _convolution(graph, x, (4 * width, width, 1), 1, 0, group=groups), _GELU)
        x = graph.add("Add", x, _convolution(graph, y, (width, 4 * width, 1), 1, 0, group=groups))
        y = _normed(graph, graph.add("Transpose", x, perm=(0, 2, 1)), width)
        x = _convolution(graph, graph.add("Transpose", y, perm=(0, 2, 1)), (width, width, 1), 1, 0, group=groups)
    return graph, x


def _sound(rng: Draw) -> tuple[Graph, str]:
    """Convolutions along time, which onnxruntime does not lay out in blocks."""
    width, length = rng.between(16, 384, 16), rng.between(400, 16000)
    graph = Graph(rng, (_halved(rng.batch(), width * length, rng.room(), 5), 1, length))
    x, before = "x", 1
    for side, stride in ((10, 5), (3, 2), (3, 2), (2, 2)):
        x = _activated(graph, _convolution(graph, x, (width, before, side), stride, 0), _GELU)
        before = width
    x = _normed(graph, graph.add("Transpose", x, perm=(0, 2, 1)), width)
    x = graph.add("Transpose", _linear(graph, x, width, width), perm=(0, 2, 1))
    return graph, _convolution(graph, x, (width, width, 9), 1, 4, group=rng.choice((4, 8, 16)))


def _tokens(rng: Draw) -> tuple[Graph, str]:
    head, heads = rng.one_of((16, 24, 32, 32, 48, 64, 64, 96, 128)), rng.between(1, 12)
    width, batch = head * heads, rng.batch()
    length = rng.between(4, 256)
    most_macs = rng.between(*_MACS)
    batch = _halved(_halved(batch, length * 4 * width, _ELEMENTS[1]), length * 12 * width**2, most_macs)
    length = max(4, min(length, most_macs // (12 * width**2)))
    inner = rng.choice((2, 3, 4, 4)) * width
    graph = Graph(rng, (batch, length), "int64")
    graph.open_batch = rng.random() < 0.5
    x = graph.add("Gather", graph.weight(1000, width, scale=1.0), "x")
    x = _normed(graph, x, width)
    for _ in range(rng.choice((1, 1, 2))):
        x = _normed(graph, graph.add("Add", x, _attended(graph, x, length, heads, head)), width)
        y = _activated(graph, _linear(graph, x, width, inner), _GELU)
        x = _normed(graph, graph.add("Add", x, _linear(graph, y, inner, width)), width)
    first = graph.add("Gather", x, graph.constant(0), axis=1)
    return graph, graph.add("Gemm", first, graph.weight(width, width), graph.weight(width, scale=0.1))


def _elements(rng: Draw) -> tuple[Graph, str]:
    """Elementwise nodes, reductions, normalisations and softmax over rows."""
    rows, cols = rng.between(1, 16384), rng.between(8, 4096, 4)
    graph, x = Graph(rng, (_halved(rows, cols, rng.room()), cols)), "x"
    add, row = graph.add, graph.constant([-1])

    def rms(x: str) -> str:
        squares = add("ReduceMean", add("Pow", x, graph.scalar(2.0)), row, keepdims=1)
        return add("Mul", x, add("Reciprocal", add("Sqrt", squares)))

    def reduced(x: str) -> str:
        return add("Sub", x, add(rng.choice(("ReduceMean", "ReduceSum", "ReduceMax")), x, row, keepdims=1))

    def sloped(x: str) -> str:
        # It branches at every value: where signs are mixed, as in networks, it takes ten times as long as else.
        return add("Add", x, add("PRelu", add("Sub", "x", graph.scalar(0.5)), graph.weight(1, scale=0.1)))

    steps: dict[str, Callable[[str], str]] = {
        # Kept positive, so that roots and logarithms stay numbers.
        "unary": lambda x: add(rng.choice(_UNARY), add("Abs", x) if rng.random() < 0.5 else x),
        "scalar": lambda x: add(rng.choice((*_BINARY, "Pow")), x, graph.scalar(2.0)),
        "binary": lambda x: add(rng.choice(_BINARY), x, add(rng.choice(_UNARY[:8]), x)),
        "slope": sloped,
        "vector": lambda x: add(rng.choice(_BINARY[:3]), x, graph.weight(cols, scale=1.0)),
        "norm": lambda x: _normed(graph, x, cols),
        "softmax": lambda x: add("Softmax", x, axis=-1),
        "reduce": reduced,
        "where": lambda x: add("Where", add("Greater", x, graph.scalar(0.5)), x, add("Neg", x)),
        "rms": rms,
    }
    for _ in range(10):
        x = steps[rng.choice(("unary", "unary", "unary", *steps))](x)
    return graph, x


def _moves(rng: Draw) -> tuple[Graph, str]:
    """Nodes that only move elements: transposes, slices, splits, concatenations, gathers, pads, casts."""
    batch, rows, cols = rng.batch(), rng.between(4, 512, 4), rng.between(8, 1024, 8)
    batch = _halved(batch, rows * cols, rng.room())
    graph, x = Graph(rng, (batch, rows, cols)), "x"
    add, constant = graph.add, graph.constant
    for _ in range(8):
        kind = rng.choice(("swap", "heads", "split", "slice", "gather", "pad", "cast", "expand", "cumulate", "turn"))
        if kind == "swap":
            x, rows, cols = add("Transpose", x, perm=(0, 2, 1)), cols, rows
        elif kind == "turn":
            x, batch, cols = add("Transpose", x, perm=(2, 1, 0)), cols, batch
        elif kind == "heads":
            heads = rng.choice([h for h in (2, 4, 8) if cols % h == 0] or [1])
            y = add("Reshape", x, constant([batch, rows, heads, cols // heads]))
            y = add("Transpose", y, perm=(0, 2, 1, 3))
            x = add("Reshape", y, constant([batch, rows, cols]))
        elif kind == "split" and cols % 2 == 0:
            last = add("Split", x, outputs=2, axis=2, num_outputs=2)
            x = add("Concat", last, last.replace("_1", "_0"), axis=2)
        elif kind == "slice" and rows > 8:
            y = add("Slice", x, *[constant([value]) for value in (0, rows // 2, 1)])
            x, rows = add("Concat", y, y, axis=1), rows // 2 * 2
        elif kind == "gather":
            x = add("Gather", x, constant([rng.randrange(rows) for _ in range(rows)]), axis=1)
        elif kind == "pad":
            x, rows = add("Pad", x, constant([0, 1, 0, 0, 1, 0])), rows + 2
        elif kind == "cast":
            x = add("Cast", add("Cast", x, to=6), to=1)
        elif kind == "expand":
            y = add("ReduceMax", x, constant([1]), keepdims=1)
            x = add("Expand", y, constant([batch, rows, cols]))
        else:
            x = add("CumSum", x, constant(1))
    return graph, x


def _spectral(rng: Draw) -> tuple[Graph, str]:
    """Fourier transforms over features and tokens, of which the real part is kept."""
    batch, most = rng.batch(), rng.room() // 8  # transforms of lengths that are no power of two take long
    if rng.random() < 0.5:
        length, width = rng.one_of((4, 8, 16, 32, 64, 128, 256)), rng.one_of((16, 32, 64, 128, 256, 512, 1024))
    else:
        length, width = rng.between(4, 256), rng.between(16, 1024, rng.choice((8, 48, 64)))
    batch = _halved(batch, length * width, most)
    graph, x = Graph(rng, (batch, length, width)), "x"
    last = graph.constant([-1])
    imaginary = graph.constant(np.zeros((batch, length, width, 1)), np.float32)
    for _ in range(2):
        y = graph.add("Concat", graph.add("Unsqueeze", x, last), imaginary, axis=3)
        for axis in (2, 1):
            y = graph.add("DFT", y, "", graph.constant(axis))
        real = graph.add("Gather", y, graph.constant(0), axis=3)
        x = _normed(graph, graph.add("Add", x, real), width)
    return graph, x


def _recurrent(rng: Draw) -> tuple[Graph, str]:
    """Recurrent layers, each of a kind and a width of its own, in one direction or both."""
    steps, batch, entering = rng.between(2, 128), rng.batch(), rng.between(16, 512, 8)
    cells = [(rng.choice((("LSTM", 4), ("GRU", 3))), rng.choice((1, 1, 2)), rng.between(16, 512, 8)) for _ in range(3)]
    step_macs = max(directions * gates * 2 * width**2 for (_, gates), directions, width in cells)
    most = rng.between(*_RECURRENT_MACS)
    batch = _halved(batch, steps * step_macs, most)
    steps = _halved(steps, batch * step_macs, most)
    graph, x = Graph(rng, (steps, batch, entering)), "x"
    for (kind, gates), directions, width in cells:
        how: dict[str, Any] = {"linear_before_reset": 1} if kind == "GRU" else {}  # as PyTorch's is
        how |= {"direction": "bidirectional"} if directions == 2 else {}
        weights = [graph.weight(directions, gates * width, size, scale=0.1) for size in (entering, width)]
        bias = graph.weight(directions, 2 * gates * width, scale=0.1)
        y = graph.add(kind, x, *weights, bias, hidden_size=width, **how)
        y = graph.add("Transpose", y, perm=(0, 2, 1, 3))
        x, entering = graph.add("Reshape", y, graph.constant([0, 0, -1])), directions * width
    return graph, x


def _perceptron(rng: Draw) -> tuple[Graph, str]:
    """Layers of few rows, which read next to nothing but weights; those of a small network stay in the cache."""
    rows, width = rng.batch(), rng.between(16, 2048, 8)
    graph, x = Graph(rng, (rows, width)), "x"
    for _ in range(rng.choice((3, 4, 5))):
        entering, width = width, rng.between(16, 2048, 8)
        x = graph.add("Gemm", x, graph.weight(width, entering), graph.weight(width, scale=0.1), transB=1)
        x = _activated(graph, x, _GELU)
    return graph, x


KINDS = (
    *("tokens", "images", "late", "elements", "grouped", "mobile", "late", "tokens", "images", "sound", "tokens"),
    *("late", "recurrent", "perceptron", "moves", "spectral", "images", "grouped", "recurrent", "perceptron"),
)
_MADE = (_tokens, _images, _mobile, _late, _grouped, _sound, _elements, _moves, _spectral, _recurrent, _perceptron)
_MAKERS = {maker.__name__.removeprefix("_"): maker for maker in _MADE}
