"""The campaign on a GPU: every step is there, what it draws comes from recordings alone, and walks are made once."""

from __future__ import annotations

import runpy
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from latpred import profiles, recording, tables, tracing
from latpred.calibration.subjects import subjects_of
from latpred.calibration.suite_paper import _bert
from latpred.predicted import GraphKey, predict_table
from latpred.recording import Recording

FOLDER = Path(__file__).parents[2] / "examples" / "gpu"
DEVICE = "rtx-8000"
BERT = "bert-base-uncased"


def test_steps_of_the_campaign_are_those_of_its_page() -> None:
    shown = subprocess.run(["bash", FOLDER / "campaign.sh"], capture_output=True, text=True, check=False)
    assert shown.returncode == 2
    named = shown.stderr.partition("# ")[2].splitlines()[0].replace(",", "").replace(" or ", " ").split()
    page = (FOLDER / "README.md").read_text()
    assert "check" in named
    assert all(f"campaign.sh {step}" in page for step in named)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of a few cells, measured as a tenth slower than the profile says."""
    profile = profiles.find(DEVICE)
    subjects = [*subjects_of(BERT), *subjects_of(BERT, seq=512), _bert(256, 12), _bert(1536, 12)]
    graphs = {one.key("fp16"): one.walk("fp16") for one in subjects}
    cells = pd.DataFrame([row(key, batch) for key in graphs for batch in (1, 4)])
    predicted = predict_table(cells, graphs, profile)
    cells["latency_s"] = 1.1 * predicted["latency_s"]
    cells["compute_s"], cells["overhead_s"] = predicted["compute_s"], predicted["overhead_s"]
    folder = tmp_path_factory.mktemp("study")
    Recording("study", "made up", cells, graphs).save(folder)
    return folder


def row(key: GraphKey, batch: int) -> dict[str, Any]:
    machine = {"machine": "here", "device": profiles.find(DEVICE).device.name, "stack": "", "run": "1"}
    cell = {name: getattr(key, name) for name in ("model", "input_kind", "input_size", "precision", "runtime")}
    return {**machine, **cell, "batch": batch, "protocol": "single", "spread_s": 0.0, "n": 9, "status": tables.OK}


@pytest.fixture
def main() -> Callable[[str, list[str]], None]:
    return lambda name, arguments: runpy.run_path(str(FOLDER / f"{name}.py"))["main"](arguments)


def test_findings_come_from_the_recording_alone(
    study: Path,
    main: Callable[[str, list[str]], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("nothing may be traced")

    monkeypatch.setattr(tracing, "trace", forbidden)
    main("findings", ["--device", DEVICE, "--again", DEVICE, "-o", str(tmp_path), str(study), str(tmp_path / "none")])
    said = capsys.readouterr().out
    made = {path.stem for path in tmp_path.glob("*.png")}
    assert {"fig1_macs", "fig3_device_time", "fig4_runtimes", "fig6_width_depth"} <= made
    assert "fig7_funnel" in made  # BERT alone, where Funnel was not measured
    batch4 = next(line.split() for line in said.splitlines() if line.startswith("batch 4"))
    assert batch4[-2] == batch4[-1]  # as many times as much, predicted and measured
    assert "eager" in said
    assert "Predictions of both calibrations differ by 0.0%" in said


def test_the_study_replays_to_its_error(study: Path) -> None:
    report = recording.load(study).replay(profiles.find(DEVICE))
    assert report.overall.median == pytest.approx(1 - 1 / 1.1)
    assert report.small_by_runtime["eager"].cells == 8


def test_walks_are_asked_for_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    script = runpy.run_path(str(FOLDER / "walks.py"))
    found = list(script["wanted"](["check"], ["eager", "compile", "compile-reduce-overhead"]))
    assert [runtime for _, _, runtime in found] == ["eager", "compile"] * 2
