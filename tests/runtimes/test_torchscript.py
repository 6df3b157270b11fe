"""TorchScript's graphs: the steps that its interpreter really runs, and what comes of models that it cannot take."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import device, dispatch, profile
from smallmodels import Function, build_small, inputs_of, small_source, untraceable
from torch import nn

from latpred import runtimes
from latpred.errors import RuntimeRefusalError
from latpred.graph.graph import ZERO, Op
from latpred.prediction.predictor import Predictor
from latpred.runtimes.lowering import of_source, refusal, trace_for_runtime
from latpred.runtimes.source import Source, source_of
from latpred.runtimes.torchscript import (
    ESTIMATE_NOTE,
    FUSION_NOTE,
    INTERPRETED,
    TorchScript,
    frozen,
    frozen_for_tracing,
    join_linears,
)
from latpred.tracing import trace

# All small models but LSTM's were compared once, without a difference; these take the least time.
CHECKED = (
    *("bert", "gpt2", "vit", "resnet", "t5", "deberta", "llama", "convnext", "squeezebert", "deberta-v2", "encoder"),
)


def dispatched(ops: tuple[Op, ...]) -> list[Op]:
    """Steps that reach PyTorch's dispatcher from the interpreter."""
    return [op for op in ops if op.host_class != INTERPRETED and ".nested" not in op.host_class]


def profiled(call: Callable[[], Any]) -> list[str]:
    """Ops that the interpreter called, by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as seen:
        call()
    events = [event for event in seen.events() if event.name.startswith("aten::")]
    return [event.name for event in events if event.cpu_parent is None or event.cpu_parent.name == "forward"]


@pytest.mark.parametrize("name", CHECKED)
def test_steps_are_those_that_the_interpreter_runs(name: str) -> None:
    source = small_source(name)
    graph = TorchScript().trace(source, "cpu")
    model = source.model()
    for batch in (1, 2) if graph.ops_at_one else (2,):
        ran = profiled(TorchScript().build(model, source.inputs(batch)))
        assert len(dispatched(graph.at(batch))) == pytest.approx(len(ran), rel=0.02)
    if name == "deberta-v2":  # what it projects of relative positions needs no input, and is a constant once frozen
        assert 0.3 < graph.macs(2) / source.graph.macs(2) < 0.5
    else:
        assert graph.macs(2) == source.graph.macs(2)
    assert (graph.runtime, graph.target, graph.notes) == ("torchscript", "cpu", ())


def test_an_exported_module_that_refuses_evaluation_mode_is_scripted_all_the_same() -> None:
    module = torch.export.export(nn.Linear(8, 8), (torch.zeros(4, 8),)).module()
    with pytest.raises(NotImplementedError):
        module.eval()
    graph = trace_for_runtime(module, torch.zeros(4, 8), runtime="torchscript", target="cuda", batches=(4,))
    assert (graph.ops[0].name, ESTIMATE_NOTE in graph.notes) == ("aten::linear", False)


X = torch.zeros(2, 8)


def test_nodes_run_what_the_kind_of_device_has_kernels_for() -> None:
    source = source_of(nn.RMSNorm(8), X)
    on_cpu, on_cuda = (
        [op.name for op in TorchScript().trace(source, kind).ops if op.launches] for kind in ("cpu", "cuda")
    )
    assert on_cuda == ["aten::rms_norm"]
    assert on_cpu == [f"aten::{name}" for name in ("pow", "mean", "add_", "rsqrt", "mul", "mul")]


def test_convolutions_follow_the_format_of_their_input_and_copy_other_filters() -> None:
    layers = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, groups=8)
    model = nn.Sequential(Function(lambda x: x.mT.unflatten(2, (4, 4))), *layers)
    graph = TorchScript().trace(source_of(model, torch.zeros(2, 16, 8)), "cpu")
    assert [op.family for op in graph.ops if op.launches] == ["copy.strided", "conv", "conv_depthwise.channels_last"]


HALVES = (("bert", torch.float16), ("gpt2", torch.bfloat16), ("llama", torch.float16), ("resnet", torch.float16))


@pytest.mark.parametrize(("name", "dtype"), HALVES)
def test_what_is_traced_in_half_precision_is_computed_in_single_and_traced_alike(name: str, dtype: torch.dtype) -> None:
    model = build_small(name, "cpu").to(dtype)
    given = inputs_of(name, 2)
    named = {key: value.to(dtype) if value.is_floating_point() else value for key, value in given.items()}
    traced = [str(make(model, named).graph) for make in (frozen, frozen_for_tracing)]
    assert len({re.sub(r"___torch_mangle_\d+\.", "", text) for text in traced}) == 1


class Chain(nn.Linear):
    """Pointwise ops that fuse, around a product that does not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x * 2.0 + 1.0)  # three in a row
        z = super().forward(y)
        return torch.sigmoid(z) * y  # two; y comes from the first group, but only through it does z


