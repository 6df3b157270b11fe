"""What is believed of costs before a table is read: means and widths of the logarithms of the law's parameters.

Means are round figures of what kernels and dispatch take on any GPU of the last ten years; how strongly they hold was
chosen by leaving out models (see `latpred.calibration.published.leave_out`). Nothing here is a result of a fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log
from typing import NamedTuple

PRODUCTS = frozenset({"gemm", "bmm", "attention", "rnn", "conv_depthwise"})
CONVOLUTIONS = "convolutions"
MEMORY = "memory-bound"


class Prior(NamedTuple):
    """Median of a parameter, and the standard deviation of its logarithm."""

    median: float
    width: float

    @property
    def mean(self) -> float:
        """Of the logarithm."""
        return log(self.median)


def group_of(family: str) -> str:
    """The group whose beliefs a family has: its own, or that of its like.

    >>> group_of("conv.3x3"), group_of("softmax"), group_of("gemm")
    ('convolutions', 'memory-bound', 'gemm')
    """
    if family in PRODUCTS:
        return family
    return CONVOLUTIONS if family.startswith("conv") else MEMORY


def multiplies(family: str) -> bool:
    """Whether kernels of a family multiply matrices, or amount to that."""
    return group_of(family) != MEMORY


# Of the slots of `profile.datasheet`: compute 2 is half the peak, activations 1.25 are four fifths of the bandwidth.
KERNEL: Mapping[str, Prior] = {
    "floor": Prior(4.5, 0.15),  # the gap to the next kernel included
    "compute": Prior(2.0, 0.6),
    "weights": Prior(1.25, 0.4),
    "activations": Prior(1.18, 0.15),
    "waves": Prior(0.3, 0.2),
    "outputs": Prior(16.0, 1.0),
    "k": Prior(32.0, 0.8),
    "n": Prior(4.0, 0.3),
}
# Convolutions move their operands more than once: layouts are changed and windows unrolled.
KERNEL_OF_GROUP: Mapping[tuple[str, str], Prior] = {(CONVOLUTIONS, "activations"): Prior(1.5, 0.5)}

# Microseconds of host time on a host of factor 1. A table sees the sum of a forward pass alone, so what one class takes
# over another holds firmly: as on CPUs where each was measured, and as published traces of dispatch have it. How much
# Python stood between the calls in software of another time is known less well.
HOST: Mapping[str, float] = {
    "conv": 35.0,
    "conv_grouped": 45.0,
    "conv_depthwise": 20.0,
    "gemm": 18.0,
    "batch_norm": 20.0,
    "norm": 15.0,
    "elementwise": 8.0,
    "softmax": 11.0,
    "pooling": 14.0,
    "cat": 14.0,
    "copy": 10.0,
    "index": 14.0,
    "view": 3.0,
    "factory": 5.0,
    "free": 3.0,
    "sync": 20.0,
    "reduction": 12.0,
    "module": 5.0,
    "python": 0.5,
    "fixed": 60.0,
    "fused": 25.0,
}
HOST_WIDTHS: Mapping[str, float] = {"module": 0.3, "python": 0.7, "fixed": 0.5, "fused": 0.25}
OTHER_HOST = 9.0
# Logarithms of what other runtimes are believed to take of eager's host costs: for ops, and for calls of Python.
RUNTIME_OPS: Mapping[str, float] = {"torchscript": -0.4, "tensorrt": -2.0}
RUNTIME_CALLS = -2.0
RUNTIME_CALLS_WIDTH = 0.5
ENGINE_WIDTH = 0.3  # of kernels in engines, which choose their own
LIBRARY = ("conv", "conv_grouped", "conv_depthwise", "batch_norm")  # libraries choose an algorithm in each call


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """How strongly beliefs hold, as standard deviations of logarithms, and how errors count.

    Attributes
    ----------
    mode, gpu, gpu_mode, gpu_family : float
        What a number format changes; what a GPU changes in all families, in one format, and in one family.
    architecture, architecture_mode, architecture_family : float
        The same for what GPUs of one architecture share.
    run, run_group : float
        Host factor of a run, and what differs in it between transformers and convolutional networks. Hosts of one GPU
        are often alike, so that a narrow belief in each by itself would blame the GPU for slow ones.
    host, host_half, library_half : float
        Cost of a host class without a width of its own in `host_widths`, and what half precision changes in it (and in
        library calls).
    runtime_host, runtime_class : float
        What another runtime than eager changes in all host costs, and in those of one class.
    runtime_product, runtime_kernel : float
        What it changes in products, and in all other kernels.
    knee, knee_width : float
        Exponent that joins the two clocks.
    noise : float
        Log error that one row is believed to have; rows of a model err together, so it exceeds the repeat noise.
    soft : float
        Log error from which on a row pulls less than quadratically.
    balance : float
        0 counts every row alike, 1 every model.
    """

    mode: float = 0.3
    gpu: float = 0.2
    gpu_mode: float = 0.15
    gpu_family: float = 0.15
    architecture: float = 0.3
    architecture_mode: float = 0.3
    architecture_family: float = 0.12
    run: float = 1.0
    run_group: float = 0.12
    host: float = 0.15
    host_half: float = 0.1
    library_half: float = 0.35
    runtime_host: float = 0.5
    runtime_class: float = 0.08
    runtime_product: float = 0.005
    runtime_kernel: float = 0.05
    knee: float = 6.0
    knee_width: float = 0.3
    noise: float = 0.12
    soft: float = 0.1
    balance: float = 0.5
    hosts: Mapping[str, float] = field(default_factory=lambda: HOST)
    host_widths: Mapping[str, float] = field(default_factory=lambda: HOST_WIDTHS)
    kernel: Mapping[str, Prior] = field(default_factory=lambda: KERNEL)
