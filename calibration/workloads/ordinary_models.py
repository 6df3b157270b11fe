"""The models of the CPU suite "ordinary": everyday networks in plain torch, many of them small.

Nothing was chosen by them. Nobody times one, or holds a prediction against a measurement of one, before the validation
that ends a release. Random weights, nothing downloaded. Which inputs they get is `suites`' business.
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
    MixedTokens,
    Patches,
    PlacedWords,
    Residual,
    StandardConv,
    States,
    conv,
    double,
    feed_forward,
    inverted,
    mlp,
    norm_head,
    pooled_head,
    shuffled,
    transformer_layer,
)
from latpred.calibration.workloads.published_models import VOCABULARY


def tabular_mlp() -> nn.Module:
    """A regression on 128 columns of a table."""
    return mlp(128, 512, 256, 128, 64, 1)


def deep_mlp() -> nn.Module:
    """Twenty narrow layers with tanh between them, as for a physical field."""
    return mlp(96, *(96,) * 20, activation=nn.Tanh)


def wide_mlp() -> nn.Module:
    """A classifier of flattened digits with batch normalisation and dropout."""
    layers: list[nn.Module] = []
    for before, after in pairwise((784, 2048, 1024)):
        layers += [nn.Linear(before, after), nn.BatchNorm1d(after), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(1024, 10))


def residual_mlp() -> nn.Module:
    """Six residual blocks of width 192 over a table, each normalised first."""
    return nn.Sequential(nn.Linear(40, 192), *(feed_forward(192, 384) for _ in range(6)), norm_head(192, 5))


def recommender() -> nn.Module:
    """DLRM: eight embedding bags and a dense part, whose products in pairs feed a second MLP."""
    return _Recommender(tables=8, width=16)


def click_predictor() -> nn.Module:
    """DeepFM: a factorisation machine and an MLP over ten shared embeddings."""
    return _ClickPredictor(fields=10, width=16)


def two_tower() -> nn.Module:
    """A user's features and history in one tower, an item in the other, and their cosine."""
    return _TwoTower(features=24, width=64)


def lenet() -> nn.Module:
    """LeNet-5 on a digit of 28 pixels."""
    maps = [nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2)]
    return nn.Sequential(*maps, nn.Flatten(), mlp(400, 120, 84, 10, activation=nn.Tanh))


def deep_sets() -> nn.Module:
    """Deep Sets: one MLP for every element, a sum, another MLP."""
    return nn.Sequential(mlp(8, 128, 128, 128), _Sum(), mlp(128, 64, 10))


def pointnet() -> nn.Module:
    """PointNet without its transforms: three pointwise convolutions, a maximum over points, an MLP."""
    layers: list[nn.Module] = []
    for before, after in pairwise((3, 64, 128, 512)):
        layers += [nn.Conv1d(before, after, 1), nn.BatchNorm1d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveMaxPool1d(1), nn.Flatten(), mlp(512, 128, 10))


