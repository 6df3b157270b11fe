"""What TorchScript of PyTorch 1.12 makes of a graph: no Python, and pointwise kernels that follow each other fused.

Its own graphs are not to be had without its version and a GPU; this is what its fusers are known to do. Normalisation
of a batch is pointwise to them.
"""

from __future__ import annotations

import msgspec

from latpred.graph import Line, ModelGraph, Op
from latpred.ops.families import root

POINTWISE = ("batch_norm", "elementwise")
FUSED = "fused"  # host class of a group of several: guards are asked before its kernel is launched


def scripted(graph: ModelGraph) -> ModelGraph:
    """An eager graph of that time as TorchScript ran it; what its ops and kernels are called stays."""
    exact = graph.ops_at_one
    return msgspec.structs.replace(graph, ops=_fused(graph.ops), ops_at_one=None if exact is None else _fused(exact))


def _fused(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    kept: list[Op] = []
    open_group = False
    for op in ops:
        bare = msgspec.structs.replace(op, module_calls=0, python_calls=0)
        # A convolution adds its bias by itself; fusers never see it.
        own = op.name == "aten::add_" and op.weight_bytes.constant > 0
        pointwise = op.launches > 0 and root(op.family) in POINTWISE and not own
        if pointwise and open_group:
            kept[-1] = _with(kept[-1], bare)
        elif not op.name.startswith("python::"):
            kept.append(bare)
        open_group = pointwise
    return tuple(kept)


def _with(first: Op, second: Op) -> Op:
    """Two pointwise kernels as one: what lies between them is never written."""
    between = first.write_bytes
    extra = (second.read_bytes.constant - between.constant, second.read_bytes.per_sample - between.per_sample)
    half = ".half" if ".half" in second.host_class else ""
    return msgspec.structs.replace(
        second,
        host_class=f"{FUSED}{half}",
        weight_bytes=_sum(first.weight_bytes, second.weight_bytes),
        read_bytes=_sum(first.read_bytes, Line(max(0, extra[0]), max(0, extra[1]))),
    )


def _sum(one: Line, other: Line) -> Line:
    return Line(one.constant + other.constant, one.per_sample + other.per_sample)
