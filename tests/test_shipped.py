"""What ships with latpred: profiles read, recordings replay, and the replayed figures are those of the pages."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
from docblocks import ROOT

from latpred.accuracy import recording
from latpred.profile import store

RUNTIMES = ("eager", "torchscript", "onnxruntime", "compile")
# Recordings, and bounds on their errors at equal speed of the machine, a little above what they are.
RECORDINGS = [
    ("epyc-shared-varied", 160, 0.06, 0.19),
    ("epyc-shared-everyday", 150, 0.08, 0.18),
    ("epyc-shared-runtimes", 234, 0.06, 0.23),
    ("epyc-shared-compile", 150, 0.10, 0.24),
    ("epyc-genoa-sealed", 140, 0.06, 0.12),
    ("epyc-genoa-everyday", 150, 0.07, 0.19),
    ("epyc-genoa-runtimes", 234, 0.07, 0.20),
    ("epyc-genoa-compile", 50, 0.10, 0.23),
    ("xeon-shared-runtimes", 234, 0.09, 0.28),
]


@cache
def replayed(name: str) -> dict[str, Any]:
    return recording.load(name).replay(store.load(name.rpartition("-")[0])).to_dict()


@pytest.mark.parametrize(("name", "cells", "median", "p90"), RECORDINGS)
def test_models_that_no_fit_saw_are_predicted_and_intervals_hold_what_they_say(
    name: str, cells: int, median: float, p90: float
) -> None:
    report = replayed(name)
    errors, coverage = report["at_speed"], report["coverage_at_speed"]
    assert errors["cells"] == cells
    assert errors["median"] < median
    assert errors["p90"] < p90
    assert coverage["low"] < 0.96
    assert coverage["high"] > 0.88


def test_each_runtime_is_predicted_and_the_fastest_named() -> None:
    report = replayed("epyc-shared-runtimes")
    assert set(report["by_runtime"]) == {"eager", "torchscript", "onnxruntime"}
    assert all(errors["median"] < 0.11 for errors in report["by_runtime"].values())
    assert report["fastest"]["clear"] >= 30
    assert report["fastest"]["right"] > 0.9


def test_compile_is_predicted_beside_eager_and_torchscript() -> None:
    report = replayed("epyc-shared-compile")
    cells = {name: errors["cells"] for name, errors in report["by_runtime"].items()}
    assert cells == dict.fromkeys(("eager", "torchscript", "compile"), 50)


def percents(cell: str) -> list[float]:
    return [float(number) for number in re.findall(r"[\d.]+", cell)]


def rows_of(page: str, head: str) -> dict[str, dict[str, str]]:
    """Rows of the table that begins with a line like `head`, by the recording that each names."""
    text = (ROOT / page).read_text()
    lines = text[text.index(head) :].split("\n\n")[0].splitlines()
    names = [name.strip() for name in lines[0].split("|")[1:-1]]
    rows = [dict(zip(names, (cell.strip() for cell in line.split("|")[1:-1]), strict=True)) for line in lines[2:]]
    return {row["recording"].strip("`"): row for row in rows}


README_ROWS = rows_of("README.md", "| machine, threads, models |")
ACCURACY_ROWS = rows_of("docs/accuracy.md", "| recording |")


@pytest.mark.parametrize("name", [name for name, *_ in RECORDINGS if name != "epyc-shared-varied"])
def test_the_readme_says_what_each_recording_does(name: str) -> None:
    row, report = README_ROWS[name], replayed(name)
    said = {runtime: percents(row[runtime]) for runtime in RUNTIMES if row[runtime]}
    errors = {runtime: report["by_runtime"][runtime] for runtime in said}
    assert said == {runtime: rounded(one["median"], one["p90"]) for runtime, one in errors.items()}
    assert percents(row["repeat noise"]) == rounded(report["noise"]["median"], report["noise"]["p90"])


@pytest.mark.parametrize("name", [name for name, *_ in RECORDINGS])
def test_the_page_on_accuracy_says_what_each_recording_does(name: str) -> None:
    row, report = ACCURACY_ROWS[name], replayed(name)
    for column, figures in (("as measured", "overall"), ("at equal speed", "at_speed"), ("repeat noise", "noise")):
        assert percents(row[column]) == rounded(report[figures]["median"], report[figures]["p90"]), column
    assert int(row["cells"]) == report["overall"]["cells"]
    assert float(row["Kendall tau"]) == round(report["rank"]["tau"], 3)
    assert percents(row["in the 90 % interval"]) == rounded(report["coverage"]["share"])


def rounded(*shares: float) -> list[float]:
    return [round(100 * share, 1) for share in shares]
