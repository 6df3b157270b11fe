"""What is measured on an asynchronous device: clock constants, dispatch, kernels in long queues, networks to judge by.

Kernels are timed back to back with cold weights and hot activations, never one at a time on an idle stream, where one
would measure the launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from latpred.calibration import clocks, networks, suite, timing
from latpred.calibration.cells import Cell
from latpred.calibration.device import Device
from latpred.calibration.precisions import cast
from latpred.calibration.sampling import Choice
from latpred.calibration.session import Sampled
from latpred.calibration.timing import Timing
from latpred.profile import DeviceProfile
from latpred.tracing.precisions import dtype_of

TINY = 3 * len(networks.KINDS)
JUDGES = 24
ROUND = 24  # kernel cells between two judges
# Short samples: one slow call in a hundred then leaves most of them, and so their median, untouched.
DISPATCH = timing.Plan(sample_s=5e-5, most=400, precision=0.002)
FINE = timing.Plan(loops=16, most=2000, precision=0.001)


class Asynchronous:
    """The campaign of a GPU, or of the simulated device.

    Parameters
    ----------
    device : Device
        An asynchronous one.
    precisions : sequence of str
        The most important first.
    """

    def __init__(self, device: Device, precisions: Sequence[str]) -> None:
        self._device = device
        self._precisions = tuple(precisions)
        self._choice = Choice()

    def learn(self, profile: DeviceProfile) -> None:
        """Prefer kernels that this profile is unsure of."""
        self._choice.learn(profile)

    def cells(self) -> Iterator[Cell]:
        """Clocks, dispatch, tiny networks; then kernels of every precision in turns, with a judge now and then."""
        yield suite.CLOCK
        yield from (cell for cell in suite.memory_cells() if cell.name != "read")
        yield from suite.dispatch_cells()
        for spec in (*suite.chain_networks(), *suite.tiny_networks(TINY)):
            yield suite.network_cell(spec)
        kernels = {precision: self._kernels(precision) for precision in self._precisions}
        judges = suite.judging_networks()
        while True:
            for precision in self._precisions:
                yield from self._choice.of_kernels(kernels[precision], ROUND)
                yield suite.network_cell(next(judges), precision)

    def measure(self, cell: Cell) -> Sampled:
        """Time one cell."""
        if cell == suite.CLOCK:
            return Sampled(_constants(self._device))
        if cell.kind == "network":
            return Sampled(self._network(cell))
        call = self._device.prepare(cell)
        if cell.name == "upload":
            return Sampled({"single": timing.single(self._device, call)})
        if cell.kind == "dispatch":
            return Sampled({"issue": timing.issue(self._device, call, DISPATCH)})
        return Sampled({"queued": timing.queued(self._device, call, FINE if cell.kind == "memory" else None)})

    def _kernels(self, precision: str) -> Iterator[Cell]:
        # What multiplies nothing runs in TF32 as it does in fp32: `fitting` takes it from there.
        shared = precision == "tf32" and "fp32" in self._precisions
        return suite.kernel_cells(precision, 0, suite.PRODUCTS if shared else suite.KERNELS)

    def _network(self, cell: Cell) -> dict[str, Timing]:
        spec = suite.network_spec(cell)
        self._device.use_precision(cell.precision)
        with self._device.errors():
            subject = self._subject(cell)
        call = self._device.prepare_model(*subject, "eager")
        timings = {"single": timing.single(self._device, call)}
        syncs = networks.graph(spec, cell.precision).syncs(spec.batch)
        if spec.tiny and not syncs:
            timings["issue"] = timing.issue(self._device, call, timing.Plan(loops=1))
        return timings

    def _subject(self, cell: Cell) -> tuple[Any, Any]:
        """What the device runs: a module and its inputs, or for a simulation the graph and the batch."""
        spec = suite.network_spec(cell)
        place = getattr(self._device, "torch_device", None)
        if place is None:
            return networks.graph(spec, cell.precision), spec.batch
        with torch.device(place):
            model = networks.build(spec).to(dtype_of(cell.precision))
        return model, cast(networks.inputs(spec, device=str(place)), cell.precision)


def _constants(device: Device) -> dict[str, Timing]:
    """Clock constants as timings, so that a journal holds them like any other cell.

    The queue is a number of launches, not a time.
    """
    found = clocks.measure(device)
    values = {name: getattr(found, name) for name in found.__struct_fields__ if name not in ("queue", "stable")}
    timings = {name: Timing(us * 1e-6, 0.0, 1, found.stable) for name, us in values.items()}
    return timings | {"queue": Timing(float(found.queue), 0.0, 1, found.stable)}
