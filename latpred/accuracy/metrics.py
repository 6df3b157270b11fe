"""How far predictions are from measurements, as numbers: pure functions of arrays, with no table and no printing.

Latencies may be in any one unit. Errors are shares (0.08 is 8 %), errors of a batch size are factors (1.25 is a
quarter off). A figure that rests on nothing is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from latpred.graph.features import Floats

# A prediction within this share of the measurement counts as near: of latencies, of speed-ups, of numbers of launches.
NEAR, SPEEDUP_NEAR, LAUNCHES_NEAR = 0.10, 0.15, 0.02
# Times the latency of the smallest batch, which a curve exceeds from its knee on: more than the 1.1 of predictions
# (`prediction.clocks`), since timings of small batches differ by more than a tenth.
KNEE_RATIO = 1.5
ALIKE = 1e-9  # relative difference below which two predictions are the same one, summed in another order
_BOOTSTRAPS = 2000


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of a group of cells, |predicted - measured| / measured, as shares."""

    cells: int
    models: int
    median: float
    p90: float
    near: float  # share of cells within 10 %
    bias: float  # geometric mean of predicted / measured, less one: above zero is too slow on the whole


def errors(predicted: ArrayLike, measured: ArrayLike, models: Sequence[str] = ()) -> Errors:
    """Summarise relative errors."""
    p, m = np.asarray(predicted, float), np.asarray(measured, float)
    sizes = _relative_errors(p, m)
    with np.errstate(divide="ignore"):  # a baseline may predict no time at all
        log_ratio = np.log(p / m)
    return Errors(
        cells=int(p.size),
        models=len(set(models)),
        median=_median(sizes),
        p90=_quantile(sizes, 0.9),
        near=_share_within(sizes, NEAR),
        bias=float(np.expm1(_mean(log_ratio))),
    )


def _relative_errors(predicted: ArrayLike, measured: ArrayLike) -> Floats:
    """|predicted - measured| / measured, of each cell."""
    p, m = np.asarray(predicted, float), np.asarray(measured, float)
    sizes: Floats = np.abs(p - m) / m
    return sizes


def _share_within(sizes: Floats, limit: float) -> float:
    """Share of the errors that are at most a limit; 1.1 against 1.0 is within 10 % in spite of binary fractions."""
    return _mean(sizes <= limit * (1 + 1e-9))


def conformal(sizes: ArrayLike) -> float:
    """How far off the next prediction is at most, in nine cases of ten, from absolute errors left out.

    A little beyond their quantile, since the next error is one more of them.

    >>> conformal([0.1, 0.2, 0.3]), conformal([0.1, 0.2, 0.3, 0.4] * 10)
    (0.3, 0.4)
    """
    errors_left_out = np.asarray(sizes, float)
    if not errors_left_out.size:
        return float("nan")
    share = min(1.0, 0.90 * (1.0 + 1.0 / errors_left_out.size))
    return float(np.quantile(errors_left_out, share, method="higher"))


def half_width(errors: ArrayLike, models: ArrayLike) -> float:
    """How far off the next model is at most, in nine cases of ten, from the log errors of a few models left out.

    Their root mean square by Student's t, since few errors tell it badly. Errors of one model go together: they count
    as so many as their correlation leaves.

    >>> [round(half_width([0.1, -0.1] * pairs, range(2 * pairs)), 2) for pairs in (2, 4, 100)]
    [0.26, 0.2, 0.17]
    >>> round(half_width([0.1, 0.1, -0.1, -0.1], ["one", "one", "other", "other"]), 2)  # two errors, of two models
    0.77
    """
    from scipy.special import stdtrit

    log_errors = np.asarray(errors, float)
    count = _independent(log_errors, models)
    rms = float(np.sqrt(np.mean(log_errors**2) * (1.0 + 1.0 / count)))
    return rms * float(stdtrit(max(count - 1.0, 1.0), 0.95))


def _independent(errors: Floats, models: ArrayLike) -> float:
    """How many independent errors these are worth, given that those of a model go together (Kish's design effect)."""
    _, index, counts = np.unique(np.asarray(models), return_inverse=True, return_counts=True)
    several = counts > 1
    squares, sums = np.bincount(index, errors**2), np.bincount(index, errors)
    pairs = ((sums**2 - squares)[several] / (counts[several] - 1)).sum()
    whole = squares[several].sum()
    correlation = float(np.clip(pairs / whole, 0.0, 1.0)) if whole > 0 else 0.0
    return len(errors) / (1.0 + (len(errors) / len(counts) - 1.0) * correlation)


