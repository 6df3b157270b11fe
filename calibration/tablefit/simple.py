"""Simpler predictors of a table's rows, which the law has to beat on what is left out of both.

Those of `latpred.baselines` see MACs, bytes and launches, GPU by GPU. Boosted trees see every count that the law sees,
the datasheets and the runs, all GPUs at once. A GPU of which nothing is known is taken for the one nearest to it.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from latpred import baselines, metrics
from latpred.calibration.tablefit.fit import Problem
from latpred.calibration.tablefit.leaveout import Judged
from latpred.calibration.tablefit.parameters import EAGER
from latpred.features import Floats
from latpred.metrics import Errors
from latpred.specs import Spec

TREES = "boosted trees on counts and work of every op class"
NEAREST = "copy of the nearest GPU"
_ROUNDS = 200
_SAME = ["runtime", "precision", "model", "batch", "input_kind", "input_size"]


def for_models(problem: Problem, judged: Judged) -> dict[str, Errors]:
    """Errors of simpler predictors on eager rows, each fitted to the models that were not left out."""
    frame = judged.frame[judged.frame["runtime"] == EAGER].reset_index(drop=True)
    found = {
        one.idea: _errors(frame, one.latency_s) for one in baselines.all_baselines(frame) if one.latency_s is not None
    }
    rows = problem.table.cells.assign(predicted_s=by_trees(problem))
    return found | {TREES: _errors(rows[problem.law.rows.runtime == EAGER])}


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
            found[f"{NEAREST}, {gpu} as {other}"] = _errors(own[known], copied[known].to_numpy(float))
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


def _errors(rows: pd.DataFrame, predicted_s: Floats | None = None) -> Errors:
    predicted = rows["predicted_s"] if predicted_s is None else predicted_s
    return metrics.errors(predicted, rows["latency_s"], list(rows["model"]))
