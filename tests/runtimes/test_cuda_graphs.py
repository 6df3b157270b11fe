"""Runtimes that replay captured graphs, without a GPU: what is captured, what is refused, and where one can ask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from factories import add, device, dispatch, linear, profile, view
from factories import graph as make_graph
from smallmodels import Function

import latpred
from latpred import runtimes
from latpred.errors import DeviceError, RuntimeRefusalError, UsageError
from latpred.graph.graph import ModelGraph, Op
from latpred.prediction.predictor import Predictor
from latpred.runtimes import cuda_graphs
from latpred.runtimes.cuda_graphs import CudaGraphs, one_replay, replays
from latpred.runtimes.lowering import of_source, trace_for_runtime, traced_by, unsuited
from latpred.runtimes.source import source_of

REPLAYED = ("cuda-graphs", "onnxruntime-cuda-graphs", "compile-reduce-overhead")


def capturing() -> bool:
    """Whether a stream is being captured; a build without CUDA cannot be asked."""
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:
        return False


def checking(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Looks at values of its input unless it is being captured, as some models of transformers do."""
    whole = not capturing() and keep.sum().item() == keep.numel()
    return x.relu() if whole else x.relu().masked_fill(keep == 0, 0.0)


def masking(x: torch.Tensor) -> torch.Tensor:
    """Makes a mask only while it is captured, as models of transformers do; nothing of it waits otherwise."""
    return x.relu().masked_fill(x > 0, 0.0) if capturing() else x.relu()


X, INPUTS = torch.zeros(2, 8), (torch.randn(2, 8), torch.ones(2, 1, dtype=torch.long))


def test_one_step_launches_every_kernel() -> None:
    schedule = one_replay("replayed", (view(module_calls=2), linear(python_calls=3), add(launches=2)))
    assert schedule.host_class == ("replay",)
    assert schedule.kernel_step.tolist() == [0, 0, 0]
    assert schedule.kernel_family == ("gemm", "elementwise.add", "elementwise.add")
    assert schedule.kernel_share.tolist() == [1.0, 0.5, 0.5]
    assert [schedule.ops[index].name for index in schedule.kernel_op] == ["aten::linear", "aten::add", "aten::add"]
    assert (schedule.calls.sum(), schedule.sync.sum()) == (0, 0)
    nothing = one_replay("replayed", (view(),))  # is still replayed
    assert (nothing.host_class, len(nothing.kernel_step)) == (("replay",), 0)


def test_ops_between_captured_ones_are_dispatched_by_themselves() -> None:
    ops = (linear(), add(), add(python_calls=1), linear())
    schedule = replays("replayed", ops, [True, True, False, True])
    assert schedule.host_class == ("replay", "elementwise.add", "replay")
    assert schedule.kernel_step.tolist() == [0, 0, 1, 2]
    assert schedule.calls[:, 1].tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("runtime", "op", "message"),
    [
        (
            "cuda-graphs",
            add(name="aten::_local_scalar_dense", module="encoder.0", syncs=1),
            r"_dense in encoder\.0 makes the host wait",
        ),
        ("cuda-graphs", add(name="aten::nonzero", module="router"), r"what aten::nonzero in router gives depends on"),
        (REPLAYED[1], add(name="ort::NonZero"), r"what ort::NonZero gives depends on the data\. Ask for.*'eager'"),
        (REPLAYED[1], add(name="ort::If"), "ort::If is control flow"),
        (REPLAYED[1], add(name="ort::MemcpyToHost", syncs=1), "MemcpyToHost copies between host and device"),
    ],
)
def test_what_cannot_be_captured_is_named(runtime: str, op: Op, message: str) -> None:
    net = make_graph(linear(), op, add(), runtime=traced_by(runtime), target="cuda")
    with pytest.raises(RuntimeRefusalError, match=f"{runtime} cannot capture example-net: .*{message}"):
        runtimes.get(runtime).lower(net, 2)


def traced(model: torch.nn.Module, *inputs: torch.Tensor, runtime: str = "cuda-graphs") -> ModelGraph:
    return trace_for_runtime(model, inputs, runtime=runtime, target="cuda", batches=(2,))


@pytest.mark.parametrize(
    ("function", "inputs", "eager", "captured"),
    [
        (checking, INPUTS, (2, 1), (3, 0)),
        (masking, (X,), (1, 0), (3, 0)),
        (lambda x: masking(x @ x.T), (X,), (2, 0), (4, 0)),  # whose work is not affine in batch
    ],
)
def test_a_model_is_traced_as_it_is_while_captured(
    function: Callable[..., torch.Tensor], inputs: Any, eager: tuple[int, int], captured: tuple[int, int]
) -> None:
    plain = latpred.trace(Function(function), inputs, batches=(2,))
    graph = traced(Function(function), *inputs)
    assert [(one.launches(2), one.syncs(2)) for one in (plain, graph)] == [eager, captured]
    assert (graph.only, list(graph.exact)) == (plain.only, list(plain.exact))
    assert len(CudaGraphs().lower(graph, 2).kernel_step) == captured[0]
    assert not capturing()


def test_what_is_captured_is_traced_without_weights() -> None:
    source = replace(source_of(Function(masking), X), model=lambda: pytest.fail("weights were built"))
    assert of_source(source, "cuda-graphs", "cuda").launches(2) == 3


