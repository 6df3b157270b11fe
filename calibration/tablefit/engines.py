"""What other runtimes than eager make of the graphs of a table: TorchScript, and engines as TensorRT's.

TensorRT's own graphs are not to be had without a GPU; it is known to join pointwise kernels and normalisation to what
stands before them, and there is no Python.
"""

from __future__ import annotations

import msgspec

from latpred.eras_scripted import fuser_of, scripted
from latpred.graph import ModelGraph, Op
from latpred.kinds import CAT
from latpred.ops.families import root
from latpred.specs import Spec

ENGINES = ("tensorrt",)
SCRIPTED = ("torchscript",)
_POINTWISE = ("batch_norm", "elementwise")
_JOINED = f"{CAT}.engine"


def fuser_name(runtime: str, gpu: Spec) -> str:
    """What joins kernels in a runtime on a GPU; graphs of one runtime differ by no more than that."""
    return fuser_of(gpu).name if runtime in SCRIPTED else ""


def as_run_by(runtime: str, graph: ModelGraph, gpu: Spec) -> ModelGraph:
    """An eager graph as another runtime is known to run it on a GPU."""
    if runtime in ENGINES:
        exact = graph.ops_at_one
        return msgspec.structs.replace(
            graph, ops=_launched(graph.ops), ops_at_one=None if exact is None else _launched(exact)
        )
    return scripted(graph, fuser_of(gpu)) if runtime in SCRIPTED else graph


def _launched(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    kept: list[Op] = []
    for op in ops:
        if op.launches and op.family and not (kept and root(op.family) in _POINTWISE):
            # However many tensors an engine joins, it is not PyTorch's kernel that does it.
            family = _JOINED if root(op.family) == CAT else op.family
            kept.append(msgspec.structs.replace(op, family=family, module_calls=0, python_calls=0))
    return tuple(kept)
