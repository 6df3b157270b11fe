"""Packed batches of transformers models: sums over sequences of what each does by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import latpred
from latpred.errors import UsageError
from latpred.tracing.unequal_lengths import trace_lengths


def bert() -> torch.nn.Module:
    from transformers import BertConfig, BertModel

    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    return BertModel(BertConfig(**sizes, vocab_size=100, max_position_embeddings=64), add_pooling_layer=False)


def gpt2() -> torch.nn.Module:
    from transformers import GPT2Config, GPT2Model

    return GPT2Model(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=100, n_positions=64))


@pytest.mark.parametrize("make", [bert, gpt2])
def test_equal_lengths_are_the_work_of_a_batch_without_padding(make: Callable[[], torch.nn.Module]) -> None:
    """At a length that was never traced, against a trace at that length."""
    packed, traced = trace_lengths(make(), [23] * 3, 23, "packed"), latpred.trace(make(), seq=23)
    assert packed.macs(3) == traced.macs(3)
    assert packed.bytes(3) == traced.bytes(3)
    assert [op.dims for op in packed.ops] == [
        {name: (line.at(3), 0) for name, line in op.dims.items()} for op in traced.ops
    ]


def test_unequal_lengths_add_up_sequence_by_sequence() -> None:
    lengths = [5, 50, 20]
    packed = trace_lengths(bert(), lengths, 50, "packed")
    alone = [latpred.trace(bert(), seq=length) for length in lengths]
    for kind in ("gemm", "attention", "norm"):
        expected = 0
        for graph in alone:
            expected += sum(op.macs.per_sample for op in graph.ops if op.family.split(".")[0] == kind)
        found = sum(op.macs.at(1) for op in packed.ops if op.family.split(".")[0] == kind)
        assert found == expected
    rows = next(op for op in packed.ops if op.family == "norm.layer_norm").dims["rows"]
    assert rows.at(1) == rows.at(100) == sum(lengths)


def test_a_packed_batch_does_less_than_a_padded_one() -> None:
    lengths = [5, 50, 20]
    assert trace_lengths(bert(), lengths, 50, "packed").macs(3) < trace_lengths(bert(), lengths, 50, "padded").macs(3)


def test_a_padded_batch_has_a_mask() -> None:
    padded = trace_lengths(bert(), [5, 50, 20], 50, "padded")
    masked = [op.dims["masked"].at(3) for op in padded.ops if op.family.startswith("attention")]
    assert masked == [1, 1]
    full = trace_lengths(bert(), [50, 50], 50, "padded")
    assert [op.dims["masked"].at(2) for op in full.ops if op.family.startswith("attention")] == [0, 0]


def test_estimates_are_marked() -> None:
    assert "an estimate" in trace_lengths(bert(), [5, 50], 50, "packed").notes[0]
    assert trace_lengths(bert(), [5, 50], 50, "nested").notes[0] == "transformers runs nothing nested"
    assert trace_lengths(bert(), [5, 50], 50, "padded").notes == ()


@pytest.mark.parametrize("execution", ["padded", "packed"])
def test_lengths_beyond_the_models_maximum(execution: str) -> None:
    with pytest.raises(UsageError, match="sequences of 65 tokens are too long: BertModel takes at most 64"):
        trace_lengths(bert(), [5, 65], 65, execution)


@pytest.mark.parametrize(("model", "said"), [("resnet-18", "takes no sequences"), (torch.nn.Linear(2, 2), "takes no")])
def test_models_without_sequences(model: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        trace_lengths(model, [5, 6], 6, "padded")
