"""Named suites of whole models, as data (`latpred/models/suites/*.json`). No model of a suite is ever used in a fit.

"blind", "recent", "sealed", "assorted" and "varied" hold published architectures, narrowed or shortened until two slow
cores run them at batch 32, "everyday" networks in plain torch, many of them small. Random numbers chose half of "drawn"
and "redrawn" out of timm. "heldout" names full-size models for GPUs, "gate" holds what a calibration tests its own
profile by. Nothing is built here.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from importlib import import_module
from importlib.resources import files
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from latpred.accuracy.predicted import GraphKey
from latpred.errors import UsageError
from latpred.graph.graph import ModelGraph
from latpred.runtimes.lowering import fitting, of_source, target_of, traced_by
from latpred.runtimes.source import Source, code_of
from latpred.tracing import trace
from latpred.tracing.inputs import demand_one, derived, dtype_of, example_values, from_example, placed, real
from latpred.tracing.meta_module import cast_weights
from latpred.zoo import names

Inputs = Callable[[int, Any], Any]
SEED = 0
_ORDINARY = 16  # ids below may mean padding, whose mask would be other work


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """A model to measure."""

    name: str  # what tables call it
    input_kind: str  # "seq", "image", "audio" or "custom"
    input_size: int  # tokens, pixels of a side, samples; 0 of a custom one
    # (device, precision) -> (model in eval mode, inputs), where inputs maps (batch, device) to a tuple or dict
    make: Callable[[str, str], tuple[nn.Module, Inputs]]
    family: str = ""  # which architectures count as relatives; "" when nobody said
    graph: ModelGraph | None = None  # where that is known without tracing

    def key(self, precision: str, runtime: str = "eager") -> GraphKey:
        """What its graph of a runtime is found by."""
        return GraphKey(self.name, self.input_kind, self.input_size, precision, traced_by(runtime))

    def trace(self, precision: str, runtime: str = "eager", target: str = "cpu") -> ModelGraph:
        """What a runtime runs for it on a kind of device; the graph it came with, where there is one."""
        if self.graph is not None:
            if self.graph.precision != precision:
                traced = self.graph.precision
                raise UsageError(
                    f"{self.name} was traced in {traced}; ask for precision={traced!r}, or trace it in {precision}."
                )
            return fitting(self.graph, runtime, target)
        return of_source(self.source(precision, target), runtime, target)

    def source(self, precision: str, target: str = "cpu") -> Source:
        """The model as the tools of a runtime take it."""
        model, inputs = self.make("meta", precision)
        retrace = partial(trace, model, lambda batch: inputs(batch, "meta"), precision=precision)
        graph = retrace(target=target)
        graph = msgspec.structs.replace(graph, model=self.name, input_kind=self.input_kind, input_size=self.input_size)

        def real_inputs(batch: int) -> Any:
            return self.make("meta", precision)[1](batch, "cpu")

        return Source(graph, lambda: self.make("cpu", precision)[0], real_inputs, retrace, code_of(model))


Model = str | os.PathLike[str] | nn.Module | ModelGraph | Workload
Models = Model | Iterable[Model] | Mapping[str, Model]


def workloads_of(
    models: Models, *, inputs: Any = None, seq: int | None = None, image: int | None = None
) -> tuple[Workload, ...]:
    """Workloads from whatever a user calls models; a graph among them runs on the simulated device only."""
    if isinstance(models, (str, os.PathLike, nn.Module, ModelGraph, Workload)) or not isinstance(models, Iterable):
        models = [models]
    given = [*models.values()] if isinstance(models, Mapping) else [*models]
    if all(isinstance(model, nn.Module) for model in given):  # else sizes are of names beside the modules
        demand_one(inputs, seq, image)
    workloads = [_as_workload(model, inputs, seq, image) for model in given]
    if isinstance(models, Mapping):
        workloads = [replace(workload, name=name) for name, workload in zip(models, workloads, strict=True)]
    if not workloads:
        raise UsageError("There is no model to measure. Name at least one.")
    if inputs is not None and not any(isinstance(model, nn.Module) for model in given):
        raise UsageError("inputs are for modules; names, graphs and workloads have theirs. Leave inputs out.")
    seen: set[tuple[str, str, int]] = set()
    for workload in workloads:
        key = (workload.name, workload.input_kind, workload.input_size)
        if key in seen:
            raise UsageError(f"Two models are called {workload.name}. Pass a mapping of distinct names to modules.")
        seen.add(key)
    return tuple(workloads)


def module_workload(
    name: str, module: nn.Module, inputs: Any = None, *, seq: int | None = None, image: int | None = None
) -> Workload:
    """A live module, copied where it is not yet on the device, in eval mode and of the precision.

    Its inputs are given as `latpred.trace` takes them, or follow from the model and the tokens or pixels asked for.
    """
    example = derived(module, seq, image) if inputs is None else from_example(inputs)

    def make(device: str, precision: str) -> tuple[nn.Module, Inputs]:
        def inputs(batch: int, where: Any) -> Any:
            made = example.make(batch)
            return made if str(where) == "meta" else placed(real(made, dtype_of(precision)), str(where))

        return (module if device == "meta" else moved(module, device, precision)), inputs

    return Workload(name, example.kind, example.size, make)


@contextmanager
def of_one_seed(device: str) -> Iterator[None]:
    """Within it, the CPU and a device draw from one seed; all generators are the caller's again afterwards."""
    gpus = [torch.device(device)] if device.startswith("cuda") else []
    with torch.random.fork_rng(devices=gpus):
        torch.default_generator.manual_seed(SEED)  # torch.manual_seed would seed every GPU of the process
        for gpu in gpus:
            with torch.cuda.device(gpu):
                torch.cuda.manual_seed(SEED)
        yield


