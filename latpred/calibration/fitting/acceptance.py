"""Whether a fitted profile may be trusted: its errors on generated networks and ordinary models that no fit saw.

The spread of these errors is what the intervals of predictions rest on. The second half says which networks and models
are timed for it, and when predictions have settled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from latpred.calibration.cells import Cell
from latpred.calibration.devices import Device
from latpred.calibration.fitting.dispatch_fit import TimedNetwork
from latpred.calibration.schedules import cell_graph, network_spec
from latpred.calibration.session import Row
from latpred.calibration.timing import timer
from latpred.calibration.timing.reference_speed import gauge_on
from latpred.calibration.workloads import suites
from latpred.calibration.workloads.suites import Workload
from latpred.errors import LatpredError
from latpred.graph.features import Floats
from latpred.prediction.clocks import Z90
from latpred.prediction.predictor import Predictor
from latpred.profile import store
from latpred.profile.document import UNSURE, Acceptance, DeviceProfile
from latpred.units import MS_PER_S, US_PER_S

LEAST_SPREAD = 0.02
INTERVAL = 0.9  # share of predictions that Z90 is of, and how certain a limit is
FEWEST = 5  # networks below which a gate cannot speak
# Networks that a fit rests on: of 45, predictions came out a quarter off where the gate passed, of 80 by 4 %.
FEWEST_SEEN = 70
ENOUGH = 16  # networks to judge by for which a runtime's calibration goes on: as many as the gate has models
MEDIAN_GATE, P90_GATE = 0.15, 0.40
LEAST_STABLE = 0.70
MOST_DISTURBED = 0.25
MOST_APART = 0.5  # up to 36 % took nothing from what two threads predict; 57 % did
MOST_SHIFT = 0.10
MOST_MISSING = 1 / 3


class HoldoutError(NamedTuple):
    """One network that no fit saw: its cell, its predicted and measured latency, the spread that kernels alone give.

    guessed : whether the times of some of its kernels are guesses.
    """

    cell: str
    predicted_us: float
    measured_us: float
    kernel_spread: float
    guessed: bool = False

    @property
    def log_error(self) -> float:
        """Natural logarithm of predicted over measured."""
        return math.log(self.predicted_us / self.measured_us)


def holdout_errors(
    profile: DeviceProfile, runs: Mapping[str, TimedNetwork], runtime: str = "eager"
) -> list[HoldoutError]:
    """Errors of a profile, whose own spread is left out, on networks that no fit saw; by the keys of their cells."""
    # Not quite zero: then the predictor adds only what a kernel's spread exceeds its family's usual one by.
    bare = {name: msgspec.structs.replace(fit, spread=1e-9) for name, fit in profile.runtimes.items()}
    # What an earlier gate found is no part of it either: it would widen the intervals.
    bare_profile = msgspec.structs.replace(profile, runtimes=bare, acceptance=Acceptance(True, {}, ()))
    predictor = Predictor(bare_profile)
    errors = []
    for key, run in runs.items():
        slower = predictor.at(run.slowdown)
        prediction = slower.predict(run.graph, run.batch, runtime=runtime)
        _, priced, *_ = slower.priced(run.graph, run.batch, runtime=runtime)
        low, high = prediction.interval_ms
        spread = math.log(high / low) / (2 * Z90)
        us = prediction.latency_ms * US_PER_S / MS_PER_S
        guessed = bool(priced.unmeasured or priced.estimated)
        errors.append(HoldoutError(key, us, run.total_us, spread, guessed))
    return errors


def median_error(errors: Sequence[HoldoutError]) -> float:
    """Median absolute relative error; not a number where there are none."""
    return float(np.median(_relative_errors(errors))) if errors else math.nan


def _relative_errors(errors: Sequence[HoldoutError]) -> Floats:
    relative: Floats = np.abs(np.expm1([error.log_error for error in errors]))
    return relative


def judges(cells: Iterable[str]) -> int:
    """How many networks cells are of, by their keys: a model counts once, whatever batches it was timed at."""
    return len({key.rpartition("/")[0] if key.startswith("model/") else key for key in cells})


def _median_limit(errors: Sequence[HoldoutError]) -> float:
    """What the median error of all networks like these is at most, nine times in ten; infinite where too few tell.

    References
    ----------
    Thompson, "On confidence ranges for the median", 1936: of n networks fewer than k are better than the median with
    the probability that n coins show fewer than k heads.
    """
    networks, relative = judges(error.cell for error in errors), np.sort(_relative_errors(errors))
    heads = np.cumsum([math.comb(networks, count) for count in range(networks)]) / 2.0**networks
    certain = np.flatnonzero(heads >= INTERVAL)
    return float(relative[-(-(certain[0] + 1) * len(relative) // networks) - 1]) if len(certain) else math.inf


def network_spread(errors: Sequence[HoldoutError]) -> float:
    """Standard deviation of the log error of networks that the kernels' own spread does not explain.

    Chosen so that nine in ten of networks like them lie in their 90 % interval; of few, more of these have to. Networks
    that hang on guesses say nothing of kernels that were measured, and are left out where enough others are there.

    References
    ----------
    Vovk, Gammerman and Shafer, "Algorithmic Learning in a Random World", 2005: one more of n + 1 that are alike lies
    among the first k with a probability of k / (n + 1).
    """
    if not errors:
        return 2 * LEAST_SPREAD
    known = [error for error in errors if not (error.guessed and error.kernel_spread > LEAST_SPREAD)]
    errors = known if len(known) >= FEWEST else errors
    share = min(INTERVAL * (len(errors) + 1) / len(errors), 1.0)
    needed = [math.sqrt(max((error.log_error / Z90) ** 2 - error.kernel_spread**2, 0.0)) for error in errors]
    covered = np.arange(1, len(errors) + 1) / len(errors)  # by what each needs, the least first
    spread = sorted(needed)[int(np.argmax(covered >= share))]
    return round(min(max(spread, LEAST_SPREAD), 1.0), 4)


def missing(rows: Iterable[Row]) -> list[str]:
    """Kinds of cells, holdout networks by themselves, of which more than `MOST_MISSING` could not be measured.

    Of memory each way in which it is moved is a kind: what none of the others tells is then not known.
    """
    failures: dict[str, list[bool]] = {}
    for row in rows:
        network = row.cell.kind == "network"
        kind = f"{row.cell.kind} {row.cell.name}" if network or row.cell.kind == "memory" else row.cell.kind
        failures.setdefault(kind, []).append(bool(row.error))
        if network and network_spec(row.cell).holdout:
            failures.setdefault("holdout networks", []).append(bool(row.error))
    return [kind for kind, failed in failures.items() if np.mean(failed) > MOST_MISSING]


def accepted(
    networks: Sequence[HoldoutError],
    models: Sequence[HoldoutError],
    *,
    stable: float = 1.0,
    disturbed: float = 0.0,
    apart: float = 0.0,
    spoilt: float = 0.0,
    shifts: Sequence[float] = (),
    missing: Sequence[str] = (),
    seen: int | None = None,
    seconds: float = 0.0,
    command: str = "latpred calibrate",
) -> Acceptance:
    """Whether a profile may be trusted; ordinary models decide where there are enough of them, else networks.

    stable : share of timings that were. disturbed : share of cells that never found a calm moment. apart : share of
    cells that only found moments in which the host had moved the processors apart. spoilt : share of both among the
    cells that the fit took, which leaves them out where enough others are there. shifts : second over first timing of
    what was timed twice, at equal speed. missing : kinds of cells of which too many could not be measured. seen : how
    many networks the fit rests on, where it rests on networks. seconds : what measuring took. command : what measures
    the profile again.
    """
    enough_models = judges(error.cell for error in models) >= FEWEST
    who, judged = ("ordinary models", models) if enough_models else ("holdout networks", networks)
    median = median_error(judged)
    p90 = float(np.quantile(_relative_errors(judged), 0.9)) if judged else math.nan
    gates = {
        f"median error of {who} that no fit saw at most {MEDIAN_GATE:.0%}": (median, median <= MEDIAN_GATE),
        f"p90 error of {who} that no fit saw at most {P90_GATE:.0%}": (p90, p90 <= P90_GATE),
        f"timings that were stable at least {LEAST_STABLE:.0%}": (stable, stable >= LEAST_STABLE),
        f"cells that other work disturbed at most {MOST_DISTURBED:.0%}": (disturbed, disturbed <= MOST_DISTURBED),
    }
    if shifts:
        moved = float(np.median(np.abs(np.log(shifts))))
        name = f"median shift between two timings, at equal speed, at most {MOST_SHIFT:.0%}"
        gates[name] = (moved, moved <= MOST_SHIFT)
    if apart:
        together = apart <= MOST_APART
        gates[f"cells while the host had moved the processors apart at most {MOST_APART:.0%}"] = (apart, together)
    if spoilt:
        gates["fitted cells that were disturbed or of processors apart at most 0%"] = (spoilt, False)
    checks = {name: f"{_share(value)}: {_verdict(passed)}" for name, (value, passed) in gates.items()}
    if enough_models and networks:
        checks["median error of holdout networks"] = f"{median_error(networks):.1%}"
    number, limit = judges(error.cell for error in judged), _median_limit(judged)
    counts = {f"networks to judge by at least {FEWEST}": (number, FEWEST)}
    if seen is not None:
        counts[f"networks to learn from at least {FEWEST_SEEN}"] = seen, FEWEST_SEEN
    checks |= {name: f"{count}: {_verdict(count >= least)}" for name, (count, least) in counts.items()}
    if missing:
        checks["kinds of cells that could not be measured"] = f"{', '.join(missing)}: failed"
    good = all(passed for _, passed in gates.values())
    enough = all(count >= least for count, least in counts.values())
    passed = good and enough and not missing
    if passed and limit > MEDIAN_GATE:
        checks[UNSURE] = f"judged by {number} networks, the median error of others may be up to {limit:.1%}"
    more_would_tell = UNSURE in checks and number < ENOUGH
    advice = _advice(good, enough and not more_would_tell, missing, disturbed, apart, command, seconds)
    return Acceptance(passed=passed, checks=checks, advice=advice)


def _verdict(passed: bool) -> str:
    return "passed" if passed else "failed"


def _share(value: float) -> str:
    return f"{value:.1%}" if math.isfinite(value) else "nothing to judge by"


def with_runtime(
    profile: DeviceProfile, runtime: str, errors: Sequence[HoldoutError], spoilt: float = 0.0, seconds: float = 0.0
) -> Acceptance:
    """A profile's verdict with another runtime's added, by errors on networks and models that its fit did not see."""
    models = [error for error in errors if error.cell.startswith("model/")]
    mine = accepted([error for error in errors if error not in models], models, spoilt=spoilt)
    checks = {name: said for name, said in mine.checks.items() if not name.startswith(("timings", "cells"))}
    number = judges(error.cell for error in models)
    number = number if number >= FEWEST else judges(error.cell for error in errors if error not in models)
    few = number < (ENOUGH if UNSURE in checks else FEWEST)
    return _joined(profile, runtime, checks, mine.passed, f" --budget {more_time(seconds)}" * few)


def without(profile: DeviceProfile, runtime: str, reason: str) -> Acceptance:
    """A profile's verdict with the reason why a runtime could not be fitted; what the profile has of it stays."""
    if runtime in profile.runtimes:
        reason = f"{reason.rstrip('.')}; the profile keeps those of an earlier calibration"
    return _joined(profile, runtime, {"costs": f"{reason}: failed"}, False)


