"""RooflineRegressor: a scikit-learn estimator of kernel times, its numbers as a `KernelFit`, and tile constants.

The time of a kernel is a floor plus the quadrature of its compute and memory time, fitted on relative errors, times the
exponential of a Gaussian process over log features. This module fits; `prediction.kernel_times` evaluates without scipy
or scikit-learn.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from scipy.optimize import least_squares
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils.validation import check_array, check_is_fitted, check_X_y
from threadpoolctl import threadpool_limits

from latpred.fit.residual import HYPER_POINTS, fit_residual, shorts
from latpred.graph.features import LOOP_COUNTS, ON_CPU, Floats, Inputs, layout, read
from latpred.ops.families import lineage, root
from latpred.prediction.kernel_times import (
    FEW_ROWS,
    PRIOR,
    TINY_US,
    KernelModel,
    evaluate,
    feature_names,
    flags_of,
    inefficiency,
    inverse,
    residual_features,
    roofline,
    tiled,
)
from latpred.profile.datasheet import short
from latpred.profile.document import KernelFit

FEWEST_FOR_TILES = 60  # samples below which so many constants are not to be had
MOST_FOR_TILES = 640  # samples that are looked at; the constants change little with more
TILED = ("gemm", "bmm")
_SOFT = 0.1  # log errors beyond which a sample pulls less than quadratically
_TILE_RIDGE = 0.05
_STEPS = 30
# Multiply-adds of a product below which a library cuts no sum. cuBLAS has 2**21 on an L40S and none on an A100.
_WHOLE_MACS = tuple(0.99 * 2.0**power for power in range(18, 26))
_WORTH_WHOLE = 0.98  # of the cost without it
_REACH = 5.0  # prior widths that a constant may be off


def _fit_constants(
    inputs: Inputs, times: Floats, weights: Floats, multiprocessors: int
) -> tuple[dict[str, float], float]:
    """Constants of one device and precision, with the floor, from products of any sizes; and their robust cost."""
    assert inputs.product is not None
    order = np.argsort(inputs.product.prod(axis=1), kind="stable")
    keep = order[np.linspace(0, len(order) - 1, min(len(order), MOST_FOR_TILES)).round().astype(int)]  # evenly
    work, product, taken = inputs.work[keep], inputs.product[keep], times[keep]
    sqrt_weights = np.sqrt(weights[keep])
    # Floor and rates start from the best that any sample reached.
    start = {
        "floor": (0.8 * float(taken.min()), 0.7),
        "rate": (1.0 / float(np.quantile(taken / work[:, 0], 0.02)), 0.5),
        "bandwidth": (1.0 / float(np.quantile(taken / work[:, 1:].sum(axis=1), 0.1)), 0.5),
        **PRIOR,
    }
    middle, width = (np.array(column) for column in zip(*start.values(), strict=True))

    def constants(steps: Floats, whole: float) -> dict[str, float]:
        values = dict(zip(start, np.exp(np.log(middle) + width * steps).tolist(), strict=True))
        return values | {"whole_macs": whole} if whole else values

    def errors(steps: Floats, whole: float) -> Floats:
        values = constants(steps, whole)
        time = values["floor"] + tiled(values, work, product, multiprocessors).us
        return np.concatenate((sqrt_weights * np.log(time / taken), _TILE_RIDGE * steps))

    def cost(steps: Floats, whole: float) -> float:
        return _robust_cost(errors(steps, whole)[: len(taken)])

    def fitted(steps: Floats, whole: float) -> Floats:
        solution = least_squares(
            errors, steps, loss="soft_l1", f_scale=_SOFT, max_nfev=_STEPS, bounds=(-_REACH, _REACH), args=(whole,)
        )
        return np.asarray(solution.x)

    steps, whole = fitted(np.zeros(len(start)), 0.0), 0.0
    likely = min(_WHOLE_MACS, key=lambda macs: cost(steps, macs))
    if cost(steps, likely) < _WORTH_WHOLE * cost(steps, 0.0):
        steps, whole = fitted(steps, likely), likely
    return constants(steps, whole), cost(steps, whole)


def _robust_cost(errors: Floats) -> float:
    """Mean cost of log errors, large ones counted less than quadratically."""
    return float(np.mean(np.sqrt(1.0 + (errors / _SOFT) ** 2) - 1.0))


_PRIOR_RIDGE = 0.2  # the same towards what is known without samples
_RIDGE = 0.03  # pull of each log parameter towards its starting value, so that unseen terms stay finite
_HALF_SIZE = 16.0  # starting value: a dimension of 16 gives half the throughput
_FEW = 4.0  # starting value of the rows below which the throughput falls no further
_HALF_SIZES = ("m", "n", "k", "waves", "outputs", FEW_ROWS)
_OUTPUTS = 16.0  # starting value: so many results for each multiprocessor give half the throughput
_WORTH_TILES = 0.85  # of a roofline's cost: tiles have more constants, and must earn them
_BESIDE_SIGMA = 0.5  # relative doubt about what passes beside a sample, in units of the doubt about its time
# Terms that the samples of a family cannot tell from others. Steps of a recurrence read the same weights again and
# again (what a loop counts), and sizes of state and input hardly vary apart. Depthwise convolutions of single samples
# take longer the more channels and so weights they have; taken for what each plane costs, that made batch 8 of 1,152
# planes of 3x3 four times too slow. On an EPYC of family 25 planes of oneDNN's kernels cost nothing of their own.
# Where oneDNN has no kernel it multiplies small matrices of each plane: a plane takes 0.4 us there, however many.
# Padded maps in a calibration are too small to tell what bytes take: 96 lines of 199 values took 102 us, not 360.
_UNTOLD: dict[str, tuple[str, ...]] = {
    "rnn": ("weights", "activations", "n", "k"),
    "conv_depthwise": ("loop 0",),
    "conv_depthwise.padded": ("m", "n", "k", "weights", "activations"),
    "conv_depthwise.multiplied": ("m", "n", "k"),
}
# Microseconds on a CPU of what the samples of a family hardly tell. A plane without a kernel of oneDNN takes one or two
# threads 0.4 to 0.6 on EPYCs of family 25. Samples have up to 64 planes, and took one for 1 to 4: 3,072 came out 2 to 7
# times too slow.
_PLANE_US = {"loop 0": 0.5}
_BELIEVED_US = {"conv_depthwise.multiplied": _PLANE_US, "conv_depthwise.padded": _PLANE_US}
# Samples' worth of belief that a leaf costs what its parent does: leaves differ from their parents by 1.2 in the
# logarithm (standard deviation), samples of one leaf from each other by 0.4. An EPYC of family 25, 59 leaves.
_LEAF_SHRINKAGE = 0.1


class RooflineRegressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Time of one kernel family in microseconds, from its work and dimensions.

    Parameters
    ----------
    family : str
        Kernel family, which names the columns of X: macs, weight_bytes, read_bytes, write_bytes, then `DIMS[family]`.
    multiprocessors : int
        Of a GPU, so that a product too small to fill them is known to be slower; 0 for a CPU.
    max_points : int
        Most samples that the residual keeps; nearby ones are averaged.
    hyper_points : int
        Most samples that the residual's length scales are learned from.
    prior : KernelFit, optional
        What is known of such kernels without samples, as a GPU's datasheet tells: where samples are few or alike, its
        numbers stand.

    Attributes
    ----------
    fit_ : KernelFit
        The fitted numbers, for a profile.
    n_features_in_ : int
        Number of columns.

    Examples
    --------
    >>> import numpy as np
    >>> m = np.array([1.0, 8.0, 64.0, 512.0, 4096.0])
    >>> X = np.column_stack([m * 64 * 64, np.full(5, 16384.0), m * 256, m * 256, m, np.full((5, 2), 64.0)])
    >>> y = 2.0 + m * 64 * 64 / 1e5
    >>> model = RooflineRegressor("gemm").fit(X, y)
    >>> bool(np.all(np.abs(model.predict(X) / y - 1) < 0.1))
    True
    """

    def __init__(
        self,
        family: str = "gemm",
        multiprocessors: int = 0,
        max_points: int = 400,
        hyper_points: int = HYPER_POINTS,
        prior: KernelFit | None = None,
    ) -> None:
        self.family = family
        self.multiprocessors = multiprocessors
        self.max_points = max_points
        self.hyper_points = hyper_points
        self.prior = prior

    def fit(self, X: Any, y: Any, sample_weight: Any = None, beside: Any = None) -> RooflineRegressor:  # noqa: N803
        """Fit roofline and residual to microseconds `y` of rows `X` of work and dimensions.

        `sample_weight` is the relative precision of the samples; one of 0 leaves its sample out. `beside` are
        microseconds that pass with every sample, as its dispatch does: the roofline is then fitted to the error of both
        together, since it does not matter how short a kernel is that its dispatch hides.
        """
        rows, times = check_X_y(X, y, dtype=float)
        self._check_columns(rows)
        if (times <= 0).any():
            raise ValueError("Every time in y must be positive; drop kernels that took nothing.")
        weights = np.ones(len(times)) if sample_weight is None else check_array(sample_weight, ensure_2d=False)
        if (weights < 0).any() or not weights.any():
            raise ValueError("Each sample_weight must be 0 or more, and one of them more than 0.")
        hidden = np.broadcast_to(np.asarray(0.0 if beside is None else beside, dtype=float), times.shape)
        rows, times, weights, hidden = (each[weights > 0] for each in (rows, times, weights, hidden))
        weights = weights / weights.mean()
        inputs = read(self.family, rows)
        with threadpool_limits(1, "blas"):  # its matrices are so small that further threads take longer
            plain = self._plain(inputs, times, weights, hidden)
            roof = roofline(plain, inputs)
            points = residual_features(plain, inputs, roof)
            off, certain = _log_residuals(times, roof.us, hidden)
            weights = weights * certain
            weights = weights / weights.mean()
            self.fit_ = fit_residual(plain, points, off, weights, self.max_points, self.hyper_points)
        self.n_features_in_ = rows.shape[1]
        self._model = KernelModel(self.fit_)
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:  # noqa: N803
        """Microseconds; with `return_std`, also the standard deviation of their logarithm."""
        check_is_fitted(self, "fit_")
        rows = check_array(X, dtype=float)
        self._check_columns(rows)
        times = self._model.times(rows)
        return (times.us, times.log_std) if return_std else times.us

    def _check_columns(self, rows: Floats) -> None:
        columns = layout(self.family).columns
        if rows.shape[1] != len(columns):
            raise ValueError(
                f"X has {rows.shape[1]} features, but RooflineRegressor is expecting {len(columns)} features as input "
                f"for family {self.family!r}: {', '.join(columns)}."
            )
        if (rows < 0).any():
            raise ValueError("Negative values in data passed to RooflineRegressor: work and dimensions are counts.")

    def fit_roofline(self, X: Any, y: Any, sample_weight: Any, beside: Any) -> KernelFit:  # noqa: N803
        """The numbers of a roofline alone, which no residual corrects; arguments as for `fit`."""
        weights = np.asarray(sample_weight, dtype=float)
        inputs = read(self.family, np.asarray(X))
        return self._plain(inputs, np.asarray(y), weights / weights.mean(), np.asarray(beside))

    def _plain(self, inputs: Inputs, times: Floats, weights: Floats, beside: Floats) -> KernelFit:
        """The fit without a residual: a roofline, or tiles where they explain a GPU's products far better."""
        one_row = "one_row" in flags_of(self.family, self.multiprocessors)
        guess = _first_guess(inputs, times, self.multiprocessors)
        if one_row and "m" in guess:
            guess[FEW_ROWS] = _FEW
        untold = next((_UNTOLD[name] for name in lineage(self.family) if name in _UNTOLD), ())
        if self.multiprocessors and root(self.family) in ON_CPU:
            untold = (*untold, *_names(inputs)[len(LOOP_COUNTS.get(root(self.family), ())) :])
        guess = {name: value for name, value in guess.items() if name not in untold}
        pull = dict.fromkeys(guess, _RIDGE)
        if self.prior is not None:
            known = {name: value for name, value in _known(self.prior).items() if name not in untold}
            guess = {"floor": guess["floor"], **known}
            pull = {"floor": _RIDGE, **dict.fromkeys(known, _PRIOR_RIDGE)}
        elif not self.multiprocessors:
            believed = _BELIEVED_US.get(self.family, {})
            guess, pull = guess | believed, pull | dict.fromkeys(believed, _PRIOR_RIDGE)
        roof = partial(_roofline_us, inputs=inputs, multiprocessors=self.multiprocessors, one_row=one_row)
        fitted = _fit_parameters(times, weights, beside, guess, pull, roof)
        floor, tiling = fitted["floor"], {}
        if self.multiprocessors and root(self.family) in TILED and len(times) >= FEWEST_FOR_TILES:
            untiled = np.sqrt(weights) * np.log(roof(fitted) / times)
            constants, cost = _fit_constants(inputs, times, weights, self.multiprocessors)
            if cost < _WORTH_TILES * _robust_cost(untiled):
                floor, tiling = constants.pop("floor"), constants
        loop_us = _loop_us(fitted, inputs)
        return KernelFit(
            family=self.family,
            floor_us=short(floor),
            macs_per_us=short(inverse(fitted.get("compute", 0.0))),
            weight_bytes_per_us=short(inverse(fitted.get("weights", 0.0))),
            activation_bytes_per_us=short(inverse(fitted.get("activations", 0.0))),
            saturation={name: short(fitted[name]) for name in _HALF_SIZES if name in fitted},
            multiprocessors=self.multiprocessors,
            features=feature_names(self.family, self.multiprocessors, bool(tiling)),
            tiling={name: short(value) for name, value in tiling.items()},
            loop_us=shorts(loop_us) if loop_us.any() else (),
            jumps=bool(tiling),
        )


