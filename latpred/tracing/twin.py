"""Twin: the structure of a user's model with meta tensors in place of its weights, in evaluation mode.

The user's model is only read: its modules are copied one by one without calling anything of theirs, its weights are
never copied in memory, and what the forward pass stores on a module lands on the twin. Small integer, boolean and
scalar tensors keep their values, because Python may read them. Forward hooks stay: they run in eager too. Objects
that modules share with the outside (a config) are shared with the twin as well.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch

from latpred.errors import TraceError
from latpred.tracing.inputs import demand_dense

Tensor = torch.Tensor
_META = torch.device("meta")
_KEPT_NUMEL = 1 << 20
_REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})
_IMMUTABLE = frozenset({str, int, float, bool, type(None), torch.dtype, torch.device, torch.Size, type})
_CONTAINERS = frozenset({list, tuple, set, dict, OrderedDict})


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
    """

    module: torch.nn.Module
    paths: dict[int, str]
    parameters: int
    parameter_bytes: int
    dtype: torch.dtype


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
    model = _unwrapped(model)
    with torch.inference_mode(False), torch.no_grad():
        copier = _Copier(dtype, channels_last)
        module = copier.module(model)
    paths: dict[int, str] = {}
    weights: dict[int, Tensor] = {}
    buffers: dict[int, Tensor] = {}
    for part in _named(module, "", paths):
        for parameter in part._parameters.values():
            if parameter is not None:
                weights[id(parameter)] = parameter
        for buffer in part._buffers.values():
            if buffer is not None:
                buffers[id(buffer)] = buffer
    tensors = {**weights, **buffers}
    floating = next((t.dtype for t in tensors.values() if t.dtype.is_floating_point), dtype or torch.float32)
    return Twin(
        module=module,
        paths=paths,
        parameters=sum(p.numel() for p in weights.values()),
        parameter_bytes=sum(t.numel() * t.dtype.itemsize for t in tensors.values()),
        dtype=floating,
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


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    if isinstance(model, torch.jit.ScriptModule):
        raise TraceError(
            "the model is a TorchScript module, whose ops cannot be watched; give the nn.Module it was made of"
        )
    inner = getattr(model, "_orig_mod", None)  # torch.compile's wrapper
    if isinstance(inner, torch.nn.Module):
        return _unwrapped(inner)
    if isinstance(model, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
        return _unwrapped(model.module)
    return model


class _Copier:
    """Copies modules and their tensors, each once, so that tied weights stay tied."""

    def __init__(self, dtype: torch.dtype | None, channels_last: bool) -> None:
        self._dtype = dtype
        self._channels_last = channels_last
        self._done: dict[int, Any] = {}
        self._held: list[Any] = []  # keeps the ids above from being reused

    def module(self, source: torch.nn.Module) -> torch.nn.Module:
        known = self._done.get(id(source))
        if known is not None:
            return known  # type: ignore[no-any-return]
        twin: torch.nn.Module = object.__new__(type(source))
        self._remember(source, twin)
        state = twin.__dict__
        state.update(source.__dict__)
        for name, value in source.__dict__.items():
            kind = type(value)
            if kind in _IMMUTABLE:
                continue
            if kind in _CONTAINERS and not value:
                state[name] = kind()  # the hooks that a module does not have, a dozen of them
            elif name in _REGISTERED:
                state[name] = kind([(key, self._part(part)) for key, part in value.items()])
            else:
                state[name] = self._attribute(value, 3)
        state["training"] = False
        return twin

    def _part(self, part: Any) -> Any:
        if isinstance(part, Tensor):
            return self.tensor(part)
        return self.module(part) if isinstance(part, torch.nn.Module) else part

    def tensor(self, source: Tensor) -> Tensor:
        known = self._done.get(id(source))
        if known is not None:
            return known  # type: ignore[no-any-return]
        if torch.nn.parameter.is_lazy(source):
            raise TraceError(
                "the model has lazy parameters without a shape; run it once on real inputs before tracing it"
            )
        demand_dense(source, "the model holds")
        twin = self._twin_tensor(source)
        if isinstance(source, torch.nn.Parameter):
            twin = torch.nn.Parameter(twin, requires_grad=False)
        self._remember(source, twin)
        return twin

    def _twin_tensor(self, source: Tensor) -> Tensor:
        dtype = source.dtype
        if dtype.is_floating_point and self._dtype is not None:
            dtype = self._dtype
        kept = source.dim() == 0 or not (dtype.is_floating_point or dtype.is_complex)
        if kept and not source.is_meta and source.numel() <= _KEPT_NUMEL:
            return source.detach().to("cpu", dtype, copy=True)
        if self._channels_last and source.dim() == 4:
            return torch.empty(source.shape, dtype=dtype, device=_META, memory_format=torch.channels_last)
        return torch.empty_strided(source.shape, source.stride(), dtype=dtype, device=_META)

    def _attribute(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if issubclass(kind, Tensor):
            return self.tensor(value)
        if issubclass(kind, torch.nn.Module):
            return self.module(value)
        if kind is MethodType and isinstance(value.__self__, torch.nn.Module):
            return MethodType(value.__func__, self.module(value.__self__))
        if not depth or kind not in _CONTAINERS:
            return value
        if issubclass(kind, dict):
            return kind((key, self._attribute(item, depth - 1)) for key, item in value.items())
        return kind(self._attribute(item, depth - 1) for item in value)

    def _remember(self, source: Any, twin: Any) -> None:
        self._done[id(source)] = twin
        self._held.append(source)
