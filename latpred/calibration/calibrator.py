"""`calibrate`: measures a device (or its host alone), cell by cell in a time budget, and saves the profile they make.

Which cells come when is `schedules`' business, how they are kept `session`'s, what they amount to `fitting`'s. Other
runtimes than eager come after it: see `runtime_calibration`.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import filterfalse
from math import inf, isfinite, nan
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from latpred import host
from latpred.calibration import runtime_calibration, schedules
from latpred.calibration.cells import CLOCK, Cell
from latpred.calibration.devices import Device, conditions, cuda, open_device
from latpred.calibration.fitting import acceptance, profile_fit
from latpred.calibration.runtime_calibration import calibrate_runtimes, onnx_workloads
from latpred.calibration.runtime_calibration.base import LIKE
from latpred.calibration.schedules import schedule_of
from latpred.calibration.session import JOURNAL, LAST, LEAST_BYTES, Row, Session, directory, measured, read_journal
from latpred.calibration.timing import visits
from latpred.calibration.timing.reference_speed import STREAM_BYTES, ReferenceTimer, gauge_of
from latpred.calibration.timing.visits import Visits
from latpred.calibration.workloads import networks
from latpred.errors import CalibrationError, UsageError
from latpred.graph.features import Floats
from latpred.profile import gpus, host_profile, store
from latpred.profile.document import Checkpoint, DeviceInfo, DeviceProfile, Machine
from latpred.profile.host_profile import HOST_SCHEMA, HostProfile
from latpred.progress import ProgressEvent
from latpred.query import check_budget, whole_number
from latpred.sandbox.own_thread import without_modes

QUICK_S, FULL_S = 50.0, 285.0
LEAST_S = 5.0  # of a budget
QUICK_SHARE = 1 / 3  # of the time of other runtimes than eager that a quick calibration spends
# Networks from which on more of them hardly move predictions, and how many times the usual time a run goes on for them;
# a quick one, whose fewer cells of other kinds take most of its time where moments at full speed are rare, for longer.
ENOUGH_NETWORKS, LONGER, LONGER_QUICK = 80, 2.0, 4.0
EAGER = profile_fit.EAGER
FITTING_SHARE = 0.15  # of the budget, set aside for the last fit
GATE_SHARE = 0.16  # of the budget, set aside for the gate's second look
CHECKPOINTS = (0.3, 0.65)  # shares of the cells after which a calibration stops to learn what it knows least about
TOLD = 1.2  # times the cells that a second look at the predictions takes
PACED_S = 20.0  # of work after which a calibration's pace says how long the rest takes
WORTH_LEARNING_S = 120.0  # budget below which that takes more than it brings


@without_modes()
def calibrate(
    device: str | torch.device | Device = "cpu",
    *,
    quick: bool = False,
    budget_s: float | None = None,
    cells: int | None = None,
    precisions: str | Sequence[str] | None = None,
    runtimes: str | Sequence[str] = ("eager",),
    fresh: bool = False,
    name: str | None = None,
    threads: int | None = None,
    cudnn_benchmark: bool = False,
    progress: Callable[[ProgressEvent], None] | None = None,
) -> DeviceProfile:
    """Measure a device and save its profile.

    A calibration that was interrupted goes on where it stopped. Runtimes that a finished profile of this device lacks
    are added to it; eager, which all others rest on, is then not measured again.

    Parameters
    ----------
    device : str, torch.device or Device
        "cpu", "cuda:0", "simulated", or an open device.
    quick : bool
        One to three minutes for eager, one precision, wider intervals.
    budget_s : float, optional
        Seconds to measure for, fitting included, for all runtimes together; default for eager 50 in a quick calibration
        and 285 in a full one, and what each other runtime's study asks for. Without it, a runtime goes on where it has
        too few networks, eager to learn from and others to be judged by: a full one for up to twice as long, a quick
        one, to which fewer will do, for up to four times.
    cells : int, optional
        Stop after so many cells, what was resumed included. Seconds then count only where `budget_s` is given too, so
        that a simulated device is measured alike on any machine, however busy.
    precisions : str or sequence of str, optional
        Default: those the device does well; a quick calibration takes the first.
    runtimes : str or sequence of str
        Names of runtimes, or "all" for those of latpred that can be had here.
    fresh : bool
        Start anew even where there is something to resume or to extend.
    name : str, optional
        Of the profile; default: the device's name, with what was asked of threads and cudnn; with digits of this
        machine where another one has a profile of that name in the folder, and with the GPU's name where another GPU
        has it.
    threads : int, optional
        Threads that an op may use; default: as many as PyTorch uses now. Predictions for another number need another
        profile.
    cudnn_benchmark : bool
        Measure with `torch.backends.cudnn.benchmark` on; CUDA only.
    progress : callable, optional
        Told before each cell how far the calibration is, in seconds: a `latpred.progress.ProgressEvent`.

    Returns
    -------
    DeviceProfile
        Saved, and found by `latpred.predict` from now on.

    Raises
    ------
    UsageError
        For a budget too short, no cells, a precision the device does not have, or an unknown runtime.
    MissingPackageError
        When a runtime that was named is not installed.
    DeviceError
        When the device is not there.
    BusyError
        When another calibration of the device is under way.
    CalibrationError
        When too little could be measured for a profile, or too little memory is left to measure.
    ProfileError
        When a newer latpred wrote the profile of that name, which `fresh` replaces.

    Examples
    --------
    >>> profile = calibrate("cpu", quick=True)  # doctest: +SKIP
    """
    live = open_device(device)
    wanted = calibrate_runtimes.named(runtimes, live)
    _demand_effort(budget_s, cells, threads)  # said before anything else takes time
    _demand_memory(live)
    chosen = _precisions(live, precisions, quick)
    options = conditions.Options(threads, cudnn_benchmark).checked(live.info().kind)
    profile_name = name or store.name_here(options.named(live.name), live.info().name)
    store.file_of(profile_name)  # a bad name must not cost a measurement
    gauge_of.cache_clear()  # hours after the last calibration a machine may have another full speed
    with conditions.stated(options, live):
        kind = live.info().kind
        versions = {"networks": networks.VERSION, "graphs": onnx_workloads.VERSION}
        protocol = options.protocol(kind, live.name)
        about = {**versions, "options": options._asdict(), "protocol": protocol}

        def session_of(several: tuple[str, ...]) -> Session:
            settings = {"precisions": several, **versions, **options.settings(kind)}
            return Session(directory(live.name), live.machine(), settings, fresh=fresh, about=about)

        session = session_of(chosen)
        finished = None if fresh else calibrate_runtimes.kept(profile_name, live, protocol, chosen * bool(precisions))
        begun = set() if finished is None else session.resumable()
        if begun == {EAGER}:  # others come when it is done
            finished = None
        plan = _plan(wanted, finished, quick, budget_s, cells)
        if EAGER in plan:
            finished = None  # it is measured anew
        if finished is not None and EAGER not in begun:
            session = session_of(tuple(finished.kernels))  # those of the record that it adds to
        with session:
            planned_s, effort = sum(each.seconds for each in plan.values()), plan.get(EAGER, _Effort(0.0, 0.0))
            report = _Reporter(session, planned_s, progress, effort)
            profile = finished
            if profile is None:
                profile = _EagerCalibration(live, chosen, session, profile_name, protocol, report).run()
                store.save(profile)  # what follows may be interrupted, and eager can be predicted by now
            profile = _with_runtimes(profile, live, session, chosen, plan, report)
            session.complete()
    return profile


class _Effort(NamedTuple):
    """What a calibration may take: seconds and cells, whichever are spent first; more of both for too few networks."""

    seconds: float
    cells: float
    longer: float = 1.0  # times as much
    enough: int = ENOUGH_NETWORKS  # networks for which it goes on


@dataclass
class _Reporter:
    """Tells of a calibration, whose work is seconds; waiting for calm moments is none."""

    session: Session
    planned_s: float
    progress: Callable[[ProgressEvent], None] | None
    effort: _Effort  # of the runtime under way
    before_s: float = 0.0  # spent on other runtimes before
    longer_s: float = 0.0  # that this one goes on for beyond its share
    told_s: float = 0.0
    first: tuple[float, float] | None = None  # what the clock said and what was spent when it was first told

    def tell(self, label: str, seconds: float, error: float | None = None) -> None:
        """Tell what is under way, and for how long."""
        if self.progress is not None:
            seconds += self.before_s
            whole_s, cells = self.planned_s + self.longer_s, len(self.session.rows)
            counted = not isfinite(whole_s)  # in cells: nobody knows how long those take
            left_s = nan if counted else max(0.0, whole_s - seconds) * self._slower(seconds)
            self.told_s = seconds
            self.progress(ProgressEvent(seconds, 0 if counted else whole_s, label, nan, left_s, cells, error))

    def _slower(self, seconds: float) -> float:
        """How many times as long as the work itself the run takes so far, with waiting and what it measured again."""
        now_s = time.monotonic()
        self.first = self.first or (now_s, seconds)
        took_s, worked_s = now_s - self.first[0], seconds - self.first[1]
        return max(1.0, took_s / worked_s) if worked_s >= PACED_S else 1.0

    def turn_to(self, effort: _Effort) -> None:
        """Another runtime comes now."""
        share_s = self.effort.seconds + self.longer_s
        self.before_s = self.before_s + share_s if isfinite(share_s) else self.told_s
        self.planned_s += self.longer_s
        self.effort, self.longer_s = effort, 0.0

    def goes_on(self, spent: float, networks: int) -> bool:
        """Give a runtime with too few networks more than its time, of which it spent so many times as much."""
        enough = self.effort.enough
        if networks >= enough or spent >= self.effort.longer:
            return False
        longer = min(spent * enough / max(networks, 1), self.effort.longer) - 1.0
        self.longer_s = max(self.longer_s, longer * self.effort.seconds)
        return True


def _with_runtimes(
    profile: DeviceProfile,
    device: Device,
    session: Session,
    precisions: tuple[str, ...],
    plan: Mapping[str, _Effort],
    report: _Reporter,
) -> DeviceProfile:
    """The profile with every other runtime of the plan, saved after each."""
    priced = tuple(precision for precision in precisions if precision in profile.kernels) or tuple(profile.kernels)[:1]
    others = {name: effort for name, effort in plan.items() if name != EAGER}
    if others and not priced:
        planned_s = sum(effort.seconds for effort in plan.values())  # of which eager gets its share alone
        more = acceptance.more_time(planned_s if isfinite(planned_s) else profile.seconds)
        raise CalibrationError(
            "the time for eager ended before a kernel was measured, and other runtimes rest on kernels; what was "
            f"measured is kept. Go on with the same command and --budget {more}."
        )
    run = calibrate_runtimes.RuntimeSession(session, priced, report.goes_on)
    for name, effort in others.items():
        report.turn_to(effort)
        calibrator = runtime_calibration.get(name, device)
        profile = run.add(profile, calibrator, effort.seconds, effort.cells, report.tell)
        store.save(profile)  # as after eager
    return profile


class _EagerCalibration:
    def __init__(
        self,
        device: Device,
        precisions: Sequence[str],
        session: Session,
        name: str,
        protocol: Mapping[str, str],
        report: _Reporter,
    ) -> None:
        self._device, self._schedule, self._session = device, schedule_of(device, precisions), session
        self._effort, self._name, self._protocol, self._report = report.effort, name, protocol, report
        self._precision = precisions[0]  # that the gate looks at
        self._fit_s = (1 - FITTING_SHARE - GATE_SHARE) * self._effort.seconds
        self._simulated = device.info().kind == "simulated"
        self._learning: list[Checkpoint] = []
        self._predictions: list[tuple[int, Floats]] = []  # cells at each checkpoint, and what the gate's models took
        self._visits = Visits(session, device, EAGER, self._timed, self._effort.seconds, report.tell)

    def run(self) -> DeviceProfile:
        """Measure, and fit the profile of everything measured."""
        from scipy import linalg

        # OpenBLAS is to take its buffers for the fits while there is memory: it asks for them again without end.
        linalg.svd(np.eye(64) @ np.eye(64))
        self._measure()
        self._visits.finish()
        if not self._simulated:  # its times are the same at any time, and its models are graphs
            self._measure_for_gate()
            self._visits.finish()
        profile = self._fit()
        return msgspec.structs.replace(profile, learning=tuple(self._learning), seconds=round(self._visits.seconds, 1))

    @property
    def _spent(self) -> float:
        """Share of the effort that measuring for the fit may take, of which the gate's models are no part."""
        cells = sum(row.cell.kind != "model" for row in self._visits.rows)
        return max((self._visits.seconds - self._models_s) / self._fit_s, cells / self._effort.cells)

    @property
    def _models_s(self) -> float:
        models = (row for row in self._visits.rows if row.cell.kind == "model")
        return sum(row.seconds for row in models if not row.disturbed)

    def _measure(self) -> None:
        """Run cells until the effort is spent, stopping to learn now and then."""
        checkpoints: Sequence[float] = CHECKPOINTS if self._effort.seconds >= WORTH_LEARNING_S else ()
        # Spread over the run: of models timed one after the other, one bad minute decides what the gate says.
        models = deque([] if self._simulated else acceptance.models(self._precision))
        whole = len(models)
        for cell in filterfalse(self._session.holds, self._schedule.cells()):
            self._demand_success()
            if self._spent >= 1.0 and not self._report.goes_on(self._spent, self._networks):
                return
            if any(share < self._spent for share in checkpoints):
                self._learn()
                checkpoints = [share for share in checkpoints if share >= self._spent]
                if self._settled():
                    return
            self._visits.run(cell)
            due = whole - len(models) + 0.5 < self._spent * whole  # each in the middle of its share of the run
            if models and due and self._models_s <= GATE_SHARE * self._effort.seconds:
                self._visits.run(models.popleft())

    @property
    def _networks(self) -> int:
        """How many networks the fit rests on so far; enough where it rests on none."""
        rests = not (self._device.info().asynchronous or self._simulated)
        return profile_fit.networks_seen(self._visits.rows) if rests else ENOUGH_NETWORKS

    def _demand_success(self) -> None:
        """Stop where there will be no profile, whatever else is measured: without a clock, or where no network runs."""
        rows = self._visits.rows
        row = next(iter(rows), None)
        if row is not None and row.cell == CLOCK and row.error:
            raise CalibrationError(
                f"the clock of {self._device.name} could not be measured: {row.error}. Try again, with --fresh."
            )
        tried = [row.error for row in rows if row.cell.kind == "network" and row.cell.name not in networks.CHAINS]
        if len(tried) >= calibrate_runtimes.MOST_FAILURES and all(tried):
            raise CalibrationError(
                f"none of {len(tried)} networks could be timed on {self._device.name}. {visits.most_failed(rows)}"
                "Once that is mended, calibrate anew, with --fresh."
            )

    def _measure_for_gate(self) -> None:
        """Time what the gate rests on: ordinary models, and some of the holdout networks a second time."""
        over_s = max(0.0, self._visits.seconds - self._models_s - self._fit_s)  # what it went on for
        for cell in acceptance.cells(self._visits.rows, self._precision):
            if self._visits.seconds > (1 - FITTING_SHARE) * self._effort.seconds + over_s:
                return
            self._visits.run(cell)

    def _timed(self, cell: Cell) -> Row:
        return acceptance.measure(cell, self._device) if cell.kind == "model" else self._schedule.measure(cell)

    def _learn(self) -> None:
        try:
            profile = self._fit()
        except Exception:
            return  # too little yet, or too odd; the last fit says so where it stays so
        self._schedule.learn(profile)
        if not self._simulated:
            told = visits.undisturbed(row for row in self._visits.rows if not row.error)  # what the fit took
            self._predictions.append((len(told), acceptance.predictions(profile, self._precision)))

    def _settled(self) -> bool:
        """Whether what the last cells told has changed no prediction of note, and there are networks enough."""
        if len(self._predictions) < 2 or self._networks < ENOUGH_NETWORKS:
            return False
        (fewer, before), (more, now) = self._predictions[-2:]
        settled = more >= TOLD * fewer and acceptance.settled(before, now)
        if settled:
            self._visits.tell("its predictions move no more")
        return settled

    def _fit(self) -> DeviceProfile:
        """The profile of everything measured so far; its error is a point of the learning curve."""
        self._visits.tell("fitting")
        rows, machine, info = self._visits.rows, self._device.machine(), self._device.info()
        profile, errors = profile_fit.fit_profile(rows, machine, info, self._name, self._protocol)
        error, seconds = acceptance.median_error(errors), self._visits.seconds
        if isfinite(error):
            self._learning.append(Checkpoint(round(seconds, 1), len(self._visits.rows), round(error, 4)))
            self._report.tell("tested on holdout networks", seconds, error)
        return profile


