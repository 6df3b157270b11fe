"""PyTorch models as ONNX: torch.export's exporter, a dynamic batch, every other size fixed, and no chatter.

The exporter of torch.jit was tried on 32 small architectures too. It is several times faster, but refuses GPT-2, Llama,
FNet and torch's own encoder layer and exports Longformer wrongly; this one refuses only what torch.export cannot
follow, and everything it exported agreed with PyTorch to 1e-5.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from latpred.errors import RuntimeRefusalError, chain_of, one_line
from latpred.runtimes.base import out_of_memory
from latpred.runtimes.source import FlatModel, device_of, flattened, tensors_of
from latpred.sandbox.own_thread import replaced, silenced
from latpred.tracing.inputs import from_example, placed, real

LARGEST_IN_MEMORY = 1_900_000_000  # bytes; a serialised model must stay below 2 GB
_MOST_TEXT = 240


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Exported:
    """An exported model: serialised, or where it is too large for that, a path, where it lies as long as this lives."""

    model: bytes | str


def export(model: torch.nn.Module, inputs: Any) -> Exported:
    """Export a model whose inputs have the batch, of 2 or more, as the first dimension.

    A size of 1 would be taken for a constant. A model that torch cannot export is refused, with what stands in the way.
    """
    from torch.export import _trace

    flat = FlatModel(model, inputs)
    tensors = tensors_of(inputs)
    batch = next((tensor.shape[0] for tensor in tensors if tensor.dim()), 0)
    varying = tuple(
        {0: torch.export.Dim.DYNAMIC} if tensor.dim() and tensor.shape[0] == batch else None for tensor in tensors
    )
    try:
        # A graph that torch.export gives up on goes to stderr, hundreds of lines of it.
        with silenced(), replaced(_trace, "print", lambda *_, **__: None), torch.no_grad():
            program = torch.onnx.export(
                flat.eval(),
                tuple(tensors),
                dynamo=True,
                verbose=False,
                dynamic_shapes={"tensors": varying},
            )
    except Exception as error:  # whatever a model, torch.export or a converter raises
        if out_of_memory(error):
            raise MemoryError(_cause(error)) from error
        raise RuntimeRefusalError(_cause(error)) from error
    assert program is not None
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    with silenced():
        if held < LARGEST_IN_MEMORY:
            return Exported(program.model_proto.SerializeToString())
        folder = tempfile.mkdtemp(prefix="latpred-")
        path = str(Path(folder) / "model.onnx")
        exported = Exported(path)
        weakref.finalize(exported, shutil.rmtree, folder, ignore_errors=True)
        program.save(path, external_data=True)
        return exported


def _cause(error: BaseException) -> str:
    """The innermost reason, in a sentence: which op has no ONNX form, or what torch.export stumbled over."""
    chain = [*chain_of(error, contexts=False)]
    if isinstance(chain[-1], RuntimeRefusalError):
        return str(chain[-1])
    if str(getattr(chain[-1], "name", "")).startswith("onnxscript."):  # a module of it that is not there
        return f"the installed onnxscript does not fit this torch ({chain[-1]}); run: pip install -U onnxscript"
    for one in chain:
        lacking = re.search(
            r"No (?:decompositions registered|ONNX function found) for.*?<?OpOverload\(?op='([\w.:]+)", str(one)
        )
        if lacking:
            return f"{lacking[1].replace('.', '::', 1)} has no ONNX form"
    first = re.split(r"(?<=[.!?])\s", one_line(chain[-1]), maxsplit=1)[0]
    return f"torch cannot export the model to ONNX: {type(chain[-1]).__name__}: {first[:_MOST_TEXT]}"


def export_at_two(model: torch.nn.Module, inputs: Any) -> Exported:
    """An export at batch 2, whatever the batch of the inputs is: one at batch 1 would hold for no other."""
    kept = frozenset(tensor.dtype for tensor in tensors_of(inputs))
    made = real(from_example(inputs).make(2), torch.float32, kept=kept)
    return export(model, placed(made, str(device_of(model, inputs))))


def form_of(inputs: Any) -> str:
    """What a model's export is found by: names, dtypes and sizes of its inputs but the batch, and other values."""
    leaves, form = flattened(inputs)
    told = [(tensor.dtype, tuple(tensor.shape[1:])) for tensor in tensors_of(inputs)]
    return f"{form} {told} {[leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]}"
