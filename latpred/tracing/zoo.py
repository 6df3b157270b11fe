"""The published architectures that go by name, as sizes for transformers' config classes. No hub, no weights.

Each row names the model class, what it takes, and only the sizes that differ from the config class's own defaults. The
first name is the short one; others (the hub's) mean the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Architecture:
    """One published model.

    Attributes
    ----------
    model : str
        transformers class of the network; its config class follows from it.
    kind : str
        "seq", "image", "audio", or "custom" for what has several inputs.
    size : int
        Tokens, pixels or samples it is measured with unless asked otherwise.
    config : dict
        Arguments of the config class.
    aliases : tuple of str
        Other names.
    """

    model: str
    kind: str
    size: int
    config: dict[str, Any] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()


def _text(model: str, *aliases: str, size: int = 128, **config: Any) -> Architecture:
    return Architecture(model, "seq", size, config, aliases)


def _image(model: str, *aliases: str, size: int = 224, **config: Any) -> Architecture:
    return Architecture(model, "image", size, config, aliases)


def _audio(model: str, *aliases: str, **config: Any) -> Architecture:
    return Architecture(model, "audio", 32_000, config, aliases)


def _speech(width: int, layers: int, *aliases: str) -> Architecture:
    """Half a minute of speech, and the first token of its text; both sides have the same sizes."""
    heads = width // 64
    config = {"d_model": width, "encoder_layers": layers, "decoder_layers": layers}
    config |= {"encoder_attention_heads": heads, "decoder_attention_heads": heads}
    config |= {"encoder_ffn_dim": 4 * width, "decoder_ffn_dim": 4 * width}
    return Architecture("WhisperModel", "custom", 0, config, aliases)


_LARGE: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
_BASE: dict[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
}
_ROBERTA: dict[str, Any] = {
    "vocab_size": 50265,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
}
_DEBERTA: dict[str, Any] = {
    "vocab_size": 50265,
    "type_vocab_size": 0,
    "relative_attention": True,
    "pos_att_type": ["c2p", "p2c"],
    "position_biased_input": False,
    "max_relative_positions": -1,
    "layer_norm_eps": 1e-7,
}
_VIT = "ViTForImageClassification"
_RESNET = "ResNetForImageClassification"
_BOTTLENECK: dict[str, Any] = {"num_labels": 1000, "layer_type": "bottleneck", "hidden_sizes": [256, 512, 1024, 2048]}
_BASIC: dict[str, Any] = {"num_labels": 1000, "layer_type": "basic", "hidden_sizes": [64, 128, 256, 512]}

TEXT: dict[str, Architecture] = {
    "bert-base-uncased": _text("BertModel", "bert", "bert-base", "google-bert/bert-base-uncased"),
    "bert-base-cased": _text("BertModel", "google-bert/bert-base-cased", vocab_size=28996),
    "bert-large-uncased": _text("BertModel", "bert-large", "google-bert/bert-large-uncased", **_LARGE),
    "distilbert-base-uncased": _text("DistilBertModel", "distilbert", "distilbert/distilbert-base-uncased"),
    "roberta-base": _text("RobertaModel", "roberta", "FacebookAI/roberta-base", **_ROBERTA),
    "roberta-large": _text("RobertaModel", "FacebookAI/roberta-large", **_ROBERTA, **_LARGE),
    "albert-base-v2": _text("AlbertModel", "albert-base", "albert", "albert/albert-base-v2", **_BASE),
    "mobilebert-uncased": _text(
        "MobileBertModel", "mobilebert", "mobile-bert", "google/mobilebert-uncased", classifier_activation=False
    ),
    "squeezebert-uncased": _text("SqueezeBertModel", "squeezebert", "squeeze-bert", "squeezebert/squeezebert-uncased"),
    "funnel-transformer-small": _text(
        "FunnelModel", "funnel-small", "funnel", "funnel-transformer", "funnel-transformer/small"
    ),
    "funnel-transformer-intermediate": _text(
        "FunnelModel", "funnel-intermediate", "funnel-transformer/intermediate", block_sizes=[6, 6, 6]
    ),
    "fnet-base": _text("FNetModel", "fnet", "google/fnet-base"),
    "nystromformer-512": _text("NystromformerModel", "nystromformer", "uw-madison/nystromformer-512"),
    "longformer-base-4096": _text(
        "LongformerModel",
        *("longformer", "longformer-base", "allenai/longformer-base-4096"),
        size=512,
        attention_window=[512] * 12,
        vocab_size=50265,
        max_position_embeddings=4098,
        type_vocab_size=1,
        pad_token_id=1,
        bos_token_id=0,
        sep_token_id=2,
    ),
    "deberta-base": _text("DebertaModel", "deberta", "microsoft/deberta-base", **_DEBERTA),
    "deberta-v3-base": _text(
        "DebertaV2Model",
        "microsoft/deberta-v3-base",
        **_BASE,
        **(_DEBERTA | {"vocab_size": 128100}),
        position_buckets=256,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
    ),
    "gpt2": _text("GPT2Model", "gpt2-small", "openai-community/gpt2"),
    "gpt2-medium": _text("GPT2Model", "openai-community/gpt2-medium", n_embd=1024, n_layer=24, n_head=16),
    "gpt2-large": _text("GPT2Model", "openai-community/gpt2-large", n_embd=1280, n_layer=36, n_head=20),
    "electra-small": _text("ElectraModel", "google/electra-small-discriminator"),
    "electra-base": _text("ElectraModel", "google/electra-base-discriminator", embedding_size=768, **_BASE),
    "convbert-base": _text("ConvBertModel", "convbert", "YituTech/conv-bert-base"),
    "t5-small": _text("T5EncoderModel", "t5-small-encoder", "google-t5/t5-small"),
    "t5-base": _text(
        "T5EncoderModel", "t5-base-encoder", "google-t5/t5-base", d_model=768, d_ff=3072, num_layers=12, num_heads=12
    ),
    "qwen2.5-0.5b": _text(
        "Qwen2Model",
        "Qwen/Qwen2.5-0.5B",
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151936,
    ),
    "llama-3.2-1b": _text(
        "LlamaModel",
        "meta-llama/Llama-3.2-1B",
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    ),
    "tinyllama-1.1b": _text(
        "LlamaModel",
        *("tinyllama", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"),
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
    ),
    "llama-2-7b": _text("LlamaModel", "meta-llama/Llama-2-7b-hf"),
    "llama-3-8b": _text(
        "LlamaModel",
        *("llama-3.1-8b", "meta-llama/Meta-Llama-3-8B", "meta-llama/Llama-3.1-8B"),
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    ),
    "mistral-7b": _text("MistralModel", "mistralai/Mistral-7B-v0.1"),
    "mixtral-8x7b": _text("MixtralModel", "mistralai/Mixtral-8x7B-v0.1"),
    "clip-vit-base-patch32-text": _text("CLIPTextModel", "clip-text", size=77),
}

IMAGE: dict[str, Architecture] = {
    "vit-base-patch16-224": _image(
        _VIT, "vit16", "vit-base-16", "vit-base-patch16", "google/vit-base-patch16-224", num_labels=1000
    ),
    "vit-base-patch32-224": _image(
        _VIT,
        *("vit32", "vit-base-32", "vit-base-patch32", "google/vit-base-patch32-224-in21k"),
        num_labels=1000,
        patch_size=32,
    ),
    "vit-large-patch16-224": _image(_VIT, "google/vit-large-patch16-224", num_labels=1000, **_LARGE),
    "deit-base-patch16-224": _image(
        "DeiTForImageClassification", "deit-base", "facebook/deit-base-distilled-patch16-224", num_labels=1000
    ),
    "swin-tiny-patch4-window7-224": _image(
        "SwinForImageClassification", "swin", "swin-tiny", "microsoft/swin-tiny-patch4-window7-224", num_labels=1000
    ),
    "resnet-18": _image(_RESNET, "resnet18", "microsoft/resnet-18", **_BASIC, depths=[2, 2, 2, 2]),
    "resnet-34": _image(_RESNET, "resnet34", "microsoft/resnet-34", **_BASIC, depths=[3, 4, 6, 3]),
    "resnet-50": _image(_RESNET, "resnet50", "microsoft/resnet-50", **_BOTTLENECK, depths=[3, 4, 6, 3]),
    "resnet-101": _image(_RESNET, "resnet101", "microsoft/resnet-101", **_BOTTLENECK, depths=[3, 4, 23, 3]),
    "resnet-152": _image(_RESNET, "resnet152", "microsoft/resnet-152", **_BOTTLENECK, depths=[3, 8, 36, 3]),
    "mobilenet-v2": _image(
        "MobileNetV2ForImageClassification", "mobilenetv2", "google/mobilenet_v2_1.0_224", num_labels=1001
    ),
    "efficientnet-b0": _image(
        "EfficientNetForImageClassification",
        "google/efficientnet-b0",
        num_labels=1000,
        width_coefficient=1.0,
        depth_coefficient=1.0,
        hidden_dim=1280,
        image_size=224,
        dropout_rate=0.2,
    ),
    "convnext-tiny-224": _image(
        "ConvNextForImageClassification", "convnext-tiny", "facebook/convnext-tiny-224", num_labels=1000
    ),
    "regnet-y-040": _image("RegNetForImageClassification", "facebook/regnet-y-040", num_labels=1000),
    "segformer-b0": _image("SegformerForImageClassification", "mit-b0", "nvidia/mit-b0", num_labels=1000),
    "mobilevit-small": _image("MobileViTForImageClassification", "apple/mobilevit-small", size=256, num_labels=1000),
    "clip-vit-base-patch32-vision": _image("CLIPVisionModel", "clip", "clip-vision", "openai/clip-vit-base-patch32"),
    "dinov2-base": _image("Dinov2Model", "facebook/dinov2-base", patch_size=14, image_size=518),
}

AUDIO: dict[str, Architecture] = {
    "wavlm-base": _audio("WavLMModel", "wavlm", "microsoft/wavlm-base"),
    "wav2vec2-base": _audio("Wav2Vec2Model", "wav2vec2", "facebook/wav2vec2-base"),
    "hubert-base": _audio("HubertModel", "hubert", "hubert-base-ls960", "facebook/hubert-base-ls960"),
}

SPEECH: dict[str, Architecture] = {
    "whisper-tiny": _speech(384, 4, "whisper", "openai/whisper-tiny"),
    "whisper-base": _speech(512, 6, "openai/whisper-base"),
    "whisper-small": _speech(768, 12, "openai/whisper-small"),
}

ARCHITECTURES: dict[str, Architecture] = {**TEXT, **IMAGE, **AUDIO, **SPEECH}

# Short names of models that torchvision and timm have: what the code of "The Framework Tax" (2023) calls them.
SHORT = {
    "densenet": "torchvision:densenet161",
    "efficientnet": "timm:efficientnetv2_m",
    "efficientnet-lite": "timm:efficientnet_lite1",
    "gernet": "timm:gernet_m",
    "inception": "torchvision:inception_v3",
    "mnasnet": "torchvision:mnasnet1_0",
    "shufflenet": "torchvision:shufflenet_v2_x1_0",
    "squeezenet": "torchvision:squeezenet1_0",
}
