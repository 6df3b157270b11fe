"""Spreads candidates over the workers of a joblib backend: loky's processes, a dask cluster, ray.

joblib finds out how many candidates a worker should get at once. When a worker dies, what was not back is done again,
one by one: a candidate that kills its worker is found alone, named, and costs nobody else anything.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from itertools import islice
from types import ModuleType
from typing import Any, NamedTuple

import torch

from latpred.errors import WorkerError, one_line
from latpred.ops import BUILT_IN, Formula
from latpred.ops.families import lend, registered
from latpred.search.resume import CandidateRow, Evaluator, tool_options
from latpred.zoo.candidates import title

Numbered = tuple[int, Any]  # a candidate after its position


class _Sent(NamedTuple):
    """A candidate as it was when it was drawn: whoever makes candidates may make the next one of it.

    A worker unpickles it itself: some backends wait forever for a task that a worker could not unpickle.
    """

    name: str
    pickled: bytes
    problem: str = ""  # why it could not be pickled


# What a worker of a backend that gives results back all at once gets in one piece, and until they come back.
PIECE, ROUND = 16, 256
_UNSENT = "it cannot be sent to a worker"
HOPELESS = 3  # candidates that fail alone, one after the other and before anything succeeded: the workers are to blame

_ONE_AT_A_TIME = threading.Lock()  # a worker's threads would only wait for each other's traces
_formulas_of: tuple[str, int, int] | None = None  # whose this process has as a worker, and how many
_lent = ExitStack()  # takes these formulas back


class _Sender(NamedTuple):
    """The process that workers work for, with what rows of candidates follow from there beside what is asked."""

    host: str
    process: int
    formulas: tuple[tuple[str, Formula], ...]  # of its user
    dtype: torch.dtype  # what tensors get there where nothing else is said
    threads: int  # of torch there, by which its compiler decides
    tools: tuple[tuple[str, str], ...] = ()  # runtimes that were asked for, and what their tools are set to there

    @classmethod
    def here(cls, runtimes: Sequence[str]) -> _Sender:
        state = torch.get_default_dtype(), torch.get_num_threads()
        tools = tuple((name, tool_options(name)) for name in runtimes)
        return cls(platform.node(), os.getpid(), registered(BUILT_IN), *state, tools)


def work(evaluator: Evaluator, sender: _Sender, position: int, sent: _Sent) -> list[CandidateRow]:
    """Rows of a candidate: what a worker does for the process that sent it."""
    from joblib.externals.loky.backend.reduction import loads  # of what joblib would have sent in the same way

    if sent.problem:
        return evaluator.failed(position, sent.name, sent.problem)
    with _ONE_AT_A_TIME:
        try:
            candidate = loads(sent.pickled)
        except Exception as error:  # whatever an object raises that can be pickled and not unpickled
            said = f"{type(error).__name__}: {one_line(error)}"
            return evaluator.failed(position, sent.name, f"{_UNSENT} (unpickling it raised {said})")
        with _as_at(sender):
            return evaluator.rows(position, candidate)


@contextmanager
def _as_at(sender: _Sender) -> Iterator[None]:
    """Let another process than the sender trace as that does."""
    global _formulas_of
    if (sender.host, sender.process) == (platform.node(), os.getpid()):
        yield
        return
    wanted = (sender.host, sender.process, len(sender.formulas))
    if wanted != _formulas_of:
        _lent.close()  # a cluster outlives the processes that it works for
        _lent.callback(lend(sender.formulas))
        _formulas_of = wanted
    before = torch.get_default_dtype(), torch.get_num_threads()
    _set_process(sender.dtype, sender.threads)
    try:
        others = [name for name, options in sender.tools if tool_options(name) != options]
        if others:
            raise WorkerError(
                f"the tools of {', '.join(others)} have other settings or versions in workers than in the process that "
                "asks, and would give other predictions. Try a single process with n_jobs=1."
            )
        yield
    finally:
        _set_process(*before)


def _set_process(dtype: torch.dtype, threads: int) -> None:
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)


def predict_on_workers(
    evaluator: Evaluator, numbered: Iterable[Numbered], jobs: int
) -> Generator[list[CandidateRow], None, None]:
    """Rows of each candidate, as workers finish them.

    `numbered` is read as far as workers are busy. Where no worker finishes anything, that is a WorkerError.
    """
    pool = _WorkerPool(evaluator, jobs)
    source, ended = iter(numbered), False
    while not ended:
        queue = _CandidateQueue(source)
        try:
            for rows in pool.run(queue):
                queue.finished(rows)
                pool.succeeded = True
                yield rows
            ended = True
        except WorkerError:
            raise
        except Exception:  # a worker died: the candidate that killed it is found alone
            unfinished = queue.close()
            if not unfinished:
                raise
            for position, sent in unfinished:
                yield pool.run_alone(position, sent)
        finally:
            queue.close()  # joblib's threads would go on reading `numbered` where nobody wants more rows
        if queue.source_error is not None:
            raise queue.source_error


class _CandidateQueue:
    """Candidates for workers, one by one, and those not back yet."""

    def __init__(self, source: Iterator[Numbered]) -> None:
        self._source, self._closed = source, False
        self._lock = threading.Lock()  # joblib asks for candidates from several threads
        self._away: dict[int, _Sent] = {}
        self.source_error: BaseException | None = None

    def __iter__(self) -> Iterator[tuple[int, _Sent]]:
        while True:
            with self._lock:
                try:
                    numbered = None if self._closed else next(self._source, None)
                except BaseException as error:  # whoever makes the candidates failed or stops, not a worker
                    self.source_error = error
                    return
                if numbered is None:
                    return
                position, candidate = numbered
                sent = self._away[position] = _sent(candidate)
            yield position, sent

    def finished(self, rows: list[CandidateRow]) -> None:
        del self._away[rows[0].candidate]

    def close(self) -> list[tuple[int, _Sent]]:
        """Give out no more: the candidates that are not back."""
        with self._lock:
            self._closed = True
            return [*self._away.items()]


class _WorkerPool:
    """The workers of the backend that joblib's context names, else loky's processes."""

    def __init__(self, evaluator: Evaluator, jobs: int) -> None:
        self._evaluator, self._jobs = evaluator, jobs
        self._failed_alone = 0
        self.succeeded = False

    def run(self, numbered: Iterable[tuple[int, _Sent]]) -> Iterator[list[CandidateRow]]:
        """Rows of each candidate, in the order in which workers finish."""
        from joblib import Parallel, delayed
        from joblib.parallel import get_active_backend

        # With two jobs at least, even a single candidate is done by a worker.
        given = self._evaluator, _Sender.here(self._evaluator.runtimes)
        jobs, tasks = max(2, self._jobs), (delayed(work)(*given, *one) for one in numbered)
        if get_active_backend()[0].supports_return_generator:
            yield from Parallel(jobs, return_as="generator_unordered")(tasks)
            return
        while some := list(islice(tasks, ROUND * jobs)):  # ray's gives nothing back before it has everything
            yield from Parallel(jobs, batch_size=PIECE, pre_dispatch="all")(some)

    def run_alone(self, position: int, sent: _Sent) -> list[CandidateRow]:
        """Rows of a candidate that was lost with a worker."""
        try:
            (rows,) = self.run([(position, sent)])
        except WorkerError:
            raise
        except Exception as error:
            self._failed_alone += 1
            if self._failed_alone >= HOPELESS and not self.succeeded:
                raise WorkerError(
                    f"no worker finishes anything; the last one: {_reason(error)}. Try a single process with n_jobs=1."
                ) from error
            return self._evaluator.failed(position, sent.name, _reason(error))
        self.succeeded = True
        return rows


def _sent(candidate: Any) -> _Sent:
    try:
        return _Sent(title(candidate), _pickled(candidate))
    except Exception as error:  # whatever an object raises that cannot be pickled
        return _Sent(title(candidate), b"", f"{_UNSENT}: {type(error).__name__}: {one_line(error)}")


def _pickled(value: Any) -> bytes:
    """What a worker is sent; code of a notebook that says `torch` and `.ops` takes the module torch.ops along."""
    from joblib.externals.loky.backend.reduction import dumps

    kinds = {type(each) for name, each in sys.modules.copy().items() if name.startswith("torch.")} - {ModuleType}
    special = {kind: _by_name for kind in kinds if issubclass(kind, ModuleType)}  # of modules that pickle refuses
    return bytes(dumps(value, reducers=special))


def _by_name(module: ModuleType) -> tuple[Any, ...]:
    return import_module, (module.__name__,)


def _reason(error: Exception) -> str:
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    if isinstance(error, TerminatedWorkerError):
        return "its worker was killed, or crashed; too little memory is the usual cause"
    return f"its worker failed: {type(error).__name__}: {one_line(error)}"
