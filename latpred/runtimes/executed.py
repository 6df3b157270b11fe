"""What a runtime executed in one forward pass, and the ops, affine in batch, that passes at a few batch sizes make.

How a runtime is watched is its own file's business; which of its passes belong together too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from latpred.graph import Line, Op

FIRST_DIM = 5  # of the counts: macs, bytes of weights, read, written, and alive come before


class Executed(NamedTuple):
    """One host step: `counts` are macs, weight, read and written bytes, bytes alive after it, then its dims."""

    name: str
    host_class: str
    family: str
    dtype: str
    dims: tuple[str, ...]
    counts: tuple[int, ...]
    launches: int
    syncs: int
    estimated: bool
    python_calls: int = 0

    @property
    def kind(self) -> tuple[object, ...]:
        """What two steps must share to be the same step at two batch sizes."""
        return (self.name, self.host_class, self.family, self.dtype, self.dims, self.launches, self.syncs)

    def with_lines(self, counts: Sequence[Line]) -> Op:
        """The step as an op, its counts given for every batch size."""
        macs, weights, read, written, live, *dims = counts
        return Op(
            name=self.name,
            module="",
            host_class=self.host_class,
            family=self.family,
            dtype=self.dtype,
            dims=dict(zip(self.dims, dims, strict=True)),
            macs=macs,
            weight_bytes=weights,
            read_bytes=read,
            write_bytes=written,
            live_bytes=live,
            launches=self.launches,
            syncs=self.syncs,
            python_calls=self.python_calls,
            estimated=self.estimated,
        )


def line(at_two: int, at_three: int) -> Line:
    """The line through what was counted at batch 2 and 3.

    >>> line(20, 30)
    Line(constant=0, per_sample=10)
    """
    slope = at_three - at_two
    return Line(at_two - 2 * slope, slope)


def op_through(two: Executed, three: Executed) -> Op:
    """The op that a step at batch 2 and the same step at batch 3 are."""
    return two.with_lines([line(a, b) for a, b in zip(two.counts, three.counts, strict=True)])


def ops_exactly(steps: Iterable[Executed]) -> tuple[Op, ...]:
    """Ops of one batch size alone."""
    return tuple(step.with_lines([Line(count) for count in step.counts]) for step in steps)


def on_the_line(ops: Sequence[Op], one: Sequence[Executed]) -> bool:
    """Whether ops also give what was executed at batch 1."""
    return len(ops) == len(one) and all(_fits(op, step) for op, step in zip(ops, one, strict=True))


def _fits(op: Op, step: Executed) -> bool:
    """Whether a step is on the line; of "operands" a tensor as large as the result at batch 1 is no sign."""
    if (op.name, op.host_class, op.family, tuple(op.dims)) != (step.name, step.host_class, step.family, step.dims):
        return False
    lines = (op.macs, op.weight_bytes, op.read_bytes, op.write_bytes, op.live_bytes, *op.dims.values())
    names = ("",) * FIRST_DIM + step.dims
    told = (entry for entry in zip(lines, step.counts, names, strict=True) if entry[2] != "operands")
    return all(line.at(1) == count for line, count, _ in told)
