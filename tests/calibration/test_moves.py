"""What is called moved: parts that differ by more than their own noise, and only those, whatever the tempo."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest

from latpred.accuracy.drift import Part
from latpred.calibration.measurement import drift_test
from latpred.calibration.measurement.drift_test import Seen

PARTS = 24
ANCHORS = 6


def rounds(seed: int, noise: float, factors: Mapping[str, float], tempo: float = 1.0) -> list[list[Seen]]:
    """Two rounds of parts that all took `tempo` times as long, some of them more."""
    rng = np.random.default_rng(seed)
    return [
        [
            Seen("device", f"part{i}", f"{i}/{j}", math.log(tempo * factors.get(f"part{i}", 1.0)) + error, noise)
            for i in range(PARTS)
            for j, error in enumerate(rng.normal(0.0, noise, ANCHORS))
        ]
        for _ in range(2)
    ]


def named(parts: list[Part], verdict: str) -> set[str]:
    return {part.name for part in parts if part.verdict == verdict}


@pytest.mark.parametrize("seed", range(20))
def test_fifteen_percent_in_one_part_is_seen_and_nothing_else(seed: int) -> None:
    assert named(drift_test.judged(rounds(seed, 0.03, {"part3": 1.15})), "moved") == {"part3"}
    assert named(drift_test.judged(rounds(seed, 0.03, {"part3": 1 / 1.15})), "moved") == {"part3"}
    assert named(drift_test.judged(rounds(seed, 0.03, {})), "moved") == set()


@pytest.mark.parametrize("seed", range(20))
def test_noise_hides_a_change_and_is_never_called_one(seed: int) -> None:
    parts = drift_test.judged(rounds(seed, 0.4, {"part3": 1.15}))
    assert named(parts, "moved") == set()
    assert "part3" in named(parts, "unclear")


def test_a_common_tempo_is_said_by_itself() -> None:
    parts = {part.name: part for part in drift_test.judged(rounds(1, 0.01, {"part3": 1.3}, tempo=1.5))}
    assert parts[""].ratio == pytest.approx(1.5, rel=0.01)
    assert parts[""].verdict == "moved"
    assert parts["part3"].ratio == pytest.approx(1.3, rel=0.02)
    assert parts["part4"].verdict == "holds"
    assert parts["part3"].low < 1.3 < parts["part3"].high


def test_clocks_have_tempos_of_their_own() -> None:
    host = [[seen._replace(clock="host") for seen in one] for one in rounds(2, 0.01, {}, tempo=1.4)]
    device = rounds(3, 0.01, {})
    parts = drift_test.judged([a + b for a, b in zip(host, device, strict=True)])
    assert [(part.clock, part.name) for part in parts if part.verdict == "moved"] == [("host", "")]


def test_one_outlier_among_the_anchors_moves_nothing() -> None:
    first, second = rounds(4, 0.01, {})
    struck = [seen._replace(log_ratio=1.0) if seen.anchor == "5/0" else seen for seen in first]
    assert named(drift_test.judged([struck, second]), "moved") == set()


def test_a_part_that_is_missing_is_no_part() -> None:
    assert drift_test.judged([[], []]) == []
