"""How an accuracy report looks: tables of errors, and what else was found in sentences. Computes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from latpred.render import Page, Row, Table

if TYPE_CHECKING:
    from latpred.accuracy.accuracy_report import CurvePoint, Report
    from latpred.accuracy.metrics import Errors

_SHOWN = 8  # cells without a partner that are named
_HEADS = ("cells", "median", "p90", "within 10 %", "bias")


def report_page(report: Report) -> Page:
    """Errors by runtime, batch and model, beside those of baselines; sentences about everything else."""
    overall = report.overall
    title = f"{overall.cells} cells of {overall.models} models: {_errors(overall)}"
    return Page(title, [*_tables(report), *_sentences(report)], prose=True)


def _tables(report: Report) -> Iterator[Table]:
    by_model = dict(sorted(report.by_model.items(), key=lambda item: -round(item[1].median, 6)))
    taus = {batch: rank.tau for batch, rank in report.rank_by_batch.items()}
    scores = {score.name: score for score in report.baselines if score.errors is not None and score.rank is not None}
    yield _table("runtime", report.by_runtime)
    yield _table("batch 1 to 8", report.small_by_runtime)
    yield _table("batch", report.by_batch, taus)
    yield _table("batches", report.by_decade)
    yield _table("model", by_model)
    yield _table(
        "predictor",
        {"latpred": report.overall, **{name: score.errors for name, score in scores.items() if score.errors}},
        {"latpred": report.rank.tau, **{name: score.rank.tau for name, score in scores.items() if score.rank}},
    )


def _table(head: str, groups: Mapping[str, Errors], taus: Mapping[str, float] | None = None) -> Table:
    rows: list[Row] = []
    for group, e in groups.items():
        shares = (_percent(e.median), _percent(e.p90), _percent(e.near), _signed(e.bias))
        tau = () if taus is None else (_number(taus.get(group, math.nan)),)
        rows.append((group, str(e.cells), *shares, *tau))
    return Table((head, *_HEADS, *([] if taus is None else ["Kendall tau"])), rows)


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
    cover = report.coverage
    if cover.cells:
        yield (
            f"90 % intervals cover {_percent(cover.share)} of {cover.cells} cells "
            f"({_percent(cover.low)} to {_percent(cover.high)} when {cover.models} models are drawn anew)."
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
        yield "Baselines saw this device and every other model of this table; latpred's profile saw none of the models."
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
        # CUDA graphs replay the kernels of eager.
        replayed = runtime == "cuda-graphs"
        compared = "Kernels replayed against eager's" if replayed else "Launches walked against profiled"
        yield (
            f"{compared}, {runtime}: exact in {_percent(count.exact)} of cells of {count.models} models, within 2 % in "
            f"{_percent(count.near)}, {_percent(count.worst)} off at most."
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
