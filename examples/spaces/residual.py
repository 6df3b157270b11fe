"""A space of residual networks: blocks in each of four stages, their width, and their kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

CHOICES = {
    **{f"blocks_{stage}": tuple(range(1, 9)) for stage in range(1, 5)},
    "width": tuple(range(16, 161, 16)),
    "kernel": (3, 5, 7),
}
REFERENCE = {"blocks_1": 2, "blocks_2": 2, "blocks_3": 2, "blocks_4": 2, "width": 64, "kernel": 3}  # ResNet-18
INPUT = {"image": 224}

TINY = {
    **{f"blocks_{stage}": tuple(range(1, 4)) for stage in range(1, 5)},
    "width": (8, 12, 16, 24, 32),
    "kernel": (3, 5),
}
TINY_INPUT = {"image": 64}


def candidate(**choice: int) -> Callable[[], nn.Module]:
    """What latpred predicts: a function that builds the model."""
    return partial(build, **choice)


def build(blocks_1: int, blocks_2: int, blocks_3: int, blocks_4: int, width: int, kernel: int) -> nn.Module:
    """A network: the width doubles, and the image halves, from stage to stage."""
    stem = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
    layers = [stem, nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)]
    entering = width
    for stage, count in enumerate((blocks_1, blocks_2, blocks_3, blocks_4)):
        leaving = width << stage
        for place in range(count):
            layers.append(Block(entering, leaving, kernel, stride=2 if stage and not place else 1))
            entering = leaving
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(entering, 1000)).eval()


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, entering: int, leaving: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(entering, leaving, kernel, stride, kernel // 2, bias=False),
            nn.BatchNorm2d(leaving),
            nn.ReLU(),
            nn.Conv2d(leaving, leaving, kernel, 1, kernel // 2, bias=False),
            nn.BatchNorm2d(leaving),
        )
        self.shortcut: nn.Module = nn.Identity()
        if (entering, stride) != (leaving, 1):
            projection = nn.Conv2d(entering, leaving, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(leaving))
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Both branches, added."""
        return self.activation(self.body(x) + self.shortcut(x))
