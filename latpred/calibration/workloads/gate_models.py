"""Networks in plain torch that the gate times whole, and some of the suites' own.

First come layers, which the networks of the suite "everyday" share (`everyday_models`). Generated networks have blocks
of their own (`blocks`), so that what is judged shares no code with what is fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise, starmap

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Activation = Callable[[], nn.Module]
VOCABULARY = 4096
GATE_VOCABULARY = 2048

# -- layers ----------------------------------------------------------------------------------------------------------


def mlp(*widths: int, activation: Activation = nn.ReLU) -> nn.Sequential:
    """Linear layers with an activation between every two."""
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), activation()]
    return nn.Sequential(*layers[:-1])


def conv(
    before: int,
    after: int,
    kernel: int,
    stride: int = 1,
    groups: int = 1,
    activation: Activation = nn.ReLU,
    dilation: int = 1,
) -> nn.Sequential:
    padding = dilation * (kernel // 2)
    convolution = nn.Conv2d(before, after, kernel, stride, padding, dilation, groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(after), activation())


def basic(before: int, after: int, stride: int = 1) -> nn.Module:
    """ResNet's block of two convolutions."""
    body = nn.Sequential(conv(before, after, 3, stride), conv(after, after, 3, activation=nn.Identity))
    return ResidualSum(body, before, after, stride)


def bottleneck(before: int, after: int, stride: int, middle: nn.Module | None = None) -> nn.Module:
    """ResNet's block of three convolutions, or with something else in the place of the middle one."""
    narrow = after // 4
    middle = conv(narrow, narrow, 3, stride) if middle is None else middle
    body = nn.Sequential(conv(before, narrow, 1), middle, conv(narrow, after, 1, activation=nn.Identity))
    return ResidualSum(body, before, after, stride)


def inverted(before: int, after: int, stride: int, *extra: nn.Module, activation: Activation) -> nn.Module:
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
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))


