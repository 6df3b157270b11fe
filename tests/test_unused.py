"""Arguments that say nothing of a model are refused or said, not dropped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel

import latpred
from latpred.errors import TraceError, UsageError

IMAGES = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
IMAGE, CPU = torch.zeros(1, 3, 8, 8), "epyc-shared"
SERIES = torch.zeros(6, 1, 16)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: latpred.trace("bert-base-uncased", image=224), "takes tokens, of which image=224 says nothing"),
        (lambda: latpred.trace("resnet-18", seq=128), "takes images, of which seq=128 says nothing; leave it out"),
        (lambda: latpred.trace("wav2vec2-base", image=64), "takes audio, of which image=64 says nothing"),
        (lambda: latpred.trace("whisper-tiny", seq=128), "takes inputs of one size, of which seq= and image= say"),
        (lambda: latpred.trace(IMAGES, seq=128), "Sequential takes images, of which seq=128"),
        (lambda: latpred.trace(IMAGES, IMAGE, seq=8), "inputs= says what the model is called with; leave out seq"),
        (lambda: latpred.predict_many([IMAGES], inputs=IMAGE, image=8, device=CPU), "is called with; leave out image"),
        (lambda: latpred.measure([IMAGES], 1, inputs=IMAGE, image=8), "model is called with; leave out image"),
        (lambda: latpred.measure(["resnet-18", IMAGES], 1, image=0), "image=0 is not a length; give a whole number"),
        (lambda: latpred.predict("gpt2", execution="nested", device=CPU), "about unequal lengths; give lengths="),
        (lambda: latpred.trace("gpt2", seq=1025), "1025 tokens are too long: GPT2Model takes at most 1024"),
    ],
)
def test_what_says_nothing_of_a_model_is_refused(ask: Callable[[], object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ask()


def test_sizes_of_a_file_that_gives_its_inputs(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("import torch\ndef build():\n    return torch.nn.Linear(4, 4), torch.zeros(1, 4)\n")
    assert latpred.trace(f"{file}:build").launches() == 1
    with pytest.raises(UsageError, match="leave out seq"):
        latpred.trace(f"{file}:build", seq=8)


def test_as_many_tokens_as_there_are_positions() -> None:
    assert latpred.trace("gpt2", seq=1024).launches()
    assert latpred.trace("tinyllama-1.1b", seq=2049).launches()
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    short = BertConfig(**sizes, max_position_embeddings=64)
    assert latpred.trace(BertModel(short)).input_size == 64
    assert latpred.predict_many([short], device=CPU)["error"].isna().all()


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
