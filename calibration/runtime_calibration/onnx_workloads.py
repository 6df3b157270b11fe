"""Generated ONNX graphs: chains of the nodes that exported networks are made of, at random sizes.

An export takes seconds and a graph written down takes milliseconds, so kernels are learned from these: each is a piece
of a network, whose nodes find their operands where a network leaves them. Which nodes onnxruntime then runs is not
decided here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

OPSET = 20
_ELEMENTS = (1 << 14, 1 << 22)  # of the largest activation, drawn for each graph: many small graphs, some large ones


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
        return self.constant(self._draw.standard_normal(shape, dtype=np.float32) * np.float32(spread))

    def constant(self, values: Any, dtype: Any = None) -> str:
        """A constant array."""
        name = f"w{len(self._weights)}"
        self._weights[name] = np.asarray(values, dtype=dtype)
        return name

    def add(self, op_type: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        """Append a node; gives the name of its (last) output."""
        from onnx import helper

        name = f"n{len(self._nodes)}"
        results = [f"{name}_{index}" for index in range(outputs)]
        self._nodes.append(helper.make_node(op_type, list(inputs), results, name=name, **attributes))
        return results[-1]

    def model(self, *results: str) -> bytes:
        """The serialised model."""
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
        value: float = low if self.tiny else low * (high / low) ** self.random()
        return max(step, round(value / step) * step)

    def one_of(self, sizes: Sequence[int]) -> int:
        """One of several sizes."""
        return min(sizes) if self.tiny else self.choice(sizes)

    def batch(self) -> int:
        """A batch size."""
        return self.one_of((1, 1, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32))

    def room(self) -> int:
        """Elements of the largest activation."""
        return self.between(*_ELEMENTS)


def linear(graph: Graph, x: str, width: int, out: int, bias: bool = True) -> str:
    y = graph.add("MatMul", x, graph.weight(width, out, scale=width**-0.5))
    return graph.add("Add", y, graph.weight(out, scale=0.1)) if bias else y


def normed(graph: Graph, x: str, width: int) -> str:
    return graph.add(
        "LayerNormalization", x, graph.weight(width, scale=1.0), graph.weight(width, scale=0.1), axis=-1, epsilon=1e-5
    )


def gelu(graph: Graph, x: str) -> str:
    kind = graph.rng.choice(("Gelu", "Gelu", "tanh", "Relu", "Silu"))
    if kind == "tanh":
        return graph.add("Gelu", x, approximate="tanh")
    return graph.add("Mul", x, graph.add("Sigmoid", x)) if kind == "Silu" else graph.add(kind, x)


_ACTIVATIONS = ("Relu", "Relu", "Sigmoid", "HardSwish", "Clip", "Silu")
_LATE_MACS = (4_000_000, 400_000_000)  # of a convolution on small maps


def images(rng: Draw) -> tuple[Graph, str]:
    size, batch = rng.one_of((8, 32, 48, 64, 96, 112, 128, 160, 192, 224)), rng.batch()
    width = rng.between(16, 128, rng.choice((8, 8, 8, 4)))
    side, stride = rng.choice(((3, 1), (3, 2), (7, 2), (4, 4), (8, 8)))
    most = rng.room()
    while batch > 1 and batch * width * size * size // stride**2 > most:
        batch //= 2
    graph = Graph(rng, (batch, 3, size, size))
    x = _conv(graph, "x", 3, width, side, stride, activation=True)
    size //= stride
    if size >= 32:
        x, size = graph.add("MaxPool", x, kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1)), size // 2
    for stage in range(rng.choice((2, 3))):
        wider = width * (2 if stage else 1)
        x = _residual(graph, x, width, wider, 2 if stage and size > 7 else 1)
        width = wider
    return graph, _classified(graph, x, width)


def _residual(graph: Graph, x: str, width: int, wider: int, stride: int) -> str:
    style = graph.rng.choice(("basic", "bottleneck", "grouped", "plain", "concatenated"))
    narrow = max(8, wider // 4)
    if style == "plain":
        return _conv(graph, x, width, wider, graph.rng.choice((3, 3, 5)), stride, activation=True)
    if style == "concatenated":
        x = _conv(graph, x, width, wider, 1, stride, activation=True)
        y = _conv(graph, x, wider, wider, 3, 1, activation=True)
        y = graph.add("Concat", x, y, axis=1)
        return _conv(graph, y, 2 * wider, wider, 1, 1, activation=True)
    if style == "basic":
        y = _conv(graph, x, width, wider, 3, stride, activation=True)
        y = _conv(graph, y, wider, wider, 3, 1)
    else:
        groups = graph.rng.choice([g for g in (2, 4, 8) if narrow % g == 0] or [1]) if style == "grouped" else 1
        y = _conv(graph, x, width, narrow, 1, 1, activation=True)
        y = _conv(graph, y, narrow, narrow, 3, stride, groups=groups, activation=True)
        y = _conv(graph, y, narrow, wider, 1, 1)
    if stride > 1 or width != wider:
        x = _conv(graph, x, width, wider, 1, stride)
    return graph.add("Relu", graph.add("Add", x, y))


def mobile(rng: Draw) -> tuple[Graph, str]:
    size, batch = rng.one_of((8, 32, 48, 64, 96, 112, 128, 160, 192, 224)), rng.batch()
    width = rng.between(8, 96, 8)
    most = rng.room()
    while batch > 1 and batch * 4 * width * size * size // 4 > most:
        batch //= 2
    graph = Graph(rng, (batch, 3, size, size))
    x = _conv(graph, "x", 3, width, 3, 2, activation=True)
    kernel, squeezed, size = rng.choice((3, 3, 5, 7)), rng.random() < 0.5, size // 2
    for _ in range(rng.choice((2, 3))):
        stride, wider = (rng.choice((1, 2)) if size > 7 else 1), width + rng.choice((0, 8, 16))
        inner = width * rng.choice((1, 3, 4, 6))
        y = _conv(graph, x, width, inner, 1, 1, activation=True)
        y = _conv(graph, y, inner, inner, kernel, stride, groups=inner, activation=True)
        y = _squeezed(graph, y, inner) if squeezed else y
        y = _conv(graph, y, inner, wider, 1, 1)
        x = graph.add("Add", x, y) if stride == 1 and wider == width else y
        width, size = wider, size // stride
    return graph, _classified(graph, x, width)


def late(rng: Draw) -> tuple[Graph, str]:
    """Blocks as networks of images end in: many channels on small maps."""
    size, batch = rng.one_of((1, 2, 3, 4, 4, 5, 6, 7, 8, 10, 12, 14, 16)), rng.batch()
    wide, narrow = rng.between(64, 1536, 8), rng.between(16, 384, 8)
    style, most = rng.choice(("bottleneck", "inverted", "plain")), rng.between(*_LATE_MACS)
    work = narrow * (9 * narrow if style == "plain" else wide) * size**2
    while batch > 1 and batch * work > most:
        batch //= 2
    width = wide if style == "bottleneck" else narrow
    graph, x = Graph(rng, (batch, width, size, size)), "x"
    for _ in range(rng.choice((2, 3))):
        if style == "plain":
            y = _conv(graph, x, narrow, narrow, 3, 1, activation=True)
        elif style == "bottleneck":
            y = _conv(graph, x, wide, narrow, 1, 1, activation=True)
            groups = rng.choice([g for g in (1, 1, 2, 4, 8, 16) if narrow % (8 * g) == 0])
            y = _conv(graph, y, narrow, narrow, 3, 1, groups=groups, activation=True)
            y = _conv(graph, y, narrow, wide, 1, 1)
        else:
            y = _conv(graph, x, narrow, wide, 1, 1, activation=True)
            y = _conv(graph, y, wide, wide, rng.choice((3, 5)), 1, groups=wide, activation=True)
            y = _squeezed(graph, y, wide) if rng.random() < 0.5 else y
            y = _conv(graph, y, wide, narrow, 1, 1)
        x = graph.add("Add", x, y)
    return graph, _classified(graph, x, width)


def grouped(rng: Draw) -> tuple[Graph, str]:
    """Convolutions over tokens, one wide, some of them in groups, as some encoders have in place of products."""
    groups, batch = rng.choice((1, 2, 4, 4, 8)), rng.batch()
    width, length = groups * rng.between(16, 256, 8), rng.between(4, 256)
    most = rng.between(*_LATE_MACS)
    while batch > 1 and batch * length * 4 * width**2 // groups > most:
        batch //= 2
    graph, x = Graph(rng, (batch, width, length)), "x"
    for _ in range(rng.choice((1, 2))):
        y = gelu(graph, _along(graph, x, width, 4 * width, groups))
        x = graph.add("Add", x, _along(graph, y, 4 * width, width, groups))
        y = normed(graph, graph.add("Transpose", x, perm=(0, 2, 1)), width)
        x = _along(graph, graph.add("Transpose", y, perm=(0, 2, 1)), width, width, groups)
    return graph, x


def _along(graph: Graph, x: str, width: int, out: int, groups: int) -> str:
    """A convolution one wide along tokens."""
    weights = graph.weight(out, width // groups, 1), graph.weight(out, scale=0.1)
    return graph.add("Conv", x, *weights, group=groups, kernel_shape=(1,), strides=(1,), pads=(0, 0))


def _squeezed(graph: Graph, x: str, width: int) -> str:
    """Channels weighted by what is in them."""
    narrow = max(8, width // 4)
    pool = graph.rng.choice(("GlobalAveragePool", "ReduceMean"))
    y = graph.add(pool, x) if pool == "GlobalAveragePool" else graph.add(pool, x, graph.constant([2, 3], np.int64))
    y = graph.add("Relu", _conv(graph, y, width, narrow, 1, 1))
    return graph.add("Mul", x, graph.add("Sigmoid", _conv(graph, y, narrow, width, 1, 1)))


def _conv(
    graph: Graph, x: str, width: int, out: int, side: int, stride: int, groups: int = 1, activation: bool = False
) -> str:
    low = side // 2 if stride < side else 0
    weights = graph.weight(out, width // groups, side, side), graph.weight(out, scale=0.1)
    window: dict[str, Any] = {"strides": (stride, stride), "pads": (low,) * 4, "kernel_shape": (side, side)}
    y = graph.add("Conv", x, *weights, group=groups, **window)
    kind = graph.rng.choice(_ACTIVATIONS) if activation else ""
    if kind == "Clip":
        return graph.add("Clip", y, graph.constant(0.0, np.float32), graph.constant(6.0, np.float32))
    if kind == "Silu":
        return graph.add("Mul", y, graph.add("Sigmoid", y))
    return graph.add(kind, y) if kind else y


def _classified(graph: Graph, x: str, width: int) -> str:
    x = graph.add("Flatten", graph.add("GlobalAveragePool", x), axis=1)
    classes = graph.rng.one_of((10, 100, 1000))
    return graph.add("Gemm", x, graph.weight(width, classes), graph.weight(classes, scale=0.1))


def sound(rng: Draw) -> tuple[Graph, str]:
    """Convolutions along time, which onnxruntime does not lay out in blocks."""
    width, length = rng.between(16, 384, 16), rng.between(400, 16000)
    batch, most = rng.batch(), rng.room()
    while batch > 1 and batch * width * length // 5 > most:
        batch //= 2
    graph, x, before = Graph(rng, (batch, 1, length)), "x", 1
    for side, stride in ((10, 5), (3, 2), (3, 2), (2, 2)):
        length = (length - side) // stride + 1
        weights = graph.weight(width, before, side), graph.weight(width, scale=0.1)
        x = graph.add("Conv", x, *weights, strides=(stride,), kernel_shape=(side,), pads=(0, 0))
        x, before = gelu(graph, x), width
    x = normed(graph, graph.add("Transpose", x, perm=(0, 2, 1)), width)
    x = graph.add("Transpose", linear(graph, x, width, width), perm=(0, 2, 1))
    groups = rng.choice((4, 8, 16))
    weights = graph.weight(width, width // groups, 9), graph.weight(width, scale=0.1)
    return graph, graph.add("Conv", x, *weights, group=groups, pads=(4, 4), kernel_shape=(9,), strides=(1,))


KINDS = (
    *("tokens", "images", "late", "elements", "grouped", "mobile", "late", "tokens", "images", "sound", "tokens"),
    *("late", "moves", "spectral", "images", "grouped", "recurrent"),
)
VERSION = 3  # of what a kind and a seed mean; a journal of another version is not resumed
_MACS = (20_000_000, 2_000_000_000)  # the same, of the multiply-adds of a layer of tokens


def make(kind: str, seed: int, *, tiny: bool = False) -> tuple[bytes, dict[str, Any]]:
    """A generated model and its input.

    Examples
    --------
    >>> model, feed = make("elements", 3)
    >>> list(feed)
    ['x']
    """
    rng = Draw(f"{kind}/{seed}")
    rng.tiny = tiny
    graph, result = _MAKERS[kind](rng)
    _, shape, dtype = graph.input
    draw = np.random.default_rng(seed)
    values = draw.random(shape, dtype=np.float32) if dtype == "float32" else draw.integers(0, 1000, shape)
    return graph.model(result), {"x": values}


# -- tokens --------------------------------------------------------------------------------------------------------


def _tokens(rng: Draw) -> tuple[Graph, str]:
    head, heads = rng.one_of((16, 24, 32, 32, 48, 64, 64, 96, 128)), rng.between(1, 12)
    width, batch = head * heads, rng.batch()
    length = rng.between(4, 256)
    most, most_macs = rng.room(), rng.between(*_MACS)
    while batch > 1 and (batch * length * 4 * width > most or batch * length * 12 * width**2 > most_macs):
        batch //= 2
    length = max(4, min(length, most_macs // (12 * width**2)))
    inner = rng.choice((2, 3, 4, 4)) * width
    graph = Graph(rng, (batch, length), "int64")
    graph.open_batch = rng.random() < 0.5
    x = graph.add("Gather", graph.weight(1000, width, scale=1.0), "x")
    x = normed(graph, x, width)
    for _ in range(rng.choice((1, 1, 2))):
        x = normed(graph, graph.add("Add", x, _attended(graph, x, (length, heads, head))), width)
        y = linear(graph, x, width, inner)
        y = linear(graph, gelu(graph, y), inner, width)
        x = normed(graph, graph.add("Add", x, y), width)
    first = graph.add("Gather", x, graph.constant(0, np.int64), axis=1)
    return graph, graph.add("Gemm", first, graph.weight(width, width), graph.weight(width, scale=0.1))


def _attended(graph: Graph, x: str, sizes: tuple[int, int, int]) -> str:
    """Attention as an exporter writes it: scaled queries and keys, products with a transposed one, softmax."""
    length, heads, head = sizes
    width = heads * head
    parts = []
    for order in ((0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3)):
        y = linear(graph, x, width, width, bias=graph.rng.random() < 0.8)
        y = graph.add("Reshape", y, graph.constant([-1, length, heads, head], np.int64))
        parts.append(graph.add("Transpose", y, perm=order))
    scale = graph.constant(head**-0.25, np.float32)
    query, key = (graph.add("Mul", part, scale) for part in parts[:2])
    scores = graph.add("MatMul", query, key)
    if graph.rng.random() < 0.4:
        scores = graph.add("Add", scores, graph.weight(1, 1, length, length, scale=1.0))
    y = graph.add("MatMul", graph.add("Softmax", scores, axis=-1), parts[2])
    y = graph.add("Transpose", y, perm=(0, 2, 1, 3))
    y = graph.add("Reshape", y, graph.constant([-1, length, width], np.int64))
    return linear(graph, y, width, width)


# -- rows ----------------------------------------------------------------------------------------------------------

_UNARY = (
    *("Abs", "Neg", "Exp", "Sqrt", "Reciprocal", "Erf", "Tanh", "Sigmoid", "Relu", "Softplus", "Gelu", "Log"),
    *("HardSwish", "Cos", "Sin", "Floor", "LeakyRelu"),
)
_BINARY = ("Add", "Sub", "Mul", "Div", "Max", "Min")


def _elements(rng: Draw) -> tuple[Graph, str]:
    """Elementwise nodes, reductions, normalisations and softmax over rows."""
    rows, cols = rng.between(1, 16384), rng.between(8, 4096, 4)
    most = rng.room()
    while rows > 1 and rows * cols > most:
        rows //= 2
    graph, axes = Graph(rng, (rows, cols)), [-1]
    x, row = "x", graph.constant(axes, np.int64)
    for _ in range(10):
        kind = rng.choice(("unary", "unary", "scalar", "binary", "vector", "norm", "softmax", "reduce", "where", "rms"))
        if kind == "unary":
            # Kept positive, so that roots and logarithms stay numbers.
            x = graph.add(rng.choice(_UNARY), graph.add("Abs", x) if rng.random() < 0.5 else x)
        elif kind == "scalar":
            x = graph.add(rng.choice((*_BINARY, "Pow")), x, graph.constant(2.0, np.float32))
        elif kind == "binary":
            x = graph.add(rng.choice(_BINARY), x, graph.add(rng.choice(_UNARY[:8]), x))
        elif kind == "vector":
            x = graph.add(rng.choice(_BINARY[:3]), x, graph.weight(cols, scale=1.0))
        elif kind == "norm":
            x = normed(graph, x, cols)
        elif kind == "softmax":
            x = graph.add("Softmax", x, axis=-1)
        elif kind == "reduce":
            y = graph.add(rng.choice(("ReduceMean", "ReduceSum", "ReduceMax")), x, row, keepdims=1)
            x = graph.add("Sub", x, y)
        elif kind == "where":
            x = graph.add("Where", graph.add("Greater", x, graph.constant(0.5, np.float32)), x, graph.add("Neg", x))
        else:
            y = graph.add("ReduceMean", graph.add("Pow", x, graph.constant(2.0, np.float32)), row, keepdims=1)
            x = graph.add("Mul", x, graph.add("Reciprocal", graph.add("Sqrt", y)))
    return graph, x


def _moves(rng: Draw) -> tuple[Graph, str]:
    """Nodes that only move elements: transposes, slices, splits, concatenations, gathers, pads, casts."""
    batch, rows, cols = rng.batch(), rng.between(4, 512, 4), rng.between(8, 1024, 8)
    most = rng.room()
    while batch > 1 and batch * rows * cols > most:
        batch //= 2
    graph, x = Graph(rng, (batch, rows, cols)), "x"
    for _ in range(8):
        kind = rng.choice(("swap", "heads", "split", "slice", "gather", "pad", "cast", "expand", "cumulate"))
        if kind == "swap":
            x, rows, cols = graph.add("Transpose", x, perm=(0, 2, 1)), cols, rows
        elif kind == "heads":
            heads = rng.choice([h for h in (2, 4, 8) if cols % h == 0] or [1])
            y = graph.add("Reshape", x, graph.constant([batch, rows, heads, cols // heads], np.int64))
            y = graph.add("Transpose", y, perm=(0, 2, 1, 3))
            x = graph.add("Reshape", y, graph.constant([batch, rows, cols], np.int64))
        elif kind == "split" and cols % 2 == 0:
            last = graph.add("Split", x, outputs=2, axis=2, num_outputs=2)
            x = graph.add("Concat", last, last.replace("_1", "_0"), axis=2)
        elif kind == "slice" and rows > 8:
            bounds = [graph.constant([value], np.int64) for value in (0, rows // 2, 1)]
            y = graph.add("Slice", x, *bounds)
            x = graph.add("Concat", y, y, axis=1)
            rows = rows // 2 * 2
        elif kind == "gather":
            x = graph.add("Gather", x, graph.constant([rng.randrange(rows) for _ in range(rows)], np.int64), axis=1)
        elif kind == "pad":
            x, rows = graph.add("Pad", x, graph.constant([0, 1, 0, 0, 1, 0], np.int64)), rows + 2
        elif kind == "cast":
            x = graph.add("Cast", graph.add("Cast", x, to=6), to=1)
        elif kind == "expand":
            y = graph.add("ReduceMax", x, graph.constant([1], np.int64), keepdims=1)
            x = graph.add("Expand", y, graph.constant([batch, rows, cols], np.int64))
        else:
            x = graph.add("CumSum", x, graph.constant(1, np.int64))
    return graph, x


def _spectral(rng: Draw) -> tuple[Graph, str]:
    """Fourier transforms over features and tokens, of which the real part is kept."""
    batch, most = rng.batch(), rng.room() // 8  # transforms of lengths that are no power of two take long
    if rng.random() < 0.5:
        length, width = rng.one_of((4, 8, 16, 32, 64, 128, 256)), rng.one_of((16, 32, 64, 128, 256, 512, 1024))
    else:
        length, width = rng.between(4, 256), rng.between(16, 1024, rng.choice((8, 48, 64)))
    while batch > 1 and batch * length * width > most:
        batch //= 2
    graph, x = Graph(rng, (batch, length, width)), "x"
    last = graph.constant([-1], np.int64)
    imaginary = graph.constant(np.zeros((batch, length, width, 1)), np.float32)
    for _ in range(2):
        y = graph.add("Concat", graph.add("Unsqueeze", x, last), imaginary, axis=3)
        for axis in (2, 1):
            y = graph.add("DFT", y, "", graph.constant(axis, np.int64))
        real = graph.add("Gather", y, graph.constant(0, np.int64), axis=3)
        x = normed(graph, graph.add("Add", x, real), width)
    return graph, x


def _recurrent(rng: Draw) -> tuple[Graph, str]:
    width, steps, batch = rng.between(16, 256, 8), rng.between(2, 128), rng.batch()
    graph, x = Graph(rng, (steps, batch, width)), "x"
    kind, gates = rng.choice((("LSTM", 4), ("GRU", 3)))
    for _ in range(rng.choice((1, 2))):
        weights = graph.weight(1, gates * width, width, scale=0.1), graph.weight(1, gates * width, width, scale=0.1)
        y = graph.add(kind, x, *weights, graph.weight(1, 2 * gates * width, scale=0.1), hidden_size=width)
        x = graph.add("Squeeze", y, graph.constant([1], np.int64))
    return graph, x


_MAKERS: dict[str, Callable[[Draw], tuple[Graph, str]]] = {
    "tokens": _tokens,
    "images": images,
    "mobile": mobile,
    "late": late,
    "grouped": grouped,
    "sound": sound,
    "elements": _elements,
    "moves": _moves,
    "spectral": _spectral,
    "recurrent": _recurrent,
}
