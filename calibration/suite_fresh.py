"""The models of the CPU suite "fresh": architectures that were first measured when all else was done.

The suite "unseen" was looked at once, and what it showed was mended; these come after that. Whoever tunes anything to
them adds another suite. Random weights, nothing downloaded.
"""

from __future__ import annotations

import transformers
from torch import nn

from latpred.calibration.suite_models import VOCABULARY


def gpt_neox() -> nn.Module:
    """GPT-NeoX with parallel attention and feed-forward, 3 layers of width 448."""
    config = transformers.GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=448,
        num_hidden_layers=3,
        num_attention_heads=7,
        intermediate_size=1792,
        use_cache=False,
    )
    return transformers.GPTNeoXModel(config)


def phi() -> nn.Module:
    """Phi with partial rotary positions, 4 layers of width 320."""
    config = transformers.PhiConfig(
        vocab_size=VOCABULARY,
        hidden_size=320,
        intermediate_size=1280,
        num_hidden_layers=4,
        num_attention_heads=5,
        use_cache=False,
    )
    return transformers.PhiModel(config)


def roformer() -> nn.Module:
    """RoFormer, 4 layers of width 256."""
    config = transformers.RoFormerConfig(
        vocab_size=VOCABULARY, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024
    )
    return transformers.RoFormerModel(config)


def camembert() -> nn.Module:
    """CamemBERT (RoBERTa's shape), 3 layers of width 576."""
    config = transformers.CamembertConfig(
        vocab_size=VOCABULARY, hidden_size=576, num_hidden_layers=3, num_attention_heads=9, intermediate_size=2304
    )
    return transformers.CamembertModel(config)


def beit() -> nn.Module:
    """BEiT, 4 layers of width 384 on patches of 16 pixels."""
    config = transformers.BeitConfig(
        hidden_size=384,
        num_hidden_layers=4,
        num_attention_heads=6,
        intermediate_size=1536,
        image_size=80,
        use_relative_position_bias=True,
    )
    return transformers.BeitModel(config)


def bit() -> nn.Module:
    """BiT: a residual network with weight-standardised convolutions and group normalisation."""
    config = transformers.BitConfig(hidden_sizes=[128, 256, 512, 1024], depths=[1, 2, 2, 1], num_groups=16)
    return transformers.BitModel(config)


def pvt_v2() -> nn.Module:
    """PVT v2 in its smallest form: a pyramid with overlapping patches and reduced attention."""
    return transformers.PvtV2Model(transformers.PvtV2Config(image_size=96))


def focalnet() -> nn.Module:
    """FocalNet: depthwise convolutions of growing focus in place of attention."""
    config = transformers.FocalNetConfig(image_size=64, embed_dim=48, depths=[1, 1, 3, 1])
    return transformers.FocalNetModel(config)


def swin_v2() -> nn.Module:
    """Swin V2 with scaled cosine attention, windows of 4."""
    config = transformers.Swinv2Config(
        image_size=64, patch_size=4, embed_dim=48, depths=[2, 2, 2], num_heads=[2, 4, 8], window_size=4
    )
    return transformers.Swinv2Model(config)


def resnext() -> nn.Module:
    """A RegNetX: residual blocks of grouped convolutions without gates."""
    config = transformers.RegNetConfig(
        embedding_size=32, hidden_sizes=[64, 128, 288, 672], depths=[1, 1, 4, 2], groups_width=16, layer_type="x"
    )
    return transformers.RegNetModel(config)


def hubert() -> nn.Module:
    """HuBERT with a feature encoder of width 160 and 2 layers of width 320."""
    config = transformers.HubertConfig(
        hidden_size=320,
        num_hidden_layers=2,
        num_attention_heads=5,
        intermediate_size=1280,
        conv_dim=(160,) * 7,
        num_conv_pos_embeddings=32,
        num_conv_pos_embedding_groups=8,
    )
    return transformers.HubertModel(config)
