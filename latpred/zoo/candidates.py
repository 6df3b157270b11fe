"""Candidates of a search: whatever a searcher holds of an architecture becomes a module that can be traced.

A function that builds a model is called on the meta device with initialisation off, so that neither memory nor random
numbers are spent on weights that nobody looks at.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch

from latpred.errors import UsageError
from latpred.graph.graph import ModelGraph
from latpred.zoo import names
from latpred.zoo.user_files import errors_of


def title(candidate: Any) -> str:
    """What a table calls a candidate: a name, the class of a module, a config's model type, a function's name.

    >>> title("bert-base-uncased"), title(torch.nn.ReLU())
    ('bert-base-uncased', 'ReLU')
    """
    if isinstance(candidate, (str, os.PathLike)):
        return os.fspath(candidate)
    if isinstance(candidate, ModelGraph):
        return candidate.model
    if isinstance(candidate, torch.nn.Module):
        return type(candidate).__name__
    if names.is_config(candidate):
        return str(candidate.model_type)
    if isinstance(candidate, partial):
        return title(candidate.func)
    return str(getattr(candidate, "__name__", type(candidate).__name__))


def traceable(candidate: Any) -> torch.nn.Module | str | ModelGraph:
    """A module, a name or a graph from any candidate.

    >>> traceable(lambda: torch.nn.Linear(4, 4)).weight.device.type
    'meta'
    """
    if isinstance(candidate, os.PathLike):
        return str(os.fspath(candidate))
    if isinstance(candidate, (torch.nn.Module, str, ModelGraph)):
        return candidate
    config = names.is_config(candidate)
    if not config and (not callable(candidate) or isinstance(candidate, type)):
        what, kind = ("the class", candidate) if isinstance(candidate, type) else ("a value of type", type(candidate))
        raise UsageError(
            f"{what} {kind.__name__} is no candidate; give an nn.Module, a function that builds one, "
            "a transformers config or a model's name"
        )
    with errors_of("building the model", "the config" if config else "the function"):
        built = names.build_config(candidate) if config else names.unweighted(candidate)
    if not isinstance(built, (torch.nn.Module, ModelGraph)):
        raise UsageError(f"the function returned a {type(built).__name__}; it must return an nn.Module or a ModelGraph")
    return built
