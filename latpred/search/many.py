"""Many candidates of a search, predicted one after the other: a table with one row for each candidate and question.

A candidate that cannot be built, walked or predicted gets a row that says why, and the rest go on. How a module is
walked and how a graph is priced is told elsewhere; so is spreading candidates over processes, for which `evaluate`
and `frame` are the parts that a worker and its caller need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING, Any, NamedTuple

from latpred.errors import CandidateError, LatpredError, UsageError
from latpred.graph.graph import ModelGraph
from latpred.prediction.prediction import Curve, Prediction
from latpred.prediction.predictor import PROTOCOLS, Predictor, checked_batches, is_one
from latpred.runtimes import lowering
from latpred.runtimes.legacy_torch import traced_for

if TYPE_CHECKING:
    import os

    import pandas as pd

    from latpred.progress import Tell

ERRORS = ("record", "raise")


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of every candidate.

    Attributes
    ----------
    batches : tuple[int, ...]
        Batch sizes.
    runtimes : tuple[str, ...]
        Names of runtimes.
    precision : str or None
        fp32, tf32, fp16, bf16 or fp64; None for each model's own.
    protocol : str
        "single" or "pipelined".
    inputs : tuple, dict, callable or None
        What the models are called with; None where it follows from the model.
    seq, image : int or None
        Tokens or samples, and pixels of a side.
    """

    batches: tuple[int, ...] = (1,)
    runtimes: tuple[str, ...] = ("eager",)
    precision: str | None = None
    protocol: str = "single"
    inputs: Any = None
    seq: int | None = None
    image: int | None = None


class Row(NamedTuple):
    """One candidate at one batch size in one runtime; the numbers are NaN where `error` says what went wrong.

    Attributes
    ----------
    candidate : int
        Its position.
    name : str
        What it is called; see `latpred.zoo.candidates.title`.
    batch, runtime, precision
        What was asked.
    latency_ms, low_ms, high_ms : float
        Milliseconds of one forward pass, and the ends of their 90 % interval.
    host_ms, device_ms : float
        What the host dispatches and what the device computes.
    regime : str
        "framework-bound", "compute-bound" or "memory-bound".
    macs, parameters, launches : float
        Multiply-adds of the forward pass, parameters of the model, device launches.
    error : str or None
        Why there are no numbers.
    """

    candidate: int
    name: str
    batch: int
    runtime: str
    precision: str
    latency_ms: float = nan
    low_ms: float = nan
    high_ms: float = nan
    host_ms: float = nan
    device_ms: float = nan
    regime: str = ""
    macs: float = nan
    parameters: float = nan
    launches: float = nan
    error: str | None = None


COLUMNS = Row._fields
_TYPES = {"candidate": "int64", "batch": "int64"} | {
    name: "float64" for name, default in Row._field_defaults.items() if isinstance(default, float)
}


def question(
    predictor: Predictor,
    *,
    batch: int | Sequence[int] = 1,
    runtime: str | Sequence[str] = "eager",
    precision: str | None = None,
    protocol: str = "single",
    inputs: Any = None,
    seq: int | None = None,
    image: int | None = None,
) -> Question:
    """Check what is asked of all candidates before any of them takes time; see `predict_many`.

    Raises
    ------
    UsageError
        When an argument is wrong.
    ProfileError
        When the profile does not cover a runtime or the precision.
    """
    from latpred.tracing.inputs import demand_one

    one = is_one(batch)
    batches = checked_batches([batch] if one else batch)  # type: ignore[list-item, arg-type]
    runtimes = (runtime,) if isinstance(runtime, str) else tuple(runtime)
    if not runtimes:
        raise UsageError("no runtime was named; give one, as in runtime='eager'.")
    for name in runtimes:
        predictor.check(name, precision)
    if protocol not in PROTOCOLS:
        raise UsageError(f"protocol={protocol!r} is not known; choose from: {', '.join(PROTOCOLS)}.")
    demand_one(inputs, seq, image)
    return Question(tuple(batches.tolist()), runtimes, precision, protocol, inputs, seq, image)


def predict_many(
    predictor: Predictor,
    candidates: Iterable[Any],
    *,
    errors: str = "record",
    n_jobs: int | None = None,
    resume: str | os.PathLike[str] | None = None,
    progress: bool | Tell | None = None,
    **asked: Any,
) -> pd.DataFrame:
    """A table of all candidates; see `latpred.predict_many`, of whose other parameters `asked` is made."""
    from latpred.search.workers import collect

    if errors not in ERRORS:
        raise UsageError(f"errors={errors!r} is not known; choose from: {', '.join(ERRORS)}.")
    wanted = question(predictor, **asked)
    running: dict[str, Any] = {"n_jobs": n_jobs, "resume": resume, "progress": progress}
    return frame(collect(predictor, candidates, wanted, errors=errors, **running))


