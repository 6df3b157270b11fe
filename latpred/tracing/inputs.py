"""Inputs of a walk: a batch of any size, from a function, from an example or from what a model says of itself.

Floating-point inputs are meta tensors, integer and boolean ones real.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from latpred.errors import UsageError
from latpred.tracing.copying import copied

Tensor = torch.Tensor
Maker = Callable[[int], Any]


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a model is called with.

    Attributes
    ----------
    make : Callable[[int], Any]
        A batch of a given size: a tensor, a tuple of positional or a dict of keyword arguments.
    kind : str
        "seq", "image", "audio" or "custom".
    size : int
        Tokens, pixels or samples; 0 for custom inputs.
    batch : int
        Samples of the example that was given; 1 where there was none.
    """

    make: Maker
    kind: str
    size: int
    batch: int = 1


def from_example(example: Any) -> Inputs:
    """Inputs of any batch size from one example.

    The first dimension of the first tensor is the batch; every tensor whose first dimension has the same size is taken
    to have one row per sample, the others are left alone. Give an example of at least two samples where a
    dimension that is no batch could be 1 as well, or a function of the batch where the rule does not fit.
    """
    if is_function(example):
        return Inputs(example, "custom", 0)
    if isinstance(example, list):
        example = tuple(example)
    for tensor in tensors_in(example):
        demand_dense(tensor, "inputs hold")
    sizes = [tensor.shape[0] for tensor in tensors_in(example) if tensor.dim()]
    if not sizes or sizes[0] < 1:
        raise UsageError(
            "inputs hold no tensor whose first dimension could be the batch; give tensors such as "
            "inputs=torch.zeros(1, 3, 224, 224), or a function inputs=lambda batch: ..."
        )
    return Inputs(lambda batch: _resized(example, sizes[0], batch), "custom", 0, sizes[0])


def is_function(inputs: Any) -> bool:
    """Whether inputs are a function of the batch, and no example."""
    return callable(inputs) and not isinstance(inputs, Tensor)


def sequence_first(model: torch.nn.Module) -> bool:
    """Whether one of PyTorch's own sequence models, given by itself, takes the batch in the second dimension."""
    if isinstance(model, (torch.nn.TransformerEncoder, torch.nn.TransformerDecoder)):
        model = model.layers[0] if len(model.layers) else model
    kinds = (torch.nn.TransformerEncoderLayer, torch.nn.TransformerDecoderLayer)
    part = getattr(model, "self_attn", None) if isinstance(model, kinds) else model
    if not isinstance(part, (torch.nn.MultiheadAttention, torch.nn.RNNBase, torch.nn.Transformer)):
        return False
    return not part.batch_first


def demand_dense(tensor: Tensor, holder: str) -> None:
    """Refuse tensors that have no one shape, or no strides."""
    if tensor.is_nested:
        raise UsageError(
            f"{holder} a nested tensor, which is no rectangle; give a padded one, or say lengths=[...] with "
            "execution='nested'"
        )
    if tensor.layout is not torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        raise UsageError(f"{holder} a tensor of layout {layout}, whose ops have no formula; give it dense: .to_dense()")


def arguments(
    inputs: Inputs, batch: int, dtype: torch.dtype, channels_last: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of one walk. To be called in inference mode, which marks them as activations."""
    made = inputs.make(batch)
    settled = _settled(made, dtype, channels_last)
    if isinstance(settled, dict):
        return (), settled
    return (settled if isinstance(settled, tuple) else (settled,)), {}


def nbytes(args: tuple[Any, ...], options: dict[str, Any]) -> int:
    """Bytes of all tensors among the arguments."""
    return sum(t.numel() * t.dtype.itemsize for t in tensors_in((args, options)))


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict) or hasattr(value, "items"):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def _map(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict) or hasattr(value, "items"):
        return {key: _map(item, function) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(item, function) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_map(item, function) for item in value)
    return copied(value, function)  # a cache, say, which the forward pass writes into


def _resized(example: Any, given: int, batch: int) -> Any:
    def resize(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != given:
            return tensor
        if tensor.is_meta or tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            shape = (batch, *tensor.shape[1:])
            return torch.empty(shape, dtype=tensor.dtype, device="meta")
        return tensor[torch.arange(batch, device=tensor.device) % given]

    return _map(example, resize)


def _settled(value: Any, dtype: torch.dtype, channels_last: bool) -> Any:
    def settle(tensor: Tensor) -> Tensor:
        demand_dense(tensor, "inputs hold")
        layout = torch.channels_last if channels_last and tensor.dim() == 4 else torch.contiguous_format
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            wanted = dtype if tensor.dtype.is_floating_point else tensor.dtype
            return torch.empty(tensor.shape, dtype=wanted, device="meta", memory_format=layout)
        if tensor.is_meta:
            # Integers are read by Python and index tables: ones are safe for both.
            return torch.ones(tensor.shape, dtype=tensor.dtype)
        return tensor.detach().to("cpu", copy=True)

    return _map(value, settle)


def placed(value: Any, device: str) -> Any:
    """The same inputs on a device; meta tensors become zeros there, and on "meta" nothing moves."""
    if device == "meta":
        return value

    def place(tensor: Tensor) -> Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device) if tensor.is_meta else tensor.to(device)

    return _map(value, place)


def real(value: Any, dtype: torch.dtype, channels_last: bool = False) -> Any:
    """The same inputs on the CPU, with normal noise of a dtype in place of floating-point meta tensors; ids stay."""
    generator = torch.Generator().manual_seed(0)
    layout = torch.channels_last if channels_last else torch.contiguous_format

    def fill(tensor: Tensor) -> Tensor:
        if not tensor.dtype.is_floating_point:
            return torch.ones(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor.detach().to("cpu")
        filled = torch.randn(tensor.shape, generator=generator) if tensor.is_meta else tensor.detach().to("cpu")
        return filled.to(dtype).contiguous(memory_format=layout if tensor.dim() == 4 else torch.contiguous_format)

    return _map(value if isinstance(value, (tuple, dict)) or hasattr(value, "items") else (value,), fill)
