"""What the law is worth on what it did not see: models, GPUs or runs are left out of the fit and predicted.

Every fold starts from what is believed before any row is seen, so that nothing of what is left out lingers. A GPU or a
run that is left out keeps one row of the smallest batch for each of its runs, without which nobody knows its host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import joblib
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from latpred.accuracy import baselines, metrics
from latpred.accuracy.metrics import Errors
from latpred.calibration.published.fitted_profiles import Accuracy
from latpred.calibration.published.joint_fit import Problem
from latpred.calibration.published.parameters import EAGER
from latpred.calibration.published.published_table import MOST_PROCESSES
from latpred.graph.features import Floats
from latpred.profile.gpus import Spec

BY = ("model", "gpu", "run")
SHOTS = 5
DRAWS = 2
RUN_FOLDS = 10
KNEE = 1.2
FACTOR = 2.0
FEWEST_BESIDE = 40_000  # rows in all folds, below which a second process takes longer to start than it saves
SMALL, LARGE = 4, 64  # batches up to the first and from the second on are regimes of their own
_SEED = 0

Progress = Callable[[str], None]
Mask = NDArray[np.bool_]


class Fold(NamedTuple):
    """Rows a fit may see, and rows it is judged on."""

    name: str
    seen: Mask
    judged: Mask


class Coverage(NamedTuple):
    """Share of the rows of a regime that lie in their 90 % interval, and the interval's half width in log latency."""

    rows: int
    share: float
    width: float


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Predictions of rows that the fit did not see.

    Attributes
    ----------
    title : str
        What was left out.
    frame : DataFrame
        device, runtime, precision, model, batch, input_size, run, latency_s and predicted_s of each.
    """

    title: str
    frame: pd.DataFrame

    @property
    def log_errors(self) -> Floats:
        """Logarithm of predicted over measured."""
        found: Floats = np.log((self.frame["predicted_s"] / self.frame["latency_s"]).to_numpy(float))
        return found

    def errors(self, *columns: str) -> dict[str, Errors]:
        """Errors by the values of columns; without any, of all rows under "all"."""
        if not columns:
            return {"all": _errors(self.frame)}
        return {
            " ".join(str(part) for part in (name if isinstance(name, tuple) else (name,))): _errors(group)
            for name, group in self.frame.groupby(list(columns), sort=True)
        }

    def of(self, runtime: str) -> LeftOut:
        """The rows of one runtime."""
        return LeftOut(f"{self.title}, {runtime}", self.frame[self.frame["runtime"] == runtime].reset_index(drop=True))


def by_model(problem: Problem, progress: Progress | None = None, gpus: Sequence[str] | None = None) -> LeftOut:
    """Every model predicted from all others; with `gpus`, only the models that these have."""
    where = problem.model if gpus is None else problem.model[np.isin(problem.law.rows.gpu, gpus)]
    folds = [Fold(str(name), problem.model != name, problem.model == name) for name in sorted(set(where))]
    return _judge(problem, "a model left out", folds, progress)


def by_gpu(problem: Problem, shots: int, progress: Progress | None = None) -> LeftOut:
    """Every GPU predicted from the others, its datasheet, one row of each of its runs and `shots` models of its own."""
    rows = problem.law.rows
    draws = DRAWS if shots else 1
    folds = []
    for gpu in sorted(set(rows.gpu)):
        mine = rows.gpu == gpu
        for draw in range(draws):
            own = _some_models(problem, mine, shots, draw)
            shown = ~mine | own | _anchors(problem, mine)
            folds.append(Fold(f"{gpu}, {shots} models", shown, mine & ~shown))
    return _judge(problem, f"a GPU left out, {shots} models of it seen", folds, progress)


def by_run(problem: Problem, progress: Progress | None = None) -> LeftOut:
    """Every run predicted from the others and one row of its own, a tenth of the runs at a time."""
    rows = problem.law.rows
    runs = np.array(sorted(set(rows.run)), dtype=object)
    np.random.default_rng(_SEED).shuffle(runs)
    folds = []
    for part in np.array_split(runs, min(RUN_FOLDS, len(runs))):
        mine = np.isin(rows.run, part)
        shown = ~mine | _anchors(problem, mine)
        folds.append(Fold(f"{len(part)} runs", shown, mine & ~shown))
    return _judge(problem, "a run left out", folds, progress)


def _judge(problem: Problem, title: str, folds: Sequence[Fold], progress: Progress | None) -> LeftOut:
    parts, runtime = [], problem.law.rows.runtime
    for fold, thetas in zip(folds, _thetas(problem, [fold.seen for fold in folds]), strict=True):
        if progress is not None:
            progress(f"{title}: {fold.name}")
        for name, theta in thetas.items():
            judged = fold.judged & (runtime == name)
            predicted = np.exp(problem.law.predict(theta)[judged]) / 1e6
            parts.append(problem.table.cells[judged].assign(predicted_s=predicted, **dict(problem.work[judged])))
    return LeftOut(title, pd.concat(parts, ignore_index=True))


def _thetas(problem: Problem, masks: Sequence[Mask]) -> Iterator[dict[str, Floats]]:
    """Fits to the rows of each mask, as `Problem.thetas` makes them; where there is much to do, several at a time."""
    large = len(masks) * len(problem.model) >= FEWEST_BESIDE
    processes = min(joblib.cpu_count(), MOST_PROCESSES, len(masks)) if large else 1
    calls = (joblib.delayed(Problem.thetas)(problem, mask) for mask in masks)
    yield from joblib.Parallel(n_jobs=processes, batch_size=1, max_nbytes=None, return_as="generator")(calls)


def _anchors(problem: Problem, mine: Mask) -> Mask:
    """One row of each run: of its smallest batch, of the model that most runs have."""
    rows = problem.law.rows
    chosen = np.zeros(len(rows), bool)
    common = pd.Series(problem.model).groupby(problem.model).transform("size").to_numpy()
    for run in sorted(set(rows.run[mine])):
        own = np.flatnonzero(rows.run == run)
        order = np.lexsort((problem.model[own].astype(str), -common[own], problem.batch[own]))
        chosen[own[order[0]]] = True
    return chosen


def _some_models(problem: Problem, mine: Mask, count: int, draw: int) -> Mask:
    models = np.array(sorted(set(problem.model[mine])), dtype=object)
    picked = np.random.default_rng(_SEED + draw).choice(models, size=min(count, len(models)), replace=False)
    found: Mask = mine & np.isin(problem.model, picked)
    return found


def _errors(frame: pd.DataFrame) -> Errors:
    return metrics.errors(frame["predicted_s"], frame["latency_s"], list(frame["model"]))


# -- intervals -----------------------------------------------------------------------------------------------------


def regimes(batch: NDArray[np.int64]) -> dict[str, Mask]:
    """Rows of each regime, the ones between the first and the last included."""
    return {
        f"batch 1 to {SMALL}": batch <= SMALL,
        "between": (batch > SMALL) & (batch < LARGE),
        f"batch {LARGE} and more": batch >= LARGE,
    }


def conformal(judged: LeftOut) -> dict[str, Coverage]:
    """90 % intervals from the residuals of other models left out, and how many rows they hold, regime by regime.

    Each model's interval is the quantile of the errors of all others: neither its rows nor a fit that saw them take
    part.
    """
    sizes, models = np.abs(judged.log_errors), judged.frame["model"].to_numpy(object)
    found = {}
    for name, rows in regimes(judged.frame["batch"].to_numpy(np.int64)).items():
        inside = np.zeros(len(sizes), bool)
        for model in sorted(set(models[rows])):
            others, own = rows & (models != model), rows & (models == model)
            inside[own] = sizes[own] <= metrics.conformal(sizes[others])
        found[name] = Coverage(
            int(rows.sum()), float(inside[rows].mean()) if rows.any() else np.nan, metrics.conformal(sizes[rows])
        )
    return found


def accuracy(judged: LeftOut) -> Accuracy:
    """What a profile says of itself: errors and interval widths on models left out, the host of each row known."""
    all_rows, widths = judged.errors()["all"], list(conformal(judged).values())
    return Accuracy(
        median=float(f"{all_rows.median:.4g}"),
        small_batch=widths[0].width,
        large_batch=float(np.nanmax([each.width for each in widths[1:]])),
        text=f"{all_rows.median:.1%} median, {all_rows.p90:.1%} p90, {all_rows.near:.0%} within 10 % "
        f"({all_rows.models} models, {all_rows.cells} cells)",
    )


# -- knees ---------------------------------------------------------------------------------------------------------


def knees(judged: LeftOut, ratio: float = KNEE) -> tuple[int, float]:
    """How many curves bend, and the share of them whose knee is predicted within a factor of two.

    A curve that does not bend within its batches has its knee beyond them: the other side's must then lie within a
    factor of two of the largest batch.
    """
    good = []
    for curve in _curves(judged.frame):
        batch = curve["batch"].to_numpy(float)
        ends = [_knee(batch, curve[name].to_numpy(float), ratio) for name in ("predicted_s", "latency_s")]
        if np.isnan(ends[1]):
            continue
        predicted = batch.max() if np.isnan(ends[0]) else ends[0]
        good.append(metrics.factor(predicted, ends[1]) <= FACTOR)
    return len(good), float(np.mean(good)) if good else np.nan


def _knee(batch: Floats, latency: Floats, ratio: float) -> float:
    """As `metrics.knee`, over the least latency: repeats of small batches scatter by more than a tenth."""
    flat = np.minimum.accumulate(latency[::-1])[::-1]
    return metrics.knee(batch, flat, ratio)


def _curves(frame: pd.DataFrame) -> Iterator[pd.DataFrame]:
    keys = ["device", "runtime", "precision", "model", "input_size", "run"]
    for _, curve in frame.sort_values("batch").groupby(keys, sort=True):
        if curve["batch"].nunique() >= 4 and curve["batch"].min() == 1:
            yield curve


TREES = "boosted trees on counts and work of every op class"
NEAREST = "copy of the nearest GPU"
_ROUNDS = 200
_SAME = ["runtime", "precision", "model", "batch", "input_kind", "input_size"]


def for_models(problem: Problem, judged: LeftOut) -> dict[str, Errors]:
    """Errors of simpler predictors on eager rows, each fitted to the models that were not left out."""
    frame = judged.frame[judged.frame["runtime"] == EAGER].reset_index(drop=True)
    found = {
        one.idea: _simple_errors(frame, one.latency_s)
        for one in baselines.all_baselines(frame)
        if one.latency_s is not None
    }
    rows = problem.table.cells.assign(predicted_s=by_trees(problem))
    return found | {TREES: _simple_errors(rows[problem.law.rows.runtime == EAGER])}


def for_gpus(problem: Problem) -> dict[str, Errors]:
    """Errors of taking every GPU for the one whose datasheet is nearest, where that ran the same cell."""
    cells, gpus = problem.table.cells, problem.law.gpus
    typical = cells.groupby(["device", *_SAME])["latency_s"].median()
    found = {}
    for gpu in sorted(gpus):
        other = min((name for name in gpus if name != gpu), key=lambda name: _distance(gpus[name], gpus[gpu]))
        own = cells[(cells["device"] == gpu) & (cells["runtime"] == EAGER)]
        copied = own[_SAME].join(typical[other].rename("predicted_s"), on=_SAME)["predicted_s"]
        known = copied.notna().to_numpy()
        if known.any():
            found[f"{NEAREST}, {gpu} as {other}"] = _simple_errors(own[known], copied[known].to_numpy(float))
    return found


def by_trees(problem: Problem) -> Floats:
    """Seconds of every eager row by trees that did not see its model; NaN for others."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    given, rows = _features(problem), problem.law.rows
    eager, out = rows.runtime == EAGER, np.full(len(rows), np.nan)
    for model in sorted(set(problem.model[eager])):
        own = problem.model == model
        # The last column is the run, which says more of the host than any datasheet.
        trees = HistGradientBoostingRegressor(
            max_iter=_ROUNDS, categorical_features=[given.shape[1] - 1], random_state=0
        ).fit(given[eager & ~own], rows.log_us[eager & ~own])
        out[eager & own] = np.exp(trees.predict(given[eager & own])) / 1e6
    return out


