"""The simulated device against an independent, slower simulation, and against its own truth."""

from __future__ import annotations

import ast
import heapq
import itertools
import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from latpred import runtimes
from latpred.calibration.cells import Cell
from latpred.calibration.devices import simulated, simulated_costs
from latpred.calibration.devices.simulated import SimulatedDevice, SimulatedSpec, TrueCosts
from latpred.calibration.timing import timer
from latpred.errors import RuntimeRefusalError, UsageError
from latpred.runtimes import one_step_per_op

QUIET = SimulatedSpec(noise=0.0, spikes=0.0, drift=0.0, clock_us=0.0)
COSTS = TrueCosts()
LAUNCH, SYNC, FLOOR = 4, 3, 1.8


def true_us(graph, runtime="eager", protocol="single"):
    return SimulatedDevice(QUIET).true_latency_s(graph, 1, runtime, protocol) * 1e6


class EventByEvent:
    """Host, launches on their way, and device as processes that wake each other: no recurrence, one event at a time."""

    def __init__(self, program, queue):
        self.program, self.queue = iter(program), queue
        self.events, self.tickets = [], itertools.count()
        self.launched = self.arrived = self.started = self.finished = 0
        self.lengths, self.last_end, self.busy = [], float("-inf"), False
        self.waiting_for, self.held = None, None
        self.now = 0.0

    def run(self):
        """Host time at which the program ends."""
        self.at(0.0, self.host)
        while self.events:
            self.now, _, action = heapq.heappop(self.events)
            action()
        return self.ended

    def at(self, time, action):
        heapq.heappush(self.events, (time, next(self.tickets), action))

    def host(self):
        for what, us in self.program:
            if what == "work":
                return self.at(self.now + us, self.host)
            if what == "launch":
                self.held = us
                return self.launch()
            self.waiting_for = us
            return self.wait()
        self.ended = self.now
        return None

    def launch(self):
        if self.launched - self.started >= self.queue:
            return  # a kernel that starts tries again
        self.lengths.append(self.held)
        self.held = None
        self.launched += 1
        self.at(self.now + COSTS.launch_us, self.arrive)
        self.at(self.now, self.host)

    def wait(self):
        if self.finished == self.launched:
            self.at(self.now + self.waiting_for, self.host)
            self.waiting_for = None

    def arrive(self):
        self.arrived += 1
        self.start()

    def start(self):
        if self.busy or self.started == self.arrived:
            return
        if self.now < self.last_end + COSTS.gap_us:
            self.at(self.last_end + COSTS.gap_us, self.start)
            return
        self.busy = True
        self.at(self.now + self.lengths[self.started], self.finish)
        self.started += 1
        if self.held is not None:
            self.launch()

    def finish(self):
        self.busy, self.last_end = False, self.now
        self.finished += 1
        self.start()
        if self.waiting_for is not None:
            self.wait()


def program_of(graph, batch, forwards):
    """Instructions of forward passes and a last synchronisation, costs looked up by hand."""
    instructions = []
    for _ in range(forwards):
        instructions.append(("work", COSTS.forward_us))
        for op in graph.ops:
            host_us = op.module_calls * COSTS.module_call_us + op.python_calls * COSTS.python_call_us
            instructions.append(("work", host_us + COSTS.dispatch_us[op.host_class]))
            kernel_us = 0.0
            if op.launches:
                costs = COSTS.kernels[op.family]
                moved_us = (op.read_bytes.at(batch) + op.write_bytes.at(batch)) / op.launches / 2.6e6 / costs.memory
                kernel_us = costs.floor_us + moved_us
            instructions += [("launch", kernel_us)] * op.launches
            instructions += [("sync", COSTS.sync_us)] * op.syncs
    return [*instructions, ("sync", COSTS.sync_us)]


def random_graph(seed, make_op, make_graph):
    """Ops of all sorts, some of which wait for the device, at a random balance of host and device."""
    rng = random.Random(seed)
    size = 10 ** rng.uniform(3, 6)
    ops = []
    for _ in range(rng.randint(20, 120)):
        kind = rng.choice(("view", "copy", "elementwise", "norm", "elementwise"))
        calls = {"module_calls": rng.choice((0, 0, 1)), "python_calls": rng.choice((0, 3))}
        if kind == "view":
            ops.append(make_op("view", **calls))
        elif rng.random() < 0.1:
            ops.append(make_op("sync", syncs=1, **calls))
        else:
            numel = int(size * rng.uniform(0.1, 3))
            ops.append(make_op(kind, kind, numel, launches=rng.choice((1, 1, 1, 2)), **calls))
    return make_graph(ops)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("queue", [1024, 25])
