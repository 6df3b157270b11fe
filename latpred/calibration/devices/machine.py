"""Identity of the machine a measurement was taken on, and the state of its GPU while it was.

Identity is what must match for a profile to hold (`profile.store.mismatch` compares it); state tells what disturbed a
timing. Reading either never imports torch; nvidia-ml-py is used where it is installed.
"""

from __future__ import annotations

import platform
from typing import Any, NamedTuple

from latpred import host
from latpred.profile.document import Machine

STACK = ("torch", "transformers", "numpy", "onnxruntime")

CLOCK_SHIFT = 0.10  # between two readings; boost clocks move by some steps of 15 MHz on their own
POWER_CAP = "power cap"
SLOWDOWNS = ("hardware slowdown", "thermal (software)", "thermal (hardware)", "power brake")
# Bits by which NVIDIA's library says why clocks are low; their names it has changed, from throttle to event reasons.
IDLE = 1
REASONS = {2: "application clocks", 4: POWER_CAP} | dict(zip((8, 32, 64, 128), SLOWDOWNS, strict=True))


class GpuState(NamedTuple):
    """What a GPU was doing at one moment; a number is 0 where the driver does not tell it."""

    driver: str
    sm_mhz: int
    throttled: tuple[str, ...]  # the reasons for which it runs below its clocks; idling is none
    # Processes that compute on it beside this one. Within a container the driver may call this process by another
    # number, so one of those that it lists always counts as this one.
    other_processes: int = 0
    idle: bool = False  # whether it lowers its clocks because it has nothing to do


def identity(*, accelerator: str = "", driver: str = "", threads: int) -> Machine:
    """Host, software stack, and the accelerator by its name and driver, both empty on a CPU."""
    return Machine(
        hostname_hash=host.hostname_hash(),
        cpu=host.cpu_name(),
        cores=host.cores(),
        memory_bytes=host.memory_bytes(),
        system=f"{platform.system()} {platform.machine()}",
        accelerator=accelerator,
        driver=driver,
        stack={"python": platform.python_version()} | host.versions(*STACK),
        threads=threads,
        machine_id=host.machine_id(),
        cpu_model=host.cpu_model(),
    )


def gpu_state(pci_bus_id: str) -> GpuState | None:
    """State of one NVIDIA GPU, or None without nvidia-ml-py, a driver, or such a GPU.

    It is named by its bus, as in "00000000:3B:00.0": torch and the driver number GPUs differently.
    """
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        try:
            return _read_state(pynvml, pynvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id.encode()))
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None


def gpu_reason(before: GpuState | None, after: GpuState | None) -> str:
    """What disturbed the GPU between two readings, part of a sentence; "" when nothing did, or nothing is known.

    A power cap belongs to the work itself, which draws the power, and so do the clocks under it. Application clocks
    are its owner's choice, which the driver tells only while the GPU works. Clocks that fall because it idles belong to
    none.
    """
    if before is None or after is None:
        return ""
    others = max(before.other_processes, after.other_processes)
    if others:
        return "another process uses the GPU" if others == 1 else f"{others} other processes use the GPU"
    slowed = [reason for reason in after.throttled if reason in SLOWDOWNS]
    if slowed:
        return f"the GPU throttled: {', '.join(slowed)}"
    working = before.sm_mhz and after.sm_mhz and not before.idle and not after.idle
    if working and POWER_CAP not in after.throttled and abs(after.sm_mhz / before.sm_mhz - 1) > CLOCK_SHIFT:
        return f"the GPU's clock went from {before.sm_mhz} to {after.sm_mhz} MHz"
    return ""


def _read_state(nvml: Any, handle: Any) -> GpuState:
    """What the driver tells; 0 of what it keeps to itself, as it does of a share of a GPU or within a container."""

    def told(name: str, *given: Any, otherwise: Any = 0) -> Any:
        try:
            return getattr(nvml, f"nvmlDeviceGet{name}")(handle, *given)
        except (nvml.NVMLError, AttributeError):  # the driver or the library lacks it
            return otherwise

    slowed = told("CurrentClocksEventReasons") or told("CurrentClocksThrottleReasons")
    listed = told("ComputeRunningProcesses", otherwise=())
    # Windows lists what draws on the screen, too, and tells the memory of none.
    computing = {process.pid for process in listed if process.usedGpuMemory is not None}
    return GpuState(
        driver=nvml.nvmlSystemGetDriverVersion(),
        sm_mhz=told("ClockInfo", nvml.NVML_CLOCK_SM),
        throttled=tuple(reason for bit, reason in REASONS.items() if slowed & bit),
        other_processes=max(len(computing) - 1, 0),
        idle=bool(slowed & IDLE),
    )
