"""A small device profile written by hand, and variations of it."""

from __future__ import annotations

import platform
from importlib import metadata

import factories
import msgspec

from latpred import host
from latpred.profile.document import Acceptance, DeviceInfo, DeviceProfile, DispatchFit, KernelFit, Machine, Sample

FAMILIES = (
    *("gemm", "bmm", "conv", "conv_grouped", "conv_depthwise", "attention", "norm", "batch_norm", "softmax"),
    *("reduction", "elementwise", "copy", "cat", "index", "embedding", "pooling", "factory", "other"),
)
TORCH = metadata.version("torch")  # read once: some tests give up the right to read the environment


def kernel(family: str) -> KernelFit:
    """A roofline of 1 us, 50 GMAC/s, 10 and 20 GB/s, with nothing learned on top."""
    rates = {"macs_per_us": 50_000.0, "weight_bytes_per_us": 10_000.0, "activation_bytes_per_us": 20_000.0}
    return factories.kernel_fit(family, floor_us=1.0, **rates, noise=0.01, error=0.04, spread=0.06)


def machine(**changes: object) -> Machine:
    """The machine at hand, with changes."""
    stack = {"python": platform.python_version(), "torch": TORCH}
    own = {"hostname_hash": host.hostname_hash(), "system": platform.system(), "stack": stack}
    return factories.machine_here(**(own | changes))


def profile(name: str = "cpu", **changes: object) -> DeviceProfile:
    """A CPU profile of this machine: 10 us per op, 50 GMAC/s, with changes."""
    info = DeviceInfo(name="cpu", kind="cpu", asynchronous=False, memory_bytes=8 * 2**30)
    eager = DispatchFit({"": 10.0, "view": 2.0}, module_call_us=3.0, python_call_us=0.1, fixed_us=5.0, spread=0.05)
    own = {
        "name": name,
        "machine": machine(),
        "protocol": {"warmup": "3"},
        "samples": (Sample("dispatch/eager/fp32/view/", 2.0, 0.1, 30),),
        "acceptance": Acceptance(passed=True, checks={"cells": "1 of 1"}, advice=()),
        "seconds": 42.0,
    }
    base = factories.profile(info, map(kernel, FAMILIES), {"eager": eager})
    return msgspec.structs.replace(base, **(own | changes))
