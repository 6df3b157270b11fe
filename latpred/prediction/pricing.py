"""Pricing: a schedule with one profile's costs attached, as arrays that turn batch sizes into times.

Host steps get their dispatch cost once. Kernels that do the same work share a row, and the rows of one fit are
evaluated together for all batches. What the times add up to is `latpred.prediction.clocks`' business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from latpred import runtimes
from latpred.errors import ProfileError, UsageError
from latpred.graph.features import NATIVE, ROW_BY_ROW, WORK, Floats, finer_family
from latpred.graph.graph import CONTIGUOUS, Ints, Op, OpFacts, Schedule, host_class_of, numbered
from latpred.host import SAME, Slowdown
from latpred.ops.families import kind_of, lineage, nearest, root
from latpred.prediction.clocks import Timeline
from latpred.prediction.fallbacks import (
    GUESSED_LOG_STD,
    MEASURED,
    PRICED_AS,
    UNKNOWN_LOG_STD,
    Format,
    OtherFormat,
    format_of,
    guess,
)
from latpred.prediction.kernel_times import (
    LARGE_BLOCK,
    KernelEstimate,
    KernelModel,
    columns,
    fresh_bytes,
    reread_share,
    size_corrected,
    slower_kernels,
)
from latpred.profile import gpus
from latpred.profile.datasheet import Limits, limits_of
from latpred.profile.document import DeviceProfile, DispatchFit, KernelFit, SizeCorrection, call_prices
from latpred.profile.store import calibration
from latpred.query import AMP, HALVES
from latpred.runtimes.legacy_torch import TORCH_1_12
from latpred.storage import Recent

KEPT_ROWS = 20_000
KEPT_COSTS = 64  # of classes that schedules have together
KEPT_BATCHES = 8  # batch sizes at which the times of rows are kept; those of long curves are not worth their memory
CALL = "call"  # the step that stands for what a forward pass costs before its first op

TIME = "time"
SIZES = (TIME, "window", "channels")
"""Sizes that a correction may be of: the kernel's own time in microseconds, at full speed and before factors on its
family, and two of convolutions: the taps of the window, and the geometric mean of the channels it reads and writes."""

_FAR = (math.inf, 0.0)  # weights that the pass reads once
_WEIGHTS, _READS = WORK.index("weight_bytes"), WORK.index("read_bytes")
_BYTES = slice(WORK.index("weight_bytes"), WORK.index("write_bytes") + 1)
_PRECISIONS = {"float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "fp16", "float8_e5m2": "fp16"}
_SINGLE = frozenset({"float32", "float64", "complex64", "complex128"})  # priced with the fits of fp32
# Families with the same dimensions that stand in for one that was not measured, the nearest first.
SUBSTITUTES = {"conv_depthwise": ("conv_grouped", "conv"), "conv_grouped": ("conv",), "conv_transpose": ("conv",)}


def scaled_likes(fits: Mapping[str, object], family: str) -> list[str]:
    """The families among fits whose numbers few samples of another family scale."""
    one = root(family)
    return [name for name in SUBSTITUTES.get(one, ()) if one in getattr(fits.get(name), "leaf_scales", ())]


@dataclass(frozen=True, slots=True)
class ColdDispatch:
    """Dispatch of a schedule's steps from cold caches."""

    most_us: Floats  # (n, 4): what each step takes longer at most, by kind as in `Priced.host_us`
    reuse_bytes: Floats  # (n, 2): constant and per-sample bytes touched since the last step of its class
    half_bytes: float  # that bring half of it

    @classmethod
    def of(cls, schedule: Schedule, fit: DispatchFit, slower: float = 1.0) -> ColdDispatch | None:
        """For a runtime's costs, all of them `slower` so many times; None where cold caches cost its steps nothing."""
        if not fit.cold_costs_us:
            return None
        names, code = numbered(schedule.host_class)
        ops_us = np.array([nearest(fit.cold_costs_us, name) for name in names], dtype=float)[code]
        most_us = _by_kind(ops_us, schedule, fit, fit.cold_calls * fit.scale)
        if not most_us.any():  # as of an interpreter's nodes: cold code was measured of none of their classes
            return None
        return cls(slower * most_us, _reuse_bytes(schedule), fit.cold_bytes)

    def at(self, batches: Floats) -> Floats:
        """Microseconds that each step takes longer at each batch, shape (n, batches)."""
        longer: Floats = self.most_us.sum(axis=1, keepdims=True) * self.share(batches)
        return longer

    def share(self, batches: Floats) -> Floats:
        """Of the most that each step takes longer, what it does at each batch, shape (n, batches)."""
        touched = self.reuse_bytes[:, :1] + self.reuse_bytes[:, 1:] * batches
        return touched / (touched + self.half_bytes)


