"""Validate a profile on whole models that no fit has seen, and compare calibrations with each other.

Only puts the pieces together: `whole_models` measures, `accuracy.predicted` predicts, `accuracy.comparison` judges.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from inspect import signature
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from latpred import host, storage, tables
from latpred.accuracy.accuracy_report import Report
from latpred.accuracy.comparison import compare
from latpred.accuracy.predicted import GraphKey, graph_key, predict_table
from latpred.accuracy.recording import MANIFEST, Recording, load
from latpred.calibration.devices import conditions, open_device
from latpred.calibration.measurement.timed_baselines import BASELINES, check_names, with_baselines
from latpred.calibration.measurement.whole_models import (
    REPEATS,
    Bench,
    StoppedError,
    demand_runtime,
    measure,
)
from latpred.calibration.workloads import suites
from latpred.calibration.workloads.suites import Workload
from latpred.errors import DeviceError, LatpredError, NoProfileError, UsageError, one_line, raise_stop
from latpred.graph.graph import ModelGraph
from latpred.prediction.predictor import Predictor
from latpred.profile import store
from latpred.profile.document import DeviceProfile, Machine
from latpred.progress import ProgressCounter, ProgressEvent
from latpred.query import check_budget, checked_threads
from latpred.runtimes.lowering import target_of

MEASURED_SHARE = 0.75  # of the budget; the rest is for baselines that need the device


def validate(
    device: str = "cpu",
    *,
    profile: DeviceProfile | None = None,
    suite: str = "blind",
    runtimes: str | Sequence[str] = ("eager",),
    batch: int | Sequence[int] | None = None,
    precision: str = "fp32",
    protocol: str = "single",
    repeats: int = REPEATS,
    threads: int | None = None,
    rivals: str | Sequence[str] = tuple(BASELINES),
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
    runtimes : str or sequence of str
        Runtimes to measure in.
    batch : int or sequence of int, optional
        Batch sizes in place of the suite's own.
    precision, protocol : str
        Of all cells.
    repeats : int
        Rounds of measurement.
    threads : int, optional
        Threads that an op may use on the CPU; the profile has to be of as many. By default as many as it is of. Whether
        cudnn times its convolutions and keeps the fastest is as in the profile.
    rivals : str or sequence of str
        Baselines that need the device, "isolated_ops" and "runtime_estimator"; () times none.
    replay : Recording, str or path, optional
        A recording, its folder, or the name of a shipped one: nothing is measured then.
    record : path, optional
        Folder to keep what was measured in, to be replayed later; after Ctrl-C, what was measured by then.
    budget_s : float, optional
        Seconds after which no visit starts, from when all models are traced.
    progress : callable, optional
        Told before each visit: a `latpred.progress.ProgressEvent`.

    Raises
    ------
    ProfileError
        When there is no profile for the device, or it does not cover a runtime or the precision.
    DeviceError
        When the device is not there, or fails for good before all is measured.
    UsageError
        For an unknown suite, runtime or baseline, a folder that cannot be written, or a replay of something else than
        all that was recorded.
    RecordingError
        When the recording is not usable.
    """
    check_budget(budget_s)
    threads, rivals, runtimes = checked_threads(threads), _names(rivals), _names(runtimes)
    if replay is not None:
        _demand_usual(suite=suite, runtimes=runtimes, batch=batch, precision=precision, protocol=protocol)
        _demand_usual(repeats=repeats, rivals=rivals, record=record, budget_s=budget_s)
        return _replayed(replay if isinstance(replay, Recording) else load(replay), profile, device, threads)
    device_profile, chosen = profile or store.find(device, threads=threads), suites.get(suite)
    check_names(rivals)
    if record is not None:
        storage.demand_writable(Path(record) / MANIFEST)
    workloads, live, predictor = chosen.workloads(), open_device(device), Predictor(device_profile)
    options = conditions.Options.of(device_profile)
    options = options if threads is None else options._replace(threads=threads)
    for runtime in runtimes:
        demand_runtime(runtime, live)
        predictor.check(runtime, precision)  # said before minutes are spent on measuring
    asked: dict[str, Any] = {"precision": precision, "protocol": protocol, "repeats": repeats, **options._asdict()}
    left_s = (1 - MEASURED_SHARE) * (budget_s or 0.0) * bool(rivals)
    asked |= {"runtime": runtimes, "progress": progress, "budget_s": budget_s and budget_s - left_s}
    traced = _traced(workloads, runtimes, precision, target_of(device_profile.device.kind), progress)
    try:
        table = measure(workloads, chosen.batches if batch is None else batch, device=live, **asked)
    except StoppedError as stopped:
        if record is None:
            raise
        _keep(record, suite, device_profile, *_with_graphs(stopped.table, traced))
        raise KeyboardInterrupt(f"what was measured by then is kept in {record}") from stopped
    table, graphs = _with_graphs(table, traced)
    _keep(record, suite, device_profile, table, graphs)  # already now: baselines take minutes too
    pace = ProgressCounter("", len(table) * len(rivals), progress, budget_s=budget_s and left_s)
    try:
        with conditions.stated(options, live, dtype=None):
            notes = _notes(device_profile, live.machine(), table)
            table, reasons = with_baselines(table, workloads, Bench(live), rivals, pace.next)
    except DeviceError as lost:  # without which what was measured can be judged
        reasons = dict.fromkeys(rivals, str(lost))
    _keep(record, suite, device_profile, table, graphs, reasons)
    return compare(predict_table(table, graphs, device_profile), table, reasons=reasons, notes=notes)


