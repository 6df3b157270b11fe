"""Batches of unequal lengths: what torch issues for nested tensors, packed rows as sums, and predictions of both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from clidata import document
from factories import device, dispatch, kernel_fits
from factories import profile as asynchronous
from smallmodels import build_small
from torch import nn
from torch.profiler import ProfilerActivity, profile

import latpred
from latpred import Lengths
from latpred.api import curve_of
from latpred.errors import RuntimeRefusalError, TraceError, UsageError
from latpred.graph.graph import ModelGraph
from latpred.prediction.predictor import Predictor
from latpred.profile.document import DeviceProfile
from latpred.query import Options
from latpred.tracing.tracer import COMPILED
from latpred.tracing.unequal_lengths import padded_inputs, trace_lengths, trace_nested

WIDTH, HEADS, LAYERS = 32, 4, 2
LENGTHS, PADDED = (5, 9, 3, 12), 16
PAPER = Lengths(mean=20.92, std=10.18, padded_to=128)
NESTED = Options(lengths=PAPER, execution="nested")

pytestmark = pytest.mark.usefixtures("calibrated")


def encoder(norm_first: bool = False, **options: bool) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True, activation="gelu", norm_first=norm_first)
    return nn.TransformerEncoder(layer, LAYERS, **options).eval()


def own_layers() -> nn.TransformerEncoder:
    """An encoder of layers that are not PyTorch's."""
    return nn.TransformerEncoder(nn.Linear(WIDTH, WIDTH), LAYERS, enable_nested_tensor=False)  # type: ignore[arg-type]


def issued(model: nn.TransformerEncoder) -> Counter[str]:
    """Calls of ops in one real forward pass, by the profiler."""
    inputs = padded_inputs(model, LENGTHS, PADDED)(len(LENGTHS))
    inputs["src"] = torch.randn(inputs["src"].shape)
    with torch.inference_mode():
        model(**inputs)
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            model(**inputs)
    return Counter({event.key: event.count for event in seen.key_averages()})


WATCHED = (
    *("aten::mm", "aten::addmm", "aten::_addmm_activation", "aten::bmm", "aten::_softmax", "aten::layer_norm"),
    *("aten::_transform_bias_rescale_qkv", "aten::constant_pad_nd", "aten::masked_select"),
    *("aten::split_with_sizes", "aten::argmin", "aten::_local_scalar_dense"),
)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_ops_are_those_that_torch_issues() -> None:
    real = issued(encoder())
    ours = Counter(op.name for op in trace_nested(encoder(), LENGTHS, PADDED, target="cpu").ops)
    assert {name: ours[name] for name in WATCHED} == {name: real[name] for name in WATCHED}
    assert real["aten::_transformer_encoder_layer_fwd"] == LAYERS


def work(graph: ModelGraph, family: str) -> int:
    return sum(op.macs.at(1) for op in graph.ops if op.family.split(".")[0] == family)


def test_products_do_the_tokens_that_there_are_and_attention_the_longest_or_on_a_gpu_each_length() -> None:
    tokens, squares = sum(LENGTHS), sum(length**2 for length in LENGTHS)
    longest = len(LENGTHS) * max(LENGTHS) ** 2
    for target in ("cpu", "cuda"):
        graph = trace_nested(encoder(), LENGTHS, PADDED, target=target)
        assert work(graph, "gemm") == LAYERS * tokens * (4 * WIDTH * WIDTH + 2 * WIDTH * 64)
        norms = [op.dims["rows"].at(1) for op in graph.ops if op.family == "norm.layer_norm"]
        assert norms == [tokens] * (2 * LAYERS)
        scores, kernels = (squares, "attention") if target == "cuda" else (longest, "bmm")
        assert work(graph, kernels) == LAYERS * 2 * scores * WIDTH


def test_a_gpu_needs_no_op_per_sequence() -> None:
    few, many = (trace_nested(encoder(), [5] * n, PADDED, target="cuda") for n in (2, 40))
    assert few.launches(2) == many.launches(40)
    assert "source" in few.notes[0]
    few, many = (trace_nested(encoder(), [5] * n, PADDED, target="cpu") for n in (2, 40))
    assert few.launches(2) < many.launches(40)
    assert few.notes == ()


def test_padded_execution_does_everything_at_the_padded_length() -> None:
    model = encoder()
    graph = trace_lengths(model, LENGTHS, PADDED, "padded")
    assert model.use_nested_tensor is True, "the user's model stays as it was"
    assert work(graph, "gemm") == LAYERS * PADDED * (4 * WIDTH * WIDTH + 2 * WIDTH * 64)  # at batch 1
    assert any(op.family == "softmax.masked" for op in graph.ops)
    assert graph.input_size == PADDED
    assert trace_lengths(nn.DataParallel(encoder()), LENGTHS, PADDED, "padded").ops == graph.ops


