"""ONNX Runtime with CUDA graphs, without a GPU: what is replayed, what is refused, and what is said without CUDA."""

from __future__ import annotations

import pytest
import torch
from factories import add, linear, view
from factories import graph as make_graph

from latpred import runtimes
from latpred.errors import DeviceError, RuntimeRefusalError, UsageError
from latpred.graph.graph import ModelGraph, Op
from latpred.runtimes import lowering
from latpred.runtimes.onnx.onnxruntime import OnnxRuntimeCudaGraphs

pytest.importorskip("onnxruntime")


def nodes(*ops: Op) -> ModelGraph:
    """A graph as onnxruntime walks it."""
    return make_graph(*ops, runtime="onnxruntime", target="cuda")


def test_nodes_are_replayed_in_one_step() -> None:
    shape = view("Shape", host_class="node.free.Shape")
    net = nodes(linear(name="ort::MatMul"), shape, add(name="ort::Add"))
    runtime = OnnxRuntimeCudaGraphs()
    schedule = runtime.lower(net, 4)
    assert schedule.host_class == ("replay",)
    assert [schedule.ops[index].name for index in schedule.kernel_op] == ["ort::MatMul", "ort::Add"]
    assert runtime.lower(net, 8) is schedule


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (add(name="ort::If"), "ort::If is control flow"),
        (add(name="ort::MemcpyToHost", syncs=1), "MemcpyToHost copies between host and device"),
        (add(name="ort::NonZero"), "what ort::NonZero gives depends on the data"),
    ],
)
def test_what_onnxruntime_does_not_capture_is_named(op: Op, message: str) -> None:
    with pytest.raises(RuntimeRefusalError, match=f"cannot capture example-net: .*{message}"):
        OnnxRuntimeCudaGraphs().lower(nodes(linear(), op), 2)


def test_its_graphs_are_those_of_onnxruntime() -> None:
    runtime, plain = runtimes.get("onnxruntime-cuda-graphs"), runtimes.get("onnxruntime")
    assert lowering.traced_by("onnxruntime-cuda-graphs") == "onnxruntime"
    assert isinstance(runtime, OnnxRuntimeCudaGraphs)
    assert runtime.options == plain.options  # type: ignore[attr-defined]
    net = make_graph(linear(), add())
    assert runtime.estimate(net, "cuda") == plain.estimate(net, "cuda")  # type: ignore[attr-defined]


def test_a_model_is_walked_as_onnxruntime_runs_it() -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()), torch.zeros(2, 8)
    walked = lowering.trace_for_runtime(model, x, runtime="onnxruntime-cuda-graphs", target="cuda")
    assert walked == lowering.trace_for_runtime(model, x, runtime="onnxruntime", target="cuda")
    assert len(OnnxRuntimeCudaGraphs().lower(walked, 2).kernel_step) == walked.launches(2) > 0


def test_a_cpu_has_no_graphs() -> None:
    with pytest.raises(UsageError, match="onnxruntime-cuda-graphs needs a CUDA device"):
        lowering.trace_for_runtime(
            torch.nn.Linear(8, 8), torch.zeros(1, 8), runtime="onnxruntime-cuda-graphs", target="cpu"
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_nothing_is_built_without_cuda() -> None:
    assert "no CUDA device here" in str(OnnxRuntimeCudaGraphs().available())
    with pytest.raises(DeviceError, match="captured on CUDA devices, not on cpu"):
        OnnxRuntimeCudaGraphs().build(torch.nn.Linear(8, 8), (torch.zeros(1, 8),))
