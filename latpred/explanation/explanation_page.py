"""How an explanation looks: what each runtime takes, where the time goes, what may grow. Computes nothing new."""

from __future__ import annotations

from typing import TYPE_CHECKING

from latpred.prediction.prediction_page import input_text
from latpred.render import Page, Row, Table, format_interval, format_ms

if TYPE_CHECKING:
    from latpred.explanation.explanation import AxisHeadroom, Choice, Explanation, Headroom

NAMED = 6  # classes of ops that are named
LEAST_SHARE = 0.005  # of the latency, below which a class is not named
AXES = {"seq": "tokens", "image": "pixels of a side", "audio": "samples"}


def explanation_page(explanation: Explanation) -> Page:
    """What each runtime takes, its clocks, where the time goes, what may grow, what is missing, advice."""
    setting = explanation.fastest.prediction.setting
    inputs = ", ".join([f"batch {explanation.batch}", *input_text(setting), setting.precision])
    tables = [latencies(explanation), clocks(explanation), shares(explanation)]
    tables += [growth(name, headroom) for name, headroom in explanation.headrooms.items()]
    remarks = [*(f"without {name}: {reason}" for name, reason in missing(explanation)), *caveats(explanation)]
    parts: list[Table | str] = [*tables, *remarks, explanation.advice]
    return Page(f"{setting.model}: {inputs} on {setting.device}", parts, prose=True)


def latencies(explanation: Explanation) -> Table:
    """Latency of each runtime, and how it compares with eager."""
    rows = [
        (point.runtime, format_ms(point.latency_ms), format_interval(point.interval_ms), _speedup(choice))
        for choice in explanation.choices
        for point in [choice.prediction]
    ]
    return Table(("runtime", "latency", "90 % interval", "speed-up over eager"), rows)


def clocks(explanation: Explanation) -> Table:
    """What host and device do in each runtime, and from which batch on the device sets the latency."""
    rows = []
    for choice in explanation.choices:
        point, batch = choice.prediction, choice.prediction.crossover_batch
        times = (format_ms(point.overhead_ms), format_ms(point.compute_ms))
        regime = point.regime.removesuffix("-bound")
        crossover = "never" if batch is None else str(batch)
        rows.append((choice.runtime, *times, str(choice.steps), str(choice.launches), regime, crossover))
    return Table(("runtime", "overhead", "compute", "steps", "launches", "regime", "crossover"), rows)


def shares(explanation: Explanation) -> Table:
    """Host and device time of the classes of ops that take most, in the fastest runtime and in eager."""
    chosen = [choice for name in explanation.headrooms if (choice := explanation.choice(name)) is not None]
    names = dict.fromkeys(name for choice in chosen for name in _classes(choice))
    heads = ("ops", *(f"{choice.runtime} {clock}" for choice in chosen for clock in ("host", "device")))
    rows = [(name, *(cell for choice in chosen for cell in _times(choice, name))) for name in names]
    return Table(heads, rows, title="where the time goes:")


def growth(runtime: str, headroom: Headroom) -> Table:
    """What may grow within 5 and 20 % of the latency in a runtime; what more batch and less width would do."""
    rows = []
    for room in headroom.rooms:
        name = AXES.get(room.axis, room.axis) + " (estimate)" * room.estimate
        rows.append((name, _size(room.now, room), _upto(room.nearly_free, room), _upto(room.cheap, room)))
    doubled = f"twice the batch takes {headroom.doubled:.2f} times as long"
    note = f"{doubled}, half the width {headroom.halved:.2f} times (estimate)"
    return Table((f"may grow in {runtime}", "now", "for 5 % more", "for 20 % more"), rows, note=note)


def missing(explanation: Explanation) -> list[tuple[str, str]]:
    """Runtimes that are not compared, those for one reason together."""
    reasons: dict[str, list[str]] = {}
    for one in explanation.excluded:
        # What runs on another kind of device only is no more than mentioned.
        reason = one.reason.partition(";")[0].removeprefix(f"{one.runtime} ") if one.kind == "unsuited" else one.reason
        reasons.setdefault(reason.replace(one.runtime, "{}"), []).append(one.runtime)
    return [(", ".join(names), reason.replace("{}", ",".join(names))) for reason, names in reasons.items()]


def caveats(explanation: Explanation) -> list[str]:
    """What may not hold, each once, with the runtimes it is about where it is not about all."""
    runtimes: dict[str, list[str]] = {}
    for choice in explanation.choices:
        for caveat in choice.prediction.provenance.caveats:
            runtimes.setdefault(caveat, []).append(choice.runtime)
    everywhere = len(explanation.choices)
    return [
        f"caveat: {caveat}" if len(names) == everywhere else f"caveat of {', '.join(names)}: {caveat}"
        for caveat, names in runtimes.items()
    ]


def _classes(choice: Choice) -> list[str]:
    """Classes that take most of the host's and of the device's time together."""
    least = LEAST_SHARE * choice.prediction.latency_ms
    return [share.name for share in choice.prediction.breakdown[:NAMED] if share.host_ms + share.device_ms >= least]


def _times(choice: Choice, name: str) -> Row:
    """Host and device time of one class of ops."""
    for share in choice.prediction.breakdown:
        if share.name == name:
            return tuple(format_ms(ms) if ms else "-" for ms in (share.host_ms, share.device_ms))
    return ("-", "-")


def _upto(value: float | None, room: AxisHeadroom) -> str:
    if value is None:
        return f"beyond {_size(room.most, room)}"
    return "no further" if value <= room.now else f"to {_size(value, room)}"


def _size(value: float, room: AxisHeadroom) -> str:
    return f"{value:,.10g}{'x' if room.axis == 'width' else ''}"


def _speedup(choice: Choice) -> str:
    speedup = choice.speedup
    if choice.runtime == "eager" or speedup is None:
        return "-"
    doubt = "" if not speedup.equal else ", about equal" if speedup.alike else ", not sure"
    return f"{speedup.times:.2f}x ({speedup.low:.2f} to {speedup.high:.2f}){doubt}"