@dataclass(frozen=True, slots=True)
class Rank:
    """Kendall tau: (concordant - discordant) / pairs, over the pairs that noise leaves in no doubt."""

    tau: float  # a predicted tie (see `places`) counts as half right, hence as nothing
    pairs: int
    left_out: int
    all_pairs: float  # tau over every pair, noise or not


def rank(predicted: ArrayLike, measured: ArrayLike, noise: float, groups: ArrayLike | None = None) -> Rank:
    """Kendall tau over pairs of one group (as a batch size) whose measured ratio exceeds 1 + noise, over all groups."""
    p, m = places(predicted), np.log(np.asarray(measured, float))
    g = np.zeros(p.size) if groups is None else np.asarray(groups)
    least = np.log1p(noise)
    pairs = clear_pairs = clear_sum = untied = untied_sum = 0
    for name in np.unique(g):
        own = np.flatnonzero(g == name)
        for number, one in enumerate(own):  # one after the other: all pairs of a large table would not fit into memory
            others = own[number + 1 :]
            gap = m[one] - m[others]
            agrees = np.sign(p[one] - p[others]) * np.sign(gap).astype(np.int64)
            clear = np.abs(gap) > least
            pairs += others.size
            clear_pairs, clear_sum = clear_pairs + int(clear.sum()), clear_sum + int(agrees[clear].sum())
            untied, untied_sum = untied + int(np.count_nonzero(gap)), untied_sum + int(agrees.sum())
    return Rank(
        tau=clear_sum / clear_pairs if clear_pairs else float("nan"),
        pairs=clear_pairs,
        left_out=pairs - clear_pairs,
        all_pairs=untied_sum / untied if untied else float("nan"),
    )


def places(values: ArrayLike) -> NDArray[np.int64]:
    """The order of values, from 0 on: those that are within `ALIKE` of each other share a place.

    >>> places([0.3, 0.2, 0.1 + 0.2]).tolist()
    [1, 0, 1]
    """
    numbers = np.asarray(values, float)
    order = np.argsort(numbers)
    ordered, found = numbers[order], np.zeros(numbers.size, dtype=np.int64)
    found[order[1:]] = np.cumsum(np.diff(ordered) > ALIKE * ordered[1:])
    return found


def knee(batches: ArrayLike, latency: ArrayLike, ratio: float = KNEE_RATIO) -> float:
    """Batch size at which latency passes `ratio` times that of the smallest batch; NaN when it never gets there."""
    b, y = _by_batch(batches, latency)
    return _reaching(b, y, ratio * y[0])


def elbow(batches: ArrayLike, latency: ArrayLike) -> float:
    """Crossover batch as an end-to-end curve shows it: flat latency over the slope between its two largest batches.

    For a curve max(overhead, c * batch) this is exactly overhead / c; for overhead + c * batch it is that plus
    the smallest batch. NaN where the curve does not allow it: fewer than three batches, or an elbow outside them.
    """
    b, y = _by_batch(batches, latency)
    slope = (y[-1] - y[-2]) / (b[-1] - b[-2]) if b.size >= 3 else 0.0
    where = y[0] / slope if slope > 0 else float("nan")
    return float(where) if b[0] < where < b[-1] else float("nan")


def crossing(batches: ArrayLike, overhead: ArrayLike, compute: ArrayLike) -> float:
    """Crossover batch where both clocks are known: where compute reaches overhead; NaN when it never does."""
    b, share = _by_batch(batches, np.asarray(compute, float) / np.asarray(overhead, float))
    return _reaching(b, share, 1.0)


def _by_batch(batches: ArrayLike, values: ArrayLike) -> tuple[Floats, Floats]:
    b, y = np.asarray(batches, float), np.asarray(values, float)
    order = np.argsort(b)
    return b[order], y[order]


def _reaching(b: Floats, y: Floats, level: float) -> float:
    """Where a curve gets to a level; between two batches it is a straight line in the logarithms."""
    past = np.flatnonzero(y >= level)
    if past.size == 0:
        return float("nan")
    part = slice(max(int(past[0]) - 1, 0), int(past[0]) + 1)
    return float(np.exp(np.interp(np.log(level), np.log(y[part]), np.log(b[part]))))


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """How well a batch size read off curves (crossover or knee) is predicted, as factors of at least 1."""

    curves: int  # on which both sides show it
    one_sided: int  # curves on which only one side shows it, within the batches there are
    median: float
    p90: float
    good: float  # share of all curves that show it on either side and are within a factor of 1.25
    basis: str  # what it was read from


GOOD_FACTOR = 1.25


