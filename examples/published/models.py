"""Models behind published latencies that go by no name: what was timed was part of a model, or more than one.

Give them to latpred as examples/published/models.py:FUNCTION. Sizes are those of the published configurations.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class Encoder(nn.Module):
    """The encoder of a BERT without embeddings and pooler, called with hidden states and a mask of tokens."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        self.encoder = BertModel(BertConfig(**sizes), add_pooling_layer=False).encoder

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Hidden states after the last layer."""
        added = (1.0 - mask[:, None, None, :]) * -10000.0
        out: Tensor = self.encoder(hidden, attention_mask=added)[0]
        return out


def _bert_encoder(tokens: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return Encoder(), (torch.zeros(1, tokens, 768), torch.ones(1, tokens))


bert_encoder_32 = partial(_bert_encoder, 32)
bert_encoder_128 = partial(_bert_encoder, 128)
bert_encoder_384 = partial(_bert_encoder, 384)


class Classifying(nn.Module):
    """A network with what a benchmark of classification times too: the loss, top-1 and top-5."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Loss and shares of samples whose first guess, or one of whose first five, is right."""
        scores = self.network(images)
        labels = torch.zeros(images.shape[0], dtype=torch.int64, device=images.device)
        loss = nn.functional.cross_entropy(scores, labels)
        right = scores.topk(5, 1, True, True)[1].t().eq(labels.view(1, -1))
        top1, top5 = (right[:first].reshape(-1).float().sum(0) * (100.0 / images.shape[0]) for first in (1, 5))
        return loss, top1, top5


def resnet50_classifying() -> tuple[nn.Module, Tensor]:
    """ResNet-50 v1.5 (stride in the 3 x 3 convolution, as torchvision's), with loss and accuracy."""
    import torchvision

    return Classifying(torchvision.models.resnet50()), torch.zeros(1, 3, 224, 224)


def minilm_l6() -> nn.Module:
    """MiniLM-L6-H384 with a classifier on top."""
    return _bert(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)


def bert_distilled_4_layers() -> nn.Module:
    """BERT distilled to four layers of 288."""
    return _bert(hidden_size=288, num_hidden_layers=4, num_attention_heads=12, intermediate_size=1152)


def bert_distilled_6_layers() -> nn.Module:
    """BERT distilled to six layers of 768."""
    return _bert(num_hidden_layers=6)


class InAutocast(nn.Module):
    """A transformer in an autocast that finds halves as weights, or casts of them that it keeps."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives."""
        with torch.autocast("cuda", torch.float16):
            return self.model(*args, **kwargs)


def _in_autocast(name: str) -> nn.Module:
    from latpred.zoo import names

    return InAutocast(names.build(name).model)


bert_base_in_autocast = partial(_in_autocast, "bert-base-uncased")
distilbert_in_autocast = partial(_in_autocast, "distilbert-base-uncased")
roberta_base_in_autocast = partial(_in_autocast, "roberta-base")
roberta_large_in_autocast = partial(_in_autocast, "roberta-large")


def minilm_l6_in_autocast() -> nn.Module:
    """MiniLM-L6-H384 in autocast."""
    return InAutocast(minilm_l6())


def gpt2() -> nn.Module:
    """GPT-2 with the head that gives scores of words, and without a cache."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(use_cache=False))


def gpt2_in_autocast() -> nn.Module:
    """That in autocast."""
    return InAutocast(gpt2())


def _bert(**sizes: int) -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**sizes))


def llama_2_7b() -> nn.Module:
    """Llama-2-7B with the head that gives scores of words."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig())


def mistral_7b() -> nn.Module:
    """Mistral-7B-v0.1 with the head that gives scores of words."""
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig())
