"""`latpred.predict_many`: a table of many candidates, one row for each of them, batch and runtime.

Rows, and what is kept of an earlier run, are `resume`'s business, processes `workers`'.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Mapping, Sequence, Sized
from contextlib import closing
from typing import TYPE_CHECKING, Any

from torch.nn import Module

from latpred.errors import CandidateError, UsageError
from latpred.graph.graph import ModelGraph
from latpred.progress import Listener, ProgressCounter, shown
from latpred.query import Options
from latpred.search.resume import CandidateRow, Evaluator, frame, opened
from latpred.search.workers import predict_on_workers
from latpred.zoo.candidates import title
from latpred.zoo.names import is_config

if TYPE_CHECKING:
    import pandas as pd

    from latpred.prediction.predictor import Predictor
    from latpred.query import Device

ERRORS = ("record", "raise")


def predict_many(
    candidates: Iterable[Any],
    *,
    batch: int | Sequence[int] = 1,
    runtime: str | Sequence[str] = "eager",
    device: Device | Predictor | Sequence[Device | Predictor] | None = None,
    host: float | str | None = None,
    precision: str | None = None,
    attention: str | None = None,
    protocol: str = "single",
    inputs: Any = None,
    seq: int | None = None,
    image: int | None = None,
    errors: str = "record",
    n_jobs: int | None = None,
    resume: str | os.PathLike[str] | None = None,
    progress: bool | Listener | None = None,
) -> pd.DataFrame:
    """Predict many candidates of a search at once; what is learnt of one candidate serves the others.

    Parameters
    ----------
    candidates : iterable
        Modules, functions without arguments that build one (called on the meta device, without initialisation),
        transformers configs (their base model), names ("nasbench201:17" is a network of a published space), or graphs
        and functions that give them (`latpred.Supernet` has the graphs of many architectures quickly). A generator will
        do.
    batch : int or sequence of int
        Batch sizes.
    runtime : str or sequence of str
        Runtimes.
    device : str, path, torch.device or Predictor, or sequence of them, optional
        As for `predict`, or a `latpred.Predictor`. Of several devices each gets rows; candidates are traced once for
        all whose profiles are of one PyTorch.
    host, precision, attention, protocol, inputs, seq, image
        As for `predict`; they hold for all candidates. A graph that was traced at another such size is refused.
    errors : {"record", "raise"}
        A candidate that cannot be built, traced or predicted gets rows that say why ("record"), or ends everything.
    n_jobs : int, optional
        Processes that share the work, -1 for one on each core; without it, this process alone, or the workers of a
        `joblib.parallel_config` that the call stands in, as backend="dask" or "ray". The table is the same to the bit.
        A candidate that cannot be sent to a worker, or that kills it, is an error of its own.
    resume : path, optional
        A Parquet file: what it has is not predicted again, and what is new is added every few seconds. Rows are told
        apart by the candidate's contents with whatever its code names, the question, the profile, latpred's own code,
        and the versions of Python and the libraries; a candidate that failed, or that cannot be told from others, as
        a function that draws what it builds or reads a file, is predicted again.
    progress : bool or callable, optional
        True shows a bar with rate and time left on a terminal; a function is told each
        `latpred.progress.ProgressEvent`.

    Returns
    -------
    DataFrame
        One row for each candidate, device, batch and runtime, in this order: candidate (its position), name, device
        (its profile's name), batch, runtime, precision, latency_ms, low_ms, high_ms (its 90 % interval),
        overhead_ms, compute_ms, regime, macs, parameters, launches, caveats (sentences about what may not hold, a
        tuple), error (None, or the reason why the numbers are NaN).

    Raises
    ------
    UsageError
        When an argument is wrong.
    ProfileError
        When there is no profile of the device, or it does not cover what was asked.
    CandidateError
        With errors="raise", for the first candidate that fails.
    WorkerError
        When no worker finishes anything, or a runtime's tools have other settings or versions there than here.

    Examples
    --------
    >>> from transformers import BertConfig
    >>> table = predict_many((BertConfig(num_hidden_layers=n) for n in (2, 4, 8)), batch=[1, 16])  # doctest: +SKIP
    """
    from joblib import effective_n_jobs
    from joblib.parallel import get_active_backend

    if errors not in ERRORS:
        raise UsageError(f"errors={errors!r} is not known; choose from: {', '.join(ERRORS)}.")
    if _is_one(candidates):
        raise UsageError(f"{title(candidates)} is one candidate; give a list, as in [model].")
    if isinstance(candidates, Mapping):
        raise UsageError("a mapping has names that no row has; give its models alone: predict_many(models.values()).")
    options = Options(inputs, seq, image, precision, attention=attention, protocol=protocol)
    evaluator = Evaluator.of(device, batch, runtime, options, host)
    jobs = int(effective_n_jobs(n_jobs))
    total = len(candidates) if isinstance(candidates, Sized) else 0
    with shown(progress) as listener, opened(resume, evaluator) as store:
        counter = ProgressCounter("candidates", total, listener)
        new = store.unfinished(candidates, counter)
        parts: Generator[list[CandidateRow], None, None] = (
            (evaluator.rows(*numbered, errors) for numbered in new)
            if jobs == 1 or getattr(get_active_backend()[0], "uses_threads", False)  # which would wait for one another
            else predict_on_workers(evaluator, new, jobs)
        )
        with closing(parts):  # an error, which may be kept with all it refers to, ends the workers' run as well
            for rows in parts:
                store.take(rows)
                counter.count()
                failed = next((row for row in rows if row.error is not None), None)
                if errors == "raise" and failed is not None:
                    raise CandidateError(f"candidate {failed.candidate} ({failed.name}): {failed.error}")
    return frame(store.in_order())


def _is_one(candidates: Any) -> bool:
    """Whether this is a candidate itself, be it one that can be gone through: a name by letters, a config by fields."""
    if isinstance(candidates, (str, os.PathLike, Module, ModelGraph)) or is_config(candidates):
        return True
    return not isinstance(candidates, Iterable) and (callable(candidates) or not hasattr(candidates, "__getitem__"))
