"""The README does what it says: its commands run, its outputs have the shape shown, its Python examples hold."""

from __future__ import annotations

import doctest
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner
from profiledata import profile

from latpred import profiles
from latpred.cli import VERBS, main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()

# What differs from machine to machine: numbers and their units, the regime they lead to, threads, a profile's age.
MEASURED = re.compile(r"\d[\d.,]*|\b(us|ms|s)\b|\b(framework|compute|memory)(?=\s+\d)|threads?|just now|\w+ ago")
VARYING = ("caveat", "compute rules", "never framework-bound", "framework-bound")


class Shown(NamedTuple):
    """A command and the output that the README shows for it."""

    command: str
    output: str


def console_blocks() -> list[Shown]:
    found = []
    for block in re.findall(r"```console\n(.*?)```", README, flags=re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append(Shown(command, output.strip("\n")))
    return found


def commands_in_text() -> list[str]:
    return [line for block in re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL) for line in block.splitlines()]


def test_two_lines_do_all_set_up_and_stand_on_the_first_screen() -> None:
    first, second = commands_in_text()[:2]
    assert first.startswith("python -m pip install -c constraints.txt . && latpred predict ")
    assert second.startswith("python -m pip install -c constraints.txt -e '.[test]' && python -m pytest")
    assert README.splitlines().index(second) < 24


def test_the_first_line_predicts() -> None:
    profiles.save(profile())
    command = commands_in_text()[0].partition(" && latpred ")[2]
    shown = CliRunner().invoke(main, shlex.split(command))
    assert shown.exit_code == 0, shown.stderr
    assert [line.split()[0] for line in shown.stdout.splitlines()[2:5]] == ["1", "8", "32"]


@pytest.mark.parametrize("shown", console_blocks(), ids=lambda shown: shown.command)
def test_a_command_prints_what_is_shown(shown: Shown) -> None:
    profiles.save(profile())
    program, *arguments = shlex.split(shown.command)
    assert program == "latpred"
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.stderr
    if arguments[0] == "trace":
        assert done.stdout.strip("\n") == shown.output
    else:
        assert shape(done.stdout) == shape(shown.output)


def shape(text: str) -> list[list[str]]:
    """Words of each line, without what is measured."""
    lines = [line for line in text.strip("\n").splitlines() if not line.startswith(VARYING)]
    return [MEASURED.sub(" ", line).split() for line in lines]


def test_there_are_blocks_to_run() -> None:
    assert len(console_blocks()) >= 2


def test_python_examples_hold() -> None:
    profiles.save(profile())
    examples = "\n".join(re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL))
    test = doctest.DocTestParser().get_doctest(examples, {}, "README.md", str(ROOT / "README.md"), 0)
    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0


def test_every_verb_is_in_the_table() -> None:
    rows = [line for line in README.splitlines() if line.startswith("| `latpred ")]
    named = re.findall(r"`(?:latpred )?([a-z]+)`", " ".join(row.split("|")[1] for row in rows))
    assert sorted(named) == sorted(VERBS)
