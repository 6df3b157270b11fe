"""What passes at several batch sizes have in common, as ops whose every count is affine in batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import msgspec

from latpred.errors import TraceError
from latpred.graph.graph import Affine, Op
from latpred.tracing.op_record import OpRecord, place
from latpred.tracing.python_calls import PassWatcher

RETURN = "python::return"


@dataclass(frozen=True, slots=True)
class TracePass:
    """One forward pass at one batch size: its op records, which of them another op issued, bytes of its inputs.

    `watcher` saw the Python between the ops and the memory they hold; None where nobody looked.
    """

    batch: int
    records: list[OpRecord]
    nested: list[bool]
    input_bytes: int
    watcher: PassWatcher | None = None

    @property
    def watched(self) -> PassWatcher:
        """The watcher of a pass that had one."""
        assert self.watcher is not None
        return self.watcher


def same_ops(one: Sequence[OpRecord], other: Sequence[OpRecord]) -> bool:
    """Whether two passes issued the same ops in the same order."""
    return len(one) == len(other) and all(a is b or _alike(a, b) for a, b in zip(one, other, strict=True))


def _alike(a: OpRecord, b: OpRecord) -> bool:
    return (a.name, a.family, a.launches, a.syncs, *a.dims) == (b.name, b.family, b.launches, b.syncs, *b.dims)


def demand_same(two: TracePass, other: TracePass) -> None:
    """Refuse passes that differ in more than sizes."""
    if same_ops(two.records, other.records):
        return
    pairs = enumerate(zip(two.records, other.records, strict=False))
    last = min(len(two.records), len(other.records)) - 1
    index = next((i for i, (a, b) in pairs if not _alike(a, b)), last)
    raise TraceError(
        f"the model issues different ops at batch 2 and {other.batch}, first at {two.records[index].name} in "
        f"{place(two.watched.modules[index])}: its work is no line in batch"
    )


def ops_through(two: TracePass, other: TracePass) -> tuple[Op, ...]:
    """The ops that serve every batch >= 2, from passes at 2 and a larger batch; only at 3 is any difference a slope."""
    return _ops(two, other, two.watched, lambda a, b: Affine.through((two.batch, a), (other.batch, b)))


def ops_exactly(done: TracePass, watcher: PassWatcher | None = None) -> tuple[Op, ...]:
    """The ops of one pass, constant in batch; `watcher` is that of a pass with the same ops, where it had none."""
    return _ops(done, done, watcher or done.watched, lambda value, _: Affine(value))


def _ops(
    done: TracePass, other: TracePass, watcher: PassWatcher, through: Callable[[int, int], Affine]
) -> tuple[Op, ...]:
    count = cache(through)  # a graph has thousands of counts and few different ones
    known: dict[tuple[int, int], Op] = {}
    ops = []
    alive = zip(*(watcher.live_bytes(each.records, each.input_bytes) for each in (done, other)), strict=True)
    calls = zip(watcher.modules, watcher.module_calls, watcher.python_calls, strict=False)
    rows = zip(done.records, other.records, done.nested, alive, calls, strict=False)
    for a, b, nested, live, (module, module_calls, python_calls) in rows:
        op = known.get((id(a), id(b)))
        if op is None:
            op = known[id(a), id(b)] = _op(a, [count(x, y) for x, y in zip(a.counts, b.counts, strict=True)])
        ops.append(
            msgspec.structs.replace(
                op,
                module=module,
                host_class=a.nested_class if nested else op.host_class,
                live_bytes=count(*live),
                module_calls=module_calls,
                python_calls=python_calls,
            )
        )
    if watcher.module_calls[-1] or watcher.python_calls[-1]:
        live_bytes = ops[-1].live_bytes if ops else Affine(0)
        ops.append(closing(live_bytes, watcher.module_calls[-1], watcher.python_calls[-1]))
    return tuple(ops)


def _op(record: OpRecord, counts: Sequence[Affine]) -> Op:
    """What every call with a record has in common."""
    macs, weight_bytes, read_bytes, write_bytes, _, *dims = counts
    return Op(
        name=record.name,
        module="",
        host_class=record.host_class,
        family=record.family,
        dtype=record.dtype,
        dims=dict(zip(record.dims, dims, strict=True)),
        macs=macs,
        weight_bytes=weight_bytes,
        read_bytes=read_bytes,
        write_bytes=write_bytes,
        launches=record.launches,
        syncs=record.syncs,
        estimated=record.estimated,
    )


def closing(live_bytes: Affine, module_calls: int, python_calls: int) -> Op:
    """What Python does after the last op."""
    return Op(
        name=RETURN,
        module="",
        host_class="python.return",
        family="",
        dtype="",
        dims={},
        live_bytes=live_bytes,
        module_calls=module_calls,
        python_calls=python_calls,
    )


def is_affine(ops: Sequence[Op], one: TracePass, two: TracePass, other: TracePass) -> bool:
    """Whether the line through batch 2 and another also gives every count at batch 1."""
    if not on_one_line(one, two, other):
        return False
    live = (one.watcher or two.watched).live_bytes(one.records, one.input_bytes)
    return all(op.live_bytes.at(1) == value for op, value in zip(ops, live, strict=False))


def on_one_line(one: TracePass, two: TracePass, three: TracePass) -> bool:
    """Whether three passes issued the same ops, and all of their counts lie on lines."""
    if not (same_ops(one.records, two.records) and same_ops(two.records, three.records)):
        return False
    near, far = two.batch - one.batch, three.batch - two.batch
    seen: set[tuple[int, int, int]] = set()
    for a, b, c in zip(one.records, two.records, three.records, strict=True):
        key = (id(a), id(b), id(c))
        if key in seen:
            continue
        counts = zip(_compared(a), _compared(b), _compared(c), strict=True)
        if any((y - x) * far != (z - y) * near for x, y, z in counts):
            return False
        if b.dims.get("operands") != c.dims.get("operands"):
            return False
        seen.add(key)
    return True


def _compared(record: OpRecord) -> tuple[int, ...]:
    """Counts without "operands": at batch 1, a tensor broadcast over the batch is as large as the result."""
    return record.counts[:-1] if "operands" in record.dims else record.counts
