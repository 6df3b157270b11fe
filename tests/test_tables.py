"""Tables: what is refused and with which words, CSV round trips, joins with missing, doubled and failed rows."""

from __future__ import annotations

import gzip
from pathlib import Path

import factories
import numpy as np
import pandas as pd
import pytest
from tabledata import measured, predicted

from latpred import tables
from latpred.errors import TableError

CELLS = [("bert", 1, 0.01), ("bert", 8, 0.04), ("vit", 1, 0.02)]


def test_csv_round_trip_keeps_every_number_the_order_of_the_schema_and_notes(tmp_path: Path) -> None:
    shuffled = measured([("bert, tiny", 1, 0.0123456789), ("vit", 2, 1e-5)])[::-1].iloc[:, ::-1]
    table = tables.check(shuffled.assign(x_who=["a", "b"]), tables.MEASURED)
    assert list(table.columns) == [*tables.MEASURED.required, "x_who"]
    path = tables.write(table, tmp_path / "table.csv")
    pd.testing.assert_frame_equal(tables.read(path, tables.MEASURED), table)
    assert [file.name for file in tmp_path.iterdir()] == ["table.csv"]


def test_processors_that_a_cloud_calls_the_same_have_names_of_their_own() -> None:
    model = "AuthenticAMD 25-17-1 157c3ac1"
    named = factories.machine(cpu="AMD EPYC", cores=2, machine_id="2770b0ef4182", cpu_model=model)
    assert tables.machine_name(named) == "AMD EPYC 25-17-1 x2 #2770b0ef"


def test_missing_and_unknown_columns_are_named() -> None:
    with pytest.raises(TableError, match=r"measurement table lacks batch, run.*latpred evaluate needs"):
        tables.check(measured(CELLS).drop(columns=["run", "batch"]), tables.MEASURED)
    with pytest.raises(TableError, match=r"latency_s\. Rows of predict_many and rank .* predict MODEL --csv"):
        tables.check(pd.DataFrame({"candidate": [0], "latency_ms": [1.0]}), tables.PREDICTED)
    with pytest.raises(TableError, match=r"unknown column 'latency_ms'\. Did you mean latency_s"):
        tables.check(measured(CELLS).assign(latency_ms=1.0), tables.MEASURED)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("latency_s", "fast", "'fast' as latency_s in row 2. Put a finite number above 0"),
        ("latency_s", np.nan, "'' as latency_s in row 2"),
        ("latency_s", np.inf, "'inf' as latency_s in row 2"),
        ("latency_s", 0.0, "'0.0' as latency_s in row 2"),
        ("batch", 0, "'0' as batch in row 2. Put a whole number of at least 1"),
        ("batch", 1.5, "'1.5' as batch in row 2"),
        ("spread_s", -1.0, "'-1.0' as spread_s in row 2"),
    ],
)
def test_an_impossible_value_is_named_by_row(column: str, value: object, message: str) -> None:
    table = measured(CELLS).astype(object)
    table.loc[1, column] = value
    with pytest.raises(TableError, match=message):
        tables.check(table, tables.MEASURED)


def test_a_failed_cell_needs_no_latency() -> None:
    table = measured(CELLS, status=["ok", "out of memory", "ok"]).astype({"latency_s": object})
    table.loc[1, "latency_s"] = ""
    checked = tables.check(table, tables.MEASURED)
    assert np.isnan(checked["latency_s"][1])
    assert checked["latency_s"][0] == 0.01


def test_a_row_without_a_status_was_measured() -> None:
    lost = measured(CELLS, status=["ok", "", ""]).astype({"latency_s": object})
    lost.loc[2, "latency_s"] = ""
    assert tables.check(lost, tables.MEASURED)["status"].tolist() == ["ok", "ok", ""]
    checked = tables.check(measured(CELLS, status=["ok", np.nan, "out of memory"]), tables.MEASURED)
    assert tables.timed(checked).tolist() == [True, True, False]