def _by_kind(ops_us: Floats, schedule: Schedule, fit: DispatchFit, scale: float) -> Floats:
    """Host times of steps, (n, 4): of what they dispatch, and of each kind of `Calls` before it."""
    return np.column_stack((ops_us, schedule.calls * (scale * np.array(call_prices(fit)))))


# Bytes that each op reads and writes, weights included: constant and per sample.
moved = OpFacts({"bytes": "2d"}, lambda op: op.read_bytes + op.weight_bytes + op.write_bytes)


def _reuse_bytes(schedule: Schedule) -> Floats:
    """Bytes that a forward pass, one of many, touches between two steps of a class: constant and per sample."""
    each = moved(schedule.ops)["bytes"][schedule.kernel_op] * schedule.kernel_share[:, None]
    count = len(schedule.host_class)
    steps = np.array([np.bincount(schedule.kernel_step, column, count) for column in each.T], dtype=float).T
    done = steps.cumsum(axis=0)
    before = done - steps
    # Where the last step of each step's class is: in the pass before, if it is no earlier one.
    last, previous = dict(zip(schedule.host_class, range(count), strict=True)), np.empty(count, dtype=np.int64)
    for step, name in enumerate(schedule.host_class):
        previous[step], last[name] = last[name], step
    touched: Floats = before - before[previous]
    touched[previous >= np.arange(count)] += done[-1:]
    return touched


# What the times of a family rest on: a fit to samples (of a profile that was not measured, to all that there is), whole
# networks alone, a datasheet in a profile that was measured, or a guess from other families.
SAMPLED, NETWORKS, DATASHEET, GUESSED = "samples", "networks", "datasheet", "guess"


class KernelPrice(NamedTuple):
    """What prices an op's kernels: a model, and factors of its time above the floor and of all of it."""

    model: KernelModel | OtherFormat
    leaf_scale: float
    scale: float
    basis: str  # what the model rests on


class _KernelRow(NamedTuple):
    """Work that kernels have in common, its price, and what is known of it whatever the batch."""

    family: str
    kind: str  # the root of that, within which errors go together
    price: KernelPrice
    columns: Floats  # constant and slope of each column of its fit's family
    least_log_std: float  # of its time, whatever its fit says
    usual_log_std: float  # of its fit's errors on its own samples
    fresh: bool  # whether PyTorch makes memory for its result; other runtimes keep theirs
    reread: tuple[float, float]  # bytes touched since its weights were last read: constant and per sample


