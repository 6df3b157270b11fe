"""Graph and Draw: an ONNX graph under construction, and the sizes that are drawn for it.

What graphs are made is `onnxgraphs`' business.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
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
