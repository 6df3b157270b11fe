"""What software of another time makes of the same model: graphs as an older PyTorch ran them.

Models are traced with the PyTorch that is installed. A profile that was fitted to older measurements names its era in
`protocol["era"]`; models are then traced within `traced_for`, and graphs are rewritten before they are priced. Traces
know nothing of this, and neither do profiles that were measured with the installed software.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import msgspec

from latpred.graph.graph import Affine, ModelGraph, Op
from latpred.ops.families import root
from latpred.profile.gpus import Spec
from latpred.storage import IdentityCache

TORCH_1_12 = "torch-1.12"
TORCHSCRIPT = "torchscript"
# Runtimes whose graphs of an era are made from eager's; what others' tools make of a model is of today.
REWRITTEN = ("eager", TORCHSCRIPT, "cuda-graphs")
FUSED = "fused"  # host class of a group of several: guards are asked before its kernel is launched
GROUP = "elementwise.fused"  # family of its kernel, which a code generator wrote
_WITHOUT_NVFUSER = ("Pascal",)
_HALVES = ("fp16", "bf16")
_ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float64": 8}
_KINDS = {
    "conv_depthwise": "conv_depthwise",
    "conv_grouped": "conv_grouped",
    "batch_norm": "batch_norm",
    "bmm": "gemm",
    "embedding": "index",
}
_rewritten: IdentityCache[ModelGraph, dict[tuple[str, str], ModelGraph]] = IdentityCache()
_ERA: ContextVar[str] = ContextVar("era", default="")


def attention_of(era: str) -> str | None:
    """How transformers are to be built for an era: "eager" where attention was not fused yet, None for their default.

    >>> attention_of("torch-1.12"), attention_of("")
    ('eager', None)
    """
    return "eager" if era == TORCH_1_12 else None


@contextmanager
def traced_for(era: str) -> Iterator[None]:
    """Within it, models are traced for an era: with its attention, and eagerly for the runtimes in `REWRITTEN`."""
    if not era:
        yield
        return
    from latpred.zoo.names import attention

    token = _ERA.set(era)
    try:
        with attention(attention_of(era)):
            yield
    finally:
        _ERA.reset(token)


def current() -> str:
    """The era that models are traced for right now."""
    return _ERA.get()


class Fuser(NamedTuple):
    """A fuser's name, which families it joins, and which kinds of these it cannot read."""

    name: str
    joins: frozenset[str]
    unread: frozenset[str]


NVFUSER = Fuser(
    "nvfuser",
    joins=frozenset({"batch_norm", "elementwise"}),
    unread=frozenset({"hardtanh", "relu6", "hardswish", "hardsigmoid"}),
)
TENSOREXPR = Fuser("tensorexpr", joins=frozenset({"elementwise"}), unread=frozenset())


def fuser_of(gpu: Spec) -> Fuser:
    """The fuser that runs on a GPU."""
    return TENSOREXPR if gpu.architecture in _WITHOUT_NVFUSER else NVFUSER


def as_run_in(era: str, graph: ModelGraph, runtime: str = "eager", gpu: Spec | None = None) -> ModelGraph:
    """The eager graph of a model as a runtime of an era ran it; the graph itself where nothing differs.

    In the days of PyTorch 1.12 models of transformers did not read values back from the device, attention was several
    calls, a convolution's bias was a kernel of its own, a one-dimensional convolution went through two dimensions, and
    what a convolution or normalisation cost the host depended on its groups and on the precision.

    What TorchScript fuses depends on the GPU, of which `gpu` is the datasheet; default: that of a recent one.
    """
    if era != TORCH_1_12 or graph.runtime != "eager":
        return graph
    graphs = _rewritten.get(graph, lambda _: {})
    fuser = NVFUSER if gpu is None else fuser_of(gpu)
    key = era, fuser.name if runtime == TORCHSCRIPT else ""
    if key not in graphs:
        older = _torch_1_12(graph)
        graphs[key] = scripted(older, fuser) if runtime == TORCHSCRIPT else older
    return graphs[key]


