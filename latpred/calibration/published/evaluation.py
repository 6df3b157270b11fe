"""Predicts every row of published tables with the profile of its GPU, and holds that against what was measured.

Only puts the pieces together: `published_table` reads and traces, `accuracy.predicted` predicts, `accuracy.comparison`
judges. Nothing is fitted but, where it is asked for, one factor for each host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress

import msgspec
import numpy as np
import pandas as pd
from scipy.optimize import brentq

from latpred.accuracy.accuracy_report import Report
from latpred.accuracy.comparison import compare
from latpred.accuracy.predicted import GraphKey, batches_of, graph_keys, left_out, predict_table, refusals, trace_models
from latpred.calibration.published import published_table
from latpred.calibration.published.published_table import Progress, PublishedTable, eras
from latpred.calibration.published.row_counts import EAGER
from latpred.errors import LatpredError, ProfileError, TableError
from latpred.graph.graph import ModelGraph
from latpred.prediction import host_swap
from latpred.prediction.host_swap import Swap
from latpred.prediction.predictor import Predictor
from latpred.profile import gpus, store
from latpred.profile.document import DeviceProfile

CLEARLY = 1.5  # times the device's work that dispatch takes at least where a row tells of the host
LEAST, MOST = 0.1, 10.0  # a host whose dispatch differs by more was not what made the row differ
_EXACT = 1e-3  # of the logarithm of a factor


def evaluate_published(
    table: PublishedTable,
    profile: DeviceProfile | None = None,
    *,
    host_row: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Predict every row of a table and report how far off that is; where no row can be, the error of the first.

    Rows are predicted with one profile or, by default, each with that of its GPU, else from its datasheet; with a
    profile fitted to published latencies as in the PyTorch that the row's stack names. With `host_row` one
    framework-bound row of each run tells the speed of its host, and is not judged.
    """
    judged, predicted, notes, errors = [], [], list(table.notes), list[LatpredError]()
    # A machine may have several runs, and a run several versions of its software.
    by_run = table.cells.assign(machine=table.cells["run"] + " " + table.cells["stack"], era=eras(table.cells))
    for (name, era), cells in by_run.groupby(["device", "era"], sort=True):
        own = profile or _profile_of(str(name))
        if era and "era" in own.protocol:  # the fit knew which PyTorch ran a row
            own = msgspec.structs.replace(own, protocol=own.protocol | {"era": era})
        graphs, usable, refused = _traced(cells.drop(columns="era"), own, progress, notes)
        errors += refused
        if usable.empty:
            continue
        if progress is not None:
            progress(f"predicting {len(usable):,} rows of {own.name}")
        rows = _predicted(usable, graphs, own)
        if host_row:
            usable, rows = _with_hosts(usable, rows, graphs, own, notes)
        judged.append(usable)
        predicted.append(rows)
    if not judged:
        said = " ".join(notes[len(table.notes) :])
        raise type(errors[0])(f"no row of the table can be predicted: {said}")
    if not any(map(len, judged)):
        raise TableError("Each row tells the host of its run: none is left to judge. Add rows, or drop --host-row.")
    return compare(pd.concat(predicted, ignore_index=True), pd.concat(judged, ignore_index=True), notes=notes)


def _profile_of(device: str) -> DeviceProfile:
    """The profile of a device by its name; this machine's own where `measure` gives that name to its GPU."""
    if gpus.find(device):
        with suppress(ProfileError):
            own = store.find("cuda")
            if own.device.name == device:
                return own
    return store.find(device)


