"""ONNX Runtime: one host step for each node that it executes of the graph it made of an exported model.

A model is exported once, whatever the batch: to walk it, and to run it. Which node does what is `onnx_nodes`' business,
how a model is exported `onnx_export`'s; `.onnx` files are `onnx_file`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec

from latpred import host
from latpred.caches import IdentityCache
from latpred.errors import DeviceError, MissingPackageError, RuntimeRefusalError
from latpred.graph.graph import ModelGraph
from latpred.graph.schedule import Schedule
from latpred.runtimes import graph_store
from latpred.runtimes.cuda_graphs import NO_CUDA, one_replay, refuse_uncapturable
from latpred.runtimes.eager import one_step_per_op
from latpred.runtimes.onnx import onnx_session
from latpred.runtimes.onnx.onnx_session import GPU_PIP

if TYPE_CHECKING:
    import torch

    from latpred.runtimes.onnx.onnx_export import Exported
    from latpred.runtimes.source import Source

NODES = "nodes 3"  # version of what is made of a node; walks of another one are made again
_HALF = {"fp16": "float16", "bf16": "bfloat16"}


class OnnxRuntime:
    """ONNX Runtime with all its graph optimisations, on its CPU or CUDA provider."""

    name = "onnxruntime"
    walked_by = "onnxruntime"
    own_stream = True

    def __init__(self) -> None:
        self._recent: tuple[str, Exported] | None = None
        self._schedules: IdentityCache[ModelGraph, dict[int, Schedule]] = IdentityCache()
        self._exports: IdentityCache[torch.nn.Module, dict[str, Exported]] = IdentityCache()
        self._sessions: IdentityCache[torch.nn.Module, dict[tuple[object, ...], Any]] = IdentityCache()

    @cached_property
    def options(self) -> str:
        """Versions, exporter and optimisations; and the processor, which decides on the layout of convolutions."""
        from importlib import metadata

        versions = [f"{name} {version}" for name, version in onnx_session.installed().items()]
        for name in ("onnx", "onnxscript"):
            try:
                versions.append(f"{name} {metadata.version(name)}")
            except metadata.PackageNotFoundError:
                continue
        return "; ".join((*versions, "export dynamo, dynamic batch", "optimised: all", NODES, host.cpu_name()))

    def available(self) -> str | None:
        """None when models can be exported and run here, else what is missing."""
        return onnx_session.missing()

    def available_on(self, target: str) -> str | None:
        """The same for a kind of device: a GPU needs the CUDA provider."""
        missing = self.available()
        if missing is None and target == "cuda" and onnx_session.CUDA not in onnx_session.providers():
            missing = f"this onnxruntime has no CUDA provider; run: {onnx_session.GPU_PIP}"
        return missing

    def lower(self, graph: ModelGraph, batch: int) -> Schedule:
        """One step per executed node."""
        schedules = self._schedules.get(graph, lambda _: {})
        own = graph.own(batch)
        if own not in schedules:
            schedules[own] = one_step_per_op(self.name, graph.at(batch))
        return schedules[own]

    def walk(self, source: Source, target: str) -> ModelGraph:
        """Export, let onnxruntime optimise, and watch which nodes it runs at batches 1, 2 and 3.

        For a half precision on CUDA the nodes are those of the model in float32 with half the bytes: the CPU would run
        others, converting back and forth.

        Raises
        ------
        MissingPackageError
            When onnxruntime is not installed.
        RuntimeRefusalError
            When the model cannot be exported, loaded or run.
        """
        from latpred.runtimes.onnx import onnx_graph
        from latpred.runtimes.onnx.onnx_export import tensors_of

        onnx_session.require()
        cast = _cast_of(source.graph.precision, target)
        if source.graph.precision == "bf16" and not cast:
            raise RuntimeRefusalError("onnxruntime has no bfloat16 kernels for the CPU; ask for fp32.")
        inputs = [_in_float(source.inputs(batch), cast) for batch in onnx_graph.BATCHES]
        _, exported = self._made(source, bool(cast))
        names = onnx_session.input_names(exported.model)
        feeds = [{name: tensor.numpy() for name, tensor in zip(names, tensors_of(one), strict=True)} for one in inputs]
        watched = onnx_session.watch(exported.model, feeds, target=target, threads=_threads())
        found = onnx_graph.walked(watched, feeds, target, cast=cast)
        return msgspec.structs.replace(
            source.graph,
            ops=found.ops,
            ops_at_one=found.ops_at_one,
            input_bytes=found.input_bytes,
            parameter_bytes=found.weight_bytes,
            stack={**source.graph.stack, **onnx_session.installed()},
            runtime=self.walked_by,
            target=target,
            notes=(*source.graph.notes, *_notes(cast)),
        )

    def exported(self, source: Source, *, cast: bool = False) -> Exported:
        """A source's export, for whoever wants to run it; kept until there is another, so that a walk takes it too."""
        self._recent = self._made(source, cast)
        return self._recent[1]

    def _made(self, source: Source, cast: bool) -> tuple[str, Exported]:
        """What an export is of, and the export: it holds all weights, so a walk alone keeps none."""
        from latpred.runtimes.onnx.onnx_export import export

        known, self._recent = self._recent, None
        recency = f"{graph_store.structure(source.graph)} {source.code} {cast}"
        if known is not None and known[0] == recency:
            self._recent = known
            return known
        del known
        model, inputs = source.model(), source.inputs(2)
        if cast:
            model, inputs = model.float(), _in_float(inputs, cast)
        run = self._exports.get(model, lambda _: {}).get(_key(model, inputs))  # the very model, if it has a session
        return recency, run or export(model, inputs)

    def estimate(self, graph: ModelGraph, target: str) -> ModelGraph:
        """What onnxruntime's usual fusions would leave of an eager graph; not from a real export, and says so."""
        from latpred.runtimes.onnx.onnx_estimate import estimate

        return estimate(graph, target)

    def build(self, model: Any, inputs: Any) -> Callable[[], Any]:
        """A session's run on these inputs; exported once per model, loaded once per number of threads.

        Raises
        ------
        MissingPackageError
            When onnxruntime is not installed, or lacks the CUDA provider that a model on a GPU needs.
        RuntimeRefusalError
            When the model cannot be exported or loaded.
        """
        from latpred.runtimes.onnx.onnx_export import tensors_of

        onnx_session.require()
        tensors = tensors_of(inputs)
        device = next((t.device for t in (*model.parameters(), *tensors)), None)
        running = self.session(model, inputs, device)
        if device is not None and device.type == "cuda":
            return _run_bound(running, tensors, device)
        feed = onnx_session.feeds_of(running, tensors)
        return lambda: running.run(None, feed)

    def session(self, model: Any, inputs: Any, device: Any, *, cuda_graph: bool = False) -> Any:
        """A session of a model on its device, for such inputs at any batch size; with `cuda_graph` one that captures.

        Raises
        ------
        MissingPackageError
            When onnxruntime lacks the CUDA provider that a model on a GPU needs.
        RuntimeRefusalError
            When the model cannot be exported or loaded.
        """
        cuda = device is not None and device.type == "cuda"
        if cuda and onnx_session.CUDA not in onnx_session.providers():
            raise MissingPackageError(
                "The model is on a GPU, but the onnxruntime that is installed has no CUDA provider; run: "
                + onnx_session.GPU_PIP
            )
        form = _key(model, inputs)
        known = self._sessions.get(model, lambda _: {})
        key = (form, _threads(), str(device), cuda_graph)
        if key not in known:
            exports = self._exports.get(model, lambda _: {})
            if form not in exports:
                exports[form] = _exported(model, inputs)
            provider = onnx_session.CUDA if cuda else onnx_session.CPU
            known[key] = onnx_session.session(
                exports[form].model,
                target="cuda" if cuda else "cpu",
                threads=_threads(),
                provider=provider,
                device_id=(device.index or 0) if cuda else 0,
                cuda_graph=cuda_graph,
            )
        return known[key]


