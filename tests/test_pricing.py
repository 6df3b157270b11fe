"""Dispatch from cold caches: how far apart a class's steps lie, and what that adds to a prediction."""

from __future__ import annotations

import factories
import msgspec
import numpy as np
import pytest

from latpred.errors import ProfileError
from latpred.graph.features import Floats
from latpred.graph.graph import Affine, ModelGraph, Op, Schedule
from latpred.host import SAME
from latpred.prediction import pricing
from latpred.prediction.predictor import Predictor
from latpred.prediction.pricing import ColdDispatch, PriceList, precision_of
from latpred.prediction.timeline import forward_pass
from latpred.profile import store
from latpred.runtimes import one_step_per_op


def moving(megabytes: int, per_sample: int = 0, name: str = "elementwise.add") -> Op:
    """An op that writes so much."""
    return factories.add(host_class=name, read_bytes=Affine(0), write_bytes=Affine(megabytes * 10**6, per_sample))


def reuse_bytes(schedule: Schedule) -> Floats:
    """Bytes between two steps of a class, read off the ops."""
    cold = ColdDispatch.of(schedule, msgspec.structs.replace(factories.dispatch(), cold_costs_us={"": 1.0}))
    assert cold is not None
    return cold.reuse_bytes


def test_python_after_the_last_op_dispatches_nothing_whatever_a_profile_knows() -> None:
    fit = msgspec.structs.replace(factories.dispatch(), costs_us={"": 9.0})
    classes = ("python.return", "python.half.return", "view")
    assert [pricing.host_cost(fit, name) for name in classes] == [0.0, 0.0, 9.0]


def test_bytes_between_two_steps_of_a_class_go_round_the_pass() -> None:
    ops = (moving(1), moving(2, name="norm"), factories.view(), moving(4), moving(8, per_sample=3, name="gemm"))
    found = reuse_bytes(one_step_per_op("eager", ops))
    assert (found[:, 0] / 1e6).tolist() == [4 + 8, 15, 15, 1 + 2, 15]
    assert found[:, 1].tolist() == [3, 3, 3, 0, 3]
    twice = (factories.view(), factories.view(), moving(5))
    assert reuse_bytes(one_step_per_op("eager", twice))[:, 0].tolist() == [5e6, 0.0, 5e6]


def test_what_python_does_ahead_of_a_call_goes_cold_with_it() -> None:
    schedule = one_step_per_op("eager", [factories.linear(module_calls=2, python_calls=3), factories.view()])
    fit = factories.dispatch(scale=2.0, cold_costs_us={"": 1.0}, cold_bytes=1e6, cold_calls=3.0)
    cold = ColdDispatch.of(schedule, fit)
    assert cold is not None
    # 1 us for the op, and three times the 7 us of two modules at 1 us and three functions at 0.5 us, in a network
    assert cold.most_us.sum(axis=1).tolist() == [1.0 + 3.0 * 7.0, 1.0]


@pytest.fixture
def graph() -> ModelGraph:
    return factories.graph(factories.linear(4), factories.view(), factories.linear(4), factories.add(10**6))


def predictors() -> tuple[Predictor, Predictor]:
    """Of a CPU whose dispatch knows no cold code, and of the same one with it."""
    warm = factories.profile(factories.device(asynchronous=False))
    fit = msgspec.structs.replace(
        warm.runtimes["eager"], cold_costs_us={"gemm": 10.0, "": 20.0, "view": 4.0}, cold_bytes=1e6
    )
    return Predictor(warm), Predictor(msgspec.structs.replace(warm, runtimes={"eager": fit}))


def test_a_prediction_counts_it_as_overhead_that_grows_with_the_batch(graph: ModelGraph) -> None:
    warm, cold = (predictor.curve(graph, (2, 64)) for predictor in predictors())
    longer = [
        (many.overhead_ms - few.overhead_ms, many.latency_ms - few.latency_ms)
        for few, many in zip(warm.points, cold.points, strict=True)
    ]
    assert all(overhead == pytest.approx(latency) for overhead, latency in longer)
    assert 0.0 < longer[0][0] < longer[1][0] < 0.044  # two products, a view and a sum, all of them cold
    assert warm.points[0].overhead_ms == warm.points[1].overhead_ms


def test_the_parts_of_a_prediction_add_up_and_slow_down_with_it(graph: ModelGraph) -> None:
    predictor = predictors()[1]
    prediction = predictor.predict(graph, 16)
    costs = prediction.costs
    assert costs.host_us.sum() / 1e3 == pytest.approx(prediction.overhead_ms)
    assert (costs.host_us.sum() + costs.device_us.sum()) / 1e3 == pytest.approx(prediction.latency_ms)
    assert forward_pass(predictor, graph, 16).spans[-1].end_us / 1e3 == pytest.approx(prediction.latency_ms)
    slower = predictor.at(SAME._replace(dispatch=2.0, ops=2.0)).predict(graph, 16)
    assert slower.overhead_ms == pytest.approx(2.0 * prediction.overhead_ms)


