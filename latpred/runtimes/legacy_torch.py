"""What software of another time makes of the same model: graphs as an older PyTorch ran them.

Models are traced with the PyTorch that is installed. A profile that was fitted to older measurements names its era in
`protocol["era"]`; models are then traced within `traced_for`, and graphs are rewritten before they are priced. Traces
know nothing of this, and neither do profiles that were measured with the installed software.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial, reduce
from itertools import groupby
from typing import NamedTuple

import msgspec

from latpred.graph.graph import NO_PYTHON, Affine, ModelGraph, Op, op_by_op, rewritten
from latpred.graph.rewrites import (
    OLDER,
    bias_added,
    biases_on_cuda,
    causal_on_cuda,
    has_no_kernel,
    math_attention_on_cuda,
    self_attention_on_cuda,
    unfused,
    view,
)
from latpred.ops.families import root
from latpred.profile.gpus import Spec
from latpred.query import AMP, ERA, HALVES

TORCH_1_12 = "torch-1.12"
TORCH_2_4 = "torch-2.4"  # from 2.0 on: as `TORCH_2` but for attention that no kernel takes
TORCH_2 = "torch-2"  # what ran is what is installed, priced by the classes that tables of whole models tell apart
TORCHSCRIPT = "torchscript"
# Runtimes whose graphs of an era are made from eager's; what others' tools make of a model is of today.
FROM_EAGER = ("eager", TORCHSCRIPT, "cuda-graphs")
FUSED_CLASS = "fused"  # host class of a group of several: guards are asked before its kernel is launched
FUSED_FAMILY = "elementwise.fused"  # of its kernel, which a code generator wrote
_WITHOUT_NVFUSER = ("Pascal",)
_HALF_DTYPES = ("float16", "bfloat16")
LIBRARY_CLASSES = {  # host classes of families that libraries serve
    "conv_depthwise": "conv_depthwise",
    "conv_grouped": "conv_grouped",
    "batch_norm": "batch_norm",
    "bmm": "gemm",
    "embedding": "index",
}


def attention_of(era: str) -> str | None:
    """How transformers are built for an era: "eager" where attention was not fused yet, None for their default."""
    return "eager" if era == TORCH_1_12 else None


@contextmanager
def traced_for(era: str) -> Iterator[None]:
    """Within it, models are traced for an era: with its attention and autocast, and eagerly for `FROM_EAGER`."""
    if not era:
        yield
        return
    from latpred.zoo.names import attention

    token = ERA.set(era)
    try:
        with attention(attention_of(era)):
            yield
    finally:
        ERA.reset(token)


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


def fuser_of(gpu: Spec | None) -> Fuser:
    """The fuser that runs on a GPU; on one that nobody knows, that of a recent one."""
    return TENSOREXPR if gpu is not None and gpu.architecture in _WITHOUT_NVFUSER else NVFUSER


def as_run_in(era: str, graph: ModelGraph, runtime: str = "eager", gpu: Spec | None = None) -> ModelGraph:
    """The eager graph of a model as a runtime of an era ran it; without one, as for `TORCH_2`.

    In the days of PyTorch 1.12 models of transformers did not read values back from the device, attention was several
    calls that scaled its scores, a one-dimensional convolution went through two dimensions, and what a convolution or
    normalisation cost the host depended on its groups and on the precision. Eras are of GPUs: in all of them biases of
    convolutions are added by themselves. Later ones have CUDA's kernel of self-attention, and attention of other than
    four dimensions in parts.

    What TorchScript fuses depends on the GPU, of which `gpu` is the datasheet; default: that of a recent one.
    """
    if era != TORCH_1_12:
        graph = math_attention_on_cuda(self_attention_on_cuda(graph), has_no_kernel, older=era == TORCH_2_4)
    elif graph.runtime == "eager" and graph.attention != "sdpa":
        graph = unfused(graph, OLDER, scales_scores=True)
    graph = causal_on_cuda(graph)
    if graph.runtime != "eager":
        return biases_on_cuda(graph)
    older = rewritten(graph, _older_ops(era, graph.precision if era == TORCH_1_12 else ""))
    return scripted(older, fuser_of(gpu)) if era == TORCH_1_12 and runtime == TORCHSCRIPT else older


def rewrites(era: str, runtime: str) -> bool:
    """Whether a runtime's graphs of an era are made from eager's."""
    return era == TORCH_1_12 and runtime in FROM_EAGER


@lru_cache(maxsize=8)
def _older_ops(era: str, precision: str) -> Callable[[Sequence[Op]], Iterator[Op]]:
    return op_by_op(partial(_torch_1_12, precision=precision) if era == TORCH_1_12 else _torch_2)


def _torch_2(op: Op) -> Iterator[Op]:
    """An op with a class that tells convolutions apart, and the bias of one."""
    named = msgspec.structs.replace(op, host_class=_class_of(op.family, op.host_class, half=False))
    return bias_added(named, "elementwise.nested.add_")


def _torch_1_12(op: Op, precision: str) -> Iterator[Op]:
    """An op as PyTorch 1.12 ran it: the bias of a convolution is added by itself, a flat one has two dimensions."""
    # Under autocast some ops are in half precision.
    half = op.dtype in _HALF_DTYPES if precision in AMP else precision in HALVES
    named = msgspec.structs.replace(op, host_class=_class_of(op.family, op.host_class, half), syncs=0)
    if not root(op.family).startswith("conv"):
        yield named
        return
    flat = op.name == "aten::conv1d"
    if flat:
        unsqueeze = view(op, _half("view.unsqueeze", half))
        yield msgspec.structs.replace(unsqueeze, **op.calls._asdict())
        yield unsqueeze
        named = msgspec.structs.replace(named, **NO_PYTHON)
    yield from bias_added(named, _half("elementwise.add", half))
    if flat:
        yield view(op, _half("view.squeeze", half))


def _class_of(family: str, host_class: str, half: bool) -> str:
    kind = LIBRARY_CLASSES.get(root(family))
    general, dot, leaf = host_class.partition(".")
    return _half(f"{kind or general}{dot}{leaf}", half)


def _half(name: str, half: bool) -> str:
    """Class of an op in a half-precision model: "conv.half.conv2d" falls back to "conv"."""
    general, dot, leaf = name.partition(".")
    return f"{general}.half{dot}{leaf}" if half else name


def scripted(graph: ModelGraph, fuser: Fuser) -> ModelGraph:
    """An eager graph of that time as TorchScript ran it; what its ops and kernels are called stays."""
    return rewritten(graph, partial(_fused, fuser))


def _fused(fuser: Fuser, ops: tuple[Op, ...]) -> Iterator[Op]:
    issued = (op for op in ops if not op.name.startswith("python::"))
    for joined, group in groupby(issued, partial(_joins, fuser)):
        bare = [msgspec.structs.replace(op, **NO_PYTHON) for op in group]
        yield from [reduce(_joined, bare)] if joined else bare


def _joins(fuser: Fuser, op: Op) -> bool:
    """Whether an op may be part of a group. A convolution adds its bias by itself; fusers never see that."""
    if not op.launches or (op.name == "aten::add_" and op.weight_bytes.constant > 0):
        return False
    return root(op.family) in fuser.joins and op.family.rpartition(".")[2] not in fuser.unread


def _joined(first: Op, second: Op) -> Op:
    """Two kernels as one: what lies between them is never written."""
    extra = second.read_bytes - first.write_bytes
    half = ".half" if ".half" in second.host_class else ""
    return msgspec.structs.replace(
        second,
        host_class=f"{FUSED_CLASS}{half}",
        family=FUSED_FAMILY,
        weight_bytes=first.weight_bytes + second.weight_bytes,
        read_bytes=first.read_bytes + Affine(max(0, extra.constant), max(0, extra.per_sample)),
    )
