"""Sampling: the least certain first, once a profile says what is certain; judges always."""

from __future__ import annotations

import math
from itertools import islice

import factories
import msgspec
import pytest

from latpred.calibration import sampling, schedules
from latpred.calibration.cells import Cell
from latpred.calibration.sampling import Choice
from latpred.calibration.workloads import networks, single_ops
from latpred.calibration.workloads.networks import KINDS, NetworkSpec
from latpred.errors import TraceError
from latpred.graph.graph import ModelGraph
from latpred.ops.families import DIMS
from latpred.prediction.predictor import Predictor
from latpred.profile.document import DeviceProfile

GROUP = sampling.CANDIDATES * len(KINDS)


def small(seed: int) -> NetworkSpec:
    """A network that is walked fast, of the kind and the lot of its seed."""
    spec = networks.draw(seed)
    return NetworkSpec(spec.kind, seed, width=32, size=32, batch=1)


def profile(unsure: str) -> DeviceProfile:
    """Sure of every family but one."""
    fits = [factories.kernel_fit(name, spread=0.5 if name == unsure else 0.01) for name in DIMS]
    return factories.profile(factories.device(asynchronous=False, kind="cpu"), fits)


def test_before_learning_networks_come_as_drawn() -> None:
    specs = [small(seed) for seed in range(40)]
    assert list(islice(Choice().of_networks(iter(specs)), 40)) == specs


def test_before_learning_kernels_come_as_drawn() -> None:
    cells = list(islice(schedules.kernel_cells("fp32", seed=0), 30))
    drawn = iter(cells)
    assert list(Choice().of_kernels(drawn, 12)) == cells[:12]
    assert next(drawn) == cells[12]


def test_after_learning_judges_are_kept_and_the_uncertain_come_first() -> None:
    learned = profile("rnn")
    choice = Choice()
    choice.learn(learned)
    specs = [small(seed) for seed in range(50, 50 + GROUP)]  # seeds 55 to 65 judge
    judges = [spec for spec in specs if spec.holdout]
    assert len(judges) == len(KINDS)
    chosen = list(islice(choice.of_networks(iter(specs)), len(KINDS) + GROUP // sampling.CANDIDATES))
    assert chosen[: len(KINDS)] == judges
    predictor = Predictor(learned)
    widths = []
    for spec in chosen[len(KINDS) :]:
        low, high = predictor.predict(networks.graph(spec), spec.batch).interval_ms
        widths.append(math.log(high / low))
    assert widths == sorted(widths, reverse=True)
    assert chosen[len(KINDS)].kind == "recurrent"  # alone in what the profile is unsure of


def test_the_certain_half_is_passed_over() -> None:
    choice = Choice()
    choice.learn(profile("rnn"))
    specs = [small(seed) for seed in range(GROUP)]  # no judge among them
    chosen = list(islice(choice.of_networks(iter(specs)), GROUP // 2))
    assert len(set(chosen)) == GROUP // 2
    assert {spec.seed for spec in specs if spec.kind == "recurrent"} <= {spec.seed for spec in chosen}


@pytest.mark.parametrize("unsure", ["conv", "softmax", "pooling"])
def test_after_learning_the_least_certain_kernels_are_taken(unsure: str) -> None:
    choice = Choice()
    choice.learn(profile(unsure))
    cells = list(islice(schedules.kernel_cells("fp32", seed=0), 60))
    chosen = list(choice.of_kernels(iter(cells), 30))
    assert len(chosen) == 30
    wanted = {"conv": "conv", "softmax": "softmax", "pooling": "max_pool"}[unsure]
    assert [
        cell for cell in cells if cell.name == wanted and cell not in chosen and cell.dims.get("groups", 1) == 1
    ] == []
    assert sampling._kernel_sigma(choice._models["fp32"], chosen[0]) >= 0.5


def test_a_family_without_a_fit_is_the_least_certain_of_all() -> None:
    learned = factories.profile(fits=[factories.kernel_fit("gemm", spread=0.9)])
    choice = Choice()
    choice.learn(learned)
    cells = list(islice(schedules.kernel_cells("fp32", seed=0), 8))
    assert cells[0].name == "gemm"
    assert cells[0] not in list(choice.of_kernels(iter(cells), 4))


def test_a_network_that_cannot_be_walked_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    learned, specs = profile("rnn"), [small(seed) for seed in range(GROUP)]
    broken, walk = specs[KINDS.index("recurrent")], networks.graph  # of the kind that is the least sure

    def failing(spec: NetworkSpec, precision: str = "fp32") -> ModelGraph:
        if spec == broken:
            raise TraceError("no pixel is left")
        return walk(spec, precision)

    monkeypatch.setattr(networks, "graph", failing)
    choice = Choice()
    choice.learn(learned)
    chosen = list(islice(choice.of_networks(iter(specs)), GROUP // 2))
    assert len(set(chosen)) == GROUP // 2
    assert broken not in chosen
    assert sampling._network_sigma(Predictor(learned), broken) == -math.inf


def test_networks_come_as_drawn_where_a_profile_cannot_predict_them() -> None:
    fits = {"bf16": factories.profile().kernels["fp32"]}
    choice = Choice()
    choice.learn(msgspec.structs.replace(profile("rnn"), kernels=fits))
    specs = [small(seed) for seed in range(GROUP)]
    assert list(islice(choice.of_networks(iter(specs)), GROUP // 2)) == specs[: GROUP // 2]


def test_a_kernel_that_cannot_be_walked_or_launches_nothing_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [Cell("kernel", name, {"rows": 4, "cols": 8}) for name in ("broken", "view", "add", "softmax")]
    walk = single_ops.graph

    def failing(cell: Cell) -> tuple[ModelGraph, int]:
        if cell.name == "broken":
            raise TraceError("no pixel is left")
        return walk(cell)

    monkeypatch.setattr(single_ops, "graph", failing)
    choice = Choice()
    choice.learn(profile("softmax"))
    assert list(choice.of_kernels(iter(cells), 2)) == [cells[3], cells[2]]
