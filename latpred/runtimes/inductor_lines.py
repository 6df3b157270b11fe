"""Ops of a compiled model, affine in batch, from the calls that forward passes at a few batch sizes make.

Inductor may fuse otherwise at another batch size. Then the calls at batch 2 stand for all, those that the other batch
has no counterpart of grow in proportion, and a note says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher

from latpred.features import EFFORTS
from latpred.graph import Line, Op
from latpred.runtimes.executed import FIRST_DIM, Executed, op_through
from latpred.runtimes.inductor import Compiled, Forward
from latpred.tracing.entry import Entry

GUARDS = "guards"  # host class of what a compiled graph costs before its first kernel
EAGER = "eager"  # first part of the host class of an op that runs by itself between compiled graphs
_LIVE = FIRST_DIM - 1  # of the counts: an entry has the bytes of new storage there
_DONE = EFFORTS["generated"]


def calls_of(done: Forward) -> list[Executed]:
    """The host steps of one forward pass.

    A compiled graph begins with its guards and the checks of its inputs.
    """
    calls: list[Executed] = []
    carried = 0
    for event in done.events:
        base = live = done.input_bytes + carried
        if isinstance(event, Entry):
            calls.append(_call(event, f"{EAGER}.{event.host_class}", live + event.counts[_LIVE]))
            continue
        calls.append(_guards(event, live))
        for step in event.steps:
            live += step.entry.counts[_LIVE]
            calls.append(_call(step.entry, step.entry.host_class, live))
            live -= step.freed
        carried = max(0, live - base)
    return calls


def ops_through(two: Sequence[Executed], three: Sequence[Executed]) -> tuple[tuple[Op, ...], str]:
    """Ops for every batch size from the calls at batch 2 and 3, and a note where they differ in more than sizes."""
    kinds = tuple([call.kind for call in calls] for calls in (two, three))
    ops: list[Op] = []
    unmatched = 0
    for tag, first, last, start, _ in SequenceMatcher(None, kinds[0], kinds[1], autojunk=False).get_opcodes():
        for offset, call in enumerate(two[first:last]):
            if tag == "equal":
                ops.append(op_through(call, three[start + offset]))
            else:
                ops.append(_in_proportion(call))
                unmatched += 1
    if not unmatched and len(two) == len(three):
        return tuple(ops), ""
    counts = [sum(call.launches for call in calls) for calls in (two, three)]
    return tuple(ops), (
        f"Inductor makes {counts[0]} kernels at batch 2 and {counts[1]} at batch 3; "
        "those of batch 2 stand for all larger ones."
    )


def _call(entry: Entry, host_class: str, live: int) -> Executed:
    return Executed(
        name=entry.name,
        host_class=host_class,
        family=entry.family,
        dtype=entry.dtype,
        dims=entry.dims,
        counts=(*entry.counts[:_LIVE], live, *entry.counts[FIRST_DIM:]),
        launches=entry.launches if entry.family else 0,
        syncs=entry.syncs,
        estimated=entry.estimated,
    )


def _guards(graph: Compiled, live: int) -> Executed:
    """Guards and the wrapper go through a graph's inputs one by one, parameters included."""
    counts = (*(0,) * _LIVE, live)
    return Executed("inductor::guards", GUARDS, "", "", (), counts, 0, 0, False, python_calls=graph.inputs)


def _in_proportion(call: Executed) -> Op:
    """Work, bytes alive, what loops do and the first dimension grow with batch; weights and other dimensions do not."""
    grows = {0, 2, 3, _LIVE, FIRST_DIM} | {FIRST_DIM + at for at, name in enumerate(call.dims) if name in _DONE}
    return call.with_lines(
        [Line(count % 2, count // 2) if at in grows else Line(count) for at, count in enumerate(call.counts)]
    )
