"""What ships with latpred: profiles read, recordings replay, and the replayed figures stay what they are."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from latpred.accuracy import recording
from latpred.profile import store


class Shipped(NamedTuple):
    """A recording, the profile it is replayed with, and bounds on its errors a little above what they are."""

    name: str
    profile: str
    cells: int
    median: float
    p90: float
    wide: bool = False  # whether its intervals are known to hold more than they say


RECORDINGS = (
    Shipped("epyc-shared-blind", "epyc-shared", 208, 0.08, 0.20),
    Shipped("epyc-shared-compile", "epyc-shared", 64, 0.08, 0.20, wide=True),
    Shipped("epyc-shared-runtimes", "epyc-shared", 234, 0.08, 0.24),
)


@pytest.fixture(scope="module", params=RECORDINGS, ids=lambda shipped: shipped.name)
def replayed(request: pytest.FixtureRequest) -> tuple[Shipped, dict[str, Any]]:
    shipped: Shipped = request.param
    return shipped, recording.load(shipped.name).replay(store.load(shipped.profile)).to_dict()


def test_predictions_of_models_that_no_fit_saw(replayed: tuple[Shipped, dict[str, Any]]) -> None:
    shipped, report = replayed
    overall = report["overall"]
    assert overall["cells"] == shipped.cells
    assert overall["median"] < shipped.median
    assert overall["p90"] < shipped.p90


def test_intervals_hold_what_they_say(replayed: tuple[Shipped, dict[str, Any]]) -> None:
    shipped, coverage = replayed[0], replayed[1]["coverage"]
    assert (coverage["low"] < 0.95) != shipped.wide
    assert coverage["high"] > 0.85


def test_each_runtime_is_predicted_and_the_fastest_named() -> None:
    report = recording.load("epyc-shared-runtimes").replay(store.load("epyc-shared")).to_dict()
    assert set(report["by_runtime"]) == {"eager", "torchscript", "onnxruntime"}
    assert all(errors["median"] < 0.11 for errors in report["by_runtime"].values())
    assert report["fastest"]["clear"] >= 30
    assert report["fastest"]["right"] > 0.9


def test_compile_is_predicted() -> None:
    report = recording.load("epyc-shared-compile").replay(store.load("epyc-shared")).to_dict()
    assert report["by_runtime"]["compile"]["median"] < 0.10
    assert report["by_runtime"]["compile"]["p90"] < 0.25