def test_latencies_agree_with_an_event_by_event_simulation(seed, queue, make_op, make_graph):
    graph = random_graph(seed, make_op, make_graph)
    device = SimulatedDevice(replace(QUIET, queue=queue))
    call = device.prepare_model(graph, 3)
    once, long, short = (EventByEvent(program_of(graph, 3, count), queue).run() for count in (1, 60, 30))
    assert timer.single(device, call).median_s * 1e6 == pytest.approx(once, rel=1e-6)
    assert device.true_latency_s(graph, 3) * 1e6 == pytest.approx(once, rel=1e-6)
    period_us = (long - short) / 30
    assert timer.pipelined(device, call).median_s * 1e6 == pytest.approx(period_us, rel=5e-3)
    assert device.true_latency_s(graph, 3, protocol="pipelined") * 1e6 == pytest.approx(period_us, rel=1e-6)


def test_latencies_by_hand(make_op, make_graph):
    graph = make_graph([make_op("view"), make_op("elementwise", "elementwise")])
    # 6 forward + 1.2 view + 4.6 add, then the kernel, then 3 to notice.
    assert true_us(graph) == pytest.approx(6 + 1.2 + 4.6 + LAUNCH + FLOOR + SYNC)
    assert true_us(graph, protocol="pipelined") == pytest.approx(6 + 1.2 + 4.6)


def test_a_kernels_time_by_hand(make_op, make_graph):
    op = make_op("gemm", "gemm", 1000, macs=10**6)
    device = SimulatedDevice(QUIET)
    compute, memory = 10**6 / (9e6 * 0.75) + 1000 * 4e-3, 8000 / (2.6e6 * 0.85)
    queued = timer.queued(device, device.prepare_model(make_graph([op]), 1))
    assert queued.median_s * 1e6 == pytest.approx(2.9 + compute + 0.2 * memory + 1.2)


HOST_CLASSES = ("view", "factory", "free", "gemm", "conv", "attention", "norm", "elementwise", "copy", "index", "rnn")


@pytest.mark.parametrize("seed", range(20))
def test_costs_come_back_within_two_percent(seed, make_op, make_graph):
    families = {"view": "", "factory": "", "free": ""}
    ops = {name: make_op(name, families.get(name, name), 64) for name in HOST_CLASSES}
    device = SimulatedDevice(SimulatedSpec(seed=seed), graphs=lambda cell: (make_graph([ops[cell.name]]), 1))
    for name in HOST_CLASSES:
        issued = timer.issue(device, device.prepare(Cell("dispatch", name)))
        assert issued.median_s * 1e6 == pytest.approx(COSTS.dispatch(name), rel=0.02), name
    for numel in (100, 10**5, 10**7):
        op = make_op("elementwise", "elementwise", numel)
        queued = timer.queued(device, device.prepare_model(make_graph([op]), 1))
        true = FLOOR + 8 * numel / 2.6e6 / 0.9 + COSTS.gap_us
        assert queued.median_s * 1e6 == pytest.approx(true, rel=0.02)

    def issued_us(**calls):
        graph = make_graph([make_op("view", **calls)] * 10)
        return timer.issue(device, device.prepare_model(graph, 1)).median_s * 1e5

    bare = issued_us()
    assert (issued_us(module_calls=20) - bare) / 20 == pytest.approx(COSTS.module_call_us, rel=0.02)
    assert (issued_us(python_calls=200) - bare) / 200 == pytest.approx(COSTS.python_call_us, rel=0.02)


def test_noise_and_spikes_are_as_asked_for(make_op, make_graph):
    graph = make_graph([make_op("view")])
    device = SimulatedDevice(replace(SimulatedSpec(seed=1), clock_us=0.0), graphs=lambda cell: (graph, 1))
    call = device.prepare(Cell("dispatch", "view"))
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


def test_the_device_clock_drifts(make_op, make_graph):
    graph = make_graph([make_op("elementwise", "elementwise", 10**6)])
    fast, true = (SimulatedDevice(replace(QUIET, drift=drift)) for drift in (0.01, 0.0))
    queued = [device.time_queued(device.prepare_model(graph, 1), 10) for device in (fast, true)]
    assert queued[0] / queued[1] == pytest.approx(1.01)
    assert timer.single(fast, fast.prepare_model(graph, 1)) == timer.single(true, true.prepare_model(graph, 1))


