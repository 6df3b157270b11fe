"""Tables of published latencies: what is read from them, and what is refused with which words."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest

from latpred.accuracy.predicted import GraphKey
from latpred.calibration.published import published_table
from latpred.calibration.published.joint_fit import problem
from latpred.calibration.published.published_table import eras, read, trace_all
from latpred.errors import LatpredError, MissingPackageError, TableError, UnknownGpuError, UnknownModelError
from latpred.runtimes.legacy_torch import TORCH_1_12, TORCH_2, TORCH_2_4, as_run_in
from latpred.zoo import names

SAID = {"protocol": "pipelined", "stack": "torch=1.12.1"}


def rows(**changes: object) -> pd.DataFrame:
    columns = ["model", "input_kind", "batch", "latency_s"]
    both = [("resnet18", "image_px", 1, 0.004), ("bert", "seq_len", 8, 0.012)]
    return pd.DataFrame(both, columns=columns).assign(**{"gpu": "RTX-8000", "run": "a", **SAID, **changes})


def asked(*keys: GraphKey) -> dict[GraphKey, tuple[int, ...]]:
    """What `trace_all` is asked for where only batch 1 is."""
    return dict.fromkeys(keys, (1,))


def test_two_forms_are_read_as_they_are() -> None:
    published = read(rows(macs=1.0, leaf_modules=3).drop(columns=[*SAID]))
    assert published.cells["model"].tolist() == ["torchvision:resnet18", "bert-base-uncased"]
    assert published.cells["input_kind"].tolist() == ["image", "seq"]
    assert set(published.cells["protocol"]) == {"pipelined"}
    assert set(eras(published.cells)) == {"torch-1.12"}
    (note,) = published.notes
    assert "taken for protocol pipelined and stack torch=1.12.1 cuda=11.6 transformers=4.9" in note
    assert read(rows()).notes == ()
    frame = pd.DataFrame([{"model": "bert", "batch": 1, "latency_s": 0.01, "device": "t4", "stack": "torch=2.3.0"}])
    measured = read(frame.assign(protocol=""))
    assert set(measured.cells["protocol"]) == {"single"}
    assert (measured.cells["device"].tolist(), eras(measured.cells)) == (["t4"], [TORCH_2_4])


def test_the_form_with_a_column_gpu_may_say_of_the_setup_too() -> None:
    setup = {"memory_format": "channels_last", "attention": "sdpa", "host": "EPYC 7742", "x_page": "3"}
    parts = [rows(status="ok"), rows(status="ok", **setup), rows(status="out of memory", latency_s="")]
    cells = read(pd.concat(parts)).cells
    assert {name: cells[name].iloc[2] for name in setup} == setup
    assert (len(cells), set(cells["n"])) == (4, {1})
    with pytest.raises(TableError, match="No row of the tables can be used"):
        read(parts[2])


def test_rows_that_cannot_be_fitted_are_left_out_and_counted() -> None:
    fitted = problem(pd.concat([rows(), rows(precision="fp64"), rows(runtime="onnxruntime")]))
    assert (set(fitted.rows.precision), set(fitted.rows.runtime)) == ({"fp32"}, {"eager"})
    assert fitted.table.notes == tuple(f"rows in {name} were left out (2)" for name in ("fp64", "onnxruntime"))


MISNAMED = rows().rename(columns={"batch": "bach"}).drop(columns="run")


@pytest.mark.parametrize(
    ("frame", "error", "message"),
    [
        (MISNAMED, TableError, r"lacks batch\. .*mean nothing to latpred: bach"),
        (rows(latency_s=[4.0, 12.0]), TableError, r"latency_s of table is \S+ times what.*divide milliseconds by 1000"),
        (rows(latency_s=[0.2, 0.4], input_size=32), TableError, r"latency_s of table is \S+ times"),
        (rows(latency_s=[0.004, -0.003]), TableError, r"as latency_s in row 2.*above 0"),
        (rows(protocol="sync"), TableError, r"table, row 1, column protocol: 'sync' is not known.*one of single"),
        (rows(precision="fp64"), TableError, r"No row of the table can be fitted: rows in fp64 were left out \(2\)"),
        (rows(runtime="compile"), TableError, "rows in compile were left out .* Add rows in eager, torchscript"),
        (rows().iloc[:0], TableError, "no rows"),
        (rows().iloc[:1], TableError, r"one model only \(torchvision:resnet18\)"),
        (rows(gpu="RTX-80000"), UnknownGpuError, r"RTX-80000.*Did you mean rtx-8000.*correct the name in its column"),
        (rows(model=["berd", "bert"]), UnknownModelError, "column model: no model is called 'berd'; did you mean"),
    ],
)
def test_what_cannot_be_fitted_is_refused(frame: pd.DataFrame, error: type[LatpredError], message: str) -> None:
    with pytest.raises(error, match=message):
        problem(frame)


def test_repeats_of_a_run_count_once_and_tenfold_contradictions_less() -> None:
    table = read(pd.concat([rows(), rows(latency_s=[0.005, 0.013]), rows(latency_s=[0.006, 0.014])]))
    assert table.cells["latency_s"].tolist() == [0.005, 0.013]
    assert table.cells["repeat_ratio"].tolist() == pytest.approx([1.5, 14 / 12])
    assert table.cells["n"].tolist() == [3, 3]
    assert "4 rows repeat a cell of their run" in table.notes[0]
    assert table.weight.tolist() == [1.0, 1.0]
    table = read(pd.concat([rows(), rows(run="b", latency_s=[0.05, 0.012])]))
    assert (set(table.cells["n"]), table.cells["repeat_ratio"].isna().all()) == ({1}, True)
    assert table.weight.tolist() == [0.1, 1.0, 0.1, 1.0]
    assert "2 rows contradict others of their cell tenfold or more" in table.notes[0]
    assert "resnet18" in table.notes[0]


def test_rows_of_two_pytorchs_in_one_run_are_no_repeats() -> None:
    table = read(pd.concat([rows(), rows(stack="torch==2.1", latency_s=[0.005, 0.013])]))
    assert (table.cells["latency_s"].tolist(), table.notes) == ([0.004, 0.012, 0.005, 0.013], ())
    assert eras(table.cells) == [TORCH_1_12, TORCH_1_12, TORCH_2_4, TORCH_2_4]


def test_rows_that_name_no_run_are_of_their_machine_or_their_file(tmp_path: Path) -> None:
    nameless = rows().rename(columns={"gpu": "device"}).drop(columns="run")
    for name in ("monday", "tuesday"):
        nameless.to_csv(tmp_path / f"{name}.csv", index=False)
    (tmp_path / "other").mkdir()
    nameless.assign(latency_s=[0.005, 0.013]).to_csv(tmp_path / "other" / "monday.csv", index=False)
    files = [tmp_path / "monday.csv", tmp_path / "tuesday.csv", tmp_path / "other" / "monday.csv"]
    table = published_table.read_all([*files, nameless.assign(machine="lab"), nameless.assign(machine="office")])
    runs = ("monday", "tuesday", "monday 2", "lab", "office")
    assert table.cells["run"].tolist() == [name for name in runs for _ in range(2)]


def test_graphs_are_kept() -> None:
    keys = [GraphKey("torchvision:alexnet", "image", side, "fp32", era=TORCH_1_12) for side in (64, 96)]
    said: list[str] = []
    traced = trace_all(asked(*keys), progress=said.append)
    assert (set(traced), said) == (set(keys), ["tracing torchvision:alexnet in fp32"] * 2)
    assert (trace_all(asked(*keys), progress=said.append), len(said)) == (traced, len(keys))  # nothing is traced again
    today = [key._replace(era="") for key in keys]
    assert list(trace_all(asked(*today)).values()) == [traced[key] for key in keys]  # the same in any era


def test_fused_attention_that_a_row_names_stays_fused_in_the_era_of_the_row() -> None:
    bert = GraphKey("bert-base-uncased", "seq", 32, "fp16")
    keys = [bert._replace(attention=one, era=TORCH_1_12) for one in ("sdpa", "")]
    traced = trace_all(asked(*keys))
    ops = [as_run_in(TORCH_1_12, traced[key]).ops for key in keys]
    counts = [sum("scaled_dot_product" in op.name for op in each) for each in ops]
    assert counts == [12, 0]


def test_rows_under_autocast_are_traced_by_the_rules_of_their_era(tmp_path: Path) -> None:
    file = tmp_path / "models.py"
    file.write_text(
        "import torch\n\ndef build():\n    layer = torch.nn.Linear(8, 8)\n"
        "    return torch.nn.Sequential(layer, layer), torch.zeros(1, 8)\n"
    )
    keys = [GraphKey(f"{file}:build", "custom", 0, "amp-fp16", era=era) for era in ("", TORCH_2, TORCH_1_12)]
    graphs = trace_all(asked(*keys))
    assert [graphs[key].launches() for key in keys] == [7, 5, 5]  # which cast the weights once


@pytest.mark.parametrize("era", [TORCH_2, TORCH_1_12])
def test_what_is_no_line_in_batch_is_traced_and_rewritten_at_the_batches_of_its_rows(era: str, tmp_path: Path) -> None:
    file = tmp_path / "models.py"
    file.write_text(
        "import torch\n\nclass Own(torch.nn.Module):\n    def forward(self, x):\n        return x @ x.T\n\n"
        "def build():\n    return Own(), torch.zeros(2, 256)\n"
    )
    key = GraphKey(f"{file}:build", "custom", 0, "fp16", era=era)
    traced = as_run_in(era, trace_all({key: (8, 512)})[key])
    assert [traced.macs(batch) for batch in (8, 512)] == [8 * 8 * 256, 512 * 512 * 256]
    assert {"half" in op.host_class for op in traced.at(512) if op.launches} == {era == TORCH_1_12}


def test_models_that_lack_a_package_are_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    import_module = names.import_module

    def without_torchvision(module: str) -> ModuleType:
        if module.startswith("torchvision"):
            raise RuntimeError("operator torchvision::nms does not exist")
        return import_module(module)

    monkeypatch.setattr(names, "import_module", without_torchvision)
    three = rows(), rows(model=["alexnet", "gpt2"]), rows(model=["alexnet", "bert"])
    frame = pd.concat([one.assign(batch=2**index) for index, one in enumerate(three)])
    with pytest.raises(MissingPackageError, match="torchvision cannot be used"):
        problem(frame)
    partial = problem(frame, partial=True)
    assert sorted(partial.rows.model) == ["bert-base-uncased", "bert-base-uncased", "gpt2"]
    assert len(partial.table.weight) == len(partial.work) == 3
    (note,) = partial.table.notes
    assert note.startswith("3 rows of 2 models are left out (torchvision:resnet18, ")
    with pytest.raises(MissingPackageError, match="none of the table's models can be traced: torchvision cannot be"):
        problem(rows(model=["resnet18", "alexnet"]), partial=True)
