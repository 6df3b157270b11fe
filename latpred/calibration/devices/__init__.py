"""Devices that calibration runs on: CPU, CUDA, and a simulated one; the constants of their clocks, and who they are."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from latpred.calibration.devices.base import Call, Device
from latpred.errors import DeviceError

if TYPE_CHECKING:
    import torch

__all__ = ["Call", "Device", "open_device"]


def open_device(device: str | torch.device | Device) -> Device:
    """The device of a name, as "cpu", "cuda", "cuda:1" or "simulated", or PyTorch's own, ready to be timed.

    An open one stays as it is.

    >>> open_device("simulated").asynchronous
    True
    """
    if not isinstance(device, str):
        if hasattr(device, "prepare_model"):
            return device  # type: ignore[return-value]
        device = str(device)
    if device == "cpu":
        from latpred.calibration.devices.cpu import CpuDevice

        return CpuDevice()
    if device == "simulated":
        from latpred.calibration.devices.simulated import SimulatedDevice

        return SimulatedDevice()
    if re.fullmatch(r"cuda(:\d+)?", device):
        from latpred.calibration.devices.cuda import CudaDevice

        return CudaDevice(int(device.partition(":")[2] or 0))
    raise DeviceError(f"nothing can be measured on {device!r}. Use device='cpu', 'cuda:0' or 'simulated'.")
