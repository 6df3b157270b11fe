"""Networks of tables, words, sound, series, sets and graphs in plain torch, for the suites and the gate.

Each function builds one with random weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from latpred.calibration.workloads.everyday_layers import (
    Mean,
    PlacedWords,
    Residual,
    States,
    Take,
    Transposed,
    conv,
    feed_forward,
    mlp,
    norm_head,
    pooled_head,
    transformer_layer,
)

VOCABULARY = 4096
GATE_VOCABULARY = 2048


def perceptron(widths: Sequence[int], activation: str = "ReLU") -> nn.Module:
    """An MLP of these widths; "Sine" is an activation too, as SIREN has it."""
    return mlp(*widths, activation=_Sine if activation == "Sine" else getattr(nn, activation))


def wide_mlp() -> nn.Module:
    """A classifier of flattened digits with batch normalisation and dropout."""
    layers: list[nn.Module] = []
    for before, after in pairwise((784, 2048, 1024)):
        layers += [nn.Linear(before, after), nn.BatchNorm1d(after), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(1024, 10))


def residual_mlp() -> nn.Module:
    """Six residual blocks of width 192 over a table, each normalised first."""
    return nn.Sequential(nn.Linear(40, 192), *(feed_forward(192, 384) for _ in range(6)), norm_head(192, 5))


def highway() -> nn.Module:
    """Eight highway layers of width 128 over the columns of a table."""
    return nn.Sequential(nn.Linear(64, 128), *(_Highway(128) for _ in range(8)), nn.Linear(128, 3))


# -- recommenders ----------------------------------------------------------------------------------------------------


def recommender() -> nn.Module:
    """DLRM: eight embedding bags and a dense part, whose products in pairs feed a second MLP."""
    return _Recommender(tables=8, width=16)


def click_predictor() -> nn.Module:
    """DeepFM: a factorisation machine and an MLP over ten shared embeddings."""
    return _ClickPredictor(fields=10, width=16)


def wide_and_deep() -> nn.Module:
    """Wide & Deep: a linear part over twelve ids, and an MLP over their embeddings."""
    return _WideAndDeep(fields=12, width=24)


def two_tower() -> nn.Module:
    """A user's features and history in one tower, an item in the other, and their cosine."""
    return _TwoTower(features=24, width=64)


# -- sets, points and graphs -----------------------------------------------------------------------------------------


def deep_sets() -> nn.Module:
    """Deep Sets: one MLP for every element, a sum, another MLP."""
    return nn.Sequential(mlp(8, 128, 128, 128), _Sum(), mlp(128, 64, 10))


def set_attention() -> nn.Module:
    """Elements of a set that attend to each other twice, and one learned query that attends to all."""
    return _SetAttention(features=10, width=96)


def pointnet() -> nn.Module:
    """PointNet without its transforms: three pointwise convolutions, a maximum over points, an MLP."""
    layers: list[nn.Module] = []
    for before, after in pairwise((3, 64, 128, 512)):
        layers += [nn.Conv1d(before, after, 1), nn.BatchNorm1d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveMaxPool1d(1), nn.Flatten(), mlp(512, 128, 10))


def graph_convolution() -> nn.Module:
    """Three graph convolutions over 24 nodes with one dense adjacency, and the mean of the nodes."""
    return _GraphConvolution(nodes=24, widths=(16, 96, 96, 96))


# -- recurrent networks ----------------------------------------------------------------------------------------------


def recurrent(
    cell: str,
    inputs: int,
    hidden: int,
    outputs: int,
    head: str,
    *,
    words: int = 0,
    layers: int = 1,
    both: bool = False,
) -> nn.Module:
    """A recurrent network over series or words, in one direction or `both`, and a linear head.

    The head reads each state, the last one, their mean, or all of them weighed by additive attention.
    """
    rnn = getattr(nn, cell)(inputs, hidden, layers, batch_first=True, bidirectional=both)
    width = 2 * hidden if both else hidden
    heads: dict[str, list[nn.Module]] = {"each": [], "last": [Take(-1)], "mean": [Mean()], "weighed": [_Weighed(width)]}
    first = [nn.Embedding(words, inputs)] if words else []
    return nn.Sequential(*first, States(rnn), *heads[head], nn.Linear(width, outputs))


def lstm_tagger() -> nn.Module:
    """A tagger of words: an embedding, two layers of LSTM in both directions, a classifier for each word."""
    return _Tagger(width=256)


# -- sound and series ------------------------------------------------------------------------------------------------


