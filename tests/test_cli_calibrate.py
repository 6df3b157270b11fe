"""Verbs that measure, through the command line: what they keep, print and refuse."""

from __future__ import annotations

import csv
import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from click.testing import CliRunner, Result
from profiledata import machine, profile
from tabledata import measured, predicted

from latpred.accuracy.comparison import compare
from latpred.calibration.devices.base import open_device
from latpred.calibration.devices.simulated import SimulatedDevice
from latpred.calibration.measurement import whole_models
from latpred.calibration.session import Session, directory
from latpred.cli import main
from latpred.profile import store

MODELS = """
from torch import nn


def picture():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "models.py"
    path.write_text(MODELS)
    return f"{path}:picture"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_calibrating_while_another_calibration_runs() -> None:
    device = open_device("simulated")
    with Session(directory("simulated"), device.machine(), {}):
        shown = run("calibrate", "--device", "simulated", "--quick")
    assert shown.exit_code == 3
    assert "another calibration of simulated is under way (process " in shown.stderr
    assert "Wait until it ends" in shown.stderr


@pytest.mark.usefixtures("read_only_home")
def test_calibrating_where_nothing_can_be_kept() -> None:
    shown = run("calibrate", "--device", "simulated", "--quick")
    assert shown.exit_code == 3
    assert "Permission denied. Make it writable, or choose another directory with LATPRED_HOME=DIR." in shown.stderr


@pytest.mark.parametrize("arguments", [("calibrate",), ("measure", "resnet18"), ("validate",)], ids=lambda a: a[0])
def test_no_cuda_when_cuda_is_asked_for(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    if arguments == ("validate",):
        store.save(profile("gpu", device=SimulatedDevice().info()))
        arguments = ("validate", "--device", "cuda:0")
    else:
        arguments = (*arguments, "--device", "cuda:0")
    shown = run(*arguments)
    assert shown.exit_code == 3
    assert "cuda" in shown.stderr.lower()
    assert "Traceback" not in shown.stderr


def test_a_device_that_cannot_be_measured() -> None:
    shown = run("calibrate", "--device", "abacus")
    assert shown.exit_code == 3
    assert "nothing can be measured on 'abacus'. Use device='cpu', 'cuda:0' or 'simulated'." in shown.stderr


def test_a_budget_too_short_to_measure_anything() -> None:
    shown = run("calibrate", "--device", "simulated", "--budget", "1s")
    assert shown.exit_code == 2
    assert "a budget of 1 s measures nothing" in shown.stderr


def test_ctrl_c_keeps_what_was_measured() -> None:
    # A shell that started the tests in the background had them ignore Ctrl-C.
    heeding = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    command = [sys.executable, "-c", f"{heeding}; from latpred.cli import main; main()"]
    calibrating = subprocess.Popen(
        [*command, "calibrate", "--device", "simulated", "--budget", "10m"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    journal = directory("simulated") / "journal.jsonl"
    while calibrating.poll() is None and (not journal.exists() or journal.read_bytes().count(b"\n") < 4):
        pass
    calibrating.send_signal(signal.SIGINT)
    output, said = calibrating.communicate()
    assert calibrating.returncode == 130
    assert output == ""
    assert said.startswith("calibrating simulated: 0 %")
    assert said.splitlines()[-1] == ("latpred: interrupted; what was measured is kept, run the same command to go on.")
    assert journal.read_bytes().count(b"\n") >= 4


@pytest.mark.parametrize("form", ["file", "stdout"])
def test_ctrl_c_while_measuring_gives_what_was_measured(
    form: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    visit, visits = whole_models._Bench.visit, iter(range(9))

    def interrupted(bench: Any, cell: Any) -> None:
        if next(visits) == 2:
            raise KeyboardInterrupt
        visit(bench, cell)

    monkeypatch.setattr(whole_models._Bench, "visit", interrupted)
    path = tmp_path / "measured.csv"
    where = ("-o", str(path)) if form == "file" else ("--csv",)
    shown = run("measure", model, "--image", "16", "--batch", "1,2,4", "--device", "cpu", *where)
    assert shown.exit_code == 130
    place = f"in {path}" if form == "file" else "above"
    assert shown.stderr.splitlines()[-1] == (
        f"latpred: interrupted; 2 of 3 cells were measured by then, they are {place}."
    )
    table = pd.read_csv(path if form == "file" else io.StringIO(shown.stdout))
    assert sorted(table["status"]) == ["interrupted before it was measured", "ok", "ok"]
    assert table["latency_s"].notna().sum() == 2


def test_measure_gives_a_table_that_a_prediction_compares_with(model: str, tmp_path: Path) -> None:
    store.save(profile())
    common = (model, "--image", "16", "--batch", "1,4", "--device", "cpu")
    truth, guess = str(tmp_path / "measured.csv"), str(tmp_path / "predicted.csv")
    shown = run("measure", *common, "--repeats", "2", "-o", truth)
    assert shown.exit_code == 0
    assert shown.stderr.startswith("measuring: 0 %")
    assert run("predict", *common, "-o", guess).exit_code == 0
    report = run("compare", guess, truth)
    assert report.exit_code == 0
    assert report.stdout.startswith("2 cells of 1 models: median error ")
    document = json.loads(run("compare", guess, truth, "--json").stdout)
    assert document["schema"] == "latpred.accuracy/1"
    assert document["overall"]["cells"] == 2
    judged = json.loads(run("evaluate", truth, "--json", "--quiet").stdout)
    assert judged["overall"]["median"] == pytest.approx(document["overall"]["median"])


def test_measure_prints_a_row_per_cell_and_says_what_does_not_fit(model: str) -> None:
    shown = run("measure", model, "--image", "8192", "--batch", "1048576", "--device", "cpu", "--quiet")
    assert shown.exit_code == 3
    assert shown.stderr == ""
    assert "out of memory" in shown.stdout
    document = json.loads(
        run("measure", model, "--image", "16", "--batch", "1", "--device", "cpu", "--repeats", "1", "--json").stdout
    )
    assert document["schema"] == "latpred.measure/1"
    assert document["rows"][0]["status"] == "ok"
    assert document["rows"][0]["batch"] == 1


def test_tables_that_do_not_fit_together(model: str, tmp_path: Path) -> None:
    store.save(profile())
    guess = tmp_path / "predicted.csv"
    run("predict", model, "--image", "16", "-o", str(guess))
    shown = run("compare", str(guess), str(guess))
    assert shown.exit_code == 2
    assert "lacks spread_s" in shown.stderr
    assert run("compare", "gone.csv", str(guess)).exit_code == 2
    rows = list(csv.DictReader(io.StringIO(guess.read_text())))
    assert rows[0]["device"] == "cpu"


@pytest.mark.parametrize(("factor", "exit_code"), [(1.01, 0), (1.5, 1)])
def test_a_validation_that_misses_its_targets_exits_1(
    factor: float, exit_code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [(name, batch, 0.01 * batch * (1 + index)) for index, name in enumerate("abc") for batch in (1, 8)]
    report = compare(predicted([(*cell[:2], cell[2] * factor) for cell in cells]), measured(cells))
    monkeypatch.setattr("latpred.calibration.measurement.validation.validate", lambda *_arguments, **_options: report)
    shown = run("validate", "--quiet") if exit_code == 0 else run("validate")
    assert shown.exit_code == exit_code
    assert shown.stdout.startswith("6 cells of 3 models: median error ")
    assert ("target missed: median error is 0.5, the target 0.08" in shown.stderr) == (exit_code == 1)


def test_a_journal_of_another_machine_do_not_replace_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(profile())
    elsewhere = profile(machine=machine(hostname_hash="f" * 16))
    monkeypatch.setattr("latpred.calibration.calibrator.fit_raw", lambda folder, name: elsewhere)
    shown = run("fit", "--raw", str(tmp_path))
    assert shown.exit_code == 2
    assert "there is a profile 'cpu' of another machine already; give this one a --name." in shown.stderr
    assert store.find().machine.hostname_hash == machine().hostname_hash


def test_a_folder_without_a_journal(tmp_path: Path) -> None:
    shown = run("fit", "--raw", str(tmp_path))
    assert shown.exit_code == 3
    assert f"there is no journal.jsonl or last.jsonl in {tmp_path}" in shown.stderr
    assert "Traceback" not in shown.stderr
