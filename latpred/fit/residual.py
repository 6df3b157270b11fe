"""Fits the Gaussian-process residual of a roofline: which features matter, how much, and how noisy the samples are.

Only fitting happens here, with scipy; `prediction.kernel_times` evaluates the result with numpy. The kernel is Matern
3/2 with one length scale per feature: kernel times are continuous in log size but not smooth. Where they jump, as
products do that are cut into tiles, it is the exponential of a sum of distances, one per feature.
"""

from __future__ import annotations

import msgspec
import numpy as np
from scipy.optimize import minimize

from latpred.graph.features import Floats
from latpred.prediction.kernel_times import correlation
from latpred.profile.datasheet import short
from latpred.profile.document import KernelFit

HYPER_POINTS = 160  # samples the hyperparameters are learned from; more cost time and change little
OUTLIER = 3.0  # standard deviations from what all other samples say, beyond which a sample counts less

# Log-normal priors (mean and standard deviation of the log), in the log units of features and residuals. They decide
# where samples are few and keep a feature that never varied from being called irrelevant.
_LENGTH = (np.log(2.5), 1.0)
_AMPLITUDE = (np.log(0.04), 1.5)
_NOISE = (np.log(0.001), 1.5)


def fit_residual(
    plain: KernelFit,
    points: Floats,
    targets: Floats,
    weights: Floats,
    max_points: int,
    hyper_points: int = HYPER_POINTS,
) -> KernelFit:
    """A roofline with a residual, fitted to the log errors that the roofline leaves at points of the features."""
    points, targets, weights = _thin(points, targets, weights, max_points)
    factors = 1.0 / np.maximum(weights, 1e-6)
    subset, jumps = slice(0, hyper_points), plain.jumps
    hyper = _learn(points[subset], targets[subset], factors[subset], jumps)
    factors = _doubted(points, targets, factors, hyper, jumps)
    hyper = _learn(points[subset], targets[subset], factors[subset], jumps, start=hyper)
    errors, deviations = _leave_one_out(points, targets, factors, hyper, jumps)
    calibration = _calibration(errors / deviations)
    return msgspec.structs.replace(
        plain,
        length_scales=shorts(np.exp(hyper[:-2])),
        amplitude=short(float(np.exp(hyper[-2])) * calibration),
        noise=short(float(np.exp(hyper[-1])) * calibration),
        points=tuple(map(shorts, points)),
        targets=shorts(targets),
        noise_factors=shorts(factors),
        error=short(float(np.median(np.abs(np.expm1(errors))))),
        spread=short(float(np.sqrt(np.mean(errors**2)))),
    )


def shorts(values: Floats) -> tuple[float, ...]:
    """Six digits of each."""
    return tuple(map(short, values.tolist()))


def _calibration(standardized: Floats) -> float:
    """What both variances must grow by for nine in ten left-out samples to lie in their 90 % interval.

    Scaling both changes no mean. It never shrinks them: samples lie closer to each other than to what is asked later.
    """
    reached = float(np.quantile(np.abs(standardized), 0.9)) / 1.645
    return float(np.clip(reached**2, 1.0, 16.0)) * (1.0 + 4.0 / len(standardized))


def _thin(points: Floats, targets: Floats, weights: Floats, most: int) -> tuple[Floats, Floats, Floats]:
    """Merge samples until at most `most` are left, spread over the range; the most spread out come first.

    Each sample joins the nearest one that is kept, with which it is averaged.
    """
    spread = np.maximum(points.std(axis=0), 1e-9)
    scaled = points / spread
    kept = [int(np.argmin(((scaled - scaled.mean(axis=0)) ** 2).sum(axis=1)))]
    nearest = ((scaled - scaled[kept[0]]) ** 2).sum(axis=1)
    owner = np.zeros(len(points), dtype=int)
    while len(kept) < min(most, len(points)):
        farthest = int(np.argmax(nearest))
        if nearest[farthest] < 1e-12:
            break
        distance = ((scaled - scaled[farthest]) ** 2).sum(axis=1)
        closer = distance < nearest
        nearest, owner = np.where(closer, distance, nearest), np.where(closer, len(kept), owner)
        kept.append(farthest)
    total = np.bincount(owner, weights)
    merged = np.column_stack([np.bincount(owner, weights * column) for column in points.T]) / total[:, None]
    mean_targets: Floats = np.bincount(owner, weights * targets) / total
    return merged, mean_targets, total.astype(float)


