"""A small device profile written by hand, and variations of it."""

from __future__ import annotations

import platform
from importlib import metadata

import msgspec

from latpred import host
from latpred.profile.document import (
    SCHEMA_VERSION,
    Acceptance,
    DeviceInfo,
    DeviceProfile,
    DispatchFit,
    KernelFit,
    Machine,
    Sample,
)

FAMILIES = (
    *("gemm", "bmm", "conv", "conv_grouped", "conv_depthwise", "attention", "norm", "batch_norm", "softmax"),
    *("reduction", "elementwise", "copy", "cat", "index", "embedding", "pooling", "factory", "other"),
)


def kernel(family: str) -> KernelFit:
    """A roofline of 1 us, 50 GMAC/s, 10 and 20 GB/s, with nothing learned on top."""
    return KernelFit(
        family=family,
        floor_us=1.0,
        macs_per_us=50_000.0,
        weight_bytes_per_us=10_000.0,
        activation_bytes_per_us=20_000.0,
        saturation={},
        multiprocessors=0,
        features=(),
        length_scales=(),
        amplitude=0.0,
        noise=0.01,
        points=(),
        targets=(),
        noise_factors=(),
        error=0.04,
        spread=0.06,
    )


TORCH = metadata.version("torch")  # read once: some tests give up the right to read the environment


def machine(**changes: object) -> Machine:
    """The machine at hand, with changes."""
    base = Machine(
        hostname_hash=host.hostname_hash(),
        cpu=host.cpu_name(),
        cores=host.cores(),
        memory_bytes=host.memory_bytes(),
        system=platform.system(),
        accelerator="",
        driver="",
        stack={"python": platform.python_version(), "torch": TORCH},
        threads=1,
        machine_id=host.machine_id(),
        cpu_model=host.cpu_model(),
    )
    return msgspec.structs.replace(base, **changes)


def profile(name: str = "cpu", **changes: object) -> DeviceProfile:
    """A CPU profile of this machine: 10 us per op, 50 GMAC/s, with changes."""
    base = DeviceProfile(
        name=name,
        schema=SCHEMA_VERSION,
        created="2026-01-02T03:04:05+00:00",
        provenance="measured",
        machine=machine(),
        device=DeviceInfo(name="cpu", kind="cpu", asynchronous=False, memory_bytes=8 * 2**30),
        protocol={"warmup": "3"},
        runtimes={
            "eager": DispatchFit(
                costs_us={"": 10.0, "view": 2.0}, module_call_us=3.0, python_call_us=0.1, fixed_us=5.0, spread=0.05
            )
        },
        kernels={"fp32": {family: kernel(family) for family in FAMILIES}},
        samples=(Sample("dispatch/eager/fp32/view/", 2.0, 0.1, 30),),
        acceptance=Acceptance(passed=True, checks={"cells": "1 of 1"}, advice=()),
        seconds=42.0,
    )
    return msgspec.structs.replace(base, **changes)
