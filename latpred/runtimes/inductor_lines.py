"""Ops of a compiled model, affine in batch, from the calls that forward passes at a few batch sizes make.

Inductor may fuse otherwise at another batch size. Then the calls at batch 2 stand for all, those that the other batch
has no counterpart of grow in proportion, and a note says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import NamedTuple

from latpred.features import EFFORTS
from latpred.graph import Line, Op
from latpred.runtimes.inductor import Compiled, Forward
from latpred.tracing.entry import Entry

GUARDS = "guards"  # host class of what a compiled graph costs before its first kernel
EAGER = "eager"  # first part of the host class of an op that runs by itself between compiled graphs
_WORK = ("macs", "weight_bytes", "read_bytes", "write_bytes")
_DONE = EFFORTS["generated"]


class Call(NamedTuple):
    """One host step: what is called, the checks it makes of its inputs, and the bytes alive after it."""

    name: str
    host_class: str
    family: str
    dtype: str
    dims: tuple[str, ...]
    counts: tuple[int, ...]
    launches: int
    syncs: int
    checks: int
    live: int
    estimated: bool

    @property
    def kind(self) -> tuple[object, ...]:
        """What two calls must share to be the same call at two batch sizes."""
        return (self.name, self.host_class, self.family, self.dtype, self.dims, self.launches, self.syncs)


def calls_of(done: Forward) -> list[Call]:
    """The host steps of one forward pass.

    A compiled graph begins with its guards and the checks of its inputs, which `Call.checks` counts.
    """
    calls: list[Call] = []
    carried = 0
    for event in done.events:
        base = live = done.input_bytes + carried
        if isinstance(event, Entry):
            calls.append(_call(event, f"{EAGER}.{event.host_class}", 0, live + event.counts[len(_WORK)]))
            continue
        calls.append(_guards(event, live))
        for step in event.steps:
            live += step.entry.counts[len(_WORK)]
            calls.append(_call(step.entry, step.entry.host_class, 0, live))
            live -= step.freed
        carried = max(0, live - base)
    return calls


def ops_through(two: Sequence[Call], three: Sequence[Call]) -> tuple[tuple[Op, ...], str]:
    """Ops for every batch size from the calls at batch 2 and 3, and a note where they differ in more than sizes."""
    kinds = tuple([call.kind for call in calls] for calls in (two, three))
    ops: list[Op] = []
    unmatched = 0
    for tag, first, last, start, _ in SequenceMatcher(None, kinds[0], kinds[1], autojunk=False).get_opcodes():
        for offset, call in enumerate(two[first:last]):
            if tag == "equal":
                ops.append(_op(call, *_through(call, three[start + offset])))
            else:
                ops.append(_op(call, *_in_proportion(call)))
                unmatched += 1
    if not unmatched and len(two) == len(three):
        return tuple(ops), ""
    counts = [sum(call.launches for call in calls) for calls in (two, three)]
    return tuple(ops), (
        f"Inductor makes {counts[0]} kernels at batch 2 and {counts[1]} at batch 3; "
        "those of batch 2 stand for all larger ones."
    )


def ops_exactly(calls: Sequence[Call]) -> tuple[Op, ...]:
    """Ops of one batch size alone."""
    return tuple(_op(call, tuple(Line(value) for value in call.counts), Line(call.live)) for call in calls)


def on_the_line(ops: Sequence[Op], one: Sequence[Call]) -> bool:
    """Whether the line through batches 2 and 3 also gives every count at batch 1."""
    return len(ops) == len(one) and all(
        (op.name, op.host_class, op.family) == (call.name, call.host_class, call.family)
        and [line.at(1) for line in _lines(op)] == _counted(call)
        for op, call in zip(ops, one, strict=True)
    )


def _lines(op: Op) -> list[Line]:
    return [*(getattr(op, name) for name in _WORK), op.live_bytes, *op.dims.values()]


def _counted(call: Call) -> list[int]:
    return [*call.counts[: len(_WORK)], call.live, *call.counts[len(_WORK) + 1 :]]


def _call(entry: Entry, host_class: str, checks: int, live: int) -> Call:
    launches = entry.launches if entry.family else 0
    return Call(
        name=entry.name,
        host_class=host_class,
        family=entry.family,
        dtype=entry.dtype,
        dims=entry.dims,
        counts=entry.counts,
        launches=launches,
        syncs=entry.syncs,
        checks=checks,
        live=live,
        estimated=entry.estimated,
    )


def _guards(graph: Compiled, live: int) -> Call:
    counts = (0,) * (len(_WORK) + 1)
    return Call("inductor::guards", GUARDS, "", "", (), counts, 0, 0, graph.inputs, live, False)


def _through(two: Call, three: Call) -> tuple[tuple[Line, ...], Line]:
    lines = tuple(_line(a, b) for a, b in zip(two.counts, three.counts, strict=True))
    return lines, _line(two.live, three.live)


def _line(two: int, three: int) -> Line:
    return Line(two - 2 * (three - two), three - two)


def _in_proportion(call: Call) -> tuple[tuple[Line, ...], Line]:
    """Work, what loops do and the first dimension grow with batch; weights and the other dimensions do not."""
    first = len(_WORK) + 1
    grows = {0, 2, 3, first} | {first + index for index, name in enumerate(call.dims) if name in _DONE}
    lines = tuple(
        Line(value % 2, value // 2) if index in grows else Line(value) for index, value in enumerate(call.counts)
    )
    return lines, Line(call.live % 2, call.live // 2)


def _op(call: Call, lines: tuple[Line, ...], live: Line) -> Op:
    macs, weights, read, written, _new, *dims = lines
    return Op(
        name=call.name,
        module="",
        host_class=call.host_class,
        family=call.family,
        dtype=call.dtype,
        dims=dict(zip(call.dims, dims, strict=True)),
        macs=macs,
        weight_bytes=weights,
        read_bytes=read,
        write_bytes=written,
        live_bytes=live,
        launches=call.launches,
        syncs=call.syncs,
        # Guards and the wrapper go through a graph's inputs one by one, parameters included.
        python_calls=call.checks,
        estimated=call.estimated,
    )
