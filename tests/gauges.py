"""For tests of what measures: a gauge that says what a test wants, and the least that can be timed."""

from __future__ import annotations

from collections.abc import Iterable

from latpred.calibration.timing.reference_speed import SpeedGauge, SpeedReading
from latpred.calibration.timing.timer import Plan

FAST = Plan(least=2, most=2, budget_s=0.0, warmup_s=0.0)


class ScriptedGauge(SpeedGauge):
    """Gives slowdowns one after the other, full speed once they are spent; the fastest moment is 1."""

    fastest = SpeedReading(1.0)

    def __init__(self, slowdowns: Iterable[float] = ()) -> None:
        self._script = iter(slowdowns)
        self.reads = 0

    def read(self) -> SpeedReading:
        self.reads += 1
        return SpeedReading(next(self._script, 1.0))
