"""What torch.compile would run, guessed from an eager walk: library calls stay, all between two of them is one kernel.

No layout is changed and nothing is looked up in Inductor, so counts are off by some tenths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from latpred.graph import Line, ModelGraph, Op
from latpred.ops.families import root
from latpred.runtimes.inductor_lines import EAGER, GUARDS

NOTE = (
    "What torch.compile runs is estimated from the eager graph: "
    "one generated kernel for all ops between two library calls."
)
_LIBRARY = frozenset(
    {
        *("gemm", "bmm", "attention", "conv", "conv_grouped", "conv_depthwise", "conv_transpose"),
        *("fft", "rnn", "sort", "other"),
    }
)
_REDUCING = frozenset({"norm", "batch_norm", "softmax", "reduction"})


def estimated(graph: ModelGraph, target: str, walked_by: str) -> ModelGraph:
    """A graph of `walked_by` from an eager one."""
    one = None if graph.ops_at_one is None else fused(graph.ops_at_one)
    return msgspec.structs.replace(
        graph, ops=fused(graph.ops), ops_at_one=one, runtime=walked_by, target=target, notes=(*graph.notes, NOTE)
    )


def fused(ops: Sequence[Op]) -> tuple[Op, ...]:
    """Library calls, one generated kernel for each run of ops between them, and guards ahead of each graph.

    A synchronisation with the host ends a graph, as Dynamo cannot see past it.
    """
    found: list[Op] = []
    graph: list[Op] = []
    for op in ops:
        if not op.syncs:
            graph.append(op)
            continue
        found += _graph(graph)
        found.append(_quiet(op, f"{EAGER}.{op.host_class}"))
        graph = []
    return (*found, *_graph(graph))


def _graph(ops: Sequence[Op]) -> Iterator[Op]:
    launched = [op for op in ops if op.launches and op.family]
    if not launched:
        return
    weights = sum(1 for op in launched if op.weight_bytes.at(1))
    yield Op("inductor::guards", "", GUARDS, "", "", {}, live_bytes=ops[0].live_bytes, python_calls=1 + 2 * weights)
    run: list[Op] = []
    for op in launched:
        if root(op.family) not in _LIBRARY:
            run.append(op)
            continue
        if run:
            yield _one(run)
        run = []
        yield msgspec.structs.replace(_quiet(op, f"kernel.extern.{root(op.family)}"), launches=1)
    if run:
        yield _one(run)


def _quiet(op: Op, host_class: str) -> Op:
    return msgspec.structs.replace(op, host_class=host_class, module_calls=0, python_calls=0)


def _one(run: Sequence[Op]) -> Op:
    """One kernel for a run: it reads what its hungriest op reads, and all of the weights."""
    widest = max(run, key=lambda op: op.read_bytes.at(2) + op.write_bytes.at(2))
    reducing = [op for op in run if root(op.family) in _REDUCING]
    kind = "reduction" if reducing else "pointwise"
    itemsize = 2 if widest.dtype in ("float16", "bfloat16") else 4
    weights = Line(sum(op.weight_bytes.constant for op in run), sum(op.weight_bytes.per_sample for op in run))
    return Op(
        name="inductor::generated",
        module=run[0].module,
        host_class="kernel.generated",
        family=f"generated.{kind}",
        dtype=widest.dtype,
        dims={
            "numel": Line(widest.write_bytes.constant // itemsize, widest.write_bytes.per_sample // itemsize),
            "cols": reducing[0].dims.get("cols", Line(1)) if reducing else Line(1),
            "parts": Line(len(run)),
        },
        weight_bytes=weights,
        read_bytes=widest.read_bytes,
        write_bytes=run[-1].write_bytes,
        live_bytes=run[-1].live_bytes,
        launches=1,
        estimated=True,
    )
