"""Results of hot ops on the meta device, made from a formula.

torch's own meta kernels are written in Python and take 0.2 to 0.7 ms each; these take microseconds. A function returns
NotImplemented wherever it is not sure, wrong shapes included, so that torch's kernel decides and words the error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

Tensor = torch.Tensor
OVERRIDES: dict[str, Callable[..., Any]] = {}


def _override(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            OVERRIDES[name] = function
        return function

    return register


def _empty(shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(shape, dtype=dtype or like.dtype, device="meta")


def _same(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


@_override("linear")
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if weight.dim() != 2 or not x.dim() or x.shape[-1] != weight.shape[1] or x.dtype != weight.dtype:
        return NotImplemented
    return _empty(x.shape[:-1] + weight.shape[:1], x)


@_override("layer_norm", "rms_norm")
def _layer_norm(x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, *_: Any) -> Any:
    given = tuple(normalized_shape)
    if tuple(x.shape[-len(given) :]) != given or (weight is not None and tuple(weight.shape) != given):
        return NotImplemented
    if weight is not None and weight.dtype != x.dtype:
        return NotImplemented
    return _empty(x.shape, x)


@_override("batch_norm")
def _batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, *_: Any) -> Any:
    if x.dim() < 2 or (mean is not None and mean.shape[0] != x.shape[1]) or (weight is None and mean is None):
        return NotImplemented
    return _same(x)


@_override("gelu", "relu", "silu", "tanh", "sigmoid", "neg", "exp", "rsqrt", "sqrt", "cos", "sin", "abs", "erf")
def _unary(x: Tensor, *_: Any, **__: Any) -> Any:
    return _same(x) if x.dtype.is_floating_point else NotImplemented


@_override("softmax", "log_softmax")
def _softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    if not x.dtype.is_floating_point or not -x.dim() <= dim < x.dim():
        return NotImplemented
    return _same(x, dtype)


@_override("scaled_dot_product_attention")
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4 or not query.dtype == key.dtype == value.dtype:
        return NotImplemented
    batch, heads, queries, size = query.shape
    if key.shape[-1] != size or key.shape[:3] != value.shape[:3] or key.shape[0] != batch:
        return NotImplemented
    if heads != key.shape[1] and not (enable_gqa and heads % key.shape[1] == 0):
        return NotImplemented
    # What every fused backend returns: (batch, queries, heads, head_dim), seen transposed.
    return _empty((batch, queries, heads, value.shape[-1]), query).transpose(1, 2)


@_override("add", "mul", "sub", "div")
def _binary(x: Any, y: Any, *rest: Any, **options: Any) -> Any:
    if rest or options or not isinstance(x, Tensor) or not x.dtype.is_floating_point or not x.is_contiguous():
        return NotImplemented
    if not isinstance(y, Tensor):
        return NotImplemented if isinstance(y, complex) else _empty(x.shape, x)
    if x.dtype != y.dtype or not y.is_contiguous():
        return NotImplemented
    if x.shape == y.shape:
        return _empty(x.shape, x)
    return _empty(torch.broadcast_shapes(x.shape, y.shape), x)  # type: ignore[no-untyped-call]


@_override("embedding")
def _embedding(weight: Tensor, indices: Tensor, *_: Any) -> Any:
    if weight.dim() != 2 or indices.dtype.is_floating_point:
        return NotImplemented
    return _empty(indices.shape + weight.shape[1:], weight)


@_override("conv1d", "conv2d")
def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    spatial = weight.dim() - 2
    if x.dim() != weight.dim() or x.shape[1] != weight.shape[1] * groups or x.dtype != weight.dtype:
        return NotImplemented
    plane = _conv_plane(tuple(x.shape[2:]), tuple(weight.shape[2:]), stride, padding, dilation, spatial)
    if plane is None or min(plane) < 1:
        return NotImplemented
    shape = (x.shape[0], weight.shape[0], *plane)
    return torch.empty(shape, dtype=x.dtype, device="meta", memory_format=_conv_format(x, weight))


def _conv_plane(
    size: tuple[int, ...], kernel: tuple[int, ...], stride: Any, padding: Any, dilation: Any, spatial: int
) -> tuple[int, ...] | None:
    if padding == "same":
        return size
    if isinstance(padding, str):
        padding = 0
    steps, pads, gaps = (_each(value, spatial) for value in (stride, padding, dilation))
    if min(steps) < 1:
        return None
    return tuple(
        (n + 2 * pad - gap * (k - 1) - 1) // step + 1
        for n, k, step, pad, gap in zip(size, kernel, steps, pads, gaps, strict=True)
    )


def _each(value: Any, count: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * count
    return tuple(value) * count if len(value) == 1 else tuple(value)


def _conv_format(x: Tensor, weight: Tensor) -> torch.memory_format:
    """A convolution follows whichever of its two tensors lies channels-last."""
    if x.dim() == 4 and any(
        not t.is_contiguous() and t.is_contiguous(memory_format=torch.channels_last) for t in (x, weight)
    ):
        return torch.channels_last
    return torch.contiguous_format


@_override("_grouped_mm")
def _grouped_mm(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> Any:
    if x.dim() != 2 or weight.dim() != 3 or x.shape[-1] != weight.shape[-2]:
        return NotImplemented
    return _empty(x.shape[:-1] + weight.shape[-1:], x)


@_override("lstm", "gru")
def _recurrent(x: Tensor, hx: Any, params: Any, *options: Any) -> Any:
    if not isinstance(params, (list, tuple)):
        return NotImplemented
    bidirectional = options[4]
    state = hx if isinstance(hx, Tensor) else hx[0]
    width = (params[-1].shape[0] if len(params[0].shape) == 2 and _projected(params) else state.shape[-1]) * (
        2 if bidirectional else 1
    )
    y = _empty((*x.shape[:-1], width), x)
    if isinstance(hx, Tensor):
        return y, _same(hx)
    return (y, *(_same(part) for part in hx))


def _projected(params: Sequence[Tensor]) -> bool:
    return len(params) % 5 == 0 and params[-1].dim() == 2


@_override("_transform_bias_rescale_qkv")
def _split_heads(qkv: Tensor, bias: Tensor, heads: int) -> Any:
    batch, length, width = qkv.shape
    shape = (batch, heads, length, width // 3 // heads)
    return tuple(_empty(shape, qkv) for _ in range(3))


@_override("_masked_softmax")
def _masked_softmax(x: Tensor, *_: Any) -> Any:
    return _same(x)


def whole_matmul(x: Tensor, y: Tensor) -> tuple[int, ...] | None:
    """Result shape of a matmul that torch can run as one product without copying an operand; else None."""
    if x.dtype != y.dtype or min(x.dim(), y.dim()) < 2 or x.shape[-1] != y.shape[-2]:
        return None
    if y.dim() == 2:
        return (*x.shape[:-1], y.shape[-1]) if _mergeable(x, x.dim() - 1) else None
    if x.dim() != y.dim() or x.shape[:-2] != y.shape[:-2]:
        return None
    if not (_mergeable(x, x.dim() - 2) and _mergeable(y, y.dim() - 2)):
        return None
    return (*x.shape[:-1], y.shape[-1])


def _mergeable(tensor: Tensor, leading: int) -> bool:
    """Whether the leading dimensions collapse into one without a copy."""
    sides = [(n, s) for n, s in zip(tensor.shape[:leading], tensor.stride()[:leading], strict=True) if n != 1]
    return all(outer[1] == inner[0] * inner[1] for outer, inner in pairwise(sides))
