"""Visits: what other work disturbed is timed again in a calm moment, and a run never waits without end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import msgspec
import pytest
from gauges import ScriptedGauge

from latpred import host
from latpred.calibration.cells import Cell
from latpred.calibration.devices.cpu import CpuDevice
from latpred.calibration.devices.simulated import SimulatedDevice
from latpred.calibration.session import Row, Session
from latpred.calibration.timing import visits
from latpred.calibration.timing.disturbance import Disturbance
from latpred.calibration.timing.reference_speed import PREEMPTED, RunSpeed, SpeedReading
from latpred.calibration.timing.timer import Timing
from latpred.calibration.timing.visits import SLOWED, Tell, Visits

CALM, BUSY = Disturbance(), Disturbance("other work used 0.9 processors")


class Watched:
    """A watch that reports what a test wants, calm once that is spent."""

    def __init__(self, disturbances: Iterable[Disturbance]) -> None:
        self.disturbances, self.laps = iter(disturbances), 0

    def lap(self) -> Disturbance:
        self.laps += 1
        return CALM if self.laps % 2 else next(self.disturbances, CALM)  # every second lap ends a visit


def cell(number: int) -> Cell:
    return Cell("kernel", "gemm", {"m": number})


def timing(slow: float = 1.0) -> Timing:
    return Timing(1e-3, 1e-5, 9, True, slow)


class Measuring:
    """A measure that remembers what it was asked, in moments as slow as said."""

    def __init__(self, slows: Iterable[float] = ()) -> None:
        self.asked: list[int] = []
        self.slows = iter(slows)

    def __call__(self, one: Cell) -> Row:
        self.asked.append(one.dims["m"])
        return Row(one, {"single": timing(next(self.slows, 1.0))})


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with Session(tmp_path, SimulatedDevice().machine(), {}) as one:
        yield one


Made = Callable[..., Visits]


@pytest.fixture
def made(session: Session, monkeypatch: pytest.MonkeyPatch) -> Made:
    """Visits on a CPU that some disturbances befall."""
    monkeypatch.setattr(visits, "wait_for_calm", lambda limit_s, threads: None)
    monkeypatch.setattr(visits, "gauge_on", lambda kind, runtime: ScriptedGauge())

    def make(
        measure: Measuring,
        disturbances: Iterable[Disturbance] = (),
        tell: Tell = lambda *_: None,
        readings: Iterable[dict[str, float]] = (),
    ) -> Visits:
        one = Visits(session, CpuDevice(), "eager", measure, 60.0, tell)
        monkeypatch.setattr(one, "_watch", Watched(disturbances))
        monkeypatch.setattr(one._reference, "read", chain(readings, repeat({})).__next__)
        return one

    return make


def test_a_disturbed_cell_is_timed_again_once_it_is_calm(made: Made, session: Session) -> None:
    measure, said = Measuring(), list[str]()
    visited = made(measure, [BUSY, BUSY], lambda label, _: said.append(label))
    assert visited.run(cell(1)).disturbed == "other work used 0.9 processors"
    assert visited.run(cell(2)).disturbed
    visited.run(cell(3))  # calm at last: then those that wait
    assert measure.asked == [1, 2, 3, 1, 2]
    assert not any(row.disturbed for row in session.rows)
    waiting = "waiting for a calm moment: other work used 0.9 processors"
    assert said == [cell(1).key, waiting, cell(2).key, waiting, cell(3).key]


def test_a_worse_timing_does_not_count_in_place_of_a_better_one(made: Made, session: Session) -> None:
    measure = Measuring([1.5])
    visited = made(measure, [CALM, CALM, BUSY])
    visited.run(cell(1))
    visited.run(cell(2))
    assert measure.asked == [1, 2, 1]
    assert [row.disturbed for row in session.rows] == [SLOWED, ""]
    visited.finish()
    assert [row.disturbed for row in session.rows] == ["", ""]


@pytest.mark.parametrize(
    ("new", "old", "better"),
    [
        ({}, {}, True),
        ({"error": "it raised"}, {}, False),
        ({}, {"error": "it raised"}, True),
        ({"disturbed": "other work used 0.9 processors"}, {}, False),
        ({"disturbed": visits.MOVED_APART}, {}, False),
        ({"disturbed": visits.MOVED_APART}, {"disturbed": "other work used 0.9 processors"}, True),
        ({"slow": 1.9, "disturbed": SLOWED}, {"slow": 1.1}, False),
        ({"slow": 1.1}, {"slow": 1.9, "disturbed": SLOWED}, True),
    ],
)
def test_which_of_two_timings_counts(new: dict[str, Any], old: dict[str, Any], better: bool) -> None:
    assert visits._better(row(1, **new), row(1, **old)) is better


def test_calm_does_not_end_in_timing_all_again_at_once(made: Made) -> None:
    measure = Measuring([1.5] * 6)
    visited = made(measure)
    for number in range(7):
        visited.run(cell(number))
    assert measure.asked == [*range(7), *range(visits.AT_ONCE)]
    visited._overtime_s = 0.0
    visited.finish()
    assert len(measure.asked) == 7 + visits.AT_ONCE, "the time for that is spent"


def test_a_cell_without_a_calm_moment_is_given_up(made: Made, session: Session) -> None:
    measure = Measuring()
    visited = made(measure, [BUSY] * 50)
    visited.run(cell(1))
    for _ in range(9):
        visited.finish()
    assert len(measure.asked) == visits.MOST_VISITS
    (row,) = session.rows
    assert visits.is_disturbed(row)


@pytest.mark.parametrize(("asynchronous", "asked"), [(False, [1, 2, 1, 3]), (True, [1, 2, 3])])
def test_what_passed_for_full_speed_is_visited_again_once_faster_moments_came(
    asynchronous: bool, asked: list[int], made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuDevice, "asynchronous", asynchronous)  # whose kernels wait for no host
    measure = Measuring()
    visited = made(measure)
    for number, fastest in ((1, 1.45), (2, 1.0), (3, 1.0)):
        monkeypatch.setattr(ScriptedGauge, "fastest", SpeedReading(fastest))
        visited.run(cell(number))
    assert measure.asked == asked


def test_rows_are_as_slow_as_against_the_fastest_moments_known_in_the_end(made: Made, session: Session) -> None:
    """The first knew only slow moments, and one knew faster ones than a gauge remembers."""
    known = [SpeedReading(180.0), SpeedReading(90.0), SpeedReading(100.0)]
    rows = [msgspec.structs.replace(row(n, slow), fastest=known[n]) for n, slow in enumerate((1.0, 1.5, 1.2))]
    found = visits.against_fastest(rows)
    assert [one.timings["single"].slow for one in found] == pytest.approx([1.8, 1.35, 1.2])
    assert {one.fastest for one in found} == {known[-1]}
    assert visits.against_fastest(found) == found
    assert visits.against_fastest(rows[:1], found)[0].timings["single"].slow == pytest.approx(1.8)
    assert visits.against_fastest([row(1, 1.3)]) == [row(1, 1.3)]  # of a journal that does not say
    queued = msgspec.structs.replace(rows[0], timings={"queued": timing(), "issue": timing()})
    (queued,) = visits.against_fastest([queued], found)  # no moment of the host delays what the device has in its queue
    assert {name: one.slow for name, one in queued.timings.items()} == {"queued": 1.0, "issue": pytest.approx(1.8)}
    assert visits._better(found[1], rows[0]), "which only seemed to be fast"
    readings = ({host.DISPATCH: us} for us in (175.0, 180.0, 185.0))
    read = [msgspec.structs.replace(one, speed=speed) for one, speed in zip(rows, readings, strict=True)]
    assert visits.speed_of(read).full_us == {host.DISPATCH: 100.0}


def test_nothing_is_watched_on_a_simulated_device_and_no_run_waits_without_end(session: Session) -> None:
    visited = Visits(session, SimulatedDevice(), "eager", Measuring(), 60.0, lambda *_: None)
    row = visited.run(cell(1))
    assert (row.speed, row.disturbed, visited.lost_s) == ({}, "", 0.0)
    visited = Visits(session, CpuDevice(), "eager", Measuring(), math.inf, lambda *_: None)
    assert visited._overtime_s == visits.OVERTIME * visits.COUNTED_S


def test_what_was_disturbed_before_a_run_was_resumed_is_timed_again(made: Made, session: Session) -> None:
    made(Measuring(), [BUSY]).run(cell(1))
    measure = Measuring()
    resumed = made(measure)
    resumed.run(cell(2))
    assert measure.asked == [2, 1]
    assert not any(row.disturbed for row in session.rows)


def test_lost_time_counts_up_to_the_overtime(made: Made) -> None:
    visited = made(Measuring(), [BUSY] * 50)
    visited._overtime_s = 0.0
    for number in range(4):
        visited.run(cell(number))
    assert visited.lost_s == 0.0


def row(number: int, slow: float = 1.0, disturbed: str = "", error: str = "") -> Row:
    timings = {} if error else {"single": timing(slow)}
    return Row(cell(number), timings, 0.1, error, () if error else (100.0,), disturbed=disturbed)


def test_a_reading_that_several_rows_were_timed_around_counts_once() -> None:
    readings = [{host.DISPATCH: us} for us in (100.0, 110.0, 112.0)]
    rows = [msgspec.structs.replace(row(n), speed=one) for n, one in enumerate((*readings, *readings[:1] * 9))]
    assert visits.speed_of(rows) == RunSpeed.of(readings)


TINY = {"seed": 0, "width": 8, "size": 8, "batch": 1, "cold": 0}
POWERS = {host.DISPATCH: 1.0, host.COLD_DISPATCH: 0.5, host.STREAM: 0.25}


@pytest.mark.parametrize(
    ("timed", "known", "power"),
    [
        (Cell("network", "mlp", TINY), POWERS, 0.5),
        (Cell("network", "mlp", TINY), {host.DISPATCH: 1.0}, 1.0),  # in a run without the other reference
        (Cell("network", "modules", TINY), POWERS, 1.0),  # chains of calls, whose code stays near
        (Cell("dispatch", "add"), POWERS, 1.0),
        (Cell("memory", "read"), POWERS, 0.25),
        (cell(1), POWERS, visits.WHOLE_POWER),
    ],
)
def test_rows_are_brought_to_full_speed_by_kind_of_work(timed: Cell, known: dict[str, float], power: float) -> None:
    speed, longer = RunSpeed(dict.fromkeys(known, 100.0), known), 1.44**power
    brought = visits.brought_to_full_speed(msgspec.structs.replace(row(1, 1.44, SLOWED), cell=timed), speed)
    found = brought.timings["single"].median_s, brought.timings["single"].spread_s, *brought.calls_us
    assert found == pytest.approx((1e-3 / longer, 1e-5 / longer, 100.0 / longer))
    assert visits.brought_to_full_speed(row(1), speed) == row(1)


@pytest.mark.parametrize(
    ("others_s", "single"),
    [
        ({"issue": 1e-3}, 2.0),
        ({"issue": 1e-3, "queued": 0.5e-3}, 2.0),
        ({"issue": 1e-3, "queued": 2e-3}, 1.0),
        ({"single": 14e-6, "issue": 7e-6}, 2.0),  # the rest is what it takes to synchronise
        ({"issue": 0.2e-3}, 1.0),  # it waited for the device, which nothing else tells
        ({}, 1.0),
    ],
)
def test_what_a_slow_host_did_is_brought_to_full_speed_but_no_kernel(others_s: dict[str, float], single: float) -> None:
    timings = {name: msgspec.structs.replace(timing(), median_s=s) for name, s in ({"single": 1e-3} | others_s).items()}
    brought = visits.host_shortened(msgspec.structs.replace(row(1), timings=timings), 2.0).timings
    shorter = {"single": single, "issue": 2.0, "queued": 1.0}
    assert {name: one.median_s for name, one in brought.items()} == {
        name: one.median_s / shorter[name] for name, one in timings.items()
    }


THROTTLED = Disturbance("the GPU throttled", device="the GPU throttled")


@pytest.mark.parametrize(
    ("timed", "found", "disturbed"),
    [
        (cell(1), BUSY, ""),
        (cell(1), THROTTLED, THROTTLED.reason),
        (Cell("memory", "bandwidth", {"m": 1}), BUSY, ""),
        (Cell("memory", "upload", {"m": 1}), BUSY, BUSY.reason),  # which the host copies
        (Cell("dispatch", "add", {"m": 1}), BUSY, BUSY.reason),
    ],
)
def test_what_a_gpu_does_without_its_host_is_disturbed_by_nothing_on_the_host(
    timed: Cell, found: Disturbance, disturbed: str, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuDevice, "asynchronous", True)
    assert made(Measuring(), [found]).run(timed).disturbed == disturbed


def test_disturbed_rows_are_left_out_unless_too_few_are_left() -> None:
    rows = [row(1), row(2), row(3, disturbed="other work used 0.9 processors")]
    assert visits.undisturbed(rows) == rows[:2]
    assert visits.spoilt(visits.undisturbed(rows)) == 0.0
    all_taken = visits.undisturbed([*rows, *(row(n, 9.0) for n in range(4, 8))])
    assert (len(all_taken), visits.spoilt(all_taken)) == (7, 5 / 7)
    assert visits.undisturbed([]) == []


@pytest.mark.parametrize(
    ("slow", "reading", "cache"),
    [
        (1.0, {host.PRODUCT: 500.0, host.CACHE: 4500.0}, 1.5),
        (1.0, {host.PRODUCT: 1000.0, host.CACHE: 6000.0}, 1.0),  # all of it the processor's own
        (1.0, {host.CACHE: 1e6}, PREEMPTED),
        (1.44, {host.PRODUCT: 500.0, host.CACHE: 3600.0}, 1.2),  # what such a moment does to it
        (1.44, {}, 1.2),
        (1.0, {}, 1.0),
    ],
)
def test_a_row_says_how_slow_the_shared_cache_was(slow: float, reading: dict[str, float], cache: float) -> None:
    speed = RunSpeed(
        {host.DISPATCH: 90.0, host.PRODUCT: 500.0, host.CACHE: 3000.0},
        {host.DISPATCH: 1, host.PRODUCT: 0, host.CACHE: 0.5},
    )
    timed = msgspec.structs.replace(row(1, slow), speed=reading)
    assert visits.slowdown(timed, speed) == host.Slowdown(dispatch=slow, ops=slow, cache=round(cache**0.5, 2))


def test_every_row_has_the_reading_of_its_moment_and_those_of_processors_apart_are_left_out(
    made: Made, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = {host.DISPATCH: 1.0, host.THREADS: 1.0}
    monkeypatch.setattr(ScriptedGauge, "fastest", SpeedReading(1.0, 1.0))
    readings = [together, together | {host.THREADS: 2.0}, together | {host.DISPATCH: 2.0, host.THREADS: 2.0}]
    visited = made(Measuring([1.0, 1.0, 1.27, 1.5]), readings=readings)
    visited._overtime_s = 0.0
    for number in range(4):  # a slow cell is read for by itself, however soon it follows
        visited._visit(cell(number))
    assert [one.speed for one in session.rows] == [together, *readings]
    assert [one.disturbed for one in session.rows] == ["", "", visits.MOVED_APART, SLOWED]
    alone = Cell("network", "functions", {}), Cell("clock", "constants"), Cell("memory", "upload")
    kept = [msgspec.structs.replace(session.rows[2], cell=one) for one in alone]
    assert visits.undisturbed([*session.rows, *kept]) == [*session.rows[:2], session.rows[3], *kept]
    assert not any(map(visits.is_disturbed, session.rows))
    busy = [row(number, disturbed="other work used 0.9 processors") for number in range(4)]
    assert visits.undisturbed([*kept, *busy]) == [*kept, *busy], "too few are calm of those that could be left out"


def test_failures_are_counted_by_reason() -> None:
    rows = [row(1, error="ValueError: a"), row(2), row(3, error="out of memory: already kernel/x did not fit")]
    rows += [row(4, error="out of memory"), row(5, error="out of memory: it needs 3 GiB, and 2 GiB are free")]
    assert visits.failures(rows) == {"out of memory": 3, "ValueError: a": 1}
