"""ONNX Runtime: one host step for each node that it executes of the graph it made of an exported model.

A model is exported once, whatever the batch: to trace it, and to run it. Which ops its nodes are is `onnx_graph`'s
business, how a model is exported `onnx_export`'s; `.onnx` files are `onnx_file`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import count
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch

from latpred import host
from latpred.errors import MissingPackageError, RuntimeRefusalError, raising_stops
from latpred.graph.graph import NO_PYTHON, Affine, ModelGraph, Op, Schedule, rewritten
from latpred.graph.rewrites import itemsize
from latpred.ops.families import root
from latpred.runtimes import StepPerOp
from latpred.runtimes.base import BATCHES, built_of
from latpred.runtimes.cuda_graphs import NO_CUDA, demand_cuda, one_replay, refuse_uncapturable
from latpred.runtimes.onnx import onnx_export, onnx_graph, onnx_session
from latpred.runtimes.onnx.onnx_export import Exported, export_at_two, form_of
from latpred.runtimes.onnx.onnx_formulas import HALF_DTYPES, class_of
from latpred.runtimes.source import Source, device_of, tensors_of
from latpred.storage import IdentityCache
from latpred.tracing.inputs import cast

NODES = "nodes 13"  # version of what is made of a node; graphs of another one are made again
_UNCAPTURED = -1  # the graph id of a run that is not captured
_IDS = count(1)  # a graph is replayed whatever the shapes, so every binding gets an id of its own; 0 is onnxruntime's
NOTE = "onnxruntime's nodes are estimated from the eager trace, by its usual fusions; nothing was exported"
# Activations that onnxruntime's CPU kernels of convolutions apply themselves.
_ABSORBED = frozenset({"elementwise.relu", "elementwise.hardtanh", "elementwise.sigmoid", "elementwise.tanh"})
_CONVOLUTIONS = ("conv", "conv_grouped", "conv_depthwise")
_REORDERED = ("view.transpose", "view.permute", "view.movedim", "view.swapaxes")
_IN_ORDER = ("view.view", "view.reshape", "view.flatten", "view.unsqueeze", "view.squeeze")


class OnnxRuntime(StepPerOp):
    """ONNX Runtime with all its graph optimisations, on its CPU or CUDA provider."""

    name = traced_by = "onnxruntime"
    own_stream = True
    # Exports and sessions of models that are run, shared by all runtimes here.
    _built: ClassVar[IdentityCache[Any, Any]] = IdentityCache()

    @cached_property
    def options(self) -> str:
        """Versions, exporter and optimisations; and the processor, which decides on the layout of convolutions."""
        installed = onnx_session.installed() | host.versions("onnx", "onnxscript")
        versions = [f"{name} {version}" for name, version in installed.items()]
        # A marketing name stands for processors of other vector instructions, too, which decide on the layout.
        processor = host.cpu_model() or host.cpu_name()
        return "; ".join((*versions, "export dynamo, dynamic batch", "optimised: all", NODES, processor))

    def available(self) -> str | None:
        """None when what exports and runs models is installed here, else what is missing."""
        return onnx_session.missing(imports=False)

    def available_on(self, target: str) -> str | None:
        """As `available`, for a kind of device: a GPU needs the CUDA provider. What is installed is imported."""
        return onnx_session.missing(target)

    def trace(self, source: Source, target: str) -> ModelGraph:
        """Export, let onnxruntime optimise, and watch which nodes it runs at batches 1, 2 and 3.

        For a half precision on CUDA the nodes are those of the model in float32 with half the bytes: the CPU would run
        others, converting back and forth.
        """
        onnx_session.require()
        eager = source.graph
        half = HALF_DTYPES.get(eager.precision) if target == "cuda" else None
        if eager.precision == "bf16" and not half:
            raise RuntimeRefusalError("onnxruntime has no bfloat16 kernels for the CPU; ask for fp32.")
        whole = _in_float(source) if half else source
        exported = self._export(whole)
        names = onnx_session.input_names(exported.model)
        feeds = [onnx_session.feed_of(names, tensors_of(whole.inputs(batch))) for batch in BATCHES]
        watched = onnx_session.watch(exported.model, feeds, target=target, threads=torch.get_num_threads())
        graph = onnx_graph.graph_of(eager, watched, feeds, target, half or onnx_graph.FLOAT)
        if half is None:
            return graph
        note = f"onnxruntime's nodes are those of the model in float32, with the bytes of {half}"
        return msgspec.structs.replace(graph, notes=(*graph.notes, note))

    def _export(self, source: Source) -> Exported:
        """An export that nobody keeps, as it holds all weights; where the very model has one already, that."""
        model, inputs = source.model(), source.inputs(2)
        kept: Exported | None = built_of(self._built, model).get(form_of(inputs))
        return kept or onnx_export.export(model, inputs)

    def exported(self, model: Any, inputs: Any) -> Exported:
        """An export for such inputs at any batch, kept while the model lives as it is; its trace takes it too."""
        built, form = built_of(self._built, model), form_of(inputs)
        if form not in built:
            built[form] = export_at_two(model, inputs)
        return built[form]  # type: ignore[no-any-return]

    def estimate(self, graph: ModelGraph, target: str) -> ModelGraph:
        """What onnxruntime's usual fusions would leave of an eager graph; not from a real export, and says so."""
        rewrite = partial(_estimated, target=target)
        return rewritten(graph, rewrite, runtime=self.traced_by, target=target, notes=(*graph.notes, NOTE))

    @raising_stops()
    def build(self, model: Any, inputs: Any) -> Callable[[], Any]:
        """A session's run on these inputs; exported once per model, loaded once per number of threads."""
        onnx_session.require()
        device, tensors = device_of(model, inputs), tensors_of(inputs)
        running = self.session(model, inputs, device)
        if device.type == "cuda":
            return _run_bound(running, tensors, device)
        feed = onnx_session.feed_of([one.name for one in running.get_inputs()], tensors)
        return lambda: running.run(None, feed)

    def session(self, model: Any, inputs: Any, device: torch.device, *, cuda_graph: bool = False) -> Any:
        """A session of a model on its device, for such inputs at any batch; with `cuda_graph` one that captures."""
        cuda = device.type == "cuda"
        if cuda and onnx_session.CUDA not in onnx_session.providers():
            raise MissingPackageError(
                "The model is on a GPU, but the onnxruntime that is installed has no CUDA provider; run: "
                + onnx_session.GPU_PIP
            )
        built = built_of(self._built, model)
        tf32 = cuda and torch.backends.cuda.matmul.fp32_precision == "tf32"
        key = (form_of(inputs), torch.get_num_threads(), str(device), cuda_graph, tf32)
        if key not in built:
            built[key] = onnx_session.session(
                self.exported(model, inputs).model,
                target="cuda" if cuda else "cpu",
                threads=torch.get_num_threads(),
                gpu=(device.index or 0) if cuda else None,
                cuda_graph=cuda_graph,
                tf32=tf32,
            )
        return built[key]


