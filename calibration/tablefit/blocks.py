"""Blocks: rows of one GPU, number format and runtime, with everything of theirs that does not depend on parameters.

In a block the local numbers are kernel parameters by family, host costs by class, host factors of runs and the knee's
exponent, in this order. Nothing here knows how they become a latency: see `latpred.calibration.tablefit.law`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import scipy.sparse as sparse
from numpy.typing import NDArray

from latpred.calibration.tablefit.cells import Cells, Ints, Work
from latpred.calibration.tablefit.parameters import Builder, matrix
from latpred.calibration.tablefit.priors import multiplies
from latpred.features import Floats, waves
from latpred.promised import SLOTS
from latpred.specs import Spec


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a table as arrays: which cell each measures, where, and the logarithm of its microseconds."""

    cell: Ints
    gpu: NDArray[np.object_]
    precision: NDArray[np.object_]
    runtime: NDArray[np.object_]
    run: NDArray[np.object_]
    group: NDArray[np.object_]
    log_us: Floats

    def __len__(self) -> int:
        """How many there are."""
        return len(self.log_us)


class Part(NamedTuple):
    """Kernels of one family in a block, ordered by cell: from each of `starts` on they belong to the next of `cells`.

    times : how many kernels each row stands for. macs, loaded, moved : multiply-adds, bytes of weights and others.
    per_round, per_output, per_k, per_n : one over rounds of tiles, results, and the lengths of sums and of rows.
    """

    family: str
    first: int
    cells: Ints
    starts: Ints
    times: Floats
    macs: Floats
    loaded: Floats
    moved: Floats
    per_round: Floats
    per_output: Floats
    per_k: Floats
    per_n: Floats

    def summed(self, values: Floats) -> Floats:
        """Values of the rows, along the last axis, added up in each of `cells`; overwrites them."""
        values *= self.times
        found: Floats = np.add.reduceat(values, self.starts, axis=-1)
        return found


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of one GPU, number format and runtime."""

    rows: Ints
    cell: Ints  # of each row, among the block's own cells
    counts: Floats
    parts: tuple[Part, ...]
    classes: slice
    run: Ints  # local number of each row's run, and of its run and group
    run_group: Ints
    base: Floats
    lead: sparse.csr_matrix
    needed: Ints  # parameters that lead anywhere here, and the columns of `lead` that are theirs
    short: sparse.csr_matrix


class Place(NamedTuple):
    """Where the rows of a block were measured: the GPU's datasheet, and what the table calls everything."""

    spec: Spec
    gpu: str
    precision: str
    runtime: str


@dataclass(frozen=True, slots=True)
class Draft:
    """A block whose map from the parameters is not made yet."""

    block: Block
    terms: Sequence[Sequence[int]]

    def finished(self, size: int) -> Block:
        """The block, when it is known how many parameters there are."""
        lead = matrix(self.terms, size)
        needed = np.unique(lead.indices).astype(np.int64)
        return replace(self.block, lead=lead, needed=needed, short=lead[:, needed])


def draft(cells: Cells, rows: Rows, builder: Builder, place: Place) -> Draft:
    """The block of a place; the builder learns what parameters it needs."""
    mine = np.flatnonzero(
        (rows.gpu == place.gpu) & (rows.precision == place.precision) & (rows.runtime == place.runtime)
    )
    needed, cell = np.unique(rows.cell[mine], return_inverse=True)
    base: list[float] = []
    terms: list[list[int]] = []
    parts = []
    for family, work in cells.kernels.items():
        own = np.isin(work.cell, needed)
        if own.any():
            parts.append(_part(family, len(terms), work, own, needed, place.spec))
            for slot in SLOTS:
                constant, added = builder.kernel(family, slot, place.spec, place.precision, place.runtime)
                base.append(constant)
                terms.append(added)
    met = np.asarray(cells.counts[needed].any(axis=0))
    first = len(terms)
    classes_met = [name for name, used in zip(cells.classes, met, strict=True) if used]
    terms += [builder.host(name, place.runtime, place.spec) for name in classes_met]
    classes = slice(first, len(terms))
    runs, groups = rows.run[mine].tolist(), rows.group[mine].tolist()
    run = _numbered(terms, [builder.run(name) for name in runs])
    run_group = _numbered(terms, [builder.run_group(name, group) for name, group in zip(runs, groups, strict=True)])
    terms.append(builder.knee())
    block = Block(
        rows=mine,
        cell=cell,
        counts=cells.counts[needed][:, met],
        parts=tuple(parts),
        classes=classes,
        run=run,
        run_group=run_group,
        base=np.array(base + [0.0] * (len(terms) - len(base))),
        lead=sparse.csr_matrix((0, 0)),
        needed=np.empty(0, dtype=np.int64),
        short=sparse.csr_matrix((0, 0)),
    )
    return Draft(block, terms)


def _part(family: str, first: int, work: Work, own: NDArray[np.bool_], needed: Ints, spec: Spec) -> Part:
    cells, starts = np.unique(np.searchsorted(needed, work.cell[own]), return_index=True)
    product = work.product[own]
    m, n, k, copies = product.T
    macs, loaded, read, written = work.work[own].T
    return Part(
        family=family,
        first=first,
        cells=cells,
        starts=starts,
        times=work.count[own],
        macs=macs.copy(),
        loaded=loaded.copy(),
        moved=read + written if multiplies(family) else loaded + read + written,
        per_round=1.0 / waves(product, spec.multiprocessors),
        per_output=1.0 / (m * n * copies),
        per_k=1.0 / k,
        per_n=1.0 / n,
    )


def _numbered(terms: list[list[int]], wanted: Sequence[list[int]]) -> Ints:
    """Local numbers of rows' terms, each added once."""
    known: dict[int, int] = {}
    for (index,) in wanted:
        if index not in known:
            known[index] = len(terms)
            terms.append([index])
    return np.array([known[index] for (index,) in wanted], dtype=np.int64)
