"""Fingerprints: the same for the same model or candidate, in every process; none where nobody can tell."""

from __future__ import annotations

import argparse
import functools
import os
import random
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from searchdata import Stubborn, builder
from smallmodels import written
from torch import nn
from transformers import BertConfig, BertModel

from latpred.runtimes.lowering import trace_for_runtime
from latpred.runtimes.source import code_of
from latpred.sandbox.fingerprint import fingerprint


def scoped(source: str, **names: Any) -> Callable[[], nn.Module]:
    """A function `candidate` with globals of its own."""
    scope: dict[str, Any] = {"__name__": "mine", "nn": nn, "torch": torch, **names}
    exec(source, scope)
    found: Callable[[], nn.Module] = scope["candidate"]
    return found


def reading(width: str, **names: Any) -> Callable[[], nn.Module]:
    return scoped(f"def candidate(): return nn.Linear(64, {width})", **names)


class Helped:
    """A callable object whose settings are all there is to it."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self) -> nn.Module:
        return nn.Linear(self.width, self.width)


def cached(width: int) -> Any:
    source = f"import functools\n@functools.cache\ndef width(): return {width}\ndef candidate(): return width()"
    return scoped(source)


def decorated(times: int) -> Any:
    def deeper(function: Callable[[], int]) -> Callable[[], int]:
        return functools.wraps(function)(lambda: times * function())

    return scoped("@deeper\ndef depth(): return 2\ndef candidate(): return depth()", deeper=deeper)


def holding(value: Any) -> nn.Module:
    made = nn.Linear(4, 4)
    made._setting = value
    return made


def attending(number: int) -> BertConfig:
    return BertConfig(attn_implementation="eager" if number == 8 else "sdpa")


def buffered(steps: torch.Tensor) -> nn.Module:
    made = nn.Linear(4, 4)
    made.register_buffer("steps", steps)
    return made


def bert(width: int) -> nn.Module:
    with torch.device("meta"):
        return BertModel(BertConfig(num_hidden_layers=1, hidden_size=width, num_attention_heads=2, intermediate_size=8))


class Settings:
    width = 64

    def __init__(self, depth: object) -> None:
        self.depth = depth


def configured(width: Any) -> ModuleType:
    module = ModuleType("mine_config")
    module.width = width
    return module


ONE, OTHER = builder(8), builder(16)
NUMBERED: dict[str, Callable[[int], Any]] = {
    "name": "resnet{}".format,
    "function": builder,
    "depth": lambda depth: lambda: nn.Sequential(*[nn.Linear(8, 8)] * depth),
    "callable object": Helped,
    "function that keeps its results": cached,
    "decorator": decorated,
    "functions of one name": lambda width: (builder(8), builder(16), builder(width)),
    "inputs of a layer": lambda width: nn.Linear(width, 4),
    "outputs of a layer": lambda width: nn.Linear(4, width),
    "bias": lambda width: nn.Linear(4, 4, bias=width > 8),
    "width of a recurrent layer": lambda width: nn.LSTM(4, width),
    "layout of a weight": lambda number: nn.Conv2d(4, 4, 3).to(
        memory_format=torch.channels_last if number == 8 else torch.contiguous_format
    ),
    "weights to train": lambda number: nn.Linear(4, 5).requires_grad_(number == 8),
    "setting of a layer": lambda number: nn.Dropout(number / 100),
    "plain value of a module": holding,
    "other value of a module": lambda number: holding(argparse.Namespace(mode=number)),
    "model of a library": bert,
    "attention of a config": attending,
    "attention of a module's config": lambda number: holding(attending(number)),
    # Python may read them.
    "buffer of whole numbers": lambda number: buffered(torch.tensor([number])),
    "buffer of one number": lambda number: buffered(torch.tensor(float(number))),
    "few numbers in a helper": lambda number: holding(Settings(torch.tensor([float(number)]))),
    # What a candidate names is part of it.
    "namespace": lambda width: reading("settings.width", settings=argparse.Namespace(width=width)),
    "dict": lambda width: reading("settings['width']", settings={"width": width}),
    "list": lambda width: reading("settings[-1]", settings=[64, width]),
    "object": lambda depth: reading("settings.depth", settings=Settings(depth)),
    "class attribute": lambda width: reading(
        "Own.width", Own=type("Own", (Settings,), {"__module__": "mine", "width": width})
    ),
    "attribute of a module": lambda width: reading("config.width", config=configured(width)),
    "function of a module": lambda width: reading("config.width(4)", config=configured(lambda four: width + four)),
    "dict in a module": lambda width: reading("config.width['a']", config=configured({"a": width})),
    "tensor": lambda width: reading("int(widths[0])", widths=torch.tensor([float(width)])),
}


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """What candidates here set in the process is put back."""
    monkeypatch.setenv("W14", "64")
    monkeypatch.setitem(sys.modules, "mine_config", configured(64))


def test_lists_end_where_they_end() -> None:
    nested = ([64], 128), ([64, 128],), ([64], [128]), ([[64], 128],)
    assert len({fingerprint(functools.partial(builder, *widths)) for widths in nested}) == len(nested)


def test_weights_that_a_trace_does_without_tell_nothing_apart() -> None:
    assert fingerprint(nn.LSTM(4, 4)) == fingerprint(nn.LSTM(4, 4))
    assert fingerprint(buffered(torch.zeros(4))) == fingerprint(buffered(torch.ones(4)))


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("kind", NUMBERED)
def test_a_number_tells_candidates_apart(kind: str) -> None:
    one, again, other = (fingerprint(NUMBERED[kind](number)) for number in (8, 8, 16))
    assert None is not one == again != other is not None


@pytest.mark.usefixtures("restored")
def test_kinds_of_candidates_are_told_apart() -> None:
    assert len({fingerprint(make(8)) for make in NUMBERED.values()}) == len(NUMBERED)
    assert fingerprint(Stubborn()) is None


@pytest.mark.usefixtures("restored")
def test_a_file_counts_by_what_is_in_it(tmp_path: Path) -> None:
    file = tmp_path / "10:30" / "mine.py"
    file.parent.mkdir()
    file.write_text("def build(): ...\n")
    before = fingerprint(f"{file}:build")
    file.write_text("import torch\ndef build(): return 1\n")
    assert fingerprint(f"{file}:build") not in (before, None)
    for line in (
        *("import own_blocks", "from . import blocks", "from own.blocks import conv", "from mine_config import width"),
        *("width = int(open('width.txt').read())", "import os; width = os.environ['WIDTH']"),
        *("import torch; width = torch.load('width.pt')", "def width(): return eval('1')"),
    ):
        file.write_text(f"{line}\ndef build(): return 1\n")
        assert fingerprint(f"{file}:build") is None, "what it imports or reads may change"


def test_a_candidate_is_another_once_what_it_names_has_changed() -> None:
    settings = argparse.Namespace(width=8)
    candidate = reading("settings.width", settings=settings)
    before = fingerprint(candidate)
    settings.width = 16
    assert fingerprint(candidate) not in (before, None)


@pytest.mark.parametrize(
    "source",
    [
        "def candidate(): return nn.Linear(64, lock.width)",
        "def candidate(): return nn.Linear(64, int(open('width.txt').read()))",
        "def candidate(): return nn.Linear(64, eval('width'))",
        "def candidate(): return nn.Linear(64, getattr(config, 'width'))",
        "def candidate():\n    import mine_config\n    return nn.Linear(64, mine_config.width)",
        "def candidate():\n    from mine_config import width\n    return nn.Linear(64, width)",
        "def candidate(): return nn.Linear(64, int(path.read_text()))",
        "def candidate(): return nn.Linear(64, int(np.load('width.npy')))",
        "def candidate(): return nn.Linear(64, torch.load('width.pt'))",
        "def candidate(): return nn.Linear(64, int(os.getenv('W14')))",
        "def candidate(): return nn.Linear(64, int(os.environ['W14']))",
        "def candidate():\n    from transformers import AutoConfig\n    return AutoConfig.from_pretrained('mine')",
        "def candidate(): return nn.Linear(64, 8 if os.path.exists('wide') else 4)",
        "def candidate():\n    from importlib import import_module\n    return import_module('mine').build()",
        "def candidate():\n    from os import environ\n    return nn.Linear(64, int(environ['W14']))",
    ],
)
@pytest.mark.usefixtures("restored")
def test_what_cannot_be_told_has_no_fingerprint(source: str) -> None:
    named = {"lock": threading.Lock(), "config": configured(64), "width": 8, "path": Path("width.txt")}
    assert fingerprint(scoped(source, **named, np=np, os=os)) is None


@pytest.mark.parametrize(
    "source",
    [
        "def candidate(): return nn.Linear(64, int(torch.randint(8, 512, ())))",
        "def candidate(): return nn.Linear(64, random.randint(8, 512))",
        "def candidate(): return nn.Linear(64, np.random.randint(8, 512))",
        "def candidate():\n    import random\n    return nn.Linear(64, random.randint(8, 512))",
        "def candidate():\n    from random import choice\n    return nn.Linear(64, choice((8, 512)))",
        "def candidate():\n    from numpy.random import normal\n    return nn.Linear(64, int(normal(64)))",
        "drawn = torch.randint\ndef candidate(): return nn.Linear(64, int(drawn(8, 512, ())))",
    ],
)
def test_what_is_drawn_anew_each_time_it_is_built_has_no_fingerprint(source: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"import numpy as np, torch\nfrom torch import nn\n{source}\n")
    for candidate in (scoped(source, random=random, np=np), f"{file}:candidate"):
        assert fingerprint(candidate, builds=True) is None
        assert fingerprint(candidate) is not None, "inputs may be drawn"


def test_a_function_that_reads_is_known_under_another_name() -> None:
    assert fingerprint(reading("fetch('W14')", fetch=os.getenv), builds=True) is None


def test_attributes_of_locals_are_not_taken_for_globals() -> None:
    source = "def candidate():\n    made = nn.Linear(4, 4)\n    made.lock\n    return made"
    assert fingerprint(scoped(source, lock=threading.Lock())) is not None


SQUARE, DOUBLE = "return torch.relu(x) * torch.relu(x)", "return 2 * torch.relu(x)"


def patched(model: torch.nn.Module) -> torch.nn.Module:
    model.forward = types.MethodType(lambda self, x: torch.relu(x), model)
    return model


@pytest.mark.parametrize(
    ("model", "changed"),
    [
        *((written(SQUARE), written(text)) for text in (DOUBLE, "y = torch.relu(x); return y * y")),
        (written(SQUARE), written("return torch.relu(x) * torch.relu(x + 0)")),
        (written(SQUARE), patched(written(SQUARE))),
        (written("return f(x)", f=lambda x: x + 1), written("return f(x)", f=lambda x: x - 1)),
        (torch.fx.symbolic_trace(written(SQUARE)), torch.fx.symbolic_trace(written(DOUBLE))),
    ],
)
def test_other_code_has_another_digest_and_moved_code_its_own(model: torch.nn.Module, changed: torch.nn.Module) -> None:
    assert fingerprint(written(SQUARE)) == fingerprint(written(SQUARE))
    assert fingerprint(model) != fingerprint(changed)


class Wired(nn.Module):
    """Gives what one of its layers gave, which an attribute says, and leaves all later ones to whoever drops them."""

    def __init__(self, layer: object) -> None:
        super().__init__()
        self.layers, self.layer = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), layer

    def forward(self, x: torch.Tensor, *wanted: int) -> torch.Tensor:
        outs = []
        for layer in self.layers:
            x = layer(x)
            outs.append(x)
        return outs[wanted[0] if wanted else getattr(self.layer, "at", self.layer)]


def test_what_a_model_is_set_to_tells_it_from_another_of_the_same_trace() -> None:
    first, last, one = Wired(0), Wired(3), torch.zeros(2, 8)
    assert fingerprint(first) == fingerprint(Wired(0).eval()) != fingerprint(last)
    held = [fingerprint(Wired(types.SimpleNamespace(at=at, owner=first))) for at in (0, 0, 3)]
    assert held[0] == held[1] != held[2]
    assert code_of(first, (one, 0)) == code_of(first, (one + 1, 0)) != code_of(first, (one, 3))
    launches = [trace_for_runtime(model, one, runtime="torchscript").launches() for model in (first, last)]
    assert launches[0] < launches[1]


def test_a_digest_is_the_same_for_equal_models_whatever_they_hold() -> None:
    def hooked() -> nn.Module:
        model = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        model.register_forward_hook(lambda module, args, out: out * 2)
        model.code = nn.Parameter(torch.randn(4))  # type: ignore[assignment]
        return model

    assert fingerprint(hooked()) == fingerprint(hooked())
    assert fingerprint(nn.Sequential(nn.Linear(8, 1))) == fingerprint(nn.Sequential(nn.Linear(8, 1)))  # biases drawn
    chain: object = None
    for _ in range(2000):
        chain = [chain]
    assert fingerprint(Wired(chain)) is None, "too deep to be told"
    assert code_of(Wired(chain)) is None
