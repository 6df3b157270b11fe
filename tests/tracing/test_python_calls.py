"""What a forward pass makes the host do: Python and module calls between ops, synchronisations, memory alive."""

from __future__ import annotations

import cProfile
import gc
import sys
from types import FrameType

import pytest
import torch
from smallmodels import Function, build_small, inputs_of
from torch import nn

import latpred
from latpred.tracing import trace_pass


def plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def nothing() -> None:
    return None


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Function(lambda x: torch.relu(plus_one(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for _ in range(3):
            nothing()
        x = x * 2
        nothing()
        return x


@pytest.mark.parametrize("cheap_hook", [True, False])
def test_calls_are_counted_between_ops(cheap_hook: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_pass, "CHEAP_HOOK", cheap_hook)
    graph = latpred.trace(Outer(), torch.zeros(1, 4))
    rows = [(op.name, op.module, *op.calls) for op in graph.ops]
    assert rows == [
        ("aten::add", "inner", 2, 3, 1),  # nn.Module.__getattr__ finds `inner`, then the lambda and plus_one
        ("aten::relu", "inner", 0, 0, 0),
        ("aten::mul", "", 0, 3, 0),
        ("python::return", "", 0, 1, 0),
    ]


def test_calls_inside_an_op_are_not_the_model_s() -> None:
    slow = Function(lambda x: torch.roll(torch.cumsum(x, 1), 1, 1))  # both have meta kernels written in Python
    calls = [[op.python_calls for op in latpred.trace(slow, torch.zeros(1, size)).ops] for size in (11, 11, 13)]
    assert calls == [[1, 0]] * 3  # the lambda


def test_the_user_s_profiler_is_put_back() -> None:
    def profiler(*_: object) -> None:
        return None

    sys.setprofile(profiler)
    try:
        latpred.trace(nn.Linear(4, 4), torch.zeros(1, 4))
        assert sys.getprofile() is profiler
        with pytest.raises(latpred.LatpredError):
            latpred.trace(nn.Linear(4, 4), torch.zeros(1, 5))
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)


def test_a_trace_can_be_profiled() -> None:
    profiler = cProfile.Profile()
    with profiler:
        latpred.trace(nn.Linear(4, 4), torch.zeros(1, 4))
        nothing()
    assert any(entry.code is nothing.__code__ for entry in profiler.getstats())


@pytest.mark.parametrize(("name", "fewest"), [("deberta", 8), ("longformer", 10), ("bert", 0), ("resnet", 0)])
def test_reading_values_is_a_synchronisation(name: str, fewest: int) -> None:
    graph = latpred.trace(build_small(name, "meta"), lambda batch: inputs_of(name, batch))
    assert graph.syncs(2) >= fewest
    assert (graph.syncs(2) == 0) == (fewest == 0)
    reads = [op for op in graph.ops if op.name == "aten::_local_scalar_dense"]
    assert all(op.host_class == "sync.item" and op.syncs == 1 and not op.launches for op in reads)


def test_lists_and_arrays_made_of_tensors_are_synchronisations() -> None:
    lists = Function(lambda x, lengths: x * len(lengths.tolist()) * lengths.cumsum(0).numpy().ndim)
    graph = latpred.trace(lists, (torch.zeros(2, 3), torch.tensor([1, 2])))
    assert [op.host_class for op in graph.ops if op.syncs] == ["sync.tolist", "sync.tolist"]


def test_memory_alive_after_each_op() -> None:
    graph = latpred.trace(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 16)), torch.zeros(1, 64))
    alive = {op.name + op.module: op.live_bytes for op in graph.ops if op.launches}
    for batch in (1, 7):
        assert alive["aten::linear0"].at(batch) == batch * 4 * (64 + 256)
        assert alive["aten::relu1"].at(batch) == batch * 4 * (64 + 256 + 256)
        assert alive["aten::linear2"].at(batch) == batch * 4 * (64 + 256 + 16)
    weights = 4 * (64 * 256 + 256 + 256 * 16 + 16)
    assert graph.parameter_bytes == weights
    assert graph.peak_bytes(7) == weights + 7 * 4 * (64 + 256 + 256)


def test_a_residual_stays_alive_and_in_place_ops_make_nothing() -> None:
    up, down = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)

    def residual(x: torch.Tensor) -> torch.Tensor:
        first = x * 2
        hidden = up(first).relu_()
        return first.add_(down(hidden))

    graph = latpred.trace(Function(residual), torch.zeros(1, 8))
    assert [op.live_bytes.at(1) // 4 for op in graph.ops if op.launches] == [16, 48, 48, 56, 56]


class Casting(nn.Linear):
    """Switches autocast on, and off again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = super().forward(x)
            with torch.autocast("cpu", enabled=False):
                return super().forward(y.float())


@pytest.mark.parametrize("name", ["bert", "deberta", "gpt2", "resnet", "swin", "lstm", "autocast"])
def test_calls_are_those_of_a_real_forward_pass(name: str) -> None:
    model: nn.Module = Casting(8, 8) if name == "autocast" else build_small(name, "cpu")
    inputs = (torch.zeros(2, 8),) if name == "autocast" else inputs_of(name, 2)
    graph = latpred.trace(model, inputs, target="cpu")
    own = {nn.Module._call_impl.__code__, nn.Module._wrapped_call_impl.__code__}
    counts = {"modules": 0, "python": 0, "reads": 0}

    def count(frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        if frame.f_code is nn.Module._call_impl.__code__:
            counts["modules"] += 1
        elif frame.f_code not in own and (frame.f_back is None or frame.f_back.f_code not in own):
            counts["python"] += 1
            counts["reads"] += frame.f_code is nn.Module.__getattr__.__code__

    def forward() -> None:
        model(**inputs) if isinstance(inputs, dict) else model(*inputs)

    with torch.inference_mode():
        forward()
        gc.disable()  # finalizers of what other tests left are calls too
        sys.setprofile(count)
        try:
            forward()
        finally:
            sys.setprofile(None)
            gc.enable()
    modules, python, reads = map(sum, zip(*(op.calls for op in graph.at(2)), strict=True))
    assert (modules, python, reads) == (counts["modules"], counts["python"] - 1, counts["reads"])  # but `forward`
