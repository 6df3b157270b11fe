"""The accuracy report that `accuracy.comparison` makes: a record of figures, its JSON and its targets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import msgspec
import pandas as pd

from latpred import plot
from latpred.accuracy.metrics import Coverage, CurvePoint, Errors, Fastest, Launches, Noise, Rank, Speedups
from latpred.render import Page, Row, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHOWN = 8  # cells without a partner that are named
_MODELS = 40  # models whose errors are shown
_HEADS = ("cells", "median", "p90", "within 10 %", "bias")


def _tables(report: Report) -> Iterator[Table]:
    by_model = dict(sorted(report.by_model.items(), key=lambda item: -round(item[1].median, 6))[:_MODELS])
    taus = {batch: rank.tau for batch, rank in report.rank_by_batch.items()}
    scores = {score.name: score for score in report.baselines if score.errors is not None and score.rank is not None}
    if len(report.by_device) > 1:
        yield _table("device", report.by_device)
    yield _table("runtime", report.by_runtime)
    if len(report.by_runtime) > 1:  # of one runtime, a sentence says so
        yield _table("at equal speed", report.at_speed_by_runtime)
    yield _table("batch", report.by_batch, taus)
    yield _table("model" if len(by_model) == len(report.by_model) else "worst models", by_model)
    yield _table(
        "predictor",
        {"latpred": report.overall, **{name: score.errors for name, score in scores.items() if score.errors}},
        {"latpred": report.rank.tau, **{name: score.rank.tau for name, score in scores.items() if score.rank}},
    )


def _table(head: str, groups: Mapping[str, Errors], taus: Mapping[str, float] | None = None) -> Table:
    rows: list[Row] = []
    for group, e in groups.items():
        tau = () if taus is None else (_number(taus.get(group, math.nan)),)
        rows.append((group, str(e.cells), *map(_percent, (e.median, e.p90, e.near)), _signed(e.bias), *tau))
    return Table((head, *_HEADS, *([] if taus is None else ["Kendall tau"])), rows, folded=(head,))


def _sentences(report: Report) -> Iterator[str]:
    if report.at_speed is not None:
        measured = f"{_percent(report.overall.median)} and {_percent(report.overall.p90)}"
        yield f"At equal speed of the machine: {_errors(report.at_speed)}; as measured: {measured}."
    yield from _baselines(report)
    yield from _facts(report)
    yield _curve_point("Crossover batch", report.crossover)
    yield _curve_point("Knee batch", report.knee)
    if not math.isnan(report.regime):
        yield f"Regime (framework-bound or not) named right in {_percent(report.regime)} of cells."
    cover, at_speed = report.coverage, report.coverage_at_speed
    if cover.cells:
        yield (
            f"90 % intervals cover {_percent(cover.share)} of {cover.cells} cells "
            f"({_percent(cover.low)} to {_percent(cover.high)} when {cover.models} models are drawn anew)"
            f"{'' if at_speed is None else f', at equal speed {_percent(at_speed.share)}'}."
        )
    for title, names in (
        ("Could not be measured", report.failed),
        ("Predicted but not measured", report.only_predicted),
        ("Measured but not predicted", report.only_measured),
    ):
        if names:
            more = [f"… and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
            yield "\n  ".join([f"{title} ({len(names)}):", *names[:_SHOWN], *more])
    yield from (f"Note: {note}" for note in report.notes)


def _baselines(report: Report) -> Iterator[str]:
    answered = [f"{score.name} is {score.idea}" for score in report.baselines if score.errors is not None]
    if answered:
        yield f"{'; '.join(answered)}."
        yield "Baselines saw this device and every other model of this table; latpred's profile needs none of them."
    for score in report.baselines:
        if score.errors is None:
            yield f"{score.name} ({score.idea}) is not available: {score.reason}."
        elif score.reason:
            yield f"{score.name} has no answer for {report.overall.cells - score.errors.cells} cells: {score.reason}."


def _facts(report: Report) -> Iterator[str]:
    noise, rank = report.noise, report.rank
    if noise.cells:
        yield f"Repeat noise: median {_percent(noise.median)}, p90 {_percent(noise.p90)}, from {noise.source}."
    yield (
        f"Order within a batch: Kendall tau {_number(rank.tau)} over {rank.pairs} pairs; {rank.left_out} pairs "
        f"closer than the p90 repeat noise left out ({_number(rank.all_pairs)} with them)."
    )
    if report.fastest.clear + report.fastest.left_out:
        yield (
            f"Fastest runtime named right in {_percent(report.fastest.right)} of {report.fastest.clear} cells; "
            f"{report.fastest.left_out} whose two fastest are closer than the p90 repeat noise left out."
        )
    if report.speedups:
        near = (f"{name} {_percent(s.near)} of {s.cells} cells" for name, s in report.speedups.items())
        yield f"Speed-up over eager within 15 %: {', '.join(near)}."
    for runtime, count in report.launches.items():
        yield (
            f"Launches traced against profiled, {runtime}: exact in {_percent(count.exact)} of cells of {count.models} "
            f"models, within 2 % in {_percent(count.near)}, {_percent(count.worst)} off at most."
        )


def _curve_point(name: str, point: CurvePoint) -> str:
    if point.curves + point.one_sided == 0:
        return f"{name}: no curve shows one within its batches."
    return (
        f"{name} ({point.basis}): median factor {_number(point.median)}, p90 {_number(point.p90)} "
        f"on {point.curves} curves; {point.one_sided} more show it on one side only; "
        f"{_percent(point.good)} of all within 1.25."
    )


def _errors(e: Errors) -> str:
    return (
        f"median error {_percent(e.median)}, p90 {_percent(e.p90)}, {_percent(e.near)} within 10 %, "
        f"bias {_signed(e.bias)}"
    )


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.1f} %"


def _signed(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:+.1f} %".replace("-0.0 %", "+0.0 %")


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


SCHEMA = "latpred.accuracy/1"
# What a report is held to: shares for errors, and the least Kendall tau within each batch.
MEDIAN_TARGET, P90_TARGET, TAU_TARGET = 0.08, 0.20, 0.95


@dataclass(frozen=True, slots=True)
class Score:
    """One baseline's errors and order on the same cells; both None when it has no answer at all, for `reason`.

    With a `reason` beside its errors it had no answer for some cells.
    """

    name: str
    idea: str
    errors: Errors | None
    rank: Rank | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """How predictions compare with measurements."""

    overall: Errors
    at_speed: Errors | None  # for the speed that the machine had while it was measured, where that is known
    by_runtime: dict[str, Errors]
    at_speed_by_runtime: dict[str, Errors]  # empty where that speed is not known
    by_batch: dict[str, Errors]
    by_model: dict[str, Errors]
    by_device: dict[str, Errors]
    rank: Rank  # over pairs of models at one batch size, pooled over batch sizes
    rank_by_batch: dict[str, Rank]
    fastest: Fastest
    speedups: dict[str, Speedups]  # of each other runtime over eager
    launches: dict[str, Launches]  # by runtime, where a profiler looked
    crossover: CurvePoint
    knee: CurvePoint
    regime: float  # share of cells named right as framework-bound or not; NaN where it was not measured
    coverage: Coverage  # of the predicted intervals
    coverage_at_speed: Coverage | None  # of the same, moved to the speed that the machine had
    noise: Noise  # of the measurements
    baselines: tuple[Score, ...]  # simpler predictors on the same cells
    only_predicted: tuple[str, ...]  # cells without a partner, as `only_measured`
    only_measured: tuple[str, ...]
    failed: tuple[str, ...]  # cells that could not be measured
    notes: tuple[str, ...]  # what to know before trusting the figures
    cells: pd.DataFrame = field(repr=False, compare=False)  # both tables side by side, one row per cell

    def to_dict(self) -> dict[str, Any]:
        """The report without its cells, ready for JSON: a schema name, and None where a figure is not defined."""
        figures = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "cells"}
        document: dict[str, Any] = msgspec.json.decode(msgspec.json.encode({"schema": SCHEMA, **figures}))
        return document

    def to_frame(self) -> pd.DataFrame:
        """One row per cell: the keys, what was predicted and measured, and the signed relative `error`."""
        return self.cells.copy()

    def page(self) -> Page:
        """Errors by runtime, batch and model, beside those of baselines; sentences about everything else."""
        title = f"{self.overall.cells} cells of {self.overall.models} models: {_errors(self.overall)}"
        return Page(title, [*_tables(self), *_sentences(self)], prose=True)

    def text(self, width: int = 100) -> str:
        """The report as plain text."""
        return self.page().text(width) + "\n"

    def __repr__(self) -> str:
        """The report as plain text, 100 columns wide."""
        return self.page().text(100)

    def plot(self) -> Figure:
        """Draw predicted against measured, and the errors by batch and by model.

        Raises
        ------
        MissingPackageError
            When matplotlib is not installed.
        """
        return plot.validation(self)

    def _repr_html_(self) -> str:
        return self.page().html()

    def shortfalls(self) -> tuple[str, ...]:
        """Which targets are missed, each in a sentence with both numbers; empty when all are met."""
        errors = self.at_speed or self.overall
        worst = min((r.tau for r in self.rank_by_batch.values() if r.pairs), default=math.nan)
        checks = (
            ("median error", errors.median, MEDIAN_TARGET, errors.median <= MEDIAN_TARGET),
            ("p90 error", errors.p90, P90_TARGET, errors.p90 <= P90_TARGET),
            ("lowest Kendall tau of a batch", worst, TAU_TARGET, worst >= TAU_TARGET or math.isnan(worst)),
        )
        return tuple(f"{name} is {got:.3g}, the target {limit:.3g}" for name, got, limit, met in checks if not met)
