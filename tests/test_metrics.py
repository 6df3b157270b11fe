"""Metrics against numbers worked out by hand; test_ranking holds Kendall tau against scipy."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from latpred.accuracy import metrics


def test_errors_by_hand() -> None:
    errors = metrics.errors([1.2, 2.0, 3.0, 5.0], [1.0, 2.0, 4.0, 5.5], ["a", "a", "b", "b"])
    assert (errors.cells, errors.models, errors.near) == (4, 2, 0.5)  # ordered: 0, 1/11, 0.2, 0.25
    assert errors.median == pytest.approx((1 / 11 + 0.2) / 2)
    assert errors.p90 == pytest.approx(0.2 + 0.7 * 0.05)  # position 2.7 of 0..3
    assert errors.bias == pytest.approx((1.2 * 1.0 * 0.75 * (10 / 11)) ** 0.25 - 1)
    assert metrics.errors([0.0, 2.0], [1.0, 2.0]).bias == -1.0  # without a warning: a baseline may predict no time


def test_figures_of_nothing_are_not_numbers() -> None:
    figures = [
        *(metrics.errors([], []).median, metrics.errors([], []).bias, metrics.rank([], [], 0.0).tau),
        *(metrics.coverage([], [], [], []).share, metrics.noise([math.nan], "").p90, metrics.conformal([])),
        metrics.speedups([], []).median,
        *(metrics.fastest([1.0], [1.0], 0.1, ["alone"]).right, metrics.curve_point([math.nan], [1.0], "").median),
    ]
    assert all(math.isnan(figure) for figure in figures)
    assert metrics.errors([], []).cells == 0


def test_curve_points_speed_ups_and_noise_by_hand() -> None:
    point = metrics.curve_point([4, 2, math.nan], [8, 2, 3], "knee")
    assert (point.curves, point.one_sided, point.median, point.good) == (2, 1, 1.5, 1 / 3)
    assert metrics.speedups([2.0, 3.0], [2.0, 2.0]) == metrics.Speedups(cells=2, median=0.25, near=0.5)
    noise = metrics.noise([1.02, math.nan, 1.04], "two halves")  # a cell without repeats does not count
    assert (noise.cells, noise.median) == (2, pytest.approx(0.03))


@pytest.mark.parametrize(
    ("predicted", "measured", "noise", "groups", "tau", "pairs"),
    [
        ([2.0, 1.0, 3.0], [1.00, 1.01, 5.0], 0.02, None, 1.0, 2),  # those swapped are only 1 % apart
        ([1, 2, 9, 8], [1, 2, 3, 4], 0.0, [1, 1, 2, 2], 0.0, 2),  # only pairs of one group: one right, one wrong
        ([1, 1, 2], [1, 2, 3], 0.0, None, 2 / 3, 3),  # a predicted tie counts as nothing
    ],
)
def test_rank_by_hand(
    predicted: list[float], measured: list[float], noise: float, groups: list[int] | None, tau: float, pairs: int
) -> None:
    rank = metrics.rank(predicted, measured, noise, groups)
    assert (rank.tau, rank.pairs) == (pytest.approx(tau), pairs)
    if noise:
        assert (rank.left_out, rank.all_pairs) == (1, pytest.approx(1 / 3))


BATCHES = [1, 2, 4, 8, 16]


@pytest.mark.parametrize(
    ("reader", "columns", "where"),
    [
        # flat 10, then rising with batch: the log-log line from (4, 10) to (8, 20) passes 15 at 4 * 1.5
        (metrics.knee, ([1, 2, 4, 8], [10, 10, 10, 20]), 6.0),
        (metrics.knee, ([8, 1, 4, 2], [20, 10, 10, 10]), 6.0),
        (metrics.knee, ([1, 2, 4], [10, 10, 11]), math.nan),
        (metrics.elbow, (BATCHES, [6, 6, 6, 8, 16]), 6.0),  # max(6, batch)
        (metrics.elbow, (BATCHES, [7, 8, 10, 14, 22]), 7.0),  # 6 + batch
        (metrics.elbow, (BATCHES, [6, 6, 6, 6, 6]), math.nan),  # never rises
        (metrics.elbow, (BATCHES, [1, 2, 4, 8, 16]), math.nan),  # never flat
        (metrics.crossing, ([4, 1, 2], [3, 3, 3], [4, 1, 3]), 2.0),
        (metrics.crossing, ([1, 16], [4, 4], [1, 16]), 4.0),
        (metrics.crossing, ([1, 2], [3, 3], [4, 5]), 1.0),
        (metrics.crossing, ([1, 2], [3, 3], [1, 2]), math.nan),
    ],
)
def test_batches_read_off_curves(reader: Callable[..., float], columns: tuple[list[int], ...], where: float) -> None:
    assert reader(*columns) == pytest.approx(where, nan_ok=True)


def test_coverage_bootstrap_is_clustered_and_repeatable() -> None:
    # ten models of ten cells each; nine wholly inside, one wholly outside
    models = np.repeat([f"m{i}" for i in range(10)], 10)
    truth = np.where(models == "m0", 5.0, 1.0)
    coverage = metrics.coverage(np.zeros(100), np.full(100, 2.0), truth, models)
    assert coverage.share == pytest.approx(0.9)
    # resampled share = 1 - X / 10 with X ~ Binomial(10, 0.1): P(X >= 4) = 1.3 %, P(X >= 3) = 7 %, so 0.7 to 1
    assert (coverage.low, coverage.high) == (pytest.approx(0.7), pytest.approx(1.0))
    assert coverage == metrics.coverage(np.zeros(100), np.full(100, 2.0), truth, models)


def test_the_fastest_counts_where_the_gap_exceeds_the_noise() -> None:
    predicted, measured = [1.0, 2.0, 3.0, 1.0, 5.0, 6.0, 9.0], [1.0, 2.0, 2.0, 4.0, 1.0, 1.05, 3.0]
    fastest = metrics.fastest(predicted, measured, 0.1, ["a", "a", "b", "b", "close", "close", "alone"])
    assert (fastest.right, fastest.clear, fastest.left_out) == (0.5, 2, 1)


@pytest.mark.parametrize(("models", "rows"), [(8, 1), (8, 8), (20, 4)])
@pytest.mark.parametrize("together", [0.0, 0.7])
def test_half_widths_hold_nine_in_ten_of_the_next_model_s_rows(models: int, rows: int, together: float) -> None:
    """Whether rows of a model err alike or each for itself; one wide row does not set the width of all."""
    draw, inside, widths = np.random.default_rng(0), [], []
    for _ in range(300):
        errors = draw.normal(size=(models + 1, 1)) * together + draw.normal(size=(models + 1, rows)) * (1 - together)
        width = metrics.half_width(errors[:-1].ravel(), np.repeat(np.arange(models), rows))
        inside.append(np.mean(np.abs(errors[-1]) <= width))
        widths.append(width / np.hypot(together, 1 - together))
    assert 0.87 < np.mean(inside) < 0.945
    assert 1.6 < np.median(widths) < 2.0