def _joined(profile: DeviceProfile, runtime: str, checks: dict[str, str], passed: bool, budget: str = "") -> Acceptance:
    prefix, others = f"{runtime}: ", profile.acceptance
    kept = {name: said for name, said in others.checks.items() if not name.startswith(prefix)}
    again = f"Calibrate {runtime} anew when nothing else runs: "
    advice = [line for line in others.advice if not line.startswith(again)]
    if budget or not passed:
        advice.append(f"{again}{store.calibration(profile)} --runtimes {runtime}{budget}")
    return msgspec.structs.replace(
        others,
        checks=kept | {f"{prefix}{name}": said for name, said in checks.items()},
        advice=tuple(advice),
        runtimes={**others.runtimes, runtime: passed},
    )


def _advice(
    good: bool, enough: bool, missing: Sequence[str], disturbed: float, apart: float, command: str, seconds: float
) -> tuple[str, ...]:
    advice = []
    if missing:
        advice.append(
            f"Mend what kept cells from being measured ({', '.join(missing)}): latpred profiles show NAME has the "
            f"reasons under failed. Then calibrate anew: {command} --fresh"
        )
    if disturbed > MOST_DISTURBED:
        advice.append(
            f"Other work disturbed {disturbed:.0%} of the cells until the end. Stop it, or wait until whoever "
            f"shares the processors is done, and calibrate anew: {command} --fresh"
        )
    elif apart > MOST_APART:
        advice.append(
            f"The host had moved the processors apart for {apart:.0%} of the cells, so that threads met later than "
            f"at other times. Calibrate anew: {command} --fresh, or a profile of one thread: latpred calibrate "
            "--device cpu --threads 1"
        )
    elif not good:
        advice.append(f"Close other programs, let the machine cool down, and calibrate anew: {command} --fresh")
    if not enough:
        advice.append(f"Give the calibration more time: {command} --budget {more_time(seconds)}")
    return tuple(advice)


