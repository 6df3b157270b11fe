"""A limit in seconds for work that may hang: first it is interrupted; where that is not possible, the process ends.

A hang in Python, or in anything that a signal wakes, is interrupted and becomes an error like any other. One inside a
library that never returns cannot be: then the process says so and ends, and a resumed run leaves the cell out.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from latpred.errors import LatpredError

HARD = 4.0  # times the limit, after which work that no signal interrupts ends the process
EXIT_CODE = 3  # the environment is at fault, as everywhere on the command line

Given = TypeVar("Given")
Result = TypeVar("Result")


class TimeLimitError(LatpredError):
    """Work took longer than it may."""


@contextmanager
def time_limit(
    seconds: float, label: str
) -> Iterator[Callable[[Callable[[Given], Result]], Callable[[Given], Result]]]:
    """Give what makes a limited function of a function of one argument.

    After so many seconds its call is interrupted with a `TimeLimitError`, in the main thread of a system with signals.
    After `HARD` times as long the process ends, whatever hangs, with a sentence on what was under way.

    >>> with time_limit(5.0, "a sum") as limited:
    ...     limited(sum)([1, 2])
    3
    """
    watchdog = threading.Timer(HARD * seconds, _end, (seconds, label))
    watchdog.daemon = True
    watchdog.start()
    try:
        yield lambda call: lambda given: _interrupted_after(seconds, call, given)
    finally:
        watchdog.cancel()


def _interrupted_after(seconds: float, call: Callable[[Given], Result], given: Given) -> Result:
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        return call(given)

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise TimeLimitError(f"it took longer than {seconds:g} s")

    before: Any = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return call(given)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _end(seconds: float, label: str) -> None:
    print(
        f"latpred: {label} hangs where nothing can interrupt it, for more than {HARD * seconds:g} s. What was measured "
        "is kept: run the same command again, and it is left out once it hung twice.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(EXIT_CODE)
