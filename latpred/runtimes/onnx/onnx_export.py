"""PyTorch models as ONNX: torch.export's exporter, a dynamic batch, every other size fixed, and no chatter.

The exporter of torch.jit was tried on 32 small architectures too. It is several times faster, but refuses GPT-2, Llama,
FNet and torch's own encoder layer and exports Longformer wrongly; this one refuses only what torch.export cannot
follow, and everything it exported agreed with PyTorch to 1e-5.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from latpred.errors import RuntimeRefusalError
from latpred.sandbox.own_thread import silenced

LARGEST_IN_MEMORY = 1_900_000_000  # bytes; a serialised model must stay below 2 GB
_MOST_TEXT = 240


@dataclass(frozen=True, slots=True, eq=False)
class Exported:
    """An exported model.

    Attributes
    ----------
    model : bytes or str
        Serialised, or a path where it is too large for that.
    folder : TemporaryDirectory, optional
        Holds that path for as long as this object lives.
    """

    model: bytes | str
    folder: tempfile.TemporaryDirectory[str] | None = None


def export(model: torch.nn.Module, inputs: Any) -> Exported:
    """Export a model whose inputs have the batch as the first dimension.

    Parameters
    ----------
    model : nn.Module
        In evaluation mode.
    inputs : tuple or dict
        Arguments of its forward, at a batch of 2 or more: a size of 1 would be taken for a constant.

    Raises
    ------
    RuntimeRefusalError
        When torch cannot export the model; names what stands in the way.
    """
    flat = _Flat(model, inputs)
    tensors = tensors_of(inputs)
    batch = tensors[0].shape[0] if tensors and tensors[0].dim() else 0
    varying = tuple(
        {0: torch.export.Dim.DYNAMIC} if tensor.dim() and tensor.shape[0] == batch else None for tensor in tensors
    )
    try:
        with silenced(), torch.no_grad():
            program = torch.onnx.export(
                flat.eval(),
                tuple(tensors),
                dynamo=True,
                verbose=False,
                dynamic_shapes={"tensors": varying},
                input_names=_names(inputs, len(tensors)),
            )
    except Exception as error:  # whatever a model, torch.export or a converter raises
        raise RuntimeRefusalError(_cause(error)) from error
    assert program is not None
    return _kept(program, model)


def tensors_of(inputs: Any) -> list[torch.Tensor]:
    """The tensors among the arguments of a forward, in order.

    >>> [tensor.shape[0] for tensor in tensors_of({"x": torch.zeros(3), "flag": True, "y": torch.zeros(2)})]
    [3, 2]
    """
    return [leaf for leaf in tree_flatten(_plain(inputs))[0] if isinstance(leaf, torch.Tensor)]


class _Flat(torch.nn.Module):
    """A model that takes the tensors among its arguments, and returns the tensors in its result.

    What is no tensor in the result, such as the cache of a decoder, ONNX cannot give back.
    """

    def __init__(self, model: torch.nn.Module, inputs: Any) -> None:
        super().__init__()
        self.model = model
        leaves, self._form = tree_flatten(_plain(inputs))
        self._named = isinstance(inputs, Mapping)
        self._leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors that the model's forward gives."""
        leaves: list[Any] = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        given = tree_unflatten(leaves, self._form)
        result = self.model(**given) if self._named else self.model(*given)
        return tuple(_tensors_in(result))


def _tensors_in(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, Mapping):
        for value in result.values():
            yield from _tensors_in(value)
    elif isinstance(result, (list, tuple)):
        for value in result:
            yield from _tensors_in(value)


def _plain(inputs: Any) -> Any:
    return dict(inputs) if isinstance(inputs, Mapping) else tuple(inputs)


def _names(inputs: Any, count: int) -> list[str]:
    """Names of the inputs: those of the keyword arguments where each is one tensor."""
    if isinstance(inputs, Mapping):
        names = [name for name, value in inputs.items() if isinstance(value, torch.Tensor)]
        if len(names) == count:
            return names
    return [f"input_{index}" for index in range(count)]


def _kept(program: Any, model: torch.nn.Module) -> Exported:
    held = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    with silenced():
        if held < LARGEST_IN_MEMORY:
            return Exported(program.model_proto.SerializeToString())
        folder = tempfile.TemporaryDirectory(prefix="latpred-", ignore_cleanup_errors=True)
        path = Path(folder.name) / "model.onnx"
        program.save(str(path), external_data=True)
        return Exported(str(path), folder)


def _cause(error: BaseException) -> str:
    """The innermost reason, in a sentence: which op has no ONNX form, or what torch.export stumbled over."""
    chain: list[BaseException] = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    text = " ".join(str(chain[-1]).split())
    for one in chain:
        lacking = re.search(
            r"No (?:decompositions registered|ONNX function found) for.*?<?OpOverload\(?op='([\w.:]+)", str(one)
        )
        if lacking:
            return f"{lacking[1].replace('.', '::', 1)} has no ONNX form"
    first = re.split(r"(?<=[.!?])\s", text, maxsplit=1)[0]
    return f"torch cannot export the model to ONNX: {type(chain[-1]).__name__}: {first[:_MOST_TEXT]}"
