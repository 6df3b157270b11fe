"""RooflineRegressor: what it recovers, how it behaves as an estimator, its numbers without scikit-learn, and tiles."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from factories import kernel_fit
from sklearn.base import clone
from sklearn.model_selection import cross_val_score

from latpred.fit import roofline
from latpred.fit.residual import fit_residual
from latpred.fit.roofline import RooflineRegressor, scale_leaf
from latpred.graph.features import EFFORTS, layout, read
from latpred.prediction.kernel_times import PRIOR, TILES, KernelModel, evaluate, tiled
from latpred.profile.document import KernelFit

PEAK, BANDWIDTH, FLOOR = 5e4, 2e3, 3.0


def gemm_rows(count: int, seed: int = 0, largest: int = 4096) -> np.ndarray:
    rng = np.random.default_rng(seed)
    m, n, k = np.exp(rng.uniform(np.log(8), np.log(largest), (3, count))).round()
    return np.column_stack((m * n * k, 4 * n * k, 4 * m * k, 4 * m * n, m, n, k))


def gemm_times(rows: np.ndarray) -> np.ndarray:
    macs, weights, read, written = rows[:, :4].T
    return FLOOR + np.hypot(macs / PEAK, (weights + read + written) / BANDWIDTH)


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


def test_a_datasheet_says_what_small_samples_cannot() -> None:
    """Six elementwise kernels too small to tell a bandwidth of 12 GB/s."""
    numel = np.array([8, 16, 24, 32, 48, 64, 100_000_000])
    rows = np.column_stack((np.zeros((7, 1)), np.zeros((7, 1)), 8 * numel, 4 * numel, numel, np.full(7, 2.0)))
    times = (2.0 + 12 * numel / 12_000.0) * np.array([1.05, 0.97, 1.0, 1.06, 0.96, 1.02, 1.0])
    known = kernel_fit("elementwise", floor_us=4.0, activation_bytes_per_us=15_000.0, macs_per_us=0.0)
    large = [
        float(RooflineRegressor("elementwise", prior=prior).fit(rows[:6], times[:6]).predict(rows[6:])[0])
        for prior in (None, known)
    ]
    assert abs(np.log(large[1] / times[6])) < 0.3 < abs(np.log(large[0] / times[6]))


def test_the_residual_learns_what_the_roofline_cannot_say() -> None:
    rows, unseen = gemm_rows(250), gemm_rows(200, seed=3)

    def times(of: np.ndarray) -> np.ndarray:
        return gemm_times(of) * (1.0 + 0.4 * np.sin(np.log(of[:, 5])))

    model = RooflineRegressor("gemm").fit(rows, times(rows))
    errors = np.abs(model.predict(unseen) / times(unseen) - 1)
    assert np.median(errors) < 0.03
    wild = times(rows)
    wild[::15] *= 8.0  # a few of which do little
    errors = np.abs(RooflineRegressor("gemm").fit(rows, wild).predict(unseen) / times(unseen) - 1)
    assert np.median(errors) < 0.06


def test_maps_that_fill_no_vector_are_told_from_others() -> None:
    """Pointwise convolutions of PyTorch's own: where a map has 2 to 15 pixels, each weight takes as long as of 30."""
    rng = np.random.default_rng(4)
    logs = rng.uniform([[0], [0], [3], [3]], [[2.5], [2.8], [6], [6]], (4, 240))
    batch, side, entering, leaving = np.exp(logs).round()
    pixels, one = side**2, np.ones(240)
    macs = batch * pixels * entering * leaving
    work = (macs, 4 * entering * leaving, 4 * batch * pixels * entering, 4 * batch * pixels * leaving)
    rows = np.column_stack((*work, batch, entering, leaving, side, side, side, side, one, one, one, one))
    short = (pixels > 1) & (pixels < 16)
    times = 1.0 + np.where(short, 30.0 / pixels, 1.0) * macs / PEAK
    learned, unseen = np.arange(240) < 160, np.arange(240) >= 160
    fit = RooflineRegressor("conv_native").fit(rows[learned], times[learned]).fit_
    assert fit.efforts[1] > 0
    for some in (short, ~short):
        asked = unseen & some
        assert np.median(np.abs(evaluate(fit, rows[asked]) / times[asked] - 1)) < 0.05
    earlier = msgspec.structs.replace(fit, efforts=fit.efforts[:1])  # a profile of before
    assert (evaluate(earlier, rows[short]) < evaluate(fit, rows[short])).all()


