"""What a calibration times in eager PyTorch, in which order and how, and where the fit is unsure enough to time more.

Networks tell of dispatch where they are tiny, of kernels where they are sized, and some are held out of every fit to
test it. What is not known well is drawn first once a profile says what that is.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import count, cycle, islice
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch

from latpred import host
from latpred.calibration.cells import (
    CLOCK,
    COPY,
    KERNELS,
    PRODUCTS,
    UPLOAD,
    Cell,
    dispatch_cells,
    kernel_cells,
    log_uniform,
    memory_cells,
)
from latpred.calibration.devices import Device, constants
from latpred.calibration.fitting.kernel_fit import nearest_fit, row_of
from latpred.calibration.session import Row
from latpred.calibration.timing import in_network, timer
from latpred.calibration.timing.reference_speed import SpeedGauge, gauge_for, gauge_on
from latpred.calibration.workloads import networks, single_ops, suites
from latpred.calibration.workloads.networks import NetworkSpec
from latpred.errors import CalibrationError
from latpred.graph.graph import ModelGraph
from latpred.prediction.kernel_times import KernelModel
from latpred.prediction.predictor import Predictor
from latpred.profile.document import DeviceProfile
from latpred.tracing.inputs import cast, dtype_of

T = TypeVar("T")

CANDIDATES = 2  # drawn for each network or kernel that is taken: each costs a trace


def _network_sigma(predictor: Predictor, spec: NetworkSpec) -> float:
    """Width of the 90 % interval, on a log scale; the least where a network cannot be traced or predicted."""
    try:
        low, high = predictor.predict(networks.graph(spec, kind=predictor.profile.device.kind), spec.batch).interval_ms
    except Exception:
        # Choosing must not end a calibration over one network, and nothing says that this one is worth measuring.
        return -math.inf
    return math.log(high / low)


def _kernel_sigma(models: dict[str, KernelModel], cell: Cell) -> float:
    """Log standard deviation of the kernel's predicted time; infinite for a family without a fit."""
    try:
        graph, batch = single_ops.graph(cell)
        op = next(op for op in graph.at(batch) if op.launches)
    except Exception:
        return -math.inf  # it cannot be traced, or launches nothing
    name = nearest_fit(models, op.family)
    if name is None:
        return math.inf
    row = np.array([row_of(op, batch)])
    return float(models[name].times(row).log_std[0])


# Most work of a network, drawn for each: many small cells teach more than few large ones, but large ones must be seen.
LARGEST_MACS = (50_000_000, 4_000_000_000)
CHAIN_CALLS = (8, 512)
TINY, SMALL = 3 * len(networks.KINDS), 8 * len(networks.SMALL_KINDS)
SMALL_EVERY = 4  # sized networks between two small ones, after the first `SMALL`
# Forward passes and seconds to spend on a network where its ops are timed one by one.
TINY_EFFORT, SIZED_EFFORT, HOLDOUT_EFFORT = (15, 0.15), (5, 0.06), (7, 0.5)
# Of the cells that come after the first ones, how many are of the first precision for each one of another.
PREFERENCE = 3
ROUND = 24  # kernel cells between two holdout networks
# Short samples: one slow call in a hundred then leaves most of them, and so their median, untouched.
DISPATCH = timer.Plan(sample_s=5e-5, most=400, precision=0.002, budget_s=0.2)
FINE = timer.Plan(loops=16, most=2000, precision=0.001)
WHOLE = timer.Plan(loops=1, budget_s=0.3)  # of a network on a GPU, whose launches must fit its queue


def network_cell(spec: NetworkSpec, precision: str = "fp32", runtime: str = "eager") -> Cell:
    """The cell that times a generated network."""
    dims = {"seed": spec.seed, "width": spec.width, "size": spec.size, "batch": spec.batch, "cold": int(spec.cold)}
    return Cell("network", spec.kind, dims, precision, runtime)


def network_spec(cell: Cell) -> NetworkSpec:
    """The generated network that a cell times."""
    dims = cell.dims
    return NetworkSpec(cell.name, dims["seed"], dims["width"], dims["size"], dims["batch"], bool(dims["cold"]))


def cell_graph(cell: Cell, kind: str) -> tuple[ModelGraph, int]:
    """What the runtime of a cell runs for its op, network or model on a kind of device, and the batch size."""
    if cell.kind == "model":
        return suites.gate_graph(cell.name, cell.precision, cell.runtime, kind), cell.dims["batch"]
    if cell.kind != "network":
        return single_ops.graph(cell)
    spec = network_spec(cell)
    return networks.graph_in(spec, cell.precision, cell.runtime, kind), spec.batch


def chain_networks() -> list[NetworkSpec]:
    """Networks that do nothing but call modules or functions, few times and often."""
    return [NetworkSpec(kind, 0, networks.TINY_WIDTH, size, 1) for kind in networks.CHAINS for size in CHAIN_CALLS]


def tiny_networks(number: int) -> list[NetworkSpec]:
    """Networks that only dispatch."""
    return [networks.draw(seed, tiny=True) for seed in range(number)]


