"""Measure whole models: every cell visited in rounds, so that a slow minute of the machine falls on all of them alike.

On a CPU only moments at full speed count: what was timed while a neighbour slowed the processors is left out, and a
cell that had no other moments is visited again at the end. Gives the measurement table (`latpred.tables.MEASURED`) with
the repeat noise of the very run.
"""

from __future__ import annotations

import gc
import inspect
import math
import random
import secrets
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd
import torch

from latpred import host, runtimes, tables
from latpred.calibration.devices import Call, Device, conditions, open_device
from latpred.calibration.session import REFUSED, failure_of
from latpred.calibration.timing import disturbance, timer
from latpred.calibration.timing.reference_speed import (
    APART_WAIT_S,
    SLOW,
    RunSpeed,
    SpeedGauge,
    SpeedReading,
    gauge_on,
    reference_on,
    rest_after,
    slower,
    taken_at_full_speed,
    typical,
)
from latpred.calibration.workloads.suites import Models, Workload, workloads_of
from latpred.errors import BusyWarning, DeviceError, MissingPackageError, TraceError, UsageError
from latpred.graph.graph import ModelGraph
from latpred.progress import ProgressCounter, ProgressEvent
from latpred.query import check_budget, checked_batches, whole_number
from latpred.runtimes.lowering import demand_autocast, lacking, target_of
from latpred.sandbox.own_thread import without_modes
from latpred.tracing.autocast import under_autocast

_LAZY = inspect.iscoroutinefunction, inspect.isasyncgenfunction, inspect.isgeneratorfunction
_KEPT_SHARE = 0.2  # of the device's memory, for models that stay built between rounds
Result = TypeVar("Result")


class Bench:
    """A device with models built on it; each of `copies` runtimes that export or trace a model holds its weights."""

    def __init__(self, device: Device, copies: int = 1) -> None:
        self.device, self.info = device, device.info()
        self.target = target_of(self.info.kind)
        self.simulated = self.info.kind == "simulated"  # which runs graphs, not models
        self._copies = copies
        self._built: dict[tuple[Workload, str], tuple[Any, Callable[[int, Any], Any]]] = {}
        # What each model does, where it can be traced, and bytes of weights that are not in memory yet.
        self._known: dict[tuple[Workload, str], tuple[ModelGraph | None, int]] = {}

    def model(self, workload: Workload, batch: int, precision: str) -> tuple[Any, Any]:
        """A model on the device and its inputs at a batch size; built once as long as it is not let go."""
        key = (workload, precision)
        if key not in self._built:
            model, inputs = workload.make(self.device.name, precision)
            if any(lazy(model.forward) for lazy in _LAZY):
                raise TraceError(
                    f"{workload.name} has a forward that is async or yields: its call does nothing to time."
                )
            self._built[key] = under_autocast(model, precision, self.target), inputs
        model, inputs = self._built[key]
        return model, inputs(batch, self.device.name)

    def call(
        self, workload: Workload, batch: int, runtime: str, precision: str, graph: ModelGraph | None = None
    ) -> Call:
        """A forward pass as a runtime issues it; on the simulated device, that of its graph."""
        demand_autocast(runtime, precision)
        with self.device.errors():
            if self.simulated:
                graph = graph or workload.trace(precision, runtime, self.target)
                return self.device.prepare_model(graph, batch, runtime)
            if self.info.kind == "cpu":
                self._demand_room(workload, batch, precision)
            return self.device.prepare_model(*self.model(workload, batch, precision), runtime)

    def _demand_room(self, workload: Workload, batch: int, precision: str) -> None:
        """Refuse a model whose weights, or whose activations at a batch size, memory has no room for."""
        key = (workload, precision)
        if key not in self._known:
            graph, unbuilt = None, 0
            with suppress(Exception):  # what cannot be traced can be measured, or says itself why not
                model, _ = workload.make("meta", precision)
                unbuilt = sum(one.nbytes for one in (*model.parameters(), *model.buffers()) if one.is_meta)
                graph = workload.trace(precision)
            self._known[key] = graph, unbuilt
        (graph, unbuilt), activations = self._known[key], 0
        with suppress(UsageError):  # a graph may be known at other batch sizes alone
            activations = graph.peak_bytes(batch) - graph.parameter_bytes if graph is not None else 0
        host.demand_room(activations + unbuilt * (key not in self._built))

    def attempt(self, visit: Callable[[], Result]) -> Result:
        """What a visit gives; where memory is short it is tried again without models that wait for another round."""
        try:
            return visit()
        except MemoryError:
            if len(self._built) < 2:
                raise
        self.clear()  # out here, where no traceback holds a model any more
        return visit()

    def turn_to(self, workload: Workload, precision: str) -> None:
        """Free all other models."""
        if self._built.keys() - {(workload, precision)}:
            self.clear()

    def leave(self, workload: Workload) -> None:
        """Free a model, unless it may stay for the next round."""
        models = [model for model, _ in self._built.values() if isinstance(model, torch.nn.Module)]
        kept = self._copies * sum(p.numel() * p.element_size() for model in models for p in model.parameters())
        if kept > _KEPT_SHARE * (self.info.memory_bytes or math.inf):  # not every system says how much there is
            self._built = {key: built for key, built in self._built.items() if key[0] is not workload}
            gc.collect()

    def clear(self) -> None:
        """Free all models."""
        self._built.clear()
        gc.collect()
        if self.info.kind == "cuda":
            with self.device.errors():
                torch.cuda.empty_cache()


