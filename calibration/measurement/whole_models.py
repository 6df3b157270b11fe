"""Measure whole models: every cell visited in rounds, so that a slow minute of the machine falls on all of them alike.

On a CPU only moments at full speed count: what was timed while a neighbour slowed the processors is left out, and a
cell that had no other moments is visited again at the end. Gives the measurement table (`latpred.tables.MEASURED`) with
the repeat noise of the very run. How one visit is timed is `timing`'s business; what a device is, `device`'s.
"""

from __future__ import annotations

import gc
import math
import random
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import torch

from latpred import host, runtimes, tables
from latpred.calibration.devices import Device, conditions, open_device
from latpred.calibration.timing import timer
from latpred.calibration.timing.reference_speed import (
    SLOW,
    ReferenceTimer,
    SpeedReading,
    at_full_speed,
    full_speed,
    gauge_of,
    slower,
)
from latpred.calibration.workloads.base import Models, Workload, workloads_of
from latpred.errors import DeviceError, MissingPackageError, RuntimeRefusalError, UsageError
from latpred.progress import Pace, ProgressEvent
from latpred.runtimes.lowering import lacking, target_of
from latpred.sandbox.own_thread import without_modes

VISIT = timer.Plan(least=3, most=60, precision=0.005, budget_s=0.2, warmup_s=0.1)
"""Effort of one visit: short, because a cell is visited again in every round."""

REPEATS = 4
LEAST_KEPT = 2  # visits of a cell that count in any case
MORE_ROUNDS = 3  # for cells that were never visited at full speed
OUT_OF_MEMORY = "out of memory"
REFUSED = "refused: "
_KEPT_SHARE = 0.2  # of the device's memory, for models that stay built between rounds
_MOST_TEXT = 200


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


@dataclass
class _Cell:
    """One cell under measurement; `failure` says why there will be no more visits."""

    workload: Workload
    batch: int
    runtime: str
    visits: list[timer.Timing] = field(default_factory=list)
    fastest: list[SpeedReading] = field(default_factory=list)  # that was known of the machine at each visit
    failure: str = ""

    def settled(self) -> bool:
        """Whether anything is known of it, after a visit that was interrupted too."""
        del self.visits[len(self.fastest) :]
        return bool(self.visits or self.failure)

    def slow(self, fastest: SpeedReading) -> list[float]:
        """How slow the machine was at each visit, now that its fastest moments are known."""
        return [one.slow * slower(then, fastest) for one, then in zip(self.visits, self.fastest, strict=True)]

    def kept(self, fastest: SpeedReading) -> list[timer.Timing]:
        """Visits at full speed, each with how slow it was; two in any case, where that many were made."""
        slow = self.slow(fastest)
        visits = [msgspec.structs.replace(one, slow=ratio) for one, ratio in zip(self.visits, slow, strict=True)]
        return at_full_speed([[one] for one in visits], slow, LEAST_KEPT)[0]

    def slowed(self, fastest: SpeedReading) -> bool:
        """Whether visits at full speed are too few."""
        fast = sum(one <= SLOW for one in self.slow(fastest))
        return not self.failure and fast < min(LEAST_KEPT, len(self.visits))


@without_modes()
def measure(
    models: Models,
    batches: Iterable[int],
    *,
    runtime: str | Sequence[str] = "eager",
    device: str | Device = "cpu",
    protocol: str = "single",
    repeats: int = REPEATS,
    seq: int | None = None,
    image: int | None = None,
    precision: str = "fp32",
    threads: int | None = None,
    budget_s: float | None = None,
    plan: timer.Plan | None = None,
    progress: Callable[[ProgressEvent], None] | None = None,
) -> pd.DataFrame:
    """Measure models at batch sizes.

    Parameters
    ----------
    models : str, nn.Module, Subject, a sequence of those, or a mapping of names to modules
        What to measure.
    batches : iterable of int
        Batch sizes, each at least 1.
    runtime : str or sequence of str
        Names of runtimes; of several, visits alternate, so that they can be held against each other.
    device : str or Device
        "cpu", "cuda:0", "simulated", or a device that is already open.
    protocol : str
        "single" (synchronised after each forward) or "pipelined" (the period of forwards issued back to back).
    repeats : int
        Rounds; from two on, `repeat_ratio` tells the repeat noise of each cell.
    seq, image : int, optional
        Tokens or pixels of the inputs.
    precision : str
        fp32, tf32, fp16, bf16 or fp64.
    threads : int, optional
        Threads that an op may use on the CPU; default: as many as PyTorch uses now.
    budget_s : float, optional
        No visit starts later than this; cells that were never visited say so in `status`.
    plan : timing.Plan, optional
        Effort of one visit.
    progress : callable, optional
        Told before each visit.

    Returns
    -------
    DataFrame
        The measurement table: latency_s is the median over rounds, spread_s half their interquartile range, n their
        number, `status` "ok" or why there is no latency.

    Raises
    ------
    UsageError
        For a batch below 1, no model, fewer than one repeat or thread, an unknown runtime, protocol or precision.
    DeviceError
        When the device is not there.
    MissingPackageError
        When the runtime is not installed.
    StoppedError
        On Ctrl-C, once anything was measured: a KeyboardInterrupt whose `table` has that.

    Examples
    --------
    >>> measure("resnet-18", [0])
    Traceback (most recent call last):
    latpred.errors.UsageError: Batch 0 cannot be measured. Give whole numbers from 1 on.
    """
    sizes = _checked(batches, repeats, protocol)
    names = (runtime,) if isinstance(runtime, str) else tuple(dict.fromkeys(runtime))
    for name in names:
        runtimes.get(name)  # a misspelt one is said before a missing device
    live = open_device(device) if isinstance(device, str) else device
    for name in names:
        demand_runtime(name, live)
    workloads = workloads_of(models, seq=seq, image=image)
    cells = [_Cell(workload, batch, name) for workload in workloads for batch in sizes for name in names]
    bench = _Bench(live, precision, protocol, plan or VISIT, copies=len(names))
    options = conditions.Options(threads).checked(bench.info.kind)
    with conditions.stated(options):
        live.use_precision(precision)
        try:
            _rounds(cells, bench, repeats, Pace("", repeats * len(cells), progress, budget_s=budget_s))
        except KeyboardInterrupt:
            settled = [cell.settled() for cell in cells]
            if not any(settled):
                raise
            raise StoppedError(_table(cells, bench, "interrupted before it was measured")) from None
        return _table(cells, bench, "not reached in the time budget")


