"""Pricing: a schedule with one profile's costs attached, as arrays that turn batch sizes into times.

Host steps get their dispatch cost once. Kernels that do the same work share a row, and the rows of one fit are
evaluated together for all batches. What the times add up to is `latpred.prediction.clocks`' business.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from latpred import runtimes
from latpred.errors import ProfileError
from latpred.graph.features import NATIVE, Floats, kind
from latpred.graph.graph import Affine, Op
from latpred.graph.schedule import Ints, Schedule, numbered
from latpred.host import SAME, Slowdown
from latpred.ops.classes import kind_of
from latpred.ops.families import nearest, parent, root
from latpred.prediction.clocks import Timeline
from latpred.prediction.fallbacks import STAND_INS, Format, OtherFormat, format_of, guess
from latpred.prediction.kernel_times import KernelModel, Row, Rows
from latpred.prediction.tiles import TIME, fixed_factor, size_corrected
from latpred.profile.document import DeviceProfile, DispatchFit, KernelFit, SizeCorrection

MOST_KNOWN = 64  # sequences of classes


@dataclass(frozen=True, slots=True)
class ColdDispatch:
    """Dispatch of a schedule's steps from cold caches.

    most_us : ndarray, shape (n,), what each step takes longer at most. reuse_bytes : ndarray, shape (n, 2), constant
    and per-sample bytes touched since the last step of its class. half_bytes : bytes that bring half of it.
    """

    most_us: Floats
    reuse_bytes: Floats
    half_bytes: float

    @classmethod
    def of(
        cls, schedule: Schedule, fit: DispatchFit, slower: float = 1.0, moved: Floats | None = None
    ) -> ColdDispatch | None:
        """For a runtime's costs, all of them `slower` so many times; None where they are not known.

        Who has looked at the kernels already gives the bytes that the op of each has `moved`; see `_reuse_bytes`.
        """
        if not fit.cold_costs_us:
            return None
        names, code = numbered(schedule.host_class)
        most_us = np.array([slower * nearest(fit.cold_costs_us, name) for name in names], dtype=float)
        return cls(most_us[code], _reuse_bytes(schedule, moved), fit.cold_bytes)

    def at(self, batches: Floats) -> Floats:
        """Microseconds that each step takes longer at each batch, shape (n, batches)."""
        touched = self.reuse_bytes[:, :1] + self.reuse_bytes[:, 1:] * batches
        longer: Floats = self.most_us[:, None] * (touched / (touched + self.half_bytes))
        return longer


def _reuse_bytes(schedule: Schedule, moved: Floats | None = None) -> Floats:
    """Bytes that a forward pass, one of many, touches between two steps of a class: constant and per sample.

    `moved`, shape (m, 2), is what the op of each kernel reads and writes: reading that off all ops takes longer than
    everything else here, and a search prices the same few layers again and again.
    """
    each = (_moved(schedule) if moved is None else moved) * schedule.kernel_share[:, None]
    count = len(schedule.host_class)
    steps = np.empty((count, 2))
    for column in (0, 1):
        steps[:, column] = np.bincount(schedule.kernel_step, each[:, column], count)
    done = steps.cumsum(axis=0)
    before = done - steps
    previous, first = _previous(schedule.host_class)
    touched: Floats = before - before[previous]
    touched[first] += done[-1:]
    return touched


@lru_cache(maxsize=MOST_KNOWN)
def _previous(host_class: tuple[str, ...]) -> tuple[Ints, NDArray[np.bool_]]:
    """Where the last step of each step's class is, and which steps find it in the pass before; candidates share it."""
    _, code = numbered(host_class)
    order = code.argsort(kind="stable")  # steps of a class next to each other, in order
    first, last = np.ones((2, len(code)), dtype=bool)
    first[1:] = np.diff(code[order]) != 0
    last[:-1] = first[1:]
    before = np.empty_like(order)
    before[1:] = order[:-1]
    before[first] = order[last]
    previous, wraps = np.empty_like(order), np.empty_like(first)
    previous[order], wraps[order] = before, first
    return previous, wraps


