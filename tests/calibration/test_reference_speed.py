"""Reference speed: slow moments are told from others, and what was timed in them is left out."""

from __future__ import annotations

from functools import partial
from itertools import count

import pytest
import torch
from gauges import ScriptedGauge

from latpred.calibration.devices import conditions
from latpred.calibration.timing import reference_speed
from latpred.calibration.timing.reference_speed import (
    ReferenceTimer,
    RunSpeed,
    SpeedGauge,
    SpeedReading,
    taken_at_full_speed,
)
from latpred.host import CACHE_MACS_PER_BYTE, DISPATCH, ELEMENTWISE, KINDS, THREADS


class Replayed(SpeedGauge):
    """A gauge whose loops take given times."""

    def __init__(self, dispatch_us: list[float], threads_us: list[float] | None = None) -> None:
        super().__init__(threads=2 if threads_us else 1)
        self._dispatch, self._threads = iter(dispatch_us), iter(threads_us or [])

    def _dispatch_s(self) -> float:
        return next(self._dispatch) / 1e6

    def _threads_s(self) -> float:
        return next(self._threads, 0.0) / 1e6


def test_a_busy_neighbour_makes_a_moment_slow_and_on_another_processor_less() -> None:
    gauge = Replayed([100.0] * 30 + [155.0, 103.0])
    *_, busy, calm = [gauge.slowdown(gauge.read()) for _ in range(32)]
    assert busy == pytest.approx(1.55, abs=0.01)
    assert calm <= reference_speed.SLOW
    gauge = Replayed([100.0] * 21, [40.0] * 20 + [60.0])
    *_, beside = [gauge.slowdown(gauge.read()) for _ in range(21)]
    assert beside == pytest.approx(1.5**reference_speed.THREADED_POWER, abs=0.01)


def test_what_passed_for_full_speed_is_slow_once_faster_moments_came() -> None:
    gauge = Replayed([150.0] * 20 + [100.0] * 20)
    first = gauge.read()
    assert gauge.slowdown(first) == 1.0
    for _ in range(39):
        gauge.read()
    assert gauge.slowdown(first) == pytest.approx(1.5)
    assert gauge.fastest.dispatch_us == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("slow", "least", "kept"),
    [
        ([1.0, 1.05, 1.0], 1, [0, 1, 2]),
        ([1.0, 1.6, 1.1, 1.5], 1, [0, 2]),
        ([1.6, 1.4, 1.5], 1, [1]),  # one in any case: the least slowed
        ([1.6, 1.4, 1.5, 1.0], 3, [3, 1, 2]),
        ([], 1, []),
    ],
)
def test_what_is_kept(slow: list[float], least: int, kept: list[int]) -> None:
    values, slow_of_each = taken_at_full_speed([[index] for index in range(len(slow))], slow, least)
    assert sorted(values) == sorted(kept)
    assert slow_of_each == [slow[index] for index in values]


@pytest.mark.parametrize("threads", [1, 2])
def test_every_reference_takes_time_and_changes_nothing(threads: int) -> None:
    before = torch.get_rng_state()
    timer = ReferenceTimer(threads)
    reading = timer.read()
    assert bool((torch.get_rng_state() == before).all())
    assert set(reading) == set(KINDS) - {ELEMENTWISE if threads > 1 else THREADS}
    assert min(reading.values()) > 0
    assert bool((timer._result == timer._factor @ timer._factor).all())
    assert bool((timer._stream == 1).all())
    macs_per_byte = len(timer._rows) * timer._weights.numel() / timer._weights.nbytes
    assert macs_per_byte == CACHE_MACS_PER_BYTE, "others are held against it"


def test_processors_are_awake_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count()
    monkeypatch.setattr(reference_speed.time, "perf_counter", lambda: next(clock) * reference_speed.WAKE_S / 4)
    timer, before = ReferenceTimer(1), list[str]()
    timer._work = {kind: partial(before.append, kind) for kind in timer._work}
    monkeypatch.setattr(timer._gauge, "read", lambda: before.append(DISPATCH) or SpeedReading(1.0))
    timer.read()
    assert before[: before.index(DISPATCH)] == ["product"] * 3
    beside_gpu = ReferenceTimer(1, host_only=True)
    monkeypatch.setattr(beside_gpu._gauge, "read", lambda: SpeedReading(1.0))
    assert beside_gpu.read() == {DISPATCH: 1.0}  # other threads are left to sleep


def test_full_speed_is_what_slow_moments_are_brought_to() -> None:
    slow, fast = (
        {DISPATCH: 150.0, "product": 440.0, "stream": 1200.0},
        {DISPATCH: 100.0, "product": 400.0, "stream": 1e3},
    )
    speed = RunSpeed.of([slow] * 40 + [fast] * 10)
    assert speed.full_us == pytest.approx(fast)
    assert speed.at(1.5) == pytest.approx(slow, abs=1e-2)
    assert reference_speed.typical([slow] * 40 + [fast] * 10) == slow


