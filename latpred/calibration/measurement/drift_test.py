"""`check`: which cells of a profile are timed again to see whether it drifted, and one test for each part of it.

Every time is turned into a cost the way calibration does it; its log ratio to the profile's price is one sample of the
part that prices it. `profile_check` times the cells.
"""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import msgspec
import numpy as np
from scipy.stats import norm

from latpred import host
from latpred.accuracy.drift import Check, Part
from latpred.calibration.cells import Cell
from latpred.calibration.devices import Device, conditions, open_device
from latpred.calibration.fitting import profile_fit
from latpred.calibration.fitting.dispatch_fit import TimedNetwork, class_costs, with_parents
from latpred.calibration.fitting.kernel_fit import KernelSample, host_us, kernel_samples, nearest_fit, row_of
from latpred.calibration.fitting.profile_fit import EAGER
from latpred.calibration.schedules import network_spec, schedule_of
from latpred.calibration.session import Row, measured
from latpred.calibration.timing import disturbance, visits
from latpred.calibration.timing.in_network import calls
from latpred.calibration.timing.reference_speed import ReferenceTimer, RunSpeed
from latpred.calibration.workloads import networks, single_ops
from latpred.errors import CalibrationError, ProfileError, UsageError
from latpred.graph.features import NATIVE, Floats, native
from latpred.graph.graph import Op
from latpred.ops.families import nearest, root
from latpred.prediction.kernel_times import KernelModel
from latpred.prediction.pricing import host_cost
from latpred.profile import store
from latpred.profile.document import ADAPTED, BENCHMARK, CUDNN, DeviceProfile, DispatchFit
from latpred.profile.store import Owner, difference, owner
from latpred.progress import ProgressCounter, ProgressEvent
from latpred.sandbox.own_thread import without_modes
from latpred.units import US_PER_S

KERNEL_PROBES = 8  # of each family and precision, where a kernel is a cell of its own
NETWORK_PROBES = 12  # networks of each family, where kernels are timed in networks, which hold several of it
TINY_PROBES = 20  # networks that only dispatch
TRACED = {"kernel": 160, "network": 60}  # cells that are traced to see what they hold, of each precision
LONGEST_US = 40_000.0

_KEY = re.compile(r"(?P<kind>\w+)/(?P<runtime>[\w-]+)/(?P<precision>\w+)/(?P<name>\w+)/(?P<dims>[\w=,-]*)")


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
        probes += _covering(profile, [cell for cell, spec in specs if not (spec.tiny or spec.chain)], NETWORK_PROBES)
    if not probes:
        raise ProfileError(
            f"profile {profile.name!r} keeps no cells that could be timed again ({profile.provenance}). "
            "Calibrate this machine, then check that profile: latpred calibrate"
        )
    return probes


def _cell(key: str) -> Cell | None:
    """The cell of a key; None for keys that are not of cells, as in profiles fitted to samples from elsewhere."""
    parts = _KEY.fullmatch(key)
    if parts is None:
        return None
    pairs = (pair.partition("=") for pair in parts["dims"].split(",") if pair)
    try:
        dims = {name: int(value) for name, _, value in pairs}
    except ValueError:
        return None
    return Cell(parts["kind"], parts["name"], dims, parts["precision"], parts["runtime"])


def _covering(profile: DeviceProfile, cells: Sequence[Cell], wanted: int) -> list[Cell]:
    """Cells in their order, each taken where it holds a kernel of a family that has too few of them so far."""
    counts: dict[tuple[str, str], int] = {}
    traced: dict[str, int] = {}
    covering = []
    for cell in cells:
        so_far = traced.get(cell.precision, 0)
        if cell.precision not in profile.kernels or so_far >= TRACED[cell.kind]:
            continue
        traced[cell.precision] = so_far + 1
        parts = {(cell.precision, part) for part in _parts(profile, cell)}
        if any(counts.get(part, 0) < wanted for part in parts):
            covering.append(cell)
            for part in parts:
                counts[part] = counts.get(part, 0) + 1
    return covering


