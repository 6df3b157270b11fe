"""Formulas of elementwise ops: each has its own family, all have the same dimensions."""

from __future__ import annotations

from typing import Any

from latpred.ops.registry import Formula, Work, cost
from latpred.ops.shapes import first, is_tensor, numel


def elementwise(kind: str) -> Formula:
    """Formula of an elementwise op; `operands` counts the tensors as large as the result that it reads."""
    family = f"elementwise.{kind}"

    def formula(*args: Any, out: Any, **options: Any) -> Work:
        size = numel(first(out))
        tensors = [value for value in (*args, *options.values()) if is_tensor(value)]
        operands = sum(numel(tensor) == size for tensor in tensors)
        return Work(family, {"numel": size, "operands": operands})

    return formula


# Elementwise ops that torch does not tag as pointwise.
UNTAGGED = (
    "hardswish",
    "rsub",
    "floor_divide",
    "tril",
    "triu",
    "complex",
    "polar",
    "prelu",
    "_prelu_kernel",
    "rrelu",
    "rrelu_with_noise",
    "log_sigmoid_forward",
    "log_sigmoid",
    "bernoulli",
    "heaviside",
    "_conj_physical",
    "nan_to_num",
    "isin",
    "masked_fill",
    "dropout",
    "native_dropout",
)
for _name in UNTAGGED:
    cost(f"aten::{_name}")(elementwise(_name))


@cost("aten::fill_", "aten::zero_", "aten::fill", "aten::zero")
def fill(self: Any, *_: Any, out: Any) -> Work:
    """Overwritten without being read."""
    return Work("elementwise.fill", {"numel": numel(self), "operands": 0}, reads={0: 0})


@cost("aten::uniform_", "aten::normal_", "aten::bernoulli_", "aten::random_", "aten::exponential_")
def random(self: Any, *_: Any, out: Any, **__: Any) -> Work:
    """Overwritten with random numbers."""
    return Work("elementwise.random", {"numel": numel(self), "operands": 0}, reads={0: 0})


@cost("aten::glu")
def glu(self: Any, *_: Any, out: Any) -> Work:
    """Half of the input gates the other half."""
    return Work("elementwise.glu", {"numel": numel(out), "operands": 2})


@cost("aten::_transform_bias_rescale_qkv")
def split_heads(qkv: Any, qkv_bias: Any, *_: Any, out: Any) -> Work:
    """Bias and scale, with the three parts and the heads moved apart."""
    return Work("elementwise.transform_bias_rescale_qkv", {"numel": numel(qkv), "operands": 1})
