"""Brings networks and tensors to a precision, as a user's own `.half()` or `.to(torch.bfloat16)` would."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from latpred.tracing.precisions import dtype_of


def cast(tensors: Iterable[Tensor], precision: str) -> tuple[Tensor, ...]:
    """Floating-point tensors in a precision's dtype; others as they are."""
    dtype = dtype_of(precision)
    return tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in tensors)
