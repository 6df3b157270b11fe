"""Memory cells: bandwidth, uploads, and the cache that a process really gets."""

from __future__ import annotations

import factories
import msgspec
import pytest

from latpred.calibration.cells import Cell
from latpred.calibration.devices import constants
from latpred.calibration.session import Row
from latpred.calibration.timing.timer import Timing

MIB = 1 << 20


def row(name: str, size: int, bytes_per_us: float, error: str = "") -> Row:
    timing = Timing(size / bytes_per_us * 1e-6, 0.0, 5, True)
    return Row(Cell("memory", name, {"bytes": size}), {} if error else {"single": timing}, 0.1, error)


def test_a_device_is_described_by_its_memory_cells() -> None:
    rows = [
        *(row("read", size * MIB, rate) for size, rate in ((1, 40.0e3), (16, 40.0e3), (32, 20.0e3), (64, 10.0e3))),
        row("bandwidth", 256 * MIB, 5.0e3),
        row("upload", 256 * MIB, 3.0e3),
    ]
    info = constants.described(factories.device(), rows)
    assert info.bandwidth_bytes_per_us == 10.0e3  # a copy reads and writes
    assert info.copy_bytes_per_us == 3.0e3
    assert info.cache_bytes == pytest.approx(32 * MIB)  # 20 is halfway from 40 to 10
    assert info.resident_bytes == 0  # of an asynchronous device
    cpu = constants.described(factories.device(asynchronous=False), rows)
    assert cpu.resident_bytes == cpu.cache_bytes // constants.CACHE_SHARE
    assert info.launch_us == factories.device().launch_us


def test_the_gap_between_queued_copies_is_no_part_of_them() -> None:
    queued = row("bandwidth", 256 * MIB, 5.0e3)
    queued = msgspec.structs.replace(queued, timings={"queued": queued.timings["single"]})
    taken_us = 256 * MIB / 5.0e3
    info = constants.described(factories.device(gap_us=0.1 * taken_us), [queued])
    assert info.bandwidth_bytes_per_us == pytest.approx(10.0e3 / 0.9, rel=1e-4)


def test_without_reads_the_cache_stays_what_the_device_says() -> None:
    info = constants.described(factories.device(cache_bytes=7 * MIB), [row("bandwidth", MIB, 5.0)])
    assert info.cache_bytes == 7 * MIB
    assert info.copy_bytes_per_us == 0.0


def test_failed_and_other_cells_say_nothing() -> None:
    other = Row(Cell("kernel", "gemm", {"bytes": MIB}), {"queued": Timing(1.0, 0.0, 5, True)}, 0.1)
    info = constants.described(factories.device(), [row("upload", MIB, 5.0, error="out of memory"), other])
    assert (info.bandwidth_bytes_per_us, info.copy_bytes_per_us, info.cache_bytes) == (0.0, 0.0, 0)


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
