"""Whether other work disturbed a piece of timing: the system's counters are read before and after it and compared.

What becomes of a disturbed visit is its caller's business. The time of day is never read, so that setting it disturbs
nothing. Where a system keeps a counter to itself, what would follow from it is unknown, not calm.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
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


def read(proc: Path = host.PROC) -> Counters:
    """What the system has counted up to now; never raises."""
    running_s = host.descendants_s(proc)
    wall_s, boot_s = time.perf_counter(), _boot_s()
    spent = host.processor_time(proc)
    children = os.times()
    return Counters(
        wall_s=wall_s,
        boot_s=boot_s,
        process_cpu_s=time.process_time() + children.children_user + children.children_system + running_s,
        # Idle time is kept to the microsecond, busy time is sampled at ticks: what is not idle was busy.
        busy_s=spent and spent.processors * wall_s - spent.idle_s - spent.stolen_s,
        steal_s=spent and spent.stolen_s,
        pressure_s=host.pressure_s(proc),
        usable_cores=host.usable_cores(),
        delay_s=host.own_delay_s(proc),
        processors=spent.processors if spent else 0,
    )


def _boot_s() -> float | None:
    clock: int | None = getattr(time, "CLOCK_BOOTTIME", None)
    try:
        return None if clock is None else time.clock_gettime(clock)
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class Disturbance:
    """What happened beside a piece of timing. None is what the system does not say, or not of so short a time."""

    seconds: float = 0.0  # length of the piece
    others: float | None = None  # processors that other processes used on average
    stolen: float | None = None  # processors that the hypervisor took on average
    waiting: float | None = None  # share of the time in which some task of the system waited for a processor
    delayed: float | None = None  # processors that the threads of this process lacked on average, ready to run
    cores: int = 0  # processors that this process could use at the end; 0 is unknown
    cores_lost: int = 0  # how many more they were at the start
    suspended_s: float = 0.0  # how long the machine slept
    gpu: str = ""  # what disturbed the GPU; "" when nothing did
    threads: int = 1  # threads that were timed
    processors: int = 0  # processors of the system; 0 is unknown

    @property
    def reason(self) -> str:
        """The gravest reason to call the piece disturbed, part of a sentence; "" when all was calm or unknown."""
        ticks = TICKS_S / self.seconds if self.seconds else math.inf
        spare = OTHERS_OF_SPARE * (self.processors - self.threads)
        others, stolen, waiting = self.others or 0.0, self.stolen or 0.0, self.waiting or 0.0
        if self.suspended_s > LEAST_SLEEP_S:
            return f"the machine slept {self.suspended_s:.0f} s"
        if self.cores_lost:
            taken = "a processor was" if self.cores_lost == 1 else f"{self.cores_lost} processors were"
            return f"{taken} taken away ({self.cores + self.cores_lost} to {self.cores})"
        if self.gpu:
            return self.gpu
        if stolen > max(STOLEN, ticks):
            return f"the hypervisor took {stolen:.1f} processors"
        if others > max(OTHERS, spare, ticks):
            return f"other work used {others:.1f} processors"
        if not self.seconds or self.threads > self.cores:
            return ""  # more threads than processors wait for one another, which is no disturbance
        if self.delayed is None:
            return f"tasks waited for a processor {100 * waiting:.0f} % of the time" if waiting > WAITING else ""
        # What this process lacked itself counts, where the kernel says so.
        lacked = self.delayed > max(WAITING, LEAST_DELAY_S / self.seconds)
        return f"the timed threads lacked {self.delayed:.1f} processors" if lacked else ""


def between(before: Counters, after: Counters, *, threads: int = 1, gpu: str = "") -> Disturbance:
    """What happened from one reading to another, between which so many threads were timed."""
    seconds = after.wall_s - before.wall_s
    if seconds <= 0:
        return Disturbance(threads=threads, gpu=gpu)
    own_s = after.process_cpu_s - before.process_cpu_s
    # A processor that came or went makes busy time jump by its share of the system's whole life.
    long = seconds >= SHORT_S
    counted = long and before.processors == after.processors
    slept_s = _grown(before.boot_s, after.boot_s, seconds)
    return Disturbance(
        seconds=round(seconds, 6),
        others=_rate(before.busy_s, after.busy_s, seconds, own_s) if counted else None,
        stolen=_rate(before.steal_s, after.steal_s, seconds) if counted else None,
        waiting=_rate(before.pressure_s, after.pressure_s, seconds) if long else None,
        delayed=_rate(before.delay_s, after.delay_s, seconds),
        cores=after.usable_cores,
        cores_lost=max(before.usable_cores - after.usable_cores, 0),
        suspended_s=round(slept_s or 0.0, 3),
        gpu=gpu,
        threads=threads,
        processors=after.processors,
    )


def _grown(before: float | None, after: float | None, expected: float = 0.0) -> float | None:
    """How much more a counter grew than expected; not less than nothing, as counters are read one after the other."""
    return None if before is None or after is None else max(after - before - expected, 0.0)


def _rate(before: float | None, after: float | None, seconds: float, expected: float = 0.0) -> float | None:
    grown = _grown(before, after, expected)
    return None if grown is None else round(grown / seconds, 4)


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
