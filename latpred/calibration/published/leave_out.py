"""What the latency model is worth on what it did not see: models, GPUs or runs are left out of the fit and predicted.

Every fold starts from the priors, so that nothing of what is left out lingers. A GPU or a run that is left out keeps
one row of the smallest batch for each of its runs, without which nobody knows its host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple
from zlib import crc32

import joblib
import numpy as np
import pandas as pd

from latpred import tables
from latpred.accuracy import baselines, metrics
from latpred.accuracy.metrics import Errors
from latpred.calibration.published.joint_fit import Mask, Problem, problem
from latpred.calibration.published.latency_model import Objects
from latpred.calibration.published.published_table import MOST_PROCESSES, Progress
from latpred.calibration.published.row_counts import ALONE, EAGER, Ints
from latpred.errors import UsageError
from latpred.graph.features import Floats
from latpred.profile.gpus import Spec

SCHEMA = "latpred.leave-out/1"
BY = ("model", "gpu", "design", "run", "source", "host")
WHOLE = {
    "run": "a run",
    "design": "all GPUs of a design of multiprocessors",
    "source": "a source",
    "host": "a named host",
}
SHOTS = 5
DRAWS = 2
TENTHS = 10
MOST_FOLDS = 40  # models that are left out one by one
KNEE = 1.2
# Slope of the logarithm of latency over that of the batch: a curve is flat below the first, and rises from the second.
FLAT, RISING = 0.15, 0.6
HOST_SHARE = "host_share"  # predicted, of the slower clock
FACTOR = 2.0
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
_SAME = ["runtime", "precision", "model", "batch", "input_kind", "input_size"]
_CURVE = ["device", "runtime", "precision", "memory_format", "model", "input_size", "run"]
_SEED = 0


class _Fold(NamedTuple):
    """Rows that a fit is made from; it predicts all others."""

    name: str
    fitted: Mask


class Coverage(NamedTuple):
    """Share of the rows of a regime that lie in their 90 % interval, and the interval's half width in log latency."""

    rows: int
    share: float
    width: float


class Accuracy(NamedTuple):
    """What a profile says of itself: median error, and half widths of 90 % intervals in log latency by regime."""

    median: float
    small_batch: float
    large_batch: float
    text: str


@dataclass(frozen=True, slots=True)
class HoldoutRows:
    """Predictions of rows that the fit did not see; the frame's index is the row of the problem.

    title : what was left out. frame : columns of the table, latency_s and predicted_s among them.
    """

    title: str
    frame: pd.DataFrame

    @property
    def log_errors(self) -> Floats:
        """Logarithm of predicted over measured."""
        ratios: Floats = (self.frame["predicted_s"] / self.frame["latency_s"]).to_numpy(float)
        return np.log(ratios)

    def errors(self, *columns: str) -> dict[str, Errors]:
        """Errors by the values of columns; without any, of all rows under "all"."""
        if not columns:
            return {"all": _errors(self.frame)}
        return {
            " ".join(map(str, name)): _errors(group) for name, group in self.frame.groupby(list(columns), sort=True)
        }

    def where(self, column: str, value: str) -> HoldoutRows:
        """The rows that have a value in a column."""
        return HoldoutRows(f"{self.title}, {value}", self.frame[self.frame[column] == value])


def by_model(problem: Problem, progress: Progress | None = None, gpus: Sequence[str] | None = None) -> HoldoutRows:
    """Every model predicted from all others; with `gpus`, only the models that these have.

    Of many models a tenth is left out at a time. A run that has no other model keeps one row, which tells its host.
    """
    models, whole = problem.rows.model, problem.rows.runtime != ALONE
    wanted = whole if gpus is None else whole & np.isin(problem.rows.gpu, gpus)
    names = np.array(sorted(set(models[wanted])), dtype=object)
    folds = []
    for part in _tenths(names) if len(names) > MOST_FOLDS else [[name] for name in names]:
        mine = np.isin(models, part)
        alone = mine & ~np.isin(problem.rows.run, problem.rows.run[~mine])
        title = str(part[0]) if len(part) == 1 else f"{len(part)} models"
        folds.append(_Fold(title, ~mine | _one_of_each_run(problem, alone)))
    return _predicted(problem, "a model left out", folds, progress)


