"""Layers of everyday networks, for the models of the suite "ordinary" and those of the gate.

Generated networks have blocks of their own (`blocks`), so that what is judged shares no code with what is fitted.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Activation = Callable[[], nn.Module]


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


def double(before: int, after: int) -> nn.Sequential:
    """Two convolutions of 3 x 3."""
    return nn.Sequential(conv(before, after, 3), conv(after, after, 3))


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


def transformer_layer(width: int, heads: int, *, causal: bool = False) -> nn.Sequential:
    """A transformer's layer, normalised first."""
    attention = Residual(nn.LayerNorm(width), Attention(width, heads, causal=causal))
    return nn.Sequential(attention, feed_forward(width, 4 * width))


class Residual(nn.Module):
    """Layers whose input is added to what they make of it."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """The sum."""
        made: Tensor = self.layers(x)
        return x + made


class States(nn.Module):
    """The states of a recurrent layer, without its last ones apart."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """One state for each step."""
        states: Tensor = self.layer(x)[0]
        return states


class Mean(nn.Module):
    """The mean over tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """One row for each sample."""
        return x.mean(1)


class Last(nn.Module):
    """The last of the tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """One row for each sample."""
        return x[:, -1]


class Attention(nn.Module):
    """Self-attention with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """As many tokens as came in."""
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=self.causal)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class Patches(nn.Module):
    """An image cut into patches, which become tokens with or without learned positions."""

    def __init__(self, channels: int, width: int, side: int, tokens: int = 0) -> None:
        super().__init__()
        self.cut = nn.Conv2d(channels, width, side, side)
        self.positions = nn.Parameter(torch.randn(1, tokens, width)) if tokens else None

    def forward(self, x: Tensor) -> Tensor:
        """The tokens."""
        tokens: Tensor = self.cut(x).flatten(2).transpose(1, 2)
        return tokens if self.positions is None else tokens + self.positions


class PlacedWords(nn.Module):
    """Embeddings of words and of their places."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)

    def forward(self, ids: Tensor) -> Tensor:
        """Their sum."""
        out: Tensor = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        return out


class StandardConv(nn.Conv2d):
    """A convolution whose weights are standardised in every forward pass, as timm does it."""

    def __init__(self, before: int, after: int, kernel: int, stride: int = 1, padding: int = 0, gamma: float = 1.0):
        super().__init__(before, after, kernel, stride, padding)
        self.gain = nn.Parameter(torch.ones(after))
        self.scale = gamma * self.weight[0].numel() ** -0.5

    def forward(self, input: Tensor) -> Tensor:
        """The convolution with standardised weights."""
        rows = self.weight.reshape(1, self.out_channels, -1)
        gain = self.gain * self.scale
        weight = F.batch_norm(rows, None, None, weight=gain, training=True, momentum=0.0, eps=1e-6)
        standard = weight.reshape_as(self.weight)
        return F.conv2d(input, standard, self.bias, self.stride, self.padding, self.dilation, self.groups)


class MixedTokens(nn.Module):
    """The half of an MLP-Mixer's layer that mixes tokens, normalised first."""

    def __init__(self, width: int, tokens: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), mlp(tokens, hidden, tokens, activation=nn.GELU)

    def forward(self, x: Tensor) -> Tensor:
        """As many tokens as came in."""
        mixed: Tensor = self.mix(self.norm(x).transpose(1, 2))
        return x + mixed.transpose(1, 2)


class Basic(nn.Module):
    """ResNet's block of two convolutions."""

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(before, after, 3, stride), conv(after, after, 3, activation=nn.Identity))
        same = stride == 1 and before == after
        self.shortcut: nn.Module = nn.Identity() if same else conv(before, after, 1, stride, activation=nn.Identity)

    def forward(self, x: Tensor) -> Tensor:
        """The rectified sum."""
        return F.relu(self.body(x) + self.shortcut(x))


def shuffled(x: Tensor, groups: int) -> Tensor:
    """The channels dealt out again among groups."""
    batch, channels, height, width = x.shape
    grouped = x.view(batch, groups, channels // groups, height, width)
    return grouped.transpose(1, 2).reshape(batch, channels, height, width)
