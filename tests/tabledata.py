"""Small tables that several tests build on."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

KEY = {
    "machine": "host A",
    "device": "cpu",
    "runtime": "eager",
    "precision": "fp32",
    "input_kind": "seq",
    "input_size": 16,
    "protocol": "single",
}


def measured(cells: Sequence[tuple[str, int, float]], **columns: object) -> pd.DataFrame:
    """A measurement table of (model, batch, latency in seconds) cells; `columns` override or add."""
    rows = [
        {
            **KEY,
            "model": model,
            "batch": batch,
            "latency_s": latency,
            "spread_s": 0.0,
            "n": 5,
            "run": "r1",
            "stack": "s",
        }
        for model, batch, latency in cells
    ]
    return pd.DataFrame(rows).assign(**columns)


def predicted(cells: Sequence[tuple[str, int, float]], **columns: object) -> pd.DataFrame:
    """A predicted table of (model, batch, latency in seconds) cells; `columns` override or add."""
    rows = [{**KEY, "model": model, "batch": batch, "latency_s": latency} for model, batch, latency in cells]
    return pd.DataFrame(rows).assign(**columns)
