"""Graphs of onnxruntime: the nodes that really run, found once per structure, and models that cannot be exported."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections import Counter
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from smallmodels import Function, small_source
from torch import nn

import latpred
from latpred import runtimes
from latpred.errors import MissingPackageError, RuntimeRefusalError
from latpred.graph.graph import ModelGraph
from latpred.runtimes import graph_store, lowering
from latpred.runtimes.base import built_of
from latpred.runtimes.onnx import onnx_export, onnx_session, onnxruntime
from latpred.runtimes.onnx.onnx_formulas import Node, Value, work_of
from latpred.runtimes.onnx.onnxruntime import NOTE, OnnxRuntime
from latpred.runtimes.source import Source, source_of, tensors_of


class Net(nn.Module):
    """A convolution with its normalisation, a head, and a view between them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        return torch.softmax(self.head(y.view(y.shape[0], 1, 16)), -1)


def net() -> tuple[nn.Module, torch.Tensor]:
    return Net().eval(), torch.zeros(2, 3, 8, 8)


def executed(model: bytes, feed: dict[str, Any], folder: Path) -> Counter[str]:
    """What onnxruntime itself says it runs, asked without anything of latpred."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    settings.enable_profiling = True
    settings.profile_file_prefix = str(folder / "profile")
    session = onnxruntime.InferenceSession(model, settings, providers=["CPUExecutionProvider"])
    session.run(None, feed)
    events = json.loads(Path(session.end_profiling()).read_text())
    return Counter(event["args"]["op_name"] for event in events if event["cat"] == "Node")


def names_of(graph: ModelGraph, batch: int) -> Counter[str]:
    return Counter(op.name.removeprefix("ort::") for op in graph.at(batch))


def agrees(source: Source, folder: Path, batch: int) -> ModelGraph:
    """Check a graph against what onnxruntime runs at a batch that was not traced."""
    model = source.model()
    exported = OnnxRuntime().exported(model, source.inputs(2))
    graph = OnnxRuntime().trace(replace(source, model=lambda: model), "cpu")
    assert isinstance(exported.model, bytes)
    feed = onnx_session.feed_of(onnx_session.input_names(exported.model), tensors_of(source.inputs(batch)))
    assert names_of(graph, batch) == executed(exported.model, feed, folder)
    return graph


def test_the_nodes_are_those_that_run(tmp_path: Path) -> None:
    source = source_of(*net())
    graph = agrees(source, tmp_path, batch=5)
    assert (graph.runtime, graph.target) == ("onnxruntime", "cpu")
    assert [graph.macs(batch) for batch in (1, 4)] == [source.graph.macs(batch) for batch in (1, 4)]
    conv = next(op for op in graph.ops if op.family.startswith("conv"))
    sizes = {"batch": 7, "c_in": 3, "c_out": 16, "h_in": 8, "w_in": 8, "h_out": 6, "w_out": 6}
    filters = {"kernel_h": 3, "kernel_w": 3, "stride": 1, "groups": 1}
    assert {name: size.at(7) for name, size in conv.dims.items()} == sizes | filters
    # The normalisation and the activation are part of the convolution.
    assert not {"BatchNormalization", "Relu"} & set(names_of(graph, 2))
    assert conv.weight_bytes.at(1) == 4 * (16 * 3 * 9 + 16)


def test_for_cuda_the_cpus_own_fusions_are_left_out_and_half_precision_moves_half_the_bytes() -> None:
    sources = [source_of(*net(), precision=precision) for precision in ("fp32", "fp16")]
    whole, half = (OnnxRuntime().trace(source, "cuda") for source in sources)
    names = names_of(whole, 2)
    assert (names["Relu"], names["Conv"], names["BatchNormalization"]) == (1, 1, 0)
    assert [(op.name, op.macs) for op in whole.ops] == [(op.name, op.macs) for op in half.ops]
    heavy, light = (next(op.weight_bytes.at(1) for op in graph.ops if op.family == "conv") for graph in (whole, half))
    assert 2 * light == heavy
    assert {op.dtype for op in half.ops if op.launches} == {"float16"}
    assert "float32" in half.notes[0]


def test_nodes_without_names_have_the_shapes_and_the_work_of_others() -> None:
    # In half precision onnxruntime has no Softmax for a CPU: it puts the nodes of its definition there, without names.
    model, x = Function(lambda x: torch.softmax(x @ x.mT, -1) @ x), torch.zeros(2, 16, 64)
    whole, half = (OnnxRuntime().trace(source_of(model, x, precision=p), "cpu") for p in ("fp32", "fp16"))
    assert "Exp" in names_of(half, 2)
    assert "Exp" not in names_of(whole, 2)
    assert half.macs(2) == whole.macs(2) == 2 * 2 * 16 * 16 * 64


def test_shapes_and_views_launch_nothing() -> None:
    def heads(x: torch.Tensor) -> torch.Tensor:
        y = x.view(x.shape[0], -1, 2, 4).transpose(1, 2) + 1.0
        return y.reshape(x.shape[0], -1)

    graph = OnnxRuntime().trace(source_of(Function(heads).eval(), torch.zeros(2, 24)), "cpu")
    without = {op.name for op in graph.ops if not op.launches}
    assert {"ort::Reshape"} <= without <= {"ort::Reshape", "ort::Shape", "ort::Squeeze"}
    # A result of the model has memory of its own: there a change of shape is a copy.
    assert graph.ops[-1].name == "ort::Reshape"
    assert graph.ops[-1].family == "copy.contiguous"


MODELS = ("gpt2", "t5", "vit", "swin", "convnext", "mobilenet-v2", "deberta", "wav2vec2", "llama")


@pytest.mark.parametrize("name", ["bert", *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS)])
def test_every_architecture_runs_the_nodes_that_were_traced(name: str, tmp_path: Path) -> None:
    source = small_source(name)
    graph = agrees(source, tmp_path, batch=5)
    if name == "deberta":  # products of weights alone are computed once and for all
        assert graph.macs(4) < source.graph.macs(4)
        assert graph.macs(4) - graph.macs(3) == source.graph.macs(4) - source.graph.macs(3)
    else:
        assert graph.macs(4) == source.graph.macs(4)
    assert not graph.coverage().estimated_ops


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[onnx_export.Exported]:
    """Everything that is exported."""
    made: list[onnx_export.Exported] = []
    real = onnx_export.export

    def export(model: nn.Module, inputs: Any) -> onnx_export.Exported:
        made.append(real(model, inputs))
        return made[-1]

    monkeypatch.setattr(onnx_export, "export", export)
    return made


def test_a_session_computes_what_the_model_does_and_is_made_once(exports: list[onnx_export.Exported]) -> None:
    model, runtime = Net().eval(), OnnxRuntime()
    for batch in (1, 3):
        x = torch.randn(batch, 3, 8, 8)
        (result,) = runtime.build(model, (x,))()
        assert torch.allclose(torch.from_numpy(result), model(x), atol=1e-5)
    named = runtime.build(model, {"x": x})()
    assert torch.allclose(torch.from_numpy(named[0]), model(x), atol=1e-5)
    assert len(exports) == 2  # once for positional, once for named arguments


def test_a_model_that_was_run_is_not_exported_again_to_be_traced(exports: list[onnx_export.Exported]) -> None:
    (model, x), (other, _) = net(), net()
    source = source_of(model, x)
    OnnxRuntime().build(model, (x,))
    graph = OnnxRuntime().trace(replace(source, model=lambda: model), "cpu")
    assert len(exports) == 1
    assert graph.ops == OnnxRuntime().trace(replace(source, model=lambda: other), "cpu").ops
    assert built_of(OnnxRuntime._built, other) == {}, "a trace keeps no weights"


def test_a_model_exported_to_a_file_is_traced_and_leaves_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usual = OnnxRuntime().trace(source_of(*net()), "cpu")
    monkeypatch.setattr(onnx_export, "LARGEST_IN_MEMORY", 0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert OnnxRuntime().trace(source_of(*net()), "cpu").ops == usual.ops
    assert not os.listdir(tmp_path)


class Decoder(nn.Linear):
    """Takes a flag, and gives something that ONNX cannot give back."""

    def forward(self, x: torch.Tensor, *, twice: bool) -> dict[str, Any]:
        y = super().forward(x)
        return {"logits": super().forward(y) if twice else y, "cache": object()}


def test_what_can_be_exported() -> None:
    with pytest.raises(RuntimeRefusalError, match=r"^Function gives no tensor$"):
        onnx_export.export(Function(lambda x: object()).eval(), (torch.zeros(2, 8),))
    with pytest.raises(RuntimeRefusalError, match=r"cannot export the model to ONNX: .*static shape of 2"):
        onnx_export.export(Function(lambda x: x.view(2, 8) + 1.0).eval(), (torch.zeros(2, 8),))


def test_a_time_may_come_ahead_of_what_has_a_batch() -> None:
    model = Function(lambda time, x: torch.tanh(x) * time)
    graph = lowering.trace_for_runtime(model, (torch.tensor(1.0), torch.zeros(2, 8)), runtime="onnxruntime")
    assert (lowering.refusal(graph), graph.launches()) == (None, 2)


def test_inputs_of_two_precisions_are_exported_as_they_are() -> None:
    x, y = torch.ones(2, 8), torch.ones(2, 8, dtype=torch.float64)
    (result,) = OnnxRuntime().build(Function(lambda x, y: x + y.float()).eval(), (x, y))()
    assert result.tolist() == (x + y).tolist()


def test_a_value_that_is_no_tensor_has_an_export_of_its_own() -> None:
    model, x = Decoder(4, 4).eval(), torch.randn(2, 4)
    for twice in (True, False):
        (result,) = OnnxRuntime().build(model, {"x": x, "twice": twice})()
        torch.testing.assert_close(torch.from_numpy(result), model(x, twice=twice)["logits"])


def exhausted(*_: object, **__: object) -> None:
    raise ValueError("Failed to allocate memory for requested buffer of size 64")


@pytest.mark.parametrize("owner", ["torch.onnx.export", "onnxruntime.InferenceSession"])
def test_memory_that_runs_out_is_no_refusal(owner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, exhausted)
    model, x = net()
    with pytest.raises(MemoryError, match="Failed to allocate memory"):
        OnnxRuntime().build(model, (x,))


def test_what_has_no_onnx_form_is_named_and_estimated() -> None:
    source = source_of(nn.Sequential(nn.Linear(4, 4), Function(lambda x: x.lgamma())), torch.zeros(2, 4))
    with pytest.raises(RuntimeRefusalError, match=r"^prims::lgamma has no ONNX form"):
        OnnxRuntime().trace(source, "cpu")
    graph = lowering.of_source(source, "onnxruntime", "cpu")
    assert [op.name for op in graph.ops] == ["ort::MatMul", "ort::Add", "ort::Lgamma"]
    assert graph.notes[0].endswith("prims::lgamma has no ONNX form")
    assert graph.notes[1] == NOTE


def test_an_onnxscript_of_another_pytorch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = ModuleNotFoundError("No module named 'onnxscript.api'", name="onnxscript.api")
    monkeypatch.setattr("torch.onnx.export", Mock(side_effect=lacking))
    with pytest.raises(RuntimeRefusalError, match=r"does not fit this torch .*; run: pip install -U onnxscript"):
        OnnxRuntime().trace(source_of(*net()), "cpu")


def test_the_exporter_is_silent_and_leaves_nothing_behind(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(tempfile, "tempdir", str(here))
    OnnxRuntime().trace(source_of(*net()), "cpu")
    assert not os.listdir(here)
    refused = source_of(Function(lambda x: x if x.isfinite().all() else -x), torch.zeros(2, 4))
    with pytest.raises(RuntimeRefusalError, match="torch cannot export the model"):
        OnnxRuntime().trace(refused, "cpu")
    assert capfd.readouterr() == ("", "")


def test_the_estimate_follows_the_usual_fusions() -> None:
    eager = latpred.trace(*net())
    assert next(op.name for op in OnnxRuntime().estimate(eager, "cpu").ops if op.launches) == "ort::Conv2D"
    assert "ort::Relu" not in names_of(OnnxRuntime().estimate(eager, "cpu"), 2)
    assert any(op.name == "ort::Relu" for op in OnnxRuntime().estimate(eager, "cuda").ops)
    for target in ("cpu", "cuda"):
        guess = OnnxRuntime().estimate(eager, target)
        assert guess.macs(3) == eager.macs(3)
        assert not any("batch_norm" in op.family for op in guess.ops)
    bert = small_source("bert").graph
    assert OnnxRuntime().estimate(bert, "cuda").macs(4) == bert.macs(4)


@pytest.mark.parametrize(
    ("gpu", "line"), [(False, "pip install 'latpred[onnx]'"), (True, "pip install 'latpred[onnx-gpu]'")]
)
def test_without_onnxruntime_the_line_that_installs_it(gpu: bool, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    monkeypatch.setattr(onnx_session, "find_spec", lambda name: None if name == "onnxruntime" else object())
    graph_store.forget()
    assert runtimes.get("onnxruntime").available() == f"onnxruntime is not installed; run: {line}"
    with pytest.raises(MissingPackageError, match=re.escape(line)):
        lowering.trace_for_runtime(*net(), runtime="onnxruntime")


def test_an_onnxruntime_that_cannot_be_imported_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_session, "import_module", Mock(side_effect=ImportError("libonnxruntime.so: no such file")))
    graph_store.forget()
    said = "onnxruntime cannot be imported: libonnxruntime.so: no such file; run: pip install --force-reinstall"
    assert str(OnnxRuntime().available_on("cpu")).startswith(said)
    with pytest.raises(MissingPackageError, match=said):
        lowering.trace_for_runtime(*net(), runtime="onnxruntime")


def test_bfloat16_is_refused_on_a_cpu() -> None:
    with pytest.raises(RuntimeRefusalError, match="no bfloat16 kernels for the CPU"):
        OnnxRuntime().trace(source_of(*net(), precision="bf16"), "cpu")


def tensor(*shape: int, **kinds: Any) -> Value:
    return Value(shape, "float32", **kinds)


SCALE, AXIS = tensor(64, weight=True), Value((), "int64", weight=True, scalar=1)
TOKENS, WAVES, ODD_WAVES, BLOCK = tensor(8, 32, 64), tensor(8, 64, 10, 2), tensor(8, 60, 10, 2), (2, 3, 4, 5)
# Of orders of axes: the elements, how many stay together, and how many matrices are turned over that one axis passes.
TURNS = {
    (0, 1, 3, 2): (120, 1, 6),
    (0, 2, 3, 1): (120, 1, 2),
    (0, 3, 1, 2): (120, 1, 2),
    (1, 2, 3, 0): (120, 1, 1),
    (0, 2, 1, 3): (120, 5, 0),
    (3, 2, 1, 0): (120, 1, 0),
    (0, 1, 2, 3): (120, 120, 0),
}


@pytest.mark.parametrize(
    ("op_type", "attributes", "inputs", "out", "family", "dims"),
    [
        # A transform is along its axis, which is an input or an attribute.
        ("DFT", {}, (WAVES, None, AXIS), WAVES, "fft.dft", (80, 64)),
        ("DFT", {"axis": 1}, (WAVES,), WAVES, "fft.dft", (80, 64)),
        ("DFT", {"axis": 1}, (ODD_WAVES,), ODD_WAVES, "fft.chirp", (80, 60)),
        # Of real values half of the result is kept, after all of it was computed.
        ("DFT", {"axis": 1, "onesided": 1}, (tensor(8, 64, 10, 1),), tensor(8, 33, 10, 2), "fft.dft", (80, 64)),
        ("DFT", {"axis": 1, "inverse": 1}, (tensor(8, 33, 10, 2),), tensor(8, 64, 10, 1), "fft.dft", (80, 64)),
        # A normalisation with an addition in it has a kernel of its own.
        ("LayerNormalization", {}, (TOKENS, SCALE), TOKENS, "norm.layer_norm", (256, 64)),
        ("SkipLayerNormalization", {}, (TOKENS, TOKENS), TOKENS, "norm.skip_layer_norm", (256, 64)),
        ("SimplifiedLayerNormalization", {}, (TOKENS, SCALE), TOKENS, "norm.rms_norm", (256, 64)),
        ("SkipSimplifiedLayerNormalization", {}, (TOKENS, TOKENS), TOKENS, "norm.skip_rms_norm", (256, 64)),
        ("Gemm", {"transB": 1}, (tensor(3, 7), tensor(5, 7)), tensor(3, 5), "gemm", (3, 5, 7)),
        ("Gemm", {"transA": 1, "transB": 1}, (tensor(7, 3), tensor(5, 7)), tensor(3, 5), "gemm", (3, 5, 7)),
        *(
            (
                "Einsum",
                {"equation": term},
                (tensor(2, 3, 7), tensor(4, 1, 5, 7)),
                tensor(4, 2, 3, 5),
                "bmm",
                (2, 3, 20, 7),
            )
            for term in ("...ij,...kj->...ik", "...ij, ...kj")
        ),
        *(
            (
                "Transpose",
                {"perm": order},
                (tensor(*BLOCK),),
                tensor(*map(BLOCK.__getitem__, order)),
                "copy.transpose" if dims[1:] != (1, 0) else "copy.transpose.scattered",
                dims,
            )
            for order, dims in TURNS.items()
        ),
    ],
)
def test_what_a_node_does_follows_from_its_shapes(
    op_type: str, attributes: dict[str, Any], inputs: Any, out: Value, family: str, dims: tuple[int, ...]
) -> None:
    work = work_of(Node(op_type, "", attributes), inputs, (out,))
    assert (work.family, tuple(work.dims.values())) == (family, dims)
    assert work.macs == (prod(dims) if family in ("gemm", "bmm") else 0)


@pytest.mark.parametrize(
    ("op_type", "x", "w", "out", "family", "macs"),
    [
        ("QLinearMatMul", (3, 7), (7, 5), (3, 5), "gemm", 105),
        ("QGemm", (3, 7), (5, 7), (3, 5), "gemm", 105),
        ("QLinearConv", (2, 8, 6, 6), (4, 8, 3, 3), (2, 4, 6, 6), "conv", 2 * 4 * 36 * 72),
    ],
)
def test_products_of_bytes_count_as_others_do(op_type: str, x: Any, w: Any, out: Any, family: str, macs: int) -> None:
    inputs = [tensor(*x), tensor(1), tensor(1), tensor(*w, weight=True), tensor(1), tensor(1), tensor(1), tensor(1)]
    work = work_of(Node(op_type, "", {"transB": 1}), inputs, (tensor(*out),))
    assert work is not None
    assert (work.family, work.macs) == (family, macs)


def test_a_quantised_lstm_multiplies_in_each_step() -> None:
    inputs = [tensor(7, 2, 8), tensor(2, 8, 16, weight=True), tensor(2, 4, 16, weight=True)]
    work = work_of(Node("DynamicQuantizeLSTM", "com.microsoft", {"hidden_size": 4}), inputs, (tensor(7, 2, 2, 4),))
    assert work is not None
    assert (work.family, work.macs) == ("rnn.lstm", 7 * 2 * 2 * (8 + 4) * 16)


def test_quantised_embeddings_read_the_rows_that_are_picked() -> None:
    table, scales = (Value(shape, kind, True) for shape, kind in (((100, 32), "uint8"), ((100, 2), "float32")))
    inputs = [table, Value((2, 5), "int64"), scales]
    work = work_of(Node("GatherBlockQuantized", "com.microsoft", {}), inputs, (tensor(2, 5, 64),))
    assert work is not None
    assert (work.family, dict(work.reads)) == ("embedding", {0: 10 * 32, 2: 10 * 2 * 4})


X, WEIGHTS = tensor(2, 3, 64), tensor(64, 192, weight=True)
MASK, PAST, NONE = tensor(2, 1, 3, 10), tensor(2, 4, 7, 16), None
HEADS = {"num_heads": 4}


@pytest.mark.parametrize(
    ("op_type", "domain", "inputs", "more", "keys", "masked"),
    [
        ("GroupQueryAttention", "com.microsoft", (X, X, X), (), 3, 0),
        ("GroupQueryAttention", "com.microsoft", (X, X, X, PAST, PAST), (), 10, 0),
        ("GroupQueryAttention", "com.microsoft", (X, X, X, PAST, PAST), (tensor(2, 4, 12, 16),), 12, 0),
        ("GroupQueryAttention", "com.microsoft", (tensor(2, 3, 192), *[NONE] * 2, PAST, PAST), (), 10, 0),
        ("MultiHeadAttention", "com.microsoft", (X, X, X, tensor(192, weight=True)), (), 3, 0),
        ("MultiHeadAttention", "com.microsoft", (X, X, X, *[NONE] * 2, MASK, PAST, PAST), (), 10, 1),
        ("MultiHeadAttention", "com.microsoft", (X, PAST, PAST), (), 7, 0),
        ("Attention", "com.microsoft", (X, WEIGHTS), (), 3, 0),
        ("Attention", "com.microsoft", (X, WEIGHTS, NONE, MASK, tensor(2, 2, 4, 7, 16)), (), 10, 1),
        ("Attention", "", (tensor(2, 4, 3, 16), PAST, PAST, MASK), (), 7, 1),
        ("Attention", "", (tensor(2, 4, 3, 16), tensor(2, 4, 3, 16), tensor(2, 4, 3, 16), NONE, PAST, PAST), (), 10, 0),
    ],
)
def test_attention_sees_the_cache(op_type: str, domain: str, inputs: Any, more: Any, keys: int, masked: int) -> None:
    work = work_of(Node(op_type, domain, HEADS), inputs, (tensor(2, 3, 64), *more))
    assert tuple(work.dims.values()) == (2, 4, 3, keys, 16, masked)
    assert work.macs == 2 * 2 * 4 * 3 * keys * 16 + (2 * 3 * 64 * 192 if WEIGHTS in inputs else 0)


def test_a_cuda_provider_is_told_about_tf32_and_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Session:
        def __init__(self, *_: object, providers: list[Any], **__: object) -> None:
            asked.append(providers[0])

        def get_providers(self) -> list[str]:
            return [onnx_session.CUDA] if asked[-1][1]["device_id"] == "0" else ["CPUExecutionProvider"]

    monkeypatch.setattr("onnxruntime.InferenceSession", Session)
    for tf32 in (False, True):
        onnx_session.session(b"", target="cuda", threads=1, gpu=0, tf32=tf32)
    assert [options["use_tf32"] for _, options in asked] == ["0", "1"]
    with pytest.raises(MissingPackageError, match="CUDA provider cannot be loaded here"):
        onnx_session.session(b"", target="cuda", threads=1, gpu=1)


@pytest.mark.parametrize("build", [onnxruntime._run_bound, onnxruntime._captured])
def test_a_gpu_has_written_inputs_before_the_stream_of_onnxruntime_reads_them(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    contiguous, running = torch.Tensor.contiguous, Mock(**{"get_inputs.return_value": [Mock()]})
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda tensor: done.append("laid out") or contiguous(tensor))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append("waited"))
    running.io_binding().bind_input.side_effect = lambda *_: done.append("bound")
    running.get_outputs.return_value = running.io_binding().get_outputs.return_value = []
    build(running, [torch.ones(4, 2).t()], torch.device("cuda", 0))
    assert done[:3] == ["laid out", "waited", "bound"]
