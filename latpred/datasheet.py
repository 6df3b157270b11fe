"""Profiles from datasheets: a stated guess for a GPU that nobody measured.

Peaks, bandwidth, sizes and multiprocessors are the datasheet's. What part of them PyTorch's kernels reach, what
launches cost and what a server's processor takes to dispatch an op are typical values, the same for every GPU: five of
them were set by hand on 6,006 published eager latencies of five GPUs (host costs as a whole, and the shares of
convolutions), where predictions were then off by 27 % in the median, and the spread holds nine in ten. Nothing here is
a measurement of the GPU asked for.
"""

from __future__ import annotations

from typing import NamedTuple

from latpred.ops.families import DIMS
from latpred.profile import (
    SCHEMA_VERSION,
    Acceptance,
    DeviceInfo,
    DeviceProfile,
    DispatchFit,
    KernelFit,
    Machine,
)
from latpred.specs import GIB, Spec

PROVENANCE = "datasheet"
CREATED = "2026-01-01T00:00:00+00:00"  # of the typical values; a datasheet profile has no day of its own
SPREAD = 0.48  # standard deviation of the log of a latency: a factor of 2.2 either way holds nine in ten
CAVEAT = "nothing was measured: datasheet peaks with typical efficiencies, and dispatch of a typical server CPU"

LAUNCH_US, GAP_US, SYNC_US = 5.0, 1.0, 10.0
COPY_BYTES_PER_US = 12_000.0  # PCIe 3.0 x16, pinned
QUEUE = 1024
BANDWIDTH_SHARE = 0.75  # of the datasheet's, by kernels that only move bytes
FLOOR_US = 2.0  # of a kernel that does next to nothing


class Products(NamedTuple):
    """What part of its peak a family of products reaches at full use, in fp32 and on tensor cores."""

    fp32: float
    tensor: float


# Convolutions run in NCHW: on tensor cores every other kernel is a change of layout.
PRODUCTS = {
    "gemm": Products(0.80, 0.60),
    "bmm": Products(0.60, 0.40),
    "attention": Products(0.60, 0.40),
    "rnn": Products(0.40, 0.20),
    "conv": Products(0.75, 0.40),
    "conv_transpose": Products(0.40, 0.20),
    "conv_grouped": Products(0.20, 0.05),
    "conv_depthwise": Products(0.10, 0.02),
}
SMALL_PRODUCTS = ("conv_grouped", "conv_depthwise")
# Sizes at which a product reaches half its throughput: in each direction, in rounds of tiles, in results per
# multiprocessor.
HALF_SIZES = {"m": 16.0, "n": 16.0, "k": 32.0, "waves": 0.05}
OUTPUTS_PER_MULTIPROCESSOR = 200.0

# Microseconds of a server processor for one op that launches a kernel, by class; views launch nothing.
COSTS_US = {
    "": 13.0,
    "elementwise": 10.5,
    "norm": 19.0,
    "gemm": 19.0,
    "bmm": 21.0,
    "conv": 38.5,
    "attention": 38.5,
    "softmax": 13.5,
    "reduction": 19.0,
    "cat": 19.0,
    "copy": 14.5,
    "index": 32.0,
    "embedding": 16.0,
    "pooling": 19.0,
    "rnn": 320.0,
    "fft": 32.0,
    "sort": 32.0,
    "factory": 9.5,
    "view": 5.5,
    "free": 2.5,
    "sync": 8.0,
    "python": 0.0,
}
MODULE_CALL_US, PYTHON_CALL_US, FIXED_US = 5.0, 0.15, 25.0


def profile_of(spec: Spec) -> DeviceProfile:
    """A profile of a GPU in a typical server, from its datasheet.

    Examples
    --------
    >>> from latpred.specs import spec
    >>> profile = profile_of(spec("a100"))
    >>> profile.provenance, sorted(profile.kernels)
    ('datasheet', ['bf16', 'fp16', 'fp32', 'tf32'])
    """
    return DeviceProfile(
        name=spec.name,
        schema=SCHEMA_VERSION,
        created=CREATED,
        provenance=PROVENANCE,
        machine=_machine(spec),
        device=_device(spec),
        protocol={"source": spec.source},
        runtimes={"eager": DispatchFit(dict(COSTS_US), MODULE_CALL_US, PYTHON_CALL_US, FIXED_US, spread=SPREAD)},
        kernels={
            precision: {family: kernel_fit(spec, precision, family) for family in DIMS} for precision in spec.precisions
        },
        samples=(),
        acceptance=Acceptance(False, {"measured": "no: from a datasheet"}, (f"Measure it: {ADVICE}",)),
        seconds=0.0,
    )


ADVICE = "latpred calibrate on a machine that has one"


def kernel_fit(spec: Spec, precision: str, family: str) -> KernelFit:
    """A plain roofline of one family in one precision."""
    share = PRODUCTS.get(family)
    width = spec.bandwidth_bytes_per_us * BANDWIDTH_SHARE
    return KernelFit.plain(
        family=family,
        floor_us=FLOOR_US,
        macs_per_us=_rate(spec, precision, share) if share else 0.0,
        weight_bytes_per_us=width,
        activation_bytes_per_us=width,
        saturation=_saturation(spec, family) if share else {},
        multiprocessors=spec.multiprocessors,
    )


def _saturation(spec: Spec, family: str) -> dict[str, float]:
    """Sizes of half use; products of a few channels each are many small ones, and only fill the device together."""
    if family in SMALL_PRODUCTS:
        return {"waves": HALF_SIZES["waves"]}
    return HALF_SIZES | {"outputs": OUTPUTS_PER_MULTIPROCESSOR * spec.multiprocessors}


def _rate(spec: Spec, precision: str, share: Products) -> float:
    """Multiply-adds per microsecond; never less than fp32 would reach, which is what a library then runs."""
    plain = spec.peak_macs_per_us("fp32") * share.fp32
    if precision == "fp32" or precision not in spec.macs_per_s:
        return plain
    return max(plain, spec.peak_macs_per_us(precision) * share.tensor)


def _machine(spec: Spec) -> Machine:
    return Machine(
        hostname_hash="",
        cpu="a typical server CPU",
        cores=0,
        memory_bytes=0,
        system="",
        accelerator=spec.title,
        driver="",
        stack={},
        threads=0,
    )


def _device(spec: Spec) -> DeviceInfo:
    return DeviceInfo(
        name=spec.name,
        kind="cuda",
        asynchronous=True,
        memory_bytes=min(spec.memory_bytes, 1024 * GIB),
        multiprocessors=spec.multiprocessors,
        launch_us=LAUNCH_US,
        gap_us=GAP_US,
        sync_us=SYNC_US,
        queue=QUEUE,
        bandwidth_bytes_per_us=spec.bandwidth_bytes_per_us * BANDWIDTH_SHARE,
        copy_bytes_per_us=COPY_BYTES_PER_US,
        cache_bytes=spec.l2_bytes,
    )
