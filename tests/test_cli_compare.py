"""compare, evaluate, validate, and fitting a table through the command line."""

from __future__ import annotations

import inspect
import runpy
from pathlib import Path

import msgspec
import pandas as pd
import pytest
from clidata import document, models_file, run
from profiledata import profile
from publisheddata import BATCHES, MODELS, table, tower
from tabledata import measured, predicted

from latpred.accuracy.comparison import compare
from latpred.profile import datasheet, store

EXAMPLES = Path(__file__).parents[1] / "examples"
CELLS = [(name, batch, 0.01 * batch * (1 + index)) for index, name in enumerate("abc") for batch in (1, 8)]
HEAD = "import torch\nfrom torch import nn\n\n\n"


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A table of one GPU's latencies, whose models can be built."""
    builds = [f"def {name}():\n    return tower{sizes}, torch.zeros(1, 3, 96, 96)" for name, sizes in MODELS.items()]
    (tmp_path / "models.py").write_text("\n\n".join([HEAD, inspect.getsource(tower), *builds]))
    rows = table()
    rows = rows[(rows["gpu"] == "RTX-8000") & (rows["precision"] == "fp32")]
    path = tmp_path / "measured.csv"
    rows.assign(
        model=[f"{tmp_path}/models.py:{name}" for name in rows["model"]], input_kind="custom", input_size=0
    ).to_csv(path, index=False)
    return path


def test_what_was_measured_compares_with_what_was_predicted(tmp_path: Path) -> None:
    store.save(profile())
    common = (f"{models_file(tmp_path)}:picture", "--image", "16", "--batch", "1,4", "--device", "cpu")
    truth, guess = tmp_path / "measured.csv", tmp_path / "predicted.csv"
    shown = run("measure", *common, "--repeats", "2", "-o", truth)
    assert shown.exit_code == 0
    assert shown.stderr.startswith("measuring: 0 %")
    assert run("predict", *common, "-o", guess).exit_code == 0
    report = run("compare", guess, truth)
    assert report.exit_code == 0
    assert report.stdout.startswith("2 cells of 1 models: median error ")
    found = document("compare", guess, truth)
    assert (found["schema"], found["overall"]["cells"]) == ("latpred.accuracy/1", 2)
    evaluated = document("evaluate", truth)
    assert evaluated["overall"]["median"] == pytest.approx(found["overall"]["median"])
    wrong = run("compare", guess, guess)
    assert (wrong.exit_code, "lacks spread_s" in wrong.stderr) == (2, True)
    assert "It is a predicted one; give one of latpred measure." in wrong.stderr
    assert "Give the predicted table first, then the measured one." in run("compare", truth, guess).stderr


@pytest.mark.parametrize(("factor", "exit_code"), [(1.01, 0), (1.5, 1)])
def test_a_validation_draws_its_errors_and_exits_1_where_it_misses_its_targets(
    factor: float, exit_code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = compare(predicted([(*cell[:2], cell[2] * factor) for cell in CELLS]), measured(CELLS))
    monkeypatch.setattr("latpred.calibration.measurement.validation.validate", lambda *_arguments, **_options: report)
    shown = run("validate", "--plot", tmp_path / "errors.pdf")
    assert shown.exit_code == exit_code
    assert (tmp_path / "errors.pdf").read_bytes().startswith(b"%PDF")
    assert shown.stdout.startswith("6 cells of 3 models: median error ")
    assert ("target missed: median error is 0.5, the target 0.08" in shown.stderr) == (exit_code == 1)


def test_a_table_is_fitted_and_evaluated_with_models_left_out(published: Path, tmp_path: Path) -> None:
    shown = run("fit", published, "--name", "mine", "-o", tmp_path / "gpu.json")
    assert shown.exit_code == 0, shown.output
    fitted = store.load(tmp_path / "gpu.json")
    assert (fitted.name, fitted.device.name) == ("mine", "rtx-8000")
    report = document("evaluate", published, "--leave-out", "model")
    assert report["schema"] == "latpred.leave-out/1"
    assert report["figures"]["a model left out, eager"]["cells"] == len(MODELS) * len(BATCHES) * 2
    for option, given in (("--device", "cpu"), ("--plot", "figure.png")):
        refused = run("evaluate", published, "--leave-out", "model", option, given)
        assert (refused.exit_code, f"leave out {option}" in refused.stderr) == (2, True)


def test_datasheets_says_what_gpus_share(published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = pd.read_csv(published)
    both = pd.concat([rows, rows.assign(gpu="2080Ti", run=rows["run"] + " 2080Ti")])
    both.to_csv(published, index=False)
    main = runpy.run_path(str(EXAMPLES / "framework_tax" / "datasheets.py"))["main"]
    main([str(published), "-o", str(tmp_path / "common.json"), "--models", "3", "--profiles", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["all", "2080Ti", "RTX-8000", "fp32", *["written"] * 3]
    rows_of = store.load(tmp_path / "rtx-2080ti.json").protocol["rows"]
    assert rows_of.endswith("of larger sources 3 models each were drawn at random; 3 models could be traced")
    found = msgspec.json.decode((tmp_path / "common.json").read_bytes(), type=datasheet.Shared)
    assert "JaredFern/Framework-Tax on rtx-2080ti, rtx-8000" in found.source
