"""`check`: which cells of a profile are timed again to see whether it drifted, and one test for each part of it.

Every time is turned into a cost the way calibration does it; its log ratio to the profile's price is one sample of the
part that prices it.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import norm

from latpred import host
from latpred.accuracy.drift import HOLDS, MOVED, UNCLEAR, Check, Part
from latpred.calibration.cells import Cell
from latpred.calibration.devices import Device, conditions, open_device
from latpred.calibration.fitting import profile_fit
from latpred.calibration.fitting.dispatch_fit import TimedNetwork, class_costs, with_parents
from latpred.calibration.fitting.kernel_fit import KernelSample, host_us, kernel_samples, nearest_fit, row_of
from latpred.calibration.fitting.profile_fit import EAGER
from latpred.calibration.schedules import cell_graph, network_spec, schedule_of
from latpred.calibration.session import Row, measured
from latpred.calibration.timing import disturbance, visits
from latpred.calibration.timing.in_network import calls
from latpred.calibration.timing.reference_speed import RunSpeed, gauge_on, reference_on
from latpred.errors import CalibrationError, ProfileError, UsageError
from latpred.graph.features import NATIVE, Floats, finer_family, native
from latpred.graph.graph import Op
from latpred.host import Slowdown
from latpred.ops.families import nearest, root
from latpred.prediction.kernel_times import KernelModel
from latpred.prediction.pricing import host_cost
from latpred.profile import store
from latpred.profile.document import ADAPTED, DeviceProfile, DispatchFit
from latpred.profile.store import Owner, difference, live_name, owner
from latpred.progress import ProgressCounter, ProgressEvent
from latpred.query import check_budget
from latpred.sandbox.own_thread import without_modes

KERNEL_PROBES = 8  # of each family and precision, where a kernel is a cell of its own
NETWORK_PROBES = 12  # networks of each family, where kernels are timed in networks, which hold several of it
TINY_PROBES = 20  # networks that only dispatch
TRACED = {"kernel": 160, "network": 60}  # cells that are traced to see what they hold, of each precision
LONGEST_US = 40_000.0


def probe_cells(profile: DeviceProfile) -> list[Cell]:
    """The cells to time again; a `ProfileError` where the profile keeps none that can be."""
    samples = [(cell, sample.median_us) for sample in profile.samples if (cell := _cell(sample.cell)) is not None]
    eager = [(cell, us) for cell, us in samples if cell.runtime == EAGER]
    mixed = random.Random(0).sample(eager, len(eager))
    quick = [cell for cell, us in mixed if us <= LONGEST_US]
    specs = [(cell, network_spec(cell)) for cell in quick if cell.kind == "network"]
    probes = [cell for cell, spec in specs if spec.chain]
    probes += [cell for cell, spec in specs if spec.tiny and not spec.chain][:TINY_PROBES]
    if profile.device.asynchronous:
        probes += [cell for cell in quick if cell.kind == "dispatch"]
        probes += _covering(profile, [cell for cell in quick if cell.kind == "kernel"], KERNEL_PROBES)
    else:
        probes += _covering(profile, [cell for cell, spec in specs if not spec.tiny], NETWORK_PROBES)
    if not probes:
        raise ProfileError(
            f"profile {profile.name!r} keeps no cells that could be timed again ({profile.provenance}). "
            f"Calibrate this machine, then check that profile: {store.calibration(profile)}"
        )
    return probes


def _cell(key: str) -> Cell | None:
    """The cell of a key; None for keys that are not of cells, as in profiles fitted to samples from elsewhere."""
    try:
        cell_kind, runtime, precision, name, dims = key.split("/")
        sizes = {dim: int(size) for dim, size in (pair.split("=") for pair in dims.split(",") if pair)}
        cell = Cell(cell_kind, name, sizes, precision, runtime)
        if cell_kind == "network":
            network_spec(cell)
    except (ValueError, KeyError):  # KeyError: a network of another version, which had other dimensions
        return None
    return cell


def _covering(profile: DeviceProfile, cells: Sequence[Cell], wanted: int) -> list[Cell]:
    """Cells in their order, each taken where it holds a kernel of a family that has too few of them so far."""
    counts: Counter[tuple[str, str]] = Counter()
    traced: Counter[str] = Counter()
    covering = []
    for cell in cells:
        if cell.precision not in profile.kernels or traced[cell.precision] >= TRACED[cell.kind]:
            continue
        traced[cell.precision] += 1
        parts = {(cell.precision, part) for part in _parts(profile, cell)}
        if any(counts[part] < wanted for part in parts):
            covering.append(cell)
            counts.update(parts)
    return covering


def _parts(profile: DeviceProfile, cell: Cell) -> set[str]:
    """Fits that price what a cell launches; on a synchronous device their families, of which a network holds many.

    A cell that cannot be traced any more has none.
    """
    try:
        graph, batch = cell_graph(cell, profile.device.kind)
    except Exception:
        return set()  # it may be of another version; choosing must not end a check over one cell
    ops = [op for op in graph.at(batch) if op.launches]
    fits = (_fit_of(profile, finer_family(op.family, op.dims), row_of(op, batch), cell.precision) for op in ops)
    return {fit if cell.kind == "kernel" else root(fit) for fit in fits if fit is not None}


def _fit_of(profile: DeviceProfile, family: str, row: tuple[float, ...], precision: str) -> str | None:
    """The fit that prices a kernel of a family or kind, by its key in the profile; None where no fit does."""
    fits = profile.kernels.get(precision, {})
    if NATIVE in fits and native(family, np.array([row]), profile.machine.threads)[0]:
        return NATIVE
    return nearest_fit(fits, family)


HOST, DEVICE = "host", "device"
CALLS = {"modules": "module calls", "functions": "Python calls", "attributes": "attribute reads"}
ISSUED = "networks as they are issued"
SHORT = 0.2  # share of a chain's time that is not its calls', above which it says too little about them
CLOCK_US = 0.5  # that a clock around a call leaves open
HOST_SIGMA = 0.02  # standard deviation of the log of a dispatch cost, where nothing else is known


class Ratio(NamedTuple):
    """One thing that was timed: to which part of the profile it belongs, and the log of its time over the profile's."""

    clock: str  # "host" or "device"
    part: str
    probe: str  # what was timed; the same in every round
    log_ratio: float  # NaN where one of the two is no time
    sigma: float = HOST_SIGMA  # what the fit is usually off


