"""Cells: the unit of measurement, declared as data.

A cell names one thing to time; how it is timed is the device's business, so the same cell runs on a CPU, a GPU and the
simulated device, and its key finds it again in a journal.
"""

from __future__ import annotations

import msgspec


class Cell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One thing to time.

    kind : "dispatch" (host cost of one small op, or of a chain of module or Python calls), "kernel" (device time of one
    op at given dims), "memory" (bandwidth, copies), "clock" (launch latency, gap, sync) or "network" (a small generated
    network, end to end).
    """

    kind: str
    name: str  # host class, kernel family or network name
    dims: dict[str, int] = {}
    precision: str = "fp32"
    runtime: str = "eager"

    @property
    def key(self) -> str:
        """Stable text that identifies the cell."""
        dims = ",".join(f"{name}={value}" for name, value in sorted(self.dims.items()))
        return f"{self.kind}/{self.runtime}/{self.precision}/{self.name}/{dims}"
