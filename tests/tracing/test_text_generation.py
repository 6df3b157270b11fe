"""Traces of text generation: what the real call issues, cut into steps, and steps that were never traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch.profiler import ProfilerActivity, profile

from latpred.errors import UnknownModelError, UsageError
from latpred.tracing.layer_extrapolation import same_work
from latpred.tracing.text_generation import GenerationGraph, decoder, trace_generation

SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
MORE = {"num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 64}


def gpt2() -> torch.nn.Module:
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 100, "n_positions": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(bos_token_id=1, eos_token_id=None, **sizes)).eval()


def llama() -> torch.nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **MORE)).eval()


def sliding() -> torch.nn.Module:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, **MORE, sliding_window=8)).eval()


@pytest.mark.parametrize("make", [gpt2, llama])
def test_steps_that_were_not_traced_are_those_that_a_trace_finds(
    make: Callable[[], torch.nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    graph = trace_generation(model, 6, 9)
    monkeypatch.setattr("latpred.tracing.text_generation._extrapolated", lambda *_: None)
    direct = trace_generation(model, 6, 9)
    assert [step.before for step in graph.steps] == [step.before for step in direct.steps] == list(range(6, 14))
    for ours, theirs in zip((graph.prefill, *graph.steps), (direct.prefill, *direct.steps), strict=True):
        assert same_work(ours.graph, theirs.graph)
        assert same_work(ours.forward, theirs.forward)
        assert same_work(ours.loop, theirs.loop)


def keys(graph: GenerationGraph) -> list[int]:
    """Keys that the first attention of each step reads."""
    attention = [[op for op in step.graph.ops if op.family.startswith("attention")] for step in graph.steps]
    return [ops[0].dims["keys"].at(2) for ops in attention]


def test_a_sliding_window_is_off_the_line_and_traced_step_by_step() -> None:
    assert keys(trace_generation(sliding(), 4, 9)) == [5, 6, 7, 8, 8, 8, 8, 8]


def test_a_static_cache_costs_its_whole_length_at_every_step() -> None:
    graph = trace_generation(gpt2(), 6, 9, cache="static")
    assert set(keys(graph)) == {6 + 9 - 1}
    assert {op.name for op in graph.steps[0].graph.ops} & {"aten::index_copy_"}


def test_the_graph_issues_what_generate_issues() -> None:
    """Ops that the profiler saw called by the host, counted for each name of a launching op."""
    model = gpt2()
    names = ("aten::addmm", "aten::scaled_dot_product_attention", "aten::layer_norm", "aten::argmax", "aten::embedding")
    ids = torch.full((2, 6), 5)
    given: Any = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
    with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
        model.generate(**given, eos_token_id=99, pad_token_id=99)  # type: ignore[operator]
    counted = {event.key: event.count for event in seen.key_averages()}
    model.generation_config.eos_token_id = 99  # type: ignore[union-attr]
    graph = trace_generation(model, 6, 6)
    ops = [op.name for stage in (graph.prefill, *graph.steps) for op in stage.graph.ops]
    assert {name: ops.count(name) for name in names} == {name: counted[name] for name in names}
    assert counted["aten::argmax"] == 6
    assert ops.count("aten::_local_scalar_dense") == counted["aten::_local_scalar_dense"]
    assert len(graph.steps) == 5


def test_the_forward_pass_is_set_apart_from_the_loop_around_it_and_its_host_work_is_counted() -> None:
    graph = trace_generation(gpt2(), 6, 5)
    for stage in (graph.prefill, *graph.steps):
        forward, loop = ({op.name for op in part.ops} for part in (stage.forward, stage.loop))
        assert "aten::scaled_dot_product_attention" in forward
        assert "aten::argmax" not in forward
        assert "aten::argmax" in loop
        assert not {"aten::addmm", "aten::layer_norm"} & loop
    assert [step.graph.syncs(2) for step in graph.steps] == [0, 0, 0, 0], "the wait at the end counts once"
    step = graph.steps[1]
    assert sum(op.python_calls for op in step.loop.ops) > 20
    assert sum(op.module_calls for op in step.loop.ops) == 0
    assert sum(op.module_calls for op in step.forward.ops) > 20


def test_a_name_gets_its_language_modelling_head() -> None:
    name, module = decoder("openai-community/gpt2")
    assert (name, type(module).__name__) == ("openai-community/gpt2", "GPT2LMHeadModel")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"prompt": 60, "new_tokens": 5}, "60 prompt tokens and 5 new ones are 65, but .* at most 64"),
        ({"prompt": 0, "new_tokens": 5}, "prompt=0 is not a number of tokens"),
        ({"prompt": 5, "new_tokens": True}, "new_tokens=True is not a number of tokens"),
        ({"prompt": 5, "new_tokens": 5, "cache": "paged"}, "cache 'paged' is not known"),
        ({"prompt": 5, "new_tokens": 5, "precision": "fp8"}, "precision 'fp8' is not known"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        trace_generation(gpt2(), **arguments)


def test_models_that_generate_nothing() -> None:
    with pytest.raises(UsageError, match=r"bert-base-uncased generates no text.*gpt2"):
        decoder("bert-base-uncased")
    with pytest.raises(UsageError, match="Linear generates no text"):
        decoder(torch.nn.Linear(2, 2))
    with pytest.raises(UnknownModelError, match="gpt2"):
        decoder("gpt22")
    with pytest.raises(UsageError, match="is an encoder: it keeps no cache"):
        decoder(transformers.BertLMHeadModel(transformers.BertConfig(**SIZES, vocab_size=50)))
