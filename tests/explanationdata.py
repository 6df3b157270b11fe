"""Explanations made by hand, from numbers alone."""

from __future__ import annotations

import numpy as np
from factories import machine

from latpred.explanation.explanation import AxisHeadroom, Choice, Excluded, Explanation, Headroom, ratio
from latpred.graph.graph import Coverage
from latpred.prediction.clocks import BatchThresholds, CurveSamples
from latpred.prediction.prediction import ClassCosts, Prediction, Provenance, Setting


def prediction(
    runtime: str = "eager",
    latency_ms: float = 10.0,
    factor: float = 1.1,
    *,
    regime: str = "framework-bound",
    precision: str = "fp32",
    fits: bool | None = True,
) -> Prediction:
    """A prediction whose interval goes from latency / factor to latency x factor."""
    course = BatchThresholds(lambda batches, shift: CurveSamples(1.0, batches.astype(float), batches.astype(float)))
    provenance = Provenance("example", "measured", "2026-01-02T03:04:05+00:00", machine(), ())
    setting = Setting("example-net", "seq", 128, precision, runtime, "gpu", "single", "device", provenance, course)
    costs = ClassCosts(("norm", "gemm"), np.array([2, 3]), np.array([10.0, 20.0]), np.array([1000.0, 3000.0]))
    return Prediction(
        setting=setting,
        batch=4,
        latency_ms=latency_ms,
        interval_ms=(latency_ms / factor, latency_ms * factor),
        overhead_ms=8.0,
        compute_ms=4.0,
        device_busy=0.4,
        regime=regime,
        peak_bytes=2**30,
        fits=fits,
        coverage=Coverage(1.0, 1.0, {}),
        costs=costs,
    )


def headroom(
    batch: float | None = 12, width: float | None = 1.5, *, doubled: float = 1.02, halved: float = 0.98
) -> Headroom:
    """What may grow; `batch` and `width` for a fifth more of the latency."""
    rooms = (
        AxisHeadroom("batch", 4, batch and min(batch, 8), batch, 2**20, estimate=False),
        AxisHeadroom("width", 1.0, width and min(width, 1.2), width, 8.0, estimate=True),
    )
    return Headroom(rooms, doubled, halved)


def explanation(
    *points: Prediction, headrooms: dict[str, Headroom] | None = None, excluded: tuple[Excluded, ...] = ()
) -> Explanation:
    """Of some predictions, the fastest first."""
    choices = [Choice(point, steps=5, launches=4) for point in points]
    eager = next((choice for choice in choices if choice.runtime == "eager"), None)
    if eager is not None:
        choices = [Choice(one.prediction, one.steps, one.launches, speedup=ratio(eager, one)) for one in choices]
    ordered = tuple(sorted(choices, key=lambda choice: choice.prediction.latency_ms))
    return Explanation(ordered, excluded, headrooms or {})
