"""Visits: what other work disturbed is timed again in a calm moment, and a run never waits without end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from gauges import ScriptedGauge

from latpred import host
from latpred.calibration.cells import Cell
from latpred.calibration.devices.cpu import CpuDevice
from latpred.calibration.devices.simulated import SimulatedDevice
from latpred.calibration.session import Row, Sampled, Session
from latpred.calibration.timing import visits
from latpred.calibration.timing.disturbance import Disturbance
from latpred.calibration.timing.reference_speed import SpeedReading
from latpred.calibration.timing.timer import Timing
from latpred.calibration.timing.visits import SLOWED, Visits

CALM = Disturbance(seconds=0.2, others=0.0, stolen=0.0)
BUSY = Disturbance(seconds=0.2, others=0.9, stolen=0.0, processors=2, threads=1)


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

    def __call__(self, one: Cell) -> Sampled:
        self.asked.append(one.dims["m"])
        return Sampled({"single": timing(next(self.slows, 1.0))})


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with Session(tmp_path, SimulatedDevice().machine(), {}) as one:
        yield one


Made = Callable[..., Visits]


@pytest.fixture
def made(session: Session, monkeypatch: pytest.MonkeyPatch) -> Made:
    """Visits on a CPU that some disturbances befall."""
    monkeypatch.setattr(visits, "wait_for_calm", lambda limit_s, threads: True)
    monkeypatch.setattr(visits, "gauge_of", lambda threads: ScriptedGauge())

    def make(disturbances: Iterable[Disturbance] = (), tell: Callable[[str], None] | None = None) -> Visits:
        one = Visits(session, CpuDevice(), threads=1, budget_s=60.0, tell=tell)
        one._watch, one._reference = Watched(disturbances), None  # type: ignore[assignment]
        return one

    return make


def test_a_disturbed_cell_is_timed_again_once_it_is_calm(made: Made, session: Session) -> None:
    measure, said = Measuring(), list[str]()
    visited = made([BUSY, BUSY], said.append)
    assert visited.run(cell(1), measure).disturbed == "other work used 0.9 processors"
    assert visited.run(cell(2), measure).disturbed
    visited.run(cell(3), measure)  # calm at last: then those that wait
    assert measure.asked == [1, 2, 3, 1, 2]
    assert not any(row.disturbed for row in session.rows)
    assert said == ["waiting for a calm moment: other work used 0.9 processors"] * 2


def test_a_cell_without_a_calm_moment_is_given_up(made: Made, session: Session) -> None:
    visited, measure = made([BUSY] * 50), Measuring()
    visited.run(cell(1), measure)
    for _ in range(9):
        visited.finish()
    assert len(measure.asked) == visits.MOST_VISITS
    (row,) = session.rows
    assert visits.is_disturbed(row)


def test_slow_timings_are_visited_again(made: Made, session: Session) -> None:
    visited, measure = made(), Measuring([1.5])
    assert visited.run(cell(1), measure).disturbed == SLOWED
    visited.run(cell(2), measure)
    assert [row.disturbed for row in session.rows] == ["", ""]


def test_what_passed_for_full_speed_is_visited_again_once_faster_moments_came(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    fastest = iter([1.0, 1.45, 1.45, 1.0, 1.0, 1.0])  # by chance fast at first, then slow for a while
    monkeypatch.setattr(ScriptedGauge, "fastest", property(lambda _: SpeedReading(next(fastest, 1.0))))
    visited, measure = made(), Measuring()
    for number in (1, 2, 3):
        visited.run(cell(number), measure)
    # Each visit asks twice, before and after: the first cell was timed when 1.45 passed for full speed.
    assert measure.asked == [1, 2, 3, 1]


def test_nothing_is_watched_on_a_simulated_device(session: Session) -> None:
    visited = Visits(session, SimulatedDevice(), threads=1, budget_s=60.0)
    row = visited.run(cell(1), Measuring())
    assert (row.speed, row.disturbed, visited.lost_s) == ({}, "", 0.0)


def test_a_run_without_a_budget_does_not_wait_without_end(session: Session) -> None:
    visited = Visits(session, CpuDevice(), threads=1, budget_s=math.inf)
    assert visited._overtime_s == visits.OVERTIME * visits.COUNTED_S


def test_lost_time_counts_up_to_the_overtime(made: Made) -> None:
    visited = made([BUSY] * 50)
    visited._overtime_s = 0.0
    for number in range(4):
        visited.run(cell(number), Measuring())
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
