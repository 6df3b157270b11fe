"""Entry: what one call of an op amounts to, for one signature of shapes; and the cache that finds it again.

Identical layers make identical calls, within a walk and between walks, so formulas and meta kernels run once per
signature.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import torch
from torch._ops import OpOverload

from latpred.errors import UnknownOpError
from latpred.ops import Formula, Work, checked, formula_of, generation
from latpred.ops.classes import FREE, host_class, quiet_class, sync_class
from latpred.ops.pointwise import elementwise
from latpred.ops.shapes import is_tensor, stored_numel
from latpred.tracing.meta_shapes import OVERRIDES


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


LIMIT = 50_000

Spec = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


@dataclass(frozen=True, slots=True, eq=False)
class OpRecord:
    """One op call, without what sets it apart from its equals (module, Python calls, liveness).

    `counts` holds macs, weight bytes, read bytes, written bytes, bytes of new storage and then the dims, so that
    walks are compared and combined column by column. `specs` describes the result when it can be made anew without
    running the op; `shape` says whether that is one tensor, a tuple or a list.
    """

    name: str
    host_class: str
    nested_class: str
    family: str
    dtype: str
    dims: tuple[str, ...]
    counts: tuple[int, ...]
    launches: int
    syncs: int
    estimated: bool
    specs: tuple[Spec | None, ...] | None = None
    container: type | None = None
    alias: bool = False

    def with_syncs(self, syncs: int) -> OpRecord:
        """The same entry with host synchronisations."""
        return replace(self, syncs=syncs)

    def make(self) -> Any:
        """The op's result on the meta device."""
        assert self.specs is not None
        if self.container is None:
            return _made(self.specs[0])
        return self.container([_made(spec) for spec in self.specs])


