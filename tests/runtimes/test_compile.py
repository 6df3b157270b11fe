"""torch.compile: the calls that are predicted are those Inductor's own wrapper makes, and nothing is left behind."""

from __future__ import annotations

import copy
import logging
import re
import warnings
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from factories import add, graph, linear, view
from smallmodels import build_small, inputs_of
from torch import nn

from latpred import runtimes
from latpred.errors import RuntimeRefusalError
from latpred.graph.graph import Affine
from latpred.runtimes.base import ExecutedOp
from latpred.runtimes.inductor import front_end
from latpred.runtimes.inductor.torch_compile import NOTE, Compile, CompileReduceOverhead, calls_of, ops_through
from latpred.runtimes.lowering import trace_for_runtime

# Small models whose real wrapper is read; those after the first are left to the slow run. Architectures that a walk
# cannot take: nystromformer, whose own code Dynamo finds adding tensors that do not broadcast, and torch's encoder on
# its fast path, where the compiler makes one call of each layer. An LSTM is taken, but Dynamo leaves it to eager. For
# CUDA also longformer and funnel (a pass of Inductor's refuses their slice_scatter on fake tensors) and mixtral (it
# stores a constant of the host into a tensor of the device); these are estimated.
FAST = ("bert",)
SLOW = (
    *(
        "deberta",
        "distilbert",
        "roberta",
        "albert",
        "mobilebert",
        "squeezebert",
        "gpt2",
        "electra",
        "convbert",
        "t5",
        "llama",
    ),
    *("mixtral", "vit", "swin", "resnet", "convnext", "regnet", "wav2vec2", "deberta-v2", "longformer", "funnel"),
)
CALLS = ("graphs", "generated calls", "library calls", "generated", "library")
_LIBRARY = re.compile(r"extern_kernels\.\w+\(|torch\.ops\.\w+\.\w+\.\w+\(|aten\.\w+\.\w+\(|\.copy_\(")


class Pair(nn.Module):
    """Two layers with something generated after each."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 48), nn.Linear(48, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()).softmax(-1)  # type: ignore[no-any-return]


class Convolved(nn.Module):
    """A convolution in a half-precision model's usual surroundings."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x)).relu().mean((2, 3))  # type: ignore[no-any-return]


