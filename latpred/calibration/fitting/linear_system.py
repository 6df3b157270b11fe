"""Small linear systems of named unknowns that are not negative: measurements with their sigma, and priors that pull."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from scipy.optimize import lsq_linear

Column = tuple[str, ...]

ROUNDS = 12  # of reweighting, by when weights have settled
ORDINARY = 1.5  # standard deviations up to which an error is nothing unusual


class _Row(NamedTuple):
    terms: Mapping[Column, float]
    value: float
    sigma: float
    prior: bool


class System:
    """Equations to be met in the sense of least squares, each weighted by its sigma."""

    def __init__(self) -> None:
        self._rows: list[_Row] = []

    def measured(self, terms: Mapping[Column, float], value: float, sigma: float) -> None:
        """An equation that may be an outlier: far from all others it pulls less."""
        self._rows.append(_Row(terms, value, sigma, False))

    def prior(self, terms: Mapping[Column, float], value: float, sigma: float) -> None:
        """An equation that was known beforehand."""
        self._rows.append(_Row(terms, value, sigma, True))

    def names(self, kind: str) -> list[str]:
        """Second parts of the unknowns of a kind, in order."""
        return sorted({column[1] for row in self._rows for column in row.terms if column[0] == kind and column[1]})

    def solve(self) -> dict[Column, float]:
        """The unknowns, none of them negative."""
        columns = {column: index for index, column in enumerate(sorted({c for row in self._rows for c in row.terms}))}
        matrix = np.zeros((len(self._rows), len(columns)))
        for index, row in enumerate(self._rows):
            for column, amount in row.terms.items():
                matrix[index, columns[column]] += amount / row.sigma
        values = np.array([row.value / row.sigma for row in self._rows])
        fixed = np.array([row.prior for row in self._rows])
        # Unknowns of very different size (bytes and launches) must look alike to the solver.
        sizes = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
        weights = np.ones(len(values))
        for _ in range(ROUNDS):
            scaled = matrix / sizes * weights[:, None]
            solution = lsq_linear(scaled, values * weights, bounds=(0.0, np.inf)).x / sizes
            off = np.abs(matrix @ solution - values)
            weights = np.where(fixed, 1.0, np.sqrt(np.minimum(1.0, ORDINARY / np.maximum(off, 1e-12))))
        return {column: float(solution[index]) for column, index in columns.items()}


def of_kind(values: Mapping[Column, float], kind: str) -> dict[str, float]:
    """Values of the unknowns of a kind, by the second part of their names."""
    return {column[1]: value for column, value in values.items() if column[0] == kind}
