"""Cells that were timed again, against what a profile says of them: one log ratio for each thing it prices.

Every time is turned into a cost the way calibration does it. What the ratios say is `moves`' business.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from latpred.calibration import builders, fitting
from latpred.calibration.anchors import fit_of
from latpred.calibration.dispatchfit import NetworkRun
from latpred.calibration.inplace import calls
from latpred.calibration.kernelfit import KernelSample, row_of
from latpred.calibration.placed import host_us, placed_samples
from latpred.calibration.session import Row
from latpred.calibration.suite import network_spec
from latpred.kerneltime import KernelModel
from latpred.ops.families import root
from latpred.pricing import host_cost
from latpred.profile import DeviceProfile
from latpred.units import US_PER_S

HOST, DEVICE = "host", "device"
CALLS = {"modules": "module calls", "functions": "Python calls"}
ISSUED = "networks as they are issued"
SHORT = 0.2  # share of a chain's time that is not its calls', above which it says too little about them
HOST_DOUBT = 0.02  # standard deviation of the log of a dispatch cost, where nothing else is known


class Seen(NamedTuple):
    """One thing that was timed: to which part of the profile it belongs, and the log of its time over the profile's.

    clock : "host" or "device". anchor : what was timed; the same in every round. doubt : what the fit is usually off.
    """

    clock: str
    part: str
    anchor: str
    log_ratio: float
    doubt: float = HOST_DOUBT


def observed(profile: DeviceProfile, rows: Sequence[Row]) -> list[Seen]:
    """What rows of one round say about a profile."""
    good = [row for row in rows if not row.error]
    runs = [(row, fitting.run_of(row, profile.device)) for row in good if row.cell.kind == "network"]
    found = list(_chains(profile, runs))
    tiny = [(row, run) for row, run in runs if network_spec(row.cell).tiny and not network_spec(row.cell).chain]
    if profile.device.asynchronous:
        prices = _Prices(profile)
        found += _dispatched(profile, (row for row in good if row.cell.kind == "dispatch"))
        found += _issued(profile, tiny)
        found += (seen for row in good if row.cell.kind == "kernel" for seen in prices.queued(row))
        return found
    found += _called(profile, [run for _, run in tiny])
    return found + list(_placed(profile, [(row, run) for row, run in runs if not network_spec(row.cell).tiny]))


def _log(measured_us: float, predicted_us: float) -> Iterator[float]:
    """The log ratio, where both are times."""
    if measured_us > 0 and predicted_us > 0:
        yield math.log(measured_us / predicted_us)


def _chains(profile: DeviceProfile, runs: Iterable[tuple[Row, NetworkRun]]) -> Iterator[Seen]:
    """Chains of calls, those long enough for the calls to be what takes the time."""
    dispatch = profile.runtimes[fitting.EAGER]
    for row, run in runs:
        if network_spec(row.cell).chain:
            predicted_us = host_us(run, dispatch)
            if dispatch.fixed_us > SHORT * predicted_us:
                continue
            for ratio in _log(run.total_us, predicted_us):
                yield Seen(HOST, CALLS[row.cell.name], row.cell.key, ratio)


def _dispatched(profile: DeviceProfile, rows: Iterable[Row]) -> Iterator[Seen]:
    """Tiny ops issued in loops; one that issues several belongs to the class that costs most of it."""
    dispatch = profile.runtimes[fitting.EAGER]
    for row in rows:
        graph, batch = builders.graph(row.cell)
        ops = [op for op in graph.at(batch) if op.name != "python::return"]
        costs = {op.host_class: host_cost(dispatch, op.host_class) for op in ops}
        waited_us = profile.device.sync_us * sum(op.syncs for op in ops)
        measured_us = row.timings["issue"].median_s * US_PER_S - waited_us
        for ratio in _log(measured_us, sum(costs[op.host_class] for op in ops)):
            yield Seen(HOST, max(costs, key=lambda name: costs[name]), row.cell.key, ratio)


def _issued(profile: DeviceProfile, tiny: Iterable[tuple[Row, NetworkRun]]) -> Iterator[Seen]:
    """Tiny networks, whose dispatch is dearer than that of the same ops in loops."""
    for row, run in tiny:
        for ratio in (
            _log(run.total_us, host_us(run, profile.runtimes[fitting.EAGER])) if "issue" in row.timings else ()
        ):
            yield Seen(HOST, ISSUED, row.cell.key, ratio)


class _Prices:
    """Kernel times by a profile."""

    def __init__(self, profile: DeviceProfile) -> None:
        self._profile = profile
        self._models: dict[tuple[str, str], KernelModel] = {}

    def queued(self, row: Row) -> Iterator[Seen]:
        """A kernel timed in a queue, less the gap to its predecessor."""
        graph, batch = builders.graph(row.cell)
        launching = [op for op in graph.at(batch) if op.launches]
        if len(launching) == 1 and launching[0].launches == 1:
            us = row.timings["queued"].median_s * US_PER_S - self._profile.device.gap_us
            sample = KernelSample(launching[0].family, row_of(launching[0], batch), us)
            yield from self.seen(sample, row.cell.precision, row.cell.key)

    def seen(self, sample: KernelSample, precision: str, anchor: str, *, general: bool = False) -> Iterator[Seen]:
        """A kernel's time over the profile's; as part of its family where that is fine enough."""
        key = fit_of(self._profile, sample.family, sample.row, precision)
        if key is None:
            return
        fit = self._profile.kernels[precision][key]
        model = self._models.setdefault((precision, key), KernelModel(fit))
        scale = fit.leaf_scales.get(sample.family, 1.0)
        for ratio in _log(sample.us, float(model.times(np.array([sample.row]), scale).us[0])):
            yield Seen(DEVICE, f"{precision} {root(key) if general else key}", anchor, ratio, fit.spread)


def _placed(profile: DeviceProfile, runs: Sequence[tuple[Row, NetworkRun]]) -> Iterator[Seen]:
    """Kernels timed in their networks, by family: shapes that come again are one anchor."""
    prices, dispatch = _Prices(profile), profile.runtimes[fitting.EAGER]
    for precision in profile.kernels:
        own = [run for row, run in runs if row.cell.precision == precision]
        for sample in placed_samples(own, dispatch) if own else ():
            yield from prices.seen(sample, precision, repr((sample.family, sample.row)), general=True)


def _called(profile: DeviceProfile, runs: Sequence[NetworkRun]) -> Iterator[Seen]:
    """Calls of tiny networks, timed in place.

    What the clock adds to a call, and what it does not see of it, is the same for all of them: the median of what is
    missing is put back.
    """
    dispatch = profile.runtimes[fitting.EAGER]
    if not runs:
        return
    slow = float(np.median([run.total_us / host_us(run, dispatch) for run in runs]))
    single = [
        (group[0].host_class, taken / slow, number)
        for number, run in enumerate(runs)
        for group, taken in zip(calls(run.ops), run.calls_us, strict=True)
        if len(group) == 1
    ]
    missing_us = float(np.median([host_cost(dispatch, name) - taken for name, taken, _ in single]))
    for name, taken, number in single:
        for ratio in _log(taken + missing_us, host_cost(dispatch, name)):
            yield Seen(HOST, root(name), f"{number}/{name}", ratio + math.log(slow), 0.1)
