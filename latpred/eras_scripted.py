"""What TorchScript of PyTorch 1.12 makes of a graph: no Python, and pointwise kernels that follow each other fused.

Its own graphs are not to be had without its version and a GPU; this is what its two fusers are known to do. From Volta
on nvFuser joins what it can read, normalisation of a batch too. It refuses older GPUs, where TensorExpr joins what is
pointwise. Layer normalisation and softmax, which nvFuser reads as well, made no difference to what is predicted.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from latpred.graph import Line, ModelGraph, Op
from latpred.ops.families import root
from latpred.specs import Spec

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
        read_bytes=_sum(first.read_bytes, Line(max(0, extra[0]), max(0, extra[1]))),
    )


def _sum(one: Line, other: Line) -> Line:
    return Line(one.constant + other.constant, one.per_sample + other.per_sample)