def _learn(points: Floats, targets: Floats, factors: Floats, jumps: bool, start: Floats | None = None) -> Floats:
    """Hyperparameters (log length scales, log amplitude, log noise) of greatest posterior density."""
    dims = points.shape[1]
    middle = np.r_[np.full(dims, _LENGTH[0]), _AMPLITUDE[0], _NOISE[0]]
    width = np.r_[np.full(dims, _LENGTH[1]), _AMPLITUDE[1], _NOISE[1]]
    apart = points.T[:, :, None] - points.T[:, None, :]
    apart = np.abs(apart) if jumps else apart**2

    def loss(hyper: Floats) -> tuple[float, Floats]:
        value, gradient = _likelihood(hyper, apart, targets, factors, jumps)
        off = (hyper - middle) / width
        return value + 0.5 * float(off @ off), gradient + off / width

    bounds = [(m - 4 * w, m + 4 * w) for m, w in zip(middle, width, strict=True)]
    solution = minimize(loss, middle if start is None else start, jac=True, bounds=bounds, method="L-BFGS-B")
    return np.asarray(solution.x)


def _likelihood(hyper: Floats, apart: Floats, targets: Floats, factors: Floats, jumps: bool) -> tuple[float, Floats]:
    """Negative log marginal likelihood and its gradient; `apart` are distances where times jump, else their squares."""
    count = len(targets)
    amplitude, noise = np.exp(hyper[-2:])
    if jumps:
        inverses = np.exp(-hyper[:-2])
        covariance = decay = amplitude * np.exp(-np.einsum("dij,d->ij", apart, inverses))
    else:
        inverses = 3.0 * np.exp(-2.0 * hyper[:-2])
        distance = np.sqrt(np.einsum("dij,d->ij", apart, inverses))
        decay = amplitude * np.exp(-distance)
        covariance = (1.0 + distance) * decay
    factor = np.linalg.cholesky(covariance + np.diag(noise * factors + 1e-10))
    half = np.linalg.inv(factor)
    inverse = half.T @ half
    weights = inverse @ targets
    value = 0.5 * float(targets @ weights) + float(np.log(np.diag(factor)).sum()) + 0.5 * count * np.log(2 * np.pi)
    pull = inverse - np.outer(weights, weights)
    by_length = np.einsum("dij,ij->d", apart, pull * decay) * inverses
    by_amplitude = np.sum(pull * covariance)
    by_noise = noise * np.sum(np.diag(pull) * factors)
    return value, 0.5 * np.r_[by_length, by_amplitude, by_noise]


def _doubted(points: Floats, targets: Floats, factors: Floats, hyper: Floats, jumps: bool) -> Floats:
    """Noise factors, larger for samples that contradict what all the others say of them."""
    if len(targets) < 8:
        return factors
    errors, deviations = _leave_one_out(points, targets, factors, hyper, jumps)
    odd = np.abs(errors) / (OUTLIER * deviations)
    doubted: Floats = factors * np.maximum(1.0, odd) ** 4
    return doubted


def _leave_one_out(
    points: Floats, targets: Floats, factors: Floats, hyper: Floats, jumps: bool
) -> tuple[Floats, Floats]:
    """Error of each target predicted without it, and the standard deviation that was expected of it."""
    scaled = points / np.exp(hyper[:-2])
    amplitude, noise = np.exp(hyper[-2:])
    covariance = amplitude * correlation(scaled, scaled, jumps)
    inverse = np.linalg.inv(covariance + np.diag(noise * factors + 1e-10))
    diagonal = np.diag(inverse)
    return (inverse @ targets) / diagonal, 1.0 / np.sqrt(diagonal)
