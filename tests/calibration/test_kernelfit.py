"""Kernel fits: one for each family, special ones where samples are enough."""

from __future__ import annotations

import factories
import numpy as np
import pytest

from latpred.calibration.fitting import kernel_fit
from latpred.calibration.fitting.kernel_fit import KernelSample
from latpred.prediction.kernel_times import evaluate


def sample(numel: int, family: str = "elementwise.add", factor: float = 1.0) -> KernelSample:
    """A sum of `numel` elements: 2 us and 1000 bytes a microsecond, of which `factor` times as many."""
    row = (0.0, 0.0, 8.0 * numel, 4.0 * numel, float(numel), 2.0)
    return KernelSample(family, row, 2.0 + factor * 12.0 * numel / 1000.0)


def spread(count: int, family: str, factor: float = 1.0) -> list[KernelSample]:
    return [sample(int(numel), family, factor) for numel in np.geomspace(1e3, 1e7, count)]


def test_a_known_kernel_comes_back() -> None:
    fits = kernel_fit.fit_kernels(spread(30, "elementwise.add"))
    fit = fits["elementwise"]
    asked = [sample(numel) for numel in (5_000, 70_000, 3_000_000)]
    found = evaluate(fit, np.array([one.row for one in asked]))
    assert found == pytest.approx([one.us for one in asked], rel=0.05)


def test_a_special_family_with_many_samples_has_a_fit_of_its_own() -> None:
    many = kernel_fit.FEWEST_LEAF
    fits = kernel_fit.fit_kernels([*spread(many, "elementwise.add"), *spread(many - 1, "elementwise.gelu", 3.0)])
    assert set(fits) == {"elementwise", "elementwise.add"}
    assert set(fits["elementwise"].leaf_scales) == {"elementwise.gelu"}


def test_few_samples_borrow_the_family_s_fit_and_scale_it() -> None:
    fits = kernel_fit.fit_kernels([*spread(60, "elementwise.add"), *spread(12, "elementwise.gelu", 3.0)])
    assert "elementwise.gelu" not in fits
    # three times the others' time, drawn towards the family's
    assert 1.2 < fits["elementwise"].leaf_scales["elementwise.gelu"] <= 3.5


def pooled(count: int, family: str, factor: float = 1.0) -> list[KernelSample]:
    """Poolings of so many numbers, 2 us and what `factor` times their bytes take at 1000 a microsecond."""
    sizes = [float(round(size)) for size in np.geomspace(1e3, 1e7, count)]
    return [
        KernelSample(family, (0.0, 0.0, 8 * n, 4 * n, 1.0, 4.0, 1.0, n / 4, 2.0), 2.0 + factor * 0.012 * n)
        for n in sizes
    ]


@pytest.mark.parametrize("count", [5, 20])
def test_the_maximum_along_a_line_is_told_from_that_over_a_plane(count: int) -> None:
    along, flat = pooled(count, "pooling.max.1d", 0.1), pooled(40, "pooling.max")
    fits = kernel_fit.fit_kernels([*flat, *along, *pooled(40, "pooling.avg", 0.5)])
    few = "pooling.max.1d" not in fits
    assert few == (count < kernel_fit.APART["pooling.max.1d"])
    # few of them are a share of what their like takes, which has a fit of its own
    scale = fits["pooling.max"].leaf_scales["pooling.max.1d"] if few else 1.0
    assert scale < 0.6 or not few
    fit = fits["pooling.max" if few else "pooling.max.1d"]
    row = along[-1].row
    found = fit.floor_us + scale * (evaluate(fit, np.array([row]))[0] - fit.floor_us)
    assert found == pytest.approx(scale * flat[-1].us if few else along[-1].us, rel=0.15)
    assert evaluate(fits["pooling.max"], np.array([flat[-1].row]))[0] == pytest.approx(flat[-1].us, rel=0.1)


@pytest.mark.parametrize(("count", "fitted"), [(kernel_fit.FEWEST - 1, False), (kernel_fit.FEWEST, True)])
def test_a_family_with_too_few_samples_is_left_to_borrow(count: int, fitted: bool) -> None:
    fits = kernel_fit.fit_kernels([*spread(30, "elementwise.add"), *spread(count, "softmax")])
    assert ("softmax" in fits) is fitted
    assert "elementwise" in fits
    assert kernel_fit.fit_kernels([]) == {}


def test_repeated_rows_are_one_row_with_their_median() -> None:
    once = spread(30, "elementwise")
    outlier = [one._replace(us=100.0 * one.us) for one in once[:1]]
    # thrice the same row, one of them a hundred times too slow: the median is the row's time
    repeated = kernel_fit.fit_kernels([*once, once[0], *outlier])["elementwise"]
    row = np.array([once[0].row])
    assert len(repeated.points) == len(kernel_fit.fit_kernels(once)["elementwise"].points)
    assert evaluate(repeated, row)[0] == pytest.approx(once[0].us, rel=0.05)


def test_weights_of_a_repeated_row_add_up_to_four() -> None:
    rows, times, weights, _ = kernel_fit._averaged(
        [sample(100)] * 9 + [sample(200)] * 2 + [sample(300)._replace(weight=0.3)]
    )
    assert times.tolist() == pytest.approx([3.2, 4.4, 5.6])
    assert weights.tolist() == pytest.approx([4.0, 2.0, 0.3])
    assert rows[:, 4].tolist() == [100.0, 200.0, 300.0]


def test_the_row_of_an_op() -> None:
    op = factories.linear(rows=2, width=8)
    # at batch 3: 6 rows of 8 by 8
    moved = 4.0 * 6 * 8
    assert kernel_fit.row_of(op, 3) == (6.0 * 64, 256.0, moved, moved, 6.0, 8.0, 8.0)
    assert kernel_fit.row_of(op, 3, resident=True) == (6.0 * 64, 0.0, moved + 256.0, moved, 6.0, 8.0, 8.0)
