"""The calibration session: one at a time per device, journalled cell by cell, resumed after any kind of end.

Knows nothing of what a cell measures: a function given to `Session.run` does, and what it returns is appended to the
journal and forced to the disk before the next cell starts. So a kill loses at most the cell under way, and a journal
is a file of raw samples that can be fitted again. No cell ends a run: one that fails, hangs, or ends the process
becomes a row with the reason, and is tried once more when the run is resumed.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import IO, NamedTuple, TypeVar

import filelock
import msgspec

from latpred import storage
from latpred.calibration.cells import Cell
from latpred.calibration.timing.time_limit import time_limit
from latpred.calibration.timing.timer import Timing
from latpred.errors import BusyError, CalibrationError, DeviceError
from latpred.profile.document import Machine

JOURNAL_VERSION = 1
JOURNAL = "journal.jsonl"
LAST = "last.jsonl"
UNDER_WAY = "under-way.json"
OUT_OF_MEMORY = "out of memory"
ENDED = "ended the process"
CELL_LIMIT_S = 120.0  # a hundred times what a cell is given; only an export or a compiler comes near
MOST_TRIES = 2

T = TypeVar("T")


class Sampled(NamedTuple):
    """What measuring a cell gave: timings by what was timed, and the calls of a network that were timed in place.

    speed : microseconds of the reference work around it. disturbed : what other work did meanwhile; "" when nothing.
    """

    timings: Mapping[str, Timing]
    calls_us: tuple[float, ...] = ()
    speed: Mapping[str, float] = MappingProxyType({})
    disturbed: str = ""


Measure = Callable[[Cell], Mapping[str, Timing] | Sampled]


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One cell of a journal: its timings by what was timed ("issue", "queued", "single" …), or why there are none."""

    cell: Cell
    timings: dict[str, Timing]
    seconds: float  # what measuring took, on the wall clock
    error: str = ""
    calls_us: tuple[float, ...] = ()  # of each call from Python, for a network whose calls were timed in place
    speed: dict[str, float] = {}  # microseconds of the reference work around it
    disturbed: str = ""  # what other work did meanwhile
    tries: int = 1  # how often it was started, by this session and those that it goes on from


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """First line of a journal: what the rows hold for."""

    journal: int
    machine: Machine
    settings: str
    started: str  # ISO 8601, UTC


class UnderWay(msgspec.Struct, frozen=True):
    """The cell that is being timed, and how often it was started: what a process that was killed leaves behind."""

    key: str
    tries: int


class Holder(msgspec.Struct, frozen=True):
    """Who holds the lock."""

    pid: int
    since: str


def directory(device: str) -> Path:
    """Where the sessions of a device keep their journal and lock.

    Examples
    --------
    >>> directory("cuda:0").name
    'cuda-0'
    """
    return storage.data_dir() / "calibration" / re.sub(r"[^A-Za-z0-9._-]", "-", device)


def settings_hash(settings: object) -> str:
    """Digest of whatever the measurements depend on; a journal of other settings is not resumed."""
    return hashlib.sha256(msgspec.json.encode(settings, order="sorted")).hexdigest()[:16]


def read_rows(path: Path) -> list[Row]:
    """Rows of a journal, a torn or damaged line left out.

    Raises
    ------
    CalibrationError
        When the file cannot be read or is no journal.
    """
    try:
        header, rows, _ = _parse(path.read_bytes())
    except OSError as error:
        raise CalibrationError(
            f"cannot read {path}: {error.strerror or error}. Name a journal in JSON lines."
        ) from error
    if header is None:
        raise CalibrationError(f"{path} is no calibration journal of version {JOURNAL_VERSION}. Calibrate again.")
    return rows


