"""Source: a model as a runtime's own tools need it, real on the CPU, beside its eager trace.

Tools such as an exporter or a compiler run the model, so they need weights; which weights does not matter. Nothing is
built before it is asked for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from latpred.errors import RuntimeRefusalError
from latpred.graph.graph import ModelGraph
from latpred.sandbox.fingerprint import fingerprint
from latpred.sandbox.own_thread import without_modes
from latpred.sandbox.untouched import Copier, copied
from latpred.tracing import trace
from latpred.tracing.inputs import DTYPES, as_arguments, kept_dtypes, real, tensors_in
from latpred.tracing.meta_module import attend, cast_weights, make_meta_module
from latpred.tracing.tracer import as_written, dtype_of_build, with_inputs
from latpred.zoo.names import attention as built_with
from latpred.zoo.names import build, evaluated

SEED = 0


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A model that can be had real."""

    graph: ModelGraph  # its eager trace
    model: Callable[[], torch.nn.Module]  # builds it on the CPU for evaluation, as it was traced; may take a while
    inputs: Callable[[int], Any]  # real ones on the CPU for a batch size: positional or keyword arguments
    retrace: Callable[..., ModelGraph]  # traces it eagerly once more, with other options of `trace`
    code: str | None = ""  # digest of what sets it apart from others of its trace; None where nobody can tell
    roots: tuple[Any, ...] = ()  # classes and functions of the user's that run with it; see `latpred.sandbox.untouched`


@without_modes()
def source_of(model: torch.nn.Module | str, inputs: Any = None, **options: Any) -> Source:
    """A source from whatever `latpred.trace` takes but a graph; options and errors are those of `latpred.trace`."""
    # The runtime that was asked for compiles it, or not.
    graph = as_written(trace(model, inputs, **options))
    seq, image, attention = (options.get(name) for name in ("seq", "image", "attention"))
    dtype, last = DTYPES.get(graph.precision, torch.float32), options.get("memory_format") == "channels_last"
    wanted = DTYPES.get(options.get("precision") or "")
    written, given = with_inputs(model, inputs, seq, image)
    roots = () if isinstance(model, str) else make_meta_module(model).reached.roots

    @torch.inference_mode(False)
    def make() -> torch.nn.Module:
        if isinstance(model, str):
            with torch.random.fork_rng(devices=[]), dtype_of_build(model), built_with(attention):
                torch.default_generator.manual_seed(SEED)
                made = build(model, seq=seq, image=image, device="cpu", inputs=inputs).model
        else:
            made = _on_cpu(model)
            attend(made, attention)
        _settle(made, wanted, last)
        return made

    kept = kept_dtypes(given, written) if wanted is None else frozenset()
    code = code_of(written, given.make(min(graph.only, default=2)))
    retrace = partial(trace, model, inputs, **options)
    return Source(graph, make, lambda batch: real(given.make(batch), dtype, last, kept), retrace, code, roots)


def code_of(model: torch.nn.Module, inputs: Any = ()) -> str | None:
    """What sets a model apart from others of one trace, with inputs but their values; None where nobody can tell."""
    leaves, form = flattened(as_arguments(inputs))
    shapes = [(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    return fingerprint((model, shapes, str(form)))


def _on_cpu(module: torch.nn.Module) -> torch.nn.Module:
    """A copy of a module, and of every tensor in it, on the CPU in evaluation mode."""
    generator = torch.Generator().manual_seed(SEED)
    with torch.inference_mode(False), torch.no_grad():
        copied = Copier(lambda tensor, _: _real(tensor, generator)).module(module)
    return evaluated(copied.to(device="cpu"))


def _real(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A copy of a tensor on the CPU; one without memory gets small random numbers."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return copy.deepcopy(tensor)
    if not tensor.is_meta:
        made = tensor.detach().to("cpu", copy=True)
    elif tensor.is_floating_point():
        made = torch.empty_like(tensor, device="cpu").normal_(0.0, 0.02, generator=generator)
    else:
        made = torch.zeros_like(tensor, device="cpu")
    return torch.nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else made


def weight_sharing_copy(model: torch.nn.Module) -> torch.nn.Module:
    """A copy over the same weights: what a forward pass keeps on a module, in a list or an object lands on the copy."""
    return Copier(lambda tensor, _: tensor).module(model)


def _settle(module: torch.nn.Module, dtype: torch.dtype | None, channels_last: bool) -> None:
    """Cast weights and lay them out as the eager trace does with its own, `latpred.tracing.meta_module`."""
    if dtype is not None:
        cast_weights(module, dtype)
    for tensor in (*module.parameters(), *module.buffers()):
        if channels_last and tensor.dim() == 4:
            tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)


class FlatModel(torch.nn.Module):
    """A model that takes the tensors in its arguments and returns those in its result, as exporters want it.

    It takes those within objects too: what a tool does not see come in, it computes with once. What is no tensor in the
    result, such as the cache of a decoder, they cannot give back. A model that gives none is refused: nothing of it
    would be left.
    """

    def __init__(self, model: torch.nn.Module, inputs: Any) -> None:
        super().__init__()
        self.model = model
        leaves, self._form = flattened(inputs)
        self._leaves = [torch.empty(0) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._named = isinstance(inputs, Mapping)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rest = iter(tensors)
        given = tree_unflatten([copied(leaf, lambda _: next(rest)) for leaf in self._leaves], self._form)
        result = self.model(**given) if self._named else self.model(*given)
        found = _results(result)
        if not found:
            raise RuntimeRefusalError(f"{type(self.model).__name__} gives no tensor")
        return tuple(found)


def _results(value: Any) -> list[torch.Tensor]:
    """The tensors in a result."""
    parts: Iterable[Any] = ()
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, (list, tuple)):
        parts = value
    elif is_dataclass(value):
        parts = [getattr(value, field.name, None) for field in fields(value)]
    return [tensor for part in parts for tensor in _results(part)]


def tensors_of(inputs: Any) -> list[torch.Tensor]:
    """The tensors among the arguments of a forward, in the order in which `FlatModel` takes them."""
    return [tensor for leaf in flattened(inputs)[0] for tensor in tensors_in(leaf)]


def device_of(model: torch.nn.Module, inputs: Any) -> torch.device:
    """The device of a model's weights, else of its inputs."""
    tensors = (*model.parameters(), *model.buffers(), *tensors_of(inputs))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def flattened(inputs: Any) -> tuple[list[Any], Any]:
    return tree_flatten(dict(inputs) if isinstance(inputs, Mapping) else tuple(inputs))
