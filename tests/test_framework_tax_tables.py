"""The examples that predict the tables of the paper run and print a line for each row."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples" / "framework_tax"

SOURCE = """
import torch
import transformers


def build():
    sizes = dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128, vocab_size=100)
    model = transformers.BertModel(transformers.BertConfig(**sizes, attn_implementation="eager"))
    return model, {"input_ids": torch.zeros(1, 16, dtype=torch.long)}
"""


def test_table_1_finds_width_batch_and_length_free(capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(FOLDER / "table1.py"))["main"]
    main([])
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["precision", "width", "batch", "tokens", "predicted", "ms", "x", "first", "paper", "ms"]
    cells = [line.split() for line in lines]
    assert [row[:4] for row in cells[:4]] == [
        ["fp16", "768", "1", "128"],
        ["fp16", "768", "4", "128"],
        ["fp16", "768", "1", "512"],
        ["fp16", "1536", "1", "128"],
    ]
    assert [row[0] for row in cells[4:]] == ["fp32"] * 4
    for row in cells[:4]:
        assert float(row[5]) < 1.1
        assert row[7] == "framework-bound"
        assert abs(float(row[4]) / float(row[6]) - 1) < 0.4  # the paper's host was another


def test_table_3_orders_the_runtimes_by_what_they_leave_to_the_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models.py").write_text(SOURCE)
    main = runpy.run_path(str(FOLDER / "table3.py"))["main"]
    main(["--model", f"{tmp_path}/models.py:build"])
    _, *lines = capsys.readouterr().out.splitlines()
    found = {line.split()[0]: float(line.split()[1]) for line in lines}
    assert list(found) == ["eager", "torchscript", "cuda-graphs", "onnxruntime", "onnxruntime-cuda-graphs"]
    assert found["eager"] > found["torchscript"] > found["onnxruntime"] >= found["onnxruntime-cuda-graphs"]
    assert found["cuda-graphs"] < found["torchscript"]
    assert all(re.search(r"[+-]\d+%$", line) for line in lines)


def test_table_3_lends_nothing_to_the_runtimes_that_the_profile_knows() -> None:
    script = runpy.run_path(str(FOLDER / "table3.py"))
    errors = {name: error for name, *_, error in script["rows"](dict.fromkeys(script["PRINTED_MS"], 5.27))}
    assert errors["eager"] == pytest.approx(-0.5)
    assert set(errors) == set(script["PRINTED_MS"])
