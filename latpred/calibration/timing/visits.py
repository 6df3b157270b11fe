"""Visits: cells timed one after the other, with an eye on what else the machine does and how fast it is.

A visit that other work disturbed is not believed, and one that found no moment at full speed is believed less: the
cell is timed again later. Waiting and lost visits do not count as measuring time, up to `OVERTIME` of the budget; after
that a run takes what it gets, brought to full speed as well as that goes, and its profile says how much was disturbed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import isfinite

import msgspec

from latpred import host
from latpred.calibration.cells import UPLOAD, Cell
from latpred.calibration.devices import Device
from latpred.calibration.session import OUT_OF_MEMORY, Measure, Row, Session
from latpred.calibration.timing import reference_speed
from latpred.calibration.timing.disturbance import Watch, wait_for_calm
from latpred.calibration.timing.reference_speed import (
    PREEMPTED,
    SLOW,
    ReferenceTimer,
    RunSpeed,
    SpeedGauge,
    SpeedReading,
    gauge_on,
    moment_of,
    reference_on,
    slower,
)
from latpred.calibration.timing.timer import Timing
from latpred.calibration.workloads.networks import CHAINS, TINY_WIDTH
from latpred.host import COLD_DISPATCH, DISPATCH, STREAM, Slowdown

# Of a budget, for visits that are lost to other work and for waiting until it ends. Hosts that move processors apart
# have been seen to do so for 40 % of the time.
OVERTIME = 1.0
COUNTED_S = 60.0  # what a run counted in cells, which has no budget, is taken to last: it waits no longer than others
PATIENCE_S = 4.0  # waited for a calm moment at once, ahead of the next visit
AT_ONCE = 2  # cells that are timed again after each new one
MOST_VISITS = 3  # of a cell: other work that never ends must not be waited for without end
CALM_ENOUGH = 0.4  # of the rows, below which a fit takes the disturbed ones too
# Of how slow a moment is, by which whole networks take longer: 0.2 of those that multiply, 0.8 of those that dispatch.
WHOLE_POWER = 0.5
# Times what it takes to issue a forward pass and to synchronise, beyond which the pass waits for the device.
WAITS, SYNC_S = 1.3, 20e-6

ON_DEVICE = ("kernel", "memory")  # cells that an asynchronous device works at without its host, an upload aside

SLOWED = "the processors ran slower than at other times"
MOVED_APART = "the host had moved the processors apart"

Tell = Callable[[str, float], object]  # what is under way, and seconds spent


class Visits:
    """Times the cells of a runtime in a session, one after the other; on a simulated device nothing is watched.

    `measure` times a cell; `budget_s` is what the run may take in calm, which decides how long it may wait for calm;
    `tell` is told what is under way, and when it waits.
    """

    def __init__(
        self, session: Session, device: Device, runtime: str, measure: Measure, budget_s: float, tell: Tell
    ) -> None:
        self._session, self._runtime, self._measure, self._tell = session, runtime, measure, tell
        self._start = time.monotonic() - sum(row.seconds for row in self.rows if not row.disturbed)
        # That other work can disturb: one dispatches to a device of its own.
        self._threads = 1 if device.asynchronous else device.machine().threads
        self._asynchronous = device.asynchronous
        self._reference = reference_on(device)
        self._gauge = gauge_on(device.info().kind, "eager")
        self._watch = Watch(threads=self._threads, gpu=getattr(device, "state", None)) if self._gauge else None
        self._in_vain: Counter[str] = Counter()  # visits of each cell that gave no calm row
        self._overtime_s = OVERTIME * (budget_s if isfinite(budget_s) else COUNTED_S)
        self.lost_s = 0.0

    @property
    def rows(self) -> list[Row]:
        """What was measured of the runtime so far, what was resumed included."""
        return self._session.of(self._runtime)

    @property
    def seconds(self) -> float:
        """What was spent, on resumed rows too, without what was lost in disturbed moments."""
        return time.monotonic() - self._start - self.lost_s

    def tell(self, label: str) -> None:
        """Tell what is under way."""
        self._tell(label, self.seconds)

    def run(self, cell: Cell) -> Row:
        """Time a cell unless the session holds it; in calm also those that could not be timed well before."""
        self.tell(cell.key)
        row = last = self._visit(cell)
        for _ in range(AT_ONCE):
            doubtful = [] if last.disturbed else self._doubtful()
            if not doubtful:
                break
            last = self._visit(doubtful[0], again=True)
        return row

    def finish(self) -> None:
        """Time what is still doubtful once more, as far as the overtime goes."""
        start, lost_s = time.monotonic(), self.lost_s
        for cell in self._doubtful():
            if lost_s + time.monotonic() - start >= self._overtime_s:
                return
            self._visit(cell, again=True)

    def _visit(self, cell: Cell, *, again: bool = False) -> Row:
        if not again and self._session.holds(cell):
            return self._session.run(cell, self._watched)  # what it holds: nothing is timed, nothing lost
        if not self._on_device(cell):
            self._await_full_speed()
        row = self._session.run(cell, self._watched, again=_better if again else None)
        if not row.disturbed and self._session.counts(row):
            return row
        self._in_vain[cell.key] += 1
        left_s = self._overtime_s - self.lost_s
        self.lost_s += min(row.seconds, max(left_s, 0.0))
        if left_s > 0 and row.disturbed not in ("", SLOWED, MOVED_APART):
            self.tell(f"waiting for a calm moment: {row.disturbed}")
            start = time.monotonic()
            wait_for_calm(min(PATIENCE_S, left_s), threads=self._threads)
            self.lost_s += time.monotonic() - start
        return row

    def _on_device(self, cell: Cell) -> bool:
        """Whether a cell is timed by the device alone, so that what its host does meanwhile is of no matter."""
        return self._asynchronous and cell.kind in ON_DEVICE and cell.name != UPLOAD.name

    def _doubtful(self) -> list[Cell]:
        """Cells to time again, those first for which that was in vain least often."""
        if self._gauge is None:
            return []
        fastest = self._gauge.fastest
        cells = [row.cell for row in self.rows if self._is_doubtful(row, fastest)]
        return sorted(cells, key=lambda cell: self._in_vain[cell.key])

    def _is_doubtful(self, row: Row, fastest: SpeedReading) -> bool:
        """Whether a row was disturbed, or timed before the machine showed how fast it is, and not in vain too often."""
        too_slow = not (row.error or self._on_device(row.cell)) and is_slowed(_against(row, fastest))
        return self._in_vain[row.cell.key] < MOST_VISITS and (bool(row.disturbed) or too_slow)

    def _await_full_speed(self) -> None:
        """Wait, as far as the overtime goes, since what is timed at full speed need not be timed again."""
        if self._gauge is not None and self.lost_s < self._overtime_s:
            said = partial(self.tell, f"waiting: {MOVED_APART}")
            self.lost_s += self._gauge.await_full_speed(self._overtime_s - self.lost_s, said)

    def _watched(self, cell: Cell) -> Row:
        """Measure a cell and say what else went on, and now and then how fast the machine is."""
        if self._watch is None or self._gauge is None or self._reference is None:
            return self._measure(cell)
        self._watch.lap()
        row = self._measure(cell)
        slowed = _slow(row) > SLOW
        found, row = self._watch.lap(), with_speed(row, self._reference, self._gauge, anew=slowed)
        disturbed = found.device if self._on_device(cell) else found.reason
        if slowed and not disturbed:
            disturbed = MOVED_APART if reference_speed.is_apart(moment_of(row.speed), self._gauge.fastest) else SLOWED
        return msgspec.structs.replace(row, disturbed=disturbed)


def with_speed(row: Row, reference: ReferenceTimer | None, gauge: SpeedGauge | None, *, anew: bool = False) -> Row:
    """A row with how fast the machine is around it, and in the fastest moments so far; as it is where nobody looks."""
    if reference is None or gauge is None:
        return row
    return msgspec.structs.replace(row, speed=reference.around(row.cell.runtime, anew=anew), fastest=gauge.fastest)


def is_disturbed(row: Row) -> bool:
    """Whether a row is not to be believed at all: other work ran beside it, or hardly anything ran at all."""
    return row.disturbed not in ("", SLOWED, MOVED_APART) or _slow(row) > PREEMPTED


def _better(row: Row, earlier: Row) -> bool:
    """Whether a second timing of a cell is to count in place of the first."""

    def worth(one: Row) -> tuple[bool, ...]:
        return bool(one.error), is_disturbed(one), is_apart(one), is_slowed(one)

    return worth(row) <= worth(_against(earlier, row.fastest))


def is_apart(row: Row) -> bool:
    """Whether a row was timed while the host had moved the processors apart, as on another machine."""
    return row.disturbed == MOVED_APART


def is_slowed(row: Row) -> bool:
    """Whether a row found no moment at full speed."""
    return _slow(row) > SLOW


def _slow(row: Row) -> float:
    """How many times slower than in its fastest moments the machine was, at the worst."""
    return max((timing.slow for timing in row.timings.values()), default=1.0)


def undisturbed(rows: Iterable[Row]) -> list[Row]:
    """Rows without those that other work disturbed or that are of processors apart; all where too few would be left."""
    rows = list(rows)
    calm = [row for row in rows if not _is_spoilt(row)]
    # What stays in any case makes up for none of the others: beside work that never paused no network would be left.
    staying = sum(map(_stays, rows))
    return calm if len(calm) - staying >= CALM_ENOUGH * (len(rows) - staying) else rows


def spoilt(rows: Sequence[Row]) -> float:
    """Share of what `undisturbed` leaves out, above 0 in what it gives only where too few would have been left."""
    return sum(map(_is_spoilt, rows)) / max(len(rows), 1)


def _is_spoilt(row: Row) -> bool:
    """Whether other work disturbed a row, or it is of processors apart, and other cells tell the same."""
    return not _stays(row) and (is_disturbed(row) or is_apart(row))


def _stays(row: Row) -> bool:
    """Whether nothing else tells what a row does: waits of some ms leave the median of short calls as it is."""
    return row.cell.name in CHAINS or row.cell.kind in ("clock", "memory")


def against_fastest(rows: Iterable[Row], of: Iterable[Row] | None = None) -> list[Row]:
    """Rows that say how slow it was against the fastest moments that the last one, or the last of others, knew.

    The first rows of a run knew few moments, which may all have been slow.
    """
    rows = list(rows)
    fastest = _known_last(rows if of is None else list(of))
    return [_against(row, fastest) for row in rows]


def _known_last(rows: Sequence[Row]) -> SpeedReading | None:
    """The fastest moments that the last row knew which says so; None in a journal that does not say."""
    return next((row.fastest for row in reversed(rows) if row.fastest is not None), None)


def _against(row: Row, fastest: SpeedReading | None) -> Row:
    """A row that says how slow it was against those moments, which may have been slower ones than it knew.

    What a device had in its queue waited for no moment of its host.
    """
    if row.fastest is None or fastest is None or row.fastest == fastest:
        return row
    times = slower(row.fastest, fastest) / slower(fastest, row.fastest)
    slow = {name: one.slow if name == "queued" else one.slow * times for name, one in row.timings.items()}
    timings = {name: msgspec.structs.replace(one, slow=slow[name]) for name, one in row.timings.items()}
    return msgspec.structs.replace(row, timings=timings, fastest=fastest)


def speed_of(rows: Iterable[Row]) -> RunSpeed:
    """The machine's speed during a run, in which several rows may have been timed around one reading."""
    rows = list(rows)
    return RunSpeed.of({tuple(row.speed.values()): row.speed for row in rows}.values(), _known_last(rows))


