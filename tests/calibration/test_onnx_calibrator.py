"""onnxruntime's calibration: generated graphs that it loads, and costs found again from timings made of known ones."""

from __future__ import annotations

import random
from itertools import islice

import factories
import msgspec
import numpy as np
import pytest
from factories import device, profile

from latpred.calibration import runtime_calibration, schedules
from latpred.calibration.devices import open_device
from latpred.calibration.fitting import acceptance
from latpred.calibration.fitting.kernel_fit import PASS_SHARE, row_of
from latpred.calibration.runtime_calibration import network_fit, onnx_workloads
from latpred.calibration.runtime_calibration.onnx_calibrator import (
    OnnxCalibrator,
    TimedGraph,
    _idle,
    fit_nodes,
    graph_at_profile_speed,
    graph_cell,
    node_kernels,
    node_samples,
    summing_to,
)
from latpred.calibration.workloads import suites
from latpred.errors import CalibrationError
from latpred.graph.graph import Affine, Op
from latpred.host import Slowdown
from latpred.prediction.kernel_times import evaluate
from latpred.prediction.predictor import Predictor
from latpred.prediction.pricing import host_cost
from latpred.profile.document import DispatchFit
from latpred.runtimes.onnx import onnx_graph, onnx_session

NODE_US, GEMM_US, FIXED_US, MACS_PER_US, ADDED_US = 1.5, 3.0, 12.0, 20_000.0, 2.5


def calibrator() -> OnnxCalibrator:
    """What calibrates onnxruntime on a CPU."""
    made = runtime_calibration.get("onnxruntime", open_device("cpu"))
    assert isinstance(made, OnnxCalibrator)
    return made


def ops_of(kind: str, seed: int, *, tiny: bool) -> tuple[Op, ...]:
    model, feed = onnx_workloads.make(kind, seed, tiny=tiny)
    seen = onnx_session.watch(model, [feed], target="cpu", threads=1)
    return onnx_graph.executed(seen, feed)


@pytest.mark.parametrize("kind", dict.fromkeys(onnx_workloads.KINDS))
def test_generated_graphs_run_and_every_node_is_known(kind: str) -> None:
    for seed in range(3):
        ops = ops_of(kind, seed, tiny=True)
        assert any(op.launches for op in ops)
        assert not [op.name for op in ops if op.estimated]


def test_a_seed_makes_the_same_graph_again_and_tiny_ones_do_less() -> None:
    assert onnx_workloads.make("images", 4)[0] == onnx_workloads.make("images", 4)[0]
    small, large = (sum(op.macs.at(1) for op in ops_of("images", 4, tiny=tiny)) for tiny in (True, False))
    assert 0 < small < large


def gemm(m: int) -> Op:
    return factories.linear(m, 64, name="ort::MatMul", host_class="node.gemm.MatMul")


IDLE = DispatchFit({"": 1.0}, 0.0, 0.0, 0.0)
VIEW = Op("ort::Reshape", "", "node.view.Reshape", "", "", {})


def kernel_us(op: Op) -> float:
    return op.macs.at(1) / MACS_PER_US


def timed(ops: tuple[Op, ...], *, tiny: bool) -> TimedGraph:
    """A graph as a clock would have it: whole, and its nodes in whole microseconds of a profiler that adds to them."""
    host = sum(GEMM_US if op.launches else NODE_US for op in ops)
    profiled = [5.0 + us + ADDED_US * us / (ADDED_US + us) for us in map(kernel_us, ops)]
    nodes = tuple(float(int(us)) if op.launches else 1.0 for us, op in zip(profiled, ops, strict=True))
    return TimedGraph(ops, FIXED_US + host + sum(map(kernel_us, ops)), nodes, tiny, resident=True)


def graphs() -> list[TimedGraph]:
    rng = random.Random(0)
    tiny = [timed((gemm(1),) * a + (VIEW,) * b, tiny=True) for a, b in ((3, 20), (20, 3), (10, 10), (1, 40), (30, 30))]
    sized = [
        timed(tuple(gemm(rng.randrange(16, 2000)) for _ in range(6)) + (VIEW,) * rng.randrange(5), tiny=False)
        for _ in range(20)
    ]
    return tiny + sized


