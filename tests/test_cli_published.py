"""`latpred fit TABLE` and `latpred evaluate TABLE --leave-out` through the command line."""

from __future__ import annotations

import inspect
import json
import runpy
from pathlib import Path

import msgspec
import pandas as pd
import pytest
from click.testing import CliRunner
from publisheddata import BATCHES, MODELS, table, tower

from latpred.cli import main
from latpred.profile import datasheet, store

EXAMPLES = Path(__file__).parents[1] / "examples"
SOURCE = f"import torch\nfrom torch import nn\n\n\n{inspect.getsource(tower)}\n\n"


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    code = SOURCE + "\n\n".join(
        f"def {name}():\n    return tower{sizes}, torch.zeros(1, 3, 96, 96)" for name, sizes in MODELS.items()
    )
    (tmp_path / "models.py").write_text(code)
    rows = table()
    rows = rows[(rows["gpu"] == "RTX-8000") & (rows["precision"] == "fp32")]
    path = tmp_path / "measured.csv"
    rows.assign(
        model=[f"{tmp_path}/models.py:{name}" for name in rows["model"]], input_kind="custom", input_size=0
    ).to_csv(path, index=False)
    return path


def test_fit_writes_a_profile_that_predicts(measured: Path, tmp_path: Path) -> None:
    to = tmp_path / "gpu.json"
    done = CliRunner().invoke(main, ["fit", str(measured), "--name", "gpu", "-o", str(to)])
    assert done.exit_code == 0, done.output
    profile = store.load(to)
    assert profile.name == "gpu"
    assert profile.device.name == "rtx-8000"
    model = f"{tmp_path}/models.py:wide"
    asked = ["predict", model, "--device", str(to), "--batch", "1,256", "--protocol", "pipelined", "--json"]
    predicted = CliRunner().invoke(main, asked)
    assert predicted.exit_code == 0, predicted.output
    latencies = [point["latency_ms"] for point in json.loads(predicted.stdout)["points"]]
    rows = pd.read_csv(measured)
    rows = rows[rows["model"] == model]
    for batch, latency in zip((1, 256), latencies, strict=True):
        truth = rows[rows["batch"] == batch]["latency_s"] * 1e3
        assert truth.min() * 0.9 < latency < truth.max() * 1.1


def test_evaluate_leaves_models_out(measured: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["evaluate", str(measured), "--leave-out", "model", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["schema"] == "latpred.leave-out/1"
    assert report["figures"]["a model left out, eager"]["cells"] == len(MODELS) * len(BATCHES) * 2
    assert set(report["coverage"]) == {"batch 1 to 4", "between", "batch 64 and more"}


def test_what_excludes_each_other_is_said(measured: Path) -> None:
    for asked, words in (
        (["fit"], "either a TABLE of latencies or --raw"),
        (["evaluate", str(measured), "--leave-out", "model", "--device", "cpu"], "leave out --device"),
    ):
        done = CliRunner().invoke(main, asked)
        assert done.exit_code == 2
        assert words in done.stderr


def test_datasheets_says_what_gpus_have_in_common(
    measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    rows = pd.read_csv(measured)
    both = pd.concat([rows, rows.assign(gpu="2080Ti", run=rows["run"] + " 2080Ti")])
    both.to_csv(measured, index=False)
    main = runpy.run_path(str(EXAMPLES / "framework_tax" / "datasheets.py"))["main"]
    main([str(measured), "-o", str(tmp_path / "common.json")])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["all", "2080Ti", "RTX-8000", "fp32", "written"]
    found = msgspec.json.decode((tmp_path / "common.json").read_bytes(), type=datasheet.Shared)
    assert "2080Ti, RTX-8000" in found.source