def compared(profile: DeviceProfile, rounds: Sequence[Sequence[Row]]) -> list[Part]:
    """The parts of a profile by what was timed in several rounds."""
    every = list(chain.from_iterable(rounds))
    speed, found = visits.speed_of(every), (visits.against_fastest(rows, every) for rows in rounds)
    return drift([_ratios(profile, visits.undisturbed(rows), speed) for rows in found])


def _ratios(profile: DeviceProfile, rows: Sequence[Row], speed: RunSpeed) -> Iterator[Ratio]:
    """What undisturbed rows of one round say about a profile, as they would be at its speed; `speed` is the run's."""
    good = [row for row in rows if not row.error]
    asynchronous = profile.device.asynchronous
    issued = [visits.brought_to_full_speed(row, speed, asynchronous=asynchronous) for row in good if not _is_sized(row)]
    small = [(row, profile_fit.timed_network(row, profile.device)) for row in issued if row.cell.kind == "network"]
    slowdown = host.slowdown(profile.speed, speed.full_us, asynchronous=asynchronous)
    prices = _KernelPrices(profile)
    ratios = _issued(profile, small, slowdown)
    if asynchronous:
        gap_us = profile.device.gap_us
        kernels = [
            (row.cell.precision, row.cell.key, sample)
            for row in issued
            if row.cell.kind == "kernel"
            for sample in profile_fit.queued_sample(row, gap_us, profile.kernels.get(row.cell.precision, ()))
        ]
        ratios = chain(ratios, _dispatched(profile, issued, slowdown))
    else:
        tiny = [(row.cell.key, run) for row, run in small if not network_spec(row.cell).chain]
        # A sized network keeps its times, and says how much slower than the profile's the machine was for it.
        sized = [
            profile_fit.timed_network(row, profile.device)._replace(slowdown=visits.slowdown(row, speed, profile.speed))
            for row in good
            if _is_sized(row)
        ]
        kernels = _in_networks(profile, sized, [run for _, run in tiny], slowdown)
        ratios = chain(ratios, _called(prices, tiny, slowdown))
    return (ratio for ratio in chain(ratios, _kernels(prices, kernels)) if math.isfinite(ratio.log_ratio))


def _is_sized(row: Row) -> bool:
    return row.cell.kind == "network" and not network_spec(row.cell).tiny


def _log(measured_us: float, predicted_us: float) -> float:
    """The log ratio; NaN where one of the two is no time."""
    return math.log(measured_us / predicted_us) if measured_us > 0 and predicted_us > 0 else math.nan


