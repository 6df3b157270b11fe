"""Kernel fits: one for each family, special ones where samples are enough; kernels timed in their networks."""

from __future__ import annotations

import factories
import msgspec
import numpy as np
import pytest
from gauges import timed_in_place

from latpred.calibration import schedules
from latpred.calibration.devices.cpu import CpuDevice
from latpred.calibration.fitting import profile_fit
from latpred.calibration.fitting.dispatch_fit import TimedNetwork
from latpred.calibration.fitting.kernel_fit import (
    COLD_BYTES,
    FEWEST,
    FEWEST_COLD,
    FEWEST_LEAF,
    LEAST_ROOM,
    LEAST_SHARE,
    SHORT_US,
    KernelSample,
    fit_kernels,
    host_us,
    kernel_samples,
    row_of,
    with_cold,
)
from latpred.calibration.workloads.networks import NetworkSpec
from latpred.host import Slowdown
from latpred.prediction.kernel_times import evaluate
from latpred.profile.document import DeviceProfile, DispatchFit


def sample(numel: int, family: str = "elementwise.add", factor: float = 1.0) -> KernelSample:
    """A sum of `numel` elements: 2 us and 1000 bytes a microsecond, of which `factor` times as many."""
    row = (0.0, 0.0, 8.0 * numel, 4.0 * numel, float(numel), 2.0)
    return KernelSample(family, row, 2.0 + factor * 12.0 * numel / 1000.0)


def spread(count: int, family: str, factor: float = 1.0) -> list[KernelSample]:
    return [sample(int(numel), family, factor) for numel in np.geomspace(1e3, 1e7, count)]


def test_a_known_kernel_comes_back() -> None:
    fits = fit_kernels(spread(30, "elementwise.add"))
    fit = fits["elementwise"]
    asked = [sample(numel) for numel in (5_000, 70_000, 3_000_000)]
    found = evaluate(fit, np.array([one.row for one in asked]))
    assert found == pytest.approx([one.us for one in asked], rel=0.05)


def test_a_special_family_with_many_samples_has_a_fit_of_its_own_and_one_with_few_a_scale() -> None:
    fits = fit_kernels([*spread(FEWEST_LEAF, "elementwise.add"), *spread(FEWEST_LEAF - 1, "elementwise.gelu", 3.0)])
    assert set(fits) == {"elementwise", "elementwise.add"}
    assert fits["elementwise"].leaf_scales["elementwise.gelu"] == pytest.approx(3.0, rel=0.2)


def test_what_few_samples_were_of_is_the_datasheets_as_far_off_as_its_relatives() -> None:
    """Copies were never timed; elementwise kernels take twice the datasheet's time above half its floor."""
    known = {
        name: factories.kernel_fit(
            name, floor_us=4.0, activation_bytes_per_us=2000.0, weight_bytes_per_us=2000.0, macs_per_us=0.0
        )
        for name in ("elementwise", "copy")
    }
    fits = fit_kernels(spread(FEWEST_LEAF - 1, "elementwise.add"), prior=known)
    assert fits.keys() == {"elementwise", "copy"}
    assert fits["elementwise"].activation_bytes_per_us == pytest.approx(1000.0, rel=0.1)
    assert fits["copy"].activation_bytes_per_us == pytest.approx(1000.0, rel=0.1)
    assert fits["copy"].floor_us == pytest.approx(2.0, abs=0.3)
    assert fit_kernels(spread(FEWEST_LEAF - 1, "elementwise.add")).keys() == {"elementwise"}


def depthwise(channels: int, batch: int, window: int, side: int, leaf: str = "") -> KernelSample:
    """A depthwise convolution: vectors make 30 MACs a ns; without a kernel a plane takes 0.4 us beside its MACs."""
    planes = batch * channels
    macs = float(planes * window**2 * side**2)
    maps = 4.0 * planes * side**2
    sizes = (batch, channels, channels, side, side, side, side, window, window, 1, channels, 0)
    row = (macs, 0.0, maps + 4.0 * channels * window**2, maps, *map(float, sizes))
    us = 40.0 + 0.4 * planes + macs / 1e3 if leaf else 2.0 + macs / 3e4
    return KernelSample(f"conv_depthwise{leaf}", row, us)


