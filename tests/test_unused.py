"""Arguments that say nothing of a model are refused or said, not dropped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from clidata import run
from torch import nn

import latpred
from latpred.errors import TraceError, UsageError

IMAGES = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
SERIES = torch.zeros(6, 1, 16)


@pytest.mark.parametrize(
    ("model", "sizes", "message"),
    [
        ("bert-base-uncased", {"image": 224}, "bert-base-uncased takes tokens, of which image=224 says nothing"),
        ("resnet-18", {"seq": 128}, "resnet-18 takes images, of which seq=128 says nothing; leave it out, or give im"),
        ("wav2vec2-base", {"image": 64}, "wav2vec2-base takes audio, of which image=64 says nothing"),
        ("whisper-tiny", {"seq": 128}, "whisper-tiny takes inputs of one size, of which seq= and image= say nothing"),
        (IMAGES, {"seq": 128}, "Sequential takes images, of which seq=128"),
    ],
)
def test_sizes_that_a_model_has_not(model: str | nn.Module, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        latpred.trace(model, **sizes)  # type: ignore[arg-type]


def test_sizes_beside_inputs() -> None:
    inputs, message = torch.zeros(1, 3, 8, 8), "inputs= says what the model is called with; leave out "
    with pytest.raises(UsageError, match=f"{message}seq"):
        latpred.trace(IMAGES, inputs, seq=8)
    with pytest.raises(UsageError, match=f"{message}image"):
        latpred.predict_many([IMAGES], inputs=inputs, device="epyc-shared", image=32)


def test_sizes_of_a_file_that_gives_its_inputs(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("import torch\ndef build():\n    return torch.nn.Linear(4, 4), torch.zeros(1, 4)\n")
    assert latpred.trace(f"{file}:build").launches() == 1
    with pytest.raises(UsageError, match="leave out seq"):
        latpred.trace(f"{file}:build", seq=8)


def test_sizes_that_an_onnx_file_has_fixed(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    x, y = (onnx.helper.make_tensor_value_info(name, 1, ["batch", 8]) for name in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "graph", [x], [y])
    path = tmp_path / "net.onnx"
    opset = [onnx.helper.make_opsetid("", 20)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=9), str(path))
    for sizes in ({"seq": 8}, {"image": 8}):
        with pytest.raises(UsageError, match=r"changes nothing, since no input has such a size open\. Leave it out"):
            latpred.predict(path, 1, "onnxruntime", device="epyc-shared", **sizes)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="seq=8 changes nothing, since inputs= has its size"):
        latpred.predict(path, 1, "onnxruntime", inputs=torch.zeros(1, 8), seq=8, device="epyc-shared")


def test_an_execution_without_lengths() -> None:
    with pytest.raises(UsageError, match="execution='nested' says what is done about unequal lengths; give lengths="):
        latpred.predict("bert-base-uncased", execution="nested", device="epyc-shared")
    shown = run("predict", "bert-base-uncased", "--execution", "packed", "--device", "epyc-shared")
    assert (shown.exit_code, "add --lengths" in shown.stderr) == (2, True)


def test_more_tokens_than_there_are_positions() -> None:
    assert latpred.trace("gpt2", seq=1024).launches()
    with pytest.raises(UsageError, match="sequences of 1025 tokens are too long: GPT2Model takes at most 1024"):
        latpred.trace("gpt2", seq=1025)
    assert latpred.trace("tinyllama-1.1b", seq=2049).launches()


@pytest.mark.parametrize("row", [-1, 10])
def test_rows_outside_a_table(row: int) -> None:
    with pytest.raises(TraceError, match=f"index {row} is not in a table of 10 rows"):
        latpred.trace(nn.Embedding(10, 4), torch.full((1, 3), row))


@pytest.mark.parametrize(
    "make",
    [
        lambda first: nn.GRU(16, 16, batch_first=first),
        lambda first: nn.TransformerEncoderLayer(16, 2, 16, batch_first=first),
    ],
)
def test_the_batch_in_the_second_dimension_is_said(make: Callable[[bool], nn.Module]) -> None:
    said = latpred.trace(make(False), SERIES).notes
    assert any("has batch_first=False" in note and "batch_first=True" in note for note in said)
    assert latpred.trace(make(True), SERIES).notes == ()
    assert latpred.trace(make(False), lambda batch: SERIES.expand(6, batch, 16)).notes == ()


def test_attention_with_the_batch_in_the_second_dimension() -> None:
    graph = latpred.trace(nn.MultiheadAttention(16, 2), (SERIES, SERIES, SERIES))
    assert any("MultiheadAttention has batch_first=False" in note for note in graph.notes)
