"""The interface every device offers to calibration: a clock, a way to wait, and runnable forms of cells and models.

`timing` needs nothing else, so a simulated device with a virtual clock is measured by the same code as a real one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from latpred.calibration.cells import Cell
from latpred.profile import DeviceInfo, Machine

Call = Callable[[], None]


class Device(Protocol):
    """A device that can be timed.

    Attributes
    ----------
    name : str
        "cpu", "cuda:0" or "simulated".
    asynchronous : bool
        True when the host goes on while the device works.
    """

    name: str
    asynchronous: bool

    def machine(self) -> Machine:
        """Identity of host, device and stack."""
        ...

    def info(self) -> DeviceInfo:
        """What is known of the device without measuring; clock constants are left at zero."""
        ...

    def precisions(self) -> tuple[str, ...]:
        """Precisions the device does well, the most important first."""
        ...

    def clock(self) -> float:
        """Host time in seconds; only differences mean anything."""
        ...

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        ...

    def prepare(self, cell: Cell) -> Call:
        """Build a cell's tensors and give the call that issues it once; weights rotate from call to call.

        Raises
        ------
        MemoryError
            When the cell does not fit the device.
        """
        ...

    def prepare_model(self, model: Any, inputs: Any, runtime: str) -> Call:
        """Give the call that issues one forward pass of a model."""
        ...

    def time_queued(self, call: Call, count: int) -> float:
        """Device seconds that `count` calls take back to back, with the device never waiting for the host.

        On a synchronous device this is the host time of the same loop.
        """
        ...
