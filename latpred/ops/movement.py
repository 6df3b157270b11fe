"""Formulas of data movement: copies, concatenation, indexing, embedding and factories.

Of a table or an indexed tensor only the rows that are picked count as read, each time they are picked.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from math import prod
from typing import Any

from latpred.ops.registry import Formula, Tensor, Work, cost, first, nbytes, numel, run_length


def copy(source: Any, out: Any) -> Work:
    """A copy: a cast, a straight copy, or one that gathers `run` elements at a time."""
    size = numel(out)
    if source.dtype != out.dtype:
        kind = "cast"
    elif tuple(source.shape) == tuple(out.shape) and tuple(source.stride()) == tuple(out.stride()):
        return Work("copy.contiguous", {"numel": size, "run": size})
    else:
        kind = "strided"
    run = min(size, run_length(source.shape, source.stride()))
    if kind == "strided" and run >= size:
        kind = "contiguous"
    return Work(f"copy.{kind}", {"numel": size, "run": run})


@cost(
    *("aten::clone", "aten::contiguous", "aten::reshape", "aten::flatten", "aten::to", "aten::_to_copy"),
    *("aten::type_as", "aten::real", "aten::imag", "aten::view_copy", "aten::_reshape_copy", "aten::ravel"),
    *("aten::unflatten", "aten::resolve_conj", "aten::float"),
)
def clone(self: Any, *_: Any, out: Any, **__: Any) -> Work:
    """The whole tensor, in another layout or dtype."""
    return copy(self, out)


@cost("aten::copy_")
def copy_into(self: Any, src: Any, *_: Any, out: Any) -> Work:
    """Overwrites `self`, which is not read."""
    family, dims, *_rest = copy(src, self)
    return Work(family, dims, reads={0: 0})


def moved(kind: str) -> Formula:
    """Formula of an op that places each element of its result by a pattern."""
    family = f"copy.{kind}"

    def formula(self: Any, *_: Any, out: Any, **__: Any) -> Work:
        return Work(family, {"numel": numel(out), "run": out.shape[-1] if len(out.shape) else 1})

    return formula


for _name in (
    *("constant_pad_nd", "pad", "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d"),
    *("roll", "flip", "repeat", "tile", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "im2col", "col2im"),
    *("slice_scatter", "select_scatter", "diagonal_scatter", "slice_backward", "diag_embed", "rot90"),
):
    cost(f"aten::{_name}")(moved(_name))


@cost("aten::cat", "aten::concat", "aten::stack", "aten::hstack", "aten::vstack", "aten::dstack", "aten::block_diag")
def cat(tensors: Sequence[Tensor], *_: Any, out: Tensor, **__: Any) -> Work:
    """Several tensors written behind each other."""
    return Work("cat", {"numel": numel(out), "parts": len(tensors)})


@cost("aten::embedding")
def embedding(weight: Tensor, indices: Tensor, *_: Any, out: Tensor) -> Work:
    """One row of the table for each index."""
    return Work("embedding", {"rows": numel(indices), "cols": weight.shape[-1]}, reads={0: nbytes(out)})


@cost("aten::embedding_bag", "aten::_embedding_bag", "aten::_embedding_bag_forward_only")
def embedding_bag(weight: Tensor, indices: Tensor, *_: Any, out: Any, **__: Any) -> Work:
    """Rows of a table, summed in bags."""
    cols = weight.shape[-1]
    read = numel(indices) * cols * int(weight.dtype.itemsize)
    return Work("embedding.bag", {"rows": numel(indices), "cols": cols}, reads={0: read})


@cost("aten::index", "aten::_unsafe_index")
def index(self: Tensor, indices: Sequence[Tensor | None], *, out: Tensor) -> Work:
    """Elements or rows picked by index tensors."""
    given = [item for item in indices if item is not None]
    size = numel(out)
    # Indices are broadcast against each other: a column and a row pick all combinations.
    sides = zip_longest(*(reversed(item.shape) for item in given), fillvalue=1)
    picked = prod(max(side) for side in sides)
    rows = max(1, min(size, picked))
    return Work("index", {"rows": rows, "cols": size // rows if rows else 0}, reads={0: nbytes(out)})


@cost("aten::index_select")
def index_select(self: Tensor, dim: int, indices: Tensor, *, out: Tensor) -> Work:
    """Whole slices along a dimension."""
    rows = numel(indices)
    return Work("index.select", {"rows": rows, "cols": numel(out) // rows if rows else 0}, reads={0: nbytes(out)})


@cost("aten::gather", "aten::take_along_dim", "aten::take", "aten::masked_select")
def gather(self: Tensor, *_: Any, out: Tensor, **__: Any) -> Work:
    """Single elements."""
    return Work("index.gather", {"rows": numel(out), "cols": 1}, reads={0: nbytes(out)})


@cost("aten::repeat_interleave")
def repeat_interleave(self: Tensor, *_: Any, out: Tensor, **__: Any) -> Work:
    """Each row several times."""
    return Work("index.repeat", {"rows": numel(out), "cols": 1})


def _placed(inplace: bool) -> Formula:
    def formula(self: Tensor, *args: Any, out: Any, **_: Any) -> Work:
        indices = next((a for a in args if hasattr(a, "shape")), None)
        listed = next((a for a in args if isinstance(a, (list, tuple))), ())
        sizes = [numel(i) for i in listed if i is not None] or [numel(indices) if indices is not None else numel(self)]
        rows = max(sizes)
        touched = rows * int(self.dtype.itemsize)
        dims = {"rows": rows, "cols": 1}
        if inplace:
            return Work("index.put", dims, reads={0: 0}, writes=touched)
        return Work("index.put", dims)

    return formula


for _name in ("index_put", "_index_put_impl", "scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy"):
    cost(f"aten::{_name}_")(_placed(inplace=True))
    cost(f"aten::{_name}")(_placed(inplace=False))
cost("aten::index_fill_", "aten::masked_scatter_", "aten::put_")(_placed(inplace=True))
cost("aten::index_fill", "aten::masked_scatter")(_placed(inplace=False))


@cost("aten::one_hot")
def one_hot(self: Tensor, *_: Any, out: Tensor, **__: Any) -> Work:
    """Zeros, into which a one is put for each index."""
    return Work("index.put", {"rows": numel(self), "cols": 1}, launches=2)


def factory(*_: Any, out: Any, **__: Any) -> Work:
    """A new tensor, written once; a source that only lends its shape is not read."""
    return Work("factory", {"numel": numel(first(out))}, reads={0: 0})


FACTORIES = (
    *("arange", "zeros", "ones", "full", "eye", "linspace", "logspace", "rand", "randn", "randint", "randperm"),
    *("zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_ones", "new_full"),
    *("scalar_tensor", "tril_indices", "triu_indices", "hann_window", "hamming_window", "normal"),
)
for _name in FACTORIES:
    cost(f"aten::{_name}")(factory)
