"""The law: latency of each row of a table from parameters, and its derivatives.

Derivatives are taken by the local numbers of each block (see `latpred.calibration.tablefit.blocks`); a sparse matrix
leads from there to the parameters, which keeps normal equations small.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from latpred.calibration.tablefit.blocks import Block, Part, Place, Rows, draft
from latpred.calibration.tablefit.cells import Cells
from latpred.calibration.tablefit.parameters import Builder, Parameters
from latpred.calibration.tablefit.priors import Form, multiplies
from latpred.features import Floats
from latpred.promised import SLOTS
from latpred.specs import Spec

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


class Law:
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

    def __init__(self, cells: Cells, rows: Rows, gpus: dict[str, Spec], form: Form) -> None:
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
