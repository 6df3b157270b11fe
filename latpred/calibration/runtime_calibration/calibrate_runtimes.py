"""Which runtimes can be had, and each one's cells measured within its share of the budget, and fitted, after eager."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import filterfalse

import msgspec

from latpred import runtimes
from latpred.calibration.devices import Device
from latpred.calibration.fitting import acceptance, profile_fit
from latpred.calibration.fitting.acceptance import HoldoutError
from latpred.calibration.runtime_calibration import network_fit
from latpred.calibration.runtime_calibration.base import RuntimeCalibrator
from latpred.calibration.session import MISSING, Row, Session, failure_of
from latpred.calibration.timing.visits import Tell, Visits, failures, most_failed, spoilt, undisturbed
from latpred.errors import DeviceError, LatpredError, MissingPackageError, ProfileError, UsageError
from latpred.profile import store
from latpred.profile.document import UPGRADE, DeviceProfile, DispatchFit
from latpred.runtimes.lowering import demand_suited, lacking, target_of, unsuited

EAGER = profile_fit.EAGER
ALL = "all"
FITTING_SHARE = 0.1  # of a runtime's time, set aside for tracing networks again and fitting
MOST_FAILURES = 12  # networks or graphs that fail before any succeeds, after which there are no more cells


def offered(device: Device) -> tuple[list[str], dict[str, str]]:
    """The built-in runtimes that can be calibrated on a device, and for each of the others why not."""
    reasons = {name: hindrance(name, device) for name in runtimes.built_in()}
    able = [name for name, reason in reasons.items() if reason is None]
    return able, {name: reason for name, reason in reasons.items() if reason is not None}


def hindrance(name: str, device: Device) -> str | None:
    """Why a runtime cannot be calibrated on a device; None where it can.

    The simulated device runs graphs, so nothing that only real models need has to be there.
    """
    kind = device.info().kind
    runtime = runtimes.get(name)
    reason = unsuited(name, target_of(kind))
    if reason is None and kind == "simulated":
        real = getattr(runtime, "predicted_only", False) or not hasattr(runtime, "needs")
        return runtime.available() if real else None
    return reason or lacking(name, target_of(kind))


def named(wanted: str | Sequence[str], device: Device) -> tuple[str, ...]:
    """Names of runtimes, each once, eager among them where it was asked for; an error for one that cannot be had."""
    if wanted == ALL:
        return tuple(offered(device)[0])
    names = tuple(dict.fromkeys((wanted,) if isinstance(wanted, str) else wanted))
    if not names:
        raise UsageError(f"no runtime is named. Give one or more of {', '.join(runtimes.names())}, or {ALL}.")
    for name in names:
        demand_suited(name, target_of(device.info().kind))
        reason = hindrance(name, device)
        if reason is not None:
            raise MissingPackageError(f"{name} cannot be calibrated here: {reason}")
    return names


def kept(
    name: str, device: Device, protocol: Mapping[str, str], precisions: Sequence[str] = ()
) -> DeviceProfile | None:
    """The finished profile of a name, where it is of this device, machine and stack, and its protocol says the same."""
    try:
        profile = store.load(store.file_of(name))
    except ProfileError as error:
        if UPGRADE in str(error):  # what a newer latpred measured is not replaced without a word
            raise ProfileError(f"{error}, or choose another --name, or replace it with --fresh.") from None
        return None
    machine, info = device.machine(), device.info()
    same_device = (profile.device.kind, profile.device.name) == (info.kind, info.name)
    same_stack = store.same_machine(profile.machine, machine) and not store.mismatch(profile.machine, machine)
    finished = EAGER in profile.runtimes and profile.kernels.keys() >= set(precisions)
    same_protocol = protocol.items() <= profile.protocol.items()
    return profile if same_device and same_stack and finished and same_protocol else None


@dataclass
class RuntimeSession:
    """Runtimes measured in a session, on top of a device's profile; the most important precision comes first.

    `goes_on` says whether one that spent so much of its time may go on, with so many networks to judge by.
    """

    session: Session
    precisions: tuple[str, ...]
    goes_on: Callable[[float, int], bool] = lambda *_: False

    def add(
        self, profile: DeviceProfile, calibrator: RuntimeCalibrator, seconds: float, cells: float, tell: Tell
    ) -> DeviceProfile:
        """The profile with one more runtime, measured until its seconds, unless it goes on, or cells are spent.

        A runtime that cannot be fitted leaves the profile as it is, whose gate then says why.
        """
        runtime = calibrator.runtime
        visits = Visits(self.session, calibrator.device, runtime, calibrator.measure, seconds, tell)
        self._measure(calibrator, visits, seconds, cells)
        visits.tell(f"fitting {runtime}")
        kept = {reason: count for reason, count in profile.failures.items() if not reason.startswith(f"{runtime}: ")}
        mine = {f"{runtime}: {reason}": count for reason, count in failures(visits.rows).items()}
        spent_s = round(visits.seconds, 1)
        profile = msgspec.structs.replace(profile, seconds=profile.seconds + spent_s, failures=kept | mine)
        try:
            rows = network_fit.at_profile_speed([row for row in visits.rows if not row.error], profile)
            fit, errors = fit_with_spread(calibrator, rows, profile)
        except DeviceError:
            raise
        except Exception as error:
            # One runtime that cannot be fitted, for whatever reason, must not end the calibration of others.
            failed = _only_failures(visits.rows)
            said = str(error) if isinstance(error, LatpredError) else failure_of(error)
            reason = failed[0].error if failed else most_failed(visits.rows) + said
            return msgspec.structs.replace(profile, acceptance=acceptance.without(profile, runtime, reason))
        others = [sample for sample in profile.samples if sample.cell.split("/")[1] != runtime]
        return msgspec.structs.replace(
            profile,
            runtimes={**profile.runtimes, runtime: fit},
            samples=(*others, *(profile_fit.sample_of(row) for row in rows)),
            acceptance=acceptance.with_runtime(profile, runtime, errors, spoilt(rows), spent_s),
        )

    def _measure(self, calibrator: RuntimeCalibrator, visits: Visits, seconds: float, cells: float) -> None:
        """Time cells until the time is spent, most of them in the first precision."""
        for cell in filterfalse(self.session.holds, calibrator.cells_in(self.precisions)):
            rows = visits.rows
            failing = len(_only_failures(rows)) >= MOST_FAILURES
            spent = visits.seconds / ((1 - FITTING_SHARE) * seconds)
            over = spent >= 1.0 and not self.goes_on(spent, _judged(rows))
            if failing or over or len(rows) >= cells:
                break
            if visits.run(cell).error.startswith(MISSING):  # which each further cell would find out anew
                break
        visits.finish()


def _only_failures(rows: Sequence[Row]) -> list[Row]:
    """The networks and graphs of a runtime, where it ran none; nothing where it ran any.

    Chains of replayed kernels, which belong to the clock, run where no network does.
    """
    run = [row for row in rows if row.cell.kind != "clock"]
    return run if all(row.error for row in run) else []


def _judged(rows: Sequence[Row]) -> int:
    """How many networks a runtime can be judged by so far."""
    good = undisturbed(row for row in rows if not row.error)
    return acceptance.judges(row.cell.key for row in good if network_fit.is_holdout(row))


def fit_with_spread(
    calibrator: RuntimeCalibrator, rows: Sequence[Row], profile: DeviceProfile
) -> tuple[DispatchFit, list[HoldoutError]]:
    """A runtime's costs, with the spread of networks that no fit saw, and the errors on holdouts.

    Where those are too few to tell, the spread is no narrower than eager's.
    """
    fit = calibrator.fit(rows, profile)
    by_folds = calibrator.errors_by_folds(rows, profile)
    holdouts = [row for row in rows if network_fit.is_holdout(row)]
    errors = network_fit.errors_of_fit(fit, holdouts, profile, calibrator.runtime)
    unseen = [*errors, *by_folds]
    spread = acceptance.network_spread(unseen) if unseen else fit.spread
    least = profile.runtimes[EAGER].spread if len(unseen) < acceptance.FEWEST else 0.0
    return msgspec.structs.replace(fit, spread=max(spread, least)), errors