def _moved(schedule: Schedule) -> Floats:
    """Bytes that the op of each kernel reads and writes, read off the ops."""
    ops = [schedule.ops[index] for index in schedule.kernel_op.tolist()]
    lines = ((*op.read_bytes, *op.weight_bytes, *op.write_bytes) for op in ops)
    summed: Floats = np.fromiter(chain.from_iterable(lines), float, 6 * len(ops)).reshape(-1, 3, 2).sum(axis=1)
    return summed


ESTIMATED_SPREAD = 0.7  # log standard deviation of a time that no formula or no measurement vouches for: a factor of 2
CALL = "call"  # the step that stands for what a forward pass costs before its first op

_PRECISIONS = {"float16": "fp16", "bfloat16": "bf16"}
_SINGLE = frozenset({"float32", "float64", "complex64", "complex128"})  # priced with the fits of fp32
# Families with the same dimensions that stand in for one that was not measured, the nearest first.
SUBSTITUTES = {
    "conv_depthwise": ("conv_grouped", "conv"),
    "conv_grouped": ("conv",),
    "conv_transpose": ("conv",),
}


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that one fit evaluates: where they start among all rows, and their columns as lines in batch."""

    model: KernelModel
    first: int
    constant: Floats
    per_sample: Floats
    leaf_scales: Floats
    least_spread: Floats


@dataclass(frozen=True, slots=True)
class RowTimes:
    """Of each distinct row at each batch: time in microseconds, spread of its log, and whether memory limits it."""

    us: Floats
    spread: Floats
    memory_bound: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Priced:
    """A schedule with costs.

    Attributes
    ----------
    timeline : Timeline
        Order of steps, kernels and synchronisations; the first step is the call itself.
    host_us : ndarray, shape (n + 1,)
        Dispatch time of each step with its code in the caches.
    cold : ColdDispatch, optional
        What steps take longer where it is not.
    groups : tuple[Group, ...]
        Distinct rows of work, by the fit that prices them.
    kernel_row, kernel_share : ndarray, shape (m,)
        Which row's time each kernel takes, and how much of it.
    row_counts, usual_spread : ndarray, shape (rows,)
        How often each row's work is done, and the spread its fit had on its own samples.
    classes : tuple[str, ...]
        Names of the breakdown.
    step_class : ndarray, shape (n + 1,)
        Which class each step belongs to.
    class_ops : ndarray, shape (classes,)
        Number of ops of each; a class that the host never dispatches counts what it computes.
    class_rows : ndarray, shape (classes, rows)
        How often each class does each row's work.
    families : ndarray, shape (families, rows)
        1 where a row belongs to a family.
    live : ndarray, shape (n, 2)
        Constant and per-sample bytes alive after each op.
    unmeasured : tuple[str, ...]
        Families that the profile has no fit for.
    caveats : tuple[str, ...]
        What may not hold of kernels in formats that were not measured.
    estimated : bool
        Whether some op has no formula.
    size_corrections : tuple[Tilt, ...]
        What the rows' times are multiplied by according to themselves.
    slowdown : Slowdown
        How much slower the machine is than the profile; `host_us` holds it already.
    """

    timeline: Timeline
    host_us: Floats
    cold: ColdDispatch | None
    groups: tuple[Group, ...]
    kernel_row: NDArray[np.int64]
    kernel_share: Floats
    row_counts: Floats
    usual_spread: Floats
    classes: tuple[str, ...]
    step_class: NDArray[np.int64]
    class_ops: NDArray[np.int64]
    class_rows: Floats
    families: Floats
    live: Floats
    unmeasured: tuple[str, ...]
    caveats: tuple[str, ...]
    estimated: bool
    size_corrections: tuple[SizeCorrection, ...]
    slowdown: Slowdown = SAME

    def host_at(self, batches: Floats) -> Floats:
        """Dispatch time of each step at every batch, shape (n + 1, batches)."""
        warm = np.repeat(self.host_us[:, None], len(batches), axis=1)
        if self.cold is not None:
            warm[1:] += self.cold.at(batches)
        return warm

    def class_host_at(self, host_us: Floats) -> Floats:
        """Host time of each class, from that of each step; both with an axis of batches."""
        sums = np.zeros((len(self.classes), host_us.shape[1]))
        np.add.at(sums, self.step_class, host_us)
        return sums

    def rows_at(self, batches: Floats) -> RowTimes:
        """Times of every distinct row at every batch."""
        shape = (self.families.shape[1], len(batches))
        us, spread, memory_bound = np.empty(shape), np.empty(shape), np.empty(shape, dtype=bool)
        for group in self.groups:
            count, columns = group.constant.shape
            rows = group.constant[:, None, :] + group.per_sample[:, None, :] * batches[:, None]
            times = group.model.times(rows.reshape(-1, columns), np.repeat(group.leaf_scales, len(batches)))
            part = slice(group.first, group.first + count)
            us[part] = times.us.reshape(count, -1)
            spread[part] = np.maximum(times.spread.reshape(count, -1), group.least_spread[:, None])
            memory_bound[part] = times.memory_bound.reshape(count, -1)
        for size_correction in self.size_corrections:
            us *= size_corrected(size_correction, us)
        if self.slowdown != SAME:
            us *= np.where(memory_bound, self.slowdown.memory, self.slowdown.compute)
        return RowTimes(us, spread, memory_bound)


class PriceList:
    """Costs of a profile, looked up once: dispatch by class, kernel fits by precision and family.

    Parameters
    ----------
    profile : DeviceProfile
        What was measured.
    slowdown : Slowdown
        How much slower the machine is than when that was done.
    """

    def __init__(self, profile: DeviceProfile, slowdown: Slowdown = SAME) -> None:
        self._profile = profile
        self._slowdown = slowdown
        self._models: dict[tuple[int, bool], KernelModel] = {}
        self._guesses: dict[str, KernelModel] = {}
        self._others: dict[tuple[int, Format], OtherFormat] = {}
        self._known: dict[tuple[str, str, float], Rows] = {}

    def price(self, schedule: Schedule, precision: str, *, resident: float = 0.0) -> Priced:
        """Attach costs to a schedule.

        The `resident` share of the weights stays in the last-level cache between passes; it is read as activations are.

        Raises
        ------
        ProfileError
            When the profile does not cover the runtime or the precision.
        """
        dispatch = self.dispatch(schedule.runtime)
        self.fits(precision)
        rows, kernel_row = self._rows(schedule.runtime, precision, resident).of(schedule)
        share = schedule.kernel_share * np.array([row.scale for row in rows])[kernel_row]
        cold = None
        # A GPU's kernels leave the host's caches alone, wherever the costs of its dispatch were measured.
        if dispatch.cold_costs_us and not self._profile.device.asynchronous:
            moved = np.array([row.moved for row in rows]).reshape(-1, 2)[kernel_row]
            cold = ColdDispatch.of(schedule, dispatch, self._slowdown.dispatch, moved)
        groups, order = _grouped(rows)
        kernel_row = order[kernel_row]
        dispatch_us = _dispatch_times(schedule, dispatch) * self._slowdown.dispatch
        calls_us = _call_times(schedule, dispatch) * self._slowdown.dispatch
        classes, of_step, of_op = _classes(schedule)
        cells = of_op[schedule.kernel_op] * len(rows) + kernel_row
        done = np.bincount(cells, share, len(classes) * len(rows)).astype(float)
        class_rows = done.reshape(len(classes), len(rows))
        dispatched = np.bincount(of_step, minlength=len(classes))
        return Priced(
            timeline=Timeline.of(_with_call(schedule)),
            host_us=calls_us + np.concatenate(([0.0], dispatch_us)),
            cold=cold,
            groups=groups,
            kernel_row=kernel_row,
            kernel_share=share,
            row_counts=class_rows.sum(axis=0),
            usual_spread=_usual(rows, order),
            classes=classes,
            step_class=of_step,
            class_ops=np.where(dispatched, dispatched, np.bincount(of_op, minlength=len(classes))),
            class_rows=class_rows,
            families=_one_hot(rows, order),
            live=_lines(op.live_bytes for op in schedule.ops),
            unmeasured=tuple(dict.fromkeys(row.family for row in rows if not row.measured)),
            caveats=tuple(dict.fromkeys(row.model.caveat for row in rows if row.model.caveat)),
            estimated=any(op.estimated for op in schedule.ops),
            size_corrections=tuple(each for each in dispatch.kernel_tilts if each.of == TIME),
            slowdown=self._slowdown,
        )

    def dispatch(self, runtime: str) -> DispatchFit:
        """Host costs of a runtime.

        Raises
        ------
        ProfileError
            When the profile has none.
        """
        try:
            return self._profile.runtimes[runtime]
        except KeyError:
            known = ", ".join(self._profile.runtimes) or "none"
            kind = self._profile.device.kind
            where = {"cpu": "", "cuda": " --device cuda:0"}.get(kind, f" --device {kind}")
            missing = None if kind == "simulated" else runtimes.get(runtime).available()
            first = f"; first: {missing}" if missing else ""
            raise ProfileError(
                f"Profile {self._profile.name!r} has no dispatch costs of runtime {runtime!r} (it has: {known}). "
                f"Measure them with: latpred calibrate{where} --runtimes {runtime}{first}"
            ) from None

    def fits(self, precision: str) -> dict[str, KernelFit]:
        """Kernel fits of a precision, by family.

        Raises
        ------
        ProfileError
            When the profile has none.
        """
        fits = self._profile.kernels.get(precision) or self._profile.kernels.get(STAND_INS.get(precision, precision))
        if not fits:
            known = ", ".join(self._profile.kernels) or "none"
            raise ProfileError(
                f"Profile {self._profile.name!r} has no kernels in {precision} (it has: {known}). "
                "Ask for one of those, or calibrate a device that does this one well."
            )
        return fits

    def _rows(self, runtime: str, precision: str, resident: float) -> Rows:
        key = runtime, precision, resident
        if key not in self._known:
            self._known[key] = Rows(lambda op, family: self._size_corrected(op, family, precision, runtime), resident)
        return self._known[key]

    def _size_corrected(
        self, op: Op, family: str, precision: str, runtime: str
    ) -> tuple[KernelModel, float, float, bool]:
        """As `_model`, with the runtime's scale tilted by the op's size."""
        model, leaf_scale, scale, measured = self._model(op, family, precision, runtime)
        other = format_of(op, self._profile)
        if other is not None:
            key = id(model), other  # kept, as the models are
            if key not in self._others:
                self._others[key] = OtherFormat(model, other)
            model = self._others[key]
        return model, leaf_scale, scale * fixed_factor(self.dispatch(runtime).kernel_tilts, op), measured

    def _model(self, op: Op, family: str, precision: str, runtime: str) -> tuple[KernelModel, float, float, bool]:
        """The fit for an op's kernel, its leaf's scale, the runtime's, and whether the family was measured at all."""
        wanted = precision_of(op.dtype, precision, self._profile)
        dispatch, fits = self.dispatch(runtime), self.fits(wanted)
        own = dispatch.kernels.get(wanted, {})
        scale = dispatch.kernel_scales.get(root(family), dispatch.kernel_scales.get("", 1.0))
        by_pytorch = self._profile.device.kind == "cpu" and op.name.startswith("aten::")  # all others have libraries
        native = fits.get(NATIVE) if by_pytorch else None
        for source in (own, fits):
            name: str | None = kind(family, op.dims)
            while name is not None:
                if name in source:
                    model = self._cached(source[name], None if source is own else native)
                    leaf_scale = nearest(source[name].leaf_scales, family, 1.0)
                    return model, leaf_scale, 1.0 if source is own else scale, True
                name = parent(name)
        for substitute in SUBSTITUTES.get(root(family), ()):
            if substitute in fits:
                return self._cached(fits[substitute], native), 1.0, scale, False
        if wanted not in self._guesses:
            self._guesses[wanted] = KernelModel(guess(self._profile, fits, ESTIMATED_SPREAD))
        return self._guesses[wanted], 1.0, scale, False

    def _cached(self, fit: KernelFit, native: KernelFit | None = None) -> KernelModel:
        key = id(fit), native is None  # the profile keeps every fit alive
        if key not in self._models:
            other = None if native is None or native is fit else self._cached(native)
            self._models[key] = KernelModel(fit, other, self._profile.machine.threads)
        return self._models[key]


