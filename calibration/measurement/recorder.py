"""Measure a plan into a folder, setting by setting in the order of their worth, until it is done or the time is spent.

Every setting is timed in both protocols; on an asynchronous device its host's and its device's side are timed alone as
well, which tells its regime. What was measured is on the disk before the next setting starts, and the model is traced
where it is measured, so that the recording can be replayed anywhere. A run that ended in any way goes on where it was.
"""

from __future__ import annotations

import gzip
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import msgspec
import pandas as pd

from latpred import runtimes, storage, tables
from latpred.accuracy.predicted import GraphKey
from latpred.accuracy.recording import Recording, TracedModel
from latpred.calibration import journal
from latpred.calibration.devices import Call, Device, conditions, open_device
from latpred.calibration.journal import Journal
from latpred.calibration.measurement.plans import Plan, Setting, plan
from latpred.calibration.measurement.whole_models import OUT_OF_MEMORY, REFUSED, VISIT, Bench, demand_runtime
from latpred.calibration.timing import timer
from latpred.errors import LatpredError, MissingPackageError, RecordingError, UsageError
from latpred.graph.graph import ModelGraph
from latpred.profile.document import Machine
from latpred.progress import ProgressCounter, ProgressEvent
from latpred.runtimes.lowering import target_of, unsuited

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


ISSUES = timer.Plan(least=3, most=30, precision=0.01, budget_s=0.1, warmup_s=0.05, loops=4)
"""Effort of timing one side alone; few calls in a row, so that they fit the device's launch queue."""

NOT_TRACED = "not traced: "
MOST_ENDS = 3  # runs that may end in one and the same setting before it is passed over


class Done(NamedTuple):
    """How far a recording is.

    folder : where it is kept. stages : settings measured and planned, by name. notes : what to know. failed : settings
    that could not be measured, by reason. left : how many of those asked for are still to come.
    """

    folder: Path
    stages: dict[str, tuple[int, int]]
    notes: tuple[str, ...]
    failed: dict[str, list[str]]
    left: int

    @property
    def complete(self) -> bool:
        """Whether nothing is left to measure."""
        return all(done == planned for done, planned in self.stages.values())


def record(
    name: str,
    folder: Path,
    device: str | Device = "cuda:0",
    *,
    stages: Sequence[str] = (),
    runtimes: Sequence[str] = (),
    budget_s: float | None = None,
    effort: timer.Plan = VISIT,
    progress: Callable[[ProgressEvent], None] | None = None,
) -> Done:
    """Measure a plan ("paper", "heldout" or "check") into a folder and save it as a recording.

    Only some `stages` or `runtimes` are measured where they are named; `effort` is that of one timing. The folder keeps
    the journal from which a later run goes on; one of another machine or plan is a UsageError.
    """
    wanted = plan(name)
    _check_stages(wanted, stages)
    live = open_device(device) if isinstance(device, str) else device
    left_out, notes = _unavailable(live, wanted, runtimes)
    planned = {
        stage: [one for one in settings if one.runtime not in left_out] for stage, settings in wanted.stages.items()
    }
    chosen = [one for stage, settings in planned.items() if not stages or stage in stages for one in settings]
    with RecordingJournal(folder, name, live.machine()) as journal, conditions.stated():
        _measure(
            chosen,
            Bench(live),
            journal,
            effort,
            ProgressCounter("", _left(chosen, journal), progress, budget_s=budget_s),
        )
        failed: dict[str, list[str]] = {}
        for setting in chosen:
            entry = journal.entries.get(setting.key)
            if entry is not None and entry.status != tables.OK:
                failed.setdefault(entry.status, []).append(setting.key)
        counts = {
            stage: (len(settings) - _left(settings, journal), len(settings)) for stage, settings in planned.items()
        }
        return Done(folder, counts, (*wanted.notes, *notes), failed, _left(chosen, journal))


def _left(settings: Sequence[Setting], journal: RecordingJournal) -> int:
    return sum(setting.key not in journal.entries for setting in settings)


def _check_stages(wanted: Plan, stages: Sequence[str]) -> None:
    for stage in stages:
        if stage not in wanted.stages:
            known = ", ".join(wanted.stages)
            raise UsageError(f"The plan {wanted.name} has no stage {stage!r}. Use one of {known}.")


def _unavailable(device: Device, wanted: Plan, only: Sequence[str]) -> tuple[set[str], list[str]]:
    """Runtimes of a plan that are not measured here, and why not where nobody asked for that."""
    target = target_of(device.info().kind)
    out: set[str] = set()
    notes: list[str] = []
    named = dict.fromkeys(setting.runtime for settings in wanted.stages.values() for setting in settings)
    for runtime in only:
        if runtime not in named:
            raise UsageError(f"The plan {wanted.name} has no runtime {runtime!r}. Use some of {', '.join(named)}.")
    for runtime in named:
        reason = unsuited(runtime, target)
        try:
            demand_runtime(runtime, device)
        except MissingPackageError as error:
            reason = str(error)
        if only and runtime not in only:
            out.add(runtime)
        elif reason is not None:
            out.add(runtime)
            notes.append(f"{runtime} is left out: {reason}")
    return out, notes


