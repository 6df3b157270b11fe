"""What the latency model is worth on what it did not see: models, GPUs or runs are left out of the fit and predicted.

A model is left out under every name that it has: an architecture is, and so it is where errors judge those of others.
Every fold starts from the priors, so that nothing of what is left out lingers. A GPU or a run that is left out keeps
one row of the smallest batch for each of its runs, without which nobody knows its host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import joblib
import msgspec
import numpy as np
import pandas as pd

from latpred import tables
from latpred.accuracy import baselines, metrics
from latpred.accuracy.metrics import Errors
from latpred.calibration.published.joint_fit import Mask, Problem
from latpred.calibration.published.latency_model import Objects
from latpred.calibration.published.published_table import Progress
from latpred.calibration.published.row_counts import EAGER, NO_HOST
from latpred.errors import UsageError
from latpred.graph.features import Floats
from latpred.profile.gpus import Spec
from latpred.render import Page, Table

SCHEMA = "latpred.leave-out/1"
WHOLE = {
    "model": "a model",
    "gpu": "a GPU",
    "design": "all GPUs of a design of multiprocessors",
    "run": "a run",
    "source": "a source",
    "host": "a named host",
}
SHOTS = 5
DRAWS = 2
TENTHS = 10
MOST_FOLDS = 40  # models that are left out one by one
KNEE_RATIO = 1.2  # less than `metrics.KNEE_RATIO`: the least latency from each batch on hardly scatters
# Slope of the logarithm of latency over that of the batch: a curve is flat below the first, and rises from the second.
FLAT, RISING = 0.15, 0.6
HOST_SHARE = "host_share"  # predicted, of the slower clock
ARCHITECTURE = "architecture"  # the first name of a row's model
FACTOR = 2.0
MOST_PROCESSES = 4
FEWEST_BESIDE = 40_000  # rows in all folds, below which a second process takes longer to start than it saves
FEW = 8  # batches up to that are told apart from larger ones in reports
SMALL_MACS = 2e10  # a forward pass of that much is over before any host has dispatched it
SMALL, LARGE = 4, 64  # batches up to the first and from the second on are regimes of their own
# How often the latency model was changed and judged by leaving out models of the framework-tax table before it was as
# it is.
FORMS_TRIED = 130
TREES = "boosted trees on counts and work of every op class"
NEAREST = "copy of the nearest GPU"
_SHOWN = 8
_ROUNDS = 200
_MOST_CATEGORIES = 255  # that trees can tell apart
_SAME = [key for key in (*tables.KEYS, *tables.FURTHER_KEYS) if key not in ("machine", "device")]
_CURVE = ["device", *(key for key in _SAME if key != "batch"), "run", "stack"]
_SEED = 0

_Fold = tuple[str, Mask]  # a name, and the rows that a fit is made from; it predicts all others


@dataclass(frozen=True, slots=True)
class RegimeCoverage:
    """Share of the rows of a regime that lie in their 90 % interval, and the interval's half width in log latency."""

    rows: int
    share: float
    width: float


def by_column(
    problem: Problem, by: str, progress: Progress | None = None, *, gpus: Sequence[str] | None = None, shots: int = 0
) -> pd.DataFrame:
    """Rows of a table, by their index in the problem, each predicted by a fit that left its model, GPU or run out.

    `by` is a key of `WHOLE`. Beside a row's cell there are `predicted_s`, `host_share`, what it counts of work, and in
    `left_out` what was.

    Runs, and models where there are many, are left out by tenths; with `gpus`, only the models that these have. One row
    of each run tells its host, unless it is hosts that are left out, which are known by their names; where models are,
    only runs without any other model need that. With `shots`, so many models of a GPU are seen, in several draws.
    """
    rows, values = problem.rows, _values(problem, by)
    wanted = values != "" if by == "host" else np.ones(len(rows), bool)
    if by == "model":
        wanted = (~np.isin(rows.runtime, NO_HOST)) & (gpus is None or np.isin(rows.gpu, gpus))
    names = np.array(sorted(set(values[wanted])), dtype=object)
    tenths = by == "run" or (by == "model" and len(names) > MOST_FOLDS)
    of_gpu = f", {shots} models" if by == "gpu" else ""
    folds = []
    for part in _tenths(names) if tenths else [[name] for name in names]:
        mine = np.isin(values, part)
        alone = mine & ~np.isin(rows.run, rows.run[~mine]) if by == "model" else mine
        told = np.zeros(len(rows), bool) if by == "host" else _one_of_each_run(problem, alone)
        name = f"{len(part)} {by}s" if tenths else f"{part[0]}{of_gpu}"
        models = np.array(sorted(set(rows.architecture[mine])), dtype=object)
        for draw in range(DRAWS if shots else 1):
            random = np.random.default_rng(_SEED + draw)
            shown = random.choice(models, size=min(shots, len(models)), replace=False)
            folds.append((name, ~mine | told | np.isin(rows.architecture, shown)))
    seen = f"{of_gpu} of it seen" if of_gpu else ""
    return _predicted(problem, f"{WHOLE[by]} left out{seen}", folds, progress)


