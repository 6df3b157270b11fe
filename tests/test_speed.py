"""Speed: a slower machine slows dispatch, computing and moving each by its own factor."""

from __future__ import annotations

import pickle
import re

import factories
import msgspec
import pandas as pd
import pytest
import tabledata

from latpred import host, tables
from latpred.accuracy.comparison import compare
from latpred.accuracy.predicted import GraphKey, predict_table
from latpred.api import predictor_now
from latpred.calibration.timing import reference_speed
from latpred.errors import ProfileError
from latpred.graph.graph import Op
from latpred.host import SAME, Slowdown
from latpred.prediction.predictor import Predictor
from latpred.profile import store
from latpred.profile.document import DeviceInfo, DeviceProfile

CPU = factories.device(name="cpu", kind="cpu", asynchronous=False)
GRAPH = factories.graph(factories.linear(), factories.add())
KEY = GraphKey(GRAPH.model, GRAPH.input_kind, GRAPH.input_size, "fp32")
WARM = {"dispatch": 100.0, "product": 400.0, "convolution": 200.0, "stream": 1000.0}
THEN = WARM | {"cold_dispatch": 300.0, "cache": 3000.0}
BOTH = THEN | {"elementwise": 16.0, "threads": 160 / 9}
SLOW = {"dispatch": 150.0, "cold_dispatch": 600.0, "product": 400.0, "convolution": 288.0}
SLOW |= {"cache": 4200.0, "stream": 1100.0, "threads": 40.0, "elementwise": 25.0}


def profile(**changes: object) -> DeviceProfile:
    return msgspec.structs.replace(factories.profile(CPU), **({"speed": THEN} | changes))


@pytest.mark.parametrize(
    ("then", "now", "expected"),
    [
        ({}, {"dispatch": 3.0}, SAME),  # what a table lacks changes nothing
        ({"dispatch": 2.0}, {}, SAME),
        ({"dispatch": 0.0}, {"dispatch": 3.0}, SAME),
        (THEN, SLOW, (1.5, 2.0, 1.0, 1.44, 1.4**0.5, 1.2, 1.44)),
        (THEN | {"elementwise": 16.0}, SLOW, (1.5, 2.0, 1.0, 1.44, 1.4**0.5, 1.5625, 1.5625)),  # on one thread
        (BOTH, SLOW, (1.5, 2.0, 1.0, 1.44, 1.4**0.5, 2.25, 2.25)),
        # Nobody read the shared cache: kernels go by the others; or dispatched from cold ones: ops go by warm ones.
        (WARM, THEN | {"convolution": 288.0, "cache": 4200.0}, (1.0, 1.0, 1.0, 1.44, 1.2, 1.2, 1.44)),
        (THEN, WARM | {"convolution": 288.0}, (1.0, 1.0, 1.0, 1.44, 1.2, 1.2, 1.44)),
        (WARM, THEN | {"dispatch": 150.0}, (1.5, 1.5, 1.0, 1.0, 1.0, 1.0, 1.0)),
        (THEN, WARM | {"dispatch": 150.0}, (1.5, 1.5, 1.0, 1.0, 1.0, 1.0, 1.0)),
    ],
)
def test_every_work_has_a_reference(then: dict[str, float], now: dict[str, float], expected: tuple[float, ...]) -> None:
    assert host.slowdown(then, now) == pytest.approx(expected)


def test_references_of_the_host_say_nothing_of_kernels_elsewhere() -> None:
    launching = 1.5**host.LAUNCH_POWER
    assert host.slowdown(BOTH, SLOW, asynchronous=True) == Slowdown(launching, launching)


def test_ops_slow_down_with_cold_dispatch_and_calls_do_not() -> None:
    warm = factories.dispatch(fixed_us=7.0, module_call_us=3.0, python_call_us=0.0)
    cold = msgspec.structs.replace(warm, cold_costs_us={"": 10.0}, cold_bytes=1e3)
    for fit, ops in ((cold, 2.0), (warm, 1.0)):  # onnxruntime's nodes take as long from cold caches
        fast, slow = (
            Predictor(profile(runtimes={"eager": fit}), slowdown=slowdown).predict(GRAPH).overhead_ms
            for slowdown in (SAME, Slowdown(ops=2.0))
        )
        calls_ms = 1e-3 * (7.0 + 3.0 * sum(op.calls[0] for op in GRAPH.at(1)))
        assert slow == pytest.approx(calls_ms + ops * (fast - calls_ms))


