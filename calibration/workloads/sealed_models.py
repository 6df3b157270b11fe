"""The models of the CPU suite "sealed": everyday networks in plain torch that no choice has seen.

It takes the place that "ordinary" had until its errors were looked at. Nobody times one of these, or holds a prediction
against a measurement of one, before the validation that ends a release. Random weights, nothing downloaded.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from latpred.calibration.workloads.everyday_layers import (
    Basic,
    Last,
    Mean,
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
from latpred.calibration.workloads.published_models import VOCABULARY


def policy() -> nn.Module:
    """A policy of reinforcement learning: 48 observations, two hidden layers, 8 actions."""
    return mlp(48, 256, 256, 8, activation=nn.Tanh)


def compressor() -> nn.Module:
    """An autoencoder of 256 sensors down to 16 numbers and up again."""
    return mlp(256, 128, 64, 16, 64, 128, 256, activation=nn.ELU)


def highway() -> nn.Module:
    """Eight highway layers of width 128 over the columns of a table."""
    return nn.Sequential(nn.Linear(64, 128), *(_Highway(128) for _ in range(8)), nn.Linear(128, 3))


def coordinates() -> nn.Module:
    """SIREN: five layers with sines that give a colour for each of 256 points."""
    return mlp(2, 192, 192, 192, 192, 3, activation=_Sine)


def wide_and_deep() -> nn.Module:
    """Wide & Deep: a linear part over twelve ids, and an MLP over their embeddings."""
    return _WideAndDeep(fields=12, width=24)


def lstm_forecaster() -> nn.Module:
    """Two stacked layers of LSTM over twelve series, which give their next values."""
    return nn.Sequential(States(nn.LSTM(12, 96, num_layers=2, batch_first=True)), Last(), nn.Linear(96, 12))


def bilstm_tagger() -> nn.Module:
    """An LSTM in both directions with a class for every word."""
    rnn = nn.LSTM(64, 112, batch_first=True, bidirectional=True)
    return nn.Sequential(nn.Embedding(VOCABULARY, 64), States(rnn), nn.Linear(224, 18))


def gru_classifier() -> nn.Module:
    """A GRU over words, judged by the mean of its states."""
    rnn = nn.GRU(80, 160, batch_first=True)
    return nn.Sequential(nn.Embedding(VOCABULARY, 80), States(rnn), Mean(), nn.Linear(160, 6))


def line_reader() -> nn.Module:
    """CRNN: convolutions over the image of a line of text, an LSTM in both directions, a class for each column."""
    maps = [conv(1, 32, 3), nn.MaxPool2d(2), conv(32, 64, 3), nn.MaxPool2d(2), conv(64, 96, 3), nn.MaxPool2d((2, 1))]
    states = States(nn.LSTM(4 * 96, 96, batch_first=True, bidirectional=True))
    return nn.Sequential(*maps, nn.Flatten(1, 2), _Transposed(), states, nn.Linear(192, 40))


def text_convolution() -> nn.Module:
    """Kim's CNN: convolutions of three widths over words, the maximum of each over time."""
    return _TextConvolution(width=96, maps=64)


def wavenet() -> nn.Module:
    """WaveNet: eight gated causal convolutions of 32 channels, each dilated twice as far as the one before."""
    return _WaveNet(channels=32, levels=8)


def raw_audio() -> nn.Module:
    """M5: convolutions over the wave itself, pooled by four after each."""
    layers: list[nn.Module] = [nn.Conv1d(1, 64, 80, stride=4), nn.BatchNorm1d(64), nn.ReLU(), nn.MaxPool1d(4)]
    for before, after in pairwise((64, 64, 128, 256)):
        layers += [nn.Conv1d(before, after, 3), nn.BatchNorm1d(after), nn.ReLU(), nn.MaxPool1d(4)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(256, 35))


def sound_events() -> nn.Module:
    """Convolutions in pairs over a spectrogram, in the manner of VGG, and a class for the whole."""
    layers: list[nn.Module] = []
    for before, after in pairwise((1, 24, 48, 96)):
        layers += [conv(before, after, 3), conv(after, after, 3), nn.AvgPool2d(2)]
    return nn.Sequential(*layers, pooled_head(96, 50))


def shufflenet_v1() -> nn.Module:
    """ShuffleNet of the first version with three groups."""
    layers: list[nn.Module] = [conv(3, 24, 3, stride=2), nn.MaxPool2d(3, 2, 1)]
    for (before, after), depth in zip(pairwise((24, 120, 240)), (4, 6), strict=True):
        layers += [_ShuffledGroups(before, after, 2), *(_ShuffledGroups(after, after, 1) for _ in range(depth - 1))]
    return nn.Sequential(*layers, pooled_head(240, 100))