class KernelRows:
    """Rows of one precision in one runtime, where the `resident` share of the weights stays in the cache.

    Each has a number, which is found by an op's identity, else by its work. Its times at the batches asked for of late
    are kept for all schedules. Threads take turns.
    """

    def __init__(
        self,
        price: Callable[[Op], KernelPrice],
        resident: float,
        size_corrections: tuple[SizeCorrection, ...],
        slowdown: Slowdown,
        profile: DeviceProfile,
    ) -> None:
        self._price, self._resident = price, resident
        self._device, self._threads = profile.device, profile.machine.threads
        self._size_corrections, self._slowdown = size_corrections, slowdown
        self._by_work: dict[tuple[object, ...], int] = {}
        self.rows: list[_KernelRow] = []
        self._times: Recent[dict[int, list[float]]] = Recent(KEPT_BATCHES)
        self._lock = Lock()
        self._of_ops = OpFacts(
            {"row": "q", "live": "2d", "estimated": "q"},
            lambda op: (self._number(op) if op.family else -1, *op.live_bytes, op.estimated),
        )

    def of(self, schedule: Schedule) -> tuple[NDArray[np.void], Ints, Ints]:
        """Facts of the schedule's ops; numbers of its rows in order of appearance, and which of them each kernel is."""
        with self._lock:
            ops = self._of_ops(schedule.ops)
        found = ops["row"][schedule.kernel_op]
        if found.min(initial=0) < 0:
            raise UsageError("A schedule launches a kernel of an op that has no family; give the op one.")
        distinct = np.fromiter(dict.fromkeys(found.tolist()), np.int64)
        place = np.empty(len(self.rows), dtype=np.int64)
        place[distinct] = np.arange(len(distinct))
        return ops, distinct, place[found]

    def times(self, numbers: Ints, batches: Floats) -> KernelEstimate:
        """Times of rows, (rows, batches); those of few batches are kept, and are the same whatever else was asked."""
        if len(batches) > KEPT_BATCHES:
            return self._evaluated(numbers.tolist(), batches)
        with self._lock:
            at = [self._kept(numbers.tolist(), batch) for batch in batches.tolist()]
        us, log_std, memory_bound = np.array(at).reshape(len(batches), len(numbers), 3).transpose(2, 1, 0)
        return KernelEstimate(us, log_std, memory_bound != 0.0)

    def _kept(self, numbers: list[int], batch: float) -> list[list[float]]:
        """The three columns of an estimate at one batch, for each row; what is not known yet is evaluated first."""
        held = self._times.get(batch, dict)
        unknown = sorted(set(numbers) - held.keys())
        if unknown:
            evaluated = np.concatenate(self._evaluated(unknown, np.array([batch])), axis=1)
            held.update(zip(unknown, evaluated.tolist(), strict=True))
        return list(map(held.__getitem__, numbers))

    def _evaluated(self, numbers: list[int], batches: Floats) -> KernelEstimate:
        """Times of rows at batches, those of one fit together, or at one batch so few of them that bits are certain."""
        us, log_std, memory_bound = np.empty((3, len(numbers), len(batches)))
        by_model: dict[int, list[int]] = {}
        for place, number in enumerate(numbers):
            by_model.setdefault(id(self.rows[number].price.model), []).append(place)
        most = ROW_BY_ROW if len(batches) == 1 else len(numbers)
        together = [each[start : start + most] for each in by_model.values() for start in range(0, len(each), most)]
        for places in together:
            rows = [self.rows[numbers[place]] for place in places]
            us[places], log_std[places], memory_bound[places] = self._of_one_fit(rows, batches)
        return KernelEstimate(us, log_std, memory_bound != 0.0)

    def _of_one_fit(self, rows: Sequence[_KernelRow], batches: Floats) -> KernelEstimate:
        """Times of rows that the same model prices, at batches."""
        model, shape = rows[0].price.model, (len(rows), len(batches))
        work = np.array([row.columns for row in rows])
        each = work[:, None, :, 0] + work[:, None, :, 1] * batches[:, None]
        facts = np.array([(row.price.leaf_scale, row.least_log_std, row.fresh, *row.reread) for row in rows])
        leaf_scale, least_log_std, fresh, reread, reread_per_sample = facts.T[:, :, None]
        # Weights still in the cache from earlier in the pass are read as activations.
        found = each[..., _WEIGHTS] * reread_share(reread + reread_per_sample * batches, self._device)
        each[..., _WEIGHTS] -= found
        each[..., _READS] += found
        flat = each.reshape(-1, each.shape[2])
        times = model.times(flat, leaf_scale.repeat(len(batches)))
        full_us = times.us.reshape(shape)
        us = full_us * slower_kernels(self._slowdown, model.fit.family, each)
        if self._device.fresh_bytes_per_us and each[..., _BYTES].max() >= LARGE_BLOCK:
            made = fresh * fresh_bytes(model.fit.family, flat, self._threads).reshape(shape)
            waiting_us = made / self._device.fresh_bytes_per_us
            us, full_us = us + waiting_us, full_us + waiting_us
        size = full_us / model.fit.scale
        for size_correction in self._size_corrections:
            factor = size_corrected(size_correction, size)
            us, size = us * factor, size * factor
        log_std = np.maximum(times.log_std.reshape(shape), least_log_std)
        return KernelEstimate(us, log_std, times.memory_bound.reshape(shape))

    def _number(self, op: Op) -> int:
        """The number of an op's row, which is made for the first of its work."""
        aten = op.name.startswith("aten::")
        work = (op.macs, op.weight_bytes, op.read_bytes, op.write_bytes, *op.dims.values())
        named = "" if op.dtype in MEASURED else op.name  # by which other formats are priced
        by_work = (op.family, aten, op.name.endswith("_"), named, op.dtype, op.estimated, op.reread_after, *work)
        number = self._by_work.get(by_work)
        if number is None:
            row = self._made(op)  # which may refuse
            number = self._by_work[by_work] = len(self.rows)
            self.rows.append(row)
        return number

    def _made(self, op: Op) -> _KernelRow:
        price = self._price(op)
        kind, guessed = root(op.family), op.estimated or price.basis == GUESSED
        return _KernelRow(
            family=op.family,
            kind=kind,
            price=price,
            columns=np.array(columns(op, price.model.fit.family, resident=self._resident), dtype=float),
            least_log_std=UNKNOWN_LOG_STD if kind == "other" else GUESSED_LOG_STD if guessed else 0.0,
            # Nothing is usual about a guess, and networks do not vouch for kernels that few of them have.
            usual_log_std=0.0 if op.estimated or price.basis != SAMPLED else price.model.fit.spread,
            fresh=op.name.startswith("aten::") and not op.name.endswith("_"),
            reread=op.reread_after or _FAR,
        )


