"""Twin: the structure of a user's model with meta tensors in place of its weights, in evaluation mode.

The user's model is only read: it is copied with everything it holds (`copying`), its weights are never copied in
memory, and what the forward pass stores on a module, a cache or a list lands on the twin. Small integer, boolean and
scalar tensors keep their values, because Python may read them. Forward hooks that change what a module gives stay: they
run in eager too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from latpred.errors import TraceError
from latpred.tracing.copying import Copier
from latpred.tracing.inputs import demand_dense
from latpred.tracing.unwatched import leave_hooks_out

Tensor = torch.Tensor
_META = torch.device("meta")
_KEPT_NUMEL = 1 << 20
_SMALL_NUMEL = 1 << 14  # numbers in a helper of the model's, which Python may read as well
_QUANTISED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")
_FLOATING = ("FloatFunctional", "FXFloatFunctional")  # stand there for what may be quantised one day


@dataclass(frozen=True, slots=True)
class Twin:
    """A model to walk.

    Attributes
    ----------
    module : torch.nn.Module
        The copy.
    paths : dict[int, str]
        Dotted path of each of its modules, by id.
    parameters, parameter_bytes : int
        Number of parameters, and bytes of parameters and buffers, each counted once.
    dtype : torch.dtype
        Dtype of the first floating-point parameter or buffer; without any, the one asked for, or float32.
    format : torch.dtype
        The same, but for a model of complex numbers alone: theirs.
    compiled : bool
        Whether `torch.compile` was at the model or a part of it; the copy runs eagerly.
    reached : Copier
        What made the copy, and knows whose code it can run.
    """

    module: torch.nn.Module
    paths: dict[int, str]
    parameters: int
    parameter_bytes: int
    dtype: torch.dtype
    format: torch.dtype
    compiled: bool
    reached: Copier


def make_twin(model: torch.nn.Module, dtype: torch.dtype | None = None, channels_last: bool = False) -> Twin:
    """Copy a model's structure.

    Parameters
    ----------
    model : torch.nn.Module
        On any device.
    dtype : torch.dtype, optional
        What floating-point weights become; as they are by default.
    channels_last : bool
        Whether 4-d weights lie channels-last.

    Raises
    ------
    TraceError
        When the model is of a kind that cannot be copied this way; says which to give instead.
    """
    copier = Copier(_Twinned(dtype, channels_last))
    with torch.inference_mode(False), torch.no_grad():
        module = copier.module(_unwrapped(model, copier))
    _demand_measured(copier.kinds)
    paths: dict[int, str] = {}
    weights: dict[int, Tensor] = {}
    buffers: dict[int, Tensor] = {}
    for part in _named(module, "", paths):
        leave_hooks_out(part)
        for parameter in part._parameters.values():
            if parameter is not None:
                weights[id(parameter)] = parameter
        for buffer in part._buffers.values():
            if buffer is not None:
                buffers[id(buffer)] = buffer
    tensors = {**weights, **buffers}
    floating = next((t.dtype for t in tensors.values() if t.dtype.is_floating_point), None)
    other = next((t.dtype for t in tensors.values() if t.dtype.is_complex), dtype or torch.float32)
    return Twin(
        module=module,
        paths=paths,
        parameters=sum(p.numel() for p in weights.values()),
        parameter_bytes=sum(t.numel() * t.dtype.itemsize for t in tensors.values()),
        dtype=floating or dtype or torch.float32,
        format=floating or other,
        compiled=copier.compiled,
        reached=copier,
    )


def _named(module: torch.nn.Module, path: str, paths: dict[int, str]) -> list[torch.nn.Module]:
    """The modules of a tree, each once and in the order of `named_modules`; their paths go into `paths`."""
    paths[id(module)] = path
    found = [module]
    prefix = f"{path}." if path else ""
    for name, child in module._modules.items():
        if child is not None and id(child) not in paths:
            found += _named(child, prefix + name, paths)
    return found


def _unwrapped(model: torch.nn.Module, copier: Copier) -> torch.nn.Module:
    if isinstance(model, torch.jit.ScriptModule):
        raise TraceError(
            "the model is a TorchScript module, whose ops cannot be watched; give the nn.Module it was made of"
        )
    inner = model.__dict__.get("_modules", {}).get("_orig_mod")  # of torch.compile's wrapper
    if isinstance(inner, torch.nn.Module):
        copier.compiled = True
        return _unwrapped(inner, copier)
    if isinstance(model, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
        return _unwrapped(model.module, copier)
    return model


def _demand_measured(kinds: set[type]) -> None:
    """Refuse modules whose kernels are in no profile."""
    for kind in kinds:
        if kind.__module__.startswith(_QUANTISED) and kind.__name__ not in _FLOATING:
            raise TraceError(
                f"the model has quantised modules ({kind.__name__}), whose kernels nobody measured; give the "
                "model as it was before it was quantised"
            )


class _Twinned:
    """Makes the twins of tensors."""

    def __init__(self, dtype: torch.dtype | None, channels_last: bool) -> None:
        self._dtype = dtype
        self._channels_last = channels_last

    def __call__(self, source: Tensor, within_object: bool) -> Tensor:
        if torch.nn.parameter.is_lazy(source):
            raise TraceError(
                "the model has lazy parameters without a shape; run it once on real inputs before tracing it"
            )
        demand_dense(source, "the model holds")
        twin = self._twin(source, _SMALL_NUMEL if within_object else 0)
        return torch.nn.Parameter(twin, requires_grad=False) if isinstance(source, torch.nn.Parameter) else twin

    def _twin(self, source: Tensor, keep: int) -> Tensor:
        dtype = source.dtype
        if dtype.is_floating_point and self._dtype is not None:
            dtype = self._dtype
        kept = source.dim() == 0 or not (dtype.is_floating_point or dtype.is_complex) or source.numel() <= keep
        if kept and not source.is_meta and source.numel() <= _KEPT_NUMEL:
            return source.detach().to("cpu", dtype, copy=True)
        if self._channels_last and source.dim() == 4:
            return torch.empty(source.shape, dtype=dtype, device=_META, memory_format=torch.channels_last)
        return torch.empty_strided(source.shape, source.stride(), dtype=dtype, device=_META)
