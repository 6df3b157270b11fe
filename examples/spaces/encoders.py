"""A space of transformer encoders: depth, width and heads of a BERT.

Tokens are bytes, so that nearly all parameters are in the layers and none of them lie idle in a table of words.
"""

from __future__ import annotations

from torch import nn
from transformers import BertConfig, BertModel

CHOICES = {"depth": tuple(range(1, 25)), "width": tuple(range(128, 2049, 128)), "heads": (2, 4, 8, 16)}
REFERENCE = {"depth": 8, "width": 512, "heads": 8}  # BERT-medium
INPUT = {"seq": 128}

TINY = {"depth": tuple(range(1, 7)), "width": tuple(range(64, 321, 32)), "heads": (2, 4, 8)}
TINY_INPUT = {"seq": 32}


def candidate(depth: int, width: int, heads: int) -> BertConfig:
    """What latpred predicts: a config, whose model gets the attention that the profile's software had."""
    return BertConfig(
        vocab_size=256,
        num_hidden_layers=depth,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=4 * width,
    )


def build(depth: int, width: int, heads: int) -> nn.Module:
    """The model itself."""
    return BertModel(candidate(depth, width, heads)).eval()
