"""RooflineRegressor: what it recovers, how it behaves as an estimator, its numbers without scikit-learn, and tiles."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from factories import kernel_fit
from sklearn.base import clone
from sklearn.model_selection import cross_val_score
from threadpoolctl import threadpool_info, threadpool_limits

from latpred.fit import roofline
from latpred.fit.residual import fit_residual
from latpred.fit.roofline import RooflineRegressor
from latpred.graph.features import LOOP_COUNTS, layout, read
from latpred.prediction.kernel_times import PRIOR, TILES, KernelModel, evaluate, tiled
from latpred.profile import store
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


def depthwise_rows(batch: object, channels: object, side: int = 3) -> np.ndarray:
    """3x3 depthwise convolutions on square maps."""
    planes = np.asarray(batch, float) * channels
    numbers = {"batch": batch, "c_in": channels, "c_out": channels, "groups": channels, "kernel_d": 0}
    sides = dict.fromkeys(("h_in", "w_in", "h_out", "w_out"), side) | dict.fromkeys(("kernel_h", "kernel_w"), 3)
    moved = dict.fromkeys(("read_bytes", "write_bytes"), 4 * planes * side**2)
    weights = 4 * 9 * np.asarray(channels, float)
    return rows_of(
        "conv_depthwise", macs=planes * 9 * side**2, weight_bytes=weights, **moved, stride=1, **numbers, **sides
    )


def test_channels_of_single_samples_do_not_make_batches_of_depthwise_convolutions_slow() -> None:
    channels = np.array([32, 64, 128, 256, 512, 1024] * 4)
    rows = np.concatenate([depthwise_rows(1, channels[side::4], side) for side in (3, 6, 12, 24)])
    weights, read, written = rows[:, 1:4].T
    fit = RooflineRegressor("conv_depthwise").fit(rows, 60.0 + weights / 900.0 + (read + written) / 2e4).fit_
    assert evaluate(fit, depthwise_rows(8, 1152))[0] == pytest.approx(60.0 + 46.1 + 33.2, rel=0.3)


def test_the_physics_comes_back_from_noisy_samples() -> None:
    rows = gemm_rows(150)
    noise = np.exp(np.random.default_rng(1).normal(0, 0.02, 150))
    fit = RooflineRegressor("gemm").fit(rows, gemm_times(rows) * noise).fit_
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
        float(RooflineRegressor("elementwise", prior=prior).fit(rows[:6], times[:6]).predict(rows[6:])[0])
        for prior in (None, known)
    ]
    assert abs(np.log(large[1] / times[6])) < 0.3 < abs(np.log(large[0] / times[6]))


def test_one_odd_kernel_does_not_outweigh_a_datasheet() -> None:
    """Products in bf16 that an H100 was timed at: one of four rows, which sums 2,928 values, has all the weights."""
    sizes = [(386, 16, 616), (4819, 216, 464), (3063, 2440, 1048), (37, 32, 88), (4, 144, 2928), (3253, 240, 128)]
    known = store.load("h100").kernels["bf16"]["gemm"]
    times = np.array([3.3, 5.9, 30.5, 2.6, 6.3, 3.5])
    fit = RooflineRegressor("gemm", 132, prior=known).fit(products(*np.transpose(sizes), size=2), times).fit_
    assert fit.weight_bytes_per_us > 0.5 * known.weight_bytes_per_us


def test_the_residual_learns_what_the_roofline_cannot_say() -> None:
    rows, unseen = gemm_rows(250), gemm_rows(200, seed=3)

    def times(of: np.ndarray) -> np.ndarray:
        return gemm_times(of) * (1.0 + 0.4 * np.sin(np.log(of[:, 5])))

    wild = times(rows)
    wild[::15] *= 8.0  # a few of which do little
    for seen, most in ((times(rows), 0.03), (wild, 0.06)):
        errors = np.abs(RooflineRegressor("gemm").fit(rows, seen).predict(unseen) / times(unseen) - 1)
        assert np.median(errors) < most


@pytest.mark.parametrize("jumps", [False, True])
def test_a_residual_finds_which_of_two_features_matters(jumps: bool) -> None:
    rng = np.random.default_rng(0)
    points = rng.uniform(0, 8, (120, 2))
    steps = 0.1 * (np.floor(points[:, 0]) % 2) + 0.01 * rng.standard_normal(120)
    found = fit_residual(kernel_fit(jumps=jumps), points, steps - steps.mean(), np.ones(120), 120)
    assert found.length_scales[1] > 3 * found.length_scales[0]


@pytest.mark.parametrize("count", [1, 2, 5, 15])
def test_few_samples_still_give_sane_times(count: int) -> None:
    rows = gemm_rows(count)
    model = RooflineRegressor("gemm").fit(rows, gemm_times(rows))
    times, spread = model.predict(gemm_rows(50, seed=5), return_std=True)
    assert np.isfinite([times, spread]).all()
    assert (times > 0).all()
    assert model.predict(rows) == pytest.approx(gemm_times(rows), rel=0.3)


def test_far_away_the_roofline_speaks_alone_and_says_that_it_is_unsure() -> None:
    rows = gemm_rows(150, largest=512)
    wiggly = gemm_times(rows) * (1.0 + 0.4 * np.sin(3 * np.log(rows[:, 5])))
    fit = RooflineRegressor("gemm").fit(rows, wiggly).fit_
    far = products(1e7, 1e7, 1e7)
    bare = msgspec.structs.replace(fit, points=(), targets=(), noise_factors=())
    assert evaluate(fit, far) == pytest.approx(evaluate(bare, far), rel=0.1)
    model = KernelModel(fit)
    assert model.times(far).log_std[0] > 1.5 * np.median(model.times(rows).log_std)


def test_an_estimator_like_any_other() -> None:
    asked = {"family": "gemm", "multiprocessors": 8, "max_points": 50, "hyper_points": 40, "prior": None}
    model = RooflineRegressor(**asked)
    assert clone(model).get_params() == asked
    rows = gemm_rows(60)
    assert cross_val_score(model, rows, np.log(gemm_times(rows)) + 5.0, cv=3).shape == (3,)
    assert model.fit(rows, gemm_times(rows)) is model
    assert (model.n_features_in_, len(model.fit_.points)) == (7, 50)
    assert model.score(rows, gemm_times(rows)) > 0.99


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
        RooflineRegressor("gemm").fit(rows, gemm_times(rows))
        assert (within, threads()) == ([{1}], before)


def test_weights_decide_between_samples_that_disagree() -> None:
    rows = np.repeat(gemm_rows(40), 2, axis=0)
    times = gemm_times(rows)
    times[1::2] *= 2.0
    model = RooflineRegressor("gemm").fit(rows, times, sample_weight=np.tile([1.0, 1e-3], 40))
    assert model.predict(rows[::2]) == pytest.approx(times[::2], rel=0.05)


def test_a_sample_without_weight_is_as_if_absent() -> None:
    rows, none = gemm_rows(40), np.zeros(40)
    without = RooflineRegressor("gemm").fit(rows[::2], gemm_times(rows[::2]), beside=none[::2])
    weighed = RooflineRegressor("gemm").fit(rows, gemm_times(rows), np.tile([1.0, 0.0], 20), none)
    assert weighed.fit_ == without.fit_


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows, times: (rows[:, :5], times), "expecting 7 features"),
        (lambda rows, times: (-rows, times), "Negative values"),
        (lambda rows, times: (rows, times - 1e9), "must be positive"),
        (lambda rows, times: (np.where(rows == rows[0, 0], np.nan, rows), times), "NaN"),
        (lambda rows, times: (rows, times[:-1]), "inconsistent numbers of samples"),
        (lambda rows, times: (rows, times, -times), "sample_weight must be 0 or more"),
        (lambda rows, times: (rows, times, 0.0 * times), "sample_weight must be 0 or more"),
    ],
)
def test_bad_samples_are_refused(change: object, message: str) -> None:
    rows = gemm_rows(20)
    with pytest.raises(ValueError, match=message):
        RooflineRegressor("gemm").fit(*change(rows, gemm_times(rows)))  # type: ignore[operator]


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


@pytest.mark.parametrize("sides", [(1.0, 0.0), (1.0, 1.0)])
def test_a_larger_product_takes_no_less_time(sides: tuple[float, float]) -> None:
    fit = kernel_fit("gemm", floor_us=0.0, saturation={"waves": 0.5}, multiprocessors=64)
    more = np.arange(1.0, 600.0)
    times = evaluate(fit, products(*(side * more + (1.0 - side) * 768.0 for side in sides), 768.0))
    assert (np.diff(times) >= -1e-9).all()


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
    fit = RooflineRegressor(family).fit_roofline(rows, times, np.ones(len(rows)), np.zeros(len(rows)))
    assert {place: fit.loop_us[place] for place in loop_us} == pytest.approx(loop_us, rel=0.1)
    assert evaluate(fit, rows) == pytest.approx(times, rel=0.1)


@pytest.mark.parametrize("family", ["elementwise.sin", "pooling.avg", "rnn"])
def test_a_gpu_has_no_loops_of_a_cpu(family: str) -> None:
    columns, times, _ = LOOPS[family]
    loop_us = RooflineRegressor(family, 108).fit(rows_of(family, **columns), times).fit_.loop_us
    assert not any(loop_us[len(LOOP_COUNTS.get(family, ())) :])


def test_a_kernel_without_multiplications() -> None:
    numel = np.geomspace(8, 1e6, 40)
    rows = elementwise_rows(numel)
    fit = RooflineRegressor("elementwise").fit(rows, 1.0 + 8 * numel / BANDWIDTH).fit_
    assert (fit.macs_per_us, fit.weight_bytes_per_us) == (0.0, 0.0)
    assert fit.activation_bytes_per_us == pytest.approx(BANDWIDTH, rel=0.05)


def test_a_kernel_that_its_dispatch_hides_gets_no_floor_from_longer_ones() -> None:
    numel = np.geomspace(8, 1e6, 40)
    rows, true_us = elementwise_rows(numel), 8 * numel / BANDWIDTH
    seen_us = np.where(true_us < 0.5, 0.02, true_us)  # what is left of a call of 3 us, where that is next to nothing
    beside = RooflineRegressor("elementwise").fit(rows, seen_us, beside=np.full(40, 3.0)).fit_
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


def test_a_long_sum_with_few_results_is_split() -> None:
    inputs = read("gemm", halves((64, 64, 65536), (4096, 4096, 4096)))
    found = tiled(CONSTANTS, inputs.work, inputs.product, MULTIPROCESSORS)
    parts = np.exp(found.logs[:, 2])
    assert parts[0] > 4
    assert parts[1] == pytest.approx(1.0)
    assert {tuple(row) for row in np.exp(found.logs[:, :2]).round().tolist()} <= set(TILES)
    assert (found.memory_us <= found.us).all()


def test_products_of_a_gpu_are_fitted_by_their_tiles_where_there_are_samples_enough() -> None:
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
    few = rows[: roofline.FEWEST_FOR_TILES - 1]
    assert RooflineRegressor("gemm", MULTIPROCESSORS).fit(few, times_of(few)).fit_.tiling == {}


def test_a_library_that_cuts_no_small_product_is_noticed() -> None:
    rows, small = random_rows(300), halves((2, 64, 8192), (8, 64, 2048), (8, 64, 8192))
    whole = times_of(small, whole_macs=2.0**21)
    assert whole / times_of(small) == pytest.approx([5.7, 2.2, 1.0], rel=0.02)
    fit = RooflineRegressor("gemm", MULTIPROCESSORS).fit(rows, times_of(rows, whole_macs=2.0**21)).fit_
    assert fit.tiling["whole_macs"] == pytest.approx(2**21, rel=0.02)
    assert evaluate(fit, small) == pytest.approx(whole, rel=0.25)
