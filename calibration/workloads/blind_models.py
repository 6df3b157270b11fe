"""The models of the CPU suite "blind": ordinary architectures that no prediction was held against while latpred grew.

They are measured once, for a release's figures, by whoever makes the release; until then nobody compares a prediction
with a measurement of one. Afterwards they count as seen, and the next verdict needs models of its own. Random weights,
nothing downloaded; networks of torchvision and timm stand in `suites` by their names.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import transformers
from torch import nn

from latpred.calibration.workloads.published_models import VOCABULARY


def mistral() -> nn.Module:
    """Mistral with grouped key and value heads, 4 layers of width 384."""
    config = transformers.MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=384,
        intermediate_size=1344,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        use_cache=False,
    )
    return transformers.MistralModel(config)


def qwen3() -> nn.Module:
    """Qwen3, whose queries and keys are normalised, 4 layers of width 320."""
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=320,
        intermediate_size=960,
        num_hidden_layers=4,
        num_attention_heads=5,
        num_key_value_heads=5,
        head_dim=64,
        use_cache=False,
    )
    return transformers.Qwen3Model(config)


def gemma2() -> nn.Module:
    """Gemma 2 with capped attention scores and norms on both sides of a layer, 4 layers of width 384."""
    config = transformers.Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=64,
        query_pre_attn_scalar=64,
        use_cache=False,
    )
    return transformers.Gemma2Model(config)


def phi3() -> nn.Module:
    """Phi-3 with joined projections, 3 layers of width 512."""
    config = transformers.Phi3Config(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )
    return transformers.Phi3Model(config)


def falcon() -> nn.Module:
    """Falcon with one key head for all queries and parallel feed-forward, 4 layers of width 384."""
    config = transformers.FalconConfig(
        vocab_size=VOCABULARY, hidden_size=384, num_hidden_layers=4, num_attention_heads=6, use_cache=False
    )
    return transformers.FalconModel(config)


def gpt_j() -> nn.Module:
    """GPT-J with interleaved rotary positions, 3 layers of width 512."""
    config = transformers.GPTJConfig(
        vocab_size=VOCABULARY,
        n_embd=512,
        n_layer=3,
        n_head=8,
        rotary_dim=32,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )
    return transformers.GPTJModel(config)


def modernbert() -> nn.Module:
    """ModernBERT with gated feed-forward and alternating local attention, 4 layers of width 384."""
    config = transformers.ModernBertConfig(
        vocab_size=VOCABULARY,
        hidden_size=384,
        intermediate_size=576,
        num_hidden_layers=4,
        num_attention_heads=6,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    )
    return transformers.ModernBertModel(config)


def deberta_v3() -> nn.Module:
    """DeBERTa V3 with its bucketed relative positions, 3 layers of width 384."""
    v3: dict[str, Any] = {"position_buckets": 64, "share_att_key": True, "norm_rel_ebd": "layer_norm"}
    config = transformers.DebertaV2Config(
        vocab_size=VOCABULARY,
        hidden_size=384,
        num_hidden_layers=3,
        num_attention_heads=6,
        intermediate_size=1536,
        type_vocab_size=0,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        position_biased_input=False,
        **v3,
    )
    return transformers.DebertaV2Model(config)


def marian() -> nn.Module:
    """Marian, a translator: 2 layers of encoder and 2 of decoder, of width 512, one pass of both."""
    config = transformers.MarianConfig(
        vocab_size=VOCABULARY,
        d_model=512,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=2048,
        decoder_ffn_dim=2048,
        pad_token_id=0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return _Translator(transformers.MarianModel(config))


def clip_text() -> nn.Module:
    """The text encoder of CLIP, 4 layers of width 512."""
    config = transformers.CLIPTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=4,
        num_attention_heads=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.CLIPTextModel(config)


def siglip_vision() -> nn.Module:
    """The image encoder of SigLIP with its pooling by attention, 4 layers of width 384."""
    config = transformers.SiglipVisionConfig(
        hidden_size=384, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=6, image_size=80
    )
    return transformers.SiglipVisionModel(config)


def audio_spectrogram() -> nn.Module:
    """The Audio Spectrogram Transformer on 96 frames, 4 layers of width 384."""
    config = transformers.ASTConfig(
        hidden_size=384,
        num_hidden_layers=4,
        num_attention_heads=6,
        intermediate_size=1536,
        max_length=96,
        num_mel_bins=64,
        frequency_stride=16,
        time_stride=16,
    )
    return transformers.ASTModel(config)


def speech_conformer() -> nn.Module:
    """A wav2vec 2.0 Conformer: feature encoder of width 128, 2 layers of width 256."""
    config = transformers.Wav2Vec2ConformerConfig(
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=1024,
        conv_dim=(128,) * 7,
        num_conv_pos_embeddings=32,
        num_conv_pos_embedding_groups=8,
    )
    return transformers.Wav2Vec2ConformerModel(config)


def lstm_tagger() -> nn.Module:
    """A tagger of words: an embedding, two layers of LSTM in both directions, a classifier for each word."""
    return _Tagger(width=256)


def unet() -> nn.Module:
    """A U-Net of three depths that segments images: convolutions down, transposed ones up, joined at each depth."""
    return _UNet((24, 48, 96, 192))


class _Translator(nn.Module):
    """Reads a sentence with the encoder and the same tokens, as a translation so far, with the decoder."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = torch.ones_like(tokens)  # as a tokenizer gives it
        out: torch.Tensor = self.model(
            input_ids=tokens, attention_mask=mask, decoder_input_ids=tokens, decoder_attention_mask=mask
        ).last_hidden_state
        return out


class _Tagger(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, bidirectional=True, batch_first=True)
        self.classifier = nn.Linear(2 * width, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.classifier(self.lstm(self.embedding(tokens))[0])
        return out


class _UNet(nn.Module):
    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        pairs = list(pairwise(widths))
        self.first = _double(3, widths[0])
        self.down = nn.ModuleList(_double(a, b) for a, b in pairs)
        self.grow = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in reversed(pairs))
        self.up = nn.ModuleList(_double(2 * a, a) for a, _ in reversed(pairs))
        self.classes = nn.Conv2d(widths[0], 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maps = [self.first(x)]
        for block in self.down:
            maps.append(block(nn.functional.max_pool2d(maps[-1], 2)))
        x = maps.pop()
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat([maps.pop(), grow(x)], 1))
        out: torch.Tensor = self.classes(x)
        return out


def _double(before: int, after: int) -> nn.Sequential:
    """Two convolutions of 3 x 3, each normalised and rectified."""
    layers: list[nn.Module] = []
    for channels in (before, after):
        layers += [nn.Conv2d(channels, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers)
