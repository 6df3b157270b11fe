"""What ships with latpred: profiles read, recordings replay, and the replayed figures are those of the pages."""

from __future__ import annotations

import re
import statistics
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from docblocks import ROOT

from latpred.accuracy import recording
from latpred.profile import store


def rows_of(page: str, head: str) -> dict[str, dict[str, str]]:
    """Rows of the table that begins with a line like `head`, by the recording that each names."""
    text = (ROOT / page).read_text()
    lines = text[text.index(head) :].split("\n\n")[0].splitlines()
    names = [name.strip() for name in lines[0].split("|")[1:-1]]
    rows = [dict(zip(names, (cell.strip() for cell in line.split("|")[1:-1]), strict=True)) for line in lines[2:]]
    return {row["recording"].strip("`"): row for row in rows}


ACCURACY_ROWS = rows_of("docs/accuracy.md", "| recording |")
MODELS, AS_MEASURED = "models, threads, batches; measured", "as measured, by runtime"


@cache
def replayed(name: str) -> dict[str, Any]:
    return recording.load(name).replay(store.load(str(recording.profile_of(name)))).to_dict()


def percents(cell: str) -> list[float]:
    return [float(number) for number in re.findall(r"[\d.]+", cell)]


def by_runtime(row: dict[str, str]) -> dict[str, list[float]]:
    """Median and p90 of each runtime, as the page has them."""
    return {part.split()[0]: percents(part) for part in row[AS_MEASURED].split(", ")}


def rounded(*shares: float) -> list[float]:
    return [round(100 * share, 1) for share in shares]


def test_the_pages_name_every_recording() -> None:
    shipped = {path.name for path in (ROOT / "latpred" / "models" / "recordings").iterdir() if path.is_dir()}
    assert set(ACCURACY_ROWS) == shipped


@pytest.mark.parametrize("name", ACCURACY_ROWS)
def test_the_page_on_accuracy_says_what_a_recording_does(name: str) -> None:
    row, report = ACCURACY_ROWS[name], replayed(name)
    for column, figures in (("at equal speed", "at_speed"), ("repeat noise", "noise")):
        assert percents(row[column]) == rounded(report[figures]["median"], report[figures]["p90"]), column
    assert by_runtime(row) == {name: rounded(one["median"], one["p90"]) for name, one in report["by_runtime"].items()}
    assert int(row["cells"]) == report["overall"]["cells"]
    assert float(row["Kendall tau"]) == round(report["rank"]["tau"], 3)
    assert percents(row["in the 90 % interval"]) == rounded(report["coverage"]["share"])


def test_the_readme_says_between_what_the_errors_of_the_recordings_lie() -> None:
    said = " ".join((ROOT / "README.md").read_text().split())
    rows = {name: by_runtime(row) for name, row in ACCURACY_ROWS.items() if not name.endswith(("-varied", "-paper"))}
    for everyday, runtime, shown in (
        (False, "eager", r"published models were off by (\S+) to (\S+) % in the median in eager"),
        (False, "torchscript", r"(\S+) to (\S+) % in TorchScript"),
        (False, "onnxruntime", r"(\S+) to (\S+) % in ONNX Runtime \(p90"),
        (True, "eager", r"everyday networks by (\S+) to (\S+) % in eager"),
        (True, "compile", r"(\S+) to (\S+) % in `compile`"),
    ):
        medians = [
            errors[runtime][0]
            for name, errors in rows.items()
            if runtime in errors and ('"everyday"' in ACCURACY_ROWS[name][MODELS]) == everyday
        ]
        found = re.search(shown, said)
        assert found, shown
        assert [float(number) for number in found.groups()] == [min(medians), max(medians)], shown


@pytest.mark.parametrize("name", ACCURACY_ROWS)
def test_models_that_no_fit_saw_are_predicted_and_intervals_hold_what_they_say(name: str) -> None:
    errors, coverage = replayed(name)["at_speed"], replayed(name)["coverage_at_speed"]
    median, p90 = (0.25, 0.45) if name.startswith("h100") else (0.10, 0.25)  # the first GPU, for thirteen minutes
    assert errors["median"] < median + 0.02 * name.endswith("-compile")
    assert errors["p90"] < p90 + 0.02 * name.endswith("-compile")
    assert coverage["high"] > 0.88


def test_intervals_are_no_wider_than_they_say_in_the_middle() -> None:
    # One hour's errors are of one kind: of a single recording they may hold all.
    assert statistics.median(replayed(name)["coverage_at_speed"]["low"] for name in ACCURACY_ROWS) < 0.90


def test_the_fastest_runtime_is_named() -> None:
    fastest = replayed("epyc-shared-runtimes")["fastest"]
    assert fastest["clear"] >= 30
    assert fastest["right"] > 0.9


def test_the_page_on_gpus_says_what_the_recording_of_the_h100_does() -> None:
    page, recorded = (ROOT / "docs/gpus.md").read_text(), recording.load("h100-shared-paper")
    single = replace(recorded, table=recorded.table[recorded.table.protocol == "single"])
    for profile, column in (("h100-shared", 1), ("h100", 4)):
        report = single.replay(store.load(profile))
        for runtime, found in (report.at_speed_by_runtime or report.by_runtime).items():
            (row,) = re.findall(rf"(?mi)^\| {runtime.replace('-', ' ')} \|(.*)$", page)
            assert percents(row)[column : column + 2] == rounded(found.median, found.p90), (runtime, profile)
