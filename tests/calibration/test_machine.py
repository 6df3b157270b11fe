"""Identity of the machine, and what a GPU management library says, without such a library."""

from __future__ import annotations

import os
import platform
import sys
import types
from importlib import metadata

import pytest

from latpred.calibration.devices import machine


def test_identity_tells_machine_and_stack_apart():
    found = machine.identity(accelerator="GPU", driver="570.1", threads=3)
    assert (found.accelerator, found.driver, found.threads) == ("GPU", "570.1", 3)
    assert found.cores == os.cpu_count()
    assert found.stack["python"] == platform.python_version()
    assert found.stack["torch"] == metadata.version("torch")
    assert {"transformers", "numpy"} <= found.stack.keys()
    assert platform.node() not in str(found)


BUS = "00000000:3B:00.0"


class FakeError(Exception):
    """What the library raises."""


def refuse(*_):
    raise FakeError


def processes(*pids, memory=1 << 20):
    """As the library lists them."""
    return [types.SimpleNamespace(pid=pid, usedGpuMemory=memory) for pid in pids]


@pytest.fixture
def library(monkeypatch):
    """A management library that knows one GPU, which runs hot."""
    nvml = types.ModuleType("pynvml")
    open_count = [0]
    nvml.NVMLError, nvml.NVML_CLOCK_SM = FakeError, 1
    nvml.nvmlInit = lambda: open_count.__setitem__(0, open_count[0] + 1)
    nvml.nvmlShutdown = lambda: open_count.__setitem__(0, open_count[0] - 1)
    nvml.nvmlDeviceGetHandleByPciBusId = lambda bus: "handle" if bus == BUS.encode() else refuse()
    nvml.nvmlSystemGetDriverVersion = lambda: "570.1"
    nvml.nvmlDeviceGetClockInfo = lambda handle, clock: {1: 1200}[clock]
    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: 4 | 32 | 1  # power cap, thermal, and idle
    nvml.nvmlDeviceGetComputeRunningProcesses = lambda handle: processes(os.getpid(), 17, 18, 18)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return types.SimpleNamespace(nvml=nvml, open_count=open_count)


@pytest.mark.parametrize("called", ["Throttle", "Event"])
def test_gpu_state_is_read_and_the_library_closed_again(called, library):
    told = vars(library.nvml).pop("nvmlDeviceGetCurrentClocksThrottleReasons")
    setattr(library.nvml, f"nvmlDeviceGetCurrentClocks{called}Reasons", told)
    throttled = ("power cap", "thermal (software)")
    state = machine.GpuState("570.1", 1200, throttled, other_processes=2, idle=True)
    assert machine.gpu_state(BUS) == state
    assert library.open_count == [0]


def test_what_a_driver_keeps_to_itself_does_not_hide_the_rest(library):
    for kept in ("CurrentClocksThrottleReasons", "ComputeRunningProcesses"):
        setattr(library.nvml, f"nvmlDeviceGet{kept}", refuse)
    assert machine.gpu_state(BUS) == machine.GpuState("570.1", 1200, ())


ON_WINDOWS = processes(17, 18, 19, memory=None)  # which draw on the screen


@pytest.mark.parametrize(
    ("listed", "others"), [((), 0), (processes(4711), 0), (processes(4711, 4712), 1), (ON_WINDOWS, 0)]
)
def test_this_process_which_a_container_numbers_anew_is_no_other_nor_is_a_window(listed, others, library):
    library.nvml.nvmlDeviceGetComputeRunningProcesses = lambda handle: listed
    assert machine.gpu_state(BUS).other_processes == others


def gpu(sm_mhz=1800, throttled=(), other_processes=0, idle=False):
    return machine.GpuState("1", sm_mhz, throttled, other_processes, idle)


HOT = gpu(throttled=("thermal (software)",))


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (gpu(), gpu(), ""),
        (gpu(1800), gpu(1755), ""),
        (gpu(1800), gpu(1200), "the GPU's clock went from 1800 to 1200 MHz"),
        (gpu(1200), gpu(1800), "the GPU's clock went from 1200 to 1800 MHz"),
        (gpu(1800), gpu(345, idle=True), ""),
        (gpu(0), gpu(1800), ""),
        (gpu(), gpu(throttled=("power cap",)), ""),  # which the work itself reached
        (gpu(1590), gpu(1110, throttled=("power cap",)), ""),
        (gpu(1110, throttled=("power cap",)), gpu(1590), "the GPU's clock went from 1110 to 1590 MHz"),
        (gpu(idle=True), gpu(throttled=("thermal (software)",)), "the GPU throttled: thermal (software)"),
        (HOT, HOT, "the GPU throttled: thermal (software)"),
        (gpu(throttled=("power cap",)), gpu(), ""),
        # Application clocks are told only while the GPU works: no cell is disturbed by that it had been idle.
        (gpu(1290, idle=True), gpu(1290, throttled=("application clocks",)), ""),
        (gpu(1530), gpu(1290, throttled=("application clocks",)), "the GPU's clock went from 1530 to 1290 MHz"),
        (gpu(other_processes=1), gpu(), "another process uses the GPU"),
        (gpu(), gpu(1200, other_processes=2), "2 other processes use the GPU"),
        (None, gpu(1200, other_processes=2), ""),
        (gpu(), None, ""),
    ],
)
def test_what_disturbs_a_gpu(before, after, reason):
    assert machine.gpu_reason(before, after) == reason


def test_no_state_without_the_gpu_its_driver_or_the_library(library, monkeypatch):
    assert machine.gpu_state("00000000:FF:00.0") is None
    assert library.open_count == [0]  # and the library is closed
    library.nvml.nvmlInit = refuse
    assert machine.gpu_state(BUS) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert machine.gpu_state(BUS) is None
