"""The models of the CPU suite: published architectures from their own configurations, sized for two slow cores.

Every function builds one module with random weights on the current default device; nothing is ever downloaded. Which
inputs they get is `suites`' business.
"""

from __future__ import annotations

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
