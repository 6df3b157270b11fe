"""Blocks of the generated calibration networks: the layer types that published architectures share.

Only shapes and op kinds matter here; nothing is ever trained. They share no code with the models of suites, so that
what is judged has nothing in common with what is fitted. A convolutional block of stride 2 wants a map of at least two
pixels a side; `networks.strides` sees to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

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


_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, "tanh"),
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "silu": nn.SiLU,
    "hardswish": nn.Hardswish,
    "tanh": nn.Tanh,
    "tanh_gelu": TanhGelu,
}
# Over the last dimension.
_NORMS: dict[str, Callable[[int], nn.Module]] = {"layer": nn.LayerNorm, "rms": RmsNorm, "affine": AffineNorm}


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
            # A mask of each sample, or of each head, as learned positions give it; the latter keeps torch from fusing.
            shape = {"masked": (b, 1, s, s), "biased": (self.heads, s, s)}.get(self.form)
            mask = None if shape is None else torch.zeros(shape, dtype=x.dtype, device=x.device)
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).reshape(b, s, w))


class EncoderLayer(nn.Module):
    """Attention and feed-forward with residuals, norm before or after."""

    def __init__(
        self,
        width: int,
        heads: int,
        hidden: int,
        *,
        pre_norm: bool,
        attention: str = "fused",
        activation: str = "gelu",
        norm: str = "layer",
    ) -> None:
        super().__init__()
        self.pre_norm = pre_norm
        self.attention = Attention(width, heads, attention)
        self.first, self.second = _NORMS[norm](width), _NORMS[norm](width)
        self.up, self.act, self.down = nn.Linear(width, hidden), _ACTIVATIONS[activation](), nn.Linear(hidden, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        if self.pre_norm:
            x = x + self.attention(self.first(x))
            return x + self.dropout(self.down(self.act(self.up(self.second(x)))))
        x = self.first(x + self.dropout(self.attention(x)))
        return self.second(x + self.dropout(self.down(self.act(self.up(x)))))


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


def conv_norm(
    c_in: int, c_out: int, kernel: int, stride: int = 1, groups: int = 1, activation: str | None = "relu"
) -> nn.Sequential:
    convolution = nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(
        convolution, nn.BatchNorm2d(c_out), *([] if activation is None else [_ACTIVATIONS[activation]()])
    )


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        narrow = max(8, channels // 4)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.down, self.up = nn.Conv2d(channels, narrow, 1), nn.Conv2d(narrow, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.up(F.relu(self.down(self.pool(x)))))


class ResidualBlock(nn.Module):
    """Basic or bottleneck residual block, optionally grouped and gated."""

    def __init__(
        self, c_in: int, c_out: int, stride: int, window: int, *, groups: int, bottleneck: bool, squeeze: bool
    ) -> None:
        super().__init__()
        middle = max(groups * 4, c_out // 4 // groups * groups) if bottleneck else c_out
        first, last = (1, 1) if bottleneck else (window, window)
        self.body = nn.Sequential(
            conv_norm(c_in, middle, first, 1 if bottleneck else stride),
            *([conv_norm(middle, middle, window, stride, groups)] if bottleneck else []),
            conv_norm(middle, c_out, last, 1, activation=None),
            *([SqueezeExcite(c_out)] if squeeze else []),
        )
        same = c_in == c_out and stride == 1
        self.shortcut = nn.Identity() if same else conv_norm(c_in, c_out, 1, stride, activation=None)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        out += self.shortcut(x)
        return self.act(out)


class PlainBlock(nn.Module):
    """A convolution as VGG has it, with pooling instead of stride."""

    def __init__(self, c_in: int, c_out: int, stride: int, window: int, *, bias: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(c_in, c_out, window, padding=window // 2, bias=bias)
        self.act = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(2) if stride == 2 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.act(self.conv(x)))


class InvertedResidual(nn.Module):
    """Expansion, depthwise convolution, optional gate, projection."""

    def __init__(
        self, c_in: int, c_out: int, stride: int, expand: int, kernel: int, activation: str, squeeze: bool
    ) -> None:
        super().__init__()
        wide = c_in * expand
        self.body = nn.Sequential(
            *([conv_norm(c_in, wide, 1, activation=activation)] if expand > 1 else []),
            conv_norm(wide, wide, kernel, stride, groups=wide, activation=activation),
            *([SqueezeExcite(wide)] if squeeze else []),
            conv_norm(wide, c_out, 1, activation=None),
        )
        self.residual = stride == 1 and c_in == c_out

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.residual else self.body(x)


class DenseBlock(nn.Module):
    """Two growth layers on concatenated features, then a transition."""

    def __init__(self, c_in: int, c_out: int, stride: int, growth: int) -> None:
        super().__init__()
        self.grow = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(c_in + i * growth), nn.ReLU(), nn.Conv2d(c_in + i * growth, growth, 3, padding=1)
            )
            for i in range(2)
        )
        self.shrink = conv_norm(c_in + 2 * growth, c_out, 1)
        self.pool = nn.AvgPool2d(2) if stride == 2 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.grow:
            features.append(layer(torch.cat(features, 1)))
        return self.pool(self.shrink(torch.cat(features, 1)))


class FireBlock(nn.Module):
    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        narrow = max(8, c_out // 8)
        self.squeeze = nn.Conv2d(c_in, narrow, 1)
        self.left, self.right = nn.Conv2d(narrow, c_out // 2, 1), nn.Conv2d(narrow, c_out - c_out // 2, 3, padding=1)
        self.pool = nn.MaxPool2d(3, 2, ceil_mode=True) if stride == 2 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.squeeze(x))
        return self.pool(torch.cat((F.relu(self.left(x)), F.relu(self.right(x))), 1))


class ShuffleBlock(nn.Module):
    """Half the channels pass, half are convolved, then channels are shuffled."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.enter = conv_norm(c_in, c_out, 3, stride) if stride > 1 or c_in != c_out else nn.Identity()
        half = c_out // 2
        self.body = nn.Sequential(
            conv_norm(half, half, 1), conv_norm(half, half, 3, groups=half, activation=None), conv_norm(half, half, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        keep, change = self.enter(x).chunk(2, dim=1)
        out = torch.cat((keep, self.body(change)), dim=1)
        b, c, h, w = out.shape
        return out.view(b, 2, c // 2, h, w).transpose(1, 2).contiguous().view(b, c, h, w)


class Classifier(nn.Module):
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.flatten(self.pool(x), 1))


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

    def __init__(self, width: int, heads: int, window: int, *, shift: int) -> None:
        super().__init__()
        self.heads, self.window, self.shift = heads, window, shift
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))
        self.index = nn.Buffer(torch.zeros(window**4, dtype=torch.long), persistent=False)
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
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, classes)
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