@dataclass(frozen=True, slots=True)
class Priced:
    """A schedule with costs: of n steps and the call before them, m kernels, and rows of work that kernels share."""

    timeline: Timeline  # order of steps, kernels and synchronisations; the first step is the call itself
    # (n + 1, 4): the host's time of each step, its code in the caches: dispatch, and each kind of `Calls` before it.
    host_us: Floats
    cold: ColdDispatch | None  # what steps take longer where it is not
    rows: KernelRows  # those of other schedules too
    row_numbers: Ints  # (rows,): which of these are the schedule's, each once
    usual_log_std: Floats  # (rows,): of their fits' errors on their own samples
    families: Floats  # (families, rows): 1 where a row belongs to a family, in order of appearance
    unmeasured: tuple[str, ...]  # families that the profile has no fit for
    from_datasheet: tuple[str, ...]  # families that a measured profile has a datasheet's fit for
    caveats: tuple[str, ...]  # what may not hold of kernels in formats that were not measured
    kernel_row: Ints  # (m,): whose time each kernel takes
    kernel_share: Floats  # (m,): and how much of it
    classes: tuple[str, ...]  # names of the breakdown
    class_steps: Floats  # (classes, n + 1): 1 where a step belongs to a class
    class_ops: Ints  # ops of each; a class that the host never dispatches counts what it computes
    class_rows: Floats  # (classes, rows): how often each class does each row's work
    live: Floats  # (ops, 2): constant and per-sample bytes alive after each op
    estimated: tuple[str, ...]  # names of ops without a formula

    def times(self, batches: Floats) -> KernelEstimate:
        """Times of every row at every batch."""
        return self.rows.times(self.row_numbers, batches)

    def host_at(self, batches: Floats) -> Floats:
        """Dispatch time of each step at every batch, shape (n + 1, batches)."""
        warm = np.repeat(self.host_us.sum(axis=1, keepdims=True), len(batches), axis=1)
        if self.cold is not None:
            warm[1:] += self.cold.at(batches)
        return warm

    def host_by_kind(self, batch: int) -> Floats:
        """Host times of each step at one batch, by kind, from caches as cold as they are then."""
        us = self.host_us.copy()
        if self.cold is not None:
            us[1:] += self.cold.most_us * self.cold.share(np.array([float(batch)]))
        return us

    def live_at(self, batches: Floats | Ints) -> Floats:
        """Bytes alive after each op at every batch."""
        return self.live[:, :1] + self.live[:, 1:] * batches


