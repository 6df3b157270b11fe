"""latpred.predict_generation: what its steps add up to, what it prints, which runtimes it refuses; and the verb."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from clidata import models_file
from factories import device, dispatch
from factories import profile as asynchronous
from profiledata import kernel, profile
from tracing.test_text_generation import gpt2

import latpred
from latpred import tables
from latpred.cli import main
from latpred.errors import RuntimeRefusalError, UsageError
from latpred.explanation.generation import generation_curve
from latpred.prediction.predictor import Predictor
from latpred.tracing.text_generation import trace_generation

pytestmark = pytest.mark.usefixtures("calibrated")


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


def test_attention_in_parts_and_another_host() -> None:
    fused, parts = (
        trace_generation(gpt2(), 6, 5, attention=attention).steps[1].graph for attention in ("sdpa", "eager")
    )
    assert "aten::scaled_dot_product_attention" in {op.name for op in fused.ops}
    assert {op.name for op in parts.ops} >= {"aten::softmax", "aten::matmul"}
    asked = {"device": "rtx-8000", "attention": "eager"}
    slow, fast = (latpred.predict_generation(gpt2(), 6, 5, host=factor, **asked) for factor in (2.0, 0.5))
    assert slow.overhead_ms == pytest.approx(4.0 * fast.overhead_ms)
    model = gpt2()
    latpred.predict_generation(model, 6, 2, **asked)
    assert model.config._attn_implementation == "sdpa", "the user's model stays as it was"
    with pytest.raises(UsageError, match="attention='flash'"):
        latpred.predict_generation(gpt2(), 6, 5, attention="flash")


def test_what_it_looks_like() -> None:
    curve = latpred.predict_generation(gpt2(), 6, 3, [1, 8])
    assert "GPT2LMHeadModel: 3 new tokens after 6, fp32, eager on cpu, batch 1" in repr(curve[0])
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
    ("runtime", "error", "message"),
    [
        ("onnxruntime", RuntimeRefusalError, r"generation in onnxruntime is not predicted.*cuda-graphs"),
        ("eagre", UsageError, "Did you mean 'eager'"),
        ("cuda-graphs", UsageError, "cuda-graphs needs a CUDA device"),
    ],
)
def test_runtimes_of_which_nothing_can_be_told(runtime: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        latpred.predict_generation(gpt2(), 6, 3, runtime=runtime)


@pytest.mark.parametrize("batch", [0, []])
def test_wrong_batches(batch: object) -> None:
    with pytest.raises(UsageError):
        latpred.predict_generation(gpt2(), 6, 3, batch)  # type: ignore[call-overload]


def test_the_device_fills_up() -> None:
    small = msgspec.structs.replace(profile().device, memory_bytes=1000)
    found = generation_curve(Predictor(profile(device=small)), trace_generation(gpt2(), 6, 3), np.array([1]))[0]
    assert found.fits is False
    assert "does not fit" in repr(found)


def test_the_verb(tmp_path: Path) -> None:
    options = ["generate", f"{models_file(tmp_path)}:gpt2", "--prompt", "6", "--new-tokens", "3", "--batch", "1,8"]
    done = CliRunner().invoke(main, options)
    assert done.exit_code == 0, done.output
    assert "3 new tokens after 6" in done.output
    assert max(map(len, done.stdout.splitlines()[1:4])) <= 80
    document = json.loads(CliRunner().invoke(main, [*options, "--json"]).stdout)
    assert document["schema"] == "latpred.generation-curve/1"
    assert [point["batch"] for point in document["points"]] == [1, 8]
    assert len(document["points"][0]["steps"]) == 3
    assert CliRunner().invoke(main, [*options, "--csv"]).stdout.count("prompt+3") == 2


def test_what_is_measured_is_the_model_as_it_is(tmp_path: Path) -> None:
    model = f"{models_file(tmp_path)}:gpt2"
    for option, value in (("--attention", "eager"), ("--host", "0.5"), ("--threads", "1")):
        done = CliRunner().invoke(main, ["generate", model, "--prompt", "6", option, value, "--measure"])
        assert done.exit_code == 2
        assert f"leave it out, or {option}" in done.output
