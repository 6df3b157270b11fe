"""What onnxruntime would run for a model that was never exported: a guess from its eager walk, by rule.

Views of another order become copies, attention its parts, biases additions; batch normalisations go into convolutions,
and on a CPU activations and residual additions too. Constants disappear. Every op that is left is one node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from latpred.graph.graph import ZERO, Affine, ModelGraph, Op
from latpred.ops.families import root
from latpred.runtimes.onnx.onnx_formulas import class_of

NOTE = "onnxruntime's nodes are estimated from the eager walk, by its usual fusions; nothing was exported"
# Activations that onnxruntime's CPU kernels of convolutions apply themselves.
_ABSORBED = frozenset({"elementwise.relu", "elementwise.hardtanh", "elementwise.sigmoid", "elementwise.tanh"})
_CONVOLUTIONS = ("conv", "conv_grouped", "conv_depthwise")
_REORDERED = ("view.transpose", "view.permute", "view.t", "view.movedim", "view.swapaxes")


def estimate(graph: ModelGraph, target: str) -> ModelGraph:
    """A guess of onnxruntime's graph.

    Parameters
    ----------
    graph : ModelGraph
        An eager walk.
    target : str
        Kind of device: "cpu" or "cuda".

    Examples
    --------
    >>> import torch, latpred
    >>> mlp = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    >>> [op.name for op in estimate(latpred.trace(mlp, torch.zeros(1, 8)), "cpu").ops]
    ['ort::MatMul', 'ort::Add', 'ort::Relu']
    """
    return msgspec.structs.replace(
        graph,
        ops=tuple(_nodes(graph.ops, target)),
        ops_at_one=None if graph.ops_at_one is None else tuple(_nodes(graph.ops_at_one, target)),
        runtime="onnxruntime",
        target=target,
        notes=(*graph.notes, NOTE),
    )


def _nodes(ops: Sequence[Op], target: str) -> Iterator[Op]:
    before: Op | None = None  # the last op that does work
    for index, op in enumerate(ops):
        if not op.launches:
            yield from _view(op, before)
            continue
        if not _vanishes(op, before, target):
            followed = next((other for other in ops[index + 1 :] if other.launches), None)
            yield from _parts(op, followed)
            before = op


def _view(op: Op, before: Op | None) -> Iterator[Op]:
    """A view in another order is a copy of what came before it; one in the same order still is a node."""
    if not op.host_class.startswith("view.") or ".nested." in op.host_class or before is None:
        return
    if op.host_class in _REORDERED and op.host_class != "view.t":
        yield _like(before, "Transpose", "copy.transpose", {"numel": _elements(before), "run": Affine(1)})
    elif op.host_class in ("view.view", "view.reshape", "view.flatten", "view.unsqueeze", "view.squeeze"):
        yield Op("ort::Reshape", op.module, "node.view.Reshape", "", "", {}, live_bytes=op.live_bytes)


def _vanishes(op: Op, before: Op | None, target: str) -> bool:
    """Whether an op goes into the one before it, or is computed once and for all."""
    if root(op.family) == "factory" or before is None:
        return root(op.family) == "factory"
    convolved = before.family in _CONVOLUTIONS
    if op.family == "batch_norm":
        return convolved
    return convolved and target == "cpu" and (op.family in _ABSORBED or op.family == "elementwise.add")


def _parts(op: Op, followed: Op | None) -> Iterator[Op]:
    kind = root(op.family)
    if kind == "gemm":
        yield from _product(op, followed)
    elif kind == "attention":
        yield from _attention(op)
    else:
        name = op.name.rpartition("::")[2].rstrip("_").title().replace("_", "")
        yield _bare(op, f"ort::{name}", class_of(op.family, name))


def _product(op: Op, followed: Op | None) -> Iterator[Op]:
    """A product and the addition of its bias, which a GELU or a normalisation behind it would do on the way."""
    yield _bare(op, "ort::MatMul", "node.gemm.MatMul")
    n, k = op.dims["n"], op.dims["k"]
    item = 2 if op.dtype in ("float16", "bfloat16") else 4
    biased = op.weight_bytes.constant > n.constant * k.constant * item
    if biased and (followed is None or followed.family not in ("elementwise.gelu", "norm.layer_norm")):
        yield _like(op, "Add", "elementwise.add", {"numel": _elements(op), "operands": Affine(1)})


def _attention(op: Op) -> Iterator[Op]:
    """Scaled queries and keys, keys turned, scores, mask, softmax, weighted sum."""
    queries, keys, width = op.dims["queries"], op.dims["keys"], op.dims["head_dim"]
    heads = op.dims["heads"].constant
    batch = Affine(op.dims["batch"].constant * heads, op.dims["batch"].per_sample * heads)
    size = _elements(op)
    for name in ("Mul", "Mul"):
        yield _like(op, name, "elementwise.mul", {"numel": size, "operands": Affine(1)})
    yield _like(op, "Transpose", "copy.transpose", {"numel": size, "run": Affine(1)})
    half = Affine(op.macs.constant // 2, op.macs.per_sample // 2)
    scores = _times(batch, queries.constant * keys.constant)
    item = 2 if op.dtype in ("float16", "bfloat16") else 4
    moved = Affine(scores.constant * item, scores.per_sample * item)
    first = {"batch": batch, "m": queries, "n": keys, "k": width}
    yield msgspec.structs.replace(_like(op, "MatMul", "bmm", first), macs=half, write_bytes=moved)
    rows = {"rows": _times(batch, queries.constant), "cols": keys}
    if op.dims["masked"].constant:
        added = _like(op, "Add", "elementwise.add", {"numel": scores, "operands": Affine(1)})
        yield msgspec.structs.replace(added, read_bytes=moved, write_bytes=moved)
    softmax = _like(op, "Softmax", "softmax.softmax", rows)
    yield msgspec.structs.replace(softmax, read_bytes=moved, write_bytes=moved)
    second = {"batch": batch, "m": queries, "n": width, "k": keys}
    yield msgspec.structs.replace(_like(op, "MatMul", "bmm", second), macs=half, read_bytes=moved)


def _like(op: Op, name: str, family: str, dims: dict[str, Affine]) -> Op:
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
    return msgspec.structs.replace(
        op, name=name, host_class=host_class, module_calls=0, python_calls=0, syncs=0, launches=1
    )


def _elements(op: Op) -> Affine:
    item = 2 if op.dtype in ("float16", "bfloat16") else 4
    return Affine(op.write_bytes.constant // item, op.write_bytes.per_sample // item)


def _times(line: Affine, factor: int) -> Affine:
    return Affine(line.constant * factor, line.per_sample * factor) if line != ZERO else ZERO
