"""Profiles and graphs with known numbers, for tests that need neither a model nor a device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from latpred import host
from latpred.graph.graph import Affine, ModelGraph, Op
from latpred.profile.document import (
    SCHEMA_VERSION,
    Acceptance,
    DeviceInfo,
    DeviceProfile,
    DispatchFit,
    KernelFit,
    Machine,
)

if TYPE_CHECKING:
    from latpred.calibration.devices.simulated_costs import TrueCosts


def machine(**changes: object) -> Machine:
    """A machine that is not this one."""
    values = {
        "hostname_hash": "0" * 16,
        "cpu": "Example 9000",
        "cores": 8,
        "memory_bytes": 2**34,
        "system": "Linux",
        "accelerator": "",
        "driver": "",
        "stack": {},
        "threads": 8,
    }
    return Machine(**(values | changes))  # type: ignore[arg-type]


def machine_here(**changes: object) -> Machine:
    """The hardware at hand."""
    own = {"cpu": host.cpu_name(), "cores": host.cores(), "memory_bytes": host.memory_bytes(), "threads": 1}
    return machine(**(own | {"machine_id": host.machine_id(), "cpu_model": host.cpu_model()} | changes))


def device(**changes: object) -> DeviceInfo:
    """An asynchronous device with round constants."""
    values = {
        "name": "example",
        "kind": "simulated",
        "asynchronous": True,
        "memory_bytes": 2**33,
        "launch_us": 4.0,
        "gap_us": 1.0,
        "sync_us": 10.0,
        "queue": 1024,
    }
    return DeviceInfo(**(values | changes))  # type: ignore[arg-type]


def kernel_fit(family: str = "gemm", **changes: object) -> KernelFit:
    """A roofline without residual: 2 us + work at 1e6 MACs/us and 1e3 bytes/us."""
    rates = {"macs_per_us": 1e6, "weight_bytes_per_us": 1e3, "activation_bytes_per_us": 1e3}
    values = {"family": family, "floor_us": 2.0, **rates, **changes}
    return KernelFit(**values)  # type: ignore[arg-type]


def kernel_fits(*families: str, **changes: object) -> tuple[KernelFit, ...]:
    """One such roofline for each of some families."""
    return tuple(kernel_fit(family, **changes) for family in families)


def dispatch(**changes: object) -> DispatchFit:
    """Host costs in round microseconds."""
    values = {
        "costs_us": {"": 7.0, "gemm": 5.0, "view": 2.0, "view.transpose": 3.0},
        "module_call_us": 1.0,
        "python_call_us": 0.5,
        "fixed_us": 20.0,
    }
    return DispatchFit(**(values | changes))  # type: ignore[arg-type]


def profile(
    info: DeviceInfo | None = None, fits: Iterable[KernelFit] = (), runtimes: dict[str, DispatchFit] | None = None
) -> DeviceProfile:
    """A profile of `device()` with plain fits for matrix products and elementwise ops."""
    fits = tuple(fits) or (kernel_fit("gemm"), kernel_fit("elementwise", macs_per_us=0.0))
    return DeviceProfile(
        name="example",
        schema=SCHEMA_VERSION,
        created="2026-01-02T03:04:05+00:00",
        provenance="measured",
        machine=machine(),
        device=info or device(),
        protocol={},
        runtimes=runtimes or {"eager": dispatch()},
        kernels={"fp32": {fit.family: fit for fit in fits}},
        samples=(),
        acceptance=Acceptance(passed=True, checks={}, advice=()),
        seconds=1.0,
    )


def perfect(costs: TrueCosts, **changes: object) -> DeviceProfile:
    """What a perfect calibration of the simulated device would find of eager and of some kernels of its own."""
    fits = [
        kernel_fit(
            name,
            floor_us=costs.kernel(name).floor_us,
            macs_per_us=0.0,
            weight_bytes_per_us=costs.weight_bytes_per_us,
            activation_bytes_per_us=costs.activation_bytes_per_us * costs.kernel(name).memory,
        )
        for name in ("elementwise", "norm", "copy", "softmax")
    ]
    eager = DispatchFit(dict(costs.dispatch_us), costs.module_call_us, costs.python_call_us, costs.forward_us)
    info = device(launch_us=costs.launch_us, gap_us=costs.gap_us, sync_us=costs.sync_us, **changes)
    return profile(info, fits, {"eager": eager})


def linear(rows: int = 128, width: int = 768, **changes: object) -> Op:
    """A square linear layer on `rows` rows per sample."""
    values = {
        "name": "aten::linear",
        "module": "layer",
        "host_class": "gemm.linear",
        "family": "gemm",
        "dtype": "float32",
        "dims": {"m": Affine(0, rows), "n": Affine(width), "k": Affine(width)},
        "macs": Affine(0, rows * width * width),
        "weight_bytes": Affine(4 * width * width),
        "read_bytes": Affine(0, 4 * rows * width),
        "write_bytes": Affine(0, 4 * rows * width),
        "live_bytes": Affine(0, 8 * rows * width),
        "launches": 1,
    }
    return Op(**(values | changes))  # type: ignore[arg-type]


def add(numel: int = 1000, **changes: object) -> Op:
    """An elementwise sum of `numel` elements per sample."""
    values = {
        "name": "aten::add",
        "module": "",
        "host_class": "elementwise.add",
        "family": "elementwise.add",
        "dtype": "float32",
        "dims": {"numel": Affine(0, numel), "operands": Affine(2)},
        "read_bytes": Affine(0, 8 * numel),
        "write_bytes": Affine(0, 4 * numel),
        "launches": 1,
    }
    return Op(**(values | changes))  # type: ignore[arg-type]


def view(name: str = "transpose", **changes: object) -> Op:
    """An op that launches nothing."""
    values = {
        "name": f"aten::{name}",
        "module": "",
        "host_class": f"view.{name}",
        "family": "",
        "dtype": "float32",
        "dims": {},
    }
    return Op(**(values | changes))  # type: ignore[arg-type]


def bare(host_class: str, family: str = "", numel: int = 0, **changes: object) -> Op:
    """An op of a class and a family that reads `numel` numbers per sample and writes as many."""
    values = {
        "name": f"aten::{host_class}",
        "module": "",
        "host_class": host_class,
        "family": family,
        "dtype": "float32",
        "dims": {"numel": Affine(0, numel), "rows": Affine(0, numel), "cols": Affine(1)},
        "read_bytes": Affine(0, 4 * numel),
        "write_bytes": Affine(0, 4 * numel),
        "launches": int(bool(family)),
    }
    return Op(**(values | changes))  # type: ignore[arg-type]


def graph(*ops: Op, **changes: object) -> ModelGraph:
    """A graph of these ops."""
    values = {
        "model": "example-net",
        "input_kind": "seq",
        "input_size": 128,
        "precision": "fp32",
        "memory_format": "contiguous",
        "parameters": 1000,
        "parameter_bytes": 4000,
        "input_bytes": Affine(0, 1024),
        "ops": ops,
    }
    return ModelGraph(**(values | changes))  # type: ignore[arg-type]
