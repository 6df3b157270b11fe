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

from latpred.calibration.cells import Cell
from latpred.calibration.devices import simulated, simulated_costs, simulated_programs
from latpred.calibration.devices.simulated import SimulatedDevice, SimulatedSpec, TrueCosts
from latpred.calibration.timing import timer
from latpred.errors import UsageError

QUIET = SimulatedSpec(noise=0.0, spikes=0.0, drift=0.0, clock_us=0.0)
COSTS = TrueCosts()


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
                law = COSTS.kernels[op.family]
                moved_us = (op.read_bytes.at(batch) + op.write_bytes.at(batch)) / op.launches / 2.6e6 / law.memory
                kernel_us = law.floor_us + moved_us
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
def test_single_latency_agrees_with_an_event_by_event_simulation(seed, queue, make_op, make_graph):
    graph = random_graph(seed, make_op, make_graph)
    device = SimulatedDevice(replace(QUIET, queue=queue))
    expected_us = EventByEvent(program_of(graph, 3, 1), queue).run()
    assert timer.single(device, device.prepare_model(graph, 3)).median_s * 1e6 == pytest.approx(expected_us, rel=1e-6)
    assert device.true_latency_s(graph, 3) * 1e6 == pytest.approx(expected_us, rel=1e-6)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("queue", [1024, 25])
def test_pipelined_period_agrees_with_an_event_by_event_simulation(seed, queue, make_op, make_graph):
    graph = random_graph(seed, make_op, make_graph)
    device = SimulatedDevice(replace(QUIET, queue=queue))
    long, short = (EventByEvent(program_of(graph, 3, count), queue).run() for count in (60, 30))
    expected_us = (long - short) / 30
    measured = timer.pipelined(device, device.prepare_model(graph, 3))
    assert measured.median_s * 1e6 == pytest.approx(expected_us, rel=5e-3)
    assert device.true_latency_s(graph, 3, protocol="pipelined") * 1e6 == pytest.approx(expected_us, rel=1e-6)


def test_host_bound_latency_by_hand(make_op, make_graph):
    graph = make_graph([make_op("view"), make_op("elementwise", "elementwise")])
    # 6 forward + 1.2 view + 4.6 add, then the kernel: 4 launch + 1.8 floor, then 3 to notice.
    assert SimulatedDevice(QUIET).true_latency_s(graph, 1) * 1e6 == pytest.approx(6 + 1.2 + 4.6 + 4 + 1.8 + 3)
    assert SimulatedDevice(QUIET).true_latency_s(graph, 1, protocol="pipelined") * 1e6 == pytest.approx(6 + 1.2 + 4.6)


def test_replayed_graph_by_hand(make_op, make_graph):
    graph = make_graph([make_op("elementwise", "elementwise")] * 10)
    # One launch of 7 + 4, ten floors, nine gaps between nodes, and 3 to notice.
    expected_us = 7 + 4 + 10 * 1.8 + 9 * 0.7 + 3
    assert SimulatedDevice(QUIET).true_latency_s(graph, 1, "cuda-graphs") * 1e6 == pytest.approx(expected_us)


def test_kernel_law_by_hand(make_op, make_graph):
    op = make_op("gemm", "gemm", 1000, macs=10**6)
    device = SimulatedDevice(QUIET)
    call = device.prepare_model(make_graph([op]), 1)
    compute = 10**6 / (9e6 * 0.75) + 1000 * 4e-3
    memory = 8000 / (2.6e6 * 0.85)
    expected_us = 2.9 + compute + 0.2 * memory + 1.2
    assert timer.queued(device, call).median_s * 1e6 == pytest.approx(expected_us)


HOST_CLASSES = ("view", "factory", "free", "gemm", "conv", "attention", "norm", "elementwise", "copy", "index", "rnn")


@pytest.mark.parametrize("seed", range(20))
def test_dispatch_costs_come_back_within_two_percent(seed, make_op, make_graph):
    families = {"view": "", "factory": "", "free": ""}
    ops = {name: make_op(name, families.get(name, name), 64) for name in HOST_CLASSES}
    device = SimulatedDevice(SimulatedSpec(seed=seed), graphs=lambda cell: (make_graph([ops[cell.name]]), 1))
    for name in HOST_CLASSES:
        found = timer.issue(device, device.prepare(Cell("dispatch", name)))
        assert found.median_s * 1e6 == pytest.approx(device.true_costs().dispatch(name), rel=0.02), name


@pytest.mark.parametrize("seed", range(20))
def test_python_costs_come_back_within_two_percent(seed, make_op, make_graph):
    device = SimulatedDevice(SimulatedSpec(seed=seed))

    def issued_us(**calls):
        graph = make_graph([make_op("view", **calls)] * 10)
        return timer.issue(device, device.prepare_model(graph, 1)).median_s * 1e5

    bare = issued_us()
    assert (issued_us(module_calls=20) - bare) / 20 == pytest.approx(COSTS.module_call_us, rel=0.02)
    assert (issued_us(python_calls=200) - bare) / 200 == pytest.approx(COSTS.python_call_us, rel=0.02)


