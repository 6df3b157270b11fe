"""Finds the parameters of the law: damped Gauss-Newton steps on soft relative errors and what is believed.

The normal equations are summed block by block in local numbers, so that a step costs little whatever the number of
parameters. Parameters that no row bears on stay at what is believed of them, and take no part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import scipy.linalg

from latpred.calibration.tablefit.blocks import Block
from latpred.calibration.tablefit.cells import Ints
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
    """Some parameters and the loss there, with its gradient and an approximation of its Hessian."""

    theta: Floats
    loss: float
    gradient: Floats
    hessian: Floats


class _Used(NamedTuple):
    """A block that has rows in use: their weights and latencies, and where in the Hessian its parameters stand."""

    block: Block
    weights: Floats
    log_us: Floats
    places: Ints
    squares: Ints


@dataclass(frozen=True, slots=True)
class _System:
    """The loss, over the parameters that rows in use bear on."""

    law: Law
    used: tuple[_Used, ...]
    free: Ints
    means: Floats  # of all parameters
    precision: Floats  # of the free ones

    @classmethod
    def of(cls, law: Law, weights: Floats, beliefs: Beliefs) -> _System:
        """The system of the rows that have weight."""
        blocks = [block for block in law.blocks if weights[block.rows].any()]
        free = np.unique(np.concatenate([block.needed for block in blocks]))
        used = []
        for block in blocks:
            places = np.searchsorted(free, block.needed)
            squares = (places[:, None] * len(free) + places).ravel()
            used.append(_Used(block, weights[block.rows], law.rows.log_us[block.rows], places, squares))
        return cls(law, tuple(used), free, beliefs.means, 1.0 / beliefs.widths[free] ** 2)

    def full(self, theta: Floats) -> Floats:
        """All parameters, from the free ones."""
        found = self.means.copy()
        found[self.free] = theta
        return found

    def point(self, theta: Floats) -> _Point:
        """The loss at some free parameters."""
        scale, noise = self.law.form.soft, self.law.form.noise
        away = theta - self.means[self.free]
        loss, gradient = float((self.precision * away**2).sum()), self.precision * away
        hessian = np.diag(self.precision)
        squares, everything = hessian.reshape(-1), self.full(theta)
        for used in self.used:
            state = evaluate(used.block, everything, derivatives=True)
            errors = state.log_us - used.log_us
            softness = np.sqrt(1.0 + (errors / scale) ** 2)
            # Twice the soft absolute value: quadratic near zero, linear far from it.
            loss += float((used.weights * (softness - 1.0)).sum()) * 2.0 * (scale / noise) ** 2
            pull = np.sqrt(used.weights / softness) / noise
            slopes = local_gradients(used.block, state)
            slopes *= pull[:, None]
            lead = used.block.short
            squares[used.squares] += (lead.T @ (lead.T @ (slopes.T @ slopes)).T).ravel()
            gradient[used.places] += lead.T @ (slopes.T @ (pull * errors))
        return _Point(theta, loss, gradient, hessian)

    def better(self, point: _Point, damping: float) -> tuple[_Point, float] | None:
        """A step that lowers the loss, with the damping it took; None when there is none."""
        diagonal = np.diag_indices(len(self.free))
        for _ in range(_MOST_TRIES):
            damped = point.hessian.copy()
            damped[diagonal] *= 1.0 + damping
            factor = scipy.linalg.cho_factor(damped, overwrite_a=True, check_finite=False)
            newton = scipy.linalg.cho_solve(factor, -point.gradient, check_finite=False)
            found = self.point(point.theta + np.clip(newton, -_LARGEST_STEP, _LARGEST_STEP))
            if found.loss < point.loss:
                return found, damping
            damping *= 5.0
        return None


def solve(law: Law, weights: Floats, beliefs: Beliefs | None = None, start: Floats | None = None) -> Solution:
    """The parameters that rows and beliefs together make likeliest.

    Parameters
    ----------
    law : Law
        With its rows.
    weights : ndarray
        Of each row; 0 leaves one out.
    beliefs : Beliefs, optional
        What is believed before any row is seen; default: the law's own.
    start : ndarray, optional
        Where the search begins; default: at what is believed.
    """
    beliefs = beliefs or Beliefs(law.parameters.means, law.parameters.widths)
    system = _System.of(law, weights, beliefs)
    point = system.point((beliefs.means if start is None else start)[system.free])
    damping, steps = 1e-3, 0
    while steps < MOST_STEPS:
        found = system.better(point, damping)
        if found is None:
            break
        before, (point, damping) = point.loss, found
        steps += 1
        if before - point.loss < _ENOUGH * point.loss:
            break
        damping = max(damping / 5.0, 1e-6)
    return Solution(system.full(point.theta), point.loss, steps)
