"""What other runtimes than eager make of the graphs of a table: TorchScript, and engines as TensorRT's.

TensorRT's own graphs are not to be had without a GPU; it is known to join pointwise kernels and normalisation to what
stands before them, and there is no Python.
"""

from __future__ import annotations

import msgspec

from latpred.eras_scripted import POINTWISE, scripted
from latpred.graph import ModelGraph, Op
from latpred.ops.families import root

ENGINES = ("tensorrt",)
SCRIPTED = ("torchscript",)


def as_run_by(runtime: str, graph: ModelGraph) -> ModelGraph:
    """An eager graph as another runtime is known to run it."""
    if runtime in ENGINES:
        exact = graph.ops_at_one
        return msgspec.structs.replace(
            graph, ops=_launched(graph.ops), ops_at_one=None if exact is None else _launched(exact)
        )
    return scripted(graph) if runtime in SCRIPTED else graph


def _launched(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    kept: list[Op] = []
    for op in ops:
        if op.launches and op.family and not (kept and root(op.family) in POINTWISE):
            kept.append(msgspec.structs.replace(op, module_calls=0, python_calls=0))
    return tuple(kept)
