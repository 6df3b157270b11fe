"""The first prediction on a machine that nobody calibrated: a quick calibration, once, for all processes.

`LATPRED_CALIBRATE=never` switches it off, and from Python naming a device does: then the error says how to calibrate.
Nothing here measures; `latpred.calibration` does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from latpred import home, host_activity, profiles
from latpred.errors import BusyError, CalibrationError, NoProfileError, UsageError
from latpred.storage import locked

if TYPE_CHECKING:
    from latpred.calibration.campaign import Progress

VARIABLE = "LATPRED_CALIBRATE"
CHOICES = ("quick", "never")
WAIT_S = 300.0  # several times what a quick calibration takes
_BUSY = (
    f"another process has been calibrating this machine for more than {WAIT_S / 60:.0f} minutes. "
    "Stop it, or calibrate once before starting many: latpred calibrate --quick"
)


def allowed() -> bool:
    """Whether a machine without a profile may be calibrated without being asked."""
    value = os.environ.get(VARIABLE, "").strip().lower() or CHOICES[0]
    if value not in CHOICES:
        raise UsageError(f"{VARIABLE}={value!r} is not known; set it to {' or '.join(CHOICES)}.")
    return value != "never"


def busy_note() -> str:
    """What to know before a calibration beside other work, part of a sentence; "" when the processors are free."""
    notes = host_activity.busy_notes(host_activity.usable_cores())
    if not notes:
        return ""
    return f"; other work keeps the processors busy ({', '.join(notes)}), so figures will be rough"


def calibrate_once(
    find: Callable[[], object] = profiles.find,
    calibrate: Callable[[], object] | None = None,
    say: Callable[[str], None] | None = None,
) -> None:
    """Calibrate this machine unless another process did so in the meantime.

    Processes that come second wait for the first: two calibrations at once would measure each other.
    """
    folder = home.data_dir() / "calibration"
    with ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(folder / "first.lock", _BUSY))
        except BusyError:
            (say or _say)("another process calibrates this machine for the first time; waiting for it")
            held.enter_context(locked(folder / "first.lock", _BUSY, WAIT_S))
        except OSError as error:
            raise CalibrationError(
                f"cannot keep a calibration in {folder}: {error.strerror or error}. "
                f"Make it writable, or choose another directory with {home.VARIABLE}=DIR."
            ) from None
        try:
            find()
        except NoProfileError:
            (calibrate or _calibrate)()


def _calibrate() -> None:
    from latpred.calibration import calibrate

    _say(
        f"no profile of this machine in {profiles.directory()}; calibrating its CPU now, once, in under a minute "
        f"(latpred calibrate is more exact and does a GPU; {VARIABLE}=never switches this off){busy_note()}"
    )
    profile = calibrate("cpu", quick=True, progress=_Quarters())
    _say(f"calibrated: {profiles.path(profile.name)}")


class _Quarters:
    """Says each time another quarter of a calibration is done."""

    def __init__(self) -> None:
        self._last = 0

    def __call__(self, at: Progress) -> None:
        quarter = min(3, int(4 * at.seconds / at.budget_s))
        if quarter > self._last:
            self._last = quarter
            _say(f"calibrating: {25 * quarter} %")


def _say(sentence: str) -> None:
    print(f"latpred: {sentence}", file=sys.stderr, flush=True)
