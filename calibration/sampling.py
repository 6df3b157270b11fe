"""Chooses which shapes of a kernel to time: first spread like those to be asked for, then where the fit is unsure.

Only the chosen are timed; what an unchosen one takes is never looked at. Timing them is the caller's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from latpred.calibration.cells import Cell
from latpred.calibration.fitting.kernel_fit import row_of
from latpred.calibration.workloads import networks, single_ops
from latpred.calibration.workloads.networks import NetworkSpec
from latpred.errors import UsageError
from latpred.fit.roofline import RooflineRegressor
from latpred.graph.features import Floats, read
from latpred.ops.families import parent
from latpred.prediction.kernel_times import KernelModel
from latpred.prediction.predictor import Predictor
from latpred.profile.document import DeviceProfile

Indices = NDArray[np.int64]

FIRST = 0.6  # of the budget, spread before anything is known
ROUNDS = 2  # in which the rest is chosen, with a fit between them
FEWEST = 20
CONSIDERED, REFERENCES = 1200, 600  # shapes that are weighed against each other, and that are to be known better
HYPER_POINTS = 240  # of the choice: they tell the length scales
CANDIDATES = 2  # drawn for each network or kernel that is taken: each costs a trace


class Chosen(NamedTuple):
    """Shapes that were chosen and timed: their indices among the candidates in order of choice, and microseconds."""

    indices: Indices
    times: Floats


def choose_shapes(
    candidates: Floats,
    budget: int,
    measure: Callable[[Indices], Floats],
    *,
    family: str = "gemm",
    multiprocessors: int = 0,
    seed: int = 0,
) -> Chosen:
    """Choose shapes from candidates and have them timed.

    Parameters
    ----------
    candidates : ndarray, shape (n, columns)
        Work and dimensions in the order of `latpred.graph.features.layout(family).columns`.
    budget : int
        How many to time.
    measure : callable
        Takes indices of candidates, gives their microseconds.
    family : str
        Kernel family.
    multiprocessors : int
        Of a GPU; 0 for a CPU.
    seed : int
        Of the choice.

    Raises
    ------
    UsageError
        For a budget too small for a fit, or larger than there are candidates.

    Examples
    --------
    >>> import numpy as np
    >>> m, n, k = np.array([(m, n, k) for m in (1, 8, 64, 512) for n in (64, 512) for k in (64, 512, 4096)], float).T
    >>> rows = np.column_stack([m * n * k, 2 * n * k, 2 * m * k, 2 * m * n, m, n, k])
    >>> chosen = choose_shapes(rows, 20, lambda indices: 2.0 + rows[indices, 0] / 1e6)
    >>> len(set(chosen.indices.tolist()))
    20
    """
    rows = np.asarray(candidates, dtype=float)
    if not FEWEST <= budget <= len(rows):
        raise UsageError(
            f"a budget of {budget} shapes out of {len(rows)} is not possible; time from {FEWEST} to all of them."
        )
    rng = np.random.default_rng(seed)
    chosen = farthest_points(read(family, rows).logs, max(FEWEST, round(FIRST * budget)), seed)
    times = np.asarray(measure(chosen), dtype=float)
    for number in range(ROUNDS):
        wanted = (budget - len(chosen)) // (ROUNDS - number)
        if wanted:
            fit = regressor(family, multiprocessors, len(chosen)).fit(rows[chosen], times).to_fit()
            more = _least_certain(KernelModel(fit), rows, chosen, wanted, rng)
            chosen, times = np.concatenate((chosen, more)), np.concatenate((times, measure(more)))
    return Chosen(chosen, times)


def regressor(family: str, multiprocessors: int, points: int) -> RooflineRegressor:
    """The estimator that chosen shapes are fitted with: it keeps every one of them."""
    return RooflineRegressor(family, multiprocessors, points, min(points, HYPER_POINTS))


def farthest_points(logs: Floats, count: int, seed: int = 0) -> Indices:
    """Indices of so many points that stand for all others: one near the middle of each of as many groups."""
    from sklearn.cluster import MiniBatchKMeans

    groups = MiniBatchKMeans(count, random_state=seed, n_init=1, batch_size=4096, max_iter=30).fit(logs)
    taken: dict[int, None] = {}
    for middle in groups.cluster_centers_:
        distance = ((logs - middle) ** 2).sum(axis=1)
        nearest = np.argsort(distance, kind="stable")[: count + 1]
        taken[next(int(index) for index in nearest if int(index) not in taken)] = None
    return np.array(list(taken), dtype=np.int64)


def _least_certain(model: KernelModel, rows: Floats, chosen: Indices, wanted: int, rng: np.random.Generator) -> Indices:
    """Shapes that, timed, would leave the least variance over all; each knows of those picked before it."""
    free = np.setdiff1d(np.arange(len(rows)), chosen)
    considered = rng.permutation(free)[: max(CONSIDERED, 2 * wanted)]
    references = rng.permutation(len(rows))[:REFERENCES]
    covariance = model.covariance(rows[np.concatenate((considered, references))])
    count, noise = len(considered), model.fit.noise
    picked: list[int] = []
    for _ in range(min(wanted, count)):
        variance = np.diag(covariance)[:count]
        gain = (covariance[:count, count:] ** 2).sum(axis=1) / (variance + noise)
        gain[picked] = -1.0
        best = int(np.argmax(gain))
        picked.append(best)
        column = covariance[:, best]
        covariance = covariance - np.outer(column, column) / (column[best] + noise)
    return np.asarray(considered[picked], dtype=np.int64)


class UncertaintySampler:
    """Takes the less certain half of what is drawn, once a profile says what is certain."""

    def __init__(self) -> None:
        self._profile: DeviceProfile | None = None
        self._models: dict[str, dict[str, KernelModel]] = {}

    def learn(self, profile: DeviceProfile) -> None:
        """Tell certainty by this profile from now on."""
        self._profile = profile
        self._models = {
            precision: {family: KernelModel(fit) for family, fit in fits.items()}
            for precision, fits in profile.kernels.items()
        }

    def of_networks(self, drawn: Iterator[NetworkSpec]) -> Iterator[NetworkSpec]:
        """Networks worth measuring; holdout networks are never passed over, or the test would be biased."""
        while True:
            if self._profile is None:
                yield next(drawn)
                continue
            predictor = Predictor(self._profile)
            group = list(islice(drawn, CANDIDATES * len(networks.KINDS)))
            yield from (spec for spec in group if spec.holdout)
            others = [spec for spec in group if not spec.holdout]
            others.sort(key=lambda spec: _network_sigma(predictor, spec), reverse=True)
            yield from others[: len(group) // CANDIDATES]

    def of_kernels(self, drawn: Iterator[Cell], number: int) -> Iterator[Cell]:
        """So many kernel cells worth measuring."""
        if self._profile is None:
            yield from islice(drawn, number)
            return
        group = list(islice(drawn, CANDIDATES * number))
        group.sort(key=lambda cell: _kernel_sigma(self._models.get(cell.precision, {}), cell), reverse=True)
        yield from group[:number]


def _network_sigma(predictor: Predictor, spec: NetworkSpec) -> float:
    """Width of the 90 % interval, on a log scale; the least where a network cannot be traced or predicted."""
    try:
        low, high = predictor.predict(networks.graph(spec), spec.batch).interval_ms
    except Exception:
        # Choosing must not end a calibration over one network, and nothing says that this one is worth measuring.
        return -math.inf
    return math.log(high / low)


def _kernel_sigma(models: dict[str, KernelModel], cell: Cell) -> float:
    """Log standard deviation of the kernel's predicted time; infinite for a family without a fit.

    The least where a cell cannot be traced or launches nothing.
    """
    try:
        graph, batch = single_ops.graph(cell)
    except Exception:
        return -math.inf
    op = next((op for op in graph.at(batch) if op.launches), None)
    if op is None:
        return -math.inf
    name: str | None = op.family
    while name is not None and name not in models:
        name = parent(name)
    if name is None:
        return math.inf
    row = np.array([row_of(op, batch)])
    return float(models[name].times(row).log_std[0])