class Broken(nn.Module):
    """Reads a value back, which no compiled graph can."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x).relu()
        return self.layer(y * y.sum().item()).relu()  # type: ignore[no-any-return]


def real_calls(model: nn.Module, inputs: Any) -> Counter[str]:
    """What one forward pass calls, read off the wrapper that a real torch.compile writes; its C++ is never built."""
    from torch._inductor.graph import GraphLowering

    found: Counter[str] = Counter()

    def to_module(lowering: Any) -> Any:
        body = lowering.codegen()[0].value.partition("def call(")[2]
        lines = [line for line in body.splitlines() if not line.strip().startswith(("#", "assert"))]
        nodes = [node for node in lowering.scheduler.nodes if type(node).__name__ != "NopKernelSchedulerNode"]
        calls = {
            "graphs": 1,
            "generated calls": sum(1 for line in lines if re.match(r"\s+cpp_fused_\w*\(", line)),
            "library calls": sum(len(_LIBRARY.findall(line)) for line in lines),
            "generated": sum(1 for node in nodes if not node.is_extern()),
            "library": sum(1 for node in nodes if node.is_extern() and type(node.node).__name__ != "MultiOutput"),
        }

        def call(values: list[Any]) -> list[Any]:
            taken = list(values)
            values.clear()
            found.update(calls)
            return list(lowering.orig_gm(*taken))

        return SimpleNamespace(call=call, __file__="")

    dynamo, config = torch._dynamo.config, torch._inductor.config
    with (
        mock.patch.object(GraphLowering, "compile_to_module", to_module),
        config.patch(force_disable_caches=True),  # type: ignore[attr-defined]
        dynamo.patch(accumulated_recompile_limit=1000),  # type: ignore[attr-defined]
        warnings.catch_warnings(),
        torch.inference_mode(),
    ):
        warnings.simplefilter("ignore")
        compiled = front_end.compiled(model, 1000)
        compiled(**inputs) if isinstance(inputs, dict) else compiled(*inputs)
    return found


def predicted_calls(model: nn.Module, inputs: Any, target: str = "cpu") -> Counter[str]:
    """The same numbers from a walk."""
    found: Counter[str] = Counter()
    for event in front_end.forward(model, inputs, target).events:
        if not isinstance(event, front_end.Compiled):
            continue
        found["graphs"] += 1
        for step in event.steps:
            generated = step.entry.name == "inductor::generated"
            found["generated" if generated else "library"] += 1
            if not step.entry.host_class.endswith(".joined"):
                found["generated calls" if generated else "library calls"] += 1
    return found


def check(name: str) -> None:
    real = real_calls(build_small(name, "cpu"), inputs_of(name, 2))
    predicted = predicted_calls(build_small(name, "cpu"), inputs_of(name, 2))
    assert {key: predicted[key] for key in CALLS} == {key: real[key] for key in CALLS}
    assert real["library"]


@pytest.mark.parametrize("name", FAST)
def test_the_calls_are_those_of_inductors_own_wrapper(name: str) -> None:
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_the_calls_of_more_models_are_those_of_inductors_own_wrapper(name: str) -> None:
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "generated", "library"), [("bert-base-uncased", 38, 85), ("torchvision:resnet18", 36, 21)]
)
def test_cuda_kernels_are_counted_without_a_gpu(name: str, generated: int, library: int) -> None:
    from latpred.runtimes.source import source_of

    source = source_of(name)
    found = predicted_calls(source.model(), source.inputs(2), "cuda")
    assert (found["generated"], found["library"]) == (generated, library)


@pytest.fixture
def pair_on_cuda() -> Any:
    """Walked once: later tests find it in memory."""
    with torch.device("meta"):
        model = Pair().eval()
    return trace_for_runtime(model, torch.zeros(2, 32), runtime="compile", target="cuda")


def test_steps_carry_the_work_of_their_op(pair_on_cuda: Any) -> None:
    first, second = (op for op in pair_on_cuda.ops if op.family == "gemm")
    assert [first.dims[name].at(5) for name in ("m", "n", "k")] == [5, 48, 32]
    assert first.macs == Affine(0, 32 * 48)
    assert first.weight_bytes == Affine(4 * 32 * 48)  # the bias is added by the kernel that follows
    assert second.macs == Affine(0, 48 * 16)
    assert first.host_class == "kernel.extern.gemm"


def test_generated_kernels_move_bytes(pair_on_cuda: Any) -> None:
    relu, softmax = (op for op in pair_on_cuda.ops if op.name == "inductor::generated")
    assert (relu.family, softmax.family) == ("generated.pointwise", "generated.softmax")
    assert relu.read_bytes == relu.write_bytes == Affine(0, 4 * 48)
    assert relu.weight_bytes == Affine(4 * 48)  # the bias
    assert softmax.read_bytes == Affine(0, 4 * 16)
    assert softmax.dims["cols"] == Affine(16)
    assert relu.launches == softmax.launches == 1
    assert (relu.dims["math"], softmax.dims["math"]) == (Affine(0), Affine(0, 16))


def test_guards_come_first_and_count_what_they_check(pair_on_cuda: Any) -> None:
    guards = pair_on_cuda.ops[0]
    assert guards.host_class == "guards"
    assert guards.python_calls == 5  # two layers of weight and bias, and the input
    assert not guards.launches


def test_reduce_overhead_launches_a_graph_at_once(pair_on_cuda: Any) -> None:
    schedule = CompileReduceOverhead().lower(pair_on_cuda, 8)
    assert schedule.host_class == ("guards", "replay")
    assert schedule.kernel_step.tolist() == [1] * 4
    assert CompileReduceOverhead().walked_by == "compile"


def test_a_second_walk_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = front_end.forward
    monkeypatch.setattr(front_end, "forward", lambda *given: calls.append(given) or original(*given))
    walked = [
        trace_for_runtime(Pair(40).eval(), torch.zeros(2, 40), runtime="compile", target="cuda") for _ in range(2)
    ]
    assert len(calls) == 3  # batches 2, 3 and 1 of the first
    assert walked[0].ops == walked[1].ops


def test_a_refusal_becomes_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_end, "SUPPORTED", ("9.9",))
    walked = trace_for_runtime(Pair(24).eval(), torch.zeros(2, 24), runtime="compile", target="cuda")
    assert "torch 9.9" in walked.notes[0]
    assert NOTE in walked.notes
    assert walked.launches(4) == 4


def test_a_call_that_hides_its_kernels_is_refused_by_name() -> None:
    with pytest.raises(RuntimeRefusalError, match="_transformer_encoder_layer_fwd as one call"):
        front_end.forward(build_small("encoder", "cpu"), inputs_of("encoder", 2), "cpu")


def test_what_dynamo_says_is_passed_on() -> None:
    class Wrong(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.zeros(3, 7)

    with pytest.raises(RuntimeRefusalError, match="could not be followed through this model for cpu"):
        front_end.forward(Wrong().eval(), (torch.zeros(2, 5),), "cpu")


def test_graph_breaks_are_counted_with_the_ops_between_them() -> None:
    events = front_end.forward(Broken().eval(), (torch.randn(2, 8),), "cpu").events
    assert sum(isinstance(event, front_end.Compiled) for event in events) == 2
    calls = calls_of(front_end.forward(Broken().eval(), (torch.randn(2, 8),), "cpu"))
    assert [call.host_class for call in calls].count("guards") == 2
    assert sum(call.syncs for call in calls) == 1


def test_half_precision_models_are_lowered_as_such() -> None:
    model = Convolved().eval().half()
    events = front_end.forward(model, (torch.zeros(2, 3, 8, 8, dtype=torch.float16),), "cuda").events
    steps = [step for event in events if isinstance(event, front_end.Compiled) for step in event.steps]
    conv = next(step.entry for step in steps if step.entry.family == "conv")
    assert conv.dtype == "float16"
    assert {step.entry.dtype for step in steps} == {"float16"}


def test_a_users_compiled_model_survives_a_walk() -> None:
    compilations: list[int] = []

    def backend(gm: Any, _: Any) -> Callable[..., Any]:
        compilations.append(1)
        return gm.forward  # type: ignore[no-any-return]

    model, x = Pair(56).eval(), torch.zeros(2, 56)
    compiled = torch.compile(model, backend=backend)
    compiled(x)
    front_end.forward(copy.deepcopy(model), (x,), "cpu")
    compiled(x)
    assert compilations == [1]


def test_nothing_of_torch_is_different_after_a_walk() -> None:
    def settings() -> Any:
        import torch._dynamo.config as dynamo
        import torch._functorch.config as functorch
        import torch._inductor.compile_fx as compile_fx
        import torch._inductor.config as config

        patched = (torch.cuda.get_device_properties, torch._C._select_conv_backend, compile_fx.compile_fx_forward)
        saved = [one.save_config_portable() for one in (dynamo, functorch, config)]  # type: ignore[attr-defined]
        return saved, patched, logging.getLogger("torch._dynamo").level, list(warnings.filters)

    before = settings()
    front_end.forward(Pair(16).eval(), (torch.zeros(2, 16),), "cuda")
    with pytest.raises(RuntimeRefusalError):
        front_end.forward(Pair(16).eval(), (torch.zeros(2, 17),), "cuda")
    assert settings() == before


def test_other_kernels_at_another_batch_leave_a_note() -> None:
    two = [_call("a", 4), _call("b", 6), _call("c", 8)]
    three = [_call("a", 6), _call("c", 12)]
    ops, note = ops_through(two, three)
    assert [op.read_bytes for op in ops] == [Affine(0, 2), Affine(0, 3), Affine(0, 4)]
    assert "3 kernels at batch 2 and 2 at batch 3" in note
    assert ops_through(two, two)[1] == ""


def test_what_loops_do_grows_with_batch() -> None:
    dims = ("numel", "cols", "parts", "plain", "math", "strided", "looked_up")
    two = _call("a", 4)._replace(dims=dims, counts=(0, 0, 4, 4, 0, 8, 6, 2, 10, 12, 14, 16))
    (one,), _ = ops_through([two], [])
    assert {name: line.at(4) for name, line in one.dims.items()} == dict(
        zip(dims, (16, 6, 2, 20, 24, 28, 32), strict=True)
    )


class _Scattering(torch.nn.Module):
    """An activation that a pooling evaluates anew for each value of its window, a transposition and a lookup."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(7))
        self.register_buffer("index", torch.zeros(12, 12, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = torch.nn.functional.max_pool2d(torch.sigmoid(x), 2)  # (batch, 4, 12, 12)
        return (pooled + self.table[self.index]).permute(0, 2, 3, 1).contiguous()


def test_what_the_loops_of_a_kernel_do_is_counted() -> None:
    walked = trace_for_runtime(_Scattering(), torch.zeros(2, 4, 24, 24), runtime="compile", target="cpu")
    kernels = [op for op in walked.ops if op.name == "inductor::generated"]
    done = {name: sum(op.dims[name].at(3) for op in kernels) for name in ("math", "strided", "looked_up")}
    points = 3 * 4 * 12 * 12
    assert done["math"] == 4 * points
    assert points <= done["strided"] <= 6 * points
    assert done["looked_up"] == points


def _call(name: str, size: int) -> ExecutedOp:
    return ExecutedOp(name, "kernel.generated", "generated.copy", "float32", (), (0, 0, size, size, size), 1, 0, False)


def test_an_eager_graph_is_fused_between_library_calls() -> None:
    net = graph(add(), linear(), view(), add(), add(), linear(), add(syncs=1), add())
    walked = Compile().estimate(net, "cpu")
    assert [op.host_class for op in walked.ops] == [
        *("guards", "kernel.generated", "kernel.extern.gemm", "kernel.generated", "kernel.extern.gemm"),
        *("eager.elementwise.add", "guards", "kernel.generated"),
    ]
    assert walked.runtime == "compile"
    assert walked.target == "cpu"
    assert NOTE in walked.notes


def test_a_model_is_built_with_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert "install g++" in str(runtimes.get("compile").available())
    if not torch.cuda.is_available():
        assert "no CUDA device" in str(runtimes.get("compile-reduce-overhead").available())


@pytest.mark.slow
def test_a_built_model_runs_and_is_kept() -> None:
    model, x = Pair().eval(), torch.randn(2, 32)
    run = runtimes.get("compile").build(model, (x,))
    assert torch.allclose(run(), model(x), atol=1e-5)
    kept = model.__dict__["_latpred_compiled"].by_runtime["compile"]
    runtimes.get("compile").build(model, {"x": torch.randn(5, 32)})
    assert model.__dict__["_latpred_compiled"].by_runtime["compile"] is kept
    assert not copy.deepcopy(model).__dict__["_latpred_compiled"].by_runtime
