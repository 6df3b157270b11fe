"""One forward pass as it unfolds: when the host dispatches each step and when the device runs each kernel.

The same recurrence as in `prediction.clocks`, step by step and with names, for the "single" protocol. `plot` draws
it; `to_dict` gives the JSON that Chrome's tracing page and Perfetto open.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from latpred.ops.families import kind_of
from latpred.prediction.prediction import Prediction

if TYPE_CHECKING:
    import pandas as pd

    from latpred.graph.graph import ModelGraph, Schedule
    from latpred.prediction.predictor import Predictor
    from latpred.prediction.pricing import Priced
    from latpred.profile.document import DeviceInfo

SCHEMA = "latpred.timeline/1"
HOST, DEVICE = "host", "device"
CALL, WAIT = "call", "synchronise"  # steps that no op stands for: what comes before the first one, and waiting


class Span(NamedTuple):
    """Something that takes time on one of the clocks.

    row : "host" or "device". name : of the op. kind : class of ops, as in a breakdown. module : where in the model.
    step : number of the host step it is or was launched by. start_us, end_us : since the forward pass was called.
    """

    row: str
    name: str
    kind: str
    module: str
    step: int
    start_us: float
    end_us: float


class Gaps(NamedTuple):
    """Times between kernels in which the device has nothing to do, in microseconds: all, and the longest."""

    total_us: float
    longest_us: float


@dataclass(frozen=True, slots=True, repr=False)
class ForwardPass:
    """The two clocks of one forward pass."""

    prediction: Prediction  # of this forward pass: its latency is where the last span ends
    spans: tuple[Span, ...]  # of the host and of the device, each in the order of time

    def row(self, name: str) -> tuple[Span, ...]:
        """Spans of the "host" or of the "device"."""
        return tuple(span for span in self.spans if span.row == name)

    def busy_us(self, name: str) -> float:
        """How long the host dispatches, or the device executes; waiting is not counted."""
        return sum(span.end_us - span.start_us for span in self.row(name) if span.kind != WAIT)

    @property
    def gaps(self) -> Gaps:
        """What the device idles between its first and its last kernel."""
        kernels = self.row(DEVICE)
        pauses = [max(0.0, b.start_us - a.end_us) for a, b in pairwise(kernels)]
        return Gaps(sum(pauses), max(pauses, default=0.0))

    def to_dict(self) -> dict[str, Any]:
        """A trace in Chrome's format, which https://ui.perfetto.dev and chrome://tracing open."""
        setting = self.prediction.setting
        rows = {HOST: 1, DEVICE: 2}
        events = [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": name}}
            for name, number in rows.items()
        ]
        about = f"{setting.model}, batch {self.prediction.batch}, {setting.runtime} on {setting.device} (predicted)"
        events.append({"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": about}})
        events += [_event(span, rows[span.row]) for span in self.spans]
        events += self._flows(rows)
        return {
            "schema": SCHEMA,
            "displayTimeUnit": "ms",
            "traceEvents": events,
            "otherData": {
                "model": setting.model,
                "batch": self.prediction.batch,
                "runtime": setting.runtime,
                "device": setting.device,
                "precision": setting.precision,
                "latency_ms": self.prediction.latency_ms,
            },
        }

    def to_frame(self) -> pd.DataFrame:
        """One row per span."""
        import pandas as pd

        return pd.DataFrame(self.spans, columns=Span._fields)

    def _flows(self, rows: dict[str, int]) -> list[dict[str, Any]]:
        """Arrows from each step to the kernels it launches."""
        steps = {span.step: span for span in self.row(HOST) if span.kind != WAIT}
        arrows: list[dict[str, Any]] = []
        for number, kernel in enumerate(self.row(DEVICE)):
            same = {"name": "launch", "cat": "launch", "id": number, "pid": 1}
            arrows.append({**same, "ph": "s", "tid": rows[HOST], "ts": steps[kernel.step].start_us})
            arrows.append({**same, "ph": "f", "bp": "e", "tid": rows[DEVICE], "ts": kernel.start_us})
        return arrows

    def __repr__(self) -> str:
        """One line."""
        point = self.prediction
        return f"ForwardPass({point.model}, batch {point.batch}: {len(self.spans)} spans in {point.latency_ms:.3f} ms)"


