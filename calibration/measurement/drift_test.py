"""Cells that were timed again, against what a profile says of them: one log ratio for each thing it prices.

Every time is turned into a cost the way calibration does it. What the ratios say is `moves`' business.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import norm

from latpred.accuracy.drift import Part
from latpred.calibration.cells import Cell
from latpred.calibration.fitting import profile_fit
from latpred.calibration.fitting.dispatch_fit import NetworkRun
from latpred.calibration.fitting.kernel_fit import KernelSample, host_us, placed_samples, row_of
from latpred.calibration.schedules import network_spec
from latpred.calibration.session import Row
from latpred.calibration.timing.in_network import calls
from latpred.calibration.workloads import networks, single_ops
from latpred.errors import ProfileError
from latpred.graph.features import NATIVE, native
from latpred.graph.graph import ModelGraph
from latpred.ops.families import nearest, parent, root
from latpred.prediction.kernel_times import KernelModel
from latpred.prediction.pricing import host_cost
from latpred.profile.document import DeviceProfile
from latpred.units import US_PER_S

EAGER = "eager"
KERNEL_ANCHORS = 8  # of each family and precision, where a kernel is a cell of its own
PLACED_ANCHORS = 12  # networks of each family, where kernels are timed in networks, which hold several of it
TINY_ANCHORS = 20  # networks that only dispatch
LOOKED_AT = {"kernel": 160, "network": 60}  # cells that are walked to see what they hold, of each precision
LONGEST_US = 40_000.0

_KEY = re.compile(r"(?P<kind>\w+)/(?P<runtime>[\w-]+)/(?P<precision>\w+)/(?P<name>\w+)/(?P<dims>[\w=,-]*)")


def chosen(profile: DeviceProfile) -> list[Cell]:
    """The cells to time again.

    Raises
    ------
    ProfileError
        When the profile keeps no cells that can be.
    """
    known = [(cell, sample.median_us) for sample in profile.samples if (cell := _cell(sample.cell)) is not None]
    eager = [(cell, us) for cell, us in known if cell.runtime == EAGER]
    mixed = random.Random(0).sample(eager, len(eager))
    quick = [cell for cell, us in mixed if us <= LONGEST_US]
    found = _networks(quick)
    if profile.device.asynchronous:
        found += [cell for cell in quick if cell.kind == "dispatch"]
        found += _covering(profile, [cell for cell in quick if cell.kind == "kernel"], KERNEL_ANCHORS)
    else:
        sized = [cell for cell in quick if cell.kind == "network" and not network_spec(cell).tiny]
        found += _covering(profile, [cell for cell in sized if not network_spec(cell).chain], PLACED_ANCHORS)
    if not found:
        raise ProfileError(
            f"profile {profile.name!r} keeps no cells that could be timed again ({profile.provenance}). "
            "Calibrate this machine, then check that profile: latpred calibrate"
        )
    return found


def fit_of(profile: DeviceProfile, family: str, row: tuple[float, ...], precision: str) -> str | None:
    """The fit that prices a kernel, by its key in the profile; None where no fit does."""
    fits = profile.kernels.get(precision, {})
    if NATIVE in fits and native(family, np.array([row]), profile.machine.threads)[0]:
        return NATIVE
    name: str | None = family
    while name is not None and name not in fits:
        name = parent(name)
    return name


def _cell(key: str) -> Cell | None:
    """The cell of a key; None for keys that are not of cells, as in profiles fitted to samples from elsewhere."""
    found = _KEY.fullmatch(key)
    if found is None:
        return None
    pairs = (pair.partition("=") for pair in found["dims"].split(",") if pair)
    try:
        dims = {name: int(value) for name, _, value in pairs}
    except ValueError:
        return None
    return Cell(found["kind"], found["name"], dims, found["precision"], found["runtime"])


def _networks(cells: Iterable[Cell]) -> list[Cell]:
    """Chains of calls, and networks that only dispatch."""
    specs = [(cell, network_spec(cell)) for cell in cells if cell.kind == "network"]
    tiny = [cell for cell, spec in specs if spec.tiny and not spec.chain]
    return [*(cell for cell, spec in specs if spec.chain), *tiny[:TINY_ANCHORS]]


def _covering(profile: DeviceProfile, cells: Sequence[Cell], wanted: int) -> list[Cell]:
    """Cells in their order, each taken where it holds a kernel of a family that has too few of them so far."""
    counts: dict[tuple[str, str], int] = {}
    looked: dict[str, int] = {}
    found = []
    for cell in cells:
        seen = looked.get(cell.precision, 0)
        if cell.precision not in profile.kernels or seen >= LOOKED_AT[cell.kind]:
            continue
        looked[cell.precision] = seen + 1
        parts = {(cell.precision, part) for part in _parts(profile, cell)}
        if any(counts.get(part, 0) < wanted for part in parts):
            found.append(cell)
            for part in parts:
                counts[part] = counts.get(part, 0) + 1
    return found


def _parts(profile: DeviceProfile, cell: Cell) -> set[str]:
    """Fits that price what a cell launches; on a synchronous device their families, of which a network holds many."""
    graph, batch = single_ops.graph(cell) if cell.kind == "kernel" else _network(cell)
    ops = [op for op in graph.at(batch) if op.launches]
    fits = (fit_of(profile, op.family, row_of(op, batch), cell.precision) for op in ops)
    found = {fit for fit in fits if fit is not None}
    return found if cell.kind == "kernel" else {root(fit) for fit in found}


def _network(cell: Cell) -> tuple[ModelGraph, int]:
    spec = network_spec(cell)
    return networks.graph(spec, cell.precision), spec.batch


HOST, DEVICE = "host", "device"
CALLS = {"modules": "module calls", "functions": "Python calls"}
ISSUED = "networks as they are issued"
SHORT = 0.2  # share of a chain's time that is not its calls', above which it says too little about them
HOST_SIGMA = 0.02  # standard deviation of the log of a dispatch cost, where nothing else is known


class Seen(NamedTuple):
    """One thing that was timed: to which part of the profile it belongs, and the log of its time over the profile's.

    clock : "host" or "device". anchor : what was timed; the same in every round. doubt : what the fit is usually off.
    """

    clock: str
    part: str
    anchor: str
    log_ratio: float
    sigma: float = HOST_SIGMA


def observed(profile: DeviceProfile, rows: Sequence[Row]) -> list[Seen]:
    """What rows of one round say about a profile."""
    good = [row for row in rows if not row.error]
    runs = [(row, profile_fit.run_of(row, profile.device)) for row in good if row.cell.kind == "network"]
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
    dispatch = profile.runtimes[profile_fit.EAGER]
    for row, run in runs:
        if network_spec(row.cell).chain:
            predicted_us = host_us(run, dispatch)
            if dispatch.fixed_us > SHORT * predicted_us:
                continue
            for ratio in _log(run.total_us, predicted_us):
                yield Seen(HOST, CALLS[row.cell.name], row.cell.key, ratio)


def _dispatched(profile: DeviceProfile, rows: Iterable[Row]) -> Iterator[Seen]:
    """Tiny ops issued in loops; one that issues several belongs to the class that costs most of it."""
    dispatch = profile.runtimes[profile_fit.EAGER]
    for row in rows:
        graph, batch = single_ops.graph(row.cell)
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
            _log(run.total_us, host_us(run, profile.runtimes[profile_fit.EAGER])) if "issue" in row.timings else ()
        ):
            yield Seen(HOST, ISSUED, row.cell.key, ratio)


class _Prices:
    """Kernel times by a profile."""

    def __init__(self, profile: DeviceProfile) -> None:
        self._profile = profile
        self._models: dict[tuple[str, str], KernelModel] = {}

    def queued(self, row: Row) -> Iterator[Seen]:
        """A kernel timed in a queue, less the gap to its predecessor."""
        graph, batch = single_ops.graph(row.cell)
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
        scale = nearest(fit.leaf_scales, sample.family, 1.0)
        for ratio in _log(sample.us, float(model.times(np.array([sample.row]), scale).us[0])):
            yield Seen(DEVICE, f"{precision} {root(key) if general else key}", anchor, ratio, fit.spread)


def _placed(profile: DeviceProfile, runs: Sequence[tuple[Row, NetworkRun]]) -> Iterator[Seen]:
    """Kernels timed in their networks, by family: shapes that come again are one anchor."""
    prices, dispatch = _Prices(profile), profile.runtimes[profile_fit.EAGER]
    for precision in profile.kernels:
        own = [run for row, run in runs if row.cell.precision == precision]
        for sample in placed_samples(own, dispatch) if own else ():
            yield from prices.seen(sample, precision, repr((sample.family, sample.row)), general=True)


def _called(profile: DeviceProfile, runs: Sequence[NetworkRun]) -> Iterator[Seen]:
    """Calls of tiny networks, timed in place.

    What the clock adds to a call, and what it does not see of it, is the same for all of them: the median of what is
    missing is put back.
    """
    dispatch = profile.runtimes[profile_fit.EAGER]
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


FALSE_ALARMS = 1e-3
LEAST = 0.07  # log ratio below which nothing is called moved, however well it is known
WANTED = math.log(1.15)  # what a check should see
PRIOR = 4  # anchors that a part's usual doubt counts as
MAD_TO_SD, MEDIAN_TO_MEAN = 1.4826, 1.2533


class _Group(NamedTuple):
    """Anchors of one part, each the median over rounds."""

    clock: str
    part: str
    ratios: np.ndarray[tuple[int], np.dtype[np.float64]]
    sigma: float


def judged(rounds: Sequence[Iterable[Seen]]) -> list[Part]:
    """The parts of a profile, those that all others of a clock have in common first.

    Parameters
    ----------
    rounds : sequence of iterables of Seen
        The same anchors in every round.
    """
    groups = sorted(_groups([seen for one in rounds for seen in one]), key=lambda group: group.part)
    parts: list[Part] = []
    clocks = sorted({group.clock for group in groups}, reverse=True)
    z = float(norm.isf(FALSE_ALARMS / 2 / max(len(groups) + len(clocks), 1)))
    for clock in clocks:
        own = [group for group in groups if group.clock == clock]
        centres = [float(np.median(group.ratios)) for group in own]
        common = float(np.median(centres))
        usual = _usual(own, centres)
        errors = [_error(group, usual) for group in own]
        parts.append(_part(clock, "", common, MEDIAN_TO_MEAN * float(np.median(errors)) / math.sqrt(len(own)), z, own))
        for group, centre, error in zip(own, centres, errors, strict=True):
            parts.append(_part(clock, group.part, centre - common, error, z, [group]))
    return parts


def _groups(seen: Iterable[Seen]) -> list[_Group]:
    by_part: dict[tuple[str, str], dict[str, list[Seen]]] = {}
    for one in seen:
        by_part.setdefault((one.clock, one.part), {}).setdefault(one.anchor, []).append(one)
    return [
        _Group(
            clock,
            part,
            np.array([np.median([one.log_ratio for one in group]) for group in anchors.values()]),
            float(np.median([one.sigma for group in anchors.values() for one in group])),
        )
        for (clock, part), anchors in by_part.items()
    ]


def _usual(groups: Sequence[_Group], centres: Sequence[float]) -> float:
    """Standard deviation of one anchor's ratio as most of this clock's have it."""
    within = [group.ratios - np.median(group.ratios) for group in groups if len(group.ratios) > 2]
    if within:
        return MAD_TO_SD * float(np.median(np.abs(np.concatenate(within))))
    return MAD_TO_SD * float(np.median(np.abs(np.array(centres) - np.median(centres))))


def _error(group: _Group, usual: float) -> float:
    """Standard error of a part's centre."""
    count = len(group.ratios)
    left = group.ratios - np.median(group.ratios)
    prior = max(usual, group.sigma)
    variance = (PRIOR * prior**2 + float(left @ left)) / (PRIOR + count - 1)
    return MEDIAN_TO_MEAN * math.sqrt(variance / count) if count > 2 else math.sqrt(variance / count)


def _part(clock: str, name: str, log_ratio: float, error: float, z: float, groups: Sequence[_Group]) -> Part:
    threshold = max(LEAST, z * error)
    moved, told = abs(log_ratio) > threshold, threshold <= WANTED
    return Part(
        clock=clock,
        name=name,
        ratio=math.exp(log_ratio),
        low=math.exp(log_ratio - z * error),
        high=math.exp(log_ratio + z * error),
        least=math.exp(threshold),
        anchors=sum(len(group.ratios) for group in groups),
        verdict="moved" if moved else "holds" if told else "unclear",
    )
