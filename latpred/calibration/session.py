"""The session of a measurement: one at a time in a folder, journalled cell by cell, resumed after any kind of end.

A journal holds raw timings that can be fitted again: a header and rows in JSON lines. A row is on the disk when
`Session.run` returns, so a kill loses at most what was being measured; a torn last line is cut off, and a damaged line
costs only itself. No cell ends a run but one at which the device is lost or the disk is full: one that fails, hangs, or
ends the process becomes a row with the reason, and is tried once more when the run is resumed. A journal of other
settings, or of another machine, is replaced.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, TypeVar

import msgspec

from latpred import host, storage
from latpred.calibration.cells import Cell
from latpred.calibration.timing.reference_speed import SpeedReading
from latpred.calibration.timing.timer import Timing, time_limit
from latpred.errors import DISK_FULL, CalibrationError, DeviceError, MissingPackageError, RuntimeRefusalError, chain_of
from latpred.profile.document import Machine
from latpred.profile.store import Owner, mismatch, owner, same_machine

JOURNAL_VERSION = 1
JOURNAL = "journal.jsonl"
LAST = "last.jsonl"
UNDER_WAY = "under-way.json"
LOCK, HOLDER = "lock", "holder.json"  # who holds the lock is kept beside it: opening a lock file may empty it
OUT_OF_MEMORY = "out of memory"
REFUSED = "refused: "
MISSING = "missing package: "
ENDED = "ended the process"
CELL_LIMIT_S = 120.0  # a hundred times what a cell is given; only an export or a compiler comes near
LEAST_BYTES = 200e6  # below which no cell is begun: native code crashes where it gets no memory
MOST_TRIES = 2
MOST_TEXT = 300
T = TypeVar("T")


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One cell of a journal: its timings by what was timed ("issue", "queued", "single" …), or why there are none."""

    cell: Cell
    timings: dict[str, Timing]
    seconds: float = 0.0  # what measuring took, on the wall clock
    error: str = ""
    calls_us: tuple[float, ...] = ()  # of each call from Python, for a network whose calls were timed within it
    speed: dict[str, float] = {}  # microseconds of the reference work around it
    fastest: SpeedReading | None = None  # moments known by then, against which its timings say how slow it was
    disturbed: str = ""  # what other work did meanwhile
    tries: int = 1  # how often it was started, by this session and those that it goes on from
    more: dict[str, str | float] = {}  # other columns of a whole model's row

    @property
    def settled(self) -> bool:
        """Whether a resumed session has no reason to measure the cell again."""
        return not self.error or self.tries >= MOST_TRIES


Measure = Callable[[Cell], Row]


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """First line of a journal: what the rows hold for."""

    journal: int
    machine: Machine
    settings: str
    started: str  # ISO 8601, UTC
    # How it was measured, whatever its precisions: versions of what was measured, and the options asked for.
    about: dict[str, Any] = {}

    def resumes(self, other: Header) -> bool:
        """Whether rows below another header hold for this one, too."""
        return self._agrees(other) and other.settings == self.settings

    def extends(self, other: Header) -> bool:
        """Whether rows of further runtimes may join those below another header, which may be in other precisions."""
        # The same threads may have been asked for, or be what PyTorch uses anyway: that differs in `about` alone.
        return self._agrees(other) and (other.about == self.about or other.settings == self.settings)

    def _agrees(self, other: Header) -> bool:
        """Whether another header is of this machine, where one of both may lack a package."""
        mine, its = self.machine, other.machine
        return other.journal == self.journal and same_machine(its, mine) and not mismatch(its, mine)


class UnderWay(msgspec.Struct, frozen=True):
    """The cell that is being timed, and how often it was started: what a process that was killed leaves behind."""

    key: str
    tries: int


class _Holder(msgspec.Struct, frozen=True):
    """Who holds the lock."""

    pid: int
    since: str


