"""Verbs that predict or count, through the command line: what they print, draw and write."""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner
from clidata import document, models_file, run
from profiledata import profile
from reportdata import saved

import latpred
from latpred import tables
from latpred.cli import main
from latpred.profile import store

QUICK = "latpred.calibration.calibrator.calibrate"


@pytest.fixture
def models(tmp_path: Path) -> str:
    return models_file(tmp_path)


@pytest.fixture
def model(models: str) -> str:
    return f"{models}:picture"


@pytest.fixture
def where(model: str) -> tuple[str, ...]:
    """The picture model on a GPU whose profile has eager and CUDA graphs."""
    return (model, "--image", "32", "--device", saved())


@pytest.mark.usefixtures("calibrated")
def test_a_terminal_may_be_narrow(model: str) -> None:
    arguments = [model, "--image", "32", "--batch", "1,2,4"]
    narrow = CliRunner(env={"COLUMNS": "50"}).invoke(main, ["predict", *arguments])
    assert narrow.stdout.splitlines()[1].split()[-1] == "samples/s"
    assert "\N{HORIZONTAL ELLIPSIS}" not in narrow.stdout


@pytest.mark.usefixtures("calibrated")
def test_json_is_the_curve_with_its_schema(model: str) -> None:
    found = document("predict", model, "--image", "32", "--batch", "1,8")
    assert next(iter(found.items())) == ("schema", "latpred.curve/1")
    assert [point["batch"] for point in found["points"]] == [1, 8]
    doubling = document("curve", model, "--image", "16")
    assert [point["batch"] for point in doubling["points"]] == [1, 2, 4, 8, 16, 32, 64, 128]


@pytest.mark.usefixtures("calibrated")
def test_csv_is_a_predicted_table(model: str, tmp_path: Path) -> None:
    written = tmp_path / "predicted.csv"
    shown = run("curve", model, "--image", "32", "--batch", "1-8:2x", "-o", written)
    assert (shown.stdout, shown.stderr) == ("", f"wrote {written}\n")
    table = tables.read(written, tables.PREDICTED)
    assert list(table["batch"]) == [1, 2, 4, 8]
    assert set(table["input_size"]) == {32}
    assert list(table["macs"] / table["batch"]) == [30 * 30 * 8 * 27 + 80] * 4
    assert (table["launches"] >= 4).all()
    assert (table["bytes"] > 0).all()


@pytest.mark.usefixtures("calibrated")
@pytest.mark.parametrize("verb", ["predict", "explain", "trace", "measure", "timeline"])
@pytest.mark.parametrize("name", ["nosuch.py", "./folder/nosuch.py:build", "nosuch.json", "nosuch.onnx"])
def test_a_file_that_is_missing_is_said_to_be(name: str, verb: str) -> None:
    shown = run(verb, name)
    assert shown.exit_code == 2
    assert "there is no file" in shown.stderr.lower()
    assert len(shown.stderr.splitlines()) == 1


@pytest.mark.usefixtures("calibrated")
def test_an_unknown_op_is_estimated_and_named(models: str) -> None:
    assert "estimated: latpred_cli_test::mystery (1)" in run("predict", f"{models}:Strange", "--image", "64").stdout


HEAVY = """
import sys
from latpred.cli import main
for device in ("rtx-8000", "cpu"):
    main(["predict", "bert-base-uncased", "--device", device, "--json"], standalone_mode=False)
print({"torch", "transformers"} & set(sys.modules), file=sys.stderr)
"""


@pytest.mark.usefixtures("calibrated")
def test_the_second_prediction_of_a_name_needs_no_pytorch() -> None:
    script = [sys.executable, "-c", HEAVY]
    first, second = (subprocess.run(script, capture_output=True, text=True, check=True) for _ in range(2))
    assert first.stdout == second.stdout
    assert "torch" in first.stderr
    assert second.stderr == "set()\n"


def test_number_formats_channels_last_and_attention_are_options(model: str) -> None:
    fits = profile().kernels["fp32"]
    store.save(profile(kernels={"fp32": fits, "bf16": fits}))
    asked = ("predict", model, "--image", "8")
    for precision in ("fp64", "amp-bf16"):
        assert document(*asked, "--precision", precision)["precision"] == precision
    said = "caveat: convolutions were measured in the contiguous format"
    assert said in run(*asked, "--channels-last").stdout
    assert said not in run(*asked).stdout
    bert = ("predict", "distilbert-base-uncased", "--seq", "16", "--device", "rtx-8000", "--attention")
    fused, parts = (document(*bert, attention)["points"][0]["latency_ms"] for attention in ("sdpa", "eager"))
    assert fused < parts


