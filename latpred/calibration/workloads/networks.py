"""Generated networks: small random architectures whose ops are timed in place.

An op timed alone in a loop finds its operands in the nearest cache and runs up to twice as fast as the same op inside a
network, so on a synchronous device kernels are learned from whole forward passes. These networks are drawn at random,
from the blocks that published architectures are made of, and belong to no suite that a profile is ever judged on.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import nn

from latpred.calibration.cells import log_uniform
from latpred.calibration.workloads import blocks
from latpred.graph.graph import ModelGraph
from latpred.runtimes.lowering import fitting, of_source, target_of
from latpred.runtimes.source import Source
from latpred.tracing import trace
from latpred.tracing.inputs import cast, dtype_of

Tensors = tuple[torch.Tensor, ...]


class NetworkSpec(msgspec.Struct, frozen=True):
    """One generated network: what `build` needs to make it again, anywhere."""

    kind: str
    seed: int
    width: int  # scales every layer
    size: int  # sequence length, side of the image, or number of features
    batch: int
    cold: bool = False  # the cache is filled with something else before each pass, as by a larger model's layers

    @property
    def tiny(self) -> bool:
        """So narrow that only dispatch takes time."""
        return self.width == TINY_WIDTH

    @property
    def chain(self) -> bool:
        """Issues no op at all."""
        return self.kind in CHAINS

    @property
    def holdout(self) -> bool:
        """Kept out of every fit, to tell how well whole networks are predicted."""
        return not self.tiny and self.seed // len(KINDS) % HOLDOUT_EVERY == HOLDOUT_EVERY - 1


KINDS = ("encoder", "decoder", "residual", "mobile", "patch", "window", "dense", "audio", "mixer", "recurrent", "mlp")
WAVE, WAVE_TURNS = "wave", (1, 3)  # in these of five turns of "audio" its place is taken
VERSION = 17  # of what a spec means; a journal of another version is not resumed
TINY_WIDTH = 8
HOLDOUT_EVERY = 6
EVICTING_BYTES = 64 << 20  # what a cold network's weights are pushed out by
COLD_SHARE = 0.6  # of sized networks
MEDLEY, MEDLEY_VALUES = "medley", (1 << 15, 1 << 20)  # and how many its maps have: dispatch hides what takes less
# The same of networks whose maps no cache holds; with larger ones the memory that the system gives would be timed too.
LARGE, LARGE_VALUES = "large", (1 << 20, 4 << 20)
# Every other one is a perceptron: small models are made of products of few rows, for which libraries have other code.
SMALL_KINDS = "mlp", "recurrent", "mlp", MEDLEY, "mlp", LARGE
SMALL_BATCHES = (1, 1, 2, 3, 4, 6, 8, 12, 16, 24)
SMALL_BYTES = 4 << 20  # of weights, which the caches of most machines hold beside what else a pass touches
CHAINS = ("modules", "functions", "attributes")  # do nothing but call or read, `size` times
_IMAGE = ("residual", "mobile", "patch", "window", "dense")
_WORDS = ("encoder", "decoder", "recurrent")


def draw(seed: int, *, tiny: bool = False) -> NetworkSpec:
    """A random network; `tiny` ones are so narrow that only their dispatch takes time."""
    rng = random.Random(seed)
    turn, number = divmod(seed, len(KINDS))
    kind = KINDS[number]
    if kind == "audio" and turn % 5 in WAVE_TURNS:
        kind = WAVE
    if tiny:
        return NetworkSpec(kind, seed, width=TINY_WIDTH, size=32 if kind in _IMAGE else 8, batch=1)
    smallest, largest = (32, 320) if kind in ("residual", "mobile", "dense") else (64, 1280)
    width = log_uniform(rng, smallest, largest, 8)
    if kind == "mlp":
        size = log_uniform(rng, 8, 1024, 8)
    elif kind in _IMAGE:
        size = rng.choice((32, 48, 64, 96, 112, 128, 160, 192, 224))
    else:
        size = log_uniform(rng, 4, 384, 1 if rng.random() < 0.3 else 4)
    batch = rng.choice((1, 1, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32))
    return NetworkSpec(kind, seed, width, size, batch, cold=rng.random() < COLD_SHARE)


def draw_small(kind: str, seed: int) -> NetworkSpec:
    """A random network that finds its weights where its last forward pass left them, if they are few enough."""
    rng = random.Random(f"small/{seed}")
    if kind in (MEDLEY, LARGE):
        width, batch = log_uniform(rng, 16, 128, 8), rng.choice((1, 1, 2, 4, 16))
        plane = log_uniform(rng, *(MEDLEY_VALUES if kind == MEDLEY else LARGE_VALUES), 1) / (width * batch)
        return NetworkSpec(kind, seed, width, max(8, _multiple(plane**0.5, 2)), batch)
    smallest, longest, batches = (128, 1024, SMALL_BATCHES) if kind == "mlp" else (64, 96, (1, 1, 1, 1, 2, 4))
    width, size = log_uniform(rng, smallest, 1024, 8), log_uniform(rng, 4, longest, 1)
    return NetworkSpec(kind, seed, width, size, rng.choice(batches))


def build(spec: NetworkSpec) -> nn.Module:
    """The network of a spec, in eval mode, on the default device."""
    rng = random.Random(spec.seed * 7919 + 13)
    return _MAKERS[spec.kind](rng, spec).eval().requires_grad_(False)


def parameter_bytes(spec: NetworkSpec) -> int:
    """What the weights of a spec's network take in float32, without making them or tracing it."""
    with torch.device("meta"):
        return sum(parameter.nbytes for parameter in build(spec).parameters())


