"""`fit_raw`: the profile of a calibration's journal, wherever it was measured. Nothing is measured here."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec

from latpred.calibration import fitting
from latpred.calibration.session import JOURNAL, LAST, Header, directory, read_rows
from latpred.calibration.simulated import SimulatedDevice
from latpred.errors import CalibrationError
from latpred.profile import DeviceInfo, DeviceProfile, Machine


def fit_raw(folder: str | os.PathLike[str], *, name: str | None = None) -> DeviceProfile:
    """Fit a profile to the journal of a calibration that ran elsewhere, or that was not finished.

    Parameters
    ----------
    folder : path
        Holds the journal.jsonl of a calibration under way, or the last.jsonl of one that was finished.
    name : str, optional
        Of the profile; default: the device's, as in "nvidia-h200".

    Returns
    -------
    DeviceProfile
        Of eager PyTorch; not saved yet.

    Raises
    ------
    CalibrationError
        When there is no such folder, or what it holds does not amount to a profile.

    Examples
    --------
    >>> profile = fit_raw("calibration-of-the-gpu-server")  # doctest: +SKIP
    """
    place = Path(folder)
    journal = next((path for path in (place / JOURNAL, place / LAST) if path.exists()), None)
    if journal is None:
        raise CalibrationError(
            f"there is no {JOURNAL} or {LAST} in {place}. Name the folder of a calibration's journal, as here "
            f"{directory('cpu')}."
        )
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
    except (ValueError, ArithmeticError) as error:
        raise CalibrationError(
            f"what {journal} holds could not be fitted ({error}). Calibrate the machine again, when it is idle."
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
