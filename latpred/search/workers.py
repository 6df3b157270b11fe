"""Spreads candidates over the workers of a joblib backend: loky's processes, a dask cluster, ray.

Workers get chunks of candidates and give rows back as soon as they have them. When a worker dies, what it had is done
again, one piece at a time, so that a candidate which kills its worker is named and costs nobody else anything.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from latpred.errors import WorkerError
from latpred.ops import BUILT_IN, Formula, cost, generation
from latpred.ops.families import registered
from latpred.progress import ProgressCounter
from latpred.search.resume import CandidateRow, Evaluator

Chunk = list[tuple[int, Any]]  # candidates with their positions

FIRST_CHUNK, LARGEST_CHUNK = 4, 512
CHUNK_S = 0.5  # how long a worker should have with a chunk: long beside sending it, short beside a run
LAST = 3  # chunks that each worker should still get of what is left, so that all end at about the same time
ROUND = 8  # chunks for each worker of a backend that gives results back all at once
HOPELESS = 3  # pieces that fail alone, one after the other and before anything succeeded: the workers are to blame

_ONE_AT_A_TIME = threading.Lock()  # a worker's threads would only wait for each other's traces


class Done(NamedTuple):
    """The position of a chunk's first candidate, its rows, and the seconds that a worker had with it."""

    first: int
    rows: list[CandidateRow]
    seconds: float


def work(evaluator: Evaluator, formulas: Sequence[tuple[str, Formula]], sender: int, chunk: Chunk) -> Done:
    """Rows of a chunk: what a worker does for the process `sender`, with the formulas that its user registered."""
    with _ONE_AT_A_TIME:
        if os.getpid() != sender:
            import torch

            torch.set_num_threads(1)
            for name, formula in formulas[generation() - BUILT_IN :]:  # all of them where the worker is new
                cost(name)(formula)
        clock = ProgressCounter("candidates")
        rows = [row for position, candidate in chunk for row in evaluator.rows(position, candidate)]
        return Done(chunk[0][0], rows, clock.seconds)


def predict_on_workers(
    evaluator: Evaluator, numbered: Iterable[tuple[int, Any]], jobs: int, total: int = 0
) -> Iterator[list[CandidateRow]]:
    """Rows of candidates, a chunk at a time, as workers finish them.

    `numbered` is read as far as workers are busy; `total` is 0 where nobody knows how many there are. Where no worker
    finishes anything, that is a WorkerError.
    """
    pool = _WorkerPool(evaluator, jobs)
    source = iter(numbered)
    while True:
        queue = _ChunkQueue(source, jobs, total)
        try:
            for done in pool.run(queue):
                queue.finished(done)
                pool.succeeded = True
                yield done.rows
        except Exception:  # a worker died, or what it was sent cannot be sent: each piece will say so by itself
            unfinished = queue.close()
            if not unfinished:
                raise
            for chunk in unfinished:
                yield from pool.run_alone(chunk)
            continue
        if queue.source_error is not None:
            raise queue.source_error
        return


class _ChunkQueue:
    """Chunks for workers, and those not back yet.

    Chunks follow the time that a worker had with the last one, so that slow candidates come back one by one and fast
    ones are not sent one by one.
    """

    def __init__(self, source: Iterator[tuple[int, Any]], jobs: int, total: int) -> None:
        self._source, self._jobs, self._total = source, jobs, total
        self._lock = threading.Lock()  # joblib asks for chunks from several threads
        self._away: dict[int, Chunk] = {}
        self._size, self._position, self._closed = FIRST_CHUNK, 0, False
        self.source_error: Exception | None = None

    def __iter__(self) -> Iterator[Chunk]:
        while True:
            with self._lock:
                chunk = [] if self._closed else self._next()
                if not chunk:
                    return
                self._away[chunk[0][0]] = chunk
            yield chunk

    def _next(self) -> Chunk:
        chunk: Chunk = []
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
            self._closed, self.source_error = True, error
        return chunk

    def finished(self, done: Done) -> None:
        with self._lock:
            count = len(self._away.pop(done.first))
            self._size = min(max(int(CHUNK_S * count / max(done.seconds, 1e-6)), 1), LARGEST_CHUNK)

    def close(self) -> list[Chunk]:
        """Give out no more: the chunks that are not back."""
        with self._lock:
            self._closed = True
            return list(self._away.values())


class _WorkerPool:
    """The workers of the backend that joblib's context names, else loky's processes."""

    def __init__(self, evaluator: Evaluator, jobs: int) -> None:
        self._evaluator, self._jobs = evaluator, jobs
        self._failed_alone = 0
        self.succeeded = False

    def run(self, chunks: Iterable[Chunk]) -> Iterator[Done]:
        """Rows of chunks, in the order in which workers finish."""
        from joblib import Parallel, delayed
        from joblib.parallel import get_active_backend

        # With two jobs at least, even a single piece is done by a worker.
        given = self._evaluator, registered(BUILT_IN), os.getpid()
        jobs, tasks = max(2, self._jobs), (delayed(work)(*given, chunk) for chunk in chunks)
        if get_active_backend()[0].supports_return_generator:
            yield from Parallel(jobs, batch_size=1, pre_dispatch="2*n_jobs", return_as="generator_unordered")(tasks)
            return
        while some := list(islice(tasks, ROUND * jobs)):  # ray's gives nothing back before it has everything
            yield from Parallel(jobs, batch_size=1, pre_dispatch="all")(some)

    def run_alone(self, chunk: Chunk) -> Iterator[list[CandidateRow]]:
        """Rows of a chunk that nothing else is done beside; where that fails, of each of its candidates."""
        try:
            rows = [done.rows for done in self.run([chunk])]
        except Exception as error:
            if len(chunk) > 1:
                for one in chunk:
                    yield from self.run_alone([one])
                return
            rows = [self._lost(*chunk[0], error)]
        else:
            self.succeeded = True
        yield from rows

    def _lost(self, position: int, candidate: Any, error: Exception) -> list[CandidateRow]:
        self._failed_alone += 1
        if self._failed_alone >= HOPELESS and not self.succeeded:
            raise WorkerError(
                f"no worker finishes anything; the last one: {_reason(error)}. Try a single process with n_jobs=1."
            ) from error
        return self._evaluator.failed(position, candidate, _reason(error))


def _reason(error: Exception) -> str:
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if isinstance(error, TerminatedWorkerError):
        return "its worker was killed, or crashed; too little memory is the usual cause"
    if "pickle" in text.lower():
        cause = error.__cause__ or error
        return f"it cannot be sent to a worker: {' '.join(str(cause).split()) or text}"
    return f"its worker failed: {text}"
