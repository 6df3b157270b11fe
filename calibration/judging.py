"""Judges a fitted profile on generated networks that no fit saw: how far off, how surely, and whether to trust it.

The spread of these errors is what the intervals of predictions rest on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from latpred.calibration.dispatchfit import NetworkRun
from latpred.landmarks import Z90
from latpred.predictor import Predictor
from latpred.profile import Acceptance, DeviceProfile
from latpred.units import MS_PER_S, US_PER_S

LEAST_SPREAD = 0.02
FEWEST = 5  # judges below which a gate cannot speak
MEDIAN_GATE, P90_GATE = 0.15, 0.40


class Verdict(NamedTuple):
    """One judge: its cell, predicted and measured latency, and the spread that the kernels alone give it."""

    cell: str
    predicted_us: float
    measured_us: float
    kernel_spread: float

    @property
    def log_error(self) -> float:
        """Natural logarithm of predicted over measured."""
        return math.log(self.predicted_us / self.measured_us)


def verdicts(profile: DeviceProfile, judges: Mapping[str, NetworkRun], runtime: str = "eager") -> list[Verdict]:
    """Predict every judge with a profile.

    Parameters
    ----------
    profile : DeviceProfile
        Its dispatch spread is left out of `Verdict.kernel_spread`.
    judges : mapping of cell keys to NetworkRun
        Networks that no fit saw, with their latency.
    runtime : str
        In which they ran.
    """
    # Not quite zero: then the predictor adds only what a kernel's spread exceeds its family's usual one by.
    bare = {name: msgspec.structs.replace(fit, spread=1e-9) for name, fit in profile.runtimes.items()}
    predictor = Predictor(msgspec.structs.replace(profile, runtimes=bare))
    found = []
    for key, run in judges.items():
        prediction = predictor.predict(run.graph, run.batch, runtime=runtime)
        low, high = prediction.interval_ms
        spread = math.log(high / low) / (2 * Z90)
        found.append(Verdict(key, prediction.latency_ms * US_PER_S / MS_PER_S, run.total_us, spread))
    return found


def median_error(found: Sequence[Verdict]) -> float:
    """Median absolute relative error; not a number without judges."""
    return float(np.median(np.abs(np.expm1([v.log_error for v in found])))) if found else math.nan


def network_spread(found: Sequence[Verdict]) -> float:
    """Standard deviation of the log error of networks that the kernels' own spread does not explain.

    Chosen so that nine in ten judges lie in their 90 % interval.
    """
    if not found:
        return 2 * LEAST_SPREAD
    low, high = LEAST_SPREAD, 1.0
    for _ in range(40):
        middle = math.sqrt(low * high)
        inside = np.mean([abs(v.log_error) <= Z90 * math.hypot(v.kernel_spread, middle) for v in found])
        low, high = (low, middle) if inside >= 0.9 else (middle, high)
    return round(high, 4)


def accepted(found: Sequence[Verdict], stable: float) -> Acceptance:
    """Whether a profile may be trusted.

    Parameters
    ----------
    found : sequence of Verdict
        The judges.
    stable : float
        Share of timings that were stable.
    """
    errors = np.abs(np.expm1([v.log_error for v in found])) if found else np.array([math.inf])
    median, p90 = float(np.median(errors)), float(np.quantile(errors, 0.9)) if found else math.inf
    gates = {
        f"median error of networks that no fit saw at most {MEDIAN_GATE:.0%}": (median, median <= MEDIAN_GATE),
        f"p90 error of networks that no fit saw at most {P90_GATE:.0%}": (p90, p90 <= P90_GATE),
        "timings that were stable at least 70%": (stable, stable >= 0.7),
    }
    checks = {name: f"{value:.1%}: {'passed' if passed else 'failed'}" for name, (value, passed) in gates.items()}
    enough = len(found) >= FEWEST
    checks[f"networks to judge by at least {FEWEST}"] = f"{len(found)}: {'passed' if enough else 'failed'}"
    failed = [name for name, (_, passed) in gates.items() if not passed]
    advice = _advice(bool(failed), enough)
    return Acceptance(passed=enough and not failed, checks=checks, advice=advice)


def with_runtime(known: Acceptance, runtime: str, found: Sequence[Verdict]) -> Acceptance:
    """A verdict with what another runtime's networks add to it.

    Parameters
    ----------
    known : Acceptance
        Of eager, and of what was added before.
    runtime : str
        Whose networks they are.
    found : sequence of Verdict
        Networks that its fit did not see; none where it has none to be judged by.
    """
    own = accepted(found, 1.0)
    checks = {f"{runtime}: {name}": said for name, said in own.checks.items() if not name.startswith("timings")}
    return _joined(known, runtime, checks, own.passed)


def without(known: Acceptance, runtime: str, reason: str) -> Acceptance:
    """A verdict that says why a runtime is not in the profile."""
    return _joined(known, runtime, {f"{runtime}: costs": f"{reason}: failed"}, False)


def _joined(known: Acceptance, runtime: str, checks: dict[str, str], passed: bool) -> Acceptance:
    others = {name: said for name, said in known.checks.items() if not name.startswith(f"{runtime}: ")}
    advice = [*known.advice]
    again = f"Calibrate {runtime} anew when nothing else runs: latpred calibrate --runtimes {runtime}"
    advice = [line for line in advice if line != again] + ([] if passed else [again])
    return msgspec.structs.replace(
        known, checks=others | checks, advice=tuple(advice), runtimes={**known.runtimes, runtime: passed}
    )


def _advice(failed: bool, enough: bool) -> tuple[str, ...]:
    advice = []
    if not enough:
        advice.append("Give the calibration more time: latpred calibrate --budget 5m")
    if failed:
        advice.append("Close other programs, let the machine cool down, and calibrate anew: latpred calibrate --fresh")
    return tuple(advice)
