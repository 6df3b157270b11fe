"""What can be measured whole: a recipe of a model that can be built anywhere, with inputs at any batch size.

A recipe, not a model, so that a suite of many fits in memory and the same one is traced on the meta device and run on
a real one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_map

from latpred.accuracy.predicted import GraphKey
from latpred.errors import UsageError
from latpred.graph.dtypes import dtype_of
from latpred.graph.graph import ModelGraph
from latpred.runtimes.graph_store import digest_of
from latpred.runtimes.lowering import fitting, of_source, traced_by
from latpred.runtimes.source import Source

Inputs = Callable[[int, Any], Any]
SEED = 0
_ORDINARY = 16  # ids below may mean padding, whose mask would be other work


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """A model to measure.

    Attributes
    ----------
    name : str
        What tables call it.
    input_kind, input_size : str, int
        "seq" and tokens, "image" and pixels, "audio" and samples, or "custom" and 0.
    make : callable
        (device, precision) -> (model in eval mode, inputs), where inputs maps (batch, device) to a tuple or dict.
    family : str
        Which architectures count as relatives; "" when nobody said.
    graph : ModelGraph, optional
        Its graph, where that is known without tracing.
    """

    name: str
    input_kind: str
    input_size: int
    make: Callable[[str, str], tuple[nn.Module, Inputs]]
    family: str = ""
    graph: ModelGraph | None = None

    def key(self, precision: str, runtime: str = "eager") -> GraphKey:
        """What its graph of a runtime is found by."""
        return GraphKey(self.name, self.input_kind, self.input_size, precision, traced_by(runtime))

    def trace(self, precision: str, runtime: str = "eager", target: str = "cpu") -> ModelGraph:
        """What a runtime runs for it on a kind of device; the graph it came with, where there is one."""
        if self.graph is not None:
            return fitting(self.graph, runtime, target)
        from latpred.tracing import trace

        model, inputs = self.make("meta", precision)
        graph = trace(model, lambda batch: inputs(batch, "meta"), precision=precision)
        graph = msgspec.structs.replace(graph, model=self.name, input_kind=self.input_kind, input_size=self.input_size)

        def real_inputs(batch: int) -> Any:
            return self.make("meta", precision)[1](batch, "cpu")

        source = Source(graph, lambda: self.make("cpu", precision)[0], real_inputs, digest_of(model))
        return of_source(source, runtime, target)


Model = str | nn.Module | ModelGraph | Workload
Models = Model | Iterable[Model] | Mapping[str, nn.Module]


def workloads_of(models: Models, *, seq: int | None = None, image: int | None = None) -> tuple[Workload, ...]:
    """Workloads from whatever a user calls models; a graph among them runs on the simulated device only.

    Raises
    ------
    UsageError
        When there is no model, or two have one name.
    UnknownModelError
        When a name means nothing to latpred.
    """
    if isinstance(models, (str, nn.Module, ModelGraph, Workload)):
        models = [models]
    if isinstance(models, Mapping):
        workloads = [module_workload(name, module, seq=seq, image=image) for name, module in models.items()]
    else:
        workloads = [_workload(model, seq, image) for model in models]
    if not workloads:
        raise UsageError("There is no model to measure. Name at least one.")
    seen: set[tuple[str, int]] = set()
    for workload in workloads:
        if (workload.name, workload.input_size) in seen:
            raise UsageError(f"Two models are called {workload.name}. Pass a mapping of distinct names to modules.")
        seen.add((workload.name, workload.input_size))
    return tuple(workloads)


def module_workload(
    name: str, module: nn.Module, inputs: Any = None, *, seq: int | None = None, image: int | None = None
) -> Workload:
    """A live module, copied where it is not yet on the device, in eval mode and of the precision.

    Its inputs are given as `latpred.trace` takes them, or follow from the model and the tokens or pixels asked for.
    """
    from latpred.tracing.inputs import derived, from_example

    example = derived(module, seq, image) if inputs is None else from_example(inputs)

    def make(device: str, precision: str) -> tuple[nn.Module, Inputs]:
        def inputs(batch: int, where: Any) -> Any:
            made = example.make(batch)
            return made if str(where) == "meta" else _real(made, where, precision)

        return (module if device == "meta" else moved(module, device, precision)), inputs

    return Workload(name, example.kind, example.size, make)


def seeded(make: Callable[[], nn.Module], device: str, precision: str) -> nn.Module:
    """A module in eval mode on a device, its weights drawn from one seed and the caller's generator left alone."""
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(SEED)
        model = make()
        if device != "meta":
            keep_lively(model)
    return model.to(dtype_of(precision)).eval()


