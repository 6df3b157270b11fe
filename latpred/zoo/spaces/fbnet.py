"""FBNet (Wu et al., CVPR 2019; https://arxiv.org/abs/1812.03443): networks from their list of 22 block names.

"ir_k5_e3" is an inverted residual with a 5x5 depthwise convolution and expansion 3; "ir_k3_s2" has expansion 1 and
pointwise convolutions in two groups, with a channel shuffle; "skip" is no block at all where shapes allow that, else
a pointwise convolution.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import partial

from torch import nn

from latpred.errors import UsageError
from latpred.zoo.spaces import Place, Residual, Space, convolution

BLOCKS = (*(f"ir_k{kernel}_{kind}" for kernel in (3, 5) for kind in ("e1", "s2", "e3", "e6")), "skip")
STAGES = ((16, 1, 1), (24, 4, 2), (32, 4, 2), (64, 4, 2), (112, 4, 1), (184, 4, 2), (352, 1, 1))
"""Channels, blocks and stride of each stage."""

PLACES = sum(count for _, count, _ in STAGES)
PIXELS = 224

# What the search of the paper found, one line for each stage after the first.
FOUND = {
    "A": """skip
    ir_k3_e3 ir_k3_e1 skip     skip
    ir_k5_e6 ir_k3_e3 ir_k5_e1 ir_k3_e3
    ir_k5_e6 ir_k5_e3 ir_k5_s2 ir_k5_e6
    ir_k3_e6 ir_k5_s2 ir_k5_e1 ir_k3_s2
    ir_k5_e6 ir_k5_e6 ir_k5_e3 ir_k5_e6
    ir_k5_e6""",
    "B": """ir_k3_e1
    ir_k3_e6 ir_k5_e1 ir_k3_e1 ir_k3_e1
    ir_k5_e6 ir_k5_e3 ir_k3_e6 ir_k5_e6
    ir_k5_e6 ir_k5_e1 skip     ir_k5_e3
    ir_k5_e6 ir_k3_e1 ir_k5_e1 ir_k5_e3
    ir_k5_e6 ir_k5_e1 ir_k5_e6 ir_k5_e6
    ir_k3_e6""",
    "C": """ir_k3_e1
    ir_k3_e6 skip     ir_k3_e1 ir_k3_e1
    ir_k5_e6 ir_k5_e3 ir_k5_e6 ir_k3_e6
    ir_k5_e6 ir_k5_e3 ir_k5_e6 ir_k5_e6
    ir_k5_e6 ir_k5_e6 ir_k5_e6 ir_k5_e3
    ir_k5_e6 ir_k5_e6 ir_k5_e6 ir_k5_e6
    ir_k3_e6""",
}


def encoding(index: int) -> str:
    """The blocks that the digits of a number stand for, nine to a place and the first place's last."""
    return " ".join(BLOCKS[index // len(BLOCKS) ** (PLACES - 1 - place) % len(BLOCKS)] for place in range(PLACES))


def _chosen(blocks: Sequence[str] | str) -> dict[str, str]:
    told = FOUND.get(blocks, blocks).split() if isinstance(blocks, str) else blocks
    listed = [*told] if isinstance(told, Iterable) else [told]
    if len(listed) != PLACES:
        of = f"or one of {', '.join(FOUND)}" if isinstance(blocks, str) else "'skip' where there is none"
        raise UsageError(f"An FBNet has {PLACES} blocks, not {len(listed)}; give so many names, {of}.")
    for name in listed:
        if name not in BLOCKS:
            raise UsageError(f"FBNet has no block {name!r}; its blocks are {', '.join(BLOCKS)}.")
    return {str(place): name for place, name in enumerate(listed)}


def _network(place: Place, last: int = 1984, classes: int = 1000) -> nn.Module:
    """The network; `last` is the width of the last pointwise convolution."""
    entering, number = STAGES[0][0], 0
    layers: list[nn.Module | None] = [convolution(3, entering, 3, stride=2)]
    for leaving, count, stride in STAGES:
        for block in range(count):
            shape = (entering, leaving, 1 if block else stride)
            layers.append(place(str(number), {name: partial(_block, name, *shape) for name in BLOCKS}))
            entering, number = leaving, number + 1
    layers += [convolution(entering, last, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, classes)]
    return nn.Sequential(*(layer for layer in layers if layer is not None)).eval()


def _block(name: str, entering: int, leaving: int, stride: int) -> nn.Module:
    same = stride == 1 and entering == leaving
    if name == "skip":
        return nn.Identity() if same else convolution(entering, leaving, 1, stride=stride)
    kernel, kind, number = re.findall(r"ir_k(\d)_([es])(\d)", name)[0]
    expansion, groups = (int(number), 1) if kind == "e" else (1, int(number))
    middle = entering * expansion
    return Residual(
        convolution(entering, middle, 1, groups=groups),
        nn.ChannelShuffle(groups) if groups > 1 else nn.Identity(),
        convolution(middle, middle, int(kernel), stride, groups=middle),
        nn.Conv2d(middle, leaving, 1, groups=groups, bias=False),
        nn.BatchNorm2d(leaving),
        added=same,
    )


def _options(blocks: Sequence[str] | str) -> dict[str, int]:
    """FBNet-A ends in fewer channels than the others, in its authors' code (mobile-vision, fbnet_modeldef_cls.py)."""
    return {"last": 1504} if isinstance(blocks, str) and blocks == "A" else {}


SPACE = Space("fbnet", len(BLOCKS) ** PLACES, encoding, _chosen, _network, lambda _: PIXELS, _options)
