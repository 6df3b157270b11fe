"""Speed: a slower machine slows dispatch, computing and moving each by its own factor."""

from __future__ import annotations

import msgspec
import pandas as pd
import pytest
from factories import graph, op, profile

from latpred import speed, tables
from latpred.accuracy import compare
from latpred.errors import ProfileError
from latpred.finding import predictor_now
from latpred.predicted import GraphKey, predict_table
from latpred.predictor import Predictor
from latpred.speed import SAME, Slowdown


def test_what_a_table_lacks_changes_nothing() -> None:
    assert speed.slowdown({}, {"dispatch": 3.0}) == SAME
    assert speed.slowdown({"dispatch": 2.0}, {}) == SAME
    assert speed.ratio({"dispatch": 0.0}, {"dispatch": 3.0}) == {}


def test_each_kind_of_work_has_its_reference() -> None:
    then = {"dispatch": 100.0, "product": 400.0, "convolution": 200.0, "stream": 1000.0, "threads": 20.0}
    now = {"dispatch": 150.0, "product": 400.0, "convolution": 288.0, "stream": 1100.0, "threads": 40.0}
    assert speed.slowdown(then, now) == pytest.approx((1.5, 1.2, 1.1))
    assert speed.slowdown(then, now, asynchronous=True) == Slowdown(1.5, 1.0, 1.0)
