"""Baselines on made-up measurements whose truth is the baseline's own form: the error must vanish, out of sample."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from tabledata import measured

from latpred.accuracy import baselines

Law = Callable[[pd.DataFrame], "pd.Series[float]"]


def suite(law: Law, models: int = 6) -> pd.DataFrame:
    """Models of different work at batches 1 to 32, with latencies that follow `law`."""
    rng = np.random.default_rng(0)
    cells = measured([(f"m{i}", batch, 1.0) for i in range(models) for batch in (1, 2, 4, 8, 16, 32)])
    per_sample = np.repeat(rng.uniform(1e7, 1e9, models), 6)
    cells["macs"] = per_sample * cells["batch"]
    cells["bytes"] = np.repeat(rng.uniform(1e6, 1e8, models), 6) + 1e5 * cells["batch"]
    cells["launches"] = np.repeat(rng.integers(50, 300, models), 6).astype(float)
    return cells.assign(latency_s=law(cells))


def only(name: str, cells: pd.DataFrame) -> baselines.Baseline:
    return next(one for one in baselines.all_baselines(cells) if one.name == name)


def linear(cells: pd.DataFrame) -> pd.Series[float]:
    return 2e-3 + 4e-11 * cells["macs"]


def power(cells: pd.DataFrame) -> pd.Series[float]:
    return 1e-9 * cells["macs"] ** 0.5 * cells["bytes"] ** 0.2 * cells["launches"] ** 0.7 * cells["batch"] ** 0.1


def bend(cells: pd.DataFrame) -> pd.Series[float]:
    return np.maximum(5e-3, 4e-11 * cells["macs"])


@pytest.mark.parametrize(("name", "law"), [("flops_linear", linear), ("log_features", power), ("hard_max", bend)])
def test_a_baseline_finds_its_own_law(name: str, law: Law) -> None:
    cells = suite(law)
    np.testing.assert_allclose(only(name, cells).latency_s, cells["latency_s"], rtol=1e-6)


def test_a_baseline_does_not_see_the_model_it_predicts() -> None:
    cells = suite(linear)
    spoiled = cells.assign(latency_s=np.where(cells["model"] == "m0", 50 * cells["latency_s"], cells["latency_s"]))
    found = only("flops_linear", spoiled).latency_s
    assert found is not None
    own = (cells["model"] == "m0").to_numpy()
    np.testing.assert_allclose(found[own], cells["latency_s"][own], rtol=1e-6)


def test_runtimes_are_fitted_apart() -> None:
    eager = suite(linear)
    graphs = suite(lambda cells: 0.1 * linear(cells)).assign(runtime="cuda-graphs")
    cells = pd.concat([eager, graphs], ignore_index=True)
    np.testing.assert_allclose(only("flops_linear", cells).latency_s, cells["latency_s"], rtol=1e-6)


def test_without_work_columns_it_says_so() -> None:
    found = only("hard_max", suite(bend).drop(columns="macs"))
    assert found.latency_s is None
    assert "no macs" in found.reason


def test_too_few_models() -> None:
    found = only("flops_linear", suite(linear, models=2))
    assert found.latency_s is None
    assert "at least 3 models" in found.reason


def test_measured_baselines_come_as_columns_or_with_a_reason() -> None:
    cells = suite(linear).assign(baseline_isolated_ops_s=lambda c: 2 * c["latency_s"])
    brought = {one.name: one for one in baselines.all_baselines(cells, {"runtime_estimator": "it asks CUDA"})}
    np.testing.assert_allclose(brought["isolated_ops"].latency_s, 2 * cells["latency_s"])
    assert brought["runtime_estimator"].latency_s is None
    assert brought["runtime_estimator"].reason == "it asks CUDA"
