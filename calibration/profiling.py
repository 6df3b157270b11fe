"""What a profiler sees of one forward pass: how many kernels the device ran, and how long they took together.

Device times here carry the profiler's own cost; latencies are `timing`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

FORWARDS = 3


class Seen(NamedTuple):
    """Launches of one forward pass, seconds of them all, and fills of memory, which latpred does not count."""

    launches: float
    kernel_s: float
    fills: float


class Event(NamedTuple):
    """One thing a device did."""

    name: str
    microseconds: float


def profile(call: Callable[[], object], synchronize: Callable[[], None]) -> Seen:
    """What torch.profiler sees of a call on a CUDA device, averaged over a few."""
    call()
    synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        for _ in range(FORWARDS):
            call()
        synchronize()
    return summed(device_events(profiler.events() or ()), FORWARDS)


def device_events(events: Iterable[Any]) -> list[Event]:
    """Those of a profiler's events that happened on the device, annotations of user code left out."""
    return [
        Event(event.name, float(event.device_time_total))
        for event in events
        if event.device_type.name != "CPU" and not event.is_user_annotation
    ]


def summed(events: Iterable[Event], forwards: int) -> Seen:
    """Kernels and copies within the device, for each forward pass; copies from and to the host are none of its work.

    >>> summed([Event("gemm", 4.0), Event("Memcpy HtoD", 9.0), Event("Memset (Device)", 1.0)], forwards=1)
    Seen(launches=1.0, kernel_s=4e-06, fills=1.0)
    """
    launches, fills, microseconds = 0, 0, 0.0
    for event in events:
        if event.name.startswith("Memset"):
            fills += 1
        elif not event.name.startswith("Memcpy") or "DtoD" in event.name:
            launches += 1
            microseconds += event.microseconds
    return Seen(launches / forwards, microseconds * 1e-6 / forwards, fills / forwards)
