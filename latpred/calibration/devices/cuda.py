"""An NVIDIA GPU as a device: asynchronous, timed by the host's clock from outside and by events in its stream.

Kernels are timed behind a kernel that keeps the device busy while the host fills the queue, so that the device never
waits for the host; one at a time on an idle stream would time the launch instead. What a cell is made of is
`workloads.single_ops`' business, how a runtime runs a model the runtime's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import repeat
from typing import Any
from weakref import WeakKeyDictionary

import torch

from latpred.calibration.cells import Cell
from latpred.calibration.devices import machine
from latpred.calibration.devices.base import Call, RealDevice
from latpred.calibration.devices.machine import GpuState
from latpred.errors import DeviceError, RuntimeRefusalError
from latpred.profile.document import DeviceInfo, Machine
from latpred.runtimes.base import out_of_memory
from latpred.runtimes.cuda_graphs import OF_CAPTURE, capture

HEAD_TRIES = 4
FIRST_HEAD_US = 200.0
ISSUE_US = 15.0  # a first guess at the host time of a call
LONGEST_HEAD_US = 2e5
_CUDA: Any = torch.cuda  # its events, streams and sleeping kernel carry no types
_BACKENDS: Any = torch.backends  # nor do these
OVERRIDE = "NVIDIA_TF32_OVERRIDE"  # a variable of the environment: 0 keeps NVIDIA's libraries from TF32
SLEEP_CYCLES = 2_000_000  # what the sleeping kernel's speed is measured with
SLEEPS = 50  # of that length: an idle GPU takes a moment until its clocks have risen
WARM_UPS, FORWARDS = 3, 3  # of a call that a profiler looks at
# Errors of one call, which leave the GPU as it was: what a library or a kernel does not do in a precision or a shape.
_HARMLESS = re.compile(r"CUBLAS_STATUS_(NOT_SUPPORTED|INVALID_VALUE|ARCH_MISMATCH)|invalid configuration argument")
_ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)")  # as "sm_90", "sm_90a" and "compute_120"
OTHER_BUILD = "Install one that has: https://pytorch.org/get-started/locally"


class CudaDevice(RealDevice):
    """One GPU, by its number as PyTorch counts."""

    asynchronous = True

    def __init__(self, index: int = 0) -> None:
        _require(index)
        self.name = f"cuda:{index}"
        self.torch_device = torch.device("cuda", index)
        with self.errors():
            self._properties: Any = torch.cuda.get_device_properties(index)
        self._heads_us: WeakKeyDictionary[Call, float] = WeakKeyDictionary()  # that outlasted the issue of each call
        self._replay: tuple[Call, int, Call] | None = None  # what was captured last, how often, and what replays it

    def machine(self) -> Machine:
        state = self.state()
        driver = state.driver if state else ""
        return machine.identity(accelerator=self._properties.name, driver=driver, threads=torch.get_num_threads())

    def state(self) -> GpuState | None:
        """Clocks, throttling and other processes at this moment; None without nvidia-ml-py."""
        p = self._properties
        return machine.gpu_state(f"{p.pci_domain_id:08X}:{p.pci_bus_id:02X}:{p.pci_device_id:02X}.0")

    def info(self) -> DeviceInfo:
        return info_of(self._properties)

    def precisions(self) -> tuple[str, ...]:
        """fp32, in which models come, and fp16; bf16 and tf32 from Ampere on."""
        return ("fp32", "fp16", "bf16", "tf32") if self._properties.major >= 8 else ("fp32", "fp16")

    def use_precision(self, precision: str) -> None:
        tf32, matmul, cudnn = precision == "tf32", _BACKENDS.cuda.matmul, _BACKENDS.cudnn
        if os.environ.get(OVERRIDE) == "0" and precision in ("fp32", "tf32") and "tf32" in self.precisions():
            raise DeviceError(f"{precision} would be measured without TF32, under a wrong name: unset {OVERRIDE}.")
        matmul.allow_tf32 = tf32  # PyTorch's older interface, which others still read
        matmul.fp32_precision = "tf32" if tf32 else "ieee"
        for part in (cudnn.conv, cudnn.rnn):
            if part.fp32_precision != "tf32":
                cudnn.fp32_precision = "tf32"  # which they follow, unless they say otherwise themselves
            if part.fp32_precision != "tf32":
                part.fp32_precision = "tf32"

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turns errors of CUDA into DeviceError and MemoryError, the latter with PyTorch's cache emptied."""
        try:
            yield
        except Exception as error:  # onnxruntime's own exceptions share no base class
            text = str(error)
            if out_of_memory(error):
                torch.cuda.empty_cache()
                raise MemoryError(*text.splitlines()[:1]) from error
            lost = isinstance(error, RuntimeError) and (
                "CUDA error" in text or isinstance(error, torch.AcceleratorError)
            )
            if lost and not (_HARMLESS.search(text) or OF_CAPTURE.search(text)):
                raise DeviceError(
                    f"{self.name} failed: {text.splitlines()[0]}. After such an error a process cannot use the GPU any "
                    "more: run the same command again."
                ) from error
            raise

    def prepare(self, cell: Cell) -> Call:
        if cell.kind != "clock":
            return super().prepare(cell)
        with self.errors():
            return self._clock_call(cell)

    def time_queued(self, call: Call, count: int) -> float:
        """Seconds between two events around `count` calls, all issued while the device was still busy before them."""
        with self.errors():
            head_us = max(FIRST_HEAD_US, ISSUE_US * count, self._heads_us.get(call, 0.0))
            for _ in repeat(None, HEAD_TRIES):
                seconds, kept_busy = self._behind_head(call, count, head_us)
                if kept_busy or head_us >= LONGEST_HEAD_US:
                    break
                head_us = min(4 * head_us, LONGEST_HEAD_US)
            self._heads_us[call] = head_us
            return seconds

    def time_replayed(self, call: Call, count: int) -> float | None:
        with self.errors():
            # Capturing takes a hundred times as long as replaying, and a replay is asked for many times over.
            if self._replay is None or self._replay[:2] != (call, count):
                try:
                    self._replay = (call, count, capture(call, self.torch_device, count)[0].replay)
                except RuntimeRefusalError:
                    self.synchronize()
                    return None
            return self.time_queued(self._replay[2], 1)

    def profiled_launches(self, call: Call) -> float:
        """Launches that torch.profiler sees of a call, averaged over a few."""
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with self.errors():
            for _ in range(WARM_UPS):
                call()
            self.synchronize()
            with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
                for _ in range(FORWARDS):
                    call()
                self.synchronize()
            return launching_ops(list(profiler.events() or ())) / FORWARDS

    def _behind_head(self, call: Call, count: int, head_us: float) -> tuple[float, bool]:
        """Seconds of the calls, and whether the device was still busy when the last was issued."""
        start, end = _CUDA.Event(enable_timing=True), _CUDA.Event(enable_timing=True)
        self.synchronize()
        self._sleep(head_us)
        start.record()
        for _ in repeat(None, count):
            call()
        end.record()
        kept_busy = not start.query()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3, kept_busy

    def _sleep(self, us: float) -> None:
        _CUDA._sleep(int(us * self._cycles_per_us))

    @cached_property
    def _cycles_per_us(self) -> float:
        """Cycles of the sleeping kernel in a microsecond; the clock it counts differs between GPUs."""
        times_ms = []
        for _ in range(SLEEPS):
            start, end = _CUDA.Event(enable_timing=True), _CUDA.Event(enable_timing=True)
            start.record()
            _CUDA._sleep(SLEEP_CYCLES)
            end.record()
            end.synchronize()
            times_ms.append(float(start.elapsed_time(end)))
        return SLEEP_CYCLES / (min(times_ms) * 1e3)

    def _clock_call(self, cell: Cell) -> Call:
        """The smallest kernel ("tiny"), an event without one ("mark"), or a sleep of given length ("busy")."""
        if cell.name == "tiny":
            one = torch.zeros(1, device=self.torch_device)

            def tiny() -> None:
                one.add_(1.0)

            return tiny
        if cell.name == "mark":
            record: Call = _CUDA.Event().record
            return record
        us = float(cell.dims["us"])
        self._sleep(1.0)  # measures its speed before anything is timed
        return lambda: self._sleep(us)