def _parts(profile: DeviceProfile, cell: Cell) -> set[str]:
    """Fits that price what a cell launches; on a synchronous device their families, of which a network holds many."""
    if cell.kind == "kernel":
        graph, batch = single_ops.graph(cell)
    else:
        spec = network_spec(cell)
        graph, batch = networks.graph(spec, cell.precision), spec.batch
    ops = [op for op in graph.at(batch) if op.launches]
    fits = (_fit_of(profile, op.family, row_of(op, batch), cell.precision) for op in ops)
    return {fit if cell.kind == "kernel" else root(fit) for fit in fits if fit is not None}


def _fit_of(profile: DeviceProfile, family: str, row: tuple[float, ...], precision: str) -> str | None:
    """The fit that prices a kernel, by its key in the profile; None where no fit does."""
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
    """One thing that was timed: to which part of the profile it belongs, and the log of its time over the profile's.

    clock : "host" or "device". probe : what was timed; the same in every round. sigma : what the fit is usually off.
    """

    clock: str
    part: str
    probe: str
    log_ratio: float
    sigma: float = HOST_SIGMA


def compared(profile: DeviceProfile, rounds: Sequence[Sequence[Row]]) -> list[Part]:
    """The parts of a profile by what was timed in several rounds."""
    speed = _speed_of(rounds)
    return drift([_ratios(profile, visits.undisturbed(rows), speed) for rows in rounds])


def _speed_of(rounds: Sequence[Sequence[Row]]) -> RunSpeed:
    return visits.speed_of(chain.from_iterable(rounds))


def _ratios(profile: DeviceProfile, rows: Sequence[Row], speed: RunSpeed) -> list[Ratio]:
    """What undisturbed rows of one round say about a profile, as they would be at its speed; `speed` is the run's."""
    good = [row for row in rows if not row.error]
    issued, sized = [visits.at_full_speed(row, speed) for row in good if not _is_sized(row)], filter(_is_sized, good)
    small = [(row, profile_fit.timed_network(row, profile.device)) for row in issued if row.cell.kind == "network"]
    tiny = [(row, run) for row, run in small if not network_spec(row.cell).chain]
    then = host.slowdown(profile.speed, speed.full_us, asynchronous=profile.device.asynchronous)
    dispatched = [_over(ratio, then.dispatch) for ratio in _chains(profile, small)]
    if profile.device.asynchronous:
        prices = _KernelPrices(profile)
        issues = *_dispatched(profile, (row for row in issued if row.cell.kind == "dispatch")), *_issued(profile, tiny)
        dispatched += [_over(ratio, then.ops) for ratio in issues]
        kernels = [ratio for row in issued if row.cell.kind == "kernel" for ratio in prices.queued(row)]
    else:
        dispatched += [_over(ratio, then.ops) for ratio in _called(profile, [run for _, run in tiny])]
        costs = with_parents(class_costs(run for _, run in tiny)) if tiny else profile.runtimes[EAGER].costs_us
        clocked = DispatchFit(costs, 0.0, 0.0, 0.0)
        kernels = list(_in_network(profile, [_at_speed(profile, row, speed) for row in sized], clocked))
    return dispatched + kernels


def _over(ratio: Ratio, slower: float) -> Ratio:
    """A ratio as a machine at the profile's speed would have it, where this one is so many times slower."""
    return ratio._replace(log_ratio=ratio.log_ratio - math.log(slower))


def _is_sized(row: Row) -> bool:
    return row.cell.kind == "network" and not network_spec(row.cell).tiny


def _at_speed(profile: DeviceProfile, row: Row, speed: RunSpeed) -> TimedNetwork:
    """A network with how much slower than the profile's the machine was for it."""
    run = profile_fit.timed_network(row, profile.device)
    return run._replace(slowdown=visits.slowdown(row, speed, profile.speed))


def _log(measured_us: float, predicted_us: float) -> Iterator[float]:
    """The log ratio, where both are times."""
    if measured_us > 0 and predicted_us > 0:
        yield math.log(measured_us / predicted_us)


