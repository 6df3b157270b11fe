"""What a calibration's acceptance gate says of how wrong predictions may be, as the least spread of their intervals.

A gate that failed found errors beyond what a profile should have. They are known, so intervals have to hold them.
"""

from __future__ import annotations

import math
import re

from latpred.landmarks import Z90
from latpred.profile import DeviceProfile

UNJUDGED_SPREAD = math.log(10.0) / Z90  # nothing says how wrong a profile is: a factor of ten either way
_MEDIAN_OF_NORMAL = 0.6745  # median of the absolute value of a standard normal variable
_FOUND = re.compile(r"([\d.]+|inf|nan)%: (passed|failed)")
_MOST_LOW = 0.99  # a prediction that is 100 % too low is none


def least_spread(profile: DeviceProfile, runtime: str) -> float:
    """Standard deviation of the log error that the gate found, where it failed; 0 where it passed or there is none.

    Only measured profiles have such a gate. Fits of published tables and datasheets state their own spreads.
    """
    gate = profile.acceptance
    if profile.provenance != "measured" or (gate.passed and gate.runtimes.get(runtime, True)):
        return 0.0
    prefix = f"{runtime}: "
    own = {name.removeprefix(prefix): said for name, said in gate.checks.items() if name.startswith(prefix)}
    judged = [own] if own else []
    if not gate.passed or not own:  # what is wrong with the device's kernels is wrong in every runtime
        judged.append(gate.checks)
    return max(map(_spread, judged))


def _spread(checks: dict[str, str]) -> float:
    errors = _values(checks, "p90 error of ")
    shifts = _values(checks, "median shift between two timings", failed=True)
    if not errors or not all(map(math.isfinite, errors)):
        return UNJUDGED_SPREAD
    # A relative error may be of either sign: 50 % is up to a factor of two.
    error = max(errors)
    log_error = max(math.log1p(error), -math.log1p(-min(error, _MOST_LOW)) if error < 1 else 0.0)
    return math.hypot(log_error / Z90, max(shifts, default=0.0) / _MEDIAN_OF_NORMAL)


def _values(checks: dict[str, str], start: str, *, failed: bool = False) -> list[float]:
    """Shares that checks of a name found."""
    found = [_FOUND.match(said) for name, said in checks.items() if name.startswith(start)]
    return [float(match[1]) / 100 for match in found if match and (match[2] == "failed" or not failed)]
