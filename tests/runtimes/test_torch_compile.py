"""torch.compile: the calls that are predicted are those Inductor's own wrapper makes, and nothing is left behind."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from factories import add, graph, linear, view
from processstate import different, settings
from smallmodels import Function, build_small, inputs_of
from torch import nn
from torch._inductor.runtime.hints import DeviceProperties
from torch.nn.attention import SDPBackend, sdpa_kernel

from latpred import runtimes
from latpred.errors import RuntimeRefusalError
from latpred.graph.graph import Affine, ModelGraph, Op
from latpred.runtimes.inductor import fake_cuda, front_end, torch_compile
from latpred.runtimes.inductor.torch_compile import CASTS, NOTE, Compile, CompileReduceOverhead, ops_through
from latpred.runtimes.lowering import lacking, refusal, trace_for_runtime
from latpred.sandbox.fingerprint import fingerprint

# Small models whose real wrapper is read, one of those that are alike and none that takes a minute; those after the
# first are left to the slow run. Architectures that cannot be taken: nystromformer, whose own code Dynamo finds adding
# tensors that do not broadcast, and torch's encoder on its fast path, where the compiler makes one call of each layer.
# An LSTM is taken, but Dynamo leaves it to eager. For CUDA also longformer and funnel (a pass of Inductor's refuses
# their slice_scatter on fake tensors) and mixtral (it stores a constant of the host into a tensor of the device); these
# are estimated.
FAST = ("bert",)
SLOW = (
    *("deberta", "mobilebert", "squeezebert", "gpt2", "convbert", "t5", "llama", "mixtral", "swin", "resnet"),
    *("convnext", "wav2vec2"),
)
CALLS = ("graphs", "generated calls", "library calls", "generated", "library")
_LIBRARY = re.compile(r"extern_kernels\.\w+\(|torch\.ops\.\w+\.\w+\.\w+\(|aten\.\w+\.\w+\(|\.copy_\(")


def pair(width: int = 32) -> nn.Module:
    """Two layers with something generated after each."""
    return nn.Sequential(nn.Linear(width, 48), nn.ReLU(), nn.Linear(48, 16), nn.Softmax(-1)).eval()


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


def predicted_calls(ops: tuple[Op, ...]) -> Counter[str]:
    """The same numbers from what was traced."""
    found: Counter[str] = Counter(graphs=sum(op.host_class == "guards" for op in ops))
    for op in ops:
        if op.host_class.startswith("kernel."):
            kind = "generated" if op.name == "inductor::generated" else "library"
            found[kind] += 1
            found[f"{kind} calls"] += not op.host_class.endswith(".joined")
    return found


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_the_calls_are_those_of_inductors_own_wrapper(name: str) -> None:
    real = real_calls(build_small(name, "cpu"), inputs_of(name, 2))
    predicted = predicted_calls(front_end.forward(build_small(name, "cpu"), inputs_of(name, 2), "cpu"))
    assert {key: predicted[key] for key in CALLS} == {key: real[key] for key in CALLS}
    assert real["library"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "generated", "library"), [("bert-base-uncased", 38, 85), ("torchvision:resnet18", 36, 21)]
)
def test_cuda_kernels_are_counted_without_a_gpu(name: str, generated: int, library: int) -> None:
    from latpred.runtimes.source import source_of

    source = source_of(name)
    found = predicted_calls(front_end.forward(source.model(), source.inputs(2), "cuda"))
    assert (found["generated"], found["library"]) == (generated, library)


def test_calls_carry_the_work_of_their_ops() -> None:
    graph = trace_for_runtime(pair(), torch.zeros(2, 32), runtime="compile", target="cuda")
    guards, first, relu, second, softmax = graph.ops
    assert (guards.host_class, guards.launches) == ("guards", 0)
    assert guards.python_calls == 5  # two layers of weight and bias, and the input
    assert (first.host_class, first.family, second.family) == ("kernel.extern.gemm", "gemm", "gemm")
    assert [first.dims[name].at(5) for name in ("m", "n", "k")] == [5, 48, 32]
    assert (first.macs, second.macs) == (Affine(0, 32 * 48), Affine(0, 48 * 16))
    assert first.weight_bytes == Affine(4 * 32 * 48)  # the bias is added by the kernel that follows
    assert (relu.family, softmax.family) == ("generated.pointwise", "generated.softmax")
    assert relu.read_bytes == relu.write_bytes == Affine(0, 4 * 48)
    assert (relu.weight_bytes, softmax.read_bytes) == (Affine(4 * 48), Affine(0, 4 * 16))
    assert (softmax.dims["cols"], relu.launches, softmax.launches) == (Affine(16), 1, 1)
    assert (relu.dims["math"], softmax.dims["math"]) == (Affine(0), Affine(0, 16))
    schedule = CompileReduceOverhead().lower(graph, 8)
    assert schedule.host_class == ("guards", "replay")
    assert schedule.kernel_step.tolist() == [1] * 4


def test_a_refusal_becomes_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_end, "SUPPORTED", ("9.9",))
    guess = trace_for_runtime(pair(24), torch.zeros(2, 24), runtime="compile", target="cuda")
    assert "torch 9.9" in guess.notes[0]
    assert (NOTE in guess.notes, guess.launches(4)) == (True, 4)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_kernel_of_a_template_is_refused_by_name() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    attend = Function(lambda x: (flex_attention(x, x + 1, x + 2) * 2 + 1).relu())
    said = refusal(trace_for_runtime(attend, torch.zeros(1, 2, 8, 16), runtime="compile"))
    assert said == "torch.compile makes kernels of flex_attention that are not counted."


def test_a_call_that_hides_its_kernels_is_refused_by_name() -> None:
    with pytest.raises(RuntimeRefusalError, match="_transformer_encoder_layer_fwd as one call"):
        front_end.forward(build_small("encoder", "cpu"), inputs_of("encoder", 2), "cpu")


def test_what_dynamo_says_is_passed_on_and_no_setting_is_different_then() -> None:
    front_end.forward(pair(16), (torch.zeros(2, 16),), "cuda")  # imports what such a trace imports
    before = settings()
    with pytest.raises(RuntimeRefusalError, match="could not be followed through this model for cuda"):
        front_end.forward(pair(16), (torch.zeros(2, 17),), "cuda")
    assert different(before, settings(), but=("torch's generator",)) == []  # the weights draw from it


def test_graph_breaks_are_counted_with_the_ops_between_them() -> None:
    broken = Function(lambda x: (x.relu() * x.sum().item()).relu())
    ops = front_end.forward(broken.eval(), (torch.randn(2, 8),), "cpu")
    assert [op.host_class for op in ops].count("guards") == 2
    assert sum(op.syncs for op in ops) == 1


def test_a_second_result_of_a_library_call_ends_the_call_before() -> None:
    def beams(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores, places = x.topk(4)
        return torch.cat([x[(places // 8)[:, 0]], (places % 8).float()], 1), scores[:, :2].reshape(-1)

    model, x = Function(beams).eval(), (torch.randn(2, 16),)
    assert predicted_calls(front_end.forward(model, x, "cpu")) == real_calls(model, x)


def test_convolutions_of_images_lie_channels_last_on_a_cpu_whatever_the_model_says() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 1), nn.Conv2d(16, 4, 1, stride=2)).eval()
    graph = trace_for_runtime(model, torch.zeros(2, 3, 10, 10), runtime="compile", target="cpu")
    laid_out = [op for op in graph.ops if op.host_class == "kernel.extern.conv"]
    assert [op.family for op in laid_out] == ["conv.channels_last"] * 3
    on_cuda = trace_for_runtime(model, torch.zeros(2, 3, 10, 10), runtime="compile", target="cuda")
    assert [op.family for op in on_cuda.ops if op.host_class == "kernel.extern.conv"] == ["conv"] * 3


class Steps(nn.Module):
    """The same two layers three times, in one graph or with breaks in between."""

    def __init__(self, *, whole: bool) -> None:
        super().__init__()
        self.whole, self.up, self.down = whole, nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.down(torch.tanh(self.up(x)))
            if not self.whole:
                torch._dynamo.graph_break()  # type: ignore[no-untyped-call]
        return x


@pytest.mark.parametrize("whole", [True, False])
def test_weights_that_a_pass_reads_again_say_how_much_was_touched_since(*, whole: bool) -> None:
    graph = trace_for_runtime(Steps(whole=whole).eval(), torch.zeros(2, 64), runtime="compile", target="cpu")
    products = [op for op in graph.ops if op.family == "gemm"]
    assert [op.reread_after is None for op in products] == [True] * 2 + [False] * 4
    assert all(op.reread_after is None for op in graph.ops if op.family != "gemm")
    weights = sum(op.weight_bytes.constant for op in products[:2])
    for op in products[2:]:
        assert weights <= op.reread_after.at(2) <= 1.2 * weights
        assert op.reread_after.per_sample > 0


def test_a_users_compiled_model_survives_a_trace() -> None:
    compilations: list[int] = []

    def backend(gm: Any, _: Any) -> Callable[..., Any]:
        compilations.append(1)
        return gm.forward  # type: ignore[no-any-return]

    model, x = pair(56), torch.zeros(2, 56)
    compiled = torch.compile(model, backend=backend)
    compiled(x)
    front_end.forward(copy.deepcopy(model), (x,), "cpu")
    compiled(x)
    assert compilations == [1]


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # Inductor's imports
def test_inductor_keeps_no_answer_of_a_device_that_does_not_exist() -> None:
    with fake_cuda.present():
        assert DeviceProperties.create(torch.device("cuda", 0)).multi_processor_count == 132
    assert DeviceProperties.create.cache_info().currsize == 0


def kernel(name: str, size: int, **dims: int) -> Op:
    """A generated kernel as it was executed at one batch size."""
    return add(
        name=name,
        dims={dim: Affine(value) for dim, value in dims.items()},
        **dict.fromkeys(("read_bytes", "write_bytes", "live_bytes"), Affine(size)),
    )


@pytest.mark.parametrize(
    ("two", "three", "expected"),
    [
        ({"a": 4, "b": 6, "c": 8}, {"a": 6, "c": 12}, [2, 3, 4]),
        # Where the kernels change with batch, one of another layer may stand in a kernel's place.
        ({"a": 40, "b": 4000}, {"a": 6000, "b": 60}, [20, 2000]),
    ],
)
def test_other_kernels_at_a_batch_are_noted(two: dict[str, int], three: dict[str, int], expected: list[int]) -> None:
    at_two, at_three = ([kernel(name, size) for name, size in sizes.items()] for sizes in (two, three))
    ops, note = ops_through(at_two, at_three)
    assert [op.read_bytes for op in ops] == [Affine(0, per_sample) for per_sample in expected]
    assert f"{len(two)} kernels at batch 2 and {len(three)} at batch 3; those of batch 2 stand for all larger" in note
    assert ops_through(at_two, at_two)[1] == ""


def test_what_loops_do_grows_with_batch() -> None:
    (one,), _ = ops_through([kernel("a", 4, numel=8, cols=6, parts=2, plain=10, math=12, strided=14, looked_up=16)], [])
    assert [size.at(4) for size in one.dims.values()] == [16, 6, 2, 20, 24, 28, 32]


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
    graph = trace_for_runtime(_Scattering(), torch.zeros(2, 4, 24, 24), runtime="compile", target="cpu")
    kernels = [op for op in graph.ops if op.name == "inductor::generated"]
    done = {name: sum(op.dims[name].at(3) for op in kernels) for name in ("math", "strided", "looked_up")}
    points = 3 * 4 * 12 * 12
    assert done["math"] == 2 * 4 * points  # a sigmoid takes as long as two exponentials
    assert points <= done["strided"] <= 6 * points
    assert done["looked_up"] == points


@pytest.mark.parametrize(
    ("before", "target", "exponentials"),
    [
        (lambda x: x + 1, "cpu", 7),
        (lambda x: x + 1, "cuda", 1),
        (lambda x: torch.nn.functional.pad(x, (2, 2), mode="reflect"), "cpu", 60),  # which no vector reads
    ],
)
def test_functions_count_by_how_long_they_take_in_vectors_and_one_value_at_a_time(
    before: Callable[[torch.Tensor], torch.Tensor], target: str, exponentials: int
) -> None:
    model = Function(lambda x: before(x).tanh())
    kernel = trace_for_runtime(model, torch.zeros(2, 8, 192), runtime="compile", target=target).ops[-1]
    assert kernel.dims["math"] == Affine(0, exponentials * kernel.dims["numel"].per_sample)


def test_an_eager_graph_is_fused_between_library_calls() -> None:
    net = graph(add(), linear(), view(), add(), add(), linear(), add(syncs=1), add())
    guess = Compile().estimate(net, "cpu")
    assert [op.host_class for op in guess.ops] == [
        *("guards", "kernel.generated", "kernel.extern.gemm", "kernel.generated", "kernel.extern.gemm"),
        *("eager.elementwise.add", "guards", "kernel.generated"),
    ]
    assert (guess.runtime, guess.target) == ("compile", "cpu")
    assert NOTE in guess.notes


DECISIVE: tuple[Callable[[], Any], ...] = (
    lambda: torch._inductor.config.patch(max_autotune=True),  # type: ignore[attr-defined]
    lambda: torch._dynamo.config.patch(capture_scalar_outputs=True),  # type: ignore[attr-defined]
    lambda: mock.patch.dict("os.environ", TORCHINDUCTOR_LAYOUT_OPTIMIZATION="0"),
    lambda: sdpa_kernel(SDPBackend.MATH),
    lambda: mock.patch("torch.get_num_threads", return_value=torch.get_num_threads() % 2 + 1),
    lambda: mock.patch("torch.are_deterministic_algorithms_enabled", return_value=True),
    lambda: mock.patch("torch.backends.mkldnn.is_available", return_value=False),
)


def test_what_the_compiler_decides_by_tells_graphs_apart() -> None:
    def trace() -> ModelGraph:
        return trace_for_runtime(torch.nn.Linear(8, 8), torch.zeros(2, 8), runtime="compile", target="cpu")

    first, before = trace(), Compile().options
    assert trace() is first, "a trace leaves no setting behind"
    seen = {before}
    for decisive in DECISIVE:
        with decisive():
            seen.add(Compile().options)
    assert len(seen) == 1 + len(DECISIVE)
    with mock.patch.dict("os.environ", TORCHINDUCTOR_CACHE_DIR="elsewhere"):  # which torch sets by itself
        assert Compile().options == before


@pytest.mark.parametrize(
    "switched_off",
    [
        lambda: torch.compiler.set_stance("force_eager"),
        lambda: torch._dynamo.config.patch(disable=True),  # type: ignore[attr-defined]
    ],
)
def test_a_compiler_that_is_switched_off_is_followed_all_the_same(switched_off: Callable[[], Any]) -> None:
    usual = front_end.forward(pair(72), (torch.zeros(2, 72),), "cpu")
    with switched_off():
        assert front_end.forward(pair(72), (torch.zeros(2, 72),), "cpu") == usual


@pytest.mark.parametrize(
    ("kept_from", "said"),
    [
        (lambda: mock.patch.dict("os.environ", TORCHDYNAMO_DISABLE="1"), "TORCHDYNAMO_DISABLE=1 keeps torch.compile"),
        (lambda: torch._inductor.config.patch(freezing=True), "Inductor's freezing is on"),  # type: ignore[attr-defined]
    ],
)
def test_what_cannot_be_followed_is_estimated_while_it_is_set(kept_from: Callable[[], Any], said: str) -> None:
    model, x = pair(80), torch.zeros(2, 80)
    with kept_from():
        assert said in str(refusal(trace_for_runtime(model, x, runtime="compile")))
    assert refusal(trace_for_runtime(model, x, runtime="compile")) is None


@pytest.mark.parametrize(("wide", "high", "batch", "product"), [(64, 1, 1, True), (16, 16, 1, True), (1, 64, 2, False)])
def test_small_products_are_taken_apart_by_device_rules(wide: int, high: int, batch: int, *, product: bool) -> None:
    model, x = nn.Linear(wide, high).eval(), torch.zeros(batch, wide)
    found = {
        target: any(op.family == "gemm" for op in front_end.forward(model, (x,), target)) for target in ("cpu", "cuda")
    }
    assert found == {"cpu": not product, "cuda": product}


def test_a_model_is_built_with_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch_compile, "find_spec", lambda _: None)
        patch.setattr("torch.cuda.is_available", lambda: True)
        assert lacking("compile", "cpu") is None
        assert "needs triton" in str(lacking("compile", "cuda"))
        assert "needs triton" in str(runtimes.get("compile-reduce-overhead").available())
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert "install g++" in str(runtimes.get("compile").available())
    if not torch.cuda.is_available():
        assert "no CUDA device" in str(runtimes.get("compile-reduce-overhead").available())


@pytest.mark.slow
def test_a_built_model_runs_and_is_kept_and_the_model_itself_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made, real = [], front_end.compiled
    monkeypatch.setattr(front_end, "compiled", lambda *given, **options: made.append(1) or real(*given, **options))  # type: ignore[func-returns-value]
    model, x = pair(), torch.randn(2, 32)
    before = fingerprint(model), set(vars(model))
    run = runtimes.get("compile").build(model, (x,))
    assert torch.allclose(run(), model(x), atol=1e-5)
    runtimes.get("compile").build(model, {"input": torch.randn(5, 32)})
    assert len(made) == 1
    assert (fingerprint(model), set(vars(model))) == before
    assert b"latpred" not in pickle.dumps(model)
    alive = weakref.ref(model)
    del model, run
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_model_under_autocast_is_compiled_with_its_casts(target: str) -> None:
    options = {"runtime": "compile", "target": target}
    single, mixed = (
        trace_for_runtime(pair(), torch.zeros(1, 32), precision=precision, **options)  # type: ignore[arg-type]
        for precision in ("fp32", "amp-bf16")
    )
    assert {op.dtype for op in mixed.at(2) if op.family.startswith("gemm")} == {"bfloat16"}
    assert mixed.launches(2) > single.launches(2), "weights are cast in each pass"
    assert (CASTS in mixed.notes) == (target == "cuda")
    assert not any(note.startswith("an estimate only") for note in mixed.notes)
