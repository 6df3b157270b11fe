"""Predicted against measured: joins two tables and makes the accuracy report from them, or predicts the first one.

Everything is computed from tables (`latpred.tables`) by `accuracy.metrics`; nothing here measures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import pandas as pd

from latpred import tables
from latpred.accuracy import baselines, metrics
from latpred.accuracy.accuracy_report import Report, Score
from latpred.accuracy.metrics import Coverage, CurvePoint, Errors, Noise, Rank
from latpred.accuracy.predicted import (
    GraphKey,
    answered,
    batches_of,
    graph_keys,
    predict_table,
    trace_models,
    untraced,
)
from latpred.errors import LatpredError, TableError
from latpred.prediction.predictor import Predictor
from latpred.profile import gpus
from latpred.profile.document import DeviceProfile
from latpred.render import listed
from latpred.runtimes.legacy_torch import traced_for

OFF = 5.0  # times as long: two tables in one unit are hardly ever further apart, nor two units nearer
_SHOWN = 3  # reasons why nothing was measured
_KNEE = f"latency above {metrics.KNEE_RATIO:g} times that of the smallest batch"
_SIDES = ("predicted", "measured")
_GROUP = ("machine", "device", "runtime", "precision", "protocol")
_BUT_RUNTIME = tuple(key for key in (*tables.KEYS, *tables.FURTHER_KEYS) if key != "runtime")


def compare(
    predicted: tables.Source,
    measured: tables.Source,
    *,
    reasons: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
) -> Report:
    """Hold a predicted table against a measured one.

    Parameters
    ----------
    predicted, measured : DataFrame or path
        Tables with the columns of `latpred.tables`; a path is read as CSV.
    reasons : mapping, optional
        Why a baseline that needs a device could not be had, by its name.
    notes : sequence of str
        Sentences for the report's readers.

    Raises
    ------
    TableError
        When a table breaks its schema, a cell stands in one twice, no cell is in both, or nothing was measured.

    Examples
    --------
    >>> import pandas as pd
    >>> key = dict(machine="m", device="cpu", runtime="eager", precision="fp32", model="tiny", input_kind="seq",
    ...            input_size=8, protocol="single")
    >>> guess = pd.DataFrame([{**key, "batch": 1, "latency_s": 0.011}])
    >>> truth = pd.DataFrame([{**key, "batch": 1, "latency_s": 0.010, "spread_s": 0, "n": 9, "run": "a", "stack": ""}])
    >>> round(compare(guess, truth).overall.median, 3)
    0.1
    """
    left, right = tables.read(predicted, tables.PREDICTED), tables.read(measured, tables.MEASURED)
    right = right.assign(device=right["device"].map(gpus.one_name_each(right["device"].unique())).astype(str))
    left = left.assign(device=left["device"].map(_measured_names(left["device"], right["device"])).astype(str))
    joined = tables.join(left, tables.merge_repeats(right))
    if joined.rows.empty:
        raise TableError(_nothing_shared(joined, right))
    return _report(joined, dict(reasons or {}), notes)


def _nothing_shared(joined: tables.Joined, measured: pd.DataFrame) -> str:
    """Why there is nothing to compare, and what to do about it."""
    if joined.failed and not joined.only_measured:
        reasons = listed(measured["status"].value_counts().index.tolist(), _SHOWN).removesuffix(".")
        return (
            f"There is nothing to compare, since no measured cell has a latency: {reasons}. Measure again with that "
            "mended, or with more time."
        )
    first = joined.only_predicted[:1] + joined.only_measured[:1]
    shown = f" Predicted: {first[0]}; measured: {first[1]}." if len(first) == 2 else ""
    return (
        f"No cell is in both tables.{shown} Predict the same models, input sizes, batches, runtime, precision, "
        "device and protocol that were measured."
    )


def _measured_names(predicted: pd.Series[str], measured: pd.Series[str]) -> dict[str, str]:
    """Predicted devices by the name that the same GPU was measured under, where none is predicted under that itself."""
    theirs, mine = list(measured.unique()), list(predicted.unique())
    like = gpus.one_name_each([*theirs, *mine])
    return {name: name if name in theirs or like[name] in mine else like[name] for name in mine}


def evaluate_table(
    table: tables.Source,
    profile: DeviceProfile,
    *,
    progress: Callable[[str], None] | None = None,
    keep: bool = False,
) -> Report:
    """Predict every cell of a measurement table made elsewhere and report how far off that is.

    Columns other than model, batch and latency_s have defaults (`latpred.tables.DEFAULTS`). Models are traced by
    name; `keep` as in `trace_models`. Rows in runtimes and precisions that the profile lacks, and of models that cannot
    be traced, are left out, and notes say which and why.
    """
    given = tables.load(table)
    outside = tables.complete(given, {"device": profile.device.name})
    cells = tables.merge_repeats(tables.check(outside, tables.MEASURED))
    timed = cells[tables.timed(cells)]
    if timed.empty:
        found = "; ".join(["The table has no rows with a latency", *tables.unused(given, cells)])
        raise TableError(f"{found}. Measure some: latpred measure MODEL -o measured.csv")
    predictor, failed = Predictor(profile), dict[GraphKey, LatpredError]()
    known, notes = answered(timed, predictor)
    with traced_for(predictor.era):
        keys = graph_keys(known)
        traced = trace_models(batches_of(keys, known["batch"]), predictor.target, progress, failed, keep=keep)
    out, said = untraced(known["model"], keys, failed)
    usable = known[~out]
    measured = cells.drop(timed.index.difference(usable.index))
    said += tables.unused(given, usable)  # rows that failed are told one by one
    return compare(predict_table(usable, traced, profile), measured, notes=[*notes, *said])


def _report(joined: tables.Joined, reasons: dict[str, str], remarks: Sequence[str]) -> Report:
    predicted, measured = joined.rows["latency_s_predicted"], joined.rows["latency_s_measured"]
    cells = joined.rows.assign(error=predicted / measured - 1)
    noise = _noise(cells)
    tolerance = 0.0 if math.isnan(noise.p90) else noise.p90
    speed_known = tables.AT_SPEED in cells and bool(cells[tables.AT_SPEED].notna().all())
    notes = [
        *joined.notes,
        *remarks,
        *_of_another_unit(cells),
        *([] if noise.cells else ["Repeat noise was not measured: every pair of cells counts."]),
    ]
    return Report(
        overall=_errors(cells),
        at_speed=_errors(cells, tables.AT_SPEED) if speed_known else None,
        by_runtime=_errors_by(cells, "runtime"),
        at_speed_by_runtime=_errors_by(cells, "runtime", tables.AT_SPEED) if speed_known else {},
        by_batch=_errors_by(cells.sort_values("batch", kind="stable"), "batch"),
        by_model=_errors_by(cells, "model"),
        by_device=_errors_by(cells, "device"),
        rank=_rank(cells, tolerance),
        rank_by_batch={str(batch): _rank(group, tolerance) for batch, group in cells.groupby("batch", sort=True)},
        fastest=metrics.fastest(predicted, measured, tolerance, _groups(cells, _BUT_RUNTIME)),
        speedups=_speedups(cells),
        launches=_launches(cells),
        crossover=_crossover(cells),
        knee=_latency_point(cells, metrics.knee, _KNEE),
        regime=_regime(cells),
        coverage=_coverage(cells),
        coverage_at_speed=_coverage(cells, tables.AT_SPEED) if speed_known else None,
        noise=noise,
        baselines=tuple(_score(one, cells, tolerance) for one in baselines.all_baselines(_features(cells), reasons)),
        only_predicted=joined.only_predicted,
        only_measured=joined.only_measured,
        failed=joined.failed,
        notes=tuple(notes),
        cells=cells,
    )


def _of_another_unit(cells: pd.DataFrame) -> Iterator[str]:
    """A word on tables of which one can hardly be in seconds."""
    ratio = float(np.median(cells["latency_s_measured"] / cells["latency_s_predicted"]))
    for times, unit in ((1e3, "milliseconds"), (1e6, "microseconds")):
        for side, more in zip(_SIDES, (1 / ratio, ratio), strict=True):
            if times / OFF < more < times * OFF:
                yield (
                    f"The {side} latencies are about {more:,.0f} times the other table's, as if they were in {unit}: "
                    "latency_s is in seconds."
                )


def _errors(cells: pd.DataFrame, predicted: str = "latency_s_predicted") -> Errors:
    return metrics.errors(cells[predicted], cells["latency_s_measured"], list(cells["model"]))


def _errors_by(cells: pd.DataFrame, key: str, predicted: str = "latency_s_predicted") -> dict[str, Errors]:
    return {str(name): _errors(group, predicted) for name, group in cells.groupby(key, sort=False)}


def _groups(cells: pd.DataFrame, names: Sequence[str]) -> pd.Series[int]:
    """Number of each cell's group: cells that agree in these columns, of those that there are."""
    return cells.groupby(_present(cells, names), sort=False).ngroup()


