"""Visits: what other work disturbed is timed again in a calm moment, and a run never waits without end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gauges import ScriptedGauge

from latpred import host
from latpred.calibration.cells import Cell
from latpred.calibration.devices.cpu import CpuDevice
from latpred.calibration.devices.simulated import SimulatedDevice
from latpred.calibration.session import Row, Session
from latpred.calibration.timing import visits
from latpred.calibration.timing.disturbance import Disturbance
from latpred.calibration.timing.reference_speed import SpeedReading
from latpred.calibration.timing.timer import Timing
from latpred.calibration.timing.visits import SLOWED, Visits

CALM = Disturbance(seconds=0.2, others=0.0, stolen=0.0)
BUSY = Disturbance(seconds=0.2, others=0.9, stolen=0.0, processors=2, threads=1)


class Watched:
    """A watch that reports what a test wants, calm once that is spent."""

    def __init__(self, found: list[Disturbance]) -> None:
        self.found, self.laps = iter(found), 0

    def lap(self) -> Disturbance:
        self.laps += 1
        return CALM if self.laps % 2 else next(self.found, CALM)  # every second lap ends a visit


def cell(number: int) -> Cell:
    return Cell("kernel", "gemm", {"m": number})


def timing(slow: float = 1.0) -> Timing:
    return Timing(1e-3, 1e-5, 9, True, slow)


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with Session(tmp_path, SimulatedDevice().machine(), {}) as one:
        yield one


def made(session: Session, found: list[Disturbance], monkeypatch: pytest.MonkeyPatch, **options: Any) -> Visits:
    monkeypatch.setattr(visits, "wait_for_calm", lambda limit_s, threads: True)
    monkeypatch.setattr(visits, "gauge_of", lambda threads: ScriptedGauge())
    one = Visits(session, CpuDevice(), threads=1, budget_s=60.0, **options)
    one._watch, one._reference = Watched(found), None  # type: ignore[assignment]
    return one


def test_a_disturbed_cell_is_timed_again_once_it_is_calm(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def measure(one: Cell) -> dict[str, Timing]:
        asked.append(one.dims["m"])
        return {"single": timing()}

    said: list[str] = []
    visited = made(session, [BUSY, BUSY], monkeypatch, tell=said.append)
    assert visited.run(cell(1), measure).disturbed == "other work used 0.9 processors"
    assert visited.run(cell(2), measure).disturbed
    visited.run(cell(3), measure)  # calm at last: then those that wait
    assert asked == [1, 2, 3, 1, 2]
    assert not any(row.disturbed for row in visited.rows)
    assert visited.tally.disturbed == 2
    assert said == ["waiting for a calm moment: other work used 0.9 processors"] * 2


def test_a_cell_without_a_calm_moment_is_given_up(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    visited = made(session, [BUSY] * 50, monkeypatch)
    asked: list[int] = []

    def measure(one: Cell) -> dict[str, Timing]:
        asked.append(one.dims["m"])
        return {"single": timing()}

    visited.run(cell(1), measure)
    for _ in range(9):
        visited.finish()
    assert len(asked) == visits.MOST_VISITS
    (row,) = visited.rows
    assert visits.is_disturbed(row)


def test_slow_timings_are_visited_again(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    slows = iter([1.5, 1.0, 1.0])
    visited = made(session, [], monkeypatch)
    first = visited.run(cell(1), lambda _: {"single": timing(next(slows))})
    assert first.disturbed == SLOWED
    visited.run(cell(2), lambda _: {"single": timing()})
    assert [row.disturbed for row in visited.rows] == ["", ""]


def test_what_passed_for_full_speed_is_visited_again_once_faster_moments_came(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    gauge, asked = ScriptedGauge(), []
    fastest = iter([1.0, 1.45, 1.45, 1.0, 1.0, 1.0])  # by chance fast at first, then slow for a while
    monkeypatch.setattr(ScriptedGauge, "fastest", property(lambda _: SpeedReading(next(fastest, 1.0))))
    visited = made(session, [], monkeypatch)
    visited._gauge = gauge

    def measure(one: Cell) -> dict[str, Timing]:
        asked.append(one.dims["m"])
        return {"single": timing()}

    for number in (1, 2, 3):
        visited.run(cell(number), measure)
    # Each visit asks twice, before and after: the first cell was timed when 1.45 passed for full speed.
    assert asked == [1, 2, 3, 1]


def test_nothing_is_watched_on_a_simulated_device(session: Session) -> None:
    visited = Visits(session, SimulatedDevice(), threads=1, budget_s=60.0)
    row = visited.run(cell(1), lambda _: {"single": timing()})
    assert (row.speed, row.disturbed, visited.lost_s, visited.tally.visits) == ({}, "", 0.0, 0)


def test_lost_time_counts_up_to_the_overtime(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    visited = made(session, [BUSY] * 50, monkeypatch)
    visited._overtime_s = 0.0
    for number in range(4):
        visited.run(cell(number), lambda _: {"single": timing()})
    assert visited.lost_s == 0.0


def row(number: int, slow: float = 1.0, disturbed: str = "", error: str = "") -> Row:
    timings = {} if error else {"single": timing(slow)}
    return Row(cell(number), timings, 0.1, error, () if error else (100.0,), disturbed=disturbed)


def test_rows_are_brought_to_full_speed() -> None:
    fast, slowed = visits.at_one_speed([row(1), row(2, 1.5, SLOWED)])
    assert fast == row(1)
    factor = 1.5**-host.SLOWED_POWER
    assert slowed.timings["single"].median_s == pytest.approx(1e-3 * factor)
    assert slowed.timings["single"].spread_s == pytest.approx(1e-5 * factor)
    assert slowed.calls_us == pytest.approx((100.0 * factor,))


def test_disturbed_rows_are_left_out_unless_too_few_are_left() -> None:
    rows = [row(1), row(2), row(3, disturbed="other work used 0.9 processors")]
    assert visits.at_one_speed(rows) == rows[:2]
    assert len(visits.at_one_speed([*rows, *(row(n, 9.0) for n in range(4, 8))])) == 7
    assert visits.at_one_speed([]) == []


def test_failures_are_counted_by_reason() -> None:
    rows = [row(1, error="ValueError: a"), row(2), row(3, error="out of memory: already kernel/x did not fit")]
    rows += [row(4, error="out of memory"), row(5, error="out of memory")]
    assert visits.failures(rows) == {"out of memory": 3, "ValueError: a": 1}
