"""What was executed at several batch sizes becomes ops that are affine in batch."""

from __future__ import annotations

from factories import add, view

from latpred.graph.graph import Affine, Op
from latpred.runtimes.base import first_difference, op_through, unless_affine


def executed(batch: int, operands: int = 2, name: str = "aten::add") -> Op:
    """An addition of ten elements a sample, and of three that stay."""
    size = 3 + 10 * batch
    counts = dict.fromkeys(("read_bytes", "write_bytes", "live_bytes"), Affine(4 * size))
    return add(name=name, dims={"numel": Affine(size), "operands": Affine(operands)}, **counts)


def test_two_batch_sizes_give_every_other() -> None:
    op = op_through(executed(2), executed(3))
    assert (op.dims["numel"], op.read_bytes, op.dims["operands"]) == (Affine(3, 10), Affine(12, 40), Affine(2))
    assert first_difference([executed(2), view()], [executed(3), view()]) is None
    assert first_difference([executed(2)], [executed(3, name="aten::mul")]) == "aten::add"
    assert first_difference([executed(2)], [executed(3), view()]) == "aten::transpose"


def test_batch_one_has_ops_of_its_own_where_they_are_not_on_the_line() -> None:
    op = op_through(executed(2), executed(3))
    assert unless_affine([executed(1)], [op]) is None
    assert unless_affine([executed(1, operands=1)], [op]) is None  # what is broadcast over a batch of one is no sign
    for other in ([executed(4)], [executed(1), view()], [executed(1, name="aten::mul")]):
        assert unless_affine(other, [op]) == tuple(other)
    varying = op_through(executed(2, operands=1), executed(3, operands=2))
    assert unless_affine([executed(1)], [varying]) == (executed(1),)
