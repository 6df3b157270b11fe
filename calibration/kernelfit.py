"""Kernel samples to `KernelFit`s: one regressor for each family, special families where they have samples enough.

Where a sample came from, a queue of a GPU or the place of an op in a network, does not matter here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from latpred.features import NATIVE, native
from latpred.graph import Op
from latpred.kernelrows import columns
from latpred.ops.families import root
from latpred.profile import KernelFit
from latpred.roofline import RooflineRegressor, scale_leaf

FEWEST = 6  # samples below which a family borrows
# Points that a residual keeps. Twice as many made no left-out network better and predictions several times slower.
MOST_POINTS = 200
FEWEST_LEAF = 24  # samples that earn a special family a fit of its own
APART = {"rnn": 8}  # the same where special families have other code altogether, and little of it in a network

Floats = NDArray[np.float64]


class KernelSample(NamedTuple):
    """One timed kernel.

    row : work and dimensions in the order of `latpred.features.layout(family).columns`. us : its time without dispatch.
    weight : how well that is known, relative to other samples. beside_us : dispatch that always comes with it, so that
    an error of the kernel counts as one of both.
    """

    family: str
    row: tuple[float, ...]
    us: float
    weight: float = 1.0
    beside_us: float = 0.0


def row_of(op: Op, batch: int, *, resident: float = 0.0) -> tuple[float, ...]:
    """Work and dimensions of one op at a batch size; the `resident` share of its weights was in the cache."""
    return tuple(float(line.at(batch)) for line in columns(op, root(op.family), resident=resident))


def fit_kernels(
    samples: Iterable[KernelSample], multiprocessors: int = 0, *, native_threads: int = 0
) -> dict[str, KernelFit]:
    """A fit for every family that has samples.

    Parameters
    ----------
    samples : iterable of KernelSample
        Of one device and precision; repeated rows are averaged.
    multiprocessors : int
        Of a GPU; 0 for a CPU.
    native_threads : int
        Threads of a CPU on which PyTorch computes some convolutions of this precision itself; 0 where it does not.
    """
    by_family: dict[str, dict[str, list[KernelSample]]] = {}
    for sample in samples:
        family = sample.family
        if native_threads and native(family, np.array([sample.row]), native_threads)[0]:
            family = NATIVE
        by_family.setdefault(root(family), {}).setdefault(family, []).append(sample)
    fits: dict[str, KernelFit] = {}
    for family, leaves in by_family.items():
        fits.update(_fit_family(family, leaves, multiprocessors))
    return fits


def _fit_family(
    family: str, leaves: Mapping[str, Sequence[KernelSample]], multiprocessors: int
) -> dict[str, KernelFit]:
    pooled = [sample for samples in leaves.values() for sample in samples]
    if len(pooled) < FEWEST:
        return {}
    # What the leaves differ by is taken off before the residual is fitted, which would otherwise call it noise.
    plain = RooflineRegressor(family, multiprocessors).fit_roofline(*_averaged(pooled))
    enough = APART.get(family, FEWEST_LEAF)
    few = {leaf: samples for leaf, samples in leaves.items() if leaf != family and len(samples) < enough}
    scales = {leaf: _leaf_scale(plain, samples) for leaf, samples in few.items()}
    alike = [_as_family(sample, plain, scales.get(sample.family, 1.0)) for sample in pooled]
    general = _fit(family, alike, multiprocessors)
    special = {
        leaf: _fit(family, samples, multiprocessors)
        for leaf, samples in leaves.items()
        if leaf != family and len(samples) >= enough
    }
    return {family: msgspec.structs.replace(general, leaf_scales=scales), **special}


def _leaf_scale(plain: KernelFit, samples: Sequence[KernelSample]) -> float:
    rows, times, _, beside = _averaged(samples)
    return scale_leaf(plain, rows, times, beside)


def _as_family(sample: KernelSample, plain: KernelFit, scale: float) -> KernelSample:
    """A sample of a more special family as the family itself would have taken it."""
    floor_us = min(plain.floor_us, 0.9 * sample.us)
    return sample._replace(us=floor_us + (sample.us - floor_us) / scale)


def _fit(family: str, samples: Sequence[KernelSample], multiprocessors: int) -> KernelFit:
    return RooflineRegressor(family, multiprocessors, MOST_POINTS).fit(*_averaged(samples)).to_fit()


def _averaged(samples: Sequence[KernelSample]) -> tuple[Floats, Floats, Floats, Floats]:
    """Rows, each once, with the median of its times, the sum of their weights, and what passes beside them."""
    by_row: dict[tuple[float, ...], list[KernelSample]] = {}
    for sample in samples:
        by_row.setdefault(sample.row, []).append(sample)
    times = [_middle(group) for group in by_row.values()]
    # A row seen often is known better, but not without end: what is left is the regressor's own error.
    weights = [min(4.0, sum(sample.weight for sample in group)) for group in by_row.values()]
    beside = [float(np.median([sample.beside_us for sample in group])) for group in by_row.values()]
    return np.array(list(by_row)), np.array(times), np.array(weights), np.array(beside)


def _middle(samples: Sequence[KernelSample]) -> float:
    """Median of times; those count more beside which less passes."""
    ordered = sorted(samples, key=lambda sample: sample.us)
    reached = np.cumsum([sample.weight / (sample.us + sample.beside_us) for sample in ordered])
    return ordered[int(np.searchsorted(reached, 0.5 * reached[-1]))].us
