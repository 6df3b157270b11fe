"""Sampling: the least certain networks and kernels first, holdouts always; shapes that stand for all others."""

from __future__ import annotations

import math
import runpy
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import factories
import numpy as np
import pandas as pd
import pytest

from latpred.calibration import cells, choose_shapes, evaluate_kernels, schedules
from latpred.calibration.devices import open_device
from latpred.calibration.fitting import kernel_table
from latpred.calibration.schedules import Schedule
from latpred.calibration.workloads import networks
from latpred.calibration.workloads.networks import KINDS, NetworkSpec
from latpred.errors import TableError, TraceError, UnknownGpuError, UsageError
from latpred.ops.families import DIMS
from latpred.prediction.predictor import Predictor
from latpred.profile.document import DeviceProfile

GROUP = schedules.CANDIDATES * len(KINDS)


def small(seed: int) -> NetworkSpec:
    """A network that is traced fast, of the kind and the lot of its seed."""
    spec = networks.draw(seed)
    return NetworkSpec(spec.kind, seed, width=32, size=32, batch=1)


def profile(unsure: str) -> DeviceProfile:
    """Sure of every family but one."""
    fits = [factories.kernel_fit(name, spread=0.5 if name == unsure else 0.01) for name in DIMS]
    return factories.profile(factories.device(asynchronous=False, kind="cpu"), fits)


def schedule(known: DeviceProfile | None = None) -> Schedule:
    """A schedule that has learned a profile, if any."""
    made = schedules.schedule_of(open_device("simulated"), ("fp32",))
    if known is not None:
        made.learn(known)
    return made


def refusing(trace: Callable[..., object], broken: Callable[[object], bool]) -> Callable[..., object]:
    """A way to trace that fails at some networks or cells."""

    def failing(one: object, *more: object, **options: object) -> object:
        if broken(one):
            raise TraceError("no pixel is left")
        return trace(one, *more, **options)

    return failing


def test_before_learning_everything_comes_as_drawn() -> None:
    specs, kernels = [small(seed) for seed in range(40)], list(islice(cells.kernel_cells("fp32"), 30))
    assert list(islice(schedule().uncertain_networks(iter(specs)), 40)) == specs
    drawn = iter(kernels)
    assert list(schedule().uncertain_kernels(drawn, 12)) == kernels[:12]
    assert next(drawn) == kernels[12]


def test_after_learning_holdouts_are_kept_and_the_uncertain_come_first() -> None:
    known = profile("rnn")
    specs = [small(seed) for seed in range(50, 50 + GROUP)]  # seeds 55 to 65 are held out
    holdouts = [spec for spec in specs if spec.holdout]
    assert len(holdouts) == len(KINDS)
    chosen = list(islice(schedule(known).uncertain_networks(iter(specs)), len(KINDS) + GROUP // schedules.CANDIDATES))
    assert chosen[: len(KINDS)] == holdouts
    predictor, widths = Predictor(known), []
    for spec in chosen[len(KINDS) :]:
        low, high = predictor.predict(networks.graph(spec), spec.batch).interval_ms
        widths.append(math.log(high / low))
    assert widths == sorted(widths, reverse=True)
    assert chosen[len(KINDS)].kind == "recurrent"  # alone in what the profile is unsure of


def test_the_certain_half_is_passed_over_and_what_cannot_be_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [small(seed) for seed in range(GROUP)]  # no holdout among them
    sampler = schedule(profile("rnn"))
    chosen = list(islice(sampler.uncertain_networks(iter(specs)), GROUP // 2))
    assert len(set(chosen)) == GROUP // 2
    unsure = [spec for spec in specs if spec.kind == "recurrent"]
    assert set(unsure) <= set(chosen)
    monkeypatch.setattr(networks, "graph", refusing(networks.graph, lambda spec: spec == unsure[0]))
    chosen = list(islice(sampler.uncertain_networks(iter(specs)), GROUP // 2))
    assert len(set(chosen)) == GROUP // 2
    assert unsure[0] not in chosen


@pytest.mark.parametrize(("unsure", "name"), [("conv", "conv"), ("softmax", "softmax"), ("pooling", "max_pool")])
def test_after_learning_the_least_certain_kernels_are_taken(unsure: str, name: str) -> None:
    drawn = list(islice(cells.kernel_cells("fp32"), 60))
    chosen = list(schedule(profile(unsure)).uncertain_kernels(iter(drawn), 30))
    assert len(chosen) == 30
    assert {cell.key for cell in drawn if cell.name == name and cell.dims.get("groups", 1) == 1} <= {
        cell.key for cell in chosen
    }


def test_a_family_without_a_fit_is_the_least_certain_of_all() -> None:
    sampler = schedule(factories.profile(fits=[factories.kernel_fit("gemm", spread=0.9)]))
    drawn = list(islice(cells.kernel_cells("fp32"), 8))
    assert drawn[0].name == "gemm"
    assert drawn[0] not in list(sampler.uncertain_kernels(iter(drawn), 4))


TABLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "gemm_table.py"))["made_up"](noise=0.0)
ROWS = kernel_table._rows(TABLE)


def test_chosen_shapes_stand_for_all() -> None:
    logs, chosen = np.log(TABLE[["m", "n", "k"]].to_numpy(float)), choose_shapes(ROWS, 30)
    assert len(set(chosen.tolist())) == 30
    nearest = np.min(((logs[:, None, :] - logs[chosen]) ** 2).sum(axis=2), axis=1)
    arbitrary = np.min(((logs[:, None, :] - logs[:30]) ** 2).sum(axis=2), axis=1)
    assert nearest.mean() < 0.5 * arbitrary.mean()


@pytest.mark.parametrize("budget", [19, len(TABLE) + 1])
def test_budgets_that_are_none(budget: int) -> None:
    with pytest.raises(UsageError, match=rf"a budget of {budget} shapes out of {len(TABLE)}"):
        choose_shapes(ROWS, budget)


def test_a_table_is_predicted_from_a_part_of_it() -> None:
    rest, unseen = evaluate_kernels(pd.concat([TABLE, TABLE]), [60])  # what repeats is not tested on itself
    assert (rest.tested, rest.products, rest.budget) == ("the rest", len(TABLE) - 60, 60)
    assert (unseen.tested, unseen.system, unseen.source) == ("unseen n, k", "t4", "made up")
    assert unseen.products == 10 * 14  # a fifth of 49 pairs, at 14 sizes each
    assert rest.median < 0.05
    assert rest.median <= rest.mean < 0.15
    assert rest.within_10 > 0.75


@pytest.mark.parametrize("over", [0, 1])
def test_a_budget_that_leaves_none_to_test_on(over: int) -> None:
    with pytest.raises(UsageError, match="leaves none to test on"):
        evaluate_kernels(TABLE, [len(TABLE) + over])


@pytest.mark.parametrize(
    ("table", "error", "message"),
    [
        ("nowhere.csv", TableError, "There is no table at nowhere.csv"),
        (TABLE[["system", "m", "n"]], TableError, r"no column k, latency_us \(it has: system, m, n\)"),
        (TABLE.replace({"m": {1: -1}}), TableError, "49 rows hold no positive number, the first at row 0"),
        (TABLE.assign(dtype="fp32"), TableError, "nobody knows the dtype fp32"),
        (TABLE.assign(system="abacus"), UnknownGpuError, "abacus"),
    ],
)
def test_bad_tables(table: pd.DataFrame | str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        evaluate_kernels(table, [30])
