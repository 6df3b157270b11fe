"""Study: what has to be measured for a runtime beside eager, and what the measurements amount to.

Eager is measured first and in full, by `synchronous` or `asynchronous`; a study stands on the profile that comes of it
and adds the runtime's own costs. Which study serves which runtime is decided in `calibration.runtime_calibration`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from latpred.calibration.cells import Cell
from latpred.calibration.devices import Device
from latpred.calibration.session import Row, Sampled
from latpred.profile.document import DeviceProfile, DispatchFit


class Study(Protocol):
    """The calibration of one runtime.

    Attributes
    ----------
    runtime : str
        Name of the runtime; every cell has it as `Cell.runtime`.
    seconds : float
        What a full calibration spends on it by default; a quick one spends a third.
    folds : int
        Parts that the networks of the fit fall into, so that each judges a fit of the others, where networks that judge
        are too few to tell how wide intervals must be; 0 where they are not.
    """

    runtime: str
    seconds: float
    folds: int

    def cells(self, device: Device, precision: str) -> Iterator[Cell]:
        """Cells without end, the most valuable first.

        Networks that judge (`NetworkSpec.holdout`) are among them early: the gate and the intervals rest on those.
        """
        ...

    def measure(self, cell: Cell, device: Device) -> Sampled:
        """Time one cell. What it raises becomes a row with an error, and the calibration goes on."""
        ...

    def fit(self, rows: Sequence[Row], profile: DeviceProfile) -> DispatchFit:
        """The runtime's costs.

        `spread` may be left at zero: it is set afterwards, from the networks that judge.

        Parameters
        ----------
        rows : sequence of Row
            Of this runtime, without errors, brought to the usual speed of the machine. Those of networks that judge are
            among them and must not be used.
        profile : DeviceProfile
            The same device's, with eager and the kernels fitted.

        Raises
        ------
        CalibrationError
            When there are too few rows; says how to get more.
        """
        ...
