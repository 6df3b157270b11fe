"""RuntimeCalibrator: what is measured of a runtime beside eager, and what the measurements amount to.

Eager is measured first and in full; a calibrator stands on the profile that comes of it. A runtime that compiles or
exports what it runs cannot be watched op by op, but what its steps cost can be told from whole networks that take
different numbers of them: `RuntimeCalibrator` itself does that, and serves any runtime.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, count, cycle, islice
from typing import TypeVar

import msgspec
import numpy as np

from latpred import runtimes
from latpred.calibration import schedules
from latpred.calibration.cells import Cell
from latpred.calibration.devices import Call, Device, constants
from latpred.calibration.fitting.acceptance import HoldoutError
from latpred.calibration.runtime_calibration import network_fit
from latpred.calibration.runtime_calibration.network_fit import fit_networks, too_few
from latpred.calibration.session import Row
from latpred.calibration.timing import timer
from latpred.calibration.timing.reference_speed import SpeedGauge, gauge_for, gauge_on
from latpred.calibration.timing.timer import Plan, Timing
from latpred.calibration.workloads import networks
from latpred.calibration.workloads.networks import NetworkSpec
from latpred.errors import CalibrationError
from latpred.graph.graph import ModelGraph
from latpred.profile.document import DeviceProfile, DispatchFit
from latpred.units import US_PER_S

T = TypeVar("T")

FIRST_TINY = len(networks.KINDS)  # one of each kind, before anything else
TURN = ("sized", "holdout", "tiny", "sized")  # what comes after them, again and again
ASYNCHRONOUS_TURN = ("sized", "tiny", "holdout")
WARM = 3  # forward passes before the first that counts: some runtimes settle on their code only then
# Forward passes, and seconds after which there are no more.
TINY_EFFORT, SIZED_EFFORT, HOLDOUT_EFFORT = (40, 0.15), (12, 0.15), (15, 0.5)
SINGLE, ISSUE = Plan(most=80), Plan(loops=1, most=80)
MOST_LAUNCHES = 480  # under way at once: half of what the queue of a GPU holds, as libraries launch more than is traced
QUEUED = 12  # forward passes in a queue, where they are that short


class RuntimeCalibrator:
    """Calibrates a runtime on whole networks."""

    def __init__(self, runtime: str, device: Device) -> None:
        self.runtime, self.device = runtime, device

    def cells_in(self, precisions: Sequence[str]) -> Iterator[Cell]:
        """Cells without end in several precisions, most of them in the first."""
        drawn = [self.cells(precision) for precision in precisions]
        for number in count():
            yield next(schedules.in_turn(drawn, number))

    def cells(self, precision: str) -> Iterator[Cell]:
        """Cells without end, the most valuable first: a tiny network of each kind, sized ones and holdouts.

        Holdouts are among them early: the gate and the intervals rest on those. Where a network's host time can be
        taken by itself, sized ones tell of it too: tiny ones need not come first.
        """
        drawn = candidates(10 * FIRST_TINY)
        if self.device.asynchronous:
            specs = rotating(drawn, cycle(ASYNCHRONOUS_TURN))
        else:
            specs = map(called_again, rotating(drawn, chain(("tiny",) * FIRST_TINY, cycle(TURN))))
        for spec in specs:
            yield schedules.network_cell(spec, precision, self.runtime)

    def measure(self, cell: Cell) -> Row:
        """Time a network whole, once it is known what the runtime runs for it."""
        spec = schedules.network_spec(cell)
        graph, call = self.prepared(spec, cell.precision)
        if self.device.asynchronous:
            return Row(cell, self._timings(call, graph, spec.batch))
        return Row(cell, {"single": self.timed(call, *effort(spec))})

    def prepared(self, spec: NetworkSpec, precision: str) -> tuple[ModelGraph, Call]:
        """What the runtime runs for a network, and a call of that; a simulation runs the very graph."""
        device = self.device
        device.use_precision(precision)  # a compiler looks at it
        graph = networks.graph_in(spec, precision, self.runtime, device.info().kind)
        place = getattr(device, "torch_device", None)
        with device.errors():
            if place is None:
                return graph, device.prepare_model(graph, spec.batch, self.runtime)
            model = networks.real_model(spec, precision, str(place))
            return graph, device.prepare_model(model, networks.real_inputs(spec, precision, str(place)), self.runtime)

    def fit(self, rows: Sequence[Row], profile: DeviceProfile) -> DispatchFit:
        """The runtime's costs, from rows at the usual speed of the machine; holdouts among them are left out.

        `profile` is the same device's, with eager and the kernels fitted. `spread` may be left at zero: it is set
        afterwards, from the holdouts. Too few rows are a CalibrationError that says how to get more.
        """
        return fit_networks(network_fit.networks_of(rows, profile.device), profile, self.runtime)

    def errors_by_folds(self, rows: Sequence[Row], profile: DeviceProfile) -> list[HoldoutError]:
        """Errors on networks of the fit, of fits without them; none where there are holdouts enough to tell."""
        return []

    def timed(self, call: Callable[[], object], repeats: int, budget_s: float) -> Timing:
        """Time a call on a synchronous device, each time after another of itself."""

        def turn() -> float:
            call()
            begun = time.perf_counter()
            call()
            return time.perf_counter() - begun

        begun, done = time.perf_counter(), 0
        while done < WARM or time.perf_counter() - begun < timer.SETTLE_S:
            call()
            done += 1
        return timer.summary(*timer.turns(turn, self._gauge, repeats=repeats, budget_s=budget_s))

    def _timings(self, call: Call, graph: ModelGraph, batch: int) -> dict[str, Timing]:
        """Timings of a network on an asynchronous device.

        "single"; where the host is never made to wait also "issue" and, where the stream is PyTorch's own, "queued".
        """
        device, runtime = self.device, runtimes.get(self.runtime)
        with device.errors():
            for _ in range(WARM):
                call()
        gauge = gauge_on(device.info().kind, self.runtime)
        timings = {"single": timer.single(device, call, SINGLE, gauge)}
        launches = graph.launches(batch)
        if graph.syncs(batch) or launches > MOST_LAUNCHES or getattr(runtime, "waits", False):
            return timings
        timings["issue"] = timer.issue(device, call, ISSUE, gauge)
        if getattr(runtime, "own_stream", False):
            # Nothing can be put before what it queues. Back to back its passes would tell of the device too, but of its
            # average: what is slow now and then is in every such timing, where most single passes go without it.
            return timings
        loops = min(QUEUED, MOST_LAUNCHES // max(launches, 1))
        return timings | {"queued": timer.queued(device, call, Plan(loops=loops, most=40))}

    @property
    def _gauge(self) -> SpeedGauge:
        return gauge_for(self.runtime)


def candidates(tiny: int) -> dict[str, Iterator[NetworkSpec]]:
    """Networks to choose from: so many tiny ones, and endless sized ones and holdouts."""
    return {
        "tiny": iter(schedules.tiny_networks(tiny)),
        "sized": (spec for spec in schedules.sized_networks() if not spec.holdout),
        "holdout": schedules.holdout_networks(),
    }


def rotating(drawn: Mapping[str, Iterator[T]], kinds: Iterable[str]) -> Iterator[T]:
    """The next one of each kind in turn; a kind that has come to an end is passed over."""
    for kind in kinds:
        yield from islice(drawn[kind], 1)


def called_again(spec: NetworkSpec) -> NetworkSpec:
    """The network with nothing evicted between passes.

    What evicts its weights would also evict the runtime's code and what its guards read, which stay in the caches while
    a model is called again and again.
    """
    return msgspec.structs.replace(spec, cold=False)


def effort(spec: NetworkSpec) -> tuple[int, float]:
    """Forward passes and seconds to spend on a network."""
    return TINY_EFFORT if spec.tiny else HOLDOUT_EFFORT if spec.holdout else SIZED_EFFORT


LIKE = {"onnxruntime-cuda-graphs": "onnxruntime", "compile-reduce-overhead": "compile"}  # whose kernels are replayed
REPLAYED = ("cuda-graphs", *LIKE)
LENGTHS = (1, 4, 16, 64, 256)  # kernels of a chain
CHAIN_REPLAYS = 60  # of each chain


class ReplayCalibrator(RuntimeCalibrator):
    """Calibrates a runtime that launches a captured graph for each forward pass.

    Chains of the smallest kernel, captured at several lengths, tell the gap between kernels of a graph. What a replay
    takes the host, and how the kernels compare to eager's, are told by networks, as for any other runtime.
    """

    def cells_in(self, precisions: Sequence[str]) -> Iterator[Cell]:
        for length in LENGTHS:  # of a kernel that is the same in every precision
            yield Cell("clock", "chain", {"kernels": length}, runtime=self.runtime)
        yield from super().cells_in(precisions)

    def measure(self, cell: Cell) -> Row:
        if cell.kind != "clock":
            return super().measure(cell)
        device = self.device
        tiny = device.prepare(constants.TINY)
        replays = [device.time_replayed(tiny, cell.dims["kernels"]) for _ in range(CHAIN_REPLAYS)]
        seconds = [one for one in replays if one is not None]
        if len(seconds) < CHAIN_REPLAYS:
            raise CalibrationError(f"{device.name} captures no graphs, so none can be replayed.")
        queued = timer.queued(device, tiny, constants.QUEUED)
        return Row(cell, {"replayed": timer.summary(seconds), "queued": queued})

    def fit(self, rows: Sequence[Row], profile: DeviceProfile) -> DispatchFit:
        """The gap between kernels, what a replay takes the host, and factors on kernel times."""
        gap_us = node_gap_us([row for row in rows if row.cell.kind == "clock"], profile.device.gap_us)
        like = profile.runtimes.get(LIKE.get(self.runtime, "eager"))
        timed = network_fit.networks_of(rows, profile.device)
        return fit_networks(timed, profile, self.runtime, gap_us=gap_us, like=like)


def node_gap_us(rows: Sequence[Row], stream_gap_us: float) -> float:
    """The gap between two kernels of a graph, from chains of several lengths.

    A longer chain takes a kernel and a gap more for each step; the kernel alone is what one takes in a queue, less the
    gap of the stream.
    """
    lengths = np.array([row.cell.dims["kernels"] for row in rows], dtype=float)
    if len(set(lengths.tolist())) < 2:
        raise too_few(f"{len(rows)} chains were replayed", "the gap between kernels of a graph")
    replayed_us = np.array([row.timings["replayed"].median_s for row in rows]) * US_PER_S
    floor_us = float(np.median([row.timings["queued"].median_s for row in rows])) * US_PER_S - stream_gap_us
    # A timing is off by a share of itself, so the longest chains must not outweigh the others.
    step_us, _ = np.polyfit(lengths, replayed_us, 1, w=1.0 / replayed_us)
    return round(max(float(step_us) - floor_us, 0.0), 4)
