"""Charts of a report as Vega-Lite documents, made with Altair: the same colours and line styles as `latpred.plot`.

They are as wide as the page lets them be. Nothing here predicts; what is drawn stands in tables beside them too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from latpred.plot import breakdown, style
from latpred.plot import curves as shapes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import altair as alt

    from latpred.prediction.prediction import Curve, Prediction
    from latpred.prediction.timeline import ForwardPass

Spec = dict[str, Any]

LATENCY, OVERHEAD, COMPUTE = "latency", "overhead (host)", "compute (device)"
SERIES = {LATENCY: (style.BLUE, [1, 0]), OVERHEAD: (style.VERMILION, [8, 4]), COMPUTE: (style.BLACK, [2, 3])}
_FONT = "system-ui, sans-serif"
_LEGEND: Spec = {"orient": "bottom", "columns": 3, "labelLimit": 220, "symbolStrokeWidth": 2}


def curve(found: Sequence[Curve]) -> Spec:
    """Latency against batch of the runtime that the reader chooses; the others stay as thin grey lines."""
    import altair as alt

    names = [one.setting.runtime for one in found]
    chosen = alt.param(name="runtime", value=names[0], bind=alt.binding_select(options=names, name="Runtime shown: "))
    one = len(names) == 1
    shown = alt.datum.runtime == (names[0] if one else chosen)
    batch = _batch_axis(found)
    layers = [
        *_shading(shown),
        _crossover(shown),
        alt.Chart(alt.NamedData("points"))
        .mark_line(color="#999999", strokeWidth=1)
        .encode(x=batch, y=_latency("latency", found), detail="runtime:N"),
        alt.Chart(alt.NamedData("points"))
        .transform_filter(shown)
        .mark_area(color=style.BLUE, opacity=0.2)
        .encode(x=batch, y=_latency("low", found), y2="high:Q"),
        *_lines(found, shown, batch),
    ]
    chart = alt.layer(*layers)
    rows = {"points": _all_points(found), "clocks": _clocks(found), "regions": _regions(found), "marks": _marks(found)}
    return _document(chart if one else chart.add_params(chosen), 330, rows)


def runtimes(predictions: Sequence[Prediction]) -> Spec:
    """Latency with its interval, one bar for each runtime."""
    import altair as alt

    rows = [_row(point) for point in predictions]
    order = [point.runtime for point in predictions]
    base = alt.Chart(alt.NamedData("rows")).encode(y=alt.Y("runtime:N", sort=order, title=None))
    hover = [
        alt.Tooltip("runtime:N"),
        _hint("latency"),
        _hint("low"),
        _hint("high"),
        _hint("overhead"),
        _hint("compute"),
    ]
    shown = base.mark_bar(color=style.SKY, stroke=style.BLACK, strokeWidth=0.5).encode(
        x=alt.X("latency:Q", title="latency (ms)", axis=alt.Axis(tickCount=8)), tooltip=hover
    )
    spans = base.mark_rule(strokeWidth=1.5).encode(x="low:Q", x2="high:Q", tooltip=hover)
    return _document(alt.layer(shown, spans), 40 + 28 * len(rows), {"rows": rows})


def shares(predictions: Sequence[Prediction]) -> Spec:
    """Host and device time of each runtime, stacked by class of ops."""
    import altair as alt

    names = breakdown.largest(predictions)
    rows = [
        {"row": f"{point.runtime} {clock}", "ops": name, "ms": ms, "order": index}
        for point in predictions
        for index, name in enumerate(names)
        for clock, ms in zip(("host", "device"), breakdown.times(point, name, names), strict=True)
    ]
    order = [f"{point.runtime} {clock}" for point in predictions for clock in ("host", "device")]
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


def two_clocks(found: ForwardPass) -> Spec:
    """A few dozen kernels from the middle of a forward pass, and the host steps around them."""
    import altair as alt

    start, end = breakdown.middle(found)
    names = breakdown.kinds(found)
    rows = [
        {
            "row": span.row,
            "name": span.name,
            "module": span.module or "-",
            "ops": span.kind if span.kind in names else "other",
            "start": max(span.start_us / 1e3, start),
            "end": min(span.end_us / 1e3, end),
            "us": span.end_us - span.start_us,
        }
        for span in found.spans
        if span.end_us > start * 1e3 and span.start_us < end * 1e3
    ]
    hover = [alt.Tooltip("name:N"), alt.Tooltip("module:N"), alt.Tooltip("us:Q", format=".1f", title="microseconds")]
    chart = (
        alt.Chart(alt.NamedData("rows"))
        .mark_bar(stroke=style.BLACK, strokeWidth=0.3, height={"band": 0.8})
        .encode(
            x=alt.X("start:Q", title="time since the call (ms)", scale=alt.Scale(domain=[start, end], nice=False)),
            x2="end:Q",
            y=alt.Y("row:N", sort=["host", "device"], title=None),
            color=_colours("ops", [*names, "other"]),
            tooltip=hover,
        )
    )
    return _document(chart, 150, {"rows": rows})


def _all_points(found: Sequence[Curve]) -> list[Spec]:
    return [_row(point) for one in found for point in sorted(one, key=lambda point: point.batch)]


def _clocks(found: Sequence[Curve]) -> list[Spec]:
    """Latency, overhead and compute as series of their own, as far as the axis goes down."""
    value = {LATENCY: "latency", OVERHEAD: "overhead", COMPUTE: "compute"}
    least = shapes.least_shown(found)
    return [
        {**row, "series": name, "ms": row[value[name]]}
        for row in _all_points(found)
        for name in SERIES
        if row[value[name]] >= least
    ]


def _regions(found: Sequence[Curve]) -> list[Spec]:
    return [
        {"runtime": one.setting.runtime, "regime": region.regime, "from": region.low, "to": region.high, "tint": tint}
        for one in found
        for region in shapes.regions(one, shapes.span_of(one.batches))
        for tint in [style.REGIONS[region.regime]]
    ]


def _marks(found: Sequence[Curve]) -> list[Spec]:
    """Crossovers within the batches that are shown."""
    rows = []
    for one in found:
        batch, low, high = one.crossover
        first, last = shapes.span_of(one.batches)
        if batch is not None and first < batch <= last and batch > 1:
            ends = {"low": max(low or 1, first), "high": min(high or last, last)}
            rows.append({"runtime": one.setting.runtime, "crossover": batch, **ends})
    return rows


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


def _lines(found: Sequence[Curve], shown: Any, batch: alt.X) -> list[Any]:
    import altair as alt

    names = list(SERIES)
    colours = alt.Scale(domain=names, range=[SERIES[name][0] for name in names])
    dashes = alt.Scale(domain=names, range=[SERIES[name][1] for name in names])
    legend = alt.Legend(title=None, symbolType="stroke", symbolSize=500, **{**_LEGEND, "columns": 2})
    base = alt.Chart(alt.NamedData("clocks")).transform_filter(shown).encode(x=batch, y=_latency("ms", found))
    lines = base.mark_line(strokeWidth=2).encode(
        color=alt.Color("series:N", scale=colours, legend=legend),
        strokeDash=alt.StrokeDash("series:N", scale=dashes, legend=legend),
    )
    dots = (
        base.transform_filter(alt.datum.series == LATENCY)
        .mark_point(filled=True, size=60, color=style.BLUE, opacity=1)
        .encode(
            tooltip=[
                alt.Tooltip("runtime:N"),
                alt.Tooltip("batch:Q"),
                *(_hint(name) for name in ("latency", "low", "high", "overhead", "compute")),
                alt.Tooltip("rate:Q", format=",.0f", title="samples per second"),
                alt.Tooltip("regime:N"),
            ]
        )
    )
    return [lines, dots]


def _shading(shown: Any) -> list[Any]:
    import altair as alt

    base = alt.Chart(alt.NamedData("regions")).transform_filter(shown)
    tinted = base.mark_rect(opacity=1).encode(x=alt.X("from:Q"), x2="to:Q", color=alt.Color("tint:N", scale=None))
    named = (
        base.transform_calculate(middle="sqrt(datum.from * datum.to)")
        .mark_text(baseline="top", dy=4, color="#444444", fontSize=12)
        .encode(x=alt.X("middle:Q"), y=alt.value(0), text="regime:N")
    )
    return [tinted, named]


def _crossover(shown: Any) -> Any:
    import altair as alt

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


def _batch_axis(found: Sequence[Curve]) -> alt.X:
    import altair as alt
    import numpy as np

    first, last = shapes.span_of(np.concatenate([one.batches for one in found]))
    scale = alt.Scale(type="log", base=2, domain=[first, last], nice=False)
    return alt.X("batch:Q", title="batch size", scale=scale, axis=alt.Axis(format="d", grid=False, tickCount=8))


def _latency(name: str, found: Sequence[Curve]) -> alt.Y:
    """The same axis for all that is drawn, with room for the regimes' names at the top."""
    import altair as alt

    drawn = [ms for one in found for point in one for ms in (*point.interval_ms, point.overhead_ms, point.compute_ms)]
    bottom = shapes.least_shown(found)
    scale = alt.Scale(type="log", domain=[min(ms for ms in drawn if ms >= bottom) / 1.2, max(drawn) * 2], nice=False)
    return alt.Y(f"{name}:Q", title="latency (ms)", scale=scale, axis=alt.Axis(format=",~g", tickCount=5))


def _hint(name: str, title: str | None = None) -> alt.Tooltip:
    import altair as alt

    return alt.Tooltip(f"{name}:Q", format=",.3~g", title=title or f"{name} (ms)")


def _colours(name: str, names: Sequence[str], columns: int = 3) -> alt.Color:
    import altair as alt

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
    found: Spec = whole.to_dict(validate=False)
    return {**found, "datasets": rows}
