"""What ships with latpred: profiles read, recordings replay, and the replayed figures stay what they are."""

from __future__ import annotations

import pytest

from latpred import profiles, recording
from latpred.accuracy import Report

NAME = "xeon-shared"  # one core of a shared 2-core Xeon, eager, fp32


@pytest.fixture(scope="module")
def report() -> Report:
    return recording.load(NAME).replay(profiles.load(NAME))


def test_predictions_of_models_that_no_fit_saw(report: Report) -> None:
    overall = report.to_dict()["overall"]
    assert overall["cells"] == 220
    assert overall["median"] < 0.08
    assert overall["p90"] < 0.24


def test_intervals_hold_what_they_say(report: Report) -> None:
    coverage = report.to_dict()["coverage"]
    assert coverage["low"] < 0.95
    assert coverage["high"] > 0.85
