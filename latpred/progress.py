"""How far a long run is: what is done, at what rate, how long the rest will take, and what ends it early."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf, nan
from typing import NamedTuple

Listener = Callable[["ProgressEvent"], None]
QUIET_S = 60.0  # after which whoever waits is told again


class ProgressEvent(NamedTuple):
    """How far a run is, as a `progress` function is told.

    A function of a call that counts nothing is told a line of text instead, so `progress=print` suits every call.

    Attributes
    ----------
    done, total : float
        Pieces of work behind it and all of them, of a calibration seconds; total is 0 where nobody knows.
    label : str
        What is done, or comes now.
    rate : float
        Pieces a second; NaN where nobody counts.
    left_s : float
        Seconds left at that rate; NaN where nobody knows.
    cells : int
        What a calibration has measured.
    error : float or None
        Median error of a calibration's fit on networks that it did not see; None but after a fit.
    """

    done: float
    total: float
    label: str
    rate: float = nan
    left_s: float = nan
    cells: int = 0
    error: float | None = None

    def __str__(self) -> str:
        """A line that says where the run is."""
        return f"{progress_text(self)}: {self.label}"


class ProgressCounter:
    """Counts pieces of work, tells of them, and says when the time for them is spent.

    Pieces that cost nothing, as those read back from a file, count as done but not for the rate.
    """

    def __init__(
        self,
        label: str = "",
        total: int = 0,
        listener: Listener | None = None,
        *,
        budget_s: float | None = None,
    ) -> None:
        self._label, self._total, self._listener = label, total, listener
        self._budget_s = inf if budget_s is None else budget_s
        self._begun_s = time.monotonic()
        self.done = self._worked = 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun_s

    def count(self, pieces: int = 1, *, worked: bool = True) -> None:
        self.done += pieces
        self._worked += pieces * worked
        self._say(self._label)

    def next(self, label: str) -> bool:
        """Announce a piece, which counts as done by the next; False when there is no time for it."""
        if self.seconds > self._budget_s:
            return False
        self._say(label)
        self.done += 1
        self._worked += 1
        return True

    def _say(self, label: str) -> None:
        if self._listener is not None:
            rate = self._worked / max(self.seconds, 1e-3)
            left_s = max(0, self._total - self.done) / rate if self._total and rate else nan
            self._listener(ProgressEvent(self.done, self._total, label, rate, left_s))


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Have SIGTERM do what Ctrl-C does, which keeps what was measured, unless it is answered in another way already.

    `timeout` and the schedulers of clusters end a run with it.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def shown(progress: bool | Listener | None) -> Iterator[Listener | None]:
    """What to tell each event: a function as given, a bar on a terminal's stderr for True, else nothing."""
    if progress is True:
        with bar("candidates", progress_text) as listener:
            yield listener
    else:
        yield progress or None


@contextmanager
def bar(title: str, text: Callable[[ProgressEvent], str]) -> Iterator[Listener]:
    """A bar on stderr with a text about the last event; nothing where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    column = Column(no_wrap=True, overflow="ellipsis")
    last = TextColumn("{task.fields[text]}", markup=False, table_column=column)  # names may hold brackets
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), last)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as drawn:
        task = drawn.add_task(title, total=None, text="")
        yield lambda event: drawn.update(task, completed=event.done, total=event.total or None, text=text(event))


def each_tenth(title: str, say: Callable[[str], None]) -> Listener:
    """A listener that says how far a run is when it starts, after every tenth of it, and in one that lasts minutes.

    A run that counts anew, as one that traces all models before it measures them, starts again; one that goes on for
    longer than was planned says so.
    """
    last, said_s, done = -1, time.monotonic(), 0.0

    def listener(event: ProgressEvent) -> None:
        nonlocal last, said_s, done
        last, done = -1 if event.done == 0 < done else last, event.done
        share = min(1.0, event.done / event.total) if event.total else 0.0
        tenth = int(10 * share)
        longer = tenth < last - 1
        if tenth > last or longer or time.monotonic() - said_s > QUIET_S:
            within = tenth <= last
            last, said_s = tenth if longer else max(last, tenth), time.monotonic()
            told = (f"{int(100 * share) if within else 10 * last} %", time_left(event), event.label if within else "")
            say(f"{title}: {', '.join(filter(None, told))}")

    return listener


def progress_text(event: ProgressEvent) -> str:
    """How far a run is, in a few words.

    >>> progress_text(ProgressEvent(30, 90, "candidates", 10.0, 6.0))
    '30 of 90, 10.0 a second, 6 s left'
    >>> progress_text(ProgressEvent(30, 0, "candidates", 10.0))
    '30, 10.0 a second'
    >>> print(ProgressEvent(3, 12, "resnet-18 batch 1"))
    3 of 12: resnet-18 batch 1
    """
    counted = f"{event.done:.0f} of {event.total:.0f}" if event.total else f"{event.done:.0f}"
    rate = f"{event.rate:.1f} a second" if event.rate == event.rate else ""
    return ", ".join(filter(None, (counted, rate, time_left(event))))


def time_left(event: ProgressEvent) -> str:
    """How long the rest takes; "" where nobody knows.

    >>> time_left(ProgressEvent(30, 90, "visits", left_s=240.0))
    '4 min left'
    """
    if not 0 < event.left_s < inf:
        return ""
    return f"{event.left_s:.0f} s left" if event.left_s < 100 else f"{event.left_s / 60:.0f} min left"