def test_what_tells_cells_apart_stands_in_their_names() -> None:
    rows = measured(CELLS, memory_format=["contiguous", "channels_last", ""], attention=["", "", "eager"])
    names = [tables.cell_name(row) for _, row in rows.assign(input_size=[0, 16, 32]).iterrows()]
    assert names == [
        "bert batch 1 eager fp32 cpu single",
        "bert seq 16 batch 8 eager fp32 cpu single channels_last",
        "vit seq 32 batch 1 eager fp32 cpu single eager attention",
    ]


def test_repeats_that_no_run_tells_apart_are_a_fault_of_what_was_measured() -> None:
    repeated = measured([("a", 1, 0.1)] * 2)
    with pytest.raises(TableError, match=r"The measurement table has a seq 16 batch 1 .* more than once"):
        tables.join(predicted([("a", 1, 0.1)] * 2), repeated)


def test_files_that_are_no_tables(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"There is no table at nowhere\.csv"):
        tables.read("nowhere.csv", tables.MEASURED)
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(TableError, match="is not a CSV table"):
        tables.read(tmp_path / "empty.csv", tables.MEASURED)
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(b"model,batch\n")[:-9])
    with pytest.raises(TableError, match=r"cut\.csv\.gz is not a CSV table"):
        tables.load(tmp_path / "cut.csv.gz")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model;batch;latency_ms\na;1;2,5\n", "has ';' between its columns. Put commas there, and points in its num"),
        ("model\tbatch\tlatency_ms\na\t1\t2.5\n", r"has '\\t' between its columns"),
        ("model,batch,latency_ms\na,1,2,5\n", "has rows with more values than its header has names"),
        ("model,batch,latency_s,latency_ms\na,1,,5\na,2,2,5\n", "has latency_s and latency_ms. Keep one column"),
        ("model,batch,latency_ms,latency_ms \na,1,2,5\n", "has latency_ms more than once"),
        ("model,batch,latency_ms\na,99999999999999999999,2\n", "'99999999999999999999' as batch in row 1"),
    ],
)
def test_a_csv_of_another_form_says_which(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text(text)
    with pytest.raises(TableError, match=message):
        tables.check(tables.complete(tables.load(tmp_path / "own.csv")), tables.MEASURED)


def test_spaces_and_milliseconds_of_a_csv_are_understood(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text("\ufeffmodel , batch, latency_ms\na, 1, 2.5\n", encoding="utf-8")
    cells = tables.check(tables.complete(tables.load(tmp_path / "own.csv")), tables.MEASURED)
    assert cells[["model", "batch", "latency_s"]].values.tolist() == [["a", 1, 0.0025]]


def test_join_names_what_has_no_partner_and_what_failed() -> None:
    left = tables.check(predicted([*CELLS, ("t5", 4, 0.1)]), tables.PREDICTED)
    table = measured([*CELLS[:2], ("swin", 2, 0.1)], status=["ok", "out of memory", "ok"])
    joined = tables.join(left, tables.check(table, tables.MEASURED))
    assert len(joined.rows) == 1
    assert joined.only_predicted == tuple(
        f"{name} eager fp32 cpu single" for name in ("vit seq 16 batch 1", "t5 seq 16 batch 4")
    )
    assert joined.only_measured == ("swin seq 16 batch 2 eager fp32 cpu single",)
    assert joined.failed == ("bert seq 16 batch 8 eager fp32 cpu single: out of memory",)
    assert joined.notes == ()


def test_join_across_machines_says_so() -> None:
    left = tables.check(predicted(CELLS, machine="host B"), tables.PREDICTED)
    joined = tables.join(left, tables.check(measured(CELLS), tables.MEASURED))
    assert len(joined.rows) == 3
    assert "Predicted for host B, measured on host A" in joined.notes[0]


def test_a_memory_format_tells_cells_apart_where_both_tables_have_it() -> None:
    cells, formats = [("a", 1, 0.1), ("a", 1, 0.2)], ["contiguous", "channels_last"]
    one, other = (make(cells, memory_format=formats) for make in (predicted, measured))
    assert tables.join(one, tables.merge_repeats(other)).rows["latency_s_measured"].tolist() == [0.1, 0.2]
    with pytest.raises(TableError, match=r"table has a seq 16 batch 1 .* more than once"):
        tables.join(one.drop(columns="memory_format"), other)  # a table of old does not say which it means


def test_repeats_in_several_runs_become_one_row() -> None:
    table = measured([("bert", 1, 0.010), ("vit", 1, 0.5), ("bert", 1, 0.012)], run=["r1", "r1", "r2"])
    table = table.assign(slow_ratio=[1.0, 1.0, 1.2], **{tables.COLUMN.format(tables.KINDS[0]): [10.0, 10.0, 14.0]})
    table = table.assign(overhead_s=[0.001, 0.1, 0.003], compute_s=[0.004, 0.1, 0.002])
    table = table.assign(launches=[np.nan, 7, 9], x_kernels=["", "", "8"])
    table = table.assign(regime=["compute-bound", "", "framework-bound"], stack=["torch=1", "", "torch=2"])
    merged = tables.merge_repeats(tables.check(table, tables.MEASURED))
    bert = merged[merged["model"] == "bert"].iloc[0]
    assert len(merged) == 2
    assert bert["latency_s"] == pytest.approx(0.011)
    assert bert["repeat_ratio"] == pytest.approx(1.2)
    assert (bert["n"], bert["run"], bert[tables.REPEATS]) == (10, "r1+r2", "2")
    assert merged.loc[merged["model"] == "vit", tables.REPEATS].item() == ""
    assert bert["slow_ratio"] == pytest.approx(1.1)
    assert (bert["overhead_s"], bert["compute_s"], bert["launches"]) == pytest.approx((0.002, 0.003, 9.0))
    assert (bert["regime"], bert["stack"], bert["x_kernels"]) == ("", "torch=1+torch=2", "8")
    assert bert[tables.COLUMN.format(tables.KINDS[0])] == 12.0
    assert tables.check(merged, tables.MEASURED)["n"].sum() == 15


def test_an_outside_table_is_completed() -> None:
    table = tables.complete(pd.DataFrame({"model": ["a"], "batch": [1], "latency_s": [0.1], "gpu": ["A6000"]}))
    checked = tables.check(table, tables.MEASURED)
    assert checked.loc[0, "x_gpu"] == "A6000"
    assert checked.loc[0, "runtime"] == "eager"
    silent = pd.DataFrame({"model": "a", "batch": [1, 2], "latency_s": 0.1, "n": [5, ""]}, index=[3, 3])
    silent = silent.assign(runtime=["compile", np.nan], arch=[[1, 2], [3]], image=["", 64], seq=["", ""])
    checked = tables.check(tables.complete(silent), tables.MEASURED)
    assert checked["input_size"].tolist() == [0, 64]
    assert checked[["runtime", "n", "x_arch"]].values.tolist() == [["compile", 5, "[1, 2]"], ["eager", 1, "[3]"]]
    with pytest.raises(TableError, match="lacks batch, latency_s"):
        tables.complete(pd.DataFrame({"model": ["a"]}))


def test_columns_go_by_the_names_of_arguments() -> None:
    table = pd.DataFrame({"model": ["a", "b", "c"], "batch": 1, "latency_ms": 2.0, "precision": "fp16", "gpu": "x"})
    table = table.assign(image=[64, "", ""], seq=[0, 32, np.nan], MACs="4.1 G")
    cells = tables.check(tables.complete(table), tables.MEASURED)
    assert cells[["input_kind", "input_size"]].values.tolist() == [["image", 64], ["seq", 32], ["default", 0]]
    assert (set(cells["precision"]), tables.unused(table, cells)[0][-9:]) == ({"fp16"}, "gpu, MACs")
    assert tables.unused(table, tables.complete(table.assign(input_kind="")))[0].endswith("gpu, image, seq, MACs")
    with pytest.raises(TableError, match="has seq and image in row 1"):
        tables.complete(table.assign(seq=8))
