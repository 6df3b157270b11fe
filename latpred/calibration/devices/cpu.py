"""The host's own processor as a device: synchronous, timed by the host's clock.

What a cell is made of is `workloads.single_ops`' business, how a runtime runs a model the runtime's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import repeat

import torch

from latpred import host
from latpred.calibration.devices import machine
from latpred.calibration.devices.base import Call, RealDevice
from latpred.prediction.kernel_times import LARGE_BLOCK
from latpred.profile.document import DeviceInfo, Machine
from latpred.runtimes.base import out_of_memory


class CpuDevice(RealDevice):
    """The processor that PyTorch's CPU kernels run on: an op returns when it is done."""

    name = "cpu"
    asynchronous = False
    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        # Glibc's malloc gives back what is free beyond twice the largest block below `LARGE_BLOCK` that was ever freed.
        # What it has seen must not depend on what was timed before.
        torch.empty(LARGE_BLOCK - 65536, dtype=torch.uint8)

    def machine(self) -> Machine:
        return machine.identity(threads=torch.get_num_threads())

    def info(self) -> DeviceInfo:
        return DeviceInfo("cpu", "cpu", asynchronous=False, memory_bytes=host.usable_memory_bytes(), queue=0)

    def precisions(self) -> tuple[str, ...]:
        """fp32, and bf16 where the processor has AMX or AVX-512 BF16: emulated it is slower than fp32."""
        checks = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
        return ("fp32", "bf16") if any(getattr(torch.cpu, name, bool)() for name in checks) else ("fp32",)

    def use_precision(self, precision: str) -> None:
        """Nothing to set: float32 is multiplied as float32."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turns a failed allocation, which PyTorch and onnxruntime report in their own ways, into MemoryError."""
        try:
            yield
        except Exception as error:  # onnxruntime's own exceptions share no base class
            if out_of_memory(error):
                raise MemoryError(*str(error).splitlines()[:1]) from error
            raise

    def time_queued(self, call: Call, count: int) -> float:
        start = time.perf_counter()
        for _ in repeat(None, count):
            call()
        return time.perf_counter() - start

    def time_replayed(self, call: Call, count: int) -> float | None:
        """None: there are no graphs to replay."""
        return None
