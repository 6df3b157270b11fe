"""`latpred.explain`: predicts a model in every runtime that the profile knows, and what a larger model would take.

Fills an `explanation.Explanation`, which `explanation.advice` puts into a sentence.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from latpred import runtimes as known_runtimes
from latpred.api import predictor_of
from latpred.errors import (
    LatpredError,
    MissingPackageError,
    ProfileError,
    RuntimeRefusalError,
    TraceError,
    UsageError,
)
from latpred.explanation.advice import advise
from latpred.explanation.explanation import (
    CHEAP,
    NEARLY_FREE,
    AxisHeadroom,
    Choice,
    Excluded,
    Explanation,
    Headroom,
    ratio,
)
from latpred.graph.graph import ModelGraph, grows
from latpred.graph.rewrites import widened
from latpred.prediction.clocks import Z90
from latpred.prediction.prediction import Prediction
from latpred.prediction.predictor import Predictor
from latpred.profile.store import calibration
from latpred.query import MOST_BATCH, DeviceQuery, Options, checked_batches
from latpred.runtimes import lowering
from latpred.runtimes.legacy_torch import traced_for

if TYPE_CHECKING:
    from latpred.query import Device, Model
    from latpred.runtimes.source import Source

_ERRORS: dict[str, type[LatpredError]] = {
    "unsuited": UsageError,
    "uncalibrated": ProfileError,
    "missing": MissingPackageError,
    "refused": RuntimeRefusalError,
}
WIDTHS = (1.125, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0)
TOKENS = (1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
PIXELS = (1.5, 2.0, 3.0, 4.0)  # of a side; sizes that most patches and strides divide


def explain(
    model: Model,
    batch: int = 1,
    *,
    runtimes: str | Sequence[str] | None = None,
    inputs: Any = None,
    seq: int | None = None,
    image: int | None = None,
    device: Device | None = None,
    host: float | str | None = None,
    precision: str | None = None,
    memory_format: str | None = None,
    attention: str | None = None,
    threads: int | None = None,
    cudnn_benchmark: bool | None = None,
    protocol: str = "single",
    progress: Callable[[str], None] | None = None,
) -> Explanation:
    """Say what each runtime makes of a model, where the time goes, how far it can grow, and what to change.

    Parameters
    ----------
    model, inputs, seq, image, device, host, precision, memory_format, attention, threads, cudnn_benchmark, protocol
        As for `latpred.predict`.
    batch : int
        One batch size; `latpred.predict` takes several.
    runtimes : str or sequence of str, optional
        Compare only these, and eager; by default all there are. An .onnx file, and a graph of another runtime than
        eager, is compared in what runs it alone.
    progress : callable, optional
        Told the name of each runtime whose own tools are asked, which may take seconds the first time.

    Raises
    ------
    UsageError, TraceError, ProfileError
        As for `latpred.predict`; also when none of the runtimes asked for can be compared.

    Examples
    --------
    >>> explanation = explain("resnet-18", device="rtx-8000", runtimes=["cuda-graphs"])
    >>> [choice.runtime for choice in explanation.choices]
    ['cuda-graphs', 'eager']
    >>> explanation.eager.prediction.regime
    'framework-bound'
    """
    (size,) = checked_batches([batch])
    model = os.fspath(model) if isinstance(model, os.PathLike) else model
    runtimes = [runtimes] if isinstance(runtimes, str) else runtimes and [*runtimes]  # a generator is gone through once
    predictor = predictor_of(DeviceQuery(device, host, threads, cudnn_benchmark), beside=runtimes or ())
    options = Options(inputs, seq, image, precision, memory_format, attention, protocol=protocol)
    comparison = _Comparison(predictor, model, options, size)
    names = list(known_runtimes.names() if runtimes is None else dict.fromkeys(["eager", *runtimes]))
    with traced_for(predictor.era):
        choices, excluded = comparison.of(names, progress)
        if runtimes and not any(choice.runtime in runtimes for choice in choices):
            first = next(one for one in excluded if one.runtime in runtimes)
            raise _ERRORS[first.kind](first.reason)
        if not choices:
            raise ProfileError("; ".join(one.reason for one in excluded))
        explanation = Explanation(tuple(choices), tuple(excluded), {})
        shown = {choice.runtime: choice.prediction for choice in (explanation.fastest, explanation.eager) if choice}
        headrooms = {name: comparison.headroom(point) for name, point in shown.items()}
        known = {name: headroom for name, headroom in headrooms.items() if headroom is not None}
        explanation = replace(explanation, headrooms=known)
    return replace(explanation, advice=advise(explanation))


class _Comparison:
    """One model at one batch size on one device, in one runtime after the other, each traced once."""

    def __init__(self, predictor: Predictor, model: Model, options: Options, batch: int) -> None:
        self._predictor, self._model, self._options, self._batch = predictor, model, options, batch
        self._graphs: dict[str, ModelGraph] = {}

    def of(self, names: Sequence[str], progress: Callable[[str], None] | None) -> tuple[list[Choice], list[Excluded]]:
        """What can be compared, the fastest first, and what cannot."""
        results = [self._unfit(name) or self._choice(name, progress) for name in names]
        choices = [result for result in results if isinstance(result, Choice)]
        eager = next((choice for choice in choices if choice.runtime == "eager"), None)
        if eager is not None:
            choices = [replace(choice, speedup=ratio(eager, choice)) for choice in choices]
        excluded = [result for result in results if isinstance(result, Excluded)]
        return sorted(choices, key=lambda choice: choice.prediction.latency_ms), excluded

    def _unfit(self, name: str) -> Excluded | None:
        """Why a runtime is not to be asked at all."""
        try:
            device, asked = self._predictor.profile.device, known_runtimes.get(name)
        except UsageError as error:  # a package registers what cannot be loaded
            return Excluded(name, "missing", str(error))
        reason = lowering.unsuited(name, self._predictor.target)
        if reason is not None:
            return Excluded(name, "unsuited", reason)
        if self._traced_for is not None and lowering.traced_by(name) != self._traced_for:
            return Excluded(name, "refused", f"this is a graph of {self._traced_for}, which says nothing of others")
        if name in self._predictor.profile.runtimes:
            return None
        missing = asked.available()
        if missing is not None and (device.kind != "simulated" or getattr(asked, "predicted_only", False)):
            return Excluded(name, "missing", missing)
        command = f"{calibration(self._predictor.profile)} --runtimes {name}"
        return Excluded(name, "uncalibrated", f"not calibrated; run: {command}")

    @cached_property
    def _traced_for(self) -> str | None:
        """The one runtime whose graph the model is; None for a module, a name and an eager trace, which suit all."""
        if isinstance(self._model, ModelGraph):
            return None if self._model.runtime == "eager" else self._model.runtime
        return "onnxruntime" if lowering.is_onnx_file(self._model) else None

    def _choice(self, name: str, progress: Callable[[str], None] | None) -> Choice | Excluded:
        if progress is not None and lowering.traced_by(name) != "eager":
            progress(name)
        try:
            graph = self._graph(name)
            refusal = lowering.refusal(graph)
            if refusal is not None:
                return Excluded(name, "refused", refusal)
            prediction = self._predict(graph, name)
        except RuntimeRefusalError as error:
            return Excluded(name, "refused", str(error))
        except MissingPackageError as error:
            if name == "eager":
                raise
            return Excluded(name, "missing", str(error))
        schedule, *_ = self._predictor.priced(graph, self._batch, runtime=name)
        protocol = self._options.protocol
        host_error = Z90 * self._predictor.host_log_std(graph, self._batch, runtime=name, protocol=protocol)
        steps, launches = len(schedule.host_class), len(schedule.kernel_step)
        return Choice(prediction, steps, launches, self._kernel_error(prediction, host_error), host_error)

    def _kernel_error(self, prediction: Prediction, host_error: float) -> float:
        """What of an interval comes from kernel times that other runtimes rest on as well."""
        fit = self._predictor.profile.runtimes[prediction.runtime]
        if fit.kernels and prediction.runtime in self._predictor.given.runtimes:
            return 0.0
        whole = math.log(prediction.interval_ms[1] / prediction.latency_ms)
        return math.sqrt(max(whole**2 - (Z90 * fit.spread) ** 2 - host_error**2, 0.0))

    def _predict(self, graph: ModelGraph, runtime: str, batch: int | None = None) -> Prediction:
        return self._predictor.predict(graph, batch or self._batch, runtime=runtime, protocol=self._options.protocol)

    def _graph(self, runtime: str) -> ModelGraph:
        if runtime not in self._graphs:
            self._graphs[runtime] = self._traced(runtime)
        return self._graphs[runtime]

    def _traced(self, runtime: str) -> ModelGraph:
        options, target = replace(self._options, runtime=runtime), self._predictor.target
        if isinstance(self._model, ModelGraph):
            return lowering.fitting(self._predictor.trace(self._model, options), runtime, target)
        if lowering.is_onnx_file(self._model) or lowering.traced_by(runtime) == "eager":
            return self._predictor.trace(self._model, options, (self._batch,))
        source = self._source
        try:
            return lowering.of_source(source, runtime, target)
        except (TraceError, UsageError) as error:  # eager took the model, so it is the runtime that does not
            raise RuntimeRefusalError(str(error)) from error

    @cached_property
    def _source(self) -> Source:
        """What all runtimes with tools of their own take apart."""
        from latpred.runtimes.source import source_of

        options = self._options.tracing
        return source_of(self._model, target=self._predictor.target, batches=(self._batch,), **options)  # type: ignore[arg-type]

    def headroom(self, now: Prediction) -> Headroom | None:
        """What would become of a prediction if the batch, the inputs or the width grew."""
        graph = self._graph(now.runtime)
        if graph.exact or graph.only or not grows(graph):  # no batch can be predicted that was not traced
            return None

        def latency_ms(of: ModelGraph, batch: int = now.batch) -> float:
            return self._predict(of, now.runtime, batch).latency_ms

        largest = min(now.batch, MOST_BATCH // 2)  # whose double is a batch too
        wider = ((factor, latency_ms(widened(graph, factor))) for factor in WIDTHS)
        return Headroom(
            rooms=(
                self._batch_headroom(graph, now),
                *self._input_headroom(graph, now, latency_ms),
                axis_headroom("width", 1.0, now.latency_ms, wider, WIDTHS[-1], estimate=True),
            ),
            doubled=latency_ms(graph, 2 * largest) / latency_ms(graph, largest),
            halved=latency_ms(widened(graph, 0.5)) / now.latency_ms,
        )

    def _batch_headroom(self, graph: ModelGraph, now: Prediction) -> AxisHeadroom:
        """How far the batch may grow; never beyond the device's memory."""

        def most(times: float) -> int | None:
            limit_ms = times * now.latency_ms
            largest = self._predictor.max_batch(graph, limit_ms, runtime=now.runtime, protocol=now.protocol)
            return None if largest >= MOST_BATCH else max(largest, now.batch)

        return AxisHeadroom("batch", now.batch, most(NEARLY_FREE), most(CHEAP), MOST_BATCH, estimate=False)

    def _input_headroom(
        self, graph: ModelGraph, now: Prediction, latency_ms: Callable[[ModelGraph], float]
    ) -> Iterator[AxisHeadroom]:
        """How far the inputs may grow, as far as the model goes; nothing where others than its own cannot be traced.

        Asking another runtime's tools at each size would take minutes: how its estimates from eager traces grow has to
        do.
        """
        given = isinstance(self._model, ModelGraph) or lowering.is_onnx_file(self._model)
        if given or self._options.inputs is not None or not self._graph("eager").input_size:
            return
        eager, exact = self._graph("eager"), graph.runtime == "eager"
        kind, size = eager.input_kind, eager.input_size
        sizes = [round(factor * size) for factor in (PIXELS if kind == "image" else TOKENS)]

        def in_runtime(trace: ModelGraph) -> ModelGraph:
            return lowering.fitting(trace, now.runtime, self._predictor.target)

        try:
            scale = now.latency_ms / latency_ms(graph if exact else in_runtime(eager))
        except RuntimeRefusalError:  # the eager trace reads values, which the model does not while it is captured
            return

        def grown() -> Iterator[tuple[int, float]]:
            for larger in sizes:
                asked: dict[str, Any] = {"image" if kind == "image" else "seq": larger}
                try:
                    trace = self._predictor.trace(self._model, replace(self._options, **asked), (self._batch,))
                    yield larger, scale * latency_ms(in_runtime(trace))
                except LatpredError:  # beyond its position embeddings; of a side, no multiple of what layers divide by
                    if kind != "image":
                        return

        yield axis_headroom(kind, size, now.latency_ms, grown(), sizes[-1], estimate=not exact)


