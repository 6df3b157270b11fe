"""The interface every device offers to calibration: a clock, a way to wait, and runnable forms of cells and models.

The timer needs nothing else, so a simulated device with a virtual clock is measured by the same code as a real one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from latpred.calibration.cells import Cell
from latpred.profile.document import DeviceInfo, Machine

Call = Callable[[], None]


class Device(Protocol):
    """A device that can be timed."""

    name: str  # "cpu", "cuda:0" or "simulated"
    asynchronous: bool  # True when the host goes on while the device works

    def machine(self) -> Machine:
        """Identity of host, device and stack."""

    def info(self) -> DeviceInfo:
        """What is known of the device without measuring; clock constants are left at zero."""

    def precisions(self) -> tuple[str, ...]:
        """Precisions the device does well, the most important first."""

    def use_precision(self, precision: str) -> None:
        """Set, for the whole process, how float32 is multiplied, whatever was set before.

        Convolutions and RNNs of cuDNN use TF32 where the GPU has it, as they do in PyTorch by default; matrix products
        use it in "tf32" alone. `prepare` sets it for its cell; what is prepared otherwise runs under what was set last.
        """

    def clock(self) -> float:
        """Host time in seconds; only differences mean anything."""

    def synchronize(self) -> None:
        """Wait until the device is idle."""

    def errors(self) -> AbstractContextManager[None]:
        """Within it, what the device raises comes out as MemoryError (out of memory) or DeviceError (it is lost)."""

    def prepare(self, cell: Cell) -> Call:
        """Build a cell's tensors and give the call that issues it once; weights rotate from call to call.

        A MemoryError says that the cell does not fit the device.
        """

    def prepare_model(self, model: Any, inputs: Any, runtime: str) -> Call:
        """Give the call that issues one forward pass of a model, which must be on the device with its inputs."""

    def time_queued(self, call: Call, count: int) -> float:
        """Device seconds that `count` calls take back to back, with the device never waiting for the host.

        Between two kernels lies the gap of the device's stream, as in an eager forward pass. On a synchronous device
        this is the host time of the same loop.
        """

    def time_replayed(self, call: Call, count: int) -> float | None:
        """Device seconds of one replay of a captured graph of `count` calls; None where nothing can be captured."""


class RealDevice(Device):
    """What all devices that run modules have in common; `torch_device` is where tensors of cells live."""

    torch_device: Any

    def clock(self) -> float:
        return time.perf_counter()

    def prepare(self, cell: Cell) -> Call:
        from latpred.calibration.workloads import single_ops

        with self.errors():
            self.use_precision(cell.precision)
            return single_ops.build(cell, self.torch_device)

    def prepare_model(self, model: Any, inputs: Any, runtime: str) -> Call:
        from latpred import runtimes

        with self.errors():
            return runtimes.get(runtime).build(model, inputs)