def test_a_model_that_waits_is_refused_by_name() -> None:
    waiting = Function(lambda x, keep: x * float(keep.sum().item()))
    with pytest.raises(RuntimeRefusalError, match=r"cannot capture Function: aten::\w+ makes the host wait.*eager"):
        CudaGraphs().lower(traced(waiting, *INPUTS), 2)


def test_an_eager_trace_that_waits_may_be_wrong_about_it() -> None:
    predictor = Predictor(profile(runtimes={"eager": dispatch(), "cuda-graphs": dispatch()}))
    with pytest.raises(RuntimeRefusalError, match="or pass the model itself instead of its trace"):
        predictor.predict(latpred.trace(Function(checking), INPUTS), 2, runtime="cuda-graphs")


def test_the_nodes_of_onnxruntime_are_replayed() -> None:
    pytest.importorskip("onnxruntime")
    replayed, plain = runtimes.get(REPLAYED[1]), runtimes.get("onnxruntime")
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    assert replayed.options == plain.options  # type: ignore[attr-defined]
    graph = traced(model, X, runtime=REPLAYED[1])
    assert graph == traced(model, X, runtime="onnxruntime")
    assert len(replayed.lower(graph, 2).kernel_step) == graph.launches(2) > 0


@pytest.mark.parametrize("count", [1, 40, 2000])  # 2000 are more than the queue holds, but they come in one launch
def test_overhead_is_one_replay_and_gaps_are_those_of_a_graph(count: int) -> None:
    costs = {"eager": dispatch(), "cuda-graphs": dispatch(costs_us={"replay": 7.0}, fixed_us=3.0, gap_us=0.25)}
    predictor = Predictor(profile(device(gap_us=1.0), runtimes=costs))
    net = make_graph(*[linear(rows=1, width=10)] * count)
    eager, replayed = (predictor.predict(net, 1, runtime=name) for name in ("eager", "cuda-graphs"))
    assert replayed.overhead_ms * 1e3 == pytest.approx(10.0)
    assert eager.compute_ms - replayed.compute_ms == pytest.approx(count * 0.75e-3)
    assert replayed.latency_ms * 1e3 == pytest.approx(3 + 7 + 4 + 1e3 * replayed.compute_ms - 0.25 + 10)


@pytest.mark.parametrize("runtime", REPLAYED)
def test_a_cpu_has_no_graphs(runtime: str) -> None:
    layer = torch.nn.Linear(8, 8)
    message = rf"{runtime} needs a CUDA device; ask for --device simulated or.*eager"
    with pytest.raises(UsageError, match=message):
        trace_for_runtime(layer, X, runtime=runtime, target="cpu")
    predictor = Predictor(profile(device(kind="cpu", asynchronous=False)))
    with pytest.raises(UsageError, match=message):
        predictor.predict(latpred.trace(layer, X), 1, runtime=runtime)
    assert unsuited(runtime, "cuda") is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("runtime", REPLAYED)
def test_nothing_is_built_without_cuda(runtime: str) -> None:
    assert "no CUDA device here" in str(runtimes.get(runtime).available())
    with pytest.raises(DeviceError, match="CUDA graphs are captured on CUDA devices, not on cpu"):
        runtimes.get(runtime).build(torch.nn.Linear(8, 8), (X,))


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done to a GPU that is not there."""
    done: list[str] = []

    @contextmanager
    def captured(graph: str, stream: str, **_: str) -> Iterator[None]:
        done.append(f"captured in {stream}")
        yield

    monkeypatch.setattr(torch, "zeros", lambda *_, **__: torch.ones(1))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda place: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: "another graph")
    monkeypatch.setattr(torch.cuda, "Stream", lambda place: f"a stream of {place}")
    monkeypatch.setattr(torch.cuda, "graph", captured)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda place: "the user's stream")
    monkeypatch.setattr(torch.cuda, "set_stream", done.append)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda index, pool, name=name: done.append(name), raising=False)
    return done


def failed_capture(first: Exception) -> RuntimeError:
    """As a capture ends in which something went wrong."""
    last = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    last.__context__ = first
    return last


NOT_PERMITTED = RuntimeError("CUDA error: operation not permitted when stream is capturing\nfor debugging ...")
REFUSAL = r"captured into a CUDA graph: CUDA error: operation not permitted when stream is capturing\. Ask"
PUT_BACK = ["the user's stream", "_cuda_endAllocateToPool", "_cuda_releasePool", "captured in a stream of cuda:1"]


@pytest.mark.parametrize(
    ("error", "kind", "said", "put_back"),
    [
        # Ending a capture that failed is an error of its own.
        (failed_capture(NOT_PERMITTED), RuntimeRefusalError, REFUSAL, PUT_BACK),
        (failed_capture(torch.OutOfMemoryError("2 GiB")), torch.OutOfMemoryError, "2 GiB", PUT_BACK),
        (torch.OutOfMemoryError("2 GiB"), torch.OutOfMemoryError, "2 GiB", []),
        (RuntimeError("CUDA error: an illegal memory access"), RuntimeError, "illegal memory", []),
    ],
)
def test_pytorch_is_put_back_after_a_capture_that_failed(
    error: Exception, kind: type[Exception], said: str, put_back: list[str], on_gpu: list[str]
) -> None:
    with pytest.raises(kind, match=said), cuda_graphs.refusing(torch.device("cuda", 1), lambda: (0, 0)):
        raise error
    assert on_gpu == [*put_back, "the user's stream"]
