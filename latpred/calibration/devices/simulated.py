"""An asynchronous device that exists only as a discrete-event simulation, with known costs behind seeded noise.

Two clocks: the host's moves when the host works or waits, the device's is the time at which it will be idle. Commands
come first in, first out, so every event's time is known the moment it is issued, and no event list is needed. The host
waits when the launch queue is full. Nothing here is shared with the predictor, so that recovering the truth from
outside, through the interface of a real device, is a test of all that lies between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import repeat
from typing import Any

import msgspec
import numpy as np

from latpred.calibration.cells import UPLOAD, Cell
from latpred.calibration.devices import machine
from latpred.calibration.devices.base import Call
from latpred.calibration.devices.simulated_costs import PYTHON, OpWork, SimulatedSpec, Step, TrueCosts, program, step
from latpred.errors import DeviceError
from latpred.graph.graph import NO_PYTHON, ModelGraph
from latpred.profile.document import DeviceInfo, Machine

__all__ = ["SimulatedDevice", "SimulatedSpec", "TrueCosts"]

PERIOD_FORWARDS = 48  # noiseless forwards after which a period has settled


class TwoClocks:
    """Host and device clocks in microseconds, and the commands between them."""

    def __init__(self, spec: SimulatedSpec) -> None:
        self.host_us = 0.0
        self.idle_us = 0.0  # when the device will have done all it was given
        self.captured: list[float] | None = None
        self._costs = spec.costs
        self._starts: deque[float] = deque(maxlen=spec.queue)
        self._noise = _noise(spec)

    def work(self, us: float) -> None:
        """Keep the host busy."""
        self.host_us += us * next(self._noise)

    def launch(self, *kernels_us: float) -> None:
        """Hand the device a kernel, or a graph of several in one launch."""
        if self.captured is not None:
            self.captured.extend(kernels_us)
            return
        if len(self._starts) == self._starts.maxlen:
            # A launch is taken once the launch a queue's length before it has started.
            self.host_us = max(self.host_us, self._starts[0])
        noise, costs = self._noise, self._costs
        arrival_us = self.host_us + costs.launch_us * next(noise)
        start_us = max(self.idle_us + costs.gap_us * next(noise), arrival_us)
        self._starts.append(start_us)
        self.idle_us = start_us + sum(us * next(noise) for us in kernels_us)
        self.idle_us += sum(costs.node_gap_us * next(noise) for _ in kernels_us[1:])

    def mark(self) -> None:
        """Hand the device a marker: it takes the way of a kernel, but no time and no gap."""
        self.idle_us = max(self.idle_us, self.host_us + self._costs.launch_us * next(self._noise))

    def wait(self) -> None:
        """Let the host wait until the device is idle."""
        if self.captured is not None:
            raise DeviceError("a host synchronisation cannot be captured into a graph.")
        self.host_us = max(self.host_us, self.idle_us) + self._costs.sync_us * next(self._noise)

    def run(self, one: Step) -> None:
        """One step: the host's part, its launches, its synchronisations."""
        for us in one.host:
            self.work(us)
        if one.captured:
            self.launch(*one.kernels)
            return
        for kernel_us in one.kernels:
            self.launch(kernel_us)
        for _ in range(one.syncs):
            self.wait()