def test_known_costs_are_found_again() -> None:
    fit = fit_nodes(graphs())
    assert host_cost(fit, "node.view.Reshape") == pytest.approx(NODE_US, rel=0.15)
    assert host_cost(fit, "node.gemm.MatMul") == pytest.approx(GEMM_US, rel=0.15)
    assert host_cost(fit, "node.gemm.Gemm") == pytest.approx(host_cost(fit, "node.gemm"))
    assert fit.fixed_us == pytest.approx(FIXED_US, rel=0.3)
    (us,) = evaluate(fit.kernels["fp32"]["gemm"], np.array([row_of(gemm(700), 1)]))
    assert us == pytest.approx(kernel_us(gemm(700)), rel=0.1)


def test_the_profiler_adds_no_more_to_long_kernels() -> None:
    rng = random.Random(0)
    wide = [tuple(factories.linear(rng.randrange(8, 64), 512, name="ort::MatMul") for _ in range(6)) for _ in range(20)]
    short = [timed(tuple(gemm(rng.randrange(16, 60)) for _ in range(6)), tiny=False) for _ in range(20)]
    fit = fit_nodes([*graphs()[:5], *short, *(timed(ops, tiny=False)._replace(cold=True) for ops in wide)])
    (us,) = evaluate(fit.kernels["fp32"]["gemm"], np.array([row_of(wide[0][0], 1)]))
    assert us == pytest.approx(kernel_us(wide[0][0]), rel=0.05)


def test_too_few_graphs_are_said() -> None:
    with pytest.raises(CalibrationError, match=r"2 tiny graphs and 0 larger ones.* in onnxruntime.* --budget 3m"):
        fit_nodes(graphs()[:2])


def test_what_is_measured_first() -> None:
    cells = list(islice(calibrator().cells("fp32"), 100))
    assert {cell.runtime for cell in cells} == {"onnxruntime"}
    assert len({cell.key for cell in cells}) == len(cells)
    models = [(cell.name, cell.dims["batch"]) for cell in cells if cell.kind == "model"]
    suite = suites.get(suites.GATE)
    assert len(models) > 3
    assert models == [(one.name, batch) for one in suite.ready for batch in suite.batches][: len(models)]
    assert next(calibrator().cells_in(("bf16", "fp32"))).precision == "fp32"
    sizes = [cell.dims["tiny"] for cell in cells if cell.kind == "kernel"]
    assert sizes == sorted(sizes, reverse=True)
    assert 20 < sum(sizes) < len(sizes) - 20
    graphs = [cell for cell in islice(calibrator().cells("fp32"), 200) if cell.kind == "kernel"]
    temperatures = {(cell.name, cell.dims["cold"]) for cell in graphs}
    assert len(temperatures) == 2 * len(set(onnx_workloads.KINDS))
    asynchronous = islice(runtime_calibration.get("onnxruntime", open_device("simulated")).cells("fp32"), 20)
    assert {cell.kind for cell in asynchronous} == {"network"}


def test_a_graph_is_brought_to_the_speed_that_eager_was_measured_at() -> None:
    slower = Slowdown(dispatch=2.0, product=1.25, elementwise=1.25)
    sized = timed((VIEW, gemm(2000)), tiny=False)._replace(nodes_us=(4.0, 50.0), total_us=108.0)
    assert graph_at_profile_speed(sized, slower)[1:3] == (84.0, (2.0, 40.0))
    tiny = timed((VIEW, gemm(1)), tiny=True)._replace(nodes_us=(0.0, 0.0), total_us=16.0)
    assert graph_at_profile_speed(tiny, slower)[1:3] == (8.0, (0.0, 0.0))


def test_of_a_cold_graph_only_what_reads_weights_counts() -> None:
    many, few = gemm(2000), gemm(8)  # results and weights are most of what they move

    def sampled(cold: bool) -> int:
        one = timed((many, few), tiny=False)._replace(cold=cold, nodes_us=(500.0, 300.0))
        return len(node_samples(one, node_kernels(one, IDLE), 1.0, IDLE))

    assert (sampled(cold=False), sampled(cold=True)) == (2, 1)


