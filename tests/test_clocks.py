"""The two clocks against the recurrence written out in plain Python, one step and one kernel at a time."""

from __future__ import annotations

import numpy as np
import pytest
from factories import add, device, view
from hypothesis import given, settings
from hypothesis import strategies as st

from latpred.prediction.clocks import Timeline, latency
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
