"""Constants of a device: its clock's, found from outside a device that knows its own, and its memory's."""

from __future__ import annotations

import factories
import pytest

from latpred.calibration.cells import CLOCK, Cell
from latpred.calibration.devices import Call, constants
from latpred.calibration.devices.simulated import SimulatedDevice, SimulatedSpec, TrueCosts
from latpred.calibration.session import Row
from latpred.calibration.timing.timer import Timing
from latpred.errors import CalibrationError

MIB = 1 << 20
OTHER = TrueCosts(launch_us=9.0, gap_us=0.9, sync_us=11.0, node_gap_us=0.5)


def found_us(device: SimulatedDevice) -> dict[str, float]:
    timings = constants.measure(device)
    assert all(timing.stable for timing in timings.values())
    return {name: timing.median_s * (1.0 if name == "queue" else 1e6) for name, timing in timings.items()}


@pytest.mark.parametrize(
    ("spec", "gap_off"),
    [
        *((SimulatedSpec(seed=seed), 0.02) for seed in range(20)),
        (SimulatedSpec(seed=5, costs=OTHER), 0.05),
        (SimulatedSpec(clock_us=0.8), 0.02),  # what reading the clock costs is not taken for synchronisation
        *((SimulatedSpec(queue=queue), 0.02) for queue in (37, 3000)),
    ],
)
def test_constants_come_back_within_two_percent(spec: SimulatedSpec, gap_off: float) -> None:
    found, truth = found_us(SimulatedDevice(spec)), spec.costs
    assert found["launch_us"] == pytest.approx(truth.launch_us, rel=0.02)
    assert found["gap_us"] == pytest.approx(truth.gap_us, rel=gap_off)
    assert found["sync_us"] == pytest.approx(truth.sync_us, rel=0.02)
    assert found["floor_us"] == pytest.approx(truth.kernel("elementwise").floor_us, rel=0.02)
    assert found["node_gap_us"] == pytest.approx(truth.node_gap_us, rel=0.04)
    assert found["dispatch_us"] == pytest.approx(truth.dispatch("elementwise") + spec.clock_us, rel=0.02)
    assert found["queue"] == spec.queue


def test_what_was_seen_of_a_lone_kernel_and_of_a_queue_is_kept_whole() -> None:
    # Were the marker to travel faster than a kernel, the constants would shift, but no latency made of them.
    fast = TrueCosts(mark_us=0.1)
    spec = SimulatedSpec(noise=0.0, spikes=0.0, drift=0.0, clock_us=0.0, costs=fast)
    found = found_us(SimulatedDevice(spec))
    assert found["launch_us"] + found["floor_us"] + found["sync_us"] == pytest.approx(4.0 + 1.8 + 3.0)
    assert found["floor_us"] + found["gap_us"] == pytest.approx(1.8 + 1.2)


class Jittery(SimulatedDevice):
    """A marker seems to travel with a kernel, so that the kernel seems to take all of its period."""

    def time_replayed(self, call: Call, count: int) -> float | None:
        return (3.0 + 1.1 * count) * 1e-6


def test_no_floor_is_longer_than_from_one_kernel_of_a_graph_to_the_next() -> None:
    quiet = SimulatedSpec(noise=0.0, spikes=0.0, drift=0.0, clock_us=0.0)
    found, usual = found_us(Jittery(quiet)), found_us(SimulatedDevice(quiet))
    assert (usual["floor_us"], found["floor_us"]) == (pytest.approx(1.8), pytest.approx(1.1))
    assert found["node_gap_us"] == pytest.approx(0.0)
    for name in ("gap_us", "launch_us"):  # what a queue and a lone kernel took stays whole
        assert found[name] + found["floor_us"] == pytest.approx(usual[name] + usual["floor_us"])


def test_an_endless_queue_is_reported_not_guessed() -> None:
    with pytest.raises(CalibrationError, match="never waited for simulated, though 16384 launches"):
        constants.measure(SimulatedDevice(SimulatedSpec(queue=10**6)))


def clocks(gap_us: float) -> Row:
    """A journal's row of the clock."""
    seconds = {"launch_us": 1e-6, "gap_us": gap_us * 1e-6, "sync_us": 3e-6, "floor_us": 2e-6, "queue": 4.0}
    return Row(CLOCK, {name: Timing(value, 0.0, 1, True) for name, value in seconds.items()}, 0.1)


def row(name: str, size: int, bytes_per_us: float, error: str = "", protocol: str = "single") -> Row:
    timing = Timing(size / bytes_per_us * 1e-6, 0.0, 5, True)
    return Row(Cell("memory", name, {"bytes": size}), {} if error else {protocol: timing}, 0.1, error)


def test_a_device_is_described_by_its_clock_and_memory_cells() -> None:
    rows = [
        *(row("read", size * MIB, rate) for size, rate in ((1, 40.0e3), (16, 40.0e3), (32, 20.0e3), (64, 10.0e3))),
        *(row("weights", size * MIB, rate) for size, rate in ((1, 60.0e3), (8, 60.0e3), (16, 20.0e3))),
        row("bandwidth", 256 * MIB, 5.0e3),
        row("upload", 256 * MIB, 3.0e3),
        row("fresh", 256 * MIB, 2.0e3),
    ]
    info = constants.described(factories.device(), [*rows, clocks(gap_us=2.0)])
    assert (info.launch_us, info.gap_us, info.sync_us, info.queue) == pytest.approx((1.0, 2.0, 3.0, 4))
    assert info.bandwidth_bytes_per_us == 10.0e3  # a copy reads and writes
    assert info.copy_bytes_per_us == 3.0e3
    assert info.fresh_bytes_per_us == pytest.approx(1.0 / (1.0 / 2.0e3 - 1.0 / 5.0e3), rel=1e-4)
    assert info.cache_bytes == pytest.approx(32 * MIB)  # 20 is halfway from 40 to 10
    assert info.resident_bytes == pytest.approx(8 * MIB * 2**0.5 / 1.5)  # half of it is found between 8 and 16
    with pytest.raises(CalibrationError, match=r"no clock constants\. Calibrate again, with --fresh"):
        constants.described(factories.device(), rows)


def test_what_was_not_measured_stays_as_the_device_says() -> None:
    device = factories.device(asynchronous=False, cache_bytes=7 * MIB)
    info = constants.described(device, [row("bandwidth", MIB, 5.0), row("weights", MIB, 9.0)])  # one says nothing
    assert (info.cache_bytes, info.copy_bytes_per_us, info.resident_bytes) == (7 * MIB, 0.0, 0)
    assert info.launch_us == device.launch_us
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