def keyword_spotter() -> nn.Module:
    """DS-CNN as published for 12 spoken words: depthwise separable convolutions of 64 channels."""
    stem = [nn.Conv2d(1, 64, (10, 4), stride=2, padding=(5, 1), bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    blocks = [nn.Sequential(conv(64, 64, 3, groups=64), conv(64, 64, 1)) for _ in range(4)]
    return nn.Sequential(*stem, *blocks, pooled_head(64, 12))


def audio_tagger() -> nn.Module:
    """Convolutions over a spectrogram, a GRU over its time, the mean of the states."""
    maps = [conv(1, 32, 3), nn.MaxPool2d(2), conv(32, 64, 3), nn.MaxPool2d(2), conv(64, 64, 3), nn.MaxPool2d(2)]
    states = States(nn.GRU(512, 64, batch_first=True, bidirectional=True))
    return nn.Sequential(*maps, _Frames(), states, Mean(), nn.Linear(128, 50))


def sound_events() -> nn.Module:
    """Convolutions in pairs over a spectrogram, in the manner of VGG, and a class for the whole."""
    layers: list[nn.Module] = []
    for before, after in pairwise((1, 24, 48, 96)):
        layers += [conv(before, after, 3), conv(after, after, 3), nn.AvgPool2d(2)]
    return nn.Sequential(*layers, pooled_head(96, 50))


def raw_audio() -> nn.Module:
    """M5: convolutions over the wave itself, pooled by four after each."""
    layers: list[nn.Module] = [nn.Conv1d(1, 64, 80, stride=4), nn.BatchNorm1d(64), nn.ReLU(), nn.MaxPool1d(4)]
    for before, after in pairwise((64, 64, 128, 256)):
        layers += [nn.Conv1d(before, after, 3), nn.BatchNorm1d(after), nn.ReLU(), nn.MaxPool1d(4)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(256, 35))


def gate_speech() -> nn.Module:
    """Three convolutions over a wave, then 2 transformer layers of width 128."""
    front: list[nn.Module] = [nn.Unflatten(1, (1, 3200))]
    for before, after, kernel, stride in ((1, 64, 10, 5), (64, 64, 8, 4), (64, 128, 4, 2)):
        front += [nn.Conv1d(before, after, kernel, stride), nn.GELU()]
    layers = [transformer_layer(128, 4), transformer_layer(128, 4)]
    return nn.Sequential(*front, Transposed(), *layers, Mean(), norm_head(128, 30))


def temporal_convolution() -> nn.Module:
    """TCN: six levels of causal convolutions, each dilated twice as far as the one before."""
    levels = [_Causal(8 if level == 0 else 48, 48, 2**level) for level in range(6)]
    return nn.Sequential(*levels, nn.Conv1d(48, 4, 1))


def wavenet() -> nn.Module:
    """WaveNet: eight gated causal convolutions of 32 channels, each dilated twice as far as the one before."""
    return _WaveNet(channels=32, levels=8)


# -- words -----------------------------------------------------------------------------------------------------------


def text_convolution() -> nn.Module:
    """Kim's CNN: convolutions of three widths over words, the maximum of each over time."""
    return _TextConvolution(width=96, maps=64)


def gmlp() -> nn.Module:
    """gMLP: 4 layers of width 192 whose gates look along 48 tokens."""
    layers = [
        Residual(nn.LayerNorm(192), nn.Linear(192, 768), nn.GELU(), _SpatialGate(384, 48), nn.Linear(384, 192))
        for _ in range(4)
    ]
    return nn.Sequential(nn.Embedding(VOCABULARY, 192), *layers, Mean(), norm_head(192, 8))


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


def translator() -> nn.Module:
    """The transformer of torch itself, two layers on each side, which reads 20 words and writes 20."""
    return _Translator(128)


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


# -- their blocks ----------------------------------------------------------------------------------------------------


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


class _WideAndDeep(nn.Module):
    def __init__(self, fields: int, width: int) -> None:
        super().__init__()
        self.wide, self.embedding = nn.Embedding(VOCABULARY, 1), nn.Embedding(VOCABULARY, width)
        self.deep = mlp(fields * width, 384, 192, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.sigmoid(self.wide(ids).sum(1) + self.deep(self.embedding(ids).flatten(1)))


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
        return self.last(self.attention[2](query, x, x, need_weights=False)[0][:, 0])


class _GraphConvolution(nn.Module):
    def __init__(self, nodes: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.adjacency = nn.Buffer(torch.rand(nodes, nodes).softmax(1), persistent=False)
        self.layers = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(widths))
        self.last = nn.Linear(widths[-1], 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(torch.matmul(self.adjacency, x)))
        return self.last(x.mean(1))


class _Weighed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.score = mlp(width, width, 1, activation=nn.Tanh)

    def forward(self, states: Tensor) -> Tensor:
        weights = self.score(states).softmax(1)
        return (weights * states).sum(1)


class _Tagger(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, bidirectional=True, batch_first=True)
        self.classifier = nn.Linear(2 * width, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.classifier(self.lstm(self.embedding(tokens))[0])


class _Frames(nn.Module):
    """A map of channels, pitches and times as one row for each time."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1, 2).transpose(1, 2)


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
        return self.last(skipped)


class _TextConvolution(nn.Module):
    def __init__(self, width: int, maps: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.convolutions = nn.ModuleList(nn.Conv1d(width, maps, kernel) for kernel in (3, 4, 5))
        self.classes = nn.Sequential(nn.Dropout(), nn.Linear(3 * maps, 4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids).transpose(1, 2)
        best = [F.relu(convolution(x)).max(2).values for convolution in self.convolutions]
        return self.classes(torch.cat(best, 1))


class _SpatialGate(nn.Module):
    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        self.norm, self.along = nn.LayerNorm(width), nn.Conv1d(tokens, tokens, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept, gate = x.chunk(2, -1)
        return kept * self.along(self.norm(gate))


class _Translator(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.read, self.write = PlacedWords(VOCABULARY, 20, width), PlacedWords(VOCABULARY, 20, width)
        self.transformer = nn.Transformer(width, 4, 2, 2, 4 * width, batch_first=True)
        self.scores = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.scores(self.transformer(self.read(ids), self.write(ids)))


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
