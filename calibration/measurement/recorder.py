"""Measure a plan into a folder, setting by setting in the order of their worth, until it is done or the time is spent.

Every setting is timed in both protocols; on an asynchronous device its host's and its device's side are timed alone as
well, which tells its regime. What was measured is on the disk before the next setting starts, and the model is walked
where it is measured, so that the recording can be replayed anywhere. A run that ended in any way goes on where it was.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from latpred import runtimes, tables
from latpred.accuracy.predicted import GraphKey
from latpred.calibration.devices import Call, Device, conditions, open_device
from latpred.calibration.measurement.recording_journal import JournalEntry, RecordingJournal
from latpred.calibration.measurement.whole_models import (
    OUT_OF_MEMORY,
    REFUSED,
    VISIT,
    demand_runtime,
    failure_of,
)
from latpred.calibration.timing import timer
from latpred.calibration.workloads.base import Inputs, Workload
from latpred.calibration.workloads.paper_models import Plan, Setting, plan
from latpred.errors import DeviceError, LatpredError, MissingPackageError, UsageError
from latpred.graph.graph import ModelGraph
from latpred.progress import Pace, ProgressEvent
from latpred.runtimes.lowering import target_of, unsuited

ISSUES = timer.Plan(least=3, most=30, precision=0.01, budget_s=0.1, warmup_s=0.05, loops=4)
"""Effort of timing one side alone; few calls in a row, so that they fit the device's launch queue."""

NOT_WALKED = "not walked: "
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
    """Measure a plan into a folder and save it as a recording.

    Parameters
    ----------
    name : str
        Name of a plan: "paper", "heldout" or "check".
    folder : Path
        Where the recording goes, and the notebook from which a later run goes on.
    device : str or Device
        What to measure on.
    stages, runtimes : sequence of str
        Only these; default: all.
    budget_s : float, optional
        No setting starts later than this.
    effort : timing.Plan
        Of one timing.
    progress : callable, optional
        Told before each setting.

    Raises
    ------
    UsageError
        For an unknown plan, stage or runtime, and a folder with measurements of another machine or plan.
    DeviceError
        When the device is not there, or is lost on the way.
    """
    wanted = plan(name)
    _check_stages(wanted, stages)
    live = open_device(device) if isinstance(device, str) else device
    left_out, notes = _unavailable(live, wanted, runtimes)
    planned = {stage.name: [one for one in stage.settings if one.runtime not in left_out] for stage in wanted.stages}
    chosen = [one for stage, settings in planned.items() if not stages or stage in stages for one in settings]
    with RecordingJournal(folder, name, live.machine()) as notebook, conditions.stated():
        todo = [setting for setting in chosen if setting.key not in notebook.entries]
        todo.sort(key=lambda setting: setting.counted)  # what a profiler leaves behind slows every later launch
        bench = _Bench(live, notebook, effort)
        pace = Pace("", len(todo), progress, budget_s=budget_s)
        try:
            for setting in todo:
                if not pace.next(setting.key):
                    break
                notebook.begin(setting.key)
                notebook.add(bench.visit(setting))
        finally:
            bench.clear()
            notebook.save(live.info().name)
        counts = {
            stage: (sum(one.key in notebook.entries for one in settings), len(settings))
            for stage, settings in planned.items()
        }
        failed: dict[str, list[str]] = {}
        for setting in chosen:
            entry = notebook.entries.get(setting.key)
            if entry is not None and entry.status != tables.OK:
                failed.setdefault(entry.status, []).append(setting.key)
        left = sum(setting.key not in notebook.entries for setting in chosen)
    return Done(folder, counts, (*wanted.notes, *notes), failed, left)


def _check_stages(wanted: Plan, stages: Sequence[str]) -> None:
    known = [stage.name for stage in wanted.stages]
    for stage in stages:
        if stage not in known:
            raise UsageError(f"The plan {wanted.name} has no stage {stage!r}. Use one of {', '.join(known)}.")


def _unavailable(device: Device, wanted: Plan, only: Sequence[str]) -> tuple[set[str], list[str]]:
    """Runtimes of a plan that are not measured here, and why not where nobody asked for that."""
    target = target_of(device.info().kind)
    out: set[str] = set()
    notes: list[str] = []
    named = dict.fromkeys(setting.runtime for stage in wanted.stages for setting in stage.settings)
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


@dataclass(slots=True)
class _Held:
    """The model built last."""

    workload: Workload
    precision: str
    model: Any
    inputs: Inputs