def brought_to_full_speed(row: Row, speed: RunSpeed, *, asynchronous: bool = False) -> Row:
    """A row of one kind of work as it would have been at full speed; of an asynchronous device, what its host takes."""
    if asynchronous:
        timed = row.cell.kind in ("dispatch", "network")
        return host_shortened(row, slowdown(row, speed, asynchronous=True).ops) if timed else row
    kind, slow = _kind(row.cell, speed), min(_slow(row), PREEMPTED)
    return shortened(row, speed.at(slow, row.speed)[kind] / speed.full_us[kind] if kind else slow**WHOLE_POWER)


def shortened(row: Row, longer: float) -> Row:
    """A row without the slow moment in which everything took so many times longer."""
    timings = {name: _shorter(timing, longer) for name, timing in row.timings.items()}
    return msgspec.structs.replace(row, timings=timings, calls_us=tuple(us / longer for us in row.calls_us))


def host_shortened(row: Row, longer: float) -> Row:
    """A row of an asynchronous device without the slow moment in which its host took so many times longer.

    What the device takes is its own, and a forward pass that waits for it, as any may of which nothing else is known,
    took no longer.
    """
    timings = dict(row.timings)
    for name in ("issue",) if _waits(timings) else ("issue", "single"):
        if name in timings:
            timings[name] = _shorter(timings[name], longer)
    return msgspec.structs.replace(row, timings=timings)


