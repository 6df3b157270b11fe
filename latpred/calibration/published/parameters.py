"""Parameters of the latency model with their priors, and which of them add up to each local number of a block.

Every local number (the floor of one family on one GPU in one format, the cost of one host class in one runtime) is a
sum of a few parameters, all logarithms: what is shared, and deviations from it. Medians of priors are round figures of
what kernels and dispatch take on any GPU of the last ten years. How narrow priors are was chosen by leaving out models.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import log, sqrt
from typing import NamedTuple

import numpy as np

from latpred.calibration.published.row_counts import (
    ALONE,
    CAPTURED,
    CONVOLUTIONS,
    EAGER,
    ENGINES,
    HALF,
    MODULE,
    PYTHON,
    group_of,
    multiplies,
)
from latpred.graph.features import UNEVEN, Floats
from latpred.graph.graph import CONTIGUOUS
from latpred.ops.families import takes_images
from latpred.profile import hosts
from latpred.profile.datasheet import PRODUCT_ONLY, log_promise, mode_of
from latpred.profile.gpus import Spec

Name = tuple[str, ...]
DEVIATING = ("floor", "compute", "activations")  # slots in which GPUs, formats and runtimes may differ


class Prior(NamedTuple):
    """Median of a parameter, and the standard deviation of its logarithm."""

    median: float
    width: float


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

# Microseconds of host time on a host of factor 1. A table has the sum of a forward pass alone, so what one class takes
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
OTHER_HOST = 9.0
HOST_WIDTH = 0.15
HOST_WIDTHS: Mapping[str, float] = {"module": 0.3, "python": 0.7, "fixed": 0.5, "fused": 0.25}
# Exponent that joins the two clocks, by protocol: calls that are waited for one by one overlap less.
CLOCK_EXPONENT: Mapping[str, Prior] = {"pipelined": Prior(6.0, 0.3), "single": Prior(4.0, 0.3)}

# Hyperparameters: prior widths of deviations, as standard deviations of logarithms.
FORMAT = 0.3  # what a number format changes
LAYOUT = 0.3  # what channels_last changes
RELEASE = 0.1  # what an older PyTorch and its libraries change in a group of families, and in one family
LEVELS = {  # what a design of multiprocessors and a GPU change: in all families, and in one family
    "design": (0.3, 0.12),
    "gpu": (0.2, 0.15),
}
# The same of multiply-adds, in all number formats and in one: what tensor cores reach says little of other units.
RATES = {"design": (0.1, 0.4), "gpu": (0.1, 0.25)}
# Twice as many fp32 units in a multiprocessor get no more operands: of their peak, products reach less.
LANES = Prior(sqrt(2.0), 0.15)
MANY_LANES = ("6.1", "8.6", "9.0", "10.0", "12.0")  # designs that have 128 instead of 64
# What floors are in a CUDA graph, where no gap to the next kernel is part of them, and products without a network.
ALONE_WIDTHS = {"floor": 0.7, "compute": 0.3}
# What a board's power takes from clocks that its datasheet promises: multiply-adds most of all, memory little.
POWER_LIMITED = {"compute": 0.5, "floor": 0.3, "activations": 0.3}
# Runs of the published tables lie 0.3 apart. A wider prior lets a run with few rows blame its host for its GPU.
RUN = 0.4
MIDDLE_HOST = 1.0  # how far the middle of the hosts may lie from the round figures of `HOST`: as far as any of them
NAMED_HOST, NAMED_RUN = 0.15, 0.15  # what is not known of a named host, and what differs between its runs
RUN_GROUP = 0.12  # what differs in a run's host factor between transformers and convolutional networks
HOST_HALF, LIBRARY_HALF = 0.1, 0.35  # what half precision changes in a host class, and in library calls
LIBRARY = ("conv", "conv_grouped", "conv_depthwise", "batch_norm")  # libraries choose an algorithm in each call
# Medians, as logarithms, of what other runtimes take of eager's host costs: for ops, and for calls of Python.
RUNTIME_OPS: Mapping[str, float] = {"torchscript": -0.4, "tensorrt": -2.0}
RUNTIME_CALLS, RUNTIME_CALLS_WIDTH = -2.0, 0.5
RUNTIME_HOST, RUNTIME_CLASS = 0.5, 0.08  # what a runtime changes in all host costs, and in those of one class
RUNTIME_PRODUCT, RUNTIME_KERNEL = 0.005, 0.05  # what it changes in products, and in all other kernels
ENGINE_KERNEL = 0.3  # the same in engines, which choose their own kernels


class Parameters:
    """Parameters by name, each with a prior of its logarithm.

    Asking for a local number adds those that it needs, and gives their positions.
    """

    def __init__(self) -> None:
        self.names: dict[Name, int] = {}
        self.priors: list[tuple[float, float]] = []

    @property
    def means(self) -> Floats:
        """Prior mean of each."""
        return np.array([mean for mean, _ in self.priors])

    @property
    def widths(self) -> Floats:
        """Prior standard deviation of each."""
        return np.array([width for _, width in self.priors])

    def kernel(
        self, family: str, slot: str, gpu: Spec, precision: str, runtime: str, memory_format: str, release: str = ""
    ) -> tuple[float, list[int]]:
        """Constant and parameters of one slot of one family on one GPU, in a release of PyTorch before today's."""
        if slot in PRODUCT_ONLY and not multiplies(family):
            return 0.0, []
        if memory_format == CONTIGUOUS:
            family = family.removesuffix(f".{UNEVEN}")  # groups of any width have the same kernels there
        mode = mode_of(gpu, precision, family)
        prior = KERNEL_OF_GROUP.get((group_of(family), slot), KERNEL[slot])
        # Weights stream from memory whatever multiplies with them.
        terms = [self._add(("kernel", "all" if slot == "weights" else family, slot), prior.width, log(prior.median))]
        if slot in DEVIATING:
            terms += self._of_format(family, slot, mode, precision, gpu)
            terms += self._of_gpu(family, slot, mode, gpu)
            if memory_format != CONTIGUOUS and slot != "floor" and takes_images(family):
                terms.append(self._add((memory_format, group_of(family), slot), LAYOUT))
                terms.append(self._add((memory_format, group_of(family), slot, family), LAYOUT / 2))
            if release and slot != "floor":
                terms.append(self._add((release, group_of(family), slot), RELEASE))
                terms.append(self._add((release, group_of(family), slot, family), RELEASE))
            if runtime == ALONE:
                terms += [self._add((ALONE, slot), ALONE_WIDTHS[slot])] if slot in ALONE_WIDTHS else []
            elif runtime not in (EAGER, CAPTURED):
                of_kernel = RUNTIME_PRODUCT if multiplies(family) else RUNTIME_KERNEL
                width = ENGINE_KERNEL if runtime in ENGINES else of_kernel
                terms.append(self._add(("runtime kernel", runtime, family, slot), width))
        elif slot == "weights":
            terms.append(self._add(("gpu", gpu.name, slot), LEVELS["gpu"][0]))
        return log_promise(gpu, mode, slot), terms

    def host(self, name: str, runtime: str, gpu: Spec) -> list[int]:
        """Parameters of the cost of a host class: libraries look for algorithms of tensor cores where there are any."""
        general = name.removesuffix(HALF)
        median, width = HOST.get(general, OTHER_HOST), HOST_WIDTHS.get(general, HOST_WIDTH)
        terms = [self._add(("host", general), width, log(median))]
        library = general in LIBRARY
        if name != general and (gpu.tensor_cores or not library):
            terms.append(self._add(("host half", general), LIBRARY_HALF if library else HOST_HALF))
        if runtime != EAGER and general in (PYTHON, MODULE):
            terms.append(self._add(("runtime host", runtime, general), RUNTIME_CALLS_WIDTH, RUNTIME_CALLS))
        elif runtime != EAGER:
            terms.append(self._add(("runtime host", runtime), RUNTIME_HOST, RUNTIME_OPS.get(runtime, 0.0)))
            terms.append(self._add(("runtime host", runtime, general), RUNTIME_CLASS))
        return terms

    def run(self, run: str, host: str) -> tuple[int, ...]:
        """Parameters of a run's host factor: a host that is named has one, from which its runs differ little."""
        middle = self._add(("middle host",), MIDDLE_HOST)  # factors of all hosts are over this one's
        known = hosts.find(host)
        if known is None:
            return middle, self._add(("run", run), RUN)
        named = self._add(("named host", known.name), max(known.log_std, NAMED_HOST), log(known.factor))
        return middle, named, self._add(("run", run), NAMED_RUN)

    def run_group(self, run: str, group: str) -> tuple[int, ...]:
        """Parameter of what a run's host factor is in one group of models."""
        return (self._add(("run", run, group), RUN_GROUP),)

    def clock_exponent(self, protocol: str) -> list[int]:
        """Parameter of the exponent that joins the clocks."""
        prior = CLOCK_EXPONENT[protocol]
        return [self._add(("clock exponent", protocol), prior.width, log(prior.median))]

    def _of_format(self, family: str, slot: str, mode: str, precision: str, gpu: Spec) -> Iterable[int]:
        if slot == "compute":
            if mode != "fp32":
                return [self._add(("mode", family, mode), FORMAT)]
            waiting = gpu.design in MANY_LANES and not family.startswith("conv")
            return [self._add(("lanes", slot), LANES.width, log(LANES.median))] if waiting else []
        if precision not in ("fp16", "bf16"):
            return []
        return [self._add(("half", family, slot), FORMAT * (1.5 if family.startswith("conv") else 0.5))]

    def _of_gpu(self, family: str, slot: str, mode: str, gpu: Spec) -> Iterable[int]:
        for level, name in (("design", gpu.design), ("gpu", gpu.name)):
            in_all, in_family = LEVELS[level]
            if slot == "compute":
                in_all, in_format = RATES[level]
            if level == "gpu" and gpu.power_limited:
                in_all = in_format = POWER_LIMITED[slot]
                yield self._add(("power limited", slot), in_all)
            yield self._add((level, name, slot), in_all)
            yield self._add((level, name, slot, family), in_family)
            if slot == "compute":
                yield self._add((level, name, slot, "in", mode), in_format)
                yield self._add((level, name, slot, family, mode), in_family)

    def _add(self, name: Name, width: float, mean: float = 0.0) -> int:
        """Position of a parameter, which is new or known."""
        if name not in self.names:
            self.names[name] = len(self.priors)
            self.priors.append((mean, width))
        return self.names[name]
