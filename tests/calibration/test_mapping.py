"""Tables of any columns: what rules make of them, what is left out, and what is refused with which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from publisheddata import frame as tax_frame

from latpred.calibration.published import mapping, published_table
from latpred.calibration.published.joint_fit import problem
from latpred.calibration.published.published_table import read_all, trace_all, trace_keys
from latpred.errors import LatpredError, TableError
from latpred.runtimes.legacy_torch import TORCH_1_12, TORCH_2_4

COMMON = {
    "device": "{card}",
    "latency_s": "{ms} ms",
    "source": "{site}",
    "run": "{site} {card} {software}",
    "input_kind": "image",
    "input_size": "64",
}
RULES: list[dict[str, Any]] = [
    {"where": {"ms": "."}, "set": COMMON},
    {"where": {"software": r"torch (?P<torch>[\d.]+)"}, "set": {"stack": "torch={torch}"}},
    {"where": {"runtime": "^JIT"}, "set": {"runtime": "torchscript"}},
    {"where": {"runtime": "other"}, "omit": "nobody predicts their runtime"},
    {"where": {"precision": "nhwc"}, "set": {"memory_format": "channels_last", "precision": "fp16"}},
]
ROW = {
    "site": "lab",
    "card": "Tesla T4",
    "software": "torch 2.1.0",
    "model": "torchvision:alexnet",
    "runtime": "eager",
    "precision": "fp32",
    "batch": "1",
    "ms": "3.5",
}


def table(*changes: dict[str, str]) -> pd.DataFrame:
    return pd.DataFrame([{**ROW, **change} for change in changes])


def rules(folder: Path, extra: list[dict[str, Any]] | None = None, **document: Any) -> Path:
    path = folder / "mapping.json"
    content = {"schema": "latpred.mapping/1", "rules": [*RULES, *(extra or [])], **document}
    path.write_text(json.dumps(content))
    return path


def test_rules_make_a_measurement_table(tmp_path: Path) -> None:
    given = table({}, {"runtime": "JIT (trace)", "software": "torch 1.9"}, {"batch": "2", "precision": "fp16, nhwc"})
    extra = [{"where": {"runtime": "JIT"}, "set": {"latency_s": "{ms} us", "model": "{folder}/m.py:build"}}]
    cells = read_all([given], rules(tmp_path, extra)).cells
    assert cells["latency_s"].tolist() == pytest.approx([3.5e-3, 3.5e-6, 3.5e-3])
    assert cells["runtime"].tolist() == ["eager", "torchscript", "eager"]
    assert cells["model"].tolist() == ["torchvision:alexnet", f"{tmp_path}/m.py:build", "torchvision:alexnet"]
    assert cells["stack"].tolist() == ["torch=2.1.0", "torch=1.9", "torch=2.1.0"]
    assert cells["memory_format"].tolist() == ["contiguous", "contiguous", "channels_last"]
    assert set(cells["machine"]) == {"lab Tesla T4 torch 2.1.0", "lab Tesla T4 torch 1.9"}
    assert cells["protocol"].tolist() == ["single"] * 3


def test_a_column_of_any_name_may_stand_in_braces(tmp_path: Path) -> None:
    given = table({}).rename(columns={"ms": "p50.latency[ms]"})
    extra = [{"set": {**COMMON, "latency_s": "{p50.latency[ms]} ms"}}]
    assert read_all([given], rules(tmp_path, extra)).cells["latency_s"].tolist() == pytest.approx([3.5e-3])


def test_rows_left_out_are_counted_by_reason(tmp_path: Path) -> None:
    given = table({}, {"runtime": "other one"}, {"runtime": "another"}, {"batch": "2", "card": "A100"})
    found = read_all([given], rules(tmp_path))
    assert found.notes == ("table: 2 rows are left out: nobody predicts their runtime",)
    assert found.kept() == ["1 row of lab on A100 in eager", "1 row of lab on Tesla T4 in eager"]
    with pytest.raises(TableError, match=r"No row of the tables can be used\. table: 1 row is left out: nobody"):
        read_all([table({"runtime": "other"})], rules(tmp_path))


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"precision": "fp-16"}, TableError, r"row 3, column precision: 'fp-16' is not known. Did you mean 'fp16'\?"),
        ({"batch": "eight"}, TableError, r"'eight' as batch in row 3"),
        ({"batch": ""}, TableError, r"'' as batch in row 3"),
        ({"ms": "3.5 parsecs"}, TableError, r"row 3: '3.5 parsecs ms' as latency_s is no time.*units are s, ms, us"),
        ({"ms": "-3"}, TableError, r"as latency_s in row 3.*above 0"),
    ],
)
def test_a_senseless_row_is_named(change: dict[str, str], error: type[LatpredError], said: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=said):
        read_all([table({}, {"runtime": "other"}, {"batch": "2", **change})], rules(tmp_path))


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (
            {"set": {"latency_s": "{msec} ms"}},
            r"row 1, column latency_s: the row has no 'msec' for the .* ms'. Did you mean ms\?",
        ),
        (
            {"set": {"host": "{card.name}"}},
            r"row 1, column host: the row has no 'card.name' for the mapping's '\{card.name\}'",
        ),
        ({"set": {"host": "{card"}}, r"row 1, column host: the row has no '\{' for the mapping's '\{card'"),
        (
            {"set": {"precison": "fp32"}},
            r"rule 6 sets precison, which no measurement table has. Did you mean precision",
        ),
        ({"where": {"ms": "("}}, r"rule 6: '\(' for the column ms is no regular expression"),
        ({"were": {}}, r"is not a mapping: .*`were`"),
    ],
)
def test_a_mapping_that_cannot_be_meant_says_where(extra: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(TableError, match=said):
        read_all([table({})], rules(tmp_path, [extra]))
    with pytest.raises(TableError, match=r"cannot read the mapping .*gone.json: No such file"):
        mapping.load(tmp_path / "gone.json")
    with pytest.raises(TableError, match="is not a mapping: Invalid enum value"):
        mapping.load(rules(tmp_path, schema="latpred.mapping/9"))


def test_a_rule_for_a_column_that_no_table_has_is_told(tmp_path: Path) -> None:
    extra = [{"where": {"runtme": "JIT"}, "set": {"runtime": "torchscript"}}, {"where": {"table": "x"}, "omit": "x"}]
    tables = [table({}), table({"batch": "2"}).assign(other="1")]
    (said,) = read_all(tables, rules(tmp_path, [*extra, {"where": {"other": "2"}, "omit": "2"}])).notes
    assert said.endswith("no table has the column they ask for: runtme (nearest: 'runtime')")


def test_tables_of_several_forms_are_read_as_one(tmp_path: Path) -> None:
    (tmp_path / "tax.csv").write_text(tax_frame().head(2).to_csv(index=False))
    table({}, {"batch": "2", "software": "torch 1.13.1"}).to_csv(tmp_path / "lab.csv.gz", index=False)
    found = read_all([tmp_path / "tax.csv", tmp_path / "lab.csv.gz"], rules(tmp_path))
    assert found.cells["x_source"].tolist() == ["tax", "tax", "lab", "lab"]
    assert published_table.eras(found.cells) == [TORCH_1_12, TORCH_1_12, TORCH_2_4, TORCH_1_12]
    assert published_table.read(found) is found


def test_a_mapping_that_no_table_goes_through_is_refused(tmp_path: Path) -> None:
    omits = rules(tmp_path, [{"where": {"batch": "^1$"}, "omit": "too small"}])
    with pytest.raises(TableError, match=r"No table goes through the mapping .*mapping\.json: .* Leave the "):
        read_all([tax_frame().head(2)], omits)


def test_what_a_row_ran_on_is_part_of_what_is_traced(tmp_path: Path) -> None:
    attending = {"model": "torchvision:vit_b_16"}
    older = {"software": "torch 1.9"}
    given = table(attending, attending | older, {"precision": "fp16, nhwc", "model": "torchvision:squeezenet1_0"})
    table_read = read_all([given], rules(tmp_path))
    keys = trace_keys(table_read.cells)
    assert [(key.memory_format, key.era) for key in keys] == [
        ("contiguous", TORCH_2_4),
        ("contiguous", TORCH_1_12),
        ("channels_last", TORCH_2_4),
    ]
    graphs = trace_all(dict.fromkeys(keys, (1,)))
    assert [graphs[key].memory_format for key in keys] == ["contiguous", "contiguous", "channels_last"]
    today, then, _ = problem(table_read, graphs).work["launches"]
    assert then > today  # attention was computed in parts


def test_networks_of_timm_are_built_as_its_benchmarks_ran_them(tmp_path: Path) -> None:
    files = (
        "nchw-pt112-cu113-rtx3090",
        "nhwc-pt113-cu117-rtx3090",
        "nchw-pt240-cu124-rtx4090",
        "nchw-pt291-cu128-4090",
    )
    row = {"gpu": "NVIDIA GeForce RTX 3090", "host": "not stated", "stack": "torch 2.4.0 cu124", "runtime": "eager"}
    row |= {"precision": "autocast fp16", "model": "levit_128", "batch": "8", "seq_or_image": "224", "latency_ms": "1"}
    sources = [f"huggingface/pytorch-image-models results/benchmark-infer-amp-{file}.csv@0" for file in files]
    pd.DataFrame([row | {"source": one, "notes": "", "protocol": ""} for one in sources]).to_csv(
        tmp_path / "timm_gpu.csv"
    )
    folder = Path(__file__).parents[2] / "examples" / "published"
    cells = read_all([tmp_path / "timm_gpu.csv"], folder / "mapping.json").cells
    plain, fast, deployed = "timm", folder / "timm_fast_norm.py", folder / "timm_reparameterized.py"
    assert cells["model"].tolist() == [f"{file}:levit_128" for file in (plain, fast, fast, deployed)]
    assert fast.exists()
    assert deployed.exists()
