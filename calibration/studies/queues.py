"""Generated networks timed in a runtime on an asynchronous device: waited for, issued, and one behind the other.

The latency of a forward pass, the host's time to issue it and the device's time for it tell of different things; each
is taken where it means something.
"""

from __future__ import annotations

from typing import Any

from latpred import runtimes
from latpred.calibration import timing
from latpred.calibration.cells import Cell
from latpred.calibration.device import Device
from latpred.calibration.networks import NetworkSpec
from latpred.calibration.studies import runs
from latpred.calibration.timing import Plan, Timing
from latpred.graph import ModelGraph

TURN = ("sized", "tiny", "judge")  # kinds of networks, again and again
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
        call = device.prepare_model(*_subject(device, cell, spec, graph), cell.runtime)
        for _ in range(WARM):
            call()
    timings = {"single": timing.single(device, call, SINGLE)}
    launches = graph.launches(spec.batch)
    runtime = runtimes.get(cell.runtime)
    if graph.syncs(spec.batch) or launches > MOST_LAUNCHES or getattr(runtime, "waits", False):
        return timings
    timings["issue"] = timing.issue(device, call, ISSUE)
    if getattr(runtime, "own_stream", False):
        # Nothing can be put before what it queues. Back to back its passes would tell of the device too, but of its
        # average: what is slow now and then is in every such timing, where most single passes go without it.
        return timings
    loops = min(QUEUED, MOST_LAUNCHES // max(launches, 1))
    return timings | {"queued": timing.queued(device, call, Plan(loops=loops, most=40))}


def _subject(device: Device, cell: Cell, spec: NetworkSpec, graph: ModelGraph) -> tuple[Any, Any]:
    """What the device runs: a module and its inputs, or for a simulation the graph and the batch."""
    place = getattr(device, "torch_device", None)
    if place is None:
        return graph, spec.batch
    return runs.built(spec, cell.precision, str(place)), runs.inputs_of(spec, cell.precision, str(place))
