"""Formulas of ops that wait for memory: elementwise, norms, softmax and reductions; copies, indexing and factories.

Each elementwise op has its own family, all of the same dimensions. Of a table or an indexed tensor only the rows that
are picked count as read, each time they are picked.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from math import prod
from typing import Any

from latpred.ops.families import (
    Formula,
    Tensor,
    Work,
    cost,
    first,
    is_tensor,
    lies_in_rows,
    memory_format,
    nbytes,
    numel,
    row_major,
    run_length,
)


def elementwise(kind: str) -> Formula:
    """Formula of an elementwise op; `operands` counts the tensors as large as the result that it reads."""
    return partial(_elementwise, f"elementwise.{kind}")


def _elementwise(family: str, *args: Any, out: Any, **options: Any) -> Work:
    size = numel(first(out))
    tensors = [value for value in (*args, *options.values()) if is_tensor(value)]
    return Work(family, {"numel": size, "operands": sum(numel(tensor) == size for tensor in tensors)})


# Elementwise ops that torch does not tag as pointwise, those of the last line before PyTorch 2.13 only.
for _name in (
    *("hardswish", "rsub", "floor_divide", "tril", "triu", "complex", "polar", "prelu", "_prelu_kernel"),
    *("rrelu_with_noise", "log_sigmoid_forward", "log_sigmoid", "bernoulli", "heaviside", "_conj_physical"),
    *("nan_to_num", "isin", "masked_fill", "dropout", "native_dropout"),
    *("leaky_relu", "hardtanh", "elu", "celu", "selu", "hardsigmoid", "linalg_cross", "poisson", "_standard_gamma"),
):
    cost(f"aten::{_name}")(elementwise(_name))


@cost("aten::gelu", "aten::gelu_")
def gelu(self: Any, approximate: str = "none", *, out: Any) -> Work:
    """The tangent takes three times as long as the error function on a CPU (AVX-512, PyTorch 2.13)."""
    return _elementwise("elementwise.gelu.tanh" if approximate == "tanh" else "elementwise.gelu", self, out=out)


_OWN_POWERS = (0.5, 1, 2, 3, -0.5, -1, -2)


@cost("aten::pow", "aten::pow_")
def power(self: Any, exponent: Any, *, out: Any) -> Work:
    """A few exponents have code of their own, which takes a sixth to a twenty-fifth of the time on a CPU."""
    kind = "pow.any" if is_tensor(exponent) or exponent not in _OWN_POWERS else "pow"
    return _elementwise(f"elementwise.{kind}", self, exponent, out=out)


def _overwritten(kind: str, self: Any, *_: Any, out: Any, **__: Any) -> Work:
    return Work(f"elementwise.{kind}", {"numel": numel(self), "operands": 0}, reads={0: 0})


cost("aten::fill_", "aten::zero_", "aten::fill", "aten::zero")(partial(_overwritten, "fill"))
for _name in ("uniform", "normal", "bernoulli", "random", "exponential", "cauchy", "log_normal", "geometric"):
    cost(f"aten::{_name}_")(partial(_overwritten, "random"))


def _loss(kind: str, self: Tensor, *_: Any, out: Tensor, **__: Any) -> Work:
    """How far predictions are from their targets, and where asked for the mean or sum, a kernel of its own."""
    launches = 1 if len(out.shape) == len(self.shape) else 2
    return Work(f"elementwise.{kind}", {"numel": numel(self), "operands": 2}, launches=launches)


for _name in ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"):
    cost(f"aten::{_name}")(partial(_loss, _name))


@cost("aten::nll_loss_forward", "aten::nll_loss2d_forward")
def nll_loss(self: Tensor, target: Tensor, *_: Any, out: Any) -> Work:
    """Of each sample the probability of its class."""
    dims = {"rows": numel(first(out)), "cols": numel(target) // max(1, numel(first(out)))}
    return Work("reduction.nll_loss", dims, reads={0: numel(target) * int(self.dtype.itemsize)})


@cost("aten::glu")
def glu(self: Any, *_: Any, out: Any) -> Work:
    """Half of the input gates the other half."""
    return Work("elementwise.glu", {"numel": numel(out), "operands": 2})


@cost("aten::_transform_bias_rescale_qkv")
def split_heads(qkv: Any, qkv_bias: Any, *_: Any, out: Any) -> Work:
    """Bias and scale, with the three parts and the heads moved apart."""
    return Work("elementwise.transform_bias_rescale_qkv", {"numel": numel(qkv), "operands": 1})


def _slices(tensor: Tensor, cols: int) -> dict[str, int]:
    """Dimensions of work on slices of a tensor that are so long."""
    return {"rows": numel(tensor) // cols if cols else 0, "cols": cols}


def _along(tensor: Tensor, dim: int) -> dict[str, int]:
    """The same of slices along one of its dimensions."""
    return _slices(tensor, tensor.shape[dim] if len(tensor.shape) else 1)


def _over_trailing(kind: str, input: Tensor, normalized_shape: Sequence[int], *_: Any, out: Any) -> Work:
    return Work(f"norm.{kind}", _slices(input, prod(normalized_shape)))


cost("aten::layer_norm", "aten::native_layer_norm")(partial(_over_trailing, "layer_norm"))
cost("aten::rms_norm")(partial(_over_trailing, "rms_norm"))


@cost("aten::group_norm", "aten::native_group_norm")
def group_norm(input: Tensor, *rest: Any, out: Any) -> Work:
    groups = rest[0] if isinstance(rest[0], int) else rest[-2]  # the native one takes weights and sizes first
    return Work("norm.group_norm", _slices(input, prod(input.shape[1:]) // groups))


@cost(
    *("aten::batch_norm", "aten::native_batch_norm", "aten::_native_batch_norm_legit_no_training"),
    "aten::cudnn_batch_norm",
)
def batch_norm(input: Tensor, *rest: Any, out: Any, **_: Any) -> Work:
    """Scale and shift by running statistics; where weights are standardised, by those of the values themselves."""
    dims = {"batch": input.shape[0], "channels": input.shape[1], "spatial": prod(input.shape[2:])}
    training = len(rest) > 4 and rest[4] is True  # one overload has no such flag, and a number in its place
    return Work("batch_norm.training" if training else "batch_norm", dims)


def _across(self: Tensor, dim: int) -> str:
    """What is added to the family of a softmax over another dimension than the last, for which a CPU has other code.

    It takes slices by vectors of 16; what is left over takes six times as long a value. Rows that lie in pieces are
    copied first.
    """
    inner = prod(self.shape[dim % len(self.shape) + 1 :]) if self.shape else 1
    if inner == 1:
        return "" if lies_in_rows(self) else ".strided"
    return ".across.ragged" if inner % 16 else ".across"


def _softmax(kind: str, self: Tensor, dim: int, *_: Any, out: Any, **__: Any) -> Work:
    return Work(f"softmax.{kind}{_across(self, dim)}", _along(self, dim))


cost("aten::softmax", "aten::_softmax")(partial(_softmax, "softmax"))
cost("aten::log_softmax", "aten::_log_softmax")(partial(_softmax, "log_softmax"))


@cost("aten::_masked_softmax")
def masked_softmax(self: Tensor, mask: Tensor, dim: int | None = None, *_: Any, out: Any) -> Work:
    return Work("softmax.masked", _along(self, -1 if dim is None else dim))


@cost("aten::_weight_norm", "aten::_weight_norm_interface")
def weight_norm(v: Tensor, g: Tensor, dim: int = 0, *, out: Any) -> Work:
    """A weight rescaled to a learned length, recomputed in each forward."""
    rows = numel(g)
    return Work("norm.weight_norm", {"rows": rows, "cols": numel(v) // rows})


def _reduction(kind: str, self: Tensor, *_: Any, out: Any, **__: Any) -> Work:
    """Every result stands for `cols` elements; places beside values take ten times as long."""
    rows, places = numel(first(out)), ".dim" if kind == "max" and out is not first(out) else ""
    return Work(f"reduction.{kind}{places}", {"rows": rows, "cols": numel(self) // rows if rows else 0})


def _by_rows(kind: str, self: Tensor, *args: Any, out: Any, dim: Any = None, **_: Any) -> Work:
    """What takes 2 to 20 times as long across rows as along them on a CPU."""
    after = args[kind == "linalg_vector_norm" :]  # whose order comes first
    given = (one for one in (dim, *after) if isinstance(one, (int, list, tuple)) and not isinstance(one, bool))
    across = ".across" if _keeps_innermost(self, next(given, ())) else ""
    return _reduction(f"{kind}{across}", self, out=out)


def _keeps_innermost(tensor: Tensor, dims: int | Sequence[int]) -> bool:
    """Whether some dimensions are reduced, and not the one along which values lie side by side."""
    shape = tuple(tensor.shape)
    reduced = {one % len(shape) for one in ([dims] if isinstance(dims, int) else dims)} if shape else set()
    steps = tuple(getattr(tensor, "stride", tuple)()) or row_major(shape)
    longer = [(step, -place) for place, (step, size) in enumerate(zip(steps, shape, strict=True)) if size > 1 and step]
    return bool(reduced and longer) and -min(longer)[1] not in reduced


_SAME_CODE = {
    "min": "max",
    "amin": "amax",
    "argmin": "argmax",
    **dict.fromkeys(("std", "var_mean", "std_mean"), "var"),
    **dict.fromkeys(("all", "_is_all_true", "_is_any_true"), "any"),
}
for _name in (
    *("sum", "mean", "amax", "amin", "aminmax", "max", "min", "any", "all", "prod", "std", "var", "std_mean"),
    *("var_mean", "nansum", "median", "nanmedian", "mode", "count_nonzero"),
    *("diff", "histc", "bincount", "_is_all_true", "_is_any_true"),
):
    cost(f"aten::{_name}")(partial(_reduction, _SAME_CODE.get(_name, _name)))
for _name in ("argmax", "argmin", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"):
    cost(f"aten::{_name}")(partial(_by_rows, _SAME_CODE.get(_name, _name)))
cost("aten::norm", "aten::linalg_vector_norm")(partial(_by_rows, "linalg_vector_norm"))


@cost("aten::_cdist_forward", "aten::_pdist_forward")
def distances(self: Tensor, *_: Any, out: Tensor) -> Work:
    """One for each pair of rows, each over all columns."""
    return Work("reduction.cdist", {"rows": numel(out), "cols": self.shape[-1]})


@cost("aten::_linalg_check_errors")
def check_errors(self: Tensor, *_: Any, out: None, **__: Any) -> Work:
    """Whether any matrix could not be factorized."""
    return Work("reduction.any", {"rows": 1, "cols": numel(self)})


def _sort(kind: str, self: Tensor, *args: Any, out: Any, dim: int | None = None, **_: Any) -> Work:
    position = 1 if kind in ("topk", "kthvalue") else 0
    integers = [value for value in args if isinstance(value, int) and not isinstance(value, bool)]
    if kind == "multinomial":
        integers = []  # how many are drawn, along the last dimension
    along = dim if dim is not None else integers[position] if len(integers) > position else -1
    return Work(f"sort.{kind}", _along(self, along))


for _name in ("sort", "topk", "kthvalue", "multinomial"):
    cost(f"aten::{_name}")(partial(_sort, _name))


@cost("aten::searchsorted")
def searchsorted(table: Tensor, *_: Any, out: Tensor, **__: Any) -> Work:
    """Places in a sorted table, which is halved until one is left."""
    steps = table.shape[-1].bit_length()
    read = min(nbytes(table), numel(out) * steps * int(table.dtype.itemsize))
    return Work("sort.searchsorted", {"rows": numel(out), "cols": steps}, reads={0: read})


@cost("aten::bucketize")
def bucketize(values: Any, table: Tensor, *_: Any, out: Tensor, **__: Any) -> Work:
    """The same with the table behind the values."""
    work = searchsorted(table, out=out)
    return work._replace(reads={1: work.reads[0]})


@cost("aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::nonzero")
def distinct(self: Tensor, *_: Any, out: Any, **__: Any) -> Work:
    """Values or places picked out of a whole tensor."""
    return Work("sort.unique", {"rows": 1, "cols": numel(self)})


def _fft(kind: str, self: Tensor, dim: int | Sequence[int] = -1, *_: Any, out: Any, **__: Any) -> Work:
    cols = prod(self.shape[one] for one in ([dim] if isinstance(dim, int) else dim))
    return Work(f"fft.{kind}", _slices(self, cols))


for _name in ("c2c", "r2c", "c2r"):
    cost(f"aten::_fft_{_name}")(partial(_fft, _name))


def _pooling(kind: str, out: Tensor, spatial: int, window: int) -> Work:
    lead, plane = out.shape[:-spatial], out.shape[-spatial:]
    dims = {
        "batch": prod(lead[:-1]),
        "channels": lead[-1] if lead else 1,
        "h_out": prod(plane[:-1]),
        "w_out": plane[-1],
        "window": window,
    }
    return Work(f"pooling.{kind}", dims)


def _windowed(kind: str, spatial: int, self: Tensor, kernel_size: Any, *_: Any, out: Any, **__: Any) -> Work:
    sides = [kernel_size] if isinstance(kernel_size, int) else list(kernel_size)
    window = sides[0] ** spatial if len(sides) == 1 else prod(sides)
    return _pooling(kind + memory_format(self), first(out), spatial, window)


def _adaptive(kind: str, spatial: int, self: Tensor, *_: Any, out: Any, **__: Any) -> Work:
    y = first(out)
    window = prod(self.shape[-spatial:]) // max(1, prod(y.shape[-spatial:]))
    return _pooling(f"adaptive_{kind}", y, spatial, max(1, window))


for _n in (1, 2, 3):
    # A CPU has a kernel for max_pool1d that keeps no indices; it is many times as fast as that of all others.
    cost(f"aten::max_pool{_n}d")(partial(_windowed, "max.1d" if _n == 1 else "max", _n))
    cost(f"aten::max_pool{_n}d_with_indices")(partial(_windowed, "max", _n))
    cost(f"aten::avg_pool{_n}d")(partial(_windowed, "avg", _n))
    cost(f"aten::adaptive_avg_pool{_n}d", f"aten::_adaptive_avg_pool{_n}d")(partial(_adaptive, "avg", _n))
    cost(f"aten::adaptive_max_pool{_n}d")(partial(_adaptive, "max", _n))


def _sampled(kind: str, spatial: int, taps: int, self: Tensor, *_: Any, out: Any, **__: Any) -> Work:
    work = _pooling(kind + memory_format(self), first(out), spatial, taps)
    return work._replace(reads={0: min(nbytes(self), taps * nbytes(first(out)))})


def _antialiased(kind: str, side: int, self: Tensor, *_: Any, out: Any, **__: Any) -> Work:
    """Windows with so many taps on a side, and as many times more as the map becomes narrower."""
    sides = zip(self.shape[-2:], first(out).shape[-2:], strict=True)
    return _sampled(kind, 2, prod(side * max(old, new) // new for old, new in sides), self, out=out)


for _n, _mode, _taps in ((1, "linear", 2), (2, "bilinear", 4), (3, "trilinear", 8), (2, "bicubic", 16)):
    cost(f"aten::upsample_{_mode}{_n}d")(partial(_sampled, f"upsample_{_mode}", _n, _taps))
for _mode, _side in (("bilinear", 2), ("bicubic", 4)):
    cost(f"aten::_upsample_{_mode}2d_aa")(partial(_antialiased, f"upsample_{_mode}_aa", _side))
for _n in (1, 2, 3):
    _formula = partial(_sampled, "upsample_nearest", _n, 1)
    cost(f"aten::upsample_nearest{_n}d", f"aten::_upsample_nearest_exact{_n}d")(_formula)
cost("aten::grid_sampler_2d")(partial(_sampled, "grid_sample", 2, 4))
cost("aten::grid_sampler_3d")(partial(_sampled, "grid_sample", 3, 8))


def copy(source: Any, out: Any) -> Work:
    """A copy: a cast, a straight copy, or one that gathers `run` elements at a time.

    What gets another shape is read row by row.
    """
    size, casts, shape = numel(out), source.dtype != out.dtype, tuple(source.shape)
    laid = tuple(out.stride()) if shape == tuple(out.shape) else row_major(shape)
    run = min(size, run_length(shape, tuple(source.stride()), laid))
    kind = "cast" if casts else "contiguous" if run >= size else "strided"
    return Work(f"copy.{kind}", {"numel": size, "run": run})


@cost(
    *("aten::clone", "aten::contiguous", "aten::reshape", "aten::flatten", "aten::to", "aten::_to_copy"),
    *("aten::type_as", "aten::real", "aten::imag", "aten::view_copy", "aten::_reshape_copy", "aten::ravel"),
    *("aten::resolve_conj", "aten::reshape_as"),
)
def clone(self: Any, *_: Any, out: Any, **__: Any) -> Work:
    """The whole tensor, in another layout or dtype."""
    return copy(self, out)


@cost("aten::copy_")
def copy_into(self: Any, src: Any, *_: Any, out: Any) -> Work:
    """Overwrites `self`, which is not read."""
    return copy(src, self)._replace(reads={0: 0})


def _moved(kind: str, *_: Any, out: Any, **__: Any) -> Work:
    """Each element of the result is placed by a pattern."""
    return Work(f"copy.{kind}", {"numel": numel(out), "run": out.shape[-1] if len(out.shape) else 1})


for _name in (
    *("constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d"),
    *("roll", "flip", "repeat", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "im2col", "col2im"),
    *("slice_scatter", "select_scatter", "diagonal_scatter", "slice_backward", "diag_embed", "rot90"),
    "unfold_backward",
):
    cost(f"aten::{_name}")(partial(_moved, _name))


@cost("aten::pad")
def pad(self: Any, pad: Sequence[int], mode: str = "constant", *_: Any, out: Any, **__: Any) -> Work:
    """Larger by a margin: constants are copied in runs, other values one by one, which takes several times as long.

    A CPU takes four times as long again to mirror lines as to mirror maps.
    """
    line = ".1d" if len(pad) == 2 and mode == "reflect" else ""
    return _moved("pad" if mode == "constant" else f"pad.{mode}{line}", out=out)


@cost("aten::cat", "aten::stack", "aten::block_diag")
def cat(tensors: Sequence[Tensor], *_: Any, out: Tensor, **__: Any) -> Work:
    return Work("cat", {"numel": numel(out), "parts": len(tensors)})


def _packed(input: Tensor, sizes: Tensor, *_: Any, out: Any, **__: Any) -> Work:
    """A part of the sequences for each step."""
    return Work("cat", {"numel": numel(first(out)), "parts": max(numel(first(out[1:])), numel(sizes))})


cost("aten::_pack_padded_sequence", "aten::_pad_packed_sequence")(_packed)


@cost("aten::embedding")
def embedding(weight: Tensor, indices: Tensor, *_: Any, out: Tensor) -> Work:
    return Work("embedding", {"rows": numel(indices), "cols": weight.shape[-1]}, reads={0: nbytes(out)})


@cost("aten::_embedding_bag", "aten::_embedding_bag_forward_only")
def embedding_bag(weight: Tensor, indices: Tensor, *_: Any, out: Any, **__: Any) -> Work:
    """Rows of a table, summed in bags."""
    cols = weight.shape[-1]
    read = numel(indices) * cols * int(weight.dtype.itemsize)
    return Work("embedding.bag", {"rows": numel(indices), "cols": cols}, reads={0: read})


def _picked(indices: Sequence[Tensor | None]) -> int:
    """How many places index tensors name: they are broadcast, so that a column and a row name all combinations."""
    sides = zip_longest(*(reversed(item.shape) for item in indices if item is not None), fillvalue=1)
    return prod(max(side) for side in sides)


@cost("aten::index", "aten::_unsafe_index")
def index(self: Tensor, indices: Sequence[Tensor | None], *, out: Tensor) -> Work:
    """Elements or rows picked by index tensors."""
    size = numel(out)
    rows = max(1, min(size, _picked(indices)))
    return Work("index", {"rows": rows, "cols": size // rows if rows else 0}, reads={0: nbytes(out)})


@cost("aten::index_select")
def index_select(self: Tensor, dim: int, indices: Tensor, *, out: Tensor) -> Work:
    rows = numel(indices)
    return Work("index.select", {"rows": rows, "cols": numel(out) // rows if rows else 0}, reads={0: nbytes(out)})


@cost("aten::gather", "aten::take_along_dim", "aten::take", "aten::masked_select")
def gather(self: Tensor, *_: Any, out: Tensor, **__: Any) -> Work:
    return Work("index.gather", {"rows": numel(out), "cols": 1}, reads={0: nbytes(out)})


@cost("aten::repeat_interleave")
def repeat_interleave(self: Tensor, *_: Any, out: Tensor, **__: Any) -> Work:
    return Work("index.repeat", {"rows": numel(out), "cols": 1})


def _put(self: Tensor, *args: Any, out: Any, **_: Any) -> Work:
    """Elements, or slices, placed in a copy."""
    listed = next((a for a in args if isinstance(a, (list, tuple))), None)
    if listed is not None:
        rows, sides, whole = _picked(listed), [*self.shape], []  # `whole`: dimensions that no index picks from
        for index in listed:
            if index is None:
                whole.append(sides.pop(0))
            else:
                del sides[: len(index.shape) if index.dtype.itemsize == 1 else 1]  # a mask picks from several
        return Work("index.put", {"rows": rows, "cols": prod([*whole, *sides])})
    indices = next((a for a in args if hasattr(a, "shape")), None)
    return Work("index.put", {"rows": numel(self) if indices is None else numel(indices), "cols": 1})


def _put_slices(self: Tensor, dim: int, index: Tensor, *_: Any, out: Any, **__: Any) -> Work:
    """A slice for each index, placed in a copy or added to it."""
    slices = self.shape[dim] if len(self.shape) else 1
    return Work("index.put", {"rows": numel(index), "cols": numel(self) // slices if slices else 0})


def _in_place(put: Formula, adds: bool, self: Tensor, *args: Any, out: Any, **options: Any) -> Work:
    """The same where the copy is the tensor itself, of which no more is touched than is placed."""
    work = put(self, *args, out=out, **options)
    touched = work.dims["rows"] * work.dims["cols"] * int(self.dtype.itemsize)
    return work._replace(reads={0: touched if adds else 0}, writes=touched)


@cost("aten::index_put_", "aten::_index_put_impl_")
def index_put_in_place(self: Tensor, indices: Any, values: Tensor, accumulate: bool = False, *_: Any, out: Any) -> Work:
    return _in_place(_put, accumulate, self, indices, values, out=out)


cost("aten::index_put", "aten::_index_put_impl")(_put)
for _name, _adds in (("scatter", False), ("scatter_add", True), ("scatter_reduce", True)):
    cost(f"aten::{_name}_")(partial(_in_place, _put, _adds))
    cost(f"aten::{_name}")(_put)
for _name, _adds in (("index_add", True), ("index_reduce", True), ("index_copy", False), ("index_fill", False)):
    cost(f"aten::{_name}_")(partial(_in_place, _put_slices, _adds))
    cost(f"aten::{_name}")(_put_slices)
cost("aten::masked_scatter_", "aten::put_")(partial(_in_place, _put, False))
cost("aten::masked_scatter")(_put)


@cost("aten::max_unpool2d", "aten::max_unpool3d")
def max_unpool(self: Tensor, *_: Any, out: Tensor, **__: Any) -> Work:
    """Zeros, into which each maximum is put where it came from."""
    return Work("index.put", {"rows": numel(self), "cols": 1}, launches=2)


def factory(*_: Any, out: Any, kind: str = "", **__: Any) -> Work:
    """A new tensor, written once; a source that only lends its shape is not read."""
    return Work(f"factory{kind}", {"numel": numel(first(out))}, reads={0: 0})


for _name in (
    *("arange", "zeros", "ones", "full", "eye", "linspace", "logspace", "zeros_like", "ones_like", "full_like"),
    *("new_zeros", "new_ones", "new_full", "scalar_tensor", "tril_indices", "triu_indices"),
):
    cost(f"aten::{_name}")(factory)
drawn = partial(factory, kind=".random")
for _name in ("rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal"):
    cost(f"aten::{_name}")(drawn)