def more_time(seconds: float) -> str:
    """A budget for a calibration that had too little time with so many seconds, as the command line takes it.

    >>> more_time(50.0), more_time(570.0)
    ('5m', '19m')
    """
    return f"{max(5, math.ceil(2 * seconds / 60))}m"


AGAIN = "again"  # a dimension of cells that are timed for the second time
HOLDOUTS_AGAIN = 20
# Shares by which predictions may still move, in the median and at p90, when more cells would tell nothing new.
SETTLED = 0.01, 0.03
VISIT = timer.Plan(least=3, most=60, precision=0.005, budget_s=0.15, warmup_s=0.1)


def cells(rows: Sequence[Row], precision: str) -> Iterator[Cell]:
    """Ordinary models, the models again, and holdout networks again: what matters most comes first."""
    yield from models(precision)
    yield from map(again, models(precision))
    yield from _holdouts_again(rows, precision)


def models(precision: str) -> list[Cell]:
    """Ordinary models, each at every batch size of their suite."""
    suite = suites.get(suites.GATE)
    return [model_cell(workload, batch, precision) for batch in suite.batches for workload in suite.ready]


def model_cell(workload: Workload, batch: int, precision: str, runtime: str = "eager") -> Cell:
    return Cell("model", workload.name, {"batch": batch}, precision, runtime)