def forward_pass(predictor: Predictor, graph: ModelGraph, batch: int = 1, *, runtime: str = "eager") -> ForwardPass:
    """Follow both clocks through one forward pass that is waited for."""
    prediction = predictor.predict(graph, batch, runtime=runtime)
    schedule, priced, device, _ = predictor.priced(graph, batch, runtime=runtime)
    return ForwardPass(prediction, tuple(_unfold(schedule, priced, device, batch)))


def _unfold(schedule: Schedule, priced: Priced, device: DeviceInfo, batch: int) -> list[Span]:
    here = np.array([float(batch)])
    times, host_us = priced.times(here).us[:, 0], priced.host_at(here)[:, 0]
    kernels = (times[priced.kernel_row] * priced.kernel_share).tolist()
    timeline = priced.timeline
    launches = np.searchsorted(timeline.kernel_step, np.arange(len(host_us) + 1)).tolist()
    syncs = timeline.sync.tolist()
    run = _Run(schedule, device)
    for step, cost in enumerate(host_us.tolist()):
        run.dispatch(step, cost)
        for kernel in range(launches[step], launches[step + 1]):
            run.launch(kernel, step, kernels[kernel])
        if syncs[step]:
            run.wait(step, syncs[step])
    if device.asynchronous:
        run.wait(len(syncs) - 1, 1)
    return run.spans


class _Run:
    """The clocks while they run."""

    def __init__(self, schedule: Schedule, device: DeviceInfo) -> None:
        self._schedule, self._device = schedule, device
        self._host_us, self._device_us = 0.0, -np.inf
        self._queue: deque[float] = deque(maxlen=max(device.queue, 1))
        self._one_step_per_op = len(schedule.host_class) == len(schedule.ops)
        self.spans: list[Span] = []

    def dispatch(self, step: int, cost_us: float) -> None:
        """The host works on a step."""
        kind = kind_of(self._schedule.host_class[step - 1]) if step else CALL
        name, module = kind, ""
        if step and self._one_step_per_op:
            op = self._schedule.ops[step - 1]
            name, module = op.name, op.module
        self._host_us = self._span(HOST, name, kind, module, step, self._host_us, cost_us)

    def launch(self, kernel: int, step: int, time_us: float) -> None:
        """A kernel is put into the queue, and runs when the device is free; a synchronous device is the host itself."""
        schedule, device = self._schedule, self._device
        op = schedule.ops[int(schedule.kernel_op[kernel])]
        kind = kind_of(op.host_class)
        if not device.asynchronous:
            self._host_us = self._span(DEVICE, op.name, kind, op.module, step, self._host_us, time_us)
            return
        if len(self._queue) == self._queue.maxlen:
            self._host_us = max(self._host_us, self._queue[0])
        start = max(self._device_us + device.gap_us, self._host_us + device.launch_us)
        self._queue.append(start)
        self._device_us = self._span(DEVICE, op.name, kind, op.module, step, start, time_us)

    def wait(self, step: int, times: int) -> None:
        """The host waits for all that the device was given."""
        until = max(self._host_us, self._device_us) + times * self._device.sync_us
        self._host_us = self._span(HOST, WAIT, WAIT, "", step, self._host_us, until - self._host_us)

    def _span(self, row: str, name: str, kind: str, module: str, step: int, start: float, length: float) -> float:
        self.spans.append(Span(row, name, kind, module, step, start, start + length))
        return start + length


def _event(span: Span, number: int) -> dict[str, Any]:
    args = {"module": span.module, "step": span.step} if span.module else {"step": span.step}
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.kind,
        "pid": 1,
        "tid": number,
        "ts": span.start_us,
        "dur": span.end_us - span.start_us,
        "args": args,
    }