def _demand_effort(budget_s: float | None, cells: int | None, threads: int | None) -> None:
    """Refuse an effort that measures nothing or never ends."""
    check_budget(budget_s)
    if budget_s is not None and budget_s < LEAST_S:
        raise UsageError(f"a budget of {budget_s:g} s measures nothing. Give at least {LEAST_S:g} s, better 40.")
    if budget_s is not None and not isfinite(budget_s):
        raise UsageError(f"a budget of {budget_s:g} s never ends. Give seconds, or a number of cells.")
    if cells is not None:
        whole_number("cells", cells, "number of cells")
    if threads is not None and threads > host.cores():
        raise UsageError(f"{threads} threads are more than the {host.cores()} processors here; give fewer.")


def _demand_memory(device: Device) -> None:
    """Refuse to start where no cell could be begun, on a CPU beside the data that tells the machine's speed."""
    left = max(host.bytes_left(), 0.0)
    needed = LEAST_BYTES + (networks.EVICTING_BYTES + STREAM_BYTES) * (device.info().kind == "cpu")
    if left < needed:
        raise CalibrationError(
            f"{left / 1e6:.0f} MB of memory are left for this process, and measuring takes {needed / 1e6:.0f} MB. "
            "Free some, or raise the limit of its container or shell."
        )


