"""Token blocks of the generated calibration networks: attention in its forms, norms, feed-forwards.

Only shapes and op kinds matter here; nothing is ever trained.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 2000


class TanhGelu(nn.Module):
    """The GELU of GPT-2, spelt out in elementwise ops."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class RmsNorm(nn.Module):
    """Root-mean-square norm, spelt out in elementwise ops."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class AffineNorm(nn.Module):
    """A norm without statistics: scale and shift."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias


def activation(name: str) -> nn.Module:
    """An activation module by name."""
    return {
        "gelu": nn.GELU,
        "relu": nn.ReLU,
        "relu6": nn.ReLU6,
        "silu": nn.SiLU,
        "hardswish": nn.Hardswish,
        "tanh": nn.Tanh,
        "tanh_gelu": TanhGelu,
    }[name]()


def norm(name: str, width: int) -> nn.Module:
    """A norm over the last dimension by name."""
    return {"layer": nn.LayerNorm, "rms": RmsNorm, "affine": AffineNorm}[name](width)


class Attention(nn.Module):
    """Multi-head self-attention in one of the forms that libraries use."""

    def __init__(self, width: int, heads: int, form: str) -> None:
        super().__init__()
        self.form, self.heads = form, heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, s, w = x.shape
        q, k, v = (
            layer(x).view(b, s, self.heads, w // self.heads).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        if self.form == "explicit":
            scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(w // self.heads)
            mixed = torch.matmul(F.softmax(scores, dim=-1), v)
        else:
            mask = torch.zeros(b, 1, s, s, dtype=x.dtype, device=x.device) if self.form == "masked" else None
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).reshape(b, s, w))


class EncoderLayer(nn.Module):
    """Attention and feed-forward with residuals, norm before or after."""

    def __init__(
        self, width: int, heads: int, hidden: int, *, attention: str, activation: str, norm: str, pre_norm: bool
    ) -> None:
        super().__init__()
        self.pre_norm = pre_norm
        self.attention: nn.Module = Attention(width, heads, attention if attention != "module" else "fused")
        self.first, self.second = _norm(norm, width), _norm(norm, width)
        self.up, self.act, self.down = nn.Linear(width, hidden), _activation(activation), nn.Linear(hidden, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        if self.pre_norm:
            x = x + self.attention(self.first(x))
            return x + self.dropout(self.down(self.act(self.up(self.second(x)))))
        x = self.first(x + self.dropout(self.attention(x)))
        return self.second(x + self.dropout(self.down(self.act(self.up(x)))))


_norm, _activation = norm, activation


class DecoderLayer(nn.Module):
    """Causal attention from one fused projection, optionally rotary and gated."""

    def __init__(self, width: int, heads: int, hidden: int, *, rotary: bool, gated: bool) -> None:
        super().__init__()
        self.heads, self.rotary, self.gated = heads, rotary, gated
        self.norm, self.norm2 = RmsNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.gate, self.down = nn.Linear(width, hidden), nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.act = TanhGelu()

    def forward(self, x: Tensor) -> Tensor:
        b, s, w = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm(x)).split(w, dim=-1))
        if self.rotary:
            angle = torch.arange(s, device=x.device, dtype=x.dtype)[:, None] * torch.ones(
                w // self.heads, device=x.device, dtype=x.dtype
            )
            q, k = (t * angle.cos() + _rotate(t) * angle.sin() for t in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, w))
        y = self.norm2(x)
        y = F.silu(self.gate(y)) * self.up(y) if self.gated else self.act(self.up(y))
        return x + self.down(y)


def _rotate(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


class TokenNetwork(nn.Module):
    """Embeddings, layers, a pooled classifier."""

    def __init__(self, width: int, narrow: int, layers: Sequence[nn.Module], classes: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCABULARY, narrow), nn.Embedding(2048, narrow)
        self.widen = nn.Linear(narrow, width) if narrow != width else nn.Identity()
        self.norm, self.layers = nn.LayerNorm(width), nn.Sequential(*layers)
        self.pool, self.head = nn.Linear(width, width), nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.norm(self.widen(self.words(ids) + self.positions(positions)))
        x = self.layers(x)
        return self.head(torch.tanh(self.pool(x[:, 0])))
