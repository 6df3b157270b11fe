"""Shapes that the library chooses itself, and the figures it prints of a table of products."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from latpred.calibration import choose_shapes, evaluate_kernels
from latpred.calibration.sampling import farthest_points
from latpred.errors import TableError, UnknownGpuError, UsageError

GRID = np.array(
    [
        (m, n, k)
        for m in (1, 2, 4, 8, 16, 32, 48, 64, 128, 192, 256, 512, 1024, 4096)
        for n in (64, 256, 1024, 4096)
        for k in (64, 512, 4096)
    ],
    dtype=float,
)


def microseconds(sizes: np.ndarray) -> np.ndarray:
    """A law of its own: a floor, tiles of 128 by 128 on 40 multiprocessors, and bytes."""
    m, n, k = sizes.T
    tiles = np.ceil(m / 128) * np.ceil(n / 128)
    compute = np.ceil(tiles / 40) * k * 128 * 128 / 6e5
    return 2.5 + np.hypot(compute, 2 * (n * k + m * k + m * n) / 2.4e5)


def rows_of(sizes: np.ndarray) -> np.ndarray:
    m, n, k = sizes.T
    return np.column_stack((m * n * k, 2 * n * k, 2 * m * k, 2 * m * n, m, n, k))


def table(**changes: object) -> pd.DataFrame:
    frame = pd.DataFrame(GRID.astype(int), columns=["m", "n", "k"])
    return frame.assign(system="t4", latency_us=microseconds(GRID), **changes)


def test_only_chosen_shapes_are_timed() -> None:
    asked: list[int] = []

    def measure(indices: np.ndarray) -> np.ndarray:
        asked.extend(indices.tolist())
        return microseconds(GRID[indices])

    chosen = choose_shapes(rows_of(GRID), 40, measure, multiprocessors=40)
    assert asked == chosen.indices.tolist()
    assert len(set(asked)) == 40
    assert chosen.times == pytest.approx(microseconds(GRID[chosen.indices]))


def test_the_first_shapes_stand_for_all() -> None:
    logs = np.log(GRID)
    first = farthest_points(logs, 30)
    assert len(set(first.tolist())) == 30
    nearest = np.min(((logs[:, None, :] - logs[first]) ** 2).sum(axis=2), axis=1)
    arbitrary = np.min(((logs[:, None, :] - logs[:30]) ** 2).sum(axis=2), axis=1)
    assert nearest.mean() < 0.5 * arbitrary.mean()


@pytest.mark.parametrize("budget", [0, 19, len(GRID) + 1])
def test_budgets_that_are_none(budget: int) -> None:
    with pytest.raises(UsageError, match=rf"a budget of {budget} shapes out of {len(GRID)}"):
        choose_shapes(rows_of(GRID), budget, lambda indices: np.ones(len(indices)))


def test_a_table_is_predicted_from_a_part_of_it() -> None:
    rest, unseen = evaluate_kernels(table(source="here"), [60])
    assert (rest.tested, rest.products, rest.budget) == ("the rest", len(GRID) - 60, 60)
    assert (unseen.tested, unseen.system, unseen.source) == ("unseen n, k", "t4", "here")
    assert unseen.products == 2 * 14  # a fifth of 12 pairs, at 14 sizes each
    assert rest.median < 0.05
    assert rest.median <= rest.mean < 0.15
    assert rest.within_10 > 0.75


def test_bad_tables() -> None:
    with pytest.raises(TableError, match=r"no column k, latency_us \(it has: system, m, n\)"):
        evaluate_kernels(table()[["system", "m", "n"]])
    broken = table()
    broken.loc[3, "latency_us"] = -1.0
    with pytest.raises(TableError, match="1 rows hold no positive number, the first at row 3"):
        evaluate_kernels(broken)
    with pytest.raises(UnknownGpuError):
        evaluate_kernels(table().assign(system="abacus"), [30])
