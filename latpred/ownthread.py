"""Changes to the process that only the calling thread sees: silence, and functions replaced.

Users predict beside threads that train, compile, log and print. Python and PyTorch keep warning filters, log handlers
and the functions of their modules for the whole process; what is put there from here acts on the thread that asked for
it and passes everybody else through. No torch here.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

_LOCK = threading.Lock()
_INHERITED = object()


@contextmanager
def silenced() -> Iterator[None]:
    """Drop the warnings and log records of this thread; those of other threads come through.

    >>> with silenced():
    ...     warnings.warn("nobody hears this")
    """
    here = _Here()
    ignore: Any = ("ignore", here, Warning, None, 0)  # a filter of `warnings` matches whatever its `match` says
    filters: Any = warnings.filters
    handlers = _handlers()
    with _LOCK:
        filters.insert(0, ignore)
    for handler in handlers:
        handler.addFilter(here)
    try:
        yield
    finally:
        here.over = True
        for handler in handlers:
            handler.removeFilter(here)
        with _LOCK:
            # Another thread within `catch_warnings` works on a copy, and puts the original back.
            current: Any = warnings.filters
            for known in (filters, current):
                if ignore in known:
                    known.remove(ignore)


class _Here(logging.Filter):
    """Matches a warning, and holds back a log record, of the thread that made it."""

    def __init__(self) -> None:
        super().__init__()
        self.over = False
        self._thread = threading.get_ident()

    def match(self, text: str) -> bool:
        """Whether a warning is this thread's."""
        return not self.over and threading.get_ident() == self._thread

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a log record is another thread's."""
        return self.over or threading.get_ident() != self._thread


def _handlers() -> list[logging.Handler]:
    """Everything that writes log records."""
    known = [logging.root, *list(logging.root.manager.loggerDict.values())]
    found = [handler for logger in known if isinstance(logger, logging.Logger) for handler in logger.handlers]
    last = [] if logging.lastResort is None else [logging.lastResort]
    return list(dict.fromkeys((*found, *last)))


@contextmanager
def replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Let this thread find another function under an attribute of a module or class; other threads call the usual one.

    >>> with replaced(threading, "active_count", lambda: -1):
    ...     threading.active_count()
    -1
    """
    thread = threading.get_ident()
    with _LOCK:
        switch = vars(owner).get(name)
        if not isinstance(switch, _Switch):
            switch = _Switch(vars(owner).get(name, _INHERITED), getattr(owner, name))
            setattr(owner, name, switch)
        switch.own.setdefault(thread, []).append(function)
    try:
        yield
    finally:
        with _LOCK:
            switch.own[thread].pop()
            if not switch.own[thread]:
                del switch.own[thread]
            if not switch.own and vars(owner).get(name) is switch:
                if switch.before is _INHERITED:
                    delattr(owner, name)
                else:
                    setattr(owner, name, switch.before)


class _Switch:
    """Stands where a function was, and calls the function that the calling thread has there.

    Attributes
    ----------
    before : Any
        What the owner's dictionary held, as a staticmethod; `_INHERITED` where it held nothing.
    own : dict[int, list[Callable]]
        Functions of threads that replaced it, the last one valid.
    """

    def __init__(self, before: Any, usual: Callable[..., Any]) -> None:
        self.before, self._usual = before, usual
        self.own: dict[int, list[Callable[..., Any]]] = {}
        self.__name__ = getattr(usual, "__name__", "")

    def __call__(self, *args: Any, **options: Any) -> Any:
        mine = self.own.get(threading.get_ident())
        return (mine[-1] if mine else self._usual)(*args, **options)


SWITCHING: CodeType = _Switch.__call__.__code__  # runs wherever a function is replaced
