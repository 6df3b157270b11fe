"""Sentences and tables of a report: the answer, what is covered, how far to trust it. Computes nothing new."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from latpred.explanation import advice
from latpred.prediction.crossover import Z90, BatchThreshold
from latpred.render import explanation_text as tables
from latpred.render.profile_text import age
from latpred.units import format_bytes, format_count, format_duration

if TYPE_CHECKING:
    from latpred.prediction.prediction import Curve, Prediction, Setting
    from latpred.profile.document import DeviceProfile
    from latpred.render.explanation_text import Table
    from latpred.report.gathering import Studied

_SIZES = {"seq": "{} tokens", "image": "{0} x {0} pixels", "audio": "{} samples of audio"}
_OFTEN_NAMED = 4
_SPACE_BEFORE_A_UNIT = re.compile(r"(?<=\d) (?=(?:[num]?s|[KMGT]?i?B|[KMG]|%)(?:\W|$))")
_SPACES_WITHIN_A_SPAN = re.compile(r"(?<=[\ds]) to (?=[\d.]+\W[num]?s\b)")


def answer(studied: Studied) -> str:
    """The latency in the runtime that the advice names, what sets it, and from which batch on that changes."""
    point = advice.recommended(studied.explanation).prediction
    setting = point.setting
    size = _SIZES.get(setting.input_kind, "").format(setting.input_size)
    what = ", ".join(part for part in (size, setting.precision, f"batch {point.batch}") if part)
    return (
        f"One forward pass ({what}) is predicted to take {_ms(point.latency_ms)} in {setting.runtime} on "
        f"{setting.device} (90 % interval: {_interval(point)}). {_regime(point)}"
    )


def _regime(point: Prediction) -> str:
    crossover = point.crossover
    if crossover.batch is None:
        return "At every batch size looked at, dispatching takes the host longer than computing takes the device."
    if crossover.batch <= 1:
        return "Computing, not dispatching, sets the latency at every batch size."
    return (
        f"Below batch {crossover.batch} ({_span(crossover)}) dispatching takes longer than computing: there, more work "
        "per forward pass costs little or nothing."
    )


def _span(found: BatchThreshold) -> str:
    return f"90 %: {found.low} to {found.high}" if found.high is not None else f"90 %: {found.low} or more"


def gap(studied: Studied) -> str:
    """What no formula covers, in a sentence for the top of the page; empty where all is covered."""
    coverage = studied.coverage
    if not coverage.estimated_ops:
        return ""
    names = [f"{name} ({count})" for name, count in coverage.estimated_ops.items()]
    more = f" and {len(names) - _OFTEN_NAMED} more" if len(names) > _OFTEN_NAMED else ""
    return (
        f"No cost formula knows {', '.join(names[:_OFTEN_NAMED])}{more}. Formulas cover {coverage.launches:.0%} of the "
        f"launches and {coverage.bytes:.0%} of the bytes; the rest is estimated from its bytes alone, its "
        "multiply-adds are not counted, and the intervals are wider for it. Teach latpred these operations with "
        "@latpred.cost."
    )


def overview(parts: list[Studied]) -> Table:
    """One row per model."""
    rows: Table = [("model", "batch", "fastest runtime", "latency", "90 % interval", "compute-bound from batch")]
    for studied in parts:
        point = studied.explanation.fastest.prediction
        crossover = "never" if point.crossover.batch is None else str(point.crossover.batch)
        counts = (studied.name, str(point.batch), point.runtime)
        rows.append((*counts, _ms(point.latency_ms), _interval(point), crossover))
    return rows


def runtimes(studied: Studied) -> Table:
    """Latency, interval, speed-up and clocks of each runtime in one table."""
    found = studied.explanation
    (head, *left), (clock_head, *clocks) = tables.latencies(found), tables.clocks(found)
    rows: Table = [(*head, *clock_head[1:])]
    for choice, (name, latency, _, speedup), (_, *clock) in zip(found.choices, left, clocks, strict=True):
        rows.append((name, latency, _interval(choice.prediction), speedup, *clock))
    return rows


def points(curves: tuple[Curve, ...]) -> Table:
    """All points of all curves."""
    rows: Table = [("runtime", "batch", "latency", "90 % interval", "samples/s", "overhead", "compute", "regime")]
    for curve in curves:
        for point in curve:
            large = "" if point.fits is not False else ", exceeds the memory"
            clocks = (_ms(point.overhead_ms), _ms(point.compute_ms), point.regime + large)
            rate = _rate(point.throughput_per_s)
            rows.append((point.runtime, str(point.batch), _ms(point.latency_ms), _interval(point), rate, *clocks))
    return rows


def facts(studied: Studied) -> list[tuple[str, str]]:
    """About the model."""
    graph, coverage = studied.graph, studied.coverage
    batch = studied.explanation.batch
    known = " in the operations that are known" if coverage.estimated_ops else ""
    covered = f"formulas for {coverage.launches:.0%} of launches and {coverage.bytes:.0%} of bytes"
    return [
        ("parameters", f"{format_count(graph.parameters)} ({format_bytes(graph.parameter_bytes)})"),
        (f"multiply-adds at batch {batch}", format_count(graph.macs(batch)) + known),
        (f"launches in {graph.runtime}", str(graph.launches(batch))),
        (f"peak memory at batch {batch}", format_bytes(graph.peak_bytes(batch))),
        ("coverage", "formulas for everything it does" if not coverage.estimated_ops else covered),
    ]


def trust(profile: DeviceProfile, setting: Setting) -> list[tuple[str, str]]:
    """What the predictions rest on, and how far off they were on networks that the fit had not seen."""
    machine, gate = profile.machine, profile.acceptance
    stack = ", ".join(f"{name} {version}" for name, version in machine.stack.items())
    passed = gate.passed and all(gate.runtimes.values())
    rows = [
        ("profile", f"{profile.name}: {profile.provenance}, {profile.created[:10]} ({age(profile.created)})"),
        ("device", machine.accelerator or machine.cpu),
        ("host", machine.cpu if machine.accelerator else f"the same, {machine.threads} thread(s)"),
        ("software", stack or "not recorded"),
        ("latency means", f"{setting.protocol}, inputs on the {setting.inputs_on}"),
    ]
    rows += [(f"error in {name}", _left_out(fit.spread)) for name, fit in profile.runtimes.items() if fit.spread]
    if not gate.checks:
        return [*rows, ("acceptance gate", "nothing was held out: there is no error to report")]
    return [*rows, ("acceptance gate", "passed" if passed else "not passed by all that was calibrated")]


def checks(profile: DeviceProfile) -> Table:
    """The acceptance gate's checks; empty where there were none."""
    rows = list(profile.acceptance.checks.items())
    return [("held out of the fit", "found"), *rows] if rows else []


def caveats(studied: Studied) -> list[str]:
    """What may not hold, and runtimes that are not compared."""
    found = studied.explanation
    said = [text if name == "caveat" else f"{name}: {text}" for name, text in tables.caveats(found)]
    return [*said, *(f"without {name}: {reason}" for name, reason in tables.missing(found))]


def glued(cell: str) -> str:
    """A cell whose numbers stay on one line with their units and spans: the spaces between them do not break."""
    return _SPACES_WITHIN_A_SPAN.sub("\u00a0to\u00a0", _SPACE_BEFORE_A_UNIT.sub("\u00a0", cell))


def _left_out(spread: float) -> str:
    return f"9 in 10 whole networks that the fit left out were within a factor of {math.exp(Z90 * spread):.2f}"


def _rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"


def _interval(point: Prediction) -> str:
    """The 90 % interval, its unit said once where both ends have it."""
    low, high = (_ms(end) for end in point.interval_ms)
    number, unit = low.split()
    return f"{number if unit == high.split()[1] else low} to {high}"


def _ms(milliseconds: float) -> str:
    return format_duration(milliseconds / 1e3)