def inputs(spec: NetworkSpec, batch: int | None = None, device: str = "cpu") -> Tensors:
    """Random inputs of a spec's network at its own batch or another."""
    count, samples = spec.batch if batch is None else batch, spec.size * 160
    if spec.kind in _WORDS:
        return (torch.randint(0, blocks.VOCABULARY, (count, spec.size), device=device),)
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(_IMAGE, (3, spec.size, spec.size))
    shapes |= dict.fromkeys(CHAINS, (TINY_WIDTH,))
    shapes |= {"audio": (samples,), WAVE: (1, samples), "mlp": (spec.size,)}
    shapes |= {"mixer": (spec.size, _multiple(spec.width, 8))}
    shapes |= dict.fromkeys((MEDLEY, LARGE), (spec.width, spec.size, spec.size))
    return (torch.randn(count, *shapes[spec.kind], device=device),)


def graph(spec: NetworkSpec, precision: str = "fp32", kind: str = "cpu") -> ModelGraph:
    """What a spec's network does on a kind of device; a cold one counts the weights that pushed its own out."""
    return _graph(msgspec.structs.replace(spec, batch=1), precision, target_of(kind))  # whatever its batch


@lru_cache(maxsize=4096)
def _graph(spec: NetworkSpec, precision: str, target: str) -> ModelGraph:
    traced = _traced(spec, precision, target=target)
    if not spec.cold:
        return traced
    return msgspec.structs.replace(traced, parameter_bytes=traced.parameter_bytes + EVICTING_BYTES)


def _traced(spec: NetworkSpec, precision: str, **options: Any) -> ModelGraph:
    """The eager trace of a spec's network."""
    with torch.device("meta"):
        model = build(spec)
    with torch.random.fork_rng(devices=[]):  # of whoever predicts or fits, whose generator stays where it is
        given = inputs(spec, 2)
    return trace(model, given, precision=precision, **options)


def real_model(spec: NetworkSpec, precision: str, device: str = "cpu") -> nn.Module:
    """The real network of a spec, with ordinary weights: tools that export or trace want no inference tensors."""
    with torch.inference_mode(False), torch.no_grad(), torch.device(device):
        return build(spec).to(dtype_of(precision))


def real_inputs(spec: NetworkSpec, precision: str, device: str = "cpu", batch: int | None = None) -> Tensors:
    """Real inputs of a spec's network at its own batch or another."""
    with torch.inference_mode(False):
        made: Tensors = cast(inputs(spec, batch, device), dtype_of(precision))
        return made


def graph_in(spec: NetworkSpec, precision: str, runtime: str, kind: str) -> ModelGraph:
    """What a runtime runs for a spec's network on a kind of device."""
    own, target = graph(spec, precision, kind), target_of(kind)
    if kind == "simulated":  # which runs graphs and not models: an estimated one serves it as well
        return fitting(own, runtime, target)
    real, given = partial(real_model, spec, precision), lambda batch: real_inputs(spec, precision, batch=batch)
    source = Source(own, real, given, partial(_traced, spec, precision))
    found = of_source(source, runtime, target, spec.batch)
    if spec.cold and found.parameter_bytes != own.parameter_bytes:
        # A runtime that counts weights itself knows nothing of those that push a cold network's own out.
        found = msgspec.structs.replace(found, parameter_bytes=own.parameter_bytes)
    return found