def test_convolutions_without_a_kernel_take_as_long_for_each_plane_whatever_the_batch() -> None:
    plain = [depthwise(c, 1, 3, side) for c in (32, 64, 128, 256, 512) for side in (7, 14, 28, 56)]
    few = [depthwise(c, 1, window, side, ".padded") for c in (32, 56, 96) for window, side in ((5, 1), (15, 3))]
    fits = fit_kernels([*plain, *few])
    asked = [depthwise(384, 8, 5, 1, ".padded"), depthwise(32, 8, 15, 3, ".padded")]
    found = evaluate(fits["conv_depthwise.padded"], np.array([one.row for one in asked]))
    assert found == pytest.approx([one.us for one in asked], rel=0.25)


def test_what_a_plane_without_a_kernel_takes_is_not_left_to_samples_of_few_planes() -> None:
    """Two threads of an EPYC (Milan): what one calibration timed, and two such convolutions timed alone."""

    def doubled(us: float, batch: int, channels: int, results: int, side: int, window: int) -> KernelSample:
        macs = float(batch * results * side**2 * window**2)
        maps = 4.0 * batch * side**2
        sizes = (batch, channels, results, side, side, side, side, window, window, 1, channels, 0)
        row = (macs, 4.0 * results * (window**2 + 1), maps * channels, maps * results, *map(float, sizes))
        return KernelSample("conv_depthwise.multiplied", row, us, 200.0 * batch)

    timed = ((542, 1, 56, 112, 26, 3), (2067, 1, 56, 224, 26, 7), (5087, 2, 32, 64, 90, 3), (693, 1, 32, 64, 48, 3))
    timed = (*timed, (21458, 2, 32, 128, 90, 7), (3684, 1, 32, 128, 48, 7))
    asked = [doubled(1851, 8, 384, 768, 3, 3), doubled(1497, 8, 384, 768, 3, 1)]
    plain = [depthwise(c, 1, 3, side) for c in (32, 64, 128, 256, 512) for side in (7, 14, 28, 56)]
    fit = fit_kernels([*plain, *(doubled(*one) for one in timed)])["conv_depthwise.multiplied"]
    found = evaluate(fit, np.array([one.row for one in asked]))
    assert found == pytest.approx([one.us for one in asked], rel=0.3)


@pytest.mark.parametrize(("count", "fitted"), [(FEWEST - 1, False), (FEWEST, True)])
def test_a_family_with_too_few_samples_is_left_to_borrow(count: int, fitted: bool) -> None:
    fits = fit_kernels([*spread(30, "elementwise.add"), *spread(count, "softmax")])
    assert ("softmax" in fits) is fitted
    assert "elementwise" in fits
    assert fit_kernels([]) == {}


def test_repeated_rows_are_one_row_with_their_median() -> None:
    once = spread(30, "elementwise")
    outlier = [one._replace(us=100.0 * one.us) for one in once[:1]]
    # thrice the same row, one of them a hundred times too slow: the median is the row's time
    repeated = fit_kernels([*once, once[0], *outlier])["elementwise"]
    row = np.array([once[0].row])
    assert len(repeated.points) == len(fit_kernels(once)["elementwise"].points)
    assert evaluate(repeated, row)[0] == pytest.approx(once[0].us, rel=0.05)
    # of two, one is no more the middle than the other
    scattered = [one._replace(us=factor * one.us) for factor in (0.8, 1.2) for one in once]
    assert evaluate(fit_kernels(scattered)["elementwise"], row)[0] == pytest.approx(once[0].us, rel=0.06)


def test_the_row_of_an_op() -> None:
    op = factories.linear(rows=2, width=8)
    # at batch 3: 6 rows of 8 by 8
    moved = 4.0 * 6 * 8
    assert row_of(op, 3) == (6.0 * 64, 256.0, moved, moved, 6.0, 8.0, 8.0)
    assert row_of(op, 3, resident=True) == (6.0 * 64, 0.0, moved + 256.0, moved, 6.0, 8.0, 8.0)


DISPATCH = factories.dispatch()  # 5 us for gemm, 3 for view.transpose, 7 for others; 20 for the pass
GEMM_US, TRANSPOSE_US, ADD_US, PASS_US = 5.0, 3.0, 7.0, 20.0