def _chains(profile: DeviceProfile, runs: Iterable[tuple[Row, TimedNetwork]]) -> Iterator[Ratio]:
    """Chains of calls, those long enough for the calls to be what takes the time."""
    dispatch = profile.runtimes[EAGER]
    for row, run in runs:
        predicted_us = host_us(run, dispatch) if network_spec(row.cell).chain else 0.0
        if dispatch.fixed_us <= SHORT * predicted_us:
            for ratio in _log(run.issued_us, predicted_us):
                yield Ratio(HOST, CALLS[row.cell.name], row.cell.key, ratio)


def _dispatched(profile: DeviceProfile, rows: Iterable[Row]) -> Iterator[Ratio]:
    """Tiny ops issued in loops; one that issues several belongs to the class that costs most of it."""
    dispatch = profile.runtimes[EAGER]
    for row in rows:
        graph, batch = single_ops.graph(row.cell)
        ops = [op for op in graph.at(batch) if op.name != "python::return"]
        costs = {op.host_class: host_cost(dispatch, op.host_class) for op in ops}
        waited_us = profile.device.sync_us * sum(op.syncs for op in ops)
        measured_us = row.timings["issue"].median_s * US_PER_S - waited_us
        for ratio in _log(measured_us, sum(costs[op.host_class] for op in ops)):
            yield Ratio(HOST, max(costs, key=lambda name: costs[name]), row.cell.key, ratio)


def _issued(profile: DeviceProfile, tiny: Iterable[tuple[Row, TimedNetwork]]) -> Iterator[Ratio]:
    """Tiny networks, whose dispatch is dearer than that of the same ops in loops."""
    for row, run in tiny:
        if run.issue_us is not None:
            for ratio in _log(run.issue_us, host_us(run, profile.runtimes[EAGER])):
                yield Ratio(HOST, ISSUED, row.cell.key, ratio)


class _KernelPrices:
    """Kernel times by a profile."""

    def __init__(self, profile: DeviceProfile) -> None:
        self._profile = profile
        self._models: dict[tuple[str, str], KernelModel] = {}

    def queued(self, row: Row) -> Iterator[Ratio]:
        """A kernel timed in a queue, less the gap to its predecessor."""
        for sample in profile_fit.queued_sample(row, self._profile.device.gap_us):
            yield from self.ratio(sample, row.cell.precision, row.cell.key)

    def ratio(self, sample: KernelSample, precision: str, probe: str, *, general: bool = False) -> Iterator[Ratio]:
        """A kernel's time over the profile's; as part of its family where that is fine enough."""
        key = _fit_of(self._profile, sample.family, sample.row, precision)
        if key is None:
            return
        spread = self._profile.kernels[precision][key].spread
        for ratio in _log(sample.us, self._us(sample.family, sample.row, precision, key)):
            yield Ratio(DEVICE, f"{precision} {root(key) if general else key}", probe, ratio, spread)

    def of_op(self, op: Op, run: TimedNetwork) -> float:
        """What an op's kernels take; nothing where it launches none, or none that the profile knows."""
        row, precision = row_of(op, run.batch, resident=run.resident), run.graph.precision
        key = _fit_of(self._profile, op.family, row, precision) if op.launches else None
        return 0.0 if key is None else op.launches * self._us(op.family, row, precision, key)

    def _us(self, family: str, row: tuple[float, ...], precision: str, key: str) -> float:
        fit = self._profile.kernels[precision][key]
        model = self._models.setdefault((precision, key), KernelModel(fit))
        return float(model.times(np.array([row]), nearest(fit.leaf_scales, family, 1.0)).us[0])


def _in_network(profile: DeviceProfile, runs: Sequence[TimedNetwork], clocked: DispatchFit) -> Iterator[Ratio]:
    """Kernels timed in their networks, by family: shapes that come again are one probe.

    `clocked` is dispatch as the clock around each call has it.
    """
    prices = _KernelPrices(profile)
    for precision in profile.kernels:
        mine = [run for run in runs if run.graph.precision == precision]
        for sample in kernel_samples(mine, profile.runtimes[EAGER], clocked) if mine else ():
            yield from prices.ratio(sample, precision, repr((sample.family, sample.row)), general=True)


