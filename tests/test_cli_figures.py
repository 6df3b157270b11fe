"""Figures, timelines and reports from the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from reportdata import saved
from tabledata import measured, predicted

from latpred.cli import main
from latpred.report import page

MODELS = """
from torch import nn


def dense():
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())])


def picture():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "models.py"
    path.write_text(MODELS)
    return f"{path}:picture"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_a_curve_has_a_sparkline_and_a_figure(model: str, tmp_path: Path) -> None:
    where = ("--image", "32", "--batch", "1-64:2x", "--device", saved())
    shown = run("curve", model, *where, "--plot", tmp_path / "deep" / "curve.png")
    assert shown.exit_code == 0, shown.stderr
    assert (tmp_path / "deep" / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "wrote" in shown.stderr
    line = shown.stdout.splitlines()[1]
    assert line.startswith("latency ")
    assert line.count("█") >= 2
    assert len(line) <= 80
    assert "█" not in run("predict", model, *where).stdout


def test_measured_points_are_drawn_over_it(model: str, tmp_path: Path) -> None:
    where = (model, "--image", "32", "--batch", "1,8", "--device", saved())
    run("predict", *where, "-o", tmp_path / "predicted.csv")
    rows = (tmp_path / "predicted.csv").read_text().splitlines()
    names = rows[0].split(",")
    kept = names[: names.index("latency_s") + 1]
    table = [",".join(row.split(",")[: len(kept)]) for row in rows]
    (tmp_path / "measured.csv").write_text("\n".join(table) + "\n")
    shown = run("curve", *where, "--plot", tmp_path / "c.svg", "--measured", tmp_path / "measured.csv")
    assert shown.exit_code == 0, shown.stderr
    assert ">measured<" in (tmp_path / "c.svg").read_text()
    alone = run("curve", *where, "--measured", tmp_path / "measured.csv")
    assert alone.exit_code == 2
    assert "add --plot" in alone.stderr


def test_explain_draws_its_runtimes(model: str, tmp_path: Path) -> None:
    shown = run("explain", model, "--image", "32", "-d", saved(), "--plot", tmp_path / "runtimes.svg")
    assert shown.exit_code == 0, shown.stderr
    assert "cuda-graphs device" in (tmp_path / "runtimes.svg").read_text()


def test_compare_draws_its_errors(tmp_path: Path) -> None:
    cells = [("bert", 1, 0.01), ("bert", 2, 0.02), ("resnet", 1, 0.01)]
    measured(cells).to_csv(tmp_path / "m.csv", index=False)
    predicted(cells).to_csv(tmp_path / "p.csv", index=False)
    shown = run("compare", tmp_path / "p.csv", tmp_path / "m.csv", "--plot", tmp_path / "errors.pdf")
    assert shown.exit_code == 0, shown.stderr
    assert (tmp_path / "errors.pdf").read_bytes().startswith(b"%PDF")


def test_a_timeline_is_printed_traced_and_drawn(model: str, tmp_path: Path) -> None:
    where = (model, "--image", "32", "--batch", "2", "--device", saved())
    shown = run("timeline", *where)
    assert shown.exit_code == 0, shown.stderr
    assert [line.split()[0] for line in shown.stdout.splitlines()[1:4]] == ["clock", "host", "device"]
    assert max(len(line) for line in shown.stdout.splitlines()[1:]) <= 80
    assert run("timeline", *where, "-o", tmp_path / "t.json", "--plot", tmp_path / "t.png").exit_code == 0
    document = json.loads((tmp_path / "t.json").read_text())
    assert {event["ph"] for event in document["traceEvents"]} == {"M", "X", "s", "f"}
    assert (tmp_path / "t.png").exists()
    refused = run("timeline", *where, "--protocol", "pipelined")
    assert refused.exit_code == 2
    assert "leave out --protocol" in refused.stderr


def test_a_report_of_two_models(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "_bundle", lambda: "")
    other = model.replace(":picture", ":dense")
    where = ("--image", "32", "--batch", "1,8,64", "-d", saved(), "--runtime", "cuda-graphs")
    shown = run("report", model, model, *where, "-o", tmp_path / "r.html")
    assert shown.exit_code == 0, shown.stderr
    for said in (f"predicting {model} (1 of 2)", "asking cuda-graphs", f"wrote {tmp_path / 'r.html'}"):
        assert said in shown.stderr
    assert shown.stdout == ""
    assert "2 models" in (tmp_path / "r.html").read_text()
    assert run("report", model, other, *where, "-o", tmp_path / "r.html").exit_code == 2  # its inputs do not follow


@pytest.mark.parametrize(
    ("plot", "sentence"),
    [("c.gif", "end it in .png, .svg, .pdf"), ("models.py/c.png", "cannot write"), (".", "is a directory")],
)
def test_a_figure_that_cannot_be_written_is_said_first(model: str, tmp_path: Path, plot: str, sentence: str) -> None:
    for verb in ("curve", "explain", "timeline"):
        shown = run(verb, model, "--device", saved(), "--plot", tmp_path / plot)
        assert shown.exit_code == 2
        assert sentence in shown.stderr
        assert shown.stdout == ""


def test_a_report_that_cannot_be_written_is_said_first(model: str, tmp_path: Path) -> None:
    shown = run("report", model, "--device", saved(), "-o", tmp_path / "models.py" / "r.html")
    assert shown.exit_code == 2
    assert "cannot write" in shown.stderr
    assert "predicting" not in shown.stderr


def test_without_matplotlib(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    shown = run("curve", model, "--device", saved(), "--plot", "c.png")
    assert shown.exit_code == 3
    assert "pip install 'latpred[plot]'" in shown.stderr


def test_without_what_draws_reports(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "find_spec", lambda name: None if name == "altair" else object())
    shown = run("report", model, "--device", saved())
    assert shown.exit_code == 3
    assert "pip install 'latpred[report]'" in shown.stderr
