"""Costs of onnxruntime's nodes from generated graphs that were timed whole and node by node.

    latency = fixed + Σ cost(class of the node) + Σ time of its kernel

What a node takes when it has next to nothing to do belongs to its class; what it takes beyond that in a larger graph is
its kernel's. The profiler's clock counts whole microseconds and slows what lies between two nodes, so the sum of both
is brought to the time of graphs that nobody watched. Graphs whose weights were cold tell of weights only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from latpred.calibration.fitting.dispatch_fit import with_parents
from latpred.calibration.fitting.kernel_fit import KernelSample, fit_kernels, row_of
from latpred.calibration.fitting.linear_system import Column, System
from latpred.errors import CalibrationError
from latpred.graph.graph import Op
from latpred.ops.families import parent
from latpred.profile.document import DispatchFit

FEWEST = 3  # tiny graphs below which nothing can be told apart
HALF_US = 0.5  # what the profiler's clock cuts off on average
LEAST_SHARE = 0.15  # of a node's time that must be kernel for it to say anything about kernels
MODEL_SIGMA = 0.05  # relative error of the law itself
NODE_US, NODE_SIGMA = 1.0, 1.0  # what a node costs, to begin with
CLASS_SIGMA = 0.5  # how far a class may lie from the common cost, as a share of the guess
FIXED_US, FIXED_SIGMA_US = 4.0, 20.0
FIXED, NODE = ("fixed",), ("node",)
RULING = 0.5  # share of a graph's time from which its kernels rule it
ASTRAY = 2.0  # a graph that takes so much more or less than its nodes did tells nothing


class Placed(NamedTuple):
    """A graph that was timed: its nodes, latency with all that it needs in the cache, time of each node, precision.

    tiny : whether its nodes have next to nothing to do. resident : share of its weights that was in the cache when its
    nodes were timed. cold : whether nothing was.
    """

    ops: tuple[Op, ...]
    total_us: float
    nodes_us: tuple[float, ...]
    precision: str
    tiny: bool
    resident: float
    cold: bool = False


class Kernel(NamedTuple):
    """The kernel's part of one node."""

    op: Op
    us: float
    share: float


def fit_nodes(placed: Sequence[Placed]) -> DispatchFit:
    """Host costs and kernels.

    Parameters
    ----------
    placed : sequence of Placed
        Tiny graphs and larger ones.

    Raises
    ------
    CalibrationError
        When there are too few tiny graphs or no larger one.
    """
    tiny, sized = [one for one in placed if one.tiny], [one for one in placed if not one.tiny]
    if len(tiny) < FEWEST or not sized:
        raise CalibrationError(
            f"{len(tiny)} tiny graphs and {len(sized)} larger ones were timed in onnxruntime, too few to tell its "
            "costs. Give it more time: latpred calibrate --runtimes onnxruntime --budget 3m"
        )
    costs, fixed_us = _host(tiny)
    idle = _idle(tiny)
    kernels = [_kernels(one, idle) for one in sized]
    slowed = _unwatched(sized, kernels, costs, fixed_us)
    samples: dict[str, list[KernelSample]] = {}
    for one, found in zip(sized, kernels, strict=True):
        factor = _factor(one, found, costs, fixed_us, slowed)
        if factor is not None:
            samples.setdefault(one.precision, []).extend(_samples(one, found, factor))
    fits = {precision: fit_kernels(found) for precision, found in samples.items()}
    return DispatchFit(costs, 0.0, 0.0, fixed_us, kernels={name: one for name, one in fits.items() if one})


