"""The latency model: latency of each row of a table from parameters, and its derivatives.

    latency = (host ^ p + device ^ p) ^ (1 / p), and a launch and a synchronisation where it is waited for
    host    = factor of the run · factor of the run's group · Σ count · cost(class)
    device  = Σ max(least, floor + sqrt(computing ² + memory ²)), over all kernels; least is what datasheets allow

Rows of one GPU, number format, runtime, memory format, protocol and release make a block, with numbers of its own:
eight slots of each kernel family, the host classes, the runs, the exponent p. A sparse matrix leads from the parameters
to their logarithms, so that derivatives are taken by few numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import scipy.sparse as sparse
from numpy.typing import NDArray

from latpred.calibration.published.parameters import Parameters
from latpred.calibration.published.row_counts import Cells, FamilyWork, multiplies
from latpred.graph.features import Floats, waves
from latpred.graph.graph import Ints
from latpred.prediction.kernel_times import least_us
from latpred.profile.datasheet import LAUNCH_US, SLOTS, SYNC_US, limits_of
from latpred.profile.gpus import Spec

Objects = NDArray[np.object_]
_TINY = 1e-9
_ACTIVATIONS = SLOTS.index("activations")
PLACE = ("gpu", "precision", "runtime", "memory_format", "protocol", "release")  # what all rows of a block share


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a table as arrays: which cell each measures, where, and the logarithm of its microseconds."""

    cell: Ints
    gpu: Objects
    design: Objects  # of its multiprocessors
    precision: Objects
    runtime: Objects
    run: Objects
    host: Objects  # the name of its CPU, "" where nobody knows
    protocol: Objects
    memory_format: Objects
    release: Objects  # of PyTorch, "" where it is one of today or nobody says
    group: Objects
    model: Objects
    architecture: Objects  # the first name of its model, whatever a row calls it
    source: Objects
    batch: Ints
    log_us: Floats

    def __len__(self) -> int:
        """How many there are."""
        return len(self.log_us)

    @property
    def machine(self) -> Objects:
        """Of each, what its host is known by: its name, else its run."""
        named: Objects = np.where(self.host != "", self.host, self.run)
        return named


class _FamilyKernels(NamedTuple):
    """Kernels of one family in a block, ordered by cell: from each of `starts` on they are of the next of `cells`."""

    family: str
    slots: slice  # local numbers of the family
    cells: Ints
    starts: Ints
    times: Floats  # how many kernels each row stands for
    macs: Floats
    loaded: Floats  # bytes of weights
    moved: Floats  # other bytes
    per_round: Floats  # one over rounds of tiles, results, and the lengths of sums and of rows
    per_output: Floats
    per_k: Floats
    per_n: Floats
    least: Floats  # microseconds that no prediction is below

    def us(self, local: Floats) -> Floats:
        """Microseconds in each of `cells`, and derivatives by all `SLOTS` below them."""
        values = np.zeros((1 + len(SLOTS), len(self.times)))
        (_product if multiplies(self.family) else _memory)(self, np.exp(local[self.slots]), values)
        held = values[0] < self.least
        values[0, held], values[1:, held] = self.least[held], 0.0
        values *= self.times
        summed: Floats = np.add.reduceat(values, self.starts, axis=-1)
        return summed


@dataclass(frozen=True, slots=True)
class Block:
    """Rows that `PLACE` is the same of."""

    rows: Ints
    cell: Ints  # of each row, among the block's own cells
    counts: Floats
    kernels: tuple[_FamilyKernels, ...]
    classes: slice
    run: Ints  # local number of each row's run, and of its run and group
    run_group: Ints
    waited_us: float  # what a call that is waited for takes beyond the slower clock
    constants: Floats
    needed: Ints  # parameters that any local number has
    sums: sparse.csr_matrix  # local numbers from those

    def local(self, theta: Floats) -> Floats:
        """Local numbers, as logarithms, from all parameters; the last is the exponent."""
        numbers: Floats = self.constants + self.sums @ theta[self.needed]
        return numbers


