"""Kernel rows: the distinct work of a schedule, and what prices it, known again in the next schedule.

Ops of one layer do the same work wherever the layer stands, in a model and in the many candidates of a search.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from latpred.caches import Recent
from latpred.graph.features import WORK, Floats, Inputs, layout, native, read, waves
from latpred.graph.graph import Affine, Op
from latpred.graph.schedule import Schedule
from latpred.ops.families import root
from latpred.prediction.tiles import tiled
from latpred.profile.document import DeviceInfo, KernelFit

SQRT3 = 3.0**0.5
TINY_US = 1e-6
MOST_KEPT = 512  # sets of rows whose times are kept, for the many candidates of a search that share their layers
MOST_KEPT_VALUES = 1024  # in each of them; the sets of long curves are not worth their memory


class Terms(NamedTuple):
    """Parts of a roofline, in microseconds: the floor is one number, the others one per row.

    tiles : logarithms of how each product is cut; None for a roofline without tiles.
    """

    floor: float
    compute: Floats
    memory: Floats
    tiles: Floats | None = None


class Times(NamedTuple):
    """What is known of each row.

    us : time in microseconds. spread : standard deviation of its logarithm. memory_bound : whether memory takes longer
    than compute.
    """

    us: Floats
    spread: Floats
    memory_bound: NDArray[np.bool_]


class KernelModel:
    """A `KernelFit` ready to evaluate: its Cholesky factor is computed once.

    Parameters
    ----------
    fit : KernelFit
        Numbers of a fitted regressor.
    native : KernelModel, optional
        What takes over for the convolutions that PyTorch computes itself on a CPU with so many `threads`.
    """

    caveat = ""  # what may not hold of its times

    def __init__(self, fit: KernelFit, native: KernelModel | None = None, threads: int = 0) -> None:
        self.fit = fit
        self._native, self._threads = native, threads
        self._known: Recent[Times] = Recent(MOST_KEPT)
        self._scales = np.array(fit.length_scales)
        count = len(fit.points)
        self._points = np.array(fit.points).reshape(count, len(self._scales)) / self._scales
        self._norms = np.einsum("ij,ij->i", self._points, self._points)
        if count:
            noise = fit.noise * np.array(fit.noise_factors)
            covariance = self._covariance(self._points) + np.diag(noise)
            self._whiten = np.linalg.inv(np.linalg.cholesky(covariance)).T
            self._weights = self._whiten @ (np.array(fit.targets) @ self._whiten)
            self._whiten_single = self._whiten.astype(np.float32)  # to read half as much; enough for a variance

    def times(self, rows: Floats, leaf_scales: Floats | float = 1.0) -> Times:
        """Times of rows of `layout(family).columns`.

        Parameters
        ----------
        rows : ndarray, shape (n, columns)
            Work and dimensions.
        leaf_scales : ndarray, shape (n,), or float
            What the time above the floor is multiplied by, for rows of more special families.
        """
        if rows.size > MOST_KEPT_VALUES:
            return self._fresh(rows, leaf_scales)
        # Only all of these rows together: what is computed for one may differ in the last bit with those beside it.
        key = (rows.shape, rows.tobytes(), np.asarray(leaf_scales).tobytes())
        return self._known.get(key, lambda: self._fresh(rows, leaf_scales))

    def _fresh(self, rows: Floats, leaf_scales: Floats | float) -> Times:
        if self._native is None:
            return self._times(rows, leaf_scales)
        taken_over = native(self.fit.family, rows, self._threads)
        if not taken_over.any():
            return self._times(rows, leaf_scales)
        own, others = self._times(rows, leaf_scales), self._native.times(rows)
        return Times(*(np.where(taken_over, theirs, ours) for ours, theirs in zip(own, others, strict=True)))

    def _times(self, rows: Floats, leaf_scales: Floats | float) -> Times:
        terms, above, features = self._features(rows)
        log_residual, spread = self._residual(features)
        time = np.maximum(terms.floor + leaf_scales * above, TINY_US) * np.exp(log_residual) * self.fit.scale
        return Times(time, spread, terms.memory >= terms.compute)

    def _features(self, rows: Floats) -> tuple[Terms, Floats, Floats]:
        """The roofline of rows, its time above the floor, and the residual's features."""
        inputs = read(self.fit.family, rows)
        terms = roofline(self.fit, inputs)
        above = np.hypot(terms.compute, terms.memory)
        base = np.maximum(terms.floor + above, TINY_US)
        extras = extra_features(inputs, base, self.fit.multiprocessors, terms.tiles)
        extras += [flag(inputs) for name, flag in FLAGS.items() if name in self.fit.features]
        return terms, above, np.column_stack((inputs.logs, *extras))

    def covariance(self, rows: Floats) -> Floats:
        """What is not known of the logs of rows' times, and in what rows it goes together: (n, n), noise left out."""
        scaled = self._features(rows)[2] / self._scales
        known = self._covariance(scaled) @ self._whiten
        left: Floats = self._between(scaled, scaled) - known @ known.T
        return left

    def _residual(self, features: Floats) -> tuple[Floats, Floats]:
        if not len(self._points):
            return np.zeros(len(features)), np.full(len(features), self.fit.spread)
        covariance = self._covariance(features / self._scales)
        whitened = covariance.astype(np.float32) @ self._whiten_single
        known = np.einsum("ij,ij->i", whitened, whitened).astype(float)
        variance = np.maximum(self.fit.amplitude - known, 0.0) + self.fit.noise
        return covariance @ self._weights, np.sqrt(variance)

    def _covariance(self, scaled: Floats) -> Floats:
        return self._between(scaled, self._points, self._norms)

    def _between(self, left: Floats, right: Floats, norms: Floats | None = None) -> Floats:
        """Prior covariance of scaled features; `norms` are the right ones' squared lengths, where they are known."""
        covariance: Floats = self.fit.amplitude * correlation(left, right, self.fit.jumps, norms)
        return covariance


