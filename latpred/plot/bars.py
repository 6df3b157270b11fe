"""Runtimes side by side, and where the time goes in each: bars, the second stacked by class of ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from latpred.plot import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from latpred.explanation import Explanation
    from latpred.prediction import Prediction

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