def _values(problem: Problem, by: str) -> Objects:
    """What each row has of a key of `WHOLE`."""
    values: Objects = getattr(problem.rows, ARCHITECTURE if by == "model" else by)
    return values


def _tenths(names: Objects) -> list[Objects]:
    # By a hash of each: one name more leaves the others where they were.
    drawn = np.array(sorted(names, key=lambda name: crc32(name.encode())), dtype=object)
    return np.array_split(drawn, min(TENTHS, len(drawn)))


def _predicted(problem: Problem, title: str, folds: Sequence[_Fold], progress: Progress | None) -> pd.DataFrame:
    """Predictions of what each fold leaves out; where there is much to do, several folds are fitted at a time."""
    large = len(folds) * len(problem.rows) >= FEWEST_BESIDE
    processes = min(joblib.cpu_count(), MOST_PROCESSES, len(folds)) if large else 1
    calls = (joblib.delayed(Problem.thetas)(problem, fitted) for _, fitted in folds)
    fits = joblib.Parallel(n_jobs=processes, batch_size=1, max_nbytes=None, return_as="generator")(calls)
    parts: list[pd.DataFrame] = []
    for (name, fitted), thetas in zip(folds, fits, strict=True):
        if progress is not None:
            progress(f"{title}: {name}")
        for runtime, theta in thetas.items():
            rows = ~fitted & (problem.rows.runtime == runtime)
            made = {
                "predicted_s": problem.predict(theta)[rows],
                HOST_SHARE: problem.host_shares(theta)[rows],
                ARCHITECTURE: problem.rows.architecture[rows],
            }
            parts.append(problem.table.cells[rows].assign(**made, **dict(problem.work[rows]), left_out=title))
    return pd.concat(parts)


def tells_hosts(problem: Problem) -> Mask:
    """Rows in which the host may set the latency: small batches of small models."""
    small: Mask = (problem.rows.batch <= SMALL) & (problem.work["macs"].to_numpy() <= SMALL_MACS)
    return small


def _one_of_each_run(problem: Problem, mine: Mask) -> Mask:
    """One row of each run in which its host has a part: of the smallest batch, of the model that most rows have."""
    rows = problem.rows
    common = pd.Series(rows.model).groupby(rows.model).transform("size")
    frame = pd.DataFrame({"run": rows.run, "batch": rows.batch, "common": -common, "model": rows.model.astype(str)})
    small = frame[tells_hosts(problem) & np.isin(rows.run, rows.run[mine])]
    first = small.sort_values(["batch", "common", "model"], kind="stable").drop_duplicates("run").index
    chosen = np.zeros(len(rows), bool)
    chosen[first] = True
    return chosen


def _errors(holdout: pd.DataFrame) -> Errors:
    models = holdout["model"].str.rpartition(":")[2]  # one, whatever file builds it
    return metrics.errors(holdout["predicted_s"], holdout["latency_s"], list(models))


def errors_by(holdout: pd.DataFrame, *columns: str) -> dict[str, Errors]:
    """Errors of rows that the fit did not see, by the values of one column or more."""
    return {" ".join(map(str, name)): _errors(group) for name, group in holdout.groupby(list(columns), sort=True)}


# -- intervals and knees -------------------------------------------------------------------------------------------


