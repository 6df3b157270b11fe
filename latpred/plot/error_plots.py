"""How good predictions are: predicted against measured, and their errors by batch and by model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from latpred.plot import style

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from latpred.accuracy.accuracy_report import Report

NEAR = 0.10  # the band that is drawn
_SEVERAL = 8  # groups that a legend can hold


@style.drawn
def agreement(report: Report, ax: Axes | None = None, *, by: str = "runtime") -> Axes:
    """Predicted against measured latency of every cell, with the line of no error and a band of 10 % around it.

    `by` is the column of the cells that sets the marker, where it has from two to eight values.
    """
    ax = style.axes(ax, 2.9)
    cells = report.cells
    measured, predicted = cells["latency_s_measured"] * 1e3, cells["latency_s_predicted"] * 1e3
    ends = np.array([min(measured.min(), predicted.min()) / 1.25, max(measured.max(), predicted.max()) * 1.25])
    ax.fill_between(
        ends, ends * (1 - NEAR), ends * (1 + NEAR), color=style.GREY, alpha=0.28, linewidth=0, label="within 10 %"
    )
    ax.plot(ends, ends, color=style.BLACK, linewidth=0.8, label="no error")
    for index, (name, group) in enumerate(_groups(cells, by)):
        colour, marker = style.LINES[index % len(style.LINES)], style.MARKERS[index % len(style.MARKERS)]
        ax.plot(
            measured[group.index], predicted[group.index], marker, color=colour, mfc="none", mew=0.8, linestyle="",
            label=name,
        )  # fmt: skip
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    ax.set(xlabel="measured (ms)", ylabel="predicted (ms)")
    style.plain_ticks(ax.xaxis, ax.get_xlim())
    style.plain_ticks(ax.yaxis, ax.get_ylim())
    whole = report.overall
    ax.set_title(
        f"{whole.cells} cells of {whole.models} models: median error {whole.median:.1%},\n"
        f"{whole.near:.0%} within 10 % (repeat noise {report.noise.median:.1%})"
    )
    ax.legend(loc="upper left")
    return ax


@style.drawn
def errors_by_batch(report: Report, ax: Axes | None = None) -> Axes:
    """Signed error at each batch size: the median, the middle half, and from the 5th to the 95th percentile."""
    ax = style.axes(ax, 1.9)
    groups = {str(batch): group["error"] for batch, group in report.cells.groupby("batch", sort=True)}
    _boxes(ax, groups, upright=True)
    ax.set(xlabel="batch size", ylabel="error (%), + is too high")
    return ax


@style.drawn
def errors_by_model(report: Report, ax: Axes | None = None) -> Axes:
    """Signed error of each model, the worst at the top."""
    ax = style.axes(ax, 0.5 + 0.16 * len(report.by_model))
    worst = sorted(report.by_model, key=lambda name: report.by_model[name].median)
    by_model = dict(list(report.cells.groupby("model")))
    _boxes(ax, {name: by_model[name]["error"] for name in worst}, upright=False)
    ax.set_xlabel("error (%), + is too high")
    return ax


@style.drawn
def validation(report: Report, into: Figure | None = None) -> Figure:
    """All three figures of a report on a page's width, or in `into`."""
    height = max(3.0, 0.9 + 0.16 * len(report.by_model) + 1.5)
    into = into or style.figure(style.PAGE_IN, height)
    left, right = into.subfigures(1, 2, width_ratios=(1, 1))  # type: ignore[misc]
    agreement(report, left.subplots())
    above, below = right.subplots(2, 1, height_ratios=(1.2, 0.5 + 0.16 * len(report.by_model)))
    errors_by_batch(report, above)
    errors_by_model(report, below)
    return into


def _groups(cells: pd.DataFrame, by: str) -> list[tuple[str, pd.DataFrame]]:
    if by in cells and 1 < cells[by].nunique() <= _SEVERAL:
        return [(str(name), group) for name, group in cells.groupby(by, sort=False)]
    return [("cell", cells)]


def _boxes(ax: Axes, groups: dict[str, Any], *, upright: bool) -> None:
    """Boxes without outliers beyond their whiskers' percentiles; the band of 10 % behind them."""
    span = ax.axhspan if upright else ax.axvspan
    line = ax.axhline if upright else ax.axvline
    span(-100 * NEAR, 100 * NEAR, color=style.GREY, alpha=0.28, linewidth=0)
    line(0.0, color=style.BLACK, linewidth=0.8)
    look = {"linewidth": 0.7, "color": style.BLACK}
    ax.boxplot(
        [100 * np.asarray(errors) for errors in groups.values()],
        whis=(5, 95),
        showfliers=False,
        widths=0.6,
        orientation="vertical" if upright else "horizontal",
        patch_artist=True,
        boxprops={"facecolor": style.SKY, "linewidth": 0.7},
        whiskerprops=look,
        capprops=look,
        medianprops={"color": style.BLACK, "linewidth": 1.6},
    )
    places = range(1, len(groups) + 1)
    (ax.set_xticks if upright else ax.set_yticks)(places, list(groups))
