"""Spreads candidates over the workers of a joblib backend: loky's processes, a dask cluster, ray.

Workers get chunks of candidates, make a predictor once, and give rows back as soon as they have them. When a worker
dies, what it had is done again, one piece at a time, so that a candidate which kills its worker is named and costs
nobody else anything. What a row says is `latpred.search.many`'s business.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable, Iterator, Sized
from contextlib import nullcontext
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from latpred.errors import CandidateError, UsageError, WorkerError
from latpred.prediction.predictor import Predictor
from latpred.profile.document import DeviceProfile
from latpred.progress import Pace, Tell, shown
from latpred.search import many
from latpred.search.many import Question, Row
from latpred.search.resume import Kept, opened

Numbered = list[tuple[int, Any]]

FIRST_CHUNK, LARGEST_CHUNK = 4, 512
CHUNK_S = 0.5  # how long a worker should have with a chunk: long beside sending it, short beside a run
LAST = 3  # chunks that each worker should still get of what is left, so that all end at about the same time
ROUND = 8  # chunks for each worker of a backend that gives results back all at once
HOPELESS = 3  # pieces that fail alone, one after the other and before anything succeeded: the workers are to blame
_MOST_KEPT = 4  # predictors that a worker keeps

_PREDICTORS: dict[str, Predictor] = {}
_ONE_AT_A_TIME = threading.Lock()  # a worker's threads would only wait for each other's walks


class Ticket(NamedTuple):
    """What a worker predicts with; the profile is sent packed, and unpacked once by each worker."""

    key: str
    profile: bytes
    caveats: tuple[str, ...]
    asked: Question
    sender: int  # process id

    @classmethod
    def of(cls, predictor: Predictor, asked: Question) -> Ticket:
        """The ticket for a predictor."""
        profile, caveats = msgspec.msgpack.encode(predictor.given), predictor.caveats
        key = hashlib.sha256(profile + repr(caveats).encode()).hexdigest()
        return cls(key, profile, caveats, asked, os.getpid())

    def predictor(self) -> Predictor:
        """The predictor, made unless this process has it."""
        if self.key not in _PREDICTORS:
            while len(_PREDICTORS) >= _MOST_KEPT:
                _PREDICTORS.pop(next(iter(_PREDICTORS)))
            profile = msgspec.msgpack.decode(self.profile, type=DeviceProfile)
            _PREDICTORS[self.key] = Predictor(profile, self.caveats)
        return _PREDICTORS[self.key]


class Done(NamedTuple):
    """A chunk's number, its rows, and the seconds that a worker had with it."""

    number: int
    rows: list[Row]
    seconds: float


def work(ticket: Ticket, number: int, numbered: Numbered) -> Done:
    """Rows of a chunk: what a worker does."""
    with _ONE_AT_A_TIME:
        if os.getpid() != ticket.sender:
            import torch

            torch.set_num_threads(1)
        predictor, pace = ticket.predictor(), Pace("candidates")
        rows = many.evaluate(predictor, numbered, ticket.asked)
        return Done(number, rows, pace.seconds)


def predict_on_workers(
    predictor: Predictor, numbered: Iterable[tuple[int, Any]], asked: Question, jobs: int, total: int = 0
) -> Iterator[list[Row]]:
    """Rows of candidates, a chunk at a time, as workers finish them.

    Parameters
    ----------
    predictor : Predictor
        Of the device.
    numbered : iterable of (int, candidate)
        Candidates with their positions; it is read as far as workers are busy.
    asked : Question
        What is asked of each.
    jobs : int
        How many workers there are.
    total : int
        How many candidates there are; 0 where nobody knows.

    Raises
    ------
    WorkerError
        When no worker finishes anything.
    """
    crew = _Crew(Ticket.of(predictor, asked), jobs)
    source = iter(numbered)
    while True:
        flight = _Flight(source, jobs, total)
        try:
            for done in crew.run(flight):
                flight.land(done)
                crew.succeeded = True
                yield done.rows
        except Exception:  # a worker died, or what it was sent cannot be sent: each piece will say so by itself
            unfinished = flight.under_way()
            if not unfinished:
                raise
            for chunk in unfinished:
                yield from crew.alone(chunk)
            continue
        if flight.broken is not None:
            raise flight.broken
        return


