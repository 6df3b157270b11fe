"""Schedule: what a runtime makes of a graph, as flat arrays the predictor can run its two clocks over.

One step is what the host dispatches at a time (an aten op in eager); a step launches zero or more kernels. A schedule
knows classes and counts, not costs: those come from a profile when it is priced.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from latpred.graph.graph import Op

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Schedule:
    """n host steps launching m kernels, in order."""

    runtime: str  # that lowered it
    ops: tuple[Op, ...]  # the graph's
    # Of each of the n steps: dispatch class, Python work done before it, host synchronisations.
    host_class: tuple[str, ...]
    module_calls: Ints
    python_calls: Ints
    sync: Ints
    # Of each of the m kernels: the step that launches it, never decreasing; the op, by its index, whose work it does;
    # its share of that work (1.0 unless an op takes several kernels); its family.
    kernel_step: Ints
    kernel_op: Ints
    kernel_share: NDArray[np.float64]
    kernel_family: tuple[str, ...]


@lru_cache(maxsize=64)
def numbered(names: tuple[str, ...]) -> tuple[tuple[str, ...], Ints]:
    """Distinct names in order of appearance, and which of them each is; who prices a schedule asks several times.

    >>> numbered(("view", "gemm", "view"))
    (('view', 'gemm'), array([0, 1, 0]))
    """
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return tuple(numbers), np.fromiter(map(numbers.__getitem__, names), np.int64, len(names))
