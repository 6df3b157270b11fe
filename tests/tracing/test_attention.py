"""Attention is counted in every form in which models write it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import latpred

B, HEADS, TOKENS, SIZE = 1, 4, 10, 8
EXPECTED = 2 * HEADS * TOKENS**2 * SIZE


class Form(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Fused(Form):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class Causal(Form):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Products(Form):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax(q @ k.transpose(-1, -2) / SIZE**0.5, -1) @ v


class Einsum(Form):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1), v)


class Flat(Form):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        return torch.bmm(torch.baddbmm(torch.zeros(1), q, k.mT).softmax(-1), v)


@pytest.mark.parametrize("form", [Fused, Causal, Products, Einsum, Flat])
def test_in_every_form(form: type[Form]) -> None:
    example = tuple(torch.zeros(B, HEADS, TOKENS, SIZE) for _ in range(3))
    assert latpred.trace(form(), example).macs() == EXPECTED


def test_grouped_queries_count_every_query_head() -> None:
    class Grouped(Form):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    example = (torch.zeros(B, HEADS, TOKENS, SIZE), *(torch.zeros(B, 2, TOKENS, SIZE) for _ in range(2)))
    assert latpred.trace(Grouped(), example).macs() == EXPECTED


def test_masks_and_causality_are_kept_apart() -> None:
    class Masked(nn.Module):
        def forward(self, q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    example = (torch.zeros(B, HEADS, TOKENS, SIZE), torch.ones(TOKENS, TOKENS, dtype=torch.bool))
    (op,) = (op for op in latpred.trace(Masked(), example).ops if op.launches)
    assert (op.family, op.dims["masked"].at(1)) == ("attention", 1)
    (op,) = (o for o in latpred.trace(Causal(), tuple(torch.zeros(1, 4, 10, 8) for _ in range(3))).ops if o.launches)
    assert (op.family, op.dims["masked"].at(1)) == ("attention.causal", 0)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_transformers_implementations_agree(implementation: str) -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    config._attn_implementation = implementation
    graph = latpred.trace(BertModel(config), seq=16)
    assert graph.macs() == 2 * ((4 * 32**2 + 2 * 32 * 64) * 16 + 2 * 16**2 * 32) + 32**2


@pytest.mark.parametrize("weights", [True, False])
def test_multihead_attention_takes_its_fast_path(weights: bool) -> None:
    class Self(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(x, x, x, need_weights=weights)[0]  # type: ignore[no-any-return]

    graph = latpred.trace(Self(), torch.zeros(1, 10, 32))
    assert graph.macs() == 4 * 32 * 32 * 10 + 2 * 10 * 10 * 32
    launched = [op.name for op in graph.ops if op.launches]
    assert launched[:5] == [
        *("aten::mm", "aten::_transform_bias_rescale_qkv", "aten::bmm", "aten::_softmax", "aten::bmm"),
    ]
    assert len(launched) == (9 if weights else 7)


def test_multihead_attention_between_two_sequences_does_not() -> None:
    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.attention(x, y, y, need_weights=False)[0]  # type: ignore[no-any-return]

    graph = latpred.trace(Cross(), (torch.zeros(1, 10, 32), torch.zeros(1, 6, 32)))
    assert graph.macs() == (2 * 10 + 2 * 6) * 32 * 32 + 2 * 10 * 6 * 32
    assert "aten::scaled_dot_product_attention" in [op.name for op in graph.ops]


def test_the_fused_encoder_layer() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    graph = latpred.trace(layer, torch.zeros(1, 10, 32))
    assert graph.macs() == (4 * 32 * 32 + 2 * 32 * 64) * 10 + 2 * 10 * 10 * 32
    assert "aten::_addmm_activation" in [op.name for op in graph.ops]


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_replaced_layers_compute_the_same_numbers(norm_first: bool, activation: str) -> None:
    from latpred.tracing.tracer import TraceRecorder

    torch.manual_seed(0)
    options = {"batch_first": True, "norm_first": norm_first, "activation": activation}
    layer = nn.TransformerEncoderLayer(32, 4, 64, **options).eval()  # type: ignore[arg-type]
    x = torch.randn(2, 10, 32)
    with torch.inference_mode():
        direct = layer(x)
        with TraceRecorder():
            recorded = layer(x)
    torch.testing.assert_close(recorded, direct)


def test_fused_attention_is_followed_by_no_copy_that_no_device_makes() -> None:
    class Merge(Form):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out = F.scaled_dot_product_attention(q, k, v)
            return out.transpose(1, 2).reshape(out.shape[0], TOKENS, HEADS * SIZE)

    example = tuple(torch.zeros(2, HEADS, TOKENS, SIZE) for _ in range(3))
    assert latpred.trace(Merge(), example).launches(2) == 1