def _traced(
    cells: pd.DataFrame, profile: DeviceProfile, progress: Progress | None, notes: list[str]
) -> tuple[dict[GraphKey, ModelGraph], pd.DataFrame, list[LatpredError]]:
    """Traces of the rows that a profile can predict, these rows, and the errors of others; the notes say about them.

    A profile of another time has eager traces of that time, of which its runtimes' graphs are made or estimated.
    """
    predictor = Predictor(profile)
    errors = refusals(cells, predictor)
    answered = [place for place, error in enumerate(errors) if error is None]
    keys = graph_keys(cells.iloc[answered])
    if predictor.era:
        keys = [key._replace(runtime=EAGER) for key in keys]
    asked = batches_of(keys, cells["batch"].iloc[answered])
    eager = {key._replace(era=predictor.era): sizes for key, sizes in asked.items() if key.runtime == EAGER}
    others = {key: sizes for key, sizes in asked.items() if key.runtime != EAGER}
    failed: dict[GraphKey, LatpredError] = {}
    graphs = trace_models(others, predictor.target, progress, failed)
    traced = published_table.trace_all(eager, None, progress, failed, target=predictor.target)
    graphs |= {key._replace(era=""): graph for key, graph in traced.items()}
    failed = {key._replace(era=""): error for key, error in failed.items()}
    for place, key in zip(answered, keys, strict=True):
        errors[place] = failed.get(key)
    out, said = left_out(cells["model"], errors, f"{profile.name}: ")
    notes += said
    return graphs, cells[~out].reset_index(drop=True), [error for error in errors if error]


def _predicted(cells: pd.DataFrame, graphs: Mapping[GraphKey, ModelGraph], profile: DeviceProfile) -> pd.DataFrame:
    """A predicted table of the rows, which keep the names of their machine and device."""
    rows = predict_table(cells, graphs, profile)
    return rows.assign(machine=cells["machine"].to_numpy(), device=cells["device"].to_numpy())


def _with_hosts(
    cells: pd.DataFrame,
    rows: pd.DataFrame,
    graphs: Mapping[GraphKey, ModelGraph],
    profile: DeviceProfile,
    notes: list[str],
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The rows without one of each run, and predictions for the host that this one tells."""
    judged, predicted, told = [], [], []
    for run, own in cells.groupby("run", sort=True):
        place = _telling(own, rows.loc[own.index])
        factor = None if place is None else _host_factor(cells.loc[[place]], graphs, profile)
        if place is None or factor is None:
            judged.append(own)
            predicted.append(rows.loc[own.index])
            continue
        told.append(f"{run}: x{factor:.2f} by {cells['model'][place]} batch {cells['batch'][place]}")
        swapped = host_swap.swapped(profile, Swap(factor, host_swap.LEAST_LOG_STD, str(run)))
        others = own.drop(place)
        judged.append(others)
        predicted.append(_predicted(others, graphs, swapped) if len(others) else rows.iloc[:0])
    notes += [f"dispatch on {profile.name}, told by one row of each run: {'; '.join(told)}"] if told else []
    return pd.concat(judged, ignore_index=True), pd.concat(predicted, ignore_index=True)


def _telling(cells: pd.DataFrame, rows: pd.DataFrame) -> int | None:
    """Index of the row that tells the host of its run, in eager if there is one: where the host is slowest by most."""
    ratio = (rows["overhead_s"] / rows["compute_s"]).to_numpy()
    clear = np.flatnonzero(ratio > CLEARLY)
    if not len(clear):
        return None
    order = np.lexsort((-ratio[clear], cells["runtime"].iloc[clear] != EAGER))
    return int(cells.index[clear[order[0]]])


def _host_factor(row: pd.DataFrame, graphs: Mapping[GraphKey, ModelGraph], profile: DeviceProfile) -> float | None:
    """Dispatch of a row's host over the profile's, so that the row comes out right; None where none does that."""
    measured = math.log(row["latency_s"].iloc[0])

    def too_slow(log_factor: float) -> float:
        swapped = host_swap.swapped(profile, Swap(math.exp(log_factor), host_swap.LEAST_LOG_STD, ""))
        return math.log(predict_table(row, graphs, swapped)["latency_s"].iloc[0]) - measured

    low, high = math.log(LEAST), math.log(MOST)
    if too_slow(low) >= 0 or too_slow(high) <= 0:
        return None
    return math.exp(brentq(too_slow, low, high, xtol=_EXACT))
