"""Spreads candidates over the workers of a joblib backend: loky's processes, a dask cluster, ray.

Workers get chunks of candidates, make a predictor once, and give rows back as soon as they have them. When a worker
dies, what it had is done again, one piece at a time, so that a candidate which kills its worker is named and costs
nobody else anything. What a row says is `latpred.many`'s business.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from latpred import many, profile_codec
from latpred.errors import WorkerError
from latpred.many import Question, Row
from latpred.pace import Pace
from latpred.predictor import Predictor

Numbered = list[tuple[int, Any]]

FIRST_CHUNK, LARGEST_CHUNK = 4, 64
ROUND = 8  # chunks for each worker of a backend that gives results back all at once
CHUNK_S = 0.5  # how long a worker should have with a chunk: long beside sending it, short beside a run
HOPELESS = 3  # pieces that fail alone, one after the other and before anything succeeded: the workers are to blame
_MOST_KEPT = 4  # predictors that a worker keeps

_PREDICTORS: dict[str, Predictor] = {}
_ONE_AT_A_TIME = threading.Lock()  # walking a model changes how modules are initialised, for all threads


class Ticket(NamedTuple):
    """What a worker predicts with; the profile is sent as text, and read once by each worker."""

    key: str
    profile: bytes
    caveats: tuple[str, ...]
    asked: Question
    sender: int  # process id

    @classmethod
    def of(cls, predictor: Predictor, asked: Question) -> Ticket:
        """The ticket for a predictor."""
        profile, caveats = profile_codec.encode(predictor.profile), predictor.caveats
        key = hashlib.sha256(profile + repr(caveats).encode()).hexdigest()
        return cls(key, profile, caveats, asked, os.getpid())

    def predictor(self) -> Predictor:
        """The predictor, made unless this process has it."""
        if self.key not in _PREDICTORS:
            while len(_PREDICTORS) >= _MOST_KEPT:
                _PREDICTORS.pop(next(iter(_PREDICTORS)))
            _PREDICTORS[self.key] = Predictor(profile_codec.decode(self.profile, "a sender's profile"), self.caveats)
        return _PREDICTORS[self.key]


def work(ticket: Ticket, number: int, numbered: Numbered) -> tuple[int, list[Row]]:
    """Rows of a chunk, with the chunk's number: what a worker does."""
    with _ONE_AT_A_TIME:
        if os.getpid() != ticket.sender:
            import torch

            torch.set_num_threads(1)
        return number, many.evaluate(ticket.predictor(), numbered, ticket.asked)


def spread(
    predictor: Predictor, numbered: Iterable[tuple[int, Any]], asked: Question, jobs: int
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

    Raises
    ------
    WorkerError
        When no worker finishes anything.
    """
    crew = _Crew(Ticket.of(predictor, asked), jobs)
    source = iter(numbered)
    while True:
        flight = _Flight(source, jobs)
        try:
            for number, rows in crew.run(flight):
                flight.land(number)
                crew.succeeded = True
                yield rows
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

    Chunks grow with the rate, so that slow candidates come back one by one and fast ones are not sent one by one.
    """

    def __init__(self, source: Iterator[tuple[int, Any]], jobs: int) -> None:
        self._source, self._jobs = source, jobs
        self._lock = threading.Lock()  # joblib asks for chunks from several threads
        self._away: dict[int, Numbered] = {}
        self._sent, self._closed = 0, False
        self._pace: Pace | None = None
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
        wanted = int(self._pace.rate / self._jobs * CHUNK_S) if self._pace and self._pace.done else FIRST_CHUNK
        try:
            while len(chunk) < min(max(wanted, 1), LARGEST_CHUNK):
                chunk.append(next(self._source))
        except StopIteration:
            self._closed = True
        except Exception as error:  # whoever makes the candidates failed, not a worker
            self._closed, self.broken = True, error
        return chunk

    def land(self, number: int) -> None:
        """A chunk is back. The first one tells nothing of the rate: workers had to start."""
        with self._lock:
            chunk = self._away.pop(number)
            if self._pace is None:
                self._pace = Pace("candidates")
            else:
                self._pace.count(len(chunk))

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

    def run(self, chunks: Iterable[tuple[int, Numbered]]) -> Iterator[tuple[int, list[Row]]]:
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
            found = [rows for _, rows in self.run([(0, chunk)])]
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
