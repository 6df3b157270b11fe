"""What software of another time makes of the same model: graphs as an older PyTorch ran them.

A walk is made with the PyTorch that is installed. A profile that was fitted to older measurements names its era in
`protocol["era"]`; models are then walked within `walked_for`, and graphs are rewritten before they are priced. Walks
know nothing of this, and neither do profiles that were measured with the installed software.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import msgspec

from latpred.eras_attention import is_fused, unfused
from latpred.eras_scripted import NVFUSER, fuser_of, scripted
from latpred.graph import Line, ModelGraph, Op
from latpred.identity import IdentityCache
from latpred.ops.families import root
from latpred.specs import Spec

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
def walked_for(era: str) -> Iterator[None]:
    """Within it, models are walked for an era: with its attention, and eagerly for the runtimes in `REWRITTEN`."""
    if not era:
        yield
        return
    from latpred.tracing.names import attention

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
        rest = Line(op.weight_bytes.constant - bias, op.weight_bytes.per_sample)
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
    size = {name: op.dims[name].constant for name in ("c_in", "c_out", "groups", "kernel_h", "kernel_w")}
    filters = size["c_out"] * size["c_in"] // size["groups"] * size["kernel_h"] * size["kernel_w"]
    return max(0, op.weight_bytes.constant - filters * _ELEMENT_BYTES.get(op.dtype, 4))


def _added(op: Op, bias: int, half: bool) -> Op:
    per_element = _ELEMENT_BYTES.get(op.dtype, 4)
    elements = Line(op.write_bytes.constant // per_element, op.write_bytes.per_sample // per_element)
    return Op(
        name="aten::add_",
        module=op.module,
        host_class=_half("elementwise.add", half),
        family="elementwise.add",
        dtype=op.dtype,
        dims={"numel": elements, "operands": Line(1)},
        weight_bytes=Line(bias),
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