class RecurrentNetwork(nn.Module):
    """Embedding, recurrent layers one after the other, classifier."""

    def __init__(self, width: int, recurrences: Sequence[tuple[str, int, int, bool]]) -> None:
        super().__init__()
        # Each is "lstm", "gru" or "rnn", the width of its state, layers within it, and whether it runs both ways.
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
    def __init__(self, widths: Sequence[int], act: str, norm: str, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            layers.append(nn.Linear(before, after))
            if norm != "none":
                layers.append(nn.BatchNorm1d(after) if norm == "batch" else nn.LayerNorm(after))
            layers.append(_ACTIVATIONS[act]())
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Layer(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _padded(mode: str) -> nn.Module:
    return Layer(lambda x: F.pad(x, (2, 2, 2, 2), mode=mode)[..., 2:-2, 2:-2].contiguous())


def _resized(mode: str) -> nn.Module:
    return Layer(lambda x: F.avg_pool2d(F.interpolate(x, scale_factor=2.0, mode=mode), 2))


def _attended(keys: Tensor, values: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(keys, keys, values)


def _channels_last(width: int) -> nn.Module:
    """Layers that see their maps channels last, as they come from tokens."""
    return nn.Sequential(
        Layer(lambda x: x.contiguous(memory_format=torch.channels_last)),
        nn.Conv2d(width, width, 3, padding=1, groups=width),
        nn.Conv2d(width, width, 7, padding=3, groups=width),
        nn.MaxPool2d(3, 1, 1),
        _resized("bilinear"),
        Layer(lambda x: x.contiguous()),
    )


class _Corner(nn.Conv2d):
    """Adds the mean of a depthwise convolution over a corner of a map that is narrower than its padding."""

    def forward(self, input: Tensor) -> Tensor:
        side = self.kernel_size[0] // 4
        return input + super().forward(input[..., :side, :side].contiguous()).mean((2, 3), keepdim=True)


class _Standardised(nn.Conv2d):
    """A convolution with weights brought to mean 0 and variance 1."""

    def forward(self, input: Tensor) -> Tensor:
        rows = F.batch_norm(self.weight.flatten(1)[None], None, None, training=True)
        return F.conv2d(input, rows.view_as(self.weight), padding=self.padding)


# What networks of the kinds above hardly contain, by names that say what is special: each keeps the shape of maps of so
# many channels, a multiple of 8, with sides of at least 4 pixels.
MEDLEY: dict[str, Callable[[int], nn.Module]] = {
    "elu": lambda _: nn.ELU(),
    "reflect": lambda _: _padded("reflect"),
    "mish": lambda _: nn.Mish(),
    "group norm": lambda width: nn.GroupNorm(4, width),
    "softplus": lambda _: nn.Softplus(),
    "flip": lambda _: Layer(lambda x: x.flip(-1)),
    "leaky relu": lambda _: nn.LeakyReLU(0.1),
    "channel shuffle": lambda _: nn.ChannelShuffle(4),
    "exp": lambda _: Layer(lambda x: torch.exp(-torch.abs(x))),
    "prelu": lambda width: nn.PReLU(width),
    "divide": lambda _: Layer(lambda x: x / (1.0 + torch.square(x))),
    "circular": lambda _: _padded("circular"),
    "reflected lines": lambda _: Layer(lambda x: F.pad(x.flatten(2), (2, 2), "reflect")[..., 2:-2].reshape(x.shape)),
    "log": lambda _: Layer(lambda x: torch.log1p(torch.abs(x))),
    "instance norm": lambda width: nn.InstanceNorm2d(width),
    "hardsigmoid": lambda _: nn.Hardsigmoid(),
    "log softmax": lambda _: nn.LogSoftmax(1),
    "erf": lambda _: Layer(torch.erf),
    "replicate": lambda _: _padded("replicate"),
    "pixel shuffle": lambda _: nn.Sequential(nn.PixelUnshuffle(2), nn.PixelShuffle(2)),
    "normalise": lambda _: Layer(lambda x: F.normalize(x, dim=1)),
    "celu": lambda _: nn.CELU(),
    "maximum": lambda _: Layer(lambda x: torch.maximum(x, x.roll(1, 2))),
    "log sigmoid": lambda _: nn.LogSigmoid(),
    "glu": lambda _: Layer(lambda x: F.glu(torch.cat((x, x), 1), 1)),
    "root": lambda _: Layer(lambda x: torch.sqrt(torch.abs(x) + 1.0)),
    "centred": lambda _: Layer(lambda x: x - x.amax((2, 3), keepdim=True)),
    "greatest": lambda _: Layer(lambda x: x - x.max(1, keepdim=True).values),
    "scaled": lambda _: Layer(lambda x: x * torch.rsqrt(x.var(1, keepdim=True) + 1.0)),
    "softmax of places": lambda _: Layer(
        lambda x: x.flatten(2).transpose(1, 2).softmax(1).transpose(1, 2).contiguous().view_as(x)
    ),
    "softmax of columns": lambda _: Layer(lambda x: x.transpose(2, 3).softmax(3).transpose(2, 3)),
    # Torch computes these in parts: of values wider than their keys, and of rows in pieces.
    "wide values": lambda _: Layer(lambda x: _attended(x.chunk(2, 3)[0], x)),
    "attention to columns": lambda _: Layer(lambda x: _attended(y := x.transpose(2, 3), y).transpose(2, 3)),
    # These take much longer than the others, of which a network of both tells little.
    "average": lambda _: nn.AvgPool2d(3, 1, 1),
    "nearest": lambda _: _resized("nearest"),
    "bilinear": lambda _: _resized("bilinear"),
    "transposed": lambda width: nn.Sequential(nn.ConvTranspose2d(width, width, 2, 2), nn.AvgPool2d(2)),
    "standardised": lambda width: _Standardised(width, width, 3, padding=1),
    "groups of eight": lambda width: nn.Conv2d(width, width, 3, padding=1, groups=width // 8),
    "channels last": _channels_last,
    "bicubic": lambda _: _resized("bicubic"),
    "unfolded": lambda _: Layer(lambda x: F.fold(F.unfold(x, 3, padding=1), x.shape[2:], 3, padding=1) / 9.0),
    "noise": lambda _: Layer(lambda x: x + torch.rand_like(x)),
    "places": lambda _: Layer(lambda x: x + x.argmax(1, keepdim=True)),
    "places in rows": lambda _: Layer(lambda x: x + x.argmax(3, keepdim=True)),
    "running sums": lambda _: Layer(lambda x: x.cumsum(2) / x.shape[2]),
    "normalised rows": lambda _: Layer(lambda x: F.normalize(x, dim=-1)),
    "rms norm": lambda _: Layer(lambda x: F.rms_norm(x, x.shape[-1:])),
    "sine": lambda _: Layer(torch.sin),
    "power": lambda _: Layer(lambda x: torch.abs(x) ** 1.5),
    "pointwise pairs": lambda width: nn.Conv2d(width, width, 1, groups=2),
    "pointwise many groups": lambda width: nn.Conv2d(width, width, 1, groups=8),
    "dilated": lambda width: nn.Conv2d(width, width, 3, padding=2, dilation=2),
    "groups of two": lambda width: nn.Conv2d(width, width, 3, padding=1, groups=width // 2),
    "padded": lambda width: _Corner(width, width, 5, padding=2, groups=width),
    "padded more": lambda width: _Corner(width, width, 15, padding=7, groups=width),
    "multiplied": lambda width: nn.Sequential(nn.Conv2d(width, 2 * width, 3, padding=1, groups=width), nn.GLU(1)),
    "multiplied more": lambda width: nn.Sequential(
        nn.Conv2d(width, 4 * width, 7, padding=3, groups=width), nn.GLU(1), nn.GLU(1)
    ),
}
MEDLEY_LAYERS = 15  # of one network
