"""The law: latency of each row of a table from parameters, and its derivatives.

Derivatives are taken by the local numbers of each block (see `calibration.published.latency_model`); a sparse matrix
leads from there to the parameters, which keeps normal equations small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import scipy.sparse as sparse
from numpy.typing import NDArray

from latpred.calibration.published.parameters import Builder, Parameters, matrix
from latpred.calibration.published.priors import Hyperparameters, multiplies
from latpred.calibration.published.row_counts import Cells, Ints, Work
from latpred.graph.features import Floats, waves
from latpred.profile.datasheet import SLOTS
from latpred.profile.gpus import Spec


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


_TINY = 1e-9
_ACTIVATIONS = SLOTS.index("activations")


class State(NamedTuple):
    """A block at some parameters: log latency of its rows, share of the host in it, and the two clocks."""

    log_us: Floats
    host_share: Floats
    host_us: Floats
    device_us: Floats
    by_host: Floats
    by_device: Floats
    by_knee: Floats


class LatencyModel:
    """The law over the rows of a table.

    Parameters
    ----------
    cells : Cells
        What the rows measure.
    rows : Rows
        The table.
    gpus : dict
        Datasheets by the name in `rows.gpu`.
    form : Form
        What is believed.
    """

    def __init__(self, cells: Cells, rows: Rows, gpus: dict[str, Spec], form: Hyperparameters) -> None:
        self.cells, self.rows, self.gpus, self.form = cells, rows, gpus, form
        self.builder = Builder(form)
        where = sorted(set(zip(rows.gpu, rows.precision, rows.runtime, strict=True)))
        drafts = [draft(cells, rows, self.builder, Place(gpus[gpu], gpu, *rest)) for gpu, *rest in where]
        # Blocks are made when all parameters are known, since each maps from all of them.
        self.blocks = [each.finished(len(self.parameters)) for each in drafts]

    @property
    def parameters(self) -> Parameters:
        """All parameters of the law."""
        return self.builder.parameters

    def families(self, runtime: str) -> set[str]:
        """Kernel families that rows of a runtime have."""
        own = (block for block in self.blocks if self.rows.runtime[block.rows[0]] == runtime)
        return {part.family for block in own for part in block.parts}

    def predict(self, theta: Floats) -> Floats:
        """Log microseconds of every row."""
        found = np.empty(len(self.rows))
        for block in self.blocks:
            found[block.rows] = evaluate(block, theta).log_us
        return found

    def clocks(self, theta: Floats) -> tuple[Floats, Floats]:
        """Microseconds of host and of device of every row."""
        host, device = np.empty(len(self.rows)), np.empty(len(self.rows))
        for block in self.blocks:
            state = evaluate(block, theta)
            host[block.rows], device[block.rows] = state.host_us, state.device_us
        return host, device

    def slowest(self, theta: Floats) -> list[str]:
        """Of every row: "host" where it is the slower clock, else the family that takes most of the device's time."""
        found = np.empty(len(self.rows), dtype=object)
        for block in self.blocks:
            state, families = evaluate(block, theta), [part.family for part in block.parts]
            leading = np.argmax(_by_family(block, block.base + block.lead @ theta), axis=0)[block.cell]
            found[block.rows] = [
                "host" if host else families[index]
                for host, index in zip(state.host_us >= state.device_us, leading, strict=True)
            ]
        return found.tolist()


def evaluate(block: Block, theta: Floats, derivatives: bool = False) -> State:
    """A block at some parameters; `by_*` are derivatives of each cell's log clocks by local numbers, or empty."""
    local = block.base + block.lead @ theta
    device, by_device = _device(block, local, derivatives)
    priced = block.counts * np.exp(local[block.classes])
    host = priced.sum(axis=1)
    log_host = np.log(host)[block.cell] + local[block.run] + local[block.run_group]
    log_device = np.log(device)[block.cell]
    power = float(np.exp(local[-1]))
    larger = np.maximum(log_host, log_device)
    below_host, below_device = log_host - larger, log_device - larger
    by_one, by_other = np.exp(power * below_host), np.exp(power * below_device)
    total = by_one + by_other
    share = by_one / total
    return State(
        log_us=larger + np.log(total) / power,
        host_share=share,
        host_us=np.exp(log_host),
        device_us=np.exp(log_device),
        by_host=priced / host[:, None],
        by_device=by_device / device[:, None],
        by_knee=-np.log(total) / power + share * below_host + (1.0 - share) * below_device,
    )


