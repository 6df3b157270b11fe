"""Published tables held against the profiles of their GPUs, with and without a row that tells the host."""

from __future__ import annotations

from pathlib import Path

import factories
import msgspec
import pandas as pd
import pytest
from clidata import document, run

from latpred.calibration.published import evaluation
from latpred.calibration.published.evaluation import evaluate_published
from latpred.calibration.published.published_table import read_all
from latpred.errors import TableError, UsageError
from latpred.prediction.host_swap import Swap, swapped
from latpred.prediction.predictor import Predictor
from latpred.profile import store
from latpred.runtimes.lowering import trace_for_runtime

SLOWER = {"lab": 1.7, "office": 0.8}
SOURCE = """
import torch
from torch import nn


def _stack(width, depth):
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers), torch.zeros(1, width)


def small():
    return _stack(64, 40)


def large():
    return _stack(2048, 20)
"""
BATCHES = (1, 16, 4096)


@pytest.fixture(scope="module")
def sheet(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    """Latencies as the datasheets of two GPUs have them, on hosts that differ by a known factor."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "models.py").write_text(SOURCE)
    rows = []
    for gpu in ("t4", "a100"):
        for site, factor in SLOWER.items():
            predictor = Predictor(swapped(store.load(gpu), Swap(factor, 0.05, "")))
            for name in ("small", "large"):
                model = f"{folder}/models.py:{name}"
                graph = trace_for_runtime(model)
                latency = [predictor.predict(graph, batch).latency_ms / 1e3 for batch in BATCHES]
                run = {"gpu": gpu, "run": f"{site} {gpu}", "model": model, "input_kind": "custom", "stack": "torch=2.1"}
                rows += [{**run, "batch": b, "latency_s": s} for b, s in zip(BATCHES, latency, strict=True)]
    return pd.DataFrame(rows).assign(runtime="eager", precision="fp32", protocol="single")


def test_each_row_is_predicted_with_the_profile_of_its_gpu(sheet: pd.DataFrame) -> None:
    report = evaluate_published(read_all([sheet]))
    assert report.overall.cells == len(sheet)
    assert {device: errors.cells for device, errors in report.by_device.items()} == {"t4": 12, "a100": 12}
    cells = report.to_frame()
    busy = cells[(cells["batch"] == 4096) & cells["model"].str.endswith("large")]
    assert len(busy) == 4
    assert busy["error"].abs().max() < 0.01  # where the device is slower, hosts make no difference
    assert report.by_batch["1"].median > 0.15


def test_two_runs_of_one_machine_are_judged_beside_each_other(sheet: pd.DataFrame) -> None:
    rows = sheet[sheet["gpu"] == "t4"].rename(columns={"gpu": "device"}).assign(machine="mine")
    days = [rows[rows["run"] == f"{site} t4"] for site in SLOWER]
    assert evaluate_published(read_all(days)).overall.cells == len(rows)
    assert evaluate_published(read_all(days), host_row=True).overall.cells == len(rows) - 2
    versions = [rows, rows.assign(stack="torch=2.2")]  # of the software in one run
    assert evaluate_published(read_all([pd.concat(versions)])).overall.cells == 2 * len(rows)


def test_one_table_of_a_gpu_is_predicted_with_its_profile(sheet: pd.DataFrame, tmp_path: Path) -> None:
    rows = sheet[sheet["gpu"] == "t4"].rename(columns={"gpu": "device"}).assign(device="tesla-t4")
    rows.to_csv(tmp_path / "measured.csv", index=False)
    assert document("evaluate", tmp_path / "measured.csv")["overall"]["cells"] == len(rows)


def test_a_table_that_this_machine_measured_is_predicted_with_its_own_profile() -> None:
    gpu = factories.device(name="tesla-t4", kind="cuda")
    store.save(msgspec.structs.replace(factories.profile(gpu), machine=factories.machine_here()))
    names = [evaluation._profile_of(device).name for device in ("tesla-t4", "t4", "nvidia-h200")]
    assert names == ["example", "t4", "h200"]


def test_one_row_of_each_run_tells_its_host(sheet: pd.DataFrame) -> None:
    report = evaluate_published(read_all([sheet]), host_row=True)
    assert report.overall.cells == len(sheet) - 4
    assert report.overall.p90 < 0.01
    (on_a100, on_t4) = (note for note in report.notes if "told by one row of each run" in note)
    assert ("lab a100: x1.70 by " in on_a100, "office t4: x0.80 by " in on_t4) == (True, True)
    telling = sheet[(sheet["batch"] == 1) & sheet["model"].str.endswith("small")]
    with pytest.raises(TableError, match="none is left to judge"):
        evaluate_published(read_all([telling]), host_row=True)


def test_rows_that_nobody_can_predict_are_left_out_and_counted(sheet: pd.DataFrame) -> None:
    strange = sheet.head(2).assign(runtime="quickest")
    nameless = sheet.head(1).assign(model="berd")
    report = evaluate_published(read_all([pd.concat([sheet, strange, nameless])]))
    assert report.overall.cells == len(sheet)
    left_out = [note for note in report.notes if "left out" in note]
    assert left_out[0].startswith("2 rows of 1 model are left out")
    assert "No runtime is called 'quickest'" in left_out[0]
    assert left_out[1].startswith("1 row of 1 model is left out (berd): ")
    with pytest.raises(UsageError, match=r"no row of the table can be predicted: .*quickest"):
        evaluate_published(read_all([strange]))


def test_tables_are_evaluated_and_fitted_from_the_command_line(sheet: pd.DataFrame, tmp_path: Path) -> None:
    parts = [tmp_path / "one.csv", tmp_path / "two.csv"]
    for path, gpu in zip(parts, ("t4", "a100"), strict=True):
        sheet[sheet["gpu"] == gpu].rename(columns={"latency_s": "seconds"}).to_csv(path, index=False)
    rules = tmp_path / "mapping.json"
    rules.write_text(
        '{"schema": "latpred.mapping/1", "rules": [{"set": {"device": "{gpu}", "latency_s": "{seconds} s"}}]}'
    )
    found = document("evaluate", *parts, "--mapping", rules, "--host-row")
    assert (found["schema"], found["overall"]["cells"]) == ("latpred.accuracy/1", len(sheet) - 4)
    assert found["by_device"].keys() == {"t4", "a100"}
    shown = run("evaluate", *parts, "--mapping", rules, "-o", tmp_path / "predicted.csv")
    assert shown.exit_code == 0, shown.stderr
    assert "12 rows of one on t4 in eager" in shown.stderr
    written = pd.read_csv(tmp_path / "predicted.csv")
    assert (len(written), {"latency_s_predicted", "latency_s_measured", "x_source"} <= set(written)) == (24, True)
    fitted = run("fit", *parts, "--mapping", rules, "--gpu", "t4", "-o", tmp_path / "t4.json")
    assert "saved" in fitted.stderr, fitted.stderr
