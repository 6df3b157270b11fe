"""Formulas of fused attention."""

from __future__ import annotations

from math import prod
from typing import Any

from latpred.ops.registry import Work, cost
from latpred.ops.shapes import Tensor


def attention(query: Tensor, key: Tensor, value: Tensor, masked: bool, causal: bool) -> Work:
    """Scores and weighted sum. A causal mask is counted in full: only some backends skip the upper half."""
    heads = query.shape[-3] if len(query.shape) > 2 else 1
    queries, head_dim = query.shape[-2], query.shape[-1]
    keys = key.shape[-2]
    dims = {
        "batch": prod(query.shape[:-3]),
        "heads": heads,
        "queries": queries,
        "keys": keys,
        "head_dim": head_dim,
        "masked": int(masked),
    }
    macs = prod(query.shape[:-1]) * keys * (head_dim + value.shape[-1])
    return Work("attention.causal" if causal else "attention", dims, macs)


@cost("aten::scaled_dot_product_attention")
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    out: Any,
    **_: Any,
) -> Work:
    """Torch's attention, whichever backend serves it."""
    return attention(query, key, value, attn_mask is not None, is_causal)


@cost(
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_efficient_attention",
)
def named_backend(query: Tensor, key: Tensor, value: Tensor, *rest: Any, out: Any, **options: Any) -> Work:
    """One backend, called by name."""
    mask = options.get("attn_mask", next((item for item in rest if hasattr(item, "shape")), None))
    return attention(query, key, value, mask is not None, bool(options.get("is_causal", False)))