def _torch_1_12(graph: ModelGraph) -> ModelGraph:
    half = graph.precision in _HALVES

    def rewrite(ops: tuple[Op, ...], *, at_one: bool) -> tuple[Op, ...]:
        return tuple(new for op in ops for plain in unfused(op, at_one=at_one) for new in _older(plain, half))

    exact = graph.ops_at_one
    if exact is None and any(map(is_fused, graph.ops)):
        exact = graph.ops  # the products of a single sample need no copies
    at_one = None if exact is None else rewrite(exact, at_one=True)
    return msgspec.structs.replace(graph, ops=rewrite(graph.ops, at_one=False), ops_at_one=at_one)


def _older(op: Op, half: bool) -> Iterator[Op]:
    """An op as PyTorch 1.12 ran it: the bias of a convolution is added by itself, a flat one has two dimensions."""
    named = msgspec.structs.replace(op, host_class=_class_of(op, half), syncs=0)
    if not root(op.family).startswith("conv"):
        yield named
        return
    flat = op.name == "aten::conv1d"
    if flat:
        unsqueeze = _view(op, "unsqueeze", _half("view.unsqueeze", half))
        yield msgspec.structs.replace(unsqueeze, module_calls=op.module_calls, python_calls=op.python_calls)
        yield unsqueeze
        named = msgspec.structs.replace(named, module_calls=0, python_calls=0)
    bias = _bias_bytes(op)
    yield msgspec.structs.replace(named, weight_bytes=op.weight_bytes - Affine(bias))
    if bias:
        elements = op.write_bytes // _itemsize(op)
        added = _elementwise(op, "add_", _half("elementwise.add", half), elements)
        yield msgspec.structs.replace(added, weight_bytes=Affine(bias))
    if flat:
        yield _view(op, "squeeze", _half("view.squeeze", half))


def _bias_bytes(op: Op) -> int:
    """Bytes of parameters beyond the filters."""
    # At batch 1: where each sample makes filters of its own, channels and groups are proportional to the batch.
    size = {name: op.dims[name].at(1) for name in ("c_in", "c_out", "groups", "kernel_h", "kernel_w")}
    filters = size["c_out"] * size["c_in"] // size["groups"] * size["kernel_h"] * size["kernel_w"]
    return max(0, op.weight_bytes.constant - filters * _itemsize(op))


def _itemsize(op: Op) -> int:
    return _ELEMENT_BYTES.get(op.dtype, 4)


def _class_of(op: Op, half: bool) -> str:
    kind = _KINDS.get(root(op.family))
    general, dot, leaf = op.host_class.partition(".")
    return _half(f"{kind or general}{dot}{leaf}", half)


def _half(name: str, half: bool) -> str:
    """Class of an op in a half-precision model: "conv.half.conv2d" falls back to "conv"."""
    general, dot, leaf = name.partition(".")
    return f"{general}.half{dot}{leaf}" if half else name


def is_fused(op: Op) -> bool:
    """Whether an op is attention in one call."""
    return "scaled_dot_product_" in op.name and op.dims.keys() >= {"batch", "heads", "queries", "keys", "head_dim"}


