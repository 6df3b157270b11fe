"""Verbs that hold predictions against measurements: compare, validate, evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from latpred.cli.options import Output, output_options, speech_options
from latpred.cli.output import emit, notice

if TYPE_CHECKING:
    from rich.console import Console

    from latpred.accuracy_report import Report

TABLE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(
    epilog="\b\nExample:\n"
    "  latpred predict resnet18 --batch 1,8 --csv -o predicted.csv\n"
    "  latpred measure resnet18 --batch 1,8 -o measured.csv\n"
    "  latpred compare predicted.csv measured.csv"
)
@click.argument("predicted", type=TABLE)
@click.argument("measured", type=TABLE)
@output_options
@speech_options
def compare(predicted: Path, measured: Path, output: Output) -> None:
    """Compare a predicted with a measured table: errors, order, crossover and knee, intervals, baselines."""
    from latpred.accuracy import compare as judge

    show_report(judge(predicted, measured), output)


@click.command(epilog="\b\nExample:\n  latpred evaluate measured.csv --device cpu")
@click.argument("table", type=TABLE)
@click.option("--device", "-d", help="Device, or a profile's name or file.  [default: this machine's own profile]")
@output_options
@speech_options
def evaluate(table: Path, device: str | None, output: Output) -> None:
    """Predict every cell of a measurement table made elsewhere, and say how far off that is."""
    from latpred import profiles
    from latpred.accuracy import evaluate as judge

    show_report(judge(table, profiles.find(device), progress=notice), output)


def show_report(report: Report, output: Output) -> None:
    """Print an accuracy report; CSV gives its cells."""

    def text(console: Console) -> None:
        from latpred.report_text import renderable

        console.print(renderable(report))

    emit(output, document=report.to_dict, rows=report.to_frame, text=text)