def _log_residuals(times: Floats, base: Floats, beside: Floats) -> tuple[Floats, Floats]:
    """Log ratios of times to their roofline, and how well each is known.

    Of a kernel that its dispatch hides the ratio may be anything. What is known is the ratio of both together, which
    the kernel's moves by its share of them.
    """
    share = base / (base + beside)
    alone, together = np.log(times / base), np.log((times + beside) / (base + beside)) / share
    nearest: Floats = np.where(np.abs(alone) < np.abs(together), alone, together)
    return nearest, 1.0 / (1.0 + (_BESIDE_SIGMA * beside / base) ** 2)


def scale_leaf(fit: KernelFit, rows: Any, times: Any, beside: Any) -> float:
    """Time above the floor of a more special family over that of `fit`, from a few samples of it.

    The median ratio, drawn towards 1 where samples are few. Keep it in `KernelFit.leaf_scales`.
    """
    measured = np.asarray(times, dtype=float)
    expected = evaluate(fit, np.asarray(rows, dtype=float))
    floor = np.minimum(fit.floor_us * fit.scale, 0.9 * np.minimum(measured, expected))
    hidden = np.broadcast_to(np.asarray(beside, dtype=float), measured.shape)
    logs, certain = _log_residuals(measured - floor, expected - floor, floor + hidden if hidden.any() else hidden)
    count = float(certain.sum())
    return short(float(np.exp(weighted_median(logs, certain) * count / (count + _LEAF_SHRINKAGE))))


