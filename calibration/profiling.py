"""What a profiler sees of one forward pass: ops that launched something, kernels that ran, how long they took together.

Device times here carry the profiler's own cost; latencies are `timing`'s business. In a process that has profiled once
every later launch takes longer, as PyTorch leaves the driver's callbacks in place: time first, profile last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

WARM_UPS, FORWARDS = 3, 3


class Seen(NamedTuple):
    """What one forward pass launched.

    launches : ops that gave the device something to do, which is what latpred walks; a library may take several kernels
    for one, and what a graph replays is launched by none. kernels, kernel_s : kernels that ran, and seconds of them
    all. fills : of memory, which latpred does not count.
    """

    launches: float
    kernels: float
    kernel_s: float
    fills: float


class Event(NamedTuple):
    """One thing a device did."""

    name: str
    microseconds: float


def profile(call: Callable[[], object], synchronize: Callable[[], None]) -> Seen:
    """What torch.profiler sees of a call on a CUDA device, averaged over a few."""
    for _ in range(WARM_UPS):
        call()
    synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        for _ in range(FORWARDS):
            call()
        synchronize()
    events = list(profiler.events() or ())
    return summed(device_events(events), launching_ops(events), FORWARDS)


def device_events(events: Iterable[Any]) -> list[Event]:
    """Those of a profiler's events that happened on the device, annotations of user code left out."""
    return [
        Event(event.name, float(event.device_time_total))
        for event in events
        if event.device_type.name != "CPU" and not event.is_user_annotation
    ]


def launching_ops(events: Iterable[Any]) -> int:
    """How many of a profiler's events are ops that launched a kernel, or a copy within the device."""
    return sum(
        event.device_type.name == "CPU" and any(_counts(kernel.name) for kernel in event.kernels) for event in events
    )


def summed(events: Iterable[Event], ops: int, forwards: int) -> Seen:
    """Kernels and copies within the device, for each forward pass; copies from and to the host are none of its work.

    >>> summed([Event("gemm", 4.0), Event("Memcpy HtoD", 9.0), Event("Memset (Device)", 1.0)], ops=1, forwards=1)
    Seen(launches=1.0, kernels=1.0, kernel_s=4e-06, fills=1.0)
    """
    found = list(events)
    times = [event.microseconds for event in found if _counts(event.name)]
    fills = sum(event.name.startswith("Memset") for event in found)
    return Seen(ops / forwards, len(times) / forwards, sum(times) * 1e-6 / forwards, fills / forwards)


def _counts(name: str) -> bool:
    return not name.startswith(("Memset", "Memcpy")) or "DtoD" in name
