"""Devices that calibration runs on: CPU, CUDA, and a simulated one; the constants of their clocks, and who they are."""

from __future__ import annotations

import re

from latpred.calibration.devices.base import Call, Device, ProfiledForward
from latpred.errors import DeviceError

__all__ = ["Call", "Device", "ProfiledForward", "open_device"]


def open_device(name: str) -> Device:
    """The live device of a name, ready to be timed: "cpu", "cuda", "cuda:1" or "simulated"; else a DeviceError.

    >>> open_device("simulated").asynchronous
    True
    """
    if name == "cpu":
        from latpred.calibration.devices.cpu import CpuDevice

        return CpuDevice()
    if name == "simulated":
        from latpred.calibration.devices.simulated import SimulatedDevice

        return SimulatedDevice()
    if re.fullmatch(r"cuda(:\d+)?", name):
        from latpred.calibration.devices.cuda import CudaDevice

        return CudaDevice(int(name.partition(":")[2] or 0))
    raise DeviceError(f"nothing can be measured on {name!r}. Use device='cpu', 'cuda:0' or 'simulated'.")