def _measure(
    chosen: Sequence[Setting], bench: Bench, journal: RecordingJournal, effort: timer.Plan, counter: ProgressCounter
) -> None:
    """Measure what the journal has not yet, one model built at a time."""
    todo = [setting for setting in chosen if setting.key not in journal.entries]
    todo.sort(key=lambda setting: setting.counted)  # what a profiler leaves behind slows every later launch
    built = None
    try:
        for setting in todo:
            if not counter.next(setting.key):
                break
            if (setting.workload, setting.precision) != built:
                bench.clear()
            built = setting.workload, setting.precision
            journal.begin(setting.key)
            journal.add(_visit(setting, bench, journal, effort))
    finally:
        bench.clear()
        journal.save(bench.info.name)


def _visit(setting: Setting, bench: Bench, journal: RecordingJournal, effort: timer.Plan) -> JournalEntry:
    """Measure one setting in both protocols, or say why that cannot be done."""

    def measured() -> JournalEntry:
        bench.device.use_precision(setting.precision)
        graph, untraced = _traced(setting, bench, journal)
        call = bench.call(setting.workload, setting.batch, setting.runtime, setting.precision, graph)
        if setting.counted:
            return _counted(call, setting, bench.device)
        timings = {name: timer.timed(bench.device, call, name, effort) for name in timer.PROTOCOLS}
        sides = _sides(call, setting, bench.device, graph)
        return _entry(setting, untraced or tables.OK, timings, {**sides, **_state(bench.device)})

    status = _hopeless(setting, journal)
    if status:
        return _entry(setting, status)
    entry = bench.attempt(measured)
    return _entry(setting, entry) if isinstance(entry, str) else entry


def _hopeless(setting: Setting, journal: RecordingJournal) -> str:
    """Why a setting need not be tried: what failed at a smaller batch fails here too."""
    if journal.ended_runs(setting.key) >= MOST_ENDS:
        return f"given up: it ended the run {MOST_ENDS} times"
    mine = (setting.workload.name, setting.workload.input_size, setting.precision, setting.runtime)
    for earlier in journal.entries.values():
        if (earlier.model, earlier.input_size, earlier.precision, earlier.runtime) == mine:
            if earlier.status.startswith(REFUSED):
                return earlier.status
            if earlier.status.startswith(OUT_OF_MEMORY) and setting.batch > earlier.batch:
                return f"{OUT_OF_MEMORY} (not tried: batch {earlier.batch} did not fit)"
    return ""


def _traced(setting: Setting, bench: Bench, journal: RecordingJournal) -> tuple[ModelGraph | None, str]:
    """What the runtime runs for the model, kept in the journal; or why that is not known."""
    key = setting.workload.key(setting.precision, setting.runtime)
    if key not in journal.graphs:
        try:
            journal.keep(key, setting.workload.trace(setting.precision, setting.runtime, bench.target))
        except LatpredError as error:
            if bench.simulated:  # which runs graphs
                raise
            return None, f"{NOT_TRACED}{error}"[:200]
    return journal.graphs[key], ""


def _sides(call: Call, setting: Setting, device: Device, graph: ModelGraph | None) -> dict[str, Any]:
    """Host and device timed alone; unknown where the host waits in mid-pass, or the stream is not PyTorch's."""
    if not device.asynchronous or graph is None or graph.syncs(1) or graph.syncs(2):
        return {}
    runtime = runtimes.get(setting.runtime)
    if getattr(runtime, "waits", False) or getattr(runtime, "own_stream", False):
        return {}
    host_s = timer.issue(device, call, ISSUES).median_s
    device_s = timer.queued(device, call, ISSUES).median_s
    regime = "framework-bound" if host_s > device_s else "compute-bound"
    return {"overhead_s": host_s, "compute_s": device_s, "regime": regime}


def _counted(call: Call, setting: Setting, device: Device) -> JournalEntry:
    """What a profiler counts, or why there is nothing of it."""
    profiled = getattr(device, "profile", None)
    if profiled is None:
        return _entry(setting, f"{device.name} has no profiler")
    seen = profiled(call)
    if not seen.kernels:  # containers often forbid it
        return _entry(setting, "the profiler sees no kernel")
    counts = {
        tables.KERNELS: f"{seen.kernels:g}",
        "x_kernels_s": f"{seen.kernel_s:.6g}",
        "x_fills": f"{seen.fills:g}",
    }
    # What is replayed is launched by no op, so there is nothing to hold the graph against.
    launches = {"launches": seen.launches} if setting.runtime == "eager" and seen.launches else {}
    return _entry(setting, tables.OK, {}, {**launches, **counts})


def _state(device: Device) -> dict[str, Any]:
    """The GPU's clocks just after."""
    state = device.state() if hasattr(device, "state") else None
    if state is None:
        return {}
    return {
        "x_sm_mhz": str(state.sm_mhz),
        "x_temperature_c": str(state.temperature_c),
        "x_throttled": "+".join(state.throttled),
    }


def _entry(
    setting: Setting,
    status: str,
    timings: dict[str, timer.Timing] | None = None,
    more: dict[str, Any] | None = None,
) -> JournalEntry:
    return JournalEntry(
        key=setting.key,
        model=setting.workload.name,
        input_kind=setting.workload.input_kind,
        input_size=setting.workload.input_size,
        precision=setting.precision,
        runtime=setting.runtime,
        batch=setting.batch,
        number=setting.number,
        status=status,
        timings={name: (t.median_s, t.spread_s, t.n) for name, t in (timings or {}).items()},
        more=more or {},
    )
