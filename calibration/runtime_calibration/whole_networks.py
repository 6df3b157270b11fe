"""WholeNetworks: the study that serves any runtime, by timing generated networks whole.

A runtime that compiles or exports what it runs cannot be watched op by op, but what its steps cost can be told from
networks that take different numbers of them. How the costs are found is `wholefit`'s business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, cycle
from typing import Any

import torch

from latpred import runtimes
from latpred.calibration import schedules
from latpred.calibration.cells import Cell
from latpred.calibration.devices import Device
from latpred.calibration.runtime_calibration import runs, whole_fit
from latpred.calibration.session import Row, Sampled
from latpred.calibration.timing import timer
from latpred.calibration.timing.reference_speed import SpeedGauge, gauge_of
from latpred.calibration.timing.timer import Plan, Timing
from latpred.calibration.workloads import networks
from latpred.calibration.workloads.networks import NetworkSpec
from latpred.graph.graph import ModelGraph
from latpred.profile.document import DeviceProfile, DispatchFit

QUEUE_TURN = ("sized", "tiny", "judge")  # kinds of networks, again and again
WARM = 3  # forward passes before the first that counts: some runtimes settle on their code only then
SINGLE, ISSUE = Plan(most=80), Plan(loops=1, most=80)
MOST_LAUNCHES = 480  # under way at once: half of what the queue of a GPU holds, as libraries launch more than is walked
QUEUED = 12  # forward passes in a queue, where they are that short


def timed(device: Device, cell: Cell, spec: NetworkSpec, graph: ModelGraph) -> dict[str, Timing]:
    """Timings of a network.

    Parameters
    ----------
    device : Device
        An asynchronous one.
    cell : Cell
        Its precision and runtime.
    spec : NetworkSpec
        The network.
    graph : ModelGraph
        What the runtime runs for it.

    Returns
    -------
    dict of Timing
        "single"; where the host is never made to wait also "issue" and, where the stream is PyTorch's own, "queued".
    """
    with device.errors():
        call = device.prepare_model(*_workload(device, cell, spec, graph), cell.runtime)
        for _ in range(WARM):
            call()
    timings = {"single": timer.single(device, call, SINGLE)}
    launches = graph.launches(spec.batch)
    runtime = runtimes.get(cell.runtime)
    if graph.syncs(spec.batch) or launches > MOST_LAUNCHES or getattr(runtime, "waits", False):
        return timings
    timings["issue"] = timer.issue(device, call, ISSUE)
    if getattr(runtime, "own_stream", False):
        # Nothing can be put before what it queues. Back to back its passes would tell of the device too, but of its
        # average: what is slow now and then is in every such timing, where most single passes go without it.
        return timings
    loops = min(QUEUED, MOST_LAUNCHES // max(launches, 1))
    return timings | {"queued": timer.queued(device, call, Plan(loops=loops, most=40))}


def _workload(device: Device, cell: Cell, spec: NetworkSpec, graph: ModelGraph) -> tuple[Any, Any]:
    """What the device runs: a module and its inputs, or for a simulation the graph and the batch."""
    place = getattr(device, "torch_device", None)
    if place is None:
        return graph, spec.batch
    return runs.built(spec, cell.precision, str(place)), runs.inputs_of(spec, cell.precision, str(place))


SECONDS = 90.0
FIRST_TINY = len(networks.KINDS)  # one of each kind, before anything else
TURN = ("sized", "judge", "tiny", "sized")  # what comes after them, again and again
TINY_REPEATS, TINY_S = 40, 0.15
SIZED_REPEATS, SIZED_S = 12, 0.15
JUDGE_REPEATS, JUDGE_S = 15, 0.5


class WholeNetworks:
    """The study of a runtime that nothing special is known of.

    Parameters
    ----------
    runtime : str
        Its name.
    seconds : float
        What a full calibration spends on it.

    Examples
    --------
    >>> from latpred.calibration.devices import open_device
    >>> next(WholeNetworks("torchscript").cells(open_device("cpu"), "fp32")).runtime
    'torchscript'
    """

    def __init__(self, runtime: str, seconds: float = SECONDS) -> None:
        self.runtime = runtime
        self.seconds = seconds
        self.folds = 0
        self._filler: torch.Tensor | None = None

    def cells(self, device: Device, precision: str) -> Iterator[Cell]:
        """A tiny network of each kind; then sized ones to learn and to judge from, and more tiny ones.

        Where a network's host time can be taken by itself, sized ones tell of it too: tiny ones need not come first.
        """
        drawn = {
            "tiny": iter(schedules.tiny_networks(10 * FIRST_TINY)),
            "judge": schedules.holdout_networks(),
            "sized": (spec for spec in schedules.sized_networks() if not spec.holdout),
        }
        first = () if device.asynchronous else ("tiny",) * FIRST_TINY
        for kind in chain(first, cycle(QUEUE_TURN if device.asynchronous else TURN)):
            spec = next(drawn[kind], None)  # the tiny ones come to an end
            if spec is not None:
                yield schedules.network_cell(spec, precision, self.runtime)

    def measure(self, cell: Cell, device: Device) -> Sampled:
        """Time a network whole, once the runtime has taken it apart for the fit."""
        spec = schedules.network_spec(cell)
        graph = runs.graph_on(spec, cell.precision, self.runtime, device.info().kind)
        device.use_precision(cell.precision)
        if device.asynchronous:
            return Sampled(timed(device, cell, spec, graph))
        model, inputs = runs.built(spec, cell.precision), runs.inputs_of(spec, cell.precision)
        call = device.prepare_model(model, inputs, self.runtime)
        before = self._evict if spec.cold else call
        return Sampled({"single": timed_after(call, before, self._gauge, *effort(spec))})

    def fit(self, rows: Sequence[Row], profile: DeviceProfile) -> DispatchFit:
        """Host costs by class and factors on kernel times, from the networks that do not judge."""
        return whole_fit.fit_runs(runs.runs_of(rows, profile.device), profile, self.runtime)

    @property
    def _gauge(self) -> SpeedGauge:
        return gauge_of(torch.get_num_threads())

    def _evict(self) -> None:
        """Fill the last-level cache, as the layers of a larger model would."""
        if self._filler is None:
            self._filler = torch.zeros(networks.EVICTING_BYTES // 4)
        self._filler.sum()


def effort(spec: NetworkSpec) -> tuple[int, float]:
    """Forward passes and seconds to spend on a network."""
    if spec.tiny:
        return TINY_REPEATS, TINY_S
    return (JUDGE_REPEATS, JUDGE_S) if spec.holdout else (SIZED_REPEATS, SIZED_S)


def timed_after(
    call: Callable[[], object],
    before: Callable[[], object],
    gauge: SpeedGauge,
    repeats: int,
    budget_s: float,
) -> Timing:
    """Time a call on a synchronous device, in turns with what leaves the caches as the call shall find them.

    Parameters
    ----------
    call, before : callable
        What is timed, and what comes ahead of it: a call of itself, as where a model is called again and again, or what
        evicts its weights.
    gauge : SpeedGauge
        Tells slow moments, which do not count.
    repeats, budget_s : int, float
        Turns, and seconds after which there is no other once there were a few.
    """

    def turn() -> float:
        before()
        begun = time.perf_counter()
        call()
        return time.perf_counter() - begun

    for _ in range(WARM):
        call()
    return timer.summary(*timer.turns(turn, gauge, repeats=repeats, budget_s=budget_s))
