"""Finds the constants of `prediction.tiles` that fit measured products: how a GPU's tiles go, and at what rates.

Robust least squares on log errors, drawn towards what GPUs usually have. Used by `latpred.fit.roofline`; needs scipy.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from latpred.graph.features import Floats, Inputs
from latpred.prediction.tiles import PRIOR, tiled

FEWEST = 60  # samples below which so many constants are not to be had
MOST = 320  # samples that are looked at; the constants change little with more
FAMILIES = ("gemm", "bmm")
_SOFT = 0.1  # log errors beyond which a sample pulls less than quadratically
_RIDGE = 0.05
_STEPS = 30
_REACH = 5.0  # prior widths that a constant may be off


class Constants(NamedTuple):
    """Fitted constants, with the floor in microseconds apart, and the robust cost that is left."""

    floor: float
    values: dict[str, float]
    cost: float


def fit_constants(inputs: Inputs, times: Floats, weights: Floats, multiprocessors: int) -> Constants:
    """Constants of one device and precision from products of any sizes."""
    from scipy.optimize import least_squares

    assert inputs.product is not None
    keep = _spread_out(inputs.product, MOST)
    work, product, taken = inputs.work[keep], inputs.product[keep], times[keep]
    root = np.sqrt(weights[keep])
    start = _start(work, taken)
    middle, width = (np.array(column) for column in zip(*start.values(), strict=True))

    def constants(steps: Floats) -> dict[str, float]:
        return dict(zip(start, np.exp(np.log(middle) + width * steps).tolist(), strict=True))

    def errors(steps: Floats) -> Floats:
        values = constants(steps)
        time = values["floor"] + tiled(values, work, product, multiprocessors).us
        both: Floats = np.concatenate((root * np.log(time / taken), _RIDGE * steps))
        return both

    solution = least_squares(
        errors, np.zeros(len(start)), loss="soft_l1", f_scale=_SOFT, max_nfev=_STEPS, bounds=(-_REACH, _REACH)
    )
    values = constants(solution.x)
    return Constants(values.pop("floor"), values, robust_cost(errors(solution.x)[: len(taken)]))


def robust_cost(errors: Floats) -> float:
    """Mean cost of log errors, large ones counted less than quadratically."""
    return float(np.mean(np.sqrt(1.0 + (errors / _SOFT) ** 2) - 1.0))


def _start(work: Floats, times: Floats) -> dict[str, tuple[float, float]]:
    """Starting value and width of each constant: floor and rates are the best that any sample reached."""
    return {
        "floor": (0.8 * float(times.min()), 0.7),
        "rate": (1.0 / float(np.quantile(times / work[:, 0], 0.02)), 0.5),
        "bandwidth": (1.0 / float(np.quantile(times / work[:, 1:].sum(axis=1), 0.1)), 0.5),
        **PRIOR,
    }


def _spread_out(product: Floats, most: int) -> NDArray[np.int64]:
    """Indices of at most so many products, evenly through their order of work."""
    order = np.argsort(product.prod(axis=1), kind="stable")
    if len(order) <= most:
        return order
    kept: NDArray[np.int64] = order[np.linspace(0, len(order) - 1, most).round().astype(int)]
    return kept