class PriceList:
    """Costs of a profile on a machine that is slower than it by `slowdown`; what was looked up once is kept.

    `models` of its fits may be those of another list, so that they are made ready to evaluate once for both.
    """

    def __init__(
        self, profile: DeviceProfile, slowdown: Slowdown = SAME, models: dict[object, KernelModel] | None = None
    ) -> None:
        self._profile = profile
        self._slowdown = slowdown
        info = profile.device
        self.gpu = gpus.find(info.name) if info.kind == "cuda" else None  # its datasheet, if there is one
        self.models: dict[object, KernelModel] = {} if models is None else models
        self._other_formats: dict[tuple[int, Format], KernelModel | OtherFormat] = {}
        self._rows: dict[tuple[str, str, str, float], KernelRows] = {}
        self._costs: Recent[Floats] = Recent(KEPT_COSTS)

    def price(
        self, schedule: Schedule, precision: str, memory_format: str = CONTIGUOUS, *, resident: float = 0.0
    ) -> Priced:
        """Attach costs to a schedule.

        The `resident` share of the weights stays in the last-level cache between passes; it is read as activations are.
        """
        dispatch, precision = self.dispatch(schedule.runtime), AMP.get(precision, precision)
        self.fits(precision)
        rows = self._rows_of(schedule.runtime, precision, memory_format, resident)
        ops, row_numbers, kernel_row = rows.of(schedule)
        used = [rows.rows[number] for number in row_numbers.tolist()]
        scale, usual_log_std = np.array([(row.price.scale, row.usual_log_std) for row in used]).reshape(-1, 2).T
        share = schedule.kernel_share * scale[kernel_row]
        families, family = numbered(tuple(row.kind for row in used))
        classes, of_step, of_op = _classes(schedule)
        count = len(row_numbers)
        cells = of_op[schedule.kernel_op] * count + kernel_row
        class_rows = np.bincount(cells, share, len(classes) * count).astype(float).reshape(len(classes), count)
        dispatched = np.bincount(of_step, minlength=len(classes))
        # A GPU's kernels leave the host's caches alone, wherever the costs of its dispatch were measured.
        cold = None
        if not self._profile.device.asynchronous:
            cold = ColdDispatch.of(schedule, dispatch, self._slowdown.ops)
        return Priced(
            timeline=Timeline.of(schedule.kernel_step + 1, np.concatenate(([0], schedule.sync))),
            host_us=self._host_us(schedule, dispatch, precision, cold),
            cold=cold,
            rows=rows,
            row_numbers=row_numbers,
            usual_log_std=usual_log_std,
            families=(family == np.arange(len(families))[:, None]).astype(float),
            unmeasured=tuple(dict.fromkeys(row.family for row in used if row.price.basis == GUESSED)),
            from_datasheet=tuple(dict.fromkeys(row.family for row in used if row.price.basis == DATASHEET)),
            caveats=tuple(dict.fromkeys(row.price.model.caveat for row in used if row.price.model.caveat)),
            kernel_row=kernel_row,
            kernel_share=share,
            classes=classes,
            class_steps=(of_step == np.arange(len(classes))[:, None]).astype(float),
            class_ops=np.where(dispatched, dispatched, np.bincount(of_op, minlength=len(classes))),
            class_rows=class_rows,
            live=ops["live"],
            estimated=tuple(dict.fromkeys(schedule.ops[index].name for index in np.flatnonzero(ops["estimated"]))),
        )

    def dispatch(self, runtime: str) -> DispatchFit:
        """Host costs of a runtime; an error that says how to measure them where the profile has none."""
        try:
            return self._profile.runtimes[runtime]
        except KeyError:
            named: Any = runtimes.get(runtime)
            instead = f" --device {self.gpu.name} has an estimate of it." if self.gpu else ""
            if getattr(named, "predicted_only", False):
                said = f"Profile {self._profile.name!r} was measured. {named.available()}.{instead}"
                raise ProfileError(said) from None
            known = ", ".join(self._profile.runtimes) or "none"
            missing = None if self._profile.device.kind == "simulated" else named.available()
            first = f"; first: {missing}" if missing else ""
            raise ProfileError(
                f"Profile {self._profile.name!r} has no dispatch costs of runtime {runtime!r} (it has: {known}). "
                f"Measure them with: {calibration(self._profile)} --runtimes {runtime}{first}.{instead}"
            ) from None

    def fits(self, precision: str, memory_format: str = CONTIGUOUS) -> dict[str, KernelFit]:
        """Kernel fits of a precision, by family; an error where the profile has none.

        Only what differs in another memory format has fits of its own there, as under "fp16 channels_last".
        """
        precision = AMP.get(precision, precision)
        kernels = self._profile.kernels
        fits = kernels.get(precision) or kernels.get(PRICED_AS.get(precision, precision))
        if not fits:
            known = ", ".join(name for name in kernels if " " not in name) or "none"
            raise ProfileError(
                f"Profile {self._profile.name!r} has no kernels in {precision} (it has: {known}). "
                "Ask for one of those, or calibrate a device that does this one well."
            )
        return fits | kernels.get(f"{precision} {memory_format}", {})

    def _host_us(self, schedule: Schedule, fit: DispatchFit, precision: str, cold: ColdDispatch | None) -> Floats:
        """What the host takes for the call itself and for each step, with its code in the caches; see `Priced`."""
        names, code = numbered(schedule.host_class)
        costs = self._costs.get((schedule.runtime, names), lambda: np.array([host_cost(fit, name) for name in names]))
        scale = fit.scale * (fit.half_scale if precision in HALVES else 1.0)
        dispatch = self._slowdown.dispatch
        ops = dispatch if cold is None else self._slowdown.ops  # what cold caches cost nothing slows down as calls do
        steps = _by_kind((scale * ops * costs)[code], schedule, fit, scale * dispatch)
        return np.vstack(([fit.fixed_us * dispatch, 0.0, 0.0, 0.0], steps))

    def _rows_of(self, runtime: str, precision: str, memory_format: str, resident: float) -> KernelRows:
        key = runtime, precision, memory_format, resident
        if key not in self._rows or len(self._rows[key].rows) > KEPT_ROWS:
            by_time = tuple(one for one in self.dispatch(runtime).size_corrections if one.of == TIME)
            price = partial(self._price, runtime, precision, memory_format)
            self._rows[key] = KernelRows(price, resident, by_time, self._slowdown, self._profile)
        return self._rows[key]

    def _price(self, runtime: str, precision: str, memory_format: str, op: Op) -> KernelPrice:
        """What prices an op's kernels in a runtime, in the format that the op has."""
        price = self._fitted(runtime, precision, memory_format, op)
        model, scale, corrections = price.model, price.scale, self.dispatch(runtime).size_corrections
        if corrections:  # of sizes that are the same whatever the time
            sizes = kernel_sizes(op)
            factors = [size_corrected(one, np.array(sizes[one.of])) for one in corrections if one.of in sizes]
            scale *= math.prod(map(float, factors))
        other = format_of(op, _needed(op.dtype, precision), self._profile)
        if other is not None:
            model = self._other_formats.setdefault((id(model), other), OtherFormat(model, other))  # models are kept
        return price._replace(model=model, scale=scale)

    def _fitted(self, runtime: str, precision: str, memory_format: str, op: Op) -> KernelPrice:
        """The fit of a kernel's family, or of the nearest like it: the runtime's own, else the profile's."""
        family, wanted = op.family, precision_of(op.dtype, precision, self._profile)
        dispatch, fits = self.dispatch(runtime), self.fits(wanted, memory_format)
        runtime_fits = dispatch.kernels.get(wanted, {}) | dispatch.kernels.get(f"{wanted} {memory_format}", {})
        finer = finer_family(family, op.dims)
        scales = dispatch.kernel_scales
        names = list(lineage(finer))
        scaled = (*(f"{wanted}.{name}" for name in names), *names, "")
        scale = next((scales[name] for name in scaled if name in scales), 1.0)
        by_pytorch = self._profile.device.kind == "cpu" and op.name.startswith("aten::")  # all others have libraries
        native = fits.get(NATIVE) if by_pytorch else None
        substitutes = SUBSTITUTES.get(root(family), ())
        of_runtime = (*names, *scaled_likes(runtime_fits, family))
        for source, called, own in ((runtime_fits, of_runtime, True), (fits, names, False), (fits, substitutes, False)):
            fitted = next((source[name] for name in called if name in source), None)
            if fitted is not None:
                model = self._model(fitted, self._limits(wanted, family), None if own else native)
                guessed = called is substitutes and root(family) not in fitted.leaf_scales
                basis = GUESSED if guessed else self._basis(fitted, own)
                return KernelPrice(model, nearest(fitted.leaf_scales, family, 1.0), 1.0 if own else scale, basis)
        key = wanted, family if root(family) in ("rnn", "sort") else "other", by_pytorch
        if key not in self.models:
            made = guess(self._profile, fits, family, by_pytorch)
            self.models[key] = KernelModel(made, limits=self._limits(wanted, "other"))
        return KernelPrice(self.models[key], 1.0, scale, GUESSED)

    def _basis(self, fit: KernelFit, own: bool) -> str:
        """What a fit of the profile's, or of a runtime's own kernels, rests on."""
        if fit.points or self._profile.provenance != "measured":
            return SAMPLED
        if own:
            return NETWORKS
        return SAMPLED if self.gpu is None else DATASHEET

    def _model(self, fit: KernelFit, limits: Limits | None, native: KernelFit | None = None) -> KernelModel:
        key = id(fit), limits, native is None  # the profile keeps every fit alive
        if key not in self.models:
            other = None if native is None or native is fit else self._model(native, limits)
            self.models[key] = KernelModel(fit, other, self._profile.machine.threads, limits)
        return self.models[key]

    def _limits(self, precision: str, family: str) -> Limits | None:
        """What the device cannot do faster; None where nothing tells."""
        if self.gpu is not None:
            return limits_of(self.gpu, precision, family, before_2=self._profile.protocol.get("era") == TORCH_1_12)
        info = self._profile.device
        if info.kind != "cpu" or not (info.bandwidth_bytes_per_us and info.cache_bytes):
            return None
        fits = self.fits(precision) if root(family) == "rnn" else {}  # its steps are products
        rates = [fits[name].macs_per_us for name in ("gemm", "conv") if name in fits]
        # By the copy that measured its memory, which also reads what it writes over. What lies in a cache that
        # neighbours share is not known at all.
        bandwidth = 1.5 * info.bandwidth_bytes_per_us
        return Limits(max(rates, default=math.inf), bandwidth, 4.0 * info.cache_bytes, math.inf, math.inf)