class OnnxRuntimeCudaGraphs(OnnxRuntime):
    """ONNX Runtime on its CUDA provider, each forward pass launched as one captured graph."""

    name = "onnxruntime-cuda-graphs"
    needs = "cuda"
    waits = True  # older versions wait for a replay, whatever the options of the run say

    def schedule(self, graph: ModelGraph, ops: tuple[Op, ...]) -> Schedule:
        """One step that launches every node's kernels; a node that cannot be captured is refused by name."""
        refuse_uncapturable(self.name, graph.model, ops)
        return one_replay(self.name, ops)

    def available(self) -> str | None:
        """None where onnxruntime's CUDA provider and a CUDA device are, else what is missing."""
        return onnx_session.missing("cuda") if torch.cuda.is_available() else super().available() or NO_CUDA

    @raising_stops()
    def build(self, model: Any, inputs: Any) -> Callable[[], Any]:
        """A call that replays the graph captured for these inputs; its outputs stay on the GPU, at one place."""
        onnx_session.require()
        device = device_of(model, inputs)
        demand_cuda(device)
        running = self.session(model, inputs, device, cuda_graph=True)
        try:
            return _captured(running, tensors_of(inputs), device)
        except Exception as error:  # onnxruntime's own exceptions share no base class
            raise onnx_session.failure(error, "capture") from error


def _in_float(source: Source) -> Source:
    """A source whose model and floating-point inputs are in float32."""
    return replace(
        source,
        model=lambda: source.model().float(),
        inputs=lambda batch: cast(source.inputs(batch), torch.float32),
    )


def _bound(running: Any, tensors: Any, device: Any) -> tuple[Any, list[Any]]:
    """A binding whose inputs are read where they lie on the GPU and whose outputs stay there, and what it reads."""
    import onnx

    binding = running.io_binding()
    held = [tensor.contiguous() for tensor in tensors]
    torch.cuda.synchronize(device)  # onnxruntime's stream must not read inputs before PyTorch's has written them
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
    binding, held = _bound(running, tensors, device)
    options = onnx_session.run_options()

    def run() -> Any:
        running.run_with_iobinding(binding, options)
        return binding

    run.held = held  # type: ignore[attr-defined]  # the binding knows no more than where these lie
    return run