def local_gradients(block: Block, state: State) -> Floats:
    """Derivatives of the log latency of each row by the block's local numbers, shape (rows, local numbers)."""
    share = state.host_share[:, None]
    found = np.zeros((len(block.rows), len(block.base)))
    found[:, : state.by_device.shape[1]] = (1.0 - share) * state.by_device[block.cell]
    found[:, block.classes] = share * state.by_host[block.cell]
    each = np.arange(len(block.rows))
    found[each, block.run] = state.host_share
    found[each, block.run_group] = state.host_share
    found[:, -1] = state.by_knee
    return found


def _device(block: Block, local: Floats, derivatives: bool) -> tuple[Floats, Floats]:
    """Microseconds of the device in each cell, and their derivatives by the kernels' local numbers."""
    total = np.zeros(len(block.counts))
    slots = np.zeros((len(total), len(SLOTS) * len(block.parts) if derivatives else 0))
    for part in block.parts:
        numbers = np.exp(local[part.first : part.first + len(SLOTS)])
        values = part.summed(_times(part, numbers, derivatives))
        total[part.cells] += values[0]
        if derivatives:
            slots[part.cells, part.first : part.first + len(SLOTS)] = values[1:].T
    return total, slots


def _by_family(block: Block, local: Floats) -> Floats:
    """Microseconds of each family in each cell."""
    found = np.zeros((len(block.parts), len(block.counts)))
    for row, part in zip(found, block.parts, strict=True):
        row[part.cells] = part.summed(_times(part, np.exp(local[part.first : part.first + len(SLOTS)]), False))[0]
    return found


def _times(part: Part, numbers: Floats, derivatives: bool) -> Floats:
    """Microseconds of a part's rows and, where they are asked for, derivatives by all `SLOTS` below them."""
    found = np.zeros((1 + len(SLOTS) if derivatives else 1, len(part.times)))
    (_product if multiplies(part.family) else _memory)(part, numbers, found)
    return found


def _memory(part: Part, numbers: Floats, found: Floats) -> None:
    floor, moved = numbers[0], part.moved * numbers[_ACTIVATIONS]
    found[0] = floor + moved
    if len(found) > 1:
        found[1], found[1 + _ACTIVATIONS] = floor, moved


def _product(part: Part, numbers: Floats, found: Floats) -> None:
    floor, compute, weights, activations, waves_half, outputs, k_half, n_half = numbers
    loaded, moved = part.loaded * weights, part.moved * activations
    memory = loaded + moved
    busy = part.macs * compute
    rounds, k, n = waves_half * part.per_round, k_half * part.per_k, n_half * part.per_n
    shaped = busy * (1.0 + rounds) * (1.0 + k) * (1.0 + n)
    few = busy * part.per_output * outputs
    computing = shaped + few
    above = np.sqrt(computing**2 + memory**2) + _TINY
    found[0] = floor + above
    if len(found) == 1:
        return
    by_compute, by_memory = computing / above, memory / above
    shaped *= by_compute
    found[1] = floor
    np.multiply(by_compute, computing, out=found[2])
    np.multiply(by_memory, loaded, out=found[3])
    np.multiply(by_memory, moved, out=found[4])
    np.multiply(shaped, rounds / (1.0 + rounds), out=found[5])
    np.multiply(by_compute, few, out=found[6])
    np.multiply(shaped, k / (1.0 + k), out=found[7])
    np.multiply(shaped, n / (1.0 + n), out=found[8])
