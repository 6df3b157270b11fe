"""Generated ONNX graphs of images, of sound, and of convolutions along tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from latpred.calibration.studies.onnxwriting import Draw, Graph, gelu, linear, normed

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