def _called(profile: DeviceProfile, runs: Sequence[TimedNetwork]) -> Iterator[Ratio]:
    """Calls of tiny networks, timed in place.

    What the clock adds to a call, and what it does not see of it, is the same for all of them: the median of what is
    missing is put back.
    """
    dispatch, prices = profile.runtimes[EAGER], _KernelPrices(profile)
    if not runs:
        return
    passes_us = [host_us(run, dispatch) + sum(prices.of_op(op, run) for op in run.ops) for run in runs]
    slow = float(np.median([run.total_us / us for run, us in zip(runs, passes_us, strict=True)]))
    single = [
        (
            group[0].host_class,
            taken / slow,
            host_cost(dispatch, group[0].host_class) + prices.of_op(group[0], run),
            number,
        )
        for number, run in enumerate(runs)
        for group, taken in zip(calls(run.ops), run.calls_us, strict=True)
        if len(group) == 1
    ]
    missing_us = float(np.median([expected - taken for _, taken, expected, _ in single]))
    for name, taken, expected, number in single:
        for ratio in _log(taken + missing_us, expected):
            yield Ratio(
                HOST, root(name), f"{number}/{name}", ratio + math.log(slow), math.hypot(0.1, CLOCK_US / expected)
            )


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
    groups = sorted(_groups([ratio for one in rounds for ratio in one]), key=lambda group: group.part)
    clocks = sorted({group.clock for group in groups}, reverse=True)
    z = float(norm.isf(FALSE_ALARMS / 2 / max(len(groups) + len(clocks), 1)))
    parts: list[Part] = []
    for clock in clocks:
        mine = [group for group in groups if group.clock == clock]
        common = float(np.median([group.centre for group in mine]))
        usual = _usual(mine)
        errors = [group.error(usual) for group in mine]
        error = MEDIAN_TO_MEAN * float(np.median(errors)) / math.sqrt(len(mine))
        parts.append(_part(clock, "", common, error, z, sum(len(group.ratios) for group in mine)))
        for group, error in zip(mine, errors, strict=True):
            parts.append(_part(clock, group.part, group.centre - common, error, z, len(group.ratios)))
    return parts


def _groups(measured: Iterable[Ratio]) -> list[_Group]:
    by_part: dict[tuple[str, str], dict[str, list[Ratio]]] = {}
    for one in measured:
        by_part.setdefault((one.clock, one.part), {}).setdefault(one.probe, []).append(one)
    return [
        _Group(
            clock,
            part,
            np.array([np.median([one.log_ratio for one in rounds]) for rounds in probes.values()]),
            float(np.median([one.sigma for rounds in probes.values() for one in rounds])),
        )
        for (clock, part), probes in by_part.items()
    ]


def _usual(groups: Sequence[_Group]) -> float:
    """Standard deviation of one probe's ratio as most of this clock's have it."""
    within = [group.ratios - group.centre for group in groups if len(group.ratios) > 2]
    centres = np.array([group.centre for group in groups])
    left = np.concatenate(within) if within else centres - np.median(centres)
    return MAD_TO_SD * float(np.median(np.abs(left)))


