"""Examples run and print what they say they do."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
from profiledata import profile

from latpred.profile import store

EXAMPLES = Path(__file__).parent.parent / "examples"
Printed = Callable[..., list[str]]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    """The lines that an example prints when it is run with some arguments."""

    def run(name: str, *arguments: str) -> list[str]:
        runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](list(arguments))
        return capsys.readouterr().out.splitlines()

    return run


def test_simulated_recovery_prints_a_line_for_each_seed(printed: Printed) -> None:
    lines = printed("simulated_recovery", "--seeds", "1", "--cells", "190", "--models", "resnet-18")
    assert lines[0] == "1 models in fp32, fp16; 190 cells a calibration"
    seeds = [line for line in lines if re.match(r" +\d+  [+-]\d+\.\d%", line)]
    assert [line.split()[0] for line in seeds] == ["0"]
    starts = "all costs within 2 %:", "whole models:", "crossover and knee:", "largest of costs:", "largest of models:"
    assert all(line.startswith(start) for line, start in zip(lines[3:], starts, strict=True))


def test_gemm_table_prints_a_line_for_each_test(printed: Printed) -> None:
    head, *lines = printed("gemm_table", "--budget", "40")
    assert head.split()[:3] == ["system", "source", "shapes"]
    assert [line.split()[0] for line in lines] == ["t4", "t4"]
    assert re.fullmatch(r"t4 +made up +40 +the rest +646 +\d+\.\d\d% +\d+\.\d\d% +\d+\.\d%", lines[0])


def test_nas_benchmark_prints_rates_memory_and_shares(printed: Printed) -> None:
    store.save(profile())
    lines = printed("nas_benchmark", "--candidates", "5", "--cells", "10", "--built", "1")
    assert re.fullmatch(r"profile \S+, batch 1, eager, one core", lines[0])
    assert [line.split()[0] for line in lines[4:9]] == ["1", "2", "3", "4", "5"]
    rates = [line for line in lines if re.fullmatch(r"  \S.+ +\d+\.\d\d ms each +[\d,]+ a second", line)]
    assert len(rates) == 7
    shares = [int(line.rpartition(" ")[2].rstrip("%")) for line in lines if line.endswith("%")]
    assert len(shares) == 14
    assert sum(shares[:7]) == pytest.approx(100, abs=4)
    assert sum(shares[7:]) == pytest.approx(100, abs=4)
