"""How far a long run is: what is done, at what rate, and how long the rest will take.

The clock here times nothing but the run itself, so a calendar's is good enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import NamedTuple


class ProgressEvent(NamedTuple):
    """A moment of a run.

    done, total : pieces behind it, and all; total is 0 where nobody knows. label : what they are. rate : pieces a
    second. left_s : seconds left at that rate; NaN where nobody knows.
    """

    done: int
    total: int
    label: str
    rate: float
    left_s: float


Listener = Callable[[ProgressEvent], None]


class ProgressCounter:
    """Counts pieces of work and tells a listener.

    Pieces that cost nothing, as those read back from a file, count as done but not for the rate.
    """

    def __init__(self, label: str, total: int = 0, listener: Listener | None = None) -> None:
        self._label, self._total, self._listener = label, total, listener
        self._begun = datetime.now(UTC)
        self._done = self._worked = 0

    @property
    def seconds(self) -> float:
        """Since the run began."""
        return (datetime.now(UTC) - self._begun).total_seconds()

    def count(self, pieces: int = 1, *, worked: bool = True) -> None:
        """More pieces are done."""
        self._done += pieces
        self._worked += pieces * worked
        if self._listener is not None:
            rate, left = self._worked / max(self.seconds, 1e-3), self._total - self._done
            seconds = left / rate if self._total and rate else float("nan")
            self._listener(ProgressEvent(self._done, self._total, self._label, rate, seconds))


@contextmanager
def shown(progress: bool | Listener | None) -> Iterator[Listener | None]:
    """Who listens: a function as given, a bar on a terminal's stderr for True, nobody for False or None."""
    if progress is not True:
        yield progress or None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TextColumn("{task.fields[text]}"))
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None, text="")
        yield lambda event: bar.update(
            task,
            description=event.label,
            completed=event.done,
            total=event.total or None,
            text=progress_text(event),
        )


def progress_text(event: ProgressEvent) -> str:
    """An event in a few words.

    >>> progress_text(ProgressEvent(30, 90, "candidates", 10.0, 6.0))
    '30 of 90, 10.0 a second, 6 s left'
    >>> progress_text(ProgressEvent(30, 0, "candidates", 10.0, float("nan")))
    '30, 10.0 a second'
    """
    done = f"{event.done} of {event.total}" if event.total else f"{event.done}"
    parts = [done, f"{event.rate:.1f} a second"]
    if event.left_s >= 0:
        parts.append(f"{event.left_s:.0f} s left" if event.left_s < 100 else f"{event.left_s / 60:.0f} min left")
    return ", ".join(parts)
