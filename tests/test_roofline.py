"""Kernel fits: what they recover from samples, their numbers by hand, loops and tiles."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from factories import kernel_fit
from threadpoolctl import threadpool_info, threadpool_limits

from latpred.fit import roofline
from latpred.fit.residual import fit_residual
from latpred.fit.roofline import fit_kernel, fit_roofline
from latpred.graph.features import LOOP_COUNTS, layout, read
from latpred.prediction.kernel_times import PRIOR, KernelModel, evaluate, tiled
from latpred.profile.document import KernelFit

PEAK, BANDWIDTH, FLOOR = 5e4, 2e3, 3.0


def rows_of(family: str, **columns: object) -> np.ndarray:
    """Rows of a family by the names of their columns; 1 of each other, without MACs and weights."""
    named = {"macs": 0.0, "weight_bytes": 0.0, **columns}
    return np.column_stack(np.broadcast_arrays(*(named.get(name, 1.0) for name in layout(family).columns))).astype(
        float
    )


def products(m: object, n: object, k: object, size: int = 4) -> np.ndarray:
    m, n, k = np.broadcast_arrays(*(np.asarray(side, float) for side in (m, n, k)))
    moved = {"weight_bytes": size * n * k, "read_bytes": size * m * k, "write_bytes": size * m * n}
    return rows_of("gemm", macs=m * n * k, m=m, n=n, k=k, **moved)


def gemm_rows(count: int, seed: int = 0, largest: int = 4096) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return products(*np.exp(rng.uniform(np.log(8), np.log(largest), (3, count))).round())


def gemm_times(rows: np.ndarray) -> np.ndarray:
    macs, weights, read, written = rows[:, :4].T
    return FLOOR + np.hypot(macs / PEAK, (weights + read + written) / BANDWIDTH)


def elementwise_rows(numel: np.ndarray) -> np.ndarray:
    return rows_of("elementwise", read_bytes=4 * numel, write_bytes=4 * numel, numel=numel)


def test_the_physics_comes_back_from_noisy_samples() -> None:
    rows = gemm_rows(150)
    noise = np.exp(np.random.default_rng(1).normal(0, 0.02, 150))
    fit = fit_kernel("gemm", rows, gemm_times(rows) * noise)
    assert fit.floor_us == pytest.approx(FLOOR, rel=0.1)
    assert fit.macs_per_us == pytest.approx(PEAK, rel=0.1)
    assert fit.activation_bytes_per_us == pytest.approx(BANDWIDTH, rel=0.15)
    assert fit.weight_bytes_per_us == pytest.approx(BANDWIDTH, rel=0.15)
    unseen = gemm_rows(200, seed=2)
    errors = np.abs(evaluate(fit, unseen) / gemm_times(unseen) - 1)
    assert np.median(errors) < 0.015
    assert fit.error < 0.04
    sweep = evaluate(fit, products(2.0 ** np.arange(13), 512, 512))
    assert (np.diff(sweep) > -0.05 * sweep[:-1]).all()  # it grows with the batch
    assert sweep[-1] > 10 * sweep[0]


def test_a_datasheet_says_what_small_samples_cannot() -> None:
    """Six elementwise kernels too small to tell a bandwidth of 12 GB/s."""
    numel = np.array([8, 16, 24, 32, 48, 64, 100_000_000])
    rows = elementwise_rows(numel)
    times = (2.0 + 8 * numel / 12_000.0) * np.array([1.05, 0.97, 1.0, 1.06, 0.96, 1.02, 1.0])
    known = kernel_fit("elementwise", floor_us=4.0, activation_bytes_per_us=15_000.0, macs_per_us=0.0)
    large = [
        float(evaluate(fit_kernel("elementwise", rows[:6], times[:6], prior=prior), rows[6:])[0])
        for prior in (None, known)
    ]
    assert abs(np.log(large[1] / times[6])) < 0.3 < abs(np.log(large[0] / times[6]))


def test_the_residual_learns_what_the_roofline_cannot_say() -> None:
    rows, unseen = gemm_rows(250), gemm_rows(200, seed=3)

    def times(of: np.ndarray) -> np.ndarray:
        return gemm_times(of) * (1.0 + 0.4 * np.sin(np.log(of[:, 5])))

    wild = times(rows)
    wild[::15] *= 8.0  # a few of which do little
    for seen, most in ((times(rows), 0.03), (wild, 0.06)):
        errors = np.abs(evaluate(fit_kernel("gemm", rows, seen), unseen) / times(unseen) - 1)
        assert np.median(errors) < most


@pytest.mark.parametrize("count", [1, 2, 5, 15])
def test_few_samples_still_give_sane_times(count: int) -> None:
    rows = gemm_rows(count)
    fit = fit_kernel("gemm", rows, gemm_times(rows))
    found = KernelModel(fit).times(gemm_rows(50, seed=5))
    assert np.isfinite([found.us, found.log_std]).all()
    assert (found.us > 0).all()
    assert evaluate(fit, rows) == pytest.approx(gemm_times(rows), rel=0.3)


def test_far_away_the_roofline_speaks_alone_and_says_that_it_is_unsure() -> None:
    rows = gemm_rows(150, largest=512)
    wiggly = gemm_times(rows) * (1.0 + 0.4 * np.sin(3 * np.log(rows[:, 5])))
    fit = fit_kernel("gemm", rows, wiggly)
    far = products(1e7, 1e7, 1e7)
    bare = msgspec.structs.replace(fit, points=(), targets=(), noise_factors=())
    assert evaluate(fit, far) == pytest.approx(evaluate(bare, far), rel=0.1)
    model = KernelModel(fit)
    assert model.times(far).log_std[0] > 1.5 * np.median(model.times(rows).log_std)


def test_a_fit_takes_one_thread_of_blas_and_gives_the_others_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def threads() -> set[int]:
        return {library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"}

    def noted(*arguments: Any) -> KernelFit:
        within.append(threads())
        return fit_residual(*arguments)

    within: list[set[int]] = []
    monkeypatch.setattr(roofline, "fit_residual", noted)
    with threadpool_limits(2, "blas"):
        before, rows = threads(), gemm_rows(20)
        fit_kernel("gemm", rows, gemm_times(rows))
        assert (within, threads()) == ([{1}], before)


def test_weights_decide_between_samples_that_disagree() -> None:
    rows = np.repeat(gemm_rows(40), 2, axis=0)
    times = gemm_times(rows)
    times[1::2] *= 2.0
    fit = fit_kernel("gemm", rows, times, np.tile([1.0, 1e-3], 40))
    assert evaluate(fit, rows[::2]) == pytest.approx(times[::2], rel=0.05)


# 3e6 MACs at 1e6 per us, half throughput at m = 10: 6 us; 8e3 bytes at 1e3 per us: 8 us; quadrature 10, floor 2.
SMALL = [3e6, 4e3, 2e3, 2e3, 10.0, 64.0, 64.0]
# One tile of 128 x 128 on 64 multiprocessors, half reached at 0.5 waves: 1 + 0.5 / (1 / 64) = 33 times as long.
ONE_TILE = [1e6, 0.0, 0.0, 0.0, 128.0, 128.0, 64.0]


@pytest.mark.parametrize(
    ("row", "changes", "us"),
    [
        (SMALL, {"saturation": {"m": 10.0}}, 12.0),
        (SMALL, {"saturation": {"m": 10.0}, "scale": 1.5}, 18.0),
        (SMALL, {"saturation": {"m": 40.0, "few": 30.0}}, 12.0),
        (ONE_TILE, {"floor_us": 0.0, "saturation": {"waves": 0.5}, "multiprocessors": 64}, 33.0),
        (ONE_TILE, {"floor_us": 0.0, "saturation": {"waves": 0.5}, "multiprocessors": 0}, 1.0),
    ],
)
def test_by_hand(row: list[float], changes: dict[str, object], us: float) -> None:
    assert evaluate(kernel_fit("gemm", **changes), np.array([row])) == pytest.approx([us])


def grid(*axes: tuple[float, ...]) -> list[np.ndarray]:
    return [axis.ravel() for axis in np.meshgrid(*axes)]


def moved(numel: np.ndarray) -> dict[str, np.ndarray]:
    return {"read_bytes": 4 * numel, "write_bytes": 4 * numel, "numel": numel}


NUMEL, COSTLY = grid((1e3, 1e4, 1e5, 1e6), (0.0, 1.0, 3.0, 9.0))
VALUES, MATRICES = grid((5e4, 2e5, 1e6), (0.0, 8.0, 64.0, 512.0))
ROWS, STEPS, HIDDEN = grid((1.0, 2.0, 8.0), (8.0, 50.0, 300.0), (16.0, 64.0))
PLANES, SIDE, WINDOW = grid((8.0, 64.0, 512.0), (4.0, 12.0, 32.0), (4.0, 9.0))
MAPS, PIXELS, CHANNELS = grid((1.0, 4.0), (1.0, 4.0, 9.0, 16.0, 49.0), (32.0, 128.0))
MANY = np.geomspace(64, 1e6, 60).round()
# Columns of each family, what loops over them take, and which of its counts that is.
LOOPS = {
    "generated": (
        {**moved(NUMEL), **dict.fromkeys(LOOP_COUNTS["generated"], 0.0), "math": COSTLY * NUMEL},
        2.0 + np.hypot(8 * NUMEL / 2e4, COSTLY * NUMEL * 1.4e-3),
        {LOOP_COUNTS["generated"].index("math"): 1.4e-3},
    ),
    "copy.transpose": (
        {**moved(VALUES), "matrices": MATRICES},
        1.0 + np.hypot(8 * VALUES / 1e4, 1.2 * MATRICES),
        {0: 1.2},
    ),
    "rnn": (  # steps of several rows take a time of their own
        {"macs": 4 * ROWS * STEPS * HIDDEN**2, "weight_bytes": 16 * HIDDEN**2, "batch": ROWS, "steps": STEPS}
        | {"hidden": HIDDEN, "inputs": HIDDEN, "calls": STEPS, "reread": STEPS * HIDDEN**2, "weights": 4 * HIDDEN**2},
        STEPS * np.where(ROWS > 1.0, 9.0, 4.0) + 4 * ROWS * STEPS * HIDDEN**2 / 1e5,
        {0: 4.0, 3: 5.0},
    ),
    "pooling.avg": (  # windows that overlap
        {"channels": PLANES, "h_out": SIDE, "w_out": SIDE, "window": WINDOW},
        1.0 + PLANES * SIDE**2 * (2e-3 + 2e-4 * WINDOW),
        {0: 2e-3, 1: 2e-4},
    ),
    "conv_native": (  # maps that fill no vector
        {"macs": MAPS * PIXELS * CHANNELS**2, "weight_bytes": 4 * CHANNELS**2, "batch": MAPS}
        | {"c_in": CHANNELS, "c_out": CHANNELS, "h_out": np.sqrt(PIXELS), "w_out": np.sqrt(PIXELS)},
        1.0 + MAPS * CHANNELS**2 / PEAK * np.where((PIXELS > 1) & (PIXELS < 16), PIXELS + 30.0, PIXELS),
        {1: 30.0 / PEAK},
    ),
    # A second thread helps from 32,768 values on.
    "elementwise.sin": (moved(MANY), 1.0 + 1e-3 * MANY / np.ceil(MANY / 32768), {0: 1e-3}),
}


@pytest.mark.parametrize("family", LOOPS)
def test_what_loops_do_takes_time_of_its_own(family: str) -> None:
    columns, times, loop_us = LOOPS[family]
    rows = rows_of(family, **columns)
    fit = fit_roofline(family, rows, times, np.ones(len(rows)), np.zeros(len(rows)))
    assert {place: fit.loop_us[place] for place in loop_us} == pytest.approx(loop_us, rel=0.1)
    assert evaluate(fit, rows) == pytest.approx(times, rel=0.1)


def test_a_kernel_that_its_dispatch_hides_gets_no_floor_from_longer_ones() -> None:
    numel = np.geomspace(8, 1e6, 40)
    rows, true_us = elementwise_rows(numel), 8 * numel / BANDWIDTH
    seen_us = np.where(true_us < 0.5, 0.02, true_us)  # what is left of a call of 3 us, where that is next to nothing
    beside = fit_kernel("elementwise", rows, seen_us, beside=np.full(40, 3.0))
    assert evaluate(beside, rows[:1])[0] < 0.2
    assert evaluate(beside, rows[-5:]) == pytest.approx(true_us[-5:], rel=0.1)


# Tiled products behave as on GPUs, their constants come back from measurements, and profiles carry them.
MULTIPROCESSORS = 64
CONSTANTS = {"rate": 60e6, "bandwidth": 1.2e6, **{name: start for name, (start, _) in PRIOR.items()}}


def halves(*sizes: tuple[int, int, int]) -> np.ndarray:
    return products(*np.transpose(sizes), size=2)


def times_of(rows: np.ndarray, **special: float) -> np.ndarray:
    inputs = read("gemm", rows)
    return FLOOR + tiled(CONSTANTS | special, inputs.work, inputs.product, MULTIPROCESSORS).us


def random_rows(count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return halves(*np.exp(rng.uniform(np.log([1, 64, 64]), np.log([8192] * 3), (count, 3))).round())


def test_large_products_come_near_the_rate_and_one_row_more_than_a_full_round_costs_a_round() -> None:
    side = 16384
    above = times_of(halves((side, side, side)))[0] - FLOOR
    idle = 1 + CONSTANTS["rows"] / 256 + CONSTANTS["cols"] / 128
    assert side**3 / above == pytest.approx(CONSTANTS["rate"] / idle, rel=0.1)
    full = times_of(halves((2048, 4096, 4096), (2049, 4096, 4096), (2040, 4096, 4096)))
    assert full[1] > 1.03 * full[0]
    assert full[2] == pytest.approx(full[0], rel=0.01)


def test_products_of_a_gpu_are_fitted_by_their_tiles_where_there_are_samples_enough() -> None:
    rows, fresh = random_rows(90), random_rows(300, seed=2)
    fit = fit_kernel("gemm", rows, times_of(rows), multiprocessors=MULTIPROCESSORS)
    assert set(fit.tiling) == {"rate", "bandwidth", *PRIOR}
    assert fit.features[-3:] == ("tile_rows", "tile_cols", "parts")
    assert fit.jumps
    errors = np.abs(evaluate(fit, fresh) / times_of(fresh) - 1)
    plain = fit_kernel("gemm", rows, times_of(rows))
    assert np.mean(errors) < 0.5 * np.mean(np.abs(evaluate(plain, fresh) / times_of(fresh) - 1))
    again = msgspec.json.decode(msgspec.json.encode(fit), type=KernelFit)
    assert evaluate(again, fresh) == pytest.approx(evaluate(fit, fresh), rel=1e-9)
    few = rows[: roofline.FEWEST_FOR_TILES - 1]
    assert fit_kernel("gemm", few, times_of(few), multiprocessors=MULTIPROCESSORS).tiling == {}


def test_a_library_that_cuts_no_small_product_is_noticed() -> None:
    rows, small = random_rows(300), halves((2, 64, 8192), (8, 64, 2048), (8, 64, 8192))
    whole = times_of(small, whole_macs=2.0**21)
    assert whole / times_of(small) == pytest.approx([5.7, 2.2, 1.0], rel=0.02)
    fit = fit_kernel("gemm", rows, times_of(rows, whole_macs=2.0**21), multiprocessors=MULTIPROCESSORS)
    assert fit.tiling["whole_macs"] == pytest.approx(2**21, rel=0.02)
    assert evaluate(fit, small) == pytest.approx(whole, rel=0.25)