def coverage_by_regime(holdout: pd.DataFrame) -> dict[str, RegimeCoverage]:
    """90 % intervals of each architecture from errors of all others, and how many rows they hold, regime by regime.

    A regime with one has no others: the share is NaN.
    """
    ratios: Floats = (holdout["predicted_s"] / holdout["latency_s"]).to_numpy(float)
    sizes, models = np.abs(np.log(ratios)), holdout[ARCHITECTURE].to_numpy(object)
    batch = holdout["batch"].to_numpy(np.int64)
    regimes = {
        f"batch 1 to {SMALL}": batch <= SMALL,
        "between": (batch > SMALL) & (batch < LARGE),
        f"batch {LARGE} and more": batch >= LARGE,
    }
    coverage = {}
    for name, rows in regimes.items():
        inside = np.zeros(len(sizes), bool)
        for model in sorted(set(models[rows])):
            others, own = rows & (models != model), rows & (models == model)
            inside[own] = sizes[own] <= metrics.conformal(sizes[others])
        share = float(inside[rows].mean()) if len(set(models[rows])) > 1 else np.nan
        coverage[name] = RegimeCoverage(int(rows.sum()), share, metrics.conformal(sizes[rows]))
    return coverage


def knees(holdout: pd.DataFrame) -> tuple[int, float]:
    """How many curves bend, and the share of them whose knee is predicted within a factor of two.

    A curve that does not bend within its batches has its knee beyond them: the other side's must then lie within a
    factor of two of the largest batch.
    """
    good = []
    for _, curve in holdout.sort_values("batch").groupby(_CURVE, sort=True):
        batch = curve["batch"].to_numpy(float)
        if curve["batch"].nunique() < 4 or batch.min() != 1:
            continue
        # Over the least latency from a batch on: repeats of small batches scatter by more than a tenth.
        least = (curve[name].to_numpy(float)[::-1] for name in ("predicted_s", "latency_s"))
        predicted, measured = (metrics.knee(batch, np.minimum.accumulate(one)[::-1], KNEE_RATIO) for one in least)
        if not np.isnan(measured):
            knee = batch.max() if np.isnan(predicted) else predicted
            good.append(max(knee / measured, measured / knee) <= FACTOR)
    return len(good), float(np.mean(good)) if good else np.nan


def regimes_named(holdout: pd.DataFrame) -> tuple[int, float]:
    """How many cells have a regime that their measured curve shows, and the share of them that is named right.

    Where latency stays the same to both neighbours a cell is framework-bound, where it rises on both sides it is not.
    """
    right = []
    for _, curve in holdout.groupby(_CURVE, sort=True):
        measured, share = (curve.groupby("batch")[name].median() for name in ("latency_s", HOST_SHARE))
        if len(measured) < 2:
            continue
        slopes = np.diff(np.log(measured.to_numpy(float))) / np.diff(np.log(measured.index.to_numpy(float)))
        before, after = np.append(slopes[:1], slopes), np.append(slopes, slopes[-1:])
        flat, rising = (before < FLAT) & (after < FLAT), (before > RISING) & (after > RISING)
        right += (share.to_numpy(float) > 0.5)[flat].tolist() + (share.to_numpy(float) <= 0.5)[rising].tolist()
    return len(right), float(np.mean(right)) if right else np.nan


# -- simpler predictors --------------------------------------------------------------------------------------------


def _for_models(problem: Problem, holdout: pd.DataFrame) -> dict[str, Errors]:
    """Errors of simpler predictors on eager rows, each fitted to the models that were not left out."""
    frame = holdout[holdout["runtime"] == EAGER].reset_index(drop=True)
    errors = {
        one.idea: _errors(frame.assign(predicted_s=one.latency_s).dropna(subset="predicted_s"))
        for one in baselines.all_baselines(frame.assign(model=frame[ARCHITECTURE]))
        if one.latency_s is not None
    }
    grown = problem.table.cells.assign(predicted_s=by_trees(problem)).dropna(subset="predicted_s")
    return errors | ({TREES: _errors(grown)} if len(grown) else {})


