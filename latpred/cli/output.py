"""Where results and remarks go: results to stdout or a file, in the form asked for; remarks to stderr.

Nothing here knows what a result means; each verb brings its own text, rows and document.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from latpred.cli.context import State, results
from latpred.cli.options import Output
from latpred.errors import UsageError
from latpred.storage import result_file

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

Print = Callable[["Console"], None]
WIDTH = 80


def emit(
    output: Output,
    *,
    document: Callable[[], Mapping[str, Any]],
    rows: Callable[[], pd.DataFrame],
    text: Print,
) -> None:
    """Write a result in the form asked for."""
    form = _form(output)
    if form == "json":
        import json

        written = json.dumps(document(), indent=2, allow_nan=False) + "\n"
    elif form == "csv":
        written = rows().to_csv(index=False)
    elif output.path is None:
        with results() as stream:
            text(_console(stream))
        return
    else:
        written = _plain(text)
    _write(output.path, written)


def answer(text: object) -> None:
    """Print a result of one line."""
    with results() as stream:
        click.echo(text, file=stream)


def notice(message: str) -> None:
    """Say something on stderr, unless --quiet."""
    context = click.get_current_context(silent=True)
    state = context.find_object(State) if context else None
    if state is None or not state.quiet:
        click.echo(message, err=True)


def _form(output: Output) -> str:
    if output.as_json and output.as_csv:
        raise UsageError("--json and --csv exclude each other; give one.")
    if output.as_json or output.as_csv:
        return "json" if output.as_json else "csv"
    suffix = output.path.suffix.lower() if output.path else ""
    return {".json": "json", ".csv": "csv"}.get(suffix, "text")


def _write(path: Path | None, text: str) -> None:
    if path is None:
        with results() as stream:
            click.echo(text, file=stream, nl=False)
        return
    with result_file(path, "Name another file with -o.") as part:
        part.write_text(text)
    notice(f"wrote {path}")


def _console(stream: TextIO) -> Console:
    from rich.console import Console

    class Results(Console):
        def on_broken_pipe(self) -> None:
            raise  # by itself, rich ends the program

    console = Results(file=stream, soft_wrap=False, highlight=False)
    console.width = max(console.width, WIDTH)  # a narrower terminal wraps lines, where rich would cut numbers short
    return console


def _plain(text: Print) -> str:
    import io

    from rich.console import Console

    stream = io.StringIO()
    text(Console(file=stream, width=WIDTH, highlight=False, force_terminal=False))
    return stream.getvalue()
