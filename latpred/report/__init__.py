"""A report about one or several models: one HTML file with figures, tables and sentences that needs no network.

`gather` predicts what a page shows, `write` puts it into a file. Charts are Altair's, drawn in the browser by a copy of
Vega-Lite inside the file; both come with `pip install 'latpred[report]'`.
"""

from __future__ import annotations

from latpred.report.page import Studied, demand_packages, gather, html, write

__all__ = ["Studied", "demand_packages", "gather", "html", "write"]