class _Flight:
    """Chunks on their way to workers, and those not back yet.

    Chunks follow the time that a worker had with the last one, so that slow candidates come back one by one and fast
    ones are not sent one by one.
    """

    def __init__(self, source: Iterator[tuple[int, Any]], jobs: int, total: int) -> None:
        self._source, self._jobs, self._total = source, jobs, total
        self._lock = threading.Lock()  # joblib asks for chunks from several threads
        self._away: dict[int, Numbered] = {}
        self._sent, self._closed = 0, False
        self._size, self._position = FIRST_CHUNK, 0
        self.broken: Exception | None = None

    def __iter__(self) -> Iterator[tuple[int, Numbered]]:
        while True:
            with self._lock:
                chunk = [] if self._closed else self._next()
                if not chunk:
                    return
                number, self._sent = self._sent, self._sent + 1
                self._away[number] = chunk
            yield number, chunk

    def _next(self) -> Numbered:
        chunk: Numbered = []
        wanted = self._size
        if self._total:
            wanted = min(wanted, max((self._total - self._position) // (LAST * self._jobs), FIRST_CHUNK))
        try:
            while len(chunk) < wanted:
                chunk.append(next(self._source))
                self._position = chunk[-1][0]
        except StopIteration:
            self._closed = True
        except Exception as error:  # whoever makes the candidates failed, not a worker
            self._closed, self.broken = True, error
        return chunk

    def land(self, done: Done) -> None:
        """A chunk is back."""
        with self._lock:
            own = len(self._away.pop(done.number))
            self._size = min(max(int(CHUNK_S * own / max(done.seconds, 1e-6)), 1), LARGEST_CHUNK)

    def under_way(self) -> list[Numbered]:
        """End the flight: the chunks that are not back."""
        with self._lock:
            self._closed = True
            return list(self._away.values())


class _Crew:
    """The workers of the backend that joblib's context names, else loky's processes."""

    def __init__(self, ticket: Ticket, jobs: int) -> None:
        self._ticket, self._jobs = ticket, jobs
        self._failed_alone = 0
        self.succeeded = False

    def run(self, chunks: Iterable[tuple[int, Numbered]]) -> Iterator[Done]:
        """Rows of chunks, in the order in which workers finish."""
        from joblib import Parallel, delayed
        from joblib.parallel import get_active_backend

        # With two jobs at least, even a single piece is done by a worker.
        jobs, tasks = max(2, self._jobs), (delayed(work)(self._ticket, *chunk) for chunk in chunks)
        if get_active_backend()[0].supports_return_generator:
            yield from Parallel(jobs, batch_size=1, pre_dispatch="2*n_jobs", return_as="generator_unordered")(tasks)
            return
        while some := list(islice(tasks, ROUND * jobs)):  # ray's gives nothing back before it has everything
            yield from Parallel(jobs, batch_size=1, pre_dispatch="all")(some)

    def alone(self, chunk: Numbered) -> Iterator[list[Row]]:
        """Rows of a chunk that nothing else is done beside; where that fails, of each of its candidates."""
        try:
            found = [done.rows for done in self.run([(0, chunk)])]
        except Exception as error:
            if len(chunk) > 1:
                for one in chunk:
                    yield from self.alone([one])
                return
            found = [self._lost(*chunk[0], error)]
        else:
            self.succeeded = True
        yield from found

    def _lost(self, position: int, candidate: Any, error: Exception) -> list[Row]:
        self._failed_alone += 1
        if self._failed_alone >= HOPELESS and not self.succeeded:
            raise WorkerError(
                f"no worker finishes anything; the last one: {_said(error)}. Try a single process with n_jobs=1."
            ) from error
        return many.failed(self._ticket.asked, position, candidate, _said(error))


def _said(error: Exception) -> str:
    """Why a worker gave no rows for a candidate."""
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if isinstance(error, TerminatedWorkerError):
        return "its worker was killed, or crashed; too little memory is the usual cause"
    if "pickle" in text.lower():
        cause = error.__cause__ or error
        return f"it cannot be sent to a worker: {' '.join(str(cause).split()) or text}"
    return f"its worker failed: {text}"


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
            else predict_on_workers(predictor, new, asked, jobs, total)
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
