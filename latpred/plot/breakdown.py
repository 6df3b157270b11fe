"""Runtimes side by side, and where the time goes in each: bars, the second stacked by class of ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from latpred.plot import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    from latpred.explanation.explanation import Explanation
    from latpred.prediction.prediction import Prediction
    from latpred.prediction.timeline import ForwardPass, Span

SHOWN = 7  # classes of ops with a colour of their own; what is left is one more
OTHERS = "other"
_ROW_IN, _FRAME_IN = 0.2, 1.1


@style.drawn
def runtimes(predictions: Sequence[Prediction], ax: Axes | None = None) -> Axes:
    """Latency of one model in each runtime with its 90 % interval, the first at the top.

    Raises
    ------
    MissingPackageError
        When matplotlib is not installed.
    """
    ax = style.axes(ax, _FRAME_IN + _ROW_IN * len(predictions))
    rows = np.arange(len(predictions))
    latency = np.array([point.latency_ms for point in predictions])
    ends = np.array([point.interval_ms for point in predictions])
    overhead = np.array([point.overhead_ms for point in predictions])
    ax.barh(rows, latency, height=0.62, color=style.SKY, edgecolor=style.BLACK, linewidth=0.5, label="latency")
    ax.barh(
        rows, np.minimum(overhead, latency), height=0.62, facecolor="none", edgecolor=style.BLACK, hatch="////",
        linewidth=0.5, label="of it the host dispatches",
    )  # fmt: skip
    away = np.abs(ends.T - latency)
    ax.errorbar(
        latency, rows, xerr=away, fmt="none", ecolor=style.BLACK, elinewidth=0.9, capsize=2, label="90 % interval"
    )
    _rows(ax, [point.runtime for point in predictions])
    ax.set_xlabel("latency (ms)")
    ax.set_xlim(0, float(ends.max()) * 1.03 or 1.0)
    first = predictions[0]
    ax.set_title(f"{first.model}, batch {first.batch}, {first.precision} on {first.device}")
    style.legend_below(ax, 0.38, columns=2)
    return ax


@style.drawn
def shares(predictions: Sequence[Prediction], ax: Axes | None = None) -> Axes:
    """Host and device time of each prediction, stacked by class of ops, the largest classes first.

    Raises
    ------
    MissingPackageError
        When matplotlib is not installed.
    """
    ax = style.axes(ax, _FRAME_IN + 2 * _ROW_IN * len(predictions))
    names = largest(predictions)
    look = style.looks(names)
    rows = np.arange(2 * len(predictions))
    left = np.zeros(len(rows))
    for name in names:
        width = np.array([time for point in predictions for time in times(point, name, names)])
        ax.barh(
            rows, width, left=left, height=0.72, color=look[name].colour, hatch=look[name].hatch,
            edgecolor=style.BLACK, linewidth=0.4, label=name,
        )  # fmt: skip
        left += width
    several = len({point.runtime for point in predictions}) > 1
    labels = [
        f"{point.runtime if several else f'batch {point.batch}'} {clock}"
        for point in predictions
        for clock in ("host", "device")
    ]
    _rows(ax, labels)
    ax.set_xlabel("time (ms)")
    first = predictions[0]
    ax.set_title(f"{first.model}, {first.precision} on {first.device}")
    style.legend_below(ax, 0.38, columns=3)
    return ax


@style.drawn
def explanation(found: Explanation, into: Figure | None = None) -> Figure:
    """Both figures of an explanation, one above the other."""
    points = [choice.prediction for choice in found.choices]
    heights = (_FRAME_IN + _ROW_IN * len(points), _FRAME_IN + 2 * _ROW_IN * len(points))
    into = into or style.figure(style.COLUMN_IN, sum(heights))
    above, below = into.subplots(2, 1, height_ratios=heights)
    runtimes(points, above)
    shares(points, below)
    below.set_title("where the time goes")
    return into


def largest(predictions: Sequence[Prediction]) -> list[str]:
    """Classes of ops that take most over all predictions, `OTHERS` last where there are more than have a colour."""
    total: dict[str, float] = {}
    for point in predictions:
        for share in point.breakdown:
            part = (share.host_ms + share.device_ms) / (point.latency_ms or 1.0)
            total[share.name] = total.get(share.name, 0.0) + part
    names = sorted((name for name in total if total[name] > 0), key=lambda name: -total[name])
    return names if len(names) <= SHOWN + 1 else [*names[:SHOWN], OTHERS]


def times(point: Prediction, name: str, names: Sequence[str]) -> tuple[float, float]:
    """Milliseconds of host and of device in one class, or in all that are not among `names`."""
    same = [
        share for share in point.breakdown if share.name == name or (name == OTHERS and share.name not in names[:-1])
    ]
    return sum(share.host_ms for share in same), sum(share.device_ms for share in same)


def _rows(ax: Axes, names: Sequence[str]) -> None:
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.tick_params(axis="y", length=0)


ROWS = {"host": 1.0, "device": 0.0}
KINDS = 7  # classes with a colour of their own
CLOSE = 36  # kernels in the part that is looked at closely
_HEIGHT = 0.62
_WAIT = "synchronise"
_OTHER, _WAITING = "white", "#dddddd"


@style.drawn
def timeline(found: ForwardPass, ax: Axes | None = None, *, start_ms: float = 0.0, end_ms: float | None = None) -> Axes:
    """Spans of host and device between two times; what is white in the device's row is idle.

    Raises
    ------
    MissingPackageError
        When matplotlib is not installed.
    """
    ax = style.axes(ax, 1.5)
    end_ms = found.prediction.latency_ms if end_ms is None else end_ms
    shown = [span for span in found.spans if span.end_us > start_ms * 1e3 and span.start_us < end_ms * 1e3]
    look = style.looks(kinds(found))
    for kind, style_of in look.items():
        for row, height in ROWS.items():
            spans = [(s.start_us / 1e3, (s.end_us - s.start_us) / 1e3) for s in shown if (s.row, s.kind) == (row, kind)]
            ax.broken_barh(
                spans, (height - _HEIGHT / 2, _HEIGHT), facecolor=style_of.colour, edgecolor=style.BLACK,
                linewidth=0.25 if len(shown) < 200 else 0.0, hatch=style_of.hatch if len(shown) < 200 else "",
            )  # fmt: skip
    _rest(ax, shown, look)
    ax.set_yticks(list(ROWS.values()), list(ROWS))
    ax.set(xlim=(start_ms, end_ms), ylim=(-0.55, 1.55), xlabel="time since the call (ms)")
    ax.tick_params(axis="y", length=0)
    return ax


@style.drawn
def two_clocks(found: ForwardPass, into: Figure | None = None) -> Figure:
    """The whole forward pass, and below it a part from its middle with an arrow from each step to its kernel.

    Raises
    ------
    MissingPackageError
        When matplotlib is not installed.
    """
    into = into or style.figure(style.COLUMN_IN, 2.9)
    above, below = into.subplots(2, 1)
    point = found.prediction
    timeline(found, above)
    busy = f"host {point.overhead_ms:.3g} ms, device {point.compute_ms:.3g} ms of {point.latency_ms:.3g} ms"
    above.set_title(f"{point.model}, batch {point.batch}, {point.precision}, {point.runtime} on {point.device}\n{busy}")
    above.set_xlabel("")
    start, end = middle(found)
    above.axvspan(start, end, facecolor="none", edgecolor=style.BLACK, linewidth=0.9, zorder=5)
    timeline(found, below, start_ms=start, end_ms=end)
    _arrows(below, found, start, end)
    into.legend(handles=_patches(found), loc="outside lower center", ncols=4, columnspacing=1.0, handlelength=1.6)
    return into


def kinds(found: ForwardPass) -> list[str]:
    """Classes of ops that take most time, the first of them with the plainest look."""
    total: dict[str, float] = {}
    for span in found.spans:
        if span.kind != _WAIT:
            total[span.kind] = total.get(span.kind, 0.0) + span.end_us - span.start_us
    return sorted(total, key=lambda kind: -total[kind])[:KINDS]


def middle(found: ForwardPass) -> tuple[float, float]:
    """Milliseconds of a part in the middle that holds a few dozen kernels, all of a short one."""
    kernels = found.row("device")
    if len(kernels) <= CLOSE:
        return 0.0, found.prediction.latency_ms
    first = (len(kernels) - CLOSE) // 2
    launch = {span.step: span.start_us for span in found.row("host") if span.kind != _WAIT}
    return launch[kernels[first].step] / 1e3, kernels[first + CLOSE - 1].end_us / 1e3


def _rest(ax: Axes, shown: list[Span], look: dict[str, style.Look]) -> None:
    """Classes without a colour, and waiting."""
    for colour, spans in (
        (_OTHER, [span for span in shown if span.kind not in look and span.kind != _WAIT]),
        (_WAITING, [span for span in shown if span.kind == _WAIT]),
    ):
        for row, height in ROWS.items():
            ax.broken_barh(
                [(s.start_us / 1e3, (s.end_us - s.start_us) / 1e3) for s in spans if s.row == row],
                (height - _HEIGHT / 2, _HEIGHT), facecolor=colour, edgecolor=style.GREY, linewidth=0.4,
            )  # fmt: skip


def _patches(found: ForwardPass) -> list[Patch]:
    """For the legend: every class that occurs, whether in the close-up or not."""
    from matplotlib.patches import Patch

    line: dict[str, Any] = {"edgecolor": style.BLACK, "linewidth": 0.4}
    look = style.looks(kinds(found))
    made = [Patch(facecolor=one.colour, hatch=one.hatch, label=kind, **line) for kind, one in look.items()]
    present = {span.kind for span in found.spans}
    made += [Patch(facecolor=_OTHER, label="other", **line)] * bool(present - {*look, _WAIT})
    return made + [Patch(facecolor=_WAITING, label="waiting", **line)] * (_WAIT in present)


def _arrows(ax: Axes, found: ForwardPass, start_ms: float, end_ms: float) -> None:
    ends = {span.step: span.end_us for span in found.row("host") if span.kind != _WAIT}
    kernels = [k for k in found.row("device") if start_ms <= k.start_us / 1e3 <= end_ms]
    x = np.array([[ends[k.step] / 1e3, k.start_us / 1e3] for k in kernels]).reshape(-1, 2)
    bottom, top = ROWS["host"] - _HEIGHT / 2, ROWS["device"] + _HEIGHT / 2
    ax.plot(x.T, np.tile([[bottom], [top]], len(x)), color=style.GREY, linewidth=0.5)
