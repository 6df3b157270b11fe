"""Multiply-adds and launches of published networks, against formulas derived by hand from their papers."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from smallmodels import Function
from torch import nn

import latpred
from latpred.zoo import names


def encoder(layers: int, width: int, inner: int, tokens: int) -> int:
    """Four projections and two feed-forward products per token, and two products over all pairs of tokens."""
    return layers * ((4 * width**2 + 2 * width * inner) * tokens + 2 * tokens**2 * width)


def conv(c_in: int, c_out: int, kernel: int, side: int) -> int:
    """One filter per output element."""
    return c_in * kernel**2 * c_out * side**2


def resnet(blocks: Iterable[int], bottleneck: bool) -> int:
    """Stem 7x7/2, pooling /2, four stages of residual blocks, one classifier."""
    total, c_in, side = conv(3, 64, 7, 112), 64, 56
    for stage, count in enumerate(blocks):
        width = 64 * 2**stage
        c_out = width * (4 if bottleneck else 1)
        for block in range(count):
            first = block == 0
            before, after = side, side // 2 if first and stage else side
            if bottleneck:
                total += conv(c_in, width, 1, before) + conv(width, width, 3, after) + conv(width, c_out, 1, after)
            else:
                total += conv(c_in, width, 3, after) + conv(width, width, 3, after)
            if first and (c_in != c_out):
                total += conv(c_in, c_out, 1, after)
            c_in, side = c_out, after
    return total + c_in * 1000


S, P = 128, 197  # tokens; patches of 16 x 16 and the class token
DERIVED = {
    "bert-base-uncased": encoder(12, 768, 3072, S) + 768**2,
    "distilbert-base-uncased": encoder(6, 768, 3072, S),
    "albert-base-v2": S * 128 * 768 + encoder(12, 768, 3072, S) + 768**2,
    "gpt2": encoder(12, 768, 3072, S),
    "t5-small": encoder(6, 512, 2048, S),
    "vit-base-patch16-224": conv(3, 768, 16, 14) + encoder(12, 768, 3072, P) + 768 * 1000,
    "resnet-18": resnet((2, 2, 2, 2), bottleneck=False),
    "resnet-50": resnet((3, 4, 6, 3), bottleneck=True),
    "resnet-152": resnet((3, 8, 36, 3), bottleneck=True),
    "torchvision:resnet50": resnet((3, 4, 6, 3), bottleneck=True),
}


@pytest.mark.parametrize("name", DERIVED)
def test_multiply_adds_as_derived(name: str) -> None:
    assert latpred.trace(name).macs() == pytest.approx(DERIVED[name], rel=1e-3)


def test_bert_in_words() -> None:
    graph = latpred.trace("bert-base-uncased", seq=128)
    assert (round(graph.macs() / 1e9, 3), graph.launches()) == (11.174, 153)
    kinds = [op.family for op in graph.ops if op.launches]
    assert kinds.count("gemm") == 12 * 6 + 1
    assert kinds.count("attention") == 12
    assert kinds.count("norm.layer_norm") == 25
    assert kinds.count("elementwise.gelu") == 12
    first = next(op for op in graph.ops if op.family == "gemm")
    assert first.module == "encoder.layer.0.attention.self.query"
    assert {key: line.at(8) for key, line in first.dims.items()} == {"m": 8 * 128, "n": 768, "k": 768}
    assert first.weight_bytes.at(8) == (768 * 768 + 768) * 4
    assert first.read_bytes.at(8) == first.write_bytes.at(8) == 8 * 128 * 768 * 4
    assert (graph.parameters, graph.input_kind, graph.input_size) == (109_482_240, "seq", 128)
    assert latpred.trace(graph) is graph
    assert "torch" in graph.stack
    assert "transformers" in graph.stack


def test_depthwise_grouped_and_transposed_convolutions() -> None:
    model = nn.Sequential(
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.Conv2d(8, 12, 3, padding="same", groups=4),
        nn.ConvTranspose2d(12, 6, 2, stride=2),
        nn.Conv2d(6, 4, 3, stride=2, dilation=2),
    )
    graph = latpred.trace(model, torch.zeros(1, 8, 10, 10))
    work = {op.family: op.macs.at(1) for op in graph.ops if op.launches}
    assert work == {
        "conv_depthwise": 100 * 8 * 9,
        "conv_grouped": 100 * 12 * 2 * 9,
        "conv_transpose": 100 * 12 * 6 * 4,
        "conv": 8 * 8 * 4 * 6 * 9,
    }


@pytest.mark.parametrize("rows", [1, 4])
def test_recurrent_layers_are_counted_whole(rows: int) -> None:
    model = nn.GRU(12, 20, num_layers=2, batch_first=True, bidirectional=True)
    graph = latpred.trace(model, torch.zeros(1, 9, 12))
    per_direction = 3 * 20 * (12 + 20) + 3 * 20 * (2 * 20 + 20)
    assert graph.macs(rows) == rows * 9 * 2 * per_direction


def test_precisions_change_bytes_and_not_work() -> None:
    full, half = (latpred.trace("resnet-18", precision=p) for p in ("fp32", "fp16"))
    assert half.precision == "fp16"
    assert half.macs(4) == full.macs(4)
    assert {op.dtype for op in half.ops if op.macs.at(1)} == {"float16"}
    assert sum(op.read_bytes.at(4) for op in full.ops) == 2 * sum(op.read_bytes.at(4) for op in half.ops)
    assert latpred.trace("resnet-18", precision="tf32").bytes(2) == full.bytes(2)
    last = latpred.trace("resnet-18", memory_format="channels_last")
    assert (last.memory_format, last.launches(2), last.macs(2)) == ("channels_last", full.launches(2), full.macs(2))


def test_a_half_model_is_traced_as_one() -> None:
    assert latpred.trace(nn.Linear(4, 4).half(), torch.zeros(1, 4)).precision == "fp16"
    assert latpred.trace(nn.Linear(4, 4).bfloat16(), torch.zeros(1, 4)).precision == "bf16"


def test_values_that_overlapping_windows_share_are_read_once() -> None:
    windows = Function(lambda x: (x.unfold(1, 8, 2).sum(-1), x.as_strided((x.shape[0], 3, 32), (64, 16, 1)).exp()))
    graph = latpred.trace(windows, torch.zeros(1, 64))
    assert [(op.read_bytes.at(1), op.read_bytes.at(3)) for op in graph.ops if op.launches] == [(256, 768)] * 2


@pytest.mark.parametrize("name", [n for n in names.ARCHITECTURES if n not in DERIVED])
def test_every_other_name_can_be_traced(name: str) -> None:
    graph = latpred.trace(name)
    assert graph.macs() > 1e8
    assert graph.coverage().launches == 1.0, graph.coverage().estimated_ops
