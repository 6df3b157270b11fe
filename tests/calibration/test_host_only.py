"""calibrate --host-only: a host's dispatch from a few tiny networks, kept where --host finds it."""

from __future__ import annotations

from unittest.mock import Mock

import msgspec
import pytest
import torch
from factories import machine
from gauges import READ_US, timed_in_place

from latpred import host
from latpred.calibration import calibrator, schedules
from latpred.calibration.cells import Cell
from latpred.calibration.session import Row
from latpred.calibration.timing.reference_speed import ReferenceTimer
from latpred.errors import CalibrationError
from latpred.profile import host_profile
from latpred.profile.host_profile import HostProfile
from latpred.progress import ProgressEvent


def test_a_host_is_measured_and_found_again() -> None:
    told: list[ProgressEvent] = []
    made = calibrator.calibrate_host("laptop", tiny=5, progress=told.append)
    assert host_profile.load("laptop") == made
    assert [event.done for event in told] == list(range(int(told[0].total)))
    assert made.dispatch.costs_us[""] > 0
    assert made.dispatch.module_call_us > 0
    assert any(name.startswith("view.") for name in made.dispatch.costs_us)


def test_slow_moments_are_taken_off_as_what_dispatches_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(slow: float) -> HostProfile:
        def measure(_: object, cell: Cell) -> Row:
            return msgspec.structs.replace(timed_in_place(cell, slow), speed={})

        monkeypatch.setattr(schedules.Synchronous, "measure", measure)
        return calibrator.calibrate_host("laptop", tiny=11)

    monkeypatch.setattr(ReferenceTimer, "read", lambda _: READ_US)
    usual, slowed = measured(1.0).dispatch, measured(1.44).dispatch
    assert slowed.costs_us == pytest.approx(usual.costs_us)
    assert (slowed.fixed_us, slowed.module_call_us) == pytest.approx((usual.fixed_us, usual.module_call_us))


def test_a_host_is_measured_on_the_cpu_whatever_the_default_device_is(monkeypatch: pytest.MonkeyPatch) -> None:
    places = set[str]()

    def measure(_: object, cell: Cell) -> Row:
        places.add(str(torch.ones(1).device))
        return timed_in_place(cell)

    monkeypatch.setattr(schedules.Synchronous, "measure", measure)
    torch.set_default_device("meta")
    try:
        calibrator.calibrate_host("laptop", tiny=11)
    finally:
        torch.set_default_device(None)
    assert places == {"cpu"}


def test_another_machines_host_of_that_name_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules.Synchronous, "measure", lambda _, cell: timed_in_place(cell))
    here = [calibrator.calibrate_host(tiny=11) for _ in range(2)]
    assert {one.name for one in here} == {"this-host"}
    host_profile.save(msgspec.structs.replace(here[0], machine=machine()))
    made = calibrator.calibrate_host(tiny=11)
    assert host_profile.load(f"this-host-{host.short_id()}") == made
    assert host_profile.load("this-host").machine == machine()


def test_too_few_networks_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CalibrationError, match="1 tiny networks"):
        calibrator.calibrate_host("laptop", tiny=1)
    assert host_profile.names() == []
    monkeypatch.setattr(schedules.Synchronous, "measure", Mock(side_effect=CalibrationError("no such op.")))
    with pytest.raises(CalibrationError, match=r"Of 7 cells 7 could not .* for this: no such op\. Time at least 4"):
        calibrator.calibrate_host("laptop", tiny=1)
