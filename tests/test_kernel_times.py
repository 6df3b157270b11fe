"""Kept kernel times: the same as computed afresh, told apart by rows and scales, and bounded."""

from __future__ import annotations

import numpy as np
import pytest
from factories import kernel_fit

from latpred.graph.features import layout
from latpred.prediction import kernel_times
from latpred.prediction.kernel_times import KernelModel


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 512, (count, len(layout("gemm").columns))).astype(float)


def model() -> KernelModel:
    return KernelModel(kernel_fit("gemm"))


def test_kept_times_are_those_computed_afresh() -> None:
    kept = model()
    for _ in range(2):
        for seed in range(5):
            for scales in (1.0, np.array([1.0, 2.0, 3.0])):
                given = rows(3, seed)
                for mine, fresh in zip(kept.times(given, scales), model().times(given, scales), strict=True):
                    assert mine.tobytes() == fresh.tobytes()


def test_rows_of_another_shape_with_the_same_numbers_are_others() -> None:
    kept, given = model(), rows(4)
    kept.times(given)
    assert len(kept.times(given[:2]).us) == 2
    assert len(kept.times(given).us) == 4


def test_no_more_is_kept_than_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_times, "MOST_KEPT", 3)
    kept = model()
    for seed in range(6):
        kept.times(rows(2, seed))
    assert len(kept._recent) == 3
    kept.times(rows(kernel_times.MOST_KEPT_VALUES))
    assert len(kept._recent) == 3
