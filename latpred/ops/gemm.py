"""Formulas of matrix products: one weight matrix for all rows (gemm) or a batch of independent products (bmm)."""

from __future__ import annotations

from math import prod
from typing import Any

from latpred.ops.registry import Work, cost
from latpred.ops.shapes import Tensor, numel


def gemm(m: int, n: int, k: int, family: str = "gemm") -> Work:
    """One (m, k) x (k, n) product."""
    return Work(family, {"m": m, "n": n, "k": k}, macs=m * n * k)


def bmm(batch: int, m: int, n: int, k: int) -> Work:
    """`batch` independent (m, k) x (k, n) products."""
    return Work("bmm", {"batch": batch, "m": m, "n": n, "k": k}, macs=batch * m * n * k)


@cost("aten::linear")
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Any) -> Work:
    """`input @ weight.T + bias`."""
    k = weight.shape[-1]
    n = weight.shape[0] if len(weight.shape) == 2 else 1
    return gemm(numel(input) // k if k else 0, n, k)


@cost("aten::mm", "aten::_int_mm", "aten::_scaled_mm")
def mm(self: Tensor, mat2: Tensor, *_: Any, out: Any, **__: Any) -> Work:
    """Plain matrix product."""
    return gemm(self.shape[0], mat2.shape[1], self.shape[1])


@cost("aten::addmm", "aten::_addmm_activation")
def addmm(self: Tensor, mat1: Tensor, mat2: Tensor, *, out: Any, **_: Any) -> Work:
    """`beta * self + alpha * mat1 @ mat2`."""
    return gemm(mat1.shape[0], mat2.shape[1], mat1.shape[1])


@cost("aten::mv", "aten::dot", "aten::vdot", "aten::inner")
def mv(self: Tensor, vec: Tensor, *, out: Any) -> Work:
    """Matrix or vector times vector."""
    return gemm(numel(self) // self.shape[-1] if self.shape[-1] else 0, 1, self.shape[-1])


@cost("aten::addmv")
def addmv(self: Tensor, mat: Tensor, vec: Tensor, *, out: Any, **_: Any) -> Work:
    """`self + mat @ vec`."""
    return gemm(mat.shape[0], 1, mat.shape[1])


@cost("aten::addr", "aten::outer", "aten::ger")
def outer(*args: Tensor, out: Tensor, **_: Any) -> Work:
    """Outer product of two vectors."""
    return gemm(out.shape[0], out.shape[1], 1)


@cost("aten::bmm")
def batched(self: Tensor, mat2: Tensor, *_: Any, out: Any) -> Work:
    """Batched matrix product."""
    return bmm(self.shape[0], self.shape[1], mat2.shape[2], self.shape[2])


@cost("aten::baddbmm", "aten::addbmm")
def baddbmm(self: Tensor, batch1: Tensor, batch2: Tensor, *, out: Any, **_: Any) -> Work:
    """Batched matrix product added to a tensor."""
    return bmm(batch1.shape[0], batch1.shape[1], batch2.shape[2], batch1.shape[2])


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
    """Rows sorted by expert, each times its expert's matrix."""
    k, n = self.shape[-1], mat2.shape[-1]
    return gemm(prod(self.shape[:-1]), n, k, "gemm.grouped")


@cost("aten::bilinear", "aten::_trilinear")
def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, *_: Any, out: Tensor, **__: Any) -> Work:
    """`x1 A x2 + b` for each output feature."""
    return gemm(numel(out), weight.shape[-1], weight.shape[-2])
