"""Kernel rows: the distinct work of a schedule, and what prices it, known again in the next schedule.

Ops of one layer do the same work wherever the layer stands, in a model and in the many candidates of a search.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from latpred.features import WORK, Floats, layout
from latpred.graph import Line, Op
from latpred.kerneltime import KernelModel
from latpred.profile import DeviceInfo
from latpred.schedule import Schedule

MOST_KNOWN = 20_000  # ops whose row is remembered
RESIDENT_STEPS = 8  # so few that batches and models share their prices

Priceable = Callable[[Op, str], tuple[KernelModel, float, float, bool]]


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A distinct row: what prices it, and what the runtime makes of that time. There is one object for each.

    `columns` holds the constant and the slope of each of the family's columns.
    """

    model: KernelModel
    family: str
    columns: Floats
    leaf_scale: float
    scale: float
    measured: bool
    guessed: bool


class _Known:
    """What is remembered of ops; all of it is forgotten together, since there must not be two objects of one row."""

    def __init__(self) -> None:
        self.by_op: dict[tuple[int, str], Row] = {}
        self.by_parts: dict[tuple[object, ...], Row] = {}
        self.by_work: dict[tuple[object, ...], Row] = {}
        self.ops: list[Op] = []  # kept, so that nothing else gets the identities of these and their parts


class Rows:
    """Rows of one precision in one runtime.

    Parameters
    ----------
    priceable : callable
        From an op and its kernel's family to a model, the leaf's scale, the runtime's, and whether it was measured.
    resident : float
        Share of the weights that stays in the cache; see `columns`.
    """

    def __init__(self, priceable: Priceable, resident: float) -> None:
        self._priceable = priceable
        self._resident = resident
        self._known = _Known()

    def of(self, schedule: Schedule) -> tuple[list[Row], NDArray[np.int64]]:
        """Distinct rows in order of appearance, and which of them each kernel is."""
        if len(self._known.ops) > MOST_KNOWN:
            self._known = _Known()
        known = self._known
        ops = [schedule.ops[index] for index in schedule.kernel_op.tolist()]
        keys = list(zip(map(id, ops), schedule.kernel_family, strict=True))
        found = list(map(known.by_op.get, keys))
        rows = [row or self._seen(known, key, op) for row, key, op in zip(found, keys, ops, strict=True)]
        numbers = {row: number for number, row in enumerate(dict.fromkeys(rows))}
        return list(numbers), np.array([numbers[row] for row in rows], dtype=np.int64)

    def _seen(self, known: _Known, key: tuple[int, str], op: Op) -> Row:
        """The row of an op that is new; the same walk may have found others like it."""
        family = key[1]
        shared = (op.dims, op.macs, op.weight_bytes, op.read_bytes, op.write_bytes)
        # Ops that a walk found alike share these objects, whose identities are compared faster than their values.
        parts = (family, op.name, op.dtype, op.estimated, *map(id, shared))
        row = known.by_parts.get(parts)
        if row is None:
            row = known.by_parts[parts] = self._row(known, op, family)
        known.by_op[key] = row
        known.ops.append(op)
        return row

    def _row(self, known: _Known, op: Op, family: str) -> Row:
        aten = op.name.startswith("aten::")
        work = (op.macs, op.weight_bytes, op.read_bytes, op.write_bytes, *op.dims.values())
        key = (family, aten, op.dtype, op.estimated, *work)
        row = known.by_work.get(key)
        if row is None:
            model, leaf_scale, scale, measured = self._priceable(op, family)
            lines = np.array(columns(op, model.fit.family, resident=self._resident), dtype=float)
            guessed = op.estimated or not measured
            row = known.by_work[key] = Row(model, family, lines, leaf_scale, scale, measured, guessed)
        return row


def resident_share(parameter_bytes: int, touched_bytes: float, device: DeviceInfo) -> float:
    """How much of its weights a forward pass finds in the cache where it left them, in steps of an eighth.

    What a pass touches in all decides, since activations push weights out: all is found up to `resident_bytes`, nothing
    from twice that. Profiles that were measured before that was known, which say nothing of `resident_bytes`, go by the
    weights alone.

    >>> from latpred.profile import DeviceInfo
    >>> cpu = DeviceInfo(name="cpu", kind="cpu", asynchronous=False, memory_bytes=0, resident_bytes=8 << 20)
    >>> [resident_share(1 << 20, megabytes << 20, cpu) for megabytes in (4, 10, 20)]
    [1.0, 0.75, 0.0]
    """
    if parameter_bytes <= 0:
        return 0.0
    if not device.resident_bytes:
        return float(parameter_bytes <= device.cache_bytes)
    most = max(parameter_bytes, touched_bytes) / device.resident_bytes
    return round(RESIDENT_STEPS * min(max(2.0 - most, 0.0), 1.0)) / RESIDENT_STEPS


def columns(op: Op, family: str, *, resident: float = 0.0) -> tuple[Line, ...]:
    """An op's work and dimensions, in the columns of a family.

    Weights come from memory each time, but for the share that is `resident` in the cache: that is read as activations.

    An op priced by another family than its own lacks some of its dimensions: elements are then counted as 4 bytes each,
    and everything else as 1.
    """
    elements = Line(op.write_bytes.constant // 4, op.write_bytes.per_sample // 4)
    missing = {"numel": elements}
    dims = layout(family).columns[len(WORK) :]
    weights, reads = op.weight_bytes, op.read_bytes
    if resident:
        found = Line(*(round(resident * amount) for amount in weights))
        weights = Line(weights.constant - found.constant, weights.per_sample - found.per_sample)
        reads = Line(reads.constant + found.constant, reads.per_sample + found.per_sample)
    work = (op.macs, weights, reads, op.write_bytes)
    return (*work, *(op.dims.get(name) or missing.get(name) or Line(1) for name in dims))
