"""Intervals of a profile whose gate failed hold what the gate found; of one that passed they stay as they are."""

from __future__ import annotations

import math

import msgspec
import pytest
from factories import graph, linear
from profiledata import profile

from latpred.calibration.fitting import acceptance
from latpred.calibration.fitting.dispatch_fit import NetworkRun
from latpred.prediction.crossover import Z90
from latpred.prediction.fallbacks import least_spread
from latpred.prediction.predictor import Predictor
from latpred.profile.document import Acceptance, DeviceProfile

P90 = "p90 error of ordinary models that no fit saw at most 40%"
SHIFT = "median shift between two timings at most 10%"


def judged(passed: bool, checks: dict[str, str], runtimes: dict[str, bool] | None = None) -> DeviceProfile:
    return profile(acceptance=Acceptance(passed, checks, (), runtimes or {}))


def factor(made: DeviceProfile) -> float:
    """Upper end of an interval over the prediction."""
    found = Predictor(made).predict(graph(linear()))
    return found.interval_ms[1] / found.latency_ms


@pytest.mark.parametrize(
    ("checks", "wanted"),
    [
        ({P90: "212.0%: failed"}, 3.12),  # three times too long
        ({P90: "80.0%: failed"}, 5.0),  # or five times too short
        ({P90: "inf%: failed", "networks to judge by at least 5": "0: failed"}, 10.0),
        ({"cells": "1 of 9"}, 10.0),
        ({P90: "60.0%: failed", SHIFT: "8.0%: passed"}, 2.5),
    ],
)
def test_an_interval_holds_the_errors_that_the_gate_found(checks: dict[str, str], wanted: float) -> None:
    assert factor(judged(False, checks)) == pytest.approx(wanted, rel=1e-3)
    assert factor(judged(True, checks)) == pytest.approx(math.exp(0.05 * Z90), rel=0.02)


def test_times_that_moved_between_two_timings_widen_it_too() -> None:
    steady, moved = ({P90: "20.0%: passed", SHIFT: said} for said in ("5.0%: passed", "60.0%: failed"))
    assert factor(judged(False, moved)) > 2 * factor(judged(False, steady))


def test_an_interval_that_is_wide_enough_already_stays() -> None:
    wide = judged(False, {P90: "45.0%: failed"})
    eager = msgspec.structs.replace(wide.runtimes["eager"], spread=2.0)
    wide = msgspec.structs.replace(wide, runtimes={"eager": eager})
    assert factor(wide) == pytest.approx(math.exp(2.0 * Z90), rel=1e-3)


def test_each_runtime_has_its_own_verdict() -> None:
    failed = judged(True, {P90: "9.0%: passed", f"torchscript: {P90}": "100.0%: failed"}, {"torchscript": False})
    assert least_spread(failed, "eager") == 0.0
    assert least_spread(failed, "torchscript") == pytest.approx(math.log(2) / Z90)
    both = judged(False, {P90: "300.0%: failed", f"torchscript: {P90}": "100.0%: failed"}, {"torchscript": False})
    assert least_spread(both, "torchscript") == pytest.approx(math.log(4) / Z90)
    assert least_spread(msgspec.structs.replace(both, provenance="datasheet"), "eager") == 0.0


def test_judging_anew_does_not_count_an_earlier_verdict() -> None:
    runs = {"judge": NetworkRun(graph(linear()), 1, 500.0)}
    spreads = [acceptance.holdout_errors(judged(passed, {}), runs)[0].kernel_spread for passed in (True, False)]
    assert spreads[0] == spreads[1]
