"""Registering cost formulas: names, replacements and what a formula must return."""

from __future__ import annotations

import subprocess
import sys

import pytest

from latpred.errors import UsageError
from latpred.ops import Work, checked, cost, formula_of, generation


def test_a_name_needs_a_namespace() -> None:
    with pytest.raises(UsageError, match=r"'relu' is not a qualified op name; write it as namespace::op"):
        cost("relu")


def test_a_formula_also_serves_the_in_place_form() -> None:
    assert formula_of("aten::hardswish_") is formula_of("aten::hardswish")
    assert formula_of("aten::fill_") is not None
    assert formula_of("nobody::knows_") is None


def test_registering_replaces_and_is_noticed() -> None:
    before = generation()

    @cost("testing::replaced")
    def first(x: object, *, out: object) -> Work:
        return Work("other", {"numel": 1})

    @cost("testing::replaced")
    def second(x: object, *, out: object) -> Work:
        return Work("other", {"numel": 2})

    assert formula_of("testing::replaced") is second
    assert generation() == before + 2


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (12, "returned int; it must return latpred.ops.Work"),
        (Work("gem", {"m": 1}), "unknown family 'gem'; known families: attention, batch_norm"),
        (Work("gemm", {"m": 1, "n": 1}), r"gives dims \('m', 'n'\); 'gemm' needs \('m', 'n', 'k'\)"),
    ],
)
def test_a_malformed_result_is_explained(returned: object, message: str) -> None:
    with pytest.raises(UsageError, match=f"the cost formula of mylib::op .*{message}"):
        checked(returned, "mylib::op")


def test_a_leaf_family_takes_its_root_s_dims() -> None:
    work = Work("gemm.sparse", {"m": 1, "n": 2, "k": 3}, macs=6)
    assert checked(work, "mylib::op") is work


def test_registering_needs_no_torch() -> None:
    code = "import sys, latpred; latpred.cost('a::b'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
