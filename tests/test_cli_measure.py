"""Verbs that measure, through the command line: calibrate, fit, and measure, also for a whole study."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pandas as pd
import pytest
import torch
from clidata import document, models_file, run, saved_host
from gauges import FAST
from profiledata import profile
from torch import nn

from latpred.calibration import calibrator
from latpred.calibration.devices import open_device
from latpred.calibration.measurement import recorder, validation, whole_models
from latpred.calibration.measurement.recorder import Plan, Setting
from latpred.calibration.session import Session, directory
from latpred.calibration.timing import disturbance
from latpred.calibration.workloads.suites import module_workload
from latpred.profile import host_profile, store

TINY = module_workload("tiny", nn.Linear(8, 8), torch.zeros(1, 8))
STAGES = {name: (Setting(TINY, batch, "fp32", "eager"),) for name, batch in (("core", 1), ("the rest", 4))}


def study_plan(name: str) -> Plan:
    return Plan(name, STAGES, ("timm is not installed",))


STUDY = ("measure", "--suite", "paper", "--device", "simulated")


@pytest.fixture
def model(tmp_path: Path) -> str:
    return f"{models_file(tmp_path)}:picture"


@pytest.fixture
def small_study(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "plan", study_plan)
    monkeypatch.setattr(recorder, "VISIT", FAST)


@pytest.mark.parametrize("form", ["file", "stdout"])
def test_ctrl_c_leaves_what_was_measured(
    form: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    visit, visits = whole_models._Visits._visit, iter(range(9))

    def interrupted(visiting: Any, cell: Any) -> None:
        if next(visits) == 2:
            raise KeyboardInterrupt
        visit(visiting, cell)

    monkeypatch.setattr(whole_models._Visits, "_visit", interrupted)
    path = tmp_path / "measured.csv"
    where = ("-o", path) if form == "file" else ("--csv",)
    shown = run("measure", model, "--image", "16", "--batch", "1,2,4", "--device", "cpu", *where)
    assert shown.exit_code == 130
    place = f"in {path}" if form == "file" else "above"
    said = f"latpred: interrupted; 2 of 3 cells were measured by then, they are {place}."
    assert shown.stderr.splitlines()[-1] == said
    table = pd.read_csv(path if form == "file" else io.StringIO(shown.stdout))
    assert sorted(table["status"]) == ["interrupted before it was measured", "ok", "ok"]
    assert table["latency_s"].notna().sum() == 2


@pytest.mark.filterwarnings("always::latpred.errors.BusyWarning")
def test_measure_says_what_else_ran(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("measure", model, "--image", "16", "--batch", "1", "--repeats", "1", "--device")
    for busy, device, said in ((1.3, "cpu", True), (0.0, "cpu", False), (1.3, "simulated", False)):
        beside = disturbance.Disturbance(busy=busy)
        monkeypatch.setattr(disturbance.Watch, "lap", lambda _, beside=beside: beside)
        shown = run(*asked, device)
        assert ("other work used 1.3 processors meanwhile, so times may be too long" in shown.stderr) == said


def test_measure_prints_a_row_per_cell_and_says_what_does_not_fit(model: str) -> None:
    shown = run("measure", model, "--image", "8192", "--batch", "1048576", "--device", "cpu", "--quiet")
    assert (shown.exit_code, shown.stderr) == (3, "")
    assert "out of memory" in shown.stdout
    small = ("measure", model, "--image", "16", "--batch", "1", "--device", "cpu", "--repeats", "1")
    assert "repeat noise" in run(*small).stdout.splitlines()[0]
    found = document(*small)
    assert found["schema"] == "latpred.measure/1"
    assert (found["rows"][0]["status"], found["rows"][0]["batch"]) == ("ok", 1)


@pytest.mark.usefixtures("small_study")
def test_a_stage_then_the_rest(tmp_path: Path) -> None:
    first = run(*STUDY, "--record", tmp_path, "--stage", "core")
    stages = ["core                  1 of     1", "the rest              0 of     1"]
    assert (first.exit_code, first.stdout.splitlines()) == (0, [*stages, f"kept in {tmp_path}"])
    assert "timm is not installed" in first.stderr
    found = document(*STUDY, "--record", tmp_path)
    assert found["schema"] == "latpred.recorded/1"
    assert found["complete"]
    assert found["stages"]["the rest"] == {"measured": 1, "planned": 1}


def test_a_study_exits_with_3_where_nothing_could_be_measured_of_a_stage_or_a_model_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = module_workload("wrong", nn.Linear(8, 8), torch.zeros(1, 4))
    fails, works = Setting(wrong, 1, "fp32", "eager"), STAGES["core"][0]
    monkeypatch.setattr(recorder, "VISIT", FAST)
    for number, (stages, named, code, said) in enumerate(
        [
            ({"core": (fails,)}, (), 3, "nothing could be measured of core, wrong"),
            ({"core": (fails, works)}, (), 3, "nothing could be measured of wrong"),
            ({**STAGES, "wrong": (fails,)}, ("core",), 0, ""),
            ({**STAGES, "wrong": (fails,)}, ("wrong",), 3, "nothing could be measured of wrong"),
        ]
    ):
        monkeypatch.setattr(recorder, "plan", lambda name, stages=stages: Plan(name, stages))
        run(*STUDY, "--record", tmp_path / str(number), *(("--stage", "core") * ("wrong" in stages)))
        shown = run(*STUDY, "--record", tmp_path / str(number), *(part for one in named for part in ("--stage", one)))
        assert (shown.exit_code, said in shown.stdout) == (code, True), shown.output
        assert ("nothing could be measured" in shown.stdout) is bool(said)


@pytest.mark.usefixtures("small_study")
def test_a_study_that_stopped_says_how_to_go_on_and_where(latpred_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = run(*STUDY, "--budget", "0.000001s")
    assert stopped.stdout.splitlines()[-1] == "The same command again goes on where this stopped."
    run(*STUDY, "--quiet")
    assert (latpred_home / "recordings" / "paper-simulated" / "recording.json").exists()

    monkeypatch.setattr(recorder, "record", Mock(side_effect=KeyboardInterrupt))
    ended = run(*STUDY)
    assert ended.exit_code == 130
    assert "what was measured is kept, run the same command to go on" in ended.stderr


def test_calibrating_while_another_process_does_or_where_nothing_can_be_kept(request: pytest.FixtureRequest) -> None:
    with Session(directory("simulated"), open_device("simulated").machine(), {}):
        shown = run("calibrate", "--device", "simulated", "--quick")
    assert shown.exit_code == 3
    assert "another calibration of simulated is under way (process " in shown.stderr
    assert "Wait until it ends" in shown.stderr
    request.getfixturevalue("read_only_home")  # only now: what calibrating imports must be read first
    shown = run("calibrate", "--device", "simulated", "--quick")
    assert (shown.exit_code, "Permission denied. Make it writable, or choose" in shown.stderr) == (3, True)


def test_ctrl_c_keeps_what_was_measured() -> None:
    # A shell that started the tests in the background had them ignore Ctrl-C.
    heeding = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    command = [sys.executable, "-c", f"{heeding}; from latpred.cli import main; main()"]
    command += ["calibrate", "--device", "simulated", "--budget", "10m"]
    calibrating = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    journal = directory("simulated") / "journal.jsonl"
    while calibrating.poll() is None and (not journal.exists() or journal.read_bytes().count(b"\n") < 4):
        time.sleep(0.01)
    calibrating.send_signal(signal.SIGINT)
    output, said = calibrating.communicate()
    assert (calibrating.returncode, output) == (130, "")
    assert said.startswith("calibrating simulated: 0 %")
    assert said.splitlines()[-1] == ("latpred: interrupted; what was measured is kept, run the same command to go on.")
    assert journal.read_bytes().count(b"\n") >= 4


@pytest.mark.parametrize(
    ("flags", "without"), [(["--fresh"], "--fresh"), (["--repeat", "2"], "--repeat"), (["--quick"], "")]
)
def test_ctrl_c_of_a_calibration_from_nothing_does_not_advise_another(
    flags: list[str], without: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrator, "calibrate", Mock(side_effect=KeyboardInterrupt))
    stopped = run("calibrate", "--device", "simulated", *flags)
    said = f"go on with the same command without {without}" if without else "run the same command to go on"
    assert stopped.exit_code == 130
    assert stopped.stderr.endswith(f"latpred: interrupted; what was measured is kept, {said}.\n")


def test_the_verbs_that_measure_hand_on_how(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}

    class StopError(Exception):
        pass

    def stop(*_: object, **given: object) -> None:
        seen.update(given)
        raise StopError

    for module, name in ((calibrator, "calibrate"), (whole_models, "measure"), (validation, "validate")):
        monkeypatch.setattr(module, name, stop)
    calls = [("calibrate", "-d", "cpu", "--cudnn-benchmark"), ("measure", model), ("validate", "--no-baselines")]
    for threads, arguments in enumerate(calls, 2):
        assert isinstance(run(*arguments, "--threads", str(threads)).exception, StopError)
        assert seen["threads"] == threads
    assert (seen["cudnn_benchmark"], seen["rivals"]) == (True, ())


def test_a_journal_replaces_a_profile_where_it_is_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(profile())
    monkeypatch.setattr("latpred.calibration.calibrator.fit_raw", lambda folder, name: profile(seconds=2.0))
    shown = run("fit", "--raw", tmp_path)
    assert (shown.exit_code, store.find().seconds) == (2, profile().seconds)
    assert "there is a profile 'cpu' already. Give this one another --name, or replace that one with --name cpu." in (
        shown.stderr
    )
    run("fit", "--raw", tmp_path, "-o", tmp_path / "elsewhere.json")
    assert (store.load(tmp_path / "elsewhere.json").seconds, store.find().seconds) == (2.0, profile().seconds)
    run("fit", "--raw", tmp_path, "--name", "cpu")
    assert store.find().seconds == 2.0


def test_host_only_measures_keeps_and_says_how_to_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrator, "calibrate_host", saved_host)
    shown = run("calibrate", "--host-only")
    assert shown.exit_code == 0
    assert "--host this-host" in shown.stdout
    named = document("calibrate", "--host-only", "--name", "laptop")
    assert (named["schema"], named["name"], named["costs_us"][""]) == ("latpred.host/1", "laptop", 7.0)
    assert host_profile.names() == ["laptop", "this-host"]


def test_repeated_calibrations_exit_with_1_where_a_gate_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    for passed, code in (((True, True), 0), ((True, False), 1)):
        shift = validation.Shift(1, 2, 1.0, 0.01, 0.02, {}, passed, 3)
        monkeypatch.setattr(validation, "repeat", lambda *_, shift=shift: [shift])
        shown = run("calibrate", "-d", "simulated", "--repeat", "2")
        assert shown.exit_code == code, shown.output