def _plan(
    wanted: Sequence[str], finished: DeviceProfile | None, quick: bool, budget_s: float | None, cells: int | None
) -> dict[str, _Effort]:
    """Which runtimes are measured, eager first, and what each may take: shares of the whole in proportion to its need.

    What a finished profile lacks is added to it; where it lacks nothing, what is wanted is measured anew.
    """
    # Who replays the kernels of another runtime learns from it, and comes after it.
    others = sorted((name for name in wanted if name != EAGER), key=LIKE.__contains__)
    missing = [name for name in others if finished is not None and name not in finished.runtimes]
    anew = finished is None or (not missing and EAGER in wanted)
    names = [EAGER, *others] if anew else missing or others
    eager_s, share = (QUICK_S, QUICK_SHARE) if quick else (FULL_S, 1.0)
    usual_s = {name: eager_s if name == EAGER else share * runtime_calibration.seconds_of(name) for name in names}
    total_s = sum(usual_s.values())
    as_usual = budget_s is None and cells is None
    whole_s = budget_s if budget_s is not None else total_s if as_usual else inf
    whole_cells = inf if cells is None else cells
    longer = (LONGER_QUICK if quick else LONGER) if as_usual else 1.0
    judges = acceptance.FEWEST if quick else acceptance.ENOUGH
    enough = {name: ENOUGH_NETWORKS if name == EAGER else judges for name in names}
    return {
        name: _Effort(whole_s * seconds / total_s, whole_cells * seconds / total_s, longer, enough[name])
        for name, seconds in usual_s.items()
    }


