"""A report about one or several models: one HTML file with figures, tables and sentences that needs no network.

`gather` predicts what a page shows, `write` puts it into a file. The page is a jinja2 template; its figures are those
of `latpred.plot`, as SVG.
"""

from __future__ import annotations

import base64
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from latpred import plot
from latpred.api import predict, predictor_of
from latpred.errors import UsageError
from latpred.explanation.advice import recommended
from latpred.explanation.explain import explain
from latpred.explanation.explanation import Explanation, caveats, clocks, growth, latencies, missing, shares
from latpred.graph.graph import Coverage, ModelGraph
from latpred.plot import style
from latpred.prediction.clocks import Z90
from latpred.prediction.prediction import Curve
from latpred.prediction.prediction_page import CURVE_HEADS, curve_row, input_text, star_note
from latpred.prediction.timeline import ForwardPass, forward_pass
from latpred.profile.document import DeviceProfile
from latpred.profile.profile_page import age
from latpred.query import DeviceQuery, Options, record_of
from latpred.render import Table, format_interval, format_ms, format_threshold, listed
from latpred.runtimes import lowering
from latpred.storage import result_file
from latpred.units import format_bytes, format_count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from latpred.prediction.prediction import Prediction, Setting
    from latpred.query import Model

__all__ = ["Studied", "demand_packages", "gather", "html", "write"]

_NAMED = 4  # operations without a formula that are named


class _Chart(NamedTuple):
    """A figure: what it shows, and its SVG as an address that holds all of it."""

    about: str
    address: str


def html(parts: Iterable[Studied]) -> str:
    """The report of some models as one HTML page."""
    parts = [*parts]
    if not parts:
        raise UsageError("A report needs a model; give one or more.")
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    source = resources.files("latpred.report").joinpath("page.html").read_text(encoding="utf-8")
    return environment.from_string(source).render(
        title=f"Latency of {', '.join(studied.name for studied in parts)}",
        device=parts[0].explanation.fastest.prediction.device,
        overview=_overview(parts),
        parts=[_part(number, studied) for number, studied in enumerate(parts, 1)],
        trust=_trust(parts[0].profile, parts[0].curves[0].setting),
        checks=Table(("held out of the fit", "found"), list(parts[0].profile.acceptance.checks.items())),
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=version("latpred"),
    )


def write(parts: Iterable[Studied], path: str | os.PathLike[str]) -> Path:
    """Write the report of some models to a file."""
    text, wanted = html(parts), Path(path)
    with result_file(wanted) as part:
        part.write_text(text, encoding="utf-8")
    return wanted


def demand_packages() -> None:
    """Make sure that what figures are drawn with is installed."""
    with style.in_style():
        pass


def _part(number: int, studied: Studied) -> dict[str, Any]:
    explanation = studied.explanation
    without = [f"without {name}: {reason}" for name, reason in missing(explanation)]
    return {
        "anchor": f"model-{number}",
        "name": studied.name,
        "answer": answer(studied),
        "advice": explanation.advice,
        "gap": _gap(studied),
        "charts": _charts(studied),
        "others": _other_runtimes(studied),
        "runtimes": runtimes(studied),
        "points": points(studied.curves),
        "shares": shares(explanation),
        "growth": [growth(name, headroom) for name, headroom in explanation.headrooms.items()],
        "facts": facts(studied),
        "caveats": [*(said.removeprefix("caveat: ") for said in caveats(explanation)), *without],
    }


