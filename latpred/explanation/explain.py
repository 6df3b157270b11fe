"""`latpred.explain`: predicts a model in every runtime that the profile knows, and asks what would become of it.

What the answers mean is `latpred.explanation.advice`'s business, how they look `latpred.render.explanation_text`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from latpred import runtimes as known_runtimes
from latpred.errors import LatpredError, MissingPackageError, ProfileError, RuntimeRefusalError, UsageError
from latpred.explanation.advice import Walk, advise, headroom_of, recommended
from latpred.explanation.explanation import Choice, Excluded, Explanation, ratio
from latpred.graph.graph import ModelGraph
from latpred.prediction.crossover import Z90
from latpred.prediction.find import predictor_of
from latpred.prediction.prediction import Prediction
from latpred.prediction.predictor import Predictor
from latpred.query import DeviceQuery, Options, checked_batches
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


def explain(
    model: Model,
    batch: int = 1,
    *,
    runtimes: Sequence[str] | None = None,
    inputs: Any = None,
    seq: int | None = None,
    image: int | None = None,
    device: Device | None = None,
    host: float | str | None = None,
    precision: str | None = None,
    memory_format: str | None = None,
    threads: int | None = None,
    cudnn_benchmark: bool | None = None,
    protocol: str = "single",
    progress: Callable[[str], None] | None = None,
) -> Explanation:
    """Say what each runtime makes of a model, where the time goes, how far it can grow, and what to change.

    Parameters
    ----------
    model, inputs, seq, image, device, host, precision, memory_format, threads, cudnn_benchmark, protocol
        As for `latpred.predict`.
    batch : int
        Batch size.
    runtimes : sequence of str, optional
        Compare only these, and eager; by default all there are.
    progress : callable, optional
        Told the name of each runtime whose own tools are asked, which may take seconds the first time.

    Raises
    ------
    UsageError, TraceError, ProfileError
        As for `latpred.predict`; also when none of the runtimes asked for can be compared.

    Examples
    --------
    >>> explain("bert-base-uncased", batch=8)  # doctest: +SKIP
    """
    (size,) = checked_batches([batch])
    for name in runtimes or ():
        known_runtimes.get(name)  # a misspelt one is said before anything takes time
    predictor = predictor_of(DeviceQuery(device, host, threads, cudnn_benchmark))
    options = Options(inputs, seq, image, precision, memory_format)
    names = list(known_runtimes.names() if runtimes is None else dict.fromkeys(["eager", *runtimes]))
    study = _Study(predictor, _Workload(model, options, size), size, protocol, progress)
    with traced_for(predictor.profile.protocol.get("era", "")):
        return _explained(study, names, runtimes)


def _explained(study: _Study, names: Sequence[str], runtimes: Sequence[str] | None) -> Explanation:
    choices, excluded = study.compared(names)
    if runtimes is not None and not any(choice.runtime in runtimes for choice in choices):
        first = next(one for one in excluded if one.runtime in runtimes)
        raise _ERRORS[first.kind](first.reason)
    if not choices:
        raise ProfileError("; ".join(one.reason for one in excluded))
    return study.explained(choices, excluded)


class _Workload:
    """The model, walked for each runtime when that is asked for."""

    def __init__(self, model: Model, options: Options, batch: int) -> None:
        self._model, self._options, self._batches = model, options, (batch,)
        self._source: Source | None = None

    def eager(self) -> ModelGraph | None:
        """Its eager walk, where it has one: an .onnx file has none."""
        if isinstance(self._model, ModelGraph):
            return self._options.checked(self._model)
        return None if self._is_file() else self._walked("eager", "cpu")

    def graph(self, runtime: str, target: str) -> ModelGraph:
        """What a runtime runs for it on a kind of device."""
        if isinstance(self._model, ModelGraph):
            return lowering.fitting(self._options.checked(self._model), runtime, target)
        if self._is_file() or lowering.traced_by(runtime) == "eager":
            return self._walked(runtime, target)
        if self._source is None:
            from latpred.runtimes.source import source_of

            self._source = source_of(
                self._model,  # type: ignore[arg-type]
                batches=self._batches,
                **self._options.tracing,
            )
        return lowering.of_source(self._source, runtime, target)

    def longer(self, kind: str) -> Walk | None:
        """Walks it eagerly with inputs of another size; None where its inputs are given or not of that kind."""
        if isinstance(self._model, ModelGraph) or self._options.inputs is not None or self._is_file():
            return None
        axis = "image" if kind == "image" else "seq"
        return lambda size: self._walked("eager", "cpu", **{axis: size})

    def _walked(self, runtime: str, target: str, **sizes: int) -> ModelGraph:
        options = {**self._options.tracing, **sizes}
        return lowering.trace_for_runtime(
            self._model,  # type: ignore[arg-type]
            runtime=runtime,
            target=target,
            batches=self._batches,
            **options,
        )

    def _is_file(self) -> bool:
        import os

        from latpred.runtimes.onnx import onnx_file

        return isinstance(self._model, str | os.PathLike) and onnx_file.is_file(os.fspath(self._model))


@dataclass(frozen=True, slots=True)
class _Study:
    """One model at one batch size on one device."""

    predictor: Predictor
    workload: _Workload
    batch: int
    protocol: str
    progress: Callable[[str], None] | None

    @property
    def target(self) -> str:
        """Kind of device."""
        return lowering.target_of(self.predictor.profile.device.kind)

    def compared(self, names: Sequence[str]) -> tuple[list[Choice], list[Excluded]]:
        """What can be compared, the fastest first, and what cannot."""
        choices: list[Choice] = []
        excluded: list[Excluded] = []
        for name in names:
            found = self._unfit(name) or self._choice(name)
            (choices if isinstance(found, Choice) else excluded).append(found)  # type: ignore[arg-type]
        eager = next((choice for choice in choices if choice.runtime == "eager"), None)
        if eager is not None:
            choices = [replace(choice, speedup=ratio(eager, choice)) for choice in choices]
        return sorted(choices, key=lambda choice: choice.prediction.latency_ms), excluded

    def explained(self, choices: list[Choice], excluded: list[Excluded]) -> Explanation:
        """Everything, with what may grow in the fastest runtime and in eager, and with advice."""
        found = Explanation(tuple(choices), tuple(excluded), {})
        shown = dict.fromkeys([found.fastest.runtime, recommended(found).runtime, *(["eager"] if found.eager else [])])
        eager = self.workload.eager()
        headrooms = {}
        for name in shown:
            choice = found.choice(name)
            assert choice is not None
            graph = self.workload.graph(name, self.target)
            walk = None if eager is None else self.workload.longer(eager.input_kind)
            if graph.walked or graph.only:
                continue  # no batch can be said that was not walked
            headrooms[name] = headroom_of(self.predictor, graph, choice.prediction, eager, walk)
        found = replace(found, headrooms=headrooms)
        return replace(found, advice=advise(found))

    def _unfit(self, name: str) -> Excluded | None:
        """Why a runtime is not to be asked at all."""
        reason = lowering.unsuited(name, self.target)
        if reason is not None:
            return Excluded(name, "unsuited", reason)
        if name in self.predictor.profile.runtimes:
            return None
        missing = known_runtimes.get(name).available()
        if missing is not None:
            return Excluded(name, "missing", missing)
        return Excluded(name, "uncalibrated", f"not calibrated; run: latpred calibrate --runtimes {name}")

    def _choice(self, name: str) -> Choice | Excluded:
        if self.progress is not None and lowering.traced_by(name) != "eager":
            self.progress(name)
        try:
            graph = self.workload.graph(name, self.target)
            refusal = lowering.refusal(graph)
            if refusal is not None:
                return Excluded(name, "refused", refusal)
            point = self.predictor.predict(graph, self.batch, runtime=name, protocol=self.protocol)
        except RuntimeRefusalError as error:
            return Excluded(name, "refused", str(error))
        except MissingPackageError as error:
            if name == "eager":
                raise
            return Excluded(name, "missing", str(error))
        schedule, _, _ = self.predictor.priced(graph, self.batch, runtime=name)
        return Choice(point, len(schedule.host_class), len(schedule.kernel_step), self._kernel_error(point))

    def _kernel_error(self, point: Prediction) -> float:
        """What of an interval comes from kernel times that other runtimes rest on as well."""
        fit = self.predictor.profile.runtimes[point.runtime]
        if fit.kernels:
            return 0.0
        whole = math.log(point.interval_ms[1] / point.latency_ms)
        return math.sqrt(max(whole**2 - (Z90 * fit.spread) ** 2, 0.0))
