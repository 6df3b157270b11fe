"""Ops that torch has never heard of, with and without a formula of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import latpred
from latpred.errors import UnknownOpError, UsageError
from latpred.ops import Work


@pytest.fixture(scope="module")
def library() -> Iterator[torch.library.Library]:
    made = torch.library.Library("latpred_testing", "DEF")
    made.define("fused_mlp(Tensor x, Tensor w1, Tensor w2) -> Tensor")
    made.define("whole(Tensor x) -> Tensor")
    made.impl("fused_mlp", lambda x, w1, w2: torch.empty_like(x), "Meta")
    made.impl("whole", lambda x: torch.relu(x) + 1, "CompositeImplicitAutograd")
    yield made
    made._destroy()


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.zeros(8, 32))
        self.w2 = nn.Parameter(torch.zeros(32, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.latpred_testing.fused_mlp(x, self.w1, self.w2)  # type: ignore[no-any-return]


def test_a_formula_makes_a_custom_op_known(library: torch.library.Library) -> None:
    model, example = Mlp(), torch.zeros(1, 5, 8)
    unknown = latpred.trace(model, example)
    assert unknown.coverage().launches == 0.0
    assert unknown.bytes(2) == 2 * 8 * 32 * 4 + 2 * (2 * 5 * 8 * 4)
    with pytest.raises(UnknownOpError, match=r"register one with @latpred.cost\('latpred_testing::fused_mlp'\)"):
        latpred.trace(model, example, strict=True)

    @latpred.cost("latpred_testing::fused_mlp")
    def fused_mlp(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, *, out: torch.Tensor) -> Work:
        m, (k, n) = x.shape[0] * x.shape[1], w1.shape
        return Work("gemm.fused_mlp", {"m": m, "n": n, "k": k}, macs=2 * m * n * k)

    known = latpred.trace(model, example, strict=True)
    assert known.macs(3) == 3 * 5 * 2 * 8 * 32
    (op,) = (op for op in known.ops if op.launches)
    assert (op.family, op.host_class, op.module) == ("gemm.fused_mlp", "gemm.fused_mlp", "")
    assert op.weight_bytes.at(3) == 2 * 8 * 32 * 4


def test_a_composite_op_falls_apart_until_a_formula_says_that_it_is_one_kernel(library: torch.library.Library) -> None:
    class Whole(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.latpred_testing.whole(x)  # type: ignore[no-any-return]

    parts = latpred.trace(Whole(), torch.zeros(1, 4))
    assert [op.name for op in parts.ops if op.launches] == ["aten::relu", "aten::add"]
    assert [op.host_class for op in parts.ops if op.launches] == ["elementwise.relu", "elementwise.nested.add"]

    @latpred.cost("latpred_testing::whole")
    def whole(x: torch.Tensor, *, out: torch.Tensor) -> Work:
        return Work("elementwise.whole", {"numel": x.shape[0] * x.shape[1], "operands": 1})

    kept = latpred.trace(Whole(), torch.zeros(1, 4))
    assert [op.name for op in kept.ops if op.launches] == ["latpred_testing::whole"]


def test_a_wrong_formula_is_named(library: torch.library.Library) -> None:
    @latpred.cost("latpred_testing::fused_mlp")
    def wrong(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, *, out: torch.Tensor) -> Work:
        return Work("gemm", {"m": 1})

    with pytest.raises(UsageError, match=r"the cost formula of latpred_testing::fused_mlp gives dims \('m',\)"):
        latpred.trace(Mlp(), torch.zeros(1, 5, 8))
