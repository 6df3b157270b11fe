"""Layers of everyday networks, shared by the models in plain torch.

Generated networks have blocks of their own (`blocks`), so that what is judged shares no code with what is fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Activation = Callable[[], nn.Module]


def each(block: Callable[..., nn.Module], steps: Iterable[tuple[Any, ...]]) -> list[nn.Module]:
    """One block for each step's arguments, as in channels before, channels after, stride."""
    return [block(*step) for step in steps]


def mlp(*widths: int, activation: Activation = nn.ReLU) -> nn.Sequential:
    """Linear layers with an activation between every two."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), activation()]
    return nn.Sequential(*layers[:-1])


def conv(
    before: int, after: int, kernel: int, stride: int = 1, groups: int = 1, activation: Activation = nn.ReLU
) -> nn.Sequential:
    """Convolution, batch normalisation, activation."""
    convolution = nn.Conv2d(before, after, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(after), activation())


def basic(before: int, after: int, stride: int = 1) -> nn.Module:
    """ResNet's block of two convolutions."""
    body = nn.Sequential(conv(before, after, 3, stride), conv(after, after, 3, activation=nn.Identity))
    return ResidualSum(body, before, after, stride)


def inverted(before: int, after: int, stride: int, *extra: nn.Module, activation: Activation = nn.SiLU) -> nn.Module:
    """MobileNet's block: four times the channels, a depthwise convolution, what is extra, few channels again."""
    wide = 4 * before
    layers = [
        conv(before, wide, 1, activation=activation),
        conv(wide, wide, 3, stride, groups=wide, activation=activation),
        *extra,
        conv(wide, after, 1, activation=nn.Identity),
    ]
    return Residual(*layers) if stride == 1 and before == after else nn.Sequential(*layers)


def norm_head(width: int, classes: int) -> nn.Sequential:
    """Layer normalisation and a classifier."""
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))


def pooled_head(channels: int, classes: int) -> nn.Sequential:
    """The mean of every channel and a classifier."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def feed_forward(width: int, hidden: int) -> nn.Module:
    """The feed-forward half of a transformer's layer, normalised first."""
    return Residual(nn.LayerNorm(width), nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


def attended(width: int, heads: int, *, causal: bool = False) -> nn.Module:
    """The attention half of a transformer's layer, normalised first."""
    return Residual(nn.LayerNorm(width), _Attention(width, heads, causal=causal))


def transformer_layer(width: int, heads: int, *, causal: bool = False) -> nn.Sequential:
    """A transformer's layer, normalised first."""
    return nn.Sequential(attended(width, heads, causal=causal), feed_forward(width, 4 * width))


class Residual(nn.Module):
    """Layers whose input is added to what they make of it."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class ResidualSum(nn.Module):
    """The rectified sum of a body and of its input, which is convolved where it has another shape."""

    def __init__(self, body: nn.Module, before: int, after: int, stride: int) -> None:
        super().__init__()
        same = stride == 1 and before == after
        self.body = body
        self.shortcut: nn.Module = nn.Identity() if same else conv(before, after, 1, stride, activation=nn.Identity)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class States(nn.Module):
    """The states of a recurrent layer, one for each step, without its last ones apart."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


class Mean(nn.Module):
    """The mean over tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class Take(nn.Module):
    """One of the tokens: 0 for the first, -1 for the last."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        return x[:, self.index]


class Transposed(nn.Module):
    """The last two dimensions in the other order."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class _Attention(nn.Module):
    """Self-attention with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Patches(nn.Module):
    """An image cut into patches, which become tokens with or without learned positions."""

    def __init__(self, channels: int, width: int, side: int, tokens: int = 0) -> None:
        super().__init__()
        self.cut = nn.Conv2d(channels, width, side, side)
        self.positions = nn.Parameter(torch.randn(1, tokens, width)) if tokens else None

    def forward(self, x: Tensor) -> Tensor:
        tokens: Tensor = self.cut(x).flatten(2).transpose(1, 2)
        return tokens if self.positions is None else tokens + self.positions


class ClassToken(nn.Module):
    """An image cut into patches behind a learned token."""

    def __init__(self, width: int, side: int, patches: int) -> None:
        super().__init__()
        self.cut = Patches(3, width, side)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, patches + 1, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.token.expand(x.shape[0], -1, -1), self.cut(x)], 1) + self.positions


class MixedTokens(nn.Module):
    """The half of an MLP-Mixer's layer that mixes tokens, normalised first."""

    def __init__(self, width: int, tokens: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), mlp(tokens, hidden, tokens, activation=nn.GELU)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(self.norm(x).transpose(1, 2)).transpose(1, 2)


class PlacedWords(nn.Module):
    """The sum of embeddings of words and of their places."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))


class StandardConv(nn.Conv2d):
    """A convolution whose weights are standardised in every forward pass, as timm does it."""

    def __init__(self, before: int, after: int, kernel: int, stride: int = 1, padding: int = 0, gamma: float = 1.0):
        super().__init__(before, after, kernel, stride, padding)
        self.gain = nn.Parameter(torch.ones(after))
        self.scale = gamma * self.weight[0].numel() ** -0.5

    def forward(self, input: Tensor) -> Tensor:
        rows = self.weight.reshape(1, self.out_channels, -1)
        gain = self.gain * self.scale
        weight = F.batch_norm(rows, None, None, weight=gain, training=True, momentum=0.0, eps=1e-6)
        standard = weight.reshape_as(self.weight)
        return F.conv2d(input, standard, self.bias, self.stride, self.padding, self.dilation, self.groups)


class ChannelNorm(nn.LayerNorm):
    """Layer normalisation along the channels of a map."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class SqueezedChannels(nn.Module):
    """Channels weighed by a learned function of their means (squeeze and excitation)."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.weigh = nn.Sequential(nn.Conv2d(channels, squeezed, 1), nn.ReLU(), nn.Conv2d(squeezed, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.weigh(x.mean((2, 3), keepdim=True)))


class GatedChannels(nn.Module):
    """The same as MobileNetV3 has it, in functions and with a hard sigmoid."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, channels // 4, 1), nn.Conv2d(channels // 4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * F.hardsigmoid(self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1)))))