@pytest.mark.parametrize(("precision", "longer"), [("fp32", 1.0), ("fp16", 1.25), ("amp-fp16", 1.25)])
def test_a_gpus_host_takes_longer_in_half_precision(graph: ModelGraph, precision: str, longer: float) -> None:
    def overhead_ms(scale: float) -> float:
        made = factories.profile(runtimes={"eager": factories.dispatch(half_scale=scale, fixed_us=0.0)})
        made = msgspec.structs.replace(made, kernels=dict.fromkeys(("fp32", "fp16"), made.kernels["fp32"]))
        return Predictor(made).predict(msgspec.structs.replace(graph, precision=precision)).overhead_ms

    assert overhead_ms(1.25) == pytest.approx(longer * overhead_ms(1.0))


@pytest.mark.parametrize("name", ["epyc-shared", "rtx-8000"])
def test_times_are_the_same_to_the_bit_whatever_was_asked_before(name: str) -> None:
    many = [*(factories.linear(4 * n) for n in range(1, 41)), factories.add(10**6)]
    fresh, used = (PriceList(store.load(name)) for _ in range(2))

    def bits(prices: PriceList, *ops: Op) -> list[bytes]:
        priced = prices.price(one_step_per_op("eager", ops), "fp32")
        return [column.tobytes() for column in priced.times(np.array([2.0]))]

    bits(used, *many)
    assert [bits(used, op) for op in many] == [bits(fresh, op) for op in many]


def test_what_is_said_of_an_op_does_not_depend_on_what_was_asked_before() -> None:
    prices = PriceList(store.load("epyc-shared"))
    for name in ("lib_a::mm", "lib_b::mm"):
        op = factories.linear(name=name, dtype="int8")
        (said,) = prices.price(one_step_per_op("eager", (op,)), "fp32").caveats
        assert said == f"{name} in int8 was not measured: its speed is a guess"


@pytest.mark.parametrize(
    ("dtype", "precision", "expected"),
    [
        ("float32", "amp-fp16", "fp32"),
        ("float16", "amp-fp16", "fp16"),
        ("int64", "amp-fp16", "fp16"),
        ("bfloat16", "amp-bf16", "bf16"),
        ("float32", "amp-bf16", "fp32"),
        ("float32", "fp16", "fp32"),
    ],
)
def test_under_autocast_each_op_is_priced_in_its_own_format(dtype: str, precision: str, expected: str) -> None:
    known = factories.profile()
    fits = dict.fromkeys(("fp32", "fp16", "bf16"), known.kernels["fp32"])
    assert precision_of(dtype, precision, msgspec.structs.replace(known, kernels=fits)) == expected
    if precision.startswith("amp"):
        with pytest.raises(ProfileError, match=f"no kernels in {precision.removeprefix('amp-')}"):
            PriceList(known).fits(precision)


def test_weights_that_were_read_shortly_before_are_read_as_activations() -> None:
    profile = predictors()[1].profile
    gemm = msgspec.structs.replace(profile.kernels["fp32"]["gemm"], weight_bytes_per_us=10.0)
    small = msgspec.structs.replace(profile.device, resident_bytes=10_000_000)
    prices = PriceList(msgspec.structs.replace(profile, device=small, kernels={"fp32": {"gemm": gemm}}))
    first = factories.linear(64, 512)

    def us(reread_after: Affine | None, **changes: Affine) -> float:
        op = msgspec.structs.replace(first, reread_after=reread_after, **changes)
        priced = prices.price(one_step_per_op("eager", (op,)), "fp32", resident=0.0)
        return float(priced.times(np.array([1.0])).us[0, 0])

    def at(share: float) -> float:
        moved = Affine(round(share * first.weight_bytes.constant))
        return us(None, weight_bytes=first.weight_bytes - moved, read_bytes=first.read_bytes + moved)

    assert at(1.0) != at(0.0)
    assert us(None) == us(Affine(20_000_000)) == at(0.0)
    assert us(Affine(9_000_000)) == at(1.0)
    assert us(Affine(15_000_000)) == us(Affine(14_000_000, 1_000_000)) == pytest.approx(at(0.5), rel=1e-9)


@pytest.mark.parametrize(("name", "waits"), [("aten::add", True), ("aten::add_", False), ("Add", False)])
def test_large_results_wait_for_memory_where_pytorch_makes_it(name: str, waits: bool) -> None:
    info = factories.device(asynchronous=False)
    graph = factories.graph(factories.add(numel=2**20, name=name))  # 4 MiB a sample
    latencies = []
    for rate in (0.0, 1000.0):
        profile = factories.profile(msgspec.structs.replace(info, fresh_bytes_per_us=rate))
        points = Predictor(profile).curve(graph, (7, 8)).points
        latencies.append([point.latency_ms for point in points])
    at_once, given = latencies
    assert given[0] == at_once[0]
    assert given[1] - at_once[1] == pytest.approx(waits * 8 * 2**22 / 1e6, abs=1e-6)
