"""Predictions within modes and hooks of the user's: the same numbers, and nothing for a counter to count."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from smallmodels import Function
from torch import nn
from torch.nn.modules import module as modules
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig

import latpred
from latpred.calibration.measurement import whole_models
from latpred.runtimes import graph_store, lowering
from latpred.sandbox.own_thread import without_modes
from latpred.tracing.text_generation import trace_generation
from latpred.tracing.unequal_lengths import trace_lengths

DEVICE = "epyc-shared"
X = torch.zeros(2, 3, 8, 8)
BERT = BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=64)


class Net(nn.Module):
    """Makes constants and positions of its own in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(2))
        self.table, self.head = nn.Embedding(64, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.stem(x).transpose(1, 2)
        tokens = tokens + self.table(torch.arange(tokens.shape[1])) * torch.tensor(0.5)
        return self.head(tokens * torch.ones(8).softmax(0))  # type: ignore[no-any-return]


class Called(TorchFunctionMode):
    """Counts the functions it sees, and follows modules by a hook on all of them, as a FlopCounterMode does."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.threads: list[int] = []

    def __enter__(self) -> Called:
        self.handle = modules.register_module_forward_hook(self.note)
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *failure: Any) -> None:
        self.handle.remove()
        super().__exit__(*failure)

    def note(self, *_: Any) -> None:
        self.threads.append(threading.get_ident())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def by_default() -> Iterator[None]:
    """With a default device, as whole programs set it."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


WATCHING: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "FlopCounterMode": lambda: FlopCounterMode(display=False),
    "TorchFunctionMode": Called,
    "meta": lambda: torch.device("meta"),
    "cuda": lambda: torch.device("cuda"),
    "default meta": by_default,
}


def counted(watching: Any) -> Any:
    """What a counter has counted."""
    if isinstance(watching, FlopCounterMode):
        return watching.get_flop_counts(), watching.mod_tracker.parents
    return getattr(watching, "seen", watching)


@contextmanager
def unnoticed(name: str) -> Iterator[None]:
    """Within something that watches, which is to see nothing."""
    with WATCHING[name]() as watching:
        before = repr(counted(watching))
        yield
        assert repr(counted(watching)) == before


NETWORK = Net()
SUPERNET = nn.Sequential(nn.Conv2d(3, 8, 1), latpred.Choice("k", {"1": nn.Conv2d(8, 8, 1), "none": None}))


def answers() -> list[Any]:
    many = latpred.predict_many([Net, lambda: Net(), BERT], image=16, device=DEVICE)
    generated = trace_generation("gpt2", prompt=4, new_tokens=3)
    return [
        latpred.trace(NETWORK, X),
        latpred.trace("resnet-18"),
        latpred.trace("bert-base-uncased", seq=16),
        latpred.predict(NETWORK, [1, 8], inputs=lambda batch: torch.zeros(batch, 3, 8, 8), device=DEVICE),
        latpred.predict(NETWORK, 4, "torchscript", inputs=X, device=DEVICE),
        latpred.max_batch(NETWORK, 10.0, inputs=X, device=DEVICE),
        many.to_csv(),
        latpred.Supernet(SUPERNET, image=16).graph({"k": "1"}),
        [step.graph for step in (generated.prefill, *generated.steps)],
        trace_lengths("bert-base-uncased", [3, 5], 8, "packed"),
    ]


@cache
def outside() -> list[Any]:
    """Of all tests the first one asks again without anything that watches."""
    return answers()


@pytest.mark.parametrize("name", WATCHING)
def test_numbers_are_the_same_within(name: str) -> None:
    with unnoticed(name):
        inside = answers()
    for one, other in zip(inside, outside(), strict=True):
        assert one == other


@cache
def made_outside(runtime: str) -> Any:
    """The same for a runtime whose tools take long."""
    return lowering.trace_for_runtime(Net(), X, runtime=runtime)


@pytest.mark.parametrize(
    ("name", "runtime"),
    [("TorchFunctionMode", "torchscript"), ("TorchFunctionMode", "onnxruntime"), ("meta", "compile")],
)
def test_runtimes_make_the_same_of_a_model_within(name: str, runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_store, "kept", lambda *given: given[4]())  # nothing is remembered from one to the other
    network = Net()
    with unnoticed(name):
        inside = lowering.trace_for_runtime(network, X, runtime=runtime)
    assert lowering.refusal(inside) is None
    assert made_outside(runtime) == inside


@pytest.mark.parametrize("name", ["FlopCounterMode", "TorchFunctionMode"])
def test_modules_made_in_the_forward_pass_are_called_without_hooks(name: str) -> None:
    making = Function(lambda x: nn.Sequential(nn.ReLU(), nn.Sigmoid())(x))
    with unnoticed(name):
        inside = latpred.trace(making, X)
    assert inside == latpred.trace(making, X)


def test_other_threads_keep_the_hooks_of_a_counter() -> None:
    """One calls a module in the middle of the forward pass, which calls one that latpred never saw."""
    own = nn.Identity()

    def ask(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=own, args=(1,))
        thread.start()
        thread.join()
        return nn.ReLU()(x)  # type: ignore[no-any-return]

    with Called() as following:
        before = list(modules._global_forward_hooks.items())
        latpred.trace(Function(ask), torch.zeros(1, 4))
        assert list(modules._global_forward_hooks.items()) == before
    assert following.threads
    assert threading.get_ident() not in following.threads


def test_modes_are_as_before_afterwards() -> None:
    def stacks() -> list[list[Any]]:
        hooks = [*modules._global_forward_pre_hooks.items(), *modules._global_forward_hooks.items()]
        return [_get_current_function_mode_stack(), _get_current_dispatch_mode_stack(), hooks]

    counters = FlopCounterMode(display=False), FlopCounterMode(display=False)
    with Called(), torch.device("cpu"), counters[0], counters[1], Called():
        before = stacks()
        with without_modes():
            assert stacks()[:2] == [[], []]
            with Called():
                assert len(stacks()[0]) == 1
        assert stacks() == before
        with pytest.raises(latpred.LatpredError):
            latpred.trace("no such model")
        assert stacks() == before


def test_a_measurement_runs_without_modes() -> None:
    with Called() as called, FlopCounterMode(display=False) as counter, torch.device("meta"):
        network = nn.Sequential(nn.Conv2d(3, 4, 3, device="cpu"))
        before = called.seen
        table = whole_models.measure({"net": network}, [1], image=8, repeats=1)
    assert table["status"].tolist() == ["ok"]
    assert (called.seen, counter.get_total_flops()) == (before, 0)
