"""What memory cells say of a device: its bandwidth, the cache that a process really gets, and uploads from the host.

On a shared machine the last-level cache that the processor names is not the one a process has, so it is read off the
bandwidth at growing sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from latpred.calibration.session import Row
from latpred.profile import DeviceInfo
from latpred.units import US_PER_S

# A pass may touch this part of the last-level cache for its weights to stay there: the rest is other programs'. Weights
# were read at 30 to 90 GB/s in passes that touched up to 3 MiB of 32, at 5 to 18 GB/s in those of 6.5 MiB and more.
CACHE_SHARE = 4
CACHED = 1.5  # times the bandwidth of memory that a cache has at least


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
    cache = cache_bytes(read) if read else info.cache_bytes
    return msgspec.structs.replace(
        info,
        bandwidth_bytes_per_us=round(bandwidth, 1),
        copy_bytes_per_us=round(rates.get("upload", 0.0), 1),
        cache_bytes=cache,
        resident_bytes=0 if info.asynchronous else cache // CACHE_SHARE,
    )


def cache_bytes(rates: dict[int, float]) -> int:
    """Size at which reads are halfway, on a log scale, from the pace of the caches to that of memory.

    The slowest pace is memory's, the fastest a cache's. Between two sizes the one in question is interpolated, so that
    noise moves it by a little and not to the next size.

    Parameters
    ----------
    rates : dict[int, float]
        Bytes per microsecond of repeated reads, by size in bytes.

    Examples
    --------
    >>> cache_bytes({4 << 20: 40.0, 16 << 20: 40.0, 32 << 20: 20.0, 64 << 20: 10.0, 128 << 20: 10.0}) >> 20
    32
    """
    memory, cached = min(rates.values()), max(rates.values())
    if cached < CACHED * memory:
        return 0
    halfway = math.sqrt(memory * cached)
    above = max(size for size, rate in rates.items() if rate >= halfway)
    beyond = [size for size in rates if size > above]
    if not beyond:
        return above
    share = math.log(rates[above] / halfway) / math.log(rates[above] / rates[min(beyond)])
    return round(float(above * (min(beyond) / above) ** share))
