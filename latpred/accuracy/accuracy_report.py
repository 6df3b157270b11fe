"""The accuracy report that `accuracy.comparison` makes: a record of figures, its JSON and its targets."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import msgspec
import pandas as pd

from latpred import plot
from latpred.accuracy.metrics import Coverage, Errors, Fastest, Launches, Noise, Rank, Speedups
from latpred.accuracy.metrics import CurvePoint as CurvePoint
from latpred.accuracy.report_page import report_page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCHEMA = "latpred.accuracy/1"
CAPTURED = "cuda-graphs"  # replays the kernels of eager


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
    """How predictions compare with measurements."""

    overall: Errors
    at_speed: Errors | None  # for the speed that the machine had while it was measured, where that is known
    by_runtime: dict[str, Errors]
    by_batch: dict[str, Errors]
    by_decade: dict[str, Errors]
    by_model: dict[str, Errors]
    small_by_runtime: dict[str, Errors]  # batches 1 to 8, where the host's share of latency is large
    rank: Rank  # over pairs of models at one batch size, pooled over batch sizes
    rank_by_batch: dict[str, Rank]
    fastest: Fastest
    speedups: dict[str, Speedups]  # of each other runtime over eager
    # By runtime, where a profiler looked; kernels that a captured graph replays against eager's.
    launches: dict[str, Launches]
    crossover: CurvePoint
    knee: CurvePoint
    regime: float  # share of cells named right as framework-bound or not; NaN where it was not measured
    coverage: Coverage  # of the predicted intervals
    noise: Noise  # of the measurements
    baselines: tuple[Score, ...]  # simpler predictors on the same cells
    only_predicted: tuple[str, ...]  # cells without a partner, as `only_measured`
    only_measured: tuple[str, ...]
    failed: tuple[str, ...]  # cells that could not be measured
    notes: tuple[str, ...]  # what to know before trusting the figures
    cells: pd.DataFrame = field(repr=False, compare=False)  # both tables side by side, one row per cell

    def __hash__(self) -> int:
        """Of what tells it from others without looking at all of its figures."""
        return hash((self.overall, self.rank, self.coverage, self.notes))

    def to_dict(self) -> dict[str, Any]:
        """The report without its cells, ready for JSON: a schema name, and None where a figure is not defined."""
        figures = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "cells"}
        document: dict[str, Any] = msgspec.json.decode(msgspec.json.encode({"schema": SCHEMA, **figures}))
        return document

    def to_frame(self) -> pd.DataFrame:
        """One row per cell: the keys, what was predicted and measured, and the signed relative `error`."""
        return self.cells.copy()

    def text(self, width: int = 100) -> str:
        """The report as plain text."""
        return report_page(self).text(width) + "\n"

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
        return plot.validation(self)

    def _repr_html_(self) -> str:
        return report_page(self).html()

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
