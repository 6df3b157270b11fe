"""What to change about a model or how it is run: one sentence, put together by rules from an explanation's numbers.

Each rule looks at numbers and gives a clause or nothing. "Faster" is said only where the intervals leave no doubt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

from latpred.errors import LatpredError
from latpred.explanation.explanation import CHEAP, NEARLY_FREE, AxisHeadroom, Choice, Explanation, Headroom, Ratio
from latpred.graph.graph import ModelGraph
from latpred.graph.widen import widened
from latpred.prediction.prediction import Prediction
from latpred.prediction.predictor import MOST_BATCH, Predictor
from latpred.runtimes import lowering
from latpred.units import format_bytes

LITTLE = 0.9  # of the latency: what takes more than that is no gain worth a change
FULL = 1.8  # times the latency with twice the batch: from here on a larger batch brings no throughput
HALVES = ("fp16", "bf16")


def advise(found: Explanation) -> str:
    """One sentence: which runtime, and what about the model or the batch."""
    chosen = recommended(found)
    headroom = found.headrooms.get(chosen.runtime)
    clauses = [
        too_large(chosen) or runtime(found, chosen),
        limit(chosen, headroom),
        unknown(found),
    ]
    sentence = "; ".join(clause for clause in clauses if clause)
    return f"{sentence[:1].upper()}{sentence[1:]}."


def recommended(found: Explanation) -> Choice:
    """The runtime to use: the fastest, unless eager may be as fast, which takes no change."""
    eager = found.eager
    if eager is None or (found.fastest.speedup is not None and found.fastest.speedup.longer):
        return found.fastest
    return eager


def too_large(chosen: Choice) -> str:
    """The first thing to say of a batch that the device has no memory for."""
    point = chosen.prediction
    if point.fits is not False:
        return ""
    return f"batch {point.batch} needs {format_bytes(point.peak_bytes)}, more than the device has: use a smaller one"


def runtime(found: Explanation, chosen: Choice) -> str:
    """Which runtime, where more than one is known."""
    if len(found.choices) == 1:
        return ""
    if chosen.speedup is None:
        rivals = _others(found.rivals)
        return f"run it in {chosen.runtime}, the fastest of those compared" + (f", or in {rivals}" if rivals else "")
    if chosen.runtime == "eager":
        others = _others(tuple(name for name in (found.fastest.runtime, *found.rivals) if name != "eager"))
        if others and found.fastest.speedup is not None and not found.fastest.speedup.alike:
            return _measure_both(found.fastest.runtime, found.fastest.speedup)
        return f"stay with eager: {others} may be as fast, but not surely faster" if others else "stay with eager"
    gain = chosen.speedup
    rivals = _others(tuple(name for name in found.rivals if name != "eager"))
    said = f"run it in {chosen.runtime}, {gain.times:.2f} times as fast as eager ({gain.low:.2f} to {gain.high:.2f})"
    return f"{said}, or in {rivals}, about as fast" if rivals else said


def limit(chosen: Choice, headroom: Headroom | None) -> str:
    """What sets the latency there, and what would change it."""
    if headroom is None:
        return ""
    regime = chosen.prediction.regime
    if regime == "framework-bound":
        return framework_bound(headroom)
    return compute_bound(chosen, headroom) if regime == "compute-bound" else memory_bound(chosen, headroom)


def framework_bound(headroom: Headroom) -> str:
    """The host dispatches longer than the device computes: more work is cheap, fewer layers help."""
    said = f"the host sets the latency{_spare(headroom)}, and fewer layers would be faster"
    if headroom.halved > LITTLE:
        return f"{said} but narrower ones hardly"
    return f"{said}, as would half the width ({headroom.halved:.2f} times the latency, an estimate)"


def compute_bound(chosen: Choice, headroom: Headroom) -> str:
    """The device computes longer than the host dispatches: only less work helps."""
    said = f"computing sets the latency{_mostly(chosen)}, so fewer or narrower layers help"
    if headroom.halved < LITTLE:
        said += f" (half the width: {headroom.halved:.2f} times the latency, an estimate)"
    if headroom.doubled >= FULL:
        return f"{said}, a larger batch brings no throughput"
    return f"{said}, and twice the batch takes {headroom.doubled:.2f} times as long"


def memory_bound(chosen: Choice, headroom: Headroom) -> str:
    """Memory is read longer than anything is computed: smaller numbers help, and more samples share the weights."""
    said = f"reading memory sets the latency{_mostly(chosen)}"
    if chosen.prediction.precision not in HALVES:
        said += ", so half precision helps where the device has it"
    if headroom.doubled < FULL:
        return f"{said}, and twice the batch takes {headroom.doubled:.2f} times as long"
    return f"{said}, and so do fewer or narrower layers"


def unknown(found: Explanation) -> str:
    """Which runtimes could be compared after a calibration, where only eager is known."""
    names = [one.runtime for one in found.excluded if one.kind == "uncalibrated"]
    if len(found.choices) > 1 or not names:
        return ""
    command = f"latpred calibrate --runtimes {','.join(names)}"
    return f"what {_others(tuple(names))} would bring is not known before: {command}"


def _measure_both(name: str, gain: Ratio) -> str:
    times = f"{gain.times:.2f} times as fast, but not surely faster ({gain.low:.2f} to {gain.high:.2f})"
    return f"stay with eager, or measure both: {name} is predicted {times}"


def _spare(headroom: Headroom) -> str:
    """What may grow for a fifth more, as batch and width."""
    parts = []
    batch, width = headroom.room("batch"), headroom.room("width")
    if batch is not None and (batch.cheap is None or batch.cheap > batch.now):
        parts.append(f"batch {_upto(batch)}")
    if width is not None and (width.cheap is None or width.cheap >= 1.05):
        parts.append(f"width {_upto(width)} times as large (estimate)")
    return f": {' or '.join(parts)} costs at most a fifth more" if parts else ""


def _upto(room: AxisHeadroom) -> str:
    if room.cheap is None:
        return f"beyond {room.most:,.10g}"
    return f"up to {room.cheap:,.10g}"


def _mostly(chosen: Choice) -> str:
    """The class of ops that takes most of the device's time."""
    breakdown = chosen.prediction.breakdown
    total = sum(share.device_ms for share in breakdown)
    most = max(breakdown, key=lambda share: share.device_ms)
    return f", {most.device_ms / total:.0%} of it in {most.name}" if total else ""


