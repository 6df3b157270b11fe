"""Baselines on made-up measurements whose truth is the baseline's own form: the error must vanish, out of sample."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from tabledata import measured

from latpred.accuracy import baselines

Truth = Callable[[pd.DataFrame], "pd.Series[float]"]

TRUTHS: dict[str, Truth] = {
    "flops_linear": lambda t: 2e-3 + 4e-11 * t["macs"],
    "log_features": lambda t: 1e-9 * t["macs"] ** 0.5 * t["bytes"] ** 0.2 * t["launches"] ** 0.7 * t["batch"] ** 0.1,
    "hard_max": lambda t: np.maximum(5e-3, 4e-11 * t["macs"]),
}


def suite(truth: Truth = TRUTHS["flops_linear"], models: int = 6) -> pd.DataFrame:
    """Models of different work at batches 1 to 32, with latencies that follow `truth`."""
    rng = np.random.default_rng(0)
    cells = measured([(f"m{i}", batch, 1.0) for i in range(models) for batch in (1, 2, 4, 8, 16, 32)])
    cells["macs"] = np.repeat(rng.uniform(1e7, 1e9, models), 6) * cells["batch"]
    cells["bytes"] = np.repeat(rng.uniform(1e6, 1e8, models), 6) + 1e5 * cells["batch"]
    cells["launches"] = np.repeat(rng.integers(50, 300, models), 6).astype(float)
    return cells.assign(latency_s=truth(cells))


def one(name: str, cells: pd.DataFrame, **reasons: str) -> baselines.Baseline:
    return next(each for each in baselines.all_baselines(cells, reasons) if each.name == name)


@pytest.mark.parametrize("name", TRUTHS)
def test_a_baseline_finds_its_own_form(name: str) -> None:
    cells = suite(TRUTHS[name])
    np.testing.assert_allclose(one(name, cells).latency_s, cells["latency_s"], rtol=1e-6)


def test_a_baseline_does_not_see_the_model_it_predicts() -> None:
    cells = suite()
    held = (cells["model"] == "m0").to_numpy()
    spoiled = cells.assign(latency_s=np.where(held, 50 * cells["latency_s"], cells["latency_s"]))
    latency = one("flops_linear", spoiled).latency_s
    assert latency is not None
    np.testing.assert_allclose(latency[held], cells["latency_s"][held], rtol=1e-6)


def test_runtimes_are_fitted_apart() -> None:
    graphs = suite(lambda cells: 0.1 * TRUTHS["flops_linear"](cells)).assign(runtime="cuda-graphs")
    cells = pd.concat([suite(), graphs], ignore_index=True)
    np.testing.assert_allclose(one("flops_linear", cells).latency_s, cells["latency_s"], rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "cells", "reason"),
    [
        ("hard_max", suite().drop(columns="macs"), "no macs"),
        ("flops_linear", suite(models=2), "at least 3 models"),
        ("runtime_estimator", suite(), "it asks CUDA"),
    ],
)
def test_what_cannot_be_had_says_why(name: str, cells: pd.DataFrame, reason: str) -> None:
    baseline = one(name, cells, runtime_estimator="it asks CUDA")
    assert baseline.latency_s is None
    assert reason in baseline.reason


def test_a_baseline_that_answers_for_some_cells_alone_says_why() -> None:
    cells = pd.concat([suite(), suite(models=2).assign(runtime="cuda-graphs")], ignore_index=True)
    baseline = one("flops_linear", cells)
    assert baseline.latency_s is not None
    assert np.isnan(baseline.latency_s).sum() == 12
    assert "at least 3 models in one runtime" in baseline.reason
    assert one("flops_linear", suite()).reason == ""


def test_measured_baselines_come_as_columns() -> None:
    cells = suite().assign(baseline_isolated_ops_s=lambda t: 2 * t["latency_s"])
    np.testing.assert_allclose(one("isolated_ops", cells).latency_s, 2 * cells["latency_s"])
