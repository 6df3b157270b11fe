"""Small ordinary models that a calibration times whole at its end, to test its own profile by.

No fit ever sees them, and no suite holds one. They are of the families that users bring: tables, words, images, sound.
They are plain torch, and nothing is built before it is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from latpred.calibration.workloads.base import Inputs, Workload, dense_inputs, seeded, token_inputs
from latpred.calibration.workloads.everyday_layers import (
    Basic,
    Last,
    Mean,
    MixedTokens,
    Patches,
    PlacedWords,
    Residual,
    StandardConv,
    States,
    conv,
    feed_forward,
    inverted,
    mlp,
    norm_head,
    pooled_head,
    shuffled,
    transformer_layer,
)

BATCHES: tuple[int, ...] = (1, 8)
_VOCABULARY = 2048

Make = Callable[[], nn.Module]


def gate_models() -> tuple[Workload, ...]:
    """Recipes of all models, so ordered that the first few are already of many kinds.

    Examples
    --------
    >>> len(gate_models()), BATCHES
    (16, (1, 8))
    """
    return (
        _features("gate/mlp", "custom", (200,), _wide),
        _features("gate/residual", "image", (3, 64, 64), _residual),
        _words("gate/encoder", 20, _encoder),
        _words("gate/lstm", 16, _lstm),
        _features("gate/mobile", "image", (3, 96, 96), _mobile),
        _features("gate/standardised", "image", (3, 40, 40), _standardised),
        _features("gate/vision-transformer", "image", (3, 64, 64), _vision_transformer),
        _features("gate/deep-mlp", "custom", (160,), _deep),
        _features("gate/convnext", "image", (3, 64, 64), _convnext),
        _features("gate/speech", "audio", (3200,), _speech),
        _words("gate/decoder", 28, _decoder),
        _features("gate/dense", "image", (3, 48, 48), _densely),
        _features("gate/mixer", "image", (3, 48, 48), _mixer),
        _features("gate/gru", "custom", (24, 20), _gru),
        _features("gate/shuffle", "image", (3, 80, 80), _shuffle),
        _features("gate/bottleneck", "image", (3, 64, 64), _bottleneck),
    )


def _words(name: str, length: int, make: Make) -> Workload:
    def build(device: str, precision: str) -> tuple[nn.Module, Inputs]:
        return seeded(make, device, precision), token_inputs(length, _VOCABULARY)

    return Workload(name, "seq", length, build)


def _features(name: str, kind: str, shape: tuple[int, ...], make: Make) -> Workload:
    def build(device: str, precision: str) -> tuple[nn.Module, Inputs]:
        return seeded(make, device, precision), dense_inputs(shape, precision)

    return Workload(name, kind, 0 if kind == "custom" else shape[-1], build)


def _wide() -> nn.Module:
    """Three hidden layers over a table of 200 columns."""
    return mlp(200, 640, 640, 320, 10, activation=nn.SiLU)


def _deep() -> nn.Module:
    """Twenty-four layers of width 160."""
    return mlp(*(160,) * 25)


def _lstm() -> nn.Module:
    """Two layers of LSTM over words."""
    rnn = nn.LSTM(160, 160, num_layers=2, batch_first=True)
    return nn.Sequential(nn.Embedding(_VOCABULARY, 160), States(rnn), Last(), nn.Linear(160, 8))


def _gru() -> nn.Module:
    """A GRU in both directions over twenty series."""
    return nn.Sequential(States(nn.GRU(20, 112, batch_first=True, bidirectional=True)), Mean(), nn.Linear(224, 6))


def _encoder() -> nn.Module:
    """An encoder normalised behind its sums, as BERT is: 3 layers of width 192."""
    layers = [
        nn.Sequential(_Joined(_SelfAttention(192, 3), 192), _Joined(mlp(192, 768, 192, activation=nn.GELU), 192))
        for _ in range(3)
    ]
    return nn.Sequential(PlacedWords(_VOCABULARY, 20, 192), nn.LayerNorm(192), *layers, Last(), mlp(192, 192, 4))


def _decoder() -> nn.Module:
    """A decoder with rotary positions, RMS norms and gated feed-forward: 2 layers of width 256."""
    layers: list[nn.Module] = []
    for _ in range(2):
        attention = Residual(nn.RMSNorm(256), _SelfAttention(256, 4, rotary=28))
        layers += [attention, Residual(nn.RMSNorm(256), _GatedHidden(256, 688))]
    return nn.Sequential(nn.Embedding(_VOCABULARY, 256), *layers, nn.RMSNorm(256), nn.Linear(256, _VOCABULARY))


def _residual() -> nn.Module:
    """ResNet of basic blocks, its widths from 24 to 96."""
    layers: list[nn.Module] = [conv(3, 24, 7, stride=2), nn.MaxPool2d(3, 2, 1)]
    for before, after, stride in ((24, 24, 1), (24, 24, 1), (24, 48, 2), (48, 48, 1), (48, 96, 2), (96, 96, 1)):
        layers.append(Basic(before, after, stride))
    return nn.Sequential(*layers, pooled_head(96, 50))


def _bottleneck() -> nn.Module:
    """ResNet of bottlenecks, its widths from 64 to 256."""
    layers: list[nn.Module] = [conv(3, 32, 3, stride=2)]
    for before, after, stride in ((32, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1)):
        layers.append(_Bottleneck(before, after, stride))
    return nn.Sequential(*layers, pooled_head(256, 50))


def _mobile() -> nn.Module:
    """Inverted residuals with gated channels, as MobileNetV3 has them."""
    layers: list[nn.Module] = [conv(3, 16, 3, stride=2, activation=nn.Hardswish)]
    for before, after, stride in ((16, 24, 2), (24, 24, 1), (24, 40, 2), (40, 40, 1), (40, 80, 2), (80, 80, 1)):
        gate = (_Gate(4 * before),) if after >= 40 else ()
        layers.append(inverted(before, after, stride, *gate, activation=nn.Hardswish))
    return nn.Sequential(*layers, conv(80, 320, 1, activation=nn.Hardswish), pooled_head(320, 50))


def _densely() -> nn.Module:
    """DenseNet: three blocks of four layers, each of which reads all before it."""
    layers: list[nn.Module] = [conv(3, 40, 3, stride=2)]
    channels = 40
    for block in range(3):
        if block:
            layers += [nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels // 2, 1), nn.AvgPool2d(2)]
            channels //= 2
        for _ in range(4):
            layers.append(_Grown(channels, 20))
            channels += 20
    return nn.Sequential(*layers, nn.BatchNorm2d(channels), nn.ReLU(), pooled_head(channels, 50))


def _convnext() -> nn.Module:
    """ConvNeXt of three stages, its widths from 40 to 160."""
    layers: list[nn.Module] = [nn.Conv2d(3, 40, 4, stride=4), _ChannelNorm(40), _ConvNext(40)]
    for before, after in pairwise((40, 80, 160)):
        layers += [_ChannelNorm(before), nn.Conv2d(before, after, 2, stride=2), _ConvNext(after), _ConvNext(after)]
    return nn.Sequential(*layers, pooled_head(160, 50))


def _vision_transformer() -> nn.Module:
    """ViT with a class token, 3 layers of width 160."""
    layers = [transformer_layer(160, 5) for _ in range(3)]
    return nn.Sequential(_ClassToken(160, 8, 64), *layers, _First(), norm_head(160, 50))


def _mixer() -> nn.Module:
    """MLP-Mixer, 4 layers of width 128."""
    layers = [nn.Sequential(MixedTokens(128, 36, 64), feed_forward(128, 512)) for _ in range(4)]
    return nn.Sequential(Patches(3, 128, 8), *layers, Mean(), norm_head(128, 50))


def _shuffle() -> nn.Module:
    """The first ShuffleNet: grouped pointwise convolutions, channels dealt out between them."""
    layers: list[nn.Module] = [conv(3, 24, 3, stride=2), nn.MaxPool2d(3, 2, 1), conv(24, 60, 1)]
    for before, after in ((60, 120), (120, 240)):
        layers += [_Dealt(before, after - before, 3, stride=2), _Dealt(after, after, 3), _Dealt(after, after, 3)]
    return nn.Sequential(*layers, pooled_head(240, 50))


def _speech() -> nn.Module:
    """Three convolutions over a wave, then 2 transformer layers of width 128."""
    front: list[nn.Module] = [nn.Unflatten(1, (1, 3200))]
    for before, after, kernel, stride in ((1, 64, 10, 5), (64, 64, 8, 4), (64, 128, 4, 2)):
        front += [nn.Conv1d(before, after, kernel, stride), nn.GELU()]
    layers = [transformer_layer(128, 4), transformer_layer(128, 4)]
    return nn.Sequential(*front, _Turned(), *layers, Mean(), norm_head(128, 30))


def _standardised() -> nn.Module:
    """Standardised weights and group normalisation, as BiT has them."""
    layers: list[nn.Module] = [StandardConv(3, 40, 3, stride=2, padding=1)]
    for before, after, stride in ((40, 40, 1), (40, 80, 2), (80, 80, 1), (80, 160, 2)):
        layers.append(_Standardised(before, after, stride))
    return nn.Sequential(*layers, pooled_head(160, 50))


class _SelfAttention(nn.Module):
    """Attention with a projection each for queries, keys and values; causal where positions are rotary."""

    def __init__(self, width: int, heads: int, rotary: int = 0) -> None:
        super().__init__()
        self.heads, self.causal, self.size = heads, rotary > 0, width // heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        speeds = 10000.0 ** -(torch.arange(0, self.size, 2) / self.size)
        angles = torch.outer(torch.arange(rotary), speeds).repeat(1, 2)
        self.turns = nn.Buffer(torch.stack([angles.cos(), angles.sin()]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        split = (*x.shape[:2], self.heads, self.size)
        query, key, value = (part(x).view(split).transpose(1, 2) for part in (self.query, self.key, self.value))
        if self.causal:
            query, key = self._turned(query), self._turned(key)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(x.shape))
        return out

    def _turned(self, x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        return x * self.turns[0] + torch.cat([-high, low], -1) * self.turns[1]


class _Joined(nn.Module):
    """A layer whose result is added to its input, and the sum normalised."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.layer, self.norm = layer, nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x + self.layer(x))
        return out


