"""A latency budget: what it says of a candidate, and that searchers can take it."""

from __future__ import annotations

import json
import pickle
from dataclasses import FrozenInstanceError
from pathlib import Path

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
        assert budget.constraints_func(trial) == (margin,)


def test_a_trial_that_was_told_nothing_is_an_error() -> None:
    optuna = pytest.importorskip("optuna")
    with pytest.raises(UsageError, match=r"budget.check\(candidate\).tell\(trial\)"):
        LatencyBudget(1.0).constraints_func(optuna.trial.create_trial(value=0.0))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_ray_tune_finds_the_widest_network_within_the_budget(latpred_home: Path, tmp_path: Path) -> None:
    tune = pytest.importorskip("ray.tune")
    import ray

    budget = LatencyBudget(LatencyBudget(1.0, image=32).check(network(100)).latency_ms, image=32)

    def trainable(config: dict[str, int]) -> None:  # which Ray sends to its worker, with all that it names
        from torch import nn

        width = config["width"]
        spent = budget.check(lambda: nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU()))
        tune.report({**spent.to_dict(), "quality": float(width) if spent.fits else 0.0})

    home = {"env_vars": {"LATPRED_HOME": str(latpred_home)}}
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, runtime_env=home)
    try:
        found = tune.Tuner(
            trainable,
            param_space={"width": tune.grid_search([50, 100, 200])},
            tune_config=tune.TuneConfig(metric="quality", mode="max"),
            run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0),
        ).fit()
    finally:
        ray.shutdown()
    assert not found.errors
    assert found.get_best_result().config == {"width": 100}
    for result in found:
        assert result.metrics["latency_margin_ms"] == budget(network(result.config["width"]))


@pytest.mark.filterwarnings("ignore")  # syne-tune's own
def test_syne_tune_trades_latency_for_another_metric() -> None:
    pytest.importorskip("syne_tune")
    from syne_tune.config_space import randint
    from syne_tune.optimizer.schedulers.ask_tell_scheduler import AskTellScheduler
    from syne_tune.optimizer.schedulers.multiobjective import MultiObjectiveRegularizedEvolution
    from syne_tune.optimizer.schedulers.single_fidelity_scheduler import SingleFidelityScheduler

    budget = LatencyBudget(LatencyBudget(1.0, image=32).check(network(100)).latency_ms, image=32)
    space = {"width": randint(1, 512)}
    searcher = MultiObjectiveRegularizedEvolution(space, population_size=5, sample_size=3, random_seed=0)
    metrics = ["latency_ms", "narrowness"]
    asked = AskTellScheduler(
        SingleFidelityScheduler(space, metrics, do_minimize=True, searcher=searcher, random_seed=0)
    )
    for _ in range(30):
        trial = asked.ask()
        width = trial.config["width"]
        asked.tell(trial, {**budget.check(network(width)).to_dict(), "narrowness": -float(width)})
    told = [(each.config["width"], each.metrics) for each in asked.completed_experiments.values()]
    assert len({width for width, _ in told}) > 20  # it went on searching
    for width, spent in told:
        assert spent["latency_ms"] == budget.check(network(width)).latency_ms
    assert any(spent["latency_margin_ms"] <= 0 for _, spent in told)
