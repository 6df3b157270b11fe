"""`calibrate`: measures a device, cell by cell within a time budget, and saves the profile that the cells amount to.

Which cells come when is `synchronous`' and `asynchronous`' business, how they are kept `session`'s, what they amount to
`fitting`'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from latpred import profiles
from latpred.calibration import fitting
from latpred.calibration.asynchronous import Asynchronous
from latpred.calibration.cells import Cell
from latpred.calibration.device import Device, open_device
from latpred.calibration.session import Row, Sampled, Session, directory
from latpred.calibration.synchronous import Synchronous
from latpred.errors import CalibrationError, LatpredError, UsageError
from latpred.profile import DeviceProfile

QUICK_S, FULL_S = 40.0, 300.0
LEAST_S = 5.0


class Progress(NamedTuple):
    """How far a calibration is.

    seconds, budget_s : spent and to spend, what was resumed included. cells : measured. label : the cell under way, or
    what is being done. error : median error on networks that no fit saw; None before the first fit.
    """

    seconds: float
    budget_s: float
    cells: int
    label: str
    error: float | None


class Campaign(Protocol):
    """What there is to measure on a kind of device, and how."""

    def cells(self, rows: Callable[[], Sequence[Row]]) -> Iterator[Cell]:
        """Cells in the order of their worth, without end; `rows` gives what was measured so far."""
        ...

    def measure(self, cell: Cell) -> Sampled:
        """Time one cell."""
        ...


def calibrate(
    device: str | Device = "cpu",
    *,
    quick: bool = False,
    budget_s: float | None = None,
    precisions: Sequence[str] | None = None,
    fresh: bool = False,
    name: str | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> DeviceProfile:
    """Measure a device and save its profile.

    A calibration that was interrupted goes on where it stopped.

    Parameters
    ----------
    device : str or Device
        "cpu", "cuda:0", "simulated", or an open device.
    quick : bool
        Under a minute, one precision, wider intervals.
    budget_s : float, optional
        Seconds to measure for, fitting included; default 40 for a quick calibration and 300 for a full one.
    precisions : sequence of str, optional
        Default: those the device does well; a quick calibration takes the first.
    fresh : bool
        Start anew even where there is something to resume.
    name : str, optional
        Of the profile; default: the device's name.
    progress : callable, optional
        Told before each cell.

    Returns
    -------
    DeviceProfile
        Saved, and found by `latpred.predict` from now on.

    Raises
    ------
    UsageError
        For a budget too short or a precision the device does not have.
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
    budget = budget_s if budget_s is not None else QUICK_S if quick else FULL_S
    if budget < LEAST_S:
        raise UsageError(f"a budget of {budget:g} s measures nothing. Give at least {LEAST_S:g} s, better 40.")
    chosen = _precisions(live, precisions, quick)
    kind = Asynchronous if live.asynchronous else Synchronous
    campaign: Campaign = kind(live, chosen)
    settings = {"precisions": chosen, "threads": torch.get_num_threads()}
    with torch.inference_mode(), Session(directory(live.name), live.machine(), settings, fresh=fresh) as session:
        _measure(campaign, session, budget, progress)
        profile = _fitted(live, session.rows, name or live.name, progress, budget)
        profiles.save(profile)
        session.complete()
    return profile


def _measure(
    campaign: Campaign, session: Session, budget_s: float, progress: Callable[[Progress], None] | None
) -> None:
    """Run cells until the budget is spent; seconds of resumed rows count as spent."""
    spent = sum(row.seconds for row in session.rows)
    start = time.monotonic()
    until = budget_s - fitting_seconds(budget_s)
    for cell in campaign.cells(lambda: session.rows):
        seconds = spent + time.monotonic() - start
        if seconds > until:
            return
        if progress is not None and not session.holds(cell):
            progress(Progress(seconds, budget_s, len(session.rows), cell.key, None))
        session.run(cell, campaign.measure)


def fitting_seconds(budget_s: float) -> float:
    """What is set aside for the last fit: it takes longer the more there is to fit."""
    return min(40.0, 0.2 * budget_s)


def _fitted(
    device: Device,
    rows: Sequence[Row],
    name: str,
    progress: Callable[[Progress], None] | None,
    budget_s: float,
) -> DeviceProfile:
    if progress is not None:
        progress(Progress(budget_s - fitting_seconds(budget_s), budget_s, len(rows), "fitting", None))
    try:
        return fitting.fit_profile(rows, device.machine(), device.info(), name)
    except LatpredError:
        raise
    except (ValueError, ArithmeticError) as error:
        raise CalibrationError(
            f"the measurements could not be fitted ({error}). Start anew: latpred calibrate --fresh"
        ) from error


def _precisions(device: Device, asked: Sequence[str] | None, quick: bool) -> tuple[str, ...]:
    offered = device.precisions()
    if asked is None:
        return offered[:1] if quick else offered
    unknown = [precision for precision in asked if precision not in offered]
    if unknown or not asked:
        raise UsageError(f"{device.name} does not do {', '.join(unknown) or 'nothing'}; it does {', '.join(offered)}.")
    return tuple(asked)
