"""Verbs that hold predictions against measurements: compare, validate, evaluate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from latpred.cli.options import (
    PRECISIONS,
    PROTOCOLS,
    Output,
    Verb,
    bundle,
    output_options,
    parse_batches,
    parse_seconds,
    parsed_by,
    speech_options,
    threads_option,
)
from latpred.cli.output import draw, emit, notice, plot_option
from latpred.cli.progress_bar import progress, working
from latpred.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from latpred.accuracy.accuracy_report import Report


@dataclass(frozen=True, slots=True)
class Trial:
    """What a validation measures."""

    suite: str
    batches: tuple[int, ...] | None
    precision: str
    runtimes: tuple[str, ...]
    protocol: str
    repeats: int
    threads: int | None
    budget: float | None


TABLE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(
    epilog="\b\nExample:\n"
    "  latpred predict resnet18 --batch 1,8 --csv -o predicted.csv\n"
    "  latpred measure resnet18 --batch 1,8 -o measured.csv\n"
    "  latpred compare predicted.csv measured.csv"
)
@click.argument("predicted", type=TABLE)
@click.argument("measured", type=TABLE)
@plot_option
@output_options
@speech_options
def compare(predicted: Path, measured: Path, plot: Path | None, output: Output) -> None:
    """Compare a predicted with a measured table: errors, order, crossover and knee, intervals, baselines."""
    from latpred.accuracy.comparison import compare as judge

    with working("comparing"):
        report = judge(predicted, measured)
    show_report(report, output, plot)


@click.command(
    epilog="\b\nExample:\n  latpred evaluate measured.csv --device cpu\n"
    "  latpred evaluate measured.csv --leave-out model"
)
@click.argument("table", type=TABLE)
@click.option("--device", "-d", help="Device, or a profile's name or file.  [default: this machine's own profile]")
@click.option(
    "--leave-out",
    type=click.Choice(["model", "gpu", "run"]),
    help="Fit the table itself without one of these at a time, and predict what was left out.",
)
@plot_option
@output_options
@speech_options
def evaluate(table: Path, device: str | None, leave_out: str | None, plot: Path | None, output: Output) -> None:
    """Predict every cell of a measurement table made elsewhere, and say how far off that is."""
    if leave_out is not None:
        from latpred.cli.calibrate import show_left_out

        if device is not None:
            raise UsageError("--leave-out fits profiles from the table itself; leave out --device.")
        if plot is not None:
            raise UsageError("--leave-out has a table for each part it left out, and no figure; leave out --plot.")
        show_left_out(table, leave_out, output)
        return
    from latpred.accuracy.comparison import evaluate as judge
    from latpred.profile import store

    show_report(judge(table, store.find(device), progress=notice), output, plot)


def trial_options(verb: Verb) -> Verb:
    """What `validate` measures, handed to it as `trial`."""
    return bundle(
        verb,
        "trial",
        Trial,
        click.option(
            "--suite",
            default="cpu",
            show_default=True,
            help="Which models: cpu, unseen, fresh, blind, ordinary, sealed or heldout.",
        ),
        click.option(
            "--batch",
            "-b",
            "batches",
            metavar="SIZES",
            callback=parsed_by(parse_batches),
            help="Batch sizes, as in 1-32:2x.  [default: the suite's]",
        ),
        click.option(
            "--precision", type=click.Choice(PRECISIONS), default="fp32", show_default=True, help="Number format."
        ),
        click.option(
            "--runtime", "runtimes", multiple=True, default=("eager",), show_default=True, help="May be given again."
        ),
        click.option(
            "--protocol", type=click.Choice(PROTOCOLS), default="single", show_default=True, help="As for predict."
        ),
        click.option(
            "--repeats", type=click.IntRange(1), default=4, show_default=True, help="Rounds through all cells."
        ),
        threads_option,
        click.option(
            "--budget", metavar="TIME", callback=parsed_by(parse_seconds), help="Start nothing later than this, as 10m."
        ),
    )


@click.command(epilog="\b\nExample:\n  latpred validate --budget 10m\n  latpred validate --record runs/today")
@click.option(
    "--device",
    "-d",
    default="cpu",
    show_default=True,
    help="cpu, cuda:0 or simulated; with --replay also a profile's name or file.",
)
@trial_options
@click.option("--record", type=click.Path(path_type=Path), help="Keep what was measured in this folder, to replay it.")
@click.option("--replay", help="Measure nothing: a recording's folder, or the name of a shipped one.")
@plot_option
@output_options
@speech_options
@click.pass_context
def validate(
    context: click.Context,
    device: str,
    trial: Trial,
    record: Path | None,
    replay: str | None,
    plot: Path | None,
    output: Output,
) -> None:
    """Measure whole models that no fit has seen, and compare the profile's predictions with them."""
    from latpred.calibration import validate as run

    doing = progress(f"validating {device}") if replay is None else working(f"replaying {replay}")
    with doing as show:
        report = run(
            device,
            suite=trial.suite,
            runtimes=trial.runtimes,
            batches=trial.batches,
            precision=trial.precision,
            protocol=trial.protocol,
            repeats=trial.repeats,
            threads=trial.threads,
            replay=replay,
            record=record,
            budget_s=trial.budget,
            progress=show,
        )
    show_report(report, output, plot)
    missed = report.shortfalls()
    for sentence in missed:
        notice(f"target missed: {sentence}")
    if missed:
        context.exit(1)


def show_report(report: Report, output: Output, plot: Path | None = None) -> None:
    """Print an accuracy report, and draw it; CSV gives its cells."""

    def text(console: Console) -> None:
        from latpred.render.accuracy_text import renderable

        console.print(renderable(report))

    emit(output, document=report.to_dict, rows=report.to_frame, text=text)
    draw(plot, report.plot)


@click.command(
    epilog="\b\nExample:\n"
    "  latpred measure torchvision:resnet18 torchvision:resnet34 --batch 1,8 -o measured.csv\n"
    "  latpred adapt measured.csv --device cpu -o adapted.json\n"
    "  latpred predict torchvision:resnet50 --device adapted.json"
)
@click.argument("table", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--device", "-d", help="Device, or a profile's name or file.  [default: this machine's own profile]")
@click.option("--name", help="Of the new profile.  [default: the old one's with -adapted]")
@output_options
@speech_options
def adapt(table: Path, device: str | None, name: str | None, output: Output) -> None:
    """Correct a profile with a few measured models, and say what that bought.

    The corrected profile goes to the file that -o names, else among the user's own. The report goes to stdout.
    """
    from latpred.accuracy.adaptation import adapt as correct
    from latpred.profile import store

    if output.path is not None and output.path.suffix != store.SUFFIX:
        raise UsageError(f"-o {output.path} is where the profile goes; give it a name that ends in {store.SUFFIX}.")
    found = correct(store.find(device), table, name=name, progress=notice)
    notice(f"saved {store.save(found.profile, output.path)}")

    def text(console: Console) -> None:
        console.print(found.text(), markup=False, highlight=False, soft_wrap=True)

    report = Output(as_json=output.as_json, as_csv=output.as_csv, path=None)
    emit(report, document=found.to_dict, rows=found.to_frame, text=text)
