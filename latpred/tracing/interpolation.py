"""Graphs between two walked ones: every count affine in whatever was varied, found exactly or not at all.

Counts are whole numbers; where the line through two of them misses the whole numbers in between, it is not the line.
"""

from __future__ import annotations

import msgspec

from latpred.errors import TraceError
from latpred.graph import Line, ModelGraph, Op
from latpred.tracing.lines import RETURN

Share = tuple[int, int]


class OffTheLineError(TraceError):
    """Two graphs are not one with other sizes."""


def graph_between(a: ModelGraph, b: ModelGraph, share: Share) -> ModelGraph:
    """The graph at `share` (part, whole) of the way from one to another."""
    if (a.ops_at_one is None) != (b.ops_at_one is None):
        raise OffTheLineError("one graph has rows for batch 1 and the other has none")
    exact = None
    if a.ops_at_one is not None and b.ops_at_one is not None:
        exact = _ops_between(a.ops_at_one, b.ops_at_one, share)
    return msgspec.structs.replace(a, ops=_ops_between(a.ops, b.ops, share), ops_at_one=exact)


def same_work(a: ModelGraph, b: ModelGraph) -> bool:
    """Whether two graphs launch the same work, whatever the host was seen to do around it."""
    return _rows(a.ops) == _rows(b.ops) and _rows(a.ops_at_one or ()) == _rows(b.ops_at_one or ())


def _rows(ops: tuple[Op, ...]) -> list[tuple[object, ...]]:
    return [
        (op.name, op.family, op.dims, op.macs, op.weight_bytes, op.read_bytes, op.write_bytes, op.launches, op.syncs)
        for op in ops
        if op.name != RETURN
    ]


def _ops_between(a: tuple[Op, ...], b: tuple[Op, ...], share: Share) -> tuple[Op, ...]:
    if len(a) != len(b):
        raise OffTheLineError(f"{len(a)} ops become {len(b)}")
    return tuple(_op_between(x, y, share) for x, y in zip(a, b, strict=True))


def _op_between(a: Op, b: Op, share: Share) -> Op:
    if (a.name, a.family, a.launches, a.syncs, tuple(a.dims)) != (b.name, b.family, b.launches, b.syncs, tuple(b.dims)):
        raise OffTheLineError(f"{a.name} becomes {b.name}")
    if a.dims == b.dims and (a.macs, a.weight_bytes, a.read_bytes, a.write_bytes, a.live_bytes) == (
        b.macs,
        b.weight_bytes,
        b.read_bytes,
        b.write_bytes,
        b.live_bytes,
    ):
        return a
    return msgspec.structs.replace(
        a,
        dims={name: _line_between(line, b.dims[name], share) for name, line in a.dims.items()},
        macs=_line_between(a.macs, b.macs, share),
        weight_bytes=_line_between(a.weight_bytes, b.weight_bytes, share),
        read_bytes=_line_between(a.read_bytes, b.read_bytes, share),
        write_bytes=_line_between(a.write_bytes, b.write_bytes, share),
        live_bytes=_line_between(a.live_bytes, b.live_bytes, share, exact=False),
    )


def _line_between(a: Line, b: Line, share: Share, exact: bool = True) -> Line:
    if a == b:
        return a
    part, whole = share
    constant, left = divmod((b.constant - a.constant) * part, whole)
    slope, also_left = divmod((b.per_sample - a.per_sample) * part, whole)
    if exact and (left or also_left):
        raise OffTheLineError("a count is not affine")
    return Line(a.constant + constant, a.per_sample + slope)