def _multiple(value: float, step: int) -> int:
    return max(step, round(value / step) * step)


def _heads(rng: random.Random, width: int) -> tuple[int, int]:
    """A width near the one asked for that splits into heads of a usual size."""
    head = rng.choice([size for size in (16, 24, 32, 48, 64, 80, 96, 128) if size <= width] or [width])
    heads = max(1, round(width / head))
    return heads * head, heads


def _encoder(rng: random.Random, spec: NetworkSpec) -> nn.Module:
    width, heads = _heads(rng, spec.width)
    hidden = _multiple(width * rng.choice((0.5, 1, 2, 3, 4, 4)), 8)
    bottleneck = _multiple(width / rng.choice((1, 1, 1, 2, 4)), 8)
    layers = [
        blocks.EncoderLayer(
            width,
            heads,
            hidden,
            attention=rng.choice(("fused", "fused", "masked", "explicit", "biased")),
            activation=rng.choice(("gelu", "gelu_tanh", "relu", "tanh_gelu", "silu")),
            norm=rng.choice(("layer", "layer", "affine", "rms")),
            pre_norm=rng.random() < 0.5,
        )
        for _ in range(rng.choice((1, 2, 2)))
    ]
    return blocks.TokenNetwork(width, bottleneck, layers, classes=_multiple(spec.width, 8))


def _decoder(rng: random.Random, spec: NetworkSpec) -> nn.Module:
    width, heads = _heads(rng, spec.width)
    hidden = _multiple(width * rng.choice((2, 8 / 3, 4)), 8)
    layers = [
        blocks.DecoderLayer(width, heads, hidden, rotary=rng.random() < 0.5, gated=rng.random() < 0.5)
        for _ in range(rng.choice((1, 2)))
    ]
    return blocks.TokenNetwork(width, width, layers, classes=_multiple(spec.width * 2, 8))


