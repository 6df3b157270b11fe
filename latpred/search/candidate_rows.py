"""One candidate of a search: its graph in each runtime, its predictions, and its rows of the table.

A candidate that cannot be built, traced or predicted gets rows that say why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import nan
from typing import TYPE_CHECKING, Any, NamedTuple

from latpred.errors import CandidateError, LatpredError, UsageError
from latpred.graph.graph import ModelGraph
from latpred.prediction.prediction import Curve, Prediction
from latpred.prediction.predictor import Predictor
from latpred.query import Options, checked_batches
from latpred.runtimes import lowering
from latpred.runtimes.legacy_torch import traced_for

if TYPE_CHECKING:
    import pandas as pd


class CandidateRow(NamedTuple):
    """One candidate at one batch size in one runtime; the numbers are NaN where `error` says what went wrong.

    `latpred.predict_many` says what each column holds.
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


COLUMNS = CandidateRow._fields
_TYPES = {"candidate": "int64", "batch": "int64"} | {
    name: "float64" for name, default in CandidateRow._field_defaults.items() if isinstance(default, float)
}


def frame(rows: Iterable[CandidateRow]) -> pd.DataFrame:
    """Rows as a table; one without rows has the columns as well.

    >>> frame([]).columns[:2].tolist()
    ['candidate', 'name']
    """
    import pandas as pd

    columns = list(zip(*rows, strict=True)) or [()] * len(COLUMNS)
    named = zip(COLUMNS, columns, strict=True)
    return pd.DataFrame({name: pd.Series(values, dtype=_TYPES.get(name, "object")) for name, values in named})


@dataclass(frozen=True, slots=True)
class Evaluator:
    """What is asked of every candidate, and what predicts it; workers get one and give rows."""

    predictor: Predictor
    options: Options
    batches: tuple[int, ...] = (1,)
    runtimes: tuple[str, ...] = ("eager",)

    @classmethod
    def of(cls, predictor: Predictor, batch: Any, runtime: Any, options: Options) -> Evaluator:
        """Check what is asked of all candidates before any of them takes time."""
        from latpred.tracing.inputs import demand_one

        batches, runtimes = checked_batches(batch), (runtime,) if isinstance(runtime, str) else tuple(runtime)
        if not runtimes:
            raise UsageError("no runtime was named; give one, as in runtime='eager'.")
        for name in runtimes:
            predictor.check(name, options.precision)
        demand_one(options.inputs, options.seq, options.image)
        return cls(predictor, options, batches, runtimes)

    def rows(self, position: int, candidate: Any, errors: str = "record") -> list[CandidateRow]:
        """Rows of one candidate: each batch, and within it each runtime.

        With errors="raise" a candidate that fails is a CandidateError, else a row that says why.
        """
        return list(self._rows(position, candidate, errors))

    def failed(self, position: int, candidate: Any, reason: str) -> list[CandidateRow]:
        """Rows of a candidate of which there are no numbers."""
        from latpred.zoo.candidates import title

        name, precision = title(candidate), self.options.precision or ""
        cells = [(batch, runtime) for batch in self.batches for runtime in self.runtimes]
        return [CandidateRow(position, name, *cell, precision, error=reason) for cell in cells]

    def _rows(self, position: int, candidate: Any, errors: str) -> Iterator[CandidateRow]:
        from latpred.sandbox.own_thread import without_modes
        from latpred.zoo.candidates import title

        name = title(candidate)
        with without_modes(), traced_for(self.predictor.era):
            predicted = [(runtime, *self._predicted(runtime, graph)) for runtime, graph in self._graphs(candidate)]
        for index, batch in enumerate(self.batches):
            for runtime, graph, curve in predicted:
                if isinstance(curve, Curve):
                    assert graph is not None
                    yield _row(position, name, graph, curve[index])
                    continue
                if errors == "raise":
                    raise CandidateError(f"candidate {position} ({name}): {_reason(curve)}") from curve
                precision = graph.precision if graph is not None else self.options.precision or ""
                yield CandidateRow(position, name, batch, runtime, precision, error=_reason(curve))

    def _predicted(self, runtime: str, graph: ModelGraph | Exception) -> tuple[ModelGraph | None, Curve | Exception]:
        if isinstance(graph, Exception):
            return None, graph
        try:
            return graph, self.predictor.curve(graph, self.batches, runtime=runtime, protocol=self.options.protocol)
        except LatpredError as error:
            return graph, error

    def _graphs(self, candidate: Any) -> Iterator[tuple[str, ModelGraph | Exception]]:
        """Each runtime with the graph that it lowers, or with what went wrong; runtimes share graphs."""
        graph_in = self._tracer(candidate)
        graphs: dict[str, ModelGraph | Exception] = {}
        for runtime in self.runtimes:
            traced_by = lowering.traced_by(runtime)
            if traced_by not in graphs:
                try:
                    graphs[traced_by] = graph_in(runtime)
                except Exception as error:  # whatever a searcher's code raises concerns this candidate alone
                    graphs[traced_by] = error
            yield runtime, graphs[traced_by]

    def _tracer(self, candidate: Any) -> Callable[[str], ModelGraph]:
        """A function from a runtime to the graph that it lowers; the model is built once, and only where it must be."""
        from latpred.tracing.layer_extrapolation import STACKS
        from latpred.zoo.candidates import traceable
        from latpred.zoo.names import is_config

        options = self.options
        built: list[Any] = []

        def graph_in(runtime: str) -> ModelGraph:
            if options.inputs is None and lowering.traced_by(runtime) == "eager" and is_config(candidate):
                graph = STACKS.graph(candidate, seq=options.seq, image=options.image, precision=options.precision)
                if not (graph.walked or graph.only):
                    return graph
            if not built:
                built.append(traceable(candidate))
            (model,) = built
            if isinstance(model, ModelGraph):
                return model
            return self.predictor.trace(model, replace(options, runtime=runtime), self.batches)

        return graph_in


def _row(position: int, name: str, graph: ModelGraph, point: Prediction) -> CandidateRow:
    low, high = point.interval_ms
    return CandidateRow(
        candidate=position,
        name=name,
        batch=point.batch,
        runtime=point.runtime,
        precision=point.precision,
        latency_ms=point.latency_ms,
        low_ms=low,
        high_ms=high,
        host_ms=point.overhead_ms,
        device_ms=point.compute_ms,
        regime=point.regime,
        macs=float(graph.macs(point.batch)),
        parameters=float(graph.parameters),
        launches=float(graph.launches(point.batch)),
    )


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no message"
    return text if isinstance(error, LatpredError) else f"{type(error).__name__}: {text}"
