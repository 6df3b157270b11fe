"""Runs a search's candidates: what is finished is read back, the rest is predicted here or by workers, in any order.

The rows come out in the order of the candidates.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sized
from contextlib import nullcontext
from typing import Any

from latpred import many
from latpred.errors import CandidateError, UsageError
from latpred.many import Question, Row
from latpred.pace import Pace, Tell, shown
from latpred.predictor import Predictor
from latpred.resuming import Kept, opened
from latpred.spreading import spread


def collect(
    predictor: Predictor,
    candidates: Iterable[Any],
    asked: Question,
    *,
    errors: str = "record",
    n_jobs: int | None = None,
    resume: str | os.PathLike[str] | None = None,
    progress: bool | Tell | None = None,
) -> list[Row]:
    """Rows of all candidates; see `latpred.predict_many`."""
    jobs = _workers(n_jobs)
    total = len(candidates) if isinstance(candidates, Sized) else 0
    keeping = nullcontext() if resume is None else opened(resume, predictor, asked)
    with shown(progress) as tell, keeping as kept:
        run = _Run(kept, Pace("candidates", total, tell))
        new = run.unfinished(candidates)
        parts: Iterable[list[Row]] = (
            (many.evaluate(predictor, [one], asked, errors=errors) for one in new)
            if jobs == 1
            else spread(predictor, new, asked, jobs, total)
        )
        for rows in parts:
            run.take(rows)
            if errors == "raise":
                _demand_none_failed(rows)
    return run.in_order()


def _workers(n_jobs: int | None) -> int:
    """How many workers the argument and joblib's context come to."""
    from joblib import effective_n_jobs

    if n_jobs == 0:
        raise UsageError("n_jobs=0 leaves nobody to work. Give a number of workers, or -1 for one on each core.")
    return int(effective_n_jobs(n_jobs))


class _Run:
    """What is finished, by position, and the keys of what is not."""

    def __init__(self, kept: Kept | None, pace: Pace) -> None:
        self._kept, self._pace = kept, pace
        self._finished: dict[int, list[Row]] = {}
        self._keys: dict[int, str | None] = {}

    def unfinished(self, candidates: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """Candidates that need work, with their positions; finished ones are taken from the file."""
        for position, candidate in enumerate(candidates):
            if self._kept is not None:
                key = self._kept.key(candidate)
                known = self._kept.rows(key, position)
                if known is not None:
                    self._finished[position] = known
                    self._pace.count(worked=False)
                    continue
                self._keys[position] = key
            yield position, candidate

    def take(self, rows: list[Row]) -> None:
        """Rows of some candidates are there."""
        by_position: dict[int, list[Row]] = {}
        for row in rows:
            by_position.setdefault(row.candidate, []).append(row)
        self._finished.update(by_position)
        if self._kept is not None:
            for position, own in by_position.items():
                self._kept.add(self._keys.pop(position), own)
        self._pace.count(len(by_position))

    def in_order(self) -> list[Row]:
        """All rows, candidate after candidate."""
        return [row for position in sorted(self._finished) for row in self._finished[position]]


def _demand_none_failed(rows: list[Row]) -> None:
    for row in rows:
        if row.error is not None:
            raise CandidateError(f"candidate {row.candidate} ({row.name}): {row.error}")