def strides(side: int, stages: int, *, pooled: bool) -> list[int]:
    """Strides of the stages of a convolutional network: each but the first halves its map, unless that is one pixel.

    Pooling has no result on a single pixel, and a convolution nothing to stride over.
    """
    steps = [1]
    while len(steps) < stages:
        steps.append(2 if side > 1 else 1)
        side = max(1, side // 2 if pooled else (side + 1) // 2)  # pooling leaves out an odd pixel
    return steps


def _stages(
    rng: random.Random, spec: NetworkSpec, block: Callable[[int, int, int], nn.Module], *, pooled: bool = False
) -> nn.Module:
    """A convolutional network: stem, two or three stages of growing width, pooling, classifier."""
    # A stem of large stride leaves what the late stages of a deep network see: small maps of many channels.
    kernel, stride = rng.choice(((3, 1), (3, 2), (7, 2), (4, 4), (8, 8), (16, 16)))
    width = _multiple(spec.width / (2 if stride < 4 else 1), 8)
    layers: list[nn.Module] = [blocks.conv_norm(3, width, kernel, stride, activation=rng.choice(("relu", "silu")))]
    side = (spec.size + 2 * (kernel // 2) - kernel) // stride + 1
    if rng.random() < 0.5:
        layers.append(nn.MaxPool2d(3, 2, 1))
        side = (side + 1) // 2
    for stage, step in enumerate(strides(side, rng.choice((2, 3)), pooled=pooled)):
        wider = _multiple(width * (1 if stage == 0 else 2), 8)
        layers += [block(width, wider, step), block(wider, wider, 1)]
        width = wider
    return nn.Sequential(*layers, blocks.Classifier(width, classes=rng.choice((10, 100, 1000))))


def _residual(rng: random.Random, spec: NetworkSpec) -> nn.Module:
    style = rng.choice(("basic", "bottleneck", "plain"))
    groups = rng.choice((1, 1, 4, 8, 32)) if style == "bottleneck" else 1
    squeeze = rng.random() < 0.2
    window = rng.choice((3, 3, 3, 5, 5, 7))

    def block(c_in: int, c_out: int, stride: int) -> nn.Module:
        if style == "plain":
            return blocks.PlainBlock(c_in, c_out, stride, window, bias=rng.random() < 0.5)
        return blocks.ResidualBlock(
            c_in, c_out, stride, window, groups=groups, bottleneck=style == "bottleneck", squeeze=squeeze
        )

    return _stages(rng, spec, block, pooled=style == "plain")


def _mobile(rng: random.Random, spec: NetworkSpec) -> nn.Module:
    block = partial(
        blocks.InvertedResidual,
        expand=rng.choice((1, 3, 4, 6)),
        kernel=rng.choice((3, 3, 5)),
        activation=rng.choice(("relu6", "hardswish", "silu", "relu")),
        squeeze=rng.random() < 0.5,
    )
    return _stages(rng, msgspec.structs.replace(spec, width=max(16, spec.width // 2)), block)


def _patch(rng: random.Random, spec: NetworkSpec) -> nn.Module:
    width, heads = _heads(rng, spec.width)
    side = rng.choice([side for side in (4, 8, 16, 32) if spec.size // side >= 2 and spec.size % side == 0] or [4])
    layers = [blocks.EncoderLayer(width, heads, 4 * width, pre_norm=True) for _ in range(rng.choice((1, 2)))]
    return blocks.PatchNetwork(width, side, spec.size, layers, classes=rng.choice((10, 1000)))


def _window(rng: random.Random, spec: NetworkSpec) -> nn.Module:
    width = _multiple(min(spec.width, 512), 32)
    side = rng.choice((2, 4))
    if rng.random() < 0.5:
        layers: list[nn.Module] = [blocks.ConvNextBlock(width, rng.choice((3, 5, 7))) for _ in range(2)]
        return blocks.PatchMap(width, side, layers, channels_last=False, classes=rng.choice((10, 1000)))
    window = rng.choice((2, 4, 7, 8))
    layers = [blocks.WindowBlock(width, max(1, width // 32), window, shift=shift) for shift in (0, window // 2)]
    return blocks.PatchMap(width, side, layers, channels_last=True, classes=rng.choice((10, 1000)))


def _dense(rng: random.Random, spec: NetworkSpec) -> nn.Module:
    growth = _multiple(spec.width / 4, 8)
    makers: dict[str, Callable[[int, int, int], nn.Module]] = {
        "concatenate": partial(blocks.DenseBlock, growth=growth),
        "shuffle": blocks.ShuffleBlock,
        "fire": blocks.FireBlock,
    }
    style = rng.choice(list(makers))
    return _stages(rng, spec, makers[style], pooled=style != "shuffle")


def _audio(rng: random.Random, spec: NetworkSpec) -> nn.Module:
    width, heads = _heads(rng, min(spec.width, 768))
    layer = blocks.EncoderLayer(width, heads, 4 * width, pre_norm=False)
    return blocks.AudioNetwork(_multiple(spec.width / 2, 16), width, layer, group_norm=rng.random() < 0.5)


def _wave(rng: random.Random, spec: NetworkSpec) -> nn.Module:
    """1-d convolutions over samples of sound, each followed by pooling while there is enough left to pool."""
    width, stride, classes = _multiple(spec.width / 4, 8), rng.choice((2, 4, 4, 8)), rng.choice((10, 35, 128))
    window, step = rng.choice(((2, 2), (3, 2), (3, 3), (4, 4), (4, 4), (8, 8)))
    levels, length = rng.choice((2, 3, 4)), spec.size * 160 // stride
    layers: list[nn.Module] = [nn.Conv1d(1, width, 2 * stride, stride, stride // 2)]
    while levels and length >= window:
        layers += [nn.BatchNorm1d(width), nn.ReLU(), nn.MaxPool1d(window, step)]
        wider = width * rng.choice((1, 2))
        layers.append(nn.Conv1d(width, wider, 3, padding=1))
        levels, length, width = levels - 1, (length - window) // step + 1, wider
    return nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(width, classes))


def _mixer(rng: random.Random, spec: NetworkSpec) -> nn.Module:
    width = _multiple(spec.width, 8)
    style = rng.choice(("fourier", "tokens", "grouped", "grouped"))
    return blocks.MixerNetwork(width, spec.size, style, groups=rng.choice((2, 4, 8)), classes=rng.choice((8, 128)))


def _recurrent(rng: random.Random, spec: NetworkSpec) -> nn.Module:
    width = _multiple(min(spec.width, 256), 8)
    recurrences = [
        (
            rng.choice(("lstm", "lstm", "gru", "gru", "rnn")),
            _multiple(width * rng.choice((0.25, 0.5, 1, 1)), 8),
            rng.choice((1, 1, 2)),
            rng.random() < 0.5,
        )
        for _ in range(rng.choice((1, 2, 3)))
    ]
    return blocks.RecurrentNetwork(width, recurrences)


def _mlp(rng: random.Random, spec: NetworkSpec) -> nn.Module:
    width, depth = _multiple(spec.width, 8), rng.choice((2, 3, 4, 6, 8, 12))
    tapering, norm = rng.random() < 0.3, rng.choice(("none", "none", "none", "batch", "layer"))
    widths = [spec.size, *(_multiple(width / 2 ** (layer if tapering else 0), 8) for layer in range(depth))]
    return blocks.MlpNetwork(widths, rng.choice(("relu", "relu", "gelu", "silu", "tanh")), norm, rng.choice((1, 10)))


def _medley(_: random.Random, spec: NetworkSpec) -> nn.Module:
    """Layers in turn, so that a few networks hold all of them."""
    first, makers = spec.seed * blocks.MEDLEY_LAYERS, list(blocks.MEDLEY.values())
    return nn.Sequential(
        *(makers[number % len(makers)](spec.width) for number in range(first, first + blocks.MEDLEY_LAYERS))
    )


# What most networks contain, and in large ones on maps that no cache holds: each keeps the shape of maps of so many
# channels.
_COMMON: dict[str, Callable[[int], nn.Module]] = {
    "residual": lambda _: blocks.Layer(lambda x: x + F.relu(x)),
    "gate": lambda _: blocks.Layer(lambda x: x * torch.sigmoid(x)),
    "batch norm": lambda width: nn.BatchNorm2d(width),
    "in place": lambda _: nn.ReLU(inplace=True),
    "gelu": lambda _: nn.GELU(),
    "silu": lambda _: nn.SiLU(),
    "hardswish": lambda _: nn.Hardswish(),
    "max pool": lambda _: nn.MaxPool2d(3, 1, 1),
    "depthwise": lambda width: nn.Conv2d(width, width, 3, padding=1, groups=width),
    "pointwise": lambda width: nn.Conv2d(width, width, 1),
    "concatenate": lambda _: blocks.Layer(lambda x: torch.cat(x.chunk(2, 1), 1)),
    "layer norm": lambda width: nn.Sequential(
        blocks.Layer(lambda x: x.permute(0, 2, 3, 1).contiguous()),
        nn.LayerNorm(width),
        blocks.Layer(lambda x: x.permute(0, 3, 1, 2).contiguous()),
    ),
}


def _large(rng: random.Random, spec: NetworkSpec) -> nn.Module:
    layers = [make(spec.width) for make in _COMMON.values()]
    return nn.Sequential(*rng.sample(layers, len(layers)))


class _FunctionChain(nn.Module):
    """So many calls of a Python function that does nothing."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.calls):
            x = _pass_on(x)
        return x


def _pass_on(x: torch.Tensor) -> torch.Tensor:
    return x


class _ReadChain(nn.Linear):
    """So many reads of what a module holds, parameters and modules in turn, which are found sooner and later."""

    def __init__(self, reads: int) -> None:
        super().__init__(1, 1)
        self.inner, self.pairs = nn.Identity(), reads // 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.pairs):
            self.weight, self.inner  # noqa: B018
        return x


_MADE = (
    *(_encoder, _decoder, _residual, _mobile, _patch, _window, _dense, _audio, _wave, _mixer, _recurrent, _mlp),
    *(_medley, _large),
)
_MAKERS: dict[str, Callable[[random.Random, NetworkSpec], nn.Module]] = {
    **{maker.__name__.removeprefix("_"): maker for maker in _MADE},
    "modules": lambda _, spec: nn.Sequential(*(nn.Identity() for _ in range(spec.size))),
    "functions": lambda _, spec: _FunctionChain(spec.size),
    "attributes": lambda _, spec: _ReadChain(spec.size),
}
