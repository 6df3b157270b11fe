"""Simpler predictors to be better than, each fitted to the measurements it is held against, leaving one model out.

That favours them: they see every other model of the suite on the device, batch by batch, while latpred's predictor
sees no whole model of it. They are given MACs, bytes and launches from latpred's own traces, which are right where
common counters are not. Baselines that need a device (isolated ops, torch's RuntimeEstimator) come in as columns that
were measured elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from latpred.graph.features import Floats
from latpred.tables import BASELINE_PREFIX

Model = Callable[[pd.DataFrame], Floats]

FEATURES = ("macs", "bytes", "launches")
FEWEST_MODELS = 3
_CANDIDATES = 96
_FLOOR = 1e-9  # a fitted line can cross zero; a latency cannot


@dataclass(frozen=True, slots=True)
class Baseline:
    """One baseline's predictions for the cells of a table."""

    name: str
    idea: str  # what it does, in a line
    latency_s: Floats | None  # one per row, NaN where it has no answer; None when it could not be had at all
    reason: str = ""  # why it has no answer, for any cell or for some


def all_baselines(cells: pd.DataFrame, reasons: dict[str, str] | None = None) -> tuple[Baseline, ...]:
    """Every baseline of the accuracy report."""
    fitted = [_fitted(name, idea, fit, cells) for name, (idea, fit) in _FITTED.items()]
    timed = [_timed(name, idea, cells, (reasons or {}).get(name, "")) for name, idea in _TIMED.items()]
    return (*fitted, *timed)


def _fit_flops_linear(cells: pd.DataFrame) -> Model:
    """Fit the line a + b * MACs, by least squares of the relative error."""
    macs, latency = _column(cells, "macs"), _column(cells, "latency_s")
    scale = float(max(macs.max(initial=0.0), 1.0))
    design = np.column_stack([np.ones_like(macs), macs / scale])
    constants = np.linalg.lstsq(design / latency[:, None], np.ones_like(latency), rcond=None)[0]
    intercept, slope = constants[0], constants[1] / scale
    return lambda other: np.maximum(intercept + slope * _column(other, "macs"), _FLOOR)


def _fit_log_features(cells: pd.DataFrame) -> Model:
    """Fit the log latency as a line in log MACs, log bytes, log launches and log batch."""

    def design(of: pd.DataFrame) -> Floats:
        columns = [np.log(np.maximum(_column(of, name), 1.0)) for name in (*FEATURES, "batch")]
        return np.column_stack([np.ones(len(of)), *columns])

    constants = np.linalg.lstsq(design(cells), np.log(_column(cells, "latency_s")), rcond=None)[0]
    return lambda other: np.asarray(np.exp(design(other) @ constants), dtype=np.float64)


def _fit_hard_max(cells: pd.DataFrame) -> Model:
    """Fit the bend max(o, c * MACs), with the observed pair (o, c) of least mean absolute log error."""
    macs, latency = _column(cells, "macs"), _column(cells, "latency_s")
    levels = np.log(_candidates(latency))
    rates = np.log(_candidates(latency / np.maximum(macs, 1.0)))
    log_macs, target = np.log(np.maximum(macs, 1.0)), np.log(latency)
    rising = rates[:, None] + log_macs  # (rates, cells)
    cost = np.array([np.abs(np.maximum(level, rising) - target).mean(axis=1) for level in levels])
    best = np.unravel_index(int(np.argmin(cost)), cost.shape)
    level, rate = float(np.exp(levels[best[0]])), float(np.exp(rates[best[1]]))
    return lambda other: np.maximum(level, rate * np.maximum(_column(other, "macs"), 1.0))


_FITTED: dict[str, tuple[str, Callable[[pd.DataFrame], Model]]] = {
    "flops_linear": ("a + b x MACs", _fit_flops_linear),
    "log_features": ("log-linear in MACs, bytes, launches, batch", _fit_log_features),
    "hard_max": ("max(o, c x MACs)", _fit_hard_max),
}
_TIMED = {"isolated_ops": "sum of every op timed alone", "runtime_estimator": "torch's RuntimeEstimator"}


def _fitted(name: str, idea: str, fit: Callable[[pd.DataFrame], Model], cells: pd.DataFrame) -> Baseline:
    missing = [column for column in FEATURES if column not in cells or bool(cells[column].isna().any())]
    if missing:
        return Baseline(name, idea, None, f"the predicted table has no {', '.join(missing)} for every cell")
    latency = np.full(len(cells), np.nan)
    for rows in cells.groupby(["device", "runtime", "precision", "protocol"], sort=False).indices.values():
        if cells["model"].iloc[rows].nunique() >= FEWEST_MODELS:
            latency[rows] = _leave_one_out(fit, cells.iloc[rows])
    reason = f"leaving one model out needs at least {FEWEST_MODELS} models in one runtime"
    unanswered = np.isnan(latency)
    return Baseline(name, idea, None if unanswered.all() else latency, reason if unanswered.any() else "")


def _leave_one_out(fit: Callable[[pd.DataFrame], Model], cells: pd.DataFrame) -> Floats:
    latency = np.full(len(cells), np.nan)
    models = cells["model"].to_numpy()
    for model in dict.fromkeys(models):
        held = models == model
        latency[held] = fit(cells[~held])(cells[held])
    return latency


def _timed(name: str, idea: str, cells: pd.DataFrame, reason: str) -> Baseline:
    column = f"{BASELINE_PREFIX}{name}_s"
    if column in cells and bool(cells[column].notna().any()):
        return Baseline(name, idea, _column(cells, column), reason)
    return Baseline(name, idea, None, reason or f"no column {column} was measured")


def _column(cells: pd.DataFrame, name: str) -> Floats:
    return np.asarray(cells[name], dtype=np.float64)


def _candidates(values: Floats) -> Floats:
    """At most `_CANDIDATES` of the values, evenly over their order."""
    ordered = np.unique(values)
    chosen: Floats = ordered[np.unique(np.linspace(0, ordered.size - 1, _CANDIDATES).round().astype(int))]
    return chosen
