"""Measured points beside a predicted curve: from a table or from numbers. Selects; draws and measures nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from latpred.errors import TableError

if TYPE_CHECKING:
    import pandas as pd

    from latpred.prediction import Setting

    Measured = Mapping[int, float] | pd.DataFrame | str | os.PathLike[str]


class Points(NamedTuple):
    """Batch sizes, milliseconds, and the spread of each (zero where it is not known)."""

    batches: list[int]
    latency_ms: list[float]
    spread_ms: list[float]


def points(measured: Measured, setting: Setting) -> Points:
    """What was measured of the same model, run in the same way.

    Parameters
    ----------
    measured : mapping, DataFrame or path
        Milliseconds by batch size, or a measurement table (`latpred measure -o measured.csv`).
    setting : Setting
        Of the predicted curve; rows of a table that differ from it in model, runtime, precision or protocol are left
        out.

    Raises
    ------
    TableError
        When the table breaks its schema, or holds nothing of the kind.
    """
    if isinstance(measured, Mapping):
        batches = sorted(measured)
        return Points(batches, [float(measured[batch]) for batch in batches], [0.0] * len(batches))
    from latpred import tables

    table = tables.merge_repeats(tables.check(tables.complete(tables.load(measured)), tables.MEASURED))
    same = table["latency_s"].notna()
    for name in ("model", "runtime", "precision", "protocol"):
        same &= table[name] == getattr(setting, name)
    if not same.any():
        raise TableError(
            f"Nothing was measured of {setting.model} in {setting.runtime}, {setting.precision}, {setting.protocol}; "
            f"the table has {', '.join(sorted(set(table['model'])))}. Measure it with: latpred measure"
        )
    rows = table[same].sort_values("batch")
    return Points(
        rows["batch"].astype(int).tolist(), (rows["latency_s"] * 1e3).tolist(), (rows["spread_s"] * 1e3).tolist()
    )