def _others(names: tuple[str, ...]) -> str:
    """Names as a list in a sentence.

    >>> _others(("a", "b", "c"))
    'a, b or c'
    """
    return " or ".join(", ".join(names).rsplit(", ", 1))


Walk = Callable[[int], ModelGraph]
Grown = Iterable[tuple[float, float]]  # a size, and the latency with it

WIDTHS = (1.125, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0)
TOKENS = (1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
PIXELS = (1.5, 2.0, 3.0, 4.0)  # of a side; sizes that most patches and strides divide


def headroom_of(
    predictor: Predictor, graph: ModelGraph, now: Prediction, eager: ModelGraph | None = None, walk: Walk | None = None
) -> Headroom:
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
    return Headroom(
        rooms=tuple(rooms),
        doubled=latency_ms(graph, 2 * now.batch) / now.latency_ms,
        halved=latency_ms(widened(graph, 0.5)) / now.latency_ms,
    )


def batch_room(predictor: Predictor, graph: ModelGraph, now: Prediction) -> AxisHeadroom:
    """How far the batch may grow; never beyond the device's memory."""

    def most(times: float) -> int | None:
        found = predictor.max_batch(graph, times * now.latency_ms, runtime=now.runtime, protocol=now.protocol)
        return None if found >= MOST_BATCH else max(found, now.batch)

    return AxisHeadroom("batch", now.batch, most(NEARLY_FREE), most(CHEAP), MOST_BATCH, estimate=False)


def grid_room(axis: str, now: float, latency_ms: float, grown: Grown, most: float, estimate: bool) -> AxisHeadroom:
    """How far something may grow, from the latency at growing sizes; between two of them it is taken to be straight.

    Where the sizes end before `most`, the model goes no further.

    >>> grid_room("width", 1.0, 10.0, [(2.0, 11.0), (4.0, 15.0)], 4.0, True)
    AxisHeadroom(axis='width', now=1.0, nearly_free=1.5, cheap=2.5, most=4.0, estimate=True)
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
    return AxisHeadroom(axis, now, _round(found[0], axis), _round(found[1], axis), most, estimate)


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
    return lowering.fitting(eager, runtime, target or "cpu")