def weighted_median(values: Floats, weights: Floats) -> float:
    """The value that has half of the weight on either side, between two where no single one has.

    >>> weighted_median(np.array([12.0, 10.0]), np.ones(2))
    11.0
    """
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    return float(np.interp(0.5 * reached[-1], reached - 0.5 * weights[order], values[order]))


def _roofline_us(values: dict[str, float], inputs: Inputs, multiprocessors: int, one_row: bool) -> Floats:
    """Roofline time of each row, from microseconds per unit of work and half sizes."""
    work = inputs.work
    compute = work[:, 0] * values.get("compute", 0.0)
    if inputs.product is not None:
        compute = compute * inefficiency(values, inputs.product, multiprocessors, one_row)
    compute = compute + inputs.loop_counts @ _loop_us(values, inputs)
    memory = work[:, 1] * values.get("weights", 0.0) + (work[:, 2] + work[:, 3]) * values.get("activations", 0.0)
    return np.maximum(values["floor"] + np.hypot(compute, memory), TINY_US)


def _known(prior: KernelFit) -> dict[str, float]:
    """Parameters of a fit that samples need not tell; a floor is the one thing that any few of them do."""
    rates = {
        "compute": prior.macs_per_us,
        "weights": prior.weight_bytes_per_us,
        "activations": prior.activation_bytes_per_us,
    }
    loop_us = {f"loop {index}": us for index, us in enumerate(prior.loop_us) if us}
    return {name: 1.0 / rate for name, rate in rates.items() if rate} | prior.saturation | loop_us