def _precisions(device: Device, wanted: str | Sequence[str] | None, quick: bool) -> tuple[str, ...]:
    offered = device.precisions()
    if wanted is None:
        return offered[:1] if quick else offered
    wanted = tuple(dict.fromkeys((wanted,) if isinstance(wanted, str) else wanted))
    unknown = [precision for precision in wanted if precision not in offered]
    if unknown or not wanted:
        raise UsageError(f"{device.name} does not do {', '.join(unknown) or 'nothing'}; it does {', '.join(offered)}.")
    return wanted


def fit_raw(folder: str | os.PathLike[str], *, name: str | None = None) -> DeviceProfile:
    """Fit a profile to the journal of a calibration that ran elsewhere, or that was not finished.

    Parameters
    ----------
    folder : path
        Holds the journal.jsonl of a calibration under way, or the last.jsonl of one that was finished.
    name : str, optional
        Of the profile; default: the device's, with what was asked of threads and cudnn, as in "nvidia-h200".

    Returns
    -------
    DeviceProfile
        Of eager PyTorch; not saved yet.

    Raises
    ------
    CalibrationError
        When there is no such folder, or what it holds does not amount to a profile.

    Examples
    --------
    >>> profile = fit_raw("calibration-of-the-gpu-server")  # doctest: +SKIP
    """
    place = Path(folder)
    journals = [path for path in (place / JOURNAL, place / LAST) if path.exists()]
    if not journals:
        raise CalibrationError(
            f"there is no {JOURNAL} or {LAST} in {place}. Name the folder of a calibration's journal, as here "
            f"{directory('cpu')}."
        )
    for journal in journals:  # one under way may be of other runtimes, which the last one is extended by
        header, rows = read_journal(journal)
        if any(row.cell.runtime == EAGER for row in rows):
            break
    if header.about.get("networks", networks.VERSION) != networks.VERSION:  # by the same names it timed others
        raise CalibrationError(
            f"{journal} was written by another version of latpred, which had other networks. Fit it with that version, "
            "or calibrate again."
        )
    info, options = device_of(header.machine), conditions.Options(**header.about.get("options", {}))
    try:
        profile, _ = profile_fit.fit_profile(
            rows, header.machine, info, name or options.named(info.name), header.about.get("protocol", {})
        )
    except (ValueError, ArithmeticError, LookupError) as error:
        raise CalibrationError(
            f"what {journal} holds could not be fitted ({error}). Calibrate the machine again, when it is idle."
        ) from error
    return profile