def _for_gpus(problem: Problem) -> dict[str, Errors]:
    """Errors of taking every GPU for the one whose datasheet is nearest, where that ran the same cell."""
    cells, sheets = problem.table.cells, {name: _sheet(spec) for name, spec in problem.gpus.items()}
    typical = cells.groupby(["device", *_SAME])["latency_s"].median()
    errors = {}
    for gpu, sheet in sorted(sheets.items()):
        others = {name: np.abs(other - sheet).sum() for name, other in sheets.items() if name != gpu}
        nearest = min(others, key=others.__getitem__)
        own = cells[(cells["device"] == gpu) & (cells["runtime"] == EAGER)]
        copied = own.join(typical[nearest].rename("predicted_s"), on=_SAME).dropna(subset="predicted_s")
        if len(copied):
            errors[f"{NEAREST}, {gpu} as {nearest}"] = _errors(copied)
    return errors


def by_trees(problem: Problem) -> Floats:
    """Seconds of every eager row by trees that did not see its model; NaN for others, and where no model is left."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    inputs, rows = _features(problem), problem.rows
    eager, predicted_s = rows.runtime == EAGER, np.full(len(rows), np.nan)
    for model in sorted(set(rows.architecture[eager])):
        own = rows.architecture == model
        others = eager & ~own
        if not others.any():
            continue
        # The last column is the run, which says more of the host than any datasheet.
        trees = HistGradientBoostingRegressor(
            max_iter=_ROUNDS, categorical_features=[inputs.shape[1] - 1], random_state=0
        ).fit(inputs[others], rows.log_us[others])
        predicted_s[eager & own] = np.exp(trees.predict(inputs[eager & own])) / 1e6
    return predicted_s


def _features(problem: Problem) -> Floats:
    """Of every row: counts by host class, work by kernel family, the datasheet, batch and size, the format, the run."""
    cells, rows = problem.cells, problem.rows
    columns = [*cells.counts.T]
    for work in cells.kernels.values():
        amounts = np.zeros((len(cells.keys), 3))
        moved = work.work[:, 1:].sum(axis=1)
        np.add.at(
            amounts, work.cell, work.times[:, None] * np.column_stack((np.ones_like(moved), work.work[:, 0], moved))
        )
        columns += [*np.log1p(amounts).T]
    return np.column_stack(
        (
            np.column_stack(columns)[rows.cell],
            np.array([_sheet(problem.gpus[gpu]) for gpu in rows.gpu]),
            np.log(rows.batch),
            problem.table.cells["input_size"].to_numpy(float),
            np.char.endswith(rows.precision.astype(str), "fp16"),
            np.unique(rows.run, return_inverse=True)[1] % _MOST_CATEGORIES,  # where there are more, several share one
        )
    ).astype(float)


def _sheet(spec: Spec) -> Floats:
    """Logarithms of what a datasheet says of speed."""
    return np.log([spec.peak_macs_per_us("fp32"), spec.bandwidth_bytes_per_us, spec.multiprocessors])


# -- the report ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LeaveOutReport:
    """What leaving out models, GPUs or runs showed."""

    by: str  # a key of `WHOLE`
    figures: Mapping[str, Errors]  # by test and runtime
    baselines: Mapping[str, Errors]  # of simpler predictors, on the eager rows, a model or a GPU left out
    knees: tuple[int, float]  # curves that bend, and the share of knees within a factor of two
    regime: tuple[int, float]  # cells whose curve shows their regime, and the share that is named right
    coverage: Mapping[str, RegimeCoverage]  # of 90 % intervals, by regime
    by_model: Mapping[str, Errors]  # of eager rows
    by_class: Mapping[str, Errors]  # of eager rows, by what takes most of the slower clock
    cells: pd.DataFrame  # every row that was left out, with predicted_s
    notes: tuple[str, ...]  # about the table and the latency model

    def to_dict(self) -> dict[str, Any]:
        """All figures, for JSON; what could not be computed is None."""
        document: dict[str, Any] = {
            "schema": SCHEMA,
            "left_out": self.by,
            **{name: getattr(self, name) for name in ("figures", "baselines", "by_model", "by_class")},
            "knees": {"curves": self.knees[0], "within_factor_2": self.knees[1]},
            "regime": {"cells": self.regime[0], "right": self.regime[1]},
            "coverage": self.coverage,
            "notes": self.notes,
        }
        written: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(document))
        return written

    def page(self) -> Page:
        """Errors beside those of simpler predictors, knees, regimes and intervals, and where errors are largest."""
        compared = {f"baseline {name}": errors for name, errors in self.baselines.items()}
        parts: list[Table | str] = [_table("", {**self.figures, **compared})]
        of = EAGER if (self.cells["runtime"] == EAGER).any() else "all runtimes"
        if np.isfinite(self.knees[1]):
            parts.append(f"knee within a factor of 2: {self.knees[1]:.0%} of {self.knees[0]} curves that bend ({of})")
        if np.isfinite(self.regime[1]):
            parts.append(
                f"regime named right: {self.regime[1]:.1%} of {self.regime[0]} cells whose curve shows it ({of})"
            )
        parts += [
            f"90 % interval, {name}: holds {one.share:.1%} of {one.rows} rows (x/÷ {np.exp(one.width):.2f})"
            for name, one in self.coverage.items()
            if np.isfinite(one.share)
        ]
        for title, groups in (("worst models", self.by_model), ("by what is slowest", self.by_class)):
            worst = sorted(groups.items(), key=lambda item: -item[1].median)[:_SHOWN]
            parts.append(_table(title, dict(worst)))
        title = f"Errors with {WHOLE[self.by]} left out of the fit"
        return Page(title, [*parts, *(f"Note: {note}" for note in self.notes)], prose=True)


def evaluate_left_out(problem: Problem, by: str, *, progress: Progress | None = None) -> LeaveOutReport:
    """Predict every row of a table from a fit that did not see it, leaving out one of a key of `WHOLE` at a time."""
    if by not in WHOLE:
        raise UsageError(f"{by!r} cannot be left out; choose from: {', '.join(WHOLE)}.")
    _demand_several(set(_values(problem, by)), ARCHITECTURE if by == "model" else by)
    parts = [by_column(problem, by, progress, shots=shots) for shots in ((0, SHOTS) if by == "gpu" else (0,))]
    figures: dict[str, Errors] = {}
    cells = pd.concat(parts)
    for title, part in cells.groupby("left_out", sort=False):
        sized = part.assign(batch=np.where(part["batch"] <= FEW, f"batch 1 to {FEW}", "larger batches"))
        for split in ("precision", "batch", "device"):
            columns = ("runtime", split) if len(set(sized[split])) > 1 else ("runtime",)
            groups = errors_by(sized, "runtime") | errors_by(sized, *columns)
            figures |= {f"{title}, {name}": one for name, one in groups.items()}
    of_eager = parts[0]["runtime"] == EAGER
    eager = parts[0][of_eager] if of_eager.any() else parts[0]
    compared: dict[str, Errors] = {}
    if (problem.rows.runtime == EAGER).any() and by in ("model", "gpu"):
        compared = _for_models(problem, eager) if by == "model" else _for_gpus(problem)
    return LeaveOutReport(
        by=by,
        figures=figures,
        baselines=compared,
        knees=knees(eager),
        regime=regimes_named(eager),
        coverage=coverage_by_regime(eager),
        by_model=errors_by(eager, "model"),
        by_class=errors_by(eager.assign(slowest=problem.slowest()[eager.index]), "slowest"),
        cells=cells.reset_index(drop=True),
        notes=(
            *problem.table.notes,
            f"{FORMS_TRIED} forms of the latency model were judged on the framework-tax table by leaving out models.",
        ),
    )


def _demand_several(values: set[str], by: str) -> None:
    """Refuse to leave out the only one that there is."""
    if values == {""}:
        raise UsageError(
            "The table names no CPU that is known as a host, so none can be left out. Name them in the column host, as "
            "`latpred profiles list --hosts` does."
        )
    if len(values) < 2:
        raise UsageError(f"The table has one {by} only ({min(values)!r}): leaving it out leaves nothing to fit.")


def _table(title: str, groups: Mapping[str, Errors]) -> Table:
    """Errors of groups under a title, a row each."""
    rows = [(name, str(e.cells), f"{e.median:.1%}", f"{e.p90:.1%}", f"{e.near:.0%}") for name, e in groups.items()]
    return Table((title, "rows", "median", "p90", "within 10 %"), rows, folded=(title,))