def pooled_head(channels: int, classes: int) -> nn.Sequential:
    """The mean of every channel and a classifier."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def feed_forward(width: int, hidden: int) -> nn.Module:
    """The feed-forward half of a transformer's layer, normalised first."""
    return Residual(nn.LayerNorm(width), nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


def attended(width: int, heads: int) -> nn.Module:
    """The attention half of a transformer's layer, normalised first."""
    return Residual(nn.LayerNorm(width), _Attention(width, heads))


def transformer_layer(width: int, heads: int) -> nn.Sequential:
    """A transformer's layer, normalised first."""
    return nn.Sequential(attended(width, heads), feed_forward(width, 4 * width))


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
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class _Attention(nn.Module):
    """Self-attention with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Patches(nn.Module):
    """An image cut into patches, which become tokens."""

    def __init__(self, width: int, side: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, side, side)

    def forward(self, x: Tensor) -> Tensor:
        return self.cut(x).flatten(2).transpose(1, 2)


class PlacedWords(nn.Module):
    """The sum of embeddings of words and of their places."""

    def __init__(self, vocabulary: int, length: int, width: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))


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


# -- perceptrons and recurrent networks -------------------------------------------------------------------------------


def perceptron(widths: Sequence[int], activation: str = "ReLU") -> nn.Module:
    """An MLP of these widths; "Sine" is an activation too, as SIREN has it."""
    return mlp(*widths, activation=_Sine if activation == "Sine" else getattr(nn, activation))


def recurrent(
    cell: str, inputs: int, hidden: int, outputs: int, head: str, *, words: int = 0, layers: int = 1, both: bool = False
) -> nn.Module:
    """A recurrent network over series or words, in one direction or `both`, and a linear head.

    The head reads each state, the last one, their mean, or all of them weighed by additive attention.
    """
    rnn = getattr(nn, cell)(inputs, hidden, layers, batch_first=True, bidirectional=both)
    width = 2 * hidden if both else hidden
    heads: dict[str, list[nn.Module]] = {"each": [], "last": [Take(-1)], "mean": [Mean()], "weighed": [_Weighed(width)]}
    first = [nn.Embedding(words, inputs)] if words else []
    return nn.Sequential(*first, States(rnn), *heads[head], nn.Linear(width, outputs))


class LstmTagger(nn.Module):
    """A tagger of words: an embedding, two layers of LSTM in both directions, a classifier for each word."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 256)
        self.lstm = nn.LSTM(256, 256, num_layers=2, bidirectional=True, batch_first=True)
        self.classifier = nn.Linear(512, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.classifier(self.lstm(self.embedding(tokens))[0])


def gate_speech() -> nn.Module:
    """Three convolutions over a wave, then 2 transformer layers of width 128."""
    front: list[nn.Module] = [nn.Unflatten(1, (1, 3200))]
    for before, after, kernel, stride in ((1, 64, 10, 5), (64, 64, 8, 4), (64, 128, 4, 2)):
        front += [nn.Conv1d(before, after, kernel, stride), nn.GELU()]
    layers = [transformer_layer(128, 4), transformer_layer(128, 4)]
    return nn.Sequential(*front, Transposed(), *layers, Mean(), norm_head(128, 30))


# -- words -----------------------------------------------------------------------------------------------------------


def gate_encoder() -> nn.Module:
    """An encoder normalised behind its sums, as BERT is: 3 layers of width 192."""
    layers = [
        nn.Sequential(_Joined(_SelfAttention(192, 3), 192), _Joined(mlp(192, 768, 192, activation=nn.GELU), 192))
        for _ in range(3)
    ]
    words = PlacedWords(GATE_VOCABULARY, 20, 192)
    return nn.Sequential(words, nn.LayerNorm(192), *layers, Take(-1), mlp(192, 192, 4))


def gate_decoder() -> nn.Module:
    """A decoder with rotary positions, RMS norms and gated feed-forward: 2 layers of width 256."""
    layers: list[nn.Module] = []
    for _ in range(2):
        attention = Residual(nn.RMSNorm(256), _SelfAttention(256, 4, rotary=28))
        layers += [attention, Residual(nn.RMSNorm(256), _GatedHidden(256, 688))]
    words, scores = nn.Embedding(GATE_VOCABULARY, 256), nn.Linear(256, GATE_VOCABULARY)
    return nn.Sequential(words, *layers, nn.RMSNorm(256), scores)


def convnext() -> nn.Module:
    """ConvNeXt of three stages, its widths from 40 to 160."""
    layers: list[nn.Module] = [nn.Conv2d(3, 40, 4, stride=4), ChannelNorm(40), _ConvNext(40)]
    for before, after in pairwise((40, 80, 160)):
        layers += [ChannelNorm(before), nn.Conv2d(before, after, 2, stride=2), _ConvNext(after), _ConvNext(after)]
    return nn.Sequential(*layers, pooled_head(160, 50))


# -- residual networks -----------------------------------------------------------------------------------------------


def small_resnet() -> nn.Module:
    """ResNet of basic blocks, its widths from 24 to 96."""
    steps = ((24, 24, 1), (24, 24, 1), (24, 48, 2), (48, 48, 1), (48, 96, 2), (96, 96, 1))
    return nn.Sequential(conv(3, 24, 7, stride=2), nn.MaxPool2d(3, 2, 1), *starmap(basic, steps), pooled_head(96, 50))


def bottleneck_resnet() -> nn.Module:
    """ResNet of bottlenecks, its widths from 64 to 256."""
    steps = ((32, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1))
    return nn.Sequential(conv(3, 32, 3, stride=2), *starmap(bottleneck, steps), pooled_head(256, 50))


def standardised() -> nn.Module:
    """Standardised weights and group normalisation, as BiT has them."""
    steps = ((40, 40, 1), (40, 80, 2), (80, 80, 1), (80, 160, 2))
    stem, blocks = _StandardConv(3, 40, 3, stride=2, padding=1), starmap(_Standardised, steps)
    return nn.Sequential(stem, *blocks, pooled_head(160, 50))


# -- mobile networks -------------------------------------------------------------------------------------------------


def gated_mobilenet() -> nn.Module:
    """Inverted residuals with gated channels, as MobileNetV3 has them."""
    layers: list[nn.Module] = [conv(3, 16, 3, stride=2, activation=nn.Hardswish)]
    for before, after, stride in ((16, 24, 2), (24, 24, 1), (24, 40, 2), (40, 40, 1), (40, 80, 2), (80, 80, 1)):
        gate = (_GatedChannels(4 * before),) if after >= 40 else ()
        layers.append(inverted(before, after, stride, *gate, activation=nn.Hardswish))
    return nn.Sequential(*layers, conv(80, 320, 1, activation=nn.Hardswish), pooled_head(320, 50))


def small_shufflenet_v1() -> nn.Module:
    """The first ShuffleNet: grouped pointwise convolutions, channels dealt out between them."""
    layers: list[nn.Module] = [conv(3, 24, 3, stride=2), nn.MaxPool2d(3, 2, 1), conv(24, 60, 1)]
    for before, after in ((60, 120), (120, 240)):
        layers.append(_GroupShuffled(before, after - before, (after - before) // 4, 2))
        layers += [_GroupShuffled(after, after, after // 4, 1) for _ in range(2)]
    return nn.Sequential(*layers, pooled_head(240, 50))


def small_densenet() -> nn.Module:
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


# -- patches ---------------------------------------------------------------------------------------------------------


def vision_transformer() -> nn.Module:
    """ViT with a class token, 3 layers of width 160."""
    layers = [transformer_layer(160, 5) for _ in range(3)]
    return nn.Sequential(_ClassToken(160, 8, 64), *layers, Take(0), norm_head(160, 50))


def mixer(width: int, tokens: int, along: int, layers: int, classes: int) -> nn.Module:
    """MLP-Mixer over patches of 8 x 8, whose hidden layer along the tokens has the width `along`."""
    blocks = [nn.Sequential(_MixedTokens(width, tokens, along), feed_forward(width, 4 * width)) for _ in range(layers)]
    return nn.Sequential(Patches(width, 8), *blocks, Mean(), norm_head(width, classes))


class UNet(nn.Module):
    """A U-Net of three depths that segments images: convolutions down, transposed ones up, joined at each depth."""

    def __init__(self) -> None:
        super().__init__()
        widths = (24, 48, 96, 192)
        steps = list(reversed(list(pairwise(widths))))
        self.down = nn.ModuleList(starmap(_pair, pairwise((3, *widths))))
        self.up = nn.ModuleList(_pair(2 * low, low) for low, _ in steps)
        self.grow = nn.ModuleList(nn.ConvTranspose2d(high, low, 2, stride=2) for low, high in steps)
        self.classes = nn.Conv2d(widths[0], 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        maps: list[Tensor] = []
        for block in self.down:
            maps.append(block(F.max_pool2d(maps[-1], 2) if maps else x))
        x = maps.pop()
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat([maps.pop(), grow(x)], 1))
        return self.classes(x)


# -- their blocks ----------------------------------------------------------------------------------------------------


class _ClassToken(nn.Module):
    """An image cut into patches behind a learned token."""

    def __init__(self, width: int, side: int, patches: int) -> None:
        super().__init__()
        self.cut = Patches(width, side)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, patches + 1, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.token.expand(x.shape[0], -1, -1), self.cut(x)], 1) + self.positions


class _MixedTokens(nn.Module):
    """The half of an MLP-Mixer's layer that mixes tokens, normalised first."""

    def __init__(self, width: int, tokens: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), mlp(tokens, hidden, tokens, activation=nn.GELU)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(self.norm(x).transpose(1, 2)).transpose(1, 2)


class _StandardConv(nn.Conv2d):
    """A convolution whose weights are standardised in every forward pass, as timm does it."""

    def __init__(self, before: int, after: int, kernel: int, stride: int = 1, padding: int = 0):
        super().__init__(before, after, kernel, stride, padding)
        self.gain = nn.Parameter(torch.ones(after))
        self.scale = self.weight[0].numel() ** -0.5

    def forward(self, input: Tensor) -> Tensor:
        rows = self.weight.reshape(1, self.out_channels, -1)
        gain = self.gain * self.scale
        weight = F.batch_norm(rows, None, None, weight=gain, training=True, momentum=0.0, eps=1e-6)
        standard = weight.reshape_as(self.weight)
        return F.conv2d(input, standard, self.bias, self.stride, self.padding, self.dilation, self.groups)


class _GatedChannels(nn.Module):
    """Squeeze and excitation as MobileNetV3 has it, in functions and with a hard sigmoid."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, channels // 4, 1), nn.Conv2d(channels // 4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * F.hardsigmoid(self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1)))))


class _Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(30 * x)


class _Weighed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.score = mlp(width, width, 1, activation=nn.Tanh)

    def forward(self, states: Tensor) -> Tensor:
        weights = self.score(states).softmax(1)
        return (weights * states).sum(1)


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
        return self.out(mixed.transpose(1, 2).reshape(x.shape))

    def _turned(self, x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        return x * self.turns[0] + torch.cat([-high, low], -1) * self.turns[1]


class _Joined(nn.Module):
    """A layer whose result is added to its input, and the sum normalised."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.layer, self.norm = layer, nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.layer(x))


class _GatedHidden(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class _Standardised(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.norm, self.again = nn.GroupNorm(8, before), nn.GroupNorm(8, after)
        self.first, self.second = _StandardConv(before, after, 3, stride, 1), _StandardConv(after, after, 3, 1, 1)
        same = stride == 1 and before == after
        self.shortcut = nn.Identity() if same else _StandardConv(before, after, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.second(F.relu(self.again(self.first(F.relu(self.norm(x))))))


class _GroupShuffled(nn.Module):
    """The first ShuffleNet's block; one with a stride puts its result behind its input in place of adding it."""

    def __init__(self, before: int, new: int, middle: int, stride: int) -> None:
        super().__init__()
        narrow, self.stride = middle // 3 * 3, stride
        self.enter = conv(before, narrow, 1, groups=3)
        self.thin = conv(narrow, narrow, 3, stride, groups=narrow, activation=nn.Identity)
        self.leave = conv(narrow, new, 1, groups=3, activation=nn.Identity)

    def forward(self, x: Tensor) -> Tensor:
        out = self.leave(self.thin(_shuffled(self.enter(x), 3)))
        return F.relu(torch.cat([F.avg_pool2d(x, 3, 2, 1), out], 1) if self.stride > 1 else x + out)


def _shuffled(x: Tensor, groups: int) -> Tensor:
    """The channels dealt out again among groups."""
    batch, channels, height, width = x.shape
    grouped = x.view(batch, groups, channels // groups, height, width)
    return grouped.transpose(1, 2).reshape(batch, channels, height, width)


class _Grown(nn.Module):
    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        thin, wide = nn.Conv2d(channels, 4 * growth, 1, bias=False), nn.Conv2d(4 * growth, growth, 3, padding=1)
        norms = nn.BatchNorm2d(channels), nn.BatchNorm2d(4 * growth)
        self.body = nn.Sequential(norms[0], nn.ReLU(), thin, norms[1], nn.ReLU(), wide)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], 1)


class _ConvNext(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.mix = nn.LayerNorm(width), mlp(width, 4 * width, width, activation=nn.GELU)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.mix(self.norm(self.depthwise(x).permute(0, 2, 3, 1)))
        return x + (self.scale * inner).permute(0, 3, 1, 2)


def _pair(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(*conv(before, after, 3), *conv(after, after, 3))