@pytest.mark.parametrize("seed", range(20))
def test_kernel_times_come_back_within_two_percent(seed, make_op, make_graph):
    device = SimulatedDevice(SimulatedSpec(seed=seed))
    for numel in (100, 10**5, 10**7):
        op = make_op("elementwise", "elementwise", numel)
        truth_us = 1.8 + 8 * numel / 2.6e6 / 0.9 + COSTS.gap_us
        found = timer.queued(device, device.prepare_model(make_graph([op]), 1))
        assert found.median_s * 1e6 == pytest.approx(truth_us, rel=0.02)


def test_noise_and_spikes_are_as_asked_for(make_op, make_graph):
    call_us = 1.2
    graph = make_graph([make_op("view")])
    device = SimulatedDevice(replace(SimulatedSpec(seed=1), clock_us=0.0), graphs=lambda cell: (graph, 1))
    call = device.prepare(Cell("dispatch", "view"))
    taken = []
    for _ in range(20_000):
        start = device.clock()
        call()
        taken.append((device.clock() - start) * 1e6 / call_us)
    spikes = [factor for factor in taken if factor > 1.3]
    usual = [factor for factor in taken if factor <= 1.3]
    assert len(spikes) / len(taken) == pytest.approx(0.01, rel=0.2)
    assert sum(spikes) / len(spikes) == pytest.approx(3.0, rel=0.1)
    assert (sum((factor - 1) ** 2 for factor in usual) / len(usual)) ** 0.5 == pytest.approx(0.02, rel=0.1)


def test_device_clock_drifts(make_op, make_graph):
    graph = make_graph([make_op("elementwise", "elementwise", 10**6)])
    fast, true = (SimulatedDevice(replace(QUIET, drift=drift)) for drift in (0.01, 0.0))
    queued = [device.time_queued(device.prepare_model(graph, 1), 10) for device in (fast, true)]
    assert queued[0] / queued[1] == pytest.approx(1.01)
    assert timer.single(fast, fast.prepare_model(graph, 1)) == timer.single(true, true.prepare_model(graph, 1))


def test_true_crossover_and_knee_by_hand(make_op, make_graph):
    # Host: 6 + 20 * 4.6 = 98. Device: 20 * (1.8 + 1.2 + 8e5 * batch / 2.34e6) = 60 + 6.84 * batch.
    graph = make_graph([make_op("elementwise", "elementwise", 10**5)] * 20)
    device, batches = SimulatedDevice(), [1, 2, 4, 8, 16]
    assert device.true_crossover(graph, batches) == 8
    flat_s = device.true_latency_s(graph, 1)
    assert device.true_latency_s(graph, 4) < 1.1 * flat_s < device.true_latency_s(graph, 8)
    assert device.true_knee(graph, batches) == 8
    assert device.true_crossover(graph, [1, 2]) is None
    assert device.true_knee(graph, [1, 2]) is None


def test_truth_does_not_disturb_the_device(make_op, make_graph):
    graph = make_graph([make_op("elementwise", "elementwise", 10**5)] * 20)
    asked, silent = SimulatedDevice(), SimulatedDevice()
    asked.true_knee(graph, [1, 8])
    results = [timer.single(device, device.prepare_model(graph, 2)) for device in (asked, silent)]
    assert results[0] == results[1]


def test_cell_runs_its_op_without_the_python_around_it(make_op, make_graph):
    graph = make_graph([make_op("norm", "norm", 64, module_calls=5, python_calls=50)])
    device = SimulatedDevice(QUIET, graphs=lambda cell: (graph, 1))
    issued = timer.issue(device, device.prepare(Cell("dispatch", "layer_norm")))
    assert issued.median_s * 1e6 == pytest.approx(COSTS.dispatch("norm"))


def test_synchronisation_cannot_be_captured(make_op, make_graph):
    graph = make_graph([make_op("sync", syncs=1)])
    device = SimulatedDevice()
    assert device.time_replayed(device.prepare_model(graph, 1), 3) is None


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
        "latpred.calibration",
        "latpred.calibration.devices.machine",
        "latpred.calibration.devices.conditions",
        "latpred.calibration.workloads.single_ops",
        "latpred.calibration.cells",
        "latpred.calibration.devices.base",
        "latpred.calibration.devices.simulated_costs",
        "latpred.calibration.devices.simulated_programs",
        "latpred.calibration.devices",
        "latpred.calibration.workloads",
        "latpred.errors",
        "latpred.graph.graph",
        "latpred.ops.families",
        "latpred.profile.document",
        "latpred.graph.schedule",
    }
    imported = set()
    for module in (simulated, simulated_costs, simulated_programs):
        for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
            if isinstance(node, ast.ImportFrom):
                imported.add(node.module)
            elif isinstance(node, ast.Import):
                imported.update(alias.name for alias in node.names)
    ours = {name for name in imported if name.startswith("latpred")}
    assert ours
    assert ours <= allowed
