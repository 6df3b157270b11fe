"""The journal of a recording under way: one line for each setting, and the traced models, beside what they become.

What a profiler counted (number 0) has no rows of its own: it stands in those of the same setting as it was timed first.
Two runs cannot use one folder at once.
"""

from __future__ import annotations

import gzip
import hashlib
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import pandas as pd

from latpred import storage, tables
from latpred.accuracy.predicted import GraphKey
from latpred.accuracy.recording import Recording, TracedModel
from latpred.calibration import journal
from latpred.calibration.journal import Journal
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


class JournalEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="Entry"):
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

    @property
    def setting(self) -> tuple[object, ...]:
        """What was measured, whichever time it was."""
        return self.model, self.input_kind, self.input_size, self.precision, self.runtime, self.batch


class RecordingJournal:
    """The journal in a recording's folder, as a context manager; another machine of the same make may go on with it.

    On entry a UsageError says that the folder holds another plan's measurements or another kind of machine's, a
    BusyError that another run uses it, a RecordingError that it cannot be written.
    """

    def __init__(self, folder: Path, plan: str, machine: Machine) -> None:
        self._folder, self._inner = folder, folder / FOLDER
        self._head = Head(VERSION, plan, machine, journal.now())
        self._begun: Counter[str] = Counter()
        self._resources = ExitStack()
        self.entries: dict[str, JournalEntry] = {}
        self.graphs: dict[GraphKey, ModelGraph] = {}

    def __enter__(self) -> RecordingJournal:
        with ExitStack() as stack:
            try:
                (self._inner / WALKS).mkdir(parents=True, exist_ok=True)
                busy = f"another run measures into {self._folder}. Wait until it ends."
                stack.enter_context(storage.locked(self._inner / LOCK, busy))
                self._open()
            except OSError as error:
                raise RecordingError(f"Cannot write {self._folder}: {error.strerror or error}.") from error
            stack.callback(self._journal.close)
            self._resources = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._resources.close()

    def _open(self) -> None:
        self._journal: Journal[Head, Begun | JournalEntry] = Journal(
            self._inner / LINES,
            self._head,
            Begun | JournalEntry,  # type: ignore[arg-type]  # a union is no type to a type checker, but to msgspec
            self._demand_same,
        )
        self._head = self._journal.header
        for row in self._journal.rows:
            if isinstance(row, Begun):
                self._begun[row.key] += 1
            else:
                self.entries[row.key] = row
        for file in sorted((self._inner / WALKS).glob("*.json.gz")):
            traced = msgspec.json.decode(gzip.decompress(file.read_bytes()), type=TracedModel)
            key = GraphKey(traced.model, traced.input_kind, traced.input_size, traced.precision, traced.runtime)
            self.graphs[key] = traced.graph

    def _demand_same(self, head: Head) -> bool:
        """Raise a UsageError where the folder's rows do not hold for this run."""
        if head.version != VERSION or head.plan != self._head.plan:
            raise UsageError(f"{self._folder} holds the plan {head.plan}. Name another folder with --record.")
        if _make(head.machine) != _make(self._head.machine):
            raise UsageError(
                f"{self._folder} holds measurements of {tables.machine_name(head.machine)} with "
                f"{tables.stack_text(head.machine)}, which this machine is not. Name another folder with --record."
            )
        return True

    def ended_runs(self, key: str) -> int:
        """How many earlier runs ended while they measured a setting."""
        return self._begun[key]

    def begin(self, key: str) -> None:
        """Note that a setting is about to be measured."""
        self._journal.append(Begun(key))

    def add(self, entry: JournalEntry) -> None:
        """Keep what was measured; it is on the disk when this returns."""
        self._journal.append(entry)
        self.entries[entry.key] = entry

    def keep(self, key: GraphKey, graph: ModelGraph) -> None:
        """Keep a traced model."""
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
        counted = {entry.setting: entry.more for entry in self.entries.values() if not entry.number}
        rows = [
            {**common, **row, **(counted.get(entry.setting, {}) if entry.number == 1 else {})}
            for entry in self.entries.values()
            if entry.number
            for row in _rows(entry, self._head.started)
        ]
        frame = pd.DataFrame(rows)
        texts = [name for name in frame if str(name).startswith(tables.NOTE_PREFIX) or name == "regime"]
        return tables.check(frame.fillna(dict.fromkeys(texts, "")), tables.MEASURED)


def _rows(entry: JournalEntry, started: str) -> list[dict[str, Any]]:
    """A row for each protocol; one in "single" for a setting that failed."""
    common = {name: getattr(entry, name) for name in ("model", "input_kind", "input_size", "precision", "runtime")}
    common |= {"batch": entry.batch, "run": f"{started}/{entry.number}", "status": entry.status, **entry.more}
    nothing = {"single": (float("nan"), float("nan"), 0)}
    return [
        {**common, "protocol": protocol, "latency_s": median, "spread_s": spread, "n": count}
        for protocol, (median, spread, count) in (entry.timings or nothing).items()
    ]


def _make(machine: Machine) -> tuple[object, ...]:
    """What latencies depend on; rented machines change the names of their hosts from one hour to the next."""
    return machine.cpu, machine.accelerator, machine.driver, machine.stack, machine.threads