def demand_runtime(runtime: str, device: Device) -> None:
    """Make sure that a runtime can run on a device; the `MissingPackageError` says how to install it."""
    runtimes.get(runtime)  # a misspelt one is said even where everything is simulated
    kind = device.info().kind
    missing = None if kind == "simulated" else lacking(runtime, target_of(kind))
    if missing:
        raise MissingPackageError(f"{runtime} cannot run here: {missing}")


def multiplies(device: Device, precision: str) -> bool:
    """Whether a device multiplies as a precision says: without TF32, float32 would be timed under its name."""
    return precision != "tf32" or device.info().kind == "simulated" or precision in device.precisions()


VISIT = timer.Plan(least=3, most=60, precision=0.005, budget_s=0.2, warmup_s=0.1)
"""Effort of one visit: short, because a cell is visited again in every round."""

REPEATS = 4
LEAST_KEPT = 2  # visits of a cell that count in any case
MORE_ROUNDS = 3  # for cells that were never visited at full speed


class StoppedError(KeyboardInterrupt):
    """Ctrl-C while models were measured.

    Attributes
    ----------
    table : DataFrame
        The measurement table of what was measured until then; `status` says of the other cells that they were not.
    """

    def __init__(self, table: pd.DataFrame) -> None:
        super().__init__()
        self.table = table


class _Visit(NamedTuple):
    """One timing of a cell, the machine's fastest moments by then, and what the references took right after."""

    timing: timer.Timing
    fastest: SpeedReading
    speed_us: Mapping[str, float]


@dataclass
class _Cell:
    """One cell under measurement; `failure` says why there will be no more visits."""

    workload: Workload
    batch: int
    runtime: str
    gauge: SpeedGauge | None  # none where the host is not what is timed
    visits: list[_Visit] = field(default_factory=list)
    failure: str = ""

    @property
    def fastest(self) -> SpeedReading:
        """The fastest moments of the machine so far."""
        return SpeedReading(0.0) if self.gauge is None else self.gauge.fastest

    def slow(self) -> list[float]:
        """How slow the machine was at each visit, now that its fastest moments are known."""
        return [visit.timing.slow * slower(visit.fastest, self.fastest) for visit in self.visits]

    def kept(self) -> tuple[list[_Visit], list[float]]:
        """Visits at full speed, and how slow it was at each; two in any case, where that many were made."""
        return taken_at_full_speed([[visit] for visit in self.visits], self.slow(), LEAST_KEPT)

    def slowed(self) -> bool:
        """Whether visits at full speed are too few."""
        fast = sum(one <= SLOW for one in self.slow())
        return not self.failure and fast < min(LEAST_KEPT, len(self.visits))