def curve_point(predicted: ArrayLike, measured: ArrayLike, basis: str) -> CurvePoint:
    """Errors of a batch size, one per curve; NaN where a curve does not show it."""
    p, m = np.asarray(predicted, float), np.asarray(measured, float)
    on_both = np.isfinite(p) & np.isfinite(m)
    on_any = int((np.isfinite(p) | np.isfinite(m)).sum())
    factors = np.maximum(p / m, m / p)[on_both]
    return CurvePoint(
        curves=factors.size,
        one_sided=on_any - factors.size,
        median=_median(factors),
        p90=_quantile(factors, 0.9),
        good=float((factors <= GOOD_FACTOR).sum()) / on_any if on_any else float("nan"),
        basis=basis,
    )


@dataclass(frozen=True, slots=True)
class Coverage:
    """Share of measurements inside their interval, and the range of that share over resampled models (5 to 95 %)."""

    cells: int
    models: int
    share: float
    low: float
    high: float


def coverage(low: ArrayLike, high: ArrayLike, measured: ArrayLike, clusters: ArrayLike) -> Coverage:
    """Interval coverage with a bootstrap that draws whole clusters (models), since cells of one model err together."""
    m = np.asarray(measured, float)
    inside = (m >= np.asarray(low, float)) & (m <= np.asarray(high, float))
    if m.size == 0:
        return Coverage(0, 0, np.nan, np.nan, np.nan)
    names, index = np.unique(np.asarray(clusters), return_inverse=True)
    hits = np.bincount(index, weights=inside.astype(float), minlength=names.size)
    sizes = np.bincount(index, minlength=names.size)
    drawn = np.random.default_rng(0).integers(0, names.size, size=(_BOOTSTRAPS, names.size))
    shares = hits[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    return Coverage(m.size, names.size, _mean(inside), _quantile(shares, 0.05), _quantile(shares, 0.95))


@dataclass(frozen=True, slots=True)
class Noise:
    """Repeat noise: how much slower the slower of two repeats of a cell was, as shares, and how that is known."""

    cells: int
    median: float
    p90: float
    source: str


def noise(ratios: ArrayLike, source: str) -> Noise:
    """Repeat noise from ratios of repeats, slower over faster; cells without repeats are NaN."""
    r = np.asarray(ratios, float)
    r = r[np.isfinite(r)]
    return Noise(r.size, _median(r) - 1, _quantile(r, 0.9) - 1, source)


@dataclass(frozen=True, slots=True)
class Fastest:
    """How often the fastest of several runtimes is named right."""

    right: float  # share of the clear cases
    clear: int  # cases whose two fastest are further apart than the noise
    left_out: int  # cases that are not


def fastest(predicted: ArrayLike, measured: ArrayLike, noise: float, groups: ArrayLike) -> Fastest:
    """Whether the smallest prediction of each group is the smallest measurement, where noise leaves no doubt."""
    p, m, group = np.asarray(predicted, float), np.asarray(measured, float), np.asarray(groups)
    hits: list[bool] = []
    close = 0
    for name in np.unique(group):
        members = np.flatnonzero(group == name)
        if len(members) < 2:
            continue
        best, second = np.sort(m[members])[:2]
        if second <= best * (1 + noise):
            close += 1
        else:
            hits.append(bool(np.argmin(p[members]) == np.argmin(m[members])))
    return Fastest(_mean(np.array(hits)), len(hits), close)


@dataclass(frozen=True, slots=True)
class Speedups:
    """How well the speed-up of one runtime over another is predicted: its relative errors."""

    cells: int
    median: float
    near: float  # share of cells within 15 %


def speedups(predicted: ArrayLike, measured: ArrayLike) -> Speedups:
    """Errors of speed-ups (2.0 is twice as fast)."""
    sizes = _relative_errors(predicted, measured)
    return Speedups(sizes.size, _median(sizes), _share_within(sizes, SPEEDUP_NEAR))


@dataclass(frozen=True, slots=True)
class Launches:
    """Traced against profiled device launches of one forward pass."""

    models: int  # whose launches were profiled
    exact: float  # share of cells with no difference
    near: float  # share of cells with at most 2 %
    worst: float  # largest difference, as a share of what was profiled


def launches(traced: ArrayLike, profiled: ArrayLike, models: Sequence[str]) -> Launches:
    """Errors of launch counts."""
    sizes = _relative_errors(traced, profiled)
    return Launches(len(set(models)), _mean(sizes == 0), _share_within(sizes, LAUNCHES_NEAR), _quantile(sizes, 1.0))


def _median(values: Floats) -> float:
    return float(np.median(values)) if values.size else float("nan")


def _quantile(values: Floats, share: float) -> float:
    return float(np.quantile(values, share)) if values.size else float("nan")


def _mean(values: NDArray[Any]) -> float:
    return float(values.mean()) if values.size else float("nan")