def seeded(make: Callable[[], nn.Module], device: str, precision: str) -> nn.Module:
    """A module in eval mode on a device, its weights drawn from one seed and the caller's generators left alone."""
    with of_one_seed(device), torch.device(device):
        model = make()
        if device != "meta":
            keep_lively(model)
    return model.to(dtype_of(precision)).eval()


def keep_lively(model: nn.Module) -> None:
    """Give convolutions and batch normalisations weights that keep signals at their size from layer to layer.

    Else the signals of some untrained networks fade into denormal numbers, which no trained model makes.
    EfficientNet-B0 took four times its time.
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
        ids = torch.randint(_ORDINARY, vocabulary, (batch, length), generator=torch.Generator().manual_seed(SEED))
        return (ids if torch.device(device).type == "meta" else ids.to(device),)

    return inputs


def dense_inputs(shape: tuple[int, ...], precision: str) -> Inputs:
    """Inputs of an image or audio model: one tensor of normal noise, of `shape` per sample."""
    return lambda batch, device: (example_values((batch, *shape), str(device), dtype_of(precision)),)


def _as_workload(model: Model, inputs: Any, seq: int | None, image: int | None) -> Workload:
    if isinstance(model, (str, os.PathLike)):
        return _of_name(os.fspath(model), seq, image)
    if not isinstance(model, nn.Module | ModelGraph | Workload):
        raise UsageError(f"{model!r} is no model to measure. Give a name, a module, a graph, or several of them.")
    if isinstance(model, ModelGraph | Workload):
        workload = model if isinstance(model, Workload) else _of_graph(model)
        if (seq, image) != (None, None):
            raise UsageError(f"{workload.name} has its inputs already; leave out seq and image.")
        return workload
    return module_workload(type(model).__name__, model, inputs, seq=seq, image=image)


def _of_name(name: str, seq: int | None, image: int | None) -> Workload:
    shape = names.build(name, seq=seq, image=image, device="meta")

    def make(device: str, precision: str) -> tuple[nn.Module, Inputs]:
        with of_one_seed(device):
            built = names.build(name, seq=seq, image=image, device=device, precision=precision)
            if device != "meta" and not names.is_file(name):  # a user's function may have trained weights
                keep_lively(built.model)
        return built.model, built.inputs

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
    copied = names.evaluated(copy.deepcopy(module).to(device))
    cast_weights(copied, dtype_of(precision))
    return copied


NAMES = ("blind", "everyday", "recent", "sealed", "assorted", "varied", "drawn", "redrawn", "heldout")
GATE = "gate"
_PLAIN = ("everyday_models", "gate_models")  # files beside this one


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model of a suite's file: its inputs, each of a shape without the batch, and where it comes from."""

    name: str
    takes: str
    shape: tuple[int, ...]
    model: str  # "FILE:FUNCTION" of a file beside this one, "transformers:CLASS", or a name for `predict`
    family: str = ""
    ids: int = 0  # tokens of a second input
    config: dict[str, Any] = {}  # arguments of the function, or of the configuration of the transformers class
    form: Literal["", "encoder", "translator"] = ""  # what is run of a transformers model, where that is not all of it
    about: str = ""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    purpose: str
    batches: tuple[int, ...]
    models: tuple[_Row | str, ...]
    vocabulary: int = 0


