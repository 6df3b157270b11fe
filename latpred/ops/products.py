"""Formulas of products: one weight matrix for all rows (gemm), or independent ones (bmm); attention and recurrence.

Convolutions are dense, grouped, depthwise or transposed, in one to three dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from math import prod
from typing import Any

from latpred.ops.families import (
    CAUSAL,
    CONV_DIMS,
    DIMS,
    GROUPED,
    MATH,
    STRIDED_MASK,
    UNFUSED,
    Tensor,
    Work,
    cost,
    first,
    lies_in_rows,
    memory_format,
    numel,
)


def gemm(m: int, n: int, k: int, family: str = "gemm") -> Work:
    """One (m, k) x (k, n) product."""
    return Work(family, {"m": m, "n": n, "k": k}, macs=m * n * k)


def bmm(batch: int, m: int, n: int, k: int) -> Work:
    """`batch` independent (m, k) x (k, n) products."""
    return Work("bmm", {"batch": batch, "m": m, "n": n, "k": k}, macs=batch * m * n * k)


@cost("aten::linear")
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Any) -> Work:
    k = weight.shape[-1]
    n = weight.shape[0] if len(weight.shape) == 2 else 1
    return gemm(numel(input) // k if k else 0, n, k)


def _product(place: int, *args: Any, out: Any, beta: float = 1, **_: Any) -> Work:
    """The product of two matrices, or of as many as two batches have, from some argument on.

    What is added to it is not read where it counts `beta` = 0 times.
    """
    *batch, m, k = args[place].shape
    n = args[place + 1].shape[-1]
    work = bmm(prod(batch), m, n, k) if batch else gemm(m, n, k)
    return work if beta else work._replace(reads={0: 0})


cost("aten::mm", "aten::_int_mm", "aten::_scaled_mm", "aten::bmm")(partial(_product, 0))
cost("aten::addmm", "aten::_addmm_activation", "aten::baddbmm", "aten::addbmm")(partial(_product, 1))


@cost("aten::linalg_solve_triangular")
def solve_triangular(self: Tensor, other: Tensor, *_: Any, out: Tensor, **__: Any) -> Work:
    """Half of the product with a whole matrix, as which it is priced."""
    (*batch, m, n), k = out.shape, self.shape[-1]
    work = bmm(prod(batch), m, n, k) if batch else gemm(m, n, k)
    return work._replace(macs=work.macs // 2)


def _times_vector(place: int, *args: Any, out: Any, **_: Any) -> Work:
    """Rows of a matrix, or a vector, at some argument times the vector behind it; `inner` takes rows there as well."""
    k = args[place].shape[-1]
    m, n = (numel(one) // k if k else 0 for one in args[place : place + 2])
    return gemm(m, n, k)


cost("aten::mv", "aten::dot", "aten::vdot")(partial(_times_vector, 0))
cost("aten::addmv")(partial(_times_vector, 1))


@cost("aten::addr")
def outer(*args: Tensor, out: Tensor, **_: Any) -> Work:
    return gemm(out.shape[0], out.shape[1], 1)


@cost("aten::matmul")
def matmul(self: Tensor, other: Tensor, *, out: Tensor) -> Work:
    """Product over the last two dimensions; a single matrix on the right makes it one gemm."""
    k = self.shape[-1]
    if len(other.shape) <= 2:
        n = other.shape[1] if len(other.shape) == 2 else 1
        return gemm(numel(self) // k if k else 0, n, k)
    m = self.shape[-2] if len(self.shape) > 1 else 1
    n = other.shape[-1]
    return bmm(numel(out) // (m * n) if m * n else 0, m, n, k)


@cost("aten::_grouped_mm")
def grouped_mm(self: Tensor, mat2: Tensor, *_: Any, out: Any, **__: Any) -> Work:
    """Rows sorted by expert, each times its expert's matrix; what no row meets is not read."""
    rows, (*experts, k, n) = prod(self.shape[:-1]), mat2.shape
    read = min(rows, prod(experts)) * k * n * int(mat2.dtype.itemsize)
    return gemm(rows, n, k, "gemm.grouped")._replace(reads={1: read})


def grouped_mm_by_expert(self: Tensor, mat2: Tensor, *_: Any, out: Any, **__: Any) -> Work:
    """The same in a product for each expert, those without rows counted as well: no batch has fewer than another."""
    return grouped_mm(self, mat2, out=out)._replace(launches=mat2.shape[0])


