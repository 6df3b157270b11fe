"""Engines: what TensorRT and ONNX Runtime's transformer optimizer make of a model, by rule. For predicting only.

Both read a whole graph and replace what stands together by kernels of their own: attention is one, queries, keys and
values are one product, and pointwise ops part of the kernel before them. Attention that is asked for in parts stays in
parts, as in TensorRT before 8.6, in later ones where they do not recognize it, and in ONNX Runtime with a mask for each
query. Neither is run here, so nothing is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from latpred.errors import MissingPackageError
from latpred.graph.features import CAT
from latpred.graph.graph import NO_PYTHON, ZERO, Affine, ModelGraph, Op, rewritten
from latpred.ops.families import lineage, root
from latpred.runtimes import StepPerOp

if TYPE_CHECKING:
    from latpred.runtimes.source import Source

JOINED = f"{CAT}.engine"  # however many tensors an engine joins, it is not PyTorch's kernel that does it
_POINTWISE = frozenset({"batch_norm", "elementwise"})
_MOST_PROJECTIONS = 3  # of queries, keys and values


class Engine(StepPerOp):
    """A runtime whose kernels are told from the eager graph, and that latpred does not run."""

    traced_by = name = ""
    needs = "cuda"
    options = "6"  # version of the rules: graphs by others are made again
    predicted_only = True  # it cannot be calibrated or measured, whatever is installed
    apart: frozenset[str] = frozenset()  # kernel families of pointwise ops that stay kernels of their own
    steps = "kernel"  # first part of its host classes
    how_to = ""

    def trace(self, source: Source, target: str) -> ModelGraph:
        """The estimate: nothing else is known of it."""
        return self.estimate(source.graph, target)

    def estimate(self, graph: ModelGraph, target: str) -> ModelGraph:

        def rewrite(ops: tuple[Op, ...]) -> tuple[Op, ...]:
            made = as_engine(ops, self.apart, fuses_attention=graph.attention != "eager")
            return tuple(
                msgspec.structs.replace(op, host_class=f"{self.steps}.{root(op.family)}", syncs=0) for op in made
            )

        note = f"{self.name} was not asked: its kernels are estimated from the eager graph, by its usual fusions"
        return rewritten(graph, rewrite, runtime=self.traced_by, target=target, notes=(*graph.notes, note))

    def available(self) -> str | None:
        """How to run it without latpred."""
        return f"latpred predicts {self.name} for GPUs that were not measured, and does not run it. {self.how_to}"

    def build(self, model: Any, inputs: Any) -> Callable[[], Any]:
        """Refuse: there is nothing to measure."""
        raise MissingPackageError(f"{self.available()}.")


class TensorRT(Engine):
    """An engine that TensorRT builds of the whole model."""

    name = traced_by = "tensorrt"
    how_to = "To run it: pip install torch_tensorrt, then torch_tensorrt.compile(model, inputs=...)"


class OnnxRuntimeOptimized(Engine):
    """ONNX Runtime on a graph that its transformer optimizer fused: attention, layer norm, GELU and biases."""

    name = traced_by = "onnxruntime-optimized"
    steps = "node"
    # A GELU takes its bias along, but stays a node, as do functions that no product ends in.
    apart = frozenset(f"elementwise.{name}" for name in ("gelu", "tanh", "silu", "sigmoid", "hardswish", "mish"))
    how_to = "To run it: python -m onnxruntime.transformers.optimizer --input model.onnx --output optimized.onnx"


def as_engine(
    ops: Sequence[Op], apart: frozenset[str] = frozenset(), *, fuses_attention: bool = True
) -> tuple[Op, ...]:
    """The kernels of an engine for eager ops; pointwise ones of a family in `apart` stay kernels."""
    made: list[Op] = []
    for op in ops:
        general = root(op.family)
        if not op.launches or not op.family or general == "factory":  # views, and what is computed once
            continue
        if made and general in _POINTWISE and apart.isdisjoint(lineage(op.family)):
            continue
        if general in ("bmm", "attention"):  # which read and write in any order
            while made and root(made[-1].family) == "copy":
                made.pop()
            _join_projections(made)
        if general == "copy" and made and root(made[-1].family) in ("bmm", "attention"):
            continue
        family = JOINED if general == CAT else op.family
        if "upsample" in op.family or general == "conv_depthwise":
            family += ".engine"  # not PyTorch's kernel, nor as slow where that is
        made.append(msgspec.structs.replace(op, family=family, **NO_PYTHON))
        if fuses_attention and [root(one.family) for one in made[-3:]] == ["bmm", "softmax", "bmm"]:
            made[-3:] = [_attention(made[-3], made[-1])]
    return tuple(made)


def _attention(scores: Op, values: Op) -> Op:
    """One kernel in place of the products of attention and what lies between them."""
    sizes = {"batch": "batch", "queries": "m", "keys": "n", "head_dim": "k"}
    dims = {name: scores.dims[size] for name, size in sizes.items()}
    return msgspec.structs.replace(
        values,
        name="engine::attention",
        family="attention",
        dims={**dims, "heads": Affine(1), "masked": ZERO},
        macs=scores.macs + values.macs,
        read_bytes=scores.read_bytes + values.read_bytes - scores.write_bytes,
    )


def _join_projections(made: list[Op]) -> None:
    """Make one product of the last ones where they read the same rows: queries, keys and values."""
    first = len(made)
    while first and len(made) - first < _MOST_PROJECTIONS and _alike(made[first - 1], made[-1]):
        first -= 1
    projections = made[first:]
    if len(projections) < 2:
        return
    summed = {
        name: sum((getattr(op, name) for op in projections), ZERO) for name in ("macs", "weight_bytes", "write_bytes")
    }
    columns = sum((op.dims["n"] for op in projections), ZERO)
    made[first:] = [msgspec.structs.replace(made[first], dims={**made[first].dims, "n": columns}, **summed)]


def _alike(one: Op, other: Op) -> bool:
    """Whether two kernels are products of equally many rows that are equally long."""
    return all(root(op.family) == "gemm" for op in (one, other)) and all(
        one.dims[name] == other.dims[name] for name in ("m", "k")
    )
