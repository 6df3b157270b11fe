"""Examples run and print what they say they do."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_simulated_recovery_prints_a_line_for_each_seed(capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(EXAMPLES / "simulated_recovery.py"))["main"]
    main(["--seeds", "1", "--cells", "190", "--models", "resnet-18"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1 models in fp32, fp16; 190 cells a calibration"
    seeds = [line for line in lines if re.match(r" +\d+  [+-]\d+\.\d%", line)]
    assert [line.split()[0] for line in seeds] == ["0"]
    assert re.fullmatch(r"all costs within 2 %: [01] of 1 seeds", lines[3])
    assert re.fullmatch(r"whole models: median \d+\.\d%, within 3 % \d+\.\d%, worst \d+\.\d%", lines[4])
    assert re.fullmatch(r"crossover and knee: exact \d+\.\d%, worst \d+ steps off", lines[5])
    assert lines[6].startswith("largest of costs: ")
    assert lines[7].startswith("largest of models: resnet-18 ")