def _issued(profile: DeviceProfile, small: Iterable[tuple[Row, TimedNetwork]], slowdown: Slowdown) -> Iterator[Ratio]:
    """Chains long enough for their calls to be what takes the time, and tiny networks where issuing them was timed.

    In these dispatch is dearer than in loops of the same ops.
    """
    dispatch = profile.runtimes[EAGER]
    for row, run in small:
        predicted_us = host_us(run, dispatch)
        if not network_spec(row.cell).chain:
            if run.issue_us is not None:
                yield Ratio(HOST, ISSUED, row.cell.key, _log(run.issue_us / slowdown.ops, predicted_us))
        elif dispatch.fixed_us <= SHORT * predicted_us:
            yield Ratio(HOST, CALLS[row.cell.name], row.cell.key, _log(run.issued_us / slowdown.dispatch, predicted_us))


def _dispatched(profile: DeviceProfile, rows: Iterable[Row], slowdown: Slowdown) -> Iterator[Ratio]:
    """Tiny ops issued in loops; one that issues several belongs to the class that costs most of it."""
    for row in rows:
        if row.cell.kind == "dispatch":
            names, issued_us = profile_fit.issued_in_loop(row, profile.device.sync_us)
            costs = [host_cost(profile.runtimes[EAGER], name) for name in names]
            ratio = _log(issued_us / slowdown.ops, sum(costs))
            yield Ratio(HOST, names[int(np.argmax(costs))], row.cell.key, ratio)


class _KernelPrices:
    """What kernels take by a profile, whose fits are made ready to evaluate once each."""

    def __init__(self, profile: DeviceProfile) -> None:
        self.profile = profile
        self._models = {
            (precision, key): KernelModel(fit)
            for precision, fits in profile.kernels.items()
            for key, fit in fits.items()
        }

    def us(self, precision: str, key: str, family: str, row: tuple[float, ...]) -> float:
        """Microseconds of a kernel by the fit that the profile has under `key`."""
        model = self._models[precision, key]
        return float(model.times(np.array([row]), nearest(model.fit.leaf_scales, family, 1.0)).us[0])

    def of_op(self, op: Op, run: TimedNetwork) -> float:
        """What an op's kernels take; nothing where it launches none, or none that the profile knows."""
        row, precision = row_of(op, run.batch, resident=run.resident), run.graph.precision
        key = _fit_of(self.profile, finer_family(op.family, op.dims), row, precision) if op.launches else None
        return 0.0 if key is None else op.launches * self.us(precision, key, op.family, row)


def _in_networks(
    profile: DeviceProfile, sized: Sequence[TimedNetwork], tiny: Sequence[TimedNetwork], slowdown: Slowdown
) -> list[tuple[str, str, KernelSample]]:
    """Kernels timed in their networks, with precision and probe: shapes that come again are one probe."""
    eager = profile.runtimes[EAGER]
    # Tiny networks tell what a clock around each call makes of dispatch, here at the profile's speed.
    costs_us = eager.costs_us
    if tiny:
        costs_us = {name: us / slowdown.ops for name, us in with_parents(class_costs(tiny)).items()}
    clocked = DispatchFit(costs_us, 0.0, 0.0, 0.0)
    by_precision = {name: [run for run in sized if run.graph.precision == name] for name in profile.kernels}
    return [
        (precision, repr((sample.family, sample.row)), sample)
        for precision, runs in by_precision.items()
        if runs
        for sample in kernel_samples(runs, eager, clocked)
    ]


def _kernels(prices: _KernelPrices, samples: Iterable[tuple[str, str, KernelSample]]) -> Iterator[Ratio]:
    """Kernels' times over the profile's; by family where they were timed in networks, which hold several of it."""
    profile = prices.profile
    for precision, probe, sample in samples:
        key = _fit_of(profile, sample.family, sample.row, precision)
        if key is not None:
            part = f"{precision} {key if profile.device.asynchronous else root(key)}"
            ratio = _log(sample.us, prices.us(precision, key, sample.family, sample.row))
            yield Ratio(DEVICE, part, probe, ratio, profile.kernels[precision][key].spread)


