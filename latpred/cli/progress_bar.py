"""How far a measurement is, on stderr: a bar with the time left on a terminal, a line every tenth elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from latpred.cli.main import State
from latpred.cli.output import notice
from latpred.progress import time_left

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

    from latpred.progress import ProgressEvent


Show = Callable[["ProgressEvent"], None]


@contextmanager
def progress(title: str) -> Iterator[Show | None]:
    """Give the function that shows steps as they come; None with --quiet."""
    if click.get_current_context().ensure_object(State).quiet:
        yield None
    elif sys.stderr.isatty():
        with _bar(title) as show:
            yield show
    else:
        yield _lines(title)


@contextmanager
def working(title: str) -> Iterator[None]:
    """Show on a terminal that something goes on whose end nobody knows; say nothing elsewhere."""
    if click.get_current_context().ensure_object(State).quiet or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(title):
        yield


@contextmanager
def _bar(title: str) -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(*_columns(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None, label="", left="")

        def show(event: ProgressEvent) -> None:
            bar.update(task, completed=event.done, total=event.total, label=event.label, left=time_left(event))

        yield show


def _columns() -> tuple[ProgressColumn, ...]:
    from rich.progress import BarColumn, TextColumn
    from rich.table import Column

    return (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("{task.fields[left]}"),
        TextColumn("{task.fields[label]}", table_column=Column(no_wrap=True, overflow="ellipsis")),
    )


def _lines(title: str) -> Show:
    """For logs: a line at the start and each time another tenth is done."""
    last = -1

    def show(event: ProgressEvent) -> None:
        nonlocal last
        tenth = min(10, int(10 * event.done / event.total)) if event.total else 0
        if tenth > last:
            last = tenth
            notice(f"{title}: {10 * tenth} %{', ' * bool(time_left(event))}{time_left(event)}")

    return show
