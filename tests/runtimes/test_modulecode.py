"""A model's code decides, beside its walk, whether what a runtime made of another one may be taken."""

from __future__ import annotations

import types

import pytest
import torch

from latpred.runtimes import graph_store
from latpred.runtimes.graph_store import digest_of
from latpred.runtimes.lowering import of_source
from latpred.runtimes.source import source_of
from latpred.runtimes.torchscript import TorchScript


def written(text: str, **names: object) -> torch.nn.Module:
    """A module of a class whose forward pass is the text, as a cell of a notebook would define it."""
    found: dict[str, object] = {"torch": torch, "__name__": "notebook", **names}
    body = f"class Model(torch.nn.Module):\n    def forward(self, x):\n        {text}"
    exec(body, found)
    return found["Model"]()  # type: ignore[operator, no-any-return]


SQUARE = "return torch.relu(x) * torch.relu(x)"


def test_the_same_code_has_the_same_digest_wherever_it_is_written() -> None:
    assert digest_of(written(SQUARE)) == digest_of(written(SQUARE))
    assert digest_of(torch.nn.Linear(2, 2)) == digest_of(torch.nn.ReLU())  # the version of torch tells of those


@pytest.mark.parametrize(
    "changed",
    ["return torch.relu(x) * torch.relu(x + 0)", "y = torch.relu(x); return y * y", "return 2 * torch.relu(x)"],
)
def test_other_code_has_another(changed: str) -> None:
    assert digest_of(written(SQUARE)) != digest_of(written(changed))


def test_functions_and_methods_that_a_forward_pass_calls_count() -> None:
    def helper(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def other(x: torch.Tensor) -> torch.Tensor:
        return x - 1

    text = "return helper(x)"
    assert digest_of(written(text, helper=helper)) != digest_of(written(text, helper=other))
    assert digest_of(torch.nn.Sequential(written(text, helper=helper))) == digest_of(written(text, helper=helper))
    model, patched = written(SQUARE), written(SQUARE)
    patched.forward = types.MethodType(lambda self, x: helper(x), patched)
    assert digest_of(model) != digest_of(patched)


def test_a_changed_forward_pass_is_taken_apart_again(
    tmp_path: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LATPRED_HOME", str(tmp_path))
    graph_store.forget()
    walks: list[str] = []
    real = TorchScript.walk
    monkeypatch.setattr(TorchScript, "walk", lambda self, *args: walks.append("") or real(self, *args))
    once, twice = "y = torch.relu(x); return y + y", "y, z = torch.relu(x), x; return y + y"
    for text in (once, twice, once):
        source = source_of(written(text), torch.zeros(2, 4))
        of_source(source, "torchscript", "cpu")
    assert len(walks) == 2
    graph_store.forget()