def _captured(running: Any, tensors: Any, device: Any) -> Callable[[], Any]:
    """Run once without a graph, which shows the outputs' shapes; bind those, and capture."""
    binding, held = _bound(running, tensors, device)
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


def _estimated(ops: Sequence[Op], target: str) -> Iterator[Op]:
    """What would run of a model that was never exported: a guess from its eager trace; most ops are one node."""
    before: Op | None = None  # the last op that does work
    for index, op in enumerate(ops):
        if not op.launches:
            yield from _view(op, before)
        elif not _vanishes(op, before, target):
            before, family = op, root(op.family)
            if family == "gemm":
                yield from _product(op, next((other for other in ops[index + 1 :] if other.launches), None))
            elif family == "attention":
                yield from _attention(op)
            else:
                name = op.name.rpartition("::")[2].rstrip("_").title().replace("_", "")
                yield _bare(op, name, class_of(op.family, name))


def _view(op: Op, before: Op | None) -> Iterator[Op]:
    """A view in another order is a copy of what came before it; one in the same order still is a node."""
    if before is None:
        return
    if op.host_class in _REORDERED:
        yield _like(before, "Transpose", "copy.transpose", numel=_elements(before), run=Affine(1))
    elif op.host_class in _IN_ORDER:
        yield Op("ort::Reshape", op.module, "node.view.Reshape", "", "", {}, live_bytes=op.live_bytes)


def _vanishes(op: Op, before: Op | None, target: str) -> bool:
    """Whether an op goes into the one before it, or is computed once and for all."""
    if before is None or root(op.family) == "factory":
        return root(op.family) == "factory"
    absorbed = op.family in _ABSORBED or op.family == "elementwise.add"
    return root(before.family) in _CONVOLUTIONS and (op.family == "batch_norm" or (target == "cpu" and absorbed))


def _product(op: Op, followed: Op | None) -> Iterator[Op]:
    """A product and the addition of its bias, which a GELU or a normalisation behind it would do on the way."""
    yield _bare(op, "MatMul", "node.gemm.MatMul")
    biased = op.weight_bytes.constant > op.dims["n"].constant * op.dims["k"].constant * itemsize(op)
    if biased and (followed is None or not followed.family.startswith(("elementwise.gelu", "norm.layer_norm"))):
        yield _like(op, "Add", "elementwise.add", numel=_elements(op), operands=Affine(1))


def _attention(op: Op) -> Iterator[Op]:
    """Scaled queries and keys, keys turned, scores, mask, softmax, weighted sum."""
    queries, keys, width = op.dims["queries"], op.dims["keys"], op.dims["head_dim"]
    batch, size = op.dims["batch"] * op.dims["heads"].constant, _elements(op)
    rows, scores = batch * queries.constant, batch * (queries.constant * keys.constant)
    moved, half = scores * itemsize(op), op.macs // 2
    on_scores = {"read_bytes": moved, "write_bytes": moved}
    for _ in range(2):
        yield _like(op, "Mul", "elementwise.mul", numel=size, operands=Affine(1))
    yield _like(op, "Transpose", "copy.transpose", numel=size, run=Affine(1))
    product = _like(op, "MatMul", "bmm", batch=batch, m=queries, n=keys, k=width)
    yield msgspec.structs.replace(product, macs=half, write_bytes=moved)
    if op.dims["masked"].constant:
        added = _like(op, "Add", "elementwise.add", numel=scores, operands=Affine(1))
        yield msgspec.structs.replace(added, **on_scores)
    yield msgspec.structs.replace(_like(op, "Softmax", "softmax.softmax", rows=rows, cols=keys), **on_scores)
    product = _like(op, "MatMul", "bmm", batch=batch, m=queries, n=width, k=keys)
    yield msgspec.structs.replace(product, macs=half, read_bytes=moved)


def _like(op: Op, name: str, family: str, **dims: Affine) -> Op:
    """A node that reads and writes as much as an op writes."""
    return Op(
        name=f"ort::{name}",
        module=op.module,
        host_class=class_of(family, name),
        family=family,
        dtype=op.dtype,
        dims=dims,
        read_bytes=op.write_bytes,
        write_bytes=op.write_bytes,
        live_bytes=op.live_bytes,
        launches=1,
    )


def _bare(op: Op, name: str, host_class: str) -> Op:
    """An op as a node: without Python around it, and one launch."""
    return msgspec.structs.replace(op, name=f"ort::{name}", host_class=host_class, syncs=0, launches=1, **NO_PYTHON)


def _elements(op: Op) -> Affine:
    return op.write_bytes // itemsize(op)
