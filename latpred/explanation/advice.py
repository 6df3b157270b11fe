"""What to change about a model or how it is run: one sentence, put together by rules from an explanation's numbers.

Each rule looks at numbers and gives a clause or nothing. "Faster" is said only where the intervals leave no doubt.
"""

from __future__ import annotations

from latpred.explanation.explanation import AxisHeadroom, Choice, Explanation, Headroom
from latpred.query import HALVES
from latpred.units import format_bytes

LITTLE = 0.9  # of the latency: what takes more than that is no gain worth a change
FULL = 1.8  # times the latency with twice the batch: from here on a larger batch brings no throughput


def advise(explanation: Explanation) -> str:
    """One sentence: which runtime, and what about the model or the batch; "" where there is nothing to say."""
    chosen = recommended(explanation)
    headroom = explanation.headrooms.get(chosen.runtime)
    clauses = [
        _too_large(chosen) or _runtime(explanation, chosen),
        _limit(chosen, headroom),
        _uncalibrated(explanation),
    ]
    sentence = "; ".join(clause for clause in clauses if clause)
    return f"{sentence[:1].upper()}{sentence[1:]}." if sentence else ""


def recommended(explanation: Explanation) -> Choice:
    """The runtime to use: the fastest, unless eager may be as fast, which takes no change."""
    eager = explanation.eager
    if eager is None or (explanation.fastest.speedup is not None and explanation.fastest.speedup.longer):
        return explanation.fastest
    return eager


def _too_large(chosen: Choice) -> str:
    point = chosen.prediction
    if point.fits is not False:
        return ""
    needs = f"batch {point.batch} needs {format_bytes(point.peak_bytes)}, more than the device has"
    return f"{needs}: use a smaller one" if point.batch > 1 else f"{needs}: use smaller inputs or a smaller model"


def _runtime(explanation: Explanation, chosen: Choice) -> str:
    if len(explanation.choices) == 1:
        return ""
    if chosen.speedup is None:
        as_fast = _listed(explanation.rivals)
        return f"run it in {chosen.runtime}, the fastest of those compared" + (f", or in {as_fast}" if as_fast else "")
    gain = explanation.fastest.speedup
    if chosen.runtime == "eager":
        others = _listed(tuple(name for name in (explanation.fastest.runtime, *explanation.rivals) if name != "eager"))
        if others and gain is not None and not gain.alike:
            times = f"{gain.times:.2f} times as fast, but not surely faster ({gain.low:.2f} to {gain.high:.2f})"
            return f"stay with eager, or measure both: {explanation.fastest.runtime} is predicted {times}"
        return f"stay with eager: {others} may be as fast, but not surely faster" if others else "stay with eager"
    gain = chosen.speedup
    # A rival that may be no faster than eager is no advice.
    sure = {choice.runtime for choice in explanation.choices if choice.speedup is not None and choice.speedup.longer}
    rivals = _listed(tuple(name for name in explanation.rivals if name in sure))
    said = f"run it in {chosen.runtime}, {gain.times:.2f} times as fast as eager ({gain.low:.2f} to {gain.high:.2f})"
    return f"{said}, or in {rivals}, which may be as fast" if rivals else said


def _limit(chosen: Choice, headroom: Headroom | None) -> str:
    if headroom is None:
        return ""
    regime = chosen.prediction.regime
    if regime == "framework-bound":
        return _framework_bound(headroom)
    return _compute_bound(chosen, headroom) if regime == "compute-bound" else _memory_bound(chosen, headroom)


def _framework_bound(headroom: Headroom) -> str:
    """The host dispatches longer than the device computes: more work is cheap, fewer layers help."""
    said = f"the host sets the latency{_spare(headroom)}, and fewer layers would be faster"
    if headroom.halved > LITTLE:
        return f"{said} but narrower ones hardly"
    return f"{said}, as would half the width ({headroom.halved:.2f} times the latency, an estimate)"


def _compute_bound(chosen: Choice, headroom: Headroom) -> str:
    """The device computes longer than the host dispatches: only less work helps."""
    said = f"computing sets the latency{_mostly(chosen)}, so fewer or narrower layers help"
    if headroom.halved < LITTLE:
        said += f" (half the width: {headroom.halved:.2f} times the latency, an estimate)"
    if headroom.doubled >= FULL:
        return f"{said}, a larger batch brings no throughput"
    return f"{said}, and twice the batch takes {headroom.doubled:.2f} times as long"


def _memory_bound(chosen: Choice, headroom: Headroom) -> str:
    """Memory is read longer than anything is computed: smaller numbers help, and more samples share the weights."""
    said = f"reading memory sets the latency{_mostly(chosen)}"
    half = "" if chosen.prediction.precision in HALVES else ", so half precision helps where the device has it"
    if headroom.doubled < FULL:
        return f"{said}{half}, and twice the batch takes {headroom.doubled:.2f} times as long"
    return f"{said}{half}, and so do fewer or narrower layers" if half else f"{said}, so fewer or narrower layers help"


def _uncalibrated(explanation: Explanation) -> str:
    names = [one.runtime for one in explanation.excluded if one.kind == "uncalibrated"]
    if len(explanation.choices) > 1 or not names:
        return ""
    return f"what {_listed(tuple(names))} would bring is not known before a calibration"


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
    total = sum(share.compute_ms for share in breakdown)
    most = max(breakdown, key=lambda share: share.compute_ms)
    return f", {most.compute_ms / total:.0%} of it in {most.name}" if total else ""


def _listed(names: tuple[str, ...]) -> str:
    """Names as a list in a sentence.

    >>> _listed(("a", "b", "c"))
    'a, b or c'
    """
    return " or ".join(", ".join(names).rsplit(", ", 1))