def axis_headroom(
    axis: str, now: float, latency_ms: float, grown: Iterable[tuple[float, float]], most: float, estimate: bool
) -> AxisHeadroom:
    """How far something may grow, from (size, latency) at growing sizes, with straight lines between them.

    Where the sizes end before `most`, the model goes no further.

    >>> axis_headroom("width", 1.0, 10.0, [(2.0, 11.0), (4.0, 15.0)], 4.0, True)
    AxisHeadroom(axis='width', now=1.0, nearly_free=1.5, cheap=2.5, most=4.0, estimate=True)
    """
    points = [(now, latency_ms)]
    for size, grown_ms in grown:
        points.append((size, grown_ms))
        if grown_ms > CHEAP * latency_ms:
            break
    ends = [_crossing(points, times * latency_ms) for times in (NEARLY_FREE, CHEAP)]
    last = points[-1][0]
    if last < most:
        ends = [last if end is None else end for end in ends]
    return AxisHeadroom(axis, now, _rounded(ends[0], axis), _rounded(ends[1], axis), most, estimate)


def _crossing(points: list[tuple[float, float]], limit_ms: float) -> float | None:
    for (low, low_ms), (high, high_ms) in pairwise(points):
        if high_ms > limit_ms:
            return low + (high - low) * max(0.0, limit_ms - low_ms) / (high_ms - low_ms)
    return None


def _rounded(value: float | None, axis: str) -> float | None:
    """Down to what makes sense of the axis: hundredths of the width, whole tokens and pixels."""
    if value is None:
        return None
    return int(100 * value) / 100 if axis == "width" else int(value)
