"""The example that predicts hosts by their names: it judges rows in which the host has a part, and no others."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import pytest

from latpred.prediction.host_swap import Swap, swapped
from latpred.prediction.predictor import Predictor
from latpred.profile import datasheet, gpus, hosts
from latpred.tracing import trace

FOLDER = Path(__file__).parents[2] / "examples" / "published"
MODELS = """
import torch

def narrow():
    return torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(20))), torch.zeros(1, 256)

def wide():
    return torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(10)), torch.nn.ReLU()), torch.zeros(1, 1024)
"""
SMALL, LARGE = (1, 4), (65536, 262144)


def rows(models: Path) -> list[dict[str, object]]:
    """Latencies as a datasheet has them, on four hosts of which two are named."""
    named = [(name, hosts.find(name).factor) for name in ("EPYC 7742", "Xeon E5-2698 v4")]
    made = []
    for number, (host, factor) in enumerate((("", 1.0), ("", 1.0), *named)):
        sheet = swapped(datasheet.profile_of(gpus.spec("rtx-2080ti")), Swap(factor, 0.1, ""))
        for model in (f"{models}:narrow", f"{models}:wide"):
            batches = (*SMALL, *LARGE)
            curve = Predictor(sheet).curve(trace(model), batches, protocol="pipelined")
            for batch, latency_ms in zip(batches, curve.latency_ms, strict=True):
                place = {"machine": f"m{number}", "run": f"r{number}", "host": host, "device": "2080Ti", "source": "s"}
                asked = {"runtime": "eager", "precision": "fp32", "protocol": "pipelined", "input_kind": "custom"}
                cell = {"model": model, "batch": batch, "input_size": 0, "latency_s": latency_ms / 1e3}
                made.append({**place, **asked, **cell})
    return made


def test_rows_of_the_host_are_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models.py").write_text(MODELS)
    pd.DataFrame(rows(tmp_path / "models.py")).to_csv(tmp_path / "table.csv", index=False)
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    import named_hosts

    named_hosts.main([str(tmp_path / "table.csv")])
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    starts = ("eager", "EPYC 7742, eager, 2080Ti", "Xeon E5-2698 v4, eager, 2080Ti")
    assert [line[:60].strip() for line in lines] == [
        *("factor of latpred/models/hosts.json", *starts),
        *("factor by its rating", *starts),
    ]
    found = [[part for part in line[60:].split() if part[0].isdigit()] for line in lines if line[60:]]
    assert [int(count) for count, _, _ in found] == [8, 4, 4] * 2, "two models at two small batches on each host"
    known, rated = (float(median.rstrip("%")) for _, median, _ in (found[0], found[3]))
    assert known < 10.0 < rated
