"""The verb that runs whole models and times them: measure, also for a whole study."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from latpred import host
from latpred.cli.options import Output, batch_option, given, output_options, takes, verb
from latpred.cli.output import GO_ON, emit, emit_rows, notice, progress
from latpred.errors import UsageError
from latpred.render import Page, Table, listed
from latpred.units import format_duration

if TYPE_CHECKING:
    import pandas as pd

    from latpred.calibration.measurement.recorder import Done

STUDIES = ("paper", "heldout", "check")
_NAMED = 3  # settings named of those that failed alike, and stages and models of which all did
_PLANNED = ("batches", "seq", "image", "precision", "protocol", "repeats", "threads")


@verb(
    "latpred measure resnet18 bert-base-uncased --batch 1-32:2x -o measured.csv",
    "latpred measure --suite paper --device cuda:0 --budget 9m --record h200",
)
@click.argument("models", nargs=-1, metavar="[MODEL...]")
@batch_option("1,8,32")
@takes("seq", "image", "precision_to_measure")
@click.option("--device", "-d", help="cpu, cuda:0 or simulated.  [default: cpu, with --suite cuda:0]")
@takes("runtime", "protocol", "threads_to_measure", "repeats", "budget_s")
@click.option("--suite", type=click.Choice(STUDIES), help="Measure a whole study in place of models.")
@click.option("--stage", "stages", multiple=True, help="Of the study, only this.  May be given again.")
@click.option("--record", type=click.Path(file_okay=False, path_type=Path), help="Folder to keep the study in.")
@output_options
def measure(models: tuple[str, ...], batches: tuple[int, ...], output: Output, **asked: Any) -> None:
    """Time whole models on this machine.

    They run in rounds, and the repeat noise of the same run is reported. With --suite a whole study is measured
    instead, in the order of its worth, and kept as a recording to replay; a run that was interrupted, or whose budget
    was spent, goes on where it stopped.
    """
    suite, study = asked.pop("suite"), {name: asked.pop(name) for name in ("stages", "record")}
    if suite is not None:
        _record(suite, output, **study, **asked)
        return
    if not models:
        raise UsageError("There is no model to measure. Name at least one, or a study with --suite.")
    for option in given("stages", "record"):
        raise UsageError(f"{option} is for a study; add --suite, or leave it out. -o keeps what is measured of models.")
    from latpred.calibration.measurement.whole_models import StoppedError
    from latpred.calibration.measurement.whole_models import measure as run

    asked["device"] = asked["device"] or "cpu"
    try:
        with progress("measuring") as show:
            table = run(list(models), batches, progress=show, **asked)
    except StoppedError as stopped:
        _show(stopped.table, output)
        measured = int((stopped.table["status"] == "ok").sum())
        place = f"they are in {output.path}" if output.path else "they are above"
        raise KeyboardInterrupt(f"{measured} of {len(stopped.table)} cells were measured by then, {place}") from None
    _show(table, output)
    if (table["status"] != "ok").all():
        click.get_current_context().exit(3)


def _show(table: pd.DataFrame, output: Output) -> None:
    """Print a measurement table: a row for each cell that was timed, a line for each that was not."""
    from latpred.calibration.timing.reference_speed import SLOW

    slow = [ratio for ratio in table.get(host.SLOWED, ()) if ratio > SLOW]
    said = f"{len(slow)} of these found no moment at full speed: the machine was up to {max(slow, default=1):.1f} times"
    more = [f"{said} slower"] if slow else []
    timed, failed = [], []
    for row in table.to_dict("records"):
        if row["status"] != "ok":
            failed.append(f"{row['model']} batch {row['batch']}: {row['status']}")
            continue
        times = (format_duration(row["latency_s"]), format_duration(row["spread_s"]))
        noise = f"{row['repeat_ratio'] - 1:.1%}" if row["repeat_ratio"] == row["repeat_ratio"] else "-"
        timed.append((row["model"], str(row["batch"]), *times, str(row["n"]), noise))
    heads = ("model", "batch", "latency", "spread", "rounds", "repeat noise")
    page = Page("", [Table(heads, timed, folded=("model",)), *more, *failed])
    emit_rows(output, "latpred.measure/1", "rows", table, page)


def _record(
    suite: str,
    output: Output,
    *,
    stages: tuple[str, ...],
    record: Path | None,
    device: str | None,
    runtime: str,
    budget_s: float | None,
    **_: object,
) -> None:
    """Measure a study on a device until it is done or the budget is spent, and print how much of it there is."""
    for option in given(*_PLANNED):
        raise UsageError(f"--suite {suite} plans {option} itself; leave that out.")
    if click.get_current_context().params["models"]:
        raise UsageError("Models and --suite exclude each other. Give one of them.")
    from latpred import storage
    from latpred.calibration.measurement import recorder

    device, runtimes = device or "cuda:0", (runtime,) if given("runtime") else ()
    folder = record or storage.data_dir() / "recordings" / f"{suite}-{device.replace(':', '-')}"
    with progress(f"measuring {suite}", go_on=GO_ON) as show:
        done = recorder.record(
            suite, folder, device, stages=stages, runtimes=runtimes, budget_s=budget_s, progress=show
        )
    for note in done.notes:
        notice(note)
    counts = {name: {"measured": now, "planned": all_} for name, (now, all_) in done.stages.items()}
    emit(
        output,
        document=lambda: {
            "schema": "latpred.recorded/1",
            "folder": str(done.folder),
            "stages": counts,
            "complete": done.complete,
            "failed": done.failed,
            "empty": done.empty,
        },
        rows=lambda: [{"stage": name, **count} for name, count in counts.items()],
        page=lambda: _recorded_page(done),
    )
    if done.empty:
        click.get_current_context().exit(3)


def _recorded_page(done: Done) -> Page:
    lines = [f"{name:<18}{measured:>5} of {planned:>5}" for name, (measured, planned) in done.stages.items()]
    for reason, keys in done.failed.items():
        lines.append(f"{len(keys)} in vain, {reason.rstrip('.')}: {listed(keys, _NAMED)}")
    lines += [f"nothing could be measured of {listed(done.empty, _NAMED)}"] * bool(done.empty)
    lines.append(f"kept in {done.folder}")
    return Page("", [*lines, *["The same command again goes on where this stopped."] * bool(done.left)])
