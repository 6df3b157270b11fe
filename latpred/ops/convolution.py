"""Formulas of convolutions: dense, grouped, depthwise and transposed, in one to three dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from latpred.ops.families import CONV_DIMS
from latpred.ops.registry import Tensor, Work, cost, first, numel, pair


def _plane(shape: Sequence[int]) -> tuple[int, int]:
    """Height and width of a spatial shape: a 1-d one has height 1, a third dimension is folded into the height."""
    if len(shape) == 1:
        return 1, shape[0]
    return prod(shape[:-1]), shape[-1]


def _family(transposed: bool, groups: int, c_in: int) -> str:
    if transposed:
        return "conv_transpose"
    if groups == 1:
        return "conv"
    return "conv_depthwise" if groups == c_in else "conv_grouped"


def _work(x: Tensor, weight: Tensor, out: Any, stride: int | Sequence[int], groups: int, transposed: bool) -> Work:
    y = first(out)
    spatial = len(weight.shape) - 2
    batch = x.shape[0] if len(x.shape) == spatial + 2 else 1
    c_in, c_out = x.shape[-spatial - 1], y.shape[-spatial - 1]
    h_in, w_in = _plane(x.shape[-spatial:])
    h_out, w_out = _plane(y.shape[-spatial:])
    kernel_h, kernel_w = _plane(weight.shape[2:])
    sizes = (batch, c_in, c_out, h_in, w_in, h_out, w_out, kernel_h, kernel_w, pair(stride)[1], groups)
    dims = dict(zip(CONV_DIMS, sizes, strict=True))
    # Every output element of a convolution, or every input element of its transpose, meets one filter.
    macs = numel(x if transposed else y) * prod(weight.shape[1:])
    return Work(_family(transposed, groups, c_in), dims, macs)


@cost("aten::conv1d", "aten::conv2d", "aten::conv3d")
def conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: object = 0,
    dilation: object = 1,
    groups: int = 1,
    *,
    out: Any,
) -> Work:
    """Convolution."""
    return _work(input, weight, out, stride, groups, transposed=False)


@cost("aten::conv_transpose1d", "aten::conv_transpose2d", "aten::conv_transpose3d")
def conv_transpose(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: object = 0,
    output_padding: object = 0,
    groups: int = 1,
    dilation: object = 1,
    *,
    out: Any,
) -> Work:
    """Transposed convolution."""
    return _work(input, weight, out, stride, groups, transposed=True)


@cost("aten::convolution", "aten::_convolution")
def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: object,
    dilation: object,
    transposed: bool,
    output_padding: object,
    groups: int,
    *_: Any,
    out: Any,
) -> Work:
    """The general form that the others are made of."""
    return _work(input, weight, out, stride, groups, transposed)


@cost("aten::mkldnn_convolution", "aten::cudnn_convolution")
def library_convolution(input: Tensor, weight: Tensor, *rest: Any, out: Any) -> Work:
    """A vendor library's convolution, which some models call by name."""
    stride = next((value for value in rest[1:] if isinstance(value, (list, tuple)) and value), 1)
    groups = next((value for value in reversed(rest) if isinstance(value, int) and not isinstance(value, bool)), 1)
    return _work(input, weight, out, stride, groups, transposed=False)
