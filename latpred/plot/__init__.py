"""Figures of predictions, explanations, reports and forward passes, drawn with matplotlib.

Each takes the record and the axes to draw into (a new figure without them), and returns the axes. Nothing here predicts
or measures. matplotlib is imported when something is drawn; it comes with `pip install 'latpred[plot]'`.
"""

from __future__ import annotations

from latpred.plot.breakdown import explanation, runtimes, shares, timeline, two_clocks
from latpred.plot.curves import agreement, curve, errors_by_batch, errors_by_model, latencies, validation
from latpred.plot.style import blank, figure, figure_of, save

__all__ = [
    "agreement",
    "blank",
    "curve",
    "errors_by_batch",
    "errors_by_model",
    "explanation",
    "figure",
    "figure_of",
    "latencies",
    "runtimes",
    "save",
    "shares",
    "timeline",
    "two_clocks",
    "validation",
]
