"""Batches of unequal lengths: what torch issues for nested tensors, and packed rows as sums over sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from smallmodels import build_small
from torch import nn
from torch.profiler import ProfilerActivity, profile

import latpred
from latpred.errors import UsageError
from latpred.graph.graph import ModelGraph
from latpred.tracing.unequal_lengths import padded_inputs, trace_lengths, trace_nested

WIDTH, HEADS, LAYERS = 32, 4, 2
LENGTHS, PADDED = (5, 9, 3, 12), 16


def encoder(norm_first: bool = False, **options: bool) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True, activation="gelu", norm_first=norm_first)
    return nn.TransformerEncoder(layer, LAYERS, **options).eval()


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


def test_products_do_the_tokens_that_there_are() -> None:
    tokens = sum(LENGTHS)
    for target in ("cpu", "cuda"):
        graph = trace_nested(encoder(), LENGTHS, PADDED, target=target)
        assert work(graph, "gemm") == LAYERS * tokens * (4 * WIDTH * WIDTH + 2 * WIDTH * 64)
        norms = [op.dims["rows"].at(1) for op in graph.ops if op.family == "norm.layer_norm"]
        assert norms == [tokens] * (2 * LAYERS)


def test_attention_does_the_longest_on_a_processor_and_each_length_on_a_gpu() -> None:
    longest, squares = max(LENGTHS), sum(length**2 for length in LENGTHS)
    assert work(trace_nested(encoder(), LENGTHS, PADDED, target="cpu"), "bmm") == (
        LAYERS * 2 * len(LENGTHS) * longest**2 * WIDTH
    )
    assert work(trace_nested(encoder(), LENGTHS, PADDED, target="cuda"), "attention") == LAYERS * 2 * squares * WIDTH


def test_a_gpu_needs_no_op_per_sequence() -> None:
    few, many = (trace_nested(encoder(), [5] * n, PADDED, target="cuda") for n in (2, 40))
    assert few.launches(2) == many.launches(40)
    assert "source" in few.notes[0]
    few, many = (trace_nested(encoder(), [5] * n, PADDED, target="cpu") for n in (2, 40))
    assert few.launches(2) < many.launches(40)
    assert few.notes == ()


def test_padded_execution_does_everything_at_the_padded_length() -> None:
    graph = trace_lengths(encoder(), LENGTHS, PADDED, "padded")
    assert work(graph, "gemm") == LAYERS * PADDED * (4 * WIDTH * WIDTH + 2 * WIDTH * 64)  # at batch 1
    assert any(op.family == "softmax.masked" for op in graph.ops)
    assert graph.input_size == PADDED


def test_norms_that_come_first() -> None:
    """Torch runs these without nested tensors, and says so."""
    with pytest.warns(UserWarning, match="norm_first"):
        model = encoder(norm_first=True)
    with pytest.raises(UsageError, match="does not run nested"):
        trace_nested(model, LENGTHS, PADDED, target="cpu")


def test_the_encoder_stays_as_it_was() -> None:
    model = encoder()
    trace_lengths(model, LENGTHS, PADDED, "padded")
    assert model.use_nested_tensor is True


@pytest.mark.parametrize(
    ("execution", "said"), [("nested", "enable_nested_tensor=False"), ("packed", "an nn.TransformerEncoder packs noth")]
)
def test_what_an_encoder_does_not_do(execution: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        trace_lengths(encoder(enable_nested_tensor=False), LENGTHS, PADDED, execution)


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


@pytest.mark.parametrize("execution", ["padded", "packed"])
def test_lengths_beyond_the_models_maximum(execution: str) -> None:
    with pytest.raises(UsageError, match="sequences of 65 tokens are too long: BertModel takes at most 64"):
        trace_lengths(bert(), [5, 65], 65, execution)


@pytest.mark.parametrize(("model", "said"), [("resnet-18", "takes no sequences"), (torch.nn.Linear(2, 2), "takes no")])
def test_models_without_sequences(model: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        trace_lengths(model, [5, 6], 6, "padded")
