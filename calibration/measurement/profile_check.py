"""`check`: times a few cells of a profile again, in at most half a minute, and says whether the profile still holds.

Which cells, and what their times say, is `drift_test`'s business.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from latpred.accuracy.drift import Check
from latpred.calibration.devices import Device, conditions, open_device
from latpred.calibration.measurement import drift_test
from latpred.calibration.schedules import schedule_of
from latpred.calibration.session import Row, measured
from latpred.calibration.timing import disturbance, visits
from latpred.errors import CalibrationError, ProfileError, UsageError
from latpred.profile import store
from latpred.profile.document import ADAPTED, BENCHMARK, CUDNN, DeviceProfile
from latpred.profile.store import Owner, difference, owner
from latpred.progress import ProgressCounter, ProgressEvent
from latpred.sandbox.own_thread import without_modes

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
    parts = drift_test.drift([drift_test.ratios(checked, visits.at_one_speed(rows)) for rows in rounds])
    if not parts:
        raise CalibrationError(f"nothing of profile {checked.name!r} could be timed again: {_reason(rounds)}.")
    activity = watch.lap()
    return Check(
        profile=checked.name,
        created=checked.created,
        parts=tuple(parts),
        changes=tuple(store.mismatch(checked, live.machine())),
        busy=round((activity.others or 0.0) + (activity.stolen or 0.0), 2),
        seconds=round(time.monotonic() - start, 1),
    )


def timed_again(
    profile: DeviceProfile, live: Device, budget_s: float, progress: Callable[[ProgressEvent], None] | None = None
) -> list[list[Row]]:
    """The profile's probe cells, timed in rounds under the conditions of its calibration."""
    cells = drift_test.probe_cells(profile)
    threads = profile.machine.threads if profile.device.kind == "cpu" else None
    options = conditions.Options(threads, profile.protocol.get(CUDNN) == BENCHMARK)
    rounds: list[list[Row]] = []
    pace = ProgressCounter("", ROUNDS * len(cells), progress, budget_s=budget_s)
    with conditions.stated(options.checked(live.info().kind)):
        schedule = schedule_of(live, tuple(profile.kernels))
        for number in range(ROUNDS):
            rounds.append([])
            for cell in random.Random(number).sample(cells, len(cells)):
                if not pace.next(cell.key):
                    return rounds
                rounds[-1].append(measured(cell, schedule.measure))
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