def test_a_profile_answers_for_the_usual_moments_of_its_calibration() -> None:
    usual = Slowdown(1.1, 1.1, 1.02, 1.05, 1.08)
    predictor, full = Predictor(profile(usual=usual._asdict())), Predictor(profile())
    fast_ms = full.predict(GRAPH).latency_ms
    assert predictor.predict(GRAPH).latency_ms == full.at(usual).predict(GRAPH).latency_ms > fast_ms
    assert predictor.at(SAME).predict(GRAPH).latency_ms == fast_ms
    assert pickle.loads(pickle.dumps(predictor)).slowdown == usual
    older = Predictor(profile(usual={"dispatch": 1.1, "product": 1.21}))
    assert older.slowdown == pytest.approx((1.1, 1.1, 1.21, 1.0, 1.1, 1.1, 1.0))


def test_a_slower_machine_takes_longer_by_what_limits_it() -> None:
    usual, slow = Predictor(profile()).predict(GRAPH), Predictor(profile(), slowdown=Slowdown(2.0)).predict(GRAPH)
    assert slow.overhead_ms == pytest.approx(2 * usual.overhead_ms)
    assert slow.compute_ms == pytest.approx(usual.compute_ms)
    both = Predictor(profile(), slowdown=Slowdown(1.0, 1.0, 3.0, 3.0, 3.0, 3.0)).predict(GRAPH)
    assert both.compute_ms == pytest.approx(3 * usual.compute_ms)
    assert both.latency_ms == pytest.approx(usual.overhead_ms + 3 * usual.compute_ms)


def compute_ms(op: Op, slowdown: Slowdown) -> float:
    return Predictor(profile(), slowdown=slowdown).predict(factories.graph(op)).compute_ms


@pytest.mark.parametrize(
    ("op", "share"),
    [
        (factories.add(10**4), 0.0),  # 120 KB
        (factories.add(10**6), 1.0),  # 12 MB for next to no MACs
        (factories.linear(rows=32, width=256), 0.0),  # 320 KiB
        (factories.linear(rows=16, width=1024), 1.0),  # fewer MACs per byte than the reference
        (factories.linear(rows=512, width=512), 0.1875),  # 3 MiB, 42.7 MACs per byte: 8 / 42.7
    ],
)
def test_kernels_wait_for_the_shared_cache_by_their_bytes(op: Op, share: float) -> None:
    usual = compute_ms(op, SAME)
    assert compute_ms(op, Slowdown(product=2.0, elementwise=2.0)) == pytest.approx((2.0 - share) * usual)
    assert compute_ms(op, Slowdown(cache=2.0)) == pytest.approx((1.0 + share) * usual)


def measured(latency_s: float, dispatch_us: float) -> pd.DataFrame:
    asked = {"machine": "m", "input_kind": GRAPH.input_kind, "input_size": GRAPH.input_size}
    row = tabledata.measured([(GRAPH.model, 1, latency_s)], **asked, status=tables.OK, speed_dispatch_us=dispatch_us)
    return tables.check(row, tables.MEASURED)


def test_a_report_gives_errors_as_measured_and_at_equal_speed() -> None:
    exact = profile(runtimes={"eager": factories.dispatch(spread=0.001)})
    slow_s = Predictor(exact, slowdown=Slowdown(1.5)).predict(GRAPH).latency_ms / 1e3
    table = measured(slow_s, 150.0)
    report = compare(predict_table(table, {KEY: GRAPH}, exact), table)
    assert report.at_speed is not None
    assert report.at_speed.median == pytest.approx(0.0, abs=1e-9)
    usual_s = Predictor(profile()).predict(GRAPH).latency_ms / 1e3
    assert report.overall.median == pytest.approx(1 - usual_s / slow_s)
    assert "At equal speed of the machine: median error 0.0 %" in report.text()
    assert report.coverage.share == 0.0
    assert "(0.0 % to 0.0 % when 1 models are drawn anew), at equal speed 100.0 %" in " ".join(report.text().split())
    assert not any("median error" in said for said in report.shortfalls())


