"""What a runtime was seen to execute at several batch sizes, as ops whose counts are affine in batch.

What was executed at one batch size are ops too, with counts that are constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import msgspec

from latpred.graph.graph import ZERO, Affine, Op

BATCHES = (1, 2, 3)  # 2 and 3 give a line; batch 1 may have ops of its own, as a reshape there needs no copy
_COUNTS = ("macs", "weight_bytes", "read_bytes", "write_bytes", "live_bytes")


def kind(op: Op) -> tuple[object, ...]:
    """What two executed ops must share to be the same op at two batch sizes."""
    return (op.name, op.host_class, op.family, op.dtype, tuple(op.dims), op.launches, op.syncs)


def first_difference(ops: Sequence[Op], others: Sequence[Op]) -> str | None:
    """Name of the first op that is not the same in both, None where all are."""
    for op, other in zip_longest(ops, others):
        if op is None or other is None or kind(op) != kind(other):
            return str((op or other).name)
    return None


def op_through(two: Op, three: Op) -> Op:
    """The op of every batch size, from the same op as it was executed at 2 and at 3."""

    def through(at_two: Affine, at_three: Affine) -> Affine:
        slope = at_three.constant - at_two.constant
        return Affine(at_two.constant - 2 * slope, slope)

    return msgspec.structs.replace(
        two,
        dims={name: through(size, three.dims[name]) for name, size in two.dims.items()},
        **{name: through(getattr(two, name), getattr(three, name)) for name in _COUNTS},
    )


def unless_affine(one: Sequence[Op], ops: Sequence[Op]) -> tuple[Op, ...] | None:
    """What was executed at batch 1; None where `ops`, which hold for larger batches, give that as well."""
    affine = first_difference(one, ops) is None and all(map(_gives, ops, one))
    return None if affine else tuple(one)


def _gives(op: Op, at_one: Op) -> bool:
    """Whether an op's counts at batch 1 are those that were seen.

    "operands" tells nothing: at batch 1 a tensor that is broadcast over the batch is as large as the result.
    """
    if op.dims.get("operands", ZERO).per_sample:
        return False
    counts = ((getattr(op, name), getattr(at_one, name)) for name in _COUNTS)
    dims = ((size, at_one.dims[name]) for name, size in op.dims.items() if name != "operands")
    return all(count.at(1) == seen.constant for count, seen in (*counts, *dims))
