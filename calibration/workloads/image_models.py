"""Networks of images in plain torch, for the suites and the gate. Each function builds one with random weights."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from latpred.calibration.workloads.everyday_layers import (
    ChannelNorm,
    ClassToken,
    GatedChannels,
    Mean,
    MixedTokens,
    Patches,
    Residual,
    ResidualSum,
    SqueezedChannels,
    StandardConv,
    States,
    Take,
    Transposed,
    basic,
    conv,
    double,
    each,
    feed_forward,
    inverted,
    mlp,
    norm_head,
    pooled_head,
    transformer_layer,
)


def lenet() -> nn.Module:
    """LeNet-5 on a digit of 28 pixels."""
    maps = [nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2)]
    return nn.Sequential(*maps, nn.Flatten(), mlp(400, 120, 84, 10, activation=nn.Tanh))


def vgg11() -> nn.Module:
    """VGG-11 of half the width, with a narrow classifier."""
    layers: list[nn.Module] = []
    channels = 3
    for width, pool in ((32, True), (64, True), (128, False), (128, True), (256, False), (256, True), (256, False)):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
        layers += [nn.MaxPool2d(2)] if pool else []
        channels = width
    classes = [nn.Linear(channels * 4, 512), nn.ReLU(inplace=True), nn.Linear(512, 100)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), *classes)


def squeezenet() -> nn.Module:
    """SqueezeNet 1.1 with 100 classes."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, stride=2), nn.ReLU(inplace=True)]
    channels = 64
    for squeeze in (0, 16, 16, 0, 32, 32, 0, 48, 48, 64, 64):
        layers.append(_Fire(channels, squeeze, 4 * squeeze) if squeeze else nn.MaxPool2d(3, 2, ceil_mode=True))
        channels = 8 * squeeze or channels
    classes = [nn.Dropout(), nn.Conv2d(channels, 100, 1), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, *classes)


def convmixer() -> nn.Module:
    """ConvMixer: depthwise convolutions of 7 x 7 and pointwise ones over patches, six times."""
    layers: list[nn.Module] = [nn.Conv2d(3, 128, 4, 4), nn.GELU(), nn.BatchNorm2d(128)]
    for _ in range(6):
        depthwise = nn.Sequential(nn.Conv2d(128, 128, 7, padding=3, groups=128), nn.GELU(), nn.BatchNorm2d(128))
        layers += [Residual(depthwise), nn.Conv2d(128, 128, 1), nn.GELU(), nn.BatchNorm2d(128)]
    return nn.Sequential(*layers, pooled_head(128, 10))


def convnext() -> nn.Module:
    """ConvNeXt of three stages, its widths from 40 to 160."""
    layers: list[nn.Module] = [nn.Conv2d(3, 40, 4, stride=4), ChannelNorm(40), _ConvNext(40)]
    for before, after in pairwise((40, 80, 160)):
        layers += [ChannelNorm(before), nn.Conv2d(before, after, 2, stride=2), _ConvNext(after), _ConvNext(after)]
    return nn.Sequential(*layers, pooled_head(160, 50))


# -- residual networks -----------------------------------------------------------------------------------------------


def resnet_20() -> nn.Module:
    """ResNet-20 for images of 32 pixels, with convolutions in its shortcuts."""
    layers: list[nn.Module] = [conv(3, 16, 3)]
    for before, after, stride in ((16, 16, 1), (16, 32, 2), (32, 64, 2)):
        layers += [basic(before, after, stride), basic(after, after), basic(after, after)]
    return nn.Sequential(*layers, pooled_head(64, 10))


def small_resnet() -> nn.Module:
    """ResNet of basic blocks, its widths from 24 to 96."""
    steps = ((24, 24, 1), (24, 24, 1), (24, 48, 2), (48, 48, 1), (48, 96, 2), (96, 96, 1))
    return nn.Sequential(conv(3, 24, 7, stride=2), nn.MaxPool2d(3, 2, 1), *each(basic, steps), pooled_head(96, 50))


def bottleneck_resnet() -> nn.Module:
    """ResNet of bottlenecks, its widths from 64 to 256."""
    steps = ((32, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1))
    return nn.Sequential(conv(3, 32, 3, stride=2), *each(_bottleneck, steps), pooled_head(256, 50))


