"""A speed gauge that says what a test wants."""

from __future__ import annotations

from collections.abc import Iterable

from latpred.calibration.timing.reference_speed import SpeedGauge, SpeedReading


class ScriptedGauge(SpeedGauge):
    """Gives slowdowns one after the other, full speed once they are spent; the fastest moment is 1."""

    def __init__(self, slowdowns: Iterable[float] = ()) -> None:
        self._script = iter(slowdowns)
        self.reads = 0

    def read(self) -> SpeedReading:
        self.reads += 1
        return SpeedReading(next(self._script, 1.0))

    @property
    def fastest(self) -> SpeedReading:
        return SpeedReading(1.0)

    def slowdown(self, moment: SpeedReading) -> float:
        return max(1.0, moment.dispatch_us)
