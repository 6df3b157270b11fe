"""Models whose work is not affine in batch, and models that take certain batch sizes alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from smallmodels import Function
from torch import nn

import latpred
from latpred.accuracy.adaptation import adapt
from latpred.errors import LatpredError, TraceError, UsageError
from latpred.graph.graph import ModelGraph
from latpred.profile import store
from latpred.runtimes import lowering
from latpred.tracing.tracer import FAR, Tracer

WIDTH = 16
ONE_SAMPLE = torch.zeros(1, WIDTH)


class Pairs(nn.Module):
    """Compares every sample with every other, as CLIP's logits do."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(x) @ x.T


class Above(nn.Module):
    """Does more beyond a batch size."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.first, self.more = nn.Linear(WIDTH, WIDTH), nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        out: torch.Tensor = self.more(x) if x.shape[0] > self.limit else x
        return out


class Only(nn.Module):
    """Takes some batch sizes alone."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.sizes, self.layer = sizes, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[0] in self.sizes
        out: torch.Tensor = self.layer(x)
        return out


def predicted(model: nn.Module, batch: Sequence[int], runtime: str = "eager", **given: Any) -> latpred.Curve:
    return latpred.predict(model, batch, runtime, device="epyc-shared", **{"inputs": ONE_SAMPLE} | given)


def said(curve: latpred.Curve) -> str:
    """What a curve says of its model; whose machine a shipped profile is of is another question."""
    return " | ".join(said for said in curve.setting.provenance.caveats if "another machine" not in said)


