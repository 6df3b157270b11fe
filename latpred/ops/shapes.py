"""Arithmetic on shapes that several cost formulas share. Works on anything with `.shape`, `.dtype` and `.stride()`."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Protocol


class Tensor(Protocol):
    """The two things a formula asks of a tensor; of its dtype, only the `itemsize`."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> Any: ...


def numel(tensor: Tensor) -> int:
    """Number of elements."""
    return prod(tensor.shape)


def nbytes(tensor: Tensor) -> int:
    """Bytes of all elements."""
    return prod(tensor.shape) * int(tensor.dtype.itemsize)


def is_tensor(value: object) -> bool:
    """Whether an argument is tensor-like."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def first(out: Any) -> Any:
    """The (first) tensor of an op's result."""
    return out[0] if isinstance(out, (tuple, list)) else out


def pair(value: int | Sequence[int]) -> tuple[int, int]:
    """Two numbers from a scalar, a one- or a two-element argument; the height of a 1-d argument is 1.

    >>> pair(3), pair([2]), pair([2, 5])
    ((3, 3), (1, 2), (2, 5))
    """
    if isinstance(value, int):
        return value, value
    return (1, int(value[0])) if len(value) == 1 else (prod(value[:-1]), int(value[-1]))


def rows_of(tensor: Tensor, dim: int) -> tuple[int, int]:
    """How many slices along `dim` a tensor has, and how long they are."""
    cols = tensor.shape[dim] if len(tensor.shape) else 1
    return (numel(tensor) // cols if cols else 0), cols


def run_length(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements that lie next to each other in memory when a tensor is read in row-major order.

    >>> run_length((2, 3, 4), (12, 4, 1)), run_length((2, 4, 3), (12, 1, 4)), run_length((2, 4, 3), (12, 3, 1))
    (24, 1, 24)
    """
    run = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size == 1:
            continue
        if step != run:
            break
        run *= size
    return run


def stored_numel(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements that really lie in memory: an expanded dimension repeats the same ones.

    >>> stored_numel((8, 128, 128), (0, 128, 1))
    16384
    """
    return prod(size for size, step in zip(shape, stride, strict=True) if step)