def host_cost(fit: DispatchFit, name: str) -> float:
    """Dispatch cost of a class: its own, that of the nearest more general class, or that of any op."""
    return nearest(fit.costs_us, name)


def _dispatch_times(schedule: Schedule, fit: DispatchFit) -> Floats:
    """What the host takes to dispatch each step."""
    names, code = numbered(schedule.host_class)
    prices: Floats = fit.scale * np.array([host_cost(fit, name) for name in names], dtype=float)
    return prices[code]


def _call_times(schedule: Schedule, fit: DispatchFit) -> Floats:
    """What the pass itself takes before its first step, and what module and Python calls take before each."""
    calls = schedule.module_calls * fit.module_call_us + schedule.python_calls * fit.python_call_us
    return np.concatenate(([fit.fixed_us], calls * fit.scale))


def _with_call(schedule: Schedule) -> Schedule:
    """The same schedule with the call itself as a first step."""
    return replace(schedule, kernel_step=schedule.kernel_step + 1, sync=np.concatenate(([0], schedule.sync)))


def _grouped(rows: list[Row]) -> tuple[tuple[Group, ...], NDArray[np.int64]]:
    """Rows sorted by the fit that prices them, and where each of them went."""
    by_model: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        by_model.setdefault(id(row.model), []).append(index)
    groups, first = [], 0
    for indices in by_model.values():
        own = [rows[index] for index in indices]
        lines = np.array([row.columns for row in own])
        leaf_scales = np.array([row.leaf_scale for row in own])
        least_spread = np.array([ESTIMATED_SPREAD if row.guessed else 0.0 for row in own])
        groups.append(Group(own[0].model, first, lines[:, :, 0], lines[:, :, 1], leaf_scales, least_spread))
        first += len(own)
    order = np.empty(len(rows), dtype=np.int64)
    order[list(chain.from_iterable(by_model.values()))] = np.arange(len(rows))
    return tuple(groups), order


