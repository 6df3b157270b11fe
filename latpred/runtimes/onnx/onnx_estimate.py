"""What onnxruntime would run for a model that was never exported: a guess from its eager trace, by rule.

Views of another order become copies, attention its parts, biases additions; batch normalisations go into convolutions,
and on a CPU activations and residual additions too. Constants disappear. Every op that is left is one node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from latpred.graph.graph import Affine, Op
from latpred.ops.families import root
from latpred.runtimes.onnx.onnx_formulas import class_of

NOTE = "onnxruntime's nodes are estimated from the eager trace, by its usual fusions; nothing was exported"
# Activations that onnxruntime's CPU kernels of convolutions apply themselves.
_ABSORBED = frozenset({"elementwise.relu", "elementwise.hardtanh", "elementwise.sigmoid", "elementwise.tanh"})
_CONVOLUTIONS = ("conv", "conv_grouped", "conv_depthwise")
_REORDERED = ("view.transpose", "view.permute", "view.movedim", "view.swapaxes")
_IN_ORDER = ("view.view", "view.reshape", "view.flatten", "view.unsqueeze", "view.squeeze")


def nodes(ops: Sequence[Op], target: str) -> Iterator[Op]:
    """The nodes on a kind of device, "cpu" or "cuda"."""
    before: Op | None = None  # the last op that does work
    for index, op in enumerate(ops):
        if not op.launches:
            yield from _view(op, before)
        elif not _vanishes(op, before, target):
            followed = next((other for other in ops[index + 1 :] if other.launches), None)
            yield from _parts(op, followed)
            before = op


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
    return before.family in _CONVOLUTIONS and (op.family == "batch_norm" or (target == "cpu" and absorbed))


def _parts(op: Op, followed: Op | None) -> Iterator[Op]:
    family = root(op.family)
    if family == "gemm":
        yield from _product(op, followed)
    elif family == "attention":
        yield from _attention(op)
    else:
        name = op.name.rpartition("::")[2].rstrip("_").title().replace("_", "")
        yield _bare(op, name, class_of(op.family, name))


def _product(op: Op, followed: Op | None) -> Iterator[Op]:
    """A product and the addition of its bias, which a GELU or a normalisation behind it would do on the way."""
    yield _bare(op, "MatMul", "node.gemm.MatMul")
    biased = op.weight_bytes.constant > op.dims["n"].constant * op.dims["k"].constant * _itemsize(op)
    if biased and (followed is None or followed.family not in ("elementwise.gelu", "norm.layer_norm")):
        yield _like(op, "Add", "elementwise.add", numel=_elements(op), operands=Affine(1))


def _attention(op: Op) -> Iterator[Op]:
    """Scaled queries and keys, keys turned, scores, mask, softmax, weighted sum."""
    queries, keys, width = op.dims["queries"], op.dims["keys"], op.dims["head_dim"]
    batch, size = op.dims["batch"] * op.dims["heads"].constant, _elements(op)
    rows, scores = batch * queries.constant, batch * (queries.constant * keys.constant)
    moved, half = scores * _itemsize(op), op.macs // 2
    on_scores = {"read_bytes": moved, "write_bytes": moved}
    for name in ("Mul", "Mul"):
        yield _like(op, name, "elementwise.mul", numel=size, operands=Affine(1))
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
    changes = {"module_calls": 0, "python_calls": 0, "syncs": 0, "launches": 1}
    return msgspec.structs.replace(op, name=f"ort::{name}", host_class=host_class, **changes)


def _elements(op: Op) -> Affine:
    return op.write_bytes // _itemsize(op)


def _itemsize(op: Op) -> int:
    return 2 if op.dtype in ("float16", "bfloat16") else 4