def host_cost(fit: DispatchFit, name: str) -> float:
    """Dispatch cost of a class: its own, that of the nearest more general class, or that of any op.

    Python after the last op dispatches nothing: its calls have prices of their own.
    """
    return 0.0 if kind_of(name) == "python" else nearest(fit.costs_us, name)


def _classes(schedule: Schedule) -> tuple[tuple[str, ...], Ints, Ints]:
    """Names of the breakdown, and which of them each step (the call first) and each op belongs to."""
    steps, step = numbered(schedule.host_class)
    ops, op = numbered(tuple(map(host_class_of, schedule.ops)))
    places = {CALL: 0}
    of_steps = np.array([places.setdefault(kind_of(name), len(places)) for name in steps], np.int64)
    of_ops = np.array([places.setdefault(kind_of(name), len(places)) for name in ops], np.int64)
    return tuple(places), np.concatenate(([0], of_steps[step])), of_ops[op]


def precision_of(dtype: str, precision: str, profile: DeviceProfile) -> str:
    """The precision whose fits price an op: what its dtype needs, or the model's own where the profile lacks that."""
    precision = AMP.get(precision, precision)
    needed = _needed(dtype, precision)
    return needed if profile.kernels.get(needed) else precision


def _needed(dtype: str, precision: str) -> str:
    """The precision whose fits a dtype needs: masks and positions in a half-precision model are not halves."""
    single = precision if precision in ("fp32", "tf32") else "fp32"
    return single if dtype in _SINGLE else _PRECISIONS.get(dtype, precision)


def kernel_sizes(op: Op) -> dict[str, float]:
    """Sizes of an op's kernels that its dimensions tell at any batch; none for most."""
    if "kernel_h" not in op.dims:
        return {}
    height, width, entering, leaving = (op.dims[name].constant for name in ("kernel_h", "kernel_w", "c_in", "c_out"))
    by_name = {"window": float(height * width), "channels": math.sqrt(entering * leaving)}
    return {name: size for name, size in by_name.items() if size > 0}