def _tenths(names: Objects) -> list[Objects]:
    # By a hash of each, whatever folder its file is in: one name more leaves the others where they were.
    drawn = np.array(sorted(names, key=lambda name: crc32(name.rpartition("/")[2].encode())), dtype=object)
    return np.array_split(drawn, min(TENTHS, len(drawn)))


def by_gpu(problem: Problem, shots: int, progress: Progress | None = None) -> HoldoutRows:
    """Every GPU predicted from the others, its datasheet, one row of each of its runs and `shots` models of its own."""
    folds = []
    for gpu in sorted(set(problem.rows.gpu)):
        mine = problem.rows.gpu == gpu
        models = np.array(sorted(set(problem.rows.model[mine])), dtype=object)
        for draw in range(DRAWS if shots else 1):
            random = np.random.default_rng(_SEED + draw)
            shown = random.choice(models, size=min(shots, len(models)), replace=False)
            fitted = ~mine | np.isin(problem.rows.model, shown) | _one_of_each_run(problem, mine)
            folds.append(_Fold(f"{gpu}, {shots} models", fitted))
    return _predicted(problem, f"a GPU left out, {shots} models of it seen", folds, progress)


def by_column(problem: Problem, by: str, progress: Progress | None = None) -> HoldoutRows:
    """Every run, design of multiprocessors, source or named host predicted from all others; runs by tenths.

    One row of each run tells its host, unless it is hosts that are left out: those are known by their names.
    """
    values = _values(problem, by)
    unnamed = {""} if by == "host" else set()
    names = np.array(sorted(set(values) - unnamed), dtype=object)
    folds = []
    for part in _tenths(names) if by == "run" else [[name] for name in names]:
        mine = np.isin(values, part)
        fitted = ~mine if by == "host" else ~mine | _one_of_each_run(problem, mine)
        folds.append(_Fold(f"{len(part)} runs" if by == "run" else str(part[0]), fitted))
    return _predicted(problem, f"{WHOLE[by]} left out", folds, progress)


def _values(problem: Problem, by: str) -> Objects:
    """Of every row, what may be left out with it."""
    if by == "design":
        return np.array([problem.gpus[gpu].design for gpu in problem.rows.gpu], dtype=object)
    values: Objects = getattr(problem.rows, by)
    return values


def _predicted(problem: Problem, title: str, folds: Sequence[_Fold], progress: Progress | None) -> HoldoutRows:
    parts = []
    for fold, thetas in zip(folds, _thetas(problem, folds), strict=True):
        if progress is not None:
            progress(f"{title}: {fold.name}")
        for runtime, theta in thetas.items():
            rows = ~fold.fitted & (problem.rows.runtime == runtime)
            made = {"predicted_s": problem.predict(theta)[rows], HOST_SHARE: problem.host_shares(theta)[rows]}
            parts.append(problem.table.cells[rows].assign(**made, **dict(problem.work[rows])))
    return HoldoutRows(title, pd.concat(parts))


def _thetas(problem: Problem, folds: Sequence[_Fold]) -> Iterator[dict[str, Floats]]:
    """Fits of the folds, as `Problem.thetas` makes them; where there is much to do, several at a time."""
    large = len(folds) * len(problem.rows) >= FEWEST_BESIDE
    processes = min(joblib.cpu_count(), MOST_PROCESSES, len(folds)) if large else 1
    calls = (joblib.delayed(Problem.thetas)(problem, fold.fitted) for fold in folds)
    yield from joblib.Parallel(n_jobs=processes, batch_size=1, max_nbytes=None, return_as="generator")(calls)


def tells_hosts(problem: Problem) -> Mask:
    """Rows in which the host may set the latency: small batches of small models."""
    small: Mask = (problem.rows.batch <= SMALL) & (problem.work["macs"].to_numpy() <= SMALL_MACS)
    return small


def _one_of_each_run(problem: Problem, mine: Mask) -> Mask:
    """One row of each run: of its smallest batch, of the model that most rows have.

    None of a run that has only large batches or large models: in those the host has no part.
    """
    rows = problem.rows
    chosen = np.zeros(len(rows), bool)
    small = tells_hosts(problem)
    common = pd.Series(rows.model).groupby(rows.model).transform("size").to_numpy()
    for run in sorted(set(rows.run[mine])):
        own = np.flatnonzero((rows.run == run) & small)
        if not len(own):
            continue
        order = np.lexsort((rows.model[own].astype(str), -common[own], rows.batch[own]))
        chosen[own[order[0]]] = True
    return chosen