def _fit_parameters(
    times: Floats,
    weights: Floats,
    beside: Floats,
    guess: dict[str, float],
    pull: dict[str, float],
    roof: Callable[[dict[str, float]], Floats],
) -> dict[str, float]:
    """Least squares of the pull and of soft log errors, from a high and a low floor."""
    middle, ridge = np.log(list(guess.values())), np.array([pull[name] for name in guess])
    # Weights say how well a kernel is known apart from what passes beside it; both together are known well.
    precision = np.where(beside > 0, 1.0, np.sqrt(weights))

    def parameters(logs: Floats) -> dict[str, float]:
        return dict(zip(guess, np.exp(logs).tolist(), strict=True))

    def errors(logs: Floats) -> Floats:
        us = roof(parameters(logs))
        off = precision * np.log((us + beside) / (times + beside))
        pulled = ridge * (logs - middle)
        # The soft loss of this is the square of the pull: one odd sample must not outweigh what is known of a rate.
        return np.concatenate((off, pulled * np.sqrt(1.0 + (0.5 * pulled / _SOFT) ** 2)))

    starts = [middle + np.where(np.array(list(guess)) == "floor", np.log(floor), 0.0) for floor in (1.0, 0.2)]
    bounds = (middle - 14.0, middle + 14.0)
    solutions = [least_squares(errors, start, loss="soft_l1", f_scale=_SOFT, bounds=bounds) for start in starts]
    return parameters(min(solutions, key=lambda solution: solution.cost).x)


