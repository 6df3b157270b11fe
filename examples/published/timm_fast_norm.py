"""timm's networks as its benchmarks ran them from PyTorch 1.13 on: `--fast-norm` keeps halves in its own norms.

Autocast casts what a layer norm or a group norm is given to fp32; with that flag timm's own norms cast it to half
precision, while those of `torch.nn` are as before. Its tables do not tell of the flag: from PyTorch 1.12 to 1.13
networks with group norms became 1.7 to 1.9 times as fast there, ResNets 1.1 times. Layer norms of some networks, which
are timm's own today, were those of `torch.nn` until PyTorch 2.4; ConViT's until 1.13 too, which is not followed.
"""

from __future__ import annotations

from collections.abc import Callable

import timm
from timm.layers import LayerNorm, set_fast_norm
from timm.models.nest import Nest
from timm.models.vision_transformer import VisionTransformer
from torch import nn

PLAIN = (VisionTransformer, Nest)


def __getattr__(name: str) -> Callable[[], nn.Module]:
    """What builds the network of that name in timm."""
    if not timm.is_model(name):
        raise AttributeError(name)
    return lambda: built(name)


def built(name: str) -> nn.Module:
    """A network whose norms were made with the flag."""
    set_fast_norm(True)
    try:
        model = timm.create_model(name)
    finally:
        set_fast_norm(False)
    if isinstance(model, PLAIN):
        for norm in model.modules():
            if type(norm) is LayerNorm:
                norm._fast_norm = False
    return model