def directory(device: str) -> Path:
    """Where the sessions of a device keep their journal and lock, beside those of other machines that share the folder.

    >>> directory("cuda:0").name
    'cuda-0'
    """
    usual = storage.data_dir() / "calibration" / re.sub(r"[^A-Za-z0-9._-]", "-", device)
    with _kept_in(usual, Session.purpose, Session.elsewhere):
        firsts = [_decoded(_bytes_of(usual / name).partition(b"\n")[0], Header) for name in (JOURNAL, LAST)]
    shared = any(header is not None and owner(header.machine) is not Owner.THIS for header in firsts)
    return usual.with_name(f"{usual.name}-{host.short_id()}") if shared else usual


@contextmanager
def _kept_in(folder: Path, purpose: str, elsewhere: str) -> Iterator[None]:
    """Say of a folder that cannot be used which other one can be named."""
    try:
        yield
    except OSError as error:
        raise CalibrationError(
            f"cannot keep a {purpose} journal in {folder}: {error.strerror or error}. "
            f"Make it writable, or choose another directory with {elsewhere}."
        ) from error


def settings_hash(settings: object) -> str:
    """Digest of whatever the measurements depend on; a journal of other settings is not resumed."""
    return hashlib.sha256(msgspec.json.encode(settings, order="sorted")).hexdigest()[:16]


def read_journal(path: Path) -> tuple[Header, list[Row]]:
    """Header and rows of a journal, a torn or damaged line left out; a CalibrationError where it is none."""
    try:
        header, rows, _ = _contents(path.read_bytes())
    except OSError as error:
        raise CalibrationError(
            f"cannot read {path}: {error.strerror or error}. Name a journal in JSON lines."
        ) from error
    if header is None or header.journal != JOURNAL_VERSION:
        raise CalibrationError(f"{path} is no calibration journal of version {JOURNAL_VERSION}. Calibrate again.")
    return header, rows


def _contents(data: bytes) -> tuple[Header | None, list[Row], int]:
    """Header and rows of a journal as far as they can be read, and the bytes of its whole lines."""
    length = data.rfind(b"\n") + 1
    first, *others = data[:length].splitlines() or [b""]
    rows: dict[str, Row] = {}
    for line in others:
        row = _decoded(line, Row)
        if row is not None:
            _put(rows, row)
    return _decoded(first, Header), list(rows.values()), length


def _put(rows: dict[str, Row], row: Row) -> None:
    """Keep a row as the latest: where it replaces another, the machine's speed was that of now and not of then."""
    rows.pop(row.cell.key, None)
    rows[row.cell.key] = row


