"""Architectures put together from a supernet: the graphs that traces of them give, or a refusal."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import latpred
from latpred.errors import TraceError, UsageError
from latpred.search import supernet as supernets
from latpred.tracing import trace

IMAGE = {"image": 8}


class Mixed(nn.Module):
    """Places of every kind: after each other, beside each other, one that is called twice, and memory that lives on."""

    def __init__(self, place: Callable[[str, dict[str, nn.Module | None]], nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.first, self.second = place("first", layers()), place("second", layers())
        self.again = place("again", layers())
        self.plain = nn.Sequential(place("last", layers()), place("last", layers()), nn.Flatten())
        self.head = nn.Linear(4 * 8 * 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        left, right = self.first(x), self.second(x)
        x = self.again(self.again(left + right))
        return helped(self.head(self.plain(x + left)))


def helped(x: torch.Tensor) -> torch.Tensor:
    """Python after the last op."""
    return (lambda: x)()


def layers() -> dict[str, nn.Module | None]:
    return {
        "conv": nn.Sequential(nn.Conv2d(4, 8, 1), nn.GELU(), nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4)),
        "identity": nn.Identity(),
        "in place": nn.ReLU(inplace=True),
        "twice": nn.Sequential(nn.Tanh(), nn.Sigmoid()),
    }


def chosen(label: str, options: dict[str, nn.Module | None], architecture: dict[str, str]) -> nn.Module:
    layer = options[architecture[label]]
    assert layer is not None
    return layer


@pytest.mark.parametrize("most", [supernets.MOST_PIECES, 3])
def test_every_architecture_is_what_its_trace_gives(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supernets, "MOST_PIECES", most)
    supernet = latpred.Supernet(Mixed(latpred.Choice), **IMAGE)
    assert list(supernet.choices) == ["first", "second", "again", "last"]
    draw = random.Random(0)
    for _ in range(12):
        architecture = {label: draw.choice(options) for label, options in supernet.choices.items()}
        whole = Mixed(lambda label, options, these=architecture: chosen(label, options, these))
        assert supernet.graph(architecture) == trace(whole, **IMAGE)


class Casting(nn.Module):
    """Enters torch.autocast itself, in a layer that is chosen."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.layer = device, nn.Conv2d(3, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            return self.layer(x) + x.new_zeros(1)  # type: ignore[no-any-return]  # which gives float32


def fixed(batch: int) -> torch.Tensor:
    return torch.zeros(2, 3, 8, 8)


@pytest.mark.parametrize(
    ("layer", "asked"),
    [
        (nn.Conv2d(3, 4, 1), {"inputs": fixed}),
        (Casting("cuda"), {"image": 8}),
        (Casting("cpu"), {"image": 8, "target": "cpu"}),
    ],
    ids=["fixed inputs", "autocast", "autocast of a CPU"],
)
def test_a_graph_says_what_its_trace_says(layer: nn.Module, asked: dict[str, Any]) -> None:
    options = {"a": nn.Conv2d(3, 4, 1, bias=False), "b": layer}
    graph = latpred.Supernet(nn.Sequential(latpred.Choice("c", options)), **asked).graph({"c": "b"})
    whole = trace(nn.Sequential(layer), **asked)
    assert whole.notes
    assert graph == whole


def test_a_layer_that_is_not_there() -> None:
    def network(*middle: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 1), *middle, nn.ReLU())

    layer = nn.Conv2d(4, 4, 3, padding=1)
    supernet = latpred.Supernet(network(latpred.Choice("middle", {"conv": layer, "none": None})), **IMAGE)
    assert supernet.graph({"middle": "conv"}) == trace(network(layer), **IMAGE)
    without, whole = supernet.graph({"middle": "none"}), trace(network(), **IMAGE)
    assert [op.module for op in without.ops] == ["0", "2"]
    assert [op.module for op in whole.ops] == ["0", "1"]  # all that differs
    moved = tuple(msgspec.structs.replace(op, module=str(i)) for i, op in enumerate(without.ops))
    assert msgspec.structs.replace(without, ops=moved) == whole


def test_functions_inputs_and_precisions() -> None:
    def build() -> nn.Module:
        options = nn.ModuleDict({"8": nn.Linear(4, 8), "same": nn.Linear(4, 8, bias=False)})
        return nn.Sequential(latpred.Choice("width", options))

    inputs = torch.zeros(1, 4)
    graph = latpred.Supernet(build, inputs, precision="fp16").graph({"width": "same"}, name="small")
    whole = trace(nn.Sequential(nn.Linear(4, 8, bias=False)), inputs, precision="fp16")
    assert (graph.model, graph.parameters, graph.parameter_bytes) == ("small", 32, 64)
    assert graph.ops == whole.ops


def test_a_choice_is_the_layer_that_is_chosen() -> None:
    choice = latpred.Choice("sign", {"plus": nn.Identity(), "none": None, "tanh": nn.Tanh()})
    x = torch.ones(2)
    assert choice(x) is x
    choice.chosen = "none"
    assert choice(x) is x
    choice.chosen = "tanh"
    assert choice(x).tolist() == torch.tanh(x).tolist()


