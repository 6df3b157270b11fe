"""Where the time goes: runtimes side by side, classes of ops in each, and host and device in one forward pass."""

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
    from latpred.prediction.timeline import ForwardPass

SHOWN = 7  # classes of ops with a colour of their own; what is left is one more
OTHERS = "all others"  # "other" is a class itself
CLOSE = 36  # kernels in the part of a forward pass that is looked at closely
_ROW_IN, _FRAME_IN = 0.2, 1.1
_CLOCKS = {"host": 1.0, "device": 0.0}  # where the middle of each row is
_HEIGHT = 0.62
_WAIT = "synchronise"
_OTHER, _WAITING = style.Look("white", ""), style.Look("#dddddd", "")


@style.in_style()
def runtimes(predictions: Sequence[Prediction], ax: Axes | None = None) -> Axes:
    """Latency of one model in each runtime with its 90 % interval, the first at the top."""
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
    ax.set_title(_title(predictions[0], f", batch {predictions[0].batch}"))
    style.legend_below(ax)
    return ax


@style.in_style()
def shares(predictions: Sequence[Prediction], ax: Axes | None = None) -> Axes:
    """Host and device time of each prediction, stacked by class of ops, the largest classes first."""
    ax = style.axes(ax, _FRAME_IN + 2 * _ROW_IN * len(predictions))
    classes = largest(predictions)
    look = style.looks(classes)
    rows = np.arange(2 * len(predictions))
    left = np.zeros(len(rows))
    for name in classes:
        width = np.array([time for point in predictions for time in times(point, name, classes)])
        ax.barh(
            rows, width, left=left, height=0.72, color=look[name].colour, hatch=look[name].hatch,
            edgecolor=style.BLACK, linewidth=0.4, label=name,
        )  # fmt: skip
        left += width
    several = len({point.runtime for point in predictions}) > 1
    names = [point.runtime if several else f"batch {point.batch}" for point in predictions]
    _rows(ax, [f"{name} {clock}" for name in names for clock in ("host", "device")])
    ax.set_xlabel("time (ms)")
    ax.set_title(_title(predictions[0]))
    style.legend_below(ax, columns=3)
    return ax


@style.in_style()
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
            part = (share.overhead_ms + share.compute_ms) / (point.latency_ms or 1.0)
            total[share.name] = total.get(share.name, 0.0) + part
    names = sorted((name for name in total if total[name] > 0), key=lambda name: -total[name])
    return names if len(names) <= SHOWN + 1 else [*names[:SHOWN], OTHERS]


def times(point: Prediction, name: str, names: Sequence[str]) -> tuple[float, float]:
    """Milliseconds of host and of device in one class, or in all that are not among `names`."""
    same = [
        share for share in point.breakdown if share.name == name or (name == OTHERS and share.name not in names[:-1])
    ]
    return sum(share.overhead_ms for share in same), sum(share.compute_ms for share in same)


def _title(point: Prediction, batch: str = "") -> str:
    """What was asked of several runtimes; a line below has what is not usual of it."""
    precision, *unusual = point.setting.setup
    unusual += [] if point.protocol == "single" else [point.protocol]
    usual = f"{point.model}{batch}, {precision} on {point.device}"
    return "\n".join(filter(None, (usual, ", ".join(unusual))))


def _rows(ax: Axes, names: Sequence[str]) -> None:
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.tick_params(axis="y", length=0)


@style.in_style()
def timeline(found: ForwardPass, ax: Axes | None = None, *, start_ms: float = 0.0, end_ms: float | None = None) -> Axes:
    """Spans of host and device between two times; what is white in the device's row is idle."""
    ax = style.axes(ax, 1.5)
    end_ms = found.prediction.latency_ms if end_ms is None else end_ms
    shown = [span for span in found.spans if span.end_us > start_ms * 1e3 and span.start_us < end_ms * 1e3]
    few = len(shown) < 200  # outlines and hatches of more would hide them
    for kind, look in _forward_looks(found).items():
        for row, height in _CLOCKS.items():
            spans = [(s.start_us / 1e3, (s.end_us - s.start_us) / 1e3) for s in shown if (s.row, s.kind) == (row, kind)]
            ax.broken_barh(
                spans, (height - _HEIGHT / 2, _HEIGHT), facecolor=look.colour, edgecolor=style.BLACK,
                linewidth=0.25 if few or look in (_OTHER, _WAITING) else 0.0, hatch=look.hatch if few else "",
            )  # fmt: skip
    ax.set_yticks(list(_CLOCKS.values()), list(_CLOCKS))
    ax.set(xlim=(start_ms, end_ms), ylim=(-0.55, 1.55), xlabel="time since the call (ms)")
    ax.tick_params(axis="y", length=0)
    return ax