def keyword_spotter() -> nn.Module:
    """DS-CNN as published for 12 spoken words: depthwise separable convolutions of 64 channels."""
    stem = [nn.Conv2d(1, 64, (10, 4), stride=2, padding=(5, 1), bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    blocks = [nn.Sequential(conv(64, 64, 3, groups=64), conv(64, 64, 1)) for _ in range(4)]
    return nn.Sequential(*stem, *blocks, pooled_head(64, 12))


def lstm_sentiment() -> nn.Module:
    """An LSTM over words, judged by its last state."""
    rnn = nn.LSTM(128, 128, batch_first=True)
    return nn.Sequential(nn.Embedding(VOCABULARY, 128), States(rnn), Last(), nn.Linear(128, 2))


def gru_forecaster() -> nn.Module:
    """Two stacked layers of GRU over seven series, which give their next values."""
    return nn.Sequential(States(nn.GRU(7, 64, num_layers=2, batch_first=True)), Last(), nn.Linear(64, 7))


def bigru_tagger() -> nn.Module:
    """A GRU in both directions with a class for every word."""
    rnn = nn.GRU(96, 96, batch_first=True, bidirectional=True)
    return nn.Sequential(nn.Embedding(VOCABULARY, 96), States(rnn), nn.Linear(192, 24))


def gru_attention() -> nn.Module:
    """A GRU whose states are weighed by additive attention."""
    rnn = nn.GRU(128, 128, batch_first=True)
    return nn.Sequential(nn.Embedding(VOCABULARY, 128), States(rnn), _Weighed(128), nn.Linear(128, 20))


def temporal_convolution() -> nn.Module:
    """TCN: six levels of causal convolutions, each dilated twice as far as the one before."""
    levels = [_Causal(8 if level == 0 else 48, 48, 2**level) for level in range(6)]
    return nn.Sequential(*levels, nn.Conv1d(48, 4, 1))


def shufflenet() -> nn.Module:
    """ShuffleNet V2 at half its width."""
    layers: list[nn.Module] = [conv(3, 24, 3, stride=2), nn.MaxPool2d(3, 2, 1)]
    for (before, after), depth in zip(pairwise((24, 48, 96, 192)), (4, 8, 4), strict=True):
        layers += [_Shuffled(before, after, 2), *(_Shuffled(after, after, 1) for _ in range(depth - 1))]
    return nn.Sequential(*layers, conv(192, 512, 1), pooled_head(512, 100))


def squeezenet() -> nn.Module:
    """SqueezeNet 1.1 with 100 classes."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, stride=2), nn.ReLU(inplace=True)]
    channels = 64
    for squeeze in (0, 16, 16, 0, 32, 32, 0, 48, 48, 64, 64):
        layers.append(_Fire(channels, squeeze, 4 * squeeze) if squeeze else nn.MaxPool2d(3, 2, ceil_mode=True))
        channels = 8 * squeeze or channels
    classes = [nn.Dropout(), nn.Conv2d(channels, 100, 1), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, *classes)


def mlp_mixer() -> nn.Module:
    """MLP-Mixer: 6 layers of width 192 over 64 patches."""
    layers = [nn.Sequential(MixedTokens(192, 64, 96), feed_forward(192, 768)) for _ in range(6)]
    return nn.Sequential(Patches(3, 192, 8), *layers, Mean(), norm_head(192, 100))


def gmlp() -> nn.Module:
    """gMLP: 4 layers of width 192 whose gates look along 48 tokens."""
    layers = [
        Residual(nn.LayerNorm(192), nn.Linear(192, 768), nn.GELU(), _SpatialGate(384, 48), nn.Linear(384, 192))
        for _ in range(4)
    ]
    return nn.Sequential(nn.Embedding(VOCABULARY, 192), *layers, Mean(), norm_head(192, 8))


def normalizer_free() -> nn.Module:
    """A normaliser-free residual network, whose weights are standardised in every forward pass."""
    layers: list[nn.Module] = [StandardConv(3, 32, 3, stride=2, padding=1)]
    for before, after, stride in ((32, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)):
        layers.append(_NormalizerFree(before, after, stride))
    return nn.Sequential(*layers, nn.ReLU(), pooled_head(128, 100))


def conv_attention() -> nn.Module:
    """A hybrid for 224 pixels: inverted residuals of few channels, then attention on 14 x 14."""
    layers: list[nn.Module] = [conv(3, 16, 3, stride=2, activation=nn.SiLU)]
    for before, after, stride in ((16, 24, 2), (24, 24, 1), (24, 48, 2), (48, 48, 1), (48, 96, 2)):
        layers.append(inverted(before, after, stride))
    tokens = [Patches(96, 96, 1, tokens=196), transformer_layer(96, 4), transformer_layer(96, 4)]
    return nn.Sequential(*layers, *tokens, Mean(), norm_head(96, 100))


def resnet_20() -> nn.Module:
    """ResNet-20 for images of 32 pixels, with convolutions in its shortcuts."""
    layers: list[nn.Module] = [conv(3, 16, 3)]
    for before, after, stride in ((16, 16, 1), (16, 32, 2), (32, 64, 2)):
        layers += [Basic(before, after, stride), Basic(after, after, 1), Basic(after, after, 1)]
    return nn.Sequential(*layers, pooled_head(64, 10))


def bilinear_unet() -> nn.Module:
    """A U-Net of three depths that grows its maps by interpolation."""
    return _UNet(1, (16, 32, 64))


def dcgan_generator() -> nn.Module:
    """The generator of DCGAN at half its width: from 100 numbers to an image of 64 pixels."""
    layers: list[nn.Module] = []
    for index, (before, after) in enumerate(pairwise((100, 256, 128, 64, 32))):
        stride, padding = (2, 1) if index else (1, 0)
        layers += [nn.ConvTranspose2d(before, after, 4, stride, padding, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.ConvTranspose2d(32, 3, 4, 2, 1, bias=False), nn.Tanh())


def super_resolution() -> nn.Module:
    """ESPCN: three convolutions, then three times the pixels."""
    first = [nn.Conv2d(3, 64, 5, padding=2), nn.Tanh(), nn.Conv2d(64, 32, 3, padding=1), nn.Tanh()]
    return nn.Sequential(*first, nn.Conv2d(32, 27, 3, padding=1), nn.PixelShuffle(3))


def autoencoder() -> nn.Module:
    """Convolutions down to 128 numbers and transposed ones up again."""
    down: list[nn.Module] = []
    up: list[nn.Module] = []
    for before, after in pairwise((3, 32, 64, 128)):
        down += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.LeakyReLU(0.2)]
        up = [nn.ReLU(), nn.ConvTranspose2d(after, before, 4, stride=2, padding=1), *up]
    code = [nn.Flatten(), nn.Linear(8192, 128), nn.Linear(128, 8192), nn.Unflatten(1, (128, 8, 8))]
    return nn.Sequential(*down, *code, *up, nn.Sigmoid())


def tiny_vit() -> nn.Module:
    """A small ViT without class token: 4 layers of width 128 over 64 patches."""
    layers = [transformer_layer(128, 4) for _ in range(4)]
    return nn.Sequential(Patches(3, 128, 4, tokens=64), *layers, Mean(), norm_head(128, 10))


def tiny_gpt() -> nn.Module:
    """A small GPT: 3 causal layers of width 128 and a score for every word."""
    layers = [transformer_layer(128, 4, causal=True) for _ in range(3)]
    words, scores = PlacedWords(VOCABULARY, 64, 128), nn.Linear(128, VOCABULARY, bias=False)
    return nn.Sequential(words, *layers, nn.LayerNorm(128), scores)


def text_classifier() -> nn.Module:
    """The encoder of torch itself, 3 layers of width 128, and a classifier."""
    layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    return nn.Sequential(PlacedWords(VOCABULARY, 32, 128), encoder, Mean(), nn.Linear(128, 4))


def audio_tagger() -> nn.Module:
    """Convolutions over a spectrogram, a GRU over its time, the mean of the states."""
    maps = [conv(1, 32, 3), nn.MaxPool2d(2), conv(32, 64, 3), nn.MaxPool2d(2), conv(64, 64, 3), nn.MaxPool2d(2)]
    states = States(nn.GRU(512, 64, batch_first=True, bidirectional=True))
    return nn.Sequential(*maps, _Frames(), states, Mean(), nn.Linear(128, 50))


class _Recommender(nn.Module):
    def __init__(self, tables: int, width: int) -> None:
        super().__init__()
        self.bottom = mlp(13, 128, 64, width)
        self.tables = nn.ModuleList(nn.EmbeddingBag(VOCABULARY, width, mode="sum") for _ in range(tables))
        pairs = [(row, column) for row in range(tables + 1) for column in range(row)]
        self.pairs = nn.Buffer(torch.tensor(pairs).t().contiguous(), persistent=False)
        self.top = mlp(width + len(pairs), 128, 64, 1)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.bottom(dense)
        bags = [table(part) for table, part in zip(self.tables, ids.chunk(len(self.tables), 1), strict=True)]
        vectors = torch.stack([x, *bags], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return torch.sigmoid(self.top(torch.cat([x, products], 1)))


class _ClickPredictor(nn.Module):
    def __init__(self, fields: int, width: int) -> None:
        super().__init__()
        self.linear, self.embedding = nn.Embedding(VOCABULARY, 1), nn.Embedding(VOCABULARY, width)
        self.deep = mlp(fields * width, 256, 128, 1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        pairs = 0.5 * (x.sum(1).square() - x.square().sum(1)).sum(1, keepdim=True)
        return torch.sigmoid(self.linear(ids).sum(1) + pairs + self.deep(x.flatten(1)))


class _TwoTower(nn.Module):
    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.items = nn.Embedding(VOCABULARY, width)
        self.user, self.item = mlp(features + width, 128, width), mlp(width, 128, width)

    def forward(self, features: Tensor, ids: Tensor) -> Tensor:
        history, item = self.items(ids[:, :-1]).mean(1), self.items(ids[:, -1])
        user = F.normalize(self.user(torch.cat([features, history], 1)), dim=1)
        return (user * F.normalize(self.item(item), dim=1)).sum(1)


class _Sum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1)


class _Weighed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.score = mlp(width, width, 1, activation=nn.Tanh)

    def forward(self, states: Tensor) -> Tensor:
        weights: Tensor = self.score(states).softmax(1)
        return (weights * states).sum(1)


class _Causal(nn.Module):
    def __init__(self, before: int, after: int, dilation: int) -> None:
        super().__init__()
        self.back = 2 * dilation
        self.first = nn.Conv1d(before, after, 3, dilation=dilation)
        self.second = nn.Conv1d(after, after, 3, dilation=dilation)
        self.shortcut = nn.Identity() if before == after else nn.Conv1d(before, after, 1)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.first(F.pad(x, (self.back, 0))))
        return F.relu(F.relu(self.second(F.pad(inner, (self.back, 0)))) + self.shortcut(x))


class _Shuffled(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        half, given = after // 2, before if stride > 1 else after // 2
        thin = conv(given, given, 3, stride, groups=given, activation=nn.Identity)
        self.left = nn.Sequential(thin, conv(given, half, 1)) if stride > 1 else None
        middle = conv(half, half, 3, stride, groups=half, activation=nn.Identity)
        self.right = nn.Sequential(conv(given, half, 1), middle, conv(half, half, 1))

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, 1) if self.left is None else (self.left(x), x)
        return shuffled(torch.cat([left, self.right(right)], 1), 2)


class _Fire(nn.Module):
    def __init__(self, before: int, squeeze: int, expand: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(before, squeeze, 1)
        self.narrow, self.wide = nn.Conv2d(squeeze, expand, 1), nn.Conv2d(squeeze, expand, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.squeeze(x))
        return torch.cat([F.relu(self.narrow(x)), F.relu(self.wide(x))], 1)


class _SpatialGate(nn.Module):
    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        self.norm, self.along = nn.LayerNorm(width), nn.Conv1d(tokens, tokens, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept, gate = x.chunk(2, -1)
        mixed: Tensor = self.along(self.norm(gate))
        return kept * mixed


class _NormalizerFree(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = StandardConv(before, after, 3, stride, 1), StandardConv(after, after, 3, 1, 1)
        self.shortcut = nn.Identity() if before == after else StandardConv(before, after, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.shortcut(x) + 0.2 * self.second(F.relu(self.first(F.relu(x))))
        return out


class _UNet(nn.Module):
    def __init__(self, channels: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.down = nn.ModuleList(double(before, after) for before, after in pairwise((channels, *widths)))
        self.up = nn.ModuleList(double(low + high, high) for high, low in reversed(list(pairwise(widths))))
        self.grow = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.classes = nn.Conv2d(widths[0], 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        maps: list[Tensor] = []
        for block in self.down:
            maps.append(block(F.max_pool2d(maps[-1], 2) if maps else x))
        x = maps.pop()
        for block in self.up:
            x = block(torch.cat([maps.pop(), self.grow(x)], 1))
        out: Tensor = self.classes(x)
        return out


class _Frames(nn.Module):
    """A map of channels, pitches and times as one row for each time."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1, 2).transpose(1, 2)