def small_networks() -> Iterator[NetworkSpec]:
    """Networks without end whose weights stay in the cache: hardly any of every size have those, and many models do."""
    drawn = {kind: _small(kind) for kind in networks.SMALL_KINDS}
    for kind in cycle(networks.SMALL_KINDS):
        yield next(drawn[kind])


def _small(kind: str) -> Iterator[NetworkSpec]:
    for seed in count():
        spec = networks.draw_small(kind, seed)
        if not spec.holdout and networks.parameter_bytes(spec) <= networks.SMALL_BYTES:
            yield spec


def sized_networks() -> Iterator[NetworkSpec]:
    """Endless networks of every size that a calibration can afford, one kind after the other."""
    yield from _affordable(map(networks.draw, count()))


def holdout_networks() -> Iterator[NetworkSpec]:
    """Those of the sized networks that no fit sees."""
    yield from _affordable(spec for spec in map(networks.draw, count()) if spec.holdout)


def traced(spec: NetworkSpec) -> ModelGraph | None:
    """What a drawn network does; None where it cannot be traced.

    Choosing what to measure must not end a calibration over one network. Who measures it says in its row what is wrong.
    """
    try:
        return networks.graph(spec)
    except Exception:
        return None


def _affordable(drawn: Iterator[NetworkSpec]) -> Iterator[NetworkSpec]:
    """Networks at a batch that is little enough work, without those that never are; as drawn what cannot be traced."""
    for spec in drawn:
        graph = traced(spec)
        if graph is None:
            yield spec
            continue
        most = log_uniform(random.Random(f"most/{spec.seed}"), *LARGEST_MACS)
        while spec.batch > 1 and _work(graph, spec.batch) > most:
            spec = msgspec.structs.replace(spec, batch=spec.batch // 2)
        if _work(graph, spec.batch) <= LARGEST_MACS[1]:
            yield spec


def _work(graph: ModelGraph, batch: int) -> float:
    """Multiply-adds, or bytes moved, which are worth as much."""
    return max(graph.macs(batch), graph.bytes(batch))


class Schedule:
    """What there is to time on a kind of device in some precisions, the first the most important, and how."""

    def __init__(self, device: Device, precisions: Sequence[str]) -> None:
        self._device, self._precisions = device, tuple(precisions)
        self._predictor: Predictor | None = None
        self._models: dict[str, dict[str, KernelModel]] = {}

    def learn(self, profile: DeviceProfile) -> None:
        """From now on prefer what this profile is less certain of."""
        self._predictor = Predictor(profile)
        self._models = {
            precision: {family: KernelModel(fit) for family, fit in fits.items()}
            for precision, fits in profile.kernels.items()
        }

    def uncertain_networks(self, drawn: Iterator[NetworkSpec]) -> Iterator[NetworkSpec]:
        """Networks worth measuring; holdout networks are never passed over, or the test would be biased."""
        while True:
            predictor = self._predictor
            if predictor is None:
                yield next(drawn)
                continue
            group = list(islice(drawn, CANDIDATES * len(networks.KINDS)))
            yield from (spec for spec in group if spec.holdout)
            others = (spec for spec in group if not spec.holdout)
            uncertain = sorted(others, key=lambda spec: _network_sigma(predictor, spec), reverse=True)
            yield from uncertain[: len(group) // CANDIDATES]

    def uncertain_kernels(self, drawn: Iterator[Cell], number: int) -> list[Cell]:
        """So many kernel cells worth measuring."""
        if self._predictor is None:
            return list(islice(drawn, number))
        group = list(islice(drawn, CANDIDATES * number))
        group.sort(key=lambda cell: _kernel_sigma(self._models.get(cell.precision, {}), cell), reverse=True)
        return group[:number]

    def _workload(self, cell: Cell) -> tuple[Any, Any]:
        """What the device runs: a module and its inputs, or for a simulation the graph and the batch."""
        place = getattr(self._device, "torch_device", None)
        if place is None:
            return cell_graph(cell, self._device.info().kind)
        spec = network_spec(cell)
        with torch.device(place):
            model = networks.build(spec).to(dtype_of(cell.precision))
        return model, cast(networks.inputs(spec, device=str(place)), dtype_of(cell.precision))


def in_turn(precisions: Sequence[T], number: int) -> T:
    """Which of several precisions, or of what belongs to each, a cell of this number is of.

    >>> [in_turn(("fp32", "bf16"), number) for number in range(5)]
    ['fp32', 'fp32', 'fp32', 'bf16', 'fp32']
    """
    main, *others = precisions
    if not others or number % (PREFERENCE + 1) < PREFERENCE:
        return main
    return others[number // (PREFERENCE + 1) % len(others)]


def schedule_of(device: Device, precisions: Sequence[str]) -> Synchronous | Asynchronous:
    """The schedule of a device."""
    return (Asynchronous if device.asynchronous else Synchronous)(device, precisions)


class Synchronous(Schedule):
    """The schedule of a CPU: kernels are timed within sized networks, for alone they find everything in the cache."""

    def __init__(self, device: Device, precisions: Sequence[str]) -> None:
        super().__init__(device, precisions)
        self._filler = torch.zeros(networks.EVICTING_BYTES // 4, dtype=torch.float32)

    def cells(self) -> Iterator[Cell]:
        """Tiny networks and memory, then sized networks without end, at first a small one after each, later fewer.

        Without some tiny networks there is no profile, so one of each kind comes first: a busy machine takes long.
        """
        tiny = list(map(network_cell, tiny_networks(TINY)))
        first = len(networks.KINDS)
        yield from map(network_cell, chain_networks())
        yield from (*tiny[:first], *memory_cells(), *tiny[first:])
        small = (network_cell(spec, self._precisions[0]) for spec in small_networks())
        for number, spec in enumerate(self.uncertain_networks(sized_networks())):
            yield network_cell(spec, in_turn(self._precisions, number))
            if number < SMALL or number % SMALL_EVERY == SMALL_EVERY - 1:
                yield next(small)

    def measure(self, cell: Cell) -> Row:
        """Time a network whole and call by call, or bytes being moved."""
        gauge = gauge_for(cell.runtime)
        if cell.kind == "memory":
            host.demand_room(cell.dims["bytes"] * (1 if cell.name in ("read", "weights") else 2))
            call = self._device.prepare(cell)
            return Row(cell, {"single": timer.single(self._device, call, timer.QUICK, gauge)})
        spec = network_spec(cell)
        graph, batch = cell_graph(cell, self._device.info().kind)  # one that cannot be traced is no use to any fit
        # The filler is there already, the weights that run after it are not.
        host.demand_room(graph.peak_bytes(batch) + spec.cold * (graph.parameter_bytes - 2 * networks.EVICTING_BYTES))
        repeats, budget_s = TINY_EFFORT if spec.tiny else HOLDOUT_EFFORT if spec.holdout else SIZED_EFFORT
        with self._device.errors():
            model, inputs = self._workload(cell)
            between = self._evicting(spec, inputs, cell.precision) if spec.cold else None
            timing, calls_us = in_network.time_ops(
                model, inputs, repeats=repeats, budget_s=budget_s, gauge=gauge, between=between
            )
        known = len(in_network.calls(graph.at(batch)))
        if len(calls_us) != known:
            raise CalibrationError(f"{len(calls_us)} calls were timed, but its trace has {known}")
        return Row(cell, {"single": timing}, calls_us=calls_us)

    def _evicting(self, spec: NetworkSpec, inputs: tuple[torch.Tensor, ...], precision: str) -> Callable[[], None]:
        """What takes a network's weights out of the cache, and nothing else.

        A second network with weights of its own runs after the cache was filled: it brings back what the layers of a
        large model find in the cache, which are code and the memory of results.
        """
        other_model = networks.build(spec).to(dtype_of(precision))

        def evict() -> None:
            self._filler.sum()
            other_model(*inputs)

        return evict


class Asynchronous(Schedule):
    """The schedule of a GPU, or of the simulated device: ops are issued and kernels timed one by one."""

    def cells(self) -> Iterator[Cell]:
        """Clocks, dispatch, tiny networks; then kernels of every precision in turns, with a holdout now and then."""
        yield from (CLOCK, COPY, UPLOAD, *dispatch_cells())
        for spec in (*chain_networks(), *tiny_networks(TINY)):
            yield network_cell(spec)
        # What multiplies nothing runs in TF32 as it does in fp32: `fitting` takes it from there. So do convolutions and
        # RNNs, but these are timed in both: fp32 did not use TF32 for them in journals of earlier versions.
        shared = {"tf32"} if "fp32" in self._precisions else set()
        kernels = {one: kernel_cells(one, PRODUCTS if one in shared else KERNELS) for one in self._precisions}
        holdouts = holdout_networks()
        while True:
            for precision in self._precisions:
                yield from self.uncertain_kernels(kernels[precision], ROUND)
                yield network_cell(next(holdouts), precision)

    def measure(self, cell: Cell) -> Row:
        """Time one cell."""
        if cell == CLOCK:
            return Row(cell, constants.measure(self._device))
        gauge = gauge_on(self._device.info().kind, cell.runtime)
        if cell.kind == "network":
            return self._network(cell, gauge)
        call = self._device.prepare(cell)
        if cell.name == UPLOAD.name:
            return Row(cell, {"single": timer.single(self._device, call)})
        if cell.kind == "dispatch":
            return Row(cell, {"issue": timer.issue(self._device, call, DISPATCH, gauge)})
        return Row(cell, {"queued": timer.queued(self._device, call, FINE if cell.kind == "memory" else None)})

    def _network(self, cell: Cell, gauge: SpeedGauge | None) -> Row:
        self._device.use_precision(cell.precision)
        with self._device.errors():
            model, inputs = self._workload(cell)
        call = self._device.prepare_model(model, inputs, cell.runtime)
        timings = {"single": timer.single(self._device, call, WHOLE, gauge)}
        graph, batch = cell_graph(cell, self._device.info().kind)
        if network_spec(cell).tiny and not graph.syncs(batch):
            timings["issue"] = timer.issue(self._device, call, WHOLE, gauge)
        return Row(cell, timings)