def mobilenet_half() -> nn.Module:
    """MobileNetV2's blocks at half their width, with ReLU6."""
    layers: list[nn.Module] = [conv(3, 16, 3, stride=2, activation=nn.ReLU6)]
    steps = ((16, 16, 1), (16, 16, 2), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 48, 2), (48, 48, 1), (48, 80, 1))
    layers += [inverted(before, after, stride, activation=nn.ReLU6) for before, after, stride in steps]
    return nn.Sequential(*layers, conv(80, 320, 1, activation=nn.ReLU6), pooled_head(320, 100))


def squeezed_resnet() -> nn.Module:
    """A residual network of 48 pixels whose blocks weigh their channels (squeeze and excitation)."""
    layers: list[nn.Module] = [conv(3, 32, 3)]
    for before, after, stride in ((32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)):
        layers += [Basic(before, after, stride), _Squeezed(after, after // 8)]
    return nn.Sequential(*layers, pooled_head(128, 20))


def preactivated() -> nn.Module:
    """A residual network of 32 pixels that normalises before every convolution."""
    layers: list[nn.Module] = [nn.Conv2d(3, 24, 3, padding=1, bias=False)]
    for before, after, stride in ((24, 24, 1), (24, 24, 1), (24, 48, 2), (48, 48, 1), (48, 96, 2), (96, 96, 1)):
        layers.append(_Preactivated(before, after, stride))
    return nn.Sequential(*layers, nn.BatchNorm2d(96), nn.ReLU(), pooled_head(96, 10))


def densely_joined() -> nn.Module:
    """DenseNet with a growth of 12: two dense blocks of six layers over 32 pixels."""
    first = [_DenseLayer(24 + 12 * index, 12) for index in range(6)]
    second = [_DenseLayer(48 + 12 * index, 12) for index in range(6)]
    stem, between = nn.Conv2d(3, 24, 3, padding=1, bias=False), [conv(96, 48, 1), nn.AvgPool2d(2)]
    return nn.Sequential(stem, *first, *between, *second, nn.BatchNorm2d(120), nn.ReLU(), pooled_head(120, 10))


def convmixer() -> nn.Module:
    """ConvMixer: depthwise convolutions of 7 x 7 and pointwise ones over patches, six times."""
    layers: list[nn.Module] = [nn.Conv2d(3, 128, 4, 4), nn.GELU(), nn.BatchNorm2d(128)]
    for _ in range(6):
        depthwise = nn.Sequential(nn.Conv2d(128, 128, 7, padding=3, groups=128), nn.GELU(), nn.BatchNorm2d(128))
        layers += [Residual(depthwise), nn.Conv2d(128, 128, 1), nn.GELU(), nn.BatchNorm2d(128)]
    return nn.Sequential(*layers, pooled_head(128, 10))


def res_mlp() -> nn.Module:
    """ResMLP: six layers of width 160 over 49 patches, scaled and shifted in place of normalisation."""
    layers = [nn.Sequential(_Along(160, 49), _ScaledForward(160, 640)) for _ in range(6)]
    return nn.Sequential(Patches(3, 160, 16), *layers, _Shifted(160), Mean(), nn.Linear(160, 100))


def normalizer_free_bottlenecks() -> nn.Module:
    """A normaliser-free network of bottlenecks, whose weights are standardised in every forward pass."""
    layers: list[nn.Module] = [StandardConv(3, 24, 3, stride=2, padding=1), nn.SiLU()]
    for before, after, stride in ((24, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2)):
        layers.append(_FreeBottleneck(before, after, stride))
    return nn.Sequential(*layers, nn.SiLU(), pooled_head(256, 50))


def hybrid_160() -> nn.Module:
    """A hybrid for 160 pixels: inverted residuals with squeezed channels, then attention on 10 x 10."""
    layers: list[nn.Module] = [conv(3, 24, 3, stride=2, activation=nn.Hardswish)]
    for before, after, stride in ((24, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1)):
        wide = 4 * before
        layers.append(inverted(before, after, stride, _Squeezed(wide, before), activation=nn.Hardswish))
    tokens = [Patches(64, 128, 2, tokens=100), *(transformer_layer(128, 4) for _ in range(3))]
    return nn.Sequential(*layers, *tokens, Mean(), norm_head(128, 100))


def compact_transformer() -> nn.Module:
    """CCT: a convolutional stem, four layers of attention over 64 tokens, which are pooled by a learned weight."""
    stem = [
        nn.Conv2d(3, 96, 3, padding=1, bias=False),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        conv(96, 96, 3),
        nn.MaxPool2d(2),
    ]
    layers = [transformer_layer(96, 3) for _ in range(4)]
    return nn.Sequential(
        *stem, Patches(96, 96, 1, tokens=64), *layers, nn.LayerNorm(96), _Pooled(96), nn.Linear(96, 10)
    )


def linknet() -> nn.Module:
    """LinkNet: a residual encoder of three depths, whose maps are added on the way up."""
    return _LinkNet((24, 48, 96))


def residual_super_resolution() -> nn.Module:
    """SRResNet with four blocks: from 32 pixels to 64."""
    blocks = [Residual(conv(48, 48, 3, activation=nn.PReLU), conv(48, 48, 3, activation=nn.Identity)) for _ in range(4)]
    ends = [nn.Conv2d(48, 192, 3, padding=1), nn.PixelShuffle(2), nn.PReLU(), nn.Conv2d(48, 3, 9, padding=4)]
    return nn.Sequential(nn.Conv2d(3, 48, 9, padding=4), nn.PReLU(), Residual(*blocks), *ends)


def translator() -> nn.Module:
    """The transformer of torch itself, two layers on each side, which reads 20 words and writes 20."""
    return _Translator(128)


def set_attention() -> nn.Module:
    """Elements of a set that attend to each other twice, and one learned query that attends to all."""
    return _SetAttention(features=10, width=96)


def graph_convolution() -> nn.Module:
    """Three graph convolutions over 24 nodes with one dense adjacency, and the mean of the nodes."""
    return _GraphConvolution(nodes=24, widths=(16, 96, 96, 96))


class _Highway(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.new = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(x))
        return gate * F.relu(self.new(x)) + (1 - gate) * x


class _Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(30 * x)


class _WideAndDeep(nn.Module):
    def __init__(self, fields: int, width: int) -> None:
        super().__init__()
        self.wide, self.embedding = nn.Embedding(VOCABULARY, 1), nn.Embedding(VOCABULARY, width)
        self.deep = mlp(fields * width, 384, 192, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.sigmoid(self.wide(ids).sum(1) + self.deep(self.embedding(ids).flatten(1)))


class _Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class _TextConvolution(nn.Module):
    def __init__(self, width: int, maps: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.convolutions = nn.ModuleList(nn.Conv1d(width, maps, kernel) for kernel in (3, 4, 5))
        self.classes = nn.Sequential(nn.Dropout(), nn.Linear(3 * maps, 4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids).transpose(1, 2)
        best = [F.relu(convolution(x)).max(2).values for convolution in self.convolutions]
        out: Tensor = self.classes(torch.cat(best, 1))
        return out


class _WaveNet(nn.Module):
    def __init__(self, channels: int, levels: int) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, channels, 1)
        self.gated = nn.ModuleList(nn.Conv1d(channels, 2 * channels, 2, dilation=2**level) for level in range(levels))
        self.mixed = nn.ModuleList(nn.Conv1d(channels, channels, 1) for _ in range(levels))
        self.last = nn.Sequential(nn.ReLU(), nn.Conv1d(channels, 64, 1), nn.ReLU(), nn.Conv1d(64, 64, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        skipped = torch.zeros_like(x)
        for level, (gated, mixed) in enumerate(zip(self.gated, self.mixed, strict=True)):
            signal, gate = gated(F.pad(x, (2**level, 0))).chunk(2, 1)
            out = mixed(torch.tanh(signal) * torch.sigmoid(gate))
            x, skipped = x + out, skipped + out
        scores: Tensor = self.last(skipped)
        return scores


class _ShuffledGroups(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        new, middle = after - before if stride > 1 else after, after // 4 // 3 * 3
        self.squeeze = conv(before, middle, 1, groups=3)
        self.across = conv(middle, middle, 3, stride, groups=middle, activation=nn.Identity)
        self.expand = conv(middle, new, 1, groups=3, activation=nn.Identity)
        self.joined = stride > 1

    def forward(self, x: Tensor) -> Tensor:
        out = self.expand(self.across(shuffled(self.squeeze(x), 3)))
        return F.relu(torch.cat([F.avg_pool2d(x, 3, 2, 1), out], 1) if self.joined else x + out)


class _Squeezed(nn.Module):
    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.weigh = nn.Sequential(nn.Conv2d(channels, squeezed, 1), nn.ReLU(), nn.Conv2d(squeezed, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.weigh(x.mean((2, 3), keepdim=True)))


class _Preactivated(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList((nn.BatchNorm2d(before), nn.BatchNorm2d(after)))
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.shortcut = nn.Identity() if before == after else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        ready = F.relu(self.norms[0](x))
        out: Tensor = self.second(F.relu(self.norms[1](self.first(ready)))) + self.shortcut(x)
        return out


class _DenseLayer(nn.Module):
    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(channels), nn.Conv2d(channels, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv(F.relu(self.norm(x)))], 1)


class _Shifted(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


class _Along(nn.Module):
    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        self.before, self.mix, self.after = _Shifted(width), nn.Linear(tokens, tokens), _Shifted(width)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.after(self.mix(self.before(x).transpose(1, 2)).transpose(1, 2))
        return x + mixed


class _ScaledForward(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.before, self.inner, self.after = (
            _Shifted(width),
            mlp(width, hidden, width, activation=nn.GELU),
            _Shifted(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.after(self.inner(self.before(x)))
        return out


class _FreeBottleneck(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        middle = after // 4
        self.inner = nn.ModuleList(
            (
                StandardConv(before, middle, 1),
                StandardConv(middle, middle, 3, stride, 1),
                StandardConv(middle, middle, 3, 1, 1),
                StandardConv(middle, after, 1),
            )
        )
        self.shortcut = nn.Identity() if before == after else StandardConv(before, after, 1)
        self.pool = nn.Identity() if stride == 1 else nn.AvgPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(x)
        out = x
        for layer in self.inner[:-1]:
            out = F.silu(layer(out))
        made: Tensor = self.shortcut(self.pool(x)) + 0.2 * self.inner[-1](out)
        return made


class _Pooled(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weigh = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(self.weigh(x).softmax(1).transpose(1, 2), x).squeeze(1)


class _LinkNet(nn.Module):
    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        steps = list(pairwise(widths))
        self.first = conv(3, widths[0], 7, stride=2)
        self.down = nn.ModuleList(nn.Sequential(Basic(low, high, 2), Basic(high, high, 1)) for low, high in steps)
        self.up = nn.ModuleList(self._raised(high, low) for low, high in reversed(steps))
        self.classes = nn.ConvTranspose2d(widths[0], 5, 2, stride=2)

    @staticmethod
    def _raised(high: int, low: int) -> nn.Module:
        thin = high // 4
        grown = [nn.ConvTranspose2d(thin, thin, 3, 2, 1, output_padding=1, bias=False), nn.BatchNorm2d(thin), nn.ReLU()]
        return nn.Sequential(conv(high, thin, 1), *grown, conv(thin, low, 1))

    def forward(self, x: Tensor) -> Tensor:
        maps = [self.first(x)]
        for block in self.down:
            maps.append(block(maps[-1]))
        x = maps.pop()
        for block in self.up:
            x = block(x) + maps.pop()
        out: Tensor = self.classes(x)
        return out


class _Translator(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.read, self.write = PlacedWords(VOCABULARY, 20, width), PlacedWords(VOCABULARY, 20, width)
        self.transformer = nn.Transformer(width, 4, 2, 2, 4 * width, batch_first=True)
        self.scores = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.scores(self.transformer(self.read(ids), self.write(ids)))
        return out


class _SetAttention(nn.Module):
    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(features, width)
        self.attention = nn.ModuleList(nn.MultiheadAttention(width, 4, batch_first=True) for _ in range(3))
        self.forwards = nn.ModuleList(feed_forward(width, 2 * width) for _ in range(2))
        self.query, self.last = nn.Parameter(torch.randn(1, 1, width)), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for attention, forward in zip(self.attention, self.forwards, strict=False):
            x = forward(x + attention(x, x, x, need_weights=False)[0])
        query = self.query.expand(x.shape[0], -1, -1)
        out: Tensor = self.last(self.attention[2](query, x, x, need_weights=False)[0][:, 0])
        return out


class _GraphConvolution(nn.Module):
    def __init__(self, nodes: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.adjacency = nn.Buffer(torch.rand(nodes, nodes).softmax(1), persistent=False)
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(widths))
        self.last = nn.Linear(widths[-1], 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(torch.matmul(self.adjacency, x)))
        out: Tensor = self.last(x.mean(1))
        return out
