"""Tables of published latencies: what is read from them, and what is refused with which words."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest

from latpred.calibration.published import published_table
from latpred.calibration.published.joint_fit import problem
from latpred.errors import MissingPackageError, TableError, UnknownGpuError, UnknownModelError
from latpred.runtimes.legacy_torch import TORCH_1_12
from latpred.zoo import names


def rows(**changes: object) -> pd.DataFrame:
    base = {
        "gpu": "RTX-8000",
        "model": "resnet18",
        "batch": 1,
        "latency_s": 0.004,
        "run": "a",
        "input_kind": "image_px",
    }
    frame = pd.DataFrame([base, {**base, "model": "bert", "input_kind": "seq_len", "batch": 8, "latency_s": 0.012}])
    return frame.assign(**changes)


def test_published_columns_become_those_of_a_measurement_table() -> None:
    found = published_table.read(rows(macs=1.0, leaf_modules=3))
    assert found.cells["model"].tolist() == ["torchvision:resnet18", "bert-base-uncased"]
    assert found.cells["input_kind"].tolist() == ["image", "seq"]
    assert set(found.cells["protocol"]) == {"pipelined"}
    assert found.era == "torch-1.12"
    assert found.notes == ()


def test_a_measurement_table_is_read_as_it_is() -> None:
    frame = pd.DataFrame([{"model": "bert", "batch": 1, "latency_s": 0.01, "device": "t4", "stack": "torch=2.3.0"}])
    found = published_table.read(frame)
    assert found.cells["device"].tolist() == ["t4"]
    assert found.era == ""


def test_a_missing_column_is_named_with_the_nearest() -> None:
    with pytest.raises(TableError, match=r"lacks the column latency_s \(nearest: 'latency', rename it\)"):
        published_table.read(rows().rename(columns={"latency_s": "latency"}))
    with pytest.raises(TableError, match=r"lacks the column batch \(nearest: 'bach', rename it\), the column run"):
        published_table.read(rows().rename(columns={"batch": "bach"}).drop(columns="run"))


def test_milliseconds_are_noticed() -> None:
    with pytest.raises(TableError, match=r"looks like milliseconds.* Divide the column by 1000"):
        published_table.read(rows(latency_s=[4.0, 12.0]))


@pytest.mark.parametrize("value", [0.0, -0.003])
def test_latencies_are_positive(value: float) -> None:
    with pytest.raises(TableError, match=r"as latency_s in row 2.*above 0"):
        published_table.read(rows(latency_s=[0.004, value]))


def test_an_empty_table_is_refused() -> None:
    with pytest.raises(TableError, match="no rows"):
        published_table.read(rows().iloc[:0])


def test_one_model_does_not_do() -> None:
    with pytest.raises(TableError, match=r"one model only \(torchvision:resnet18\)"):
        problem(rows().iloc[:1])


def test_a_gpu_without_a_datasheet_is_named() -> None:
    with pytest.raises(UnknownGpuError, match=r"RTX-80000.*Did you mean rtx-8000.*correct the name in the table"):
        problem(rows(gpu="RTX-80000"))


def test_an_unknown_model_is_named() -> None:
    with pytest.raises(UnknownModelError, match=r"column model: no model is called 'berd'; did you mean"):
        problem(rows(model=["berd", "resnet18"]))


def test_repeats_of_a_run_count_once() -> None:
    frame = pd.concat([rows(), rows(latency_s=[0.005, 0.013]), rows(latency_s=[0.006, 0.014])])
    found = published_table.read(frame)
    assert found.cells["latency_s"].tolist() == [0.005, 0.013]
    assert "4 rows repeat a cell of their run" in found.notes[0]
    assert found.weight.tolist() == [1.0, 1.0]


def test_tenfold_contradictions_are_reported_and_count_less() -> None:
    frame = pd.concat([rows(), rows(run="b", latency_s=[0.05, 0.012])])
    found = published_table.read(frame)
    assert found.weight.tolist() == [0.1, 1.0, 0.1, 1.0]
    assert "2 rows contradict others of their cell tenfold or more" in found.notes[0]
    assert "resnet18" in found.notes[0]


def test_walks_are_kept_and_many_are_made_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    import joblib

    keys = [published_table.TraceKey("torchvision:alexnet", "image", side, "fp32") for side in (64, 96)]
    keys.append(published_table.TraceKey("torchvision:squeezenet1_0", "image", 64, "fp32"))
    monkeypatch.setattr(published_table, "FEWEST_BESIDE", 2)
    said: list[str] = []
    with joblib.parallel_config(backend="threading"):  # a new process would not have what the tests declare
        made = published_table.trace_all(keys, TORCH_1_12, progress=said.append)
    assert set(made) == set(keys)
    assert sorted(said) == [
        "walked torchvision:alexnet (2 combinations of input size and precision)",
        "walked torchvision:squeezenet1_0 (1 combinations of input size and precision)",
    ]
    monkeypatch.setattr(published_table, "_walk_model", None)  # which now is not needed
    assert published_table.trace_all(keys, TORCH_1_12) == made
    with pytest.raises(TypeError):
        published_table.trace_all(keys, "")  # another era is another walk


def without_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of torchvision can be imported."""
    known = names.import_module

    def missing(module: str) -> ModuleType:
        if module.startswith("torchvision"):
            raise RuntimeError("operator torchvision::nms does not exist")
        return known(module)

    monkeypatch.setattr(names, "import_module", missing)


def test_models_that_lack_a_package_are_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    without_torchvision(monkeypatch)
    three = rows(), rows(model=["densenet161", "gpt2"]), rows(model=["densenet161", "bert"])
    frame = pd.concat([one.assign(batch=2**index) for index, one in enumerate(three)])
    with pytest.raises(MissingPackageError, match="torchvision cannot be used"):
        problem(frame)
    found = problem(frame, partial=True)
    assert sorted(found.model) == ["bert-base-uncased", "bert-base-uncased", "gpt2"]
    assert len(found.table.weight) == len(found.work) == 3
    (note,) = found.table.notes
    assert note.startswith("3 rows of 2 models are left out (torchvision:resnet18, densenet161): torchvision ")


def test_a_table_of_nothing_but_such_models_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    without_torchvision(monkeypatch)
    with pytest.raises(MissingPackageError, match="none of the table's models can be walked: torchvision cannot be"):
        problem(rows(model=["resnet18", "densenet161"]), partial=True)


def test_a_function_in_a_users_file_is_walked_again(tmp_path: Path) -> None:
    source = "import torch\n\ndef build():\n    return torch.nn.Linear(8, {}), torch.zeros(1, 8)\n"
    file = tmp_path / "models.py"
    key = published_table.TraceKey(f"{file}:build", "custom", 0, "fp32")
    found = []
    for width in (4, 16):
        file.write_text(source.format(width))
        found.append(published_table.trace_all([key], "")[key].macs())
    assert found == [32, 128]