def _host(tiny: Sequence[Placed]) -> tuple[dict[str, float], float]:
    """Cost of each class of node and of a run, from graphs that do nothing else."""
    system = System()
    for one in tiny:
        numbers = Counter(op.host_class for op in one.ops)
        terms: dict[Column, float] = {FIXED: 1.0}
        terms |= {("class", name): float(number) for name, number in numbers.items()}
        system.measured(terms, one.total_us, MODEL_SIGMA * one.total_us)
    system.believed({FIXED: 1.0}, FIXED_US, FIXED_SIGMA_US)
    system.believed({NODE: 1.0}, NODE_US, NODE_SIGMA)
    for name in system.names("class"):
        system.believed({("class", name): 1.0, NODE: -1.0}, 0.0, CLASS_SIGMA * NODE_US)
    found = system.solve()
    costs = {column[1]: round(us, 4) for column, us in found.items() if column[0] == "class"}
    return with_parents(costs), round(found[FIXED], 4)


def _idle(tiny: Sequence[Placed]) -> dict[str, float]:
    """What the profiler says of a node of each class that has next to nothing to do."""
    seen: dict[str, list[float]] = {}
    for one in tiny:
        for op, us in zip(one.ops, one.nodes_us, strict=True):
            seen.setdefault(op.host_class, []).append(us + HALF_US)
    return with_parents({name: float(np.median(times)) for name, times in seen.items()})


def _kernels(one: Placed, idle: dict[str, float]) -> list[Kernel]:
    """The kernel's part of every node that has one."""
    found = []
    for op, us in zip(one.ops, one.nodes_us, strict=True):
        if op.launches:
            whole = us + HALF_US
            above = max(whole - _looked_up(idle, op.host_class), 0.0)
            found.append(Kernel(op, above, above / whole))
    return found


def _unwatched(
    sized: Sequence[Placed], kernels: Sequence[Sequence[Kernel]], costs: dict[str, float], fixed_us: float
) -> float:
    """What kernels take unwatched over what they take watched, in the middle of the graphs that they rule."""
    ratios = []
    for one, found in zip(sized, kernels, strict=True):
        watched = sum(kernel.us for kernel in found)
        if not one.cold and watched > RULING * one.total_us:
            ratios.append((one.total_us - _host_us(one, costs, fixed_us)) / watched)
    return min(max(float(np.median(ratios)), 1 / ASTRAY), ASTRAY) if ratios else 1.0


def _factor(
    one: Placed, kernels: Sequence[Kernel], costs: dict[str, float], fixed_us: float, slowed: float
) -> float | None:
    """What a graph's own kernels take unwatched over watched: believed as far as they are what it takes.

    None where both disagree so much that the machine did something else in one of them.
    """
    watched = sum(kernel.us for kernel in kernels)
    if watched <= 0 or one.cold:
        return slowed
    left = max(one.total_us - _host_us(one, costs, fixed_us), 0.0)
    share = min(1.0, slowed * watched / one.total_us)
    own = left / watched
    if share > RULING and not slowed / ASTRAY <= own <= slowed * ASTRAY:
        return None
    own = min(max(own, slowed / ASTRAY), slowed * ASTRAY)
    return float(slowed ** (1.0 - share) * own**share)


def _host_us(one: Placed, costs: dict[str, float], fixed_us: float) -> float:
    return fixed_us + sum(_looked_up(costs, op.host_class) for op in one.ops)


def _samples(one: Placed, kernels: Sequence[Kernel], factor: float) -> list[KernelSample]:
    found = []
    for op, us, share in kernels:
        if share >= LEAST_SHARE and not op.estimated and (not one.cold or _reads_weights(op)):
            weight = 1.0 / (1.0 + ((1.0 - share) / share) ** 2)
            found.append(KernelSample(op.family, row_of(op, 1, resident=one.resident), factor * us, weight))
    return found


def _reads_weights(op: Op) -> bool:
    """Whether most of what a node moves is weights; in a cold graph all else is cold too, as it is in no model."""
    return op.weight_bytes.at(1) > op.read_bytes.at(1) + op.write_bytes.at(1)


def _looked_up(costs: dict[str, float], name: str) -> float:
    known: str | None = name
    while known:
        if known in costs:
            return costs[known]
        known = parent(known)
    return costs[""]
