"""The first prediction on a machine without a profile: calibrated once, by one process, unless that is switched off."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from factories import graph, linear
from profiledata import profile

import latpred
from latpred import api, calibration
from latpred.calibration.timing import disturbance
from latpred.errors import CalibrationError, NoProfileError, ProfileError, UsageError
from latpred.profile import store

Calls = list[tuple[object, ...]]


@pytest.fixture
def calibrations(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Calibrating saves a made-up profile, and is noted."""
    made: Calls = []

    def calibrate(device: str, *, quick: bool, progress: object) -> object:
        assert callable(progress)
        made.append((device, quick))
        store.save(profile())
        return profile()

    monkeypatch.setenv(api.VARIABLE, "quick")
    monkeypatch.setattr(calibration, "calibrate", calibrate, raising=False)
    return made


def test_a_machine_without_a_profile_is_calibrated_once(
    calibrations: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(disturbance, "busy_now", lambda: "other work used 1.2 processors")
    assert latpred.predict(graph(linear())).latency_ms > 0
    said = capsys.readouterr()
    assert said.out == ""
    assert "calibrating its CPU now, once, in one to three minutes" in said.err
    assert "LATPRED_CALIBRATE=never" in said.err
    assert "; other work used 1.2 processors, so figures will be rough" in said.err
    latpred.predict(graph(linear()))
    latpred.explain(graph(linear()))
    assert calibrations == [("cpu", True)]


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (partial(latpred.predict, device="cpu"), "latpred calibrate"),
        (partial(latpred.predict, threads=2), "latpred calibrate"),
        (partial(latpred.predict, cudnn_benchmark=True), "latpred calibrate"),
        (partial(latpred.predict, runtime="torchscript"), "latpred calibrate --runtimes torchscript$"),
        (partial(latpred.explain, runtimes=["torchscript"]), "latpred calibrate --runtimes torchscript$"),
        (partial(latpred.rank, runtime="torchscript"), "latpred calibrate --runtimes torchscript$"),
        (partial(latpred.predict, host="nobody"), "nobody"),
    ],
)
def test_what_the_quick_calibration_cannot_answer_costs_none(
    ask: Callable[[object], object], said: str, calibrations: Calls
) -> None:
    asked = [graph(linear())] if ask.func is latpred.rank else graph(linear())  # type: ignore[attr-defined]
    with pytest.raises(ProfileError, match=said):
        ask(asked)
    assert calibrations == []


def test_it_can_be_switched_off(calibrations: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(api.VARIABLE, "Never")
    with pytest.raises(NoProfileError):
        latpred.predict(graph(linear()))
    monkeypatch.setenv(api.VARIABLE, "maybe")
    with pytest.raises(UsageError, match="LATPRED_CALIBRATE='maybe' is not known; set it to quick or never"):
        latpred.predict(graph(linear()))
    assert calibrations == []


@pytest.mark.usefixtures("read_only_home")
def test_where_nothing_can_be_kept_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(api.VARIABLE, "quick")
    with pytest.raises(CalibrationError, match=r"Permission denied\. Make it writable, or choose another directory"):
        latpred.predict(graph(linear()))


SCRIPT = """
import functools
import warnings
warnings.simplefilter("error")
import latpred, torch
from latpred import calibration
from latpred.calibration import calibrator, schedules

# Too little to trust, enough to see that it works; cells are counted, as a busy machine does few in any time.
schedules.TINY, schedules.TINY_S, schedules.HOLDOUT_S = 6, 0.05, 0.05
calibration.calibrate = functools.partial(calibrator.calibrate, cells=22)
torch.set_num_threads(1)
point = latpred.predict(torch.nn.Linear(64, 64), inputs=torch.zeros(1, 64))
print(point.latency_ms > 0, point.provenance.profile)
"""


@pytest.mark.slow
def test_for_real(latpred_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(api.VARIABLE, "quick")
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.stdout == "True cpu\n", done.stderr
    assert all(line.startswith("latpred: ") for line in done.stderr.splitlines())
    assert msgspec.structs.asdict(store.find("cpu"))["provenance"] == "measured"
    assert latpred_home in store.file_of("cpu").parents


def test_its_threads_before_pytorch_are_those_of_last_time(latpred_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(api, "sys", SimpleNamespace(modules={}))
    monkeypatch.setattr(api, "_threads_of_torch", lambda: asked.append(1) or 3)
    assert [api._threads_now(), api._threads_now(), len(asked)] == [3, 3, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "7")  # which PyTorch heeds
    assert [api._threads_now(), api._threads_now(), len(asked)] == [3, 3, 2]
    for remembered in (latpred_home / "cache" / "threads").iterdir():
        remembered.write_text("many")
    assert [api._threads_now(), len(asked)] == [3, 3]
    monkeypatch.setattr(api, "sys", SimpleNamespace(modules={"torch": None}))
    assert [api._threads_now(), len(asked)] == [3, 4]
