"""Once-for-all (Cai et al., ICLR 2020; https://arxiv.org/abs/1908.09791): networks of its MobileNetV3 space.

An architecture is three tuples: ks, the depthwise kernel of each of 20 blocks (3, 5, 7); e, the expansion of each
(3, 4, 6); and d, how many of its four blocks each of five stages keeps (2, 3, 4). A block that is not kept has its
place in ks and e all the same. The image side is chosen with it, from 128 to 224.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

from torch import Tensor, nn

import latpred
from latpred.errors import UsageError

KERNELS, EXPANSIONS, DEPTHS = (3, 5, 7), (3, 4, 6), (2, 3, 4)
STAGES = 5
BLOCKS = 4 * STAGES
PIXELS = 224

_WIDTHS = (24, 40, 80, 112, 160)
_STRIDES = (2, 2, 2, 1, 2)
_SMOOTH = (False, False, True, True, True)  # hard swish in place of ReLU
_SQUEEZED = (False, True, False, True, True)  # squeeze and excitation
_DIVISOR = 8
_ABSENT = "absent"


def build(
    ks: Sequence[int] | int, e: Sequence[int] | int, d: Sequence[int] | int, width: float = 1.0, classes: int = 1000
) -> nn.Module:
    """A network of the space; a single number stands for as many of it as are needed."""
    kernels, expansions, depths = _decoded(ks, e, d)

    def block(place: int, *shape: int, **style: bool) -> nn.Module | None:
        kept = place % 4 < depths[place // 4]
        return Block(*shape, kernels[place], expansions[place], **style) if kept else None

    return _network(block, width, classes)


@cache
def supernet(width: float = 1.0, classes: int = 1000, image: int = PIXELS) -> latpred.Supernet:
    """All networks at once, one choice for each block; made in seconds, and only once in a process."""

    def choice(place: int, *shape: int, **style: bool) -> nn.Module:
        layers = {_named(k, e): Block(*shape, k, e, **style) for k in KERNELS for e in EXPANSIONS}
        return latpred.Choice(str(place), layers if place % 4 < DEPTHS[0] else {**layers, _ABSENT: None})

    return latpred.Supernet(partial(_network, choice, width, classes), image=image)


def graph(
    ks: Sequence[int] | int, e: Sequence[int] | int, d: Sequence[int] | int, **options: float
) -> latpred.ModelGraph:
    """What `latpred.trace` gives of the network, but for the paths of modules behind a block that is not kept.

    Nothing is built or traced; `options` are those of `supernet`.
    """
    kernels, expansions, depths = _decoded(ks, e, d)
    kept = [place % 4 < depths[place // 4] for place in range(BLOCKS)]
    named = [_named(kernels[place], expansions[place]) if kept[place] else _ABSENT for place in range(BLOCKS)]
    return supernet(**options).graph({str(place): name for place, name in enumerate(named)})


def _network(block: Callable[..., nn.Module | None], width: float, classes: int) -> nn.Module:
    entering = divisible(16 * width)
    first = [_convolution(3, entering, 3, 2, smooth=True), Block(entering, divisible(16 * width), 1, 3, 1)]
    layers: list[nn.Module | None] = [*first]
    entering = divisible(16 * width)
    for place in range(BLOCKS):
        stage, number = divmod(place, 4)
        leaving = divisible(_WIDTHS[stage] * width)
        style = {"smooth": _SMOOTH[stage], "squeezed": _SQUEEZED[stage]}
        layers.append(block(place, entering, leaving, 1 if number else _STRIDES[stage], **style))
        entering = leaving
    wide, last = divisible(960 * width), divisible(1280 * width)
    layers += [_convolution(entering, wide, 1, smooth=True), nn.AdaptiveAvgPool2d(1)]
    layers += [nn.Conv2d(wide, last, 1, bias=False), nn.Hardswish(), nn.Flatten(), nn.Linear(last, classes)]
    return nn.Sequential(*(layer for layer in layers if layer is not None)).eval()


def _decoded(
    ks: Sequence[int] | int, e: Sequence[int] | int, d: Sequence[int] | int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    return (
        _checked("ks", ks, BLOCKS, KERNELS),
        _checked("e", e, BLOCKS, EXPANSIONS),
        _checked("d", d, STAGES, DEPTHS),
    )


def _named(kernel: int, expansion: int) -> str:
    return f"kernel {kernel}, expansion {expansion}"


def divisible(channels: float) -> int:
    """The nearest multiple of 8, a step up where that would take more than a tenth away."""
    near = max(_DIVISOR, int(channels + _DIVISOR / 2) // _DIVISOR * _DIVISOR)
    return near + _DIVISOR if near < 0.9 * channels else near


class Block(nn.Module):
    """An inverted residual: expand, filter each channel, weigh the channels, project."""

    def __init__(
        self,
        entering: int,
        leaving: int,
        stride: int,
        kernel: int,
        expansion: int,
        *,
        smooth: bool = False,
        squeezed: bool = False,
    ) -> None:
        super().__init__()
        middle = divisible(entering * expansion)
        layers = [] if expansion == 1 else [_convolution(entering, middle, 1, smooth=smooth)]
        layers.append(_convolution(middle, middle, kernel, stride, middle, smooth=smooth))
        if squeezed:
            layers.append(Squeeze(middle))
        layers += [nn.Conv2d(middle, leaving, 1, bias=False), nn.BatchNorm2d(leaving)]
        self.body = nn.Sequential(*layers)
        self.residual = stride == 1 and entering == leaving

    def forward(self, x: Tensor) -> Tensor:
        """The block, added to its input where shapes allow."""
        return x + self.body(x) if self.residual else self.body(x)


class Squeeze(nn.Module):
    """Weighs channels by what is seen over the whole image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        few = divisible(channels // 4)
        self.body = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, few, 1),
            nn.ReLU(),
            nn.Conv2d(few, channels, 1),
            nn.Hardsigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """The weighted image."""
        return x * self.body(x)


def _convolution(
    entering: int, leaving: int, kernel: int, stride: int = 1, groups: int = 1, *, smooth: bool
) -> nn.Module:
    convolution = nn.Conv2d(entering, leaving, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(leaving), nn.Hardswish() if smooth else nn.ReLU())


def _checked(name: str, given: Sequence[int] | int, count: int, choices: tuple[int, ...]) -> tuple[int, ...]:
    values = (given,) * count if isinstance(given, int) else tuple(given)
    wrong = [value for value in values if value not in choices]
    if wrong or len(values) != count:
        said = f"holds {wrong[0]!r}" if wrong else f"has {len(values)} numbers"
        raise UsageError(f"{name} {said}; once-for-all networks take {count} numbers out of {choices} there.")
    return values
