"""What a person reads and what a program reads: text, HTML, dictionaries and frames of predictions."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import msgspec
import pytest
from factories import add, device, dispatch, graph, kernel_fit, linear, profile, view

from latpred import tables
from latpred.prediction.predictor import Predictor
from latpred.render import sparkline

NET = graph(linear(), add(), linear(64, 256))


def predictor(**changes: object) -> Predictor:
    fits = (kernel_fit("gemm", macs_per_us=1e6, spread=0.1), kernel_fit("elementwise", macs_per_us=0.0))
    made = profile(device(**changes), fits, {"eager": dispatch(spread=0.05)})
    return Predictor(made, ["measured on another machine"])


def test_text_of_a_prediction_says_what_matters() -> None:
    text = repr(predictor().predict(NET, 8))
    title, *facts = text.splitlines()
    assert title == "example-net, 128 tokens, fp32, eager on example, single, batch 8"
    found = {line.split()[0]: line for line in facts}
    assert {"latency", "regime", "clocks", "mostly", "memory", "crossover", "knee", "profile", "caveat"} <= set(found)
    assert "samples/s" in found["latency"]
    assert "90 %" in found["latency"]
    assert "gemm" in found["mostly"]
    assert "fits" in found["memory"]
    assert "example (example, 8 threads, calibrated" in found["profile"]
    assert "another machine" in found["caveat"]
    assert "does not fit" not in text


def test_text_of_a_curve_has_a_row_per_batch() -> None:
    curve = predictor(memory_bytes=2**27).curve(NET, [1, 2, 512], protocol="pipelined")
    text = repr(curve)
    assert "pipelined" in text
    assert sparkline(curve.latency_ms.tolist()) in text
    rows = [line.split()[0] for line in text.splitlines() if line.strip()[:1].isdigit()]
    assert rows == ["1", "2", "512*"]
    assert "* needs more memory than the device has" in text


def test_a_part_of_a_curve_may_be_empty() -> None:
    empty = predictor().curve(NET, [1, 2])[2:]
    assert "coverage: formulas for all launches" in repr(empty)
    assert ElementTree.fromstring(empty._repr_html_()) is not None


def test_a_crossover_that_may_lie_beyond_the_first_batch_is_no_never() -> None:
    near, far = (repr(predictor(asynchronous=False).curve(graph(linear(rows, 64)), [1, 2])) for rows in (16, 64))
    assert "compute- or memory-bound from batch 1 (90 %: 1 to 2)" in near
    assert "never framework-bound" not in near
    assert "never framework-bound: compute- or memory-bound from batch 1\n" in far


def test_html_is_well_formed_and_escaped() -> None:
    named = msgspec.structs.replace(NET, model="<script>")
    for shown in (predictor().predict(named), predictor().curve(named, [1, 4])):
        parsed = ElementTree.fromstring(shown._repr_html_())  # which refuses what is not closed
        assert "<script>" in "".join(parsed.itertext())


def test_dictionaries_are_json() -> None:
    point = predictor().predict(NET, 8).to_dict()
    assert json.loads(json.dumps(point)) == point
    assert point["schema"] == "latpred.prediction/1"
    curve = predictor().curve(NET, [1, 8]).to_dict()
    assert json.loads(json.dumps(curve)) == curve
    assert curve["schema"] == "latpred.curve/1"
    assert curve["points"][1]["latency_ms"] == point["latency_ms"]
    assert curve["crossover_batch"] == point["crossover_batch"]


def test_frames_are_predicted_tables() -> None:
    curve = predictor().curve(NET, [1, 8])
    frame = curve.to_frame()
    assert tables.check(frame, tables.PREDICTED)["batch"].tolist() == [1, 8]
    assert frame["latency_s"].to_numpy() * 1e3 == pytest.approx(curve.latency_ms)
    assert (frame["low_s"] < frame["latency_s"]).all()
    assert len(curve[0].to_frame()) == 1


def test_a_graph_is_a_table_of_its_ops() -> None:
    traced = graph(linear(), view())
    table = traced.to_frame([1, 4])
    assert (len(table), list(table["op"][:2])) == (4, [op.name for op in traced.ops])
    assert table[table["batch"] == 4]["macs"].sum() == traced.macs(4)


def test_breakdown_adds_up_to_the_clocks() -> None:
    found = predictor(asynchronous=False).predict(NET, 8)
    assert sum(share.overhead_ms for share in found.breakdown) == pytest.approx(found.overhead_ms)
    assert sum(share.compute_ms for share in found.breakdown) == pytest.approx(found.compute_ms)
    assert found.breakdown[0].name == "gemm"
    assert {share.name: share.ops for share in found.breakdown} == {"gemm": 2, "elementwise": 1, "call": 1}


def test_sparkline() -> None:
    assert sparkline([1, 2, 4, 8]) == "▁▂▄█"
    assert sparkline([0, 0]) == "▁▁"
    assert len(sparkline(list(range(1, 1000)))) <= 60


def test_what_was_asked_for_is_said_and_tells_cells_apart() -> None:
    asked = msgspec.structs.replace(NET, memory_format="channels_last", attention="eager")
    plain, other = (predictor().predict(net, 8) for net in (NET, asked))
    assert "fp32, channels_last, eager attention, eager on" in repr(other)
    assert (other.to_dict()["memory_format"], other.to_dict()["attention"]) == ("channels_last", "eager")
    measured = other.to_frame().assign(n=3, spread_s=0.0)
    assert len(tables.join(other.to_frame(), measured).rows) == 1
    assert tables.join(plain.to_frame(), measured).rows.empty
