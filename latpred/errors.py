"""Every error latpred raises on purpose, and what an error comes of.

Each message says first what was wrong with what was given, then the command or argument that fixes it.
`exit_code` is what the command line exits with; nothing here prints.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class LatpredError(Exception):
    """Base of all latpred errors."""

    exit_code = 2


class _SurroundingsError(LatpredError):
    """Not the request is wrong but what it meets: a machine, its files, its packages."""

    exit_code = 3


class BusyWarning(UserWarning):
    """Other work had the processors while models were timed."""


class UsageError(LatpredError, ValueError):
    """An argument is wrong: batch 0, an unknown runtime, a bad shape."""


class UnknownModelError(UsageError):
    """No model goes by this name."""


class UnknownGpuError(UsageError):
    """There is no datasheet of a GPU of this name."""


class MissingPackageError(_SurroundingsError):
    """A package that this needs is not installed, or cannot be imported."""


class TableError(UsageError):
    """A measurement or predicted table has a missing, unknown, empty or impossible value."""


class RecordingError(_SurroundingsError):
    """A recording is missing, damaged, changed since it was saved, or of another schema."""


class TimeLimitError(_SurroundingsError):
    """Work took longer than it may."""


class TraceError(LatpredError):
    """The model could not be traced; names the op and the module."""


class CandidateError(LatpredError):
    """A candidate of a search could not be predicted; names it by its position."""


class WorkerError(_SurroundingsError):
    """No worker of a run over several processes finishes anything, or none would predict what this process does."""


class UnknownOpError(TraceError):
    """`strict` was asked for and an op has no cost formula."""

    exit_code = 1


class RuntimeRefusalError(LatpredError):
    """A runtime cannot run the model (an op it cannot capture, export or compile); names the op that it cannot run."""


class ProfileError(_SurroundingsError):
    """A profile is missing, damaged, of another schema or of another machine."""


class NoProfileError(ProfileError):
    """Nothing was calibrated yet for the device asked for."""


class HostError(ProfileError):
    """A host's dispatch was not measured, cannot be read, or cannot be compared with another's."""


class CacheError(_SurroundingsError):
    """The user's cache directory cannot be used."""


class CalibrationError(_SurroundingsError):
    """The machine could not be measured."""


class BusyError(CalibrationError):
    """Another calibration holds the lock."""


class DeviceError(_SurroundingsError):
    """The device asked for is not there."""


@contextmanager
def raising_stops() -> Iterator[None]:
    """Raise what struck in a runtime's tools, as a time limit, as it was, and not as a refusal of the model."""
    try:
        yield
    except RuntimeRefusalError as error:
        raise_stop(error)
        raise


def is_stop(error: BaseException) -> bool:
    """Whether an error ends work whatever it was about, and says nothing of the model; one of a socket does not."""
    late = isinstance(error, TimeoutError) and error.errno is None
    return late or isinstance(error, (TimeLimitError, KeyboardInterrupt))


def raise_stop(error: BaseException) -> None:
    """Raise what an error comes of where that is a time limit or Ctrl-C: then nobody knows whether the model suits.

    A TimeoutError that was being handled says nothing: tools wait for locks, and then go on without.
    """
    causes = [one for one in chain_of(error, contexts=False) if one is error or type(one) is TimeoutError]
    found = [one for one in chain_of(error) if not isinstance(one, TimeoutError)]
    for one in filter(is_stop, [*causes, *found]):
        raise one from None


def one_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split()) or "no message"


def chain_of(
    error: BaseException, *, contexts: bool = True, until: BaseException | None = None
) -> Iterator[BaseException]:
    """An error and all that led to it, each once; one that says "from None" still knows in what it was raised.

    What was being handled before, and all that led to that, is left out where it is said as `until`.
    """
    waiting: list[BaseException | None] = [error]
    seen: list[BaseException | None] = [until]
    while waiting:
        one = waiting.pop()
        if one is not None and all(one is not other for other in seen):
            seen.append(one)
            waiting += (one.__context__ if contexts else None, one.__cause__)
            yield one