def _first_guess(inputs: Inputs, times: Floats, multiprocessors: int) -> dict[str, float]:
    """Starting values of the terms that the samples have work for: the best rates that any of them reached."""
    work = inputs.work
    guess = {"floor": 0.8 * float(times.min())}
    activations = work[:, 2] + work[:, 3]
    moved = work[:, 1] + activations
    # All bytes come from the same memory: a vector of weights beside large activations says nothing of its own rate.
    columns = {"compute": (work[:, 0],) * 2, "weights": (work[:, 1], moved), "activations": (activations, moved)}
    columns |= {name: (counts, counts) for name, counts in zip(_names(inputs), inputs.loop_counts.T, strict=True)}
    for name, (own, amount) in columns.items():
        if (own > 0).any():
            guess[name] = float(np.quantile(times[own > 0] / amount[own > 0], 0.1))
    if inputs.product is not None and "compute" in guess:
        guess |= dict.fromkeys(("m", "n", "k"), _HALF_SIZE)
        if multiprocessors:
            guess |= {"waves": 0.1, "outputs": _OUTPUTS * multiprocessors}
    return guess


def _names(inputs: Inputs) -> list[str]:
    """Names of the parameters of what loops count."""
    return [f"loop {index}" for index in range(inputs.loop_counts.shape[1])]


def _loop_us(values: dict[str, float], inputs: Inputs) -> Floats:
    return np.array([values.get(name, 0.0) for name in _names(inputs)])
