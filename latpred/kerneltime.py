"""Times of kernels from a `KernelFit`: roofline times the exponential of a Gaussian-process residual. Numpy only.

Far from every training point the residual vanishes and the roofline speaks alone, with a wider spread. Fitting is
`latpred.roofline`'s.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from latpred.features import Floats, Inputs, layout, native, read, waves
from latpred.identity import Recent
from latpred.ops.families import root
from latpred.profile import KernelFit
from latpred.tiling import tiled

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
        Columns as `latpred.features.layout(fit.family).columns` names them.
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
