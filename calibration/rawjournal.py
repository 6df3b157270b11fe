"""A folder that holds the journal of latpred's own calibration: finds and fits it, wherever it was measured."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from latpred.calibration import fitting
from latpred.calibration.session import JOURNAL, LAST, Header, read_rows
from latpred.calibration.simulated import SimulatedDevice
from latpred.errors import CalibrationError
from latpred.profile import DeviceInfo, DeviceProfile, Machine


def find(folder: Path) -> Path | None:
    """The journal in a folder: of the calibration under way, else of the last one; None when there is none."""
    return next((path for path in (folder / JOURNAL, folder / LAST) if path.exists()), None)


def fit(journal: Path, name: str | None) -> DeviceProfile:
    """The profile of a journal.

    Raises
    ------
    CalibrationError
        When the file is no journal, holds too little, or has cells of another version.
    """
    rows = read_rows(journal)
    machine = _header(journal).machine
    info = device_of(machine)
    try:
        profile, _ = fitting.fit_profile(rows, machine, info, name or info.name)
    except LookupError as error:
        raise CalibrationError(
            f"{journal} was written by another version of latpred: its cells lack {error}. Fit it with that version, "
            "or calibrate again."
        ) from error
    return profile


def device_of(machine: Machine) -> DeviceInfo:
    """The device of a journal's machine. What only the device itself can tell is asked of it where it is present."""
    if machine.accelerator == "simulated":
        return SimulatedDevice().info()
    if not machine.accelerator:
        return DeviceInfo("cpu", "cpu", asynchronous=False, memory_bytes=machine.memory_bytes, queue=0)
    name = re.sub(r"[^a-z0-9]+", "-", machine.accelerator.lower()).strip("-")
    return _present(name) or DeviceInfo(name, "cuda", asynchronous=True, memory_bytes=0, queue=0)


def _present(name: str) -> DeviceInfo | None:
    """What the GPU of this machine says of itself, if it goes by the name."""
    import torch

    for index in range(torch.cuda.device_count()):
        from latpred.calibration.cuda import CudaDevice

        info = CudaDevice(index).info()
        if info.name == name:
            return info
    return None


def _header(journal: Path) -> Header:
    with journal.open("rb") as file:
        line = file.readline()
    try:
        return msgspec.json.decode(line, type=Header)
    except msgspec.MsgspecError as error:
        raise CalibrationError(f"{journal} does not say where it was measured. Calibrate again.") from error