def _charts(studied: Studied) -> dict[str, _Chart]:
    explanation = studied.explanation
    points = [choice.prediction for choice in explanation.choices]
    forward = studied.forward.prediction
    idle = studied.forward.gaps.total_us / 1e3 / forward.latency_ms if forward.latency_ms else 0.0
    runtimes = f"Latency of each runtime at batch {explanation.batch} with its 90 % interval"
    classes = "Host and device time of each runtime by class of operations"
    clocks = (
        f"Part of one forward pass in {forward.runtime}: what the host dispatches and what the device runs; "
        f"between kernels the device idles for {idle:.0%} of the whole pass"
    )
    return {
        "curve": _curve_chart(studied.name, studied.curves[0]),
        "runtimes": _chart(runtimes, plot.figure_of(plot.runtimes(points, plot.blank(1.1 + 0.2 * len(points))))),
        "shares": _chart(classes, plot.figure_of(plot.shares(points, plot.blank(1.1 + 0.4 * len(points))))),
        "clocks": _chart(clocks, plot.two_clocks(studied.forward)),
    }


def _other_runtimes(studied: Studied) -> list[_Chart]:
    """All runtimes in one figure, and those that are not advised each by itself."""
    if len(studied.curves) == 1:
        return []
    about = f"Latency of {studied.name} against batch size in each runtime, on logarithmic axes"
    together = _chart(about, plot.figure_of(plot.latencies(studied.curves, plot.blank())))
    return [together, *(_curve_chart(studied.name, curve) for curve in studied.curves[1:])]


def _curve_chart(name: str, curve: Curve) -> _Chart:
    about = (
        f"Latency of {name} in {curve.setting.runtime} against batch size on logarithmic axes, with its 90 % interval, "
        "the host's overhead, the device's compute, the regimes and the crossover"
    )
    return _chart(about, plot.figure_of(plot.curve(curve, plot.blank())))


def _chart(about: str, figure: Figure) -> _Chart:
    return _Chart(about, f"data:image/svg+xml;base64,{base64.b64encode(style.svg(figure)).decode()}")


def answer(studied: Studied) -> str:
    """The latency in the runtime that the advice names, what sets it, and from which batch on that changes."""
    point = recommended(studied.explanation).prediction
    setting = point.setting
    what = ", ".join([*input_text(setting), *setting.setup, f"batch {point.batch}"])
    return (
        f"One forward pass ({what}) is predicted to take {format_ms(point.latency_ms)} in {setting.runtime} on "
        f"{setting.device} (90 % interval: {format_interval(point.interval_ms)}). {_regime(point)}"
    )


def _regime(point: Prediction) -> str:
    batch = point.crossover_batch
    if batch is None:
        return "At every batch size looked at, dispatching takes the host longer than computing takes the device."
    if batch <= 1:
        return "Computing, not dispatching, sets the latency at every batch size."
    return (
        f"Below batch {format_threshold(point.crossover)} dispatching takes longer than computing: there, "
        "more work per forward pass costs little or nothing."
    )


def _gap(studied: Studied) -> str:
    """What no formula covers, in a sentence for the top of the page; empty where all is covered."""
    coverage = studied.coverage
    if not coverage.estimated_ops:
        return ""
    names = [f"{name} ({count})" for name, count in coverage.estimated_ops.items()]
    return (
        f"No cost formula knows {listed(names, _NAMED)}. Formulas cover {coverage.launches:.0%} of the "
        f"launches and {coverage.bytes:.0%} of the bytes; the rest is estimated from its bytes alone, its "
        "multiply-adds are not counted, and the intervals are wider for it. Teach latpred these operations with "
        "@latpred.cost."
    )


def _overview(parts: Sequence[Studied]) -> Table:
    rows = []
    for studied in parts:
        point = studied.explanation.fastest.prediction
        crossover = "never" if point.crossover_batch is None else str(point.crossover_batch)
        times = (format_ms(point.latency_ms), format_interval(point.interval_ms))
        rows.append((studied.name, str(point.batch), point.runtime, *times, crossover))
    return Table(("model", "batch", "fastest runtime", "latency", "90 % interval", "crossover batch"), rows)


def runtimes(studied: Studied) -> Table:
    """Latency, interval, speed-up and clocks of each runtime in one table."""
    left, right = latencies(studied.explanation), clocks(studied.explanation)
    rows = [(*one, *other[1:]) for one, other in zip(left.rows, right.rows, strict=True)]
    return Table((*left.heads, *right.heads[1:]), rows)