@pytest.mark.parametrize("count", [1, 2, 5, 15])
def test_few_samples_still_give_sane_times(count: int) -> None:
    rows = gemm_rows(count)
    model = RooflineRegressor("gemm").fit(rows, gemm_times(rows))
    times, spread = model.predict(gemm_rows(50, seed=5), return_std=True)
    assert np.isfinite(times).all()
    assert (times > 0).all()
    assert np.isfinite(spread).all()
    assert model.predict(rows) == pytest.approx(gemm_times(rows), rel=0.3)


def test_far_away_the_roofline_speaks_alone_and_says_that_it_is_unsure() -> None:
    rows = gemm_rows(150, largest=512)
    wiggly = gemm_times(rows) * (1.0 + 0.4 * np.sin(3 * np.log(rows[:, 5])))
    fit = RooflineRegressor("gemm").fit(rows, wiggly).fit_
    far = gemm_rows(1)
    far[:] = [1e21, 4e14, 4e14, 4e14, 1e7, 1e7, 1e7]
    bare = msgspec.structs.replace(fit, points=(), targets=(), noise_factors=())
    assert evaluate(fit, far) == pytest.approx(evaluate(bare, far), rel=0.1)
    model = KernelModel(fit)
    assert model.times(far).log_std[0] > 1.5 * np.median(model.times(rows).log_std)


def test_time_grows_with_batch() -> None:
    rows = gemm_rows(200)
    noise = np.exp(np.random.default_rng(6).normal(0, 0.03, 200))
    model = RooflineRegressor("gemm").fit(rows, gemm_times(rows) * noise)
    m = 2.0 ** np.arange(13)
    sweep = np.column_stack(
        (m * 512 * 512, np.full(13, 4.0 * 512 * 512), m * 2048, m * 2048, m, np.full((13, 2), 512.0))
    )
    times = model.predict(sweep)
    assert (np.diff(times) > -0.05 * times[:-1]).all()
    assert times[-1] > 10 * times[0]


def test_an_estimator_like_any_other() -> None:
    model = RooflineRegressor("gemm", multiprocessors=8, max_points=50, hyper_points=40)
    asked = {"family": "gemm", "multiprocessors": 8, "max_points": 50, "hyper_points": 40, "prior": None}
    assert clone(model).get_params() == asked
    rows = gemm_rows(60)
    scores = cross_val_score(model, rows, np.log(gemm_times(rows)) + 5.0, cv=3)
    assert scores.shape == (3,)
    fitted = model.fit(rows, gemm_times(rows))
    assert fitted is model
    assert model.n_features_in_ == 7
    assert len(model.fit_.points) == 50
    assert model.score(rows, gemm_times(rows)) > 0.99


def test_weights_decide_between_samples_that_disagree() -> None:
    rows = np.repeat(gemm_rows(40), 2, axis=0)
    times = gemm_times(rows)
    times[1::2] *= 2.0
    weights = np.tile([1.0, 1e-3], 40)
    model = RooflineRegressor("gemm").fit(rows, times, sample_weight=weights)
    assert model.predict(rows[::2]) == pytest.approx(times[::2], rel=0.05)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows, times: (rows[:, :5], times), "expecting 7 features"),
        (lambda rows, times: (-rows, times), "Negative values"),
        (lambda rows, times: (rows, times - 1e9), "must be positive"),
        (lambda rows, times: (np.where(rows == rows[0, 0], np.nan, rows), times), "NaN"),
        (lambda rows, times: (rows, times[:-1]), "inconsistent numbers of samples"),
    ],
)
def test_bad_samples_are_refused(change: object, message: str) -> None:
    rows = gemm_rows(20)
    with pytest.raises(ValueError, match=message):
        RooflineRegressor("gemm").fit(*change(rows, gemm_times(rows)))  # type: ignore[operator]


