"""For tests of what measures: a gauge that says what a test wants, what known networks take, the least to be timed."""

from __future__ import annotations

from collections.abc import Iterable

from latpred import host
from latpred.calibration import schedules
from latpred.calibration.cells import Cell
from latpred.calibration.session import Row
from latpred.calibration.timing.in_network import calls
from latpred.calibration.timing.reference_speed import SpeedGauge, SpeedReading
from latpred.calibration.timing.timer import Plan, Timing
from latpred.calibration.workloads import networks

FAST = Plan(least=2, most=2, budget_s=0.0, warmup_s=0.0)
READ_US = {host.DISPATCH: 90.0, host.COLD_DISPATCH: 50.0, host.PRODUCT: 500.0, host.CACHE: 3000.0}


def timed_in_place(cell: Cell, slow: float = 1.0) -> Row:
    """A network whose calls take 5 us each, in sized ones 8, and a pass 20 beside them, in a moment so slow."""
    spec = schedules.network_spec(cell)
    called = len(calls(networks.graph(spec).at(spec.batch)))
    call_us, chained_us = slow * (5.0 if spec.tiny else 8.0), 0.1 * spec.size * spec.chain
    total_us = slow * (20.0 + chained_us) + called * call_us
    timings = {"single": Timing(1e-6 * total_us, 1e-9, 9, True, slow)}
    return Row(cell, timings, 0.1, calls_us=(call_us,) * called, speed=READ_US)


class ScriptedGauge(SpeedGauge):
    """Gives slowdowns one after the other, full speed once they are spent; the fastest moment is 1."""

    fastest = SpeedReading(1.0)

    def __init__(self, slowdowns: Iterable[float] = ()) -> None:
        self._script = iter(slowdowns)
        self.reads = 0

    def read(self) -> SpeedReading:
        self.reads += 1
        return SpeedReading(next(self._script, 1.0))