def blocks_of(cells: Cells, rows: Rows, gpus: Mapping[str, Spec], parameters: Parameters) -> list[Block]:
    """The blocks of a table; the parameters that they need are added."""
    places = sorted(set(zip(*(getattr(rows, name) for name in PLACE), strict=True)))
    return [_block(cells, rows, gpus[place[0]], place, parameters) for place in places]


def _block(cells: Cells, rows: Rows, spec: Spec, place: tuple[str, ...], parameters: Parameters) -> Block:
    _, precision, runtime, memory_format, protocol, release = place
    mine = np.flatnonzero(np.all([getattr(rows, name) == one for name, one in zip(PLACE, place, strict=True)], axis=0))
    needed, cell = np.unique(rows.cell[mine], return_inverse=True)
    constants: list[float] = []
    terms: list[list[int]] = []
    kernels = []
    for (family, own_format), work in cells.kernels.items():
        if np.isin(work.cell, needed).any():
            number_format = own_format or precision
            least = _least_us(work, spec, number_format, before_2=bool(release))
            kernels.append(_kernels(family, len(terms), work, needed, spec, least))
            for slot in SLOTS:
                constant, added = parameters.kernel(family, slot, spec, number_format, runtime, memory_format, release)
                constants.append(constant)
                terms.append(added)
    met = np.asarray(cells.counts[needed].any(axis=0))
    first = len(terms)
    terms += [parameters.host(name, runtime, spec) for name, used in zip(cells.classes, met, strict=True) if used]
    classes = slice(first, len(terms))
    runs, groups = rows.run[mine].tolist(), rows.group[mine].tolist()
    run = _numbered(terms, [parameters.run(*each) for each in zip(runs, rows.host[mine].tolist(), strict=True)])
    run_group = _numbered(terms, [parameters.run_group(name, group) for name, group in zip(runs, groups, strict=True)])
    terms.append(parameters.clock_exponent(protocol))
    positions, sums = _sums(terms)
    return Block(
        rows=mine,
        cell=cell,
        counts=cells.counts[needed][:, met],
        kernels=tuple(kernels),
        classes=classes,
        run=run,
        run_group=run_group,
        waited_us=LAUNCH_US + SYNC_US if protocol == "single" else 0.0,
        constants=np.array(constants + [0.0] * (len(terms) - len(constants))),
        needed=positions,
        sums=sums,
    )


def _least_us(work: FamilyWork, spec: Spec, precision: str, *, before_2: bool) -> Floats:
    """Microseconds that a datasheet lets kernels take at least."""
    return np.concatenate(
        [least_us(name, rows, limits_of(spec, precision, name, before_2=before_2)) for name, rows in work.columns]
    )[work.place]


def _kernels(family: str, first: int, work: FamilyWork, needed: Ints, spec: Spec, least: Floats) -> _FamilyKernels:
    own = np.isin(work.cell, needed)
    cells, starts = np.unique(np.searchsorted(needed, work.cell[own]), return_index=True)
    product = work.product[own]
    m, n, k, copies = product.T
    macs, loaded, read, written = work.work[own].T
    return _FamilyKernels(
        family=family,
        slots=slice(first, first + len(SLOTS)),
        cells=cells,
        starts=starts,
        times=work.times[own],
        macs=macs.copy(),
        loaded=loaded.copy(),
        moved=read + written if multiplies(family) else loaded + read + written,
        per_round=1.0 / waves(product, spec.multiprocessors),
        per_output=1.0 / (m * n * copies),
        per_k=1.0 / k,
        per_n=1.0 / n,
        least=least[own],
    )


def _numbered(terms: list[list[int]], parameters: Sequence[tuple[int, ...]]) -> Ints:
    """Local numbers of rows; rows with the same parameters share one."""
    number = {each: len(terms) + index for index, each in enumerate(dict.fromkeys(parameters))}
    terms += map(list, number)
    return np.array([number[each] for each in parameters], dtype=np.int64)


