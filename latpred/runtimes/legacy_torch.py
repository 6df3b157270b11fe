"""What software of another time makes of the same model: graphs as an older PyTorch ran them.

A walk is made with the PyTorch that is installed. A profile that was fitted to older measurements names its era in
`protocol["era"]`; models are then walked within `walked_for`, and graphs are rewritten before they are priced. Walks
know nothing of this, and neither do profiles that were measured with the installed software.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import msgspec

from latpred.caches import IdentityCache
from latpred.graph.graph import Affine, ModelGraph, Op
from latpred.ops.families import root
from latpred.profile.gpus import Spec

_CALL = "scaled_dot_product_"
_NEEDED = frozenset({"batch", "heads", "queries", "keys", "head_dim"})
_HALF_BYTES = ("float16", "bfloat16")


def is_fused(op: Op) -> bool:
    """Whether an op is attention in one call."""
    return _CALL in op.name and op.dims.keys() >= _NEEDED


def unfused(op: Op, *, at_one: bool) -> Iterator[Op]:
    """The ops that did the work of one call; any other op as it is.

    Heads lie beside each other in queries, keys and values. A batch of several is copied to where the products want it,
    and what they give is copied back; a batch of one (`at_one`) has those products without copies.
    """
    if not is_fused(op):
        yield op
        return
    steps = _Steps(op)
    yield steps.elementwise("mul", steps.queries, op)
    yield steps.view("transpose")
    if at_one:
        yield steps.product("matmul", "keys", "head_dim")
    else:
        yield from steps.copied(("expand", "copy", "nested.expand"), steps.queries, steps.head_dim)
        yield steps.copy("nested.reshape", steps.keys, Affine(1))
        yield steps.product("nested.bmm", "keys", "head_dim")
        yield steps.view("nested.view")
    if op.dims.get("masked", Affine(0)).constant:
        yield steps.elementwise("add", steps.scores)
    yield steps.softmax()
    if at_one:
        yield steps.product("matmul", "head_dim", "keys")
    else:
        yield from steps.copied(("expand", "nested.reshape", "nested.expand", "copy"), steps.keys, steps.head_dim)
        yield steps.product("nested.bmm", "head_dim", "keys")
        yield steps.view("nested.view")
    yield steps.copy("reshape", steps.queries, steps.head_dim)  # which a view does where heads come out side by side


class _Steps:
    """Ops of one attention, by what they do."""

    def __init__(self, op: Op) -> None:
        self._op = op
        self.head_dim = op.dims["head_dim"]
        self.queries, self.keys = self._elements("queries", "head_dim"), self._elements("keys", "head_dim")
        self.scores = self._elements("queries", "keys")

    def elementwise(self, name: str, elements: Affine, called: Op | None = None) -> Op:
        """One pass over elements; the calls of modules and Python before it are those of `called`."""
        calls = (called.module_calls, called.python_calls) if called else (0, 0)
        dims = {"numel": elements, "operands": Affine(1)}
        made = self._kernel(f"elementwise.{name}", f"elementwise.{name}", dims, elements, elements)
        return msgspec.structs.replace(made, module_calls=calls[0], python_calls=calls[1])

    def view(self, leaf: str) -> Op:
        """Another look at a tensor."""
        name = f"aten::{leaf.rpartition('.')[2]}"
        return Op(name, self._op.module, f"view.{leaf}", "", "", {}, live_bytes=self._op.live_bytes)

    def copied(self, leaves: tuple[str, ...], elements: Affine, run: Affine) -> Iterator[Op]:
        """Views by their names, and a copy where one is called so."""
        for leaf in leaves:
            yield self.copy("nested.reshape", elements, run) if leaf == "copy" else self.view(leaf)

    def copy(self, leaf: str, elements: Affine, run: Affine) -> Op:
        """A copy to contiguous memory."""
        return self._kernel(f"copy.{leaf}", "copy.strided", {"numel": elements, "run": run}, elements, elements)

    def product(self, leaf: str, columns: str, inner: str) -> Op:
        """A product for each head, of as many columns as one dimension and summed over another."""
        dims = self._op.dims
        each, m, n, k = _times(dims["batch"], dims["heads"]), dims["queries"], dims[columns], dims[inner]
        read = _plus(_times(each, m, k), _times(each, n, k))
        made = self._kernel(f"bmm.{leaf}", "bmm", {"batch": each, "m": m, "n": n, "k": k}, read, _times(each, m, n))
        return msgspec.structs.replace(made, macs=_times(each, m, n, k))

    def softmax(self) -> Op:
        """Over each row of scores, while those and the result are both there."""
        rows = _times(*(self._op.dims[name] for name in ("batch", "heads", "queries")))
        dims = {"rows": rows, "cols": self._op.dims["keys"]}
        made = self._kernel("softmax.softmax", "softmax.softmax", dims, self.scores, self.scores)
        both = self._bytes(_plus(self.scores, self.scores))
        return msgspec.structs.replace(made, live_bytes=_plus(self._op.live_bytes, both))

    def _kernel(self, host_class: str, family: str, dims: dict[str, Affine], read: Affine, written: Affine) -> Op:
        return Op(
            name=f"aten::{host_class.rpartition('.')[2]}",
            module=self._op.module,
            host_class=host_class,
            family=family,
            dtype=self._op.dtype,
            dims=dims,
            read_bytes=self._bytes(read),
            write_bytes=self._bytes(written),
            live_bytes=self._op.live_bytes,
            launches=1,
        )

    def _elements(self, rows: str, columns: str) -> Affine:
        return _times(*(self._op.dims[name] for name in ("batch", "heads", rows, columns)))

    def _bytes(self, elements: Affine) -> Affine:
        size = 2 if self._op.dtype in _HALF_BYTES else 4
        return Affine(size * elements.constant, size * elements.per_sample)


def _plus(one: Affine, other: Affine) -> Affine:
    return Affine(one.constant + other.constant, one.per_sample + other.per_sample)


def _times(*lines: Affine) -> Affine:
    """The product of lines, of which at most one rises with the batch."""
    found = Affine(1)
    for line in lines:
        rising = found.constant * line.per_sample + found.per_sample * line.constant
        found = Affine(found.constant * line.constant, rising)
    return found


FUSED = "fused"  # host class of a group of several: guards are asked before its kernel is launched
GROUP = "elementwise.fused"  # family of its kernel, which a code generator wrote
_WITHOUT_NVFUSER = ("Pascal",)


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
    between = first.write_bytes
    extra = (second.read_bytes.constant - between.constant, second.read_bytes.per_sample - between.per_sample)
    half = ".half" if ".half" in second.host_class else ""
    return msgspec.structs.replace(
        second,
        host_class=f"{FUSED}{half}",
        family=GROUP,
        weight_bytes=_sum(first.weight_bytes, second.weight_bytes),
        read_bytes=_sum(first.read_bytes, Affine(max(0, extra[0]), max(0, extra[1]))),
    )


def _sum(one: Affine, other: Affine) -> Affine:
    return Affine(one.constant + other.constant, one.per_sample + other.per_sample)


TORCH_1_12 = "torch-1.12"
UNFUSED = (TORCH_1_12,)  # eras that had no fused attention
TORCHSCRIPT = "torchscript"
# Runtimes whose graphs of an era are made from eager's; what others' tools make of a model is of today.
REWRITTEN = ("eager", TORCHSCRIPT, "cuda-graphs")

_HALVES = ("fp16", "bf16")
_ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float64": 8}
_KINDS = {
    "conv_depthwise": "conv_depthwise",
    "conv_grouped": "conv_grouped",
    "batch_norm": "batch_norm",
    "bmm": "gemm",
    "embedding": "index",
}
_known: IdentityCache[ModelGraph, dict[tuple[str, str], ModelGraph]] = IdentityCache()
_CURRENT: ContextVar[str] = ContextVar("era", default="")


def attention_of(era: str) -> str | None:
    """How transformers are to be built for an era: "eager" where attention was not fused yet, None for their default.

    >>> attention_of("torch-1.12"), attention_of("")
    ('eager', None)
    """
    return "eager" if era in UNFUSED else None


@contextmanager
def traced_for(era: str) -> Iterator[None]:
    """Within it, models are walked for an era: with its attention, and eagerly for the runtimes in `REWRITTEN`."""
    if not era:
        yield
        return
    from latpred.zoo.names import attention

    token = _CURRENT.set(era)
    try:
        with attention(attention_of(era)):
            yield
    finally:
        _CURRENT.reset(token)


def current() -> str:
    """The era that models are walked for right now."""
    return _CURRENT.get()


def as_run_in(era: str, graph: ModelGraph, runtime: str = "eager", gpu: Spec | None = None) -> ModelGraph:
    """The eager graph of a model as a runtime of an era ran it; the graph itself where nothing differs.

    In the days of PyTorch 1.12 models of transformers did not read values back from the device, attention was several
    calls, a convolution's bias was a kernel of its own, a one-dimensional convolution went through two dimensions, and
    what a convolution or normalisation cost the host depended on its groups and on the precision.

    What TorchScript fuses depends on the GPU, of which `gpu` is the datasheet; default: that of a recent one.
    """
    if era != TORCH_1_12 or graph.runtime != "eager":
        return graph
    known = _known.get(graph, lambda _: {})
    fuser = NVFUSER if gpu is None else fuser_of(gpu)
    how = era, fuser.name if runtime == TORCHSCRIPT else ""
    if how not in known:
        older = _torch_1_12(graph)
        known[how] = scripted(older, fuser) if runtime == TORCHSCRIPT else older
    return known[how]


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
    named = msgspec.structs.replace(op, host_class=_class_of(op, half), syncs=0)
    if not root(op.family).startswith("conv"):
        yield named
        return
    flat = op.name == "aten::conv1d"
    if flat:
        unsqueeze = _view("unsqueeze", op, half)
        yield msgspec.structs.replace(unsqueeze, module_calls=op.module_calls, python_calls=op.python_calls)
        yield unsqueeze
        named = msgspec.structs.replace(named, module_calls=0, python_calls=0)
    bias = _bias_bytes(op)
    if bias > 0:
        rest = Affine(op.weight_bytes.constant - bias, op.weight_bytes.per_sample)
        named = msgspec.structs.replace(named, weight_bytes=rest)
    yield named
    if bias > 0:
        yield _added(op, bias, half)
    if flat:
        yield _view("squeeze", op, half)


def _view(name: str, op: Op, half: bool) -> Op:
    return Op(f"aten::{name}", op.module, _half(f"view.{name}", half), "", "", {}, live_bytes=op.live_bytes)


def _bias_bytes(op: Op) -> int:
    """Bytes of parameters beyond the filters."""
    # At batch 1: where each sample makes filters of its own, channels and groups are proportional to the batch.
    size = {name: op.dims[name].at(1) for name in ("c_in", "c_out", "groups", "kernel_h", "kernel_w")}
    filters = size["c_out"] * size["c_in"] // size["groups"] * size["kernel_h"] * size["kernel_w"]
    return max(0, op.weight_bytes.constant - filters * _ELEMENT_BYTES.get(op.dtype, 4))


def _added(op: Op, bias: int, half: bool) -> Op:
    per_element = _ELEMENT_BYTES.get(op.dtype, 4)
    elements = Affine(op.write_bytes.constant // per_element, op.write_bytes.per_sample // per_element)
    return Op(
        name="aten::add_",
        module=op.module,
        host_class=_half("elementwise.add", half),
        family="elementwise.add",
        dtype=op.dtype,
        dims={"numel": elements, "operands": Affine(1)},
        weight_bytes=Affine(bias),
        read_bytes=op.write_bytes,
        write_bytes=op.write_bytes,
        live_bytes=op.live_bytes,
        launches=1,
    )


def _class_of(op: Op, half: bool) -> str:
    kind = _KINDS.get(root(op.family))
    general, dot, leaf = op.host_class.partition(".")
    return _half(f"{kind or general}{dot}{leaf}", half)


def _half(name: str, half: bool) -> str:
    """Class of an op in a half-precision model: "conv.half.conv2d" falls back to "conv"."""
    general, dot, leaf = name.partition(".")
    return f"{general}.half{dot}{leaf}" if half else name