def points(curves: Sequence[Curve]) -> Table:
    shown = [point for curve in curves for point in curve]
    rows = [(point.runtime, *curve_row(point)) for point in shown]
    return Table(("runtime", *CURVE_HEADS), rows, note=star_note(point.fits for point in shown))


def facts(studied: Studied) -> list[tuple[str, str]]:
    graph, coverage, batch = studied.graph, studied.coverage, studied.explanation.batch
    choice = studied.explanation.eager or studied.explanation.fastest
    known = " in the operations that are known" if coverage.estimated_ops else ""
    covered = f"formulas for {coverage.launches:.0%} of launches and {coverage.bytes:.0%} of bytes"
    return [
        ("parameters", f"{format_count(graph.parameters)} ({format_bytes(graph.parameter_bytes)})"),
        (f"multiply-adds at batch {batch}", format_count(graph.macs(batch)) + known),
        (f"launches in {choice.runtime}", str(choice.launches)),
        (f"peak memory at batch {batch}", format_bytes(choice.prediction.peak_bytes)),
        ("coverage", "formulas for everything it does" if not coverage.estimated_ops else covered),
    ]


def _trust(profile: DeviceProfile, setting: Setting) -> list[tuple[str, str]]:
    """What the predictions rest on, and how far off they were on networks that the fit had not seen."""
    machine, gate = profile.machine, profile.acceptance
    verdict = "passed" if gate.all_passed else "not passed by all that was calibrated"
    return [
        ("profile", f"{profile.name}: {profile.provenance}, {profile.created[:10]} ({age(profile.created)})"),
        ("device", machine.accelerator or machine.cpu),
        ("host", machine.cpu if machine.accelerator else f"the same, {machine.threads} thread(s)"),
        ("software", ", ".join(f"{name} {version}" for name, version in machine.stack.items()) or "not recorded"),
        ("latency means", f"{setting.protocol}, inputs on the {setting.inputs_on}"),
        *((f"error in {name}", _left_out(fit.spread)) for name, fit in profile.runtimes.items() if fit.spread),
        ("acceptance gate", verdict if gate.checks else "nothing was held out: there is no error to report"),
    ]


def _left_out(spread: float) -> str:
    return f"9 in 10 whole networks that the fit left out were within a factor of {math.exp(Z90 * spread):.2f}"


@dataclass(frozen=True, slots=True)
class Studied:
    """One model, predicted in every way that a report shows."""

    explanation: Explanation  # the runtimes side by side at the smallest batch
    curves: tuple[Curve, ...]  # of each of them, the runtime that is advised first
    forward: ForwardPass  # of eager, or of the fastest runtime where eager is not known
    graph: ModelGraph = field(repr=False)  # what that runtime runs
    profile: DeviceProfile = field(repr=False)

    @property
    def name(self) -> str:
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
    progress: Callable[[str], None] | None = None,
    **asked: Any,
) -> Studied:
    """Predict everything that a report says of a model; `asked` and errors are those of `latpred.explain`.

    `batches` are those of the curves; the runtimes are compared at the smallest of them.
    """
    found = explain(model, min(batches), runtimes=runtimes, progress=progress, **asked)
    advised_first = sorted(found.choices, key=lambda choice: choice is not recommended(found))
    curves = tuple(predict(model, batches, choice.runtime, **asked) for choice in advised_first)
    chosen = (found.eager or found.fastest).runtime
    predictor = predictor_of(record_of(DeviceQuery, asked))
    graph = predictor.trace(model, replace(record_of(Options, asked), runtime=chosen), batches)
    if isinstance(model, ModelGraph):
        graph = lowering.fitting(graph, chosen, predictor.target)
    return Studied(found, curves, forward_pass(predictor, graph, found.batch, runtime=chosen), graph, predictor.given)
