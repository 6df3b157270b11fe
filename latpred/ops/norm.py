"""Formulas of normalisations and softmax."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from latpred.ops.registry import Work, cost
from latpred.ops.shapes import Tensor, numel, rows_of


def _norm(kind: str, tensor: Tensor, cols: int) -> Work:
    return Work(f"norm.{kind}", {"rows": numel(tensor) // cols if cols else 0, "cols": cols})


@cost("aten::layer_norm", "aten::native_layer_norm")
def layer_norm(input: Tensor, normalized_shape: Sequence[int], *_: Any, out: Any) -> Work:
    """Statistics over the trailing dimensions."""
    return _norm("layer_norm", input, prod(normalized_shape))


@cost("aten::rms_norm", "aten::_fused_rms_norm")
def rms_norm(input: Tensor, normalized_shape: Sequence[int], *_: Any, out: Any) -> Work:
    """Root mean square over the trailing dimensions."""
    return _norm("rms_norm", input, prod(normalized_shape))


@cost("aten::group_norm")
def group_norm(input: Tensor, num_groups: int, *_: Any, out: Any) -> Work:
    """Statistics over each group of channels."""
    return _norm("group_norm", input, numel(input) // (input.shape[0] * num_groups))


@cost("aten::instance_norm")
def instance_norm(input: Tensor, *_: Any, out: Any) -> Work:
    """Statistics over each channel of each sample."""
    return _norm("instance_norm", input, prod(input.shape[2:]))


@cost(
    "aten::batch_norm",
    "aten::native_batch_norm",
    "aten::_native_batch_norm_legit_no_training",
    "aten::cudnn_batch_norm",
    "aten::_batch_norm_impl_index",
)
def batch_norm(input: Tensor, *_: Any, out: Any) -> Work:
    """Scale and shift by running statistics."""
    dims = {"batch": input.shape[0], "channels": input.shape[1], "spatial": prod(input.shape[2:])}
    return Work("batch_norm", dims)


def _softmax(kind: str) -> Any:
    def formula(self: Tensor, dim: int, *_: Any, out: Any, **__: Any) -> Work:
        rows, cols = rows_of(self, dim)
        return Work(f"softmax.{kind}", {"rows": rows, "cols": cols})

    return formula


cost("aten::softmax", "aten::_softmax", "aten::_safe_softmax")(_softmax("softmax"))
cost("aten::log_softmax", "aten::_log_softmax")(_softmax("log_softmax"))


@cost("aten::_masked_softmax")
def masked_softmax(self: Tensor, mask: Tensor, dim: int | None = None, *_: Any, out: Any) -> Work:
    """Softmax with the mask applied on the way."""
    rows, cols = rows_of(self, -1 if dim is None else dim)
    return Work("softmax.masked", {"rows": rows, "cols": cols})


@cost("aten::_weight_norm", "aten::_weight_norm_interface")
def weight_norm(v: Tensor, g: Tensor, dim: int = 0, *, out: Any) -> Work:
    """A weight rescaled to a learned length, recomputed in each forward."""
    rows = numel(g)
    return Work("norm.weight_norm", {"rows": rows, "cols": numel(v) // rows})
