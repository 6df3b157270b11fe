"""Whole layers that torch runs as one op, replaced by the kernels inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

REPLACEMENTS: dict[str, Callable[..., Any]] = {}


@contextmanager
def enabled() -> Iterator[None]:
    """Let torch take its fast paths on the meta device, as it would on a CPU or a GPU."""
    yield
