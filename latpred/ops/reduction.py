"""Formulas of reductions, scans, sorts and transforms along a dimension."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from latpred.ops.registry import Formula, Work, cost
from latpred.ops.shapes import Tensor, first, numel, rows_of


def reduction(kind: str) -> Formula:
    """Formula of an op whose every result stands for `cols` elements."""
    family = f"reduction.{kind}"

    def formula(self: Tensor, *_: Any, out: Any, **__: Any) -> Work:
        rows = numel(first(out))
        return Work(family, {"rows": rows, "cols": numel(self) // rows if rows else 0})

    return formula


REDUCTIONS = (
    *(
        "sum",
        "mean",
        "amax",
        "amin",
        "aminmax",
        "max",
        "min",
        "any",
        "all",
        "prod",
        "std",
        "var",
        "std_mean",
        "var_mean",
    ),
    *("argmax", "argmin", "logsumexp", "norm", "linalg_vector_norm", "nansum", "median", "mode", "count_nonzero"),
    *(
        "cumsum",
        "cumprod",
        "cummax",
        "cummin",
        "logcumsumexp",
        "diff",
        "histc",
        "bincount",
        "equal",
        "cosine_similarity",
    ),
)
for _name in REDUCTIONS:
    cost(f"aten::{_name}")(reduction(_name))


def _sort(kind: str) -> Formula:
    def formula(self: Tensor, *args: Any, out: Any, dim: int | None = None, **_: Any) -> Work:
        position = 1 if kind in ("topk", "kthvalue") else 0
        integers = [value for value in args if isinstance(value, int) and not isinstance(value, bool)]
        if kind == "multinomial":
            integers = []  # how many are drawn, along the last dimension
        along = dim if dim is not None else integers[position] if len(integers) > position else -1
        rows, cols = rows_of(self, along)
        return Work(f"sort.{kind}", {"rows": rows, "cols": cols})

    return formula


for _name in ("sort", "argsort", "topk", "kthvalue", "msort", "searchsorted", "bucketize", "multinomial"):
    cost(f"aten::{_name}")(_sort(_name))


@cost("aten::unique", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::nonzero")
def distinct(self: Tensor, *_: Any, out: Any, **__: Any) -> Work:
    """Values or places picked out of a whole tensor."""
    return Work("sort.unique", {"rows": 1, "cols": numel(self)})


def _fft(kind: str) -> Formula:
    def formula(self: Tensor, dim: int | Sequence[int] = -1, *_: Any, out: Any, **__: Any) -> Work:
        dims = [dim] if isinstance(dim, int) else dim
        cols = prod(self.shape[d] for d in dims)
        return Work(f"fft.{kind}", {"rows": numel(self) // cols if cols else 0, "cols": cols})

    return formula


cost("aten::_fft_c2c")(_fft("c2c"))
cost("aten::_fft_r2c")(_fft("r2c"))
cost("aten::_fft_c2r")(_fft("c2r"))