class SimulatedDevice:
    """A device of known costs behind the interface of a real one.

    >>> from latpred.calibration.timing import timer
    >>> from latpred.calibration.cells import UPLOAD, Cell
    >>> device = SimulatedDevice(SimulatedSpec(noise=0.0, spikes=0.0))
    >>> f"{timer.issue(device, device.prepare(Cell('clock', 'mark'))).median_s * 1e6:.1f} us"
    '1.5 us'
    """

    name = "simulated"
    asynchronous = True

    def __init__(self, spec: SimulatedSpec | None = None) -> None:
        self.spec = spec or SimulatedSpec()
        self._clocks = TwoClocks(self.spec)

    def machine(self) -> Machine:
        return machine.identity(accelerator="simulated", threads=1)

    def info(self) -> DeviceInfo:
        return DeviceInfo(
            "simulated",
            "simulated",
            asynchronous=True,
            memory_bytes=self.spec.memory_bytes,
            multiprocessors=self.spec.multiprocessors,
            queue=0,
        )

    def precisions(self) -> tuple[str, ...]:
        return ("fp32", "fp16")

    def use_precision(self, precision: str) -> None:
        """Nothing to set: cells and graphs say their precision."""

    def clock(self) -> float:
        """Virtual host seconds."""
        self._clocks.host_us += self.spec.clock_us
        return self._clocks.host_us * 1e-6

    def synchronize(self) -> None:
        self._clocks.wait()

    def errors(self) -> AbstractContextManager[None]:
        return nullcontext()

    def prepare(self, cell: Cell) -> Call:
        if cell.kind == "clock":
            return self._clock_call(cell)
        return self._memory_call(cell) if cell.kind == "memory" else self._op_call(cell)

    def prepare_model(self, model: Any, inputs: Any, runtime: str = "eager") -> Call:
        """The call that issues one forward pass of a `ModelGraph` in any runtime, whose inputs are a batch size."""
        self._fit(model.peak_bytes(inputs), f"{model.model} at batch {inputs}")
        return self._calling(program(self.spec.costs, model, inputs, runtime))

    def time_queued(self, call: Call, count: int) -> float:
        """Seconds of the device's clock for `count` calls behind a kernel that outlasts their issue."""
        clocks, head_us = self._clocks, 100.0 * count
        for _ in range(6):
            clocks.wait()
            clocks.launch(head_us)
            start_us = clocks.idle_us
            for _ in repeat(None, count):
                call()
            end_us, issued_us = clocks.idle_us, clocks.host_us
            clocks.wait()
            if issued_us <= start_us:
                break
            head_us *= 4
        return (end_us - start_us) * (1 + self.spec.drift) * 1e-6

    def time_replayed(self, call: Call, count: int) -> float | None:
        kernels_us = self._captured(call)
        if kernels_us is None:
            return None
        replay = Step((self.spec.costs.replay_us,), tuple(kernels_us * count), 0, True)
        return self.time_queued(self._calling([replay]), 1)

    def profiled_launches(self, call: Call) -> float:
        """Launches that a profiler would see of a call; none of one whose host waits for the device."""
        return len(self._captured(call) or [])

    def true_latency_s(self, graph: ModelGraph, batch: int, runtime: str = "eager", protocol: str = "single") -> float:
        """Seconds of a forward pass without any noise, by running it on a device without any."""
        device = SimulatedDevice(replace(self.spec, noise=0.0, spikes=0.0, drift=0.0, clock_us=0.0))
        call = device.prepare_model(graph, batch, runtime)
        if protocol == "single":
            device.synchronize()
            start_us = device._clocks.host_us
            call()
            device.synchronize()
            return (device._clocks.host_us - start_us) * 1e-6
        ends = []
        for _ in repeat(None, PERIOD_FORWARDS):
            call()
            ends.append(max(device._clocks.idle_us, device._clocks.host_us))
        half = PERIOD_FORWARDS // 2
        return (ends[-1] - ends[half - 1]) / (PERIOD_FORWARDS - half) * 1e-6

    def _captured(self, call: Call) -> list[float] | None:
        """Times of the kernels of a call; None of one whose host waits for the device."""
        self._clocks.captured = []
        try:
            call()
            return self._clocks.captured
        except DeviceError:
            return None
        finally:
            self._clocks.captured = None

    def _op_call(self, cell: Cell) -> Call:
        """The ops of a cell without the Python around them, as a real device calls them."""
        from latpred.calibration.workloads import single_ops

        graph, batch = single_ops.graph(cell)
        self._fit(graph.peak_bytes(batch), cell.key)
        ops = [op for op in graph.at(batch) if not op.name.startswith(PYTHON)]
        bare = [msgspec.structs.replace(op, **NO_PYTHON) for op in ops]
        return self._calling([step(self.spec.costs, op, batch, cell.precision) for op in bare])

    def _memory_call(self, cell: Cell) -> Call:
        """Bytes moved within the device ("bandwidth") or brought from the host and waited for ("upload")."""
        costs, size = self.spec.costs, cell.dims["bytes"]
        self._fit(2 * size, cell.key)
        if cell.name == UPLOAD.name:
            return self._calling([Step((costs.dispatch("copy"),), (size / costs.copy_bytes_per_us,), 1)])
        kernel_us = costs.kernel_us("copy", OpWork(0, 0, size, size, size / 4), "fp32")
        return self._calling([Step((costs.dispatch("copy"),), (kernel_us,))])

    def _clock_call(self, cell: Cell) -> Call:
        """The smallest kernel ("tiny"), a marker without one ("mark"), or a kernel of given length ("busy")."""
        costs, clocks = self.spec.costs, self._clocks
        if cell.name == "mark":

            def mark() -> None:
                clocks.work(costs.mark_us)
                clocks.mark()

            return mark
        kernel_us = costs.kernel("elementwise").floor_us if cell.name == "tiny" else float(cell.dims["us"])
        return self._calling([Step((costs.dispatch("elementwise"),), (kernel_us,))])

    def _calling(self, steps: Sequence[Step]) -> Call:
        run = self._clocks.run

        def call() -> None:
            for one in steps:
                run(one)

        return call

    def _fit(self, needed: float, what: str) -> None:
        if needed > self.spec.memory_bytes:
            raise MemoryError(f"{what} needs {needed:.0f} bytes, the simulated device has {self.spec.memory_bytes}")


def _noise(spec: SimulatedSpec) -> Iterator[float]:
    """Factors that events' times are multiplied with; their median is one."""
    if not spec.noise and not spec.spikes:
        yield from repeat(1.0)
    rng = np.random.default_rng(spec.seed)
    while True:
        factors = np.exp(rng.normal(0.0, spec.noise, 4096))
        struck = rng.random(4096) < spec.spikes
        factors[struck] *= spec.spike_factor * rng.uniform(0.5, 1.5, int(struck.sum()))
        yield from factors.tolist()
