"""Repeatability: shifts between profiles are told apart from what the machine's speed did."""

from __future__ import annotations

import factories
import msgspec
import pytest

from latpred.calibration.measurement import validation
from latpred.calibration.workloads import suites
from latpred.errors import MissingPackageError
from latpred.profile.document import DeviceProfile

CPU = factories.device(name="cpu", kind="cpu", asynchronous=False)
GRAPHS = [factories.graph(factories.linear(), factories.add()), factories.graph(factories.add(10**6))]


def profile(dispatch_us: float, factor: float = 1.0) -> DeviceProfile:
    known = factories.dispatch()
    costs = {name: cost * factor for name, cost in known.costs_us.items()}
    slowed = msgspec.structs.replace(known, costs_us=costs, fixed_us=known.fixed_us * factor)
    base = factories.profile(CPU, runtimes={"eager": slowed})
    return msgspec.structs.replace(base, speed={"dispatch": dispatch_us})


def test_a_slower_machine_is_no_shift_and_what_speed_does_not_explain_is_one() -> None:
    (shift,) = validation.shifts([profile(100.0), profile(100.0, 1.5)], GRAPHS)
    assert shift.p90 > 0.003
    (shift,) = validation.shifts([profile(100.0), profile(150.0, 1.5)], GRAPHS)
    assert (shift.median, shift.p90) == pytest.approx((0.0, 0.0), abs=1e-9)
    assert shift.common > 1.0
    assert shift.speed == {"dispatch": 1.5}
    assert (shift.first, shift.second, shift.passed, shift.models) == (1, 2, (True, True), len(GRAPHS))


def test_each_two_calibrations_are_compared() -> None:
    asked: list[int] = []

    def calibrate(number: int) -> DeviceProfile:
        asked.append(number)
        return profile(100.0)

    found = validation.repeat(calibrate, 3, suite="everyday")
    assert asked == [1, 2, 3]
    assert [(shift.first, shift.second) for shift in found] == [(1, 2), (1, 3), (2, 3)]
    assert all(shift.median == 0.0 for shift in found)


def test_models_that_need_a_package_which_is_not_there_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(device: str, precision: str) -> tuple[object, object]:
        raise MissingPackageError("timm is not installed")

    here = suites.get("everyday").ready[:1]
    suite = suites.Suite("toys", "for tests", (1,), ready=(*here, suites.Workload("foreign", "custom", 0, make)))
    monkeypatch.setattr(suites, "get", {"toys": suite}.__getitem__)
    (shift,) = validation.repeat(lambda _: profile(100.0), 2, suite="toys")
    assert shift.median == 0.0
