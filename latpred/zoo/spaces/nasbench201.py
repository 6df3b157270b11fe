"""NAS-Bench-201 (Dong and Yang, ICLR 2020; https://arxiv.org/abs/2001.00326): networks from their cell's string.

A cell is four nodes; "|nor_conv_3x3~0|+|none~0|skip_connect~1|+|…|" names, node by node, an operation and the earlier
node it takes its input from. The network is a stem, three stages of five equal cells, and a residual block that halves
the image between them. "none" multiplies by zero, as in the published code: it costs a kernel and is no shortcut.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from functools import cache, partial
from itertools import product

from torch import Tensor, nn

from latpred.errors import UsageError
from latpred.zoo.spaces import Place, Space

OPERATIONS = ("none", "skip_connect", "nor_conv_1x1", "nor_conv_3x3", "avg_pool_3x3")
EDGES = ((0, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3))
PIXELS = 32

_EXAMPLE = "|nor_conv_3x3~0|+|none~0|skip_connect~1|+|nor_conv_1x1~0|avg_pool_3x3~1|skip_connect~2|"
_FORM = re.compile(r"\|(\w+)~0\|\+\|(\w+)~0\|(\w+)~1\|\+\|(\w+)~0\|(\w+)~1\|(\w+)~2\|")
_ORDER = 88  # seed of the shuffle that gave the published cells their numbers


@cache
def encodings() -> tuple[str, ...]:
    """All 15,625 cells, by the numbers that they have in the published tables."""
    cells = list(product(OPERATIONS, repeat=len(EDGES)))
    random.Random(_ORDER).shuffle(cells)
    return tuple("|{}~0|+|{}~0|{}~1|+|{}~0|{}~1|{}~2|".format(*cell) for cell in cells)


def decoded(encoding: str) -> tuple[str, ...]:
    """The operations of a cell, in the order of `EDGES`."""
    found = _FORM.fullmatch(encoding) if isinstance(encoding, str) else None
    if found is None:
        raise UsageError(f"{encoding!r} is no NAS-Bench-201 cell; one looks like {_EXAMPLE!r}.")
    for name in found.groups():
        if name not in OPERATIONS:
            raise UsageError(f"NAS-Bench-201 has no operation {name!r}; its operations are {', '.join(OPERATIONS)}.")
    return found.groups()


def _chosen(encoding: str) -> dict[str, str]:
    return {str(edge): name for edge, name in enumerate(decoded(encoding))}


def _network(place: Place, classes: int = 10, channels: int = 16, cells: int = 5) -> nn.Module:
    """The network that repeats a cell: 10 classes for CIFAR-10, 100 for CIFAR-100, 120 for ImageNet16-120."""
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)]
    for stage in range(3):
        width = channels << stage
        if stage:
            layers.append(Halving(width // 2, width))
        options = {name: partial(operation, name, width) for name in OPERATIONS}
        layers += [Cell(place(str(edge), options) for edge in range(len(EDGES))) for _ in range(cells)]
    layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)]
    return nn.Sequential(*layers).eval()


class Cell(nn.Module):
    """Four nodes, each the sum of what the operations on its edges make of the nodes before it."""

    def __init__(self, operations: Iterable[nn.Module | None]) -> None:
        super().__init__()
        self.operations = nn.ModuleList(operations)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        nodes = [x]
        edges = iter(self.operations)
        for _ in range(3):
            # As published: the sum starts from 0, which costs one more addition for each node.
            nodes.append(sum(next(edges)(node) for node in nodes))
        return nodes[-1]


class Zero(nn.Module):
    """No connection: zeros."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul(0.0)


class Halving(nn.Module):
    """A residual block of stride 2."""

    def __init__(self, entering: int, leaving: int) -> None:
        super().__init__()
        self.body = nn.Sequential(_convolution(entering, leaving, 3, 2), _convolution(leaving, leaving, 3))
        self.shortcut = nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(entering, leaving, 1, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.shortcut(x) + self.body(x)
        return added


def operation(name: str, channels: int) -> nn.Module:
    """One operation by its name."""
    if name == "none":
        return Zero()
    if name == "skip_connect":
        return nn.Identity()
    if name == "avg_pool_3x3":
        return nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)
    return _convolution(channels, channels, 1 if name == "nor_conv_1x1" else 3)


def _convolution(entering: int, leaving: int, kernel: int, stride: int = 1) -> nn.Module:
    convolution = nn.Conv2d(entering, leaving, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(nn.ReLU(), convolution, nn.BatchNorm2d(leaving))


SPACE = Space(
    "nasbench201", len(OPERATIONS) ** len(EDGES), lambda index: encodings()[index], _chosen, _network, lambda _: PIXELS
)