def _errors(frame: pd.DataFrame) -> Errors:
    return metrics.errors(frame["predicted_s"], frame["latency_s"], list(frame["model"]))


# -- intervals and knees -------------------------------------------------------------------------------------------


def regimes(batch: Ints) -> dict[str, Mask]:
    """Rows of each regime, the ones between the first and the last included."""
    return {
        f"batch 1 to {SMALL}": batch <= SMALL,
        "between": (batch > SMALL) & (batch < LARGE),
        f"batch {LARGE} and more": batch >= LARGE,
    }


def conformal(holdout: HoldoutRows) -> dict[str, Coverage]:
    """90 % intervals from the residuals of other models left out, and how many rows they hold, regime by regime.

    Each model's interval is the quantile of the errors of all others: neither its rows nor a fit that saw them take
    part.
    """
    sizes, models = np.abs(holdout.log_errors), holdout.frame["model"].to_numpy(object)
    coverage = {}
    for name, rows in regimes(holdout.frame["batch"].to_numpy(np.int64)).items():
        inside = np.zeros(len(sizes), bool)
        for model in sorted(set(models[rows])):
            others, own = rows & (models != model), rows & (models == model)
            inside[own] = sizes[own] <= metrics.conformal(sizes[others])
        share = float(inside[rows].mean()) if rows.any() else np.nan
        coverage[name] = Coverage(int(rows.sum()), share, metrics.conformal(sizes[rows]))
    return coverage


def accuracy(holdout: HoldoutRows, everywhere: HoldoutRows) -> Accuracy:
    """Errors on one GPU's rows, with intervals of all GPUs.

    A model is as far off on one GPU as on another: widths come from all, since each alone has few models.
    """
    errors, widths = _errors(holdout.frame), [each.width for each in conformal(everywhere).values()]
    return Accuracy(
        median=float(f"{errors.median:.4g}"),
        small_batch=widths[0],
        large_batch=float(np.nanmax(widths[1:])),
        text=f"{errors.median:.1%} median, {errors.p90:.1%} p90, {errors.near:.0%} within 10 % "
        f"({errors.models} models, {errors.cells} cells)",
    )


def knees(holdout: HoldoutRows) -> tuple[int, float]:
    """How many curves bend, and the share of them whose knee is predicted within a factor of two.

    A curve that does not bend within its batches has its knee beyond them: the other side's must then lie within a
    factor of two of the largest batch.
    """
    good = []
    for _, curve in holdout.frame.sort_values("batch").groupby(_CURVE, sort=True):
        batch = curve["batch"].to_numpy(float)
        if curve["batch"].nunique() < 4 or batch.min() != 1:
            continue
        predicted, measured = (_knee(batch, curve[name].to_numpy(float)) for name in ("predicted_s", "latency_s"))
        if not np.isnan(measured):
            good.append(metrics.factor(batch.max() if np.isnan(predicted) else predicted, measured) <= FACTOR)
    return len(good), float(np.mean(good)) if good else np.nan


def regimes_named(holdout: HoldoutRows) -> tuple[int, float]:
    """How many cells have a regime that their measured curve shows, and the share of them that is named right.

    Where latency stays the same to both neighbours a cell is framework-bound, where it rises on both sides it is not.
    """
    right = []
    for _, curve in holdout.frame.groupby(_CURVE, sort=True):
        measured, share = (curve.groupby("batch")[name].median() for name in ("latency_s", HOST_SHARE))
        if len(measured) < 2:
            continue
        slopes = np.diff(np.log(measured.to_numpy(float))) / np.diff(np.log(measured.index.to_numpy(float)))
        before, after = np.append(slopes[:1], slopes), np.append(slopes, slopes[-1:])
        flat, rising = (before < FLAT) & (after < FLAT), (before > RISING) & (after > RISING)
        right += (share.to_numpy(float) > 0.5)[flat].tolist() + (share.to_numpy(float) <= 0.5)[rising].tolist()
    return len(right), float(np.mean(right)) if right else np.nan


def _knee(batch: Floats, latency: Floats) -> float:
    """As `metrics.knee`, over the least latency: repeats of small batches scatter by more than a tenth."""
    flat = np.minimum.accumulate(latency[::-1])[::-1]
    return metrics.knee(batch, flat, KNEE)


