"""What a datasheet promises of a kernel: the units that its times are counted in, and in which format it computes.

Only the datasheet is asked here; what kernels reach of its promises is `latpred.datasheet`'s to know, or a fit's to
find.
"""

from __future__ import annotations

from math import log, sqrt

from latpred.specs import Spec

# What a kernel's time is made of. floor: microseconds. compute, weights, activations: times per multiply-add or byte
# over what the datasheet promises. waves, outputs, k, n: sizes of half use, results per multiprocessor.
SLOTS = ("floor", "compute", "weights", "activations", "waves", "outputs", "k", "n")
PRODUCT_ONLY = ("compute", "weights", "waves", "outputs", "k", "n")
# Multiply-adds of one multiprocessor's tensor cores in a cycle, at the full rate of most architectures.
TENSOR_MACS = {"fp16": 512.0, "tf32": 256.0}


def mode_of(gpu: Spec, precision: str, family: str) -> str:
    """What a product's units compute in: "fp32", "tf32", "fp16" (tensor cores) or "half" (fp32 units).

    PyTorch lets convolutions in fp32 use TF32 where there is any, and other products not.

    >>> from latpred.specs import spec
    >>> [mode_of(spec(name), "fp32", "conv") for name in ("a100", "v100")]
    ['tf32', 'fp32']
    """
    if precision in ("fp16", "bf16"):
        return "fp16" if gpu.tensor_cores else "half"
    dense = family.startswith("conv") and family != "conv_depthwise"
    return "tf32" if "tf32" in gpu.macs_per_s and (dense or precision == "tf32") else "fp32"


def log_promise(gpu: Spec, mode: str, slot: str) -> float:
    """Logarithm of what the datasheet says of a slot: microseconds per multiply-add or byte, or multiprocessors."""
    if slot == "compute":
        return -log(macs_per_us(gpu, mode))
    if slot in ("weights", "activations"):
        return -log(gpu.bandwidth_bytes_per_us)
    return log(gpu.multiprocessors) if slot == "outputs" else 0.0


def macs_per_us(gpu: Spec, mode: str) -> float:
    """What units could compute, if nothing held them up.

    Tensor cores wait for operands, which reach them at the pace of multiprocessors and clock: a card whose tensor cores
    run at half rate is not half as fast. The middle of both paces, in logarithms, is right for GPUs that were left out.
    Tensor cores that are faster than that pace are fed faster too.
    """
    peak = gpu.peak_macs_per_us("fp32" if mode == "half" else mode)
    fed = TENSOR_MACS.get(mode, 0.0) * gpu.multiprocessors * gpu.tensor_clock_hz / 1e6
    return sqrt(peak * max(peak, fed))
