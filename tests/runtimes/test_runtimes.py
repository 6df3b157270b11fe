"""Eager lowering, models as the tools of runtimes get them, and runtimes that other packages bring."""

from __future__ import annotations

import importlib
import types
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from factories import add, device, dispatch, graph, linear, profile, view
from smallmodels import Function

from latpred import explain, runtimes
from latpred.errors import UsageError
from latpred.prediction.predictor import Predictor
from latpred.runtimes import Eager
from latpred.runtimes.lowering import refusal, trace_for_runtime, traced_by
from latpred.runtimes.source import source_of
from latpred.tracing.inputs import DTYPES
from latpred.tracing.meta_module import make_meta_module

PACKAGE = """
from latpred.runtimes import one_step_per_op


class Halved:
    name = "halved"

    def lower(self, graph, batch):
        return one_step_per_op(self.name, graph.at(batch)[::2])

    def available(self):
        return "only a test"

    def build(self, model, inputs):
        return lambda: model(*inputs)


broken = 3
ready = Halved()
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package on the path that registers runtimes by entry point."""
    (tmp_path / "halved_runtime.py").write_text(PACKAGE)
    metadata = tmp_path / "halved_runtime-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: halved-runtime\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[latpred.runtimes]\nhalved = halved_runtime:Halved\nready = halved_runtime:ready\n"
        "broken = halved_runtime:broken\nmissing = halved_runtime:Nothing\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    runtimes._made.cache_clear()
    yield
    runtimes._made.cache_clear()


def test_eager_dispatches_every_op_by_itself() -> None:
    net = graph(view(module_calls=2), linear(python_calls=3), add(launches=2, syncs=1))
    schedule = Eager().lower(net, 4)
    assert schedule.host_class == ("view.transpose", "gemm.linear", "elementwise.add")
    assert schedule.kernel_step.tolist() == [1, 2, 2]
    assert schedule.kernel_share.tolist() == [1.0, 0.5, 0.5]
    assert schedule.kernel_family == ("gemm", "elementwise.add", "elementwise.add")
    assert schedule.calls.tolist() == [[2, 0, 0], [0, 3, 0], [0, 0, 0]]
    assert schedule.sync.tolist() == [0, 0, 1]


@pytest.mark.parametrize("name", ["eager", "torchscript", "cuda-graphs", "onnxruntime-cuda-graphs"])
def test_a_graph_is_lowered_once_per_form(name: str) -> None:
    runtime, net = runtimes.get(name), graph(linear(), add(), runtime=traced_by(name))
    assert runtime.lower(net, 2) is runtime.lower(net, 64)
    assert runtime.lower(net, 1) is runtime.lower(net, 2)
    special = msgspec.structs.replace(net, ops_at_one=(linear(),))
    assert [len(runtime.lower(special, batch).kernel_step) for batch in (1, 2)] == [1, 2]


def test_eager_runs_the_model_itself() -> None:
    layer = torch.nn.Linear(4, 2).eval()
    x = torch.ones(3, 4)
    run = Eager().build(layer, (x,))
    assert torch.equal(run(), layer(x))
    assert run().is_inference()
    assert torch.equal(Eager().build(layer, {"input": x})(), layer(x))
    assert Eager().available() is None


