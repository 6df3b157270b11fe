"""Fingerprints of candidates: the same for the same architecture, another for another, none where nobody can tell."""

from __future__ import annotations

import argparse
import functools
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import latpred
from latpred.search.resume import fingerprint


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


def scoped(source: str, **names: Any) -> tuple[Callable[[], nn.Module], dict[str, Any]]:
    """A function `candidate` with globals of its own, and those."""
    scope: dict[str, Any] = {"__name__": "mine", "nn": nn, "torch": torch, **names}
    exec(source, scope)
    return scope["candidate"], scope


class Settings:
    width = 64

    def __init__(self) -> None:
        self.depth = 2


class Slotted:
    __slots__ = ("width",)

    def __init__(self, width: int) -> None:
        self.width = width


def _configured(module: Any) -> ModuleType:
    found = ModuleType("mine_config")
    found.width = module
    return found


CHANGES: dict[str, tuple[str, Callable[[], dict[str, Any]], str]] = {
    "namespace": ("settings.width", lambda: {"settings": argparse.Namespace(width=64)}, "settings.width = 4096"),
    "dict": ("settings['width']", lambda: {"settings": {"width": 64}}, "settings['width'] = 4096"),
    "list": ("settings[-1]", lambda: {"settings": [1, [64]][1]}, "settings.append(4096)"),
    "object": ("settings.depth", lambda: {"settings": Settings()}, "settings.depth = 5"),
    "object in an object": (
        "settings.inner.depth",
        lambda: {"settings": argparse.Namespace(inner=Settings())},
        "settings.inner.depth = 5",
    ),
    "slots": ("settings.width", lambda: {"settings": Slotted(64)}, "settings.width = 4096"),
    "class attribute": (
        "Own.width",
        lambda: {"Own": type("Own", (Settings,), {"__module__": "mine", "width": 64})},
        "Own.width = 4096",
    ),
    "attribute of a module": ("config.width", lambda: {"config": _configured(64)}, "config.width = 4096"),
    "dict in a module": (
        "config.width['a']",
        lambda: {"config": _configured({"a": 64})},
        "config.width['a'] = 4096",
    ),
    "tensor": ("int(widths[0])", lambda: {"widths": torch.tensor([64.0])}, "widths[0] = 4096.0"),
    "environment": ("int(os.environ['W14'])", lambda: {"os": __import__("os")}, "os.environ['W14'] = '4096'"),
    "method of a dict": ("get('width')", lambda: {"get": {"width": 64}.get}, "get.__self__['width'] = 4096"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_a_candidate_names_is_part_of_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("W14", "64")
    width, names, change = CHANGES[name]
    candidate, scope = scoped(f"def candidate(): return nn.Linear(64, {width})", **names())
    before = fingerprint(candidate)
    assert before is not None
    assert before == fingerprint(scoped(f"def candidate(): return nn.Linear(64, {width})", **names())[0])
    exec(change, scope)
    assert fingerprint(candidate) not in (before, None)


@pytest.mark.parametrize(
    "source",
    [
        "def candidate(): return nn.Linear(64, lock.width)",
        "def candidate(): return nn.Linear(64, int(open('width.txt').read()))",
        "def candidate(): return nn.Linear(64, eval('width'))",
        "def candidate(): return nn.Linear(64, getattr(config, 'width'))",
        "def candidate():\n    import mine_config\n    return nn.Linear(64, mine_config.width)",
    ],
)
def test_what_cannot_be_told_has_no_fingerprint(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _configured(64)
    monkeypatch.setitem(sys.modules, "mine_config", config)
    assert fingerprint(scoped(source, lock=threading.Lock(), config=config, width=8)[0]) is None


def test_an_import_within_a_candidate_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    config = _configured(64)
    monkeypatch.setitem(sys.modules, "mine_config", config)
    candidate, _ = scoped("def candidate():\n    from mine_config import width\n    return nn.Linear(64, width)")
    before = fingerprint(candidate)
    config.width = 4096  # type: ignore[attr-defined]
    assert None is not before != fingerprint(candidate)


def test_attributes_of_locals_are_not_taken_for_globals() -> None:
    source = "def candidate():\n    made = nn.Linear(4, 4)\n    made.lock\n    return made"
    assert fingerprint(scoped(source, lock=threading.Lock())[0]) is not None


def test_functions_of_one_name_are_told_apart_where_they_come_again() -> None:
    one, other = builder(8), builder(16)
    assert fingerprint((one, other, one)) != fingerprint((one, other, other))


def test_what_a_module_holds_counts_though_it_is_no_plain_value() -> None:
    def holding(**settings: Any) -> nn.Module:
        made = nn.Linear(4, 4)
        made.settings, made._mode = argparse.Namespace(**settings), settings.get("mode")  # type: ignore[assignment]
        return made

    one = fingerprint(holding(mode=1))
    assert None is not one == fingerprint(holding(mode=1))
    assert len({one, fingerprint(holding(mode=2)), fingerprint(holding(mode=1, more=[1]))}) == 3


def test_models_of_libraries_have_fingerprints() -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=16)
    with torch.device("meta"):
        assert fingerprint(BertModel(config)) == fingerprint(BertModel(config)) is not None


SPACE = argparse.Namespace(width=64)


def reading_the_space() -> nn.Module:
    return nn.Linear(64, SPACE.width)


def test_a_resumed_run_predicts_anew_what_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def macs() -> float:
        asked: dict[str, Any] = {
            "inputs": torch.zeros(1, 64),
            "device": "epyc-shared",
            "resume": tmp_path / "r.parquet",
        }
        return float(latpred.predict_many([reading_the_space], **asked).macs[0])

    assert macs() == 64 * 64
    monkeypatch.setattr(SPACE, "width", 4096)
    assert macs() == 64 * 4096
