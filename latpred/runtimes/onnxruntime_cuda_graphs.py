"""ONNX Runtime with CUDA graphs: the kernels of onnxruntime's own graph of a model, captured once, launched together.

onnxruntime captures only what its CUDA provider runs whole, without copies to or from the host and without control
flow; nodes that compute shapes may stay on the host, which a replay leaves out. One captured graph serves one set of
shapes, bound to where inputs and outputs lie.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any

from latpred.errors import DeviceError, RuntimeRefusalError
from latpred.graph import ModelGraph
from latpred.identity import IdentityCache
from latpred.runtimes import onnx_session
from latpred.runtimes.cuda_graphs import NO_CUDA
from latpred.runtimes.onnx_session import GPU_PIP
from latpred.runtimes.onnxruntime import OnnxRuntime, bound
from latpred.runtimes.replay import one_replay, refuse_uncapturable
from latpred.schedule import Schedule

if TYPE_CHECKING:
    from latpred.runtimes.source import Source

# Nodes that onnxruntime captures no graph with: control flow, and copies between host and device.
_REFUSED = {
    **dict.fromkeys(("ort::If", "ort::Loop", "ort::Scan"), "is control flow"),
    **dict.fromkeys(("ort::MemcpyToHost", "ort::MemcpyFromHost"), "copies between host and device"),
}
_UNCAPTURED = -1  # the graph id of a run that is not captured
_IDS = count(1)  # a graph is replayed whatever the shapes, so every binding gets an id of its own; 0 is onnxruntime's


class OnnxRuntimeCudaGraphs:
    """ONNX Runtime on its CUDA provider, each forward pass launched as one captured graph."""

    name = "onnxruntime-cuda-graphs"
    walked_by = "onnxruntime"
    needs = "cuda"
    own_stream = True
    waits = True  # older versions wait for a replay, whatever the options of the run say

    def __init__(self) -> None:
        self._schedules: IdentityCache[ModelGraph, dict[int, Schedule]] = IdentityCache()

    @property
    def options(self) -> str:
        """As for onnxruntime, whose graphs these are."""
        return _onnxruntime().options

    def walk(self, source: Source, target: str) -> ModelGraph:
        """The nodes that onnxruntime runs; see `OnnxRuntime.walk`."""
        return _onnxruntime().walk(source, target)

    def estimate(self, graph: ModelGraph, target: str) -> ModelGraph:
        """The best guess from an eager graph; see `OnnxRuntime.estimate`."""
        return _onnxruntime().estimate(graph, target)

    def lower(self, graph: ModelGraph, batch: int) -> Schedule:
        """One step that launches every node's kernels.

        Raises
        ------
        RuntimeRefusalError
            When some node cannot be captured; names it.
        """
        schedules = self._schedules.get(graph, lambda _: {})
        own = graph.own(batch)
        if own not in schedules:
            ops = graph.at(batch)
            for op in ops:
                if op.name in _REFUSED:
                    raise RuntimeRefusalError(
                        f"{self.name} cannot capture {graph.model}: {op.name} {_REFUSED[op.name]}. "
                        "Ask for runtime='onnxruntime'."
                    )
            refuse_uncapturable(self.name, graph.model, ops)
            schedules[own] = one_replay(self.name, ops)
        return schedules[own]

    def available(self) -> str | None:
        """None where onnxruntime's CUDA provider and a CUDA device are, else what is missing."""
        problem = onnx_session.missing()
        if problem is not None:
            return problem
        import torch

        if not torch.cuda.is_available():
            return NO_CUDA
        if onnx_session.CUDA not in onnx_session.providers():
            return f"this onnxruntime has no CUDA provider; run: {GPU_PIP}"
        return None

    def build(self, model: Any, inputs: Any) -> Callable[[], Any]:
        """A call that replays the graph captured for these inputs; its outputs stay on the GPU, at one place.

        Raises
        ------
        DeviceError
            When the model is not on a CUDA device.
        MissingPackageError
            When onnxruntime, or its CUDA provider, is not installed.
        RuntimeRefusalError
            When onnxruntime cannot export, load or capture the model.
        """
        from latpred.runtimes.onnx_export import tensors_of

        onnx_session.require()
        tensors = tensors_of(inputs)
        device = next((tensor.device for tensor in (*model.parameters(), *tensors)), None)
        if device is None or device.type != "cuda":
            raise DeviceError(f"CUDA graphs are captured on CUDA devices, not on {device or 'the CPU'}: {NO_CUDA}.")
        running = _onnxruntime().session(model, inputs, device, cuda_graph=True)
        try:
            return _captured(running, tensors, device)
        except Exception as error:  # onnxruntime's own exceptions share no base class
            if isinstance(error, MemoryError):
                raise
            raise RuntimeRefusalError(f"onnxruntime cannot capture the model: {onnx_session.reason(error)}") from error


def _captured(running: Any, tensors: Any, device: Any) -> Callable[[], Any]:
    """Run once without a graph, which shows the outputs' shapes; bind those, and capture."""
    import torch

    torch.cuda.synchronize(device)  # onnxruntime's stream must not read inputs before PyTorch's has written them
    binding, held = bound(running, tensors, device)
    running.run_with_iobinding(binding, onnx_session.run_options(_UNCAPTURED))
    torch.cuda.synchronize(device)
    outputs = binding.get_outputs()
    binding.clear_binding_outputs()
    for one, value in zip(running.get_outputs(), outputs, strict=True):
        binding.bind_ortvalue_output(one.name, value)
    options = onnx_session.run_options(next(_IDS))

    def run() -> Any:
        running.run_with_iobinding(binding, options)
        return outputs

    run.held = (held, binding)  # type: ignore[attr-defined]  # the graph reads and writes where these lie
    run()  # captures, after runs of its own that allocate what it needs
    return run


def _onnxruntime() -> OnnxRuntime:
    """The one that holds what was exported already."""
    from latpred import runtimes

    found = runtimes.get("onnxruntime")
    assert isinstance(found, OnnxRuntime)
    return found
