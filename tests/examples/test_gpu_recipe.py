"""The recipe for a GPU: its commands are ones that the verbs take, and its stages are those of the plan."""

from __future__ import annotations

import re
from pathlib import Path

import docblocks
import pytest

from latpred.calibration.measurement.recorder import plan

PAGE = (Path(__file__).parents[2] / "examples" / "gpu" / "README.md").read_text()
COMMANDS = [line for line in docblocks.bash_lines(PAGE) if line.startswith("latpred")]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(command: str) -> None:
    docblocks.parse(command)


def test_stages_are_those_of_the_plan() -> None:
    named = re.findall(r"^\| ([a-z0-9-]+) \|.*\| (\d+) \|$", PAGE, re.MULTILINE)
    assert [(stage, int(settings)) for stage, settings in named] == [
        (name, len(settings)) for name, settings in plan("paper").stages.items()
    ]