def sequential(**options: nn.Module | None) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 1), latpred.Choice("c", options))


def rereading() -> nn.Module:
    layer = nn.Conv2d(64, 64, 3, padding=1)
    return nn.Sequential(nn.Conv2d(3, 64, 1), layer, latpred.Choice("c", {"a": nn.ReLU()}), layer)


class Looking(nn.Module):
    """A network whose forward does other work where its choice gives what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.choice = latpred.Choice("c", {"relu": nn.ReLU(), "none": nn.Identity()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.choice(x)
        return out if out is x else out + x


class Skipping(nn.Module):
    """A network whose forward looks at what is chosen, and calls its choice for one option only."""

    def __init__(self) -> None:
        super().__init__()
        self.choice = latpred.Choice("c", {"relu": nn.ReLU(), "skip": nn.Identity()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.choice.chosen == "skip" else self.choice(x)


def tied() -> nn.Module:
    layer = nn.Conv2d(3, 3, 1)
    return nn.Sequential(layer, latpred.Choice("c", {"tied": layer, "free": nn.Conv2d(3, 3, 1)}))


@pytest.mark.parametrize(
    ("build", "error", "said"),
    [
        (
            lambda: sequential(a=nn.Conv2d(4, 4, 1), b=nn.Conv2d(4, 6, 1)),
            UsageError,
            r"of choice 'c' at '1' do not fit.*: 'a' gives \(3, 4, 8, 8\) in .*, 'b' \(3, 6, 8, 8\) in",
        ),
        (
            lambda: sequential(a=nn.Conv2d(4, 6, 1), b=None),
            UsageError,
            r"'b' leaves \(2, 4, 8, 8\) in .* as it is, 'a' gives \(2, 6, 8, 8\)",
        ),
        (lambda: sequential(a=None), UsageError, "'c' has no layer to choose"),
        (lambda: sequential(a=latpred.Choice("d", {"e": nn.ReLU()})), UsageError, "'d' lies within another"),
        (lambda: sequential(a=latpred.Choice("d", {"e": nn.Conv2d(4, 4, 1)})), UsageError, "'d' lies within another"),
        (lambda: sequential(a=nn.ReLU), UsageError, "option 'a' of choice 'c' is <class"),
        (lambda: sequential(a=nn.MaxPool2d(1, return_indices=True)), UsageError, "'a' of choice 'c' gives a tuple"),
        (lambda: latpred.Choice("c", [nn.ReLU()]), UsageError, "options of choice 'c' have no names"),
        (nn.Sequential(nn.Conv2d(3, 4, 1)), UsageError, "no latpred.Choice in it"),
        (lambda: "resnet18", UsageError, "returned a str"),
        (
            lambda: nn.Sequential(sequential(a=nn.ReLU()), latpred.Choice("c", {"b": nn.ReLU()})),
            UsageError,
            "label 'c' have different opt",
        ),
        (tied, TraceError, "shares weights with"),
        (rereading, TraceError, "reads weights more than once"),
        (lambda: nn.Sequential(nn.Conv2d(3, 3, 1), Looking()), TraceError, "around a choice depends on the option"),
        (lambda: nn.Sequential(nn.Conv2d(3, 3, 1), Skipping()), TraceError, "goes without '1.choice'"),
    ],
)
def test_what_does_not_go_together_is_refused(build: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        latpred.Supernet(build, **IMAGE)


@pytest.mark.parametrize(
    ("asked", "said"),
    [({"image": 0}, "image=0 is not a length"), ({"image": 8, "target": "tpu"}, "target 'tpu' is not known")],
)
def test_wrong_questions_are_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        latpred.Supernet(sequential(a=nn.ReLU(), b=nn.GELU()), **asked)


def test_wrong_choices_are_refused() -> None:
    supernet = latpred.Supernet(sequential(a=nn.ReLU(), b=nn.GELU()), **IMAGE)
    for wrong in ({}, ["a"], {"c": "a", "e": "a"}):
        with pytest.raises(UsageError, match=r"is no choice for each label; .* an option of each of: c"):
            supernet.graph(wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="choice 'c' has no option 'd'; it has: a, b"):
        supernet.graph({"c": "d"})
    numbered = latpred.Supernet(nn.Sequential(latpred.Choice("c", {3: nn.ReLU(), 5: nn.GELU()})), torch.zeros(1, 3))
    with pytest.raises(UsageError, match="no option 7; it has: 3, 5"):
        numbered.graph({"c": 7})  # type: ignore[dict-item]


def test_layers_that_differ_by_device_are_those_of_one_kind() -> None:
    supernet = latpred.Supernet(sequential(a=nn.ReLU(), b=nn.RMSNorm(8)), **IMAGE, target="cpu")
    graph = supernet.graph({"c": "b"})
    assert graph.target == "cpu"
    assert sum(op.name == "aten::rsqrt" for op in graph.ops) == 1