def _called(prices: _KernelPrices, runs: Sequence[tuple[str, TimedNetwork]], slowdown: Slowdown) -> Iterator[Ratio]:
    """Calls of tiny networks, timed in place; each comes with the key of its cell."""
    if not runs:
        return
    dispatch = prices.profile.runtimes[EAGER]
    passes_us = [host_us(run, dispatch) + sum(prices.of_op(op, run) for op in run.ops) for _, run in runs]
    slow = float(np.median([run.total_us / us for (_, run), us in zip(runs, passes_us, strict=True)]))
    single = [
        (key, op.host_class, taken / slow, host_cost(dispatch, op.host_class) + prices.of_op(op, run))
        for key, run in runs
        for (op, *others), taken in zip(calls(run.ops), run.calls_us, strict=True)
        if not others
    ]
    # What the clock adds to a call, and does not see of it, is the same for all: the median of it is put back.
    missing_us = float(np.median([expected - taken for _, _, taken, expected in single]))
    for key, name, taken, expected in single:
        if expected > 0:
            ratio = _log((taken + missing_us) * slow / slowdown.ops, expected)
            sigma = math.hypot(0.1, CLOCK_US / expected)
            yield Ratio(HOST, root(name), f"{key}/{name}", ratio, sigma)


FALSE_ALARMS = 1e-3
LEAST = 0.07  # log ratio below which nothing is called moved, however well it is known
WANTED = math.log(1.15)  # what a check should see
PRIOR = 4  # probes that a part's usual sigma counts as
MAD_TO_SD, MEDIAN_TO_MEAN = 1.4826, 1.2533


class _Group(NamedTuple):
    """The probes of one part, each the median over rounds."""

    clock: str
    part: str
    ratios: Floats
    sigma: float

    @property
    def centre(self) -> float:
        return float(np.median(self.ratios))

    def error(self, usual: float) -> float:
        """Standard error of the centre, where one probe's ratio usually has this standard deviation."""
        count, left = len(self.ratios), self.ratios - self.centre
        prior = max(usual, self.sigma)
        variance = (PRIOR * prior**2 + float(left @ left)) / (PRIOR + count - 1)
        return math.sqrt(variance / count) * (MEDIAN_TO_MEAN if count > 2 else 1.0)


def drift(rounds: Sequence[Iterable[Ratio]]) -> list[Part]:
    """The parts of a profile by the same probes in every round; first what all parts of a clock have in common."""
    timed = pd.DataFrame(chain(*rounds), columns=Ratio._fields).groupby(["part", "clock"])
    groups = [
        _Group(
            str(clock), str(part), of.groupby("probe", sort=False)["log_ratio"].median().to_numpy(), of.sigma.median()
        )
        for (part, clock), of in timed
    ]
    clocks = sorted({group.clock for group in groups}, reverse=True)
    z = float(norm.isf(FALSE_ALARMS / 2 / max(len(groups) + len(clocks), 1)))
    parts: list[Part] = []
    for clock in clocks:
        mine = [group for group in groups if group.clock == clock]
        centres = np.array([group.centre for group in mine])
        common = float(np.median(centres))
        # The standard deviation of one probe's ratio as most of this clock's parts have it.
        within = [group.ratios - group.centre for group in mine if len(group.ratios) > 2]
        usual = MAD_TO_SD * float(np.median(np.abs(np.concatenate(within) if within else centres - common)))
        errors = [group.error(usual) for group in mine]
        error = MEDIAN_TO_MEAN * float(np.median(errors)) / math.sqrt(len(mine))
        parts.append(_part(clock, "", common, error, z, sum(len(group.ratios) for group in mine)))
        for group, error in zip(mine, errors, strict=True):
            parts.append(_part(clock, group.part, group.centre - common, error, z, len(group.ratios)))
    return parts


def _part(clock: str, name: str, log_ratio: float, error: float, z: float, probes: int) -> Part:
    threshold = max(LEAST, z * error)
    told = HOLDS if threshold <= WANTED else UNCLEAR
    return Part(
        clock=clock,
        name=name,
        ratio=math.exp(log_ratio),
        low=math.exp(log_ratio - z * error),
        high=math.exp(log_ratio + z * error),
        least=math.exp(threshold),
        timed=probes,
        verdict=MOVED if abs(log_ratio) > threshold else told,
    )


BUDGET_S = 25.0
LEAST_S = 1.0
ROUNDS = 2


