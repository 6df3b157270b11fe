"""What an engine builder makes of a graph: products with everything pointwise behind them fused in, and no Python.

TensorRT's own graphs are not to be had without it and its GPU; this is what its builder is known to do to
convolutional networks.
"""

from __future__ import annotations

import msgspec

from latpred.graph import ModelGraph, Op
from latpred.ops.families import root

ENGINES = ("tensorrt",)
_FUSED = ("batch_norm", "elementwise")  # into what stands before them


def as_engine(graph: ModelGraph) -> ModelGraph:
    """A graph as an engine: launches only, without what is fused into the one before."""
    exact = graph.ops_at_one
    return msgspec.structs.replace(
        graph, ops=_launched(graph.ops), ops_at_one=None if exact is None else _launched(exact)
    )


def _launched(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    kept: list[Op] = []
    for op in ops:
        if op.launches and op.family and not (kept and root(op.family) in _FUSED):
            kept.append(msgspec.structs.replace(op, module_calls=0, python_calls=0))
    return tuple(kept)
