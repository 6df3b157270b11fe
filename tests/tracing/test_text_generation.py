"""Text generation: what the real call issues, cut into steps, steps that were never traced, and their predictions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from clidata import document, models_file, run
from factories import device, dispatch
from factories import profile as asynchronous
from profiledata import kernel, profile
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiled

import latpred
from latpred import tables
from latpred.errors import LatpredError, RuntimeRefusalError, UnknownModelError, UsageError
from latpred.explanation.generation import generation_curve
from latpred.prediction.predictor import Predictor
from latpred.tracing.text_generation import GenerationGraph, same_work, trace_generation

pytestmark = pytest.mark.usefixtures("calibrated")

SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
MORE = {"num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 64}


def gpt2() -> torch.nn.Module:
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 100, "n_positions": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(bos_token_id=1, eos_token_id=None, **sizes)).eval()


def llama() -> torch.nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **MORE)).eval()


def sliding() -> torch.nn.Module:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, **MORE, sliding_window=8)).eval()


def encoder() -> torch.nn.Module:
    return transformers.BertLMHeadModel(transformers.BertConfig(**SIZES, vocab_size=50)).eval()


def neox() -> torch.nn.Module:
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes, vocab_size=50)).eval()


class Adapted(torch.nn.Module):
    """Has all that it does not have itself from a model within it, as PEFT's wrappers do."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_untraced_steps_are_as_traced(make: Callable[[], torch.nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    graph = trace_generation(model, 50, 9)
    monkeypatch.setattr("latpred.tracing.text_generation._extrapolated", lambda *_: None)
    direct = trace_generation(model, 50, 9)
    assert len(graph.steps) == len(direct.steps) == 8
    assert graph.prefill.graph == direct.prefill.graph
    for ours, theirs in zip((graph.prefill, *graph.steps), (direct.prefill, *direct.steps), strict=True):
        assert same_work(ours.graph, theirs.graph)
        assert same_work(ours.forward, theirs.forward)
        assert same_work(ours.loop, theirs.loop)
        read_again = [
            op.reread_after.at(2) for graph in (ours.graph, theirs.graph) for op in graph.ops if op.reread_after
        ]
        half = len(read_again) // 2
        assert read_again[:half] == pytest.approx(read_again[half:], rel=0.1), "where the prefill is long, too"


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
    with pytest.raises(UsageError, match="cache 'paged' is not known"):
        trace_generation(gpt2(), 6, 9, cache="paged")


