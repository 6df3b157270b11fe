"""What the walk must know of each op overload before it sees a call: how it is handled and what it is called.

Composite ops that one kernel serves (linear, layer_norm, attention …) are kept whole, others fall apart into the ops
they are made of. Nothing here looks at a tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch._ops import OpOverload

from latpred.ops import Formula, formula_of
from latpred.ops.classes import FREE
from latpred.ops.elementwise import elementwise
from latpred.tracing.shaping import OVERRIDES


class Kind(IntEnum):
    """How the walk treats a call."""

    VIEW = 0  # every result shares storage with an argument
    FRESH = 1  # every result is new: its shape depends on the arguments' shapes only
    MAYBE = 2  # a view or a copy, depending on strides
    MUTABLE = 3  # writes into an argument
    FREE = 4  # launches nothing, is no view
    DECOMPOSE = 5  # falls apart into other ops
    ITEM = 6  # the host reads a value
    MOVE = 7  # .to(): a cast, a copy or nothing
    DROPOUT = 8  # nothing in evaluation mode
    MATMUL = 9  # one product, or copies and a product
    PICK = 10  # the result's shape depends on values
    ANSWER = 11  # all() and any(): a check whose answer is assumed
    BOUNDARY = 12  # runs a replacement that issues the kernels torch would
    SCALAR = 13  # a value in a tensor of no dimensions: a launch, unless it is assigned to a part of another
    LOOKUP = 14  # rows of a table, by numbers that must lie within it


_FRESH_WHOLE = frozenset(
    {
        *("linear", "layer_norm", "rms_norm", "group_norm", "instance_norm", "batch_norm", "bilinear", "_weight_norm"),
        *("scaled_dot_product_attention", "conv1d", "conv2d", "conv3d"),
        *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        *("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
        *("softmax", "log_softmax", "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d"),
        *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d"),
        *("where", "prelu", "log_sigmoid", "std", "var", "square", "pad", "cosine_similarity", "diff"),
        *("one_hot", "take_along_dim"),
    }
)
_VIEW_WHOLE = frozenset(
    {
        *(
            "chunk",
            "narrow",
            "movedim",
            "moveaxis",
            "swapaxes",
            "swapdims",
            "expand_as",
            "view_as",
            "numpy_T",
            "mT",
            "mH",
        ),
        *("matrix_H", "adjoint", "tensor_split", "hsplit", "vsplit", "dsplit", "unflatten", "broadcast_to", "positive"),
        *("unsafe_chunk", "atleast_1d", "atleast_2d", "atleast_3d", "_unsafe_view"),
    }
)
_MAYBE_WHOLE = frozenset(
    {
        *("reshape", "flatten", "contiguous", "ravel", "reshape_as", "real", "imag", "resolve_conj", "resolve_neg"),
        *("view_as_real_copy", "unsafe_split"),
    }
)
_SPECIAL = {
    "_local_scalar_dense": Kind.ITEM,
    "to": Kind.MOVE,
    "_to_copy": Kind.MOVE,
    "type_as": Kind.MOVE,
    "dropout": Kind.DROPOUT,
    "feature_dropout": Kind.DROPOUT,
    "alpha_dropout": Kind.DROPOUT,
    "feature_alpha_dropout": Kind.DROPOUT,
    "matmul": Kind.MATMUL,
    "index": Kind.PICK,
    "_unsafe_index": Kind.PICK,
    "index_put": Kind.PICK,
    "index_put_": Kind.PICK,
    "_index_put_impl_": Kind.PICK,
    "nonzero": Kind.PICK,
    "masked_select": Kind.PICK,
    "repeat_interleave": Kind.PICK,
    "unique": Kind.PICK,
    "_unique2": Kind.PICK,
    "unique_dim": Kind.PICK,
    "unique_consecutive": Kind.PICK,
    "bincount": Kind.PICK,
    "equal": Kind.ITEM,
    "scalar_tensor": Kind.SCALAR,
    "embedding": Kind.LOOKUP,
    "all": Kind.ANSWER,
    "any": Kind.ANSWER,
    "_transformer_encoder_layer_fwd": Kind.BOUNDARY,
    "_native_multi_head_attention": Kind.BOUNDARY,
}
_RESAMPLING = re.compile(r"_?upsample_\w+[^_]$")
# Make the host wait on an asynchronous device: it must learn how large the result is.
_SYNCING = frozenset(
    {"nonzero", "masked_select", "_unique2", "unique", "unique_dim", "unique_consecutive", "bincount", "equal"}
)


@dataclass(frozen=True, slots=True, eq=False)
class OpInfo:
    """One op overload, as the walk sees it.

    Attributes
    ----------
    name, short : str
        "aten::linear" and "linear".
    kind : Kind
        How it is handled.
    formula : Formula or None
        What it costs; None when nobody knows.
    override : callable or None
        Makes its result without the meta kernel.
    arguments : tuple of str
        Names of the schema's arguments, in order.
    syncs : int
        Host synchronisations of each call.
    random : bool
        Whether it draws random numbers.
    """

    name: str
    short: str
    kind: Kind
    formula: Formula | None
    override: Callable[..., Any] | None
    arguments: tuple[str, ...]
    syncs: int
    random: bool


def describe(func: OpOverload[..., Any]) -> OpInfo:
    """Everything above, worked out once for an overload."""
    schema = func._schema
    name = schema.name
    namespace, _, short = name.partition("::")
    aten = namespace == "aten"
    kind = _kind(func, short, aten)
    formula = formula_of(name)
    if formula is None and _pointwise(func):
        formula = elementwise(short.rstrip("_"))
    return OpInfo(
        name=name,
        short=short,
        kind=kind,
        formula=formula,
        override=OVERRIDES.get(short) if aten else None,
        arguments=tuple(argument.name for argument in schema.arguments),
        syncs=int(aten and short in _SYNCING),
        random=torch.Tag.nondeterministic_seeded in func.tags,
    )


def _pointwise(func: OpOverload[..., Any]) -> bool:
    """Whether torch calls the op elementwise; of some ops it tags one overload only."""
    if torch.Tag.pointwise in func.tags:
        return True
    packet = func.overloadpacket
    return any(torch.Tag.pointwise in getattr(packet, name).tags for name in packet.overloads())


def _kind(func: OpOverload[..., Any], short: str, aten: bool) -> Kind:
    if aten and short in _SPECIAL:
        return _SPECIAL[short]
    if aten and short in _VIEW_WHOLE:
        return Kind.VIEW
    if aten and _RESAMPLING.match(short):
        return Kind.FRESH  # torch has decompositions of these, for compilers: every device has a kernel
    composite = func._can_decompose()
    if short == "where" and len(func._schema.arguments) == 1:
        return Kind.DECOMPOSE  # the one-argument form is nonzero()
    if composite and aten and short in _MAYBE_WHOLE:
        return Kind.MAYBE
    if composite and not (aten and short in _FRESH_WHOLE):
        # A formula given to a composite op says that one kernel serves it.
        if aten or formula_of(func._schema.name) is None:
            return Kind.DECOMPOSE
        return Kind.FRESH
    if aten and short in FREE:
        return Kind.FREE
    if func._schema.is_mutable:
        return Kind.MUTABLE
    if any(result.alias_info is not None for result in func._schema.returns):
        return Kind.VIEW
    return Kind.FRESH
