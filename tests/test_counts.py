"""What a reader has to hold in mind may only shrink; `python tools/counts.py --keep` lowers what is kept."""

from __future__ import annotations

import json

import counts
import pytest

KEPT: dict[str, int] = json.loads(counts.KEPT.read_text())


@pytest.fixture(scope="module")
def today() -> dict[str, int]:
    return counts.counts()


@pytest.mark.parametrize("name", KEPT)
def test_counts_only_fall(name: str, today: dict[str, int]) -> None:
    assert today[name] <= KEPT[name], f"{name}; python tools/counts.py --details shows where"


def test_every_count_is_kept(today: dict[str, int]) -> None:
    assert set(today) == set(KEPT)


def test_a_circle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a", "e"}, "e": set()}
    assert counts.circles(graph) == [frozenset("abc")]
