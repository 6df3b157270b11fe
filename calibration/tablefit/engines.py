"""What TorchScript and engine builders make of a graph: pointwise kernels are fused, and there is no Python.

Their own graphs are not to be had without their versions of that time and a GPU; these are what they are known to do:
TorchScript's fusers join pointwise kernels that follow each other, normalisation of a batch among them, and TensorRT
joins them to the product before.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from latpred.graph import Line, ModelGraph, Op
from latpred.ops.families import root

ENGINES = ("tensorrt",)
SCRIPTED = ("torchscript",)
_FUSED = ("batch_norm", "elementwise")  # into what stands before them


def as_run_by(runtime: str, graph: ModelGraph) -> ModelGraph:
    """An eager graph as another runtime is known to run it."""
    if runtime in ENGINES:
        return _rewritten(graph, _launched)
    return _rewritten(graph, _scripted) if runtime in SCRIPTED else graph


def _rewritten(graph: ModelGraph, rewrite: Callable[[tuple[Op, ...]], tuple[Op, ...]]) -> ModelGraph:
    exact = graph.ops_at_one
    return msgspec.structs.replace(graph, ops=rewrite(graph.ops), ops_at_one=None if exact is None else rewrite(exact))


def _launched(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    kept: list[Op] = []
    for op in ops:
        if op.launches and op.family and not (kept and root(op.family) in _FUSED):
            kept.append(msgspec.structs.replace(op, module_calls=0, python_calls=0))
    return tuple(kept)


def _scripted(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    kept: list[Op] = []
    open_group = False
    for op in ops:
        bare = msgspec.structs.replace(op, module_calls=0, python_calls=0)
        # A convolution adds its bias by itself; fusers never see it.
        own = op.name == "aten::add_" and op.weight_bytes.constant > 0
        pointwise = op.launches > 0 and root(op.family) in _FUSED and not own
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
    return msgspec.structs.replace(
        second,
        weight_bytes=_sum(first.weight_bytes, second.weight_bytes),
        read_bytes=_sum(first.read_bytes, Line(max(0, extra[0]), max(0, extra[1]))),
    )


def _sum(one: Line, other: Line) -> Line:
    return Line(one.constant + other.constant, one.per_sample + other.per_sample)
