"""Whole layers that torch runs as one op, replaced by the kernels inside.

`nn.TransformerEncoderLayer` and `nn.MultiheadAttention` hand themselves to one aten op in inference, which issues its
kernels from C++ where no mode sees them, and which the meta device does not have. The replacements issue the ops that
torch's CPU kernel issues, and compute the same numbers; on CUDA torch puts one fused attention kernel in place of the
products and the softmax between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from types import CodeType
from typing import Any

import torch

Tensor = torch.Tensor
aten = torch.ops.aten


@contextmanager
def enabled() -> Iterator[None]:
    """Let torch take its fast paths on the meta device as well, in this thread.

    Its Python asks whether tensors are on a CPU, a GPU or the backend that was registered under a name, which all
    threads share: to others the name is what it was. Threads take turns.
    """
    module: Any = torch.utils.backend_registration
    saved = module._privateuse1_backend_name
    name = module._privateuse1_backend_name = _AlsoMeta(saved)
    name.thread = get_ident()
    try:
        yield
    finally:
        if module._privateuse1_backend_name is name:
            module._privateuse1_backend_name = saved


class _AlsoMeta(str):
    """A name that one thread finds equal to "meta" as well."""

    thread = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or (str.__eq__("meta", other) is True and get_ident() == self.thread)


ASKED: CodeType = _AlsoMeta.__eq__.__code__  # no Python of the model's


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """What `aten::_native_multi_head_attention` does for self-attention."""
    batch, length, width = query.shape
    packed = aten.mm(query.reshape(-1, width), qkv_weight.t()).view(batch, length, 3 * embed_dim)
    q, k, v = aten._transform_bias_rescale_qkv(packed, qkv_bias, num_head)
    flat = (batch * num_head, length, embed_dim // num_head)
    scores = aten.bmm(q.view(flat), k.view(flat).transpose(1, 2)).view(batch, num_head, length, length)
    if mask is None:
        weights = aten._softmax(scores, 3, False)
    else:
        weights = aten._masked_softmax(scores, mask if mask.dtype is torch.bool else mask.to(torch.bool), 3, mask_type)
    context = aten.bmm(weights.view(batch * num_head, length, length), v.view(flat))
    merged = context.view(batch, num_head, length, -1).permute(0, 2, 1, 3).contiguous().view(-1, embed_dim)
    out = aten.addmm(proj_bias, merged, proj_weight.t()).view(batch, length, embed_dim)
    if not need_weights:
        return out, None
    return out, (weights.sum(1).div_(num_head) if average_attn_weights else weights)


def encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    """What `aten::_transformer_encoder_layer_fwd` does."""

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return aten.layer_norm(x, [embed_dim], weight, bias, eps)  # type: ignore[no-any-return]

    x = norm(src, norm_weight_1, norm_bias_1) if norm_first else src
    attention = (qkv_weight, qkv_bias, proj_weight, proj_bias, mask, False, True, mask_type)
    x, _ = multi_head_attention(x, x, x, embed_dim, num_heads, *attention)
    x = x.add_(src)
    if not norm_first:
        x = norm(x, norm_weight_1, norm_bias_1)
    residual = x
    if norm_first:
        x = norm(x, norm_weight_2, norm_bias_2)
    x = aten._addmm_activation(ffn_bias_1, x.reshape(-1, embed_dim), ffn_weight_1.t(), use_gelu=use_gelu)
    x = aten.addmm(ffn_bias_2, x, ffn_weight_2.t()).view(residual.shape).add_(residual)
    return x if norm_first else norm(x, norm_weight_2, norm_bias_2)


REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "_native_multi_head_attention": multi_head_attention,
    "_transformer_encoder_layer_fwd": encoder_layer,
}
