"""Constants of a device: its clock's, found from outside a device that knows its own, and its memory's."""

from __future__ import annotations

from dataclasses import replace

import factories
import pytest

from latpred.calibration.cells import Cell
from latpred.calibration.devices import constants
from latpred.calibration.devices.simulated import SimulatedDevice, SimulatedSpec, TrueCosts
from latpred.calibration.session import Row
from latpred.calibration.timing.timer import Timing
from latpred.errors import CalibrationError

MIB = 1 << 20


@pytest.mark.parametrize("seed", range(20))
def test_constants_come_back_within_two_percent(seed):
    device = SimulatedDevice(SimulatedSpec(seed=seed, noise=0.02, spikes=0.01))
    truth, found = device.spec.costs, constants.measure(device)
    assert found.launch_us == pytest.approx(truth.launch_us, rel=0.02)
    assert found.gap_us == pytest.approx(truth.gap_us, rel=0.02)
    assert found.sync_us == pytest.approx(truth.sync_us, rel=0.02)
    assert found.floor_us == pytest.approx(truth.kernel("elementwise").floor_us, rel=0.02)
    assert found.node_gap_us == pytest.approx(truth.node_gap_us, rel=0.04)
    assert found.dispatch_us == pytest.approx(truth.dispatch("elementwise"), rel=0.02)
    assert found.queue == device.spec.queue
    assert found.stable


@pytest.mark.parametrize("queue", [37, 1024, 3000])
def test_queue_depth_is_found_whatever_it_is(queue):
    assert constants.measure(SimulatedDevice(SimulatedSpec(queue=queue))).queue == queue


def test_constants_of_another_device_come_back_too():
    truth = TrueCosts(launch_us=9.0, gap_us=0.9, sync_us=11.0, node_gap_us=0.5)
    found = constants.measure(SimulatedDevice(SimulatedSpec(seed=5, costs=truth)))
    assert (found.launch_us, found.sync_us) == pytest.approx((9.0, 11.0), rel=0.02)
    assert found.gap_us == pytest.approx(0.9, rel=0.05)


def test_what_reading_the_clock_costs_is_not_taken_for_synchronisation():
    slow = SimulatedDevice(SimulatedSpec(clock_us=0.8))
    found, truth = constants.measure(slow), slow.spec.costs
    assert (found.sync_us, found.launch_us) == pytest.approx((truth.sync_us, truth.launch_us), rel=0.02)


def test_what_was_seen_of_a_lone_kernel_and_of_a_queue_is_kept_whole():
    # Were the marker to travel faster than a kernel, the constants would shift, but no latency made of them.
    fast = replace(TrueCosts(), mark_us=0.1)
    device = SimulatedDevice(SimulatedSpec(noise=0.0, spikes=0.0, drift=0.0, clock_us=0.0, costs=fast))
    found = constants.measure(device)
    assert found.launch_us + found.floor_us + found.sync_us == pytest.approx(4.0 + 1.8 + 3.0)
    assert found.floor_us + found.gap_us == pytest.approx(1.8 + 1.2)


def test_an_endless_queue_is_reported_not_guessed():
    with pytest.raises(CalibrationError, match="never waited for simulated, though 16384 launches"):
        constants.measure(SimulatedDevice(SimulatedSpec(queue=10**6)))


def test_constants_go_into_the_device_description_and_into_a_journal():
    clocks = constants.Clocks(launch_us=1.0, gap_us=2.0, sync_us=3.0, queue=4, stable=False)
    info = clocks.into(SimulatedDevice().info())
    assert (info.launch_us, info.gap_us, info.sync_us, info.queue) == (1.0, 2.0, 3.0, 4)
    timings = clocks.timings()
    assert timings["gap_us"] == Timing(2e-6, 0.0, 1, False)
    assert timings["queue"].median_s == 4.0
    assert timings.keys() == set(clocks.__struct_fields__) - {"stable"}


def row(name: str, size: int, bytes_per_us: float, error: str = "", protocol: str = "single") -> Row:
    timing = Timing(size / bytes_per_us * 1e-6, 0.0, 5, True)
    return Row(Cell("memory", name, {"bytes": size}), {} if error else {protocol: timing}, 0.1, error)


def test_a_device_is_described_by_its_memory_cells() -> None:
    rows = [
        *(row("read", size * MIB, rate) for size, rate in ((1, 40.0e3), (16, 40.0e3), (32, 20.0e3), (64, 10.0e3))),
        *(row("weights", size * MIB, rate) for size, rate in ((1, 60.0e3), (8, 60.0e3), (16, 20.0e3))),
        row("bandwidth", 256 * MIB, 5.0e3),
        row("upload", 256 * MIB, 3.0e3),
        row("fresh", 256 * MIB, 2.0e3),
    ]
    info = constants.described(factories.device(), rows)
    assert info.bandwidth_bytes_per_us == 10.0e3  # a copy reads and writes
    assert info.copy_bytes_per_us == 3.0e3
    assert info.fresh_bytes_per_us == pytest.approx(1.0 / (1.0 / 2.0e3 - 1.0 / 5.0e3), rel=1e-4)
    assert info.cache_bytes == pytest.approx(32 * MIB)  # 20 is halfway from 40 to 10
    assert info.resident_bytes == pytest.approx(8 * MIB * 2**0.5 / 1.5)  # half of it is found between 8 and 16
    assert info.launch_us == factories.device().launch_us


def test_the_gap_between_queued_copies_is_no_part_of_them() -> None:
    taken_us = 256 * MIB / 5.0e3
    queued = row("bandwidth", 256 * MIB, 5.0e3, protocol="queued")
    info = constants.described(factories.device(gap_us=0.1 * taken_us), [queued])
    assert info.bandwidth_bytes_per_us == pytest.approx(10.0e3 / 0.9, rel=1e-4)


def test_what_was_not_measured_stays_as_the_device_says() -> None:
    device = factories.device(cache_bytes=7 * MIB)
    info = constants.described(device, [row("bandwidth", MIB, 5.0), row("weights", MIB, 9.0)])  # one says nothing
    assert (info.cache_bytes, info.copy_bytes_per_us, info.resident_bytes) == (7 * MIB, 0.0, 0)
    other = Row(Cell("kernel", "gemm", {"bytes": MIB}), {"queued": Timing(1.0, 0.0, 5, True)}, 0.1)
    info = constants.described(device, [row("upload", MIB, 5.0, error="out of memory"), other])
    assert (info.bandwidth_bytes_per_us, info.copy_bytes_per_us, info.cache_bytes) == (0.0, 0.0, 7 * MIB)


@pytest.mark.parametrize(
    ("rates", "cache"),
    [
        ({100: 10.0, 200: 10.0, 400: 10.0}, 0),  # nothing is faster than memory
        ({100: 14.9, 200: 12.0, 400: 10.0}, 0),  # nor by so little
        ({100: 40.0, 200: 20.0, 400: 10.0}, 200),
        ({100: 40.0, 200: 40.0, 400: 10.0, 800: 10.0}, 283),  # halfway between two sizes
        ({100: 40.0, 200: 36.0, 400: 10.0, 800: 11.0}, 275),  # noise moves it by a little
        ({100: 10.0, 200: 40.0}, 200),
        ({8: 12.0}, 0),
    ],
)
def test_the_cache_ends_where_reads_slow_down(rates: dict[int, float], cache: int) -> None:
    assert constants.cache_bytes(rates) == pytest.approx(cache, abs=1)