def attention(query: Tensor, key: Tensor, value: Tensor, masked: bool, causal: bool, leaf: str = "") -> Work:
    """Scores and weighted sum. A causal mask is counted in full: only some backends skip the upper half."""
    scored, summed = _outside(query, key), _outside(query, key, value)
    *_, queries, head_dim = query.shape
    keys = key.shape[-2]
    sizes = (prod(summed[1:]), prod(summed[:1]), queries, keys, head_dim, int(masked))
    dims = dict(zip(DIMS["attention"], sizes, strict=True))
    macs = queries * keys * (prod(scored) * head_dim + prod(summed) * value.shape[-1])
    return Work(f"{CAUSAL if causal else 'attention'}{leaf}", dims, macs)


def _outside(*tensors: Tensor) -> list[int]:
    """Heads, then batch sizes, of which one of queries may meet several of keys, and the other way round."""
    return [max(sizes) for sizes in zip_longest(*(tensor.shape[-3::-1] for tensor in tensors), fillvalue=1)]


def suits_kernels(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool:
    """Whether fused kernels take what attention is given: four dimensions, rows in one piece, nothing to broadcast."""
    lead = 1 if enable_gqa else 2
    alike = tuple(query.shape[:lead]) == tuple(key.shape[:lead]) == tuple(value.shape[:lead])
    return len(query.shape) == 4 and alike and all(map(lies_in_rows, (query, key, value)))


def suits_cpu(query: Tensor, value: Tensor, mask: Tensor | None, dropout: float) -> bool:
    """Whether a CPU's does as well: it drops nothing, wants values as wide as queries, masks of two or four sides."""
    return not dropout and query.shape[-1] == value.shape[-1] and (mask is None or len(mask.shape) in (2, 4))


@cost("aten::scaled_dot_product_attention")
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    out: Any,
    enable_gqa: bool = False,
    **_: Any,
) -> Work:
    """Torch's attention, whichever backend serves it.

    What some devices have no kernel for has a family of its own.
    """
    if not suits_kernels(query, key, value, enable_gqa):
        leaf = MATH
    elif not suits_cpu(query, value, attn_mask, dropout_p):
        leaf = UNFUSED
    elif attn_mask is not None and not lies_in_rows(attn_mask):
        leaf = STRIDED_MASK
    else:
        leaf = "" if query.shape[1] == key.shape[1] else GROUPED
    return attention(query, key, value, attn_mask is not None, is_causal, leaf)


def _named_backend(place: int, query: Tensor, key: Tensor, value: Tensor, *rest: Any, out: Any, **options: Any) -> Work:
    """Attention in one backend, which is told at a `place` among the rest whether it is causal."""
    mask = options.get("attn_mask", next((item for item in rest if hasattr(item, "shape")), None))
    causal = options.get("is_causal", rest[place] if len(rest) > place else False)
    return attention(query, key, value, mask is not None, bool(causal))


cost("aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu")(
    partial(_named_backend, 1)
)
cost("aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_efficient_attention")(
    partial(_named_backend, 3)
)


_GATES = {4: "rnn.lstm", 3: "rnn.gru"}  # libraries run each by code of its own


@cost("aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu")
def recurrent(input: Tensor, *given: Any, out: Any) -> Work:
    """All gates of all steps: every weight matrix meets every element of the sequence once.

    The recurrent ones are read again in every step, which waits for the one before. Some libraries lay all of them out
    anew in each call: oneDNN's LSTM does so at 3 GB/s, which is most of a short sequence's time.
    """
    packed = isinstance(given[2], (list, tuple))  # the sizes of the batches of all steps come first
    hx, params, _, num_layers, _, _, bidirectional, *batch_first = given[packed:]
    time = 1 if any(batch_first) and len(input.shape) == 3 else 0
    state = hx if hasattr(hx, "shape") else hx[-1]  # of an LSTM its cells: its results may be projected to less
    steps = numel(given[0]) if packed else input.shape[time]
    rows = numel(input) // input.shape[-1] if input.shape[-1] else 0
    batch = state.shape[-2] if packed else rows // steps if steps else 0
    matrices = sum(numel(weight) for weight in params if len(weight.shape) == 2)
    hidden, layers = state.shape[-1], num_layers * (2 if bidirectional else 1)
    gates = params[0].shape[0] // hidden if params and hidden else 0
    dims = {
        "batch": batch,
        "steps": steps,
        "hidden": hidden,
        "inputs": input.shape[-1],
        "layers": layers,
        "calls": steps * layers,
        "reread": steps * layers * gates * hidden * hidden,
        "weights": matrices,
    }
    return Work(_GATES.get(gates, "rnn.plain"), dims, macs=rows * matrices)


