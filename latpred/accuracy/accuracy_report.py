"""The accuracy report as a record: what `accuracy.comparison` found, its forms and its gate. Computes nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

import pandas as pd

from latpred.accuracy.metrics import Coverage, Errors, Fastest, Launches, Noise, Rank, Speedups

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA = "latpred.accuracy/1"
CAPTURED = "cuda-graphs"  # replays the kernels of eager


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """How well a batch size read off curves (crossover or knee) is predicted.

    Attributes
    ----------
    curves : int
        Curves on which both sides show it.
    one_sided : int
        Curves on which only one side shows it, within the batches there are.
    median, p90 : float
        Factor between predicted and measured, at least 1.
    good : float
        Share of all curves that show it on either side and are within a factor of 1.25.
    basis : str
        What it was read from.
    """

    curves: int
    one_sided: int
    median: float
    p90: float
    good: float
    basis: str


@dataclass(frozen=True, slots=True)
class Score:
    """One baseline's errors and order on the same cells; both None when it has no answer at all, for `reason`.

    With a `reason` beside its errors it had no answer for some cells.
    """

    name: str
    idea: str
    errors: Errors | None
    rank: Rank | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Targets:
    """What a report is held to: shares for errors, and the least Kendall tau within each batch."""

    median: float = 0.08
    p90: float = 0.20
    tau: float = 0.95


@dataclass(frozen=True, slots=True)
class Report:
    """How predictions compare with measurements.

    Attributes
    ----------
    overall : Errors
        Over all cells, as measured.
    at_speed : Errors or None
        The same of predictions for the speed that the machine had during the measurement; None where it is not known.
    by_runtime, by_batch, by_decade, by_model : dict[str, Errors]
        The same by group.
    small_by_runtime : dict[str, Errors]
        By runtime over batches 1 to 8, where the host's share of latency is large.
    rank : Rank
        Kendall tau over pairs of models at one batch size, pooled over batch sizes.
    rank_by_batch : dict[str, Rank]
        The same for each batch size.
    fastest : Fastest
        How often the fastest of several runtimes is named right.
    speedups : dict[str, Speedups]
        Of each other runtime over eager.
    launches : dict[str, Launches]
        By runtime, walked launches against those that a profiler counted, and kernels that a captured graph replays
        against eager's; empty where no profiler looked.
    crossover, knee : CurvePoint
        Errors of the batch sizes at which the curves turn.
    regime : float
        Share of cells of which it is named right whether they are framework-bound; NaN where it was not measured.
    coverage : Coverage
        Of the predicted intervals; no cells where there are none.
    noise : Noise
        Repeat noise of the measurements.
    baselines : tuple[Score, ...]
        Simpler predictors on the same cells.
    only_predicted, only_measured, failed : tuple[str, ...]
        Cells that found no partner, and cells that could not be measured.
    notes : tuple[str, ...]
        What to know before trusting the figures.
    cells : DataFrame
        Both tables side by side, one row per cell, with `error`, the signed relative error.
    """

    overall: Errors
    at_speed: Errors | None
    by_runtime: dict[str, Errors]
    by_batch: dict[str, Errors]
    by_decade: dict[str, Errors]
    by_model: dict[str, Errors]
    small_by_runtime: dict[str, Errors]
    rank: Rank
    rank_by_batch: dict[str, Rank]
    fastest: Fastest
    speedups: dict[str, Speedups]
    launches: dict[str, Launches]
    crossover: CurvePoint
    knee: CurvePoint
    regime: float
    coverage: Coverage
    noise: Noise
    baselines: tuple[Score, ...]
    only_predicted: tuple[str, ...]
    only_measured: tuple[str, ...]
    failed: tuple[str, ...]
    notes: tuple[str, ...]
    cells: pd.DataFrame = field(repr=False, compare=False)

    def __hash__(self) -> int:
        """Of what tells it from others without looking at all of its figures."""
        return hash((self.overall, self.rank, self.coverage, self.notes))

    def to_dict(self) -> dict[str, Any]:
        """The report without its cells, ready for JSON: a schema name, and None where a figure is not defined."""
        parts = {f.name: _plain(getattr(self, f.name)) for f in fields(self) if f.name != "cells"}
        return {"schema": SCHEMA, **parts}

    def to_frame(self) -> pd.DataFrame:
        """One row per cell: the keys, what was predicted and measured, and the signed relative `error`."""
        return self.cells.copy()

    def text(self, width: int = 100) -> str:
        """The report as plain text."""
        from latpred.render.accuracy_text import text

        return text(self, width)

    def __str__(self) -> str:
        """The report as plain text, 100 columns wide."""
        return self.text()

    def plot(self) -> Figure:
        """Draw predicted against measured, and the errors by batch and by model.

        Raises
        ------
        MissingPackageError
            When matplotlib is not installed.
        """
        from latpred import plot

        return plot.validation(self)

    def _repr_html_(self) -> str:
        from latpred.render.accuracy_text import html

        return html(self)

    def shortfalls(self, targets: Targets | None = None) -> tuple[str, ...]:
        """Which targets are missed, each in a sentence with both numbers; empty when all are met."""
        want = targets or Targets()
        errors = self.at_speed or self.overall
        worst = min((r.tau for r in self.rank_by_batch.values() if r.pairs), default=math.nan)
        checks = (
            ("median error", errors.median, want.median, errors.median <= want.median),
            ("p90 error", errors.p90, want.p90, errors.p90 <= want.p90),
            ("lowest Kendall tau of a batch", worst, want.tau, worst >= want.tau or math.isnan(worst)),
        )
        return tuple(f"{name} is {got:.3g}, the target {limit:.3g}" for name, got, limit, met in checks if not met)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, (Errors, Rank, Fastest, Speedups, Launches, Coverage, Noise, CurvePoint, Score)):
        return _plain(asdict(value))
    return value
