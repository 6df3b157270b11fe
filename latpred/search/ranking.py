"""`latpred.rank` and `latpred.agreement`: candidates by predicted latency, and how well a measured order agrees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from latpred.accuracy import metrics
from latpred.errors import UsageError
from latpred.graph.features import Floats
from latpred.search.many import predict_many

if TYPE_CHECKING:
    import pandas as pd

    from latpred.prediction.predictor import Predictor
    from latpred.query import Device


def rank(
    candidates: Iterable[Any] | pd.DataFrame,
    *,
    batch: int | Sequence[int] = 1,
    runtime: str | Sequence[str] = "eager",
    device: Device | Predictor | Sequence[Device | Predictor] | None = None,
    host: float | str | None = None,
    precision: str | None = None,
    attention: str | None = None,
    protocol: str = "single",
    inputs: Any = None,
    seq: int | None = None,
    image: int | None = None,
) -> pd.DataFrame:
    """Candidates from the fastest to the slowest, as predicted.

    Parameters
    ----------
    candidates : iterable or DataFrame
        What `latpred.predict_many` takes; or a table that it gave, which has all that the other parameters ask.
    batch, runtime, device, host, precision, attention, protocol, inputs, seq, image
        As for `latpred.predict_many`.

    Returns
    -------
    DataFrame
        The table of `latpred.predict_many` with a column rank in front, sorted by it. Each device, batch and runtime
        has an order of its own, from 1 on; candidates that are predicted alike, to a relative 1e-9, share a rank, and
        those that could not be predicted stand last and have none.

    Raises
    ------
    UsageError, ProfileError
        As for `latpred.predict_many`.

    Examples
    --------
    >>> import pandas as pd
    >>> table = pd.DataFrame({"candidate": [0, 1, 2], "batch": 1, "runtime": "eager", "latency_ms": [3.0, 1.0, 3.0]})
    >>> rank(table)[["rank", "candidate"]].values.tolist()
    [[1, 1], [2, 0], [2, 2]]
    """
    import pandas as pd

    asked: dict[str, Any] = {"batch": batch, "runtime": runtime, "device": device, "host": host, "inputs": inputs}
    asked |= {"precision": precision, "attention": attention, "protocol": protocol, "seq": seq, "image": image}
    if isinstance(candidates, pd.DataFrame):
        table = candidates
        if lacking := [name for name in ("candidate", "latency_ms") if name not in table]:
            raise UsageError(f"the table lacks {', '.join(lacking)}; give one that latpred.predict_many gave.")
        usual = rank.__kwdefaults__ or {}
        if given := [name for name, value in asked.items() if str(value) != str(usual[name])]:
            raise UsageError(f"the table was predicted already; ask latpred.predict_many for {', '.join(given)}.")
    else:
        table = predict_many(candidates, **asked)
    known = table["latency_ms"].notna()
    cells = table.assign(_place=pd.Series(metrics.places(table["latency_ms"]), table.index).where(known))
    groups = cells.groupby([name for name in ("device", "batch", "runtime") if name in table], sort=False)
    ordered = table.assign(rank=groups["_place"].rank(method="min").astype("Int64"), _cell=groups.ngroup())
    ordered = ordered.sort_values(["_cell", "rank", "candidate"], na_position="last", ignore_index=True)
    return ordered[["rank", *(name for name in table.columns if name != "rank")]]


@dataclass(frozen=True, slots=True)
class Agreement:
    """How well predictions put candidates into the measured order, from -1 (reversed) over 0 (no better than chance).

    Attributes
    ----------
    kendall : float
        Kendall's tau over the pairs that noise leaves in no doubt.
    pairs, left_out : int
        How many pairs those are, and how many are in doubt.
    kendall_b : float
        Kendall's tau-b over all pairs.
    spearman : float
        Spearman's rank correlation.
    """

    kendall: float
    pairs: int
    left_out: int
    kendall_b: float
    spearman: float


def agreement(predicted: ArrayLike, measured: ArrayLike, noise: float = 0.0) -> Agreement:
    """Rank correlations between predictions (or anything that should tell the order) and measured latencies.

    Parameters
    ----------
    predicted : array_like
        Latencies, or multiply-adds, parameters and the like; above zero. A tie between two of them, to a relative
        1e-9, counts as half right.
    measured : array_like
        Latencies of the same candidates, at one batch size in one runtime.
    noise : float
        Repeat noise as a share; 0.02 leaves pairs out of `kendall` whose latencies are less than 2 % apart.

    Raises
    ------
    UsageError
        When the two are not as long as each other, a value is not a finite number above zero, or the noise is none.

    Examples
    --------
    >>> agrees = agreement([1, 2, 4, 3], [1.0, 2.0, 3.0, 3.01], noise=0.02)
    >>> agrees.kendall, agrees.pairs, agrees.left_out, round(agrees.kendall_b, 2), round(agrees.spearman, 2)
    (1.0, 5, 1, 0.67, 0.8)
    """
    from scipy import stats

    p, m = _checked("predicted", predicted), _checked("measured", measured)
    if p.shape != m.shape:
        raise UsageError(f"{p.size} predictions cannot be compared with {m.size} measurements; give one of each.")
    if not (isinstance(noise, Real) and 0 <= noise < np.inf):
        raise UsageError(f"noise={noise!r} is no share; give 0.02 for 2 %, or 0 to count every pair.")
    clear = metrics.rank(p, m, noise)
    order = metrics.places(p)
    varied = p.size > 1 and bool(np.ptp(order)) and bool(np.ptp(m))  # else nothing has an order
    return Agreement(
        kendall=clear.tau,
        pairs=clear.pairs,
        left_out=clear.left_out,
        kendall_b=float(stats.kendalltau(order, m).statistic) if varied else float("nan"),
        spearman=float(stats.spearmanr(order, m).statistic) if varied else float("nan"),
    )


def _checked(name: str, values: ArrayLike) -> Floats:
    try:
        numbers = np.asarray(values, float).ravel()
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name} does not hold numbers alone: {error}.") from None
    wrong = ~(np.isfinite(numbers) & (numbers > 0))
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise UsageError(f"{name} holds {numbers[at]:g} at position {at}; leave out what is not a number above 0.")
    return numbers
