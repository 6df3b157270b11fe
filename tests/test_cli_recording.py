"""`latpred measure --suite`: what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

from latpred.calibration.measurement import recorder
from latpred.calibration.measurement.plans import Plan, Setting
from latpred.calibration.workloads.base import module_workload
from latpred.cli import main

TINY = module_workload("tiny", nn.Linear(8, 8), torch.zeros(1, 8))
STAGES = {name: (Setting(TINY, batch, "fp32", "eager"),) for name, batch in (("core", 1), ("the rest", 4))}


@pytest.fixture(autouse=True)
def tiny_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "plan", lambda name: Plan(name, STAGES, ("timm is not installed",)))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["measure", "--suite", "paper", "--device", "simulated", *arguments])


def test_a_stage_then_the_rest(tmp_path: Path) -> None:
    first = run("--record", str(tmp_path), "--stage", "core")
    assert first.exit_code == 0
    assert first.stdout.splitlines() == [
        "core                  1 of     1",
        "the rest              0 of     1",
        f"kept in {tmp_path}",
    ]
    assert "timm is not installed" in first.stderr
    document = json.loads(run("--record", str(tmp_path), "--json").stdout)
    assert document["schema"] == "latpred.recorded/1"
    assert document["complete"]
    assert document["stages"]["the rest"] == {"measured": 1, "planned": 1}


def test_a_run_that_stopped_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = run("--record", str(tmp_path), "--budget", "0.000001s")
    assert stopped.stdout.splitlines()[-1] == "The same command again goes on where this stopped."

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(recorder, "record", interrupted)
    ended = run("--record", str(tmp_path))
    assert ended.exit_code == 130
    assert "what was measured is kept, run the same command to go on" in ended.stderr


def test_where_it_is_kept_unless_said(latpred_home: Path) -> None:
    run("--quiet")
    assert (latpred_home / "recordings" / "paper-simulated" / "recording.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bert"], "Models and --suite exclude each other"),
        (["--batch", "4"], "--suite paper plans --batch itself; leave that out"),
        (["--precision", "fp16"], "--suite paper plans --precision itself"),
        (["--runtime", "torchscript"], "no runtime 'torchscript'"),
        (["--stage", "last"], "no stage 'last'"),
    ],
)
def test_what_a_plan_decides_itself_is_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = run("--record", str(tmp_path), *arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_nothing_to_measure() -> None:
    result = CliRunner().invoke(main, ["measure"])
    assert result.exit_code == 2
    assert "Name at least one, or a study with --suite" in result.output
