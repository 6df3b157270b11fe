"""Candidates in order, and how well an order agrees with a measured one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from torch import nn

import latpred
from latpred.accuracy import metrics
from latpred.errors import UsageError
from latpred.search.ranking import agreement, rank

pytestmark = pytest.mark.usefixtures("calibrated")


def network(width: int) -> nn.Module:
    if width < 1:
        raise ValueError("too narrow")
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU())


def test_the_fastest_comes_first_and_failures_last() -> None:
    widths = (64, 8, 0, 256, 8)
    candidates = [lambda width=width: network(width) for width in widths]
    table = latpred.rank(candidates, batch=[1, 4], image=32)
    assert table["batch"].tolist() == [1] * 5 + [4] * 5
    for _, part in table.groupby("batch"):
        assert part["candidate"].tolist() == [1, 4, 0, 3, 2]
        assert part["rank"].tolist() == [1, 1, 3, 4, pd.NA]
        assert part["latency_ms"].dropna().is_monotonic_increasing
        assert "too narrow" in part["error"].iloc[-1]


def test_each_runtime_has_an_order_of_its_own() -> None:
    rows = [(0, "eager", 2.0), (0, "onnxruntime", 1.0), (1, "eager", 1.0), (1, "onnxruntime", 3.0)]
    table = pd.DataFrame(rows, columns=["candidate", "runtime", "latency_ms"]).assign(batch=1)
    found = rank(table)
    assert found["runtime"].tolist() == ["eager", "eager", "onnxruntime", "onnxruntime"]
    assert found["candidate"].tolist() == [1, 0, 0, 1]
    assert found["rank"].tolist() == [1, 2, 1, 2]
    assert list(table.columns) == ["candidate", "runtime", "latency_ms", "batch"]  # the one given is left alone
    assert rank(found).equals(found)


def test_candidates_that_only_the_last_digits_tell_apart_share_a_rank() -> None:
    """The same costs added in another order."""
    latency_ms = [0.1 + (0.2 + 0.3), 0.5, (0.1 + 0.2) + 0.3, 0.6 * (1 + 1e-7), np.nan]
    assert latency_ms[0] != latency_ms[2]
    table = pd.DataFrame({"candidate": range(5), "batch": 1, "runtime": "eager", "latency_ms": latency_ms})
    for part in (table, table[::-1]):
        found = rank(part)
        assert found["rank"].tolist() == [1, 2, 2, 4, pd.NA]
        assert found["candidate"].tolist() == [1, 0, 2, 3, 4]
    equal, measured = latency_ms[0:3:2], [1.0, 2.0]
    assert metrics.rank(equal, measured, 0.0).tau == 0
    assert np.isnan(agreement(equal, measured).kendall_b)
    assert agreement([*equal, 0.5], [2.0, 2.1, 1.0]).spearman == agreement([0.6, 0.6, 0.5], [2.0, 2.1, 1.0]).spearman


def test_an_empty_search_has_an_empty_order() -> None:
    assert list(rank([]).columns)[:2] == ["rank", "candidate"]
    assert len(rank([])) == 0


def test_a_table_of_another_kind_says_what_it_lacks() -> None:
    with pytest.raises(UsageError, match=r"the table lacks candidate, latency_ms; give one that latpred\.predict_many"):
        rank(pd.DataFrame({"model": ["a"], "batch": 1, "latency_s": 0.1}))
    table = pd.DataFrame({"candidate": [0], "batch": 1, "runtime": "eager", "latency_ms": 1.0})
    with pytest.raises(UsageError, match=r"was predicted already; ask latpred\.predict_many for batch, device"):
        rank(table, batch=8, runtime="eager", device="a100")


def test_agreement_without_noise_is_kendalls_tau() -> None:
    rng = np.random.default_rng(0)
    measured = rng.uniform(1, 2, 40)
    predicted = measured * rng.uniform(0.8, 1.2, 40)
    found = agreement(predicted, measured)
    assert found.kendall == pytest.approx(found.kendall_b)
    assert (found.pairs, found.left_out) == (40 * 39 // 2, 0)
    assert found.kendall < found.spearman < 1
    assert agreement(-np.sort(-measured), np.sort(measured)).kendall == -1


def test_nothing_to_order_is_no_number() -> None:
    for pair in (([], []), ([1.0], [2.0]), ([3.0, 3.0], [1.0, 2.0])):
        assert np.isnan(agreement(*pair).spearman)


@pytest.mark.parametrize(
    ("predicted", "measured", "noise", "said"),
    [
        ([1.0], [1.0, 2.0], 0.0, "1 predictions cannot be compared with 2"),
        ([1.0, 0.0], [1.0, 2.0], 0.0, "predicted holds 0 at position 1"),
        ([1.0, 1.0], [1.0, float("nan")], 0.0, "measured holds nan at position 1"),
        (["fast"], [1.0], 0.0, "predicted does not hold numbers alone: .*'fast'"),
        ([1.0], [1.0], -0.1, "noise=-0.1 is no share"),
    ],
)
def test_bad_input_is_refused(predicted: list[Any], measured: list[float], noise: float, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        agreement(predicted, measured, noise)
