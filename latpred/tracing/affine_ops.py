"""Lines: what the walks at several batch sizes have in common, as ops whose every count is affine in batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from latpred.errors import TraceError
from latpred.graph.graph import Affine, Op
from latpred.tracing.op_record import OpRecord, place
from latpred.tracing.python_calls import NEW, HostWork

RETURN = "python::return"


@dataclass(frozen=True, slots=True)
class TracePass:
    """One finished walk: its entries, which of them were nested, and the bytes of its inputs."""

    batch: int
    entries: list[OpRecord]
    nested: list[bool]
    input_bytes: int


class AffineOps:
    """Builds lines through batch 2 and another, each value once: a graph has thousands and few different ones."""

    def __init__(self, other: int) -> None:
        self._span = other - 2
        self._known: dict[tuple[int, int], Affine] = {}
        self._parts: dict[tuple[int, int], _Part] = {}

    def through(self, at_two: int, at_other: int) -> Affine:
        """The line with these values at batch 2 and at the other."""
        line = self._known.get((at_two, at_other))
        if line is None:
            slope = (at_other - at_two) // self._span
            line = self._known[at_two, at_other] = Affine(at_two - 2 * slope, slope)
        return line

    def part(self, two: OpRecord, other: OpRecord) -> _Part:
        """What every call with these two entries has in common."""
        part = self._parts.get((id(two), id(other)))
        if part is None:
            counts = [self.through(a, b) for a, b in zip(two.counts, other.counts, strict=True)]
            part = _Part(two, tuple(counts), dict(zip(two.dims, counts[NEW + 1 :], strict=True)))
            self._parts[id(two), id(other)] = part
        return part


@dataclass(frozen=True, slots=True)
class _Part:
    entry: OpRecord
    counts: tuple[Affine, ...]
    dims: dict[str, Affine]


def same_ops(one: Sequence[OpRecord], other: Sequence[OpRecord]) -> bool:
    """Whether two walks issued the same ops in the same order."""
    return len(one) == len(other) and all(a is b or _alike(a, b) for a, b in zip(one, other, strict=True))


def _alike(a: OpRecord, b: OpRecord) -> bool:
    return (
        a.name == b.name
        and a.family == b.family
        and a.launches == b.launches
        and a.dims == b.dims
        and a.syncs == b.syncs
    )


def demand_same(two: TracePass, three: TracePass, host: HostWork) -> None:
    """Refuse walks that differ in more than sizes."""
    if same_ops(two.entries, three.entries):
        return
    index = next(
        (i for i, (a, b) in enumerate(zip(two.entries, three.entries, strict=False)) if not _alike(a, b)),
        min(len(two.entries), len(three.entries)) - 1,
    )
    raise TraceError(
        f"the model issues different ops at batch 2 and {three.batch}, first at {two.entries[index].name} in "
        f"{place(host.modules[index])}: its work is no line in batch"
    )


def ops_through(two: TracePass, other: TracePass, host: HostWork) -> tuple[Op, ...]:
    """The ops that serve every batch >= 2, from walks at 2 and a larger batch; only at 3 is any difference a slope."""
    lines = AffineOps(other.batch)
    parts = [lines.part(a, b) for a, b in zip(two.entries, other.entries, strict=True)]
    live = [
        lines.through(a, b)
        for a, b in zip(
            live_bytes(two.entries, host, two.input_bytes),
            live_bytes(other.entries, host, other.input_bytes),
            strict=True,
        )
    ]
    return _ops(parts, live, two.nested, host)


def ops_exactly(walk: TracePass, host: HostWork) -> tuple[Op, ...]:
    """The ops of one walk, constant in batch."""
    known: dict[int, _Part] = {}
    for entry in walk.entries:
        if id(entry) not in known:
            counts = tuple(Affine(value) for value in entry.counts)
            known[id(entry)] = _Part(entry, counts, dict(zip(entry.dims, counts[NEW + 1 :], strict=True)))
    live = [Affine(value) for value in live_bytes(walk.entries, host, walk.input_bytes)]
    return _ops([known[id(entry)] for entry in walk.entries], live, walk.nested, host)


def is_affine(ops: Sequence[Op], one: TracePass, two: TracePass, other: TracePass, host: HostWork) -> bool:
    """Whether the line through batch 2 and another also gives every count at batch 1."""
    if not in_line(one, two, other):
        return False
    live = live_bytes(one.entries, host, one.input_bytes)
    return all(op.live_bytes.at(1) == value for op, value in zip(ops, live, strict=False))


def in_line(one: TracePass, two: TracePass, three: TracePass) -> bool:
    """Whether three walks issued the same ops, and all of their counts lie on lines."""
    if not (same_ops(one.entries, two.entries) and same_ops(two.entries, three.entries)):
        return False
    near, far = two.batch - one.batch, three.batch - two.batch
    seen: set[tuple[int, int, int]] = set()
    for a, b, c in zip(one.entries, two.entries, three.entries, strict=True):
        key = (id(a), id(b), id(c))
        if key in seen:
            continue
        counts = zip(_compared(a), _compared(b), _compared(c), strict=True)
        if any((y - x) * far != (z - y) * near for x, y, z in counts):
            return False
        if b.dims[-1:] == ("operands",) and b.counts[-1] != c.counts[-1]:
            return False
        seen.add(key)
    return True


def _compared(entry: OpRecord) -> tuple[int, ...]:
    """Counts without "operands": at batch 1, a tensor broadcast over the batch is as large as the result."""
    if entry.dims[-1:] == ("operands",):
        return entry.counts[:-1]
    return entry.counts


def live_bytes(entries: Sequence[OpRecord], host: HostWork, input_bytes: int) -> list[int]:
    """Activation bytes alive just after each op, inputs included."""
    change = [entry.counts[NEW] for entry in entries]
    for birth, death in host.deaths.items():
        change[death] -= entries[birth].counts[NEW]
    if change:
        change[0] += input_bytes
    return list(accumulate(change))


def _ops(parts: Sequence[_Part], live: Sequence[Affine], nested: Sequence[bool], host: HostWork) -> tuple[Op, ...]:
    ops = [
        Op(
            name=part.entry.name,
            module=module,
            host_class=part.entry.nested_class if inner else part.entry.host_class,
            family=part.entry.family,
            dtype=part.entry.dtype,
            dims=part.dims,
            macs=part.counts[0],
            weight_bytes=part.counts[1],
            read_bytes=part.counts[2],
            write_bytes=part.counts[3],
            live_bytes=alive,
            launches=part.entry.launches,
            syncs=part.entry.syncs,
            module_calls=module_calls,
            python_calls=python_calls,
            estimated=part.entry.estimated,
        )
        for part, alive, inner, module, module_calls, python_calls in zip(
            parts, live, nested, host.modules, host.module_calls, host.python_calls, strict=False
        )
    ]
    if host.module_calls[-1] or host.python_calls[-1]:
        ops.append(closing(live[-1] if live else Affine(0), host.module_calls[-1], host.python_calls[-1]))
    return tuple(ops)


def closing(live: Affine, module_calls: int, python_calls: int) -> Op:
    """What Python does after the last op."""
    return Op(
        name=RETURN,
        module="",
        host_class="python.return",
        family="",
        dtype="",
        dims={},
        live_bytes=live,
        module_calls=module_calls,
        python_calls=python_calls,
    )
