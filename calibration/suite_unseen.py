"""The models of the CPU suite "unseen": architectures that played no part while latpred was built.

Where the suite "cpu" was looked at again and again, these were first measured when everything else was done; keep it so
and add new ones rather than tune to these. Random weights, nothing downloaded.
"""

from __future__ import annotations

import torch
import transformers
from torch import nn

from latpred.calibration.suite_models import VOCABULARY


def bart_encoder() -> nn.Module:
    """Encoder of BART, 3 layers of width 512."""
    config = transformers.BartConfig(
        vocab_size=VOCABULARY, d_model=512, encoder_layers=3, encoder_attention_heads=8, encoder_ffn_dim=2048
    )
    return transformers.BartModel(config).encoder


def opt() -> nn.Module:
    """OPT, 4 layers of width 384."""
    config = transformers.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=384,
        num_hidden_layers=4,
        num_attention_heads=6,
        ffn_dim=1536,
        word_embed_proj_dim=384,
        use_cache=False,
    )
    return transformers.OPTModel(config)


def bloom() -> nn.Module:
    """BLOOM with its ALiBi biases, 3 layers of width 512."""
    config = transformers.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=512, n_layer=3, n_head=8, use_cache=False, bos_token_id=1, eos_token_id=2
    )
    return transformers.BloomModel(config)


def qwen2() -> nn.Module:
    """Qwen2, 5 layers of width 320 with grouped key and value heads."""
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=320,
        intermediate_size=1120,
        num_hidden_layers=5,
        num_attention_heads=5,
        num_key_value_heads=1,
        use_cache=False,
    )
    return transformers.Qwen2Model(config)


def mpnet() -> nn.Module:
    """MPNet with relative positions, 4 layers of width 384."""
    config = transformers.MPNetConfig(
        vocab_size=VOCABULARY, hidden_size=384, num_hidden_layers=4, num_attention_heads=6, intermediate_size=1536
    )
    return transformers.MPNetModel(config)


def convbert() -> nn.Module:
    """ConvBERT, 3 layers of width 384 that mix attention and dynamic convolutions."""
    config = transformers.ConvBertConfig(
        vocab_size=VOCABULARY,
        embedding_size=384,
        hidden_size=384,
        num_hidden_layers=3,
        num_attention_heads=6,
        intermediate_size=1536,
    )
    return transformers.ConvBertModel(config)


def xlnet() -> nn.Module:
    """XLNet, 3 layers of width 384 with two-term relative attention."""
    config = transformers.XLNetConfig(vocab_size=VOCABULARY, d_model=384, n_layer=3, n_head=6, d_inner=1536)
    return transformers.XLNetModel(config)


def whisper_encoder() -> nn.Module:
    """Encoder of Whisper, 3 layers of width 384 on 96 frames."""
    config = transformers.WhisperConfig(
        d_model=384, encoder_layers=3, encoder_attention_heads=6, encoder_ffn_dim=1536, max_source_positions=48
    )
    return transformers.WhisperModel(config).encoder


def dinov2() -> nn.Module:
    """DINOv2, 4 layers of width 384 on patches of 14 pixels."""
    config = transformers.Dinov2Config(
        hidden_size=384, num_hidden_layers=4, num_attention_heads=6, image_size=70, patch_size=14
    )
    return transformers.Dinov2Model(config)


def segformer() -> nn.Module:
    """SegFormer-B0: a hierarchy of efficient self-attention and depthwise feed-forward layers."""
    return transformers.SegformerModel(transformers.SegformerConfig())


def poolformer() -> nn.Module:
    """PoolFormer of half its small form's depth: average pooling in place of attention."""
    return transformers.PoolFormerModel(transformers.PoolFormerConfig(depths=[1, 1, 3, 1]))


def mobilevit() -> nn.Module:
    """MobileViT-S as published: inverted residuals and small transformers."""
    return transformers.MobileViTModel(transformers.MobileViTConfig(image_size=96))


def mobilenet_v1() -> nn.Module:
    """MobileNetV1 as published: depthwise and pointwise convolutions in turn."""
    return transformers.MobileNetV1Model(transformers.MobileNetV1Config())


def levit() -> nn.Module:
    """LeViT-128S as published: convolutions, then attention in shrinking resolution."""
    config = transformers.LevitConfig(image_size=96, depths=[2, 3, 4], hidden_sizes=[128, 256, 384])
    return transformers.LevitModel(config)


def convnext_v2() -> nn.Module:
    """ConvNeXt V2 in its atto form: depthwise convolutions with global response normalisation."""
    config = transformers.ConvNextV2Config(depths=[2, 2, 6, 2], hidden_sizes=[40, 80, 160, 320])
    return transformers.ConvNextV2Model(config)


def densenet() -> nn.Module:
    """A small DenseNet: every layer reads what all before it in its block wrote."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    channels = 32
    for depth in (4, 6, 8):
        for _ in range(depth):
            layers.append(_Dense(channels, growth=16))
            channels += 16
        layers += [nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels // 2, 1), nn.AvgPool2d(2)]
        channels //= 2
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 100))


class _Dense(nn.Module):
    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(channels), nn.Conv2d(channels, 4 * growth, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(4 * growth), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.conv1(nn.functional.relu(self.norm1(x)))
        return torch.cat([x, self.conv2(nn.functional.relu(self.norm2(inner)))], 1)
