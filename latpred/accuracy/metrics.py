"""How far predictions are from measurements, as numbers: pure functions of arrays, with no table and no printing.

Latencies may be in any one unit; errors are shares (0.08 is 8 %), errors of a batch size are factors (1.25 is a
quarter off).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

# A prediction within this share of the measurement counts as near: of latencies, of speed-ups, of numbers of launches.
NEAR, SPEEDUP_NEAR, LAUNCHES_NEAR = 0.10, 0.15, 0.02
KNEE_RATIO = 1.5  # the knee is where latency exceeds this many times the flat latency
_BOOTSTRAPS = 2000


@dataclass(frozen=True, slots=True)
class Errors:
    """Absolute relative errors of a group of cells, as shares.

    Attributes
    ----------
    cells, models : int
        How many of each the figures rest on.
    median, p90 : float
        Of |predicted - measured| / measured.
    near : float
        Share of cells within 10 %.
    bias : float
        Geometric mean of predicted / measured, less one: above zero is too slow on the whole.
    """

    cells: int
    models: int
    median: float
    p90: float
    near: float
    bias: float


def errors(predicted: ArrayLike, measured: ArrayLike, models: Sequence[str] = ()) -> Errors:
    """Summary of relative errors; all figures are NaN when there is no cell.

    >>> e = errors([1.1, 1.8, 4.0], [1.0, 2.0, 4.0])
    >>> round(e.median, 3), round(e.near, 3)
    (0.1, 1.0)
    """
    p, m = np.asarray(predicted, float), np.asarray(measured, float)
    count = len(set(models)) if len(models) else 0
    if p.size == 0:
        return Errors(0, count, np.nan, np.nan, np.nan, np.nan)
    off = _off(p, m)
    return Errors(
        cells=int(p.size),
        models=count,
        median=float(np.median(off)),
        p90=float(np.quantile(off, 0.9)),
        near=float(np.mean(off <= NEAR * (1 + 1e-9))),  # 1.1 against 1.0 is near in spite of binary fractions
        bias=float(np.expm1(np.mean(np.log(p / m)))),
    )


def conformal(sizes: ArrayLike, level: float = 0.90) -> float:
    """How far off the next prediction is at most, with probability `level`, as the sizes of errors left out tell.

    A little beyond their quantile, since the next error is one more of them; NaN without any.

    Parameters
    ----------
    sizes : array
        Absolute errors.
    level
        The probability.

    Examples
    --------
    >>> conformal([0.1, 0.2, 0.3]), conformal([0.1, 0.2, 0.3, 0.4] * 10)
    (0.3, 0.4)
    """
    known = np.asarray(sizes, float)
    if not known.size:
        return float(np.nan)
    share = min(1.0, level * (1.0 + 1.0 / known.size))
    return float(np.quantile(known, share, method="higher"))


def half_width(errors: ArrayLike, models: ArrayLike) -> float:
    """How far off the next model is at most, in nine cases of ten, as a few errors of models left out tell.

    Their root mean square by Student's t, since few errors tell it badly. Errors of one model go together: they count
    as so many as their correlation leaves.

    Parameters
    ----------
    errors : array
        Logarithms of measured over predicted.
    models : array
        The model of each.

    Examples
    --------
    >>> [round(half_width([0.1, -0.1] * pairs, range(2 * pairs)), 2) for pairs in (2, 4, 100)]
    [0.26, 0.2, 0.17]
    >>> round(half_width([0.1, 0.1, -0.1, -0.1], ["one", "one", "other", "other"]), 2)  # two errors, of two models
    0.77
    """
    from scipy.special import stdtrit

    off = np.asarray(errors, float)
    count = _independent(off, np.asarray(models))
    size = float(np.sqrt(np.mean(off**2) * (1.0 + 1.0 / count)))
    return size * float(stdtrit(max(count - 1.0, 1.0), 0.95))


def _independent(errors: Floats, models: NDArray[Any]) -> float:
    """How many errors of their own there are, given that those of a model go together (Kish's design effect)."""
    _, index, counts = np.unique(models, return_inverse=True, return_counts=True)
    several = counts > 1
    squares, sums = np.bincount(index, errors**2), np.bincount(index, errors)
    pairs = ((sums**2 - squares)[several] / (counts[several] - 1)).sum()
    whole = squares[several].sum()
    together = float(np.clip(pairs / whole, 0.0, 1.0)) if whole > 0 else 0.0
    return len(errors) / (1.0 + (len(errors) / len(counts) - 1.0) * together)


@dataclass(frozen=True, slots=True)
class Rank:
    """Kendall tau: (concordant - discordant) / pairs, over the pairs that noise leaves in no doubt.

    A predicted tie counts as half right, hence as nothing. `all_pairs` is the same over every pair, noise or not.
    """

    tau: float
    pairs: int
    left_out: int
    all_pairs: float


def rank(predicted: ArrayLike, measured: ArrayLike, noise: float, groups: ArrayLike | None = None) -> Rank:
    """Kendall tau over pairs of one group whose measured ratio exceeds 1 + noise, pooled over groups.

    Parameters
    ----------
    predicted, measured : array_like
        Latencies.
    noise : float
        Repeat noise as a share; 0.02 leaves out pairs less than 2 % apart.
    groups : array_like, optional
        Only cells with equal values here are paired (batch sizes, as a rule).

    Examples
    --------
    >>> rank([1, 3, 2], [1.0, 2.0, 3.0], noise=0.0).tau
    0.3333333333333333
    """
    p, m = np.log(np.asarray(predicted, float)), np.log(np.asarray(measured, float))
    g = np.zeros(p.size) if groups is None else np.unique(np.asarray(groups), return_inverse=True)[1]
    i, j = np.triu_indices(p.size, k=1)
    same = g[i] == g[j]
    i, j = i[same], j[same]
    gap = m[i] - m[j]
    agree = np.sign(p[i] - p[j]) * np.sign(gap)
    clear = np.abs(gap) > np.log1p(noise)
    return Rank(
        tau=_mean(agree[clear]),
        pairs=int(clear.sum()),
        left_out=int((~clear).sum()),
        all_pairs=_mean(agree[gap != 0]),
    )


def knee(batches: ArrayLike, latency: ArrayLike, ratio: float = KNEE_RATIO) -> float:
    """Batch size at which latency passes `ratio` times the flat latency, read off the curve.

    Flat is the latency of the smallest batch. Between measured batches the curve is a straight line in the logarithms.
    NaN when the curve never gets there.

    >>> round(knee([1, 2, 4], [1.0, 1.0, 2.0], ratio=2 ** 0.5), 3)
    2.828
    """
    b, y = _sorted(batches, latency)
    return _reaching(b, y, ratio * y[0])


def elbow(batches: ArrayLike, latency: ArrayLike) -> float:
    """Crossover batch as an end-to-end curve shows it: flat latency over the slope between its two largest batches.

    For a curve max(overhead, c * batch) this is exactly overhead / c; for overhead + c * batch it is that plus
    the smallest batch. NaN where the curve does not allow it: fewer than three batches, or an elbow outside them.

    >>> elbow([1, 2, 4, 8, 16], [4.0, 4.0, 4.0, 8.0, 16.0])
    4.0
    """
    b, y = _sorted(batches, latency)
    if b.size < 3:
        return float("nan")
    slope = (y[-1] - y[-2]) / (b[-1] - b[-2])
    if slope <= 0:
        return float("nan")
    where = y[0] / slope
    return float(where) if b[0] < where < b[-1] else float("nan")


def crossing(batches: ArrayLike, overhead: ArrayLike, compute: ArrayLike) -> float:
    """Crossover batch where both clocks are known: where compute reaches overhead; NaN when it never does.

    >>> round(crossing([1, 4, 16], [8.0, 8.0, 8.0], [1.0, 4.0, 16.0]), 3)
    8.0
    """
    b, share = _sorted(batches, np.asarray(compute, float) / np.asarray(overhead, float))
    return _reaching(b, share, 1.0)


def factor(predicted: float, measured: float) -> float:
    """How many times too large or too small, at least 1; NaN when either is.

    >>> factor(4, 8)
    2.0
    """
    return float(max(predicted / measured, measured / predicted))


@dataclass(frozen=True, slots=True)
class Coverage:
    """Share of measurements inside their interval, and the range of that share over resampled models (5 to 95 %)."""

    cells: int
    models: int
    share: float
    low: float
    high: float


def coverage(low: ArrayLike, high: ArrayLike, measured: ArrayLike, clusters: ArrayLike, seed: int = 0) -> Coverage:
    """Interval coverage with a bootstrap that draws whole clusters (models), since cells of one model err together.

    >>> c = coverage([0, 0, 2], [2, 2, 3], [1, 1, 1], ["a", "a", "b"])
    >>> round(c.share, 3), c.low, c.high
    (0.667, 0.0, 1.0)
    """
    m = np.asarray(measured, float)
    inside = (m >= np.asarray(low, float)) & (m <= np.asarray(high, float))
    if m.size == 0:
        return Coverage(0, 0, np.nan, np.nan, np.nan)
    names, index = np.unique(np.asarray(clusters), return_inverse=True)
    hits = np.bincount(index, weights=inside.astype(float), minlength=names.size)
    sizes = np.bincount(index, minlength=names.size)
    drawn = np.random.default_rng(seed).integers(0, names.size, size=(_BOOTSTRAPS, names.size))
    shares = hits[drawn].sum(axis=1) / sizes[drawn].sum(axis=1)
    return Coverage(
        cells=int(m.size),
        models=int(names.size),
        share=float(inside.mean()),
        low=float(np.quantile(shares, 0.05)),
        high=float(np.quantile(shares, 0.95)),
    )


@dataclass(frozen=True, slots=True)
class Noise:
    """Repeat noise: how much slower the slower of two repeats of a cell was, as shares, and how that is known."""

    cells: int
    median: float
    p90: float
    source: str


def noise(ratios: ArrayLike, source: str) -> Noise:
    """Repeat noise from ratios of repeats, slower over faster.

    >>> noise([1.0, 1.02, 1.04], "two halves").median
    0.020000000000000018
    """
    r = np.asarray(ratios, float)
    r = r[np.isfinite(r)]
    if r.size == 0:
        return Noise(0, np.nan, np.nan, source)
    return Noise(int(r.size), float(np.median(r) - 1), float(np.quantile(r, 0.9) - 1), source)


def decade(batch: int) -> str:
    """Batch decade a batch size falls in.

    >>> decade(1), decade(32)
    ('1-9', '10-99')
    """
    start = 10 ** (len(str(int(batch))) - 1)
    return f"{start}-{start * 10 - 1}"


@dataclass(frozen=True, slots=True)
class Fastest:
    """How often the fastest of several ways to run a model is named right.

    Attributes
    ----------
    right : float
        Share of the clear cases.
    clear : int
        Cases whose two fastest are further apart than the noise.
    left_out : int
        Cases that are not.
    """

    right: float
    clear: int
    left_out: int


def fastest(predicted: ArrayLike, measured: ArrayLike, noise: float, groups: ArrayLike) -> Fastest:
    """Whether the smallest prediction of each group is the smallest measurement.

    Parameters
    ----------
    predicted, measured : array_like
        Latencies.
    noise : float
        Repeat noise as a share; groups whose two fastest are closer are left out.
    groups : array_like
        Cells with equal values are ways to run the same thing.

    Examples
    --------
    >>> fastest([1, 2, 3, 1], [1.0, 2.0, 2.0, 4.0], noise=0.1, groups=["a", "a", "b", "b"])
    Fastest(right=0.5, clear=2, left_out=0)
    """
    p, m = np.asarray(predicted, float), np.asarray(measured, float)
    kinds = np.unique(np.asarray(groups), return_inverse=True)[1]
    hits: list[bool] = []
    close = 0
    for kind in range(kinds.max(initial=-1) + 1):
        members = np.flatnonzero(kinds == kind)
        if len(members) < 2:
            continue
        best, second = np.sort(m[members])[:2]
        if second <= best * (1 + noise):
            close += 1
        else:
            hits.append(bool(np.argmin(p[members]) == np.argmin(m[members])))
    return Fastest(float(np.mean(hits)) if hits else float("nan"), len(hits), close)


@dataclass(frozen=True, slots=True)
class Speedups:
    """How well the speed-up of one runtime over another is predicted.

    Attributes
    ----------
    cells : int
        How many it rests on.
    median : float
        Of |predicted - measured| / measured, of the speed-ups.
    near : float
        Share of cells within 15 %.
    """

    cells: int
    median: float
    near: float


def speedups(predicted: ArrayLike, measured: ArrayLike) -> Speedups:
    """Errors of speed-ups (2.0 is twice as fast).

    >>> speedups([2.0, 3.0], [2.0, 2.0])
    Speedups(cells=2, median=0.25, near=0.5)
    """
    off = _off(predicted, measured)
    if off.size == 0:
        return Speedups(0, np.nan, np.nan)
    return Speedups(int(off.size), float(np.median(off)), float(np.mean(off <= SPEEDUP_NEAR * (1 + 1e-9))))


@dataclass(frozen=True, slots=True)
class Launches:
    """Walked against profiled device launches of one forward pass.

    Attributes
    ----------
    models : int
        Models whose launches were profiled.
    exact, near : float
        Share of cells with no difference, and with at most 2 %.
    worst : float
        Largest difference, as a share of what was profiled.
    """

    models: int
    exact: float
    near: float
    worst: float


def launches(walked: ArrayLike, profiled: ArrayLike, models: Sequence[str]) -> Launches:
    """Errors of launch counts.

    >>> launches([100, 99], [100, 100], ["bert", "vit"])
    Launches(models=2, exact=0.5, near=1.0, worst=0.01)
    """
    off = _off(walked, profiled)
    if off.size == 0:
        return Launches(0, np.nan, np.nan, np.nan)
    return Launches(len(set(models)), float(np.mean(off == 0)), float(np.mean(off <= LAUNCHES_NEAR)), float(off.max()))


def _off(predicted: ArrayLike, measured: ArrayLike) -> Floats:
    p, m = np.asarray(predicted, float), np.asarray(measured, float)
    off: Floats = np.abs(p - m) / m
    return off


def _sorted(batches: ArrayLike, latency: ArrayLike) -> tuple[Floats, Floats]:
    b, y = np.asarray(batches, float), np.asarray(latency, float)
    order = np.argsort(b)
    return b[order], y[order]


def _reaching(b: Floats, y: Floats, level: float) -> float:
    """Where a curve gets to a level; between two batches it is a straight line in the logarithms."""
    past = np.flatnonzero(y >= level)
    if past.size == 0:
        return float("nan")
    part = slice(max(int(past[0]) - 1, 0), int(past[0]) + 1)
    return float(np.exp(np.interp(np.log(level), np.log(y[part]), np.log(b[part]))))


def _mean(values: Floats) -> float:
    return float(values.mean()) if values.size else float("nan")
