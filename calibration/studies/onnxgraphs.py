"""Generated ONNX graphs: chains of the nodes that exported networks are made of, at random sizes.

An export takes seconds and a graph written down takes milliseconds, so kernels are learned from these: each is a piece
of a network, whose nodes find their operands where a network leaves them. Which nodes onnxruntime then runs is not
decided here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from latpred.calibration.studies import onnximages
from latpred.calibration.studies.onnxwriting import Draw, Graph, gelu, linear, normed

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
    "images": onnximages.images,
    "mobile": onnximages.mobile,
    "late": onnximages.late,
    "grouped": onnximages.grouped,
    "sound": onnximages.sound,
    "elements": _elements,
    "moves": _moves,
    "spectral": _spectral,
    "recurrent": _recurrent,
}
