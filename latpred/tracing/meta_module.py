"""MetaModule: a copy of a user's model with meta tensors in place of its weights, in evaluation mode.

The model is only read: what the forward pass stores on a module, a cache or a list lands on the copy. Small integer
and boolean tensors, and those of one value, keep their values, because Python may read them. Here as well: how models
are built without weights, and what layers that run as one op fall into.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch.nn import init
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from latpred.errors import TraceError
from latpred.sandbox.own_thread import ThreadLock, replaced, uncounted
from latpred.sandbox.untouched import Copier, keeps_values
from latpred.tracing.inputs import demand_dense, has_precision

Tensor = torch.Tensor
_QUANTISED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")
_FLOATING = ("FloatFunctional", "FXFloatFunctional")  # stand there for what may be quantised one day


@dataclass(frozen=True, slots=True)
class MetaModule:
    module: torch.nn.Module  # the copy
    paths: dict[int, str]  # dotted path of each of its modules, by id
    parameters: int  # each counted once
    parameter_bytes: int  # of parameters and buffers
    dtype: torch.dtype  # of the first floating-point parameter or buffer; else the one asked for, or float32
    format: torch.dtype  # the same, but for a model of complex numbers alone: theirs
    reached: Copier  # what made the copy: it knows whose code that can run, and whether torch.compile was at any of it


def make_meta_module(
    model: torch.nn.Module, dtype: torch.dtype | None = None, channels_last: bool = False, *, hooks: bool = True
) -> MetaModule:
    """Copy a model's structure, its floating-point weights as `dtype` if given; `hooks` is that of `Copier`."""
    copier = Copier(partial(_on_meta, dtype, channels_last), hooks=hooks)
    with torch.inference_mode(False), torch.no_grad():
        module = copier.module(model)
    _demand_measured(copier.kinds)
    paths = {id(part): path for path, part in module.named_modules()}
    parts = list(module.modules())
    weights = {id(tensor): tensor for part in parts for tensor in part._parameters.values() if tensor is not None}
    buffers = {id(tensor): tensor for part in parts for tensor in part._buffers.values() if tensor is not None}
    tensors = {**weights, **buffers}
    formats = [t.dtype for t in tensors.values() if t.dtype.is_floating_point]
    # One of 8 bits is for the operands of its products; everything else is computed in another.
    floating = next((one for one in formats if one.itemsize > 1), formats[0] if formats else None)
    other = next((t.dtype for t in tensors.values() if t.dtype.is_complex), dtype or torch.float32)
    return MetaModule(
        module=module,
        paths=paths,
        parameters=sum(p.numel() for p in weights.values()),
        parameter_bytes=sum(tensor.nbytes for tensor in tensors.values()),
        dtype=floating or dtype or torch.float32,
        format=floating or other,
        reached=copier,
    )


def attend(module: torch.nn.Module, implementation: str | None) -> None:
    """Have models of transformers in a copy compute attention in a way, where they ask their config for it."""
    for part in module.modules() if implementation else ():
        config: Any = getattr(part, "config", None)
        able = implementation != "sdpa" or getattr(part, "_supports_sdpa", True)
        if able and getattr(config, "_attn_implementation", None) not in (None, implementation):
            config._attn_implementation = implementation


def _demand_measured(kinds: set[type]) -> None:
    """Refuse modules whose kernels are in no profile."""
    for kind in kinds:
        if kind.__module__.startswith(_QUANTISED) and kind.__name__ not in _FLOATING:
            raise TraceError(
                f"the model has quantised modules ({kind.__name__}), whose kernels nobody measured; give the "
                "model as it was before it was quantised"
            )


def _on_meta(dtype: torch.dtype | None, channels_last: bool, source: Tensor, within_object: bool) -> Tensor:
    """The meta tensor that stands for a model's."""
    if torch.nn.parameter.is_lazy(source):
        raise TraceError("the model has lazy parameters without a shape; run it once on real inputs before tracing it")
    demand_dense(source, "the model holds")
    if is_traceable_wrapper_subclass(source) or _runs_code(type(source)):
        raise TraceError(
            f"the model holds a tensor of class {type(source).__name__}, whose kernels nobody measured; give the model "
            "with plain tensors, as it was before its weights were quantised, made sparse or spread over devices"
        )
    made = _small_or_meta(source, dtype, channels_last, within_object)
    if not isinstance(source, torch.nn.Parameter):
        return made
    return torch.nn.Parameter(made, requires_grad=source.requires_grad)  # autocast keeps casts of what requires it


def _runs_code(kind: type[Tensor]) -> bool:
    """Whether a class of tensors runs Python of its own around ops or in place of them; parameters switch that off."""
    usual: Any = Tensor.__torch_function__
    return getattr(kind.__torch_function__, "__func__", usual.__func__) is not usual.__func__


def _small_or_meta(source: Tensor, wanted: torch.dtype | None, channels_last: bool, within_object: bool) -> Tensor:
    dtype = source.dtype if wanted is None or not has_precision(source) else wanted
    if keeps_values(source, within_object):
        return source.detach().to("cpu", dtype, copy=True)
    if channels_last and source.dim() == 4:
        return torch.empty(source.shape, dtype=dtype, device="meta", memory_format=torch.channels_last)
    return torch.empty_strided(source.shape, source.stride(), dtype=dtype, device="meta")


