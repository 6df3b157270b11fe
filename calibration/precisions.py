"""Brings networks and tensors to a precision, as a user's own `.half()` or `.to(torch.bfloat16)` would."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def cast(tensors: Iterable[Tensor], precision: str) -> tuple[Tensor, ...]:
    """Floating-point tensors in a precision's dtype; others as they are."""
    dtype = DTYPES[precision]
    return tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in tensors)
