"""Chooses among candidate cells those that a fit is least sure of.

Before anything was fitted, every candidate is as good as the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

import numpy as np

from latpred.calibration import builders, networks
from latpred.calibration.cells import Cell
from latpred.calibration.kernelfit import row_of
from latpred.calibration.networks import NetworkSpec
from latpred.kerneltime import KernelModel
from latpred.ops.families import parent
from latpred.predictor import Predictor
from latpred.profile import DeviceProfile

CANDIDATES = 2  # drawn for each that is chosen: each costs a walk


class Choice:
    """Takes the less certain half of what is drawn, once a profile says what is certain."""

    def __init__(self) -> None:
        self._profile: DeviceProfile | None = None
        self._models: dict[str, dict[str, KernelModel]] = {}

    def learn(self, profile: DeviceProfile) -> None:
        """Judge certainty by this profile from now on."""
        self._profile = profile
        self._models = {
            precision: {family: KernelModel(fit) for family, fit in fits.items()}
            for precision, fits in profile.kernels.items()
        }

    def of_networks(self, drawn: Iterator[NetworkSpec]) -> Iterator[NetworkSpec]:
        """Networks worth measuring; those that judge the fit are never passed over, or the verdict would be biased."""
        while True:
            if self._profile is None:
                yield next(drawn)
                continue
            predictor = Predictor(self._profile)
            group = list(islice(drawn, CANDIDATES * len(networks.KINDS)))
            judges = [spec for spec in group if spec.judge]
            others = [spec for spec in group if not spec.judge]
            others.sort(key=lambda spec: _network_doubt(predictor, spec), reverse=True)
            yield from judges
            yield from others[: len(group) // CANDIDATES]

    def of_kernels(self, drawn: Iterator[Cell], number: int) -> Iterator[Cell]:
        """So many kernel cells worth measuring."""
        if self._profile is None:
            yield from islice(drawn, number)
            return
        group = list(islice(drawn, CANDIDATES * number))
        group.sort(key=lambda cell: _kernel_doubt(self._models.get(cell.precision, {}), cell), reverse=True)
        yield from group[:number]


def _network_doubt(predictor: Predictor, spec: NetworkSpec) -> float:
    """Width of the 90 % interval, on a log scale; the least where a network cannot be walked or predicted."""
    try:
        low, high = predictor.predict(networks.graph(spec), spec.batch).interval_ms
    except Exception:
        # Choosing must not end a calibration over one network, and nothing says that this one is worth measuring.
        return -math.inf
    return math.log(high / low)


def _kernel_doubt(models: dict[str, KernelModel], cell: Cell) -> float:
    """Log standard deviation of the kernel's predicted time; infinite for a family without a fit.

    The least where a cell cannot be walked or launches nothing.
    """
    try:
        graph, batch = builders.graph(cell)
    except Exception:
        return -math.inf
    op = next((op for op in graph.at(batch) if op.launches), None)
    if op is None:
        return -math.inf
    name: str | None = op.family
    while name is not None and name not in models:
        name = parent(name)
    if name is None:
        return math.inf
    row = np.array([row_of(op, batch)])
    return float(models[name].times(row).spread[0])