def unfused(op: Op, *, at_one: bool) -> Iterator[Op]:
    """The ops that did the work of one call of attention; any other op as it is.

    Heads lie beside each other in queries, keys and values. A batch of several is copied to where the products want it,
    and what they give is copied back; a batch of one (`at_one`) has those products without copies.
    """
    if not is_fused(op):
        yield op
        return
    heads, head_dim = op.dims["batch"] * op.dims["heads"], op.dims["head_dim"]
    queries, keys = (heads * op.dims[rows] * head_dim for rows in ("queries", "keys"))
    scores = heads * op.dims["queries"] * op.dims["keys"]
    scaled = _elementwise(op, "mul", "elementwise.mul", queries)
    yield msgspec.structs.replace(scaled, module_calls=op.module_calls, python_calls=op.python_calls)
    yield _view(op, "transpose", "view.transpose")
    if at_one:
        yield _product(op, "matmul", "keys", "head_dim")
    else:
        yield _view(op, "expand", "view.expand")
        yield _copy(op, "nested.reshape", queries, head_dim)
        yield _view(op, "expand", "view.nested.expand")
        yield _copy(op, "nested.reshape", keys, Affine(1))
        yield _product(op, "nested.bmm", "keys", "head_dim")
        yield _view(op, "view", "view.nested.view")
    if op.dims.get("masked", Affine(0)).constant:
        yield _elementwise(op, "add", "elementwise.add", scores)
    rows = {"rows": heads * op.dims["queries"], "cols": op.dims["keys"]}
    softmax = _kernel(op, "softmax", "softmax.softmax", "softmax.softmax", rows, scores, scores)
    both = scores * (2 * _itemsize(op))  # scores and result are there at once
    yield msgspec.structs.replace(softmax, live_bytes=op.live_bytes + both)
    if at_one:
        yield _product(op, "matmul", "head_dim", "keys")
    else:
        yield _view(op, "expand", "view.expand")
        yield _view(op, "reshape", "view.nested.reshape")
        yield _view(op, "expand", "view.nested.expand")
        yield _copy(op, "nested.reshape", keys, head_dim)
        yield _product(op, "nested.bmm", "head_dim", "keys")
        yield _view(op, "view", "view.nested.view")
    yield _copy(op, "reshape", queries, head_dim)  # which a view does where heads come out side by side


def _view(op: Op, name: str, host_class: str) -> Op:
    """Another look at a tensor of an op."""
    return Op(f"aten::{name}", op.module, host_class, "", "", {}, live_bytes=op.live_bytes)


def _elementwise(op: Op, name: str, host_class: str, elements: Affine) -> Op:
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
        read_bytes=read * _itemsize(op),
        write_bytes=written * _itemsize(op),
        live_bytes=op.live_bytes,
        launches=1,
    )


def scripted(graph: ModelGraph, fuser: Fuser) -> ModelGraph:
    """An eager graph of that time as TorchScript ran it; what its ops and kernels are called stays."""
    exact = graph.ops_at_one
    return msgspec.structs.replace(
        graph, ops=_fused(graph.ops, fuser), ops_at_one=None if exact is None else _fused(exact, fuser)
    )


def _fused(ops: tuple[Op, ...], fuser: Fuser) -> tuple[Op, ...]:
    kept: list[Op] = []
    open_group = False
    for op in ops:
        if op.name.startswith("python::"):
            continue
        bare = msgspec.structs.replace(op, module_calls=0, python_calls=0)
        joined = _joins(op, fuser)
        if joined and open_group:
            kept[-1] = _with(kept[-1], bare)
        else:
            kept.append(bare)
        open_group = joined
    return tuple(kept)


def _joins(op: Op, fuser: Fuser) -> bool:
    """Whether an op may be part of a group. A convolution adds its bias by itself; fusers never see that."""
    if not op.launches or (op.name == "aten::add_" and op.weight_bytes.constant > 0):
        return False
    return root(op.family) in fuser.joins and op.family.rpartition(".")[2] not in fuser.unread


def _with(first: Op, second: Op) -> Op:
    """Two kernels as one: what lies between them is never written."""
    extra = second.read_bytes - first.write_bytes
    half = ".half" if ".half" in second.host_class else ""
    return msgspec.structs.replace(
        second,
        host_class=f"{FUSED}{half}",
        family=GROUP,
        weight_bytes=first.weight_bytes + second.weight_bytes,
        read_bytes=first.read_bytes + Affine(max(0, extra.constant), max(0, extra.per_sample)),
    )
