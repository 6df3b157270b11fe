"""timm's networks as its benchmarks of PyTorch 2.9 ran them: with `--reparam` and `--fast-norm`.

Branches that training needs (RepVGG, MobileOne, FastViT) become one convolution, and convolutions take in their batch
norms (LeViT, RepViT, EfficientViT-M). The numbers of parameters in that table are those of such networks.
"""

from __future__ import annotations

from collections.abc import Callable

import timm
from timm.layers import set_fast_norm
from timm.utils.model import reparameterize_model
from torch import nn


def __getattr__(name: str) -> Callable[[], nn.Module]:
    """What builds the network of that name in timm."""
    if not timm.is_model(name):
        raise AttributeError(name)
    return lambda: built(name)


def built(name: str) -> nn.Module:
    """A network as it is deployed, whose norms were made with the flag."""
    set_fast_norm(True)
    try:
        return reparameterize_model(timm.create_model(name).eval())
    finally:
        set_fast_norm(False)
