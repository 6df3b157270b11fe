"""Whether other work disturbed a piece of timing: the system's counters are read before and after it and compared.

What becomes of a disturbed visit is its caller's business. The time of day is never read, so that setting it disturbs
nothing. Where a system keeps a counter to itself, nothing is said of what would follow from it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import NamedTuple

from latpred import host
from latpred.calibration.devices.machine import GpuState, gpu_reason

# A shorter piece is not judged by /proc/stat, whose ticks are 10 ms, nor by the system's pressure: in 20 ms of calm,
# tasks that had nothing to do with the timed thread waited for up to a third of the time.
SHORT_S = 0.05
TICKS_S = 0.04  # idle, disk and stolen time are each cut to a tick, and our own is not read at the same instant
OTHERS = 0.10  # processors that others may use: the kernel's own threads and a virtual machine's use up to 0.05
# The same for each processor that the timed threads leave free: a server of 64 always does something on one of them,
# which takes some memory bandwidth and clock from the timed threads, but no processor.
OTHERS_OF_SPARE = 0.05
# Each timed thread loses a little, so both of these grow with the threads beyond two. What others use does not: on a
# processor that is timed it holds up all threads.
STOLEN = 0.05  # less than of others, since a hypervisor stops a thread for whole slices of some ms
WAITING = 0.10  # of the time, or processors, that ready threads may lack: up to 0.07 where they fill a calm machine
LEAST_DELAY_S = 1e-3  # handing over to a kernel thread takes some 0.05 ms, a large share of a very short piece
LEAST_SLEEP_S = 0.5  # the two clocks that tell a sleep are read one after the other, and we may be stopped in between
BUSY_LOAD = 0.3  # tasks for each usable processor; this process itself adds 0.1 while it starts
WINDOW_S = 0.5  # the shortest in which ticks tell OTHERS from nothing


class Counters(NamedTuple):
    """What the system had counted at one moment; only differences mean anything. None is what it does not count."""

    wall_s: float  # of a clock that never jumps and stands still while the machine sleeps
    boot_s: float | None  # of a clock that goes on meanwhile
    # Processor time of all threads of this process and of those under it, where the system lists them: compilers work
    # in processes that stay. Elsewhere a child counts as other work until it ends.
    process_cpu_s: float
    busy_s: float | None  # time that all processors were not idle, without what was stolen
    steal_s: float | None  # time that the hypervisor took from them
    pressure_s: float | None  # time in which some task of the system waited for a processor
    usable_cores: int  # processors that this process may run on
    delay_s: float | None = None  # time that threads of this process waited for a processor, added up
    processors: int = 0  # of the system; 0 is unknown
    throttled_s: float | None = None  # time that a container's limit kept its threads from running, added up


def read() -> Counters:
    """What the system has counted up to now; never raises."""
    running_s = host.descendants_s()
    wall_s, boot_s = time.perf_counter(), _boot_s()
    spent = host.processor_time()
    children = os.times()
    return Counters(
        wall_s=wall_s,
        boot_s=boot_s,
        process_cpu_s=time.process_time() + children.children_user + children.children_system + running_s,
        # Idle time is kept to the microsecond, busy time is sampled at ticks: what is not idle was busy.
        busy_s=spent and spent.processors * wall_s - spent.idle_s - spent.stolen_s,
        steal_s=spent and spent.stolen_s,
        pressure_s=host.pressure_s(),
        usable_cores=host.usable_cores(),
        delay_s=host.own_delay_s(),
        processors=spent.processors if spent else 0,
        throttled_s=host.throttled_s(),
    )


def _boot_s() -> float | None:
    clock: int | None = getattr(time, "CLOCK_BOOTTIME", None)
    try:
        return None if clock is None else time.clock_gettime(clock)
    except OSError:
        return None


class Disturbance(NamedTuple):
    """What happened beside a piece of timing."""

    reason: str = ""  # the gravest one to call it disturbed, part of a sentence; "" when all was calm or unknown
    # Processors that other processes, beyond what a server always does on those left free, and the hypervisor used.
    busy: float = 0.0
    device: str = ""  # the gravest that touches a device which works without its host


def between(before: Counters, after: Counters, *, threads: int = 1, gpu: str = "") -> Disturbance:
    """What happened from one reading to another, between which so many threads were timed."""
    seconds = after.wall_s - before.wall_s
    if seconds <= 0:  # a coarse clock
        return Disturbance(gpu, device=gpu)
    # A processor that came or went makes busy time jump by its share of the system's whole life.
    counted = seconds >= SHORT_S and before.processors == after.processors
    own_s = after.process_cpu_s - before.process_cpu_s
    others = _grown(before.busy_s, after.busy_s, own_s) / seconds if counted else 0.0
    stolen = _grown(before.steal_s, after.steal_s) / seconds if counted else 0.0
    spare, ticks = OTHERS_OF_SPARE * (after.processors - threads), TICKS_S / seconds
    crowd = max(threads / 2, 1.0)
    throttled = _grown(before.throttled_s, after.throttled_s) / seconds
    slept_s = _grown(before.boot_s, after.boot_s, seconds)
    slept = f"the machine slept {slept_s:.0f} s" if slept_s > LEAST_SLEEP_S else ""
    lost = before.usable_cores - after.usable_cores
    taken = "a processor was" if lost == 1 else f"{lost} processors were"
    found = (
        (slept, slept),
        (lost > 0, f"{taken} taken away ({before.usable_cores} to {after.usable_cores})"),
        (gpu, gpu),
        (throttled > crowd * WAITING, f"the container's limit took {throttled:.1f} processors"),
        (stolen > max(crowd * STOLEN, ticks), f"the hypervisor took {stolen:.1f} processors"),
        (others > max(OTHERS, spare, ticks), f"other work used {others:.1f} processors"),
        # More threads than processors wait for one another, which is no disturbance.
        (threads <= after.usable_cores, _waiting(before, after, seconds, crowd)),
    )
    reason = next((said for is_so, said in found if is_so), "")
    return Disturbance(reason, max(others - max(spare, 0.0), 0.0) + stolen, slept or gpu)


def _waiting(before: Counters, after: Counters, seconds: float, crowd: float) -> str:
    """Whether threads lacked processors: those of this process, or any of the system where the kernel says no more."""
    if before.delay_s is not None and after.delay_s is not None:
        delayed = _grown(before.delay_s, after.delay_s) / seconds
        lacked = delayed > max(crowd * WAITING, LEAST_DELAY_S / seconds)
        return f"the timed threads lacked {delayed:.1f} processors" if lacked else ""
    waiting = _grown(before.pressure_s, after.pressure_s) / seconds if seconds >= SHORT_S else 0.0
    return f"tasks waited for a processor {100 * waiting:.0f} % of the time" if waiting > WAITING else ""


def _grown(before: float | None, after: float | None, expected: float = 0.0) -> float:
    """How much more a counter grew than expected; not less than nothing, as counters are read one after the other."""
    return 0.0 if before is None or after is None else max(after - before - expected, 0.0)


class Watch:
    """Watches the machine from its making on, and says of each lap what disturbed it.

    `gpu` reads the state of the GPU where one is timed, which opens the driver's library and may take a while.
    """

    def __init__(self, *, threads: int = 1, gpu: Callable[[], GpuState | None] | None = None) -> None:
        self._threads, self._gpu = threads, gpu
        self._state = gpu() if gpu else None
        self._before = read()
        self._cores = self._before.usable_cores  # what is timed later on fewer is of another machine

    def lap(self) -> Disturbance:
        """What happened since the last lap, or since the start; a new lap begins."""
        after = read()
        state = self._gpu() if self._gpu else None
        before = self._before._replace(usable_cores=self._cores)
        disturbance = between(before, after, threads=self._threads, gpu=gpu_reason(self._state, state))
        self._before, self._state = after, state
        return disturbance


def busy_now() -> str:
    """What other work did to the processors in half a second, part of a sentence; "" where it was calm or unknown."""
    before = read()
    time.sleep(WINDOW_S)
    after = read()
    load = host.load() if after.busy_s is None else None  # of the last minute, where no more is said
    if load is not None and load > BUSY_LOAD * after.usable_cores:
        return f"the load is {load:.1f}"
    return between(before, after).reason


def wait_for_calm(limit_s: float, *, threads: int = 1) -> None:
    """Sleep until other work leaves the machine alone for half a second, or so long."""
    watch = Watch(threads=threads)
    for _ in range(max(math.ceil(limit_s / WINDOW_S), 1)):
        time.sleep(WINDOW_S)
        if not watch.lap().reason:
            return
