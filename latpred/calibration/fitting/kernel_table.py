"""Judges the kernel regression on a table of matrix products timed elsewhere: how exact after how many shapes.

The library chooses the shapes by their sizes and sees the times of no other; it is then held against all the rest, and,
with some pairs of n and k kept from it altogether, where there are three or more, against those.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from latpred.errors import TableError, UsageError
from latpred.fit.roofline import RooflineRegressor
from latpred.graph.features import Floats, read
from latpred.profile import gpus
from latpred.query import whole_number
from latpred.tables import load

COLUMNS = ("system", "m", "n", "k", "latency_us")
BUDGETS = (100, 300, 1000)
FEWEST = 20
HYPER_POINTS = 240  # that tell the length scales
UNSEEN = 0.2  # share of the pairs of n and k that are kept from the choice
ELEMENT_BYTES = {"float32": 4, "tf32": 4, "float16": 2, "bfloat16": 2}


class Score(NamedTuple):
    """Relative errors of one fit on products that it did not see."""

    system: str
    source: str  # of the table, and its dtype
    budget: int  # shapes that it was fitted to
    tested: str  # on "the rest" of the table, or on products of an "unseen n, k"
    products: int
    mean: float
    median: float
    within_10: float


def evaluate_kernels(
    table: str | os.PathLike[str] | pd.DataFrame, budgets: Sequence[int] = BUDGETS, *, seed: int = 0
) -> list[Score]:
    """Fit products of a table from shapes that the library chooses, and test on all others.

    Parameters
    ----------
    table : DataFrame or path
        Columns system (a GPU that `profile.gpus` knows), m, n, k and latency_us; where there are several, source and
        dtype. Rows of one system, source and dtype are fitted together; a product that repeats counts once, as its
        median.
    budgets : sequence of int
        How many shapes to choose.
    seed : int
        Of the choice, and of the pairs that are kept out.

    Raises
    ------
    TableError
        When a column is missing or holds what no product has.
    UnknownGpuError
        When there is no datasheet of a system.
    UsageError
        When a budget does not fit a table.
    """
    frame = _checked(load(table))
    names = [name for name in ("system", "source", "dtype") if name in frame]
    # Of a product that came twice, one timing may be fitted to: the other would test nothing.
    products = frame.groupby([*names, "m", "n", "k"], sort=False, dropna=False, as_index=False)[["latency_us"]].median()
    parts = products.groupby(names, sort=False, dropna=False)
    return [score for _, part in parts for budget in budgets for score in _scores(part, budget, seed)]


def choose_shapes(candidates: Floats, budget: int, *, family: str = "gemm", seed: int = 0) -> NDArray[np.int64]:
    """Choose shapes to time that stand for all candidates: one near the middle of each of as many groups.

    Parameters
    ----------
    candidates : ndarray, shape (n, columns)
        Work and dimensions in the order of `latpred.graph.features.layout(family).columns`.
    budget : int
        How many to choose.
    family : str
        Kernel family, whose features the groups are of.
    seed : int
        Of the groups.

    Returns
    -------
    ndarray, shape (budget,)
        Indices among the candidates.

    Raises
    ------
    UsageError
        For a budget too small for a fit, or larger than there are candidates.

    Examples
    --------
    >>> import numpy as np
    >>> m, n, k = np.array([(m, n, k) for m in (1, 8, 64, 512) for n in (64, 512) for k in (64, 512, 4096)], float).T
    >>> rows = np.column_stack([m * n * k, 2 * n * k, 2 * m * k, 2 * m * n, m, n, k])
    >>> len(set(choose_shapes(rows, 20).tolist()))
    20
    """
    from sklearn.cluster import MiniBatchKMeans

    rows = np.asarray(candidates, dtype=float)
    budget = whole_number("budget", budget, "number of shapes")
    if not FEWEST <= budget <= len(rows):
        raise UsageError(
            f"a budget of {budget} shapes out of {len(rows)} is not possible; time from {FEWEST} to all of them."
        )
    logs = read(family, rows).logs
    groups = MiniBatchKMeans(budget, random_state=seed, n_init=1, batch_size=4096, max_iter=30).fit(logs)
    chosen: list[int] = []
    for middle in groups.cluster_centers_:
        distance = ((logs - middle) ** 2).sum(axis=1)
        distance[chosen] = np.inf
        chosen.append(int(distance.argmin()))
    return np.array(chosen, dtype=np.int64)


def _checked(frame: pd.DataFrame) -> pd.DataFrame:
    missing = [name for name in COLUMNS if name not in frame]
    if missing:
        raise TableError(
            f"the table has no column {', '.join(missing)} (it has: {', '.join(map(str, frame.columns))}). "
            f"A table of products has {', '.join(COLUMNS)}."
        )
    numbers = frame[list(COLUMNS[1:])].apply(pd.to_numeric, errors="coerce").astype(float)
    wrong = ~(np.isfinite(numbers) & (numbers > 0)).all(axis=1)
    if wrong.any():
        raise TableError(
            f"{int(wrong.sum())} rows hold no positive number, the first at row {int(np.argmax(wrong))}. "
            "Sizes and microseconds must be above 0; drop those rows."
        )
    unknown = [] if "dtype" not in frame else sorted(set(map(str, frame["dtype"])) - ELEMENT_BYTES.keys())
    if unknown:
        raise TableError(f"nobody knows the dtype {', '.join(unknown)}. Products are in {', '.join(ELEMENT_BYTES)}.")
    return frame.assign(**{name: numbers[name] for name in COLUMNS[1:]})


def _scores(part: pd.DataFrame, budget: int, seed: int) -> Iterator[Score]:
    rows, times = _rows(part), part["latency_us"].to_numpy(dtype=float)
    if budget >= len(rows):
        raise UsageError(f"a budget of {budget} shapes out of {len(rows)} leaves none to test on; give fewer.")
    first = part.iloc[0]
    told = (first[name] for name in ("source", "dtype") if name in part)
    system, source = str(first["system"]), " ".join(str(name) for name in told if pd.notna(name) and name != "")
    multiprocessors = gpus.spec(system).multiprocessors
    hidden = _hidden(part, seed)
    tests = {"the rest": np.ones(len(rows), dtype=bool)}
    if hidden.any():
        tests["unseen n, k"] = ~hidden
    for tested, offered in tests.items():
        chosen = np.flatnonzero(offered)[choose_shapes(rows[offered], budget, seed=seed)]
        model = RooflineRegressor("gemm", multiprocessors, budget, min(budget, HYPER_POINTS))
        model.fit(rows[chosen], times[chosen])
        scored = hidden if tested != "the rest" else np.isin(np.arange(len(rows)), chosen, invert=True)
        errors = np.abs(model.predict(rows[scored]) / times[scored] - 1.0)
        mean, median, within_10 = errors.mean(), np.median(errors), (errors <= 0.1).mean()
        yield Score(system, source, budget, tested, int(scored.sum()), float(mean), float(median), float(within_10))


def _rows(part: pd.DataFrame) -> Floats:
    """Work and dimensions of each product."""
    m, n, k = (part[name].to_numpy(dtype=float) for name in ("m", "n", "k"))
    dtypes = part["dtype"] if "dtype" in part else pd.Series("bfloat16", index=part.index)
    size = dtypes.map(ELEMENT_BYTES).to_numpy(dtype=float)
    return np.column_stack((m * n * k, size * n * k, size * m * k, size * m * n, m, n, k))


def _hidden(part: pd.DataFrame, seed: int) -> NDArray[np.bool_]:
    """Rows of the pairs of n and k that are kept out: none where there are at most two pairs."""
    pairs = part[["n", "k"]].drop_duplicates().sort_values(["n", "k"])
    kept = pairs.sample(frac=UNSEEN, random_state=seed)
    hidden: NDArray[np.bool_] = pd.MultiIndex.from_frame(part[["n", "k"]]).isin(pd.MultiIndex.from_frame(kept))
    return hidden