def test_true_crossover_and_knee_by_hand(make_op, make_graph):
    # Host: 6 + 20 * 4.6 = 98. Device: 20 * (1.8 + 1.2 + 8e5 * batch / 2.34e6) = 60 + 6.84 * batch.
    graph = make_graph([make_op("elementwise", "elementwise", 10**5)] * 20)
    device, silent, batches = SimulatedDevice(), SimulatedDevice(), [1, 2, 4, 8, 16]
    assert device.true_crossover(graph, batches) == 8
    flat_s = device.true_latency_s(graph, 1)
    assert device.true_latency_s(graph, 4) < 1.1 * flat_s < device.true_latency_s(graph, 8)
    assert device.true_knee(graph, batches) == 8
    assert device.true_crossover(graph, [1, 2]) is None
    assert device.true_knee(graph, [1, 2]) is None
    # Nor does asking for the truth disturb the device.
    results = [timer.single(one, one.prepare_model(graph, 2)) for one in (device, silent)]
    assert results[0] == results[1]


def test_a_cell_runs_its_op_without_the_python_around_it(make_op, make_graph):
    graph = make_graph([make_op("norm", "norm", 64, module_calls=5, python_calls=50)])
    device = SimulatedDevice(QUIET, graphs=lambda cell: (graph, 1))
    issued = timer.issue(device, device.prepare(Cell("dispatch", "layer_norm")))
    assert issued.median_s * 1e6 == pytest.approx(COSTS.dispatch("norm"))


def test_what_does_not_fit_is_out_of_memory(make_op, make_graph):
    device = SimulatedDevice(SimulatedSpec(memory_bytes=1000))
    with pytest.raises(MemoryError, match="simulated device has 1000"):
        device.prepare(Cell("memory", "bandwidth", {"bytes": 600}))
    graph = msgspec.structs.replace(make_graph([make_op("view")]), parameter_bytes=2000)
    with pytest.raises(MemoryError, match="handmade at batch 2"):
        device.prepare_model(graph, 2)


def test_memory_cells_move_bytes():
    device = SimulatedDevice(QUIET)
    upload = timer.single(device, device.prepare(Cell("memory", "upload", {"bytes": 24_000_000})))
    assert upload.median_s * 1e6 == pytest.approx(4.9 + 4 + 1000 + 3 + 3)
    bandwidth = timer.queued(device, device.prepare(Cell("memory", "bandwidth", {"bytes": 10**8})))
    assert 2e8 / (bandwidth.median_s * 1e6) == pytest.approx(2.6e6 * 0.8, rel=0.05)


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda device, graph: device.prepare(Cell("network", "encoder")), "go through prepare_model"),
        (lambda device, graph: device.prepare(Cell("clock", "hour")), "'mark', 'tiny' or 'busy'"),
        (lambda device, graph: device.prepare(Cell("memory", "lane", {"bytes": 1})), "'bandwidth' or 'upload'"),
        (lambda device, graph: device.prepare_model(object(), 1), "Trace the model first"),
        (lambda device, graph: device.prepare_model(graph, 1, "onnxruntime"), "is simulated from the graph of onnxrun"),
        (lambda device, graph: device.prepare_model(graph, 1, "onxruntime"), "No runtime is called 'onxruntime'"),
        (lambda device, graph: device.prepare_model(graph, ()), "no batch size"),
    ],
)
def test_what_cannot_be_simulated_says_what_can(attempt, message, make_op, make_graph):
    with pytest.raises(UsageError, match=message):
        attempt(SimulatedDevice(), make_graph([make_op("view")]))


def test_batch_is_read_off_the_inputs(make_op, make_graph):
    class Tensor:
        shape = (8, 128)

    graph = make_graph([make_op("elementwise", "elementwise", 10**6)])

    def latency(inputs):
        device = SimulatedDevice(QUIET)
        return timer.single(device, device.prepare_model(graph, inputs)).median_s

    assert latency(8) == latency((Tensor(),)) == latency({"input_ids": Tensor()}) != latency(1)


