"""Charts of a report as Vega-Lite documents, made with Altair: the same colours and line styles as `latpred.plot`.

They are as wide as the page lets them be. Nothing here predicts; what is drawn stands in tables beside them too.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import altair as alt
import numpy as np

from latpred.plot import breakdown, style
from latpred.plot.curves import crossover_shown, least_shown, regions, span_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from latpred.prediction.prediction import Curve, Prediction
    from latpred.prediction.timeline import ForwardPass

Spec = dict[str, Any]

SERIES = {"latency": style.LATENCY, "overhead": style.OVERHEAD, "compute": style.COMPUTE}  # by the field of a point
_LINE = 2  # width of a line, in pixels
_MS = ("latency", "low", "high", "overhead", "compute")
_FONT = "system-ui, sans-serif"
_LEGEND: Spec = {"orient": "bottom", "columns": 3, "labelLimit": 220, "symbolStrokeWidth": _LINE}


def curve(curves: Sequence[Curve]) -> Spec:
    """Latency against batch of the runtime that the reader chooses; the others stay as thin grey lines."""
    names = [curve.setting.runtime for curve in curves]
    chosen = alt.param(name="runtime", value=names[0], bind=alt.binding_select(options=names, name="Runtime shown: "))
    alone = len(names) == 1
    shown = alt.datum.runtime == (names[0] if alone else chosen)
    batch, ms = _batch_axis(curves), functools.partial(_latency_axis, curves)
    layers = [
        *_shading(shown),
        _crossover(shown),
        alt.Chart(alt.NamedData("points"))
        .mark_line(color="#999999", strokeWidth=1)
        .encode(x=batch, y=ms("latency"), detail="runtime:N"),
        alt.Chart(alt.NamedData("points"))
        .transform_filter(shown)
        .mark_area(color=style.BLUE, opacity=0.2)
        .encode(x=batch, y=ms("low"), y2="high:Q"),
        *_lines(shown, batch, ms),
    ]
    chart = alt.layer(*layers)
    rows = {"points": _all_points(curves), "clocks": _clocks(curves), **_bounds(curves)}
    return _document(chart if alone else chart.add_params(chosen), 330, rows)


def runtimes(predictions: Sequence[Prediction]) -> Spec:
    """Latency with its interval, one bar for each runtime."""
    rows = [_row(point) for point in predictions]
    order = [point.runtime for point in predictions]
    base = alt.Chart(alt.NamedData("rows")).encode(y=alt.Y("runtime:N", sort=order, title=None))
    hover = [alt.Tooltip("runtime:N"), *map(_hint, _MS)]
    shown = base.mark_bar(color=style.SKY, stroke=style.BLACK, strokeWidth=0.5).encode(
        x=alt.X("latency:Q", title="latency (ms)", axis=alt.Axis(tickCount=8)), tooltip=hover
    )
    spans = base.mark_rule(strokeWidth=1.5).encode(x="low:Q", x2="high:Q", tooltip=hover)
    return _document(alt.layer(shown, spans), 40 + 28 * len(rows), {"rows": rows})


def shares(predictions: Sequence[Prediction]) -> Spec:
    """Host and device time of each runtime, stacked by class of ops."""
    names = breakdown.largest(predictions)
    rows = [
        {"row": f"{point.runtime} {clock}", "ops": name, "ms": ms, "order": index}
        for point in predictions
        for index, name in enumerate(names)
        for clock, ms in zip(("host", "device"), breakdown.times(point, name, names), strict=True)
    ]
    order = list(dict.fromkeys(str(row["row"]) for row in rows))
    chart = (
        alt.Chart(alt.NamedData("rows"))
        .mark_bar(stroke="white", strokeWidth=0.8)
        .encode(
            x=alt.X("ms:Q", title="time (ms)", axis=alt.Axis(tickCount=6)),
            y=alt.Y("row:N", sort=order, title=None),
            color=_colours("ops", names, columns=2),
            order="order:Q",
            tooltip=[alt.Tooltip("row:N", title="clock"), alt.Tooltip("ops:N"), _hint("ms", "milliseconds")],
        )
    )
    return _document(chart, 60 + 22 * len(order), {"rows": rows})


def two_clocks(forward: ForwardPass) -> Spec:
    """A few dozen kernels from the middle of a forward pass, and the host steps around them."""
    start, end = breakdown.middle(forward)
    names = breakdown.kinds(forward)
    rows = [
        {
            "row": span.row,
            "name": span.name,
            "module": span.module or "-",
            "ops": span.kind if span.kind in names else breakdown.OTHERS,
            "start": max(span.start_us / 1e3, start),
            "end": min(span.end_us / 1e3, end),
            "us": span.end_us - span.start_us,
        }
        for span in breakdown.spans_between(forward, start, end)
    ]
    hover = [alt.Tooltip("name:N"), alt.Tooltip("module:N"), alt.Tooltip("us:Q", format=".1f", title="microseconds")]
    chart = (
        alt.Chart(alt.NamedData("rows"))
        .mark_bar(stroke=style.BLACK, strokeWidth=0.3, height={"band": 0.8})
        .encode(
            x=alt.X("start:Q", title="time since the call (ms)", scale=alt.Scale(domain=[start, end], nice=False)),
            x2="end:Q",
            y=alt.Y("row:N", sort=["host", "device"], title=None),
            color=_colours("ops", [*names, breakdown.OTHERS]),
            tooltip=hover,
        )
    )
    return _document(chart, 150, {"rows": rows})


def _all_points(curves: Sequence[Curve]) -> list[Spec]:
    return [_row(point) for curve in curves for point in sorted(curve, key=lambda point: point.batch)]


def _clocks(curves: Sequence[Curve]) -> list[Spec]:
    """Latency, overhead and compute as series of their own, as far as the axis goes down."""
    least = least_shown(curves)
    return [
        {**row, "series": series.label, "ms": row[name]}
        for row in _all_points(curves)
        for name, series in SERIES.items()
        if row[name] >= least
    ]


def _bounds(curves: Sequence[Curve]) -> dict[str, list[Spec]]:
    """Regimes and crossovers within the batches that are shown."""
    regimes: list[Spec] = []
    marks: list[Spec] = []
    for curve in curves:
        runtime, span = curve.setting.runtime, span_of(curve.batches)
        for regime, low, high in regions(curve, span):
            tint = style.REGIONS[regime]
            regimes.append({"runtime": runtime, "regime": regime, "from": low, "to": high, "tint": tint})
        crossover = crossover_shown(curve, span)
        if crossover is not None:
            batch, low, high = crossover
            marks.append({"runtime": runtime, "crossover": batch, "low": low, "high": high})
    return {"regions": regimes, "marks": marks}


def _row(point: Prediction) -> Spec:
    low, high = point.interval_ms
    return {
        "runtime": point.runtime,
        "batch": point.batch,
        "latency": point.latency_ms,
        "low": low,
        "high": high,
        "overhead": point.overhead_ms,
        "compute": point.compute_ms,
        "rate": point.throughput_per_s,
        "regime": point.regime,
    }


def _lines(shown: Any, batch: alt.X, ms: Callable[[str], alt.Y]) -> list[Any]:
    names = [series.label for series in SERIES.values()]
    dashes = [[_LINE * length for length in series.dashes] or [1, 0] for series in SERIES.values()]
    colour = alt.Scale(domain=names, range=[series.colour for series in SERIES.values()])
    legend = alt.Legend(title=None, symbolType="stroke", symbolSize=500, **{**_LEGEND, "columns": 2})
    base = alt.Chart(alt.NamedData("clocks")).transform_filter(shown).encode(x=batch, y=ms("ms"))
    lines = base.mark_line(strokeWidth=_LINE).encode(
        color=alt.Color("series:N", scale=colour, legend=legend),
        strokeDash=alt.StrokeDash("series:N", scale=alt.Scale(domain=names, range=dashes), legend=legend),
    )
    dots = (
        base.transform_filter(alt.datum.series == style.LATENCY.label)
        .mark_point(filled=True, size=60, color=style.LATENCY.colour, opacity=1)
        .encode(
            tooltip=[
                alt.Tooltip("runtime:N"),
                alt.Tooltip("batch:Q"),
                *map(_hint, _MS),
                alt.Tooltip("rate:Q", format=",.0f", title="samples per second"),
                alt.Tooltip("regime:N"),
            ]
        )
    )
    return [lines, dots]


def _shading(shown: Any) -> list[Any]:
    base = alt.Chart(alt.NamedData("regions")).transform_filter(shown)
    tinted = base.mark_rect(opacity=1).encode(x=alt.X("from:Q"), x2="to:Q", color=alt.Color("tint:N", scale=None))
    named = (
        base.transform_calculate(middle="sqrt(datum.from * datum.to)")
        .mark_text(baseline="top", dy=4, color="#444444", fontSize=12)
        .encode(x=alt.X("middle:Q"), y=alt.value(0), text="regime:N")
    )
    return [tinted, named]


def _crossover(shown: Any) -> Any:
    base = alt.Chart(alt.NamedData("marks")).transform_filter(shown)
    hover = [
        alt.Tooltip("crossover:Q"), alt.Tooltip("low:Q", format=".0f", title="from"),
        alt.Tooltip("high:Q", format=".0f", title="to"),
    ]  # fmt: skip
    band = base.mark_rect(color=style.GREY, opacity=0.2).encode(x=alt.X("low:Q"), x2="high:Q", tooltip=hover)
    line = base.mark_rule(color="#555555", strokeDash=[6, 2, 1, 2], strokeWidth=1.5).encode(
        x=alt.X("crossover:Q"), tooltip=hover
    )
    return alt.layer(band, line)


def _batch_axis(curves: Sequence[Curve]) -> alt.X:
    first, last = span_of(np.concatenate([curve.batches for curve in curves]))
    scale = alt.Scale(type="log", base=2, domain=[first, last], nice=False)
    return alt.X("batch:Q", title="batch size", scale=scale, axis=alt.Axis(format="d", grid=False, tickCount=8))


def _latency_axis(curves: Sequence[Curve], name: str) -> alt.Y:
    """The same axis for all that is drawn, with room for the regimes' names at the top."""
    points = [point for curve in curves for point in curve]
    drawn = [ms for point in points for ms in (*point.interval_ms, point.overhead_ms, point.compute_ms)]
    bottom = least_shown(curves)
    scale = alt.Scale(type="log", domain=[min(ms for ms in drawn if ms >= bottom) / 1.2, max(drawn) * 2], nice=False)
    return alt.Y(f"{name}:Q", title="latency (ms)", scale=scale, axis=alt.Axis(format=",~g", tickCount=5))


def _hint(name: str, title: str | None = None) -> alt.Tooltip:
    return alt.Tooltip(f"{name}:Q", format=",.3~g", title=title or f"{name} (ms)")


def _colours(name: str, names: Sequence[str], columns: int = 3) -> alt.Color:
    scale = alt.Scale(domain=list(names), range=[look.colour for look in style.looks(names).values()])
    return alt.Color(f"{name}:N", scale=scale, legend=alt.Legend(title=None, **{**_LEGEND, "columns": columns}))


def _document(chart: Any, height: int, rows: dict[str, list[Spec]]) -> Spec:
    """As wide as its container. Its marks are hidden from screen readers, who have the caption and the table."""
    whole = (
        chart.properties(width="container", height=height, background="white")
        .configure(font=_FONT, aria=False, autosize={"type": "fit-x", "contains": "padding"})
        .configure_axis(labelFontSize=12, titleFontSize=12, titleFontWeight="normal", labelLimit=200)
        .configure_legend(labelFontSize=12)
        .configure_view(stroke=None)
    )
    # What is wrong with a document shows in the browser's tests; checking it here takes a third of the time.
    spec: Spec = whole.to_dict(validate=False)
    return {**spec, "datasets": rows}