def demand_runtime(runtime: str, device: Device) -> None:
    """Make sure that a runtime can run on a device.

    Raises
    ------
    UsageError
        When no runtime goes by the name.
    MissingPackageError
        When it is not installed; the message says how to install it.
    """
    runtimes.get(runtime)  # a misspelt one is said even where everything is simulated
    kind = device.info().kind
    missing = None if kind == "simulated" else lacking(runtime, target_of(kind))
    if missing:
        raise MissingPackageError(f"{runtime} cannot run here: {missing}")


class _Bench:
    """A device with models built on it; those that fit into a share of its memory stay built between rounds."""

    def __init__(self, device: Device, precision: str, protocol: str, plan: timer.Plan, copies: int = 1) -> None:
        self.device, self.precision, self.protocol, self.plan = device, precision, protocol, plan
        self._copies = copies  # of its weights: each runtime that exports or traces a model holds them once more
        self.info = device.info()
        threads = torch.get_num_threads()
        self._reference = ReferenceTimer(threads) if self.info.kind != "simulated" else None
        self._gauge = gauge_of(threads) if self.info.kind == "cpu" else None
        self.speeds: list[dict[str, float]] = []
        self._built: dict[Workload, tuple[Any, Callable[[int], Any]]] = {}
        self._room = _KEPT_SHARE * self.info.memory_bytes

    def visit(self, cell: _Cell) -> None:
        """Time a cell once, or note why that cannot be done."""
        try:
            cell.visits.append(self._timing(cell))
            cell.fastest.append(self.fastest)
            if self._reference is not None:
                self.speeds.append(self._reference.read())
        except (UsageError, DeviceError):
            raise
        except Exception as error:  # a model's own forward may raise anything; the table says what
            cell.failure = failure_of(error)
            if cell.failure == OUT_OF_MEMORY:
                self.clear()

    @property
    def fastest(self) -> SpeedReading:
        """The fastest moments of the machine so far; nothing where the host is not what is timed."""
        return SpeedReading(0.0) if self._gauge is None else self._gauge.fastest

    def leave(self, workload: Workload) -> None:
        """Free a model, unless it may stay for the next round."""
        if workload not in self._built:
            return
        kept = self._copies * sum(_weight_bytes(model) for model, _ in self._built.values())
        if kept > self._room:
            del self._built[workload]
            gc.collect()

    def clear(self) -> None:
        """Free all models."""
        self._built.clear()
        gc.collect()

    def _timing(self, cell: _Cell) -> timer.Timing:
        try:
            return self._timed(cell)
        except (MemoryError, torch.OutOfMemoryError):
            if len(self._built) <= 1:
                raise
        self.clear()  # the memory may be held by models that only wait for their next round
        return self._timed(cell)

    def _timed(self, cell: _Cell) -> timer.Timing:
        with self.device.errors():
            if self.info.kind == "simulated":
                graph = cell.workload.walk(self.precision, cell.runtime, target_of(self.info.kind))
                call = self.device.prepare_model(graph, cell.batch, cell.runtime)
            else:
                if cell.workload not in self._built:
                    self._built[cell.workload] = self._build(cell.workload)
                model, inputs = self._built[cell.workload]
                call = self.device.prepare_model(model, inputs(cell.batch), cell.runtime)
        return timer.timed(self.device, call, self.protocol, self.plan, self._gauge)

    def _build(self, workload: Workload) -> tuple[Any, Callable[[int], Any]]:
        where = self.device.name
        model, inputs = workload.make(where, self.precision)
        return model, lambda batch: inputs(batch, where)


