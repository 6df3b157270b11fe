"""Named suites of whole models, which are data: `models/suites/*.json`. No model of a suite is ever used in a fit.

"cpu" holds published architectures, narrowed or shortened until two slow cores run them at batch 32; "unseen", "fresh",
"blind", "ordinary" and then "sealed" hold others that came later, for a verdict on models that nothing was chosen by:
nobody holds a prediction against a measurement of one before the validation that ends a release. "heldout" names
full-size models for GPUs, "gate" holds what a calibration tests its own profile by. Nothing is built here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.resources import files
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn

from latpred.calibration.workloads.base import Inputs, Workload, dense_inputs, seeded, token_inputs, workloads_of
from latpred.errors import UsageError
from latpred.zoo.names import settle_transformers

NAMES = ("cpu", "unseen", "fresh", "blind", "ordinary", "sealed", "heldout")
GATE = "gate"
_PLAIN = ("image_models", "sequence_models")  # beside this module; their functions build models in plain torch


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model of a suite's file: its inputs, each of a shape without the batch, and where it comes from."""

    name: str
    takes: str
    shape: tuple[int, ...]
    model: str  # "image_models:FUNCTION", "sequence_models:FUNCTION", "transformers:CLASS", or a name for `predict`
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
    purpose: str
    batches: tuple[int, ...]
    ready: tuple[Workload, ...] = ()
    names: tuple[str, ...] = ()

    def workloads(self) -> tuple[Workload, ...]:
        """Recipes of all models; a name may need a package that is not installed (`UnknownModelError`)."""
        return (*self.ready, *(workloads_of(self.names) if self.names else ()))


@cache
def get(name: str) -> Suite:
    """A suite by name.

    >>> len(get("cpu").ready)
    22
    """
    if name not in (*NAMES, GATE):
        raise UsageError(f"There is no suite {name!r}. Use one of {', '.join(NAMES)}.")
    file = msgspec.json.decode((files("latpred.models") / "suites" / f"{name}.json").read_bytes(), type=_File)
    ready = tuple(_workload(row, file.vocabulary) for row in file.models if isinstance(row, _Row))
    return Suite(name, file.purpose, file.batches, ready, tuple(row for row in file.models if isinstance(row, str)))


def published(name: str, config: dict[str, Any], form: str = "") -> Callable[[], nn.Module]:
    """What builds a transformers model of a class's configuration, or the part of it that is run."""
    model_class = getattr(_transformers(), name)

    def make() -> nn.Module:
        model: nn.Module = model_class(model_class.config_class(**config))
        if form == "encoder":
            return model.get_submodule("encoder")
        return _Translator(model) if form == "translator" else model

    return make


@cache
def _transformers() -> Any:
    settle_transformers()
    return import_module("transformers")


def _workload(row: _Row, vocabulary: int) -> Workload:
    source, _, what = row.model.partition(":")
    tokens = row.takes == "seq"

    def maker() -> Callable[[], nn.Module]:
        if source == "transformers":
            return published(what, {**({"vocab_size": vocabulary} if tokens else {}), **row.config}, row.form)
        return partial(getattr(import_module(f"{__package__}.{source}"), what), **row.config)

    def build(device: str, precision: str) -> tuple[nn.Module, Inputs]:
        if source not in (*_PLAIN, "transformers"):
            return workloads_of(row.model, image=row.shape[-1])[0].make(device, precision)
        first = token_inputs(row.shape[0], vocabulary) if tokens else dense_inputs(row.shape, precision)
        second = token_inputs(row.ids, vocabulary)

        def inputs(batch: int, where: Any) -> Any:
            return (*first(batch, where), *(second(batch, where) if row.ids else ()))

        return seeded(maker(), device, precision), inputs

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