@without_modes()
def measure(
    models: Models,
    batch: int | Iterable[int],
    *,
    runtime: str | Sequence[str] = "eager",
    device: str | torch.device | Device = "cpu",
    protocol: str = "single",
    repeats: int = REPEATS,
    inputs: Any = None,
    seq: int | None = None,
    image: int | None = None,
    precision: str = "fp32",
    threads: int | None = None,
    cudnn_benchmark: bool = False,
    budget_s: float | None = None,
    plan: timer.Plan | None = None,
    progress: Callable[[ProgressEvent], None] | None = None,
) -> pd.DataFrame:
    """Measure models at batch sizes.

    Parameters
    ----------
    models : str, path, nn.Module, Workload, a sequence of those, or a mapping of names to them
        What to measure.
    batch : int or iterable of int
        Batch sizes, each at least 1.
    runtime : str or sequence of str
        Names of runtimes; of several, visits alternate, so that they can be held against each other.
    device : str, torch.device or Device
        "cpu", "cuda:0", "simulated", or a device that is already open.
    protocol : str
        "single" (synchronised after each forward) or "pipelined" (the period of forwards issued back to back).
    repeats : int
        Rounds. `repeat_ratio` tells the repeat noise of each cell with two visits or more; one that was slowed by other
        work has more visits than rounds.
    inputs : optional
        What modules are called with, as for `latpred.trace`; names, graphs and workloads have inputs of their own.
    seq, image : int, optional
        Tokens or pixels of the inputs.
    precision : str
        fp32, tf32, fp16, bf16, fp64, amp-fp16 or amp-bf16: fp32, each pass in a `torch.autocast` of its own.
    threads : int, optional
        Threads that an op may use on the CPU; default: as many as PyTorch uses now.
    cudnn_benchmark : bool
        Measure with `torch.backends.cudnn.benchmark` on; CUDA only.
    budget_s : float, optional
        No visit starts later than this; cells that were never visited say so in `status`.
    plan : timing.Plan, optional
        Effort of one visit.
    progress : callable, optional
        Told before each visit: a `latpred.progress.ProgressEvent`.

    Returns
    -------
    DataFrame
        The measurement table: latency_s is the median over rounds, spread_s half their interquartile range, n their
        number, `status` "ok" or why there is no latency, as too little memory for its weights or activations.

    Raises
    ------
    UsageError
        For a batch below 1, no model, fewer than one repeat or thread, an unknown runtime, protocol or precision, and
        for tf32 on a device that has none.
    DeviceError
        When the device is not there, or fails for good.
    MissingPackageError
        When the runtime is not installed.
    BusyWarning
        A warning, where other work used the processors meanwhile.
    StoppedError
        On Ctrl-C, once anything was measured: a KeyboardInterrupt whose `table` has that.

    Examples
    --------
    >>> measure("resnet-18", [0])
    Traceback (most recent call last):
    latpred.errors.UsageError: Batch 0 is not possible; the smallest batch is 1.
    """
    sizes = checked_batches(tuple(batch) if isinstance(batch, Iterable) else batch)
    repeats = whole_number("repeats", repeats, "number of repeats")
    check_budget(budget_s)
    if protocol not in timer.PROTOCOLS:
        raise UsageError(f"There is no protocol {protocol!r}. Use one of {', '.join(timer.PROTOCOLS)}.")
    names = (runtime,) if isinstance(runtime, str) else tuple(dict.fromkeys(runtime))
    if not names:
        raise UsageError(f"no runtime is named. Give one or more of {', '.join(runtimes.names())}.")
    live = open_device(device)
    for name in names:
        demand_runtime(name, live)
    if not multiplies(live, precision):
        raise UsageError(f"{live.name} has no {precision}; it does {', '.join(live.precisions())}.")
    workloads = workloads_of(models, inputs=inputs, seq=seq, image=image)
    kind = live.info().kind
    stated = conditions.stated(conditions.Options(threads, cudnn_benchmark).checked(kind), live, dtype=None)
    with stated, _watching(kind):
        gauges = {name: gauge_on(kind, name) for name in names}
        cells = [_Cell(workload, size, *on) for workload in workloads for size in sizes for on in gauges.items()]
        counter = ProgressCounter("", repeats * len(cells), progress, budget_s=budget_s)
        visits = _Visits(cells, Bench(live, copies=len(names)), precision, protocol, plan or VISIT, counter)
        live.use_precision(precision)
        try:
            visits.rounds(repeats)
        except KeyboardInterrupt:
            if not any(cell.visits or cell.failure for cell in cells):
                raise
            raise StoppedError(visits.table("interrupted before it was measured")) from None
        return visits.table("not reached in the time budget")


@contextmanager
def _watching(kind: str) -> Iterator[None]:
    """Warn in the end where other work used the processors, which a simulated device does not need."""
    watch = disturbance.Watch()
    yield
    busy = watch.lap().busy
    if busy > disturbance.OTHERS and kind != "simulated":
        said = f"other work used {busy:.1f} processors meanwhile, so times may be too long; measure again without it"
        warnings.warn(said, BusyWarning, stacklevel=5)


