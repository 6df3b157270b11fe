"""Measures the constants of an asynchronous device's clock: launch latency, gap, synchronisation, floor and queue.

Three things can be seen from outside: a lone kernel takes dispatch + launch + floor + sync, kernels in a queue follow
each other every floor + gap, and waiting for an idle device takes sync. That leaves one free choice between launch,
floor and gap, which no latency depends on: what one gains the others lose. A marker settles it, which goes the way of a
kernel but occupies the device for no time: a lone marker takes dispatch + launch + sync. So a chain of markers and one
of kernels separate floor from launch, and with it from gap. What the host takes for both scatters, and kernels of a
replayed graph follow each other closer than those of a queue: no floor is longer than from one of them to the next. On
a synchronous device all constants are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat
from math import inf, isfinite, log, sqrt

import msgspec
import numpy as np

from latpred.calibration.cells import CLOCK, COPY, FRESH, UPLOAD, Cell
from latpred.calibration.devices.base import Call, Device
from latpred.calibration.session import Row
from latpred.calibration.timing import timer
from latpred.calibration.timing.reference_speed import gauge_on
from latpred.calibration.timing.timer import Plan, Timing
from latpred.errors import CalibrationError
from latpred.profile.document import DeviceInfo
from latpred.units import US_PER_S

# One call a sample: what reading the clock costs is then the same in every sample and cancels in differences.
FINE = Plan(sample_s=0.0, loops=1, least=50, most=8000, precision=2e-4, budget_s=1.0)
# Short queues: one slow kernel in a hundred then leaves most samples, and so their median, untouched.
QUEUED = Plan(sample_s=2e-4, loops=16, most=1000, precision=3e-4, budget_s=1.0)
CHAIN = 16  # kernels of a replayed graph
REPLAYS = 200
LONGEST_QUEUE = 16384
TRIES = 3
CACHED = 1.5  # times the bandwidth of memory that a cache has at least

MARK, TINY = Cell("clock", "mark"), Cell("clock", "tiny")


def measure(device: Device) -> dict[str, Timing]:
    """An asynchronous device's constants as a journal holds them: as times, of which the queue's is a number."""
    tiny, mark = device.prepare(TINY), device.prepare(MARK)
    gauge = gauge_on(device.info().kind, CLOCK.runtime)
    lone_tiny, lone_mark = (timer.single(device, call, FINE, gauge) for call in (tiny, mark))
    issue_tiny, issue_mark = (timer.issue(device, call, FINE, gauge) for call in (tiny, mark))
    idle = timer.single(device, lambda: None, replace(FINE, warmup_s=0.05), gauge)
    period = timer.queued(device, tiny, QUEUED)
    # A sample around no call waits once before the clock starts and once after: only the latter is timed.
    readings = [device.clock() for _ in range(200)]
    sync_us = _us(idle) - float(np.median(np.diff(readings))) * 1e6
    behind_mark_us = _us(lone_mark) - _us(issue_mark)
    floor_us = _us(lone_tiny) - _us(issue_tiny) - behind_mark_us
    step_us = _step_us(device, tiny)
    floor_us = min(max(floor_us, 0.0), _us(period), step_us)
    gap_us = _us(period) - floor_us
    constants_us = {
        # From the end of a dispatch to the start of its kernel on an idle device. What was seen of a lone kernel is
        # kept whole, wherever the marker draws the line.
        "launch_us": max(_us(lone_tiny) - _us(issue_tiny) - sync_us - floor_us, 0.0),
        "gap_us": gap_us,  # between the end of a kernel and the start of the next in the queue
        "sync_us": sync_us,  # what waiting costs when there is nothing left to wait for
        "floor_us": floor_us,  # device time of the smallest kernel
        "node_gap_us": step_us - floor_us if isfinite(step_us) else 0.0,
        "dispatch_us": _us(issue_tiny),  # host time to issue the smallest kernel
    }
    seconds = {name: us * 1e-6 for name, us in constants_us.items()}
    queue = _queue_depth(device, tiny, _us(issue_tiny))
    timed = (lone_tiny, lone_mark, issue_tiny, issue_mark, idle)
    stable, slow = all(one.stable for one in (*timed, period)), max(one.slow for one in timed)
    return {name: Timing(value, 0.0, 1, stable, slow) for name, value in {**seconds, "queue": float(queue)}.items()}


def _queue_depth(device: Device, tiny: Call, dispatch_us: float) -> int:
    """How many launches the device takes before the host must wait.

    The device is kept busy while small kernels are launched behind it: the first launch that takes as long as the
    device stays busy found the queue full.
    """
    limit = 2048
    for _ in range(TRIES):
        busy_us = max(4 * limit * dispatch_us, 2e4)
        busy = device.prepare(Cell("clock", "busy", {"us": round(busy_us)}))
        with device.errors():
            device.synchronize()
            start = device.clock()
            busy()
            ends = [device.clock()]
            for _ in repeat(None, limit):
                tiny()
                ends.append(device.clock())
                if ends[-1] - start > 0.5 * busy_us * 1e-6:
                    break
            device.synchronize()
        longest = int(np.argmax(np.diff(ends)))
        if ends[longest + 1] - ends[longest] > 0.25 * busy_us * 1e-6:
            return longest
        limit = min(4 * limit, LONGEST_QUEUE)
    raise CalibrationError(
        f"the host never waited for {device.name}, though {limit} launches were behind a busy kernel. "
        "Is something else using the device? Calibrate again when it is idle."
    )


def _step_us(device: Device, tiny: Call) -> float:
    """Microseconds from the start of one kernel to that of the next in a replayed graph; infinite where none is."""
    replayed_us = []
    for length in (1, CHAIN):
        if device.time_replayed(tiny, length) is None:
            return inf
        seen = [seconds for _ in range(REPLAYS) if (seconds := device.time_replayed(tiny, length)) is not None]
        replayed_us.append(float(np.median(seen)) * US_PER_S)
    one_us, chain_us = replayed_us
    return max(chain_us - one_us, 0.0) / (CHAIN - 1)


def _us(timed: Timing) -> float:
    return timed.median_s * 1e6


def described(info: DeviceInfo, rows: Sequence[Row]) -> DeviceInfo:
    """The device with what its clock and memory cells measured filled in."""
    if info.asynchronous:
        timings = next((row.timings for row in rows if row.cell == CLOCK and not row.error), None)
        if timings is None:
            raise CalibrationError("the journal has no clock constants. Calibrate again, with --fresh.")
        values = {name: timings[name].median_s * US_PER_S for name in ("launch_us", "gap_us", "sync_us")}
        info = msgspec.structs.replace(info, **values, queue=round(timings["queue"].median_s))
    by_size: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.cell.kind == "memory" and not row.error:
            # Between copies that follow each other lies the gap, as between any kernels.
            gap_us = info.gap_us if "queued" in row.timings else 0.0
            taken_us = next(iter(row.timings.values())).median_s * US_PER_S - gap_us
            by_size.setdefault(row.cell.name, {})[row.cell.dims["bytes"]] = row.cell.dims["bytes"] / taken_us
    rates = {name: max(each.values()) for name, each in by_size.items()}
    # Microseconds that the system takes for a byte that it gives.
    longer = 1.0 / rates.get(FRESH.name, inf) - 1.0 / rates.get(COPY.name, inf)
    return msgspec.structs.replace(
        info,
        bandwidth_bytes_per_us=round(2 * rates.get(COPY.name, 0.0), 1),  # a copy reads and writes
        copy_bytes_per_us=round(rates.get(UPLOAD.name, 0.0), 1),
        cache_bytes=cache_bytes(by_size["read"]) if "read" in rates else info.cache_bytes,
        resident_bytes=_resident_bytes(by_size["weights"]) if "weights" in rates else 0,
        fresh_bytes_per_us=round(1.0 / longer, 1) if longer > 0 else 0.0,
    )


def cache_bytes(rates: dict[int, float]) -> int:
    """Size at which reads are halfway, on a log scale, from the pace of the caches to that of memory, interpolated."""
    memory, cached = min(rates.values()), max(rates.values())
    if cached < CACHED * memory:
        return 0
    halfway = sqrt(memory * cached)
    above = max(size for size, rate in rates.items() if rate >= halfway)
    beyond = [size for size in rates if size > above]
    if not beyond:
        return above
    share = log(rates[above] / halfway) / log(rates[above] / rates[min(beyond)])
    return round(float(above * (min(beyond) / above) ** share))


def _resident_bytes(rates: dict[int, float]) -> int:
    """What a forward pass may touch for its weights to stay in the cache, from chains of products of one row.

    Half of a chain's weights do where a byte takes the mean of the shortest and the longest time, and half of a pass's
    where it touches 1.5 times the result (`resident_share`). Chains that are all as fast say nothing: 0.
    """
    sizes = sorted(rates)
    times = np.maximum.accumulate([1.0 / rates[size] for size in sizes])
    halfway = np.interp(0.5 * (times[0] + times[-1]), times, np.log(sizes))
    return round(float(np.exp(halfway)) / 1.5) if times[-1] >= CACHED * times[0] else 0
