"""float32 for tensors of which nothing else is said, whatever the process has set with `torch.set_default_dtype`.

That setting belongs to all threads, so it stays: this thread finds other functions where PyTorch's are that ask for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType
from typing import Any

import torch

from latpred.ownthread import SWITCHING, replaced

_FLOATING = ("empty", "zeros", "ones", "rand", "randn", "eye", "linspace", "logspace")
_AS_GIVEN = ("tensor", "as_tensor", "scalar_tensor", "full", "arange", "range")  # floating where a value is


@contextmanager
def usual_dtype() -> Iterator[None]:
    """Make tensors in float32 where nothing else is said, as a published model expects, in this thread.

    What PyTorch itself promotes, as a quotient of integers, becomes what the process says.
    """
    with ExitStack() as usual:
        if torch.get_default_dtype() != torch.float32:
            usual.enter_context(replaced(torch, "get_default_dtype", _float32))
            for name in (*_FLOATING, *_AS_GIVEN):
                usual.enter_context(replaced(torch, name, _in_float32(getattr(torch, name), name in _FLOATING)))
        yield


def _float32() -> torch.dtype:
    return torch.float32


def _in_float32(make: Callable[..., torch.Tensor], floating: bool) -> Callable[..., torch.Tensor]:
    def made(*args: Any, **options: Any) -> torch.Tensor:
        if options.get("dtype") is None and options.get("out") is None and (floating or _has_float((args, options))):
            options["dtype"] = torch.float32
        return make(*args, **options)

    return made


def _has_float(value: Any) -> bool:
    """Whether there is a Python float; written without a generator, which would be one more call of Python."""
    if isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            if _has_float(item):
                return True
    return type(value) is float


# Code that runs with a model, but is not its own.
CODES: frozenset[CodeType] = frozenset(
    {SWITCHING, _float32.__code__, _in_float32(torch.empty, True).__code__, _has_float.__code__}
)
