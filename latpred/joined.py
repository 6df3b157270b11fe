"""One curve of predictions whose graphs differ, as where every batch was walked by itself.

Where the regime changes is then read off straight lines through the batches asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from latpred.landmarks import Z90, Course, Landmarks
from latpred.prediction import Curve, Prediction

_COARSE = "crossover and knee are read off straight lines through the batches asked for"


def joined(points: Sequence[Prediction], notes: Sequence[str] = ()) -> Curve:
    """The curve of predictions at one batch each, with the caveats of all and the notes of what they have in common."""
    first = points[0].setting
    own = (caveat for point in points for caveat in point.provenance.caveats)
    caveats = dict.fromkeys([*own, *notes, _COARSE])
    setting = replace(
        first,
        provenance=replace(first.provenance, caveats=tuple(caveats)),
        landmarks=Landmarks(_Lines(points)),
    )
    return Curve(setting, tuple(replace(point, setting=setting) for point in points))


class _Lines:
    """The course of a curve as straight lines between its points, and in proportion to the batch outside of them."""

    def __init__(self, points: Sequence[Prediction]) -> None:
        ordered = sorted(points, key=lambda point: point.batch)
        self._batches = np.array([point.batch for point in ordered], dtype=float)
        self._compute = np.array([point.compute_ms for point in ordered]) * 1e3
        self._overhead = np.array([point.overhead_ms for point in ordered]) * 1e3
        self._rest = np.array([point.latency_ms for point in ordered]) * 1e3 - np.maximum(self._compute, 0.0)
        self._spread = float(np.log(ordered[-1].interval_ms[1] / ordered[-1].latency_ms)) / Z90

    def __call__(self, batches: NDArray[np.int64], shift: float) -> Course:
        at = batches.astype(float)
        inside = np.clip(at, self._batches[0], self._batches[-1])
        compute = np.interp(inside, self._batches, self._compute) * (at / inside) * np.exp(shift * self._spread)
        overhead = np.interp(inside, self._batches, self._overhead)
        return Course(overhead, compute, compute + np.interp(inside, self._batches, self._rest))