def _features(problem: Problem) -> Floats:
    """Of every row: counts by host class, work by kernel family, batch and size, the datasheet, the format, the run."""
    cells, rows = problem.law.cells, problem.law.rows
    columns = [*cells.counts.T]
    for work in cells.kernels.values():
        amounts = np.zeros((len(cells.keys), 3))
        moved = work.work[:, 1:].sum(axis=1)
        np.add.at(
            amounts, work.cell, work.count[:, None] * np.column_stack((np.ones_like(moved), work.work[:, 0], moved))
        )
        columns += [*np.log1p(amounts).T]
    sheets = {name: _sheet(spec) for name, spec in problem.law.gpus.items()}
    runs = {name: number for number, name in enumerate(sorted(set(rows.run)))}
    own = [
        (*sheets[gpu], np.log(batch), size, float(precision == "fp16"), runs[run])
        for gpu, batch, size, precision, run in zip(
            rows.gpu, problem.batch, problem.table.cells["input_size"], rows.precision, rows.run, strict=True
        )
    ]
    found: Floats = np.column_stack((np.column_stack(columns)[rows.cell], np.array(own, dtype=float)))
    return found


def _sheet(spec: Spec) -> tuple[float, float, float]:
    """Logarithms of what a datasheet says of speed."""
    peak = spec.peak_macs_per_us("fp32")
    return float(np.log(peak)), float(np.log(spec.bandwidth_bytes_per_us)), float(np.log(spec.multiprocessors))


def _distance(one: Spec, other: Spec) -> float:
    return float(np.abs(np.subtract(_sheet(one), _sheet(other))).sum())


def _simple_errors(rows: pd.DataFrame, predicted_s: Floats | None = None) -> Errors:
    predicted = rows["predicted_s"] if predicted_s is None else predicted_s
    return metrics.errors(predicted, rows["latency_s"], list(rows["model"]))