def test_simulation_shares_no_code_with_the_predictor():
    allowed = {
        "latpred",  # its registry of runtimes
        *("latpred.errors", "latpred.graph.graph", "latpred.ops.families"),
        "latpred.query",  # the names of precisions
        *("latpred.profile.document", "latpred.calibration.cells", "latpred.calibration.workloads"),
        *(f"latpred.calibration.devices{name}" for name in ("", ".base", ".simulated_costs", ".simulated_programs")),
    }
    imported = set()
    for module in (simulated, simulated_costs, simulated_costs):
        for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
            if isinstance(node, ast.ImportFrom):
                imported.add(node.module)
            elif isinstance(node, ast.Import):
                imported.update(alias.name for alias in node.names)
    ours = {name for name in imported if name.startswith("latpred")}
    assert ours
    assert ours <= allowed


@pytest.fixture
def run_by(make_op, make_graph):
    """A graph of so many steps of a class as a runtime has it, each launching one kernel."""

    def make(runtime, host_class, count, family="elementwise", numel=0):
        ops = [make_op(host_class, family, numel)] * count
        return msgspec.structs.replace(make_graph(ops), runtime=runtime, target="cuda")

    return make


def test_every_built_in_runtime_is_simulated(run_by) -> None:
    built = {name for name in runtimes.built_in() if not hasattr(runtimes.get(name), "predicted_only")}
    assert COSTS.runtimes.keys() == built - {"eager"}
    for name, costs in COSTS.runtimes.items():
        assert true_us(run_by(costs.graphs[0], "kernel.extern", 3), name) > 3 * FLOOR


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
    ("runtime", "graph_of", "host_us", "factor"),
    [
        ("cuda-graphs", "cuda-graphs", 7.0, 1.0),
        ("cuda-graphs", "eager", 7.0, 1.0),
        ("onnxruntime-cuda-graphs", "onnxruntime", 12.5, 1.1),
    ],
)
def test_a_replay_costs_one_launch_and_the_gaps_of_a_graph(run_by, runtime, graph_of, host_us, factor) -> None:
    graph = run_by(graph_of, "elementwise", 10)
    device_us = 10 * FLOOR * factor + 9 * COSTS.node_gap_us
    assert true_us(graph, runtime) == pytest.approx(host_us + LAUNCH + device_us + SYNC)
    # From one replay to the next lies an ordinary gap.
    assert true_us(graph, runtime, "pipelined") == pytest.approx(max(host_us, device_us + COSTS.gap_us))


def test_kernels_of_every_compiled_graph_are_replayed_by_themselves(make_op, make_graph) -> None:
    kernel, wait = make_op("kernel.extern.gemm", "elementwise"), make_op("sync.item", syncs=1)
    compiled = [make_op("guards"), kernel, kernel, kernel]
    ops = [*compiled, make_op("elementwise.add", "elementwise"), wait, *compiled]
    graph = msgspec.structs.replace(make_graph(ops), runtime="compile", target="cuda")
    graph_us = 3 * FLOOR + 2 * COSTS.node_gap_us
    # Guards and a replay, then an op that is dispatched, and a wait for all of it.
    waited_us = 9 + 7 + 8 + LAUNCH + graph_us + COSTS.gap_us + FLOOR + SYNC
    expected_us = waited_us + 7 + 8 + LAUNCH + graph_us + SYNC
    assert true_us(graph, "compile-reduce-overhead") == pytest.approx(expected_us)
    assert true_us(graph, "compile") > true_us(graph, "compile-reduce-overhead")


def test_a_wait_cannot_be_replayed(make_op, make_graph) -> None:
    graph = make_graph([make_op("elementwise", "elementwise"), make_op("sync", syncs=1)])
    device = SimulatedDevice()
    assert device.time_replayed(device.prepare_model(graph, 1), 3) is None
    with pytest.raises(RuntimeRefusalError, match="synchronisation of handmade cannot be captured"):
        device.prepare_model(graph, 1, "cuda-graphs")


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
    assert true_us(graph, "halved") == pytest.approx(host_us + LAUNCH + 2 * half_us + COSTS.gap_us + SYNC + SYNC)


def test_crossovers_of_other_runtimes_by_hand(run_by) -> None:
    device, batches = SimulatedDevice(), [1, 2, 4, 8, 16]
    # Host: 4.5 + 20 * 3.7 = 78.5. Device: 20 * (1.8 + 1.2 + 8e5 * batch / 2.34e6) = 60 + 6.84 * batch.
    assert device.true_crossover(run_by("torchscript", "node.gemm", 20, numel=10**5), batches, "torchscript") == 4
    assert device.true_crossover(run_by("torchscript", "node.gemm", 20), batches, "torchscript") is None
    # Host: 7. Device: more than 20 floors.
    assert device.true_crossover(run_by("eager", "elementwise", 20), batches, "cuda-graphs") == 1
