"""Clock constants of an asynchronous device from raw samples: chains of tiny kernels, an idle wait, whole models.

With dispatch d, launch latency L, gap g, node gap h, smallest kernel f and synchronisation s, what was sampled fixes

    waiting for an idle device                              s
    graphs of n tiny kernels: time over n                   f + h
    n tiny kernels issued one by one: time over n           d, where the host is the slower of the two, else f + g
                                      time at n = 0         L + f + s, or L - g + d + s
    whole models, by the device's pace, eager over replayed g - h, times their number of kernels
    whole models, replayed over the profiler's kernel sum   h, times their number of kernels
    whole models, by the device's pace: host over device    how far the host ran ahead: the queue

Without profiled kernels h counts as 0. No latency depends on that choice: what the kernels then gain the gaps and the
launch lose. Without models that keep the device busy, g counts as h and the queue keeps its usual length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from latpred.calibration.clocks import Clocks
from latpred.calibration.rawfiles import ChainRow, Folder, ModelRow
from latpred.errors import CalibrationError
from latpred.units import US_PER_S

USUAL_QUEUE = 1024
FEWEST_CHAINS = 3
LONGEST_CHAIN = 500  # launches well within every queue
HOST_PACE = 1.15  # a chain that takes this much longer than its dispatch goes by the device's pace
DEVICE_PACE = 1.3  # so much longer than the host needs, and a model goes by the device's pace
HELD_BACK = 1.2  # so much longer than its own pace, and the host had to wait for room in the queue


class Busy(NamedTuple):
    """A model in eager that keeps the device busy, its number of kernels, and the host's own seconds for a forward."""

    row: ModelRow
    kernels: int
    host_s: float


def constants(folder: Folder, busy: Sequence[Busy], dispatch_us: float) -> Clocks:
    """Clock constants from a folder.

    Parameters
    ----------
    folder : Folder
        Of an asynchronous device.
    busy : sequence of Busy
        Eager models by the device's pace; see `goes_by_the_device`.
    dispatch_us : float
        Host time to issue one kernel of the chains, known from a loop of them.

    Raises
    ------
    CalibrationError
        When there are too few chains.
    """
    sync_us = _idle_us(folder)
    period_us = _line(_chains(folder, "cuda_graph_nodes"))[0]
    slope_us, start_us = _line([row for row in _chains(folder, "eager_chain") if row.nodes <= LONGEST_CHAIN])
    node_gap_us = min(_node_gap_us(folder), period_us)
    floor_us = period_us - node_gap_us
    gap_us = max(node_gap_us + _extra_gap_us(folder, busy), 0.0)
    if slope_us <= HOST_PACE * dispatch_us:
        launch_us = start_us - floor_us - sync_us
    else:
        gap_us = max(slope_us - floor_us, 0.0)
        launch_us = start_us + gap_us - dispatch_us - sync_us
    return Clocks(
        launch_us=max(launch_us, 0.0),
        gap_us=gap_us,
        sync_us=sync_us,
        floor_us=floor_us,
        node_gap_us=node_gap_us,
        dispatch_us=dispatch_us,
        queue=_queue(busy),
    )


def goes_by_the_device(row: ModelRow, host_s: float) -> bool:
    """Whether a model's forwards follow each other as fast as the device can, not as the host can.

    Parameters
    ----------
    row : ModelRow
        The model at some batch size.
    host_s : float
        What the host needs for a forward when nothing holds it back.
    """
    return row.pipelined > DEVICE_PACE * host_s


def held_back(row: ModelRow, kernels: int) -> bool:
    """Whether the host may have waited for room in the queue, so that `host_issue` is not its own pace."""
    return kernels * row.single.n > USUAL_QUEUE and row.pipelined > 1.05 * row.host_issue


def _idle_us(folder: Folder) -> float:
    for row in folder.ops:
        if row.op == "sync_idle":
            return row.median * US_PER_S
    raise CalibrationError(_missing("sync_idle", 0, 1))


def _chains(folder: Folder, op: str) -> list[ChainRow]:
    return [row for row in folder.chains if row.op == op]


def _line(rows: Sequence[ChainRow]) -> tuple[float, float]:
    """Slope and start, in microseconds, of the line through chains' times, all of the same relative error."""
    if len(rows) < FEWEST_CHAINS:
        raise CalibrationError(_missing("cuda_graph_nodes and eager_chain", len(rows), FEWEST_CHAINS))
    nodes = np.array([row.nodes for row in rows], dtype=float)
    times = np.array([row.single.median for row in rows]) * US_PER_S
    slope, start = np.polyfit(nodes, times, 1, w=1 / times)
    return float(slope), float(start)


def _node_gap_us(folder: Folder) -> float:
    """What a replayed graph takes beyond the kernels that the profiler saw, per kernel."""
    profiled = {(row.model, row.precision, row.batch): row for row in folder.launches if row.kernels}
    found = []
    for row in folder.models:
        seen = profiled.get((row.model, row.precision, row.batch))
        if row.runtime == "cuda_graphs" and seen is not None and seen.kernel_s:
            found.append(((row.pipelined - seen.kernel_s) * US_PER_S / seen.kernels, seen.kernels / row.pipelined))
    return max(_weighted_median(found), 0.0)


def _extra_gap_us(folder: Folder, busy: Sequence[Busy]) -> float:
    """By how much the gap exceeds the gap inside a graph."""
    graphs = {_key(row): row for row in folder.models if row.runtime == "cuda_graphs"}
    found = []
    for row, kernels, _ in busy:
        replayed = graphs.get(_key(row))
        if replayed is not None and kernels:
            extra_us = (row.pipelined - replayed.pipelined) * US_PER_S / kernels
            found.append((extra_us, kernels / row.pipelined))
    return _weighted_median(found)


def _queue(busy: Sequence[Busy]) -> int:
    """Launches that the host was ahead of the device by when it had issued everything, where it had been held back."""
    ahead = [
        kernels * row.single.n * (1.0 - row.host_issue / row.pipelined)
        for row, kernels, host_s in busy
        if HELD_BACK * host_s < row.host_issue < row.pipelined
    ]
    return round(float(np.median(ahead))) if ahead else USUAL_QUEUE


def _key(row: ModelRow) -> tuple[str, str, int]:
    return (row.model, row.precision, row.batch)


def _weighted_median(found: Sequence[tuple[float, float]]) -> float:
    """Median of values with weights, 0 without any: long kernels say little about the gaps between them."""
    if not found:
        return 0.0
    values, weights = np.array(sorted(found)).T
    half = np.searchsorted(np.cumsum(weights), 0.5 * weights.sum())
    return float(values[half])


def _missing(what: str, found: int, needed: int) -> str:
    return (
        f"dispatch.jsonl has {found} cells of {what} with times, and the clock of an asynchronous device needs "
        f"{needed}. Sample the machine's dispatch part again."
    )


def host_pace(rows: Sequence[ModelRow]) -> Mapping[str, float]:
    """Host seconds to issue each model's eager forward: the least seen, since neither batch nor precision counts."""
    paces: dict[str, float] = {}
    for row in rows:
        if row.runtime == "eager":
            paces[row.model] = min(row.host_issue, paces.get(row.model, row.host_issue))
    return paces
