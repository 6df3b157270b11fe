"""Judges a fitted profile on generated networks that no fit saw: how far off, how surely, and whether to trust it.

The spread of these errors is what the intervals of predictions rest on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from latpred.calibration.dispatchfit import NetworkRun
from latpred.calibration.session import Row
from latpred.calibration.suite import network_spec
from latpred.landmarks import Z90
from latpred.predictor import Predictor
from latpred.profile import Acceptance, DeviceProfile
from latpred.units import MS_PER_S, US_PER_S

LEAST_SPREAD = 0.02
FEWEST = 5  # judges below which a gate cannot speak
MEDIAN_GATE, P90_GATE = 0.15, 0.40
LEAST_STABLE = 0.70
MOST_DISTURBED = 0.25
MOST_SHIFT = 0.10
MOST_MISSING = 1 / 3


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
    # What an earlier gate found is no part of it either: it would widen the intervals.
    predictor = Predictor(msgspec.structs.replace(profile, runtimes=bare, acceptance=Acceptance(True, {}, ())))
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


class RunQuality(NamedTuple):
    """How a calibration went.

    stable : share of timings that were. disturbed : share of cells that never found a calm moment. shifts : second over
    first timing of what was timed twice. missing : kinds of cells of which too many could not be measured.
    """

    stable: float
    disturbed: float = 0.0
    shifts: Sequence[float] = ()
    missing: Sequence[str] = ()


def missing(rows: Iterable[Row]) -> list[str]:
    """Kinds of cells, holdout networks by themselves, of which more than `MOST_MISSING` could not be measured."""
    seen: dict[str, list[bool]] = {}
    for row in rows:
        network = row.cell.kind == "network"
        seen.setdefault(f"{row.cell.kind} {row.cell.name}" if network else row.cell.kind, []).append(bool(row.error))
        if network and network_spec(row.cell).judge:
            seen.setdefault("holdout networks", []).append(bool(row.error))
    return [name for name, failed in seen.items() if np.mean(failed) > MOST_MISSING]


def accepted(found: Sequence[Verdict], models: Sequence[Verdict], run: RunQuality) -> Acceptance:
    """Whether a profile may be trusted.

    Parameters
    ----------
    found, models : sequence of Verdict
        Holdout networks, and ordinary models, which decide where there are enough of them.
    run : RunQuality
        How the calibration went.
    """
    enough_models = len(models) >= FEWEST
    gates = _error_gates(*(("ordinary models", models) if enough_models else ("holdout networks", found)))
    gates["timings that were stable at least 70%"] = (run.stable, run.stable >= LEAST_STABLE)
    calm = run.disturbed <= MOST_DISTURBED
    gates[f"cells that other work disturbed at most {MOST_DISTURBED:.0%}"] = (run.disturbed, calm)
    if run.shifts:
        moved = float(np.median(np.abs(np.log(run.shifts))))
        gates[f"median shift between two timings at most {MOST_SHIFT:.0%}"] = (moved, moved <= MOST_SHIFT)
    checks = {name: f"{_share(value)}: {'passed' if passed else 'failed'}" for name, (value, passed) in gates.items()}
    if enough_models and found:
        checks["median error of holdout networks"] = f"{median_error(found):.1%}"
    enough = len(found) >= FEWEST
    checks[f"networks to judge by at least {FEWEST}"] = f"{len(found)}: {'passed' if enough else 'failed'}"
    if run.missing:
        checks["kinds of cells that could not be measured"] = f"{', '.join(run.missing)}: failed"
    failed = [name for name, (_, passed) in gates.items() if not passed]
    passed = enough and not failed and not run.missing
    return Acceptance(passed=passed, checks=checks, advice=_advice(bool(failed), enough, run))


def _share(value: float) -> str:
    return f"{value:.1%}" if math.isfinite(value) else "nothing to judge by"


def _error_gates(who: str, found: Sequence[Verdict]) -> dict[str, tuple[float, bool]]:
    """Median and p90 error, and whether each is small enough."""
    errors = np.abs(np.expm1([v.log_error for v in found])) if found else np.array([math.inf])
    median, p90 = float(np.median(errors)), float(np.quantile(errors, 0.9)) if found else math.inf
    return {
        f"median error of {who} that no fit saw at most {MEDIAN_GATE:.0%}": (median, median <= MEDIAN_GATE),
        f"p90 error of {who} that no fit saw at most {P90_GATE:.0%}": (p90, p90 <= P90_GATE),
    }


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
    own = accepted(found, (), RunQuality(1.0))
    checks = {
        f"{runtime}: {name}": said for name, said in own.checks.items() if not name.startswith(("timings", "cells"))
    }
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


def _advice(failed: bool, enough: bool, run: RunQuality) -> tuple[str, ...]:
    advice = []
    if run.disturbed > MOST_DISTURBED:
        advice.append(
            f"Other work disturbed {run.disturbed:.0%} of the cells until the end. Stop it, or wait until whoever "
            "shares the processors is done, and calibrate anew: latpred calibrate --fresh"
        )
    elif failed:
        advice.append("Close other programs, let the machine cool down, and calibrate anew: latpred calibrate --fresh")
    if not enough:
        advice.append("Give the calibration more time: latpred calibrate --budget 5m")
    return tuple(advice)
