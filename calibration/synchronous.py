"""What is measured on a synchronous device: networks, timed whole and call by call in place.

Tiny networks tell what dispatch costs, sized ones what kernels take; some of the latter are kept to judge the fit by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from latpred.calibration import inplace, networks, suite, timing
from latpred.calibration.cells import Cell
from latpred.calibration.device import Device
from latpred.calibration.networks import NetworkSpec
from latpred.calibration.precisions import cast
from latpred.calibration.reference_speed import gauge_of
from latpred.calibration.sampling import Choice
from latpred.calibration.session import Sampled
from latpred.profile import DeviceProfile
from latpred.tracing.precisions import dtype_of

TINY = 3 * len(networks.KINDS)
TINY_REPEATS, TINY_S = 15, 0.15
SIZED_REPEATS, SIZED_S = 5, 0.06
JUDGE_REPEATS, JUDGE_S = 7, 0.5
# Of the cells that come after the first ones, how many are of the first precision for each one of another.
PREFERENCE = 3


class Synchronous:
    """The campaign of a CPU.

    Parameters
    ----------
    device : Device
        A synchronous one.
    precisions : sequence of str
        The most important first.
    """

    def __init__(self, device: Device, precisions: Sequence[str]) -> None:
        self._device = device
        self._precisions = tuple(precisions)
        self._choice = Choice()
        self._filler = torch.zeros(networks.EVICTING_BYTES // 4)

    def learn(self, profile: DeviceProfile) -> None:
        """Prefer networks that this profile is unsure of."""
        self._choice.learn(profile)

    def cells(self) -> Iterator[Cell]:
        """Tiny networks, memory, then sized networks without end.

        Without some tiny networks there is no profile, so one of each kind comes first: a busy machine takes long.
        """
        tiny = list(map(suite.network_cell, suite.tiny_networks(TINY)))
        first = len(networks.KINDS)
        yield from map(suite.network_cell, suite.chain_networks())
        yield from (*tiny[:first], *suite.memory_cells(), *tiny[first:])
        for number, spec in enumerate(self._choice.of_networks(suite.sized_networks())):
            yield suite.network_cell(spec, self._precision(number))

    def measure(self, cell: Cell) -> Sampled:
        """Time a network whole and call by call, or bytes being moved."""
        gauge = gauge_of(torch.get_num_threads())
        if cell.kind == "memory":
            call = self._device.prepare(cell)
            return Sampled({"single": timing.single(self._device, call, timing.QUICK, gauge)})
        spec = suite.network_spec(cell)
        networks.graph(spec, cell.precision)  # one that cannot be traced is no use to any fit
        model = networks.build(spec).to(dtype_of(cell.precision))
        inputs = cast(networks.inputs(spec), cell.precision)
        repeats, budget_s = _effort(spec)
        between = self._evicting(spec, inputs, cell.precision) if spec.cold else None
        placed = inplace.time_ops(model, inputs, repeats=repeats, budget_s=budget_s, gauge=gauge, between=between)
        return Sampled({"single": placed.forward}, placed.calls_us)

    def _evicting(self, spec: NetworkSpec, inputs: tuple[torch.Tensor, ...], precision: str) -> Callable[[], None]:
        """What takes a network's weights out of the cache, and nothing else.

        A twin with weights of its own runs after the cache was filled: it brings back what the layers of a large model
        find in the cache, which are code and the memory of results.
        """
        twin = networks.build(spec).to(dtype_of(precision))

        def evict() -> None:
            self._filler.sum()
            twin(*inputs)

        return evict

    def _precision(self, number: int) -> str:
        main, *others = self._precisions
        if not others or number % (PREFERENCE + 1) < PREFERENCE:
            return main
        return others[number // (PREFERENCE + 1) % len(others)]


def _effort(spec: NetworkSpec) -> tuple[int, float]:
    """Forward passes and seconds to spend on a network."""
    if spec.tiny:
        return TINY_REPEATS, TINY_S
    return (JUDGE_REPEATS, JUDGE_S) if spec.judge else (SIZED_REPEATS, SIZED_S)