def _decoded(text: bytes, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError:
        return None


def _bytes_of(path: Path) -> bytes:
    """What a file holds; nothing where there is none."""
    return path.read_bytes() if path.exists() else b""


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class Session:
    """A measurement under way, as a context manager; on entry a BusyError says that another one uses the folder.

    The journal is bound to a machine, and to settings: anything JSON can hold that the measurements depend on. `fresh`
    starts anew even where there is something to resume; `about` is what the header says of how it was measured.
    """

    purpose, elsewhere = "calibration", f"{storage.VARIABLE}=DIR"  # what errors call it, and what names another folder
    going_on = "without --fresh the command"  # what goes on from what was measured
    limit_s = CELL_LIMIT_S  # after which a cell is given up
    _journal: BinaryIO  # open within the session

    def __init__(
        self,
        folder: Path,
        machine: Machine,
        settings: object,
        *,
        fresh: bool = False,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self._folder = folder
        self._header = Header(JOURNAL_VERSION, machine, settings_hash(settings), _now(), dict(about or {}))
        self._fresh = fresh
        self._rows: dict[str, Row] = {}
        self._tries: dict[str, int] = {}  # of cells that an earlier session could not measure
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack, self._writing():
            self._folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(storage.locked(self._folder / LOCK, self._busy()))
            holder = _Holder(os.getpid(), _now())
            storage.write(self._folder / HOLDER, msgspec.json.encode(holder))
            self._journal = self._opened()
            stack.callback(self._journal.close)
            self._resources = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._writing(), self._resources:
            if not isinstance(error, DeviceError):  # whoever leaves here was not killed, unless the device was
                (self._folder / UNDER_WAY).unlink(missing_ok=True)

    @property
    def rows(self) -> tuple[Row, ...]:
        """Everything measured so far, what was resumed included, in order."""
        return tuple(self._rows.values())

    def of(self, runtime: str) -> list[Row]:
        """What was measured of a runtime so far."""
        return [row for row in self._rows.values() if row.cell.runtime == runtime]

    def resumable(self) -> set[str]:
        """The runtimes that the journal to go on from has rows of; to be asked before it is entered."""
        with self._writing():
            header, rows, _ = _contents(_bytes_of(self._folder / JOURNAL))
        return {row.cell.runtime for row in rows} if header is not None and self._resumes(header) else set()

    def holds(self, cell: Cell) -> bool:
        """Whether the journal has this cell already."""
        return cell.key in self._rows

    def counts(self, row: Row) -> bool:
        """Whether a row is what the journal has of its cell, and not one that did not replace an earlier."""
        return self._rows.get(row.cell.key) is row

    def run(self, cell: Cell, measure: Measure, *, again: Callable[[Row, Row], bool] | None = None) -> Row:
        """Measure a cell unless the journal has it; `again` says of a new row and the old one whether it replaces that.

        One that a runtime refuses is refused at other batches, too. A DeviceError says that the device is lost; the
        cell is left for the next session.
        """
        earlier = self._rows.get(cell.key)
        if earlier is not None and again is None:
            return earlier
        row = self._tried(cell, measure)
        if earlier is None or again is None or again(row, earlier):
            with self._writing():
                self._journal.write(msgspec.json.encode(row) + b"\n")
                self._journal.flush()
                os.fsync(self._journal.fileno())
            _put(self._rows, row)
        return row

    def _tried(self, cell: Cell, measure: Measure) -> Row:
        """Measure a cell, unless it is known how that ends; word of it is on the disk in case it ends the process."""
        for row in self._rows.values():
            if row.error.startswith(REFUSED) and _but_for_batch(cell) == _but_for_batch(row.cell):
                return Row(cell, {}, 0.0, row.error, tries=row.tries)
        tries = self._tries.get(cell.key, 0)
        if tries >= MOST_TRIES:
            return Row(cell, {}, 0.0, f"{ENDED} each time it was timed", tries=tries)
        with self._writing():
            (self._folder / UNDER_WAY).write_bytes(msgspec.json.encode(UnderWay(cell.key, tries + 1)))

        def limited(one: Cell) -> Row:
            with time_limit(self.limit_s):
                return measure(one)

        try:
            row = measured(cell, limited)
        except DeviceError as error:
            kept = f"What was measured is kept, and {self.going_on} goes on from it."
            raise DeviceError(f"{cell.key}: {error} {kept}") from error
        return msgspec.structs.replace(row, tries=tries + 1)

    def complete(self) -> None:
        """End the session for good: the journal becomes the record of the last calibration, and nothing is resumed.

        Call it once the profile is saved. One without eager extends the last calibration, and adds to its record.
        """
        last = self._folder / LAST
        anew = {row.cell.runtime for row in self._rows.values()}
        with self._writing():
            self._journal.close()
            header, rows, _ = _contents(_bytes_of(last))
            extends = "eager" not in anew and header is not None and self._header.extends(header)
            older = [row for row in rows if extends and row.cell.runtime not in anew]
            first = header if older else self._header  # that of eager, which a profile is fitted to again
            lines = [msgspec.json.encode(part) for part in (first, *older, *self._rows.values())]
            storage.write(last, b"\n".join(lines) + b"\n")
            (self._folder / JOURNAL).unlink()

    def _opened(self) -> BinaryIO:
        """The journal, and what of its rows need not be measured again."""
        path, under_way = self._folder / JOURNAL, self._folder / UNDER_WAY
        header, rows, length = _contents(_bytes_of(path))
        if header is not None and self._resumes(header):
            os.truncate(path, length)
            self._header = msgspec.structs.replace(header, about=self._header.about)  # as asked for now
        else:
            rows = []
            under_way.unlink(missing_ok=True)
            storage.write(path, msgspec.json.encode(self._header) + b"\n")
        self._rows = {row.cell.key: row for row in rows if row.settled}
        self._tries = {row.cell.key: row.tries for row in rows if not row.settled}
        killed = _decoded(_bytes_of(under_way), UnderWay)
        if killed is not None:  # the cell that a process was timing when it ended
            self._tries[killed.key] = killed.tries
        return path.open("ab")

    def _resumes(self, header: Header) -> bool:
        """Whether the rows of a journal that there is count."""
        return not self._fresh and self._header.resumes(header)

    def _writing(self) -> AbstractContextManager[None]:
        return _kept_in(self._folder, self.purpose, self.elsewhere)

    def _busy(self) -> str:
        """What to say where another session holds the lock."""
        who = _decoded(_bytes_of(self._folder / HOLDER), _Holder)
        process = f" (process {who.pid}, since {who.since})" if who else ""
        return (
            f"another {self.purpose} of {self._folder.name} is under way{process}, and two would slow each other down. "
            "Wait until it ends, or stop it with Ctrl-C; what it measured is kept."
        )


def measured(cell: Cell, measure: Measure) -> Row:
    """Measure a cell; one that fails becomes a row with its error. A device that is lost and a full disk are raised."""
    start = time.monotonic()
    row, error = Row(cell, {}), ""
    try:
        if host.bytes_left() < LEAST_BYTES:
            # Perhaps for a few seconds, whatever the cell: nothing follows for others, or for the next session.
            raise CalibrationError(f"less than {LEAST_BYTES / 1e6:.0f} MB of memory are left for this process")
        row = measure(cell)
        error = _not_finite(row)
    except DeviceError:
        raise
    except Exception as failure:
        full = next((one for one in chain_of(failure) if getattr(one, "errno", None) in DISK_FULL), None)
        if full is not None:  # which is no fault of the cell, and would be that of all others
            said = f"no room is left on the disk: {full}. Free some, and run the same command again."
            raise CalibrationError(said) from failure
        # One op that a device or a torch version lacks must not end a calibration of hundreds of others.
        error = failure_of(failure)
    if error:
        row = Row(cell, {}, disturbed=row.disturbed)
    return msgspec.structs.replace(row, seconds=time.monotonic() - start, error=error)


def failure_of(error: Exception) -> str:
    """What a row says of a cell that raised an error."""
    text = " ".join(str(error).split())
    if isinstance(error, RuntimeRefusalError):
        return f"{REFUSED}{text}"[:MOST_TEXT]
    if isinstance(error, MissingPackageError):
        return f"{MISSING}{text}"[:MOST_TEXT]
    if isinstance(error, MemoryError):
        return f"{OUT_OF_MEMORY}: {text}"[:MOST_TEXT]
    return (text if isinstance(error, CalibrationError) else f"{type(error).__name__}: {text}")[:MOST_TEXT]


def _not_finite(row: Row) -> str:
    """Which of the times is no number, in words; "" when all are."""
    wrong = [name for name, timing in row.timings.items() if not math.isfinite(timing.median_s)]
    if not all(map(math.isfinite, row.calls_us)):
        wrong.append("calls")
    return f"no number was measured for {', '.join(wrong)}" if wrong else ""


def _but_for_batch(cell: Cell) -> Cell:
    """What a runtime refuses at every batch, after seconds each time, however often it is asked."""
    return msgspec.structs.replace(cell, dims={**cell.dims, "batch": 0, "number": 0})
