"""One forward pass unfolded: it ends when the predictor says, and its trace is one that viewers open."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from factories import add, device, dispatch, graph, kernel_fits, linear, profile, view

from latpred.graph.graph import Affine, ModelGraph
from latpred.prediction.predictor import Predictor
from latpred.prediction.timeline import DEVICE, HOST, MEMORY, WAIT, forward_pass

FITS = kernel_fits("gemm", "elementwise", weight_bytes_per_us=1e5, activation_bytes_per_us=1e5, macs_per_us=1e7)
SMALL = graph(*[op for _ in range(6) for op in (linear(4, 64, module_calls=3), view(), add(256))])
LARGE = graph(*[op for _ in range(6) for op in (linear(), view(), add(100_000))])
WAITING = graph(linear(), add(syncs=1), linear(4, 64), add(syncs=2), linear())


def predictor(**changes: object) -> Predictor:
    return Predictor(profile(device(**changes), FITS, {"eager": dispatch()}))


@pytest.mark.parametrize("net", [SMALL, LARGE, WAITING], ids=["host-bound", "device-bound", "synchronising"])
@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize(
    "clock",
    [{}, {"clock_exponent": 4.0}, {"queue": 2}, {"asynchronous": False}],
    ids=["queue", "bend", "short queue", "in turns"],
)
def test_it_ends_when_the_prediction_says(net: ModelGraph, batch: int, clock: dict[str, object]) -> None:
    known = predictor(**clock)
    found = forward_pass(known, net, batch)
    assert found.prediction.latency_ms == known.predict(net, batch).latency_ms
    assert max(span.end_us for span in found.spans) / 1e3 == pytest.approx(found.prediction.latency_ms)
    assert found.busy_us(HOST) / 1e3 == pytest.approx(found.prediction.overhead_ms)


def test_a_cpu_waits_for_memory_at_the_end() -> None:
    large = graph(*(linear(live_bytes=Affine(0, mib << 20)) for mib in (0, 24, 48, 72, 0)))
    found = forward_pass(predictor(asynchronous=False, fresh_bytes_per_us=1000.0), large)
    last = found.row(HOST)[-1]
    assert (last.name, last.kind, last.end_us) == (MEMORY, WAIT, pytest.approx(found.prediction.latency_ms * 1e3))
    assert last.end_us - last.start_us == pytest.approx((72 << 20) / 1e3)


def test_spans_of_a_row_follow_each_other_and_kernels_their_launch() -> None:
    found = forward_pass(predictor(), SMALL)
    for name in (HOST, DEVICE):
        spans = found.row(name)
        assert all(a.end_us <= b.start_us + 1e-9 for a, b in pairwise(spans))
    launched = {span.step: span.end_us for span in found.row(HOST) if span.kind != WAIT}
    assert len(found.row(DEVICE)) == SMALL.launches()
    assert all(kernel.start_us >= launched[kernel.step] + 4.0 - 1e-9 for kernel in found.row(DEVICE))
    assert {span.kind for span in found.row(DEVICE)} == {"gemm", "elementwise"}
    assert found.row(HOST)[1].module == "layer"


def test_gaps_are_where_the_device_waits_for_the_host() -> None:
    waiting, busy = forward_pass(predictor(), SMALL).gaps, forward_pass(predictor(), LARGE, 64).gaps
    assert busy.longest_us == pytest.approx(1.0)  # what the device itself takes between two kernels
    assert waiting.longest_us > 5.0
    assert waiting.total_us > 5 * busy.total_us


def test_the_trace_is_in_chromes_format() -> None:
    found = forward_pass(predictor(), SMALL, 2)
    document = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert document["schema"] == "latpred.timeline/1"
    events = document["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(found.spans) == len(found.to_frame())
    assert all(event["dur"] >= 0 and {"ts", "pid", "tid", "name", "cat"} <= set(event) for event in complete)
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {1: "host", 2: "device"}
    starts, ends = ([event["id"] for event in events if event["ph"] == phase] for phase in "sf")
    assert starts == ends == list(range(SMALL.launches()))
