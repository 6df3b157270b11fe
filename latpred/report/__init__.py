"""A report about one or several models: one HTML file with figures, tables and sentences that needs no network.

`gather` predicts what a page shows, `write` puts it into a file. Its figures are those of `latpred.plot`, as SVG.
"""

from __future__ import annotations

from latpred.report.page import Studied, demand_packages, gather, html, write

__all__ = ["Studied", "demand_packages", "gather", "html", "write"]
