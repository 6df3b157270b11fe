"""calibrate and fit through the command line: what they keep, print and refuse."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from clidata import document, models_file, run, saved_host
from profiledata import machine, profile

from latpred.calibration import calibrator
from latpred.calibration.devices import open_device
from latpred.calibration.measurement import validation, whole_models
from latpred.calibration.session import Session, directory
from latpred.profile import host_profile, store


def test_calibrating_while_another_calibration_runs_or_where_nothing_can_be_kept(
    request: pytest.FixtureRequest,
) -> None:
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


def test_the_verbs_that_measure_hand_on_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}

    class StopError(Exception):
        pass

    def stop(*_: object, **given: object) -> None:
        seen.update(given)
        raise StopError

    for module, name in ((calibrator, "calibrate"), (whole_models, "measure"), (validation, "validate")):
        monkeypatch.setattr(module, name, stop)
    model = f"{models_file(tmp_path)}:picture"
    calls = [("calibrate", "-d", "cpu", "--cudnn-benchmark"), ("measure", model), ("validate",)]
    for threads, arguments in enumerate(calls, 2):
        assert isinstance(run(*arguments, "--threads", str(threads)).exception, StopError)
        assert seen["threads"] == threads
    assert seen["cudnn_benchmark"] is True


def test_a_journal_of_another_machine_does_not_replace_a_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save(profile())
    elsewhere = profile(machine=machine(hostname_hash="f" * 16))
    monkeypatch.setattr("latpred.calibration.calibrator.fit_raw", lambda folder, name: elsewhere)
    shown = run("fit", "--raw", tmp_path)
    assert shown.exit_code == 2
    assert "there is a profile 'cpu' of another machine already; give this one a --name." in shown.stderr
    assert store.find().machine.hostname_hash == machine().hostname_hash
    assert run("fit", "--raw", tmp_path, "-o", tmp_path / "elsewhere.json").exit_code in (0, 1)
    assert store.load(tmp_path / "elsewhere.json").machine.hostname_hash == "f" * 16
    assert store.find().machine.hostname_hash == machine().hostname_hash


def test_host_only_measures_keeps_and_says_how_to_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrator, "calibrate_host", saved_host)
    shown = run("calibrate", "--host-only")
    assert shown.exit_code == 0
    assert "--host this-host" in shown.stdout
    named = document("calibrate", "--host-only", "--name", "laptop")
    assert (named["schema"], named["name"], named["costs_us"][""]) == ("latpred.host/1", "laptop", 7.0)
    assert host_profile.names() == ["laptop", "this-host"]