def test_pointwise_ops_are_grouped_on_cuda_and_the_graph_says_that_this_is_an_estimate() -> None:
    source = source_of(Chain(32, 32), torch.zeros(2, 32))
    plain, grouped = (TorchScript().trace(source, target) for target in ("cpu", "cuda"))
    assert plain.launches(2) == 6
    assert grouped.launches(2) == 3
    assert grouped.notes == (FUSION_NOTE,)
    fused = [op for op in grouped.ops if op.name == "prim::TensorExprGroup"]
    assert [op.family for op in fused] == ["elementwise.fused"] * 2
    first, second = fused
    assert (first.read_bytes.at(2), first.write_bytes.at(2)) == (2 * 32 * 4, 2 * 32 * 4)
    assert (second.read_bytes.at(2), second.write_bytes.at(2)) == (2 * 2 * 32 * 4, 2 * 32 * 4)
    assert second.dims["operands"].at(2) == 2


class Heads(nn.Module):
    """Linear layers of one input: three that are joined on CUDA, one without a bias, two of what was written since."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(16, width) for width in (16, 24, 8))
        self.plain, self.late, self.later = nn.Linear(16, 4, bias=False), nn.Linear(16, 20), nn.Linear(16, 12)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x.relu()
        parts = [part(x).sum(-1) for part in self.parts]
        return *parts, self.plain(x), self.late(x.add_(1.0)), self.later(x)


def test_linear_layers_of_one_input_are_one_product_on_cuda() -> None:
    model, inputs = Heads().eval(), (torch.randn(2, 5, 16),)
    source = source_of(model, torch.randn(1, 5, 16))
    on_cpu, on_cuda = (
        {op.dims["n"].constant: op for op in TorchScript().trace(source, target).ops if op.name == "aten::linear"}
        for target in ("cpu", "cuda")
    )
    assert sorted(on_cpu) == [4, 8, 12, 16, 20, 24]
    assert sorted(on_cuda) == [4, 32, 48]
    assert on_cuda[48].weight_bytes == sum((on_cpu[width].weight_bytes for width in (8, 16, 24)), ZERO)
    slices = [op for op in TorchScript().trace(source, "cuda").ops if op.name == "aten::slice"]
    assert len(slices) == 5
    assert not any(op.launches for op in slices)
    module = frozen(model, inputs)
    join_linears(module.graph)
    with torch.inference_mode():
        for joined, apart in zip(module(*inputs), model(*inputs), strict=True):
            torch.testing.assert_close(joined, apart)


def test_a_group_does_not_wait_for_itself() -> None:
    """A sum must come after a softmax, which needs what the sum would be fused with."""

    def around(x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        return y + y.softmax(-1)

    graph = TorchScript().trace(source_of(Function(around), X), "cuda")
    assert [op.name for op in graph.ops if op.launches] == ["aten::tanh", "aten::softmax", "aten::add"]


def test_a_model_that_cannot_be_traced_is_refused_and_estimated() -> None:
    source, said = source_of(Function(untraceable), X), "TorchScript cannot trace Function: ValueError: tracing is not"
    for ask in (lambda: TorchScript().trace(source, "cpu"), lambda: TorchScript().build(source.model(), (X,))):
        with pytest.raises(RuntimeRefusalError, match=said):
            ask()
    guess = of_source(source, "torchscript", "cpu")
    assert "tracing is not for me" in str(refusal(guess))
    assert ESTIMATE_NOTE in guess.notes
    assert guess.launches(2) == 1


@dataclass
class Held:
    """A result of a class of one's own."""

    values: Any