def again(cell: Cell) -> Cell:
    """The same cell, to be timed a second time."""
    return msgspec.structs.replace(cell, dims={**cell.dims, AGAIN: 1})


def _holdouts_again(rows: Sequence[Row], precision: str) -> Iterator[Cell]:
    """Some of the holdout networks that were timed, kinds in turn."""
    by_kind: dict[str, list[Cell]] = {}
    for row in rows:
        cell = row.cell
        mine = cell.kind == "network" and cell.precision == precision and AGAIN not in cell.dims
        if mine and not row.error and network_spec(cell).holdout:
            by_kind.setdefault(cell.name, []).append(cell)
    each = -(-HOLDOUTS_AGAIN // max(len(by_kind), 1))
    for number in range(each):
        yield from (again(kind[number]) for kind in by_kind.values() if number < len(kind))


def measure(cell: Cell, device: Device) -> Row:
    """Time an ordinary model whole, called again and again."""
    cell_graph(cell, device.info().kind)  # one without a trace is no use to the gate
    device.use_precision(cell.precision)  # the cell before may have been in another
    with device.errors():
        model, inputs = suites.gate_model(cell.name).make(device.name, cell.precision)
        call = device.prepare_model(model, inputs(cell.dims["batch"], device.name), cell.runtime)
    gauge = gauge_on(device.info().kind, cell.runtime)
    return Row(cell, {"single": timer.single(device, call, VISIT, gauge)})


def shift(rows: Iterable[Row], errors: Iterable[HoldoutError]) -> list[float]:
    """Ratio of the second to the first timing of each cell that was timed twice, over the ratio that is predicted.

    Each is predicted at the speed that the machine had then, so a slower moment that its references saw is no shift.
    """
    pairs = [timed for timed in _by_cell(rows, errors).values() if len(timed) == 2]
    return [math.exp(first.log_error - second.log_error) for first, second in pairs]


def averaged(rows: Iterable[Row], errors: Iterable[HoldoutError]) -> list[HoldoutError]:
    """One error for each cell; of one that was timed twice the mean, since one minute differs from the next."""
    means = []
    for cell, timed in _by_cell(rows, errors).items():
        log_us = np.log([(one.predicted_us, one.measured_us) for one in timed])
        predicted_us, measured_us = np.exp(log_us.mean(axis=0)).tolist()
        means.append(timed[0]._replace(cell=cell, predicted_us=predicted_us, measured_us=measured_us))
    return means


def _by_cell(rows: Iterable[Row], errors: Iterable[HoldoutError]) -> dict[str, list[HoldoutError]]:
    """Errors by the cell that they are of, the first timing before the second."""
    firsts = {again(row.cell).key: row.cell.key for row in rows if AGAIN not in row.cell.dims}
    by_cell: dict[str, list[HoldoutError]] = {}
    for error in sorted(errors, key=lambda one: one.cell in firsts):
        by_cell.setdefault(firsts.get(error.cell, error.cell), []).append(error)
    return by_cell


def predictions(profile: DeviceProfile, precision: str) -> Floats:
    """Latencies of the ordinary models, in milliseconds; no number where the profile knows too little."""
    predictor, suite = Predictor(profile), suites.get(suites.GATE)
    latencies: list[float] = []
    for workload in suite.ready:
        try:
            graph, _ = cell_graph(model_cell(workload, 1, precision), profile.device.kind)
            points = predictor.curve(graph, suite.batches).points
            latencies += [point.latency_ms for point in points]
        except LatpredError:
            latencies += [math.nan] * len(suite.batches)
    return np.array(latencies)


def settled(before: Floats, now: Floats) -> bool:
    """Whether predictions have moved by next to nothing; one without a number settles nothing."""
    moved = np.abs(np.log(now / before))
    return bool(np.median(moved) <= SETTLED[0] and np.quantile(moved, 0.9) <= SETTLED[1])
