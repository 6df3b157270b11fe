"""Repeatability: how far predictions move from one calibration of a machine to the next.

Calibrates several times and predicts a suite of models with each profile. A shift is what is left between two profiles
after each is brought to its own machine's full speed; what that speed itself did is told beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from latpred import host
from latpred.prediction.predictor import Predictor
from latpred.profile.document import DeviceProfile
from latpred.runtimes.lowering import target_of

if TYPE_CHECKING:
    from latpred.graph.graph import ModelGraph

BATCHES = (1, 2, 4, 8, 16, 32)
EAGER = "eager"


class Shift(NamedTuple):
    """How predictions of a suite differ between two calibrations."""

    first: int  # which calibrations, counted from 1
    second: int
    common: float  # median ratio of the second's predictions to the first's
    median: float  # of the absolute difference at equal speed, as a share
    p90: float
    speed: dict[str, float]  # reference times of the second over those of the first
    passed: tuple[bool, bool]  # whether each passed its gate


def repeat(calibrate: Callable[[int], DeviceProfile], times: int, suite: str = "blind") -> list[Shift]:
    """Calibrate several times and compare what each profile predicts of a suite, in eager at batches 1 to 32.

    `calibrate` is told which time it is, from 1 on.
    """
    profiles = [calibrate(number) for number in range(1, times + 1)]
    return shifts(profiles, graphs_of(suite, target_of(profiles[0].device.kind)))


def graphs_of(suite: str, target: str) -> list[ModelGraph]:
    """What the models of a suite do; those that need a package that is not here are left out."""
    from latpred.calibration.workloads import suites

    graphs = []
    for workload in suites.get(suite).workloads():
        try:
            graphs.append(workload.trace("fp32", EAGER, target))
        except (ImportError, RuntimeError):
            continue
    return graphs


def shifts(profiles: Sequence[DeviceProfile], graphs: Sequence[ModelGraph]) -> list[Shift]:
    """How the predictions of each two profiles differ."""
    return [
        _shift(index, other, profiles[index], profiles[other], graphs)
        for index, other in combinations(range(len(profiles)), 2)
    ]


def _shift(index: int, other: int, first: DeviceProfile, second: DeviceProfile, graphs: Sequence[ModelGraph]) -> Shift:
    # The first profile is predicted at the speed that the second was measured at.
    slowdown = host.slowdown(first.speed, second.speed, asynchronous=first.device.asynchronous)
    before, after = _latencies(Predictor(first), graphs), _latencies(Predictor(second), graphs)
    at_speed = _latencies(Predictor(first, slowdown=slowdown), graphs)
    off = np.abs(np.expm1(np.log(after / at_speed)))
    return Shift(
        first=index + 1,
        second=other + 1,
        common=float(np.median(after / before)),
        median=float(np.median(off)),
        p90=float(np.quantile(off, 0.9)),
        speed=host.ratio(first.speed, second.speed),
        passed=(first.acceptance.passed, second.acceptance.passed),
    )


def _latencies(predictor: Predictor, graphs: Sequence[ModelGraph]) -> Any:
    points = [predictor.curve(graph, BATCHES) for graph in graphs]
    return np.array([point.latency_ms for curve in points for point in curve.points])