class _Visits:
    """The cells of a run on a bench, and how fast the machine was meanwhile."""

    def __init__(
        self,
        cells: Sequence[_Cell],
        bench: Bench,
        precision: str,
        protocol: str,
        plan: timer.Plan,
        counter: ProgressCounter,
    ) -> None:
        self.cells, self.bench, self.precision, self.protocol, self.plan = cells, bench, precision, protocol, plan
        self._counter, self._reference = counter, reference_on(bench.device)
        self._gauge = gauge_on(bench.info.kind, "eager")
        self._machine = bench.device.machine()  # as long as its driver answers
        self._timed_s = self._waited_s = 0.0

    def rounds(self, repeats: int) -> None:
        """Visit every cell so often, and those again that were never visited at full speed, while there is time."""
        for number in range(repeats + MORE_ROUNDS):
            cells, label = self.cells, f"round {number + 1} of {repeats}"
            if number >= repeats:
                cells = [cell for cell in self.cells if cell.slowed()]
                label = "again, since the machine was slowed"
            for group in _order(cells, number):
                for cell in group:
                    if not self._counter.next(f"{cell.workload.name} batch {cell.batch}, {cell.runtime}, {label}"):
                        return
                    if not cell.failure:
                        self._visit(cell)
                self.bench.leave(group[0].workload)

    def _visit(self, cell: _Cell) -> None:
        """Time a cell once, or note why that cannot be done."""

        def timed() -> timer.Timing:
            call = self.bench.call(cell.workload, cell.batch, cell.runtime, self.precision)
            return timer.PROTOCOLS[self.protocol](self.bench.device, call, self.plan, cell.gauge)

        if self._gauge is not None and self._waited_s < self._timed_s:  # never longer than it measures
            self._waited_s += self._gauge.await_full_speed(min(APART_WAIT_S, self._timed_s - self._waited_s))
        start = time.monotonic()
        try:
            timing = self.bench.attempt(timed)
        except UsageError:
            raise
        except DeviceError as error:
            raise DeviceError(f"{cell.workload.name} at batch {cell.batch} in {cell.runtime}: {error}") from error
        except Exception as error:  # a model's own forward may raise anything
            cell.failure = failure_of(error)
            # A runtime that refuses a model refuses it at every batch, after seconds each time.
            for other in self.cells if cell.failure.startswith(REFUSED) else ():
                if other.workload is cell.workload and other.runtime == cell.runtime:
                    other.failure = cell.failure
            return
        self._timed_s += time.monotonic() - start
        speed_us = {}
        if self._reference is not None:
            rest_after(cell.runtime)
            speed_us = self._reference.read()
        cell.visits.append(_Visit(timing, cell.fastest, speed_us))

    def table(self, unvisited: str) -> pd.DataFrame:
        """What was measured; `unvisited` is the status of cells that never were."""
        common = {
            "machine": tables.machine_name(self._machine),
            "device": self.bench.info.name,
            "precision": self.precision,
            "protocol": self.protocol,
            "run": f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}",
            "stack": tables.stack_text(self._machine),
        }
        readings = (visit.speed_us for cell in self.cells for visit in cell.visits)
        speed = RunSpeed.of(readings, None if self._gauge is None else self._gauge.fastest)
        rows = [{**common, **_row(cell, unvisited, speed)} for cell in self.cells]
        return tables.check(pd.DataFrame(rows), tables.MEASURED)


def _order(cells: Sequence[_Cell], number: int) -> list[list[_Cell]]:
    """The cells model by model, models and batches in an order that differs from round to round."""
    groups: dict[Workload, list[_Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.workload, []).append(cell)
    rng = random.Random(number)
    ordered = list(groups.values())
    rng.shuffle(ordered)
    for group in ordered:
        rng.shuffle(group)
    return ordered


def _row(cell: _Cell, unvisited: str, speed: RunSpeed) -> dict[str, Any]:
    visits, slow = cell.kept()
    failure = "" if cell.visits else cell.failure or unvisited  # what was timed before a failure counts
    row: dict[str, Any] = {
        "runtime": cell.runtime,
        "model": cell.workload.name,
        "batch": cell.batch,
        "input_kind": cell.workload.input_kind,
        "input_size": cell.workload.input_size,
        "n": len(visits),
        "status": failure or tables.OK,
        **dict.fromkeys(("latency_s", "spread_s", "repeat_ratio"), math.nan),
    }
    if not failure:
        # The spread within one visit is smaller than the noise of a repeated measurement, and flatters.
        medians_s = [visit.timing.median_s for visit in visits]
        whole = timer.summary(medians_s, float(np.median(slow)))
        row |= {"latency_s": whole.median_s, "spread_s": whole.spread_s}
        row |= {host.SLOWED: round(whole.slow, 3)} if cell.gauge is not None else {}
        if len(visits) > 1:
            even, odd = (float(np.median(medians_s[start::2])) for start in (0, 1))
            row["repeat_ratio"] = max(even, odd) / min(even, odd)
    at = speed.at(row.get(host.SLOWED, 1.0), typical(visit.speed_us for visit in visits))
    return row | {host.COLUMN.format(kind): round(us, 3) for kind, us in at.items()}