def test_norms_that_come_first() -> None:
    """Torch runs these without nested tensors, and says so."""
    with pytest.warns(UserWarning, match="norm_first"):
        model = encoder(norm_first=True)
    with pytest.raises(UsageError, match="does not run nested"):
        trace_nested(model, LENGTHS, PADDED, target="cpu")


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    return BertModel(BertConfig(**sizes, vocab_size=100, max_position_embeddings=64), add_pooling_layer=False)


@pytest.mark.parametrize("make", [bert, lambda: build_small("gpt2", "meta")])
def test_equal_lengths_are_the_work_of_a_batch_without_padding(make: Callable[[], torch.nn.Module]) -> None:
    """At a length that was never traced, against a trace at that length."""
    packed, traced = trace_lengths(make(), [23] * 3, 23, "packed"), latpred.trace(make(), seq=23)
    assert packed.macs(3) == traced.macs(3)
    assert packed.bytes(3) == traced.bytes(3)
    assert [op.dims for op in packed.ops] == [
        {name: (line.at(3), 0) for name, line in op.dims.items()} for op in traced.ops
    ]


def test_unequal_lengths_add_up_sequence_by_sequence_and_do_less_than_padded_ones() -> None:
    lengths = [5, 50, 20]
    packed, padded = (trace_lengths(bert(), lengths, 50, execution) for execution in ("packed", "padded"))
    alone = [latpred.trace(bert(), seq=length) for length in lengths]
    for kind in ("gemm", "attention", "norm"):
        expected = 0
        for graph in alone:
            expected += sum(op.macs.per_sample for op in graph.ops if op.family.split(".")[0] == kind)
        assert work(packed, kind) == expected
    rows = next(op for op in packed.ops if op.family == "norm.layer_norm").dims["rows"]
    assert rows.at(1) == rows.at(100) == sum(lengths)
    assert packed.macs(3) < padded.macs(3)
    assert "an estimate" in packed.notes[0]
    assert padded.notes == ()
    assert trace_lengths(bert(), lengths, 50, "nested").notes[0] == "transformers runs nothing nested"


@pytest.mark.parametrize(("lengths", "masked"), [([5, 50, 20], 1), ([50, 50], 0)])
def test_a_padded_batch_has_a_mask(lengths: list[int], masked: int) -> None:
    attention = [op for op in trace_lengths(bert(), lengths, 50, "padded").ops if op.family.startswith("attention")]
    assert [op.dims["masked"].at(len(lengths)) for op in attention] == [masked] * 2


def test_only_a_table_of_positions_limits_lengths() -> None:
    found = trace_lengths("llama-3.1-8b", [5, 4096], 4096, "packed")
    assert next(op for op in found.ops if op.family == "embedding").dims["rows"].at(2) == 4101


def test_work_that_is_done_in_blocks_of_tokens_is_no_parabola() -> None:
    """Longformer pads to a multiple of its window: 300 tokens are no more like 48 than 512 are."""
    from transformers import LongformerConfig, LongformerModel

    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    model = LongformerModel(LongformerConfig(**sizes, vocab_size=100, attention_window=[64]))
    with pytest.raises(TraceError, match=r"work at 300 tokens is not what it is at 16, 32, 48 carried on; .*'padded'"):
        trace_lengths(model, [20, 300], 300, "packed")
    assert trace_lengths(model, [20, 300], 300, "padded").macs(2) > 0
    assert trace_lengths(model, [20, 60], 60, "packed").macs(2) > 0, "one block each"


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # importing torch's compiler
def test_compiled_models_are_seen_through_and_said_to_be_compiled() -> None:
    for model, execution in ((encoder(), "padded"), (encoder(), "nested"), (bert(), "packed")):
        plain = trace_lengths(model, [5, 9], 9, execution)
        compiled = trace_lengths(torch.compile(model), [5, 9], 9, execution)  # type: ignore[arg-type]
        assert (compiled.ops, compiled.notes) == (plain.ops, (*plain.notes, COMPILED))


def large_encoder() -> nn.TransformerEncoder:
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True, activation="gelu")
        return nn.TransformerEncoder(layer, 2).eval()


def gpu() -> DeviceProfile:
    """A device with one law for all its kernels, in eager and in CUDA graphs."""
    products, others = ("gemm", "bmm", "attention"), ("norm", "softmax", "elementwise", "copy", "cat", "index")
    graphs = dispatch(costs_us={"": 0.5, "replay": 9.0}, module_call_us=0.0, python_call_us=0.0)
    rates = {"macs_per_us": 1e7, "weight_bytes_per_us": 5e5, "activation_bytes_per_us": 5e5}
    fits = kernel_fits(*products, *others, "reduction", "factory", **rates)
    return asynchronous(device(), fits, {"eager": dispatch(), "cuda-graphs": graphs})