def device_of(machine: Machine) -> DeviceInfo:
    """The device of a journal's machine: asked of itself where it is present, else as its datasheet has it."""
    if machine.accelerator == "simulated":
        return open_device("simulated").info()
    if not machine.accelerator:
        return DeviceInfo("cpu", "cpu", asynchronous=False, memory_bytes=machine.memory_bytes, queue=0)
    here = (cuda.info_of(torch.cuda.get_device_properties(index)) for index in range(torch.cuda.device_count()))
    elsewhere = DeviceInfo(cuda.name_of(machine.accelerator), "cuda", asynchronous=True, memory_bytes=0, queue=0)
    spec = gpus.find(machine.accelerator)
    if spec is not None:
        memory_bytes, cache_bytes = spec.memory_bytes, spec.l2_bytes
        elsewhere = msgspec.structs.replace(
            elsewhere, memory_bytes=memory_bytes, cache_bytes=cache_bytes, multiprocessors=spec.multiprocessors
        )
    return next((info for info in here if info.name == elsewhere.name), elsewhere)


TINY = 2 * len(networks.KINDS)


@without_modes()
def calibrate_host(
    name: str | None = None,
    *,
    tiny: int = TINY,
    progress: Callable[[ProgressEvent], None] | None = None,
) -> HostProfile:
    """Measure what dispatch costs on this host, and save it.

    Parameters
    ----------
    name : str, optional
        Of the host profile, as `--host` takes it; default: "this-host", with digits of this machine where the folder
        has a host of that name that is another.
    tiny : int
        Tiny networks to time; each takes about 0.2 s.
    progress : callable, optional
        Told before each cell: a `latpred.progress.ProgressEvent`.

    Raises
    ------
    HostError
        When the name is not a file name, or the directory cannot be written.
    CalibrationError
        When too little could be measured.

    Examples
    --------
    >>> calibrate_host("laptop").dispatch.module_call_us  # doctest: +SKIP
    """
    count = whole_number("tiny", tiny, "number of networks")
    name = name or host_profile.name_here("this-host")
    host_profile.path(name)  # a bad name must not cost a measurement
    live = open_device("cpu")
    _demand_memory(live)
    start = time.monotonic()
    cells = [schedules.network_cell(spec) for spec in (*schedules.chain_networks(), *schedules.tiny_networks(count))]
    rows = []
    with conditions.stated():
        threads = torch.get_num_threads()
        schedule, reference, gauge = schedules.Synchronous(live, ("fp32",)), ReferenceTimer(threads), gauge_of(threads)
        for index, cell in enumerate(cells):
            if progress is not None:
                progress(ProgressEvent(index, len(cells), cell.key))
            rows.append(visits.with_speed(measured(cell, schedule.measure), reference, gauge))
    good = visits.against_fastest(row for row in rows if not row.error)
    speed = visits.speed_of(good)
    good = [visits.brought_to_full_speed(row, speed) for row in visits.undisturbed(good)]
    advice = f"Time at least {profile_fit.FEWEST_NETWORKS}: latpred calibrate --host-only"
    dispatch, _ = profile_fit.host_costs(good, live.info(), f"{visits.most_failed(rows)}{advice}")
    profile = HostProfile(
        name=name,
        kind="host",
        schema=HOST_SCHEMA,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=live.machine(),
        dispatch=dispatch,
        seconds=round(time.monotonic() - start, 1),
    )
    host_profile.save(profile)
    return profile