def cast_weights(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Give weights and buffers of a real model the dtype that a trace gives its own."""
    for tensor in (*module.parameters(), *module.buffers()):
        if has_precision(tensor):
            tensor.data = tensor.data.to(dtype)
    for part in module.modules():
        if isinstance(part, torch.nn.RNNBase):
            part.flatten_parameters()  # CUDA wants them in one piece


# What gives a tensor its first values and returns it.
_FILLS = frozenset(
    {
        *(init.uniform_, init.normal_, init.constant_, init.kaiming_uniform_),
        *(Tensor.uniform_, Tensor.normal_, Tensor.fill_, Tensor.zero_),
        *(Tensor.erfinv_, Tensor.clamp_),  # steps of a truncated normal distribution
    }
)
_CONSTRUCTORS = frozenset(_device_constructors())


class Unweighted(DeviceContext):
    """Within it, this thread makes tensors on the meta device, and nothing there is initialised."""

    def __init__(self) -> None:
        super().__init__("meta")

    def __enter__(self) -> None:
        # As `with torch.device("meta")`, which besides notes the device where all threads find it.
        TorchFunctionMode.__enter__(self)  # type: ignore[no-untyped-call]

    def __exit__(self, *failure: object) -> None:
        TorchFunctionMode.__exit__(self, *failure)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func in _FILLS:
            tensor = args[0] if args else options.get("tensor")
            if isinstance(tensor, Tensor) and tensor.is_meta:
                return tensor
        elif func in _CONSTRUCTORS and options.get("device") is None:
            options["device"] = self.device
        return func(*args, **options)


_DEFAULT_DTYPE = ThreadLock()


@contextmanager
def usual_dtype() -> Iterator[None]:
    """Have the process's default dtype be float32, as a published model expects. Threads take turns."""
    with _DEFAULT_DTYPE.held():
        known = torch.get_default_dtype()
        if known == torch.float32:  # another thread may set it meanwhile
            yield
            return
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(known)


aten = torch.ops.aten


@contextmanager
def fast_paths_on_meta() -> Iterator[None]:
    """Let torch take its fast paths on the meta device as well, in this thread.

    Its Python asks whether tensors are on a CPU, a GPU or the backend that was registered under a name, which all
    threads share: to others the name is what it was. Threads take turns.
    """
    module: Any = torch.utils.backend_registration
    saved = module._privateuse1_backend_name
    name = module._privateuse1_backend_name = _AlsoMeta(saved)
    name.thread = get_ident()
    flex: Any = sys.modules.get("torch.nn.attention.flex_attention")  # which refuses other devices than it knows
    known = replaced(flex, "_validate_device", lambda *_: None) if hasattr(flex, "_validate_device") else nullcontext()
    try:
        with known:
            yield
    finally:
        if module._privateuse1_backend_name is name:
            module._privateuse1_backend_name = saved


class _AlsoMeta(str):
    """A name that one thread finds equal to "meta" as well."""

    thread = 0
    __hash__ = str.__hash__

    @uncounted
    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or (str.__eq__("meta", other) is True and get_ident() == self.thread)


def _multi_head_attention(
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
    """What `aten::_native_multi_head_attention` does for self-attention; autocast makes three tensors of the one."""
    batch, length, width = query.shape
    if query is key is value:
        packed = aten.mm(query.reshape(-1, width), qkv_weight.t()).view(batch, length, 3 * embed_dim)
    else:
        pairs = zip((query, key, value), aten.split(qkv_weight, embed_dim), strict=True)
        packed = torch.cat([aten.mm(x.reshape(-1, width), w.t()).view(batch, length, -1) for x, w in pairs], 2)
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


def _encoder_layer(src: Tensor, embed_dim: int, num_heads: int, *rest: Any) -> Tensor:
    """What `aten::_transformer_encoder_layer_fwd` does."""
    mask, mask_type = (*rest[15:], None, None)[:2]

    def attention(x: Tensor) -> Tensor:
        given = (x, x, x, embed_dim, num_heads, *rest[:4], mask, False, True, mask_type)
        return aten._native_multi_head_attention(*given)[0]  # type: ignore[no-any-return]

    return layer_around(attention, src, embed_dim, *rest[4:15])


def layer_around(
    attention: Callable[[Tensor], Tensor],
    src: Tensor,
    width: int,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    *weights: Tensor,
) -> Tensor:
    """An encoder's layer around its attention, over (batch, length, width) or (tokens, width)."""
    norms, (weight, bias, out_weight, out_bias) = (weights[:2], weights[2:4]), weights[4:]

    def norm(x: Tensor, place: int) -> Tensor:
        return aten.layer_norm(x, [width], *norms[place], eps)  # type: ignore[no-any-return]

    def rows(x: Tensor) -> Tensor:
        return x if x.dim() == 2 else x.reshape(-1, width)

    def back(x: Tensor) -> Tensor:
        return x if src.dim() == 2 else x.view(src.shape)

    x = attention(norm(src, 0) if norm_first else src).add_(src)
    if not norm_first:
        x = norm(x, 0)
    residual = x
    if norm_first:
        x = norm(x, 1)
    x = aten._addmm_activation(bias, rows(x), weight.t(), use_gelu=use_gelu)
    x = back(aten.addmm(out_bias, x, out_weight.t())).add_(residual)
    return x if norm_first else norm(x, 1)


REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "_native_multi_head_attention": _multi_head_attention,
    "_transformer_encoder_layer_fwd": _encoder_layer,
}
