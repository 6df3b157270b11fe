"""Measure a plan into a folder, setting by setting in the order of their worth, until it is done or the time is spent.

Plans are of GPUs: the study of "The Framework Tax", models kept out of fits, and "check", a minute or two in which
everything is tried once. A plan is a list of stages, a stage a list of settings (one model at one batch size in one
runtime and precision): whoever runs out of time part-way has what matters most.

Every setting is timed in both protocols; on an asynchronous device its host's and its device's side are timed alone as
well, which tells its regime. What was measured is on the disk before the next setting starts, and the model is traced
where it is measured, so that the recording can be replayed anywhere. A run that ended in any way goes on where it was.
"""

from __future__ import annotations

import gzip
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pandas as pd
from torch import nn

from latpred import host, runtimes, storage, tables
from latpred.accuracy.predicted import GraphKey
from latpred.accuracy.recording import Recording, TracedModel
from latpred.calibration.cells import Cell
from latpred.calibration.devices import Call, Device, conditions, open_device
from latpred.calibration.measurement.whole_models import VISIT, Bench, multiplies
from latpred.calibration.runtime_calibration.calibrate_runtimes import hindrance
from latpred.calibration.session import JOURNAL, Header, Row, Session, read_journal
from latpred.calibration.timing import timer
from latpred.calibration.timing.reference_speed import gauge_on
from latpred.calibration.workloads import suites
from latpred.calibration.workloads.suites import Inputs, Workload, seeded, token_inputs, workloads_of
from latpred.errors import CalibrationError, MissingPackageError, UsageError
from latpred.graph.graph import ModelGraph, all_ops
from latpred.profile.document import Machine
from latpred.progress import ProgressCounter, ProgressEvent

CORE = (
    *("bert-base-uncased", "distilbert-base-uncased", "squeezebert-uncased", "albert-base-v2", "roberta-base", "gpt2"),
    *("resnet-18", "resnet-50", "mobilenet-v2", "timm:efficientnet_lite0", "vit-base-32", "wavlm-base"),
)
MORE = ("fnet-base", "resnet-101", "resnet-152", "bert-large-uncased")
REPEATED = 4  # models that are measured again, for the repeat noise
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SHAPES = (*((width, 12) for width in (128, 256, 512, 1024, 1536)), *((768, layers) for layers in (2, 4, 8, 16, 24)))
CAPTURED = ("eager", "cuda-graphs")
FIRST = (*CAPTURED, "torchscript")
COMPILED = ("compile", "compile-reduce-overhead", "onnxruntime", "onnxruntime-cuda-graphs")
PRECISIONS = ("fp16", "fp32", "bf16", "tf32")
TRIED = ("distilbert-base-uncased", "resnet-18")
COUNTED = 0  # number of a setting that is not timed: a profiler counts what it launches
_VOCABULARY, _LENGTH = 30522, 128


