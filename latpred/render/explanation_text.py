"""How an explanation looks: tables and sentences within 80 columns, or the same in a notebook. Computes nothing new."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from html import escape

from latpred.explanation.explanation import AxisHeadroom, Choice, Explanation, Headroom, Ratio
from latpred.prediction.crossover import BatchThreshold
from latpred.prediction.prediction import Setting
from latpred.units import format_duration

WIDTH = 80
SHOWN = 6  # classes of ops that are named
LEAST_SHARE = 0.005  # of the latency, below which a class is not named

AXES = {"seq": "tokens", "image": "pixels of a side", "audio": "samples"}

Table = list[tuple[str, ...]]  # the first row is the head


def plain(found: Explanation) -> str:
    """Title, what each runtime takes, its clocks, where the time goes, what may grow, what is missing, advice."""
    shown = [title(found), "", *_aligned(latencies(found)), "", *_aligned(clocks(found)), ""]
    shown += ["where the time goes:", *_aligned(shares(found)), ""]
    for name, headroom in found.headrooms.items():
        shown += [*_aligned(growth(name, headroom)), *_wrapped("", changes(headroom)), ""]
    for name, reason in missing(found):
        shown += _wrapped(f"without {name}: ", reason)
    shown += [line for name, caveat in caveats(found) for line in _wrapped(f"{name}: ", caveat)]
    return "\n".join([*shown, "", *_wrapped("", found.advice)])


def html(found: Explanation) -> str:
    """The same as tables."""
    parts = [f"<strong>{escape(title(found))}</strong>", f"<p>{escape(found.advice)}</p>"]
    parts += [_html_table(table) for table in (latencies(found), clocks(found), shares(found))]
    parts += [_html_table(growth(name, headroom)) for name, headroom in found.headrooms.items()]
    facts = [(f"in {name}", changes(headroom)) for name, headroom in found.headrooms.items()]
    facts += [(f"without {name}", reason) for name, reason in missing(found)]
    facts += caveats(found)
    rows = "".join(f"<tr><th style='text-align:left'>{escape(n)}</th><td>{escape(t)}</td></tr>" for n, t in facts)
    return f"<div>{''.join(parts)}<table>{rows}</table></div>"


def title(found: Explanation) -> str:
    """What was asked."""
    setting = found.fastest.prediction.setting
    return f"{setting.model}: batch {found.batch}, {_inputs(setting)}{setting.precision} on {setting.device}"


def latencies(found: Explanation) -> Table:
    """Latency of each runtime, and how it compares with eager."""
    rows: Table = [("runtime", "latency", "90 % interval", "speed-up over eager")]
    for choice in found.choices:
        point = choice.prediction
        low, high = (format_duration(end / 1e3) for end in point.interval_ms)
        rows.append((choice.runtime, _ms(point.latency_ms), f"{low} to {high}", _speedup(choice)))
    return rows


def clocks(found: Explanation) -> Table:
    """What host and device do in each runtime, and from which batch on the device sets the latency."""
    rows: Table = [("runtime", "overhead", "compute", "steps", "launches", "regime", "crossover")]
    for choice in found.choices:
        point = choice.prediction
        counts = (str(choice.steps), str(choice.launches))
        regime = point.regime.removesuffix("-bound")
        rows.append(
            (choice.runtime, _ms(point.overhead_ms), _ms(point.compute_ms), *counts, regime, _batch(point.crossover))
        )
    return rows


def shares(found: Explanation) -> Table:
    """Host and device time of the classes of ops that take most, in the fastest runtime and in eager."""
    chosen = [choice for name in found.headrooms if (choice := found.choice(name)) is not None]
    names = dict.fromkeys(name for choice in chosen for name in _classes(choice))
    rows: Table = [("ops", *(f"{choice.runtime} {clock}" for choice in chosen for clock in ("host", "device")))]
    for name in names:
        cells = [cell for choice in chosen for cell in _cells(choice, name)]
        rows.append((name, *cells))
    return rows


def growth(runtime: str, headroom: Headroom) -> Table:
    """What may grow within 5 and 20 % of the latency in a runtime."""
    rows: Table = [(f"may grow in {runtime}", "now", "for 5 % more", "for 20 % more")]
    for room in headroom.rooms:
        name = AXES.get(room.axis, room.axis) + " (estimate)" * room.estimate
        ends = (_upto(room.nearly_free, room), _upto(room.cheap, room))
        rows.append((name, _size(room.now, room), *ends))
    return rows


def changes(headroom: Headroom) -> str:
    """What more batch and less width would do."""
    doubled = f"twice the batch takes {headroom.doubled:.2f} times as long"
    return f"{doubled}, half the width {headroom.halved:.2f} times (estimate)"


def missing(found: Explanation) -> list[tuple[str, str]]:
    """Runtimes that are not compared, those for one reason together."""
    reasons: dict[str, list[str]] = {}
    for one in found.excluded:
        # What runs on another kind of device only is no more than mentioned.
        reason = one.reason.partition(";")[0].removeprefix(f"{one.runtime} ") if one.kind == "unsuited" else one.reason
        reasons.setdefault(reason.replace(one.runtime, "{}"), []).append(one.runtime)
    return [(", ".join(names), reason.replace("{}", ",".join(names))) for reason, names in reasons.items()]


def caveats(found: Explanation) -> list[tuple[str, str]]:
    """What may not hold, each once, with the runtimes it is about where it is not about all."""
    said: dict[str, list[str]] = {}
    for choice in found.choices:
        for caveat in choice.prediction.provenance.caveats:
            said.setdefault(caveat, []).append(choice.runtime)
    everywhere = len(found.choices)
    return [
        ("caveat" if len(names) == everywhere else f"caveat of {', '.join(names)}", caveat)
        for caveat, names in said.items()
    ]


def _classes(choice: Choice) -> list[str]:
    """Classes that take most of the host's and of the device's time together."""
    least = LEAST_SHARE * choice.prediction.latency_ms
    return [share.name for share in choice.prediction.breakdown[:SHOWN] if share.host_ms + share.device_ms >= least]


def _cells(choice: Choice, name: str) -> tuple[str, str]:
    share = next((share for share in choice.prediction.breakdown if share.name == name), None)
    return ("-", "-") if share is None else (_ms_or_dash(share.host_ms), _ms_or_dash(share.device_ms))


def _upto(value: float | None, room: AxisHeadroom) -> str:
    if value is None:
        return f"beyond {_size(room.most, room)}"
    return "no further" if value <= room.now else f"to {_size(value, room)}"


def _size(value: float, room: AxisHeadroom) -> str:
    return f"{value:,.10g}{'x' if room.axis == 'width' else ''}"


def _speedup(choice: Choice) -> str:
    found = choice.speedup
    if choice.runtime == "eager" or found is None:
        return "-"
    return f"{found.times:.2f}x ({found.low:.2f} to {found.high:.2f}){_verdict(found)}"


def _verdict(found: Ratio) -> str:
    if not found.equal:
        return ""
    return ", about equal" if found.alike else ", not sure"


def _batch(found: BatchThreshold) -> str:
    return "never" if found.batch is None else str(found.batch)


def _inputs(setting: Setting) -> str:
    size = AXES.get(setting.input_kind)
    return f"{setting.input_size} {size.partition(' ')[0]}, " if size and setting.input_size else ""


def _ms(milliseconds: float) -> str:
    return format_duration(milliseconds / 1e3)


def _ms_or_dash(milliseconds: float) -> str:
    return _ms(milliseconds) if milliseconds else "-"


def _aligned(table: Table) -> list[str]:
    """Rows with columns under each other: the first to the left, the others to the right; long heads in two lines."""
    rows = [row for head in _head_lines(table) for row in [head]] + table[1:]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table[0]))]
    gap = "  " if sum(widths) + 2 * (len(widths) - 1) <= WIDTH else " "
    return [
        gap.join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]).rstrip()
        for row in rows
    ]


def _head_lines(table: Table) -> Table:
    head = table[0]
    widths = [max((len(row[column]) for row in table[1:]), default=0) for column in range(len(head))]
    split = [("", head[0]), *(_split(name, width) for name, width in zip(head[1:], widths[1:], strict=True))]
    if all(not above for above, _ in split):
        return [head]
    return [tuple(above for above, _ in split), tuple(below for _, below in split)]


def _split(name: str, width: int) -> tuple[str, str]:
    """A head in two lines, where it has two words and is wider than its column."""
    above, space, below = name.partition(" ")
    return (above, below) if space and len(name) > max(width, len("90 % interval")) else ("", name)


def _wrapped(name: str, text: str) -> list[str]:
    return textwrap.wrap(name + text, WIDTH, subsequent_indent="  " * bool(name), break_on_hyphens=False)


def _html_table(table: Sequence[tuple[str, ...]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table[0])
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table[1:])
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
