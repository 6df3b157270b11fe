"""calibrate --host-only: a host's dispatch from a few tiny networks, kept where --host finds it."""

from __future__ import annotations

import pytest

from latpred.calibration import calibrator
from latpred.errors import CalibrationError, HostError
from latpred.prediction import host_swap
from latpred.profile import host_profile


def test_a_host_is_measured_and_found_again() -> None:
    told: list[tuple[int, int, str]] = []
    made = calibrator.calibrate_host("laptop", tiny=5, progress=lambda *at: told.append(at))
    assert host_profile.load("laptop") == made
    assert [index for index, _, _ in told] == list(range(told[0][1]))
    assert made.dispatch.costs_us[""] > 0
    assert made.dispatch.module_call_us > 0
    assert any(name.startswith("view.") for name in made.dispatch.costs_us)
    factor, _ = host_swap.ratio(made.dispatch, made.dispatch, quiet=True)
    assert factor == pytest.approx(1.0)


def test_a_bad_name_costs_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrator, "measured", lambda *_: pytest.fail("measured"))
    with pytest.raises(HostError, match="cannot name a host"):
        calibrator.calibrate_host("a/b")


def test_too_few_networks_are_said() -> None:
    with pytest.raises(CalibrationError, match="1 tiny networks"):
        calibrator.calibrate_host("laptop", tiny=1)
    assert host_profile.names() == []