def _rank(cells: pd.DataFrame, tolerance: float) -> Rank:
    groups = _groups(cells, [*_GROUP, "batch"])
    return metrics.rank(cells["latency_s_predicted"], cells["latency_s_measured"], tolerance, groups)


def _speedups(cells: pd.DataFrame) -> dict[str, metrics.Speedups]:
    """By runtime: how much faster than eager it is, where eager was measured too."""
    latencies, same = [f"latency_s_{side}" for side in _SIDES], _present(cells, _BUT_RUNTIME)
    eager = cells.loc[cells["runtime"] == "eager", [*same, *latencies]]
    others = cells[cells["runtime"] != "eager"].merge(eager, on=same, suffixes=("", "_eager"))
    return {
        str(runtime): metrics.speedups(*(pairs[f"{name}_eager"] / pairs[name] for name in latencies))
        for runtime, pairs in others.groupby("runtime", sort=False)
    }


def _launches(cells: pd.DataFrame) -> dict[str, metrics.Launches]:
    """By runtime: launches as traced against those that a profiler saw, where one looked."""
    columns = [f"launches_{side}" for side in _SIDES]
    if not set(columns) <= set(cells.columns):
        return {}
    return {
        str(runtime): metrics.launches(group[columns[0]], group[columns[1]], list(group["model"]))
        for runtime, group in cells.dropna(subset=columns).groupby("runtime", sort=False)
    }


