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
DEVICE_BOUND = 1.2  # period over issue time from which the host is surely the faster
PERIOD = Plan(most=40)
LONG_S = 3e-4  # latency whose first and last microseconds do not matter: it tells of the device by itself


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
        "single"; where the host is never made to wait also "issue" and, where the device's time can be told, "queued".
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
    if not getattr(runtime, "own_stream", False):
        loops = min(QUEUED, MOST_LAUNCHES // max(launches, 1))
        return timings | {"queued": timing.queued(device, call, Plan(loops=loops, most=40))}
    if timings["single"].median_s > LONG_S:
        return timings
    period = timing.pipelined(device, call, PERIOD)
    if period.median_s > DEVICE_BOUND * timings["issue"].median_s:
        timings["queued"] = period  # the host keeps ahead, so the device alone sets the period
    return timings


def _subject(device: Device, cell: Cell, spec: NetworkSpec, graph: ModelGraph) -> tuple[Any, Any]:
    """What the device runs: a module and its inputs, or for a simulation the graph and the batch."""
    place = getattr(device, "torch_device", None)
    if place is None:
        return graph, spec.batch
    return runs.built(spec, cell.precision, str(place)), runs.inputs_of(spec, cell.precision, str(place))