def _waits(timings: Mapping[str, Timing]) -> bool:
    """Whether a forward pass with these timings waits for the device, or nothing tells that it does not."""
    if "issue" not in timings:
        return True
    issue_s = timings["issue"].median_s
    if "queued" in timings:
        return timings["queued"].median_s > issue_s
    return "single" in timings and timings["single"].median_s > WAITS * (issue_s + SYNC_S)


def _shorter(timing: Timing, longer: float) -> Timing:
    return msgspec.structs.replace(timing, median_s=timing.median_s / longer, spread_s=timing.spread_s / longer)


def _kind(cell: Cell, speed: RunSpeed) -> str:
    """The reference of a run that a cell's work is like; "" where it is like all of them."""
    if cell.kind == "memory":
        like = STREAM
    elif cell.kind == "network" and cell.dims["width"] == TINY_WIDTH:
        like = DISPATCH if cell.name in CHAINS or COLD_DISPATCH not in speed.full_us else COLD_DISPATCH
    else:
        like = DISPATCH if cell.kind == "dispatch" else ""
    return like if like in speed.full_us else ""


def slowdown(
    row: Row, speed: RunSpeed, usual_us: Mapping[str, float] | None = None, *, asynchronous: bool = False
) -> Slowdown:
    """How slow the machine was around a row, against its full speed in that run or other reference times."""
    now_us = speed.at(min(_slow(row), PREEMPTED), row.speed)
    then = host.slowdown(usual_us or speed.full_us, now_us, asynchronous=asynchronous)
    return Slowdown(*(round(ratio, 2) for ratio in then))


def failures(rows: Sequence[Row]) -> dict[str, int]:
    """How many cells could not be measured, by reason, the most frequent first; of all sizes that did not fit, one."""
    reasons = (OUT_OF_MEMORY if row.error.startswith(OUT_OF_MEMORY) else row.error for row in rows)
    return dict(Counter(filter(None, reasons)).most_common())


def most_failed(rows: Sequence[Row]) -> str:
    """How many cells could not be measured, and why most often, as a sentence; "" where there were none."""
    reasons = failures(rows)
    reason, failed = next(iter(reasons), "").rstrip("."), sum(reasons.values())
    return f"Of {len(rows)} cells {failed} could not be measured, most often for this: {reason}. " if failed else ""
