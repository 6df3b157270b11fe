"""Identity of the machine a measurement was taken on, and the state of its GPU while it was.

Identity is what must match for a profile to hold (`profile.store.mismatch` compares it); state (clocks, throttling,
temperature) is provenance. Reading either never imports torch; nvidia-ml-py is used where it is installed.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import msgspec

from latpred import host
from latpred.profile.document import Machine

STACK = ("torch", "transformers", "numpy", "onnxruntime")

CLOCK_SHIFT = 0.10  # between two readings; boost clocks move by some steps of 15 MHz on their own
SLOWDOWNS = ("hardware slowdown", "thermal (software)", "thermal (hardware)", "power brake")


class GpuState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a GPU was doing at one moment.

    `throttled` names the reasons for which it runs below its clocks; idling is none. A number is 0 where the driver
    does not tell it. `other_processes` compute on it beside this one. Within a container the driver may call this
    process by another number, so one of those that it lists always counts as this one. `idle` is a GPU that lowers its
    clocks because it has nothing to do.
    """

    name: str
    driver: str
    sm_mhz: int
    sm_max_mhz: int
    memory_mhz: int
    temperature_c: int
    power_w: float
    throttled: tuple[str, ...]
    other_processes: int = 0
    idle: bool = False


def identity(*, accelerator: str = "", driver: str = "", threads: int) -> Machine:
    """Host, software stack, and the device that was named.

    Parameters
    ----------
    accelerator, driver : str
        Name and driver of the device; empty on a CPU.
    threads : int
        Threads one op may use.

    Examples
    --------
    >>> identity(threads=1).accelerator
    ''
    """
    return Machine(
        hostname_hash=host.hostname_hash(),
        cpu=host.cpu_name(),
        cores=host.cores(),
        memory_bytes=host.memory_bytes(),
        system=f"{platform.system()} {platform.machine()}",
        accelerator=accelerator,
        driver=driver,
        stack=stack(),
        threads=threads,
        machine_id=host.machine_id(),
        cpu_model=host.cpu_model(),
    )


def stack() -> dict[str, str]:
    """Versions of Python and of the packages that set what an op costs."""
    found = {"python": platform.python_version()}
    for package in STACK:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def gpu_state(pci_bus_id: str) -> GpuState | None:
    """State of one NVIDIA GPU, or None without nvidia-ml-py, a driver, or such a GPU.

    Parameters
    ----------
    pci_bus_id : str
        As in "00000000:3B:00.0": torch and the driver number GPUs differently, their bus they agree on.
    """
    with _management_library() as nvml:
        if nvml is None:
            return None
        try:
            return _read_state(nvml, nvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id.encode()))
        except nvml.NVMLError:
            return None


def gpu_reason(before: GpuState | None, after: GpuState | None) -> str:
    """What disturbed the GPU between two readings, part of a sentence; "" when nothing did, or nothing is known.

    A power cap that was there before belongs to the work itself, and clocks that fall because the GPU idles to none.

    Parameters
    ----------
    before, after : GpuState or None
        The readings.

    Examples
    --------
    >>> gpu_reason(None, None)
    ''
    """
    if before is None or after is None:
        return ""
    others = max(before.other_processes, after.other_processes)
    if others:
        return "another process uses the GPU" if others == 1 else f"{others} other processes use the GPU"
    new = [reason for reason in after.throttled if reason in SLOWDOWNS or reason not in before.throttled]
    if new:
        return f"the GPU throttled: {', '.join(new)}"
    known = before.sm_mhz and after.sm_mhz and not before.idle and not after.idle
    if known and abs(after.sm_mhz / before.sm_mhz - 1) > CLOCK_SHIFT:
        return f"the GPU's clock went from {before.sm_mhz} to {after.sm_mhz} MHz"
    return ""


@contextmanager
def _management_library() -> Iterator[Any]:
    """The initialised pynvml module, or None."""
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _read_state(nvml: Any, handle: Any) -> GpuState:
    """What the driver tells; 0 of what it keeps to itself, as it does of a share of a GPU or within a container."""

    def told(ask: Callable[..., Any], *given: Any, otherwise: Any = 0) -> Any:
        try:
            return ask(*given)
        except nvml.NVMLError:
            return otherwise

    mask = told(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    computing = {process.pid for process in told(nvml.nvmlDeviceGetComputeRunningProcesses, handle, otherwise=())}
    return GpuState(
        name=_text(told(nvml.nvmlDeviceGetName, handle, otherwise="")),
        driver=_text(nvml.nvmlSystemGetDriverVersion()),
        sm_mhz=told(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
        sm_max_mhz=told(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM),
        memory_mhz=told(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
        temperature_c=told(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        power_w=told(nvml.nvmlDeviceGetPowerUsage, handle) / 1000,
        throttled=_throttle_reasons(nvml, mask),
        other_processes=max(len(computing) - 1, 0),
        idle=bool(mask & nvml.nvmlClocksThrottleReasonGpuIdle),
    )


def _throttle_reasons(nvml: Any, mask: int) -> tuple[str, ...]:
    known = {
        "power cap": nvml.nvmlClocksThrottleReasonSwPowerCap,
        "application clocks": nvml.nvmlClocksThrottleReasonApplicationsClocksSetting,
        "hardware slowdown": nvml.nvmlClocksThrottleReasonHwSlowdown,
        "thermal (software)": nvml.nvmlClocksThrottleReasonSwThermalSlowdown,
        "thermal (hardware)": nvml.nvmlClocksThrottleReasonHwThermalSlowdown,
        "power brake": nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
    }
    return tuple(reason for reason, bit in known.items() if mask & bit)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
