"""Verbs that hold predictions against measurements: compare, evaluate, validate and adapt."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from latpred.cli.options import PRECISIONS, Output, batch_option, examples, output_options, takes
from latpred.cli.output import draw, emit, notice, progress, working
from latpred.errors import UsageError

if TYPE_CHECKING:
    from latpred.accuracy.accuracy_report import Report

TABLE = click.Path(exists=True, dir_okay=False, path_type=Path)


def show_report(report: Report, output: Output, plot: Path | None) -> None:
    """Print an accuracy report, and draw it; CSV gives its cells."""
    from latpred.accuracy.accuracy_report import report_page

    emit(output, document=report.to_dict, rows=report.to_frame, page=lambda: report_page(report))
    draw(plot, report.plot)


@click.command(
    epilog=examples(
        "latpred predict resnet18 --batch 1,8 --csv -o predicted.csv",
        "latpred measure resnet18 --batch 1,8 -o measured.csv",
        "latpred compare predicted.csv measured.csv",
    )
)
@click.argument("predicted", type=TABLE)
@click.argument("measured", type=TABLE)
@takes("plot")
@output_options
def compare(predicted: Path, measured: Path, plot: Path | None, output: Output) -> None:
    """Compare a predicted with a measured table: errors, order, crossover and knee, intervals, baselines."""
    from latpred.accuracy.comparison import compare as compare_tables

    with working("comparing"):
        report = compare_tables(predicted, measured)
    show_report(report, output, plot)


@click.command(
    epilog=examples(
        "latpred evaluate measured.csv --device cpu",
        "latpred evaluate measured.csv --leave-out model",
    )
)
@click.argument("table", type=TABLE)
@takes("device")
@click.option(
    "--leave-out",
    type=click.Choice(["model", "gpu", "run"]),
    help="Fit the table itself without one of these at a time, and predict what was left out.",
)
@takes("plot")
@output_options
def evaluate(table: Path, device: str | None, leave_out: str | None, plot: Path | None, output: Output) -> None:
    """Predict every cell of a measurement table made elsewhere, and say how far off that is."""
    if leave_out is None:
        from latpred.accuracy.comparison import evaluate as evaluate_table
        from latpred.profile import store

        show_report(evaluate_table(table, store.find(device), progress=notice), output, plot)
        return
    if device is not None:
        raise UsageError("--leave-out fits profiles from the table itself; leave out --device.")
    if plot is not None:
        raise UsageError("--leave-out has a table for each part it left out, and no figure; leave out --plot.")
    from latpred.calibration.published.leave_out import evaluate_left_out
    from latpred.render import Page

    left_out = evaluate_left_out(table, leave_out, progress=notice)
    emit(output, document=left_out.to_dict, rows=left_out.to_frame, page=lambda: Page("", [left_out.text()]))


@click.command(epilog=examples("latpred validate --budget 10m", "latpred validate --record runs/today"))
@click.option(
    "--device",
    "-d",
    default="cpu",
    show_default=True,
    help="cpu, cuda:0 or simulated; with --replay also a profile's name or file.",
)
@click.option(
    "--suite",
    default="cpu",
    show_default=True,
    help="Which models: cpu, unseen, fresh, blind, ordinary, sealed or heldout.",
)
@batch_option(None, shown="the suite's")
@click.option("--precision", type=click.Choice(PRECISIONS), default="fp32", show_default=True, help="Number format.")
@click.option("--runtime", "runtimes", multiple=True, default=("eager",), show_default=True, help="May be given again.")
@takes("protocol", "repeats", "threads_to_measure", "budget_s")
@click.option("--record", type=click.Path(path_type=Path), help="Keep what was measured in this folder, to replay it.")
@click.option("--replay", help="Measure nothing: a recording's folder, or the name of a shipped one.")
@takes("plot")
@output_options
def validate(device: str, replay: str | None, plot: Path | None, output: Output, **asked: Any) -> None:
    """Measure whole models that no fit has seen, and compare the profile's predictions with them."""
    from latpred.calibration import validate as run

    with progress(f"validating {device}") if replay is None else working(f"replaying {replay}") as show:
        report = run(device, replay=replay, progress=show, **asked)
    show_report(report, output, plot)
    missed = report.shortfalls()
    for sentence in missed:
        notice(f"target missed: {sentence}")
    if missed:
        click.get_current_context().exit(1)


@click.command(
    epilog=examples(
        "latpred measure torchvision:resnet18 torchvision:resnet34 --batch 1,8 -o measured.csv",
        "latpred adapt measured.csv --device cpu -o adapted.json",
        "latpred predict torchvision:resnet50 --device adapted.json",
    )
)
@click.argument("table", type=TABLE)
@takes("device")
@click.option("--name", help="Of the new profile.  [default: the old one's with -adapted]")
@output_options
def adapt(table: Path, device: str | None, name: str | None, output: Output) -> None:
    """Correct a profile with a few measured models, and say what that bought.

    The corrected profile goes to the file that -o names, else among the user's own. The report goes to stdout.
    """
    from latpred.accuracy.adaptation import adapt as adapt_profile
    from latpred.profile import store

    if output.path is not None and output.path.suffix != store.SUFFIX:
        raise UsageError(f"-o {output.path} is where the profile goes; give it a name that ends in {store.SUFFIX}.")
    adaptation = adapt_profile(store.find(device), table, name=name, progress=notice)
    notice(f"saved {store.save(adaptation.profile, output.path)}")
    emit(
        output._replace(path=None),
        document=adaptation.to_dict,
        rows=adaptation.to_frame,
        page=adaptation.page,
    )