def test_the_graph_issues_what_generate_issues() -> None:
    """Ops that the profiler saw called by the host, counted for each name of a launching op."""
    model = gpt2()
    names = ("aten::addmm", "aten::scaled_dot_product_attention", "aten::layer_norm", "aten::argmax", "aten::embedding")
    ids = torch.full((2, 6), 5)
    given: Any = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
    with torch.inference_mode(), profiled(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
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


def small(vocabulary: int, end: int | list[int]) -> torch.nn.Module:
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": vocabulary}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(bos_token_id=1, eos_token_id=end, **sizes))


@pytest.mark.parametrize(
    "build",
    [encoder, neox, partial(small, 4, 2), partial(small, 8, [5, 6, 7])],
    ids=["encoder", "neox", "few tokens", "several ends"],
)
def test_every_decoder_generates_however_few_tokens_it_knows(build: Callable[[], torch.nn.Module]) -> None:
    model = build()
    assert getattr(model.config, "is_decoder", False) is False, "its config calls it none"
    assert len(trace_generation(model, 4, 3).steps) == 2


def test_the_steps_add_up() -> None:
    found = latpred.predict_generation(gpt2(), 6, 5, 2)
    assert isinstance(found, latpred.GenerationPrediction)
    assert found.latency_ms == pytest.approx(found.first_token_ms + found.step_ms.sum())
    # a processor does one after the other
    assert found.latency_ms == pytest.approx(found.overhead_ms + found.compute_ms)
    assert found.tokens_per_s == pytest.approx(2 * 5 / found.latency_ms * 1e3)
    assert found.overhead_share == pytest.approx(found.overhead_ms / found.latency_ms)
    assert found.per_token_ms == pytest.approx(found.step_ms.mean())
    assert found.interval_ms[0] < found.latency_ms < found.interval_ms[1]
    assert [step.cached for step in found.steps] == [6, 7, 8, 9]
    assert len(found.regime) == 5


def test_a_step_costs_more_the_longer_the_cache_is() -> None:
    found = latpred.predict_generation(gpt2(), 6, 9, 64)
    assert (np.diff(found.step_ms) > 0).all()
    assert len({step.overhead_ms for step in found.steps}) == 1


def test_one_token_is_the_prefill() -> None:
    found = latpred.predict_generation(gpt2(), 6, 1)
    assert (found.steps, found.per_token_ms, found.latency_ms) == ((), None, found.first_token_ms)


def test_several_batches_are_a_curve_whose_table_joins_with_a_measured_one() -> None:
    curve = latpred.predict_generation(gpt2(), 6, 3, [1, 8])
    assert isinstance(curve, latpred.GenerationCurve)
    assert [point.batch for point in curve] == [1, 8]
    assert curve[1].latency_ms > curve[0].latency_ms
    frame = tables.check(curve.to_frame(), tables.PREDICTED)
    assert frame["input_kind"].tolist() == ["prompt+3", "prompt+1"] * 2
    assert frame["latency_s"].tolist() == pytest.approx(
        [ms / 1e3 for point in curve for ms in (point.latency_ms, point.first_token_ms)]
    )


def test_many_steps_are_priced_at_some_lengths_and_lie_on_lines_between(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = trace_generation(gpt2(), 6, 12)
    predictor, batches = Predictor(profile()), np.array([16])
    each = generation_curve(predictor, graph, batches)[0]
    monkeypatch.setattr("latpred.explanation.generation._MOST_PRICED", 4)
    some = generation_curve(predictor, graph, batches)[0]
    assert some.step_ms == pytest.approx(each.step_ms, rel=1e-3)
    assert [step.cached for step in some.steps] == [step.cached for step in each.steps]
    assert some.steps[:2] == each.steps[:2], "the first step alone reads weights where the prefill left them"


def test_attention_in_parts_and_another_host() -> None:
    fused, parts = (trace_generation(gpt2(), 6, 5, attention=kind).steps[1].graph for kind in ("sdpa", "eager"))
    assert "aten::scaled_dot_product_attention" in {op.name for op in fused.ops}
    assert {op.name for op in parts.ops} >= {"aten::softmax", "aten::matmul"}
    asked = {"device": "rtx-8000", "attention": "eager"}
    slow, fast = (latpred.predict_generation(gpt2(), 6, 5, host=factor, **asked) for factor in (2.0, 0.5))
    assert slow.overhead_ms == pytest.approx(4.0 * fast.overhead_ms)
    assert "fp32, eager attention, eager on rtx-8000" in repr(fast)
    assert fast.to_dict()["attention"] == "eager"
    assert set(fast.to_frame()["attention"]) == {"eager"}
    model = gpt2()
    latpred.predict_generation(model, 6, 2, **asked)
    assert model.config._attn_implementation == "sdpa", "the user's model stays as it was"


def test_what_it_looks_like() -> None:
    curve = latpred.predict_generation(gpt2(), 6, 3, [1, 8])
    assert "GPT2LMHeadModel: 3 new tokens after 6, fp32, eager on cpu" in repr(curve[0])
    assert repr(curve).splitlines()[1].split()[-4:] == ["next", "tokens/s", "overhead", "regime"]
    assert "<table>" in curve._repr_html_()
    assert "<table>" in curve[0]._repr_html_()


def test_replayed_steps_have_a_static_cache_and_say_that_they_are_an_estimate() -> None:
    families = ("gemm", "attention", "norm", "elementwise", "copy", "cat", "embedding", "reduction", "index", "factory")
    runtimes = {"eager": dispatch(), "cuda-graphs": dispatch(costs_us={"": 0.1, "replay": 9.0})}
    predictor = Predictor(asynchronous(device(), [kernel(family) for family in families], runtimes))
    batches = np.array([2])
    static = trace_generation(gpt2(), 6, 5, cache="static")
    replayed = generation_curve(predictor, static, batches, "cuda-graphs")[0]
    eager = generation_curve(predictor, trace_generation(gpt2(), 6, 5), batches)[0]
    assert replayed.cache == "static"
    assert replayed.overhead_ms < eager.overhead_ms
    assert replayed.per_token_ms < eager.per_token_ms
    said = replayed.provenance.caveats[0]
    assert "an estimate" in said
    assert "static cache of 10 tokens" in said
    assert not eager.provenance.caveats


@pytest.mark.parametrize(
    ("asked", "error", "said"),
    [
        ({"prompt": 60, "new_tokens": 6}, UsageError, "60 prompt tokens and 6 new ones take 65 positions, but .* 64"),
        ({"prompt": 0}, UsageError, "prompt=0 is not a number of tokens"),
        ({"prompt": 6.0}, UsageError, "prompt=6.0 is not a number of tokens"),
        ({"new_tokens": True}, UsageError, "new_tokens=True is not a number of tokens"),
        ({"precision": "fp8"}, UsageError, "precision 'fp8' is not known"),
        ({"attention": "flash"}, UsageError, "attention='flash'"),
        ({"batch": 0}, UsageError, "smallest batch is 1"),
        ({"batch": []}, UsageError, "names no batch size"),
        ({"runtime": "onnxruntime"}, RuntimeRefusalError, r"generation in onnxruntime is not predicted.*cuda-graphs"),
        ({"runtime": "eagre"}, UsageError, "Did you mean 'eager'"),
        ({"runtime": "cuda-graphs"}, UsageError, "cuda-graphs needs a CUDA device"),
        ({"model": "bert-base-uncased"}, UsageError, r"bert-base-uncased generates no text.*gpt2"),
        ({"model": torch.nn.Linear(2, 2)}, UsageError, "Linear generates no text"),
        ({"model": "gpt22"}, UnknownModelError, "gpt2"),
        ({"model": Adapted(gpt2())}, UsageError, r"Adapted hands generate\(\) on to a model within it"),
    ],
)
def test_of_what_nothing_can_be_told(asked: dict[str, Any], error: type[LatpredError], said: str) -> None:
    with pytest.raises(error, match=said):
        latpred.predict_generation(**{"model": gpt2(), "prompt": 6, "new_tokens": 3, **asked})


def test_the_device_fills_up() -> None:
    small = msgspec.structs.replace(profile().device, memory_bytes=1000)
    found = generation_curve(Predictor(profile(device=small)), trace_generation(gpt2(), 6, 3), np.array([1]))[0]
    assert found.fits is False
    assert "needs more memory than the device has" in repr(found)


def test_the_verb(tmp_path: Path) -> None:
    options = ["generate", f"{models_file(tmp_path)}:gpt2", "--prompt", "6", "--new-tokens", "3", "--batch", "1,8"]
    done = run(*options)
    assert done.exit_code == 0, done.output
    assert "3 new tokens after 6" in done.output
    assert max(map(len, done.stdout.splitlines()[1:4])) <= 80
    found = document(*options)
    assert found["schema"] == "latpred.generation-curve/1"
    assert [point["batch"] for point in found["points"]] == [1, 8]
    assert len(found["points"][0]["steps"]) == 3
    assert run(*options, "--csv").stdout.count("prompt+3") == 2