def test_a_row_goes_by_the_minute_that_it_was_timed_in() -> None:
    """Neighbours changed the machine in the middle of the run; one reading in between was an accident."""
    first, early, late, odd = (
        {DISPATCH: 100.0 + add, "product": us} for add, us in ((0.3, 700.0), (0.0, 400.0), (0.1, 480.0), (0.2, 900.0))
    )
    speed = RunSpeed.of([first] + [early] * 50 + [late] * 20 + [odd] + [late] * 19)
    assert speed.full_us["product"] == 400.0
    found = [speed.at(1.0, read)["product"] for read in (first, early, late, odd)]
    assert found == pytest.approx([400.0, 400.0, 480.0, 480.0], 3e-3)
    few = RunSpeed.of([early, late])
    assert few.at(1.0, early)["product"] == few.at(1.0, late)["product"] == pytest.approx(440.0, 3e-3)
    assert speed.at(1.0)["product"] == 400.0


def test_runs_with_no_slow_moments_or_a_few_readings_that_scattered_take_the_usual_powers() -> None:
    speed = RunSpeed.of([{DISPATCH: 100.0, "product": 400.0}] * 20)
    assert speed.full_us == {DISPATCH: 100.0, "product": 400.0}
    assert speed.powers == {kind: reference_speed.USUAL_POWERS[kind] for kind in speed.full_us}
    assert RunSpeed.of([]) == RunSpeed.of([{}]) == reference_speed.FULL
    usual, scattered = {DISPATCH: 100.0, "product": 400.0}, {DISPATCH: 120.0, "product": 400.0}
    speed = RunSpeed.of([usual] * 60 + [scattered] * 15)
    assert speed.powers["product"] == reference_speed.USUAL_POWERS["product"]
    assert RunSpeed.of([usual] * 60 + [scattered] * 30).powers["product"] == 0.0


def test_fast_moments_that_hardly_any_reading_met_are_full_speed_where_a_gauge_knows_them() -> None:
    slow, fast = {DISPATCH: 180.0, "product": 440.0}, {DISPATCH: 100.0, "product": 400.0}
    readings = [slow] * 100 + [fast] * 6
    assert RunSpeed.of(readings).full_us[DISPATCH] == 180.0
    speed = RunSpeed.of(readings, SpeedReading(100.0))
    assert speed.full_us == pytest.approx(fast)
    assert speed.at(1.8) == pytest.approx(slow)
    apart = {DISPATCH: 100.0, THREADS: 90.0}
    assert RunSpeed.of([apart] * 9, SpeedReading(100.0, 30.0)).full_us[THREADS] > 30.0  # nothing else was read
    assert RunSpeed.of(readings, SpeedReading(0.0)) == RunSpeed.of(readings)  # of a gauge that never looked


TOGETHER = {DISPATCH: 100.0, THREADS: 28.0, "stream": 2000.0}
MOVED = {DISPATCH: 103.0, THREADS: 50.0, "stream": 1200.0}


def test_moments_with_the_processors_apart_are_another_machines() -> None:
    readings = [TOGETHER] * 12 + [MOVED] * 20
    speed = RunSpeed.of(readings)
    assert speed.full_us == pytest.approx(TOGETHER)
    assert speed.at(1.26, MOVED) == MOVED  # no power of how slow the moment was gives these
    assert speed.at(1.0, TOGETHER) == pytest.approx(TOGETHER)
    assert RunSpeed.of([MOVED] * 20).full_us == pytest.approx(MOVED)  # always so: then that is the machine


class Moved(ScriptedGauge):
    """The processors are apart at first, and together after some looks."""

    fastest = SpeedReading(1.0, 1.0)

    def __init__(self, looks: int, dispatch_us: float = 1.0) -> None:
        super().__init__([dispatch_us] * looks)
        self.looks = looks

    def read(self) -> SpeedReading:
        return super().read()._replace(threads_us=2.0 if self.reads <= self.looks else 1.0)


def test_processors_that_are_apart_are_waited_for_longer_than_a_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_speed, "FAST_WAIT_S", 0.0)
    monkeypatch.setattr(reference_speed, "POLL_S", 0.0)
    said: list[str] = []
    for gauge, limit_s, looks in ((Moved(5), 60.0, 6), (Moved(5, dispatch_us=2.0), 60.0, 1), (Moved(5), 0.0, 1)):
        gauge.await_full_speed(limit_s, lambda: said.append("apart"))
        assert gauge.reads == looks
    assert said == ["apart"]


def test_threads_of_another_library_are_left_to_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    rested: list[float] = []
    monkeypatch.setattr(reference_speed.time, "sleep", rested.append)
    for threads, runtime in ((2, "eager"), (1, "onnxruntime"), (2, "onnxruntime")):
        with conditions.stated(conditions.Options(threads=threads)):
            reference_speed.rest_after(runtime)
    assert rested == [reference_speed.REST_S]


def test_one_gauge_serves_the_process_and_wakes_no_thread_beside_another_librarys() -> None:
    assert reference_speed.gauge_of(1) is reference_speed.gauge_of(1) is not reference_speed.gauge_of(2)
    with conditions.stated(conditions.Options(threads=2)):
        assert reference_speed.gauge_for("eager") is reference_speed.gauge_of(2)
        assert reference_speed.gauge_for("onnxruntime").read().threads_us == 0.0


def test_beside_a_gpu_only_the_thread_that_feeds_it_is_looked_at() -> None:
    assert reference_speed.gauge_on("cuda", "eager") is reference_speed.gauge_of(1)
    assert reference_speed.gauge_on("simulated", "eager") is None
    assert reference_speed.gauge_on("cpu", "eager") is reference_speed.gauge_for("eager")
    assert ReferenceTimer(2, host_only=True).read().keys() == {DISPATCH}