@dataclass(frozen=True, slots=True)
class Setting:
    """One model at one batch size in one runtime and precision."""

    workload: Workload
    batch: int
    precision: str
    runtime: str
    number: int = 1  # 2 where it is measured again to learn the repeat noise; `COUNTED` where nothing is timed

    @property
    def counted(self) -> bool:
        """Whether a profiler counts its launches and nothing is timed."""
        return self.number == COUNTED

    @property
    def cell(self) -> Cell:
        """What a journal knows it by."""
        dims = {"size": self.workload.input_size, "batch": self.batch, "number": self.number}
        return Cell(f"model.{self.workload.input_kind}", self.workload.name, dims, self.precision, self.runtime)


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings by stage, the most valuable first, no setting twice; `notes` say what could not be planned here."""

    name: str
    stages: dict[str, tuple[Setting, ...]]
    notes: tuple[str, ...] = ()


Settings = Iterator[Setting]


def plan(name: str) -> Plan:
    """A plan by name."""
    plans = {"paper": (_paper, CORE), "heldout": (_heldout, suites.get("heldout").names), "check": (_check, TRIED)}
    if name not in plans:
        raise UsageError(f"There is no plan to measure {name!r} by. Use one of {', '.join(plans)}.")
    stages_of, names = plans[name]
    models, notes = _named(names)
    seen: set[str] = set()
    stages = {}
    for stage, settings in stages_of(models).items():
        stages[stage] = tuple(setting for setting in settings if setting.cell.key not in seen)
        seen.update(setting.cell.key for setting in stages[stage])
    return Plan(name, stages, notes)


def _paper(core: Sequence[Workload]) -> dict[str, Settings]:
    more = workloads_of(MORE)
    lengths = [workload for length in LENGTHS for workload in workloads_of("bert-base-uncased", seq=length)]
    shapes = [_bert(width, layers) for width, layers in SHAPES]
    return {
        **_first_stages(core),
        "shapes": _grid(shapes, (1, 16), runtimes=CAPTURED),
        "lengths": _grid(lengths, (1,)),
        "compiled": _grid(core, (1, 16), runtimes=COMPILED),
        "batches": _grid(core, BATCHES),
        "more-models": _grid(more, BATCHES),
        "fp32": _grid(core, BATCHES, ("fp32",)),
        "more-compiled": chain(_grid(lengths, (1,), runtimes=COMPILED), _grid(core, (4, 64), runtimes=COMPILED)),
        "other-precisions": _grid(core, (1, 4, 16, 64), ("bf16", "tf32"), CAPTURED),
        "the-rest": _grid([*core, *more], BATCHES, PRECISIONS, (*FIRST, *COMPILED)),
    }


def _heldout(models: Sequence[Workload]) -> dict[str, Settings]:
    return {
        **_first_stages(models),
        "compiled": _grid(models, (1, 16), runtimes=COMPILED),
        "batches": _grid(models, BATCHES),
        "fp32": _grid(models, BATCHES, ("fp32",)),
        "the-rest": _grid(models, BATCHES, PRECISIONS, (*FIRST, *COMPILED)),
    }


def _check(models: Sequence[Workload]) -> dict[str, Settings]:
    """Two models once in every runtime: does all of it work here?"""
    return {"every-runtime": _grid(models, (1,), runtimes=(*FIRST, *COMPILED)), "launches": _launches(models)}


def _first_stages(models: Sequence[Workload]) -> dict[str, Settings]:
    return {
        "core": _grid(models, (1, 4, 16, 64)),
        "again": _grid(models[:REPEATED], (1, 16), number=2),
        "launches": _launches(models),
    }


def _launches(models: Sequence[Workload]) -> Settings:
    """What a profiler counts: batch 1, as dispatched."""
    return _grid(models, (1,), runtimes=("eager",), number=COUNTED)


def _grid(
    workloads: Sequence[Workload],
    batches: Sequence[int],
    precisions: Sequence[str] = ("fp16",),
    runtimes: Sequence[str] = FIRST,
    number: int = 1,
) -> Settings:
    """All combinations, model by model, so that each is built once."""
    for precision, workload, runtime, batch in product(precisions, workloads, runtimes, batches):
        yield Setting(workload, batch, precision, runtime, number)


def _named(names: Sequence[str]) -> tuple[list[Workload], tuple[str, ...]]:
    """Workloads of those names that can be built here, and a sentence about each of the others."""
    workloads: list[Workload] = []
    notes = []
    for name in names:
        try:
            workloads += workloads_of(name)
        except MissingPackageError as error:
            notes.append(str(error))
    return workloads, tuple(notes)


def _bert(width: int, layers: int) -> Workload:
    """BERT of another width or depth, heads of 64."""
    sizes = {"num_hidden_layers": layers, "num_attention_heads": width // 64, "intermediate_size": 4 * width}

    def build(device: str, precision: str) -> tuple[nn.Module, Inputs]:
        make = suites.published("BertModel", {"hidden_size": width, **sizes})
        return seeded(make, device, precision), token_inputs(_LENGTH, _VOCABULARY)

    return Workload(f"bert-w{width}-l{layers}", "seq", _LENGTH, build, "bert")


UNTIMED = timer.Timing(math.nan, math.nan, 0, False)  # of a setting that failed
JOURNAL_FOLDER, GRAPHS_FOLDER = "journal", "graphs"
ISSUES = timer.Plan(least=3, most=30, precision=0.01, budget_s=0.1, warmup_s=0.05, loops=4)
"""Effort of timing one side alone; few calls in a row, so that they fit the device's launch queue."""


