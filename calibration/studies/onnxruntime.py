"""The study of ONNX Runtime: generated ONNX graphs watched node by node tell its kernels, exported networks its host.

On a synchronous device onnxruntime's own profiler says what every node takes, in whole microseconds. Graphs written
down in milliseconds are watched for kernels, since an export takes seconds; tiny exported networks tell what a node
costs before it does anything, and others judge. A device that runs on its own is left to `whole`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count, cycle
from typing import Any, NamedTuple

import numpy as np

from latpred.calibration import suite
from latpred.calibration.cells import Cell
from latpred.calibration.device import Device
from latpred.calibration.session import Row, Sampled
from latpred.calibration.studies import onnxfit, onnxgraphs, runs
from latpred.calibration.studies.onnxfit import Placed
from latpred.calibration.studies.whole import WholeNetworks, effort, in_turns
from latpred.calibration.tempo import TEMPO
from latpred.graph import Op
from latpred.profile import DeviceProfile, DispatchFit
from latpred.runtimes import get, onnx_session, onnx_walk, walking
from latpred.runtimes.onnx_export import tensors_of
from latpred.units import US_PER_S

NAME = "onnxruntime"
SECONDS = 90.0
FIRST_TINY, TINY_GRAPHS, MOST_TINY = 2, 20, 8
TURN = ("graph",) * 14 + ("judge",) + ("graph",) * 14 + ("judge", "tiny")  # after the first tiny ones, again and again
GRAPH_EFFORT = (12, 0.1)  # forward passes, and seconds after which there are no more
TINY_EFFORT = (60, 0.1)
WATCHED = 5  # forward passes with the profiler on, after one that is not counted
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
        """A few tiny networks; then generated graphs, networks that judge, and more tiny ones."""
        if device.asynchronous:
            yield from super().cells(device, precision)
            return
        tiny, judges = iter(suite.tiny_networks(MOST_TINY)), suite.judging_networks()
        graphs = (graph_cell(number, precision) for number in count())
        for _ in range(FIRST_TINY):
            yield suite.network_cell(next(tiny), precision, self.runtime)
        for number in range(TINY_GRAPHS):
            yield graph_cell(number, precision, tiny=True)
        for kind in cycle(TURN):
            if kind == "graph":
                yield next(graphs)
                continue
            spec = next(judges if kind == "judge" else tiny, None)
            if spec is not None:
                yield suite.network_cell(spec, precision, self.runtime)

    def measure(self, cell: Cell, device: Device) -> Sampled:
        """Time a graph or network whole; unless it only judges, also node by node."""
        if device.asynchronous:
            return super().measure(cell, device)
        threads = _threads()
        if cell.kind == "kernel":
            tiny = bool(cell.dims["tiny"])
            made, (repeats, budget_s), watched = _generated(cell), TINY_EFFORT if tiny else GRAPH_EFFORT, True
        else:
            spec = suite.network_spec(cell)
            made, (repeats, budget_s), watched = self._exported(cell), effort(spec), spec.tiny
        between = self._evict if cell.dims.get("cold") else self._metronome.beat
        running = onnx_session.session(made.model, target="cpu", threads=threads)
        forward, tempo = in_turns(lambda: running.run(None, made.feed), between, repeats, budget_s)
        timings = {"single": forward, TEMPO: tempo}
        if not watched:
            return Sampled(timings)
        times = max(2, min(WATCHED, int(WATCHED_S / forward.median_s)))
        return Sampled(timings, self._watched(cell, made, times, between))

    def fit(self, rows: Sequence[Row], profile: DeviceProfile) -> DispatchFit:
        """Host costs by class and onnxruntime's own kernels."""
        if profile.device.asynchronous:
            return super().fit(rows, profile)
        placed = [self._placed(row, profile) for row in rows if row.calls_us]
        return onnxfit.fit_nodes([one for one in placed if one is not None])

    def _exported(self, cell: Cell) -> Made:
        """A network by one export, which walks it too."""
        spec = suite.network_spec(cell)
        source = runs.source_of_spec(spec, cell.precision)
        runtime: Any = get(NAME)
        model = runtime.exported(source).model
        walking.of_source(source, self.runtime, "cpu")  # takes the same export
        tensors = tensors_of(source.inputs(spec.batch))
        names = onnx_session.input_names(model)
        return Made(model, {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)})

    def _watched(self, cell: Cell, made: Made, times: int, between: Callable[[], object]) -> tuple[float, ...]:
        """Median microseconds of every node; what the nodes do is kept for the fit."""
        feeds = [made.feed] * (times + 1)
        seen = onnx_session.watch(made.model, feeds, target="cpu", threads=_threads(), between=between)
        if cell.kind == "kernel":
            self._ops[cell.key] = _ops(seen, made)
        return tuple(np.median([[event.us for event in run] for run in seen.runs[1:]], axis=0).tolist())

    def _placed(self, row: Row, profile: DeviceProfile) -> Placed | None:
        """A row as the fit takes it; None when its nodes are not those that were timed."""
        cell, total_us = row.cell, row.timings["single"].median_s * US_PER_S
        cached = profile.device.cache_bytes
        if cell.kind == "kernel":
            ops, batch, tiny = self._graph_ops(cell), 1, bool(cell.dims["tiny"])
            held = sum(op.weight_bytes.at(1) for op in ops)
            resident = not cell.dims.get("cold") and held <= cached
        else:
            spec = suite.network_spec(cell)
            graph = runs.graph_of(spec, cell.precision, self.runtime, "cpu")
            ops, batch, tiny = graph.at(spec.batch), spec.batch, spec.tiny
            resident = 0 < graph.parameter_bytes <= cached
        if len(ops) != len(row.calls_us):
            return None
        return Placed(ops, batch, total_us, row.calls_us, cell.precision, tiny, resident)

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
    kinds = onnxgraphs.KINDS
    cold = 0 if tiny else number // len(kinds) % COLD_EVERY
    dims = {"seed": number, "cold": cold, "tiny": int(tiny)}
    return Cell("kernel", kinds[number % len(kinds)], dims, precision, NAME)


def _generated(cell: Cell) -> Made:
    return Made(*onnxgraphs.make(cell.name, cell.dims["seed"], tiny=bool(cell.dims["tiny"])))


def _ops(seen: onnx_session.Watched, made: Made) -> tuple[Op, ...]:
    last = seen._replace(runs=seen.runs[-1:])
    return onnx_walk.walked(last, [made.feed], "cpu").ops


def _threads() -> int:
    import torch

    return torch.get_num_threads()
