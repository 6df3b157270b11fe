"""Tiled products: the law behaves as GPUs do, its constants come back from measurements, and profiles carry them."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from factories import kernel_fit

from latpred.fit import roofline
from latpred.fit.residual import fit_residual
from latpred.fit.roofline import RooflineRegressor
from latpred.graph.features import read
from latpred.prediction.kernel_times import PRIOR, TILES, KernelModel, evaluate, tiled
from latpred.profile.document import KernelFit

MULTIPROCESSORS = 64
CONSTANTS = {"rate": 60e6, "bandwidth": 1.2e6, **{name: start for name, (start, _) in PRIOR.items()}}
FLOOR = 3.0


def rows_of(sizes: np.ndarray) -> np.ndarray:
    m, n, k = np.asarray(sizes, dtype=float).T
    return np.column_stack((m * n * k, 2 * n * k, 2 * m * k, 2 * m * n, m, n, k))


def times_of(rows: np.ndarray, **special: float) -> np.ndarray:
    inputs = read("gemm", rows)
    return FLOOR + tiled(CONSTANTS | special, inputs.work, inputs.product, MULTIPROCESSORS).us


def random_rows(count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.uniform(np.log([1, 64, 64]), np.log([8192, 8192, 8192]), (count, 3))).round()
    return rows_of(sizes)


def test_large_products_come_near_the_rate() -> None:
    side = 16384
    above = times_of(rows_of([(side, side, side)]))[0] - FLOOR
    idle = 1 + CONSTANTS["rows"] / 256 + CONSTANTS["cols"] / 128
    assert side**3 / above == pytest.approx(CONSTANTS["rate"] / idle, rel=0.1)


def test_one_row_more_than_a_full_round_costs_a_round() -> None:
    full = times_of(rows_of([(2048, 4096, 4096), (2049, 4096, 4096), (2040, 4096, 4096)]))
    assert full[1] > 1.03 * full[0]
    assert full[2] == pytest.approx(full[0], rel=0.01)


def test_a_long_sum_with_few_results_is_split() -> None:
    inputs = read("gemm", rows_of([(64, 64, 65536), (4096, 4096, 4096)]))
    found = tiled(CONSTANTS, inputs.work, inputs.product, MULTIPROCESSORS)
    parts = np.exp(found.logs[:, 2])
    assert parts[0] > 4
    assert parts[1] == pytest.approx(1.0)
    assert {tuple(row) for row in np.exp(found.logs[:, :2]).round().tolist()} <= set(TILES)
    assert (found.memory_us <= found.us).all()


def test_products_of_a_gpu_are_fitted_by_their_tiles() -> None:
    rows, fresh = random_rows(90), random_rows(300, seed=2)
    model = RooflineRegressor("gemm", MULTIPROCESSORS).fit(rows, times_of(rows))
    fit = model.fit_
    assert set(fit.tiling) == {"rate", "bandwidth", *PRIOR}
    assert fit.features[-3:] == ("tile_rows", "tile_cols", "parts")
    assert fit.jumps
    errors = np.abs(model.predict(fresh) / times_of(fresh) - 1)
    plain = RooflineRegressor("gemm", 0).fit(rows, times_of(rows))
    assert np.mean(errors) < 0.5 * np.mean(np.abs(plain.predict(fresh) / times_of(fresh) - 1))
    again = msgspec.json.decode(msgspec.json.encode(fit), type=KernelFit)
    assert evaluate(again, fresh) == pytest.approx(model.predict(fresh), rel=1e-9)
    assert np.diag(KernelModel(fit).covariance(fresh)).min() > -1e-9


def test_a_library_that_cuts_no_small_product_is_noticed() -> None:
    rows, small = random_rows(300), rows_of([(2, 64, 8192), (8, 64, 2048), (8, 64, 8192)])
    whole = times_of(small, whole_macs=2.0**21)
    assert whole / times_of(small) == pytest.approx([5.7, 2.2, 1.0], rel=0.02)
    fit = RooflineRegressor("gemm", MULTIPROCESSORS).fit(rows, times_of(rows, whole_macs=2.0**21)).fit_
    assert fit.tiling["whole_macs"] == pytest.approx(2**21, rel=0.02)
    assert evaluate(fit, small) == pytest.approx(whole, rel=0.25)


def test_without_multiprocessors_or_samples_a_roofline_does() -> None:
    few = random_rows(roofline.FEWEST - 1)
    assert RooflineRegressor("gemm", MULTIPROCESSORS).fit(few, times_of(few)).fit_.tiling == {}
    assert kernel_fit().tiling == {}


@pytest.mark.parametrize("jumps", [False, True])
def test_a_residual_finds_which_of_two_features_matters(jumps: bool) -> None:
    rng = np.random.default_rng(0)
    points = rng.uniform(0, 8, (120, 2))
    steps = 0.1 * (np.floor(points[:, 0]) % 2) + 0.01 * rng.standard_normal(120)
    found = fit_residual(points, steps - steps.mean(), np.ones(120), 120, jumps=jumps)
    assert found.length_scales[1] > 3 * found.length_scales[0]
