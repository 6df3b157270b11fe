"""Validation on a suite of toys: measure, predict, compare, record, replay to the same figures; and repeatability."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import factories
import msgspec
import numpy as np
import pytest
import torch
from profiledata import machine, profile
from torch import nn

from latpred.accuracy.recording import load
from latpred.calibration.devices.cpu import CpuDevice
from latpred.calibration.measurement import validation
from latpred.calibration.measurement.validation import validate
from latpred.calibration.measurement.whole_models import StoppedError, measure
from latpred.calibration.workloads import suites
from latpred.calibration.workloads.suites import Workload, dense_inputs
from latpred.errors import (
    DeviceError,
    LatpredError,
    MissingPackageError,
    NoProfileError,
    ProfileError,
    TableError,
    UsageError,
)
from latpred.profile.document import BENCHMARK, CUDNN, DeviceInfo, DeviceProfile


def perceptron(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4))


def toy(name: str, build: Callable[[], nn.Module]) -> Workload:
    def make(device: str, precision: str) -> tuple[nn.Module, Any]:
        with torch.device(device):
            return build().eval(), dense_inputs((16,), precision)

    return Workload(name, "custom", 0, make)


A, B, C = (toy(name, lambda width=width: perceptron(width)) for name, width in (("a", 8), ("b", 64), ("c", 512)))


def offer(monkeypatch: pytest.MonkeyPatch, *ready: Workload) -> None:
    """Make these models the suite "toys"."""
    suite = suites.Suite("toys", (1, 4), ready=ready)
    monkeypatch.setattr(suites, "get", {"toys": suite}.__getitem__)


@pytest.fixture(autouse=True)
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, A, B, C)


def test_measured_predicted_compared_recorded_and_replayed(tmp_path: Path) -> None:
    known = profile(machine=machine(system="Plan 9"))
    report = validate("cpu", profile=known, suite="toys", repeats=2, record=tmp_path / "toys")
    assert report.overall.cells == 6
    assert report.overall.models == 3
    assert report.only_measured == report.only_predicted == report.failed == ()
    assert any(note.endswith("the profile's is Plan 9.") for note in report.notes)
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


def test_what_is_validated_is_measured_as_the_profile_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU that says that it is a GPU."""

    class Gpu(CpuDevice):
        def info(self) -> DeviceInfo:
            return msgspec.structs.replace(super().info(), kind="cuda")

    class Says(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            said.append(torch.backends.cudnn.benchmark)
            return super().forward(x)

    said: list[bool] = []
    offer(monkeypatch, toy("says", lambda: Says(16, 16)))
    monkeypatch.setattr(validation, "open_device", lambda name: Gpu())
    for benchmark in (BENCHMARK, f"no {BENCHMARK}"):
        known = profile("gpu", device=Gpu().info(), protocol={CUDNN: benchmark})
        validate("cuda:0", profile=known, suite="toys", repeats=1, batch=[1], rivals=["isolated_ops"])
        assert (True in said, said[-1]) == (benchmark == BENCHMARK,) * 2  # the last are the baseline's
        said.clear()


class Reads(nn.Linear):
    """No trace can follow it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if float(x.sum()) > 1e9 else x


def foreign() -> nn.Module:
    raise MissingPackageError("timm is not installed")


@pytest.mark.parametrize(
    ("build", "said"),
    [(foreign, "timm is not installed"), (lambda: Reads(16, 16), "no trace: the model's Python reads a value")],
)
def test_a_model_that_fails_is_left_out_and_costs_the_others_nothing(
    build: Callable[[], nn.Module], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    offer(monkeypatch, A, toy("odd", build), B)
    once = {"runtimes": iter(["eager"]), "rivals": iter(())}
    report = validate(profile=profile(), suite="toys", repeats=1, record=tmp_path / "toys", **once)
    assert report.overall.cells == 4
    assert all("odd" in cell and said in cell for cell in report.failed)
    assert len(report.failed) == 2
    offer(monkeypatch, toy("odd", build))
    with pytest.raises(TableError, match=f"no measured cell has a latency: .*{said}"):
        validate(profile=profile(), suite="toys", repeats=1, rivals=())


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ({"runtimes": ("eager", "torchscript")}, ProfileError, "no dispatch costs of runtime 'torchscript'"),
        ({"precision": "bf16"}, ProfileError, "no kernels in bf16"),
        ({"profile": None, "device": "simulated"}, NoProfileError, "simulated"),
        ({"replay": "x", "suite": "blind", "batch": [1, 8]}, UsageError, "measures nothing; leave out batch"),
        ({"rivals": ["isolated_op"]}, UsageError, "no baseline 'isolated_op' to measure"),
        ({"rivals": "isolated_op"}, UsageError, "no baseline 'isolated_op' to measure"),
        ({"budget_s": "10m"}, UsageError, "budget_s='10m' is not a number of seconds"),
        ({"threads": 0}, UsageError, "threads=0 is not a number of threads"),
        ({"record": Path(__file__) / "toys"}, UsageError, "is a file, not a folder"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_measured(
    asked: dict[str, Any], error: type[LatpredError], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validation, "measure", lambda *_, **__: pytest.fail("measured"))
    with pytest.raises(error, match=message):
        validate(**{"profile": profile(), "suite": "toys", **asked})


def stop(*_: object, **__: object) -> NoReturn:
    raise KeyboardInterrupt


@pytest.mark.parametrize("measuring", [True, False])
def test_ctrl_c_leaves_what_was_measured(measuring: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def stopped(*asked: Any, **options: Any) -> NoReturn:
        raise StoppedError(measure(*asked, **options))

    monkeypatch.setattr(validation, *(("measure", stopped) if measuring else ("with_baselines", stop)))
    with pytest.raises(KeyboardInterrupt):
        validate(profile=profile(), suite="toys", repeats=1, batch=np.array([2]), record=tmp_path / "toys")
    assert load(tmp_path / "toys").table["batch"].tolist() == [2] * 3


def lost(*_: object, **__: object) -> NoReturn:
    raise DeviceError("cuda:0 failed.")


def test_a_device_lost_in_a_baseline_costs_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(validation.BASELINES, "isolated_ops", lost)
    report = validate(profile=profile(), suite="toys", repeats=1, rivals=["isolated_ops"])
    assert report.overall.cells == 6
    assert {score.name: score.reason for score in report.baselines}["isolated_ops"] == "cuda:0 failed."


CPU = factories.device(name="cpu", kind="cpu", asynchronous=False)
GRAPHS = [factories.graph(factories.linear(), factories.add()), factories.graph(factories.add(10**6))]


def calibrated(dispatch_us: float, factor: float = 1.0) -> DeviceProfile:
    known = factories.dispatch()
    costs = {name: cost * factor for name, cost in known.costs_us.items()}
    slowed = msgspec.structs.replace(known, costs_us=costs, fixed_us=known.fixed_us * factor)
    base = factories.profile(CPU, runtimes={"eager": slowed})
    return msgspec.structs.replace(base, speed={"dispatch": dispatch_us})


def test_a_slower_machine_is_no_shift_and_what_speed_does_not_explain_is_one() -> None:
    (shift,) = validation.shifts([calibrated(100.0), calibrated(100.0, 1.5)], GRAPHS)
    assert shift.p90 > 0.003
    (shift,) = validation.shifts([calibrated(100.0), calibrated(150.0, 1.5)], GRAPHS)
    assert (shift.median, shift.p90) == pytest.approx((0.0, 0.0), abs=1e-9)
    assert shift.common > 1.0
    assert shift.speed == {"dispatch": 1.5}
    assert (shift.first, shift.second, shift.passed, shift.models) == (1, 2, (True, True), len(GRAPHS))


def unwritten(*_: object) -> NoReturn:
    raise NotImplementedError


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_two_calibrations_are_compared_by_the_models_of_here(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, A, toy("odd", foreign), B)
    asked: list[int] = []

    def calibrate(number: int) -> DeviceProfile:
        asked.append(number)
        profile = calibrated(100.0)
        return msgspec.structs.replace(profile, kernels={precision: profile.kernels["fp32"]})

    found = validation.repeat(calibrate, 3, suite="toys")
    assert asked == [1, 2, 3]
    assert [(shift.first, shift.second) for shift in found] == [(1, 2), (1, 3), (2, 3)]
    assert {(shift.median, shift.models) for shift in found} == {(0.0, 2)}
    monkeypatch.setattr(Workload, "trace", unwritten)
    with pytest.raises(NotImplementedError):
        validation.repeat(calibrate, 2, suite="toys")