class Mixed(torch.nn.Module):
    """Weights of several dtypes and ranks, of which the forward pass takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.half = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).half()
        self.images, self.volumes = torch.nn.Conv2d(2, 2, 3), torch.nn.Conv3d(2, 2, 3)
        self.turns = torch.nn.Parameter(torch.tensor([1 + 2j]))
        self.register_buffer("eight", torch.ones(2).to(torch.float8_e4m3fn))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("precision", [None, "fp16"])
def test_a_real_model_has_the_dtypes_and_layouts_of_its_eager_trace(precision: str | None) -> None:
    model = Mixed()
    made = source_of(model, torch.zeros(2, 4), precision=precision, memory_format="channels_last").model()
    wanted = DTYPES.get(precision or "")
    traced = make_meta_module(model, wanted, channels_last=True).module
    for own, theirs in zip(made.state_dict().values(), traced.state_dict().values(), strict=True):
        assert (own.dtype, own.stride()) == (theirs.dtype, theirs.stride())
    assert made.turns.item() == 1 + 2j


class Scattered(torch.nn.Module):
    """Keeps tensors in a plain attribute, a list and an object, all of which nn.Module leaves where they are."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8, device=device)
        self.scale, self.shifts = torch.ones(8, device=device), [torch.ones(8, device=device)]
        self.held = types.SimpleNamespace(mask=torch.ones(8, dtype=torch.long, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale + self.shifts[0] * self.held.mask  # type: ignore[no-any-return]


def test_every_tensor_that_a_model_holds_is_real_for_the_tools_of_runtimes() -> None:
    graphs = [trace_for_runtime(Scattered(kind), torch.zeros(2, 8), runtime="torchscript") for kind in ("cpu", "meta")]
    assert refusal(graphs[0]) is None
    assert graphs[0] == graphs[1]


class Sample:
    """What a model takes, as one object."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Taking(torch.nn.Linear):
    def forward(self, sample: Sample) -> torch.Tensor:  # type: ignore[override]
        return super().forward(sample.x)


@pytest.mark.parametrize("runtime", ["torchscript", "onnxruntime", "compile"])
def test_tensors_within_an_object_that_a_model_takes_are_no_constants(runtime: str) -> None:
    for given in (lambda batch: Sample(torch.zeros(batch, 8)), (Sample(torch.zeros(2, 8)),)):
        graph = trace_for_runtime(Taking(8, 8), given, runtime=runtime)
        assert (graph.macs(4), refusal(graph)) == (4 * 8 * 8, None)
    build = runtimes.get("torchscript").build
    for batch in (2, 3):
        assert build(Taking(8, 8).eval(), (Sample(torch.zeros(batch, 8)),))()[0].shape == (batch, 8)


class Placed(torch.nn.Module):
    """Adds a table that its first pass makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = torch.nn.Linear(64, 64), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.sin(torch.arange(x.shape[1]).float()[:, None] * torch.arange(64).float())
        return self.layer(x + self.table)  # type: ignore[no-any-return]


@pytest.mark.parametrize("runtime", ["torchscript", "compile"])
def test_a_model_that_keeps_what_it_computed_is_taken_apart_alike_at_each_batch(runtime: str) -> None:
    graph = trace_for_runtime(Placed().eval(), torch.zeros(2, 6, 64), runtime=runtime)
    assert graph.notes == ()
    if runtime == "compile":  # a sine is compiled once, and run no more
        assert not any(op.dims["math"].at(2) for op in graph.ops if "math" in op.dims)


class Mixing(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.float16):
            return super().forward(x)


@pytest.mark.parametrize("runtime", ["torchscript", "onnxruntime", "compile"])
def test_casts_of_a_gpu_that_a_cpu_does_not_make_are_those_of_the_eager_trace(runtime: str) -> None:
    graph = trace_for_runtime(Mixing(8, 8), torch.zeros(2, 8), runtime=runtime, target="cuda")
    assert "enters torch.autocast for CUDA" in str(refusal(graph))
    assert {op.dtype for op in graph.ops if op.family == "gemm"} == {"float16"}
    model = torch.nn.Sequential(Mixing(8, 8), Function(lambda x: x @ x.T))
    graph = trace_for_runtime(model, torch.zeros(2, 8), runtime=runtime, target="cuda", batches=(2, 4))
    assert all({op.dtype for op in one.ops if op.family == "gemm"} == {"float16"} for one in graph.exact.values())


@pytest.mark.parametrize("runtime", ["torchscript", "onnxruntime"])
def test_a_model_that_was_changed_is_built_anew(runtime: str) -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8)).eval(), torch.zeros(1, 8)
    for width in (8, 3):
        assert runtimes.get(runtime).build(model, (x,))()[0].shape == (1, width)
        model.append(torch.nn.Linear(8, 3).eval())


@pytest.mark.usefixtures("installed")
def test_a_third_partys_runtime_is_found_and_predicted() -> None:
    assert "halved" in runtimes.names()
    assert runtimes.get("halved").available() == "only a test"
    assert runtimes.get("halved") is runtimes.get("halved")
    assert isinstance(runtimes.get("halved"), runtimes.Runtime)
    assert runtimes.get("ready").name == "halved"  # an object serves as well as a class
    costs = {"eager": dispatch(), "halved": dispatch()}
    predictor = Predictor(profile(device(asynchronous=False), runtimes=costs))
    net = graph(linear(), add(), linear(), add())
    expected = predictor.curve(graph(linear(), linear()), [1, 8]).latency_ms
    assert predictor.curve(net, [1, 8], runtime="halved").latency_ms == pytest.approx(expected)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", ["broken", "missing"])
def test_a_broken_registration_is_named(name: str) -> None:
    said = f"Runtime '{name}' is registered as halved_runtime"
    with pytest.raises(UsageError, match=said):
        runtimes.get(name)
    with pytest.raises(UsageError, match=said):
        explain(graph(linear()), device="rtx-8000", runtimes=[name])
    excluded = explain(graph(linear()), device="rtx-8000").excluded  # of all that there are
    assert any(said in one.reason for one in excluded if one.runtime == name)
