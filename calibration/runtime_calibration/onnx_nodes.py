"""The study of ONNX Runtime: generated ONNX graphs watched node by node tell its costs, exported networks judge.

On a synchronous device onnxruntime's own profiler says what every node takes, in whole microseconds. Graphs written
down in milliseconds are watched, since an export takes seconds: tiny ones tell what a node costs before it does
anything, larger ones what its kernel takes. Exported networks judge. A device that runs on its own is left to `whole`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, cycle, islice
from typing import Any, NamedTuple

import msgspec
import numpy as np

from latpred.calibration import schedules
from latpred.calibration.cells import Cell
from latpred.calibration.devices.base import Device
from latpred.calibration.runtime_calibration import onnx_fit, onnx_workloads, runs
from latpred.calibration.runtime_calibration.onnx_fit import Placed
from latpred.calibration.runtime_calibration.whole_networks import WholeNetworks, effort, timed_after
from latpred.calibration.session import Row, Sampled
from latpred.calibration.timing.reference_speed import SpeedReading, at_full_speed
from latpred.graph.graph import Op
from latpred.prediction.kernel_times import resident_share
from latpred.profile.document import DeviceProfile, DispatchFit
from latpred.runtimes import get, lowering
from latpred.runtimes.onnx import onnx_graph, onnx_session
from latpred.runtimes.source import tensors_of
from latpred.units import US_PER_S

NAME = "onnxruntime"
SECONDS = 100.0
TINY_GRAPHS, MOST_JUDGES = 45, 9  # a judge takes as long to export as thirty graphs take to time
TURN = ("graph",) * 25 + ("judge",)  # after the tiny graphs, again and again
GRAPH_EFFORT = (8, 0.08)  # forward passes, and seconds after which there are no more
TINY_EFFORT = (60, 0.1)
WATCHED = 5  # forward passes with the profiler on, after one that is not counted
LEAST_WATCHED = 2  # of them, kept however slow the moment was
WATCHED_S = 0.25  # beyond which there are fewer
COLD_EVERY = 2  # of the generated graphs, every second runs with its weights out of the cache


class Made(NamedTuple):
    """A model that can be loaded: serialised, with the inputs of one forward pass."""

    model: bytes | str
    feed: dict[str, Any]


class OnnxStudy(WholeNetworks):
    """The study of onnxruntime.

    Parameters
    ----------
    runtime : str
        Its name.
    seconds : float
        What a full calibration spends on it.

    Examples
    --------
    >>> OnnxStudy().runtime
    'onnxruntime'
    """

    def __init__(self, runtime: str = NAME, seconds: float = SECONDS) -> None:
        super().__init__(runtime, seconds)
        self._ops: dict[str, tuple[Op, ...]] = {}

    def cells(self, device: Device, precision: str) -> Iterator[Cell]:
        """Tiny graphs, then larger ones, and networks that judge among them."""
        if device.asynchronous:
            yield from super().cells(device, precision)
            return
        for number in range(TINY_GRAPHS):
            yield graph_cell(number, precision, tiny=True)
        graphs = (graph_cell(number, precision) for number in count())
        # Where a model is called again and again, only its own size makes its weights leave the cache.
        judges = (
            msgspec.structs.replace(spec, cold=False) for spec in islice(schedules.judging_networks(), MOST_JUDGES)
        )
        for kind in cycle(TURN):
            if kind == "graph":
                yield next(graphs)
                continue
            spec = next(judges, None)
            if spec is not None:
                yield schedules.network_cell(spec, precision, self.runtime)

    def measure(self, cell: Cell, device: Device) -> Sampled:
        """Time a graph or network whole, called again and again; a graph also node by node, its weights cold if asked.

        What a cold graph takes as a whole is timed warm like all others: out of the cache lie also onnxruntime's code
        and the results of the nodes, which a large model finds where it left them.
        """
        if device.asynchronous:
            return super().measure(cell, device)
        if cell.kind == "kernel":
            made, (repeats, budget_s) = _generated(cell), TINY_EFFORT if cell.dims["tiny"] else GRAPH_EFFORT
        else:
            made, (repeats, budget_s) = self._exported(cell), effort(schedules.network_spec(cell))
        running = onnx_session.session(made.model, target="cpu", threads=_threads())

        def forward() -> None:
            running.run(None, made.feed)

        timing = timed_after(forward, forward, self._gauge, repeats, budget_s)
        timings = {"single": timing}
        if cell.kind != "kernel":
            return Sampled(timings)
        times = max(2, min(WATCHED, int(WATCHED_S / timing.median_s)))
        return Sampled(timings, self._watched(cell, made, times))

    def fit(self, rows: Sequence[Row], profile: DeviceProfile) -> DispatchFit:
        """Host costs by class and onnxruntime's own kernels."""
        if profile.device.asynchronous:
            return super().fit(rows, profile)
        placed = [self._placed(row, profile) for row in rows if row.calls_us]
        return onnx_fit.fit_nodes([one for one in placed if one is not None])

    def _exported(self, cell: Cell) -> Made:
        """A network by one export, which walks it too."""
        spec = schedules.network_spec(cell)
        source = runs.source_of_spec(spec, cell.precision)
        runtime: Any = get(NAME)
        model = runtime.exported(source).model
        lowering.of_source(source, self.runtime, "cpu")  # takes the same export
        names = onnx_session.input_names(model)
        return Made(model, onnx_session.feed_of(names, tensors_of(source.inputs(spec.batch))))

    def _watched(self, cell: Cell, made: Made, times: int) -> tuple[float, ...]:
        """Median microseconds of every node; what the nodes do is kept for the fit."""
        moments: list[SpeedReading] = []

        def between() -> None:
            moments.append(self._gauge.read())
            if cell.dims["cold"]:
                self._evict()

        feeds = [made.feed] * (times + 1)
        seen = onnx_session.watch(made.model, feeds, target="cpu", threads=_threads(), between=between)
        self._ops[cell.key] = _ops(seen, made)
        slow = self._gauge.between([*moments, self._gauge.read()])[1:]
        runs_us = [[[event.us for event in run]] for run in seen.runs[1:]]
        kept, _ = at_full_speed(runs_us, slow, LEAST_WATCHED)
        return tuple(np.median(kept, axis=0).tolist())

    def _placed(self, row: Row, profile: DeviceProfile) -> Placed | None:
        """A graph as the fit takes it; None when its nodes are not those that were timed."""
        cell, ops = row.cell, self._graph_ops(row.cell)
        if len(ops) != len(row.calls_us):
            return None
        tiny, cold = bool(cell.dims["tiny"]), bool(cell.dims["cold"])
        weights = sum(op.weight_bytes.at(1) for op in ops)
        touched = weights + sum(op.read_bytes.at(1) + op.write_bytes.at(1) for op in ops)
        resident = 0.0 if cold else resident_share(max(weights, 1), touched, profile.device)
        total_us = row.timings["single"].median_s * US_PER_S
        return Placed(ops, total_us, row.calls_us, cell.precision, tiny, resident, cold)

    def _graph_ops(self, cell: Cell) -> tuple[Op, ...]:
        if cell.key not in self._ops:
            made = _generated(cell)
            self._ops[cell.key] = _ops(onnx_session.watch(made.model, [made.feed], target="cpu", threads=1), made)
        return self._ops[cell.key]


def graph_cell(number: int, precision: str, *, tiny: bool = False) -> Cell:
    """The cell of a generated graph.

    >>> graph_cell(1, "fp32").key
    'kernel/onnxruntime/fp32/images/cold=0,seed=1,tiny=0'
    """
    kinds = onnx_workloads.KINDS
    cold = 0 if tiny else number // len(kinds) % COLD_EVERY
    dims = {"seed": number, "cold": cold, "tiny": int(tiny)}
    return Cell("kernel", kinds[number % len(kinds)], dims, precision, NAME)


def _generated(cell: Cell) -> Made:
    return Made(*onnx_workloads.make(cell.name, cell.dims["seed"], tiny=bool(cell.dims["tiny"])))


def _ops(seen: onnx_session.Watched, made: Made) -> tuple[Op, ...]:
    return onnx_graph.executed(seen, made.feed)


def _threads() -> int:
    import torch

    return torch.get_num_threads()
