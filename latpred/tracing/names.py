"""Models by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from latpred.errors import UnknownModelError


@dataclass(frozen=True, slots=True)
class Built:
    """A model built by name."""

    model: torch.nn.Module
    inputs: Callable[[int, Any], Any]
    name: str
    input_kind: str
    input_size: int


def build(
    name: str, *, seq: int | None = None, image: int | None = None, device: str = "meta", precision: str = "fp32"
) -> Built:
    raise UnknownModelError(name)
