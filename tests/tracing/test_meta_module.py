"""The user's model is read and never touched, wherever it is and whatever state it is in."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch
from smallmodels import Function
from torch import nn

import latpred
from latpred.errors import TraceError


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


def test_hooks_that_change_what_a_module_gives_are_part_of_the_forward_pass() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model[1].register_forward_hook(lambda module, args, out: 2 * out)
    looked: list[torch.Tensor] = []

    def look(module: nn.Module, args: object, out: torch.Tensor) -> None:
        looked.append(out.exp())

    model[1].register_forward_hook(look)
    graph = latpred.trace(model, torch.zeros(1, 4))
    names = [op.name for op in graph.ops if op.launches]
    assert names == ["aten::add", "aten::linear", "aten::relu", "aten::mul"]
    assert looked == []


def hook_of(given: str, *lines: str) -> Callable[..., None]:
    """A hook of some arguments, by the lines of its body."""
    scope: dict[str, Any] = {"torch": torch, "__name__": "notebook"}
    exec("def doubled(x):\n    x.mul_(2)\ndef twice(x):\n    doubled(x)", scope)
    exec("def clipped(x):\n    x[x > 6] = 6\ndef scaled(x):\n    x *= 2", scope)
    exec("\n    ".join((f"def hook({given}):", *lines)), scope)
    return scope["hook"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("given", "lines"),
    [
        ("module, args, out", ["out *= 2"]),
        ("module, args, out", ["out[:, 0] = 0"]),
        ("module, args, out", ["out[:1] = 0"]),
        ("module, args, out", ["value = 0", "out[0] = value"]),
        ("module, args, out", ["for x in args:", "    x += 1"]),
        ("module, args, out", ["(x,) = args", "x -= 1"]),
        ("module, args, out", ["part = out[:1]", "part *= 2"]),
        ("module, args, out", ["flat = out.view(-1)", "flat[0] = 0"]),
        ("module, args, out", ["flat = (", "    out[0]", "    .view(-1)", ")", "flat[0] = 0"]),
        ("module, args, out", ["turned = out.T", "turned[0] = 0"]),
        ("module, args, out", ["torch.add(out, 1, out=out)"]),
        ("module, args, out", ["torch.nn.functional.relu(out, inplace=True)"]),
        ("*given", ["given[-1][:] += 1"]),
        ("module, args, out", ["out.data = out * 2"]),
        ("module, args, out", ["twice(out)"]),
        ("module, args, out", ["clipped(out)"]),
        ("module, args, out", ["scaled(out)"]),
    ],
)
def test_hooks_that_write_in_place_are_part_of_the_forward_pass(given: str, lines: list[str]) -> None:
    model = nn.Linear(4, 4)
    model.register_forward_hook(hook_of(given, *lines))
    assert latpred.trace(model, torch.zeros(1, 4)).launches() > 1


def test_hooks_that_write_into_what_is_no_tensor_of_the_model_only_look_on() -> None:
    seen: dict[Any, Any] = {"calls": 0}

    def count(module: nn.Module, args: tuple[torch.Tensor, ...], out: torch.Tensor, kept: Any = seen) -> None:
        seen["calls"] += 1
        kept[module] = out.exp()
        total = 0
        for x in args:
            total += x.numel()
        total = out.numel()
        total //= out.shape[0]
        apart = out.detach().clone()
        apart[:] = total

    def keep(kept: dict[Any, Any], module: nn.Module, args: object, out: torch.Tensor, *, also: Any) -> None:
        kept[module] = also[module] = out.exp()

    model = nn.Linear(4, 4)
    for hook in (count, partial(keep, seen, also=seen)):
        model.register_forward_hook(hook)
    assert latpred.trace(model, torch.zeros(1, 4)).launches() == 1
    assert seen == {"calls": 0}


def test_names_for_a_profiler_launch_nothing() -> None:
    layer = nn.Linear(4, 4)

    def named(x: torch.Tensor) -> torch.Tensor:
        with torch.profiler.record_function("layer"):
            return layer(x)  # type: ignore[no-any-return]

    assert latpred.trace(Function(named), torch.zeros(1, 4)).launches() == 1


def test_wrappers_are_seen_through() -> None:
    model = nn.Linear(4, 4)
    assert latpred.trace(nn.DataParallel(model), torch.zeros(1, 4)).ops == latpred.trace(model, torch.zeros(1, 4)).ops
    within = nn.DataParallel(model)
    within.device_ids, within.src_device_obj = [0], torch.device("cuda", 0)  # as where there is a GPU
    assert latpred.trace(nn.Sequential(within), torch.zeros(1, 4)).launches() == 1


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


_collected: dict[str, torch.Tensor] = {}


def _collect(module: nn.Module, args: object, out: torch.Tensor) -> None:
    _collected["first"] = out


def _collecting(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(forward)
    def collecting(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.body(x)
        return forward(self, _collected.pop("first"))

    return collecting


class Collecting(Watching):
    """Does so by a decorator and a variable of its file, as the backbones of transformers do."""

    def __init__(self) -> None:
        super().__init__("method")
        self.body[0]._forward_hooks.clear()
        self.body[0].register_forward_hook(_collect)

    @_collecting
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)  # type: ignore[no-any-return]


def test_a_hook_that_feeds_a_decorated_model_through_a_variable_runs() -> None:
    assert latpred.trace(Collecting(), torch.zeros(1, 4)).macs(8) == 8 * (2 * 4 * 4 + 4 * 2)


def test_a_model_that_is_fed_by_a_hook_and_fails_says_why_it_does() -> None:
    model = Watching("method")
    model.head = nn.Linear(5, 2)
    with pytest.raises(TraceError, match=r"aten::linear in module 'head'"):
        latpred.trace(model, torch.zeros(1, 4))


@pytest.mark.parametrize("how", ["closure", "method"])
def test_a_hook_that_feeds_the_model_runs(how: str) -> None:
    model = Watching(how)
    fresh = latpred.trace(model, torch.zeros(1, 4))
    model(torch.zeros(3, 4))
    used = latpred.trace(model, torch.zeros(1, 4))
    assert fresh.macs(8) == used.macs(8) == 8 * (2 * 4 * 4 + 4 * 2)
    assert model.kept["first"].shape == (3, 4)


@pytest.mark.parametrize(
    "line", ["module.last = out", "setattr(module, 'last', out)", "name = 'last'; setattr(module, name, out)"]
)
def test_a_hook_that_leaves_something_on_its_module_feeds_the_model(line: str) -> None:
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(hook_of("module, args, out", line))
    model = Function(lambda x: [layer(x), layer.last.exp()])
    model.layer = layer  # type: ignore[assignment]
    assert latpred.trace(model, torch.zeros(1, 4)).launches() == 2


def test_a_model_that_is_fed_by_a_hook_may_take_one_batch_size_alone() -> None:
    class Once(Watching):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.reshape(1, 4))

    graph = latpred.trace(Once("method"), torch.zeros(1, 4))
    assert graph.only == (1,)
    assert graph.macs(1) == 2 * 4 * 4 + 4 * 2


def test_a_hook_that_only_looks_at_values_ends_no_trace() -> None:
    model, statistics = nn.Sequential(nn.Linear(4, 4)), dict[str, float]()

    class Store:
        def keep(self, module: nn.Module, args: object, out: torch.Tensor) -> None:
            statistics["mean"] = out.mean().item()

    def look(module: nn.Module, args: object, out: torch.Tensor) -> None:
        statistics["mean"] = out.mean().item()

    model.store = Store()  # type: ignore[assignment]
    for hook in (model.store.keep, look):
        handle = model[0].register_forward_hook(hook)
        assert latpred.trace(model, torch.zeros(1, 4)).launches() == 1
        handle.remove()
    assert not statistics


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
