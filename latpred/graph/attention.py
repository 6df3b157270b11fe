"""How a graph computes attention: in one call, or as products with a softmax between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from latpred.errors import UsageError
from latpred.graph.graph import Affine, ModelGraph, Op
from latpred.ops.families import root

_ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float64": 8}
_FUSED = "scaled_dot_product_"  # in the names of calls that compute it as a whole
REWRITTEN = "attention in parts is worked out from the fused calls of the model"
_PRODUCTS = ("bmm", "attention", "gemm", "conv")


def attended(graph: ModelGraph, attention: str) -> ModelGraph:
    """The graph with attention as asked for; an error where it would have to be fused by the model itself."""
    if graph.attention == attention:
        return graph
    if attention == "eager":
        if graph.runtime != "eager":
            raise UsageError(
                f"this graph is what {graph.runtime} runs; trace the model again with attention='eager', or pass it."
            )
        if any(map(_is_fused, graph.ops)):
            graph = msgspec.structs.replace(unfused(graph), notes=(*graph.notes, REWRITTEN))
    elif any(map(_in_parts, (graph.ops, graph.ops_at_one or ()))):
        raise UsageError(
            f"{graph.model} computes attention as products and softmax, which attention='sdpa' cannot change; trace a "
            "model that calls torch.nn.functional.scaled_dot_product_attention, or leave attention out."
        )
    return msgspec.structs.replace(graph, attention=attention)


def _in_parts(ops: Sequence[Op]) -> bool:
    """Whether the product after some softmax is one of many small ones, as of scores with values."""
    softmax = False
    for op in ops:
        family = root(op.family)
        if softmax and family == "bmm":
            return True
        softmax = family == "softmax" or (softmax and family not in _PRODUCTS)
    return False


def unfused(graph: ModelGraph) -> ModelGraph:
    """The graph with the parts of every call of attention in its place; the products of one sample need no copies."""

    def rewrite(ops: tuple[Op, ...], *, at_one: bool) -> tuple[Op, ...]:
        return tuple(part for op in ops for part in _parts_of(op, at_one=at_one))

    ops = (*graph.ops, *(graph.ops_at_one or ()))
    if not any(_FUSED in name for name in {op.name for op in ops}) or not any(map(_is_fused, ops)):
        return graph
    return msgspec.structs.replace(
        graph,
        ops=rewrite(graph.ops, at_one=False),
        ops_at_one=rewrite(graph.ops if graph.ops_at_one is None else graph.ops_at_one, at_one=True),
        exact={batch: unfused(alone) for batch, alone in graph.exact.items()},
    )


def _is_fused(op: Op) -> bool:
    """Whether an op is attention in one call."""
    return _FUSED in op.name and op.dims.keys() >= {"batch", "heads", "queries", "keys", "head_dim"}


def itemsize(op: Op) -> int:
    """Bytes of each number that an op computes with."""
    return _ELEMENT_BYTES.get(op.dtype, 4)


def _parts_of(op: Op, *, at_one: bool) -> Iterator[Op]:
    """The ops that did the work of one call of attention; any other op as it is.

    Heads lie beside each other in queries, keys and values. A batch of several is copied to where the products want it,
    and what they give is copied back; a batch of one (`at_one`) has those products without copies.
    """
    if not _is_fused(op):
        yield op
        return
    heads, head_dim = op.dims["batch"] * op.dims["heads"], op.dims["head_dim"]
    queries, keys = (heads * op.dims[rows] * head_dim for rows in ("queries", "keys"))
    scores = heads * op.dims["queries"] * op.dims["keys"]
    scaled = elementwise(op, "mul", "elementwise.mul", queries)
    yield msgspec.structs.replace(scaled, module_calls=op.module_calls, python_calls=op.python_calls)
    yield view(op, "transpose", "view.transpose")
    if at_one:
        yield _product(op, "matmul", "keys", "head_dim")
    else:
        yield view(op, "expand", "view.expand")
        yield _copy(op, "nested.reshape", queries, head_dim)
        yield view(op, "expand", "view.nested.expand")
        yield _copy(op, "nested.reshape", keys, Affine(1))
        yield _product(op, "nested.bmm", "keys", "head_dim")
        yield view(op, "view", "view.nested.view")
    if op.dims.get("masked", Affine(0)).constant:
        yield elementwise(op, "add", "elementwise.add", scores)
    rows = {"rows": heads * op.dims["queries"], "cols": op.dims["keys"]}
    softmax = _kernel(op, "softmax", "softmax.softmax", "softmax.softmax", rows, scores, scores)
    both = scores * (2 * itemsize(op))  # scores and result are there at once
    yield msgspec.structs.replace(softmax, live_bytes=op.live_bytes + both)
    if at_one:
        yield _product(op, "matmul", "head_dim", "keys")
    else:
        yield view(op, "expand", "view.expand")
        yield view(op, "reshape", "view.nested.reshape")
        yield view(op, "expand", "view.nested.expand")
        yield _copy(op, "nested.reshape", keys, head_dim)
        yield _product(op, "nested.bmm", "head_dim", "keys")
        yield view(op, "view", "view.nested.view")
    yield _copy(op, "reshape", queries, head_dim)  # which a view does where heads come out side by side


def view(op: Op, name: str, host_class: str) -> Op:
    """Another look at a tensor of an op."""
    return Op(f"aten::{name}", op.module, host_class, "", "", {}, live_bytes=op.live_bytes)


def elementwise(op: Op, name: str, host_class: str, elements: Affine) -> Op:
    """One pass over elements of an op."""
    family = f"elementwise.{name.rstrip('_')}"
    return _kernel(op, name, host_class, family, {"numel": elements, "operands": Affine(1)}, elements, elements)


def _copy(op: Op, leaf: str, elements: Affine, run: Affine) -> Op:
    """A copy of elements of an op to contiguous memory."""
    return _kernel(op, "reshape", f"copy.{leaf}", "copy.strided", {"numel": elements, "run": run}, elements, elements)


def _product(op: Op, leaf: str, columns: str, inner: str) -> Op:
    """A product for each head, of as many columns as one dimension of an op and summed over another."""
    heads, m, n, k = op.dims["batch"] * op.dims["heads"], op.dims["queries"], op.dims[columns], op.dims[inner]
    dims = {"batch": heads, "m": m, "n": n, "k": k}
    read, written = heads * m * k + heads * n * k, heads * m * n
    made = _kernel(op, leaf.rpartition(".")[2], f"bmm.{leaf}", "bmm", dims, read, written)
    return msgspec.structs.replace(made, macs=heads * m * n * k)


def _kernel(
    op: Op, name: str, host_class: str, family: str, dims: dict[str, Affine], read: Affine, written: Affine
) -> Op:
    """A kernel that reads and writes so many elements, in the place and precision of an op."""
    return Op(
        name=f"aten::{name}",
        module=op.module,
        host_class=host_class,
        family=family,
        dtype=op.dtype,
        dims=dims,
        read_bytes=read * itemsize(op),
        write_bytes=written * itemsize(op),
        live_bytes=op.live_bytes,
        launches=1,
    )
