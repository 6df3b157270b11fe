"""Finds the parameters of the law: damped Gauss-Newton steps on soft relative errors and what is believed.

The normal equations are summed block by block in local numbers, so that a step costs little whatever the number of
parameters.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy.linalg

from latpred.calibration.tablefit.law import Law, evaluate, local_gradients
from latpred.features import Floats

MOST_STEPS = 40
_MOST_TRIES = 8
_LARGEST_STEP = 1.0
_ENOUGH = 1e-4  # relative decrease of the loss below which a step was the last


class Solution(NamedTuple):
    """Parameters found, the loss there, and how many steps it took."""

    theta: Floats
    loss: float
    steps: int


class Beliefs(NamedTuple):
    """Means and widths of all parameters."""

    means: Floats
    widths: Floats


class _Point(NamedTuple):
    """Loss at some parameters with its gradient and an approximation of its Hessian."""

    loss: float
    gradient: Floats
    hessian: Floats


def solve(law: Law, weights: Floats, beliefs: Beliefs | None = None) -> Solution:
    """The parameters that rows and beliefs together make likeliest.

    Parameters
    ----------
    law : Law
        With its rows.
    weights : ndarray
        Of each row; 0 leaves one out.
    beliefs : Beliefs, optional
        What is believed before any row is seen, where the search begins; default: the law's own.
    """
    means, widths = beliefs or (law.parameters.means, law.parameters.widths)
    precision = 1.0 / widths**2
    theta = means.copy()
    damping, steps = 1e-3, 0
    point = _point(law, weights, theta, means, precision)
    while steps < MOST_STEPS:
        found = _better(law, weights, theta, point, means, precision, damping)
        if found is None:
            break
        theta, loss, damping = found
        steps += 1
        gained = point.loss - loss
        if gained < _ENOUGH * loss:
            return Solution(theta, loss, steps)
        damping = max(damping / 5.0, 1e-6)
        point = _point(law, weights, theta, means, precision)
    return Solution(theta, point.loss, steps)


def _better(
    law: Law, weights: Floats, theta: Floats, point: _Point, means: Floats, precision: Floats, damping: float
) -> tuple[Floats, float, float] | None:
    """A step that lowers the loss, with the damping it took; None when there is none."""
    diagonal = np.diag_indices(len(theta))
    for _ in range(_MOST_TRIES):
        damped = point.hessian.copy()
        damped[diagonal] *= 1.0 + damping
        newton = scipy.linalg.solve(damped, -point.gradient, assume_a="pos", overwrite_a=True, check_finite=False)
        step = np.clip(newton, -_LARGEST_STEP, _LARGEST_STEP)
        loss = _loss(law, weights, theta + step, means, precision)
        if loss < point.loss:
            return theta + step, loss, damping
        damping *= 5.0
    return None


def _loss(law: Law, weights: Floats, theta: Floats, means: Floats, precision: Floats) -> float:
    total = float((precision * (theta - means) ** 2).sum())
    for block in law.blocks:
        own = weights[block.rows]
        if own.any():
            errors = evaluate(block, theta).log_us - law.rows.log_us[block.rows]
            total += float((own * _soft(errors, law.form.soft)).sum()) / law.form.noise**2
    return total


def _soft(errors: Floats, scale: float) -> Floats:
    """Twice the soft absolute value: quadratic near zero, linear far from it."""
    loss: Floats = 2.0 * scale**2 * (np.sqrt(1.0 + (errors / scale) ** 2) - 1.0)
    return loss


def _point(law: Law, weights: Floats, theta: Floats, means: Floats, precision: Floats) -> _Point:
    scale, noise = law.form.soft, law.form.noise
    hessian, gradient = np.diag(precision), precision * (theta - means)
    loss = float((precision * (theta - means) ** 2).sum())
    for block in law.blocks:
        own = weights[block.rows]
        used = own > 0
        if not used.any():
            continue
        state = evaluate(block, theta, derivatives=True)
        errors = state.log_us - law.rows.log_us[block.rows]
        loss += float((own * _soft(errors, scale)).sum()) / noise**2
        pull = own / np.sqrt(1.0 + (errors / scale) ** 2) / noise**2
        slopes = local_gradients(block, state)[used]
        weighted = slopes * np.sqrt(pull[used])[:, None]
        needed, lead = block.needed, block.short
        hessian[np.ix_(needed, needed)] += lead.T @ (lead.T @ (weighted.T @ weighted)).T
        gradient[needed] += lead.T @ (slopes.T @ (pull[used] * errors[used]))
    return _Point(loss, gradient, hessian)