# -- simpler predictors --------------------------------------------------------------------------------------------


def _for_models(problem: Problem, holdout: HoldoutRows) -> dict[str, Errors]:
    """Errors of simpler predictors on eager rows, each fitted to the models that were not left out."""
    frame = holdout.frame[holdout.frame["runtime"] == EAGER].reset_index(drop=True)
    errors = {
        one.idea: _errors(frame.assign(predicted_s=one.latency_s).dropna(subset="predicted_s"))
        for one in baselines.all_baselines(frame)
        if one.latency_s is not None
    }
    rows = problem.table.cells.assign(predicted_s=by_trees(problem))
    return errors | {TREES: _errors(rows[problem.rows.runtime == EAGER])}


def _for_gpus(problem: Problem) -> dict[str, Errors]:
    """Errors of taking every GPU for the one whose datasheet is nearest, where that ran the same cell."""
    cells, sheets = problem.table.cells, {name: _sheet(spec) for name, spec in problem.gpus.items()}
    typical = cells.groupby(["device", *_SAME])["latency_s"].median()
    errors = {}
    for gpu, sheet in sorted(sheets.items()):
        others = {name: np.abs(np.subtract(other, sheet)).sum() for name, other in sheets.items() if name != gpu}
        nearest = min(others, key=others.__getitem__)
        own = cells[(cells["device"] == gpu) & (cells["runtime"] == EAGER)]
        copied = own.join(typical[nearest].rename("predicted_s"), on=_SAME).dropna(subset="predicted_s")
        if len(copied):
            errors[f"{NEAREST}, {gpu} as {nearest}"] = _errors(copied)
    return errors