def static_and_nested(model: nn.TransformerEncoder, batch: int) -> list[latpred.Prediction]:
    """Lengths as the paper has them, in a static CUDA graph and in eager without their padding."""
    asked = (Options(lengths=PAPER, runtime="cuda-graphs"), NESTED)
    return [curve_of(Predictor(gpu()), model, (batch,), options)[0] for options in asked]


def test_nested_execution_cuts_what_a_static_graph_costs() -> None:
    """At batch 128 the paper measured 80.56 % less than a static CUDA graph takes, on sequences with these lengths."""
    static, nested = static_and_nested(large_encoder(), 128)
    assert 0.75 < 1 - nested.latency_ms / static.latency_ms < 0.90
    assert nested.compute_ms < 0.25 * static.compute_ms


def test_a_list_is_its_own_batch() -> None:
    found = latpred.predict(encoder(), lengths=[12, 40, 7])
    assert isinstance(found, latpred.Prediction)
    assert found.batch == 3
    assert found.setting.input_size == 40
    assert latpred.predict(encoder(), 3, lengths=[12, 40, 7]).latency_ms == found.latency_ms


def test_a_distribution_serves_every_batch() -> None:
    curve = latpred.predict(encoder(), [1, 8, 64], lengths=PAPER, execution="nested")
    assert isinstance(curve, latpred.Curve)
    assert curve.batches.tolist() == [1, 8, 64]
    assert (curve.compute_ms[1:] > curve.compute_ms[:-1]).all()
    assert curve.overhead_ms[2] > curve.overhead_ms[0]  # on a processor each sequence has ops of its own
    assert curve.crossover.batch is not None
    assert any("straight lines" in caveat for caveat in curve.setting.provenance.caveats)
    assert {id(point.setting) for point in curve} == {id(curve.setting)}


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: trace_lengths(encoder(enable_nested_tensor=False), LENGTHS, PADDED, "nested"), "nested_tensor=False"),
        (lambda: trace_lengths(encoder(), LENGTHS, PADDED, "packed"), "an nn.TransformerEncoder packs nothing"),
        (lambda: trace_lengths(own_layers(), [5, 6], 6, "padded"), "nothing tells how wide inputs are; leave"),
        (lambda: trace_lengths(bert(), [5, 65], 65, "padded"), "65 tokens are too long: BertModel takes at most 64"),
        (lambda: trace_lengths(bert(), [5, 65], 65, "packed"), "65 tokens are too long: BertModel takes at most 64"),
        (lambda: trace_lengths("resnet-18", [5, 6], 6, "padded"), "takes no sequences"),
        (lambda: trace_lengths(nn.Linear(2, 2), [5, 6], 6, "padded"), "takes no sequences"),
        (lambda: latpred.predict(encoder(), [1], lengths=[12, 40, 7]), "3 lengths are a batch of 3, not of 1"),
        (lambda: latpred.predict(encoder(), [3, 6], lengths=[12, 40, 7]), "3 lengths are a batch of 3, not of 6"),
        (lambda: latpred.predict(encoder(), lengths=[12], seq=64), "lengths= says what the inputs are; leave out seq"),
        (lambda: latpred.predict(encoder(), lengths=[12], execution="jagged"), "choose from: padded, nested"),
        (lambda: latpred.predict(latpred.trace("gpt2", seq=4), lengths=[3, 4]), "needs a PyTorch model or the name"),
        (lambda: latpred.predict(Path("m.onnx"), lengths=[3, 4], device="epyc-shared"), "an .onnx file"),
        (lambda: latpred.predict(Path("m.py:build"), lengths=[3, 4]), "there is no file 'm.py'"),
        (
            lambda: curve_of(Predictor(gpu()), encoder(), (2,), replace(NESTED, runtime="cuda-graphs")),
            "cuda-graphs runs graphs of fixed shapes, so nothing nested",
        ),
    ],
)
def test_what_cannot_be_asked_of_lengths(ask: Callable[[], object], said: str) -> None:
    with pytest.raises((UsageError, RuntimeRefusalError), match=said):
        ask()


def test_the_command_line() -> None:
    asked = ["predict", "distilbert-base-uncased", "--lengths", "12,40,7"]
    padded, packed = document(*asked), document(*asked, "--execution", "packed")
    assert [point["batch"] for point in padded["points"]] == [3]
    assert packed["points"][0]["compute_ms"] < padded["points"][0]["compute_ms"]
    spread = document("curve", "distilbert-base-uncased", "--lengths", "mean=20,std=5,pad=64", "-b", "2,4")
    assert [point["batch"] for point in spread["points"]] == [2, 4]