def test_without_profile_and_terminal_a_quick_calibration_runs(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def calibrate(device: str, *, quick: bool, **_rest: object) -> object:
        asked.append((device, quick))
        store.save(profile())
        return profile()

    monkeypatch.setenv("LATPRED_CALIBRATE", "quick")
    monkeypatch.setattr(QUICK, calibrate)
    shown = run("predict", model, "--image", "8", "--device", "cpu")
    assert (shown.exit_code, asked) == (0, [("cpu", True)])
    assert "no profile of cpu in" in shown.stderr
    assert "calibrating it now" in shown.stderr
    assert shown.stdout.startswith(model)


def test_on_a_terminal_a_calibration_is_offered_and_declined(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LATPRED_CALIBRATE", "quick")
    main_end, terminal = pty.openpty()
    os.write(main_end, b"n\n")
    command = [sys.executable, "-c", "from latpred.cli import main; main()", "predict", model, "--device", "cpu"]
    done = subprocess.run([*command, "--image", "8"], stdin=terminal, stderr=terminal, stdout=subprocess.PIPE)
    os.close(terminal)
    said = b""
    with suppress(OSError):  # at the end of what was written to a terminal that is closed
        while part := os.read(main_end, 4096):
            said += part
    os.close(main_end)
    assert (done.returncode, done.stdout) == (3, b"")
    assert b"Calibrate it now (one to three minutes)?" in said
    assert b"Make one with: latpred calibrate --device cpu" in said


def test_explain_prints_what_it_says_in_json_and_csv(model: str, where: tuple[str, ...]) -> None:
    shown = run("explain", *where, "--batch", "2")
    assert shown.exit_code == 0, shown.stderr
    assert shown.stdout.splitlines()[0] == f"{model}: batch 2, 32 pixels, fp32 on example, single"
    assert "asking cuda-graphs what it makes of" in shown.stderr
    found = document("explain", *where, "--batch", "2")
    assert found["schema"] == "latpred.explanation/1"
    assert set(found["outlooks"]["eager"]["rooms"]) == {"batch", "image", "width"}
    assert found["advice"] in " ".join(shown.stdout.split())
    rows = csv.DictReader(io.StringIO(run("explain", *where, "--runtime", "cuda-graphs", "--csv").stdout))
    assert [(row["runtime"], row["launches"]) for row in rows] == [("cuda-graphs", "4"), ("eager", "4")]


def test_a_curve_has_a_sparkline_and_a_prediction_has_none(where: tuple[str, ...]) -> None:
    line = run("curve", *where, "--batch", "1-64:2x").stdout.splitlines()[1]
    assert line.startswith("latency ")
    assert line.count("█") >= 2
    assert "█" not in run("predict", *where, "--batch", "1-64:2x").stdout


def test_figures_are_drawn_with_measured_points(model: str, where: tuple[str, ...], tmp_path: Path) -> None:
    assert run("explain", *where, "--plot", tmp_path / "runtimes.svg").exit_code == 0
    assert "cuda-graphs device" in (tmp_path / "runtimes.svg").read_text()
    table = latpred.predict(model, [1, 8], image=32, device="gpu").to_frame()[[*tables.KEYS, "latency_s"]]
    table.assign(spread_s=0.0, n=1, run="", stack="").to_csv(tmp_path / "m.csv", index=False)
    drawn = run("curve", *where, "--measured", tmp_path / "m.csv", "--plot", tmp_path / "deep" / "c.svg")
    assert (drawn.exit_code, drawn.stderr) == (0, f"wrote {tmp_path / 'deep' / 'c.svg'}\n")
    assert ">measured<" in (tmp_path / "deep" / "c.svg").read_text()


def test_a_timeline_is_printed_traced_and_drawn(where: tuple[str, ...], tmp_path: Path) -> None:
    lines = run("timeline", *where).stdout.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["clock", "host", "device"]
    assert max(len(line) for line in lines[1:5]) <= 80
    said = [line for line in lines if line.startswith(("profile: ", "caveat: "))]  # what the times rest on
    assert said
    assert said == [line for line in run("predict", *where).stdout.splitlines() if line in said]
    assert run("timeline", *where, "-o", tmp_path / "t.json", "--plot", tmp_path / "t.png").exit_code == 0
    assert json.loads((tmp_path / "t.json").read_text())["schema"] == "latpred.timeline/1"
    assert (tmp_path / "t.png").exists()


def test_a_report_of_two_models(model: str, where: tuple[str, ...], tmp_path: Path) -> None:
    shown = run("report", model, *where, "--batch", "1,8", "--runtime", "cuda-graphs", "-o", tmp_path / "r.html")
    assert (shown.exit_code, shown.stdout) == (0, ""), shown.stderr
    for said in (f"predicting {model} (1 of 2)", "asking cuda-graphs", f"wrote {tmp_path / 'r.html'}"):
        assert said in shown.stderr
    assert "2 models" in (tmp_path / "r.html").read_text()


def test_without_what_draws(where: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for verb, *figure in (("report",), ("curve", "--plot", "c.png")):
        shown = run(verb, *where, *figure)
        assert (shown.exit_code, "pip install 'latpred[plot]'" in shown.stderr) == (3, True)


def test_rank_orders_models_on_each_device() -> None:
    asked = ("rank", "nasbench201:9", "fbnet:0", "nasbench201:x", "--image", "32", "--batch", "1,8")
    asked += ("--device", "rtx-8000", "--device", "rtx-2080ti", "--runtime", "cuda-graphs")
    rows = document(*asked)["rows"]
    cells = itertools.product(("rtx-8000", "rtx-2080ti"), (1, 8), (1, 2, None))
    assert [(row["device"], row["batch"], row["rank"]) for row in rows] == list(cells)
    assert all(row["rank"] or "is no NAS-Bench-201 cell" in row["error"] for row in rows)
    text = run(*asked).stdout
    heads = [line for line in text.splitlines() if ", batch " in line]
    on = (f"{device}, single, batch {batch}" for device in ("rtx-8000", "rtx-2080ti") for batch in (1, 8))
    assert heads == [f"fp32, cuda-graphs on {cell}" for cell in on]
    assert text.count("nasbench201:x on rtx-8000, rtx-2080ti: ") == 1
    assert "caveat on rtx-2080ti: fitted to published latencies" in text
    faster = run("rank", "nasbench201:9", "--device", "rtx-8000", "--host", "0.5", "--json")
    assert json.loads(faster.stdout)["rows"][0]["caveats"][0].startswith("host")
    refused = run("rank", "nasbench201:9", "--device", "rtx-8000,a100")
    assert (refused.exit_code, "'rtx-8000,a100' is no device; give each by itself" in refused.stderr) == (2, True)


def test_a_ranking_says_what_may_not_hold_once_and_of_whom(models: str) -> None:
    asked = ("rank", f"{models}:picture", f"{models}:Strange", "--image", "32", "--batch", "1,8", "-d", "rtx-8000")
    lines, fitted = run(*asked).stdout.splitlines(), "fitted to published latencies of a Quadro RTX 8000"
    assert lines.count(f"caveat: {fitted}") == 1
    (of_one,) = [line for line in lines if "no cost formula for" in line]
    assert of_one.startswith(f"caveat of {models}:Strange: ")
    assert [row["caveats"][0] for row in document(*asked)["rows"]] == [fitted] * 4
    assert f"{fitted}; " in run(*asked, "--csv").stdout
    assert f"caveat on a100: {fitted[:32]}" in run(*asked, "--device", "a100").stdout


def test_trace_counts_by_hand(model: str) -> None:
    found = document("trace", model, "--image", "10", "--batch", "2")
    assert found["schema"] == "latpred.trace/1"
    # 8 x 8 positions of a 3 x 3 window over 3 channels for 8 outputs, then 8 to 10; both twice.
    assert found["totals"][0]["macs"] == 2 * (8 * 8 * 9 * 3 * 8 + 80)
    assert found["totals"][0]["launches"] == 4
    assert "0.000 GMACs" in run("trace", model, "--image", "10", "--batch", "2").stdout
    table = pd.read_csv(io.StringIO(run("trace", model, "--image", "10", "--batch", "1", "-b", "4", "--csv").stdout))
    assert table.groupby("batch")["macs"].sum().to_list() == [13904, 4 * 13904]
    assert table["module"][0] == 0


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


def test_other_counters_run_the_attention_that_was_asked_for(models: str) -> None:
    asked = ("trace", f"{models}:gpt2", "--seq", "8", "--check", "--attention")
    for attention, same in (("eager", True), ("sdpa", False)):
        counted = document(*asked, attention)["check"][0]
        assert (counted["counter"], counted["ours"] == counted["theirs"]) == ("FlopCounterMode", same)


def test_models_are_found_by_a_part_of_their_name() -> None:
    shown = run("models", "BERT_base")
    assert "bert-base-uncased" in shown.stdout
    assert "list them with --libraries" in shown.stderr
    assert run("models", "bert", "--json").stderr == ""


def test_a_ranking_of_nothing_exits_with_2(tmp_path: Path) -> None:
    shown = run("rank", "nasbench201:x", f"{models_file(tmp_path)}:broken", "--device", "rtx-8000", "--json")
    assert shown.exit_code == 2
    assert [row["latency_ms"] for row in json.loads(shown.stdout)["rows"]] == [None, None]