def test_a_kernel_without_multiplications() -> None:
    numel = np.exp(np.linspace(np.log(100), np.log(1e7), 40)).round()
    rows = np.column_stack((np.zeros(40), np.zeros(40), 8 * numel, 4 * numel, numel, np.full(40, 2.0)))
    fit = RooflineRegressor("elementwise").fit(rows, 2.0 + 12 * numel / BANDWIDTH).fit_
    assert fit.macs_per_us == 0.0
    assert fit.activation_bytes_per_us == pytest.approx(BANDWIDTH, rel=0.05)
    assert fit.weight_bytes_per_us == 0.0


def test_steps_of_several_rows_take_a_time_of_their_own_on_a_cpu() -> None:
    batch, steps, hidden = (column.ravel() for column in np.meshgrid((1.0, 2.0, 8.0), (8.0, 50.0, 300.0), (16.0, 64.0)))
    weights = 4 * hidden**2
    work = (batch * steps * weights, 4 * weights, 4 * batch * steps * hidden, 4 * batch * steps * hidden)
    rows = np.column_stack((*work, batch, steps, hidden, hidden, np.ones(18), steps, 0.5 * steps * weights, weights))
    times = 4.0 * steps + np.where(batch > 1.0, 5.0 * steps, 0.0) + rows[:, 0] / 1e5
    bare = RooflineRegressor("rnn").fit_roofline(rows, times, np.ones(18), np.zeros(18))
    assert evaluate(bare, rows) == pytest.approx(times, rel=0.1)
    assert bare.efforts[::3] == pytest.approx((4.0, 5.0), rel=0.1)
    on_gpu = RooflineRegressor("rnn", 108).fit_roofline(rows, times, np.ones(18), np.zeros(18))
    assert any(on_gpu.efforts[:3])
    assert not any(on_gpu.efforts[3:])


def test_a_leaf_is_scaled_above_the_floor() -> None:
    fit = kernel_fit("elementwise", macs_per_us=0.0)
    numel = np.array([1e5, 1e6, 1e7, 1e8])
    rows = np.column_stack((np.zeros(4), np.zeros(4), 8 * numel, 4 * numel, numel, np.full(4, 2.0)))
    # Three times as long above a floor of 2 us; four samples count 4 / (4 + 0.1) against none.
    scale = scale_leaf(fit, rows, 2.0 + 3.0 * 12 * numel / 1e3)
    assert scale == pytest.approx(3.0 ** (4 / 4.1), rel=1e-3)
    scaled = KernelModel(fit).times(rows, scale).us
    assert scaled == pytest.approx(2.0 + scale * 12 * numel / 1e3)


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


def test_what_loops_do_takes_time_of_its_own() -> None:
    rng = np.random.default_rng(0)
    numel, costly = 10 ** rng.uniform(3, 6, 40), rng.integers(0, 10, 40)
    rows = np.zeros((40, len(layout("generated").columns)))
    rows[:, 2] = rows[:, 3] = 4 * numel
    named = {"numel": numel, "cols": np.ones(40), "parts": np.ones(40), "math": costly * numel}
    for name, values in named.items():
        rows[:, layout("generated").columns.index(name)] = values
    us = 2.0 + np.hypot(8 * numel / 2e4, costly * numel * 1.4e-3)
    fit = RooflineRegressor("generated").fit(rows, us).fit_
    math = EFFORTS["generated"].index("math")
    assert fit.efforts[math] == pytest.approx(1.4e-3, rel=0.1)
    assert evaluate(fit, rows) == pytest.approx(us, rel=0.1)
    assert RooflineRegressor("softmax").fit(rows[:, :6] + 1, us).fit_.efforts == ()


def elementwise_rows(numel: np.ndarray) -> np.ndarray:
    return np.column_stack((0 * numel, 0 * numel, 4 * numel, 4 * numel, numel, np.ones(len(numel))))


