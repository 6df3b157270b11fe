"""Hand-made graphs for the simulated device, so that its tests need neither PyTorch nor a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from latpred.graph.graph import Affine, ModelGraph, Op

MakeOp = Callable[..., Op]
MakeGraph = Callable[[Sequence[Op]], ModelGraph]


@pytest.fixture
def make_op() -> MakeOp:
    """An op of a class and a family that moves `numel` elements per sample."""

    def make(
        host_class: str,
        family: str = "",
        numel: int = 0,
        *,
        launches: int | None = None,
        syncs: int = 0,
        macs: int = 0,
        module_calls: int = 0,
        python_calls: int = 0,
    ) -> Op:
        return Op(
            name=f"aten::{host_class}",
            module="",
            host_class=host_class,
            family=family,
            dtype="float32",
            dims={},
            macs=Affine(0, macs),
            read_bytes=Affine(0, 4 * numel),
            write_bytes=Affine(0, 4 * numel),
            launches=int(bool(family)) if launches is None else launches,
            syncs=syncs,
            module_calls=module_calls,
            python_calls=python_calls,
        )

    return make


@pytest.fixture
def make_graph() -> MakeGraph:
    """A graph of ops, in fp32."""

    def make(ops: Sequence[Op]) -> ModelGraph:
        return ModelGraph("handmade", "custom", 0, "fp32", "contiguous", 0, 0, Affine(0), tuple(ops))

    return make