class OpRecordCache:
    """What was learnt of ops and their calls; dropped when a formula is registered, or when there is too much."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, OpRecord] = {}
        self._infos: dict[Any, OpInfo] = {}
        self._generation = -1

    def tables(self) -> tuple[dict[Hashable, OpRecord], dict[Any, OpInfo]]:
        """Entries by signature, and op infos by overload, for one walk to read and extend."""
        if self._generation != generation() or len(self._entries) > LIMIT:
            self._entries, self._infos = {}, {}
            self._generation = generation()
        return self._entries, self._infos


CACHE = OpRecordCache()


def no_launch(info: OpInfo, view: bool) -> OpRecord:
    """Entry of a call that launches nothing."""
    return OpRecord(
        name=info.name,
        host_class=quiet_class(info.short, view),
        nested_class=quiet_class(info.short, view, nested=True),
        family="",
        dtype="",
        dims=(),
        counts=(0, 0, 0, 0, 0),
        launches=0,
        syncs=0,
        estimated=False,
        alias=True,
    )


def allocation(info: OpInfo, out: Any) -> OpRecord:
    """Entry of a call that makes memory without launching anything."""
    entry = no_launch(info, view=False)
    return _with_specs(entry, out, (0, 0, 0, 0, _new_bytes(out)))


def sync(info: OpInfo, tensor: torch.Tensor) -> OpRecord:
    """Entry of a call by which the host reads a value."""
    return OpRecord(
        name=info.name,
        host_class=sync_class(info.short),
        nested_class=sync_class(info.short, nested=True),
        family="",
        dtype=dtype_name(tensor.dtype),
        dims=(),
        counts=(0, 0, 0, 0, 0),
        launches=0,
        syncs=1,
        estimated=False,
        alias=True,
    )


def launching(
    info: OpInfo, args: Sequence[Any], options: dict[str, Any], out: Any, weights: Sequence[bool]
) -> OpRecord:
    """Entry of a call that launches work.

    `weights` says of each tensor among the arguments, in order, whether it is a parameter.
    """
    work, estimated = _work(info, args, options, out)
    weight_bytes, read_bytes = _reads(args, options, weights, work)
    written = leaves(out)
    write_bytes = work.writes if work.writes is not None else sum(_distinct(t) for t in written)
    new_bytes = 0 if info.kind.name == "MUTABLE" or info.short.endswith("_") else _new_bytes(out)
    computed_in = _computed_in(args, written)
    # A multiply-add of complex numbers is four of real ones.
    macs = 4 * work.macs if computed_in.is_complex else work.macs
    counts = (macs, weight_bytes, read_bytes, write_bytes, new_bytes, *work.dims.values())
    entry = OpRecord(
        name=info.name,
        host_class=host_class(info.short, work.family),
        nested_class=host_class(info.short, work.family, nested=True),
        family=work.family,
        dtype=dtype_name(computed_in),
        dims=tuple(work.dims),
        counts=counts,
        launches=work.launches,
        syncs=info.syncs,
        estimated=estimated,
    )
    return _with_specs(entry, out, counts)


def unknown(name: str, module: str) -> UnknownOpError:
    """The error of a strict walk."""
    return UnknownOpError(
        f"no cost formula knows {name}, called in {place(module)}; register one with @latpred.cost({name!r}), "
        "or trace without strict to have it estimated from its bytes"
    )


def place(module: str) -> str:
    """A module's path, as a sentence names it."""
    return f"module '{module}'" if module else "the model's own forward"


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype without its namespace.

    >>> dtype_name(torch.float32)
    'float32'
    """
    return str(dtype).rpartition(".")[2]


def _work(info: OpInfo, args: Sequence[Any], options: dict[str, Any], out: Any) -> tuple[Work, bool]:
    if info.formula is not None:
        return checked(info.formula(*args, out=out, **options), info.name), False
    size = max((t.numel() for t in leaves(out)), default=0)
    return Work("other", {"numel": size}), True


def _with_specs(entry: OpRecord, out: Any, counts: tuple[int, ...]) -> OpRecord:
    container = type(out) if isinstance(out, (tuple, list)) else None
    parts = [out] if container is None else list(out)
    if container is not None and container is not list:
        container = tuple
    simple = all(part is None or isinstance(part, torch.Tensor) for part in parts)
    specs = tuple(_spec(part) for part in parts) if simple else None
    return replace(entry, counts=counts, specs=specs, container=container)


def _made(spec: Spec | None) -> torch.Tensor | None:
    return None if spec is None else torch.empty_strided(spec[0], spec[1], dtype=spec[2], device="meta")


def _spec(tensor: torch.Tensor | None) -> Spec | None:
    return None if tensor is None else (tuple(tensor.shape), tensor.stride(), tensor.dtype)


def leaves(value: Any) -> list[torch.Tensor]:
    """The tensors in an argument or a result."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in leaves(item)]
    return []


def _reads(args: Sequence[Any], options: dict[str, Any], weights: Sequence[bool], work: Work) -> tuple[int, int]:
    """Bytes read of parameters and of activations."""
    flags = iter(weights)
    totals = [0, 0]
    for index, value in enumerate((*args, *options.values())):
        override = work.reads.get(index) if index < len(args) else None
        tensors = leaves(value)
        is_weight = [next(flags) for _ in tensors]
        if override is not None and tensors:
            totals[is_weight[0]] += override
            continue
        for leaf, weight in zip(tensors, is_weight, strict=True):
            totals[weight] += _distinct(leaf)
    return totals[1], totals[0]


def _distinct(tensor: torch.Tensor) -> int:
    """Bytes of a tensor, each stored element once: an expanded dimension is read from cache."""
    if tensor.is_contiguous():
        return tensor.numel() * tensor.dtype.itemsize
    return stored_numel(tensor.shape, tensor.stride()) * tensor.dtype.itemsize


def _new_bytes(out: Any) -> int:
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in leaves(out))


def _computed_in(args: Sequence[Any], written: list[torch.Tensor]) -> torch.dtype:
    """The floating-point or complex dtype among the arguments, else the first argument's, else the result's."""
    tensors = [value for value in args if is_tensor(value)] or written
    for tensor in tensors:
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            return tensor.dtype
    return tensors[0].dtype if tensors else torch.float32