def correlation(left: Floats, right: Floats, jumps: bool, norms: Floats | None = None) -> Floats:
    """How far residuals go together: Matern 3/2, or where times jump, the exponential of a sum of distances.

    Parameters
    ----------
    left, right : ndarray, shapes (n, d) and (p, d)
        Features over length scales.
    jumps : bool
        See `KernelFit.jumps`.
    norms : ndarray, shape (p,), optional
        Squared lengths of the right ones, where they are known.
    """
    if jumps:
        far = np.zeros((len(left), len(right)))
        for ours, theirs in zip(left.T, right.T, strict=True):
            far += np.abs(ours[:, None] - theirs)
        near: Floats = np.exp(-far)
        return near
    norms = np.einsum("ij,ij->i", right, right) if norms is None else norms
    squared = np.einsum("ij,ij->i", left, left)[:, None] + norms - 2.0 * (left @ right.T)
    distance = SQRT3 * np.sqrt(np.maximum(squared, 0.0))
    smooth: Floats = (1.0 + distance) * np.exp(-distance)
    return smooth


def evaluate(fit: KernelFit, rows: Floats) -> Floats:
    """Microseconds of rows of work and dimensions.

    Parameters
    ----------
    fit : KernelFit
        What `RooflineRegressor.to_fit` gives.
    rows : ndarray, shape (n, columns)
        Columns as `latpred.graph.features.layout(fit.family).columns` names them.
    """
    return KernelModel(fit).times(np.asarray(rows, dtype=float)).us


def roofline(fit: KernelFit, inputs: Inputs) -> Terms:
    """Floor, compute and memory time of each row, without the residual."""
    work = inputs.work
    if fit.tiling and inputs.product is not None:
        us, memory, tiles = tiled(fit.tiling, work, inputs.product, fit.multiprocessors)
        # Their quadrature is the time of the tiles again.
        return Terms(fit.floor_us, np.sqrt(us**2 - memory**2), memory, tiles)
    weights, activations = _bandwidths(fit)
    memory = work[:, 1] * weights + (work[:, 2] + work[:, 3]) * activations
    compute = work[:, 0] * _inverse(fit.macs_per_us)
    if inputs.product is not None:
        compute = compute * idleness(fit.saturation, inputs.product, fit.multiprocessors, "one_row" in fit.features)
    if fit.efforts:
        compute = compute + inputs.efforts @ np.array(fit.efforts)
    return Terms(fit.floor_us, compute, memory)


def idleness(half_sizes: dict[str, float], product: Floats, multiprocessors: int, one_row: bool = False) -> Floats:
    """How many times longer a product takes than at full throughput: 1 when it is large in every direction.

    On a CPU a product of `one_row` has code of its own, which waits for nothing but the weights.

    However few its results are, each is a sum that takes one step after the other: that part adds to the others.
    """
    factor = np.ones(len(product))
    for column, name in enumerate(("m", "n", "k")):
        factor *= 1.0 + half_sizes.get(name, 0.0) / product[:, column]
    if multiprocessors:
        factor *= 1.0 + half_sizes.get("waves", 0.0) / waves(product, multiprocessors)
        factor += half_sizes.get("outputs", 0.0) / (product[:, 0] * product[:, 1] * product[:, 3])
    return np.where(product[:, 0] <= 1.0, 1.0, factor) if one_row else factor


