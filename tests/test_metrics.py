"""Metrics against numbers worked out by hand, and Kendall tau against scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from latpred.accuracy import metrics


def test_errors_by_hand() -> None:
    found = metrics.errors([1.2, 2.0, 3.0, 5.0], [1.0, 2.0, 4.0, 5.5], ["a", "a", "b", "b"])
    off = [0.2, 0.0, 0.25, 1 / 11]  # ordered: 0, 0.0909, 0.2, 0.25
    assert found.cells == 4
    assert found.models == 2
    assert found.median == pytest.approx((1 / 11 + 0.2) / 2)
    assert found.p90 == pytest.approx(0.2 + 0.7 * 0.05)  # position 2.7 of 0..3
    assert found.near == 0.5
    assert found.bias == pytest.approx((1.2 * 1.0 * 0.75 * (10 / 11)) ** 0.25 - 1)
    assert max(off) == 0.25


def test_errors_of_nothing_are_not_numbers() -> None:
    found = metrics.errors([], [])
    assert found.cells == 0
    assert math.isnan(found.median)


def test_rank_agrees_with_scipy_without_noise() -> None:
    rng = np.random.default_rng(3)
    truth = rng.uniform(1, 2, 40)
    guess = truth * rng.uniform(0.7, 1.3, 40)
    assert metrics.rank(guess, truth, noise=0.0).tau == pytest.approx(stats.kendalltau(guess, truth).statistic)


def test_rank_leaves_out_pairs_inside_the_noise() -> None:
    # 1.00 and 1.01 are swapped by the prediction, but only 1 % apart
    found = metrics.rank([2.0, 1.0, 3.0], [1.00, 1.01, 5.0], noise=0.02)
    assert (found.tau, found.pairs, found.left_out) == (1.0, 2, 1)
    assert found.all_pairs == pytest.approx(1 / 3)


def test_rank_pairs_only_within_a_group() -> None:
    found = metrics.rank([1, 2, 9, 8], [1, 2, 3, 4], noise=0.0, groups=[1, 1, 2, 2])
    assert found.pairs == 2
    assert found.tau == 0.0  # one pair right, one wrong


def test_a_predicted_tie_counts_as_nothing() -> None:
    assert metrics.rank([1, 1, 2], [1, 2, 3], noise=0.0).tau == pytest.approx(2 / 3)


def test_knee_is_read_between_batches() -> None:
    # flat 10, then rising with batch: log-log line from (4, 10) to (8, 20) passes 15 at 4 * 1.5
    assert metrics.knee([1, 2, 4, 8], [10, 10, 10, 20]) == pytest.approx(6.0)
    assert math.isnan(metrics.knee([1, 2, 4], [10, 10, 11]))


def test_knee_does_not_depend_on_row_order() -> None:
    assert metrics.knee([8, 1, 4, 2], [20, 10, 10, 10]) == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("latency", "where"),
    [
        ([6.0, 6.0, 6.0, 8.0, 16.0], 6.0),  # max(6, batch)
        ([7.0, 8.0, 10.0, 14.0, 22.0], 7.0),  # 6 + batch
        ([6.0, 6.0, 6.0, 6.0, 6.0], math.nan),  # never rises
        ([1.0, 2.0, 4.0, 8.0, 16.0], math.nan),  # never flat
    ],
)
def test_elbow(latency: list[float], where: float) -> None:
    assert metrics.elbow([1, 2, 4, 8, 16], latency) == pytest.approx(where, nan_ok=True)


def test_crossing_where_compute_reaches_overhead() -> None:
    assert metrics.crossing([4, 1, 2], [3, 3, 3], [4, 1, 3]) == pytest.approx(2)
    assert metrics.crossing([1, 16], [4, 4], [1, 16]) == pytest.approx(4)  # between two batches that were measured
    assert metrics.crossing([1, 2], [3, 3], [4, 5]) == 1
    assert math.isnan(metrics.crossing([1, 2], [3, 3], [1, 2]))


def test_coverage_bootstrap_is_clustered_and_repeatable() -> None:
    # ten models of ten cells each; nine wholly inside, one wholly outside
    models = np.repeat([f"m{i}" for i in range(10)], 10)
    truth = np.where(models == "m0", 5.0, 1.0)
    found = metrics.coverage(np.zeros(100), np.full(100, 2.0), truth, models, seed=7)
    assert found.share == pytest.approx(0.9)
    # resampled share = 1 - X / 10 with X ~ Binomial(10, 0.1): P(X >= 4) = 1.3 %, P(X >= 3) = 7 %, so 0.7 to 1
    assert (found.low, found.high) == (pytest.approx(0.7), pytest.approx(1.0))
    assert found == metrics.coverage(np.zeros(100), np.full(100, 2.0), truth, models, seed=7)


def test_noise_ignores_cells_without_repeats() -> None:
    found = metrics.noise([1.02, math.nan, 1.04], "two halves")
    assert found.cells == 2
    assert found.median == pytest.approx(0.03)


@pytest.mark.parametrize(("batch", "name"), [(1, "1-9"), (9, "1-9"), (10, "10-99"), (128, "100-999")])
def test_decade(batch: int, name: str) -> None:
    assert metrics.decade(batch) == name


def test_the_fastest_is_judged_where_the_gap_exceeds_the_noise() -> None:
    predicted, measured = [1.0, 2.0, 3.0, 1.0, 5.0, 6.0, 9.0], [1.0, 2.0, 2.0, 4.0, 1.0, 1.05, 3.0]
    found = metrics.fastest(predicted, measured, 0.1, ["a", "a", "b", "b", "close", "close", "alone"])
    assert (found.right, found.clear, found.left_out) == (0.5, 2, 1)
    assert math.isnan(metrics.fastest([1.0], [1.0], 0.1, ["alone"]).right)