class RecordingSession(Session):
    """The session in a recording's folder, with the traced models; another machine of its make may go on with it."""

    purpose, elsewhere, going_on = "recording", "--record DIR", "the same command"
    limit_s = 600.0  # of one setting: a compiler may take minutes for a large model

    def __init__(self, folder: Path, plan: str, machine: Machine) -> None:
        super().__init__(folder / JOURNAL_FOLDER, machine, plan)
        self._header = msgspec.structs.replace(self._header, settings=plan)
        self._recording = folder
        self._graphs: dict[GraphKey, ModelGraph] = {}
        journal = folder / JOURNAL_FOLDER / JOURNAL
        if journal.exists():
            try:
                read_journal(journal)
            except CalibrationError as error:  # it is left as it is, since there may be hours of measuring in it
                raise UsageError(
                    f"{journal} cannot be read: it is damaged, or of another version of latpred. "
                    "Name another folder with --record."
                ) from error
        with self._writing():
            files = sorted((folder / JOURNAL_FOLDER / GRAPHS_FOLDER).glob("*.json.gz"))
        for file in files:
            traced = msgspec.json.decode(gzip.decompress(file.read_bytes()), type=TracedModel)
            self._graphs[traced.key] = traced.graph

    def _resumes(self, header: Header) -> bool:
        """Raise a UsageError where the folder's rows do not hold for this run."""
        if header.settings != self._header.settings:
            raise UsageError(f"{self._recording} holds the plan {header.settings}. Name another folder with --record.")
        if _make(header.machine) != _make(self._header.machine):
            raise UsageError(
                f"{self._recording} holds measurements of {tables.machine_name(header.machine)} with "
                f"{tables.stack_text(header.machine)}, which this machine is not. Name another folder with --record."
            )
        return True

    def graph(self, setting: Setting, target: str) -> ModelGraph:
        """What a setting's runtime runs for its model, traced once and kept."""
        key = setting.workload.key(setting.precision, setting.runtime)
        if key not in self._graphs:
            graph = setting.workload.trace(setting.precision, setting.runtime, target)
            traced = TracedModel(**key._asdict(), graph=graph)
            name = hashlib.sha256("\n".join(map(str, key)).encode()).hexdigest()[:24]
            with self._writing():
                file = self._folder / GRAPHS_FOLDER / f"{name}.json.gz"
                storage.write(file, gzip.compress(msgspec.json.encode(traced), mtime=0))
            self._graphs[key] = graph
        return self._graphs[key]

    def save(self, device: str) -> None:
        """Write the recording of everything timed so far, where there is anything."""
        plan, machine = self._header.settings, self._header.machine
        # What a profiler counts goes with what was timed first.
        counted = {
            msgspec.structs.replace(row.cell, dims={**row.cell.dims, "number": 1}).key: row.more
            for row in self.rows
            if row.cell.dims["number"] == COUNTED
        }
        common = {"machine": tables.machine_name(machine), "device": device, "stack": tables.stack_text(machine)}
        rows = [
            {**common, **columns, **counted.get(row.cell.key, {})}
            for row in self.rows
            if row.cell.dims["number"] != COUNTED
            for columns in _columns(row, self._header.started)
        ]
        if rows:
            frame = pd.DataFrame(rows)
            texts = [name for name in frame if str(name).startswith(tables.NOTE_PREFIX) or name == "regime"]
            table = tables.check(frame.fillna(dict.fromkeys(texts, "")), tables.MEASURED)
            about = f"plan {plan} on {device} ({common['machine']}), {common['stack']}, from {self._header.started}"
            Recording(f"{plan}-{device}", about, table, self._graphs).save(self._recording)