def squeezed_resnet() -> nn.Module:
    """A residual network of 48 pixels whose blocks weigh their channels (squeeze and excitation)."""
    layers: list[nn.Module] = [conv(3, 32, 3)]
    for before, after, stride in ((32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)):
        layers += [basic(before, after, stride), SqueezedChannels(after, after // 8)]
    return nn.Sequential(*layers, pooled_head(128, 20))


def preactivated() -> nn.Module:
    """A residual network of 32 pixels that normalises before every convolution."""
    steps = ((24, 24, 1), (24, 24, 1), (24, 48, 2), (48, 48, 1), (48, 96, 2), (96, 96, 1))
    stem, blocks = nn.Conv2d(3, 24, 3, padding=1, bias=False), each(_Preactivated, steps)
    return nn.Sequential(stem, *blocks, nn.BatchNorm2d(96), nn.ReLU(), pooled_head(96, 10))


def standardised() -> nn.Module:
    """Standardised weights and group normalisation, as BiT has them."""
    steps = ((40, 40, 1), (40, 80, 2), (80, 80, 1), (80, 160, 2))
    stem, blocks = StandardConv(3, 40, 3, stride=2, padding=1), each(_Standardised, steps)
    return nn.Sequential(stem, *blocks, pooled_head(160, 50))


def normalizer_free() -> nn.Module:
    """A normaliser-free residual network, whose weights are standardised in every forward pass."""
    steps = ((32, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1))
    stem, blocks = StandardConv(3, 32, 3, stride=2, padding=1), each(_NormalizerFree, steps)
    return nn.Sequential(stem, *blocks, nn.ReLU(), pooled_head(128, 100))


def normalizer_free_bottlenecks() -> nn.Module:
    """A normaliser-free network of bottlenecks, whose weights are standardised in every forward pass."""
    steps = ((24, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2))
    stem, blocks = StandardConv(3, 24, 3, stride=2, padding=1), each(_FreeBottleneck, steps)
    return nn.Sequential(stem, nn.SiLU(), *blocks, nn.SiLU(), pooled_head(256, 50))


# -- mobile networks -------------------------------------------------------------------------------------------------


def mobilenet_half() -> nn.Module:
    """MobileNetV2's blocks at half their width, with ReLU6."""
    layers: list[nn.Module] = [conv(3, 16, 3, stride=2, activation=nn.ReLU6)]
    steps = ((16, 16, 1), (16, 16, 2), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 48, 2), (48, 48, 1), (48, 80, 1))
    layers += [inverted(*step, activation=nn.ReLU6) for step in steps]
    return nn.Sequential(*layers, conv(80, 320, 1, activation=nn.ReLU6), pooled_head(320, 100))


def gated_mobilenet() -> nn.Module:
    """Inverted residuals with gated channels, as MobileNetV3 has them."""
    layers: list[nn.Module] = [conv(3, 16, 3, stride=2, activation=nn.Hardswish)]
    for before, after, stride in ((16, 24, 2), (24, 24, 1), (24, 40, 2), (40, 40, 1), (40, 80, 2), (80, 80, 1)):
        gate = (GatedChannels(4 * before),) if after >= 40 else ()
        layers.append(inverted(before, after, stride, *gate, activation=nn.Hardswish))
    return nn.Sequential(*layers, conv(80, 320, 1, activation=nn.Hardswish), pooled_head(320, 50))


def shufflenet() -> nn.Module:
    """ShuffleNet V2 at half its width."""
    layers: list[nn.Module] = [conv(3, 24, 3, stride=2), nn.MaxPool2d(3, 2, 1)]
    for (before, after), depth in zip(pairwise((24, 48, 96, 192)), (4, 8, 4), strict=True):
        layers += [_Shuffled(before, after, 2), *(_Shuffled(after, after, 1) for _ in range(depth - 1))]
    return nn.Sequential(*layers, conv(192, 512, 1), pooled_head(512, 100))


def shufflenet_v1() -> nn.Module:
    """ShuffleNet of the first version with three groups."""
    layers: list[nn.Module] = [conv(3, 24, 3, stride=2), nn.MaxPool2d(3, 2, 1)]
    for (before, after), depth in zip(pairwise((24, 120, 240)), (4, 6), strict=True):
        layers.append(_GroupShuffled(before, after - before, after // 4, 2))
        layers += [_GroupShuffled(after, after, after // 4, 1) for _ in range(depth - 1)]
    return nn.Sequential(*layers, pooled_head(240, 100))


def small_shufflenet_v1() -> nn.Module:
    """The first ShuffleNet: grouped pointwise convolutions, channels dealt out between them."""
    layers: list[nn.Module] = [conv(3, 24, 3, stride=2), nn.MaxPool2d(3, 2, 1), conv(24, 60, 1)]
    for before, after in ((60, 120), (120, 240)):
        layers.append(_GroupShuffled(before, after - before, (after - before) // 4, 2))
        layers += [_GroupShuffled(after, after, after // 4, 1) for _ in range(2)]
    return nn.Sequential(*layers, pooled_head(240, 50))


# -- dense networks --------------------------------------------------------------------------------------------------


def densenet() -> nn.Module:
    """A small DenseNet: every layer reads what all before it in its block wrote."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    channels = 32
    for depth in (4, 6, 8):
        for _ in range(depth):
            layers.append(_DenseBottleneck(channels, growth=16))
            channels += 16
        layers += [nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels // 2, 1), nn.AvgPool2d(2)]
        channels //= 2
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 100))


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


def densely_joined() -> nn.Module:
    """DenseNet with a growth of 12: two dense blocks of six layers over 32 pixels."""
    first, second = ([_DenseLayer(start + 12 * index, 12) for index in range(6)] for start in (24, 48))
    stem, between = nn.Conv2d(3, 24, 3, padding=1, bias=False), [conv(96, 48, 1), nn.AvgPool2d(2)]
    return nn.Sequential(stem, *first, *between, *second, nn.BatchNorm2d(120), nn.ReLU(), pooled_head(120, 10))


# -- patches ---------------------------------------------------------------------------------------------------------


def tiny_vit() -> nn.Module:
    """A small ViT without class token: 4 layers of width 128 over 64 patches."""
    layers = [transformer_layer(128, 4) for _ in range(4)]
    return nn.Sequential(Patches(3, 128, 4, tokens=64), *layers, Mean(), norm_head(128, 10))


def vision_transformer() -> nn.Module:
    """ViT with a class token, 3 layers of width 160."""
    layers = [transformer_layer(160, 5) for _ in range(3)]
    return nn.Sequential(ClassToken(160, 8, 64), *layers, Take(0), norm_head(160, 50))


def mixer(width: int, tokens: int, along: int, layers: int, classes: int) -> nn.Module:
    """MLP-Mixer over patches of 8 x 8, whose hidden layer along the tokens has the width `along`."""
    blocks = [nn.Sequential(MixedTokens(width, tokens, along), feed_forward(width, 4 * width)) for _ in range(layers)]
    return nn.Sequential(Patches(3, width, 8), *blocks, Mean(), norm_head(width, classes))


def res_mlp() -> nn.Module:
    """ResMLP: six layers of width 160 over 49 patches, scaled and shifted in place of normalisation."""
    layers = [nn.Sequential(_Along(160, 49), _ScaledForward(160, 640)) for _ in range(6)]
    return nn.Sequential(Patches(3, 160, 16), *layers, _Shifted(160), Mean(), nn.Linear(160, 100))


def conv_attention() -> nn.Module:
    """A hybrid for 224 pixels: inverted residuals of few channels, then attention on 14 x 14."""
    layers = each(inverted, ((16, 24, 2), (24, 24, 1), (24, 48, 2), (48, 48, 1), (48, 96, 2)))
    tokens = [Patches(96, 96, 1, tokens=196), transformer_layer(96, 4), transformer_layer(96, 4)]
    return nn.Sequential(conv(3, 16, 3, 2, activation=nn.SiLU), *layers, *tokens, Mean(), norm_head(96, 100))


def hybrid_160() -> nn.Module:
    """A hybrid for 160 pixels: inverted residuals with squeezed channels, then attention on 10 x 10."""
    layers: list[nn.Module] = [conv(3, 24, 3, stride=2, activation=nn.Hardswish)]
    for before, after, stride in ((24, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1)):
        layers.append(inverted(before, after, stride, SqueezedChannels(4 * before, before), activation=nn.Hardswish))
    tokens = [Patches(64, 128, 2, tokens=100), *(transformer_layer(128, 4) for _ in range(3))]
    return nn.Sequential(*layers, *tokens, Mean(), norm_head(128, 100))


def compact_transformer() -> nn.Module:
    """CCT: a convolutional stem, four layers of attention over 64 tokens, which are pooled by a learned weight."""
    first = [nn.Conv2d(3, 96, 3, padding=1, bias=False), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    tokens = [conv(96, 96, 3), nn.MaxPool2d(2), Patches(96, 96, 1, tokens=64)]
    layers = [transformer_layer(96, 3) for _ in range(4)]
    return nn.Sequential(*first, *tokens, *layers, nn.LayerNorm(96), _Pooled(96), nn.Linear(96, 10))


# -- images out of images, and text out of them ------------------------------------------------------------------------


def unet() -> nn.Module:
    """A U-Net of three depths that segments images: convolutions down, transposed ones up, joined at each depth."""
    return _UNet(3, (24, 48, 96, 192), 4, learned=True)


def bilinear_unet() -> nn.Module:
    """A U-Net of three depths that grows its maps by interpolation."""
    return _UNet(1, (16, 32, 64), 2, learned=False)


def linknet() -> nn.Module:
    """LinkNet: a residual encoder of three depths, whose maps are added on the way up."""
    return _LinkNet((24, 48, 96))


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


def residual_super_resolution() -> nn.Module:
    """SRResNet with four blocks: from 32 pixels to 64."""
    blocks = [Residual(conv(48, 48, 3, activation=nn.PReLU), conv(48, 48, 3, activation=nn.Identity)) for _ in range(4)]
    ends = [nn.Conv2d(48, 192, 3, padding=1), nn.PixelShuffle(2), nn.PReLU(), nn.Conv2d(48, 3, 9, padding=4)]
    return nn.Sequential(nn.Conv2d(3, 48, 9, padding=4), nn.PReLU(), Residual(*blocks), *ends)


def autoencoder() -> nn.Module:
    """Convolutions down to 128 numbers and transposed ones up again."""
    down: list[nn.Module] = []
    up: list[nn.Module] = []
    for before, after in pairwise((3, 32, 64, 128)):
        down += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.LeakyReLU(0.2)]
        up = [nn.ReLU(), nn.ConvTranspose2d(after, before, 4, stride=2, padding=1), *up]
    code = [nn.Flatten(), nn.Linear(8192, 128), nn.Linear(128, 8192), nn.Unflatten(1, (128, 8, 8))]
    return nn.Sequential(*down, *code, *up, nn.Sigmoid())


def line_reader() -> nn.Module:
    """CRNN: convolutions over the image of a line of text, an LSTM in both directions, a class for each column."""
    maps = [conv(1, 32, 3), nn.MaxPool2d(2), conv(32, 64, 3), nn.MaxPool2d(2), conv(64, 96, 3), nn.MaxPool2d((2, 1))]
    states = States(nn.LSTM(4 * 96, 96, batch_first=True, bidirectional=True))
    return nn.Sequential(*maps, nn.Flatten(1, 2), Transposed(), states, nn.Linear(192, 40))


# -- their blocks ----------------------------------------------------------------------------------------------------


def _bottleneck(before: int, after: int, stride: int) -> nn.Module:
    narrow = after // 4
    last = conv(narrow, after, 1, activation=nn.Identity)
    body = nn.Sequential(conv(before, narrow, 1), conv(narrow, narrow, 3, stride), last)
    return ResidualSum(body, before, after, stride)


class _Preactivated(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList((nn.BatchNorm2d(before), nn.BatchNorm2d(after)))
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.shortcut = nn.Identity() if before == after else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        ready = F.relu(self.norms[0](x))
        return self.second(F.relu(self.norms[1](self.first(ready)))) + self.shortcut(x)


class _Standardised(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.norm, self.again = nn.GroupNorm(8, before), nn.GroupNorm(8, after)
        self.first, self.second = StandardConv(before, after, 3, stride, 1), StandardConv(after, after, 3, 1, 1)
        same = stride == 1 and before == after
        self.shortcut = nn.Identity() if same else StandardConv(before, after, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.second(F.relu(self.again(self.first(F.relu(self.norm(x))))))


class _NormalizerFree(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = StandardConv(before, after, 3, stride, 1), StandardConv(after, after, 3, 1, 1)
        self.shortcut = nn.Identity() if before == after else StandardConv(before, after, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + 0.2 * self.second(F.relu(self.first(F.relu(x))))


class _FreeBottleneck(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        middle = after // 4
        wide = StandardConv(middle, middle, 3, stride, 1), StandardConv(middle, middle, 3, 1, 1)
        self.inner = nn.ModuleList((StandardConv(before, middle, 1), *wide, StandardConv(middle, after, 1)))
        self.shortcut = nn.Identity() if before == after else StandardConv(before, after, 1)
        self.pool = nn.Identity() if stride == 1 else nn.AvgPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(x)
        out = x
        for layer in self.inner[:-1]:
            out = F.silu(layer(out))
        return self.shortcut(self.pool(x)) + 0.2 * self.inner[-1](out)


class _Shuffled(nn.Module):
    """ShuffleNet V2's block: half of the channels pass, the other half is convolved."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        half, given = after // 2, before if stride > 1 else after // 2
        thin = conv(given, given, 3, stride, groups=given, activation=nn.Identity)
        self.left = nn.Sequential(thin, conv(given, half, 1)) if stride > 1 else None
        middle = conv(half, half, 3, stride, groups=half, activation=nn.Identity)
        self.right = nn.Sequential(conv(given, half, 1), middle, conv(half, half, 1))

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, 1) if self.left is None else (self.left(x), x)
        return _shuffled(torch.cat([left, self.right(right)], 1), 2)


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


class _Fire(nn.Module):
    def __init__(self, before: int, squeeze: int, expand: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(before, squeeze, 1)
        self.narrow, self.wide = nn.Conv2d(squeeze, expand, 1), nn.Conv2d(squeeze, expand, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.squeeze(x))
        return torch.cat([F.relu(self.narrow(x)), F.relu(self.wide(x))], 1)


class _DenseLayer(nn.Module):
    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(channels), nn.Conv2d(channels, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv(F.relu(self.norm(x)))], 1)


class _DenseBottleneck(nn.Module):
    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(channels), nn.Conv2d(channels, 4 * growth, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(4 * growth), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.conv1(F.relu(self.norm1(x)))
        return torch.cat([x, self.conv2(F.relu(self.norm2(inner)))], 1)


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
        return x + self.after(self.mix(self.before(x).transpose(1, 2)).transpose(1, 2))


class _ScaledForward(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.before, self.after = _Shifted(width), _Shifted(width)
        self.inner = mlp(width, hidden, width, activation=nn.GELU)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.after(self.inner(self.before(x)))


class _Pooled(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weigh = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(self.weigh(x).softmax(1).transpose(1, 2), x).squeeze(1)


class _UNet(nn.Module):
    """Pairs of convolutions down and up again; maps grow by transposed convolutions or by interpolation."""

    def __init__(self, channels: int, widths: tuple[int, ...], classes: int, *, learned: bool) -> None:
        super().__init__()
        steps = list(reversed(list(pairwise(widths))))
        pair = _flat_double if learned else double
        self.down = nn.ModuleList(pair(before, after) for before, after in pairwise((channels, *widths)))
        self.up = nn.ModuleList(pair(2 * low if learned else low + high, low) for low, high in steps)
        self.grow = nn.ModuleList(
            nn.ConvTranspose2d(high, low, 2, stride=2)
            if learned
            else nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
            for low, high in steps
        )
        self.classes = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        maps: list[Tensor] = []
        for block in self.down:
            maps.append(block(F.max_pool2d(maps[-1], 2) if maps else x))
        x = maps.pop()
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat([maps.pop(), grow(x)], 1))
        return self.classes(x)


def _flat_double(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(*conv(before, after, 3), *conv(after, after, 3))


class _LinkNet(nn.Module):
    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        steps = list(pairwise(widths))
        self.first = conv(3, widths[0], 7, stride=2)
        self.down = nn.ModuleList(nn.Sequential(basic(low, high, 2), basic(high, high)) for low, high in steps)
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
        return self.classes(x)
