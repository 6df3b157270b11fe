"""The accuracy report for people: rich tables on a terminal, the same as plain text elsewhere. Computes nothing."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping
from html import escape

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from latpred.accuracy.accuracy_report import CAPTURED, CurvePoint, Report
from latpred.accuracy.metrics import Errors

_SHOWN = 8
_ERROR_COLUMNS = ("cells", "median", "p90", "within 10 %", "bias")


def text(report: Report, width: int = 100) -> str:
    """The report as plain text, at most `width` columns wide."""
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, legacy_windows=False).print(renderable(report))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def renderable(report: Report) -> RenderableType:
    """The report as something rich can print."""
    parts: list[RenderableType] = [
        Text(_headline(report), style="bold"),
        *_tables(report),
        Text("\n".join(_facts(report))),
    ]
    for title, names in (
        ("Could not be measured", report.failed),
        ("Predicted but not measured", report.only_predicted),
        ("Measured but not predicted", report.only_measured),
    ):
        if names:
            parts.append(Text(_listing(title, names)))
    parts.extend(Text(f"Note: {note}") for note in report.notes)
    spaced = [item for part in parts for item in (part, Text())]
    return Group(*spaced[:-1])


def html(report: Report) -> str:
    """The same tables and sentences for a notebook."""
    sentences = [*_facts(report), *(f"Note: {note}" for note in report.notes)]
    said = "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)
    tables = "".join(_html_table(table) for table in _tables(report))
    return f"<div><strong>{escape(_headline(report))}</strong>{tables}{said}</div>"


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{escape(str(column.header))}</th>" for column in table.columns)
    rows = zip(*(column.cells for column in table.columns), strict=True)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _tables(report: Report) -> tuple[Table, ...]:
    taus = {batch: _number(rank.tau) for batch, rank in report.rank_by_batch.items()}
    return (
        _errors_table("runtime", report.by_runtime),
        *([_errors_table("batch 1 to 8", report.small_by_runtime)] if report.small_by_runtime else []),
        _errors_table("batch", report.by_batch, taus),
        _errors_table("batches", report.by_decade),
        _errors_table("model", _worst_first(report.by_model)),
        _baselines_table(report),
    )


def _headline(report: Report) -> str:
    e = report.overall
    return (
        f"{e.cells} cells of {e.models} models: median error {_percent(e.median)}, p90 {_percent(e.p90)}, "
        f"{_percent(e.near)} within 10 %, bias {_signed(e.bias)}"
    )


def _errors_table(name: str, groups: Mapping[str, Errors], taus: Mapping[str, str] | None = None) -> Table:
    table = _table(name, *_ERROR_COLUMNS, *(["Kendall tau"] if taus is not None else []))
    for group, e in groups.items():
        row = [group, *_error_cells(e)]
        table.add_row(*row, *([taus.get(group, "-")] if taus is not None else []))
    return table


def _baselines_table(report: Report) -> Table:
    table = _table("predictor", *_ERROR_COLUMNS, "Kendall tau")
    table.add_row("latpred", *_error_cells(report.overall), _number(report.rank.tau))
    for score in report.baselines:
        if score.errors is not None and score.rank is not None:
            table.add_row(score.name, *_error_cells(score.errors), _number(score.rank.tau))
    return table


def _facts(report: Report) -> Iterable[str]:
    noise, rank, cover = report.noise, report.rank, report.coverage
    yield from _speed_facts(report)
    had = [f"{score.name} is {score.idea}" for score in report.baselines if score.errors is not None]
    if had:
        yield f"{'; '.join(had)}."
        yield "Baselines saw this device and every other model of this table; latpred's profile saw none of the models."
    for score in report.baselines:
        if score.errors is None:
            yield f"{score.name} ({score.idea}) is not available: {score.reason}."
        elif score.reason:
            yield f"{score.name} has no answer for {report.overall.cells - score.errors.cells} cells: {score.reason}."
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
        found = (f"{name} {_percent(s.near)} of {s.cells} cells" for name, s in report.speedups.items())
        yield f"Speed-up over eager within 15 %: {', '.join(found)}."
    for runtime, count in report.launches.items():
        what = "Kernels replayed against eager's" if runtime == CAPTURED else "Launches walked against profiled"
        yield (
            f"{what}, {runtime}: exact in {_percent(count.exact)} of cells of "
            f"{count.models} models, within 2 % in {_percent(count.near)}, {_percent(count.worst)} off at most."
        )
    yield _curve_fact("Crossover batch", report.crossover)
    yield _curve_fact("Knee batch", report.knee)
    if not math.isnan(report.regime):
        yield f"Regime (framework-bound or not) named right in {_percent(report.regime)} of cells."
    if cover.cells:
        yield (
            f"90 % intervals cover {_percent(cover.share)} of {cover.cells} cells "
            f"({_percent(cover.low)} to {_percent(cover.high)} when {cover.models} models are drawn anew)."
        )


def _speed_facts(report: Report) -> Iterable[str]:
    if report.at_speed is not None:
        e, measured = report.at_speed, report.overall
        yield (
            f"At equal speed of the machine: median error {_percent(e.median)}, p90 {_percent(e.p90)}, "
            f"{_percent(e.near)} within 10 %, bias {_signed(e.bias)}; as measured: {_percent(measured.median)} "
            f"and {_percent(measured.p90)}."
        )


def _curve_fact(name: str, point: CurvePoint) -> str:
    if point.curves + point.one_sided == 0:
        return f"{name}: no curve shows one within its batches."
    return (
        f"{name} ({point.basis}): median factor {_number(point.median)}, p90 {_number(point.p90)} "
        f"on {point.curves} curves; {point.one_sided} more show it on one side only; "
        f"{_percent(point.good)} of all within 1.25."
    )


def _worst_first(groups: Mapping[str, Errors]) -> dict[str, Errors]:
    return dict(sorted(groups.items(), key=lambda item: -round(item[1].median, 6)))


def _listing(title: str, names: tuple[str, ...]) -> str:
    more = f"\n  … and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{title} ({len(names)}):\n  " + "\n  ".join(names[:_SHOWN]) + more


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title_justify="left", header_style="bold")
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _error_cells(e: Errors) -> tuple[str, ...]:
    return (str(e.cells), _percent(e.median), _percent(e.p90), _percent(e.near), _signed(e.bias))


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.1f} %"


def _signed(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:+.1f} %".replace("-0.0 %", "+0.0 %")


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"