def _present(cells: pd.DataFrame, names: Sequence[str]) -> list[str]:
    return [name for name in names if name in cells.columns]


def _noise(cells: pd.DataFrame) -> Noise:
    if "repeat_ratio" in cells and bool(cells["repeat_ratio"].notna().any()):
        return metrics.noise(cells["repeat_ratio"], "the repeats of each cell")
    # What was timed once has no spread, though its table says 0.
    repeated = (cells["n"] > 1) | (cells["spread_s"] > 0)
    ratio = (1 + 2 * cells["spread_s"] / cells["latency_s_measured"]).where(repeated)
    return metrics.noise(ratio, "the spread within each cell (its repeats were not kept apart)")


def _coverage(cells: pd.DataFrame, around: str = "latency_s_predicted") -> Coverage:
    """How many measurements lie in their intervals, moved so that these lie around other predictions."""
    ends = ["low_s", "high_s"]
    known = cells.dropna(subset=ends) if set(ends) <= set(cells.columns) else cells.iloc[:0].assign(low_s=0, high_s=0)
    low, high = (known[end] * known[around] / known["latency_s_predicted"] for end in ends)
    return metrics.coverage(low, high, known["latency_s_measured"], known["model"])


def _regime(cells: pd.DataFrame) -> float:
    if "regime_measured" not in cells or "regime_predicted" not in cells:
        return math.nan
    known = cells[(cells["regime_measured"] != "") & (cells["regime_predicted"] != "")]
    # clocks tell whether the host or the device is slower; what the device waits for, they do not
    predicted, measured = (known[f"regime_{side}"].str.startswith("framework") for side in _SIDES)
    return float((predicted == measured).mean()) if len(known) else math.nan


def _crossover(cells: pd.DataFrame) -> CurvePoint:
    clocks = [f"{name}_s_{side}" for name in ("overhead", "compute") for side in _SIDES]
    known = cells.dropna(subset=clocks) if set(clocks) <= set(cells.columns) else cells.iloc[:0]
    if len(known) == 0:
        return _latency_point(cells, metrics.elbow, "flat latency over the slope at the largest batches")
    predicted, measured = (_per_curve(known, metrics.crossing, f"overhead_s_{s}", f"compute_s_{s}") for s in _SIDES)
    return metrics.curve_point(predicted, measured, "measured overhead and compute")


def _latency_point(cells: pd.DataFrame, reader: Callable[..., float], basis: str) -> CurvePoint:
    """Errors of what `reader` reads off the latency curves."""
    predicted, measured = (_per_curve(cells, reader, f"latency_s_{side}") for side in _SIDES)
    return metrics.curve_point(predicted, measured, basis)


def _per_curve(cells: pd.DataFrame, reader: Callable[..., float], *columns: str) -> list[float]:
    """What `reader` makes of the batches and those columns, curve by curve."""
    curves = cells.groupby(_present(cells, tables.CURVE_KEYS), sort=False)
    return [reader(curve["batch"], *(curve[name] for name in columns)) for _, curve in curves if len(curve) > 1]


def _features(cells: pd.DataFrame) -> pd.DataFrame:
    """The cells as baselines know them: measured latency, and work as the predicted table counted it."""
    work = {f"{name}_predicted": name for name in baselines.FEATURES}
    timed = [name for name in cells.columns if name.startswith(tables.BASELINE_PREFIX)]
    plain = {name: name.removesuffix("_predicted").removesuffix("_measured") for name in timed}
    return cells.rename(columns={"latency_s_measured": "latency_s", **work, **plain})


def _score(baseline: baselines.Baseline, cells: pd.DataFrame, tolerance: float) -> Score:
    if baseline.latency_s is None:
        return Score(baseline.name, baseline.idea, None, None, baseline.reason)
    answered = cells.assign(latency_s_predicted=baseline.latency_s)[np.isfinite(baseline.latency_s)]
    reason = baseline.reason if len(answered) < len(cells) else ""
    return Score(baseline.name, baseline.idea, _errors(answered), _rank(answered, tolerance), reason)