def _columns(row: Row, started: str) -> Iterator[dict[str, Any]]:
    """A row of the table for each protocol; one in "single" for a setting that failed."""
    cell, timings = row.cell, row.timings
    common: dict[str, Any] = {"model": cell.name, "precision": cell.precision, "runtime": cell.runtime}
    common |= {"input_kind": cell.kind.partition(".")[2], "input_size": cell.dims["size"], "batch": cell.dims["batch"]}
    common |= {"run": f"{started}/{cell.dims['number']}", "status": row.error or tables.OK, **row.more}
    for name in timer.PROTOCOLS if timings else ("single",):
        timing = timings.get(name, UNTIMED)
        at: dict[str, float | str] = {
            host.COLUMN.format(kind): round(full_us * timing.slow, 3) for kind, full_us in row.speed.items()
        }
        at |= {host.SLOWED: round(timing.slow, 3)} if at else {}
        if "issue" in timings:
            issue, device_s = timings["issue"], timings["queued"].median_s
            # Of moments as slow as those of the latency: a shared host jumps from one timing to the next.
            host_s = issue.median_s * (timing.slow / issue.slow) ** host.LAUNCH_POWER
            regime = "framework-bound" if host_s > device_s else "compute-bound"
            at |= {"overhead_s": host_s, "compute_s": device_s, "regime": regime}
        yield {
            **common,
            **at,
            "protocol": name,
            "latency_s": timing.median_s,
            "spread_s": timing.spread_s,
            "n": timing.n,
        }


def _make(machine: Machine) -> tuple[object, ...]:
    """What latencies depend on; rented machines change the names of their hosts from one hour to the next."""
    return machine.cpu, machine.accelerator, machine.driver, machine.stack, machine.threads


class Done(NamedTuple):
    """How far a recording is."""

    folder: Path  # where it is kept
    stages: dict[str, tuple[int, int]]  # settings measured and planned, by name
    notes: tuple[str, ...]  # what to know
    failed: dict[str, list[str]]  # settings that could not be measured, by reason
    left: int  # how many of those asked for are still to come
    empty: list[str]  # stages and models asked for of which all that was tried failed

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
    progress: Callable[[ProgressEvent], None] | None = None,
) -> Done:
    """Measure a plan ("paper", "heldout" or "check") into a folder and save it as a recording.

    Only some `stages` or `runtimes` are measured where they are named. The folder keeps the journal from which a later
    run goes on; one of another machine or plan is a UsageError.
    """
    wanted = plan(name)
    for stage in stages:
        if stage not in wanted.stages:
            raise UsageError(f"The plan {name} has no stage {stage!r}. Use one of {', '.join(wanted.stages)}.")
    live = open_device(device)
    left_out, notes = _unavailable(live, wanted, runtimes)
    planned = {
        stage: [one for one in settings if not {one.runtime, one.precision} & left_out]
        for stage, settings in wanted.stages.items()
    }
    asked = [(stage, one) for stage, settings in planned.items() if not stages or stage in stages for one in settings]
    if not asked:
        why = "; ".join(notes) or "the stages that were named have nothing in these runtimes"
        raise CalibrationError(f"nothing of the plan {name} that was asked for can be measured: {why}.")
    with conditions.stated(device=live), RecordingSession(folder, name, live.machine()) as session:
        todo = [one for _, one in asked if not session.holds(one.cell)]
        counter = ProgressCounter("", len(todo), progress, budget_s=budget_s)
        _measure(todo, Bench(live), session, counter)
        return _done(folder, planned, (*wanted.notes, *notes), asked, {row.cell.key: row for row in session.rows})


