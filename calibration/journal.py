"""What a recorder has measured so far, kept so that nothing is lost however a run ends.

What a profiler counted (number 0) has no rows of its own: it stands in those of the same setting as it was timed first.
Beside the recording that it becomes, a folder holds `notebook/`: one line for each setting, forced to the disk as it is
written, and the walked models. Two runs cannot use one folder at once.
"""

from __future__ import annotations

import gzip
import hashlib
import os
from collections import Counter
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import msgspec
import pandas as pd

from latpred import storage, tables
from latpred.accuracy.predicted import GraphKey
from latpred.accuracy.recording import Recording, TracedModel
from latpred.errors import RecordingError, UsageError
from latpred.graph.graph import ModelGraph
from latpred.profile.document import Machine

VERSION = 1
FOLDER, LINES, WALKS, LOCK = "notebook", "settings.jsonl", "walks", "lock"


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """First line: what the others hold for."""

    version: int
    plan: str
    machine: Machine
    started: str  # ISO 8601, UTC


class Begun(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """A setting is about to be measured."""

    key: str


class JournalEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """One setting, measured or not: median, spread and number of samples by protocol, and other columns of its rows."""

    key: str
    model: str
    input_kind: str
    input_size: int
    precision: str
    runtime: str
    batch: int
    number: int
    status: str
    timings: dict[str, tuple[float, float, int]]
    more: dict[str, str | float]


class Journal:
    """The notebook of a folder, as a context manager.

    Parameters
    ----------
    folder : Path
        Folder of the recording.
    plan : str
        Which plan it is measured by.
    machine : Machine
        Where; another machine of the same make may go on where one stopped.

    Raises
    ------
    UsageError
        On entry, when the folder holds another plan's measurements, or another kind of machine's.
    BusyError
        On entry, when another run uses the folder.
    RecordingError
        On entry, when the folder cannot be written.
    """

    def __init__(self, folder: Path, plan: str, machine: Machine) -> None:
        self._folder, self._inner = folder, folder / FOLDER
        self._head = Head(VERSION, plan, machine, _now())
        self._begun: Counter[str] = Counter()
        self._resources = ExitStack()
        self._file: IO[bytes] | None = None
        self.entries: dict[str, JournalEntry] = {}
        self.graphs: dict[GraphKey, ModelGraph] = {}

    def __enter__(self) -> Journal:
        with ExitStack() as stack:
            try:
                (self._inner / WALKS).mkdir(parents=True, exist_ok=True)
                busy = f"another run measures into {self._folder}. Wait until it ends."
                stack.enter_context(storage.locked(self._inner / LOCK, busy))
                self._open()
            except OSError as error:
                raise RecordingError(f"Cannot write {self._folder}: {error.strerror or error}.") from error
            self._resources = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._resources.close()

    def ended_runs(self, key: str) -> int:
        """How many earlier runs ended while they measured a setting."""
        return self._begun[key]

    def begin(self, key: str) -> None:
        """Note that a setting is about to be measured."""
        self._append(Begun(key))

    def add(self, entry: JournalEntry) -> None:
        """Keep what was measured; it is on the disk when this returns."""
        self._append(entry)
        self.entries[entry.key] = entry

    def keep(self, key: GraphKey, graph: ModelGraph) -> None:
        """Keep a walked model."""
        body = gzip.compress(msgspec.json.encode(TracedModel(*key[:4], graph=graph, runtime=key.runtime)), mtime=0)
        name = hashlib.sha256("\n".join(map(str, key)).encode()).hexdigest()[:24]
        path = self._inner / WALKS / f"{name}.json.gz"
        storage.write(path, body)
        self.graphs[key] = graph

    def save(self, device: str) -> Recording | None:
        """Write the recording of everything measured so far; None where that is nothing."""
        if not any(entry.number for entry in self.entries.values()):
            return None
        head, machine = self._head, self._head.machine
        about = f"plan {head.plan} on {device} ({tables.machine_name(machine)}), {tables.stack_text(machine)}"
        recording = Recording(
            f"{head.plan}-{device}", f"{about}, from {head.started}", self._table(device), self.graphs
        )
        recording.save(self._folder)
        return recording

    def _table(self, device: str) -> pd.DataFrame:
        machine = self._head.machine
        common = {"machine": tables.machine_name(machine), "device": device, "stack": tables.stack_text(machine)}
        counted = {_setting(entry): entry.more for entry in self.entries.values() if not entry.number}
        rows = [
            {**common, **row, **(counted.get(_setting(entry), {}) if entry.number == 1 else {})}
            for entry in self.entries.values()
            if entry.number
            for row in _rows(entry, self._head.started)
        ]
        frame = pd.DataFrame(rows)
        texts = [name for name in frame if str(name).startswith(tables.NOTE_PREFIX) or name == "regime"]
        return tables.check(frame.fillna(dict.fromkeys(texts, "")), tables.MEASURED)

    def _open(self) -> None:
        path = self._inner / LINES
        data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]  # a line that was being written when a run was killed is torn
        lines = [_decoded(line) for line in whole.splitlines()]
        if lines and isinstance(lines[0], Head):
            self._demand_same(lines[0])
            self._head = lines[0]
        else:
            whole = msgspec.json.encode(self._head) + b"\n"
        if whole != data:
            path.write_bytes(whole)
        for line in lines:
            if isinstance(line, Begun):
                self._begun[line.key] += 1
            elif isinstance(line, JournalEntry):
                self.entries[line.key] = line
        for file in sorted((self._inner / WALKS).glob("*.json.gz")):
            walked = msgspec.json.decode(gzip.decompress(file.read_bytes()), type=TracedModel)
            key = GraphKey(walked.model, walked.input_kind, walked.input_size, walked.precision, walked.runtime)
            self.graphs[key] = walked.graph
        self._file = path.open("ab")

    def _demand_same(self, found: Head) -> None:
        if found.version != VERSION or found.plan != self._head.plan:
            raise UsageError(f"{self._folder} holds the plan {found.plan}. Name another folder with --record.")
        if _make(found.machine) != _make(self._head.machine):
            raise UsageError(
                f"{self._folder} holds measurements of {tables.machine_name(found.machine)} with "
                f"{tables.stack_text(found.machine)}, which this machine is not. Name another folder with --record."
            )

    def _append(self, line: Begun | JournalEntry) -> None:
        if self._file is None:
            raise UsageError("this notebook is closed; open it with a with statement.")
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def _rows(entry: JournalEntry, started: str) -> list[dict[str, Any]]:
    """A row for each protocol; one in "single" for a setting that failed."""
    common = {name: getattr(entry, name) for name in ("model", "input_kind", "input_size", "precision", "runtime")}
    common |= {"batch": entry.batch, "run": f"{started}/{entry.number}", "status": entry.status, **entry.more}
    nothing = {"single": (float("nan"), float("nan"), 0)}
    return [
        {**common, "protocol": protocol, "latency_s": median, "spread_s": spread, "n": count}
        for protocol, (median, spread, count) in (entry.timings or nothing).items()
    ]


def _setting(entry: JournalEntry) -> tuple[object, ...]:
    """What was measured, whichever time it was."""
    return entry.model, entry.input_kind, entry.input_size, entry.precision, entry.runtime, entry.batch


def _make(machine: Machine) -> tuple[object, ...]:
    """What latencies depend on; rented machines change the names of their hosts from one hour to the next."""
    return machine.cpu, machine.accelerator, machine.driver, machine.stack, machine.threads


def _decoded(line: bytes) -> Head | Begun | JournalEntry | None:
    try:
        return msgspec.json.decode(line, type=Head | Begun | JournalEntry)
    except msgspec.MsgspecError:
        return None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
