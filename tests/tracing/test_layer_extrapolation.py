"""Graphs put together from shallow traces: the same as full ones, or not used."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import transformers
from transformers import BertConfig, PretrainedConfig

from latpred.errors import TimeLimitError
from latpred.graph.graph import ModelGraph
from latpred.tracing import layer_extrapolation, trace
from latpred.tracing.layer_extrapolation import LayerExtrapolation
from latpred.zoo import names

SMALL = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "vocab_size": 50}


def whole(config: PretrainedConfig, **options: Any) -> ModelGraph:
    return trace(names.build_config(config), **options)


def bert(depth: int, **changes: Any) -> BertConfig:
    return BertConfig(num_hidden_layers=depth, **(SMALL | changes))


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("BertConfig", SMALL),
        ("RobertaConfig", SMALL),
        ("ElectraConfig", SMALL | {"embedding_size": 16}),
        ("DistilBertConfig", {"dim": 32, "hidden_dim": 48, "n_heads": 2, "vocab_size": 50}),
        ("GPT2Config", {"n_embd": 32, "n_head": 2, "vocab_size": 50}),
        ("LlamaConfig", SMALL | {"num_key_value_heads": 2}),
        ("AlbertConfig", SMALL | {"embedding_size": 16}),
        ("DebertaConfig", SMALL | {"relative_attention": True, "pos_att_type": ["c2p"]}),
        ("FNetConfig", {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 50}),
        ("ViTConfig", SMALL | {"image_size": 32, "patch_size": 8}),
        ("T5Config", {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_heads": 2, "vocab_size": 50}),
    ],
)
def test_every_family_gives_the_graphs_of_full_traces(name: str, config: dict[str, Any]) -> None:
    stacks = LayerExtrapolation()
    size = {"image": 32} if name == "ViTConfig" else {"seq": 8}
    for depth in (2, 6, 7, 6, 7):
        widths = {key: 2 * value for key, value in config.items() if key == "intermediate_size"} if depth == 7 else {}
        given = getattr(transformers, name)(num_hidden_layers=depth, **(config | widths))
        assert stacks.graph(given, **size) == whole(given, **size)


def test_most_of_many_berts_are_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[object] = []
    monkeypatch.setattr(layer_extrapolation, "trace", lambda *of, **how: traced.append(of) or trace(*of, **how))
    stacks = LayerExtrapolation()
    berts = [bert(depth, intermediate_size=width) for width in (32, 48, 80, 96) for depth in range(5, 10)]
    graphs = [stacks.graph(given, seq=8) for given in berts]
    assert len(traced) == 4 + 5, "each width four layers deep, and each depth once"
    assert graphs == [whole(given, seq=8) for given in berts]
    middle = next(index for index, op in enumerate(graphs[6].ops) if op.module.startswith("encoder.layer.4"))
    assert all(graphs[6].ops[index] is graphs[7].ops[index] for index in range(middle)), "depths share their layers"


def test_a_time_limit_that_ends_a_shallow_trace_is_raised_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_extrapolation, "trace", mock.Mock(side_effect=[TimeLimitError("late"), None]))
    with pytest.raises(TimeLimitError, match="late"):
        LayerExtrapolation().graph(bert(5), seq=8)


def test_nothing_passes_between_precisions_inputs_and_code() -> None:
    stacks = LayerExtrapolation()
    for _ in range(2):
        for options in ({"seq": 8}, {"seq": 9}, {"seq": 8, "precision": "fp16"}):
            for changes in ({}, {"hidden_act": "relu"}, {"attn_implementation": "eager"}):
                given = bert(5, **changes)
                assert stacks.graph(given, **options) == whole(given, **options)
    with names.attention("eager"):
        assert stacks.graph(bert(6), seq=8) == whole(bert(6), seq=8)


def test_layers_that_differ_by_number_are_traced_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.bert.modeling_bert import BertLayer

    plain = BertLayer.forward
    odd = {"from": 2}

    def forward(self: Any, hidden_states: Any, *args: Any, **options: Any) -> Any:
        out = plain(self, hidden_states, *args, **options)
        return out + 1 if self.attention.self.layer_idx >= odd["from"] else out

    monkeypatch.setattr(BertLayer, "forward", forward)
    for first in (2, 5):  # seen among four layers; seen only when a deep one is traced in full
        odd["from"] = first
        stacks = LayerExtrapolation()
        for depth in (6, 7, 8, 7, 8):
            for width in (48, 96):
                given = bert(depth, intermediate_size=width)
                assert stacks.graph(given, seq=8) == whole(given, seq=8)


def test_a_config_that_holds_objects_is_traced_in_full() -> None:
    stacks = LayerExtrapolation()
    given = bert(6)
    given.something = object()
    assert stacks.graph(given, seq=8) == whole(given, seq=8)
    assert not stacks._stacks._values
