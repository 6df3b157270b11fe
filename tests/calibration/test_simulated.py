"""The simulated device by hand, against the predictor, with which it shares no code, and against its own truth."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from counts import imports_of
from factories import bare, perfect
from factories import graph as graph_of

from latpred import runtimes
from latpred.calibration.cells import Cell
from latpred.calibration.devices import simulated, simulated_costs
from latpred.calibration.devices.simulated import SimulatedDevice, SimulatedSpec, TrueCosts
from latpred.calibration.timing import timer
from latpred.calibration.workloads import single_ops
from latpred.errors import RuntimeRefusalError
from latpred.graph.graph import Affine
from latpred.prediction.predictor import Predictor
from latpred.runtimes import one_step_per_op

QUIET = SimulatedSpec(noise=0.0, spikes=0.0, drift=0.0, clock_us=0.0)
COSTS = TrueCosts()
LAUNCH, SYNC, FLOOR = 4, 3, 1.8
SHAPE = {"rows": 4, "cols": 8}


def true_us(graph, runtime="eager", protocol="single"):
    return SimulatedDevice(QUIET).true_latency_s(graph, 1, runtime, protocol) * 1e6


def random_graph(seed):
    """Ops of all sorts, some of which wait for the device, at a random balance of host and device."""
    rng = random.Random(seed)
    size = 10 ** rng.uniform(3, 6)
    ops = []
    for _ in range(rng.randint(20, 120)):
        kind = rng.choice(("view", "copy", "elementwise", "norm", "elementwise"))
        calls = {"module_calls": rng.choice((0, 0, 1)), "python_calls": rng.choice((0, 3))}
        if kind == "view":
            ops.append(bare("view", **calls))
        elif rng.random() < 0.1:
            ops.append(bare("sync", syncs=1, **calls))
        else:
            ops.append(bare(kind, kind, int(size * rng.uniform(0.1, 3)), **calls))
    if seed % 2:  # all kernels first: a host that has to wait for a short queue is late for what follows
        ops.sort(key=lambda op: not op.launches)
    return graph_of(*ops)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("queue", [1024, 25])
def test_latencies_agree_with_those_of_the_predictor(seed, queue):
    graph, predictor = random_graph(seed), Predictor(perfect(COSTS, queue=queue))
    device = SimulatedDevice(replace(QUIET, queue=queue))
    call = device.prepare_model(graph, 3)
    once_s, period_s = (predictor.predict(graph, 3, protocol=name).latency_ms / 1e3 for name in ("single", "pipelined"))
    assert timer.single(device, call).median_s == pytest.approx(once_s, rel=1e-6)
    assert device.true_latency_s(graph, 3) == pytest.approx(once_s, rel=1e-6)
    assert timer.pipelined(device, call).median_s == pytest.approx(period_s, rel=5e-3)
    assert device.true_latency_s(graph, 3, protocol="pipelined") == pytest.approx(period_s, rel=1e-6)


def test_a_kernels_time_by_hand():
    op = bare("gemm", "gemm", 1000, macs=Affine(0, 10**6))
    device = SimulatedDevice(QUIET)
    compute, memory = 10**6 / (9e6 * 0.75) + 1000 * 4e-3, 8000 / (2.6e6 * 0.85)
    queued = timer.queued(device, device.prepare_model(graph_of(op), 1))
    assert queued.median_s * 1e6 == pytest.approx(2.9 + compute + 0.2 * memory + 1.2)


def test_noise_and_spikes_are_as_asked_for():
    device = SimulatedDevice(SimulatedSpec(seed=1, clock_us=0.0))
    call = device.prepare(Cell("dispatch", "view", SHAPE))
    taken = []
    for _ in range(20_000):
        start = device.clock()
        call()
        taken.append((device.clock() - start) * 1e6 / 1.2)
    spikes = [factor for factor in taken if factor > 1.3]
    usual = [factor for factor in taken if factor <= 1.3]
    assert len(spikes) / len(taken) == pytest.approx(0.01, rel=0.2)
    assert sum(spikes) / len(spikes) == pytest.approx(3.0, rel=0.1)
    assert (sum((factor - 1) ** 2 for factor in usual) / len(usual)) ** 0.5 == pytest.approx(0.02, rel=0.1)


def test_the_true_latency_by_hand_and_the_device_as_it_was():
    # Host: 6 + 20 * 4.6 = 98. Device: 20 * (1.8 + 1.2 + 8e5 * batch / 2.34e6) = 60 + 6.84 * batch.
    graph = graph_of(*[bare("elementwise", "elementwise", 10**5)] * 20)
    device = SimulatedDevice()
    flat_s = device.true_latency_s(graph, 1)
    assert device.true_latency_s(graph, 4) < 1.1 * flat_s < device.true_latency_s(graph, 8)
    # Nor does asking for the truth disturb the device, whose noise its seed sets.
    devices = device, SimulatedDevice(), SimulatedDevice(SimulatedSpec(seed=1))
    ways = timer.single, timer.pipelined, timer.issue, timer.queued
    asked, silent, other = ([way(one, one.prepare_model(graph, 2)) for way in ways] for one in devices)
    assert asked == silent != other


def test_a_cell_runs_its_op_without_the_python_around_it():
    device, cell = SimulatedDevice(QUIET), Cell("dispatch", "layer_norm", SHAPE)
    assert any(any(op.calls) for op in single_ops.graph(cell)[0].ops)
    issued = timer.issue(device, device.prepare(cell))
    assert issued.median_s * 1e6 == pytest.approx(COSTS.dispatch("norm"))


def test_simulation_shares_no_code_with_the_predictor():
    allowed = {
        "latpred.runtimes",  # the registry
        *("latpred.errors", "latpred.graph.graph", "latpred.ops.families", "latpred.profile.document"),
        "latpred.query",  # the names of precisions
        *("latpred.calibration.cells", "latpred.calibration.workloads.single_ops"),
        *(f"latpred.calibration.devices.{name}" for name in ("base", "machine", "simulated_costs")),
    }
    imported = {found.target for module in (simulated, simulated_costs) for found in imports_of(module.__name__)}
    ours = {name for name in imported if name.startswith("latpred")}
    assert ours
    assert ours <= allowed


def steps_of(host_class, family="elementwise", numel=0):
    """Ten steps of a class, each launching one kernel."""
    return graph_of(*[bare(host_class, family, numel)] * 10)


def test_every_built_in_runtime_is_simulated() -> None:
    built = {name for name in runtimes.built_in() if not hasattr(runtimes.get(name), "predicted_only")}
    assert COSTS.runtimes.keys() == built - {"eager"}
    for name in COSTS.runtimes:
        assert true_us(steps_of("kernel.extern"), name) > 10 * FLOOR


@pytest.mark.parametrize(
    ("runtime", "host_us", "factor"), [("cuda-graphs", 7.0, 1.0), ("onnxruntime-cuda-graphs", 12.5, 1.1)]
)
def test_a_replay_costs_one_launch_and_the_gaps_of_a_graph(runtime, host_us, factor) -> None:
    graph, device_us = steps_of("elementwise"), 10 * FLOOR * factor + 9 * COSTS.node_gap_us
    assert true_us(graph, runtime) == pytest.approx(host_us + LAUNCH + device_us + SYNC)
    # From one replay to the next lies an ordinary gap.
    assert true_us(graph, runtime, "pipelined") == pytest.approx(max(host_us, device_us + COSTS.gap_us))


def test_kernels_of_every_compiled_graph_are_replayed_by_themselves() -> None:
    kernel, wait = bare("kernel.extern.gemm", "elementwise"), bare("sync.item", syncs=1)
    compiled = [bare("guards"), kernel, kernel, kernel]
    ops = [*compiled, bare("elementwise.add", "elementwise"), wait, *compiled]
    graph = graph_of(*ops)
    graph_us = 3 * FLOOR + 2 * COSTS.node_gap_us
    # Guards and a replay, then an op that is dispatched, and a wait for all of it.
    waited_us = 9 + 7 + 8 + LAUNCH + graph_us + COSTS.gap_us + FLOOR + SYNC
    expected_us = waited_us + 7 + 8 + LAUNCH + graph_us + SYNC
    assert true_us(graph, "compile-reduce-overhead") == pytest.approx(expected_us)
    assert true_us(graph, "compile") > true_us(graph, "compile-reduce-overhead")


def test_a_wait_cannot_be_replayed() -> None:
    graph = graph_of(bare("elementwise", "elementwise"), bare("sync", syncs=1))
    device = SimulatedDevice()
    assert device.time_replayed(device.prepare_model(graph, 1), 3) is None
    with pytest.raises(RuntimeRefusalError, match="synchronisation of example-net cannot be captured"):
        device.prepare_model(graph, 1, "cuda-graphs")


def test_a_third_partys_runtime_is_simulated_from_its_schedule(monkeypatch) -> None:
    class Halved:
        name = "halved"

        def lower(self, graph, batch):
            return one_step_per_op(self.name, graph.at(batch)[::2])

    monkeypatch.setattr(runtimes, "get", lambda name: {"halved": Halved()}[name])
    shared = bare("norm", "norm", 10**6, launches=2, module_calls=1)
    graph = graph_of(shared, bare("view"), bare("sync", syncs=1), bare("view"))
    half_us = 2.6 + 8 * 10**6 / 2 / 2.6e6 / 0.7
    host_us = 6 + COSTS.module_call_us + 6.4
    assert true_us(graph, "halved") == pytest.approx(host_us + LAUNCH + 2 * half_us + COSTS.gap_us + SYNC + SYNC)
