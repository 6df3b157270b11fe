"""The verb that runs whole models and times them: measure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

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
from latpred.cli.output import emit
from latpred.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

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
        from latpred.cli.recording import record_suite

        record_suite(context, whole.suite, whole.stages, whole.record, target, budget, output)
        return
    if not models:
        raise UsageError("There is no model to measure. Name at least one, or a study with --suite.")
    if target.host is not None:
        raise UsageError("measure runs models on this host, so --host means nothing to it. Give it to latpred predict.")
    from latpred.calibration.measuring import StoppedError
    from latpred.calibration.measuring import measure as run
    from latpred.cli.progress import progress

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
