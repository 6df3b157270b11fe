"""The README does what it says: its two lines, its tables of errors and of verbs. Its blocks run in test_docs."""

from __future__ import annotations

import re

import docblocks
import pytest
from docblocks import ROOT
from profiledata import profile

from latpred.cli import main
from latpred.profile import store

README = (ROOT / "README.md").read_text()

# Rows of the accuracy tables, and what reports call them.
PREDICTORS = {
    "latpred": "latpred",
    "sum of every op timed alone": "isolated_ops",
    "log-linear in MACs, bytes, launches and batch *": "log_features",
    "linear fit on MACs *": "flops_linear",
    "larger of a constant and c x MACs *": "hard_max",
}


def test_two_lines_do_all_set_up_and_stand_on_the_first_screen() -> None:
    first, second = docblocks.bash_lines(README)[:2]
    assert first.startswith("python -m pip install -c constraints.txt . && latpred predict ")
    assert second.startswith("python -m pip install -c constraints.txt -e '.[test]' && python -m pytest")
    assert README.splitlines().index(second) < 24


def test_the_first_line_predicts() -> None:
    store.save(profile())
    command = docblocks.bash_lines(README)[0].partition(" && latpred ")[2]
    shown = docblocks.run(f"latpred {command}")
    assert [line.split()[0] for line in shown.splitlines()[2:5]] == ["1", "8", "32"]


def test_the_table_of_predictors_is_what_the_recording_says() -> None:
    said = docblocks.run("latpred validate --replay epyc-shared-varied", exits=(0, 1))
    for label, name in PREDICTORS.items():
        found = re.search(rf"^{name} +\d+ +([\d.]+) % +([\d.]+) % +([\d.]+) %.*?([\d.]+)?$", said, re.MULTILINE)
        shown = next(line.split("|")[2:-1] for line in README.splitlines() if line.startswith(f"| {label} |"))
        assert found, name
        for cell, value in zip(shown, found.groups(), strict=False):
            number = cell.replace("%", "").strip()
            digits = len(number.partition(".")[2])
            assert float(number) == pytest.approx(float(value), abs=0.51 * 10**-digits), (label, cell)


def test_every_verb_is_in_the_table() -> None:
    rows = [line for line in README.splitlines() if line.startswith("| `latpred ")]
    named = re.findall(r"`(?:latpred )?([a-z]+)`", " ".join(row.split("|")[1] for row in rows))
    assert sorted(named) == sorted(main.commands)
