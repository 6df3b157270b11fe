"""One forward pass as it unfolds: when the host dispatches each step and when the device runs each kernel.

The same recurrence as in `prediction.clocks`, step by step and with names, for the "single" protocol. `plot` draws
it; `to_dict` gives the JSON that Chrome's tracing page and Perfetto open.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from latpred.ops.families import kind_of
from latpred.prediction.prediction import Prediction
from latpred.prediction.pricing import CALL

if TYPE_CHECKING:
    import pandas as pd

    from latpred.graph.graph import ModelGraph, Schedule
    from latpred.prediction.predictor import Predictor
    from latpred.prediction.pricing import Priced
    from latpred.profile.document import DeviceInfo

SCHEMA = "latpred.timeline/1"
HOST, DEVICE = "host", "device"
WAIT = "synchronise"  # kind of a span in which the host waits
MEMORY = "memory of the system"  # what a CPU waits for when a pass has given much of its memory back


class Span(NamedTuple):
    """Something that takes time on one of the clocks."""

    row: str  # "host" or "device"
    name: str  # of the op
    kind: str  # class of ops, as in a breakdown
    module: str  # where in the model
    step: int  # number of the host step that it is or was launched by
    start_us: float  # since the forward pass was called
    end_us: float


class _Gaps(NamedTuple):
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
    def gaps(self) -> _Gaps:
        """What the device idles between its first and its last kernel."""
        kernels = self.row(DEVICE)
        pauses = [max(0.0, b.start_us - a.end_us) for a, b in pairwise(kernels)]
        return _Gaps(sum(pauses), max(pauses, default=0.0))

    def to_dict(self) -> dict[str, Any]:
        """A trace in Chrome's format, which https://ui.perfetto.dev and chrome://tracing open."""
        point, threads = self.prediction, {HOST: 1, DEVICE: 2}
        about = f"{point.model}, batch {point.batch}, {point.runtime} on {point.device} (predicted)"
        named = [("thread_name", number, name) for name, number in threads.items()] + [("process_name", 0, about)]
        events = [_event("M", kind, number, args={"name": name}) for kind, number, name in named]
        for span in self.spans:
            inside = {"module": span.module} if span.module else {}
            times = {"ts": span.start_us, "dur": span.end_us - span.start_us}
            args = {**inside, "step": span.step}
            events.append(_event("X", span.name, threads[span.row], cat=span.kind, **times, args=args))
        steps = {span.step: span for span in self.row(HOST) if span.kind != WAIT}
        for number, kernel in enumerate(self.row(DEVICE)):  # an arrow from the step that launches it
            arrow = {"cat": "launch", "id": number}
            events.append(_event("s", "launch", threads[HOST], **arrow, ts=steps[kernel.step].start_us))
            events.append(_event("f", "launch", threads[DEVICE], **arrow, bp="e", ts=kernel.start_us))
        asked = ("model", "batch", "runtime", "device", "precision", "latency_ms")
        return {
            "schema": SCHEMA,
            "displayTimeUnit": "ms",
            "traceEvents": events,
            "otherData": {name: getattr(point, name) for name in asked},
        }

    def to_frame(self) -> pd.DataFrame:
        import pandas as pd

        return pd.DataFrame(self.spans, columns=Span._fields)

    def __repr__(self) -> str:
        point = self.prediction
        return f"ForwardPass({point.model}, batch {point.batch}: {len(self.spans)} spans in {point.latency_ms:.3f} ms)"


def forward_pass(predictor: Predictor, graph: ModelGraph, batch: int = 1, *, runtime: str = "eager") -> ForwardPass:
    """Follow both clocks through one forward pass that is waited for."""
    prediction = predictor.predict(graph, batch, runtime=runtime)
    schedule, priced, device, beside_us = predictor.priced(graph, batch, runtime=runtime)
    spans = list(_unfold(schedule, priced, device, batch, beside_us))
    # Where the clocks bend into each other, the wait at the end is longer.
    spans[-1] = spans[-1]._replace(end_us=max(spans[-1].end_us, prediction.latency_ms * 1e3))
    return ForwardPass(prediction, tuple(spans))


def _unfold(schedule: Schedule, priced: Priced, device: DeviceInfo, batch: int, beside_us: float) -> Iterator[Span]:
    here = np.array([float(batch)])
    host_us = priced.host_at(here)[:, 0].tolist()
    kernel_us = (priced.times(here).us[priced.kernel_row, 0] * priced.kernel_share).tolist()
    launches = np.searchsorted(priced.timeline.kernel_step, np.arange(len(host_us) + 1)).tolist()
    syncs = priced.timeline.sync.tolist()
    one_step_per_op = len(schedule.host_class) == len(schedule.ops)
    queue: deque[float] = deque(maxlen=max(device.queue, 1))
    host, through = 0.0, -np.inf  # the clocks: of the host, and when the device is through with its last kernel

    def waited(step: int, times: int) -> Span:
        return Span(HOST, WAIT, WAIT, "", step, host, max(host, through) + times * device.sync_us)

    for step, cost in enumerate(host_us):
        name = kind = kind_of(schedule.host_class[step - 1]) if step else CALL
        module = ""
        if step and one_step_per_op:
            name, module = schedule.ops[step - 1].name, schedule.ops[step - 1].module
        yield Span(HOST, name, kind, module, step, host, host + cost)
        host += cost
        for kernel in range(launches[step], launches[step + 1]):
            op, start = schedule.ops[int(schedule.kernel_op[kernel])], host
            if device.asynchronous:
                if len(queue) == queue.maxlen:
                    host = max(host, queue[0])
                start = max(through + device.gap_us, host + device.launch_us)
                queue.append(start)
            end = start + kernel_us[kernel]
            host, through = (host, end) if device.asynchronous else (end, through)  # else the device is the host itself
            yield Span(DEVICE, op.name, kind_of(op.host_class), op.module, step, start, end)
        if syncs[step]:
            pause = waited(step, syncs[step])
            yield pause
            host = pause.end_us
    if device.asynchronous:
        yield waited(len(syncs) - 1, 1)
    elif beside_us:
        yield Span(HOST, MEMORY, WAIT, "", len(syncs) - 1, host, host + beside_us)


def _event(phase: str, name: str, thread: int, **rest: Any) -> dict[str, Any]:
    return {"ph": phase, "name": name, "pid": 1, "tid": thread, **rest}
