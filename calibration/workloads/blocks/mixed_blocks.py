"""Blocks of the generated calibration networks that mix images, audio or tokens in other ways."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from latpred.calibration.workloads.blocks.token_blocks import VOCABULARY, activation


class PatchNetwork(nn.Module):
    """Image patches as tokens with a class token."""

    def __init__(self, width: int, side: int, size: int, layers: Sequence[nn.Module], classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, side, side)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, (size // side) ** 2 + 1, width))
        self.layers, self.norm, self.head = nn.Sequential(*layers), nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), dim=1) + self.positions
        return self.head(self.norm(self.layers(x))[:, 0])


class ConvNextBlock(nn.Module):
    """Depthwise convolution, then a channels-last feed-forward with layer scale."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, kernel, padding=kernel // 2, groups=width)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.ones(width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + self.scale * self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2)


class WindowBlock(nn.Module):
    """Attention inside windows of a channels-last map, shifted by a roll."""

    index: torch.Tensor

    def __init__(self, width: int, heads: int, window: int, *, shift: int) -> None:
        super().__init__()
        self.heads, self.window, self.shift = heads, window, shift
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))
        self.register_buffer("index", torch.zeros(window**4, dtype=torch.long), persistent=False)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        n = self.window
        y = F.pad(self.norm(x), (0, 0, 0, -w % n, 0, -h % n))
        if self.shift:
            y = torch.roll(y, shifts=(-self.shift, -self.shift), dims=(1, 2))
        rows, columns = y.shape[1] // n, y.shape[2] // n
        y = y.view(b, rows, n, columns, n, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, n * n, c)
        q, k, v = self.qkv(y).reshape(-1, n * n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        bias = self.bias[self.index].view(n * n, n * n, self.heads).permute(2, 0, 1).unsqueeze(0)
        scores = (q * (c // self.heads) ** -0.5).matmul(k.transpose(-2, -1)) + bias
        y = self.out(F.softmax(scores, dim=-1).matmul(v).transpose(1, 2).reshape(-1, n * n, c))
        y = y.view(b, rows, columns, n, n, c).permute(0, 1, 3, 2, 4, 5).reshape(b, rows * n, columns * n, c)
        if self.shift:
            y = torch.roll(y, shifts=(self.shift, self.shift), dims=(1, 2))
        x = x + y[:, :h, :w, :]
        return x + self.mlp(x)


class PatchMap(nn.Module):
    """A patch stem, blocks on the map, a pooled classifier."""

    def __init__(
        self, width: int, side: int, layers: Sequence[nn.Module], *, channels_last: bool, classes: int
    ) -> None:
        super().__init__()
        self.channels_last = channels_last
        self.stem, self.layers = nn.Conv2d(3, width, side, side), nn.Sequential(*layers)
        self.merge, self.head = nn.Linear(4 * width, 2 * width, bias=False), nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.layers(x.permute(0, 2, 3, 1)) if self.channels_last else self.layers(x).permute(0, 2, 3, 1)
        h, w = x.shape[1] // 2 * 2, x.shape[2] // 2 * 2
        quarters = [x[:, i:h:2, j:w:2, :] for i in (0, 1) for j in (0, 1)]
        return self.head(self.merge(torch.cat(quarters, -1)).mean(dim=(1, 2)))


class AudioNetwork(nn.Module):
    """A strided 1-d convolution front, positional grouped convolution and one encoder layer."""

    def __init__(self, channels: int, width: int, layer: nn.Module, *, group_norm: bool) -> None:
        super().__init__()
        shapes = ((1, 10, 5), (channels, 3, 2), (channels, 3, 2), (channels, 2, 2))
        self.front = nn.ModuleList(nn.Conv1d(c_in, channels, k, stride, bias=False) for c_in, k, stride in shapes)
        self.norm = nn.GroupNorm(channels, channels) if group_norm else nn.Identity()
        self.project = nn.Linear(channels, width)
        self.positions = nn.Conv1d(width, width, 32, padding=16, groups=8)
        self.layer = layer

    def forward(self, wave: Tensor) -> Tensor:
        x = wave[:, None]
        for index, conv in enumerate(self.front):
            x = conv(x)
            x = F.gelu(self.norm(x) if index == 0 else x)
        x = self.project(x.transpose(1, 2))
        x = x + F.gelu(self.positions(x.transpose(1, 2))[..., :-1]).transpose(1, 2)
        return self.layer(x).mean(dim=1)


class MixerNetwork(nn.Module):
    """Token mixing without attention: Fourier transform, a token MLP, or grouped 1x1 convolutions."""

    def __init__(self, width: int, tokens: int, style: str, *, groups: int, classes: int) -> None:
        super().__init__()
        self.style = style
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down, self.head = (
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
            nn.Linear(width, classes),
        )
        if style == "tokens":
            self.mix: nn.Module = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        else:
            self.mix = nn.Conv1d(width, width, 1, groups=groups) if style == "grouped" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if self.style == "fourier":
            y = torch.fft.fft2(x.float()).real
            if y.dtype is not x.dtype:  # FFTs come back in fp32, which a norm of half-precision weights refuses
                y = y.to(x.dtype)
        elif self.style == "tokens":
            y = self.mix(x.transpose(1, 2)).transpose(1, 2)
        else:
            y = self.mix(x.permute(0, 2, 1)).permute(0, 2, 1)
        x = self.norm(x + y)
        x = self.norm2(x + self.down(F.gelu(self.up(x))))
        keep = torch.where(x > 0, x, torch.zeros_like(x)).cumsum(1)
        return self.head(keep.masked_fill(keep > 1e9, 0.0).sum(dim=1))


class Recurrence(NamedTuple):
    """What a recurrent layer is: "lstm", "gru" or "rnn", width of its state, layers, and whether it runs both ways."""

    cell: str
    hidden: int
    layers: int
    bidirectional: bool


class RecurrentNetwork(nn.Module):
    """Embedding, recurrent layers one after the other, classifier."""

    def __init__(self, width: int, recurrences: Sequence[Recurrence]) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        makers = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}
        self.recurrences = nn.ModuleList()
        for cell, hidden, layers, bidirectional in recurrences:
            self.recurrences.append(makers[cell](width, hidden, layers, batch_first=True, bidirectional=bidirectional))
            width = hidden * (2 if bidirectional else 1)
        self.head = nn.Linear(width, 16)

    def forward(self, ids: Tensor) -> Tensor:
        out = self.words(ids)
        for recurrence in self.recurrences:
            out, _ = recurrence(out)
        return self.head(out.amax(dim=1))


class MlpNetwork(nn.Module):
    """Linear layers over a table, each with an activation and maybe a normalisation."""

    def __init__(self, widths: Sequence[int], act: str, norm: str, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), *_norms(norm, after), activation(act)]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def _norms(name: str, width: int) -> list[nn.Module]:
    if name == "none":
        return []
    return [nn.BatchNorm1d(width) if name == "batch" else nn.LayerNorm(width)]
