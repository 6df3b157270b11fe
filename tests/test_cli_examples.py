"""Every verb's --help has examples that work: what measures nothing is run, the rest is parsed and its models built."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import click
import pytest
from clidata import run
from docblocks import parse
from profiledata import profile
from tabledata import measured

from latpred import storage
from latpred.cli import main
from latpred.profile import store
from latpred.zoo import names

MEASURE = ("calibrate", "check", "fit", "measure", "validate")  # or need what only a measurement gives
MODELS = "from torch import nn\n\ndef build():\n    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())\n"


def commands(group: click.Group, path: str = "latpred") -> dict[str, click.Command]:
    """Every verb, those of groups included."""
    found: dict[str, click.Command] = {}
    for name, command in group.commands.items():
        found[f"{path} {name}"] = command
        if isinstance(command, click.Group):
            found |= commands(command, f"{path} {name}")
    return found


def examples(command: click.Command) -> list[str]:
    """Lines of a help page that are commands of latpred."""
    found = re.findall(r"^ *(?:cp .*\$\()?(latpred [^)\n]+)", command.epilog or "", re.MULTILINE)
    return [line.strip('"') for line in found]


COMMANDS = commands(main)
EXAMPLES = list(dict.fromkeys(line for command in COMMANDS.values() for line in examples(command)))


@pytest.mark.parametrize("path", COMMANDS)
def test_every_verb_has_an_example_and_says_what_may_be_given_again(path: str) -> None:
    shown = run(*path.split()[1:], "--help")
    assert shown.exit_code == 0
    assert any(line.startswith(path) for line in examples(COMMANDS[path]))
    assert all(line in shown.stdout for line in examples(COMMANDS[path]))
    for option in COMMANDS[path].params:  # what help, and so the reference, says no other way
        assert getattr(option, "multiple", False) == ("again" in str(getattr(option, "help", ""))), option.name


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that examples name, and the home of a machine that was calibrated."""
    place = tmp_path_factory.mktemp("prepared")
    (place / "files").mkdir()
    cells = [(name, batch, 0.02 * batch) for name in ("resnet18", "resnet34") for batch in (1, 8)]
    table = measured(cells, input_kind="image", input_size=224)
    rule = {"set": {"latency_s": "{seconds} s"}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(storage.VARIABLE, str(place / "home"))
        patch.chdir(place / "files")
        store.save(profile())
        Path("models.py").write_text(MODELS)
        table.to_csv("measured.csv", index=False)
        table.assign(device="t4").rename(columns={"latency_s": "seconds"}).to_csv("published.csv", index=False)
        Path("mapping.json").write_text(json.dumps({"schema": "latpred.mapping/1", "rules": [rule]}))
        assert run("predict", "resnet18", "--batch", "1,8", "--csv", "-o", "predicted.csv").exit_code == 0
        assert run("adapt", "measured.csv", "-o", "adapted.json").exit_code == 0
    return place


@pytest.fixture
def _folder(line: str, prepared: Path, tmp_path: Path, latpred_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with these files, on that machine."""
    shutil.copytree(prepared / "files", tmp_path, dirs_exist_ok=True)
    shutil.copytree(prepared / "home", latpred_home, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    if "onnxruntime" in line:  # which takes a minute for a large model, so it is there where it is asked for
        store.save(profile(runtimes=dict.fromkeys(("eager", "onnxruntime"), profile().runtimes["eager"])))


def _marked(line: str) -> Any:
    """Examples that take more than ten seconds are slow tests."""
    slow = line.startswith("latpred generate llama") or "onnxruntime" in line
    return pytest.param(line, marks=pytest.mark.slow) if slow else line


@pytest.mark.usefixtures("_folder")
@pytest.mark.parametrize("line", [_marked(line) for line in EXAMPLES if line.split()[1] not in MEASURE])
def test_an_example_works(line: str) -> None:
    if "--leave-out" in line:  # which the four rows at hand are too few for
        parse(line)
        return
    # Of a report the tools of all runtimes would be asked for minutes; one is enough to see that it is written.
    one = ("--runtime", "cuda-graphs") if line.startswith("latpred report") and "--device rtx" in line else ()
    done = run(*shlex.split(line)[1:], *one)
    assert done.exit_code == 0, (done.stderr, done.exception)


@pytest.mark.parametrize("line", [line for line in EXAMPLES if line.split()[1] in MEASURE])
def test_an_example_that_measures_is_understood(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "calibration" / "cuda-0").mkdir(parents=True)
    parse(line)
    words = shlex.split(line)[2:]
    taken = words[: next((index for index, word in enumerate(words) if word.startswith("-")), len(words))]
    for name in taken if line.split()[1] == "measure" else ():
        names.build(name)