class _Bench:
    """Times settings on a device, one model built at a time."""

    def __init__(self, device: Device, notebook: RecordingJournal, effort: timer.Plan) -> None:
        self._device, self._notebook, self._effort = device, notebook, effort
        self._info = device.info()
        self._held: _Held | None = None

    def visit(self, setting: Setting) -> JournalEntry:
        """Measure one setting in both protocols, or say why that cannot be done."""
        status = self._hopeless(setting)
        if status:
            return self._entry(setting, status)
        try:
            self._device.use_precision(setting.precision)
            graph, untraced = self._walk(setting)
            call = self._prepared(setting, graph)
            if setting.counted:
                return self._counted(call, setting)
            found = {name: timer.timed(self._device, call, name, self._effort) for name in timer.PROTOCOLS}
            sides = self._sides(call, setting, graph)
        except (UsageError, DeviceError):
            raise
        except Exception as error:  # a model's own forward may raise anything; the table says what
            status = failure_of(error)
            if status == OUT_OF_MEMORY:
                self.clear()
            return self._entry(setting, status)
        return self._entry(setting, untraced or tables.OK, found, {**sides, **self._state()})

    def clear(self) -> None:
        """Free the model."""
        self._held = None
        gc.collect()
        if self._info.kind == "cuda":
            torch.cuda.empty_cache()

    def _hopeless(self, setting: Setting) -> str:
        """Why a setting need not be tried: what failed at a smaller batch fails here too."""
        if self._notebook.ended_runs(setting.key) >= MOST_ENDS:
            return f"given up: it ended the run {MOST_ENDS} times"
        for earlier in self._notebook.entries.values():
            same = earlier.model == setting.workload.name and earlier.input_size == setting.workload.input_size
            same = same and (earlier.precision, earlier.runtime) == (setting.precision, setting.runtime)
            if same and earlier.status.startswith(REFUSED):
                return earlier.status
            if same and earlier.status.startswith(OUT_OF_MEMORY) and setting.batch > earlier.batch:
                return f"{OUT_OF_MEMORY} (not tried: batch {earlier.batch} did not fit)"
        return ""

    def _walk(self, setting: Setting) -> tuple[ModelGraph | None, str]:
        """What the runtime runs for the model, kept in the notebook; or why that is not known."""
        key: GraphKey = setting.workload.key(setting.precision, setting.runtime)
        graph = self._notebook.graphs.get(key)
        if graph is not None:
            return graph, ""
        try:
            graph = setting.workload.walk(setting.precision, setting.runtime, target_of(self._info.kind))
        except LatpredError as error:
            if self._info.kind == "simulated":  # which runs walks
                raise
            return None, f"{NOT_WALKED}{error}"[:200]
        self._notebook.keep(key, graph)
        return graph, ""

    def _prepared(self, setting: Setting, graph: ModelGraph | None) -> Call:
        with self._device.errors():
            if self._info.kind == "simulated":
                return self._device.prepare_model(graph, setting.batch, setting.runtime)
            held = self._held
            if held is None or (held.workload.name, held.workload.input_size, held.precision) != (
                setting.workload.name,
                setting.workload.input_size,
                setting.precision,
            ):
                self.clear()
                made = setting.workload.make(self._device.name, setting.precision)
                held = self._held = _Held(setting.workload, setting.precision, *made)
            return self._device.prepare_model(
                held.model, held.inputs(setting.batch, self._device.name), setting.runtime
            )

    def _sides(self, call: Call, setting: Setting, graph: ModelGraph | None) -> dict[str, Any]:
        """Host and device timed alone; unknown where the host waits in mid-pass, or the stream is not PyTorch's."""
        if not self._device.asynchronous or graph is None or graph.syncs(1) or graph.syncs(2):
            return {}
        runtime = runtimes.get(setting.runtime)
        if getattr(runtime, "waits", False) or getattr(runtime, "own_stream", False):
            return {}
        host_s = timer.issue(self._device, call, ISSUES).median_s
        device_s = timer.queued(self._device, call, ISSUES).median_s
        regime = "framework-bound" if host_s > device_s else "compute-bound"
        return {"overhead_s": host_s, "compute_s": device_s, "regime": regime}

    def _counted(self, call: Call, setting: Setting) -> JournalEntry:
        """What a profiler counts, or why there is nothing of it."""
        look = getattr(self._device, "profile", None)
        if look is None:
            return self._entry(setting, f"{self._device.name} has no profiler")
        seen = look(call)
        if not seen.kernels:  # containers often forbid it
            return self._entry(setting, "the profiler sees no kernel")
        found = {
            tables.KERNELS: f"{seen.kernels:g}",
            "x_kernels_s": f"{seen.kernel_s:.6g}",
            "x_fills": f"{seen.fills:g}",
        }
        # What is replayed is launched by no op, so there is nothing to hold the walk against.
        walked = {"launches": seen.launches} if setting.runtime == "eager" and seen.launches else {}
        return self._entry(setting, tables.OK, {}, {**walked, **found})

    def _state(self) -> dict[str, Any]:
        """The GPU's clocks just after."""
        look = getattr(self._device, "state", None)
        state = look() if look is not None else None
        if state is None:
            return {}
        return {
            "x_sm_mhz": str(state.sm_mhz),
            "x_temperature_c": str(state.temperature_c),
            "x_throttled": "+".join(state.throttled),
        }

    def _entry(
        self,
        setting: Setting,
        status: str,
        found: dict[str, timer.Timing] | None = None,
        more: dict[str, Any] | None = None,
    ) -> JournalEntry:
        latencies = {name: (t.median_s, t.spread_s, t.n) for name, t in (found or {}).items()}
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
            timings=latencies,
            more=more or {},
        )