class Session:
    """A calibration under way, as a context manager.

    Parameters
    ----------
    folder : Path
        Where journal and lock live; see `directory`.
    machine : Machine
        Identity the journal is bound to.
    settings : object
        Anything JSON can hold that the measurements depend on.
    fresh : bool
        Start anew even where there is something to resume.
    limit_s : float
        Seconds after which a cell that still runs is given up.

    Raises
    ------
    BusyError
        On entry, when another session of this folder is under way.
    CalibrationError
        On entry, when the folder cannot be written.
    """

    def __init__(
        self, folder: Path, machine: Machine, settings: object, *, fresh: bool = False, limit_s: float = CELL_LIMIT_S
    ) -> None:
        self._folder = folder
        self._header = Header(JOURNAL_VERSION, machine, settings_hash(settings), _now())
        self._fresh = fresh
        self._limit_s = limit_s
        self._rows: dict[str, Row] = {}
        self._tries: dict[str, int] = {}  # of cells that an earlier session could not measure
        self._resources = ExitStack()
        self._file: IO[bytes] | None = None
        self.resumed = 0

    def __enter__(self) -> Session:
        with ExitStack() as stack:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(_lock(self._folder))
                self._open_journal()
            except OSError as error:
                raise CalibrationError(_unwritable(self._folder, error)) from error
            self._resources = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        (self._folder / UNDER_WAY).unlink(missing_ok=True)  # whoever leaves here was not killed
        self._resources.close()

    @property
    def rows(self) -> tuple[Row, ...]:
        """Everything measured so far, what was resumed included, in order."""
        return tuple(self._rows.values())

    def begun(self, runtime: str) -> bool:
        """Whether the journal has anything of a runtime already."""
        return any(row.cell.runtime == runtime for row in self._rows.values())

    def holds(self, cell: Cell) -> bool:
        """Whether the journal has this cell already."""
        return cell.key in self._rows

    def run(self, cell: Cell, measure: Measure, *, again: bool = False) -> Row:
        """Measure a cell unless the journal has it; `again` replaces what it has.

        A cell that fails becomes a row with its error. One that runs out of memory also spares its larger siblings the
        attempt: they get the same row.

        Raises
        ------
        DeviceError
            When the device is lost; the cell is left for the next session.
        CalibrationError
            When the journal cannot be written.
        """
        known = self._rows.get(cell.key)
        if known is not None and not again:
            return known
        row = self._spared(cell) or self._ended_before(cell) or self._tried(cell, measure)
        if known is None or known.error or not row.error:
            self._append(row)
        return row

    def _tried(self, cell: Cell, measure: Measure) -> Row:
        """Measure a cell, leaving word of it on the disk for the case that it ends the process."""
        tries = self._tries.get(cell.key, 0) + 1
        try:
            (self._folder / UNDER_WAY).write_bytes(msgspec.json.encode(UnderWay(cell.key, tries)))
        except OSError as error:
            raise CalibrationError(_unwritable(self._folder, error)) from error
        with time_limit(self._limit_s, cell.key) as limited:
            row = measured(cell, limited(measure))
        return msgspec.structs.replace(row, tries=tries)

    def _ended_before(self, cell: Cell) -> Row | None:
        """The row of a cell that was started often enough and ended the process each time."""
        tries = self._tries.get(cell.key, 0)
        return Row(cell, {}, 0.0, f"{ENDED} each time it was timed", tries=tries) if tries >= MOST_TRIES else None

    def earlier(self) -> tuple[Row, ...]:
        """Rows of the last calibration that was completed, where it was one of the same machine and settings."""
        last = self._folder / LAST
        header, rows, _ = _parse(last.read_bytes()) if last.exists() else (None, [], 0)
        return tuple(rows) if _same(header, self._header) else ()

    def complete(self, *, extending: bool = False) -> Path:
        """End the session for good: the journal becomes the record of the last calibration, and nothing is resumed.

        Call it once the profile is saved. One that was `extending` the last calibration adds to its record.
        """
        if self._file is not None:
            self._file.close()
            self._file = None
        last, journal = self._folder / LAST, self._folder / JOURNAL
        measured = {row.cell.runtime for row in self._rows.values()}
        older = [row for row in self.earlier() if row.cell.runtime not in measured] if extending else []
        if older:
            lines = [msgspec.json.encode(part) for part in (self._header, *older, *self._rows.values())]
            _replace(last, b"\n".join(lines) + b"\n")
            journal.unlink()
        else:
            os.replace(journal, last)
        _sync_directory(self._folder)
        return last

    def _open_journal(self) -> None:
        path = self._folder / JOURNAL
        header, rows, length = _parse(path.read_bytes()) if path.exists() else (None, [], 0)
        if self._fresh or not _same(header, self._header):
            rows = []
            _replace(path, msgspec.json.encode(self._header) + b"\n")
        else:
            os.truncate(path, length)
        latest = {row.cell.key: row for row in rows}
        self._rows = {key: row for key, row in latest.items() if _settled(row)}
        self._tries = {key: row.tries for key, row in latest.items() if key not in self._rows}
        left = _left_under_way(self._folder / UNDER_WAY) if rows or path.exists() else None
        if left is not None and not self._fresh and left.key not in self._rows:
            self._tries[left.key] = left.tries
        self.resumed = len(self._rows)
        self._file = path.open("ab")

    def _append(self, row: Row) -> None:
        if self._file is None:
            raise CalibrationError("this session is over. Open another one to measure more.")
        try:
            self._file.write(msgspec.json.encode(row) + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise CalibrationError(_unwritable(self._folder, error)) from error
        self._rows[row.cell.key] = row

    def _spared(self, cell: Cell) -> Row | None:
        """The row of a cell at least as large in everything as one that ran out of memory."""
        for row in self._rows.values():
            if row.error.startswith(OUT_OF_MEMORY) and _at_least(cell, row.cell):
                return Row(cell, {}, 0.0, f"{OUT_OF_MEMORY}: already {row.cell.key} did not fit")
        return None


def measured(cell: Cell, measure: Measure) -> Row:
    """Measure a cell; one that fails becomes a row with its error."""
    start = time.monotonic()
    sampled: Mapping[str, Timing] | Sampled
    try:
        sampled, error = measure(cell), ""
    except MemoryError as failure:
        sampled, error = {}, f"{OUT_OF_MEMORY}: {failure}"
    except DeviceError:
        raise
    except Exception as failure:
        # One op that a device or a torch version lacks must not end a calibration of hundreds of others.
        sampled, error = {}, f"{type(failure).__name__}: {str(failure)[:200]}"
    found = sampled if isinstance(sampled, Sampled) else Sampled(sampled)
    error = error or _not_finite(found)
    if error:
        found = Sampled({}, disturbed=found.disturbed)
    return Row(
        cell, dict(found.timings), time.monotonic() - start, error, found.calls_us, dict(found.speed), found.disturbed
    )


def _settled(row: Row) -> bool:
    """Whether a resumed session has no reason to measure a cell again."""
    return not row.error or row.tries >= MOST_TRIES or row.error.startswith(OUT_OF_MEMORY)


def _not_finite(sampled: Sampled) -> str:
    """Which of the times is no number, in words; "" when all are."""
    wrong = [name for name, timing in sampled.timings.items() if not math.isfinite(timing.median_s)]
    if not all(map(math.isfinite, sampled.calls_us)):
        wrong.append("calls")
    return f"no number was measured for {', '.join(wrong)}" if wrong else ""


def _left_under_way(path: Path) -> UnderWay | None:
    """The cell that a killed process was timing; None where there is none, or nothing readable."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=UnderWay)
    except (OSError, msgspec.MsgspecError):
        return None


def _at_least(cell: Cell, other: Cell) -> bool:
    same = (cell.kind, cell.name, cell.precision, cell.runtime) == (
        other.kind,
        other.name,
        other.precision,
        other.runtime,
    )
    return same and cell.dims.keys() == other.dims.keys() and all(cell.dims[k] >= v for k, v in other.dims.items())


def _same(found: Header | None, wanted: Header) -> bool:
    return found is not None and (found.machine, found.settings) == (wanted.machine, wanted.settings)


def _parse(data: bytes) -> tuple[Header | None, list[Row], int]:
    """Header, whole rows, and the length in bytes up to the end of the last whole line."""
    length = data.rfind(b"\n") + 1
    lines = data[:length].splitlines()
    header = _decoded(lines[0], Header) if lines else None
    if header is None or header.journal != JOURNAL_VERSION:
        return None, [], 0
    rows = [row for line in lines[1:] if (row := _decoded(line, Row)) is not None]
    return header, rows, length


def _decoded(line: bytes, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.MsgspecError:
        return None


def _lock(folder: Path) -> ExitStack:
    """Hold the folder's lock; who holds it is kept beside it, since opening a lock file may empty it."""
    lock, holder = filelock.FileLock(folder / "lock"), folder / "holder.json"
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise BusyError(_busy(folder, holder)) from None
    stack = ExitStack()
    stack.callback(lock.release)
    try:
        _replace(holder, msgspec.json.encode(Holder(os.getpid(), _now())))
    except OSError:
        stack.close()
        raise
    return stack


def _busy(folder: Path, holder: Path) -> str:
    try:
        who = msgspec.json.decode(holder.read_bytes(), type=Holder)
    except (OSError, msgspec.MsgspecError):
        return f"another calibration of {folder.name} is under way. Wait until it ends."
    return (
        f"another calibration of {folder.name} is under way (process {who.pid}, since {who.since}), and two would slow "
        f"each other down. Wait until it ends, or stop it with: kill -INT {who.pid}; what it measured is kept."
    )


def _unwritable(folder: Path, error: OSError) -> str:
    return (
        f"cannot keep a calibration journal in {folder}: {error.strerror or error}. "
        f"Make it writable, or choose another directory with {storage.VARIABLE}=DIR."
    )


def _replace(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old one or the new one, whatever happens."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync_directory(path.parent)


def _sync_directory(folder: Path) -> None:
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
