"""Every example that a verb's --help shows works: what measures nothing is run, of the rest the models are built."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from docblocks import parse
from profiledata import profile
from tabledata import measured

from latpred.cli import main
from latpred.profile import store
from latpred.zoo import names

MEASURE = ("calibrate", "check", "fit", "measure", "validate")  # or need what only a measurement gives
MODELS = "from torch import nn\n\ndef build():\n    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())\n"


def examples() -> list[str]:
    """Lines of all help pages that are commands of latpred, once each."""
    found: list[str] = []

    def visit(command: click.Command, path: list[str]) -> None:
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                inner = command.get_command(context, name)
                assert inner is not None
                visit(inner, [*path, name])
        found.extend(re.findall(r"^ *(?:cp .*\$\()?(latpred [^)\n]+)", command.epilog or "", re.MULTILINE))

    visit(main, [])
    return [line.strip('"') for line in dict.fromkeys(found)]


EXAMPLES = examples()


@pytest.fixture
def _folder(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with the files that examples name, on a machine that was calibrated."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.py").write_text(MODELS)
    eager = profile().runtimes["eager"]
    # A runtime with tools of its own takes a minute for a large model, so it is there where it is asked for.
    store.save(profile(runtimes={name: eager for name in ("eager", "onnxruntime") if name in f"eager {line}"}))
    cells = [(name, batch, 0.02 * batch) for name in ("resnet18", "resnet34") for batch in (1, 8)]
    table = measured(cells, input_kind="image", input_size=224)
    table.to_csv("measured.csv", index=False)
    assert run("latpred predict resnet18 --batch 1,8 --csv -o predicted.csv").exit_code == 0
    assert run("latpred adapt measured.csv -o adapted.json").exit_code == 0


def run(line: str) -> Result:
    return CliRunner().invoke(main, shlex.split(line)[1:])


def test_there_are_examples_of_every_verb() -> None:
    assert {line.split()[1] for line in EXAMPLES} >= set(main.list_commands(click.Context(main)))


def _marked(line: str) -> Any:
    """Examples that take more than ten seconds are slow tests."""
    slow = line.startswith(("latpred report", "latpred generate llama")) or "onnxruntime" in line
    return pytest.param(line, marks=pytest.mark.slow) if slow else line


@pytest.mark.usefixtures("_folder")
@pytest.mark.parametrize("line", [_marked(line) for line in EXAMPLES if line.split()[1] not in MEASURE])
def test_an_example_works(line: str) -> None:
    if "--leave-out" in line:  # which the four rows at hand are too few for
        parse(line)
        return
    done = run(line)
    assert done.exit_code == 0, (done.stderr, done.exception)


@pytest.mark.parametrize("line", [line for line in EXAMPLES if line.split()[1] in MEASURE])
def test_an_example_that_measures_names_models_that_there_are(line: str) -> None:
    words = shlex.split(line)[2:]
    taken = words[: next((index for index, word in enumerate(words) if word.startswith("-")), len(words))]
    for name in taken if line.split()[1] == "measure" else ():
        names.build(name)
