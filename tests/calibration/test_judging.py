"""Judging: errors of networks that no fit saw, the spread they leave and the gates they must pass."""

from __future__ import annotations

import math

import factories
import numpy as np
import pytest

from latpred.calibration import schedules
from latpred.calibration.fitting import acceptance as judging
from latpred.calibration.fitting.acceptance import HoldoutError, RunQuality
from latpred.calibration.fitting.dispatch_fit import NetworkRun
from latpred.calibration.session import Row
from latpred.calibration.workloads import networks
from latpred.prediction.crossover import Z90


def verdict(ratio: float, kernel_spread: float = 0.0) -> HoldoutError:
    """A network predicted at `ratio` times what it takes."""
    return HoldoutError("cell", 100.0 * ratio, 100.0, kernel_spread)


def test_judges_are_predicted_by_the_profile() -> None:
    # a synchronous device: 20 us for the pass, 5 for the class, 2 + macs / 1e6 in the kernel, nothing else
    profile = factories.profile(factories.device(asynchronous=False, kind="cpu"))
    op = factories.linear(rows=128, width=768)
    graph = factories.graph(op)
    (found,) = judging.holdout_errors(profile, {"judge": NetworkRun(graph, 2, 500.0)})
    macs_us, weight_us = 2 * 128 * 768 * 768 / 1e6, 4 * 768 * 768 / 1e3
    moved_us = weight_us + 2 * 2 * 4 * 128 * 768 / 1e3
    kernel_us = found.predicted_us - 20.0 - 5.0 - 2.0
    assert max(macs_us, moved_us) <= kernel_us * (1 + 1e-9)
    assert kernel_us <= macs_us + moved_us
    assert (found.cell, found.measured_us) == ("judge", 500.0)
    assert found.log_error == pytest.approx(math.log(found.predicted_us / 500.0))


def test_the_dispatch_spread_is_left_out_of_a_verdict() -> None:
    info = factories.device(asynchronous=False, kind="cpu")
    wide = factories.profile(info, runtimes={"eager": factories.dispatch(spread=0.5)})
    (found,) = judging.holdout_errors(wide, {"judge": NetworkRun(factories.graph(factories.linear()), 1, 500.0)})
    assert found.kernel_spread == pytest.approx(0.0, abs=1e-6)


def test_the_median_error_counts_both_sides() -> None:
    assert judging.median_error([verdict(1.1), verdict(0.8), verdict(1.0)]) == pytest.approx(0.1)
    assert math.isnan(judging.median_error([]))


def test_the_spread_covers_nine_in_ten() -> None:
    # errors of 1 to 10 %: the ninth must lie just inside
    found = [verdict(math.exp(percent / 100)) for percent in range(1, 11)]
    spread = judging.network_spread(found)
    assert spread == pytest.approx(0.09 / Z90, abs=1e-4)
    rng = np.random.default_rng(0)
    found = [verdict(math.exp(error)) for error in rng.normal(0.0, 0.2, 2000)]
    assert judging.network_spread(found) == pytest.approx(0.2, rel=0.06)


def test_what_the_kernels_explain_is_not_counted_again() -> None:
    errors = [verdict(math.exp(percent / 100), kernel_spread=0.04) for percent in range(1, 11)]
    expected = math.sqrt((0.09 / Z90) ** 2 - 0.04**2)
    assert judging.network_spread(errors) == pytest.approx(expected, abs=1e-4)


def test_the_spread_has_bounds() -> None:
    assert judging.network_spread([verdict(1.0)] * 10) == pytest.approx(judging.LEAST_SPREAD, abs=1e-4)
    assert judging.network_spread([verdict(1e9)] * 10) == 1.0
    assert judging.network_spread([]) == 2 * judging.LEAST_SPREAD


def test_a_good_profile_passes() -> None:
    acceptance = judging.accepted([verdict(1.05)] * 5, (), RunQuality(0.9))
    assert acceptance.passed
    assert acceptance.advice == ()
    assert acceptance.checks == {
        "median error of holdout networks that no fit saw at most 15%": "5.0%: passed",
        "p90 error of holdout networks that no fit saw at most 40%": "5.0%: passed",
        "timings that were stable at least 70%": "90.0%: passed",
        "cells that other work disturbed at most 25%": "0.0%: passed",
        "networks to judge by at least 5": "5: passed",
    }


@pytest.mark.parametrize(
    ("ratios", "run", "failing"),
    [
        ([1.2] * 10, RunQuality(0.9), "median error of holdout networks that no fit saw at most 15%"),
        ([1.0] * 8 + [1.6] * 2, RunQuality(0.9), "p90 error of holdout networks that no fit saw at most 40%"),
        ([1.0] * 10, RunQuality(0.69), "timings that were stable at least 70%"),
        ([1.0] * 10, RunQuality(0.9, shifts=(1.2, 1.2, 1.0)), "median shift between two timings at most 10%"),
    ],
)
def test_each_gate_fails_alone(ratios: list[float], run: RunQuality, failing: str) -> None:
    acceptance = judging.accepted([verdict(ratio) for ratio in ratios], (), run)
    assert not acceptance.passed
    assert [name for name, text in acceptance.checks.items() if text.endswith("failed")] == [failing]
    assert acceptance.advice == (
        "Close other programs, let the machine cool down, and calibrate anew: latpred calibrate --fresh",
    )


def test_too_few_judges_ask_for_more_time() -> None:
    acceptance = judging.accepted([verdict(1.0)] * 4, (), RunQuality(1.0))
    assert not acceptance.passed
    assert acceptance.checks["networks to judge by at least 5"] == "4: failed"
    assert acceptance.advice == ("Give the calibration more time: latpred calibrate --budget 5m",)


def test_no_judges_pass_no_gate() -> None:
    acceptance = judging.accepted([], (), RunQuality(1.0))
    assert not acceptance.passed
    checked = acceptance.checks["median error of holdout networks that no fit saw at most 15%"]
    assert checked == "nothing to judge by: failed"
    assert len(acceptance.advice) == 2


def test_ordinary_models_decide_where_there_are_enough() -> None:
    acceptance = judging.accepted([verdict(1.5)] * 10, [verdict(1.02)] * judging.FEWEST, RunQuality(1.0))
    assert acceptance.passed
    assert acceptance.checks["median error of ordinary models that no fit saw at most 15%"] == "2.0%: passed"
    assert acceptance.checks["median error of holdout networks"] == "50.0%"


def test_a_disturbed_run_fails_and_says_what_by() -> None:
    acceptance = judging.accepted([verdict(1.0)] * 10, (), RunQuality(1.0, disturbed=0.4))
    assert not acceptance.passed
    assert acceptance.checks["cells that other work disturbed at most 25%"] == "40.0%: failed"
    assert acceptance.advice[0].startswith("Other work disturbed 40% of the cells until the end.")


def test_too_much_of_a_kind_that_failed_fails_the_gate() -> None:
    seed = 5 * len(networks.KINDS)
    holdout = schedules.network_cell(networks.draw(seed))
    others = [schedules.network_cell(networks.draw(number)) for number in range(1, 4)]
    assert schedules.network_spec(holdout).holdout
    rows = [Row(holdout, {}, 0.1, "it raised"), *(Row(cell, {}, 0.1) for cell in others)]
    missing = judging.missing(rows)
    assert missing == ["network encoder", "holdout networks"]
    acceptance = judging.accepted([verdict(1.0)] * 10, (), RunQuality(1.0, missing=missing))
    assert not acceptance.passed
    assert "holdout networks" in acceptance.checks["kinds of cells that could not be measured"]
