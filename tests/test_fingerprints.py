"""Fingerprints of candidates: the same for the same architecture, another for another, none where nobody can tell."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from latpred.fingerprints import fingerprint


def builder(width: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(64, width), nn.ReLU())


class Locked:
    """A candidate that holds what two objects cannot be compared by."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self) -> nn.Module:
        return builder(32)()


def test_fingerprints_tell_architectures_apart() -> None:
    def depth(count: int) -> Callable[[], nn.Module]:
        return lambda: nn.Sequential(*[nn.Linear(8, 8)] * count)

    kinds: list[Any] = [
        *("resnet18", "resnet34", builder(8), builder(16), depth(2), depth(3)),
        *(
            nn.Linear(4, 8),
            nn.Linear(4, 8, bias=False),
            nn.Linear(8, 4),
            nn.Dropout(0.1),
            nn.Dropout(0.2),
            Helped(1),
            Helped(2),
        ),
    ]
    prints = [fingerprint(kind) for kind in kinds]
    assert None not in prints
    assert len(set(prints)) == len(kinds)
    assert fingerprint(builder(8)) == prints[2]
    assert fingerprint(nn.Linear(4, 8)) == prints[6]
    assert fingerprint(Locked()) is None


class Helped:
    """A callable object whose settings are all there is to it."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self) -> nn.Module:
        return nn.Linear(self.width, self.width)


def test_a_function_that_keeps_its_results_counts_by_its_code() -> None:
    def build(width: int) -> Callable[[], nn.Module]:
        scope: dict[str, Any] = {"__name__": "mine"}
        exec(f"import functools\n@functools.cache\ndef width(): return {width}\ndef build(): return width()", scope)
        found: Callable[[], nn.Module] = scope["build"]
        return found

    assert fingerprint(build(8)) == fingerprint(build(8)) != fingerprint(build(16))


def test_a_decorator_counts_beside_what_it_wraps() -> None:
    def build(times: int) -> Callable[[], nn.Module]:
        def deeper(function: Callable[[], int]) -> Callable[[], int]:
            return functools.wraps(function)(lambda: times * function())

        scope: dict[str, Any] = {"__name__": "mine", "deeper": deeper}
        exec("@deeper\ndef depth(): return 2\ndef build(): return depth()", scope)
        found: Callable[[], nn.Module] = scope["build"]
        return found

    assert fingerprint(build(1)) == fingerprint(build(1)) != fingerprint(build(3))


def test_a_file_counts_by_what_is_in_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def build(): ...\n")
    before = fingerprint(f"{file}:build")
    file.write_text("def build(): return 1\n")
    assert fingerprint(f"{file}:build") != before