@without_modes()
def check(
    profile: DeviceProfile | str | None = None,
    *,
    device: str | Device | None = None,
    budget_s: float = BUDGET_S,
    progress: Callable[[ProgressEvent], None] | None = None,
) -> Check:
    """Say whether a profile of this machine still holds, after a new driver, PyTorch or library, or some months.

    A few of the cells that the profile was fitted to are timed again, in rounds and in an order of their own in each,
    and held against what the profile predicts of them. Only eager is: what other runtimes dispatch is not looked at.

    Parameters
    ----------
    profile : DeviceProfile or str, optional
        A profile, its name or file; default: the device's own.
    device : str or Device, optional
        "cpu", "cuda:0", "simulated" or an open device; default: the profile's.
    budget_s : float
        Seconds after which no cell starts; the first round is then all there is.
    progress : callable, optional
        Told before each cell: a `latpred.progress.ProgressEvent`.

    Returns
    -------
    Check
        The parts that hold, those that moved and by how much, those that noise hides, and what of the machine changed.

    Raises
    ------
    ProfileError
        When there is no profile, it is another machine's or another device's, or it keeps no cells that can be timed
        again.
    DeviceError
        When the profile's device is not there.
    CalibrationError
        When nothing could be timed.

    Examples
    --------
    >>> latpred.check().verdict  # doctest: +SKIP
    'holds'
    """
    check_budget(budget_s)
    if budget_s < LEAST_S:
        raise UsageError(f"a budget of {budget_s:g} s measures nothing. Give at least {LEAST_S:g} s, better 25.")
    checked = _own_profile(profile, device)
    live = open_device(device or live_name(checked))
    info = live.info()
    if (info.kind, info.name) != (checked.device.kind, checked.device.name):
        raise ProfileError(
            f"profile {checked.name!r} is of {checked.device.name}, not of {info.name}. "
            "Name the device that it is of, or leave the device out."
        )
    start = time.monotonic()
    watch = disturbance.Watch(gpu=getattr(live, "state", None))
    rounds = timed_again(checked, live, budget_s, progress)
    meanwhile = watch.lap()
    rows = list(chain.from_iterable(rounds))
    parts = compared(checked, rounds)
    if not parts:
        too_short = "the budget was too short; give more, as with --budget 30s"
        reason = next((row.error for row in rows if row.error), too_short)
        raise CalibrationError(f"nothing of profile {checked.name!r} could be timed again: {reason}.")
    return Check(
        profile=checked.name,
        created=checked.created,
        parts=tuple(parts),
        changes=tuple(conditions.changes(checked, live, conditions.Options.of(checked))),
        speed=host.ratio(checked.speed, visits.speed_of(rows).full_us),
        busy=round(meanwhile.busy, 2),
        seconds=round(time.monotonic() - start, 1),
        again=store.calibration(checked),
        gpu=meanwhile.device if info.asynchronous else "",
    )


def timed_again(
    profile: DeviceProfile, live: Device, budget_s: float, progress: Callable[[ProgressEvent], None] | None = None
) -> list[list[Row]]:
    """The profile's probe cells, timed in rounds under the conditions of its calibration."""
    cells = probe_cells(profile)
    options = conditions.Options.of(profile)
    rounds: list[list[Row]] = []
    pace = ProgressCounter("", ROUNDS * len(cells), progress, budget_s=budget_s)
    with conditions.stated(options, live):
        schedule = schedule_of(live, tuple(profile.kernels))
        reference, gauge = reference_on(live), gauge_on(live.info().kind, EAGER)
        for number in range(ROUNDS):
            rounds.append([])
            for cell in random.Random(number).sample(cells, len(cells)):
                if not pace.next(cell.key):
                    return rounds
                rounds[-1].append(visits.with_speed(measured(cell, schedule.measure), reference, gauge))
    return rounds


def _own_profile(profile: DeviceProfile | str | None, device: str | Device | None) -> DeviceProfile:
    """The profile that was named or is the device's; a `ProfileError` unless it was measured on this machine."""
    if profile is None:
        profile = store.find(device if device is None else str(getattr(device, "name", device)))
    elif not isinstance(profile, DeviceProfile):
        profile = store.load(profile)
    if profile.provenance != "measured":
        raise ProfileError(
            f"profile {profile.name!r} was not measured here ({profile.provenance}), so nothing of it can be timed "
            f"again. Calibrate this machine, then check that profile: {store.calibration(profile)}"
        )
    if ADAPTED in profile.protocol:
        raise ProfileError(
            f"profile {profile.name!r} was adapted, {profile.protocol[ADAPTED]}, so its cells no longer are what it "
            "predicts. Check the profile that it was adapted from."
        )
    if owner(profile.machine) is Owner.ANOTHER:
        raise ProfileError(
            f"profile {profile.name!r} is of another machine ({profile.machine.cpu}, {difference(profile.machine)}). "
            f"Check it there, or calibrate this machine: {store.calibration(profile)}"
        )
    return profile
