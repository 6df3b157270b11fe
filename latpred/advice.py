"""What to change about a model or how it is run: one sentence, put together by rules from an explanation's numbers.

Each rule looks at numbers and gives a clause or nothing. "Faster" is said only where the intervals leave no doubt.
"""

from __future__ import annotations

from latpred.explanation import Choice, Explanation, Outlook, Ratio, Room
from latpred.units import format_bytes

LITTLE = 0.9  # of the latency: what takes more than that is no gain worth a change
FULL = 1.8  # times the latency with twice the batch: from here on a larger batch brings no throughput
HALVES = ("fp16", "bf16")


def advise(found: Explanation) -> str:
    """One sentence: which runtime, and what about the model or the batch."""
    chosen = recommended(found)
    outlook = found.outlooks.get(chosen.runtime)
    clauses = [
        too_large(chosen) or runtime(found, chosen),
        limit(chosen, outlook),
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


def limit(chosen: Choice, outlook: Outlook | None) -> str:
    """What sets the latency there, and what would change it."""
    if outlook is None:
        return ""
    regime = chosen.prediction.regime
    if regime == "framework-bound":
        return framework_bound(outlook)
    return compute_bound(chosen, outlook) if regime == "compute-bound" else memory_bound(chosen, outlook)


def framework_bound(outlook: Outlook) -> str:
    """The host dispatches longer than the device computes: more work is cheap, fewer layers help."""
    said = f"the host sets the latency{_spare(outlook)}, and fewer layers would be faster"
    if outlook.halved > LITTLE:
        return f"{said} but narrower ones hardly"
    return f"{said}, as would half the width ({outlook.halved:.2f} times the latency, an estimate)"


def compute_bound(chosen: Choice, outlook: Outlook) -> str:
    """The device computes longer than the host dispatches: only less work helps."""
    said = f"computing sets the latency{_mostly(chosen)}, so fewer or narrower layers help"
    if outlook.halved < LITTLE:
        said += f" (half the width: {outlook.halved:.2f} times the latency, an estimate)"
    if outlook.doubled >= FULL:
        return f"{said}, a larger batch brings no throughput"
    return f"{said}, and twice the batch takes {outlook.doubled:.2f} times as long"


def memory_bound(chosen: Choice, outlook: Outlook) -> str:
    """Memory is read longer than anything is computed: smaller numbers help, and more samples share the weights."""
    said = f"reading memory sets the latency{_mostly(chosen)}"
    if chosen.prediction.precision not in HALVES:
        said += ", so half precision helps where the device has it"
    if outlook.doubled < FULL:
        return f"{said}, and twice the batch takes {outlook.doubled:.2f} times as long"
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


def _spare(outlook: Outlook) -> str:
    """What may grow for a fifth more, as batch and width."""
    parts = []
    batch, width = outlook.room("batch"), outlook.room("width")
    if batch is not None and (batch.cheap is None or batch.cheap > batch.now):
        parts.append(f"batch {_upto(batch)}")
    if width is not None and (width.cheap is None or width.cheap >= 1.05):
        parts.append(f"width {_upto(width)} times as large (estimate)")
    return f": {' or '.join(parts)} costs at most a fifth more" if parts else ""


def _upto(room: Room) -> str:
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
