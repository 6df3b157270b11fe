"""Precisions by name, and the dtype that floating-point tensors have in each."""

from __future__ import annotations

import torch

from latpred.errors import UsageError
from latpred.query import AMP

DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp64": torch.float64,
    **dict.fromkeys(AMP, torch.float32),
}
AUTOCAST = {name: DTYPES[half] for name, half in AMP.items()}  # what torch.autocast casts to
_NAMES = {dtype: name for name, dtype in DTYPES.items() if name not in ("tf32", *AMP)}


def precision_name(dtype: torch.dtype) -> str:
    """Name of the precision that a model with weights of a dtype has: the dtype's own where it has no other.

    >>> precision_name(torch.float64), precision_name(torch.complex64)
    ('fp64', 'complex64')
    """
    return _NAMES.get(dtype, str(dtype).rpartition(".")[2])


def dtype_of(precision: str) -> torch.dtype:
    """Floating-point dtype of weights and inputs in a precision.

    >>> dtype_of("tf32")
    torch.float32
    """
    if precision not in DTYPES:
        raise UsageError(f"precision {precision!r} is not known; choose one of {', '.join(DTYPES)}")
    return DTYPES[precision]


def refuse_autocast(precision: str | None, what: str) -> None:
    """Refuse a precision under torch.autocast where that is not predicted."""
    if precision in AMP:
        raise UsageError(f"{what} is not predicted under autocast; ask for precision={AMP[precision]!r} instead.")