def info_of(properties: Any) -> DeviceInfo:
    """A GPU by what PyTorch says of its properties."""
    return DeviceInfo(
        name_of(properties.name),
        "cuda",
        asynchronous=True,
        memory_bytes=properties.total_memory,
        multiprocessors=properties.multi_processor_count,
        queue=0,
        cache_bytes=int(getattr(properties, "L2_cache_size", 0)),
    )


def name_of(accelerator: str) -> str:
    """What profiles call a GPU that the driver calls so."""
    return re.sub(r"[^a-z0-9]+", "-", accelerator.lower()).strip("-")


def unsupported(index: int) -> str:
    """That PyTorch was built for other architectures than a GPU's, part of a sentence; "" where it was not.

    What was compiled for an architecture runs on later ones of its generation, intermediate code on all later ones.
    """
    here, built = torch.cuda.get_device_capability(index), torch.cuda.get_arch_list()
    codes = [(match[1], (int(match[2]), int(match[3]))) for match in map(_ARCHITECTURE.match, built) if match]
    if not codes or any(code <= here and (kind == "compute" or code[0] == here[0]) for kind, code in codes):
        return ""
    name = f"{torch.cuda.get_device_name(index)}, whose compute capability is {here[0]}.{here[1]}"
    return f"this PyTorch has no kernels for the {name}, only for {', '.join(built)}"


def _require(index: int) -> None:
    if not torch.cuda.is_available():
        build = "this PyTorch was built without CUDA" if torch.version.cuda is None else "the driver shows none"
        raise DeviceError(
            f"no CUDA device here: {build}. Use device='cpu', or the name of a profile measured elsewhere "
            "(latpred profiles list)."
        )
    count = torch.cuda.device_count()
    if index >= count:
        raise DeviceError(f"there is no cuda:{index}: this machine has cuda:0 to cuda:{count - 1}.")
    if said := unsupported(index):
        raise DeviceError(f"{said}. {OTHER_BUILD}")


def launching_ops(events: Sequence[Any]) -> int:
    """How many ops among a profiler's events launch a kernel or a copy within the device, which is what is traced.

    A library may take several kernels for one op. Copies from and to the host do not count.
    """
    ops = (event for event in events if event.device_type.name == "CPU")
    return sum(any(_is_kernel(kernel.name) for kernel in op.kernels) for op in ops)


def _is_kernel(name: str) -> bool:
    return not name.startswith(("Memset", "Memcpy")) or "DtoD" in name
