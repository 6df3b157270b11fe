"""Kernel samples from raw cells: work as a walk of the very op counts it, times less what surrounds the kernel.

On an asynchronous device cells were timed in replayed graphs, so a gap goes with every kernel; on a synchronous one by
calling them, so the dispatch does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from latpred.calibration import rawcells
from latpred.calibration.clocks import Clocks
from latpred.calibration.kernelfit import KernelSample, row_of
from latpred.calibration.rawfiles import KernelRow
from latpred.errors import TraceError
from latpred.graph import Op
from latpred.pricing import host_cost
from latpred.profile import DispatchFit
from latpred.units import US_PER_S

LEAST_SHARE = 0.2  # of a call's time that must be kernel for the call to say anything about kernels
LARGE_BYTES = 64 << 20  # copies from here on show the memory's bandwidth
# Weights of products were rotated over so many copies that they came from memory, unless they are too small for that.
ROTATED = ("gemm", "conv")
ROTATED_BYTES, MOST_COPIES = 120_000_000, 64

Samples = dict[str, list[KernelSample]]
Timed = Callable[[tuple[Op, ...], float], tuple[float, float]]
"""Microseconds of the last of some ops, out of those of all, and how well they are known; nothing is known of 0."""


def replayed(rows: Iterable[KernelRow], clocks: Clocks, cache_bytes: int, left_out: Counter[str]) -> Samples:
    """Samples by precision from kernels in graphs: each comes with the gap before it.

    A tiny kernel that a cell runs beside its own (an index made on the spot) takes as long as any tiny one.
    """

    def timed(ops: tuple[Op, ...], taken: float) -> tuple[float, float]:
        beside = sum(op.launches for op in ops[:-1]) * (clocks.floor_us + clocks.node_gap_us)
        us = taken - beside - ops[-1].launches * clocks.node_gap_us
        return us, 1.0 if us > 0 else 0.0

    return _collected(rows, timed, cache_bytes, left_out)


def called(rows: Iterable[KernelRow], dispatch: DispatchFit, cache_bytes: int, left_out: Counter[str]) -> Samples:
    """Samples by precision from calls: what is left of their time after dispatch, believed the less the less it is."""

    def timed(ops: tuple[Op, ...], taken: float) -> tuple[float, float]:
        us = taken - sum(host_cost(dispatch, op.host_class) for op in ops)
        share = us / taken
        return us, share**2 if share >= LEAST_SHARE else 0.0

    return _collected(rows, timed, cache_bytes, left_out)


def bandwidth(samples: Mapping[str, Iterable[KernelSample]]) -> float:
    """Bytes per microsecond of large copies, 0 without any."""
    rates = []
    for found in samples.values():
        for sample in found:
            moved = sum(sample.row[1:4])
            if sample.family.startswith("copy") and moved >= LARGE_BYTES:
                rates.append(moved / sample.us)
    return float(f"{np.quantile(rates, 0.9):.4g}") if rates else 0.0


def resident(family: str, weight_bytes: int, cache_bytes: int) -> bool:
    """Whether a cell found its weights in a cache of that size, for all the rotating."""
    copies = max(1, min(MOST_COPIES, ROTATED_BYTES // max(weight_bytes, 1))) if family in ROTATED else 1
    return copies * weight_bytes <= cache_bytes


def _collected(rows: Iterable[KernelRow], timed: Timed, cache_bytes: int, left_out: Counter[str]) -> Samples:
    found: Samples = {}
    for row in rows:
        try:
            ops = rawcells.kernel(row.family, row.dims, row.precision)
        except (KeyError, TypeError, TraceError):
            left_out[f"kernels of {row.family} with unknown dims"] += 1
            continue
        # A copy that turns out to be needless launches nothing.
        us, weight = timed(ops, row.median * US_PER_S) if ops else (0.0, 0.0)
        if not weight:
            left_out["kernels lost in what surrounds them"] += 1
            continue
        own = ops[-1]
        cached = resident(row.family, own.weight_bytes.at(1), cache_bytes)
        samples = found.setdefault(row.precision, [])
        samples.append(KernelSample(own.family, row_of(own, 1, resident=cached), us, weight))
        embedding = rawcells.lookup(row.family, row.dims, row.precision)
        if embedding is not None:
            # Its table was read as the activation that the cell had in its place.
            samples.append(KernelSample(embedding.family, row_of(embedding, 1, resident=True), us, weight))
    return found