def _names(given: str | Sequence[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _demand_usual(**asked: Any) -> None:
    """Refuse what only measuring would heed: the figures of a replay are of all that was recorded."""
    parameters = signature(validate).parameters
    for name, value in asked.items():
        usual = parameters[name].default
        if value is not None if usual is None else value != usual:
            raise UsageError(f"A replay judges all that was recorded, and measures nothing; leave out {name}.")


def _replayed(recording: Recording, profile: DeviceProfile | None, device: str, threads: int | None) -> Report:
    """Judge a profile by a recording; where none is given and this machine has none, one must be named."""
    try:
        return recording.replay(profile or store.find(device, threads=threads))
    except NoProfileError as error:
        raise NoProfileError(f"{error}, or name the profile to judge, as in --device epyc-shared") from None


def _notes(profile: DeviceProfile, machine: Machine, table: pd.DataFrame) -> list[str]:
    """How the machine was while a table was measured, beside what the profile is of."""
    ratios = host.ratio(profile.speed, tables.speed_of(table))
    speed = f"Speed of the machine, as times over the profile's: {host.sentence(ratios)}."
    return [f"Measured now: {said}." for said in store.mismatch(profile.machine, machine)] + [speed] * bool(ratios)


def _traced(
    workloads: Sequence[Workload],
    runtimes: Sequence[str],
    precision: str,
    target: str,
    progress: Callable[[ProgressEvent], None] | None,
) -> dict[GraphKey, ModelGraph | str]:
    """What the models do in each runtime, before any is measured, so that what was can be kept at once; or why not."""
    traced: dict[GraphKey, ModelGraph | str] = {}
    counter = ProgressCounter("", len(workloads) * len(runtimes), progress)
    for workload, runtime in product(workloads, runtimes):
        shape = {"input_kind": workload.input_kind, "input_size": workload.input_size}
        key = graph_key({"model": workload.name, **shape, "precision": precision, "runtime": runtime})
        counter.next(f"tracing {workload.name}, {runtime}")
        if key in traced:
            continue
        try:
            traced[key] = workload.trace(precision, runtime, target)
        except Exception as error:  # whatever building a model raises, measuring it does not fail of
            raise_stop(error)
            traced[key] = one_line(error)
    return traced


def _with_graphs(
    table: pd.DataFrame, traced: Mapping[GraphKey, ModelGraph | str]
) -> tuple[pd.DataFrame, dict[GraphKey, ModelGraph]]:
    """The table, and what its models do; a model that no trace can follow gets the reason as its status."""
    table, graphs = table.copy(), {}
    for row, cell in table[table["status"] == tables.OK].iterrows():
        graph = traced[key := graph_key(cell.to_dict())]
        if isinstance(graph, ModelGraph):
            graphs[key] = graph
        else:
            table.loc[row, ["status", "latency_s", "spread_s"]] = f"no trace: {graph}", math.nan, math.nan
    return table, graphs


def _keep(
    record: str | os.PathLike[str] | None,
    suite: str,
    profile: DeviceProfile,
    table: pd.DataFrame,
    graphs: Mapping[GraphKey, ModelGraph],
    reasons: Mapping[str, str] | None = None,
) -> None:
    """Save what was measured of a suite, where there is a folder to keep it in."""
    if record is not None:
        first = table.iloc[0]
        about = f"suite {suite} on {first['device']} ({first['machine']}), {first['stack']}, run {first['run']}"
        Recording(f"{suite}-{profile.name}", about, table, graphs, reasons=reasons or {}).save(record)


BATCHES = (1, 2, 4, 8, 16, 32)


class Shift(NamedTuple):
    """How predictions of a suite differ between two calibrations."""

    first: int  # which calibrations, counted from 1
    second: int
    common: float  # median ratio of the second's predictions to the first's
    median: float  # of the absolute difference at equal speed, as a share
    p90: float
    speed: dict[str, float]  # reference times of the second over those of the first
    passed: tuple[bool, bool]  # whether each passed its gates, of all runtimes
    models: int  # of the suite that could be traced


def repeat(calibrate: Callable[[int], DeviceProfile], times: int, suite: str = "blind") -> list[Shift]:
    """Calibrate several times, told which from 1 on, and compare what the profiles predict of a suite, in eager."""
    profiles = [calibrate(number) for number in range(1, times + 1)]
    measured = profiles[0].kernels
    precision = "fp32" if "fp32" in measured else next(iter(measured), "fp32")
    graphs = []
    for workload in suites.get(suite).workloads():
        with suppress(LatpredError, ImportError):  # those that need a package that is not here
            graphs.append(workload.trace(precision, "eager", target_of(profiles[0].device.kind)))
    return shifts(profiles, graphs)


def shifts(profiles: Sequence[DeviceProfile], graphs: Sequence[ModelGraph]) -> list[Shift]:
    """How the predictions of each two profiles differ."""
    found = []
    for (number, first), (other_number, second) in combinations(enumerate(profiles, 1), 2):
        # The first profile is predicted at the speed that the second was measured at.
        slowdown = host.slowdown(first.speed, second.speed, asynchronous=first.device.asynchronous)
        predictor = Predictor(first)
        before, at_speed = (_latencies(predictor.at(speed), graphs) for speed in (host.SAME, slowdown))
        after = _latencies(Predictor(second).at(host.SAME), graphs)
        off = np.abs(after / at_speed - 1)
        found.append(
            Shift(
                first=number,
                second=other_number,
                common=float(np.median(after / before)),
                median=float(np.median(off)),
                p90=float(np.quantile(off, 0.9)),
                speed=host.ratio(first.speed, second.speed),
                passed=(first.acceptance.all_passed, second.acceptance.all_passed),
                models=len(graphs),
            )
        )
    return found


def _latencies(predictor: Predictor, graphs: Sequence[ModelGraph]) -> Any:
    return np.array([point.latency_ms for graph in graphs for point in predictor.curve(graph, BATCHES).points])
