"""`calibrate`: measures a device, cell by cell within a time budget, and saves the profile that the cells amount to.

Which cells come when is `synchronous`' and `asynchronous`' business, how they are kept `session`'s, what they amount to
`fitting`'s. Other runtimes than eager come after it: see `calibrate_runtimes`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from latpred.calibration import runtime_calibration
from latpred.calibration.cells import Cell
from latpred.calibration.devices import conditions
from latpred.calibration.devices.base import Device, open_device
from latpred.calibration.devices.simulated import SimulatedDevice
from latpred.calibration.fitting import acceptance, profile_fit
from latpred.calibration.runtime_calibration import calibrate_runtimes, onnx_workloads
from latpred.calibration.schedules import Asynchronous, Synchronous
from latpred.calibration.session import JOURNAL, LAST, Header, Row, Sampled, Session, directory, read_rows
from latpred.calibration.timing.visits import Visits
from latpred.calibration.workloads import networks
from latpred.errors import CalibrationError, UsageError
from latpred.graph.features import Floats
from latpred.profile import store
from latpred.profile.document import Checkpoint, DeviceInfo, DeviceProfile, Machine
from latpred.sandbox.own_thread import without_modes

QUICK_S, FULL_S = 50.0, 285.0
LEAST_S = 5.0
QUICK_SHARE = 1 / 3  # of the time of other runtimes than eager that a quick calibration spends
EAGER = profile_fit.EAGER
FITTING_SHARE = 0.15  # of the budget, set aside for the last fit
GATE_SHARE = 0.16  # of the budget, set aside for the gate's second look
CHECKPOINTS = (0.3, 0.65)  # shares of the cells after which a calibration stops to learn what it knows least about
WORTH_LEARNING_S = 120.0  # budget below which that takes more than it brings


class Progress(NamedTuple):
    """How far a calibration is.

    seconds, budget_s : spent and to spend (infinite where cells are counted), what was resumed included. cells :
    measured. label : the cell under way, or what is being done. error : median error on networks that no fit saw; None
    before the first fit.
    """

    seconds: float
    budget_s: float
    cells: int
    label: str
    error: float | None


class Campaign(Protocol):
    """What there is to measure on a kind of device, and how."""

    def cells(self) -> Iterator[Cell]:
        """Cells in the order of their worth, without end."""
        ...

    def measure(self, cell: Cell) -> Sampled:
        """Time one cell."""
        ...

    def learn(self, profile: DeviceProfile) -> None:
        """Take note of what is known by now, so that the cells to come are those that it knows least about."""
        ...


@without_modes()
def calibrate(
    device: str | Device = "cpu",
    *,
    quick: bool = False,
    budget_s: float | None = None,
    cells: int | None = None,
    precisions: Sequence[str] | None = None,
    runtimes: str | Sequence[str] = ("eager",),
    fresh: bool = False,
    name: str | None = None,
    threads: int | None = None,
    cudnn_benchmark: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> DeviceProfile:
    """Measure a device and save its profile.

    A calibration that was interrupted goes on where it stopped. Runtimes that a finished profile of this device lacks
    are added to it; eager, which all others rest on, is then not measured again.

    Parameters
    ----------
    device : str or Device
        "cpu", "cuda:0", "simulated", or an open device.
    quick : bool
        Under a minute for eager, one precision, wider intervals.
    budget_s : float, optional
        Seconds to measure for, fitting included, for all runtimes together; default for eager 50 in a quick calibration
        and 285 in a full one, and what each other runtime's calibrator asks for.
    cells : int, optional
        Stop after so many cells, what was resumed included. Seconds then count only where `budget_s` is given too, so
        that a simulated device is measured alike on any machine, however busy.
    precisions : sequence of str, optional
        Default: those the device does well; a quick calibration takes the first.
    runtimes : str or sequence of str
        Names of runtimes, or "all" for those of latpred that can be had here.
    fresh : bool
        Start anew even where there is something to resume or to extend.
    name : str, optional
        Of the profile; default: the device's name, with what was asked of threads and cudnn.
    threads : int, optional
        Threads that an op may use; default: as many as PyTorch uses now. Predictions for another number need another
        profile.
    cudnn_benchmark : bool
        Measure with `torch.backends.cudnn.benchmark` on; CUDA only.
    progress : callable, optional
        Told before each cell.

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
        When too little could be measured for a profile.

    Examples
    --------
    >>> profile = calibrate("cpu", quick=True)  # doctest: +SKIP
    """
    live = open_device(device) if isinstance(device, str) else device
    asked = calibrate_runtimes.named(runtimes, live)
    _effort(quick, budget_s, cells)  # said before anything else takes time
    chosen = _precisions(live, precisions, quick)
    options = conditions.Options(threads, cudnn_benchmark).checked(live.info().kind)
    called = name or options.named(live.name)
    with conditions.stated(options):
        made = {"networks": networks.VERSION, "graphs": onnx_workloads.VERSION}
        settings = {"precisions": chosen, **made, **options.settings()}
        with Session(directory(live.name), live.machine(), settings, fresh=fresh) as session:
            known = None if fresh or session.begun(EAGER) else calibrate_runtimes.kept(called, live, options.noted_in)
            plan = _plan(asked, known, quick, budget_s, cells)
            if known is None or EAGER in plan:
                kind = Asynchronous if live.asynchronous else Synchronous
                run = _Run(live, kind(live, chosen), session, plan, called, progress)
                run.measure()
                run.look_again()
                known = options.noted_in(run.fitted())
                store.save(known)  # what follows may be interrupted, and eager can be predicted by now
            profile = _studied(known, live, session, chosen, plan, progress)
            store.save(profile)
            session.complete(extending=EAGER not in plan)
    return profile


def _studied(
    profile: DeviceProfile,
    device: Device,
    session: Session,
    precisions: tuple[str, ...],
    plan: Mapping[str, _Effort],
    progress: Callable[[Progress], None] | None,
) -> DeviceProfile:
    """The profile with every other runtime of the plan."""
    priced = tuple(precision for precision in precisions if precision in profile.kernels) or tuple(profile.kernels)[:1]
    if not priced and set(plan) - {EAGER}:
        raise CalibrationError(
            "the time for eager ended before a kernel was measured, and other runtimes rest on kernels; what was "
            f"measured is kept. Go on with more: latpred calibrate --device {device.name} --budget 5m"
        )
    run = calibrate_runtimes.RuntimeSession(device, session, priced)
    whole_s = sum(effort.seconds for effort in plan.values())
    before_s = plan[EAGER].seconds if EAGER in plan else 0.0
    for name, effort in plan.items():
        if name == EAGER:
            continue

        def tell(label: str, seconds: float, before_s: float = before_s) -> None:
            if progress is not None:
                progress(Progress(before_s + seconds, whole_s, len(session.rows), label, None))

        profile = run.add(profile, runtime_calibration.get(name), effort.seconds, effort.cells, tell)
        before_s += effort.seconds
    return profile


class _Effort(NamedTuple):
    """What a calibration may take: seconds and cells, whichever are spent first."""

    seconds: float
    cells: float


@dataclass
class _Run:
    """The calibration of eager under way; seconds of resumed rows count as spent."""

    device: Device
    campaign: Campaign
    session: Session
    plan: Mapping[str, _Effort]
    name: str
    progress: Callable[[Progress], None] | None
    learning: list[Checkpoint] = field(default_factory=list)
    predicted: list[Floats] = field(default_factory=list)  # of the gate's models, at each checkpoint

    def __post_init__(self) -> None:
        self._start = time.monotonic() - sum(row.seconds for row in self.rows)
        threads = self.device.machine().threads
        self.visits = Visits(
            self.session, self.device, threads=threads, budget_s=self.effort.seconds, tell=lambda said: self._tell(said)
        )

    @property
    def rows(self) -> list[Row]:
        """What was measured in eager so far."""
        return [row for row in self.session.rows if row.cell.runtime == EAGER]

    @property
    def effort(self) -> _Effort:
        """What eager may take."""
        return self.plan[EAGER]

    @property
    def seconds(self) -> float:
        """Spent so far, without what was lost to other work."""
        return time.monotonic() - self._start - self.visits.lost_s

    def measure(self) -> None:
        """Run cells until the effort is spent, stopping to learn now and then."""
        checkpoints = list(CHECKPOINTS) if self.effort.seconds >= WORTH_LEARNING_S else []
        for cell in self.campaign.cells():
            if self.session.holds(cell):
                continue
            if self._spent >= 1.0:
                return
            if checkpoints and self._spent > checkpoints[0]:
                checkpoints.pop(0)
                self._learn()
                if self._settled():
                    return
            self._tell(cell.key)
            self.visits.run(cell, self.campaign.measure)

    def look_again(self) -> None:
        """Time what the gate rests on: ordinary models, and some of the holdout networks a second time."""
        self.visits.finish()
        if self.device.info().kind == "simulated":
            return  # its times are the same at any time, and its models are graphs
        for cell in acceptance.cells(self.rows):
            if self.seconds > (1 - FITTING_SHARE) * self.effort.seconds:
                return
            self._tell(cell.key)
            self.visits.run(cell, self._measure_for_gate)
        self.visits.finish()

    def _measure_for_gate(self, cell: Cell) -> Sampled:
        return acceptance.measure(cell, self.device) if cell.kind == acceptance.MODEL else self.campaign.measure(cell)

    @property
    def _spent(self) -> float:
        """Share of the effort that measuring for the fit may take."""
        seconds = self.seconds / ((1 - FITTING_SHARE - GATE_SHARE) * self.effort.seconds)
        return max(seconds, len(self.rows) / self.effort.cells)

    def fitted(self) -> DeviceProfile:
        """The profile of everything measured."""
        profile, error = self._fit()
        self._note(error)
        return msgspec.structs.replace(profile, learning=tuple(self.learning), seconds=round(self.seconds, 1))

    def _learn(self) -> None:
        try:
            profile, error = self._fit()
        except Exception:
            return  # too little yet, or too odd; the last fit says so where it stays so
        self._note(error)
        self.campaign.learn(profile)
        if self.device.info().kind != "simulated":
            self.predicted.append(acceptance.predictions(profile))

    def _settled(self) -> bool:
        """Whether what the last cells told has changed no prediction of note."""
        settled = len(self.predicted) > 1 and acceptance.settled(*self.predicted[-2:])
        if settled:
            self._tell("its predictions move no more")
        return settled

    def _fit(self) -> tuple[DeviceProfile, float]:
        self._tell("fitting")
        profile, found = profile_fit.fit_profile(self.rows, self.device.machine(), self.device.info(), self.name)
        return profile, acceptance.median_error(found)

    def _note(self, error: float) -> None:
        if isfinite(error):
            self.learning.append(Checkpoint(round(self.seconds, 1), len(self.rows), round(error, 4)))
            self._tell("judged", error)

    def _tell(self, label: str, error: float | None = None) -> None:
        if self.progress is not None:
            whole_s = sum(effort.seconds for effort in self.plan.values())
            self.progress(Progress(self.seconds, whole_s, len(self.session.rows), label, error))


def _effort(quick: bool, budget_s: float | None, cells: int | None) -> _Effort:
    usual = inf if cells is not None else QUICK_S if quick else FULL_S
    seconds = usual if budget_s is None else budget_s
    if seconds < LEAST_S:
        raise UsageError(f"a budget of {seconds:g} s measures nothing. Give at least {LEAST_S:g} s, better 40.")
    if cells is not None and cells < 1:
        raise UsageError(f"{cells} cells measure nothing. Give at least 1, better some hundreds, or a budget_s.")
    return _Effort(seconds, inf if cells is None else cells)


def _plan(
    asked: Sequence[str], known: DeviceProfile | None, quick: bool, budget_s: float | None, cells: int | None
) -> dict[str, _Effort]:
    """Which runtimes are measured, eager first, and what each may take: shares of the whole in proportion to its need.

    What a finished profile lacks is added to it; where it lacks nothing, what was asked for is measured anew.
    """
    others = [name for name in asked if name != EAGER]
    missing = [name for name in others if known is not None and name not in known.runtimes]
    anew = known is None or (not missing and EAGER in asked)
    names = [EAGER, *others] if anew else missing or others
    seconds = {name: _usual_s(name, quick) for name in names}
    whole, shares = _effort(quick, budget_s, cells), sum(seconds.values())
    return {
        name: _Effort(
            usual if budget_s is None and cells is None else whole.seconds * usual / shares,
            whole.cells * usual / shares,
        )
        for name, usual in seconds.items()
    }


def _usual_s(name: str, quick: bool) -> float:
    """Seconds that a runtime takes where nobody says otherwise."""
    if name == EAGER:
        return QUICK_S if quick else FULL_S
    return runtime_calibration.get(name).seconds * (QUICK_SHARE if quick else 1.0)


def _precisions(device: Device, asked: Sequence[str] | None, quick: bool) -> tuple[str, ...]:
    offered = device.precisions()
    if asked is None:
        return offered[:1] if quick else offered
    unknown = [precision for precision in asked if precision not in offered]
    if unknown or not asked:
        raise UsageError(f"{device.name} does not do {', '.join(unknown) or 'nothing'}; it does {', '.join(offered)}.")
    return tuple(asked)


def fit_raw(folder: str | os.PathLike[str], *, name: str | None = None) -> DeviceProfile:
    """Fit a profile to the journal of a calibration that ran elsewhere, or that was not finished.

    Parameters
    ----------
    folder : path
        Holds the journal.jsonl of a calibration under way, or the last.jsonl of one that was finished.
    name : str, optional
        Of the profile; default: the device's, as in "nvidia-h200".

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
    journal = next((path for path in (place / JOURNAL, place / LAST) if path.exists()), None)
    if journal is None:
        raise CalibrationError(
            f"there is no {JOURNAL} or {LAST} in {place}. Name the folder of a calibration's journal, as here "
            f"{directory('cpu')}."
        )
    rows = read_rows(journal)
    machine = _header(journal).machine
    info = device_of(machine)
    try:
        profile, _ = profile_fit.fit_profile(rows, machine, info, name or info.name)
    except LookupError as error:
        raise CalibrationError(
            f"{journal} was written by another version of latpred: its cells lack {error}. Fit it with that version, "
            "or calibrate again."
        ) from error
    except (ValueError, ArithmeticError) as error:
        raise CalibrationError(
            f"what {journal} holds could not be fitted ({error}). Calibrate the machine again, when it is idle."
        ) from error
    return profile


def device_of(machine: Machine) -> DeviceInfo:
    """The device of a journal's machine. What only the device itself can tell is asked of it where it is present."""
    if machine.accelerator == "simulated":
        return SimulatedDevice().info()
    if not machine.accelerator:
        return DeviceInfo("cpu", "cpu", asynchronous=False, memory_bytes=machine.memory_bytes, queue=0)
    name = re.sub(r"[^a-z0-9]+", "-", machine.accelerator.lower()).strip("-")
    return _present(name) or DeviceInfo(name, "cuda", asynchronous=True, memory_bytes=0, queue=0)


def _present(name: str) -> DeviceInfo | None:
    """What the GPU of this machine says of itself, if it goes by the name."""
    import torch

    for index in range(torch.cuda.device_count()):
        from latpred.calibration.devices.cuda import CudaDevice

        info = CudaDevice(index).info()
        if info.name == name:
            return info
    return None


def _header(journal: Path) -> Header:
    with journal.open("rb") as file:
        line = file.readline()
    try:
        return msgspec.json.decode(line, type=Header)
    except msgspec.MsgspecError as error:
        raise CalibrationError(f"{journal} does not say where it was measured. Calibrate again.") from error