def test_a_second_thread_helps_from_so_many_values_on() -> None:
    def two_threads_us(numel: np.ndarray) -> np.ndarray:
        return 1.0 + 1e-3 * numel / np.where(numel > 32768, 2, 1)

    numel = np.geomspace(64, 1e6, 60).round()
    around = np.array([25_000.0, 32_000.0, 34_000.0, 45_000.0])
    rows, us = elementwise_rows(numel), two_threads_us(numel)
    alone = RooflineRegressor("elementwise.sin").fit(rows, us)
    assert alone.predict(elementwise_rows(around)) == pytest.approx(two_threads_us(around), rel=0.2)
    assert RooflineRegressor("elementwise.sin", multiprocessors=80).fit(rows, us).fit_.efforts == ()


def test_windows_that_overlap_take_longer_than_their_bytes_tell() -> None:
    planes, window = np.repeat([8.0, 64.0, 512.0], 12), np.tile([4.0, 4.0, 9.0], 12)
    side = np.tile([4.0, 8.0, 12.0, 16.0, 24.0, 32.0], 6)
    results, apart = planes * side**2, window == 4  # 2 x 2 without overlap, 3 x 3 moved by one
    read_bytes = 4 * results * np.where(apart, 4, 1)
    rows = np.column_stack((0 * side, 0 * side, read_bytes, 4 * results, 0 * side + 1, planes, side, side, window))
    us = 1.0 + results * (2e-3 + 2e-4 * window)
    fit = RooflineRegressor("pooling.avg").fit(rows[apart], us[apart]).fit_
    assert evaluate(fit, rows[~apart]) == pytest.approx(us[~apart], rel=0.5)  # by their bytes, 0.6 too fast


def test_a_kernel_that_its_dispatch_hides_gets_no_floor_from_longer_ones() -> None:
    numel = np.geomspace(8, 1e6, 40)
    rows = elementwise_rows(numel)
    true_us = 8 * numel / BANDWIDTH
    seen_us = np.where(true_us < 0.5, 0.02, true_us)  # what is left of a call of 3 us, where that is next to nothing
    beside = RooflineRegressor("elementwise").fit(rows, seen_us, beside=np.full(40, 3.0)).fit_
    assert evaluate(beside, rows[:1])[0] < 0.2
    assert evaluate(beside, rows[-5:]) == pytest.approx(true_us[-5:], rel=0.1)


def test_a_leaf_s_scale_does_not_heed_what_its_dispatch_hides() -> None:
    numel = np.geomspace(8, 1e6, 30)
    rows = elementwise_rows(numel)
    fit = RooflineRegressor("elementwise").fit(rows, 1.0 + 8 * numel / BANDWIDTH).fit_
    slow_us = 1.0 + 3.0 * 8 * numel / BANDWIDTH
    hidden_us = np.where(slow_us < 1.5, 0.02, slow_us)
    assert scale_leaf(fit, rows, hidden_us, np.full(30, 4.0)) == pytest.approx(3.0, rel=0.15)


def test_turning_over_more_matrices_takes_longer() -> None:
    sizes = [(numel, matrices) for numel in (5e4, 2e5, 1e6) for matrices in (0, 8, 64, 512)]
    rows = np.array([[0, 0, 4 * numel, 4 * numel, numel, 1, matrices] for numel, matrices in sizes])
    times = 1.0 + np.hypot(rows[:, 2] / 1e4, 1.2 * rows[:, 6])
    few, many = RooflineRegressor("copy.transpose").fit(rows, times).predict(rows[[4, 7]])
    assert few == pytest.approx(times[4], rel=0.1)
    assert many == pytest.approx(times[7], rel=0.1)
    fit = RooflineRegressor("copy.transpose").fit(rows, times).fit_
    assert fit.efforts == pytest.approx((1.2,), rel=0.1)


# Tiled products behave as on GPUs, their constants come back from measurements, and profiles carry them.
MULTIPROCESSORS = 64
CONSTANTS = {"rate": 60e6, "bandwidth": 1.2e6, **{name: start for name, (start, _) in PRIOR.items()}}


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
    found = fit_residual(kernel_fit(jumps=jumps), points, steps - steps.mean(), np.ones(120), 120)
    assert found.length_scales[1] > 3 * found.length_scales[0]
