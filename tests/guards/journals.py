"""Stored journals of calibrations, one of each kind of device, and the profiles that they are fitted to.

`simulated.jsonl.gz` holds every runtime of the simulated GPU, `cpu.jsonl.gz` a part of what a CPU's measured in eager,
`h100.jsonl.gz` what an H100's measured in eager and in CUDA graphs. Its clock was measured before a kernel's floor was
held against the steps of replayed graphs, and was corrected by the chains that the same journal has.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from math import inf
from pathlib import Path
from typing import Any

import msgspec

from latpred import storage
from latpred.calibration import calibrate, calibrator, runtime_calibration, schedules, session
from latpred.calibration.devices.simulated import SimulatedDevice, SimulatedSpec
from latpred.calibration.fitting import profile_fit
from latpred.calibration.runtime_calibration.calibrate_runtimes import RuntimeSession
from latpred.calibration.session import Session
from latpred.profile import document as codec
from latpred.profile.document import DeviceProfile

FOLDER = Path(__file__).with_name("journals")
SIMULATED, CPU, H100 = (FOLDER / f"{name}.jsonl.gz" for name in ("simulated", "cpu", "h100"))
JOURNALS = (SIMULATED, CPU, H100)
EAGER_CELLS, OTHER_CELLS = 260, 180  # of the simulated device: in eager, and in all its other runtimes together
LARGE_STEP = 3  # of the CPU's other cells every third is enough for a fit
SETTINGS = "a stored journal"


def fitted(journal: Path, folder: Path) -> DeviceProfile:
    """The profile of a stored journal, with every runtime that it has rows of; the folder holds a session of it."""
    head, *lines = gzip.decompress(journal.read_bytes()).splitlines(keepends=True)
    header = msgspec.json.decode(head, type=session.Header)
    header = msgspec.structs.replace(header, settings=session.settings_hash(SETTINGS))
    (folder / session.JOURNAL).write_bytes(b"".join([msgspec.json.encode(header), b"\n", *lines]))
    machine = header.machine
    with Session(folder, machine, SETTINGS) as stored:
        profile, _ = profile_fit.fit_profile(stored.rows, machine, calibrator.device_of(machine), "stored")
        others = dict.fromkeys(row.cell.runtime for row in stored.rows if row.cell.runtime != profile_fit.EAGER)
        if others:
            added = RuntimeSession(stored, tuple(profile.kernels))
            for runtime in others:
                calibrated = runtime_calibration.get(runtime, SimulatedDevice())
                profile = added.add(profile, calibrated, inf, 0, lambda *_: None)
    return profile


def document(profile: DeviceProfile) -> Any:
    """A profile as plain values, without what depends on when it was fitted and how long that took."""
    timeless = msgspec.structs.replace(profile, created="", seconds=0.0)
    return json.loads(json.dumps(codec.to_document(timeless)))


def kept_at(journal: Path) -> Path:
    """Where the profile of a journal is kept."""
    return journal.with_name(journal.name.removesuffix(".jsonl.gz") + ".profile.json.gz")


def kept(journal: Path) -> Any:
    """The profile that a journal was fitted to when it was kept."""
    return json.loads(gzip.decompress(kept_at(journal).read_bytes()))


def measure_simulated() -> None:
    """Calibrate the simulated device in all its runtimes and store the journal."""
    with tempfile.TemporaryDirectory() as folder:
        before = os.environ.get(storage.VARIABLE)
        os.environ[storage.VARIABLE] = folder
        try:
            device = SimulatedDevice(SimulatedSpec(seed=3))
            calibrate(device, cells=EAGER_CELLS)
            calibrate(device, cells=OTHER_CELLS, runtimes="all")
            body = (session.directory(device.name) / session.LAST).read_bytes()
        finally:
            if before is None:
                del os.environ[storage.VARIABLE]
            else:
                os.environ[storage.VARIABLE] = before
    FOLDER.mkdir(exist_ok=True)
    SIMULATED.write_bytes(gzip.compress(body, mtime=0))


def store_cpu(last: Path) -> None:
    """Store a part of a CPU's finished calibration: of the first precision, all small networks and some large ones."""
    head, *lines = last.read_bytes().splitlines(keepends=True)
    rows = [(line, msgspec.json.decode(line, type=session.Row)) for line in lines]
    eager = [
        (line, row) for line, row in rows if row.cell.runtime == profile_fit.EAGER and row.cell.precision == "fp32"
    ]
    small = [line for line, row in eager if _is_small(row)]
    large = [line for line, row in eager if not _is_small(row)]
    CPU.write_bytes(gzip.compress(b"".join([head, *small, *large[::LARGE_STEP]]), mtime=0))


def _is_small(row: session.Row) -> bool:
    if row.cell.kind != "network":
        return False
    spec = schedules.network_spec(row.cell)
    return spec.tiny or spec.chain


def keep() -> None:
    """Fit the stored journals and write what comes of them; the simulated one is measured where there is none."""
    if not SIMULATED.exists():
        measure_simulated()
    for journal in JOURNALS:
        with tempfile.TemporaryDirectory() as folder:
            text = json.dumps(document(fitted(journal, Path(folder))), indent=1)
        kept_at(journal).write_bytes(gzip.compress(text.encode(), mtime=0))
