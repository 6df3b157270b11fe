"""What ships with latpred: profiles read, recordings replay, and the replayed figures stay what they are."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from latpred.accuracy import recording
from latpred.profile import store

# Recordings, and bounds on their errors at equal speed of the machine, a little above what they are.
RECORDINGS = [
    ("epyc-shared-varied", 160, 0.06, 0.19),
    ("epyc-shared-everyday", 150, 0.08, 0.18),
    ("epyc-shared-runtimes", 234, 0.06, 0.23),
    ("epyc-shared-compile", 150, 0.10, 0.24),
    ("epyc-genoa-sealed", 140, 0.06, 0.12),
    ("epyc-genoa-everyday", 150, 0.07, 0.19),
    ("epyc-genoa-runtimes", 234, 0.07, 0.20),
    ("epyc-genoa-compile", 50, 0.10, 0.23),
    ("xeon-shared-runtimes", 234, 0.09, 0.28),
]


@cache
def replayed(name: str) -> dict[str, Any]:
    return recording.load(name).replay(store.load(name.rpartition("-")[0])).to_dict()


@pytest.mark.parametrize(("name", "cells", "median", "p90"), RECORDINGS)
def test_models_that_no_fit_saw_are_predicted_and_intervals_hold_what_they_say(
    name: str, cells: int, median: float, p90: float
) -> None:
    report = replayed(name)
    errors, coverage = report["at_speed"], report["coverage_at_speed"]
    assert errors["cells"] == cells
    assert errors["median"] < median
    assert errors["p90"] < p90
    assert coverage["low"] < 0.96
    assert coverage["high"] > 0.88


def test_each_runtime_is_predicted_and_the_fastest_named() -> None:
    report = replayed("epyc-shared-runtimes")
    assert set(report["by_runtime"]) == {"eager", "torchscript", "onnxruntime"}
    assert all(errors["median"] < 0.11 for errors in report["by_runtime"].values())
    assert report["fastest"]["clear"] >= 30
    assert report["fastest"]["right"] > 0.9


def test_compile_is_predicted_beside_eager_and_torchscript() -> None:
    report = replayed("epyc-shared-compile")
    cells = {name: errors["cells"] for name, errors in report["by_runtime"].items()}
    assert cells == dict.fromkeys(("eager", "torchscript", "compile"), 50)
