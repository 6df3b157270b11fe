"""trace and models through the command line: what a model does, counted by hand, and the names there are."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from clidata import document, models_file, run


@pytest.fixture
def model(tmp_path: Path) -> str:
    return f"{models_file(tmp_path)}:picture"


def test_trace_counts_by_hand(model: str) -> None:
    found = document("trace", model, "--image", "10", "--batch", "2")
    assert found["schema"] == "latpred.trace/1"
    # 8 x 8 positions of a 3 x 3 window over 3 channels for 8 outputs, then 8 to 10; both twice.
    assert found["totals"][0]["macs"] == 2 * (8 * 8 * 9 * 3 * 8 + 80)
    assert found["totals"][0]["launches"] == 4
    assert "0.000 GMACs" in run("trace", model, "--image", "10", "--batch", "2").stdout
    rows = list(csv.DictReader(io.StringIO(run("trace", model, "--image", "10", "--csv").stdout)))
    assert sum(int(row["macs"]) for row in rows) == 8 * 8 * 9 * 3 * 8 + 80
    assert rows[0]["module"] == "0"


def test_trace_shows_what_a_runtime_does(model: str) -> None:
    eager = document("trace", model, "--image", "8")
    found = document("trace", model, "--image", "8", "--runtime", "torchscript")
    assert found["graph"]["runtime"] == "torchscript"
    assert found["totals"][0]["macs"] == eager["totals"][0]["macs"]
    assert found["totals"][0]["steps"] == len(found["graph"]["ops_at_one"] or found["graph"]["ops"])
    text = run("trace", model, "--image", "8", "--runtime", "cuda-graphs").stdout
    assert text.startswith(f"{model}: image 8, fp32, cuda-graphs on cuda, batch 1")
    assert "1 host step" in text
    assert "aten::conv2d" in text


def test_trace_shows_the_casts_of_autocast(model: str) -> None:
    plain = document("trace", model, "--image", "8", "--target", "cuda", "--channels-last")
    assert plain["graph"]["memory_format"] == "channels_last"
    found = document("trace", model, "--image", "8", "--precision", "amp-fp16")
    assert (found["graph"]["precision"], found["graph"]["target"]) == ("amp-fp16", "cuda")
    casts = found["totals"][0]["launches"] - plain["totals"][0]["launches"]
    assert casts == 5, "the image, and weight and bias of two layers"


def test_models_are_found_by_a_part_of_their_name() -> None:
    shown = run("models", "BERT_base")
    assert "bert-base-uncased" in shown.stdout
    assert "list them with --libraries" in shown.stderr
    assert run("models", "bert", "--json").stderr == ""
