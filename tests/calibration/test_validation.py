"""Validation end to end on a suite of toys: measure, predict, compare, record, and replay to the same figures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from profiledata import profile
from torch import nn

from latpred.calibration.measurement import validation
from latpred.calibration.measurement.validation import validate
from latpred.calibration.workloads import suites
from latpred.calibration.workloads.suites import Workload, dense_inputs
from latpred.errors import MissingPackageError, NoProfileError, ProfileError, UsageError


def toy(name: str, width: int) -> Workload:
    def make(device: str, precision: str) -> tuple[nn.Module, object]:
        with torch.device(device):
            model = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4)).eval()
        return model, dense_inputs((16,), precision)

    return Workload(name, "custom", 0, make)


@pytest.fixture(autouse=True)
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    suite = suites.Suite("toys", "for tests", (1, 4), ready=(toy("a", 8), toy("b", 64), toy("c", 512)))
    monkeypatch.setattr(suites, "get", {"toys": suite}.__getitem__)


def test_measured_predicted_compared_recorded_and_replayed(tmp_path: Path) -> None:
    known = profile()
    report = validate("cpu", profile=known, suite="toys", repeats=2, record=tmp_path / "toys")
    assert report.overall.cells == 6
    assert report.overall.models == 3
    assert report.only_measured == report.only_predicted == report.failed == ()
    scores = {score.name: score for score in report.baselines}
    assert scores["isolated_ops"].errors is not None
    assert scores["flops_linear"].errors is not None
    assert "CUDA" in scores["runtime_estimator"].reason
    assert report.noise.cells == 6

    again = validate(profile=known, replay=tmp_path / "toys")
    assert again.overall.median == pytest.approx(report.overall.median, rel=1e-6)
    assert again.noise.p90 == pytest.approx(report.noise.p90, abs=1e-9)
    assert again.overall.cells == 6
    assert [score.reason for score in again.baselines] == [score.reason for score in report.baselines]


def test_a_model_that_needs_a_package_which_is_not_there_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def make(device: str, precision: str) -> tuple[nn.Module, object]:
        raise MissingPackageError("timm is not installed")

    ready = (toy("a", 8), Workload("foreign", "custom", 0, make), toy("b", 64))
    monkeypatch.setattr(suites, "get", {"toys": suites.Suite("toys", "for tests", (1, 4), ready=ready)}.__getitem__)
    report = validate(profile=profile(), suite="toys", repeats=1, record=tmp_path / "toys")
    assert report.overall.cells == 4
    assert all("foreign" in cell and "timm is not installed" in cell for cell in report.failed)
    assert len(report.failed) == 2


def test_a_model_that_no_trace_can_follow_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reads(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if float(x.sum()) > 1e9 else x

    def make(device: str, precision: str) -> tuple[nn.Module, object]:
        with torch.device(device):
            return Reads(16, 16).eval(), dense_inputs((16,), precision)

    ready = (toy("a", 8), Workload("odd", "custom", 0, make), toy("b", 64))
    monkeypatch.setattr(suites, "get", {"toys": suites.Suite("toys", "for tests", (1, 4), ready=ready)}.__getitem__)
    report = validate(profile=profile(), suite="toys", repeats=1, rivals=())
    assert report.overall.cells == 4
    assert all("odd" in cell and "no trace: the model's Python reads a value" in cell for cell in report.failed)
    assert len(report.failed) == 2


def test_a_note_says_where_the_machine_differs() -> None:
    report = validate(profile=profile(), suite="toys", batches=[1], repeats=1, rivals=())
    assert any("torch" in note or "stack" in note or "threads" in note or "system" in note for note in report.notes)


def test_the_simulated_device_too() -> None:
    with pytest.raises(NoProfileError):
        validate("simulated", suite="toys")


def test_what_a_profile_lacks_is_said_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "measure", lambda *_, **__: pytest.fail("measured"))
    with pytest.raises(ProfileError, match="no dispatch costs of runtime 'torchscript'"):
        validate(profile=profile(), suite="toys", runtimes=("eager", "torchscript"))
    with pytest.raises(ProfileError, match="no kernels in bf16"):
        validate(profile=profile(), suite="toys", precision="bf16")


def test_a_replay_cannot_be_recorded(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Give replay or record, not both"):
        validate(profile=profile(), replay=tmp_path, record=tmp_path)