def _done(
    folder: Path,
    planned: Mapping[str, Sequence[Setting]],
    notes: tuple[str, ...],
    asked: Sequence[tuple[str, Setting]],
    rows: Mapping[str, Row],
) -> Done:
    """How far a recording is that has these rows, by the keys of their cells, where these settings were asked for."""
    counts = {stage: (sum(one.cell.key in rows for one in all_), len(all_)) for stage, all_ in planned.items()}
    tried = [((stage, one.workload.name), rows[one.cell.key]) for stage, one in asked if one.cell.key in rows]
    failed: dict[str, list[str]] = {}
    for _, row in tried:
        if row.error:
            failed.setdefault(row.error, []).append(row.cell.key)
    measured = {name for names, row in tried if not row.error for name in names}
    # Many containers forbid the profiler, without whose counts all else is as good.
    timed = [names for names, row in tried if row.cell.dims["number"] != COUNTED]
    empty = [name for name in dict.fromkeys(chain(*timed)) if name not in measured]
    return Done(folder, counts, notes, failed, len(asked) - len(tried), empty)


def _unavailable(device: Device, wanted: Plan, only: Sequence[str]) -> tuple[set[str], list[str]]:
    """Runtimes and precisions of a plan that are not measured here, and why not where nobody asked for that."""
    named = dict.fromkeys(setting.runtime for settings in wanted.stages.values() for setting in settings)
    for runtime in only:
        if runtime not in named:
            raise UsageError(f"The plan {wanted.name} has no runtime {runtime!r}. Use some of {', '.join(named)}.")
    asked = [runtime for runtime in named if not only or runtime in only]
    reasons = {runtime: reason for runtime in asked if (reason := hindrance(runtime, device)) is not None}
    precisions = {setting.precision for settings in wanted.stages.values() for setting in settings}
    reasons |= {name: f"{device.name} has none" for name in sorted(precisions) if not multiplies(device, name)}
    left_out = {*(runtime for runtime in named if runtime not in asked), *reasons}
    return left_out, [f"{name} is left out: {reason}" for name, reason in reasons.items()]


def _measure(todo: list[Setting], bench: Bench, session: RecordingSession, counter: ProgressCounter) -> None:
    """Measure settings, one model built at a time."""
    todo.sort(key=lambda setting: setting.counted)  # what a profiler leaves behind slows every later launch
    try:
        for setting in todo:
            if not counter.next(setting.cell.key):
                break
            bench.turn_to(setting.workload, setting.precision)

            def visited(_: Cell, setting: Setting = setting) -> Row:
                return bench.attempt(lambda: _visit(setting, bench, session))

            session.run(setting.cell, visited)
    finally:
        session.save(bench.info.name)


def _visit(setting: Setting, bench: Bench, session: RecordingSession) -> Row:
    """Time one setting in both protocols, or count what it launches; host and device alone too, where they can be."""
    device = bench.device
    device.use_precision(setting.precision)
    graph = session.graph(setting, bench.target)
    call = bench.call(setting.workload, setting.batch, setting.runtime, setting.precision, graph)
    if setting.counted:
        return Row(setting.cell, {}, more=_counted(call, device))
    gauge = gauge_on(bench.info.kind, setting.runtime)
    timings = {name: timed(device, call, VISIT, gauge) for name, timed in timer.PROTOCOLS.items()}
    runtime = runtimes.get(setting.runtime)
    # Not where the host waits in mid-pass, or the stream is not PyTorch's.
    together = getattr(runtime, "waits", False) or getattr(runtime, "own_stream", False)
    if device.asynchronous and not (together or any(op.syncs for op in all_ops(graph))):
        timings |= {"issue": timer.issue(device, call, ISSUES, gauge), "queued": timer.queued(device, call, ISSUES)}
    full_us = gauge.fastest.dispatch_us if gauge is not None and device.asynchronous else 0.0
    speed = {host.DISPATCH: full_us} if full_us else {}
    return Row(setting.cell, timings, speed=speed)


def _counted(call: Call, device: Device) -> dict[str, str | float]:
    """The launches that a profiler counts; a CalibrationError says why there are none."""
    profiled_launches = getattr(device, "profiled_launches", None)
    if profiled_launches is None:
        raise CalibrationError(f"{device.name} has no profiler")
    launches = profiled_launches(call)
    if not launches:  # containers often forbid it
        raise CalibrationError("the profiler sees no launch")
    return {"launches": launches}
