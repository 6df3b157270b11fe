"""A latency budget: what it says of a candidate, and that searchers can take it."""

from __future__ import annotations

import json
import pickle
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from torch import nn

import latpred
from latpred import LatencyBudget
from latpred.errors import CandidateError, UsageError
from latpred.prediction.predictor import Predictor
from latpred.profile import store

pytestmark = pytest.mark.usefixtures("calibrated")


def network(width: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU())


def test_the_margin_is_the_prediction_less_the_limit() -> None:
    predicted = latpred.predict(network(64), batch=4, image=32)
    spent = LatencyBudget(1.0, batch=4, image=32).check(network(64))
    assert spent.latency_ms == predicted.latency_ms
    assert (spent.low_ms, spent.high_ms) == predicted.interval_ms
    assert spent.margin_ms == predicted.latency_ms - 1.0
    exact = LatencyBudget(predicted.latency_ms, batch=4, image=32)
    assert exact(network(64)) == 0.0
    assert exact.check(network(64)).fits
    assert exact(lambda: network(256)) > 0
    assert not exact.check(network(256)).fits


def test_a_predictor_is_a_device_and_a_budget_is_of_one_cell() -> None:
    given = Predictor(store.find("cpu"))
    assert LatencyBudget(np.float32(2), device=given, image=32)(network(8)) == LatencyBudget(2.0, image=32)(network(8))
    for wrong in ({"batch": [1, 8]}, {"runtime": ["eager", "torchscript"]}, {"device": ["rtx-8000", "a100"]}):
        with pytest.raises(UsageError, match="one batch size in one runtime on one device"):
            LatencyBudget(2.0, **wrong)  # type: ignore[arg-type]


def test_reports_are_plain_floats_under_the_name_of_the_budget() -> None:
    found = LatencyBudget(2, image=32, name="batch_1").check(network(8)).to_dict()
    assert list(found) == [f"batch_1_{key}" for key in ("ms", "low_ms", "high_ms", "limit_ms", "margin_ms")]
    assert all(type(value) is float for value in found.values())
    assert json.loads(json.dumps(found)) == found


def test_a_budget_is_a_value_that_travels_to_workers() -> None:
    budget = LatencyBudget(2.0, image=32)
    assert pickle.loads(pickle.dumps(budget)) == budget
    assert pickle.loads(pickle.dumps(budget))(network(8)) == budget(network(8))
    with pytest.raises(FrozenInstanceError):
        budget.limit_ms = 3.0  # type: ignore[misc]


@pytest.mark.parametrize("limit", [0, -1.0, float("nan"), float("inf"), "5", True, None])
def test_a_limit_is_a_positive_number(limit: object) -> None:
    with pytest.raises(UsageError, match="limit_ms must be a positive number"):
        LatencyBudget(limit)  # type: ignore[arg-type]


def test_a_candidate_that_cannot_be_predicted_says_so() -> None:
    with pytest.raises(CandidateError, match="nothing tells what Linear takes"):
        LatencyBudget(2.0).check(nn.Linear(3, 3))


def test_optuna_keeps_the_budget() -> None:
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    budget = LatencyBudget(LatencyBudget(1.0, image=32).check(network(100)).latency_ms, image=32)

    def objective(trial: optuna.Trial) -> float:
        width = trial.suggest_int("width", 1, 512)
        budget.check(lambda: network(width)).tell(trial)
        return float(width)

    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(objective, n_trials=30)
    widths = [trial.params["width"] for trial in study.trials]
    assert max(widths) > 100  # some did not keep it, and none of those is the best
    assert study.best_trial.params["width"] == max(width for width in widths if width <= 100)
    for trial in study.trials:
        margin = budget(network(trial.params["width"]))
        assert trial.user_attrs["latency_margin_ms"] == margin
