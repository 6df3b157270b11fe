"""ReplayCalibrator: of runtimes that launch a captured graph for each forward pass.

Chains of the smallest kernel, captured at several lengths, tell the gap between kernels of a graph. What a replay takes
the host, and how the kernels compare to eager's, are told by generated networks, as for any other runtime.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from latpred.calibration.cells import Cell
from latpred.calibration.devices import Call, Device
from latpred.calibration.devices.constants import QUEUED, TINY
from latpred.calibration.runtime_calibration.base import RuntimeCalibrator
from latpred.calibration.runtime_calibration.network_fit import fit_networks, networks_of
from latpred.calibration.session import Row, Sampled
from latpred.calibration.timing import timer
from latpred.calibration.timing.timer import Timing
from latpred.errors import CalibrationError
from latpred.profile.document import DeviceProfile, DispatchFit
from latpred.units import US_PER_S

# Seconds of a full calibration: exporting takes a while, compiling longer.
SECONDS = {"cuda-graphs": 45.0, "onnxruntime-cuda-graphs": 60.0, "compile-reduce-overhead": 120.0}
LIKE = {"onnxruntime-cuda-graphs": "onnxruntime", "compile-reduce-overhead": "compile"}  # whose kernels are replayed
LENGTHS = (1, 4, 16, 64, 256)  # kernels of a chain
REPLAYS = 60  # of each chain
CHAIN = "chain"


class ReplayCalibrator(RuntimeCalibrator):
    """Calibrates a runtime that replays captured graphs.

    >>> from latpred.calibration.devices import open_device
    >>> next(ReplayCalibrator("cuda-graphs").cells(open_device("simulated"), "fp32")).key
    'clock/cuda-graphs/fp32/chain/kernels=1'
    """

    def __init__(self, runtime: str) -> None:
        super().__init__(runtime, SECONDS[runtime])

    def cells(self, device: Device, precision: str) -> Iterator[Cell]:
        """Chains, then networks."""
        for length in LENGTHS:
            yield Cell("clock", CHAIN, {"kernels": length}, precision, self.runtime)
        yield from super().cells(device, precision)

    def measure(self, cell: Cell, device: Device) -> Sampled:
        """Time replays of a chain, or a network."""
        if cell.kind != "clock":
            return super().measure(cell, device)
        tiny = device.prepare(TINY)
        replayed = _replayed(device, tiny, cell.dims["kernels"])
        return Sampled({"replayed": replayed, "queued": timer.queued(device, tiny, QUEUED)})

    def fit(self, rows: Sequence[Row], profile: DeviceProfile) -> DispatchFit:
        """The gap between kernels, what a replay takes the host, and factors on kernel times."""
        gap_us = node_gap_us([row for row in rows if row.cell.kind == "clock"], profile.device.gap_us, self.runtime)
        like = profile.runtimes.get(LIKE.get(self.runtime, "eager"))
        networks = networks_of(rows, profile.device)
        return fit_networks(networks, profile, self.runtime, gap_us=gap_us, like=like)


def node_gap_us(rows: Sequence[Row], stream_gap_us: float, runtime: str) -> float:
    """The gap between two kernels of a graph, from chains of several lengths.

    A longer chain takes a kernel and a gap more for each step; the kernel alone is what one takes in a queue, less the
    gap of the stream.
    """
    lengths = np.array([row.cell.dims["kernels"] for row in rows], dtype=float)
    if len(set(lengths.tolist())) < 2:
        raise CalibrationError(
            f"{len(rows)} chains were replayed, too few to tell the gap between kernels of a graph. "
            f"Give it more time: latpred calibrate --runtimes {runtime} --budget 3m"
        )
    replayed_us = np.array([row.timings["replayed"].median_s for row in rows]) * US_PER_S
    floor_us = float(np.median([row.timings["queued"].median_s for row in rows])) * US_PER_S - stream_gap_us
    # A timing is off by a share of itself, so the longest chains must not outweigh the others.
    step_us, _ = np.polyfit(lengths, replayed_us, 1, w=1.0 / replayed_us)
    return round(max(float(step_us) - floor_us, 0.0), 4)


def _replayed(device: Device, call: Call, length: int) -> Timing:
    """Device time of one replay of a chain."""
    replays = [device.time_replayed(call, length) for _ in range(REPLAYS)]
    seconds = [one for one in replays if one is not None]
    if len(seconds) < REPLAYS:
        raise CalibrationError(f"{device.name} captures no graphs, so none can be replayed.")
    return timer.summary(seconds)
