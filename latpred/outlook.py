"""What may grow before the latency does: batch by the curve, input sizes by new walks, width by scaled counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

from latpred.errors import LatpredError
from latpred.explanation import CHEAP, NEARLY_FREE, Outlook, Room
from latpred.graph import ModelGraph
from latpred.prediction import Prediction
from latpred.predictor import MOST_BATCH, Predictor
from latpred.runtimes import walking
from latpred.scaling import widened

Walk = Callable[[int], ModelGraph]
Grown = Iterable[tuple[float, float]]  # a size, and the latency with it

WIDTHS = (1.125, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0)
TOKENS = (1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
PIXELS = (1.5, 2.0, 3.0, 4.0)  # of a side; sizes that most patches and strides divide


def outlook_of(
    predictor: Predictor, graph: ModelGraph, now: Prediction, eager: ModelGraph | None = None, walk: Walk | None = None
) -> Outlook:
    """What would become of a prediction."""

    def latency_ms(of: ModelGraph, batch: int = now.batch) -> float:
        return predictor.predict(of, batch, runtime=now.runtime, protocol=now.protocol).latency_ms

    rooms = [batch_room(predictor, graph, now)]
    if walk is not None and eager is not None and eager.input_size:
        factors = PIXELS if eager.input_kind == "image" else TOKENS
        exact = graph.runtime == "eager"
        # Asking another runtime's tools at each size would take minutes: how its estimates grow has to do.
        base = latency_ms(graph if exact else _estimated(eager, now.runtime, graph.target))
        scale = now.latency_ms / base
        sizes = [round(factor * eager.input_size) for factor in factors]
        grown = _walked(sizes, walk, lambda other: scale * latency_ms(_estimated(other, now.runtime, graph.target)))
        rooms.append(grid_room(eager.input_kind, eager.input_size, now.latency_ms, grown, sizes[-1], not exact))
    wider = ((factor, latency_ms(widened(graph, factor))) for factor in WIDTHS)
    rooms.append(grid_room("width", 1.0, now.latency_ms, wider, WIDTHS[-1], estimate=True))
    return Outlook(
        rooms=tuple(rooms),
        doubled=latency_ms(graph, 2 * now.batch) / now.latency_ms,
        halved=latency_ms(widened(graph, 0.5)) / now.latency_ms,
    )


def batch_room(predictor: Predictor, graph: ModelGraph, now: Prediction) -> Room:
    """How far the batch may grow; never beyond the device's memory."""

    def most(times: float) -> int | None:
        found = predictor.max_batch(graph, times * now.latency_ms, runtime=now.runtime, protocol=now.protocol)
        return None if found >= MOST_BATCH else max(found, now.batch)

    return Room("batch", now.batch, most(NEARLY_FREE), most(CHEAP), MOST_BATCH, estimate=False)


def grid_room(axis: str, now: float, latency_ms: float, grown: Grown, most: float, estimate: bool) -> Room:
    """How far something may grow, from the latency at growing sizes; between two of them it is taken to be straight.

    Where the sizes end before `most`, the model goes no further.

    >>> grid_room("width", 1.0, 10.0, [(2.0, 11.0), (4.0, 15.0)], 4.0, True)
    Room(axis='width', now=1.0, nearly_free=1.5, cheap=2.5, most=4.0, estimate=True)
    """
    points = [(now, latency_ms)]
    for size, grown_ms in grown:
        points.append((size, grown_ms))
        if grown_ms > CHEAP * latency_ms:
            break
    found = [_crossing(points, times * latency_ms) for times in (NEARLY_FREE, CHEAP)]
    last = points[-1][0]
    if last < most:
        found = [last if value is None else value for value in found]
    return Room(axis, now, _round(found[0], axis), _round(found[1], axis), most, estimate)


def _crossing(points: list[tuple[float, float]], limit_ms: float) -> float | None:
    for (low, low_ms), (high, high_ms) in pairwise(points):
        if high_ms > limit_ms:
            return low + (high - low) * max(0.0, limit_ms - low_ms) / (high_ms - low_ms)
    return None


def _round(value: float | None, axis: str) -> float | None:
    """Down to what makes sense of the axis: hundredths of the width, whole tokens and pixels."""
    if value is None:
        return None
    return int(100 * value) / 100 if axis == "width" else int(value)


def _walked(sizes: Iterable[int], walk: Walk, latency_ms: Callable[[ModelGraph], float]) -> Grown:
    """Latencies at growing input sizes, as far as the model goes."""
    for size in sizes:
        try:
            yield size, latency_ms(walk(size))
        except LatpredError:  # beyond its position embeddings, or not a multiple of its patches
            return


def _estimated(eager: ModelGraph, runtime: str, target: str) -> ModelGraph:
    return walking.fitting(eager, runtime, target or "cpu")
