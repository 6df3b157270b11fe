"""Latency against batch: one curve, several runtimes, or predicted against measured and their errors."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from latpred.errors import TableError
from latpred.plot import style
from latpred.render import format_threshold

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from latpred.accuracy.accuracy_report import Report
    from latpred.prediction.prediction import Curve, Setting

    Measured = Mapping[int, float] | pd.DataFrame | str | os.PathLike[str]

FAR_BELOW = 1000.0  # below the least latency over this, a clock is not followed: it would squeeze everything else
MOST_MARKERS = 24  # with more points than that, a line says more without them
LATENCY = "predicted latency"
_UNSAID = {"input_kind": "default", "input_size": 0, "memory_format": "", "attention": ""}  # of a row, by column
_LABEL_SHARE = 0.17  # of the axis, below which a region has no room for its name


def points(measured: Measured, setting: Setting) -> tuple[list[int], list[float], list[float]]:
    """What was measured of the model of a curve: batch sizes, milliseconds, and the spread of each, 0 if not known.

    Rows of a table that differ from the curve in model, runtime, precision, protocol, inputs, memory format or
    attention are left out, and those of other devices where there are some of the curve's own. What a row does not say
    may be anything.
    """
    if isinstance(measured, Mapping):
        batches = sorted(measured)
        return batches, [float(measured[batch]) for batch in batches], [0.0] * len(batches)
    from latpred import tables

    table = tables.merge_repeats(tables.check(tables.complete(tables.load(measured)), tables.MEASURED))
    same = table["latency_s"].notna()
    for name in ("model", "runtime", "precision", "protocol"):
        same &= table[name] == getattr(setting, name)
    for name, unsaid in _UNSAID.items():
        if name in table:
            same &= table[name].isin((getattr(setting, name), unsaid))
    if not same.any():
        asked = f"{setting.runtime}, {setting.precision}, {setting.protocol}, {setting.input_kind} {setting.input_size}"
        own = table[table["model"] == setting.model]
        sizes = sorted({f"{kind} {size}" for kind, size in zip(own["input_kind"], own["input_size"], strict=True)})
        there = f"it at {', '.join(sizes)}" if sizes else ", ".join(sorted(set(table["model"])))
        raise TableError(
            f"Nothing was measured of {setting.model} in {asked}; the table has {there}. "
            "Measure it with: latpred measure"
        )
    on_device = same & (table["device"] == setting.device)  # a profile may have another name for it than its driver
    same = on_device if on_device.any() else same
    rows = table[same].sort_values("batch")
    latency_ms, spread_ms = ((rows[name] * 1e3).tolist() for name in ("latency_s", "spread_s"))
    return rows["batch"].astype(int).tolist(), latency_ms, spread_ms


class _Region(NamedTuple):
    regime: str
    low: float
    high: float


@style.in_style()
def curve(found: Curve, ax: Axes | None = None, *, measured: Measured | None = None) -> Axes:
    """Latency against batch with its interval, what bounds it, the regimes and the crossover.

    `measured` is drawn over it: milliseconds by batch, or a measurement table (`latpred measure -o measured.csv`).
    """
    known = None if measured is None else points(measured, found.setting)
    ax = style.axes(ax)
    order = np.argsort(found.batches)
    batches, latency = found.batches[order], found.latency_ms[order]
    low, high = found.interval_ms[order].T
    span = span_of(batches)
    _shade(ax, regions(found, span), span)
    _crossover(ax, found, span)
    ax.fill_between(batches, low, high, color=style.BLUE, alpha=0.22, linewidth=0, label="90 % interval")
    if len(batches) == 1:  # a band has no width there
        ax.vlines(batches, low, high, color=style.BLUE, alpha=0.4, linewidth=3)
    marker = "_" if len(batches) == 1 else ""
    clocks = (
        ("overhead (host)", found.overhead_ms, style.VERMILION, (5, 1.5)),
        ("compute (device)", found.compute_ms, style.BLACK, (1, 1.2)),
    )
    for name, clock, colour, dashes in clocks:
        ax.plot(batches, clock[order], color=colour, dashes=dashes, marker=marker, label=name)
    marker = "o" if len(batches) <= MOST_MARKERS else ""
    ax.plot(batches, latency, color=style.BLUE, marker=marker, label=LATENCY, zorder=3)
    _too_large(ax, found)
    if known is not None:
        ax.errorbar(
            *known, fmt="D", color=style.BLACK, mfc="white", mew=0.8, elinewidth=0.8, zorder=4, label="measured"
        )  # fmt: skip
    _scales(ax, [found])
    ax.set_title(title(found.setting), pad=13)
    _legend(ax)
    return ax


@style.in_style()
def latencies(curves: Sequence[Curve], ax: Axes | None = None) -> Axes:
    """Latency against batch in several runtimes, or on several devices, with the crossover of each."""
    ax = style.axes(ax)
    for index, (one, name) in enumerate(zip(curves, _labels(curves), strict=True)):
        order = np.argsort(one.batches)
        look: dict[str, Any] = {
            "color": style.LINES[index % len(style.LINES)],
            "linestyle": style.DASHES[index % len(style.DASHES)],
            "marker": style.MARKERS[index % len(style.MARKERS)] if len(one) <= MOST_MARKERS else "",
        }
        ax.plot(one.batches[order], one.latency_ms[order], label=name, **look)
    _scales(ax, curves)
    facts = [(one.setting.model, ", ".join(one.setting.setup), f"on {one.setting.device}") for one in curves]
    ax.set_title(", ".join(column[0] for column in zip(*facts, strict=True) if len(set(column)) == 1))
    ax.legend()
    return ax


def title(setting: Setting) -> str:
    protocol = "" if setting.protocol == "single" else f", {setting.protocol}"
    return f"{setting.model}, {', '.join(setting.setup)}\n{setting.runtime} on {setting.device}{protocol}"


def regions(found: Curve, span: tuple[float, float]) -> list[_Region]:
    """Where each regime holds: the crossover ends the framework-bound part, points half way between them the others."""
    points = sorted(found, key=lambda point: point.batch)
    runs = [(regime, list(group)) for regime, group in groupby(points, key=lambda point: point.regime)]
    crossover = found.crossover.batch
    ends = [span[0]]
    for (regime, before), (_, after) in pairwise(runs):
        last, first = before[-1].batch, after[0].batch
        if regime == "framework-bound" and crossover is not None and last < crossover <= first:
            ends.append(float(crossover))
        else:
            ends.append(float(np.sqrt(last * first)))
    ends.append(span[1])
    return [_Region(regime, *edges) for (regime, _), edges in zip(runs, pairwise(ends), strict=True)]


def span_of(batches: np.ndarray) -> tuple[float, float]:
    """Of the axis: a little beyond the points, an octave around a single one."""
    low, high = float(batches.min()), float(batches.max())
    room = 2.0 if low == high else (high / low) ** 0.03
    return low / room, high * room


def _shade(ax: Axes, found: list[_Region], span: tuple[float, float]) -> None:
    octaves = np.log(span[1] / span[0])
    for region in found:
        hatch = "///" if region.regime == "framework-bound" else ""
        ax.axvspan(
            region.low, region.high, facecolor=style.REGIONS[region.regime], edgecolor=style.REGION_HATCH, hatch=hatch,
            linewidth=0, zorder=0,
        )  # fmt: skip
        share = np.log(region.high / region.low) / octaves
        if share > _LABEL_SHARE:
            name = region.regime if share > 2 * _LABEL_SHARE else region.regime.removesuffix("-bound")
            ax.text(
                np.sqrt(region.low * region.high), 1.015, name, transform=ax.get_xaxis_transform(),
                ha="center", va="bottom", fontsize=6.5, color="#333333",
            )  # fmt: skip


def _crossover(ax: Axes, found: Curve, span: tuple[float, float]) -> None:
    """The batch from which the device sets the latency, and its interval as far as the axis goes."""
    batch, low, high = found.crossover
    if batch is not None and found.batches.min() < batch <= span[1]:
        ends = max(low or 1, span[0]), min(high or span[1], span[1])
        ax.axvspan(*ends, facecolor=style.GREY, alpha=0.22, linewidth=0, zorder=0.5)
        label = f"crossover {format_threshold(found.crossover)}"
        ax.axvline(batch, color=style.GREY, linewidth=1.0, linestyle=(0, (4, 1, 1, 1)), label=label)


def _too_large(ax: Axes, found: Curve) -> None:
    over = [point for point in found if point.fits is False]
    if over:
        ax.plot(
            [point.batch for point in over], [point.latency_ms for point in over], "X", color=style.VERMILION, ms=5,
            mec="white", mew=0.5, linestyle="", zorder=5, label="exceeds the memory",
        )  # fmt: skip


def _scales(ax: Axes, curves: Sequence[Curve]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    least = min(float(one.interval_ms.min()) for one in curves) / FAR_BELOW
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_ylim(bottom=max(ax.get_ylim()[0], least))
    ax.set_xlim(*span_of(np.concatenate([one.batches for one in curves])))
    ax.xaxis.set_major_locator(LogLocator(base=2, numticks=9))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}" if value >= 1 else ""))
    style.plain_ticks(ax.yaxis, ax.get_ylim())
    ax.set_xlabel("batch size")
    ax.set_ylabel("latency (ms)")


def _legend(ax: Axes) -> None:
    """What was predicted and measured in the first column, what bounds it in the second."""
    handles, labels = ax.get_legend_handles_labels()
    rank = {LATENCY: 0, "90 % interval": 1, "measured": 2, "exceeds the memory": 3}
    order = sorted(range(len(labels)), key=lambda index: rank.get(labels[index], 4))
    style.legend_below(ax, handles=[handles[index] for index in order])


def _labels(curves: Sequence[Curve]) -> list[str]:
    """What tells the curves apart: model, precision and layout, runtime or device, as far as they differ."""
    asked = [one.setting for one in curves]
    facts = [[one.model, ", ".join(one.setup), one.runtime, one.device] for one in asked]
    differ = [len(set(column)) > 1 for column in zip(*facts, strict=True)]
    if not any(differ):
        return [one.setting.runtime for one in curves]
    return [", ".join(fact for fact, counts in zip(row, differ, strict=True) if counts) for row in facts]


NEAR = 0.10  # the band that is drawn
_SEVERAL = 8  # groups that a legend can hold
_LONGEST = 30  # characters of a model's name: with more its box has no room


@style.in_style()
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


@style.in_style()
def errors_by_batch(report: Report, ax: Axes | None = None) -> Axes:
    """Signed error at each batch size: the median, the middle half, and from the 5th to the 95th percentile."""
    ax = style.axes(ax, 1.9)
    groups = {str(batch): group["error"] for batch, group in report.cells.groupby("batch", sort=True)}
    _boxes(ax, groups, upright=True)
    ax.set(xlabel="batch size", ylabel="error (%),\n+ is too high")  # in one line it is longer than the axis
    return ax


@style.in_style()
def errors_by_model(report: Report, ax: Axes | None = None) -> Axes:
    """Signed error of each model, the worst at the top."""
    ax = style.axes(ax, 0.5 + 0.16 * len(report.by_model))
    worst = sorted(report.by_model, key=lambda name: report.by_model[name].median)
    by_model = dict(list(report.cells.groupby("model")))
    _boxes(ax, {name: by_model[name]["error"] for name in worst}, upright=False)
    ax.set_xlabel("error (%), + is too high")
    return ax


@style.in_style()
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
    names = [name if len(name) <= _LONGEST else f"…{name[1 - _LONGEST :]}" for name in groups]
    (ax.set_xticks if upright else ax.set_yticks)(places, names)