def by_trees(problem: Problem) -> Floats:
    """Seconds of every eager row by trees that did not see its model; NaN for others."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    inputs, rows = _features(problem), problem.rows
    eager, predicted_s = rows.runtime == EAGER, np.full(len(rows), np.nan)
    for model in sorted(set(rows.model[eager])):
        own = rows.model == model
        # The last column is the run, which says more of the host than any datasheet.
        trees = HistGradientBoostingRegressor(
            max_iter=_ROUNDS, categorical_features=[inputs.shape[1] - 1], random_state=0
        ).fit(inputs[eager & ~own], rows.log_us[eager & ~own])
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
            np.unique(rows.run, return_inverse=True)[1],
        )
    ).astype(float)


def _sheet(spec: Spec) -> tuple[float, float, float]:
    """Logarithms of what a datasheet says of speed."""
    peak = spec.peak_macs_per_us("fp32")
    return float(np.log(peak)), float(np.log(spec.bandwidth_bytes_per_us)), float(np.log(spec.multiprocessors))


# -- the report ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LeaveOutReport:
    """What leaving out models, GPUs or runs showed."""

    by: str  # "model", "gpu" or "run"
    figures: Mapping[str, Errors]  # by test and runtime
    baselines: Mapping[str, Errors]  # of simpler predictors, on the eager rows, a model or a GPU left out
    knees: tuple[int, float]  # curves that bend, and the share of knees within a factor of two
    regime: tuple[int, float]  # cells whose curve shows their regime, and the share that is named right
    coverage: Mapping[str, Coverage]  # of 90 % intervals, by regime
    by_model: Mapping[str, Errors]  # of eager rows
    by_class: Mapping[str, Errors]  # of eager rows, by what takes most of the slower clock
    cells: pd.DataFrame  # every predicted row
    notes: tuple[str, ...]  # about the table and the latency model

    def to_dict(self) -> dict[str, Any]:
        """All figures, for JSON; what could not be computed is None."""
        errors = {
            name: {key: _finite(asdict(value)) for key, value in getattr(self, name).items()}
            for name in ("figures", "baselines", "by_model", "by_class")
        }
        return {
            "schema": SCHEMA,
            "left_out": self.by,
            **errors,
            "knees": _finite({"curves": self.knees[0], "within_factor_2": self.knees[1]}),
            "regime": _finite({"cells": self.regime[0], "right": self.regime[1]}),
            "coverage": {name: _finite(one._asdict()) for name, one in self.coverage.items()},
            "notes": list(self.notes),
        }

    def to_frame(self) -> pd.DataFrame:
        """Predicted and measured latency of every row that was left out."""
        return self.cells

    def text(self) -> str:
        """The report for people."""
        lines = [_line("", "rows", "median", "p90", "within 10 %")]
        lines += [_row(name, errors) for name, errors in self.figures.items()]
        lines += [_row(f"baseline {name}", errors) for name, errors in self.baselines.items()]
        if np.isfinite(self.knees[1]):
            lines += ["", f"knee within a factor of 2: {self.knees[1]:.0%} of {self.knees[0]} curves that bend (eager)"]
        if np.isfinite(self.regime[1]):
            lines.append(
                f"regime named right: {self.regime[1]:.1%} of {self.regime[0]} cells whose curve shows it (eager)"
            )
        for name, one in self.coverage.items():
            if one.rows:
                lines.append(
                    f"90 % interval, {name}: holds {one.share:.1%} of {one.rows} rows (x/÷ {np.exp(one.width):.2f})"
                )
        for title, groups in (("worst models", self.by_model), ("by what is slowest", self.by_class)):
            lines += ["", _line(title, "rows", "median", "p90", "within 10 %")]
            worst = sorted(groups.items(), key=lambda item: -item[1].median)
            lines += [_row(name, errors) for name, errors in worst[:_SHOWN]]
        return "\n".join([*lines, "", *(f"Note: {note}" for note in self.notes)]) + "\n"


def evaluate_left_out(source: tables.Source | Problem, by: str, *, progress: Progress | None = None) -> LeaveOutReport:
    """Predict every row of a table from a fit that did not see it, leaving out a "model", a "gpu" or a "run" at a time.

    Rows of models that need a package which is not there are left out; the report's notes say which and how many.
    """
    if by not in BY:
        raise UsageError(f"{by!r} cannot be left out; choose from: {', '.join(BY)}.")
    whole = source if isinstance(source, Problem) else problem(source, progress=progress, partial=True)
    values = set(_values(whole, by))
    if len(values) < 2:
        raise UsageError(f"The table has one {by} only ({min(values)!r}): leaving it out leaves nothing to fit.")
    if by == "model":
        return _report(whole, by, [by_model(whole, progress)])
    if by == "gpu":
        return _report(whole, by, [by_gpu(whole, shots, progress) for shots in (0, SHOTS)])
    return _report(whole, by, [by_column(whole, by, progress)])


def _report(problem: Problem, by: str, parts: list[HoldoutRows]) -> LeaveOutReport:
    """Figures of rows that were left out; the first part is looked at closely."""
    figures: dict[str, Errors] = {}
    for part in parts:
        sized = part.frame.assign(batch=np.where(part.frame["batch"] <= FEW, f"batch 1 to {FEW}", "larger batches"))
        for split in ("precision", "batch", "device"):
            columns = ("runtime", split) if len(set(sized[split])) > 1 else ("runtime",)
            errors = HoldoutRows(part.title, sized).errors
            figures |= {f"{part.title}, {name}": one for name, one in (errors("runtime") | errors(*columns)).items()}
    first, has_eager = parts[0], bool((problem.rows.runtime == EAGER).any())
    eager = first.where("runtime", EAGER) if (first.frame["runtime"] == EAGER).any() else first
    compared: dict[str, Errors] = {}
    if has_eager and by in ("model", "gpu"):
        compared = _for_models(problem, eager) if by == "model" else _for_gpus(problem)
    slowest = problem.slowest()[eager.frame.index]
    return LeaveOutReport(
        by=by,
        figures=figures,
        baselines=compared,
        knees=knees(eager),
        regime=regimes_named(eager),
        coverage=conformal(eager),
        by_model=eager.errors("model"),
        by_class=HoldoutRows("", eager.frame.assign(slowest=slowest)).errors("slowest"),
        cells=pd.concat([part.frame.assign(left_out=part.title) for part in parts], ignore_index=True),
        notes=(
            *problem.table.notes,
            f"{FORMS_TRIED} forms of the latency model were judged on the framework-tax table by leaving out models.",
        ),
    )


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: None if isinstance(value, float) and not np.isfinite(value) else value for name, value in values.items()
    }


def _row(name: str, errors: Errors) -> str:
    return _line(name, str(errors.cells), f"{errors.median:.1%}", f"{errors.p90:.1%}", f"{errors.near:.0%}")


def _line(name: str, *cells: str) -> str:
    return f"{name:58s}" + "".join(f"{cell:>12s}" for cell in cells)