@style.in_style()
def two_clocks(found: ForwardPass, into: Figure | None = None) -> Figure:
    """The whole forward pass, and below it a part from its middle with an arrow from each step to its kernel."""
    into = into or style.figure(style.COLUMN_IN, 2.9)
    above, below = into.subplots(2, 1)
    point = found.prediction
    timeline(found, above)
    setup = ", ".join(point.setting.setup)
    busy = f"host {point.overhead_ms:.3g} ms, device {point.compute_ms:.3g} ms of {point.latency_ms:.3g} ms"
    above.set_title(f"{point.model}, batch {point.batch}, {setup}, {point.runtime} on {point.device}\n{busy}")
    above.set_xlabel("")
    start, end = _middle(found)
    above.axvspan(start, end, facecolor="none", edgecolor=style.BLACK, linewidth=0.9, zorder=5)
    timeline(found, below, start_ms=start, end_ms=end)
    _arrows(below, found, start, end)
    into.legend(handles=_patches(found), loc="outside lower center", ncols=4, columnspacing=1.0, handlelength=1.6)
    return into


def _middle(found: ForwardPass) -> tuple[float, float]:
    """Milliseconds of a part in the middle that holds a few dozen kernels, all of a short one."""
    kernels = found.row("device")
    if len(kernels) <= CLOSE:
        return 0.0, found.prediction.latency_ms
    first = (len(kernels) - CLOSE) // 2
    launch = {span.step: span.start_us for span in found.row("host") if span.kind != _WAIT}
    return launch[kernels[first].step] / 1e3, kernels[first + CLOSE - 1].end_us / 1e3


def _forward_looks(forward: ForwardPass) -> dict[str, style.Look]:
    """A look for every class of ops in a forward pass, the plainest for what takes most; without a colour is white."""
    total: dict[str, float] = {}
    for span in forward.spans:
        total[span.kind] = total.get(span.kind, 0.0) + span.end_us - span.start_us
    largest_first = sorted(total, key=lambda kind: -total[kind])
    looks = style.looks([kind for kind in largest_first if kind != _WAIT][:SHOWN])
    return looks | {kind: _WAITING if kind == _WAIT else _OTHER for kind in total if kind not in looks}


def _patches(forward: ForwardPass) -> list[Patch]:
    """For the legend: every class that occurs, whether in the close-up or not."""
    from matplotlib.patches import Patch

    names = {_OTHER: OTHERS, _WAITING: "waiting"}
    looks = {names.get(look, kind): look for kind, look in _forward_looks(forward).items()}
    line: dict[str, Any] = {"edgecolor": style.BLACK, "linewidth": 0.4}
    return [Patch(facecolor=look.colour, hatch=look.hatch, label=name, **line) for name, look in looks.items()]


def _arrows(ax: Axes, found: ForwardPass, start_ms: float, end_ms: float) -> None:
    ends = {span.step: span.end_us for span in found.row("host") if span.kind != _WAIT}
    kernels = [k for k in found.row("device") if start_ms <= k.start_us / 1e3 <= end_ms]
    x = np.array([[ends[k.step] / 1e3, k.start_us / 1e3] for k in kernels]).reshape(-1, 2)
    bottom, top = _CLOCKS["host"] - _HEIGHT / 2, _CLOCKS["device"] + _HEIGHT / 2
    ax.plot(x.T, np.tile([[bottom], [top]], len(x)), color=style.GREY, linewidth=0.5)
