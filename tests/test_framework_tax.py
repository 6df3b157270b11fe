"""The paper's case studies: each is predicted from names, prints its numbers, and writes its figure or its table."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from latpred import tables
from latpred.accuracy import recording

FOLDER = Path(__file__).parent.parent / "examples" / "framework_tax"
SMALL = {
    "fig01_macs": ["--device", "epyc-shared", "--models", "resnet-18,mobilenet-v2,distilbert"],
    "fig03_device_time": ["--device", "rtx-8000", "--models", "resnet-18"],
    "fig04_runtimes": ["--device", "rtx-8000", "--models", "distilbert"],
    "fig05_lengths": ["--device", "rtx-8000"],
    "fig06_width_depth": ["--device", "rtx-8000"],
    "fig07_funnel": ["--device", "epyc-shared"],
    "fig08_efficient": ["--device", "rtx-8000", "--models", "distilbert,albert"],
    "fig09_devices": ["--device", "rtx-8000,rtx-3090", "--models", "resnet-18"],
    "fig10_vision_speech": ["--device", "rtx-8000", "--models", "resnet-18,vit-base-32,mobilenet-v2"],
    "fig11_generation": ["--device", "rtx-8000"],
    "fig12_precision": ["--device", "rtx-8000", "--models", "resnet-18"],
    "fig13_fnet": ["--device", "rtx-8000"],
}

SOURCE = """
import torch
import transformers


def build():
    sizes = dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128, vocab_size=100)
    model = transformers.BertModel(transformers.BertConfig(**sizes, attn_implementation="eager"))
    return model, {"input_ids": torch.zeros(1, 16, dtype=torch.long)}
"""


Main = Callable[[str, list[str]], None]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Main:
    monkeypatch.syspath_prepend(str(FOLDER))
    return lambda name, arguments: runpy.run_path(str(FOLDER / f"{name}.py"))["main"](arguments)


@pytest.fixture
def figures() -> dict[str, Any]:
    """What is defined beside the figures."""
    return runpy.run_path(str(FOLDER / "figures.py"))


def test_every_figure_is_tried_and_listed(figures: dict[str, Any]) -> None:
    listed = (FOLDER / "README.md").read_text()
    assert list(figures["FIGURES"]) == list(SMALL)
    assert all(f"python examples/framework_tax/figures.py {name}" in listed for name in SMALL)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")  # FNet in fp16
@pytest.mark.parametrize("name", SMALL)
def test_a_figure_prints_and_draws(name: str, main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure = tmp_path / f"{name}.png"
    main("figures", [name, *SMALL[name], "--batches", "1,8", "-o", str(figure)])
    assert figure.stat().st_size > 5_000
    said = capsys.readouterr().out.splitlines()
    assert f"wrote {figure}" in said
    numbers = [cell for line in said for cell in line.split() if cell.replace(".", "").isdigit()]
    assert len(numbers) >= 4


def test_measured_points_come_from_a_recording(figures: dict[str, Any]) -> None:
    asking = ["fig08_efficient", "--device", "epyc-shared", "--recording", "epyc-shared-runtimes"]
    _, asked = figures["asked"]([*asking, "--batches", "1,4"])
    measured_ms = figures["measured"](asked, "blind/mistral")
    table = tables.merge_repeats(recording.load("epyc-shared-runtimes").table)
    first = table[(table["model"] == "blind/mistral") & (table["batch"] == 1) & (table["runtime"] == "eager")].iloc[0]
    assert list(measured_ms) == [1, 4]
    assert measured_ms[1] == pytest.approx(1e3 * first["latency_s"])
    assert figures["measured"](asked, "no such model") == {}


def test_table_1_finds_width_batch_and_length_free(main: Main, capsys: pytest.CaptureFixture[str]) -> None:
    main("table1", [])
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


def test_table_3_orders_runtimes_by_overhead(main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "models.py").write_text(SOURCE)
    main("table3", ["--model", f"{tmp_path}/models.py:build"])
    _, *lines = capsys.readouterr().out.splitlines()
    found = {line.split()[0]: float(line.split()[1]) for line in lines}
    assert list(found) == ["eager", "torchscript", "cuda-graphs", "onnxruntime", "onnxruntime-cuda-graphs"]
    assert found["eager"] > found["torchscript"] > found["onnxruntime"] >= found["onnxruntime-cuda-graphs"]
    assert found["cuda-graphs"] < found["torchscript"]
    assert all(re.search(r"[+-]\d+%$", line) for line in lines)