def left_behind(us: float, after: tuple[float, float, float]) -> float:
    return after[0] * us / (us + SHORT_US) + after[1] * us**0.5 + after[2] * us


def run(rows: int, kernels_us: tuple[float, float], after: tuple[float, float, float], **changes: bool) -> TimedNetwork:
    """A product, a transpose and a sum; each kernel adds parts `after` it that saturate, grow as its root and as it."""
    product_us, sum_us = kernels_us
    ops = (factories.linear(rows), factories.view(), factories.add(rows))
    calls_us = (GEMM_US + product_us, TRANSPOSE_US, ADD_US + sum_us)
    left = sum(left_behind(us, after) for us in kernels_us)
    return TimedNetwork(factories.graph(*ops), 1, PASS_US + sum(calls_us) + left, calls_us, **changes)


def runs(after: tuple[float, float, float]) -> list[TimedNetwork]:
    kernels = ((40.0, 9.0), (100.0, 16.0), (900.0, 400.0), (2500.0, 25.0), (64.0, 3600.0))
    return [run(rows, us, after) for rows, us in zip((1, 2, 3, 4, 5), kernels, strict=True)]


def kernels_us(timed: list[TimedNetwork], dispatch: DispatchFit = DISPATCH) -> list[float]:
    return [sample.us for sample in kernel_samples(timed, dispatch, dispatch)]


@pytest.mark.parametrize("after", [(0.0, 0.0, 0.0), (2.0, 0.0, 0.0), (1.0, 0.2, 0.05)])
def test_known_kernels_and_afterwork_come_back(after: tuple[float, float, float]) -> None:
    samples = kernel_samples(runs(after), DISPATCH, DISPATCH)
    products = [sample.us for sample in samples if sample.family == "gemm"]
    expected = [us + left_behind(us, after) for us in (40.0, 100.0, 900.0, 2500.0, 64.0)]
    assert products == pytest.approx(expected, rel=1e-3)
    assert len(samples) == 10  # nothing of the transposes


def test_a_call_hidden_in_its_dispatch_is_known_to_be_short_and_one_from_a_slow_cache_is_brought_to_its_speed() -> None:
    timed = run(3, (0.0, 8.0), (0.0, 0.0, 0.0))
    assert kernels_us([timed]) == pytest.approx([LEAST_SHARE * GEMM_US, 8.0], rel=0.02)
    shared = run(3, (90.0, 8.0), (0.0, 0.0, 0.0))._replace(slowdown=Slowdown(cache=1.5))
    assert kernels_us([shared]) == pytest.approx([60.0, 8.0])


def test_kernels_are_as_long_as_a_pass_without_clocks_has_room_for() -> None:
    timed = run(3, (40.0, 60.0), (0.0, 0.0, 0.0))
    shorter = kernels_us([timed._replace(total_us=timed.total_us - 20.0)])
    assert shorter == pytest.approx([32.0, 48.0])
    least = kernels_us([timed._replace(total_us=timed.total_us - 90.0)])
    assert least == pytest.approx([LEAST_ROOM * 40.0, LEAST_ROOM * 60.0])


COLD = msgspec.structs.replace(DISPATCH, cold_costs_us={"gemm": 10.0, "view": 6.0, "": 14.0}, cold_bytes=COLD_BYTES)


def cold_run(rows: int, product_us: float, sum_us: float) -> TimedNetwork:
    """As `run`, with nothing left behind, where every call finds its code as cold as the bytes of the pass make it."""
    ops = (factories.linear(rows), factories.view(), factories.add(rows * 1000))
    graph = factories.graph(*ops)
    touched = graph.bytes(1)  # each class comes once in a pass
    share = touched / (touched + COLD_BYTES)
    calls_us = (GEMM_US + product_us + 10.0 * share, TRANSPOSE_US + 6.0 * share, ADD_US + sum_us + 14.0 * share)
    return TimedNetwork(graph, 1, PASS_US + sum(calls_us), calls_us)


