"""Forward passes of every runtime on the simulated device, added up by hand."""

from __future__ import annotations

import msgspec
import pytest

from latpred import runtimes
from latpred.calibration.devices.simulated import SimulatedDevice, SimulatedSpec, TrueCosts
from latpred.calibration.timing import timer
from latpred.errors import RuntimeRefusalError, UsageError
from latpred.runtimes.eager import one_step_per_op

COSTS = TrueCosts()
QUIET = SimulatedSpec(noise=0.0, spikes=0.0, drift=0.0, clock_us=0.0)
BUILT_IN = (
    *("eager", "torchscript", "onnxruntime", "cuda-graphs", "onnxruntime-cuda-graphs"),
    *("compile", "compile-reduce-overhead"),
)
LAUNCH, SYNC, FLOOR = 4, 3, 1.8


def true_us(graph, runtime, protocol="single"):
    return SimulatedDevice(QUIET).true_latency_s(graph, 1, runtime, protocol) * 1e6


@pytest.fixture
def run_by(make_op, make_graph):
    """A graph of so many steps of a class as a runtime has it, each launching one kernel."""

    def make(runtime, host_class, count, family="elementwise", numel=0):
        ops = [make_op(host_class, family, numel)] * count
        return msgspec.structs.replace(make_graph(ops), runtime=runtime, target="cuda")

    return make


def test_every_built_in_runtime_is_simulated(run_by) -> None:
    assert COSTS.runtimes.keys() == set(BUILT_IN) - {"eager"}
    for name in BUILT_IN:
        graph = run_by("eager" if name == "eager" else COSTS.runtimes[name].graphs[0], "kernel.extern", 3)
        assert true_us(graph, name) > 3 * FLOOR


@pytest.mark.parametrize(
    ("runtime", "host_class", "expected_us"),
    [
        ("torchscript", "node.gemm.linear", 4.5 + 10 * 3.7),
        ("torchscript", "node.odd", 4.5 + 10 * 2.6),
        ("onnxruntime", "node.conv", 11 + 10 * 4.4),
        ("compile", "kernel.generated.joined", 8 + 10 * 3.1),
        ("compile", "kernel.extern.conv", 8 + 10 * 7.2),
    ],
)
def test_steps_cost_what_their_class_costs(run_by, runtime, host_class, expected_us) -> None:
    assert true_us(run_by(runtime, host_class, 10, family=""), runtime) == pytest.approx(expected_us + SYNC)


def test_kernels_take_their_factor_of_eagers(run_by) -> None:
    kernel_us = FLOOR + 8 * 10**6 / 2.6e6 / 0.9
    graph = run_by("onnxruntime", "node.elementwise", 10, numel=10**6)
    first_us = 11 + 1.5 + LAUNCH
    assert true_us(graph, "onnxruntime") == pytest.approx(first_us + 10 * 1.1 * kernel_us + 9 * COSTS.gap_us + SYNC)


@pytest.mark.parametrize(
    ("runtime", "walked_by", "host_us", "factor"),
    [
        ("cuda-graphs", "cuda-graphs", 7.0, 1.0),
        ("cuda-graphs", "eager", 7.0, 1.0),
        ("onnxruntime-cuda-graphs", "onnxruntime", 12.5, 1.1),
    ],
)
def test_a_replay_costs_one_launch_and_the_gaps_of_a_graph(run_by, runtime, walked_by, host_us, factor) -> None:
    graph = run_by(walked_by, "elementwise", 10)
    device_us = 10 * FLOOR * factor + 9 * COSTS.node_gap_us
    assert true_us(graph, runtime) == pytest.approx(host_us + LAUNCH + device_us + SYNC)
    # From one replay to the next lies an ordinary gap.
    assert true_us(graph, runtime, "pipelined") == pytest.approx(max(host_us, device_us + COSTS.gap_us))


def test_kernels_of_every_compiled_graph_are_replayed_by_themselves(make_op, make_graph) -> None:
    kernel, wait = make_op("kernel.extern.gemm", "elementwise"), make_op("sync.item", syncs=1)
    guards, odd = make_op("guards"), make_op("elementwise.add", "elementwise")
    compiled = [guards, kernel, kernel, kernel]
    graph = msgspec.structs.replace(make_graph([*compiled, odd, wait, *compiled]), runtime="compile", target="cuda")
    graph_us = 3 * FLOOR + 2 * COSTS.node_gap_us
    # Guards and a replay, then an op that is dispatched, and a wait for all of it.
    launched_us = 9 + 7 + 8 + LAUNCH + graph_us
    waited_us = launched_us + COSTS.gap_us + FLOOR + SYNC
    expected_us = waited_us + 7 + 8 + LAUNCH + graph_us + SYNC
    assert true_us(graph, "compile-reduce-overhead") == pytest.approx(expected_us)
    assert true_us(graph, "compile") > true_us(graph, "compile-reduce-overhead")


def test_a_wait_cannot_be_replayed(make_op, make_graph) -> None:
    graph = make_graph([make_op("elementwise", "elementwise"), make_op("sync", syncs=1)])
    with pytest.raises(RuntimeRefusalError, match="synchronisation of handmade cannot be captured"):
        SimulatedDevice().prepare_model(graph, 1, "cuda-graphs")


def test_a_graph_serves_only_the_runtime_it_was_walked_for(run_by) -> None:
    with pytest.raises(UsageError, match="is what eager runs, and compile is simulated from the graph of compile"):
        SimulatedDevice().prepare_model(run_by("eager", "elementwise", 1), 1, "compile")


def test_a_third_partys_runtime_is_simulated_from_its_schedule(monkeypatch, make_op, make_graph) -> None:
    class Halved:
        name = "halved"

        def lower(self, graph, batch):
            return one_step_per_op(self.name, graph.at(batch)[::2])

    monkeypatch.setattr(runtimes, "get", lambda name: {"halved": Halved()}[name])
    shared = make_op("norm", "norm", 10**6, launches=2, module_calls=1)
    graph = make_graph([shared, make_op("view"), make_op("sync", syncs=1), make_op("view")])
    half_us = 2.6 + 8 * 10**6 / 2 / 2.6e6 / 0.7
    host_us = 6 + COSTS.module_call_us + 6.4
    expected_us = host_us + LAUNCH + 2 * half_us + COSTS.gap_us + SYNC + SYNC
    assert true_us(graph, "halved") == pytest.approx(expected_us)


def test_crossover_by_hand(run_by) -> None:
    device, batches = SimulatedDevice(), [1, 2, 4, 8, 16]
    # Host: 4.5 + 20 * 3.7 = 78.5. Device: 20 * (1.8 + 1.2 + 8e5 * batch / 2.34e6) = 60 + 6.84 * batch.
    assert device.true_crossover(run_by("torchscript", "node.gemm", 20, numel=10**5), batches, "torchscript") == 4
    assert device.true_crossover(run_by("torchscript", "node.gemm", 20), batches, "torchscript") is None
    # Host: 7. Device: more than 20 floors.
    assert device.true_crossover(run_by("eager", "elementwise", 20), batches, "cuda-graphs") == 1


def test_noise_leaves_replays_where_they_are(run_by) -> None:
    graph = run_by("onnxruntime", "node.gemm", 40, "gemm")
    device = SimulatedDevice(SimulatedSpec(seed=5))
    measured = timer.single(device, device.prepare_model(graph, 1, "onnxruntime-cuda-graphs"))
    assert measured.median_s * 1e6 == pytest.approx(true_us(graph, "onnxruntime-cuda-graphs"), rel=0.02)
