"""The verb that runs whole models and times them: measure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click
from click.core import ParameterSource

from latpred.cli.main import State
from latpred.cli.options import (
    Model,
    Output,
    Target,
    Verb,
    batch_option,
    bundle,
    model_options,
    output_options,
    parse_seconds,
    parsed_by,
    speech_options,
    target_options,
    threads_option,
)
from latpred.cli.output import emit, notice
from latpred.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from latpred.calibration.measurement.recorder import Done

PLANS = ("paper", "heldout", "check")


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole study to measure: which, which stages of it, and where to keep it."""

    suite: str | None
    stages: tuple[str, ...]
    record: Path | None


def suite_options(verb: Verb) -> Verb:
    """`--suite --stage --record`, handed to the verb as `whole`."""
    return bundle(
        verb,
        "whole",
        Whole,
        click.option("--suite", type=click.Choice(PLANS), help="Measure a whole study in place of models."),
        click.option("--stage", "stages", multiple=True, help="Of the study, only this.  May be given again."),
        click.option("--record", type=click.Path(file_okay=False, path_type=Path), help="Folder to keep the study in."),
    )


@click.command(
    epilog="\b\nExample:\n"
    "  latpred measure resnet18 bert-base-uncased --batch 1-32:2x -o measured.csv\n"
    "  latpred measure --suite paper --device cuda:0 --budget 9m --record h200"
)
@click.argument("models", nargs=-1, metavar="[MODEL...]")
@batch_option("1,8,32")
@model_options
@target_options
@threads_option
@click.option("--repeats", type=click.IntRange(1), default=4, show_default=True, help="Rounds through all cells.")
@click.option(
    "--budget", metavar="TIME", callback=parsed_by(parse_seconds), help="Start nothing later than this, as 90s or 5m."
)
@suite_options
@output_options
@speech_options
@click.pass_context
def measure(
    context: click.Context,
    models: tuple[str, ...],
    batches: tuple[int, ...],
    model_input: Model,
    target: Target,
    threads: int | None,
    repeats: int,
    budget: float | None,
    whole: Whole,
    output: Output,
) -> None:
    """Run models on this machine and time them, in rounds, with the repeat noise of the same run.

    With --suite a whole study is measured instead, in the order of its worth, and kept as a recording to replay; a run
    that was interrupted, or whose budget was spent, goes on where it stopped.
    """
    if whole.suite is not None:
        record_suite(context, whole.suite, whole.stages, whole.record, target, budget, output)
        return
    if not models:
        raise UsageError("There is no model to measure. Name at least one, or a study with --suite.")
    if target.host is not None:
        raise UsageError("measure runs models on this host, so --host means nothing to it. Give it to latpred predict.")
    from latpred.calibration.measurement.whole_models import StoppedError
    from latpred.calibration.measurement.whole_models import measure as run
    from latpred.cli.progress_bar import progress

    try:
        with progress("measuring") as show:
            table = run(
                list(models),
                batches,
                runtime=target.runtime,
                device=target.device or "cpu",
                protocol=target.protocol,
                repeats=repeats,
                threads=threads,
                seq=model_input.seq,
                image=model_input.image,
                precision=model_input.precision or "fp32",
                budget_s=budget,
                progress=show,
            )
    except StoppedError as stopped:
        _keep(stopped.table, output)
    show_table(table, output)
    if (table["status"] != "ok").all():
        context.exit(3)


def _keep(table: pd.DataFrame, output: Output) -> NoReturn:
    """Write what was measured before Ctrl-C, and end as Ctrl-C does."""
    show_table(table, output)
    measured = int((table["status"] == "ok").sum())
    place = f"they are in {output.path}" if output.path else "they are above"
    raise KeyboardInterrupt(f"{measured} of {len(table)} cells were measured by then, {place}")