class Averaging(nn.Module):
    """Puts another tensor in place of a buffer in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Buffer(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + x.mean(0)
        return x - self.mean


def layer_macs(batch: int, layers: int = 1) -> int:
    return batch * layers * WIDTH * WIDTH


@pytest.mark.parametrize("runtime", ["eager", "torchscript", "compile"])
def test_products_of_all_pairs_are_counted_at_each_batch(runtime: str) -> None:
    graph = lowering.trace_for_runtime(Pairs(), ONE_SAMPLE, runtime=runtime, batches=(1, 8, 48))
    # At batch 1 Inductor makes a sum of a product.
    assert [graph.macs(b) for b in (8, 48)] == [layer_macs(b) + b * b * WIDTH for b in (8, 48)]
    assert any("not affine in batch: traced at 1, 8, 48" in note for note in graph.notes)
    stored = graph.to_json()
    assert '"walked":{"1":{' in stored  # as files of earlier versions have it
    assert ModelGraph.from_json(stored) == graph


def test_what_only_the_first_pass_does_takes_nothing_off_the_line() -> None:
    graph = latpred.trace(Averaging(), ONE_SAMPLE)
    assert (graph.notes, graph.exact) == ((), {})


@pytest.mark.parametrize("runtime", ["eager", "torchscript", "compile"])
def test_branches_on_the_batch_are_taken(runtime: str) -> None:
    graph = lowering.trace_for_runtime(Above(8), ONE_SAMPLE, runtime=runtime, batches=(8, 16))
    assert [graph.macs(b) for b in (8, 16)] == [layer_macs(8), layer_macs(16, layers=6)]


def test_a_batch_too_large_for_a_runtimes_tools_is_estimated() -> None:
    graph = lowering.trace_for_runtime(Pairs(), ONE_SAMPLE, runtime="onnxruntime", batches=(1, 1024))
    assert graph.macs(1024) == layer_macs(1024) + 1024**2 * WIDTH
    assert any("at batch 1024 alone onnxruntime was not asked" in note for note in graph.notes)


def test_each_batch_of_a_curve_is_predicted_from_its_own_pass() -> None:
    few, many = (nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))) for layers in (1, 6))
    curve = predicted(Above(8), [4, 16])
    assert curve[0].latency_ms == pytest.approx(predicted(few, [4])[0].latency_ms, rel=0.2)
    assert curve[1].latency_ms > 0.8 * predicted(many, [16])[0].latency_ms
    assert "not affine in batch: traced at 4, 16" in said(curve)
    assert curve.to_dict()["crossover_interval"]


def test_a_line_is_checked_as_far_as_it_is_asked_for() -> None:
    assert said(predicted(Above(200), [1, FAR])) == ""
    assert "not affine in batch" in said(predicted(Above(200), [1, 256]))
    assert "not affine in batch" in said(predicted(Above(FAR - 1), [1]))


def test_a_graph_says_that_it_is_no_line() -> None:
    graph = latpred.trace(Pairs(), ONE_SAMPLE)
    assert any("not affine in batch" in note and "batches=" in note for note in graph.notes)
    assert graph.macs(FAR) == layer_macs(FAR) + FAR**2 * WIDTH
    with pytest.raises(UsageError, match="no largest batch can be worked out"):
        latpred.max_batch(graph, 1.0, device="epyc-shared")


def test_many_candidates_are_traced_at_each_batch() -> None:
    table = latpred.predict_many([Pairs(), Above(8)], batch=[4, 100], inputs=ONE_SAMPLE, device="epyc-shared")
    assert table.macs.tolist() == [
        *(layer_macs(b) + b * b * WIDTH for b in (4, 100)),
        *(layer_macs(4), layer_macs(100, layers=6)),
    ]


def test_many_integers_are_not_computed_with(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []
    usual = Tracer.one_pass
    monkeypatch.setattr(Tracer, "one_pass", lambda *given, **how: batches.append(given[1]) or usual(*given, **how))
    latpred.trace(nn.Linear(WIDTH, WIDTH), ONE_SAMPLE)
    assert batches == [FAR, 2, 1]
    batches.clear()
    latpred.trace(nn.Embedding(10, 4), torch.zeros(1, 4096, dtype=torch.int64), batches=[512])
    assert max(batches) == 8


@pytest.mark.parametrize("runtime", ["eager", "torchscript", "compile", "onnxruntime"])
def test_a_model_of_one_batch_size_is_predicted_for_that(runtime: str) -> None:
    curve = predicted(Only(1), [1], runtime)
    assert curve[0].latency_ms > 0
    assert "traced at batch 1 alone: nothing is known of any other batch" in said(curve)
    known = {1: ONE_SAMPLE}
    assert predicted(nn.Linear(WIDTH, WIDTH), [1], runtime, inputs=lambda batch: known[batch])[0].latency_ms > 0


def test_a_batch_that_the_model_refuses_is_refused_where_larger_ones_are_too() -> None:
    class AtMostFour(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.shape[0] <= 4
            return super().forward(x)

    class LongerFromThree(AtMostFour):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).repeat(1 if x.shape[0] < 4 else 2, 1)

    assert latpred.trace(LongerFromThree(WIDTH, WIDTH), ONE_SAMPLE, batches=[1, 4]).notes != ()
    model = AtMostFour(WIDTH, WIDTH)
    assert latpred.trace(model, ONE_SAMPLE, batches=[1, 4]).notes == ()
    with pytest.raises(TraceError, match=r"at batch 8: AssertionError.* it takes batch 1, 4: ask for that alone"):
        latpred.trace(model, ONE_SAMPLE, batches=[1, 4, 8])


def test_other_batch_sizes_are_refused_with_the_one_to_ask_for() -> None:
    with pytest.raises(TraceError, match=r"at batch 8: AssertionError.* it takes batch 1: ask for that alone"):
        predicted(Only(1), [1, 8])
    graph = latpred.trace(Only(4), torch.zeros(4, WIDTH))
    assert graph.only == (4,)
    assert graph.macs(4) == layer_macs(4)
    unknown = r"known at batch 4 alone, not at batch 8\. Ask for batch=4, trace the model with batches=\[8\]"
    for ask in (lambda: latpred.predict(graph, 8, device="epyc-shared"), lambda: graph.macs(8)):
        with pytest.raises(UsageError, match=unknown):
            ask()
    assert latpred.max_batch(graph, 1e6, device="epyc-shared") == 4


@pytest.mark.parametrize(("inputs", "error"), [(lambda batch: {1: 0}[batch], "KeyError"), (lambda: 0, "TypeError")])
def test_a_function_of_inputs_that_fails_is_said(inputs: Any, error: str) -> None:
    with pytest.raises(TraceError, match=f"the function of inputs failed at batch 8: {error}: .*; let it give"):
        predicted(nn.Linear(WIDTH, WIDTH), [8], inputs=inputs)


@pytest.mark.parametrize("batches", [8, [8], np.array([8])])
def test_batches_to_trace_are_those_of_a_question(batches: Any) -> None:
    graph = latpred.trace(Only(8), ONE_SAMPLE, batches=batches)
    assert ModelGraph.from_json(graph.to_json()).only == (8,)
    with pytest.raises(UsageError, match="the smallest batch is 1"):
        latpred.trace(Only(8), ONE_SAMPLE, batches=[0])


def test_exported_programs_hold_for_their_batch() -> None:
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()).eval()
    module = torch.export.export(layer, (torch.zeros(4, WIDTH),)).module()
    assert latpred.trace(module, torch.zeros(4, WIDTH)).macs(4) == layer_macs(4)
    with pytest.raises(LatpredError, match="at batch 1"):
        latpred.trace(module, torch.zeros(4, WIDTH), batches=[1])


def test_conditions_on_the_batch() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    twice, once = (lambda x: layer(layer(x))), (lambda x: layer(x))
    branching = Function(lambda x: torch.cond(x.shape[0] > 2, twice, once, (x,)))
    graph = latpred.trace(branching, ONE_SAMPLE, batches=[1, 32])
    assert [graph.macs(b) for b in (1, 32)] == [layer_macs(1), layer_macs(32, layers=2)]


def test_inputs_that_do_not_grow_are_said() -> None:
    fixed = predicted(nn.Linear(WIDTH, WIDTH), [1, 64], inputs=lambda _: torch.zeros(3, WIDTH))
    assert "inputs= gives the same inputs whatever the batch" in said(fixed)
    rows = torch.zeros(8, WIDTH)
    assert said(predicted(nn.Linear(WIDTH, WIDTH), [1, 4], inputs=lambda batch: rows[:batch])) == ""


def test_a_network_with_choices_must_be_on_a_line() -> None:
    layers = {"narrow": nn.Linear(WIDTH, WIDTH), "none": None}
    with pytest.raises(TraceError, match="not affine in batch: at 64 it is another than at 2 and 3 say"):
        latpred.Supernet(nn.Sequential(latpred.Choice("layer", layers), Above(8)), ONE_SAMPLE)


def test_measured_batches_are_traced_before_a_profile_is_adapted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Sequence[int]] = []
    usual = lowering.trace_for_runtime
    monkeypatch.setattr(
        lowering, "trace_for_runtime", lambda *given, **how: asked.append(list(how["batches"])) or usual(*given, **how)
    )
    model = Pairs()
    rows = [(model, batch, "eager", "fp32", 0.05 + batch / 1000) for batch in (1, 64, 256)]
    adapt(store.load("epyc-shared"), rows, inputs=ONE_SAMPLE)
    assert asked == [[1, 64, 256]]
