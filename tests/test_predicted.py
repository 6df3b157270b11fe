"""Predicting every cell of a table, and evaluating a table that was measured elsewhere."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch
from profiledata import profile
from tabledata import measured
from torch import nn

import latpred.tracing
from latpred import tables
from latpred.accuracy import comparison
from latpred.accuracy.predicted import GraphKey, graph_keys, predict_table, trace_models
from latpred.errors import MissingPackageError, TableError, UsageError
from latpred.graph.graph import ModelGraph
from latpred.prediction.predictor import Predictor

KEY = GraphKey("bert", "seq", 16, "fp32")


@pytest.fixture(scope="module")
def graph() -> ModelGraph:
    layers = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    return latpred.tracing.trace(layers, torch.zeros(2, 16, 64))


@pytest.fixture
def asked(graph: ModelGraph, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """What every trace is asked for, each of which gives the same graph; models of "lib" lack their package."""
    calls: list[dict[str, object]] = []

    def trace(model: str, inputs: object = None, **options: object) -> ModelGraph:
        if model.startswith("lib:"):
            raise MissingPackageError("lib cannot be used: it does not fit.")
        calls.append({"model": model, **options})
        return graph

    monkeypatch.setattr(latpred.tracing, "trace", trace)
    return calls


def checked(*cells: tuple[str, int, float], **columns: object) -> pd.DataFrame:
    return tables.check(measured(cells, **columns), tables.MEASURED)


def test_each_measured_row_is_what_the_predictor_says(graph: ModelGraph) -> None:
    cells = checked(("bert", 1, 0.1), ("bert", 8, 0.2), ("bert", 9, 0.3), status=["ok", "ok", "out of memory"])
    rows = predict_table(cells, {KEY: graph}, profile())
    single = Predictor(profile()).predict(graph, 8)
    assert list(rows["batch"]) == [1, 8]
    assert rows["latency_s"][1] == pytest.approx(single.latency_ms / 1e3)
    assert (rows["low_s"][1], rows["high_s"][1]) == pytest.approx(tuple(ms / 1e3 for ms in single.interval_ms))
    assert (rows["macs"][1], rows["launches"][1]) == (8 * 16 * 64 * 64 * 2, 3)
    assert rows["machine"][0] == tables.machine_name(profile().machine)
    with pytest.raises(TableError, match="No graph for bert at seq 16, fp32"):
        predict_table(cells, {}, profile())


def test_models_are_traced_as_their_rows_say(asked: list[dict[str, object]]) -> None:
    images = measured([("vit", 1, 0.1)], input_kind="image", input_size=96, attention="")
    speech = measured([("wav2vec2", 1, 0.1)], input_kind="audio", input_size=8000, attention="sdpa")
    keys = graph_keys(pd.concat([images, speech]))
    assert trace_models(dict.fromkeys(keys, (1,)), "cpu").keys() == set(keys)
    sizes = [[call[name] for name in ("model", "seq", "image", "precision", "attention")] for call in asked]
    assert sizes == [["vit", None, 96, "fp32", None], ["wav2vec2", 8000, None, "fp32", "sdpa"]]


def test_an_outside_table_is_evaluated_without_models_that_lack_a_package(
    graph: ModelGraph, asked: list[dict[str, object]]
) -> None:
    truth = Predictor(profile()).predict(graph, 4).latency_ms / 1e3
    outside = pd.DataFrame({"model": ["bert", "lib:a", "lib:b", "lib:b"], "batch": [4, 1, 1, 2], "gpu": "none"})
    report = comparison.evaluate_table(outside.assign(latency_s=truth / 1.25), profile())
    assert (report.overall.cells, report.only_measured) == (1, ())
    assert report.overall.median == pytest.approx(0.25)
    assert "measured on unknown" in report.notes[0]
    assert "3 rows of 2 models are left out (lib:a, lib:b): lib cannot be used: it does not fit." in report.notes
    with pytest.raises(MissingPackageError, match="none of the table's models can be traced: lib cannot be used"):
        comparison.evaluate_table(outside.iloc[1:].assign(latency_s=truth), profile())


def test_a_row_that_was_not_measured_is_not_traced_but_said(graph: ModelGraph, asked: list[dict[str, object]]) -> None:
    outside = pd.DataFrame({"model": ["bert", "lib:a"], "batch": 4, "status": ["ok", "out of memory"]})
    report = comparison.evaluate_table(outside.assign(latency_s=[0.1, ""]), profile())
    assert (report.overall.cells, [said.partition(" batch")[0] for said in report.failed]) == (1, ["lib:a"])
    assert [call["model"] for call in asked] == ["bert"]
    with pytest.raises(TableError, match="has no rows with a latency"):
        comparison.evaluate_table(outside.tail(1).assign(latency_s=""), profile())


def test_a_row_in_a_runtime_that_the_profile_lacks_is_left_out(asked: list[dict[str, object]]) -> None:
    rows = measured([("bert", 4, 0.1)] * 2, runtime=["eager", "quickest"])
    report = comparison.evaluate_table(rows, profile())
    assert (report.overall.cells, report.only_measured) == (1, ())
    assert any("No runtime is called 'quickest'" in note for note in report.notes)
    with pytest.raises(UsageError, match="quickest"):
        comparison.evaluate_table(rows.tail(1), profile())


def test_work_that_is_no_line_in_batch_is_counted_at_the_batches_of_the_table(tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text(
        "import torch\n\nclass Own(torch.nn.Module):\n    def forward(self, x):\n        return x @ x.T\n\n"
        "def build():\n    return Own(), torch.zeros(2, 256)\n"
    )
    table = pd.DataFrame({"model": f"{tmp_path}/models.py:build", "batch": [8, 512], "latency_s": 0.1})
    cells = comparison.evaluate_table(table, profile()).cells
    assert cells["macs"].tolist() == [batch * batch * 256 for batch in cells["batch"]]


def test_what_a_table_was_evaluated_with_is_not_traced_again() -> None:
    table = pd.DataFrame({"model": "torchvision:squeezenet1_0", "batch": [8, 512], "latency_s": 0.1})
    said: list[str] = []
    one, other = (comparison.evaluate_table(table, profile(), progress=said.append, keep=True) for _ in range(2))
    assert said == ["tracing torchvision:squeezenet1_0 for eager"]
    pd.testing.assert_frame_equal(one.cells, other.cells)


@pytest.mark.parametrize(
    ("kind", "size", "said"),
    [
        ("prompt+16", 16, "measure a generation, not one forward pass"),
        ("default", 64, "does not say of what"),
        ("seq_len", 64, "Put one of seq, audio, image"),
    ],
)
def test_a_size_that_cannot_be_traced_is_said(kind: str, size: int, said: str, asked: list[dict[str, object]]) -> None:
    with pytest.raises(TableError, match=said):
        comparison.evaluate_table(measured([("bert", 1, 0.1)], input_kind=kind, input_size=size), profile())
    assert asked == []


def test_a_table_without_rows_is_refused() -> None:
    with pytest.raises(TableError, match="has no rows"):
        comparison.evaluate_table(checked(("bert", 1, 0.1)).iloc[:0], profile())