@dataclass(frozen=True, slots=True)
class Suite:
    """Models to validate on, at these batch sizes; `names` are built by name, `ready` from recipes of its own."""

    name: str
    batches: tuple[int, ...]
    ready: tuple[Workload, ...] = ()
    names: tuple[str, ...] = ()

    def workloads(self) -> tuple[Workload, ...]:
        """Recipes of all models; a name may need a package that is not installed (`UnknownModelError`)."""
        return (*self.ready, *(workloads_of(self.names) if self.names else ()))


@cache
def get(name: str) -> Suite:
    """A suite by name."""
    if name not in (*NAMES, GATE):
        raise UsageError(f"There is no suite {name!r}. Use one of {', '.join(NAMES)}.")
    file = msgspec.json.decode((files("latpred.models") / "suites" / f"{name}.json").read_bytes(), type=_File)
    ready = tuple(_workload(row, file.vocabulary) for row in file.models if isinstance(row, _Row))
    return Suite(name, file.batches, ready, tuple(row for row in file.models if isinstance(row, str)))


def gate_model(name: str) -> Workload:
    """A model that the gate times."""
    return {workload.name: workload for workload in get(GATE).ready}[name]


@lru_cache(maxsize=64)
def gate_graph(name: str, precision: str, runtime: str, kind: str) -> ModelGraph:
    """What a runtime runs for a model of the gate on a kind of device."""
    return gate_model(name).trace(precision, runtime, target_of(kind))


def published(name: str, config: dict[str, Any], form: str = "") -> Callable[[], nn.Module]:
    """What builds a transformers model of a class's configuration, or the part of it that is run."""
    model_class = names.transformers_class(name)

    def make() -> nn.Module:
        model: nn.Module = model_class(model_class.config_class(**config))
        if form == "encoder":
            return model.get_submodule("encoder")
        return _Translator(model) if form == "translator" else model

    return make


def _workload(row: _Row, vocabulary: int) -> Workload:
    source, _, what = row.model.partition(":")
    tokens = row.takes == "seq"

    def build(device: str, precision: str) -> tuple[nn.Module, Inputs]:
        if source == "transformers":
            make = published(what, {**({"vocab_size": vocabulary} if tokens else {}), **row.config}, row.form)
        elif source in _PLAIN:
            make = partial(getattr(import_module(f"{__package__}.{source}"), what), **row.config)
        else:
            return workloads_of(row.model, image=row.shape[-1])[0].make(device, precision)
        first = token_inputs(row.shape[0], vocabulary) if tokens else dense_inputs(row.shape, precision)
        second = token_inputs(row.ids, vocabulary)

        def inputs(batch: int, where: Any) -> Any:
            return (*first(batch, where), *(second(batch, where) if row.ids else ()))

        return seeded(make, device, precision), inputs

    return Workload(row.name, row.takes, 0 if row.takes == "custom" else row.shape[-1], build, row.family)


class _Translator(nn.Module):
    """Reads a sentence with the encoder and the same tokens, as a translation so far, with the decoder."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        mask = torch.ones_like(tokens)  # as a tokenizer gives it
        out: Tensor = self.model(
            input_ids=tokens, attention_mask=mask, decoder_input_ids=tokens, decoder_attention_mask=mask
        ).last_hidden_state
        return out
