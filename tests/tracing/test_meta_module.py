"""The user's model is read and never touched, wherever it is and whatever state it is in."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from smallmodels import Function
from torch import nn

import latpred
from latpred.errors import TraceError
from latpred.tracing.tracer import HOOKLESS


class Tied(nn.Module):
    """Has a plain tensor, a layer outside the module tree and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.offset = torch.ones(8)
        self.layers = [nn.Linear(8, 8)]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](self.embedding(ids) + self.offset)
        return self.head(self.drop(self.norm(x.mean(1))))  # type: ignore[no-any-return]


def test_a_model_in_training_is_traced_in_evaluation() -> None:
    model = Tied().train()
    graph = latpred.trace(model, torch.zeros(2, 5, dtype=torch.long))
    assert model.training
    assert model.norm.training
    assert "aten::dropout" in [op.name for op in graph.ops]  # it launches nothing
    assert [op.name for op in graph.ops if op.launches] == [
        *("aten::embedding", "aten::add", "aten::linear", "aten::mean", "aten::batch_norm", "aten::linear")
    ]


def test_tied_weights_are_counted_once_and_those_outside_the_module_tree_as_weights() -> None:
    graph = latpred.trace(Tied(), torch.zeros(2, 5, dtype=torch.long))
    assert graph.parameters == 20 * 8 + 2 * 8
    assert graph.parameter_bytes == 4 * (20 * 8 + 2 * 8) + 4 * 2 * 8 + 8
    linear = next(op for op in graph.ops if op.name == "aten::linear")
    assert linear.weight_bytes.at(1) == 4 * (8 * 8 + 8)


def test_where_the_model_is_makes_no_difference() -> None:
    graphs = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
        graphs.append(latpred.trace(model, torch.zeros(1, 3, 8, 8, device=device)))
    assert graphs[0] == graphs[1]


def test_no_weights_are_copied() -> None:
    model = nn.Linear(2048, 2048)
    gc.collect()
    graph = latpred.trace(model, torch.zeros(1, 2048))
    assert graph.parameter_bytes == 4 * (2048 * 2048 + 2048)
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter)]
    big = [t for t in tensors if t.numel() == 2048 * 2048 and not t.is_meta]
    assert {t.data_ptr() for t in big} == {model.weight.data_ptr()}


def test_parametrised_and_normed_weights() -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 4, 3))
    graph = latpred.trace(model, torch.zeros(1, 4, 10))
    assert [op.family for op in graph.ops if op.launches] == ["norm.weight_norm", "conv"]


def test_hooks_are_part_of_the_forward_pass() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model[1].register_forward_hook(lambda module, args, out: 2 * out)
    looked: list[torch.Tensor] = []

    def look(module: nn.Module, args: object, out: torch.Tensor) -> None:
        looked.append(out.exp())

    model[1].register_forward_hook(look)
    graph = latpred.trace(model, torch.zeros(1, 4))
    names = [op.name for op in graph.ops if op.launches]
    assert names == ["aten::add", "aten::linear", "aten::relu", "aten::mul", "aten::exp"]
    assert looked == []


def test_names_for_a_profiler_launch_nothing() -> None:
    layer = nn.Linear(4, 4)

    def named(x: torch.Tensor) -> torch.Tensor:
        with torch.profiler.record_function("layer"):
            return layer(x)  # type: ignore[no-any-return]

    assert latpred.trace(Function(named), torch.zeros(1, 4)).launches() == 1


def test_wrappers_are_seen_through() -> None:
    model = nn.Linear(4, 4)
    assert latpred.trace(nn.DataParallel(model), torch.zeros(1, 4)).ops == latpred.trace(model, torch.zeros(1, 4)).ops
    within = nn.Sequential(nn.DataParallel(model))
    assert latpred.trace(within, torch.zeros(1, 4)).launches() == 1


class Watching(nn.Module):
    """Computes with what a hook has kept of a layer inside."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 2)
        self.kept: dict[str, torch.Tensor] = {}
        kept = self.kept

        def keep(module: nn.Module, args: object, out: torch.Tensor) -> None:
            kept["first"] = out

        self.body[0].register_forward_hook(keep if how == "closure" else self.keep)

    def keep(self, module: nn.Module, args: object, out: torch.Tensor) -> None:
        self.kept.update(first=out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.body(x)
        return self.head(self.kept["first"])  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["closure", "method"])
def test_a_hook_feeds_the_copy_and_not_the_model(how: str) -> None:
    model = Watching(how)
    fresh = latpred.trace(model, torch.zeros(1, 4))
    model(torch.zeros(3, 4))
    used = latpred.trace(model, torch.zeros(1, 4))
    assert fresh.macs(8) == used.macs(8) == 8 * (2 * 4 * 4 + 4 * 2)
    assert model.kept["first"].shape == (3, 4)


def test_a_model_that_is_fed_by_a_hook_and_fails_says_why_it_does() -> None:
    model = Watching("method")
    model.head = nn.Linear(5, 2)
    with pytest.raises(TraceError, match=r"aten::linear in module 'head'"):
        latpred.trace(model, torch.zeros(1, 4))


@pytest.mark.parametrize("look", [lambda out: out.mean().item(), lambda out: out.detach().cpu().numpy()])
def test_hooks_that_look_at_values_are_left_out_and_that_is_said(look: Callable[[torch.Tensor], Any]) -> None:
    model, seen = nn.Sequential(nn.Linear(4, 4)), list[Any]()
    model[0].register_forward_hook(lambda module, args, out: seen.append(look(out)))
    graph = latpred.trace(model, torch.zeros(1, 4))
    assert (graph.launches(), graph.notes, seen) == (1, (HOOKLESS,), [])


class Wrapped(torch.Tensor):
    """A tensor around another one."""

    __tensor_flatten__ = __tensor_unflatten__ = None

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        return NotImplemented


class Doubling(torch.Tensor):
    """A tensor that doubles what every op with it gives."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out * 2 if func is nn.functional.linear else out


class Named(torch.Tensor):
    """A tensor whose class says something and does nothing."""


@pytest.mark.parametrize(
    "weight", [torch.Tensor._make_wrapper_subclass(Wrapped, (4, 4)), torch.eye(4).as_subclass(Doubling)]
)
def test_weights_that_are_no_plain_tensors_are_refused(weight: torch.Tensor) -> None:
    model = nn.Linear(4, 4)
    model.scale = weight  # type: ignore[assignment]
    with pytest.raises(TraceError, match=f"holds a tensor of class {type(weight).__name__}, whose kernels nobody"):
        latpred.trace(model, torch.zeros(1, 4))


def named() -> nn.Module:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(model.weight.detach().as_subclass(Named))
    return model


def ordered() -> nn.Module:
    """As in models pickled by older versions."""
    model = nn.Sequential(nn.Linear(4, 4))
    model._modules = OrderedDict(model._modules)
    return model


@pytest.mark.parametrize("make", [named, ordered, torch.inference_mode()(lambda: nn.Linear(4, 4))])
def test_weights_that_are_held_or_made_in_another_way_are_weights(make: Callable[[], nn.Module]) -> None:
    (op,) = latpred.trace(make(), torch.zeros(1, 4)).ops
    assert (op.launches, op.weight_bytes.at(1)) == (1, 4 * 20)
