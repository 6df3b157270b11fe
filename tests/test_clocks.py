"""The two clocks against the recurrence written out in plain Python, one step and one kernel at a time."""

from __future__ import annotations

import numpy as np
import pytest
from factories import add, device, view
from hypothesis import given, settings
from hypothesis import strategies as st

from latpred.graph.features import Floats
from latpred.prediction.clocks import BatchThresholds, CurveSamples, Timeline, latency
from latpred.profile.document import DeviceInfo
from latpred.runtimes import one_step_per_op

Step = tuple[float, list[float], int]  # dispatch, kernel times, synchronisations


def reference_ends(steps: list[Step], info: DeviceInfo, forwards: int) -> list[float]:
    """When host and device are through with each forward, the device never waited for in between."""
    host, end = 0.0, float("-inf")
    starts: list[float] = []
    ends = []
    for _ in range(forwards):
        for dispatch, kernels, syncs in steps:
            host += dispatch
            for kernel in kernels:
                if len(starts) >= info.queue:
                    host = max(host, starts[-info.queue])
                starts.append(max(end + info.gap_us, host + info.launch_us))
                end = starts[-1] + kernel
            for _ in range(syncs):
                host = max(host, end) + info.sync_us
        ends.append(max(host, end))
    return ends


def computed(steps: list[Step], info: DeviceInfo, protocol: str) -> float:
    ops = [add(launches=len(kernels), syncs=syncs) if kernels else view(syncs=syncs) for _, kernels, syncs in steps]
    schedule = one_step_per_op("eager", tuple(ops))
    host = np.array([dispatch for dispatch, _, _ in steps])
    kernels = np.array([kernel for _, row, _ in steps for kernel in row], dtype=float)
    both = np.column_stack((kernels, 3.0 * kernels))
    timeline = Timeline.of(schedule.kernel_step, schedule.sync)
    first, second = latency(timeline, host, both, info, protocol)
    alone = latency(timeline, host, both[:, 1:], info, protocol)[0]
    assert second == pytest.approx(alone), "a batch axis must not mix batches"
    return float(first)


def period_us(
    count: int, step_us: float, kernel_us: list[float], syncs: int = 0, protocol: str = "pipelined"
) -> Floats:
    """Periods of `count` steps, each with a kernel, on a device whose clocks join smoothly, at several batches."""
    info = DeviceInfo("x", "cuda", asynchronous=True, memory_bytes=0, launch_us=5.0, clock_exponent=8.44792)
    sync = np.zeros(count, dtype=int)
    sync[-1] = syncs
    kernels = np.repeat([kernel_us], count, axis=0)
    return latency(Timeline.of(np.arange(count), sync), np.full(count, step_us), kernels, info, protocol)


def test_clocks_join_smoothly_however_the_period_is_found() -> None:
    bend = 2 ** (1 / 8.44792)
    # The queue never fills up; it does; and the host waits once a pass, for one launch and the last kernel.
    for count, syncs, plain_us in ((1024, 0, 10_240.0), (1025, 0, 10_250.0), (1000, 1, 10_015.0)):
        assert period_us(count, 10.0, [10.0], syncs)[0] == pytest.approx(bend * plain_us, rel=1e-3)


def test_no_forward_that_is_waited_for_is_faster_than_those_that_overlap() -> None:
    kernel_us = [1.0, 9.0, 9.9, 10.0, 11.0, 100.0]
    assert (period_us(1000, 10.0, kernel_us, protocol="single") >= period_us(1000, 10.0, kernel_us)).all()


def test_how_a_period_is_found_does_not_depend_on_other_batches() -> None:
    assert period_us(1000, 1.0, [2.0, 10.0])[1] == period_us(1000, 1.0, [10.0])[0]


def test_a_threshold_is_where_the_curve_passes_it_whatever_its_interval() -> None:
    def sample(batches: np.ndarray, shift: float) -> CurveSamples:
        compute = batches * np.where(np.sign(shift) * batches < 0, 0.5, 2.0 if shift else 1.0)  # longest as predicted
        return CurveSamples(np.full(len(batches), 64.0), compute / (1.0 + 3.0 * (shift == 0.0)), compute)

    assert BatchThresholds(sample).crossover() == (256, 32, 256)


def test_a_threshold_that_some_small_batch_passes_is_that_of_all_larger_ones() -> None:
    def sample(batches: np.ndarray, _shift: float) -> CurveSamples:
        compute = np.where(batches == 1, 100.0, 1.0 * batches)  # a kernel of its own serves batch 1
        return CurveSamples(np.full(len(batches), 64.0), compute, np.where(batches == 256, np.nan, 64.0 + compute))

    assert BatchThresholds(sample).crossover() == (64, 64, 64)


cost = st.floats(0.0, 50.0).map(lambda value: round(value, 2))
step = st.tuples(cost, st.lists(cost, max_size=3), st.sampled_from([0, 0, 0, 0, 1, 2]))
queue = st.sampled_from([1, 2, 3, 5, 1024])


@settings(max_examples=150, deadline=None)
@given(st.lists(step, min_size=1, max_size=12), queue)
def test_single_equals_the_recurrence(steps: list[Step], queue: int) -> None:
    info = device(queue=queue)
    assert computed(steps, info, "single") == pytest.approx(reference_ends(steps, info, 1)[0] + info.sync_us)


@settings(max_examples=100, deadline=None)
@given(st.lists(step, min_size=1, max_size=8), queue)
def test_pipelined_equals_the_period_of_the_recurrence(steps: list[Step], queue: int) -> None:
    info = device(queue=queue)
    ends = reference_ends(steps, info, 460)
    period = (ends[-1] - ends[39]) / 420
    assert computed(steps, info, "pipelined") == pytest.approx(period, rel=2e-3, abs=1e-6)


@settings(max_examples=50, deadline=None)
@given(st.lists(step, min_size=1, max_size=12), st.sampled_from(["single", "pipelined"]))
def test_on_a_synchronous_device_everything_adds_up(steps: list[Step], protocol: str) -> None:
    info = device(asynchronous=False, sync_us=0.0, launch_us=0.0, gap_us=0.0)
    expected = sum(dispatch + sum(kernels) for dispatch, kernels, _ in steps)
    assert computed(steps, info, protocol) == pytest.approx(expected)