@cost("aten::lstm_cell", "aten::gru_cell", "aten::rnn_tanh_cell", "aten::rnn_relu_cell")
def cell(input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, *_: Any, out: Any) -> Work:
    """One step of one layer: input and state meet their weights in plain products, priced as one."""
    batch = numel(input) // input.shape[-1] if input.shape[-1] else 0
    dims = {"m": batch, "n": w_ih.shape[0], "k": input.shape[-1] + w_hh.shape[-1]}
    return Work("gemm.cell", dims, macs=batch * (numel(w_ih) + numel(w_hh)))


def _plane(sizes: Sequence[int]) -> tuple[int, int]:
    """Height and width of spatial sizes: of a line the height is 1, a third dimension is folded into the height."""
    return prod(sizes[:-1]), sizes[-1]


# Columns on each side of a row that oneDNN's depthwise kernel for AVX-512 has room for; with more, or on maps that are
# narrower than their padding, it multiplies matrices channel by channel, which takes 6 to 50 times as long. Its kernel
# for channels last has room for any.
MOST_PADDED = 6


def _work(x: Tensor, weight: Tensor, out: Any, stride: Any, groups: int, transposed: bool, dilation: Any = 1) -> Work:
    y = first(out)
    spatial = len(weight.shape) - 2
    batch = x.shape[0] if len(x.shape) == spatial + 2 else 1
    c_in, c_out = x.shape[-spatial - 1], y.shape[-spatial - 1]
    h_in, w_in = _plane(x.shape[-spatial:])
    h_out, w_out = _plane(y.shape[-spatial:])
    kernel_h, kernel_w = _plane(weight.shape[2:])
    steps, gaps = ([sides] if isinstance(sides, int) else list(map(int, sides)) for sides in (stride, dilation))
    sizes = (batch, c_in, c_out, h_in, w_in, h_out, w_out, kernel_h, kernel_w, max(steps), groups)
    dims = dict(zip(CONV_DIMS, (*sizes, *weight.shape[2:-2]), strict=False))
    # Every output element of a convolution, or every input element of its transpose, meets one filter.
    macs = numel(x if transposed else y) * prod(weight.shape[1:])
    if transposed:
        return Work("conv_transpose", dims, macs)
    if groups == 1:
        return Work("conv", dims, macs)
    if groups != c_in:
        return Work("conv_grouped", dims, macs)
    if c_out != c_in:
        # oneDNN has no depthwise kernel for several results of each channel: they take 3 to 27 times as long on a CPU.
        return Work("conv_depthwise.multiplied", dims, macs)
    padding = (w_out - 1) * steps[-1] + (kernel_w - 1) * gaps[-1] + 1 - w_in
    layout = memory_format(x)
    leaf = ".padded" if padding > 2 * min(w_out, MOST_PADDED) and not layout else layout
    return Work(f"conv_depthwise{leaf}", dims, macs)


def _convolved(transposed: bool, input: Tensor, weight: Tensor, *rest: Any, out: Any, **named: Any) -> Work:
    """The rest is bias, stride, padding, dilation or the padding of a transpose's output, and groups."""
    stride = rest[1] if len(rest) > 1 else named.get("stride", 1)
    groups = rest[4] if len(rest) > 4 else named.get("groups", 1)
    dilation = rest[3] if len(rest) > 3 else named.get("dilation", 1)
    return _work(input, weight, out, stride, groups, transposed, dilation)


for _n in (1, 2, 3):
    cost(f"aten::conv{_n}d")(partial(_convolved, False))
    cost(f"aten::conv_transpose{_n}d")(partial(_convolved, True))


@cost("aten::convolution", "aten::_convolution")
def convolution(input: Tensor, weight: Tensor, *rest: Any, out: Any) -> Work:
    """The general form that the others are made of."""
    _, stride, _, dilation, transposed, _, groups, *_ = rest
    return _work(input, weight, out, stride, groups, transposed, dilation)


@cost("aten::mkldnn_convolution", "aten::cudnn_convolution")
def library_convolution(input: Tensor, weight: Tensor, *rest: Any, out: Any) -> Work:
    """A vendor library's convolution, which some models call by name."""
    _, stride, dilation, *_ = [value for value in rest if isinstance(value, (list, tuple))]  # padding comes first
    groups = next((value for value in reversed(rest) if isinstance(value, int) and not isinstance(value, bool)), 1)
    return _work(input, weight, out, stride, groups, False, dilation)