def test_a_kernel_that_no_clock_tells_from_an_idle_node_is_a_short_one() -> None:
    graph = timed((gemm(1), gemm(2000)), tiny=False)._replace(nodes_us=(0.0, 400.0))
    short, long = node_samples(graph, node_kernels(graph, IDLE), 1.0, IDLE)
    assert 0 < short.us < 0.1
    assert long.us == pytest.approx(399.5)
    # An error of either counts as one of the node and of its share of the pass.
    assert short.beside_us == long.beside_us == pytest.approx(1.0 + PASS_SHARE * graph.total_us)


def test_one_slow_moment_does_not_hide_the_kernels_of_a_class() -> None:
    rare, usual = msgspec.structs.replace(gemm(500), host_class="node.rnn.GRU"), gemm(500)
    disturbed = [timed((op,), tiny=True)._replace(nodes_us=(44.5,)) for op in (rare, usual)]
    sized = timed((rare, usual), tiny=False)._replace(nodes_us=(24.5, 24.5))
    idle = _idle([*graphs(), *disturbed, sized])
    # Of many tiny nodes one that was slow changes nothing; of one alone nothing faster is known but the sized ones.
    assert host_cost(idle, usual.host_class) == 5.5
    assert host_cost(idle, rare.host_class) == 25.0


def test_times_sum_to_what_warm_graphs_take_in_the_middle() -> None:
    host, fits = DispatchFit({"": NODE_US}, 0.0, 0.0, FIXED_US), fit_nodes(graphs()).kernels["fp32"]

    def lasting(ops: tuple[Op, ...], longer: float) -> TimedGraph:
        graph, rows = timed(ops, tiny=False), np.array([row_of(op, 1, resident=1.0) for op in ops if op.launches])
        return graph._replace(total_us=graph.host_us(host) + longer * float(evaluate(fits["gemm"], rows).sum()))

    ops = gemm(700), gemm(300)
    warm, cold = [lasting(ops, longer) for longer in (1.1, 1.2, 3.0)], lasting(ops, 5.0)._replace(cold=True)
    mostly_host = lasting((*ops, *[VIEW] * 100), 9.0)._replace(total_us=300.0)
    summed = summing_to(fits, [*warm, cold, cold, mostly_host], host)
    assert {name: fit.scale / fits[name].scale for name, fit in summed.items()} == pytest.approx({"gemm": 1.2})
    assert summing_to(fits, [cold], host) == fits


def test_a_graph_is_timed_whole_and_by_nodes_in_the_order_of_its_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    executed, cell = onnx_graph.executed, graph_cell(5, "fp32", tiny=True)
    first = calibrator()
    row = first.measure(cell)
    assert row.timings["single"].median_s > 0
    assert len(row.calls_us) == len(ops_of(cell.name, 5, tiny=True))

    def otherwise(watched: onnx_session.Watched, feed: dict[str, object]) -> tuple[Op, ...]:
        ops = executed(watched, feed)[::-1]
        return tuple(msgspec.structs.replace(op, live_bytes=Affine(place)) for place, op in enumerate(ops))

    monkeypatch.setattr(onnx_graph, "executed", otherwise)
    names = [(op.name, op.dims) for op in first._graph_ops(cell)]
    assert len(set(map(str, names))) > 1
    assert [(op.name, op.dims) for op in calibrator()._graph_ops(cell)] == names


def test_an_ordinary_model_is_exported_timed_and_judged_by() -> None:
    workload = suites.get(suites.GATE).ready[0]
    cell = acceptance.model_cell(workload, 8, "fp32", "onnxruntime")
    row = calibrator().measure(cell)
    assert network_fit.is_holdout(row)
    known = profile(device(name="cpu", kind="cpu", asynchronous=False))
    fit = msgspec.structs.replace(fit_nodes(graphs()), spread=0.1)
    (error,) = network_fit.errors_of_fit(fit, [row], known, "onnxruntime")
    graph, _ = schedules.cell_graph(cell, "cpu")
    assert {op.host_class.split(".")[0] for op in graph.ops} == {"node"}
    whole = msgspec.structs.replace(known, runtimes={**known.runtimes, "onnxruntime": fit})
    expected = Predictor(whole).predict(graph, 8, runtime="onnxruntime").latency_ms
    assert error.predicted_us == pytest.approx(1e3 * expected)
    assert error.measured_us == pytest.approx(1e6 * row.timings["single"].median_s)