def failure_of(error: Exception) -> str:
    """What stands as the status of a cell that raised an error."""
    if isinstance(error, RuntimeRefusalError):
        return f"{REFUSED}{error}"[:_MOST_TEXT]
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return OUT_OF_MEMORY
    text = " ".join(str(error).split())[:_MOST_TEXT]
    return f"{type(error).__name__}: {text}"


def _rounds(cells: Sequence[_Cell], bench: _Bench, repeats: int, pace: Pace) -> None:
    for number in range(repeats):
        if not _round(cells, cells, number, f"round {number + 1} of {repeats}", bench, pace):
            return
    for number in range(repeats, repeats + MORE_ROUNDS):
        slowed = [cell for cell in cells if cell.slowed(bench.fastest)]
        if not _round(slowed, cells, number, "again, since the machine was slowed", bench, pace):
            return


def _round(visited: Sequence[_Cell], cells: Sequence[_Cell], number: int, said: str, bench: _Bench, pace: Pace) -> bool:
    """Visit cells once; False when there is no time for all of them."""
    for group in _order(visited, number):
        for cell in group:
            if not pace.next(f"{cell.workload.name} batch {cell.batch}, {cell.runtime}, {said}"):
                return False
            if not cell.failure:
                bench.visit(cell)
            if cell.failure == OUT_OF_MEMORY:
                _give_up_larger(cells, cell)
            if cell.failure.startswith(REFUSED):
                _give_up_runtime(cells, cell)
        bench.leave(group[0].workload)
    return True


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


def _give_up_larger(cells: Sequence[_Cell], failed: _Cell) -> None:
    for cell in cells:
        same = cell.workload is failed.workload and cell.runtime == failed.runtime
        if same and cell.batch > failed.batch and not cell.failure:
            cell.failure = f"{OUT_OF_MEMORY} (not tried: batch {failed.batch} did not fit)"


def _give_up_runtime(cells: Sequence[_Cell], refused: _Cell) -> None:
    """A runtime that refuses a model refuses it at every batch, after seconds each time."""
    for cell in cells:
        if cell.workload is refused.workload and cell.runtime == refused.runtime:
            cell.failure = refused.failure


def _table(cells: Sequence[_Cell], bench: _Bench, unvisited: str) -> pd.DataFrame:
    machine = bench.device.machine()
    common = {
        "machine": tables.machine_name(machine),
        "device": bench.info.name,
        "precision": bench.precision,
        "protocol": bench.protocol,
        "run": f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}",
        "stack": tables.stack_text(machine),
    }
    fastest = {host.DISPATCH: bench.fastest.dispatch_us, host.THREADS: bench.fastest.threads_us}
    found = full_speed(bench.speeds) | {kind: round(us, 3) for kind, us in fastest.items() if us > 0}
    speeds = {host.COLUMN.format(kind): us for kind, us in found.items()}
    rows = [{**common, **speeds, **_row(cell, bench.fastest, unvisited)} for cell in cells]
    return tables.check(pd.DataFrame(rows), tables.MEASURED)


def _row(cell: _Cell, fastest: SpeedReading, unvisited: str) -> dict[str, Any]:
    visits = cell.kept(fastest)
    failure = cell.failure or ("" if cell.visits else unvisited)
    row: dict[str, Any] = {
        "runtime": cell.runtime,
        "model": cell.workload.name,
        "batch": cell.batch,
        "input_kind": cell.workload.input_kind,
        "input_size": cell.workload.input_size,
        "n": len(visits),
        "status": failure or tables.OK,
    }
    if failure:
        return {**row, "latency_s": math.nan, "spread_s": math.nan, "repeat_ratio": math.nan}
    whole = timer.over_runs(visits)
    row |= {host.SLOWED: round(whole.slow, 3)} if fastest.dispatch_us > 0 else {}
    return {**row, "latency_s": whole.median_s, "spread_s": whole.spread_s, "repeat_ratio": _repeat_ratio(visits)}


def _repeat_ratio(visits: Sequence[timer.Timing]) -> float:
    """Slower over faster of the medians of even and odd rounds; NaN from a single round."""
    if len(visits) < 2:
        return math.nan
    halves = [float(np.median([visit.median_s for visit in visits[start::2]])) for start in (0, 1)]
    return max(halves) / min(halves)


def _weight_bytes(model: Any) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters()) if isinstance(model, torch.nn.Module) else 0


def _checked(batches: Iterable[int], repeats: int, protocol: str) -> tuple[int, ...]:
    sizes = tuple(dict.fromkeys(batches))
    wrong = [size for size in sizes if isinstance(size, bool) or not isinstance(size, int) or size < 1]
    if wrong or not sizes:
        raise UsageError(f"Batch {wrong[0] if wrong else 'list'!r} cannot be measured. Give whole numbers from 1 on.")
    if repeats < 1:
        raise UsageError(f"{repeats} repeats measure nothing. Use repeats=1 or more; from 2 on repeat noise is known.")
    if protocol not in timer.PROTOCOLS:
        raise UsageError(f"There is no protocol {protocol!r}. Use one of {', '.join(timer.PROTOCOLS)}.")
    return sizes
