"""Validate a profile: measure a suite of whole models that no fit has seen, or replay a recording, and compare.

Only puts the pieces together: `whole_models` measures, `accuracy.predicted` predicts, `accuracy.comparison` judges.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import pandas as pd

from latpred import host, tables
from latpred.accuracy.comparison import Report, compare
from latpred.accuracy.predicted import predict_table
from latpred.accuracy.recording import Recording, load
from latpred.calibration.devices import conditions, open_device
from latpred.calibration.measurement.bench import Bench, demand_runtime
from latpred.calibration.measurement.timed_baselines import BASELINES, with_baselines
from latpred.calibration.measurement.whole_models import REPEATS, measure
from latpred.calibration.workloads import suites
from latpred.errors import UsageError
from latpred.prediction.predictor import Predictor
from latpred.profile import store
from latpred.profile.document import DeviceProfile
from latpred.progress import ProgressCounter, ProgressEvent
from latpred.runtimes.lowering import target_of

MEASURED_SHARE = 0.75  # of the budget; the rest is for baselines that need the device


def validate(
    device: str = "cpu",
    *,
    profile: DeviceProfile | None = None,
    suite: str = "cpu",
    runtimes: Sequence[str] = ("eager",),
    batches: Sequence[int] | None = None,
    precision: str = "fp32",
    protocol: str = "single",
    repeats: int = REPEATS,
    threads: int | None = None,
    rivals: Sequence[str] = tuple(BASELINES),
    replay: Recording | str | os.PathLike[str] | None = None,
    record: str | os.PathLike[str] | None = None,
    budget_s: float | None = None,
    progress: Callable[[ProgressEvent], None] | None = None,
) -> Report:
    """Hold a profile's predictions against whole models measured here, or against a recording.

    Parameters
    ----------
    device : str
        "cpu", "cuda:0" or "simulated"; with `replay`, what finds the profile.
    profile : DeviceProfile, optional
        What to predict with; by default the one `latpred.profile.store.find` finds for the device.
    suite : str
        Name of a suite (`latpred.calibration.workloads.suites`).
    runtimes : sequence of str
        Runtimes to measure in.
    batches : sequence of int, optional
        Batch sizes in place of the suite's own.
    precision, protocol : str
        Of all cells.
    repeats : int
        Rounds of measurement.
    threads : int, optional
        Threads that an op may use on the CPU; the profile has to be of as many.
    rivals : sequence of str
        Baselines that need the device: "isolated_ops", "runtime_estimator".
    replay : Recording, str or path, optional
        A recording, its folder, or the name of a shipped one: nothing is measured then.
    record : path, optional
        Folder to keep what was measured in, to be replayed later.
    budget_s : float, optional
        Seconds after which no visit starts.
    progress : callable, optional
        Told before each visit.

    Raises
    ------
    ProfileError
        When there is no profile for the device, or it does not cover a runtime or the precision.
    UsageError
        For an unknown suite, runtime or baseline, or a replay that is also to be recorded.
    RecordingError
        When the recording is not usable.
    """
    if replay is not None and record is not None:
        raise UsageError("A replay measures nothing that could be recorded. Give replay or record, not both.")
    device_profile = profile or store.find(device, threads=threads)
    if replay is not None:
        return (replay if isinstance(replay, Recording) else load(replay)).replay(device_profile)
    chosen = suites.get(suite)
    workloads = chosen.workloads()
    live, predictor = open_device(device), Predictor(device_profile)
    for runtime in runtimes:
        demand_runtime(runtime, live)
        predictor.check(runtime, precision)  # said before minutes are spent on measuring
    table = measure(
        workloads,
        batches or chosen.batches,
        runtime=runtimes,
        device=live,
        protocol=protocol,
        repeats=repeats,
        threads=threads,
        precision=precision,
        budget_s=None if budget_s is None else MEASURED_SHARE * budget_s,
        progress=progress,
    )
    left_s = None if budget_s is None else (1 - MEASURED_SHARE) * budget_s
    pace = ProgressCounter("", len(table) * len(rivals), progress, budget_s=left_s)
    with conditions.stated(conditions.Options(threads)):
        table, reasons = with_baselines(table, workloads, Bench(live), rivals, pace.next)
        notes = [f"Measured now: {said}." for said in store.mismatch(device_profile, live.machine())]
        ratios = host.ratio(device_profile.speed, tables.speed_of(table))
        notes += [f"Speed of the machine, as times over the profile's: {host.sentence(ratios)}."] if ratios else []
    target = target_of(device_profile.device.kind)
    graphs = {
        workload.key(precision, runtime): workload.trace(precision, runtime, target)
        for runtime in runtimes
        for workload in workloads
    }
    if record is not None:
        Recording(f"{suite}-{device_profile.name}", _about(suite, table), table, graphs, reasons=reasons).save(record)
    return compare(predict_table(table, graphs, device_profile), table, reasons=reasons, notes=notes)


def _about(suite: str, table: pd.DataFrame) -> str:
    first = table.iloc[0]
    return f"suite {suite} on {first['device']} ({first['machine']}), {first['stack']}, run {first['run']}"