def test_tensors_in_the_dataclass_that_a_model_gives_are_kept() -> None:
    graph = trace_for_runtime(Function(lambda x: Held(torch.tanh(x))), X, runtime="torchscript")
    assert (graph.ops[0].name, refusal(graph)) == ("aten::tanh", None)


def test_of_a_model_that_gives_no_tensor_nothing_would_be_left() -> None:
    with pytest.raises(RuntimeRefusalError, match=r"^Function gives no tensor$"):
        TorchScript().build(Function(lambda x: object()), (X,))


def test_a_model_that_does_other_things_at_other_batches_is_refused() -> None:
    branching = Function(lambda x: torch.tanh(x) if x.shape[0] == 3 else torch.tanh(x) + 1)
    source = Source(trace(nn.Tanh(), X), lambda: branching, lambda batch: (torch.zeros(batch, 8),), trace)
    with pytest.raises(RuntimeRefusalError, match="TorchScript runs other ops at batch 2 and 3"):
        TorchScript().trace(source, "cpu")


class Gated(nn.Module):
    """Freezing keeps `weight` on it: a list that a write may reach holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.weight = nn.Linear(4, 8), nn.Parameter(torch.ones(8, 4, 2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores in their places, and what each of the weights makes of the input."""
        scores, places = self.gate(x).topk(2)
        return torch.zeros(len(x), 8).scatter_(1, places, scores), torch.einsum("nd,edh->enh", x, self.weight)


def test_an_error_in_a_frozen_module_is_one_of_python() -> None:
    """Run in a process of its own: where a call stack names methods that are gone, the process ends."""
    code = "from test_torchscript import *; "
    code += "trace_for_runtime(Gated(), lambda batch: torch.zeros(batch, 4), runtime='torchscript')"
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}, check=False)
    assert done.returncode == 0


def test_an_estimate_from_an_eager_graph_is_close_to_the_trace() -> None:
    for name in ("bert", "resnet", "vit"):
        source = small_source(name)
        graph, guess = TorchScript().trace(source, "cpu"), TorchScript().estimate(source.graph, "cpu")
        assert guess.launches(2) == pytest.approx(graph.launches(2), abs=2)
        assert guess.macs(2) == graph.macs(2)
        assert not any(op.module_calls or op.python_calls for op in guess.ops)
        assert guess.runtime == "torchscript"


def test_what_is_built_computes_what_the_model_computes() -> None:
    model = build_small("bert", "cpu")
    inputs = {"input_ids": torch.randint(0, 200, (3, 16))}
    with torch.inference_mode():
        expected = model(**inputs).last_hidden_state
    found = TorchScript().build(model, inputs)()
    assert torch.allclose(found[0], expected, atol=1e-5)
    assert found[0].is_inference()


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor


def test_models_are_traced_once_for_each_shape_and_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    traces, real = [], torch.jit.trace
    monkeypatch.setattr(torch.jit, "trace", lambda *given, **options: traces.append(1) or real(*given, **options))  # type: ignore[no-untyped-call, func-returns-value]
    model, runtime = Scaled().eval(), TorchScript()
    runtime.build(model, (torch.ones(2, 3), 2.0))
    assert torch.equal(runtime.build(model, (torch.full((2, 3), 2.0), 2.0))()[0], torch.full((2, 3), 4.0))
    assert len(traces) == 1
    assert torch.equal(runtime.build(model, (torch.ones(2, 3), 3.0))()[0], torch.full((2, 3), 3.0))
    assert len(traces) == 2
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_every_node_costs_the_host_what_its_class_does() -> None:
    assert runtimes.get("torchscript").available() is None
    graph = trace_for_runtime(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), X, runtime="torchscript")
    fits = {"eager": dispatch(), "torchscript": dispatch(costs_us={"": 1.0, "node": 2.0}, module_call_us=0.0)}
    whole = profile(device(asynchronous=False, kind="cpu"), runtimes=fits)
    made = Predictor(whole).predict(graph, 4, runtime="torchscript")
    assert made.overhead_ms == pytest.approx((20.0 + 2.0 * len(graph.ops)) / 1e3)
