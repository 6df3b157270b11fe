"""Models that several tests of tracing use: small versions of many architectures, from transformers configs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from latpred.runtimes.source import Source, source_of

_TEXT = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 200,
}
_AUDIO = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "conv_dim": [32] * 7,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
_DEBERTA = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False}

# Class, config arguments, what it takes and how much of it.
SMALL: dict[str, tuple[str, dict[str, Any], str, int]] = {
    "bert": ("BertModel", _TEXT, "seq", 16),
    "distilbert": ("DistilBertModel", {"dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4}, "seq", 16),
    "roberta": ("RobertaModel", _TEXT, "seq", 16),
    "albert": ("AlbertModel", _TEXT | {"embedding_size": 32}, "seq", 16),
    "mobilebert": ("MobileBertModel", {"num_hidden_layers": 2, "vocab_size": 200}, "seq", 16),
    "squeezebert": ("SqueezeBertModel", {"num_hidden_layers": 2, "vocab_size": 200}, "seq", 16),
    "funnel": ("FunnelModel", {"block_sizes": [1, 1], "num_decoder_layers": 1, "vocab_size": 200}, "seq", 16),
    "fnet": ("FNetModel", {"num_hidden_layers": 2, "vocab_size": 200, "hidden_size": 64}, "seq", 16),
    "nystromformer": (
        "NystromformerModel",
        _TEXT | {"segment_means_seq_len": 64, "num_landmarks": 16, "max_position_embeddings": 64},
        "seq",
        64,
    ),
    "longformer": ("LongformerModel", _TEXT | {"attention_window": [16, 16]}, "seq", 32),
    "deberta": ("DebertaModel", _TEXT | _DEBERTA, "seq", 16),
    "deberta-v2": ("DebertaV2Model", _TEXT | _DEBERTA | {"share_att_key": True}, "seq", 16),
    "gpt2": ("GPT2Model", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 200}, "seq", 16),
    "electra": ("ElectraModel", _TEXT | {"embedding_size": 32}, "seq", 16),
    "convbert": ("ConvBertModel", _TEXT | {"embedding_size": 64}, "seq", 16),
    "t5": ("T5EncoderModel", {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}, "seq", 16),
    "llama": ("LlamaModel", _TEXT | {"num_key_value_heads": 2}, "seq", 16),
    "mixtral": ("MixtralModel", _TEXT | {"num_key_value_heads": 2, "num_local_experts": 4}, "seq", 16),
    "vit": ("ViTModel", _TEXT | {"image_size": 32, "patch_size": 8}, "image", 32),
    "swin": ("SwinModel", {"image_size": 64, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}, "image", 64),
    "resnet": ("ResNetModel", {"hidden_sizes": [32, 64], "depths": [2, 2], "embedding_size": 16}, "image", 32),
    "mobilenet-v2": ("MobileNetV2Model", {"depth_multiplier": 0.25, "image_size": 32}, "image", 32),
    "efficientnet": (
        "EfficientNetModel",
        {"width_coefficient": 0.2, "depth_coefficient": 0.5, "hidden_dim": 256},
        "image",
        64,
    ),
    "convnext": ("ConvNextModel", {"hidden_sizes": [16, 32], "depths": [2, 2], "num_stages": 2}, "image", 32),
    "regnet": ("RegNetModel", {"hidden_sizes": [32, 64], "depths": [1, 2], "groups_width": 16}, "image", 32),
    "segformer": (
        "SegformerModel",
        {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 48, 64], "num_attention_heads": [1, 2, 3, 4]},
        "image",
        64,
    ),
    "mobilevit": ("MobileViTModel", {"image_size": 64, "hidden_sizes": [24, 32, 40]}, "image", 64),
    "wav2vec2": ("Wav2Vec2Model", _AUDIO, "audio", 4000),
    "hubert": ("HubertModel", _AUDIO, "audio", 4000),
    "wavlm": ("WavLMModel", _AUDIO, "audio", 4000),
}


class Recurrent(nn.Module):
    """Embedding, a two-layer LSTM and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 24)
        self.lstm = nn.LSTM(24, 32, 2, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(self.embedding(input_ids))
        return self.head(states[:, -1])  # type: ignore[no-any-return]


class FastEncoder(nn.Module):
    """torch's own encoder, which takes its fused path in inference."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)  # type: ignore[no-any-return]


OWN: dict[str, tuple[type[nn.Module], Callable[[int], Any]]] = {
    "lstm": (Recurrent, lambda batch: {"input_ids": torch.full((batch, 7), 3)}),
    "encoder": (FastEncoder, lambda batch: (torch.zeros(batch, 6, 32),)),
}
ARCHITECTURES = (*SMALL, *OWN)


def build_small(name: str, device: str) -> nn.Module:
    """A small model of one architecture, in evaluation mode."""
    import transformers

    with torch.device(device):
        if name in OWN:
            return OWN[name][0]().eval()
        model_class, options, _, _ = SMALL[name]
        kind = getattr(transformers, model_class)
        return kind(kind.config_class(**options)).eval()  # type: ignore[no-any-return]


def inputs_of(name: str, batch: int) -> dict[str, torch.Tensor] | tuple[torch.Tensor, ...]:
    """A batch of real inputs for it."""
    if name in OWN:
        return OWN[name][1](batch)  # type: ignore[no-any-return]
    _, _, kind, size = SMALL[name]
    if kind == "seq":
        return {"input_ids": torch.full((batch, size), 5)}
    if kind == "audio":
        return {"input_values": torch.zeros(batch, size)}
    return {"pixel_values": torch.zeros(batch, 3, size, size)}


def small_source(name: str) -> Source:
    """A small model as a runtime's tools take it."""
    return source_of(build_small(name, "cpu"), lambda batch: inputs_of(name, batch))


class Function(nn.Module):
    """A module that computes a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Of what it is given."""
        return self.function(*inputs)


def untraceable(x: torch.Tensor) -> torch.Tensor:
    """What TorchScript's tracer cannot follow."""
    if torch.jit.is_tracing():
        raise ValueError("tracing is not for me")
    return torch.tanh(x)


class Dispatched(TorchDispatchMode):
    """Sees the ops that torch really runs: their names, arguments and results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func._schema.name, args, out))
        return out


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Another default dtype of the process."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def written(text: str, **names: object) -> torch.nn.Module:
    """A module of a class whose forward pass is the text, as a cell of a notebook would define it."""
    found: dict[str, object] = {"torch": torch, "__name__": "notebook", **names}
    body = f"class Model(torch.nn.Module):\n    def forward(self, x):\n        {text}"
    exec(body, found)
    return found["Model"]()  # type: ignore[operator, no-any-return]
