"""How far a long run is: what is done, at what rate, and how long the rest will take.

The clock here times nothing but the run itself, so a calendar's is good enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import NamedTuple

Tell = Callable[["Step"], None]


class Step(NamedTuple):
    """A moment of a run.

    done, total : pieces behind it, and all; total is 0 where nobody knows. label : what they are. rate : pieces a
    second. left_s : seconds left at that rate; NaN where nobody knows.
    """

    done: int
    total: int
    label: str
    rate: float
    left_s: float


class Pace:
    """Counts pieces of work and tells of them.

    Pieces that cost nothing, as those read back from a file, count as done but not for the rate.
    """

    def __init__(self, label: str, total: int = 0, tell: Tell | None = None) -> None:
        self._label, self._total, self._tell = label, total, tell
        self._begun = datetime.now(UTC)
        self.done = self._worked = 0

    @property
    def seconds(self) -> float:
        """Since the run began."""
        return (datetime.now(UTC) - self._begun).total_seconds()

    @property
    def rate(self) -> float:
        """Pieces a second, of those that took work; 0 before the first."""
        return self._worked / max(self.seconds, 1e-3)

    def count(self, pieces: int = 1, *, worked: bool = True) -> None:
        """More pieces are done."""
        self.done += pieces
        self._worked += pieces * worked
        if self._tell is not None:
            rate, left = self.rate, self._total - self.done
            seconds = left / rate if self._total and rate else float("nan")
            self._tell(Step(self.done, self._total, self._label, rate, seconds))


@contextmanager
def shown(progress: bool | Tell | None) -> Iterator[Tell | None]:
    """What to tell each step: a function as given, a bar on a terminal's stderr for True, nothing for False or None."""
    if progress is not True:
        yield progress or None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TextColumn("{task.fields[pace]}"))
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None, pace="")
        yield lambda step: bar.update(
            task, description=step.label, completed=step.done, total=step.total or None, pace=pace_text(step)
        )


def pace_text(step: Step) -> str:
    """A step in a few words.

    >>> pace_text(Step(30, 90, "candidates", 10.0, 6.0))
    '30 of 90, 10.0 a second, 6 s left'
    >>> pace_text(Step(30, 0, "candidates", 10.0, float("nan")))
    '30, 10.0 a second'
    """
    parts = [f"{step.done} of {step.total}" if step.total else f"{step.done}", f"{step.rate:.1f} a second"]
    if step.left_s >= 0:
        parts.append(f"{step.left_s:.0f} s left" if step.left_s < 100 else f"{step.left_s / 60:.0f} min left")
    return ", ".join(parts)