def evaluate(
    predictor: Predictor, numbered: Iterable[tuple[int, Any]], asked: Question, *, errors: str = "record"
) -> list[Row]:
    """Rows of candidates that come with their positions, in order.

    Parameters
    ----------
    predictor : Predictor
        Of the device.
    numbered : iterable of (int, candidate)
        Candidates as `latpred.predict_many` takes them.
    asked : Question
        What `question` gives.
    errors : {"record", "raise"}
        Whether a candidate that fails gets a row that says why, or ends everything.

    Raises
    ------
    CandidateError
        With errors="raise", for the first candidate that fails.
    """
    return [row for position, candidate in numbered for row in rows_of(predictor, asked, position, candidate, errors)]


def failed(asked: Question, position: int, candidate: Any, reason: str) -> list[Row]:
    """Rows of a candidate of which there are no numbers."""
    from latpred.zoo.candidates import title

    name, precision = title(candidate), asked.precision or ""
    cells = [(batch, runtime) for batch in asked.batches for runtime in asked.runtimes]
    return [Row(position, name, *cell, precision, error=reason) for cell in cells]


def frame(rows: Iterable[Row]) -> pd.DataFrame:
    """Rows as a table; one without rows has the columns as well.

    >>> frame([]).columns[:2].tolist()
    ['candidate', 'name']
    """
    import pandas as pd

    columns = list(zip(*rows, strict=True)) or [()] * len(COLUMNS)
    return pd.DataFrame(
        {
            name: pd.Series(values, dtype=_TYPES.get(name, "object"))
            for name, values in zip(COLUMNS, columns, strict=True)
        }
    )


def rows_of(predictor: Predictor, asked: Question, position: int, candidate: Any, errors: str) -> Iterator[Row]:
    """Rows of one candidate: each batch, and within it each runtime."""
    name, found = _predicted(predictor, asked, candidate)
    for index, batch in enumerate(asked.batches):
        for runtime, (graph, curve) in zip(asked.runtimes, found, strict=True):
            if isinstance(curve, Curve):
                assert graph is not None
                yield _row(position, name, graph, curve[index])
                continue
            if errors == "raise":
                raise CandidateError(f"candidate {position} ({name}): {_reason(curve)}") from curve
            precision = graph.precision if graph is not None else asked.precision or ""
            yield Row(position, name, batch, runtime, precision, error=_reason(curve))


Found = list[tuple[ModelGraph | None, Curve | Exception]]


def _predicted(predictor: Predictor, asked: Question, candidate: Any) -> tuple[str, Found]:
    """The candidate's name, and its graph and curve, or what went wrong, in each runtime."""
    from latpred.sandbox.own_thread import without_modes
    from latpred.zoo import candidates

    name = candidates.title(candidate)
    walked: dict[str, ModelGraph | Exception] = {}
    found: Found = []
    with without_modes(), traced_for(predictor.profile.protocol.get("era", "")):
        graph_in = _grapher(predictor, asked, candidate)
        for runtime in asked.runtimes:
            own = lowering.traced_by(runtime)
            if own not in walked:
                try:
                    walked[own] = graph_in(runtime)
                except Exception as error:  # whatever a searcher's code raises concerns this candidate alone
                    walked[own] = error
            found.append(_priced(predictor, asked, walked[own], runtime))
    return name, found


def _priced(
    predictor: Predictor, asked: Question, graph: ModelGraph | Exception, runtime: str
) -> tuple[ModelGraph | None, Curve | Exception]:
    if isinstance(graph, Exception):
        return None, graph
    try:
        return graph, predictor.curve(graph, asked.batches, runtime=runtime, protocol=asked.protocol)
    except LatpredError as error:
        return graph, error


def _grapher(predictor: Predictor, asked: Question, candidate: Any) -> Callable[[str], ModelGraph]:
    """A function from a runtime to the graph that it lowers; the model is built once, and only where it must be."""
    from latpred.tracing.layer_extrapolation import STACKS
    from latpred.zoo.candidates import traceable
    from latpred.zoo.names import is_config

    target = lowering.target_of(predictor.profile.device.kind)
    options: dict[str, Any] = {"seq": asked.seq, "image": asked.image, "precision": asked.precision}
    built: list[Any] = []

    def graph_in(runtime: str) -> ModelGraph:
        if asked.inputs is None and lowering.traced_by(runtime) == "eager" and is_config(candidate):
            graph = STACKS.graph(candidate, **options)
            if not (graph.walked or graph.only):
                return graph
        if not built:
            built.append(traceable(candidate))
        (model,) = built
        if isinstance(model, ModelGraph):
            return model
        return lowering.trace_for_runtime(
            model, asked.inputs, runtime=runtime, target=target, batches=asked.batches, **options
        )

    return graph_in


def _row(position: int, name: str, graph: ModelGraph, found: Prediction) -> Row:
    low, high = found.interval_ms
    return Row(
        candidate=position,
        name=name,
        batch=found.batch,
        runtime=found.runtime,
        precision=found.precision,
        latency_ms=found.latency_ms,
        low_ms=low,
        high_ms=high,
        host_ms=found.overhead_ms,
        device_ms=found.compute_ms,
        regime=found.regime,
        macs=float(graph.macs(found.batch)),
        parameters=float(graph.parameters),
        launches=float(graph.launches(found.batch)),
    )


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no message"
    return text if isinstance(error, LatpredError) else f"{type(error).__name__}: {text}"
