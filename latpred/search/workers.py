"""Spreads candidates over the workers of a joblib backend: loky's processes, a dask cluster, ray.

joblib finds out how many candidates a worker should get at once. When a worker dies, what was not back is done again,
and in halves where that fails too: a candidate that kills its worker is found alone, named, and costs nobody else
anything.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from itertools import islice
from types import ModuleType
from typing import Any, NamedTuple

import torch

from latpred.errors import WorkerError, one_line
from latpred.ops import BUILT_IN, Formula, generation
from latpred.ops.families import lend, registered
from latpred.search.resume import CandidateRow, Evaluator, tool_options
from latpred.zoo.candidates import title

Numbered = tuple[int, Any]  # a candidate after its position


class _Pickled(NamedTuple):
    """A candidate as it was when it was drawn: whoever makes candidates may make the next one of it.

    A worker unpickles it itself: some backends wait forever for a task that a worker could not unpickle.
    """

    name: str
    pickled: bytes


# What a worker of a backend that gives results back all at once gets in one piece, and until they come back.
PIECE, ROUND = 16, 256
_UNSENT = "it cannot be sent to a worker"
HOPELESS = 3  # candidates that fail alone, one after the other and before anything succeeded: the workers are to blame

_ONE_AT_A_TIME = threading.Lock()  # a worker's threads would only wait for each other's traces
# Whose formulas this process has as a worker, how many, and the generation that they made.
_formulas_of: tuple[str, int, int, int] | None = None
_lent = ExitStack()  # takes these formulas back


class _Formulas(tuple[tuple[str, Formula], ...]):
    """Names and formulas, pickled as candidates are: multiprocessing would send no function of a notebook by itself."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        from joblib.externals.loky.backend.reduction import loads

        return loads, (_pickled(tuple(self)),)


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
        return cls(platform.node(), os.getpid(), _Formulas(registered(BUILT_IN)), *state, tools)


def work(evaluator: Evaluator, sender: _Sender, position: int, candidate: Any) -> list[CandidateRow]:
    """Rows of a candidate: what a worker does for the process that sent it."""
    from joblib.externals.loky.backend.reduction import loads  # of what joblib would have sent in the same way

    with _ONE_AT_A_TIME:
        try:
            given = loads(candidate.pickled) if isinstance(candidate, _Pickled) else candidate
        except Exception as error:  # whatever an object raises that can be pickled and not unpickled
            said = f"{type(error).__name__}: {one_line(error)}"
            return evaluator.failed(position, candidate.name, f"{_UNSENT} (unpickling it raised {said})")
        with _as_at(sender):
            return evaluator.rows(position, given)


@contextmanager
def _as_at(sender: _Sender) -> Iterator[None]:
    """Let another process than the sender trace as that does."""
    global _formulas_of
    if (sender.host, sender.process) == (platform.node(), os.getpid()):
        yield
        return
    wanted = (sender.host, sender.process, len(sender.formulas))
    if (*wanted, generation()) != _formulas_of:  # modules that came with candidates may have registered some here
        _lent.close()  # a cluster outlives the processes that it works for
        _lent.callback(lend(sender.formulas))
        _formulas_of = (*wanted, generation())
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
    evaluator: Evaluator, numbered: Iterable[Numbered], jobs: int, *, drawn: bool
) -> Generator[list[CandidateRow], None, None]:
    """Rows of each candidate, as workers finish them.

    `numbered` is read as far as workers are busy. `drawn` candidates are made one by one, perhaps of each other: they
    are copied as they come, for threads as well. Where no worker finishes anything, that is a WorkerError.
    """
    from joblib.parallel import get_active_backend

    pool = _WorkerPool(evaluator, jobs)
    source, ended = iter(numbered), False
    threads = getattr(get_active_backend()[0], "uses_threads", False)
    kept = partial(_copied, threads=threads) if drawn or not threads else lambda candidate: candidate
    while not ended:
        queue = _CandidateQueue(source, kept)
        try:
            for rows in pool.run(queue):
                queue.finished(rows)
                pool.succeeded = True
                yield rows
            ended = True
        except WorkerError:
            raise
        except Exception:  # a worker died, or what it was sent cannot be sent: each candidate will say so by itself
            unfinished = queue.close()
            if not unfinished:
                raise
            yield from pool.run_again(unfinished)
        finally:
            queue.close()  # joblib's threads would go on reading `numbered` where nobody wants more rows
        if queue.source_error is not None:
            raise queue.source_error


class _CandidateQueue:
    """Candidates for workers, one by one, and those not back yet."""

    def __init__(self, source: Iterator[Numbered], kept: Callable[[Any], Any]) -> None:
        self._source, self._kept, self._closed = source, kept, False
        self._lock = threading.Lock()  # joblib asks for candidates from several threads
        self._away: dict[int, Any] = {}
        self.source_error: BaseException | None = None

    def __iter__(self) -> Iterator[Numbered]:
        while True:
            with self._lock:
                try:
                    numbered = None if self._closed else next(self._source, None)
                except BaseException as error:  # whoever makes the candidates failed or stops, not a worker
                    self.source_error = error
                    return
                if numbered is None:
                    return
                position, candidate = numbered[0], self._kept(numbered[1])
                self._away[position] = candidate
            yield position, candidate

    def finished(self, rows: list[CandidateRow]) -> None:
        del self._away[rows[0].candidate]

    def close(self) -> list[Numbered]:
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

    def run(self, numbered: Iterable[Numbered]) -> Iterator[list[CandidateRow]]:
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

    def run_again(self, unfinished: list[Numbered]) -> Iterator[list[CandidateRow]]:
        """Rows of candidates that were lost with a worker; where some are lost again, of each half of them."""
        try:
            of_each = [*self.run(unfinished)]
        except WorkerError:
            raise
        except Exception as error:
            if len(unfinished) > 1:
                middle = len(unfinished) // 2
                yield from self.run_again(unfinished[:middle])
                yield from self.run_again(unfinished[middle:])
                return
            of_each = [self._lost(*unfinished[0], error)]
        else:
            self.succeeded = True
        yield from of_each

    def _lost(self, position: int, candidate: Any, error: Exception) -> list[CandidateRow]:
        sent = isinstance(candidate, _Pickled)
        self._failed_alone += sent  # else no worker is to blame
        if self._failed_alone >= HOPELESS and not self.succeeded:
            raise WorkerError(
                f"no worker finishes anything; the last one: {_reason(error)}. Try a single process with n_jobs=1."
            ) from error
        return self._evaluator.failed(position, candidate.name if sent else title(candidate), _reason(error))


def _copied(candidate: Any, *, threads: bool) -> Any:
    """A copy of a candidate, pickled unless it is for threads; the candidate itself where it cannot be copied."""
    from joblib.externals.loky.backend.reduction import loads

    try:
        pickled = _pickled(candidate)
        return loads(pickled) if threads else _Pickled(title(candidate), pickled)
    except Exception:  # whatever an object raises that cannot be copied; only threads can take it as it is
        return candidate


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

    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if isinstance(error, TerminatedWorkerError):
        return "its worker was killed, or crashed; too little memory is the usual cause"
    if "pickle" in text.lower():
        said = str(error.__cause__ or text).strip('"\n')
        *_, said = said.splitlines() if "Traceback (" in said else [said]  # of a traceback, the error itself
        return f"{_UNSENT}: {' '.join(said.split())}"
    return f"its worker failed: {text}"
