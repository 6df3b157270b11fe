"""Verbs that hold predictions against measurements: compare, evaluate, validate and adapt."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from latpred.cli.options import FILE, TABLES, Output, batch_option, given, output_options, profile_options, takes, verb
from latpred.cli.output import draw, emit, notice, progress, working
from latpred.errors import UsageError

if TYPE_CHECKING:
    from latpred.accuracy.accuracy_report import Report
    from latpred.calibration.published.published_table import PublishedTable


def _show_report(report: Report, output: Output, plot: Path | None) -> None:
    """Print an accuracy report, and draw it; CSV gives its cells."""
    emit(output, document=report.to_dict, rows=report.to_frame, page=report.page)
    draw(plot, report.plot)


@verb(
    "latpred predict resnet18 --batch 1,8 --csv -o predicted.csv",
    "latpred measure resnet18 --batch 1,8 -o measured.csv",
    "latpred compare predicted.csv measured.csv",
)
@click.argument("predicted", type=FILE)
@click.argument("measured", type=FILE)
@takes("plot")
@output_options
def compare(predicted: Path, measured: Path, plot: Path | None, output: Output) -> None:
    """Compare a predicted table with a measured one.

    The report has errors, order, crossover and knee, intervals, and baselines.
    """
    from latpred.accuracy.comparison import compare as compare_tables

    with working("comparing"):
        report = compare_tables(predicted, measured)
    _show_report(report, output, plot)


@verb(
    "latpred evaluate measured.csv --device cpu",
    "latpred evaluate measured.csv --leave-out model",
    "latpred evaluate published.csv --mapping mapping.json --host-row -o predicted.csv",
)
@TABLES
@takes("mapping", "device")
@click.option("--host-row", is_flag=True, help="Let one row of each run tell how fast its host is; others are judged.")
@click.option(
    "--leave-out",
    type=click.Choice(["model", "gpu", "design", "run", "source", "host"]),
    help="Fit the tables themselves without one of these at a time, and predict what was left out.",
)
@takes("plot")
@output_options
def evaluate(
    sources: tuple[Path, ...],
    mapping: Path | None,
    device: str | None,
    host_row: bool,
    leave_out: str | None,
    plot: Path | None,
    output: Output,
) -> None:
    """Judge predictions on tables measured elsewhere.

    Rows of several tables, of tables that name GPUs, or that go through a --mapping, are each predicted with the
    profile of their device, else from its datasheet; --device predicts all rows with one profile.
    """
    from latpred.calibration.published import published_table
    from latpred.profile import store

    if not sources:
        raise UsageError("There is no table to evaluate. Name at least one CSV file.")
    if leave_out is not None:
        _evaluate_left_out(published_table.read_all(sources, mapping), leave_out, output)
    elif len(sources) > 1 or mapping is not None or published_table.names_gpus(sources[0]):
        from latpred.calibration.published.evaluation import evaluate_published

        table = published_table.read_all(sources, mapping)
        for line in table.kept():
            notice(line)
        profile = None if device is None else store.find(device)
        _show_report(evaluate_published(table, profile, host_row=host_row, progress=notice), output, plot)
    else:
        from latpred.accuracy.comparison import evaluate_table

        if host_row:
            raise UsageError("--host-row is for tables that name GPUs; leave it out.")
        _show_report(evaluate_table(sources[0], store.find(device), progress=notice, keep=True), output, plot)


def _evaluate_left_out(table: PublishedTable, by: str, output: Output) -> None:
    """Fit a table without parts of it, and show how far off these are."""
    for option in given("device", "host_row", "plot"):
        why = "has a table for each part, and no figure" if option == "--plot" else "fits profiles from the tables"
        raise UsageError(f"--leave-out {why}; leave out {option}.")
    from latpred.calibration.published.joint_fit import problem
    from latpred.calibration.published.leave_out import evaluate_left_out

    left_out = evaluate_left_out(problem(table, progress=notice, partial=True), by, progress=notice)
    emit(output, document=left_out.to_dict, rows=lambda: left_out.cells, page=left_out.page)


@verb(
    "latpred validate --budget 10m",
    "latpred validate --record runs/today",
    "latpred validate --replay epyc-shared-varied",
)
@click.option(
    "--device",
    "-d",
    help="cpu, cuda:0 or simulated; with --replay also a profile's name or file.  [default: cpu, or the profile of a "
    "shipped recording]",
)
@click.option(
    "--suite",
    default="blind",
    show_default=True,
    help="blind, everyday, recent, sealed, assorted, varied, drawn, redrawn or heldout.",
)
@batch_option(None, shown="the suite's")
@takes("precision_to_validate")
@click.option("--runtime", "runtimes", multiple=True, default=("eager",), show_default=True, help="May be given again.")
@takes("protocol", "repeats", "threads_to_validate", "budget_s")
@click.option("--no-baselines", is_flag=True, help="Leave out the baselines that take time on the device.")
@click.option("--record", type=click.Path(path_type=Path), help="Keep what was measured in this folder, to replay it.")
@click.option("--replay", help="Measure nothing: a recording's folder, or the name of a shipped one.")
@takes("plot")
@output_options
def validate(
    device: str | None,
    replay: str | None,
    batches: tuple[int, ...] | None,
    no_baselines: bool,
    plot: Path | None,
    output: Output,
    **asked: Any,
) -> None:
    """Measure a suite of models and judge the predictions.

    No fit has seen the models of a suite.
    """
    from latpred.accuracy.recording import profile_of
    from latpred.calibration import validate as run

    if replay is not None:
        device = device or profile_of(replay)
        for option in given("batches", "no_baselines", *asked.keys()):
            raise UsageError(f"--replay judges all that was recorded, and measures nothing; leave out {option}.")
    device, asked = device or "cpu", asked | ({"rivals": ()} if no_baselines else {})
    with progress(f"validating {device}") if replay is None else working(f"replaying {replay}") as show:
        report = run(device, replay=replay, batch=batches, progress=show, **asked)
    _show_report(report, output, plot)
    missed = report.shortfalls()
    for sentence in missed:
        notice(f"target missed: {sentence}")
    if missed:
        click.get_current_context().exit(1)


@verb(
    "latpred measure torchvision:resnet18 torchvision:resnet34 --batch 1,8 -o measured.csv",
    "latpred adapt measured.csv --device cpu -o adapted.json",
    "latpred predict torchvision:resnet50 --device adapted.json",
)
@click.argument("table", type=FILE)
@takes("device")
@click.option("--name", help="Of the new profile.  [default: the old one's with -adapted]")
@profile_options
def adapt(table: Path, device: str | None, name: str | None, path: Path | None, output: Output) -> None:
    """Correct a profile with a few measured models.

    The corrected profile goes to the file that -o names, else among the user's own. The report goes to stdout.
    """
    from latpred.accuracy.adaptation import adapt as adapt_profile
    from latpred.profile import store

    adaptation = adapt_profile(store.find(device), table, name=name, progress=notice)
    notice(f"saved {store.save(adaptation.profile, path)}")
    emit(output, document=adaptation.to_dict, rows=adaptation.to_frame, page=adaptation.page)
