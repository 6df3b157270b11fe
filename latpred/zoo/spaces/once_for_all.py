"""Once-for-all (Cai et al., ICLR 2020; https://arxiv.org/abs/1908.09791): networks of its MobileNetV3 space.

An architecture is a mapping, or JSON of one, as the authors write it: "ks", the depthwise kernel of each of 20 blocks
(3, 5, 7); "e", the expansion of each (3, 4, 6); "d", how many of its four blocks each of five stages keeps (2, 3, 4);
and "r", the image's side, 224 without it. A block that is not kept has its place in ks and e all the same. One number
stands for as many of it as are needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from itertools import product
from numbers import Integral
from typing import Any

from torch import Tensor, nn

from latpred.errors import UsageError
from latpred.query import whole_number
from latpred.zoo.spaces import Place, Residual, Space, convolution

KERNELS, EXPANSIONS, DEPTHS = (3, 5, 7), (3, 4, 6), (2, 3, 4)
STAGES = 5
BLOCKS = 4 * STAGES
PIXELS = 224

_WIDTHS = (24, 40, 80, 112, 160)
_STRIDES = (2, 2, 2, 1, 2)
_ACTIVATIONS = (nn.ReLU, nn.ReLU, nn.Hardswish, nn.Hardswish, nn.Hardswish)
_SQUEEZED = (False, True, False, True, True)  # squeeze and excitation
_DIVISOR = 8
_ABSENT = "absent"
_EXAMPLE = '{"ks": 7, "e": 6, "d": 4}'
_KINDS = tuple(product(KERNELS, EXPANSIONS))  # of blocks
_PER_STAGE = sum(len(_KINDS) ** depth for depth in DEPTHS)


def encoding(index: int) -> str:
    """The network of a number, stage after stage; of a stage the shallow ones come first."""
    ks, e, d = [], [], []
    for stage in range(STAGES):
        number, depth = index // _PER_STAGE ** (STAGES - 1 - stage) % _PER_STAGE, DEPTHS[0]
        while number >= len(_KINDS) ** depth:
            number, depth = number - len(_KINDS) ** depth, depth + 1
        blocks = [_KINDS[number // len(_KINDS) ** place % len(_KINDS)] for place in range(4)]
        ks += [kernel for kernel, _ in blocks]
        e += [expansion for _, expansion in blocks]
        d.append(depth)
    return json.dumps({"ks": ks, "e": e, "d": d})


def _chosen(architecture: Mapping[str, Any] | str) -> dict[str, str]:
    given = _read(architecture)
    kernels, expansions = (_checked(name, given[name], BLOCKS, of) for name, of in (("ks", KERNELS), ("e", EXPANSIONS)))
    depths = _checked("d", given["d"], STAGES, DEPTHS)
    kept = [place % 4 < depths[place // 4] for place in range(BLOCKS)]
    kinds = zip(kernels, expansions, kept, strict=True)
    return {str(place): _named(k, e) if there else _ABSENT for place, (k, e, there) in enumerate(kinds)}


def _pixels(architecture: Mapping[str, Any] | str) -> int:
    side = _read(architecture).get("r", PIXELS)
    alone = isinstance(side, (list, tuple)) and len(side) == 1  # as the authors write it
    return whole_number("r", side[0] if alone else side, "length")


def _read(architecture: Mapping[str, Any] | str) -> Mapping[str, Any]:
    given: Any = None
    with suppress(ValueError, TypeError):
        given = dict(json.loads(architecture) if isinstance(architecture, str) else architecture)
    if given is None or not {"ks", "e", "d"} <= {*given} <= {"ks", "e", "d", "r", "wid"}:
        raise UsageError(f"{architecture!r} is no once-for-all network; give a mapping such as {_EXAMPLE}.")
    if given.get("wid") is not None:
        raise UsageError(f"wid={given['wid']!r} is not read; leave it out, and give width= for other widths.")
    return given  # type: ignore[no-any-return]


def _network(place: Place, width: float = 1.0, classes: int = 1000) -> nn.Module:
    entering = _divisible(16 * width)
    layers: list[nn.Module | None] = [
        convolution(3, entering, 3, 2, activation=nn.Hardswish),
        _block(entering, entering, 1, 3, 1),
    ]
    for number in range(BLOCKS):
        stage, block = divmod(number, 4)
        leaving = _divisible(_WIDTHS[stage] * width)
        shape = (entering, leaving, 1 if block else _STRIDES[stage])
        style: dict[str, Any] = {"activation": _ACTIVATIONS[stage], "squeezed": _SQUEEZED[stage]}
        options: dict[str, Any] = {_named(k, e): partial(_block, *shape, k, e, **style) for k, e in _KINDS}
        layers.append(place(str(number), options if block < DEPTHS[0] else {**options, _ABSENT: lambda: None}))
        entering = leaving
    wide, last = _divisible(960 * width), _divisible(1280 * width)
    layers += [convolution(entering, wide, 1, activation=nn.Hardswish), nn.AdaptiveAvgPool2d(1)]
    layers += [nn.Conv2d(wide, last, 1, bias=False), nn.Hardswish(), nn.Flatten(), nn.Linear(last, classes)]
    return nn.Sequential(*(layer for layer in layers if layer is not None)).eval()


def _named(kernel: int, expansion: int) -> str:
    return f"kernel {kernel}, expansion {expansion}"


def _divisible(channels: float) -> int:
    """The nearest multiple of 8, a step up where that would take more than a tenth away."""
    near = max(_DIVISOR, int(channels + _DIVISOR / 2) // _DIVISOR * _DIVISOR)
    return near + _DIVISOR if near < 0.9 * channels else near


def _block(
    entering: int,
    leaving: int,
    stride: int,
    kernel: int,
    expansion: int,
    activation: Callable[[], nn.Module] = nn.ReLU,
    squeezed: bool = False,
) -> nn.Module:
    """An inverted residual: expand, filter each channel, weigh the channels, project."""
    middle = _divisible(entering * expansion)
    layers = [] if expansion == 1 else [convolution(entering, middle, 1, activation=activation)]
    layers.append(convolution(middle, middle, kernel, stride, middle, activation))
    if squeezed:
        layers.append(Squeeze(middle))
    layers += [nn.Conv2d(middle, leaving, 1, bias=False), nn.BatchNorm2d(leaving)]
    return Residual(*layers, added=stride == 1 and entering == leaving)


class Squeeze(nn.Module):
    """Weighs channels by what is seen over the whole image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        few = _divisible(channels // 4)
        squeeze, widen = nn.Conv2d(channels, few, 1), nn.Conv2d(few, channels, 1)
        self.body = nn.Sequential(nn.AdaptiveAvgPool2d(1), squeeze, nn.ReLU(), widen, nn.Hardsigmoid())

    def forward(self, x: Tensor) -> Tensor:
        weights: Tensor = self.body(x)
        return x * weights


def _checked(name: str, given: Iterable[int] | int, count: int, choices: tuple[int, ...]) -> tuple[int, ...]:
    values = tuple(given) if isinstance(given, Iterable) else (given,) * count
    wrong = [value for value in values if not isinstance(value, Integral) or value not in choices]
    if wrong or len(values) != count:
        said = f"holds {wrong[0]!r}" if wrong else f"has {len(values)} numbers"
        raise UsageError(f"{name} {said}; once-for-all networks take {count} numbers out of {choices} there.")
    return tuple(map(int, values))


SPACE = Space("once_for_all", _PER_STAGE**STAGES, encoding, _chosen, _network, _pixels)
