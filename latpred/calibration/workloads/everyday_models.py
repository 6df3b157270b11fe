"""Networks of the suite "everyday" in plain torch, each after a well-known implementation.

Each public function or class builds one with random weights.
"""

from __future__ import annotations

from itertools import pairwise, starmap

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from latpred.calibration.workloads.gate_models import (
    VOCABULARY,
    ChannelNorm,
    Mean,
    Patches,
    PlacedWords,
    Residual,
    SqueezedChannels,
    States,
    Take,
    Transposed,
    attended,
    basic,
    bottleneck,
    conv,
    feed_forward,
    inverted,
    mlp,
    norm_head,
    pooled_head,
)

# -- control, coordinates, tables and series -------------------------------------------------------------------------


class ActorCritic(nn.Module):
    """PPO's actor and critic over 17 observations, two networks apart as in CleanRL: 6 actions and a value."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = (mlp(17, 64, 64, outputs, activation=nn.Tanh) for outputs in (6, 1))
        self.log_std = nn.Parameter(torch.zeros(1, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean = self.actor(x)
        return mean, self.log_std.expand_as(mean).exp(), self.critic(x)


class RadianceField(nn.Module):
    """NeRF at half its width: colour and density of points of a ray, from waves of their places and directions."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.first, self.second = mlp(63, *[width] * 4), mlp(63 + width, *[width] * 4)
        self.density, self.feature = nn.Linear(width, 1), nn.Linear(width, width)
        self.colour = mlp(width + 27, width // 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        place, direction = _waves(x[..., :3], 10), _waves(x[..., 3:], 4)
        inner = F.relu(self.second(torch.cat([place, F.relu(self.first(place))], -1)))
        colour = self.colour(torch.cat([self.feature(inner), direction], -1))
        return torch.cat([torch.sigmoid(colour), F.relu(self.density(inner))], -1)


def _waves(x: Tensor, octaves: int) -> Tensor:
    waves = [wave(x * 2.0**octave) for octave in range(octaves) for wave in (torch.sin, torch.cos)]
    return torch.cat([x, *waves], -1)


class Experts(nn.Module):
    """MMoE: two experts over one table, which each of two tasks weighs by its own gate and reads by its own tower."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(mlp(64, 256, 128) for _ in range(2))
        self.towers = nn.ModuleList(mlp(128, 64, 1) for _ in range(2))
        self.gates = nn.ModuleList(nn.Linear(64, 2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        experts = torch.stack([F.relu(expert(x)) for expert in self.experts], 1)
        mixed = [(gate(x).softmax(1).unsqueeze(2) * experts).sum(1) for gate in self.gates]
        return torch.cat([tower(part) for tower, part in zip(self.towers, mixed, strict=True)], 1)


def tabular_resnet() -> nn.Module:
    """The ResNet of Gorishniy et al. for tables: four blocks of width 128, each normalised over the batch first."""
    inner = [(nn.Linear(128, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 128), nn.Dropout(0.1)) for _ in range(4)]
    blocks = [Residual(nn.BatchNorm1d(128), *layers) for layers in inner]
    return nn.Sequential(nn.Linear(54, 128), *blocks, nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 7))


def series_mixer() -> nn.Module:
    """TSMixer: linear layers along 96 times and across seven series in turn, then 24 times more."""
    blocks: list[nn.Module] = []
    for _ in range(4):
        along = Residual(nn.BatchNorm1d(96), Transposed(), nn.Linear(96, 96), nn.ReLU(), nn.Dropout(0.1), Transposed())
        across = Residual(nn.BatchNorm1d(96), mlp(7, 64, 7), nn.Dropout(0.1))
        blocks += [along, across]
    return nn.Sequential(*blocks, Transposed(), nn.Linear(96, 24), Transposed())


# -- recurrent networks ----------------------------------------------------------------------------------------------


class GreedyTranslator(nn.Module):
    """An LSTM reads words, another writes 12: it attends to what was read each time, and takes the best word."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, width), nn.Embedding(VOCABULARY, width)
        self.encoder, self.cell = nn.LSTM(width, width, batch_first=True), nn.LSTMCell(2 * width, width)
        self.match, self.scores = nn.Linear(width, width, bias=False), nn.Linear(2 * width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        read, (states, memories) = self.encoder(self.source(ids))
        state, memory, keys = states[0], memories[0], self.match(read).transpose(1, 2)
        word, context, written = torch.zeros_like(ids[:, 0]), torch.zeros_like(state), []
        for _ in range(12):
            state, memory = self.cell(torch.cat([self.target(word), context], 1), (state, memory))
            context = torch.bmm(torch.bmm(state.unsqueeze(1), keys).softmax(2), read).squeeze(1)
            written.append(self.scores(torch.cat([state, context], 1)))
            word = written[-1].argmax(1)
        return torch.stack(written, 1)


class Nowcaster(nn.Module):
    """ConvLSTM: two layers over frames cut into patches, and the frame that comes next."""

    def __init__(self, channels: int = 4, widths: tuple[int, int] = (16, 8)) -> None:
        super().__init__()
        steps = pairwise((channels, *widths))
        self.gates = nn.ModuleList(nn.Conv2d(before + after, 4 * after, 3, padding=1) for before, after in steps)
        self.widths, self.frame = widths, nn.Conv2d(widths[-1], channels, 1)

    def forward(self, frames: Tensor) -> Tensor:
        states = list(frames.unbind(1))
        for gates, width in zip(self.gates, self.widths, strict=True):
            state = cell = frames.new_zeros(frames.shape[0], width, *frames.shape[3:])
            for step, frame in enumerate(states):
                enter, forget, leave, new = gates(torch.cat([frame, state], 1)).chunk(4, 1)
                cell = torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(new)
                states[step] = state = torch.sigmoid(leave) * torch.tanh(cell)
        return self.frame(state)


# -- mobile networks, mixers, networks without normalisation -----------------------------------------------------------


def sandglass() -> nn.Module:
    """MobileNeXt at half its width: depthwise convolutions at both ends of a bottleneck."""
    steps = ((16, 48, 2), (48, 72, 1), (72, 96, 2), (96, 96, 1), (96, 144, 2), (144, 144, 1), (144, 192, 1))
    layers = list(starmap(_sandglass, (*steps, (192, 192, 1), (192, 288, 2), (288, 288, 1))))
    return nn.Sequential(conv(3, 16, 3, stride=2, activation=nn.ReLU6), *layers, pooled_head(288, 100))


def _sandglass(before: int, after: int, stride: int) -> nn.Module:
    narrow = before // 6
    first = conv(before, before, 3, groups=before, activation=nn.ReLU6)
    into = [first, conv(before, narrow, 1, activation=nn.Identity)]
    out = [conv(narrow, after, 1, activation=nn.ReLU6), conv(after, after, 3, stride, after, nn.Identity)]
    return Residual(*into, *out) if stride == 1 and before == after else nn.Sequential(*into, *out)


def interleaved() -> nn.Module:
    """IGCV3: inverted residuals whose pointwise convolutions have two groups, channels shuffled behind each."""
    steps = ((16, 24, 2), (24, 24, 1), (24, 32, 2), (32, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 96, 1))
    stem, last = conv(3, 16, 3, stride=2, activation=nn.ReLU6), conv(96, 320, 1, activation=nn.ReLU6)
    return nn.Sequential(stem, *starmap(_interleaved, steps), last, pooled_head(320, 100))


def _interleaved(before: int, after: int, stride: int) -> nn.Module:
    wide = 6 * before
    into = [conv(before, wide, 1, groups=2, activation=nn.ReLU6), nn.ChannelShuffle(2)]
    thin = conv(wide, wide, 3, stride, wide, nn.ReLU6)
    layers = [*into, thin, conv(wide, after, 1, groups=2, activation=nn.Identity), nn.ChannelShuffle(2)]
    return Residual(*layers) if stride == 1 and before == after else nn.Sequential(*layers)


def spatial_shift() -> nn.Module:
    """S2-MLP: quarters of the channels shifted by one patch each way between linear layers, 6 layers of width 96."""
    layers: list[nn.Module] = []
    for _ in range(6):
        shifted = Residual(nn.LayerNorm(96), nn.Linear(96, 96), nn.GELU(), _Shift(), nn.Linear(96, 96))
        layers += [shifted, feed_forward(96, 288)]
    stem, last = [Patches(96, 8), nn.Unflatten(1, (8, 8))], [nn.Flatten(1, 2), Mean()]
    return nn.Sequential(*stem, *layers, *last, norm_head(96, 100))


class _Shift(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out, quarter = x.clone(), x.shape[-1] // 4
        out[:, 1:, :, :quarter] = x[:, :-1, :, :quarter]
        out[:, :-1, :, quarter : 2 * quarter] = x[:, 1:, :, quarter : 2 * quarter]
        out[:, :, 1:, 2 * quarter : 3 * quarter] = x[:, :, :-1, 2 * quarter : 3 * quarter]
        out[:, :, :-1, 3 * quarter :] = x[:, :, 1:, 3 * quarter :]
        return out


def fixup() -> nn.Module:
    """A Fixup ResNet for 32 pixels: scalar biases and a scale in place of every normalisation."""
    steps = ((16, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1))
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), _Bias(), nn.ReLU()]
    return nn.Sequential(
        *stem, *starmap(_Fixup, steps), nn.AdaptiveAvgPool2d(1), nn.Flatten(), _Bias(), nn.Linear(64, 10)
    )


class _Bias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class _Fixup(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        convolution = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        again = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.first, self.last, self.scale = _Bias(), _Bias(), nn.Parameter(torch.ones(1))
        self.body = nn.Sequential(convolution, _Bias(), nn.ReLU(), _Bias(), again)
        self.pool = nn.AvgPool2d(1, stride) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        shifted = self.first(x)
        if self.pool is not None:
            x = self.pool(shifted)
            x = torch.cat([x, torch.zeros_like(x)], 1)
        return F.relu(self.last(self.body(shifted) * self.scale) + x)


def spectral_critic() -> nn.Module:
    """The discriminator of SNGAN for 32 pixels at half its width: every weight divided by its spectral norm."""
    layers: list[nn.Module] = []
    steps = ((3, 32, 3, 1), (32, 32, 4, 2), (32, 64, 3, 1), (64, 64, 4, 2), (64, 128, 3, 1))
    for before, after, kernel, stride in steps:
        layers += [spectral_norm(nn.Conv2d(before, after, kernel, stride, 1)), nn.LeakyReLU(0.1)]
    return nn.Sequential(*layers, nn.Flatten(), spectral_norm(nn.Linear(8192, 1)))


# -- convolution and attention ---------------------------------------------------------------------------------------


def bottleneck_transformer() -> nn.Module:
    """BoTNet: two bottlenecks of ResNet, then two with attention over 8 x 8 in place of their middle convolution."""
    middles: list[nn.Module] = [conv(16, 16, 3), conv(32, 32, 3, 2)]
    middles += [nn.Sequential(_MapAttention(64, 4, 8), nn.BatchNorm2d(64), nn.ReLU()) for _ in range(2)]
    stem = [conv(3, 32, 7, stride=2), nn.MaxPool2d(3, 2, 1)]
    steps = zip((32, 64, 128, 256), (64, 128, 256, 256), (1, 2, 1, 1), middles, strict=True)
    return nn.Sequential(*stem, *starmap(bottleneck, steps), pooled_head(256, 50))


def convolution_then_attention() -> nn.Module:
    """CoAtNet: inverted residuals with squeezed channels, then two layers of attention with relative positions."""
    layers: list[nn.Module] = [conv(3, 24, 3, stride=2, activation=nn.GELU)]
    for before, after, stride in ((24, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1)):
        layers.append(inverted(before, after, stride, SqueezedChannels(4 * before, before // 4), activation=nn.GELU))
    layers.append(nn.Conv2d(64, 96, 1))
    for _ in range(2):
        hidden = nn.Conv2d(96, 384, 1), nn.GELU(), nn.Conv2d(384, 96, 1)
        layers += [Residual(ChannelNorm(96), _MapAttention(96, 3, 8)), Residual(ChannelNorm(96), *hidden)]
    return nn.Sequential(*layers, pooled_head(96, 50))


class _MapAttention(nn.Module):
    """Attention over a map in plain products, whose scores are shifted by how far apart two places are."""

    def __init__(self, width: int, heads: int, side: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.table, self.scale = nn.Parameter(torch.randn(heads, (2 * side - 1) ** 2)), (width // heads) ** -0.5
        places = torch.cartesian_prod(torch.arange(side), torch.arange(side))
        apart = places[:, None] - places + side - 1
        self.index = nn.Buffer(apart[..., 0] * (2 * side - 1) + apart[..., 1], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x.flatten(2).transpose(1, 2)).unflatten(2, (3, self.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        scores = torch.matmul(query, key.transpose(-1, -2)) * self.scale + self.table[:, self.index]
        mixed = torch.matmul(scores.softmax(-1), value).transpose(1, 2).flatten(2)
        return self.out(mixed).transpose(1, 2).reshape(x.shape)


# -- sound -----------------------------------------------------------------------------------------------------------


class Separator(nn.Module):
    """Conv-TasNet: two voices out of one wave, by masks from eight dilated convolutions over a learned basis."""

    def __init__(self, basis: int = 64, narrow: int = 48, wide: int = 96) -> None:
        super().__init__()
        self.encode = nn.Conv1d(1, basis, 16, 8, bias=False)
        layers: list[nn.Module] = [nn.GroupNorm(1, basis), nn.Conv1d(basis, narrow, 1)]
        for dilation in (1, 2, 4, 8, 1, 2, 4, 8):
            thin = nn.Conv1d(wide, wide, 3, padding=dilation, dilation=dilation, groups=wide)
            first = nn.Conv1d(narrow, wide, 1), nn.PReLU(), nn.GroupNorm(1, wide)
            layers.append(Residual(*first, thin, nn.PReLU(), nn.GroupNorm(1, wide), nn.Conv1d(wide, narrow, 1)))
        self.masks = nn.Sequential(*layers, nn.Conv1d(narrow, 2 * basis, 1), nn.ReLU(), nn.Unflatten(1, (2, basis)))
        self.decode = nn.ConvTranspose1d(basis, 1, 16, 8, bias=False)

    def forward(self, wave: Tensor) -> Tensor:
        code = F.relu(self.encode(wave))
        voices = self.masks(code) * code.unsqueeze(1)
        return self.decode(voices.flatten(0, 1)).view(wave.shape[0], 2, -1)


def keyword_recurrence() -> nn.Module:
    """The CRNN of Arik et al. for 12 spoken words: one strided convolution over a spectrogram, two GRUs both ways."""
    gru = nn.GRU(96, 32, 2, batch_first=True, bidirectional=True)
    maps = [nn.Conv2d(1, 32, (20, 5), (8, 2)), nn.ReLU(), nn.Flatten(1, 2), Transposed()]
    return nn.Sequential(*maps, States(gru), Take(-1), mlp(64, 64, 12))


def codec_encoder() -> nn.Module:
    """The encoder of EnCodec over raw sound: causal strided convolutions with ELU, then two layers of LSTM."""
    layers: list[nn.Module] = [_CausalConv(1, 16, 7)]
    for width, stride in ((16, 2), (32, 4), (64, 5), (128, 8)):
        inner = Residual(nn.ELU(), _CausalConv(width, width // 2, 3), nn.ELU(), nn.Conv1d(width // 2, width, 1))
        layers += [inner, nn.ELU(), _CausalConv(width, 2 * width, 2 * stride, stride)]
    states = Residual(States(nn.LSTM(256, 256, 2, batch_first=True)))
    return nn.Sequential(*layers, Transposed(), states, Transposed(), nn.ELU(), _CausalConv(256, 128, 7))


class _CausalConv(nn.Conv1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(F.pad(input, (self.kernel_size[0] - self.stride[0], 0), mode="reflect"))


def transducer_encoder() -> nn.Module:
    """The streaming encoder of an RNN transducer: four LSTMs, each projected; frames are paired after the second."""
    lstms = [nn.LSTM(inputs, 160, batch_first=True) for inputs in (80, 96, 192, 96)]
    layers = [nn.Sequential(States(lstm), nn.Linear(160, 96), nn.LayerNorm(96)) for lstm in lstms]
    return nn.Sequential(*layers[:2], nn.Unflatten(1, (24, 2)), nn.Flatten(2), *layers[2:], nn.Linear(96, 128))


# -- words -----------------------------------------------------------------------------------------------------------


def question_answerer() -> nn.Module:
    """QANet: separable convolutions, attention and a feed-forward layer, twice; where an answer starts and ends."""
    layers: list[nn.Module] = []
    for _ in range(2):
        for _ in range(4):
            thin = nn.Conv1d(96, 96, 7, padding=3, groups=96, bias=False)
            layers.append(Residual(nn.LayerNorm(96), Transposed(), thin, nn.Conv1d(96, 96, 1), nn.ReLU(), Transposed()))
        layers += [attended(96, 8), feed_forward(96, 96)]
    return nn.Sequential(PlacedWords(VOCABULARY, 40, 96), *layers, nn.Linear(96, 2), nn.LogSoftmax(1))


# -- dense prediction ------------------------------------------------------------------------------------------------


class PyramidDetector(nn.Module):
    """RetinaNet: a residual network, a feature pyramid of three levels, heads that all levels share."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.stem = conv(3, 16, 3, stride=2)
        self.stages = nn.ModuleList(starmap(basic, ((16, 32, 2), (32, 64, 2), (64, 96, 2))))
        self.sides = nn.ModuleList(nn.Conv2d(channels, width, 1) for channels in (32, 64, 96))
        self.smooth = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(3))
        ends = [[nn.Conv2d(width, after, 3, padding=1) for after in (width, 3 * outputs)] for outputs in (5, 4)]
        self.heads = nn.ModuleList(nn.Sequential(first, nn.ReLU(), last) for first, last in ends)

    def forward(self, x: Tensor) -> list[Tensor]:
        x, maps = self.stem(x), []
        for stage, side in zip(self.stages, self.sides, strict=True):
            x = stage(x)
            maps.append(side(x))
        for level in (1, 0):
            maps[level] = maps[level] + F.interpolate(maps[level + 1], scale_factor=2.0, mode="nearest")
        maps = [smooth(level) for smooth, level in zip(self.smooth, maps, strict=True)]
        found = [[head(level).permute(0, 2, 3, 1).flatten(1) for level in maps] for head in self.heads]
        return [torch.cat(levels, 1).view(x.shape[0], -1, size) for levels, size in zip(found, (5, 4), strict=True)]


class AtrousSegmenter(nn.Module):
    """DeepLabV3: dilated convolutions in place of strides, then four convolutions and a mean side by side."""

    def __init__(self, width: int = 40) -> None:
        super().__init__()
        dilated = Residual(conv(width, width, 3, dilation=2), conv(width, width, 3, dilation=2))
        self.backbone = nn.Sequential(conv(3, 24, 3, stride=2), basic(24, width, 2), dilated)
        self.branches = nn.ModuleList([conv(width, width, 1), *(conv(width, width, 3, dilation=d) for d in (3, 6, 9))])
        self.pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), conv(width, width, 1))
        self.classes = nn.Sequential(conv(5 * width, width, 1), nn.Conv2d(width, 8, 1))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.backbone(x)
        pooled = F.interpolate(self.pooled(inner), inner.shape[2:], mode="bilinear", align_corners=False)
        out = self.classes(torch.cat([*(branch(inner) for branch in self.branches), pooled], 1))
        return F.interpolate(out, x.shape[2:], mode="bilinear", align_corners=False)
