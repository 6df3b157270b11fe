"""What a report says about one model: its runtimes side by side, a curve in each, one forward pass. Draws nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from latpred.api import predict
from latpred.explanation.advice import recommended
from latpred.explanation.explain import explain
from latpred.explanation.explanation import Explanation
from latpred.graph.graph import Coverage, ModelGraph
from latpred.prediction.find import predictor_of
from latpred.prediction.prediction import Curve
from latpred.prediction.timeline import ForwardPass, forward_pass
from latpred.profile.document import DeviceProfile
from latpred.query import DeviceQuery, Options
from latpred.runtimes import lowering

if TYPE_CHECKING:
    from latpred.prediction.predictor import Predictor
    from latpred.query import Device, Model


@dataclass(frozen=True, slots=True)
class Studied:
    """One model, predicted in every way that a report shows.

    Attributes
    ----------
    explanation : Explanation
        The runtimes side by side at the smallest batch.
    curves : tuple[Curve, ...]
        Of each of them, the runtime that is advised first.
    forward : ForwardPass
        Of eager, or of the fastest runtime where eager is not known.
    graph : ModelGraph
        What that runtime runs.
    profile : DeviceProfile
        What it all rests on.
    """

    explanation: Explanation
    curves: tuple[Curve, ...]
    forward: ForwardPass
    graph: ModelGraph = field(repr=False)
    profile: DeviceProfile = field(repr=False)

    @property
    def name(self) -> str:
        """Of the model."""
        return self.explanation.fastest.prediction.model

    @property
    def coverage(self) -> Coverage:
        """How much of the graph rests on cost formulas."""
        return self.graph.coverage(self.explanation.batch)


def gather(
    model: Model,
    batches: Sequence[int],
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
) -> Studied:
    """Predict everything that a report says of a model.

    Parameters
    ----------
    model, inputs, seq, image, device, host, precision, memory_format, threads, cudnn_benchmark, protocol
        As for `latpred.predict`.
    batches : sequence of int
        Of the curves; the runtimes are compared at the smallest of them.
    runtimes, progress
        As for `latpred.explain`.

    Raises
    ------
    UsageError, TraceError, ProfileError
        As for `latpred.explain`.
    """
    where: dict[str, Any] = {"device": device, "host": host, "threads": threads, "cudnn_benchmark": cudnn_benchmark}
    given = {"inputs": inputs, "seq": seq, "image": image, "precision": precision, "memory_format": memory_format}
    asked = {**where, **given, "protocol": protocol}
    found = explain(model, min(batches), runtimes=runtimes, progress=progress, **asked)
    advised_first = sorted(found.choices, key=lambda choice: choice is not recommended(found))
    curves = tuple(predict(model, batches, choice.runtime, **asked) for choice in advised_first)
    chosen = (found.eager or found.fastest).runtime
    predictor = predictor_of(DeviceQuery(device, host, threads, cudnn_benchmark))
    graph = _graph(model, Options(**given, runtime=chosen), predictor, batches)
    return Studied(found, curves, forward_pass(predictor, graph, found.batch, runtime=chosen), graph, predictor.given)


def _graph(model: Model, options: Options, predictor: Predictor, batches: Sequence[int]) -> ModelGraph:
    graph = predictor.trace(model, options, batches)
    return lowering.fitting(graph, options.runtime, predictor.target) if isinstance(model, ModelGraph) else graph