def extra_features(inputs: Inputs, base: Floats, multiprocessors: int, tiles: Floats | None = None) -> list[Floats]:
    """Features of the residual beside the logs: the roofline's own time and, on a GPU, how full the last wave is.

    With `tiles`, also how each product is cut.
    """
    extras = [np.log(base)]
    if inputs.product is not None and multiprocessors:
        rounds = waves(inputs.product, multiprocessors)
        extras.append(np.log(np.ceil(rounds) / rounds))
    return extras if tiles is None else [*extras, *tiles.T]


def _one_row(inputs: Inputs) -> Floats:
    if inputs.product is None:
        return np.zeros(len(inputs.work))
    single: Floats = (inputs.product[:, 0] <= 1.0).astype(float)
    return single


def _resident(inputs: Inputs) -> Floats:
    cached: Floats = (inputs.work[:, 1] == 0.0).astype(float)
    return cached


# What a CPU's products differ by beside their sizes: libraries have other code for a single row, and weights that lie
# in the cache take another way than those that come from memory. Fits say in `features` which of them they know.
FLAGS = {"one_row": _one_row, "resident": _resident}


def flags_of(family: str, multiprocessors: int) -> tuple[str, ...]:
    """Names of the flags that fits of a family know.

    >>> flags_of("gemm", 0), flags_of("conv", 0), flags_of("gemm", 108)
    (('resident', 'one_row'), ('resident',), ())
    """
    if multiprocessors or layout(family).product is None:
        return ()
    return ("resident", "one_row") if root(family) == "gemm" else ("resident",)


def extra_names(product: bool, multiprocessors: int, tiles: bool = False) -> tuple[str, ...]:
    """Names of `extra_features`."""
    names = ("roofline", "last_wave") if product and multiprocessors else ("roofline",)
    return (*names, "tile_rows", "tile_cols", "parts") if tiles else names


def _bandwidths(fit: KernelFit) -> tuple[float, float]:
    """Microseconds per weight byte and per activation byte; one stands in for the other where it was never seen."""
    weights, activations = fit.weight_bytes_per_us, fit.activation_bytes_per_us
    return _inverse(weights or activations), _inverse(activations or weights)


def _inverse(rate: float) -> float:
    return 1.0 / rate if rate else 0.0


MOST_KNOWN = 20_000  # ops whose row is remembered
RESIDENT_STEPS = 8  # so few that batches and models share their prices
_BYTES = slice(WORK.index("weight_bytes"), WORK.index("write_bytes") + 1)

Priceable = Callable[[Op, str], tuple[KernelModel, float, float, bool]]


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A distinct row: what prices it, and what the runtime makes of that time. There is one object for each.

    `columns` holds the constant and the slope of each of the family's columns, `moved` those of all bytes read and
    written.
    """

    model: KernelModel
    family: str
    columns: Floats
    moved: tuple[float, float]
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
            constant, per_sample = lines[_BYTES].sum(axis=0).tolist()
            moved, guessed = (constant, per_sample), op.estimated or not measured
            row = known.by_work[key] = Row(model, family, lines, moved, leaf_scale, scale, measured, guessed)
        return row


def resident_share(parameter_bytes: int, touched_bytes: float, device: DeviceInfo) -> float:
    """How much of its weights a forward pass finds in the cache where it left them, in steps of an eighth.

    What a pass touches in all decides, since activations push weights out: all is found up to `resident_bytes`, nothing
    from twice that. Profiles that were measured before that was known, which say nothing of `resident_bytes`, go by the
    weights alone.

    >>> from latpred.profile.document import DeviceInfo
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


def columns(op: Op, family: str, *, resident: float = 0.0) -> tuple[Affine, ...]:
    """An op's work and dimensions, in the columns of a family.

    Weights come from memory each time, but for the share that is `resident` in the cache: that is read as activations.

    An op priced by another family than its own lacks some of its dimensions: elements are then counted as 4 bytes each,
    and everything else as 1.
    """
    elements = Affine(op.write_bytes.constant // 4, op.write_bytes.per_sample // 4)
    missing = {"numel": elements}
    dims = layout(family).columns[len(WORK) :]
    weights, reads = op.weight_bytes, op.read_bytes
    if resident:
        found = Affine(*(round(resident * amount) for amount in weights))
        weights = Affine(weights.constant - found.constant, weights.per_sample - found.per_sample)
        reads = Affine(reads.constant + found.constant, reads.per_sample + found.per_sample)
    work = (op.macs, weights, reads, op.write_bytes)
    return (*work, *(op.dims.get(name) or missing.get(name) or Affine(1) for name in dims))
