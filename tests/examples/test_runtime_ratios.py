"""The example that compares runtimes with published tables: one row tells the host, everything else is predicted."""

from __future__ import annotations

import csv
import gzip
import runpy
from pathlib import Path
from typing import Any

import pytest

import latpred

SCRIPT = Path(__file__).parents[2] / "examples" / "published" / "runtime_ratios.py"
HEADS = ("source", "gpu", "stack", "runtime", "precision", "model", "model_build_hint", "batch", "seq_or_image")
MODELS = """
import torch
from torch import nn


def build():
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(8)]), (
        torch.zeros(1, 4, 64),
    )
"""


def table(folder: Path, rows: list[tuple[str, int, float]], notes: str = "") -> str:
    path = folder / "table.csv.gz"
    with gzip.open(path, "wt", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*HEADS, "protocol", "latency_ms", "notes"])
        for runtime, batch, ms in rows:
            plain = ("a/b@1", "NVIDIA A100-SXM4-80GB", "torch 2", runtime, "fp16", "tiny", "")
            writer.writerow([*plain, batch, 4, "single", ms, notes])
    return str(path)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    (tmp_path / "models.py").write_text(MODELS)
    found = runpy.run_path(str(SCRIPT))
    found["MODELS"]["tiny"] = f"{tmp_path}/models.py:build"
    plain = latpred.predict  # the inputs of this model have no length of their own
    monkeypatch.setattr(latpred, "predict", lambda *given, seq, **asked: plain(*given, **asked))
    return found


def test_one_row_tells_the_host(script: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def predicted(runtime: str) -> float:
        return latpred.predict(
            f"{tmp_path}/models.py:build", 1, runtime, device="a100", precision="fp16", host=0.5, seq=4
        ).latency_ms

    eager, graphs, tensorrt = predicted("eager"), predicted("cuda-graphs"), predicted("tensorrt")
    rows = [("eager", 1, eager), ("cuda-graphs (torch.cuda.graph)", 1, 1.25 * graphs), ("TensorRT", 1, 1.25 * tensorrt)]
    script["main"]([table(tmp_path, rows)])
    host, *ratios, first, second, last = capsys.readouterr().out.splitlines()
    assert host.split()[-1] == "0.50"
    assert [line.split()[-4] for line in ratios] == ["cuda-graphs", "tensorrt"]
    assert float(ratios[0].split()[-3]) == pytest.approx(graphs / eager, rel=0.01)
    assert ratios[0].split()[-1] == "-20%"
    assert first.startswith("cuda-graphs                 1 rows, median error 20.0%")
    assert second.startswith("tensorrt")
    assert last == "fastest of three or more right in 1 of 1"


def test_rows_that_are_wrong_or_cannot_be_predicted_are_left_out(script: dict[str, Any], tmp_path: Path) -> None:
    rows = [("eager", 1, 1.0), ("AITemplate + CUDA graphs", 1, 1.0), ("kernl (CUDA graphs)", 1, 1.0)]
    assert [row.runtime for row in script["read"](table(tmp_path, rows))] == ["eager"]
    assert not list(script["read"](table(tmp_path, rows, "SUSPECT: identical to the row before")))
