"""Convolutional blocks of the generated calibration networks.

A block of stride 2 wants a map of at least two pixels a side; `networks.strides` sees to it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from latpred.calibration.workloads.blocks.token_blocks import activation as _activation


def conv_norm(
    c_in: int, c_out: int, kernel: int, stride: int = 1, groups: int = 1, activation: str | None = "relu"
) -> nn.Sequential:
    """Convolution, batch norm and an activation."""
    layers: list[nn.Module] = [
        nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(c_out),
    ]
    return nn.Sequential(*layers, *([] if activation is None else [_activation(activation)]))


class SqueezeExcite(nn.Module):
    """Channel gate from globally pooled features."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        narrow = max(8, channels // 4)
        self.pool, self.down, self.up = (
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, narrow, 1),
            nn.Conv2d(narrow, channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.up(F.relu(self.down(self.pool(x)))))


class ResidualBlock(nn.Module):
    """Basic or bottleneck residual block, optionally grouped and gated."""

    def __init__(
        self, c_in: int, c_out: int, stride: int, window: int, *, groups: int, bottleneck: bool, squeeze: bool
    ) -> None:
        super().__init__()
        middle = max(groups * 8, c_out // 4 // groups * groups) if bottleneck else c_out
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
    """Squeeze by 1x1, expand by 1x1 and 3x3, concatenate."""

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
    """Global pooling and a linear layer."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.flatten(self.pool(x), 1))