def test_what_ops_dispatch_slowly_or_from_cold_caches_is_no_kernel() -> None:
    """On a machine that takes twice as long to dispatch ops, and 1.5 times to begin a pass."""
    fast = [cold_run(rows, 40.0, 9.0) for rows in range(1, 1000, 1000 // FEWEST_COLD)]
    slow = []
    for one in fast:
        calls_us = tuple(2.0 * us - kernel_us for us, kernel_us in zip(one.calls_us, (40.0, 0.0, 9.0), strict=True))
        total_us = 1.5 * PASS_US + sum(calls_us)
        slow.append(one._replace(calls_us=calls_us, total_us=total_us, slowdown=Slowdown(1.5, 2.0)))
    assert [host_us(one, COLD) for one in slow] == pytest.approx([one.total_us - 49.0 for one in slow])
    for timed in (fast, slow):
        assert kernels_us(timed, COLD) == pytest.approx([40.0, 9.0] * len(timed))
    assert with_cold(DISPATCH, DISPATCH, slow) == with_cold(DISPATCH, DISPATCH, fast)


def test_calls_without_a_kernel_tell_what_cold_code_takes() -> None:
    timed = [cold_run(rows, 40.0, 9.0) for rows in range(1, 1000, 1000 // FEWEST_COLD)]
    found = with_cold(DISPATCH, DISPATCH, timed)
    # A transpose takes 6 us from cold caches, twice its 3 us, and so all classes take twice theirs.
    assert found.cold_costs_us == {name: pytest.approx(2.0 * us) for name, us in DISPATCH.costs_us.items()}
    assert found.cold_bytes == COLD_BYTES
    assert found.costs_us == DISPATCH.costs_us
    assert with_cold(DISPATCH, DISPATCH, timed[:1]) == DISPATCH  # of which few calls tell nothing


def fitted(slow: float = 1.0, precision: str = "fp32", sized: int = 4) -> DeviceProfile:
    """The profile of a CPU that timed chains, tiny networks and so many sized ones, these in a moment so slow."""
    rows = []
    encoders = [NetworkSpec("encoder", seed, 64, 32, 1) for seed in range(sized)]
    for spec in (*schedules.chain_networks(), *schedules.tiny_networks(11), *encoders):
        cell = schedules.network_cell(spec, "fp32" if spec.tiny else precision)
        rows.append(timed_in_place(cell, 1.0 if spec.tiny else slow))
    return profile_fit.fit_profile(rows, factories.machine(), CpuDevice().info(), "mine")[0]


@pytest.mark.parametrize(("sized", "known"), [(4, {"bf16"}), (0, {"fp32"})])
def test_tiny_networks_tell_of_kernels_only_beside_sized_ones_of_their_precision(sized: int, known: set[str]) -> None:
    assert fitted(precision="bf16", sized=sized).kernels.keys() == known


def test_a_slow_moment_of_the_machine_is_not_taken_for_cold_code() -> None:
    usual, slowed = (fitted(slow).runtimes["eager"] for slow in (1.0, 1.44))
    assert usual.cold_calls > 0.1
    assert slowed.cold_calls == pytest.approx(usual.cold_calls, rel=0.01)
    assert slowed.cold_costs_us == pytest.approx(usual.cold_costs_us, rel=0.01)


def test_kernels_that_share_a_call_and_estimated_work_give_no_sample() -> None:
    shared = factories.graph(factories.linear(4), factories.add(100, host_class="elementwise.nested.add"))
    estimated = factories.graph(factories.linear(4, estimated=True))
    assert kernels_us([TimedNetwork(graph, 1, 500.0, (450.0,)) for graph in (shared, estimated)]) == []


def test_the_host_time_of_a_pass() -> None:
    ops = (factories.linear(4, module_calls=2), factories.view(python_calls=6), factories.add())
    fit = factories.dispatch(scale=2.0)
    # 20 + 2 x (5 + 3 + 7 + 2 modules at 1 + 6 functions at 0.5)
    assert host_us(TimedNetwork(factories.graph(*ops), 1, 0.0), fit) == 20.0 + 2.0 * 20.0
    cold = cold_run(500, 40.0, 9.0)
    assert host_us(cold, COLD) == pytest.approx(cold.total_us - 49.0)
    # A chain of Python calls dispatches nothing: 20 + 6 functions at 0.5
    calls_alone = factories.graph(factories.view(name="python::return", host_class="python", python_calls=6))
    assert host_us(TimedNetwork(calls_alone, 1, 0.0), COLD) == pytest.approx(23.0)
