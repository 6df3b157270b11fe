"""What each option of a supernet adds to the latency: a table whose sums a search can differentiate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from latpred.errors import UsageError
from latpred.search.many import predict_many

if TYPE_CHECKING:
    import pandas as pd

    from latpred.graph.features import Floats
    from latpred.search.supernet import Supernet

DRAWS = 4  # architectures for each number that is fitted
HELD_OUT = 0.2  # share of the draws that only tell how far off sums are


def latency_table(
    supernet: Supernet,
    *,
    device: Any = None,
    host: float | str | None = None,
    batch: int | Sequence[int] = 1,
    runtime: str | Sequence[str] = "eager",
    protocol: str = "single",
    seed: int = 0,
) -> pd.DataFrame:
    """What each option adds to the latency, for differentiable search: expected latencies are sums of it.

    Fitted to the predictions of architectures drawn at random, so that sums hold over the whole space as well as sums
    can. Where host and device take turns at setting the pace, none does quite.

    Parameters
    ----------
    supernet : Supernet
        All architectures.
    device, host, batch, runtime, protocol
        As for `latpred.predict_many`.
    seed : int
        Of the draws.

    Returns
    -------
    DataFrame
        Rows with device, batch, runtime, label, option, latency_ms, error. The cheapest option of a label adds 0; the
        row with no label and no option is the network of these. error is the median relative error of sums, on
        architectures that were not fitted, or on those that were where the space is so small that none is left.

    Examples
    --------
    >>> from torch import nn
    >>> from latpred import Choice, Supernet
    >>> layers = {"3": nn.Conv2d(8, 8, 3, padding=1), "none": None}
    >>> supernet = Supernet(nn.Sequential(nn.Conv2d(3, 8, 1), Choice("kernel", layers)), image=32)
    >>> table = latency_table(supernet, device="rtx-8000")
    >>> table[["label", "option"]].values.tolist()
    [['', ''], ['kernel', '3'], ['kernel', 'none']]
    """
    import pandas as pd

    if not hasattr(supernet, "choices"):
        raise UsageError(f"a {type(supernet).__name__} is no supernet; give latpred.Supernet(model, image=...).")
    options = supernet.choices
    counts = [len(names) for names in options.values()]
    chosen = drawn(counts, np.random.default_rng(seed))
    architectures = (
        {label: names[n] for (label, names), n in zip(options.items(), one, strict=True)} for one in chosen
    )
    predicted = predict_many(
        map(supernet.graph, architectures),
        device=device,
        host=host,
        batch=batch,
        runtime=runtime,
        protocol=protocol,
        errors="raise",
    )
    keys = [("", ""), *((label, name) for label, names in options.items() for name in names)]
    parts = []
    settings = ["device", "batch", "runtime"]
    for _, cells in predicted.groupby(settings, sort=False):
        added, error = additive(chosen, counts, cells["latency_ms"].to_numpy())
        part = pd.DataFrame(keys, columns=["label", "option"]).assign(latency_ms=added.round(12), error=error)
        parts.append(part.merge(cells[settings].head(1), how="cross"))
    return pd.concat(parts, ignore_index=True)[[*settings, "label", "option", "latency_ms", "error"]]


def drawn(counts: Sequence[int], rng: np.random.Generator) -> list[tuple[int, ...]]:
    """Architectures by the numbers of their options, each option of a label about as often as the others."""
    rounds = 1 + DRAWS * (1 + sum(count - 1 for count in counts)) // max(counts)
    most = max(counts)
    columns = [np.concatenate([rng.permutation(most) % count for _ in range(rounds)]) for count in counts]
    return [tuple(row) for row in np.column_stack(columns).tolist()]


def additive(chosen: Sequence[Sequence[int]], counts: Sequence[int], latency_ms: Floats) -> tuple[Floats, float]:
    """What all architectures have and what each option adds to it, the least of a label nothing; and the error of sums.

    The error is the median of architectures that had no part in the fit, of all without any.

    >>> chosen = [(0, 0), (1, 0), (0, 1), (0, 0), (1, 1)]
    >>> added, error = additive(chosen, (2, 2), np.array([3.0, 5.0, 4.0, 3.0, 6.0]))
    >>> added.round(6).tolist(), round(error, 6)
    ([3.0, 0.0, 2.0, 0.0, 1.0], 0.0)
    """
    starts = 1 + np.cumsum([0, *counts[:-1]])
    design = np.zeros((len(chosen), 1 + sum(counts)))
    design[:, 0] = 1.0
    for row, one in zip(design, chosen, strict=True):
        row[starts + np.array(one)] = 1.0
    fitted = max(len(chosen) - int(HELD_OUT * len(chosen)), 1)
    added: Floats = np.linalg.lstsq(design[:fitted], latency_ms[:fitted], rcond=None)[0].astype(float)
    known = set(map(tuple, chosen[:fitted]))
    unseen = [number for number in range(fitted, len(chosen)) if tuple(chosen[number]) not in known]
    judged = unseen or [*range(len(chosen))]
    errors = np.abs(design[judged] @ added / latency_ms[judged] - 1.0)
    for start, count in zip(starts.tolist(), counts, strict=True):
        least = added[start : start + count].min()
        added[start : start + count] -= least
        added[0] += least
    return added, float(np.median(errors))