class _GatedHidden(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class _Bottleneck(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        narrow = after // 4
        last = conv(narrow, after, 1, activation=nn.Identity)
        self.body = nn.Sequential(conv(before, narrow, 1), conv(narrow, narrow, 3, stride), last)
        same = stride == 1 and before == after
        self.shortcut: nn.Module = nn.Identity() if same else conv(before, after, 1, stride, activation=nn.Identity)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class _Gate(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, channels // 4, 1), nn.Conv2d(channels // 4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * F.hardsigmoid(self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1)))))


class _Grown(nn.Module):
    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        thin, wide = nn.Conv2d(channels, 4 * growth, 1, bias=False), nn.Conv2d(4 * growth, growth, 3, padding=1)
        self.body = nn.Sequential(
            nn.BatchNorm2d(channels), nn.ReLU(), thin, nn.BatchNorm2d(4 * growth), nn.ReLU(), wide
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], 1)


class _ChannelNorm(nn.LayerNorm):
    """Layer normalisation along the channels of a map."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class _ConvNext(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.mix = nn.LayerNorm(width), mlp(width, 4 * width, width, activation=nn.GELU)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.mix(self.norm(self.depthwise(x).permute(0, 2, 3, 1)))
        scaled: Tensor = self.scale * inner
        return x + scaled.permute(0, 3, 1, 2)


class _ClassToken(nn.Module):
    def __init__(self, width: int, side: int, patches: int) -> None:
        super().__init__()
        self.cut = Patches(3, width, side)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, patches + 1, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.token.expand(x.shape[0], -1, -1), self.cut(x)], 1) + self.positions


class _First(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]


class _Turned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class _Dealt(nn.Module):
    """The first ShuffleNet's block; one with a stride puts its result behind its input in place of adding it."""

    def __init__(self, before: int, after: int, groups: int, stride: int = 1) -> None:
        super().__init__()
        self.groups, self.stride, narrow = groups, stride, after // 4 // groups * groups or groups
        self.enter = conv(before, narrow, 1, groups=groups)
        self.thin = conv(narrow, narrow, 3, stride, groups=narrow, activation=nn.Identity)
        self.leave = conv(narrow, after, 1, groups=groups, activation=nn.Identity)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.leave(self.thin(shuffled(self.enter(x), self.groups)))
        if self.stride > 1:
            return F.relu(torch.cat([F.avg_pool2d(x, 3, self.stride, 1), inner], 1))
        return F.relu(x + inner)


class _Standardised(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.norm, self.again = nn.GroupNorm(8, before), nn.GroupNorm(8, after)
        self.first, self.second = StandardConv(before, after, 3, stride, 1), StandardConv(after, after, 3, 1, 1)
        same = stride == 1 and before == after
        self.shortcut = nn.Identity() if same else StandardConv(before, after, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.shortcut(x) + self.second(F.relu(self.again(self.first(F.relu(self.norm(x))))))
        return out
