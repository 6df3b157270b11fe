"""A speed gauge that says what a test wants."""

from __future__ import annotations

from collections.abc import Iterable

from latpred.calibration.timing.reference_speed import Moment, SpeedGauge


class ScriptedGauge(SpeedGauge):
    """Gives slowdowns one after the other, full speed once they are spent; the fastest moment is 1."""

    def __init__(self, slowdowns: Iterable[float] = ()) -> None:
        self._script = iter(slowdowns)
        self._seen, self.reads = [], 0

    def read(self) -> Moment:
        self.reads += 1
        self._seen.append(Moment(next(self._script, 1.0)))
        return self._seen[-1]

    @property
    def fastest(self) -> Moment:
        return Moment(1.0)

    def slowdown(self, moment: Moment) -> float:
        return max(1.0, moment.dispatch_us)