def _sums(terms: Sequence[Sequence[int]]) -> tuple[Ints, sparse.csr_matrix]:
    """The parameters among terms, and the matrix that adds them up, one row for each local number."""
    needed, columns = np.unique([position for each in terms for position in each], return_inverse=True)
    rows = np.repeat(np.arange(len(terms)), [len(each) for each in terms])
    return needed, sparse.csr_matrix((np.ones(len(rows)), (rows, columns)), shape=(len(terms), len(needed)))


class State(NamedTuple):
    """A block at some parameters: log latency of its rows, share of the host in it, and the two clocks."""

    log_us: Floats
    host_share: Floats
    host_us: Floats
    device_us: Floats
    slopes: Floats  # derivatives of log_us by local numbers, (rows, local numbers)


def state_of(block: Block, theta: Floats) -> State:
    """A block at some parameters."""
    local = block.local(theta)
    device = np.zeros(len(block.counts))
    by_device = np.zeros((len(device), block.classes.start))
    for kernels in block.kernels:
        us, *by_slot = kernels.us(local)
        device[kernels.cells] += us
        by_device[kernels.cells, kernels.slots] = np.transpose(by_slot)
    priced = block.counts * np.exp(local[block.classes])
    host = priced.sum(axis=1) + _TINY  # kernels timed by themselves have none
    log_host = np.log(host)[block.cell] + local[block.run] + local[block.run_group]
    log_device = np.log(device)[block.cell]
    power = float(np.exp(local[-1]))
    larger = np.maximum(log_host, log_device)
    below_host, below_device = log_host - larger, log_device - larger
    by_one, by_other = np.exp(power * below_host), np.exp(power * below_device)
    total = by_one + by_other
    share = by_one / total
    log_busy = larger + np.log(total) / power
    log_us = np.log(np.exp(log_busy) + block.waited_us) if block.waited_us else log_busy
    slopes = np.zeros((len(share), len(local)))
    each, of_host = np.arange(len(share)), share[:, None]
    slopes[:, : block.classes.start] = (1.0 - of_host) * (by_device / device[:, None])[block.cell]
    slopes[:, block.classes] = of_host * (priced / host[:, None])[block.cell]
    slopes[each, block.run] = share
    slopes[each, block.run_group] = share
    slopes[:, -1] = -np.log(total) / power + share * below_host + (1.0 - share) * below_device
    slopes *= np.exp(log_busy - log_us)[:, None]  # the rest is waiting
    return State(log_us, share, np.exp(log_host), np.exp(log_device), slopes)


def _memory(kernels: _FamilyKernels, numbers: Floats, us: Floats) -> None:
    """Fill in microseconds of kernels that move bytes, and their derivatives."""
    floor, moved = numbers[0], kernels.moved * numbers[_ACTIVATIONS]
    us[0] = floor + moved
    us[1], us[1 + _ACTIVATIONS] = floor, moved


def _product(kernels: _FamilyKernels, numbers: Floats, us: Floats) -> None:
    """The same of kernels that multiply."""
    floor, compute, weights, activations, waves_half, outputs, k_half, n_half = numbers
    loaded, moved = kernels.loaded * weights, kernels.moved * activations
    memory = loaded + moved
    busy = kernels.macs * compute
    rounds, k, n = waves_half * kernels.per_round, k_half * kernels.per_k, n_half * kernels.per_n
    shaped = busy * (1.0 + rounds) * (1.0 + k) * (1.0 + n)
    few = busy * kernels.per_output * outputs
    computing = shaped + few
    above = np.sqrt(computing**2 + memory**2) + _TINY
    us[0] = floor + above
    by_compute, by_memory = computing / above, memory / above
    shaped *= by_compute
    us[1] = floor
    np.multiply(by_compute, computing, out=us[2])
    np.multiply(by_memory, loaded, out=us[3])
    np.multiply(by_memory, moved, out=us[4])
    np.multiply(shaped, rounds / (1.0 + rounds), out=us[5])
    np.multiply(by_compute, few, out=us[6])
    np.multiply(shaped, k / (1.0 + k), out=us[7])
    np.multiply(shaped, n / (1.0 + n), out=us[8])