def test_several_runtimes_are_judged_at_equal_speed_each() -> None:
    cells = [("one", 1, 1e-3), ("one", 2, 1e-3)]
    runtimes = {"runtime": ["eager", "torchscript"], "status": tables.OK}
    both = tabledata.measured(cells, **runtimes)
    predicted = tabledata.predicted(cells, runtime=runtimes["runtime"], at_speed_s=[1e-3, 1.1e-3])
    report = compare(predicted, both)
    assert {name: round(one.median, 6) for name, one in report.at_speed_by_runtime.items()} == {
        "eager": 0.0,
        "torchscript": 0.1,
    }
    assert re.search(r"^at equal speed .*\neager .* 0\.0 %.*\ntorchscript .* 10\.0 %", report.text(), re.MULTILINE)


def test_each_cell_is_held_against_a_prediction_at_its_own_speed() -> None:
    table = pd.concat([measured(1e-3, dispatch_us) for dispatch_us in (100.0, 150.0)])
    table["batch"] = [1, 2]
    predicted_s = predict_table(tables.check(table, tables.MEASURED), {KEY: GRAPH}, profile())[tables.AT_SPEED]
    expected = [
        Predictor(profile(), slowdown=Slowdown(slow)).predict(GRAPH, batch).latency_ms / 1e3
        for slow, batch in ((1.0, 1), (1.5, 2))
    ]
    assert predicted_s.tolist() == pytest.approx(expected)


def test_kernels_slow_down_with_the_reference_of_their_kind() -> None:
    slower = Slowdown(product=2.0, convolution=4.5, elementwise=8.0, depthwise=7.0)
    ratios = [compute_ms(op, slower) / compute_ms(op, SAME) for op in (factories.linear(8, 64), factories.add(100))]
    assert ratios == pytest.approx([2.0, 8.0])
    assert [slower.near(family) for family in ("conv_grouped", "conv_depthwise", "rnn")] == [4.5, 7.0, 2.0]


@pytest.mark.parametrize(("device", "threads", "power"), [(CPU, 3, 1.0), (factories.device(), 1, host.LAUNCH_POWER)])
def test_now_is_answered_at_the_speed_of_the_moment(
    device: DeviceInfo, threads: int, power: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = profile(machine=factories.machine_here(threads=3), device=device)
    asked: list[object] = []
    monkeypatch.setattr(
        reference_speed, "speed_now", lambda *given, host_only: asked.extend((*given, host_only)) or {"dispatch": 130.0}
    )
    now = predictor_now(Predictor(mine, ("known",)))
    assert asked == [threads, device.asynchronous]  # beside a GPU as in its calibration: nothing but dispatch is timed
    assert now.slowdown == Slowdown(1.3**power, 1.3**power)
    assert now.caveats == (
        "known",
        "adjusted to the present speed of the machine; reference times, relative to the profile's: dispatch x1.30",
    )


def test_now_needs_a_profile_of_this_machine_that_states_its_speed() -> None:
    with pytest.raises(ProfileError, match="on another machine"):
        predictor_now(Predictor(profile()))
    mine = profile(machine=factories.machine_here(), speed={})
    with pytest.raises(ProfileError, match="does not record how fast"):
        predictor_now(Predictor(mine))
    for name, source in {"l40s": "from a datasheet", "rtx-8000": "fitted from published measurements"}.items():
        with pytest.raises(ProfileError, match=f"profile '{name}' is {source}, of no machine"):
            predictor_now(Predictor(store.load(name)))


def test_a_second_of_timing_reads_every_reference() -> None:
    assert set(reference_speed.speed_now(1, seconds=0.0)) == {*THEN, "elementwise"}
    assert set(reference_speed.speed_now(1, seconds=0.0, host_only=True)) == {"dispatch"}
