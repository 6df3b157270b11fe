"""What memory cells say of a device: its bandwidth, the cache that a process really gets, and uploads from the host.

On a shared machine the last-level cache that the processor names is not the one a process has, so it is read off the
bandwidth at growing sizes.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from latpred.calibration.session import Row
from latpred.profile import DeviceInfo
from latpred.units import US_PER_S

CACHED = 1.5  # times the bandwidth of memory, at which bytes must come from a cache


def described(info: DeviceInfo, rows: Iterable[Row]) -> DeviceInfo:
    """The device with what its memory cells measured filled in."""
    read: dict[int, float] = {}
    rates: dict[str, float] = {}
    for row in rows:
        if row.cell.kind == "memory" and not row.error:
            size = row.cell.dims["bytes"]
            # Between copies that follow each other lies the gap, as between any kernels.
            gap_us = info.gap_us if "queued" in row.timings else 0.0
            rate = size / (next(iter(row.timings.values())).median_s * US_PER_S - gap_us)
            if row.cell.name == "read":
                read[size] = rate
            else:
                rates[row.cell.name] = rate
    bandwidth = 2 * rates.get("bandwidth", 0.0)  # a copy reads and writes
    return msgspec.structs.replace(
        info,
        bandwidth_bytes_per_us=round(bandwidth, 1),
        copy_bytes_per_us=round(rates.get("upload", 0.0), 1),
        cache_bytes=cache_bytes(read) if read else info.cache_bytes,
    )


def cache_bytes(rates: dict[int, float]) -> int:
    """Largest size that is read clearly faster than the largest of all, which no cache holds.

    Parameters
    ----------
    rates : dict[int, float]
        Bytes per microsecond of repeated reads, by size in bytes.

    Examples
    --------
    >>> cache_bytes({1 << 20: 40.0, 4 << 20: 20.0, 16 << 20: 11.0, 64 << 20: 8.0}) >> 20
    4
    """
    memory = rates[max(rates)]
    cached = [size for size, rate in rates.items() if rate >= CACHED * memory]
    return max(cached, default=0)