def _lines(lines: Iterable[Affine]) -> Floats:
    """Lines as an array of two columns."""
    return np.fromiter(chain.from_iterable(lines), dtype=float).reshape(-1, 2)


def _one_hot(rows: list[Row], order: NDArray[np.int64]) -> Floats:
    names, positions = numbered(tuple(root(row.family) for row in rows))
    matrix = np.zeros((len(names), len(rows)))
    matrix[positions, order] = 1.0
    return matrix


def _usual(rows: list[Row], order: NDArray[np.int64]) -> Floats:
    """Spread that each row's fit had on its own samples; nothing is usual about a row that is only guessed."""
    spreads = np.empty(len(rows))
    spreads[order] = [0.0 if row.guessed else row.model.fit.spread for row in rows]
    return spreads


def _classes(schedule: Schedule) -> tuple[tuple[str, ...], NDArray[np.int64], NDArray[np.int64]]:
    """Names of the breakdown, and which of them each step (the call first) and each op belongs to."""
    names = {CALL: 0}
    own, code = numbered(schedule.host_class)
    known = {name: names.setdefault(kind_of(name), len(names)) for name in own}
    of_step = np.concatenate(([0], np.array(list(known.values()), dtype=np.int64)[code]))
    for name in dict.fromkeys([op.host_class for op in schedule.ops]):
        known[name] = names.setdefault(kind_of(name), len(names))
    of_op = np.array([known[op.host_class] for op in schedule.ops], dtype=np.int64)
    return tuple(names), of_step, of_op


def precision_of(dtype: str, precision: str, profile: DeviceProfile) -> str:
    """The precision whose fits an op's dtype needs: masks and positions in a half-precision model are not halves."""
    single = precision if precision in ("fp32", "tf32") else "fp32"
    wanted = single if dtype in _SINGLE else _PRECISIONS.get(dtype, precision)
    return wanted if profile.kernels.get(wanted) else precision
