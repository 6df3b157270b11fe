"""Batch thresholds of a curve: crossover and knee with their intervals, and the largest batch within a limit.

Each is the smallest batch at which something becomes true; finding it takes a few dozen points, so they are computed
when first asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from latpred.errors import UsageError
from latpred.graph.features import Floats

MOST = 2**16  # largest batch that is looked at
KNEE = 1.1
Z90 = 1.6448536269514722  # half width of the central 90 % of a normal distribution, in standard deviations

_POINTS = 8  # batches evaluated at once while a bracket is narrowed


class BatchThreshold(NamedTuple):
    """A batch size, and the 90 % interval it lies in; None stands for "not up to the largest batch looked at"."""

    batch: int | None
    low: int | None
    high: int | None


class CurveSamples(NamedTuple):
    """What thresholds depend on, at some batches: microseconds of host, of device and of all."""

    overhead_us: Floats
    compute_us: Floats
    latency_us: Floats


Sampler = Callable[[NDArray[np.int64], float], CurveSamples]
"""Samples a curve at some batches, with device times multiplied by exp(shift * their log_std)."""
Test = Callable[[CurveSamples, CurveSamples], NDArray[np.bool_]]
"""Whether a threshold is passed, from samples at some batches and at batch 1."""


@dataclass(slots=True)
class BatchThresholds:
    """Crossover and knee of one model in one runtime on one device.

    Pickling keeps the answers and drops what they were computed from.
    """

    _sample: Sampler | None
    _answers: dict[tuple[str, float], BatchThreshold] = field(default_factory=dict)

    def crossover(self) -> BatchThreshold:
        """The smallest batch at which the device takes at least as long as the host."""
        return self._find("crossover", 1.0, lambda curve, _: curve.compute_us >= curve.overhead_us)

    def knee(self, ratio: float = KNEE) -> BatchThreshold:
        """The smallest batch whose latency exceeds `ratio` times that of batch 1."""
        if not ratio > 1.0:
            raise UsageError(f"A knee needs a ratio above 1, not {ratio}; use 1.1 for 10 % over the flat latency.")
        return self._find("knee", ratio, lambda curve, flat: curve.latency_us > ratio * flat.latency_us)

    def __getstate__(self) -> dict[str, object]:
        """Answers only."""
        if self._sample is not None:
            self.crossover()
            self.knee()
        return {"_sample": None, "_answers": self._answers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """What `__getstate__` gave."""
        for name, value in state.items():
            setattr(self, name, value)

    def _find(self, kind: str, ratio: float, test: Test) -> BatchThreshold:
        if (kind, ratio) not in self._answers:
            self._answers[kind, ratio] = self._search(test, ratio)
        return self._answers[kind, ratio]

    def _search(self, test: Test, ratio: float) -> BatchThreshold:
        sample = self._sample
        if sample is None:
            raise UsageError(
                f"This prediction came from another process, without its knee at {ratio}. Ask for it there."
            )

        def threshold(shift: float) -> int | None:
            flat = sample(np.array([1]), shift)
            return first_true(lambda batches: test(sample(batches, shift), flat))

        # A slower device reaches both thresholds at a smaller batch.
        ends = sorted((threshold(Z90), threshold(0.0), threshold(-Z90)), key=lambda batch: batch or math.inf)
        return BatchThreshold(ends[1], ends[0], ends[2])


def first_true(test: Callable[[NDArray[np.int64]], NDArray[np.bool_]], most: int = MOST) -> int | None:
    """The smallest batch at which a test that stays true becomes true; None if it does not up to `most`.

    >>> first_true(lambda batches: batches >= 37)
    37
    """
    batches = np.unique(np.append(2 ** np.arange(int(math.log2(most)) + 1), most))
    hits = np.flatnonzero(test(batches))
    if not len(hits):
        return None
    high = int(batches[hits[0]])
    low = int(batches[hits[0] - 1]) if hits[0] else 0
    while high - low > 1:
        inside = np.unique(np.linspace(low, high, _POINTS + 2)[1:-1].round().astype(np.int64))
        inside = inside[(inside > low) & (inside < high)]
        hits = np.flatnonzero(test(inside))
        if len(hits):
            high = int(inside[hits[0]])
            low = int(inside[hits[0] - 1]) if hits[0] else low
        else:
            low = int(inside[-1])
    return high
