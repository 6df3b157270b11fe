"""The tempo of a machine: how long a piece of work takes that is always the same.

A shared processor is slower in one minute than in the next, by far more than a kernel is known to. Work done between
the timings tells, so that cells timed at different tempos can be compared, and visits in a slow moment set aside.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import torch

from latpred.calibration.cells import Cell
from latpred.calibration.session import Row
from latpred.calibration.timing import Timing

SIZE = 320
BEATS = 3
TEMPO = "tempo"  # the timing of a row that holds it
ALIKE = 0.10  # relative difference of tempos that says nothing
FEWEST = 3  # repeats that are kept in any case
FARTHEST = 2.0  # a row is never evened by more than this factor


class Metronome:
    """A product of small matrices, which leaves the last-level cache as it is."""

    def __init__(self) -> None:
        self._factor = torch.randn(SIZE, SIZE)
        self._product = torch.empty_like(self._factor)

    def beat(self) -> None:
        """Do the work once."""
        torch.mm(self._factor, self._factor, out=self._product)

    def seconds(self) -> float:
        """What the work takes now: the median of a few beats."""
        taken = []
        for _ in range(BEATS):
            start = time.perf_counter()
            self.beat()
            taken.append(time.perf_counter() - start)
        return float(np.median(taken))


def evened(rows: Iterable[Row]) -> list[Row]:
    """Rows as they would have been at the usual tempo: the median of all rows of the same kind.

    Rows without a tempo stay as they are.
    """
    rows = list(rows)
    beats: dict[tuple[str, int, str], list[float]] = {}
    for row in rows:
        if TEMPO in row.timings:
            beats.setdefault(_kind(row.cell), []).append(row.timings[TEMPO].median_s)
    usual = {kind: float(np.median(seconds)) for kind, seconds in beats.items()}
    return [_at(row, usual) for row in rows]


def _kind(cell: Cell) -> tuple[str, int, str]:
    """Rows whose tempo was told by the same work, after the same work: what ran before a beat slows it by a fifth."""
    return cell.runtime, cell.dims.get("cold", 0), cell.precision


def _at(row: Row, usual: dict[tuple[str, int, str], float]) -> Row:
    if TEMPO not in row.timings:
        return row
    slow = row.timings[TEMPO].median_s / usual[_kind(row.cell)]
    slow = min(max(slow, 1 / FARTHEST), FARTHEST)
    timings = {name: _scaled(timing, slow) for name, timing in row.timings.items()}
    return msgspec.structs.replace(row, timings=timings, calls_us=tuple(us / slow for us in row.calls_us))


def _scaled(timing: Timing, slow: float) -> Timing:
    return msgspec.structs.replace(timing, median_s=timing.median_s / slow, spread_s=timing.spread_s / slow)


def steady(timings: Sequence[Timing], tempos: Sequence[float], usual: float) -> list[Timing]:
    """Timings taken at about the usual tempo; at least half of them and at least three, whatever the tempo was.

    Parameters
    ----------
    timings : sequence of Timing
        Repeats of one cell.
    tempos : sequence of float
        Seconds of `Metronome.seconds` around each.
    usual : float
        Median tempo of the whole run.
    """
    order = sorted(range(len(timings)), key=lambda index: abs(np.log(tempos[index] / usual)))
    least = max((len(timings) + 1) // 2, FEWEST)
    kept = [i for rank, i in enumerate(order) if rank < least or abs(tempos[i] / usual - 1) <= ALIKE]
    return [timings[index] for index in sorted(kept)]