def show_table(table: pd.DataFrame, output: Output) -> None:
    """Print a measurement table."""

    def text(console: Console) -> None:
        from rich.table import Table

        from latpred.units import format_duration

        shown = Table(box=None, pad_edge=False, header_style="bold")
        shown.add_column("model", overflow="fold")
        for name in ("batch", "latency", "spread", "rounds", "repeat noise"):
            shown.add_column(name, justify="right")
        rows = table.to_dict("records")
        for row in (row for row in rows if row["status"] == "ok"):
            spread, known = row["spread_s"], row["repeat_ratio"] == row["repeat_ratio"]
            noise = f"{row['repeat_ratio'] - 1:.1%}" if known else "-"
            cells = (
                str(row["batch"]),
                format_duration(row["latency_s"]),
                format_duration(spread),
                str(row["n"]),
                noise,
            )
            shown.add_row(row["model"], *cells)
        if shown.rows:
            console.print(shown)
        for row in (row for row in rows if row["status"] != "ok"):
            console.print(f"{row['model']} batch {row['batch']}: {row['status']}", markup=False, soft_wrap=True)

    emit(output, document=lambda: table_document(table), rows=lambda: table, text=text)


def table_document(table: pd.DataFrame) -> dict[str, object]:
    """A measurement table as a JSON document; empty cells are null."""
    import json

    return {"schema": "latpred.measure/1", "rows": json.loads(table.to_json(orient="records", double_precision=15))}


_COUNTS = ("measured", "planned")
_SHOWN = 3  # settings named of those that failed alike
_PLANNED = {
    "batches": "--batch",
    "seq": "--seq",
    "image": "--image",
    "precision": "--precision",
    "protocol": "--protocol",
    "host": "--host",
    "repeats": "--repeats",
    "threads": "--threads",
}


def record_suite(
    context: click.Context,
    suite: str,
    stages: tuple[str, ...],
    folder: Path | None,
    target: Target,
    budget: float | None,
    output: Output,
) -> None:
    """Measure a plan on a device until it is done or the budget is spent, and print how much of it there is."""
    for name, option in _PLANNED.items():
        if _given(context, name):
            raise UsageError(f"--suite {suite} plans {option} itself; leave that out.")
    if context.params.get("models"):
        raise UsageError("Models and --suite exclude each other. Give one of them.")
    from latpred import storage
    from latpred.calibration.measurement.recorder import record
    from latpred.cli.progress_bar import progress

    device = target.device or "cuda:0"
    state = context.ensure_object(State)
    state.resumable = True
    place = folder or storage.data_dir() / "recordings" / f"{suite}-{device.replace(':', '-')}"
    with progress(f"measuring {suite}") as show:
        done = record(
            suite,
            place,
            device,
            stages=stages,
            runtimes=(target.runtime,) if _given(context, "runtime") else (),
            budget_s=budget,
            progress=show,
        )
    state.resumable = False
    for note in done.notes:
        notice(note)
    emit(output, document=lambda: document(done), rows=lambda: rows(done), text=lambda console: _show(done, console))


def rows(done: Done) -> pd.DataFrame:
    """How far a recording is, a row for each stage."""
    import pandas as pd

    return pd.DataFrame([(name, *counts) for name, counts in done.stages.items()], columns=["stage", *_COUNTS])


def document(done: Done) -> dict[str, object]:
    """How far a recording is, as JSON holds it."""
    stages = {name: dict(zip(_COUNTS, counts, strict=True)) for name, counts in done.stages.items()}
    return {
        "schema": "latpred.recorded/1",
        "folder": str(done.folder),
        "stages": stages,
        "complete": done.complete,
        "failed": done.failed,
    }


def _show(done: Done, console: Console) -> None:
    for name, (measured, planned) in done.stages.items():
        console.print(f"{name:<18}{measured:>5} of {planned:>5}", markup=False, highlight=False)
    for reason, keys in done.failed.items():
        console.print(
            f"{len(keys)} in vain, {reason.rstrip('.')}: {_some(keys)}", markup=False, highlight=False, soft_wrap=True
        )
    console.print(f"kept in {done.folder}", markup=False, highlight=False, soft_wrap=True)
    if done.left:
        console.print("The same command again goes on where this stopped.", highlight=False)


def _given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def _some(keys: list[str]) -> str:
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return ", ".join(keys[:_SHOWN]) + more
