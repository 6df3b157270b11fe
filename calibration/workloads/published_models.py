"""The models of the CPU suite: published architectures from their own configurations, sized for two slow cores.

Every function builds one module with random weights on the current default device; nothing is ever downloaded. Which
inputs they get is `suites`' business.
"""

from __future__ import annotations

import torch
import transformers
from torch import nn

VOCABULARY = 4096


def bert() -> nn.Module:
    """BERT, 4 layers of width 512."""
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=512, num_hidden_layers=4, num_attention_heads=8, intermediate_size=2048
    )
    return transformers.BertModel(config)


def distilbert() -> nn.Module:
    """DistilBERT, 2 of its 6 layers of width 768."""
    return transformers.DistilBertModel(transformers.DistilBertConfig(vocab_size=VOCABULARY, n_layers=2))


def albert() -> nn.Module:
    """ALBERT, one shared layer of width 384 passed 6 times."""
    config = transformers.AlbertConfig(
        vocab_size=VOCABULARY,
        embedding_size=128,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=6,
        intermediate_size=1536,
    )
    return transformers.AlbertModel(config)


def mobilebert() -> nn.Module:
    """MobileBERT, 8 of its 24 bottleneck layers."""
    return transformers.MobileBertModel(transformers.MobileBertConfig(vocab_size=VOCABULARY, num_hidden_layers=8))


def squeezebert() -> nn.Module:
    """SqueezeBERT, 4 layers of width 384 whose projections are grouped convolutions."""
    config = transformers.SqueezeBertConfig(
        vocab_size=VOCABULARY,
        embedding_size=384,
        hidden_size=384,
        num_hidden_layers=4,
        num_attention_heads=6,
        intermediate_size=1536,
    )
    return transformers.SqueezeBertModel(config)


def funnel() -> nn.Module:
    """Funnel, three blocks of two layers of width 256, with its decoder."""
    config = transformers.FunnelConfig(
        vocab_size=VOCABULARY, block_sizes=[2, 2, 2], d_model=256, n_head=4, d_head=64, d_inner=1024
    )
    return transformers.FunnelModel(config)


def electra() -> nn.Module:
    """ELECTRA-small, 6 of its 12 layers."""
    config = transformers.ElectraConfig(
        vocab_size=VOCABULARY,
        embedding_size=128,
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        intermediate_size=1024,
    )
    return transformers.ElectraModel(config)


def deberta() -> nn.Module:
    """DeBERTa with disentangled attention, 3 layers of width 384."""
    config = transformers.DebertaConfig(
        vocab_size=VOCABULARY,
        hidden_size=384,
        num_hidden_layers=3,
        num_attention_heads=6,
        intermediate_size=1536,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        position_biased_input=False,
    )
    return transformers.DebertaModel(config)


def fnet() -> nn.Module:
    """FNet, 4 layers of width 512 that mix tokens by Fourier transforms."""
    config = transformers.FNetConfig(
        vocab_size=VOCABULARY, hidden_size=512, num_hidden_layers=4, intermediate_size=2048
    )
    return transformers.FNetModel(config)


def gpt2() -> nn.Module:
    """GPT-2, 4 layers of width 384."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=384,
        n_layer=4,
        n_head=6,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2Model(config)


def llama() -> nn.Module:
    """Llama, 4 layers of width 512 with grouped key and value heads."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    return transformers.LlamaModel(config)


def t5_encoder() -> nn.Module:
    """Encoder of T5-small, 3 of its 6 layers."""
    config = transformers.T5Config(vocab_size=VOCABULARY, num_layers=3)
    return transformers.T5EncoderModel(config)


def vit() -> nn.Module:
    """Vision transformer, 4 layers of width 384 on patches of 8 pixels."""
    config = transformers.ViTConfig(
        hidden_size=384,
        num_hidden_layers=4,
        num_attention_heads=6,
        intermediate_size=1536,
        image_size=48,
        patch_size=8,
    )
    return transformers.ViTModel(config)


def swin() -> nn.Module:
    """Swin, three stages of two layers from width 64, windows of 4."""
    config = transformers.SwinConfig(
        image_size=64, patch_size=4, embed_dim=64, depths=[2, 2, 2], num_heads=[2, 4, 8], window_size=4
    )
    return transformers.SwinModel(config)


def convnext() -> nn.Module:
    """ConvNeXt, half the width and depth of its tiny form."""
    config = transformers.ConvNextConfig(depths=[2, 2, 4, 2], hidden_sizes=[48, 96, 192, 384])
    return transformers.ConvNextModel(config)


def resnet18() -> nn.Module:
    """ResNet-18 as published."""
    config = transformers.ResNetConfig(layer_type="basic", depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512])
    return transformers.ResNetModel(config)


def resnet50() -> nn.Module:
    """ResNet-50 as published."""
    return transformers.ResNetModel(transformers.ResNetConfig())


def mobilenet_v2() -> nn.Module:
    """MobileNetV2 as published."""
    return transformers.MobileNetV2Model(transformers.MobileNetV2Config())


def efficientnet_b0() -> nn.Module:
    """EfficientNet-B0 as published."""
    config = transformers.EfficientNetConfig(width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280)
    return transformers.EfficientNetModel(config)


def regnet_y() -> nn.Module:
    """RegNetY of 400 million multiply-adds at 224 pixels."""
    config = transformers.RegNetConfig(
        embedding_size=32, hidden_sizes=[48, 104, 208, 440], depths=[1, 3, 6, 6], groups_width=8, layer_type="y"
    )
    return transformers.RegNetModel(config)


def vgg11() -> nn.Module:
    """VGG-11 of half the width, with a narrow classifier."""
    layers: list[nn.Module] = []
    channels = 3
    for width, pool in ((32, True), (64, True), (128, False), (128, True), (256, False), (256, True), (256, False)):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
        layers += [nn.MaxPool2d(2)] if pool else []
        channels = width
    head = [
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(channels * 4, 512),
        nn.ReLU(inplace=True),
        nn.Linear(512, 100),
    ]
    return nn.Sequential(*layers, *head)


def wav2vec2() -> nn.Module:
    """wav2vec 2.0 with a feature encoder of width 128 and 3 layers of width 256."""
    config = transformers.Wav2Vec2Config(
        hidden_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=1024,
        conv_dim=(128,) * 7,
        num_conv_pos_embeddings=32,
        num_conv_pos_embedding_groups=8,
    )
    return transformers.Wav2Vec2Model(config)


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
