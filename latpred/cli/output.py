"""Where results and remarks go: results to stdout or a file, in the form asked for; remarks and progress to stderr.

Nothing here knows what a result means; each verb brings its own page, rows and document.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from latpred.cli.main import state
from latpred.cli.options import Output
from latpred.progress import Listener, ProgressEvent, bar, each_tenth, time_left
from latpred.render import WIDTH, Page

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

GO_ON = "run the same command to go on"  # after an interrupt, where what was measured is kept


def emit(
    output: Output,
    *,
    document: Callable[[], Mapping[str, Any]],
    rows: Callable[[], pd.DataFrame | Sequence[Mapping[str, Any]]],
    page: Callable[[], Page],
) -> None:
    """Write a result in the form asked for."""
    form = output.form
    if form == "text" and output.path is None:
        _print(page())
        return
    if form == "json":
        text = json.dumps(document(), indent=2, allow_nan=False)
    elif form == "csv":
        import pandas as pd

        text = pd.DataFrame(rows()).to_csv(index=False).removesuffix("\n")
    else:
        text = page().text()
    if output.path is None:
        answer(text)
        return
    from latpred.storage import result_file

    with result_file(output.path) as part:
        part.write_text(text + "\n", encoding="utf-8")
    notice(f"wrote {output.path}")


def emit_rows(output: Output, schema: str, name: str, rows: pd.DataFrame | list[dict[str, Any]], page: Page) -> None:
    """Write rows in the form asked for; JSON has them under a name."""
    emit(
        output,
        document=lambda: {"schema": schema, name: rows if isinstance(rows, list) else records(rows)},
        rows=lambda: rows,
        page=lambda: page,
    )


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a table for a JSON document, in which empty cells are null."""
    rows: list[dict[str, Any]] = json.loads(table.to_json(orient="records", double_precision=15))
    return rows


def answer(text: object) -> None:
    """Print a result."""
    click.echo(text, file=state().results)


def notice(message: str) -> None:
    """Say something on stderr, unless --quiet."""
    if not state().quiet:
        click.echo(message, err=True)


def draw(path: Path | None, figure: Callable[[], Figure]) -> None:
    """Make a figure and write it, where one is wanted."""
    if path is not None:
        from latpred.plot import save

        notice(f"wrote {save(figure(), path)}")


def _print(page: Page) -> None:
    from rich.console import Console

    console = Console(file=state().results, highlight=False)
    console.width = max(console.width, WIDTH)  # a narrower terminal wraps lines, where rich would cut numbers short
    console.print(page, crop=False)


@contextmanager
def progress(title: str, *, go_on: str = "") -> Iterator[Listener | None]:
    """Give what shows how far a measurement is: a bar on a terminal, else a line each tenth; None with --quiet.

    Of one that keeps what it measures, `go_on` is what to do after an interrupt.
    """
    state().go_on = go_on
    if state().quiet:
        yield None
    elif sys.stderr.isatty():
        with bar(title, _how_far) as show:
            yield show
    else:
        yield each_tenth(title, notice)
    state().go_on = ""  # an interrupt does not get here: what was measured is kept, and told


def _how_far(event: ProgressEvent) -> str:
    done = f"{100 * min(event.done / event.total, 1.0):.0f} %" if event.total else ""  # slowed cells add rounds
    return "  ".join(filter(None, (done, time_left(event), event.label)))


@contextmanager
def working(title: str) -> Iterator[None]:
    """Show on a terminal that something goes on whose end nobody knows; say nothing elsewhere."""
    if state().quiet or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(title):
        yield