def keep_lively(model: nn.Module) -> None:
    """Give convolutions and batch normalisations weights that keep signals at their size from layer to layer.

    Some architectures start from weights so small that, without the statistics that training learns, the signals of a
    deep network fade into denormal numbers. Processors take several times as long for those, and no trained model makes
    them: EfficientNet-B0 took four times its time.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and not parametrize.is_parametrized(module):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        elif isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) and module.affine:
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)


def token_inputs(length: int, vocabulary: int) -> Inputs:
    """Inputs of a token model: one tensor of random ids, on the host where the model is on the meta device."""

    def inputs(batch: int, device: Any) -> tuple[torch.Tensor, ...]:
        ids = torch.randint(_ORDINARY, vocabulary, (batch, length), generator=_generator())
        return (ids if torch.device(device).type == "meta" else ids.to(device),)

    return inputs


def dense_inputs(shape: tuple[int, ...], precision: str) -> Inputs:
    """Inputs of an image or audio model: one tensor of normal noise, of `shape` per sample."""

    def inputs(batch: int, device: Any) -> tuple[torch.Tensor, ...]:
        if torch.device(device).type == "meta":
            return (torch.empty((batch, *shape), dtype=dtype_of(precision), device="meta"),)
        noise = torch.randn((batch, *shape), generator=_generator())
        return (noise.to(device=device, dtype=dtype_of(precision)),)

    return inputs


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


def _workload(model: Model, seq: int | None, image: int | None) -> Workload:
    if isinstance(model, Workload):
        return model
    if isinstance(model, str):
        return _of_name(model, seq, image)
    if isinstance(model, ModelGraph):
        return _of_graph(model)
    return module_workload(type(model).__name__, model, seq=seq, image=image)


def _of_name(name: str, seq: int | None, image: int | None) -> Workload:
    from latpred.zoo import names

    shape = names.build(name, seq=seq, image=image, device="meta")

    def make(device: str, precision: str) -> tuple[nn.Module, Inputs]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            built = names.build(name, seq=seq, image=image, device=device, precision=precision)
            if device != "meta" and not names.is_file(name):  # a user's function may have trained weights
                keep_lively(built.model)
        return built.model.eval(), built.inputs

    return Workload(name, shape.input_kind, shape.input_size, make)


def _of_graph(graph: ModelGraph) -> Workload:
    def make(device: str, precision: str) -> tuple[nn.Module, Inputs]:
        raise UsageError(f"{graph.model} is a graph, which {device} cannot run. Pass its name or module.")

    return Workload(graph.model, graph.input_kind, graph.input_size, make, graph=graph)


def moved(module: nn.Module, device: str, precision: str) -> nn.Module:
    """A module on a device, in eval mode and of a precision: itself where it is so already, else a copy."""
    weights = [*module.parameters(), *module.buffers()]
    floating = [tensor for tensor in weights if tensor.is_floating_point()]
    there = all(tensor.device == torch.device(device) for tensor in weights)
    if there and not module.training and all(tensor.dtype == dtype_of(precision) for tensor in floating):
        return module
    return copy.deepcopy(module).to(device=device, dtype=dtype_of(precision)).eval()


def _real(made: Any, device: Any, precision: str) -> Any:
    """Inputs with meta tensors filled in and everything on the device."""

    def place(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.is_meta:
            value = torch.randn(value.shape, generator=_generator())
        return value.to(device=device, dtype=dtype_of(precision) if value.is_floating_point() else value.dtype)

    return tree_map(place, made if isinstance(made, (tuple, dict)) else (made,))
