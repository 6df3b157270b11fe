"""Named parameters of the law with what is believed of them, and the linear maps from them to a block's local numbers.

Every local number (the floor of one family on one GPU in one format, the cost of one host class in one runtime) is a
sum of a few parameters, all logarithms: what is shared, and deviations that are believed to be about zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import scipy.sparse as sparse

from latpred.calibration.published.priors import (
    ENGINE_WIDTH,
    KERNEL_OF_GROUP,
    LIBRARY,
    OTHER_HOST,
    RUNTIME_CALLS,
    RUNTIME_CALLS_WIDTH,
    RUNTIME_OPS,
    Hyperparameters,
    Prior,
    group_of,
    multiplies,
)
from latpred.calibration.published.row_counts import ENGINES, HALF, MODULE, PYTHON, WITHOUT_HALF
from latpred.graph.features import Floats
from latpred.profile.datasheet import PRODUCT_ONLY, log_promise, mode_of
from latpred.profile.gpus import Spec

Name = tuple[str, ...]
DEVIATING = ("floor", "compute", "activations")  # slots in which GPUs, formats and runtimes may differ
EAGER = "eager"


class Parameters:
    """Parameters by name, each with the mean and the width that are believed of it."""

    def __init__(self) -> None:
        self.names: dict[Name, int] = {}
        self._means: list[float] = []
        self._widths: list[float] = []

    def add(self, name: Name, mean: float, width: float) -> int:
        """Position of a parameter, which is new or known."""
        if name not in self.names:
            self.names[name] = len(self._means)
            self._means.append(mean)
            self._widths.append(width)
        return self.names[name]

    @property
    def means(self) -> Floats:
        """What is believed of each, before any row is seen."""
        return np.array(self._means)

    @property
    def widths(self) -> Floats:
        """Standard deviations of that."""
        return np.array(self._widths)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._means)


class Builder:
    """Makes the terms of local numbers, adding the parameters they need."""

    def __init__(self, form: Hyperparameters) -> None:
        self.form = form
        self.parameters = Parameters()

    def kernel(self, family: str, slot: str, gpu: Spec, precision: str, runtime: str) -> tuple[float, list[int]]:
        """Constant and parameters of one slot of one family on one GPU."""
        if slot in PRODUCT_ONLY and not multiplies(family):
            return 0.0, []
        mode = mode_of(gpu, precision, family)
        terms = self._shared(family, slot)
        if slot in DEVIATING:
            terms += self._of_format(family, slot, mode, precision)
            terms += self._of_gpu(family, slot, mode, gpu)
            if runtime != EAGER:
                terms.append(self._deviation(("runtime kernel", runtime, family, slot), self._freedom(family, runtime)))
        elif slot == "weights":
            terms.append(self._deviation(("gpu", gpu.name, slot), self.form.gpu))
        return log_promise(gpu, mode, slot), terms

    def host(self, name: str, runtime: str, gpu: Spec) -> list[int]:
        """Parameters of the cost of a host class: libraries look for algorithms of tensor cores where there are any."""
        general = name.removesuffix(HALF)
        width = self.form.host_widths.get(general, self.form.host)
        believed = Prior(self.form.hosts.get(general, OTHER_HOST), width)
        terms = [self.parameters.add(("host", general), believed.mean, believed.width)]
        library = general in LIBRARY
        if name != general and general not in WITHOUT_HALF and (gpu.tensor_cores or not library):
            half = self.form.library_half if library else self.form.host_half
            terms.append(self._deviation(("host half", general), half))
        if runtime != EAGER:
            terms += self._host_of_runtime(general, runtime)
        return terms

    def run(self, run: str) -> list[int]:
        """Parameter of a run's host factor."""
        return [self._deviation(("run", run), self.form.run)]

    def run_group(self, run: str, group: str) -> list[int]:
        """Parameter of what a run's host factor is in one group of models."""
        return [self._deviation(("run", run, group), self.form.run_group)]

    def knee(self) -> list[int]:
        """Parameter of the exponent that joins the clocks."""
        return [self.parameters.add(("knee",), float(np.log(self.form.knee)), self.form.knee_width)]

    def _host_of_runtime(self, general: str, runtime: str) -> list[int]:
        if general in (PYTHON, MODULE):
            return [self.parameters.add(("runtime host", runtime, general), RUNTIME_CALLS, RUNTIME_CALLS_WIDTH)]
        mean = RUNTIME_OPS.get(runtime, 0.0)
        every = self.parameters.add(("runtime host", runtime), mean, self.form.runtime_host)
        return [every, self._deviation(("runtime host", runtime, general), self.form.runtime_class)]

    def _freedom(self, family: str, runtime: str) -> float:
        if runtime in ENGINES:
            return ENGINE_WIDTH
        return self.form.runtime_product if multiplies(family) else self.form.runtime_kernel

    def _deviation(self, name: Name, width: float) -> int:
        return self.parameters.add(name, 0.0, width)

    def _shared(self, family: str, slot: str) -> list[int]:
        believed = KERNEL_OF_GROUP.get((group_of(family), slot), self.form.kernel[slot])
        # Weights stream from memory whatever multiplies with them.
        name = ("kernel", "all" if slot == "weights" else family, slot)
        return [self.parameters.add(name, believed.mean, believed.width)]

    def _of_format(self, family: str, slot: str, mode: str, precision: str) -> list[int]:
        if slot == "compute":
            return [self._deviation(("mode", family, mode), self.form.mode)] if mode != "fp32" else []
        if precision not in ("fp16", "bf16"):
            return []
        library = family.startswith("conv")
        return [self._deviation(("half", family, slot), self.form.mode * (1.5 if library else 0.5))]

    def _of_gpu(self, family: str, slot: str, mode: str, gpu: Spec) -> list[int]:
        form = self.form
        terms = []
        for level, name, width, in_mode, in_family in (
            ("architecture", gpu.architecture, form.architecture, form.architecture_mode, form.architecture_family),
            ("gpu", gpu.name, form.gpu, form.gpu_mode, form.gpu_family),
        ):
            terms.append(self._deviation((level, name, slot), width))
            terms.append(self._deviation((level, name, slot, family), in_family))
            if slot == "compute":
                terms.append(self._deviation((level, name, slot, "in", mode), in_mode))
                terms.append(self._deviation((level, name, slot, family, mode), in_family))
        return terms


def matrix(terms: Sequence[Sequence[int]], size: int) -> sparse.csr_matrix:
    """The matrix that sums parameters into local numbers, one row each."""
    rows = np.repeat(np.arange(len(terms)), [len(each) for each in terms])
    columns = np.array([index for each in terms for index in each], dtype=np.int64)
    return sparse.csr_matrix((np.ones(len(rows)), (rows, columns)), shape=(len(terms), size))
