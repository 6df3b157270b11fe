"""What is called a disturbance, on made-up counters; two tests make a real one."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from latpred import host
from latpred.calibration.devices.machine import GpuState
from latpred.calibration.timing import disturbance
from latpred.calibration.timing.disturbance import Counters, Watch, between, read, wait_for_calm

START = Counters(
    wall_s=100.0,
    boot_s=500.0,
    process_cpu_s=40.0,
    busy_s=300.0,
    steal_s=5.0,
    pressure_s=20.0,
    usable_cores=2,
    delay_s=1.0,
    processors=2,
)
EIGHT, SERVER = (START._replace(processors=many, usable_cores=many) for many in (8, 64))
BARE = START._replace(delay_s=None)  # where the kernel does not say who waited
SECRETIVE = START._replace(boot_s=None, busy_s=None, steal_s=None, pressure_s=None, delay_s=None)


def later(before: Counters = START, seconds: float = 2.0, *, own: float = 1.0, **grown: Any) -> Counters:
    """A reading some seconds after another: `own` processors used by this process, every other by as much as said."""
    usual = {"wall_s": seconds, "boot_s": seconds, "process_cpu_s": own * seconds, "busy_s": own * seconds}
    given = {name: by for name, by in {**usual, **grown}.items() if getattr(before, name) is not None}
    return before._replace(**{name: getattr(before, name) + by for name, by in given.items()})


@pytest.mark.parametrize(
    ("before", "threads", "grown", "reason"),
    [
        (START, 2, {}, ""),
        (START, 1, {"busy_s": 2.0 + 1.8}, "other work used 0.9 processors"),
        (START, 1, {"steal_s": 0.6}, "the hypervisor took 0.3 processors"),
        (START._replace(throttled_s=3.0), 2, {"throttled_s": 0.8}, "the container's limit took 0.4 processors"),
        (START, 1, {"steal_s": 0.6, "busy_s": 2.0 + 1.8}, "the hypervisor took 0.3 processors"),
        (START, 1, {"delay_s": 0.8}, "the timed threads lacked 0.4 processors"),
        (START, 1, {"usable_cores": -1, "busy_s": 2.0 + 1.8}, "a processor was taken away (2 to 1)"),
        (EIGHT, 1, {"usable_cores": -2}, "2 processors were taken away (8 to 6)"),
        (START, 1, {"usable_cores": 1}, ""),  # processors that are given are no disturbance
        (START, 1, {"boot_s": 14.0, "busy_s": 2.0 + 1.8}, "the machine slept 12 s"),
        (START, 1, {"busy_s": 2.0 + 0.1, "steal_s": 0.06, "delay_s": 0.1, "pressure_s": 0.1, "boot_s": 2.1}, ""),
        (START, 1, {"pressure_s": 1.0}, ""),  # elsewhere, where our own threads did not wait
        (START, 1, {"processors": 1, "busy_s": 5000.0}, ""),  # what busy time means has changed
        # Stepping back.
        (START, 1, {"busy_s": 0.5, "steal_s": -1.0, "delay_s": -0.5, "pressure_s": -0.1, "boot_s": 1.9}, ""),
        (BARE, 2, {"pressure_s": 0.62}, "tasks waited for a processor 31 % of the time"),
        # With three threads on two processors, the process itself makes them wait.
        (BARE, 3, {"pressure_s": 0.62}, ""),
        (START, 3, {"pressure_s": 0.62, "delay_s": 0.9}, ""),
        # A server may do something on the processors that are left free.
        (START, 1, {"busy_s": 2.0 + 1.0}, "other work used 0.5 processors"),
        (SERVER, 1, {"busy_s": 2.0 + 1.0}, ""),
        (SERVER, 63, {"busy_s": 2.0 + 1.0}, "other work used 0.5 processors"),
        # Each of many threads loses as little as each of two.
        (SERVER, 64, {"steal_s": 0.12, "delay_s": 0.24}, ""),
        (SERVER, 64, {"steal_s": 4.0}, "the hypervisor took 2.0 processors"),
        (SERVER, 64, {"delay_s": 8.0}, "the timed threads lacked 4.0 processors"),
        # Ticks are too coarse for short pieces, which are told by what is finer.
        (START, 1, {"seconds": 0.1, "busy_s": 0.12}, ""),
        (START, 1, {"seconds": 0.5, "busy_s": 0.6}, "other work used 0.2 processors"),
        (START, 1, {"seconds": 20.0, "busy_s": 24.0}, "other work used 0.2 processors"),
        (START, 1, {"seconds": 0.02, "busy_s": 0.06, "delay_s": 0.006}, "the timed threads lacked 0.3 processors"),
        (START, 1, {"seconds": 0.02, "busy_s": 0.06, "steal_s": 0.02}, ""),
        (START, 1, {"seconds": 0.002, "delay_s": 0.0005}, ""),  # a single hand-over
        (BARE, 1, {"seconds": 0.02, "pressure_s": 0.01}, ""),
        (SECRETIVE, 1, {"busy_s": 9.0, "steal_s": 9.0, "pressure_s": 9.0, "delay_s": 9.0, "boot_s": 99.0}, ""),
    ],
)
def test_what_disturbs_and_what_is_usual(before: Counters, threads: int, grown: dict[str, float], reason: str) -> None:
    assert between(before, later(before, **grown), threads=threads).reason == reason


@pytest.mark.parametrize(("before", "busy"), [(START, 0.45 + 0.15), (SERVER, 0.15), (SECRETIVE, 0.0)])
def test_how_many_processors_others_used_beyond_what_is_usual(before: Counters, busy: float) -> None:
    assert between(before, later(before, busy_s=2.0 + 1.0, steal_s=0.3)).busy == pytest.approx(busy)
    assert between(before, before, gpu="its clock fell") == ("its clock fell", 0.0, "its clock fell")  # no time passed


@pytest.mark.parametrize(
    ("grown", "gpu", "device"),
    [
        ({"busy_s": 3.8, "steal_s": 0.6, "delay_s": 0.8, "usable_cores": -1}, "", ""),
        ({"busy_s": 3.8}, "its clock fell", "its clock fell"),
        ({"busy_s": 3.8, "boot_s": 14.0}, "", "the machine slept 12 s"),
    ],
)
def test_what_processors_do_does_not_touch_a_device_of_its_own(grown: dict[str, float], gpu: str, device: str) -> None:
    assert between(START, later(**grown), gpu=gpu).device == device


def test_setting_the_time_of_day_disturbs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    days = itertools.count(0, -86400)
    monkeypatch.setattr(time, "time", lambda: float(next(days)))
    monkeypatch.setattr(time, "time_ns", lambda: next(days))
    assert "slept" not in Watch().lap().reason


def test_reading_made_up_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "PROC", tmp_path)
    (tmp_path / "stat").write_text("cpu 100 0 50 800 50 0 0 25\ncpu0 50 0 25 400 25 0 0 10\ncpu1 50 0 25 400 25 0 0 15")
    (tmp_path / "pressure").mkdir()
    (tmp_path / "pressure" / "cpu").write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=1500000\n")
    for parent, child in (("self", "7"), ("7", "8")):  # a compiler's process, and one that works for it
        (tmp_path / parent / "task" / "1").mkdir(parents=True)
        (tmp_path / parent / "task" / "1" / "children").write_text(f"{child} ")
        (tmp_path / child).mkdir()
        (tmp_path / child / "stat").write_text(f"{child} (a) b) S {'0 ' * 10}100000000 20000000 3000000 400000 20 0\n")
    found = read()
    second = os.sysconf("SC_CLK_TCK")
    assert found.process_cpu_s == pytest.approx(2 * 123_400_000 / second, 1e-3)
    assert found.processors == 2
    assert found.busy_s == pytest.approx(2 * found.wall_s - (850 + 25) / second)
    assert (found.steal_s, found.pressure_s, found.delay_s) == (25 / second, 1.5, None)


def test_reading_where_the_system_counts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "CLOCK_BOOTTIME", -12345, raising=False)
    assert read().boot_s is None  # a boot clock that cannot be read
    monkeypatch.delattr(time, "CLOCK_BOOTTIME", raising=False)
    monkeypatch.setattr(host, "cpu_quota", lambda: math.inf)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(host, "PROC", tmp_path)
    found = read()
    assert (found.boot_s, found.busy_s, found.steal_s, found.pressure_s, found.delay_s) == (None,) * 5
    assert (found.usable_cores, found.processors) == (os.cpu_count(), 0)


def script(patch: pytest.MonkeyPatch, *steps: dict[str, Any]) -> None:
    """Have the start read first, then what comes after each step."""
    found = itertools.accumulate(steps, lambda before, step: later(before, **step), initial=START)
    patch.setattr(disturbance, "read", lambda: next(found))


GONE = "a processor was taken away (2 to 1)"


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([{}, {"busy_s": 3.0}, {}], ["", "other work used 0.5 processors", ""]),
        # Processors that are gone are gone for all that follows.
        ([{}, {"usable_cores": -1}, {}, {"usable_cores": 1}], ["", GONE, GONE, ""]),
    ],
)
def test_a_watch_tells_of_each_lap_by_itself(
    steps: list[dict[str, Any]], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, *steps)
    watch = Watch(threads=2)
    assert [watch.lap().reason for _ in said] == said


def gpu(sm_mhz: int = 1800, other_processes: int = 0) -> GpuState:
    return GpuState("1", sm_mhz, (), other_processes)


def test_a_watch_looks_at_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, {}, {}, {}, {})
    states: Iterator[GpuState | None] = iter([gpu(), gpu(), gpu(1200), gpu(1200, other_processes=2), None])
    watch = Watch(gpu=lambda: next(states))
    said = ["", "the GPU's clock went from 1800 to 1200 MHz", "2 other processes use the GPU", ""]
    assert [watch.lap().reason for _ in said] == said


BUSY = {"seconds": 0.5, "own": 0.0, "busy_s": 0.45}


@pytest.mark.parametrize(
    ("limit_s", "busy", "windows"), [(60.0, 2, 3), (0.0, 9, 1), (0.4, 9, 1), (2.0, 9, 4), (2.1, 9, 5)]
)
def test_waiting_ends_with_the_first_calm_window_or_its_limit(
    limit_s: float, busy: int, windows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    script(monkeypatch, *[BUSY] * busy, {"seconds": 0.5, "own": 0.0})
    wait_for_calm(limit_s)
    assert slept == [disturbance.WINDOW_S] * windows


BOUND = len(getattr(os, "sched_getaffinity", lambda _: ())(0))  # processors, where processes are bound to them


@pytest.mark.skipif(BOUND < 2, reason="needs two processors, and a system that binds processes to them")
def test_a_processor_taken_from_this_process_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "cpu_quota", lambda: math.inf)  # which may be fewer processors than are bound
    cores = os.sched_getaffinity(0)
    watch = Watch()
    try:
        os.sched_setaffinity(0, set(sorted(cores)[1:]))
        found = watch.lap()
    finally:
        os.sched_setaffinity(0, cores)
    assert found.reason == f"a processor was taken away ({len(cores)} to {len(cores) - 1})"


@pytest.mark.skipif(host.processor_time() is None, reason="needs a system that counts processor time")
def test_a_process_that_computes_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "descendants_s", lambda: 0.0)  # it is to pass for somebody else's
    monkeypatch.setattr(disturbance, "OTHERS_OF_SPARE", 0.0)  # a server of many processors may do as much by itself
    code = "print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()  # it has started
        try:
            watch = Watch()
            time.sleep(0.7)
            found = watch.lap()
        finally:
            other.kill()
    assert found.busy > 0.2
    assert found.reason


def test_busy_now_is_of_half_a_second_or_else_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(host, "load", lambda: 9.0)
    for looks, said in (
        ([START, later()], ""),
        ([START, later(busy_s=2.0 + 1.8)], "other work used 0.9 processors"),
        ([SECRETIVE, later(SECRETIVE)], "the load is 9.0"),
    ):
        monkeypatch.setattr(disturbance, "read", iter(looks).__next__)
        assert disturbance.busy_now() == said