def _exported(model: Any, inputs: Any) -> Exported:
    """An export at batch 2, since one at batch 1 would hold for no other."""
    from latpred.runtimes.onnx.onnx_export import export, tensors_of
    from latpred.tracing.inputs import from_example, real

    floating = [tensor.dtype for tensor in tensors_of(inputs) if tensor.is_floating_point()]
    weights = next(iter(model.parameters()), None)
    twice = real(from_example(inputs).make(2), floating[0] if floating else _default_dtype(weights))
    if weights is not None and weights.is_cuda:
        from latpred.tracing.inputs import placed

        twice = placed(twice, str(weights.device))
    return export(model, twice)


def _key(model: Any, inputs: Any) -> str:
    """What an export of a model is found by."""
    return f"{_form(inputs)} {_default_dtype(next(iter(model.parameters()), None))}"


def _default_dtype(weights: Any) -> Any:
    import torch

    return torch.float32 if weights is None else weights.dtype


def bound(running: Any, tensors: Any, device: Any) -> tuple[Any, list[Any]]:
    """A binding whose inputs are read where they lie on the GPU and whose outputs stay there, and what it reads."""
    import numpy as np
    import onnx
    import torch

    binding = running.io_binding()
    held = [tensor.contiguous() for tensor in tensors]
    for one, tensor in zip(running.get_inputs(), held, strict=True):
        kind: Any = onnx.TensorProto.BFLOAT16  # a type that numpy lacks
        if tensor.dtype != torch.bfloat16:
            kind = np.dtype(str(tensor.dtype).rpartition(".")[2])
        binding.bind_input(one.name, "cuda", device.index or 0, kind, tuple(tensor.shape), tensor.data_ptr())
    for one in running.get_outputs():
        binding.bind_output(one.name, "cuda", device.index or 0)
    return binding, held


def _run_bound(running: Any, tensors: Any, device: Any) -> Callable[[], Any]:
    """A run whose inputs and outputs stay on the GPU, and which leaves the waiting to the caller."""
    binding, held = bound(running, tensors, device)
    options = onnx_session.run_options()

    def run() -> Any:
        running.run_with_iobinding(binding, options)
        return held and binding

    return run


def _form(inputs: Any) -> str:
    """What an export depends on beside the model: names, dtypes and sizes of the inputs but the batch."""
    from torch.utils._pytree import tree_flatten

    from latpred.runtimes.onnx.onnx_export import tensors_of

    _, form = tree_flatten(dict(inputs) if hasattr(inputs, "items") else tuple(inputs))
    shapes = [(str(tensor.dtype), tuple(tensor.shape[1:])) for tensor in tensors_of(inputs)]
    return f"{form} {shapes}"


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _cast_of(precision: str, target: str) -> dict[str, str]:
    half = _HALF.get(precision) if target == "cuda" else None
    return {"float": half} if half else {}


def _in_float(inputs: Any, wanted: object) -> Any:
    """Inputs with their floating-point tensors in float32, where that is `wanted`."""
    if not wanted:
        return inputs
    from torch.utils._pytree import tree_map

    def cast(value: Any) -> Any:
        return value.float() if hasattr(value, "is_floating_point") and value.is_floating_point() else value

    return tree_map(cast, inputs)


def _notes(cast: dict[str, str]) -> tuple[str, ...]:
    if not cast:
        return ()
    return (f"onnxruntime's nodes are those of the model in float32, with the bytes of {cast['float']}",)


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
        from latpred.runtimes.onnx.onnx_export import tensors_of

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