def _part(clock: str, name: str, log_ratio: float, error: float, z: float, probes: int) -> Part:
    threshold = max(LEAST, z * error)
    moved, told = abs(log_ratio) > threshold, threshold <= WANTED
    return Part(
        clock=clock,
        name=name,
        ratio=math.exp(log_ratio),
        low=math.exp(log_ratio - z * error),
        high=math.exp(log_ratio + z * error),
        least=math.exp(threshold),
        timed=probes,
        verdict="moved" if moved else "holds" if told else "unclear",
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
        Told before each cell.

    Returns
    -------
    Check
        The parts that hold, those that moved and by how much, those that noise hides, and what of the machine changed.

    Raises
    ------
    ProfileError
        When there is no profile, it is another machine's, or it keeps no cells that can be timed again.
    DeviceError
        When the profile's device is not there.
    CalibrationError
        When nothing could be timed.

    Examples
    --------
    >>> latpred.check().verdict  # doctest: +SKIP
    'holds'
    """
    if budget_s < LEAST_S:
        raise UsageError(f"a budget of {budget_s:g} s measures nothing. Give at least {LEAST_S:g} s, better 25.")
    checked = _profile(profile, device)
    _demand_own(checked)
    live = device if device is not None and not isinstance(device, str) else open_device(device or checked.device.kind)
    start = time.monotonic()
    watch = disturbance.Watch()
    rounds = timed_again(checked, live, budget_s, progress)
    parts = compared(checked, rounds)
    if not parts:
        raise CalibrationError(f"nothing of profile {checked.name!r} could be timed again: {_reason(rounds)}.")
    activity = watch.lap()
    return Check(
        profile=checked.name,
        created=checked.created,
        parts=tuple(parts),
        changes=tuple(store.mismatch(checked, live.machine())),
        speed=host.ratio(checked.speed, _speed_of(rounds).full_us),
        busy=round((activity.others or 0.0) + (activity.stolen or 0.0), 2),
        seconds=round(time.monotonic() - start, 1),
    )


def timed_again(
    profile: DeviceProfile, live: Device, budget_s: float, progress: Callable[[ProgressEvent], None] | None = None
) -> list[list[Row]]:
    """The profile's probe cells, timed in rounds under the conditions of its calibration."""
    cells = probe_cells(profile)
    threads = profile.machine.threads if profile.device.kind == "cpu" else None
    options = conditions.Options(threads, profile.protocol.get(CUDNN) == BENCHMARK)
    rounds: list[list[Row]] = []
    pace = ProgressCounter("", ROUNDS * len(cells), progress, budget_s=budget_s)
    with conditions.stated(options.checked(live.info().kind)):
        schedule = schedule_of(live, tuple(profile.kernels))
        reference = None if live.info().kind == "simulated" else ReferenceTimer(threads or 1)
        speed_us: dict[str, float] = {}
        read_at = -math.inf
        for number in range(ROUNDS):
            rounds.append([])
            for cell in random.Random(number).sample(cells, len(cells)):
                if not pace.next(cell.key):
                    return rounds
                row = measured(cell, schedule.measure)
                if reference is not None and time.monotonic() > read_at + visits.READ_EVERY_S:
                    speed_us, read_at = reference.read(), time.monotonic()
                rounds[-1].append(msgspec.structs.replace(row, speed=speed_us))
    return rounds


def _profile(profile: DeviceProfile | str | None, device: str | Device | None) -> DeviceProfile:
    if isinstance(profile, DeviceProfile):
        return profile
    if profile is not None:
        return store.load(profile)
    return store.find(device if device is None or isinstance(device, str) else device.name)


def _demand_own(profile: DeviceProfile) -> None:
    if profile.provenance != "measured":
        raise ProfileError(
            f"profile {profile.name!r} was not measured here ({profile.provenance}), so nothing of it can be timed "
            "again. Calibrate this machine, then check that profile: latpred calibrate"
        )
    if ADAPTED in profile.protocol:
        raise ProfileError(
            f"profile {profile.name!r} was adapted, {profile.protocol[ADAPTED]}, so its cells no longer are what it "
            "predicts. Check the profile that it was adapted from."
        )
    if owner(profile.machine) is Owner.ANOTHER:
        raise ProfileError(
            f"profile {profile.name!r} is of another machine ({profile.machine.cpu}, {difference(profile.machine)}). "
            "Check it there, or calibrate this machine: latpred calibrate"
        )


def _reason(rounds: Sequence[Sequence[Row]]) -> str:
    errors = [row.error for rows in rounds for row in rows if row.error]
    return errors[0] if errors else "the budget was too short. Give more: latpred check --budget 30s"
