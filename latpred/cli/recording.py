"""`latpred measure --suite`: measures a plan into a folder, and says how far it is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from latpred.cli.context import State
from latpred.cli.options import Output, Target
from latpred.cli.output import emit, notice
from latpred.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from latpred.calibration.recorder import Done

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
    from latpred import home
    from latpred.calibration.recorder import record
    from latpred.cli.progress import progress

    device = target.device or "cuda:0"
    state = context.ensure_object(State)
    state.resumable = True
    place = folder or home.data_dir() / "recordings" / f"{suite}-{device.replace(':', '-')}"
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
