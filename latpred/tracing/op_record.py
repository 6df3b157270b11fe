"""Call: one call of an op. OpRecord: what it amounts to, for its signature of shapes, by which a cache finds it again.

Identical layers make identical calls, so formulas and meta kernels run once per signature. Results of hot ops on the
meta device are made from a formula in microseconds: torch's own meta kernels are written in Python and take 0.2 to 0.7
ms each. Such a function returns NotImplemented wherever it is not sure, wrong shapes included, so that torch's kernel
decides and words the error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_map_only

from latpred.errors import UnknownOpError
from latpred.graph.graph import ModelGraph, all_ops
from latpred.ops import Formula, Work, formula_of, generation, work_of
from latpred.ops.families import FREE, host_class, is_tensor, no_launch_class, stored_numel
from latpred.ops.pointwise import elementwise

# Composite ops that are recorded whole, and give new results.
_FRESH_WHOLE = frozenset(
    {
        *("batch_norm", "_weight_norm"),
        *("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
        *("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d"),
        *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d"),
        *("prelu", "log_sigmoid", "std", "var", "square", "diff", "take_along_dim"),
        *("silu_backward", "mish_backward"),  # of which CPUs and CUDA have kernels
    }
)
_PICKING = ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount")
_DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
_CONVOLUTIONS = ("convolution", "_convolution", *(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)))
_WINDOWS = tuple(f"{kind}_window" for kind in ("hann", "hamming", "blackman", "bartlett", "kaiser"))
_VIEWS = (
    *("chunk", "narrow", "movedim", "moveaxis", "swapaxes", "swapdims", "expand_as", "view_as", "numpy_T", "mT"),
    *("mH", "matrix_H", "adjoint", "tensor_split", "hsplit", "vsplit", "dsplit", "unflatten", "broadcast_to"),
    *("positive", "unsafe_chunk", "atleast_1d", "atleast_2d", "atleast_3d", "_unsafe_view"),
)
_MAYBE_VIEWS = (  # where the strides allow it, else copies
    *("reshape", "flatten", "contiguous", "ravel", "reshape_as"),
    *("real", "imag", "resolve_conj", "resolve_neg"),
)
_SPECIAL = {
    **dict.fromkeys(_VIEWS, "view"),
    **dict.fromkeys(_MAYBE_VIEWS, "maybe"),
    **dict.fromkeys(("_local_scalar_dense", "equal", "allclose"), "item"),
    **dict.fromkeys(("to", "_to_copy", "type_as"), "move"),
    **dict.fromkeys((*_DROPOUTS, *(f"{name}_" for name in _DROPOUTS)), "dropout"),
    **dict.fromkeys(("index", "_unsafe_index"), "index"),
    **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_"), "index_put"),
    **dict.fromkeys(("repeat_interleave", *_PICKING), "pick"),
    **dict.fromkeys(("all", "_is_all_true", "any", "_is_any_true", "eq"), "answer"),
    **dict.fromkeys(("_transformer_encoder_layer_fwd", "_native_multi_head_attention"), "boundary"),
    **dict.fromkeys(("layer_norm", "group_norm", *_CONVOLUTIONS), "laid_out"),
    **dict.fromkeys(("softmax", "log_softmax"), "softmax"),
    "rms_norm": "rms_norm",
    "linear": "linear",
    "matmul": "matmul",
    "scalar_tensor": "scalar",
    "scaled_dot_product_attention": "attention",
    **dict.fromkeys(("_pack_padded_sequence", "_pad_packed_sequence"), "packed"),
    "embedding": "lookup",
    **dict.fromkeys(("logsumexp", "_trilinear", "_safe_softmax", "_euclidean_dist", *_WINDOWS), "decompose"),
    **{name: name for name in ("roll", "pad", "one_hot")},
    "_grouped_mm": "grouped_mm",
    "_linalg_check_errors": "fresh",
}
_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
_RESAMPLING = re.compile(r"_?upsample_\w+[^_]$")


@dataclass(frozen=True, slots=True, eq=False)
class OpInfo:
    """One op overload: its name ("aten::linear") and short name ("linear"), how it is handled and what it costs."""

    name: str
    short: str
    kind: str  # the name of the function in `handlers` that handles a call
    formula: Formula | None  # None when nobody knows
    override: Callable[..., Any] | None  # makes its result without the meta kernel
    arguments: tuple[str, ...]  # names of the schema's, in order
    syncs: int  # 1 where the host must learn how large each result is, or whether it failed, for which it has to wait
    random: bool  # whether it draws random numbers


def describe(func: OpOverload[..., Any]) -> OpInfo:
    """What there is to know of an overload, worked out once."""
    schema = func._schema
    name = schema.name
    namespace, _, short = name.partition("::")
    aten = namespace == "aten"
    formula = formula_of(name)
    if formula is None and _pointwise(func):
        formula = elementwise(short.rstrip("_"))
    kind = "free" if namespace == "profiler" else _kind(func, short, aten, formula)  # as record_function() issues
    return OpInfo(
        name=name,
        short=short,
        kind=kind,
        formula=formula,
        override=OVERRIDES.get(short) if aten else None,
        arguments=tuple(argument.name for argument in schema.arguments),
        syncs=int(aten and short in (*_PICKING, "_linalg_check_errors")),
        random=torch.Tag.nondeterministic_seeded in func.tags,
    )


def _pointwise(func: OpOverload[..., Any]) -> bool:
    """Whether torch calls the op elementwise; of some ops it tags one overload only."""
    if torch.Tag.pointwise in func.tags:
        return True
    packet = func.overloadpacket
    return any(torch.Tag.pointwise in getattr(packet, name).tags for name in packet.overloads())


def _kind(func: OpOverload[..., Any], short: str, aten: bool, formula: Formula | None) -> str:
    if aten and short in _SPECIAL:
        return _SPECIAL[short]
    if aten and _RESAMPLING.match(short):
        return "fresh"  # torch has decompositions of these, for compilers: every device has a kernel
    composite = func._can_decompose()
    if composite and not (aten and short in _FRESH_WHOLE):
        # A formula given to a composite op says that one kernel serves it.
        return "decompose" if aten or formula is None else "fresh"
    if aten and short in FREE:
        return "free"
    if torch.Tag.inplace_view in func.tags:
        return "view"  # it gives the tensor another shape, each time anew
    if not func._schema.is_mutable and any(result.alias_info is not None for result in func._schema.returns):
        return "view"
    if aten and formula is None and _has_kernel(func._name, torch._C.DispatchKey.CompositeExplicitAutograd):
        return "decompose"  # one code for all devices, made of other ops
    return "mutable" if func._schema.is_mutable else "fresh"


LIMIT = 50_000
Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class OpRecord:
    """One op that ran, without what sets it apart from its equals (module, Python calls, memory that is alive)."""

    name: str
    host_class: str
    family: str = ""
    dtype: str = ""
    dims: Mapping[str, int] = field(default_factory=dict)
    macs: int = 0
    weight_bytes: int = 0  # read
    read_bytes: int = 0
    write_bytes: int = 0
    new_bytes: int = 0  # of new storage
    launches: int = 0
    syncs: int = 0
    estimated: bool = False
    make: Callable[[], Any] | None = None  # its result on the meta device, without running the op; of tensors alone

    @property
    def counts(self) -> tuple[int, ...]:
        """The five counts and the dimensions: what is compared between batch sizes."""
        work = (self.macs, self.weight_bytes, self.read_bytes, self.write_bytes, self.new_bytes)
        return (*work, *self.dims.values())


@lru_cache(1)
def _tables(generation: int, usual: torch.dtype) -> tuple[dict[Hashable, OpRecord], dict[Any, OpInfo]]:
    return {}, {}


def learnt() -> tuple[dict[Hashable, OpRecord], dict[Any, OpInfo]]:
    """What was learnt of calls, by signature, and of op overloads, for one pass to read and extend.

    It is dropped when a formula is registered, when PyTorch promotes integers to another dtype, or when there is too
    much.
    """
    given = generation(), torch.get_default_dtype()
    if len(_tables(*given)[0]) > LIMIT:
        _tables.cache_clear()
    return _tables(*given)


@lru_cache(LIMIT)
def no_launch(info: OpInfo, view: bool) -> OpRecord:
    """A call that launches nothing."""
    return OpRecord(info.name, no_launch_class(info.short, view))


def allocation(info: OpInfo, out: Any) -> OpRecord:
    """A call that makes memory without launching anything."""
    return OpRecord(info.name, no_launch_class(info.short, view=False), new_bytes=_new_bytes(out))


def sync(info: OpInfo, tensor: torch.Tensor) -> OpRecord:
    """A call by which the host reads a value."""
    return OpRecord(info.name, host_class(info.short, "sync"), dtype=dtype_name(tensor.dtype), syncs=1)


def launching(
    info: OpInfo, args: Sequence[Any], options: dict[str, Any], out: Any, weights: Sequence[bool]
) -> OpRecord:
    """A call that launches work.

    `weights` says of each tensor among the arguments, in order, whether it is a parameter.
    """
    given = "out" in options  # the caller's own tensor, which is written and not read
    options = {name: value for name, value in options.items() if name != "out"}
    if info.formula is not None:
        work = work_of(info.formula, info.name, *args, out=out, **options)
    else:
        work = Work("other", {"numel": max((t.numel() for t in leaves(out)), default=0)})
    weight_bytes, read_bytes = _reads(args, options, weights, work)
    written = leaves(out)
    computed_in = _computed_in(args, written)
    return OpRecord(
        name=info.name,
        host_class=host_class(info.short, work.family),
        family=work.family,
        dtype=dtype_name(computed_in),
        dims=work.dims,
        macs=4 * work.macs if computed_in.is_complex else work.macs,  # four multiply-adds of real numbers
        weight_bytes=weight_bytes,
        read_bytes=read_bytes,
        write_bytes=work.writes if work.writes is not None else sum(_distinct(t) for t in written),
        new_bytes=0 if given or info.kind == "mutable" or info.short.endswith("_") else _new_bytes(out),
        launches=work.launches,
        syncs=info.syncs,
        estimated=info.formula is None,
        make=_maker(out),
    )


ON_META, REAL = 1, 2  # where a call's tensors are


class Call(NamedTuple):
    """One call of an op."""

    func: OpOverload[..., Any]
    info: OpInfo
    args: Sequence[Any]
    options: dict[str, Any]

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for value in (*self.args, *self.options.values()) for tensor in leaves(value)]

    @property
    def named(self) -> dict[str, Any]:
        return dict(zip(self.info.arguments, self.args, strict=False)) | self.options

    def signature(self) -> tuple[Hashable, int]:
        """What decides the result's shapes, and where the tensors are."""
        key: list[Any] = [self.info]
        places = _sign(self.args, key)
        if self.options:
            key += self.options
            places |= _sign(self.options.values(), key)
        return tuple(key), places

    def run(self) -> Any:
        return self.func(*self.args, **self.options)

    def on_meta(self) -> Call:
        """The same call, real tensors replaced by meta ones."""
        args, options = tree_map_only(Tensor, on_meta, (list(self.args), self.options))
        return self._replace(args=args, options=options)

    def launching(self, out: Any) -> OpRecord:
        # Parameters and buffers are those tensors that were made outside inference mode.
        weights = [not tensor.is_inference() for tensor in self.tensors]
        return launching(self.info, self.args, self.options, out, weights)


def _sign(values: Iterable[Any], key: list[Any]) -> int:
    """Append what decides an op's shapes to `key`; tell where its tensors are."""
    places = 0
    for value in values:
        if isinstance(value, Tensor):
            key += (value.shape, value.stride(), value.dtype, value.is_inference())
            places |= ON_META if value.is_meta else REAL
        elif isinstance(value, (list, tuple)):
            key.append(len(value))
            places |= _sign(value, key)
        else:
            key += (value, value.__class__)  # 1, 1.0 and True are equal, but promote differently
    return places


def on_meta(tensor: Tensor) -> Tensor:
    """A tensor's shape, strides and dtype without its values; itself where it has none."""
    if tensor.is_meta:
        return tensor
    with torch.inference_mode(tensor.is_inference()):  # by which parameters and buffers are told
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def place(module: str) -> str:
    """A module's path, as a sentence names it."""
    return f"module '{module}'" if module else "the model's own forward"


def demand_known(graph: ModelGraph) -> None:
    """Refuse a graph with an op that no formula knows."""
    for op in all_ops(graph):
        if op.estimated:
            own = graph.runtime == "eager"  # whose ops may have formulas of the user's
            called = f"called in {place(op.module)}" if own else f"which {graph.runtime} runs"
            register = f"register one with @latpred.cost({op.name!r}), or " if own else ""
            raise UnknownOpError(
                f"no cost formula knows {op.name}, {called}; {register}trace without strict to have it estimated "
                "from its bytes"
            )


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype without its namespace."""
    return str(dtype).rpartition(".")[2]


def _maker(out: Any) -> Callable[[], Any] | None:
    """What makes a result anew on the meta device; None where it has parts that are no tensors."""
    if not isinstance(out, (tuple, list)):
        return _tensor_maker(out) if out is None or isinstance(out, torch.Tensor) else None
    if not all(part is None or isinstance(part, torch.Tensor) for part in out):
        return None
    makers = list(map(_tensor_maker, out))
    holder = list if type(out) is list else tuple
    return lambda: holder([make() for make in makers])


def _tensor_maker(tensor: torch.Tensor | None) -> Callable[[], Any]:
    if tensor is None:
        return lambda: None
    # A device is read faster than its name; it is made here, since modes of the caller look on while files load.
    meta = torch.device("meta")
    return partial(torch.empty_strided, tensor.shape, tensor.stride(), dtype=tensor.dtype, device=meta)


def leaves(value: Any) -> list[torch.Tensor]:
    """The tensors in an argument, an input or a result."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in leaves(item)]
    if isinstance(value, Mapping):
        return leaves(list(value.values()))
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
        return tensor.nbytes
    return stored_numel(tensor.shape, tensor.stride()) * tensor.dtype.itemsize


def _new_bytes(out: Any) -> int:
    return sum(tensor.nbytes for tensor in leaves(out))


def _computed_in(args: Sequence[Any], written: list[torch.Tensor]) -> torch.dtype:
    """The floating-point or complex dtype among the arguments, else the first argument's, else the result's.

    Beside others, a tensor without dimensions counts as a number, as where PyTorch promotes.
    """
    tensors = sorted(filter(is_tensor, args), key=lambda tensor: not tensor.shape) or written
    for tensor in tensors:
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            return tensor.dtype
    return tensors[0].dtype if tensors else torch.float32


OVERRIDES: dict[str, Callable[..., Any]] = {}


def _override(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            OVERRIDES[name] = function
        return function

    return register


def _empty(shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(shape, dtype=dtype or like.dtype, device="meta")


@_override("mm", "mv", "addmm", "addbmm")
def _product(*given: Any, **_: Any) -> Any:
    """Refuse two dtypes, of which the meta device alone makes a product."""
    asked = [one for one in given if isinstance(one, torch.dtype)]  # of the result, which what is added may have
    dtypes = {x.dtype: None for x in given if isinstance(x, Tensor) and x.dtype not in asked}
    if len(dtypes) > 1:
        raise RuntimeError(f"a product needs tensors of one dtype, but got {' and '.join(map(str, dtypes))}")
    return NotImplemented


@_override("linear")
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if weight.dim() != 2 or not x.dim() or x.shape[-1] != weight.shape[1] or x.dtype != weight.dtype:
        return _product(x, weight, bias)
    return _empty(x.shape[:-1] + weight.shape[:1], x)


@_override("layer_norm", "rms_norm")
def _layer_norm(x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, *_: Any) -> Any:
    given = tuple(normalized_shape)
    if tuple(x.shape[-len(given) :]) != given or (weight is not None and tuple(weight.shape) != given):
        return NotImplemented
    if weight is not None and weight.dtype != x.dtype:
        return NotImplemented
    return _empty(x.shape, x)


@_override("batch_norm")
def _batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, *_: Any) -> Any:
    if x.dim() < 2 or (mean is not None and mean.shape[0] != x.shape[1]) or (weight is None and mean is None):
        return NotImplemented
    return torch.empty_like(x, memory_format=layout_of(x))  # however x lies


@_override("gelu", "relu", "tanh", "neg", "exp", "rsqrt", "sqrt", "cos", "sin", "abs", "erf", "_masked_softmax")
def _unary(x: Tensor, *_: Any, **__: Any) -> Any:
    return torch.empty_like(x) if x.dtype.is_floating_point else NotImplemented


@_override("softmax", "log_softmax")
def _softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    if not x.dtype.is_floating_point or not -x.dim() <= dim < x.dim():
        return NotImplemented
    return _empty(x.shape, x, dtype)  # contiguous, however x lies


@_override("scaled_dot_product_attention")
def _attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *_: Any, **options: Any) -> Any:
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4 or not query.dtype == key.dtype == value.dtype:
        return NotImplemented
    batch, heads, queries, size = query.shape
    if key.shape[-1] != size or key.shape[:3] != value.shape[:3] or key.shape[0] != batch:
        return NotImplemented
    if heads != key.shape[1] and not (options.get("enable_gqa") and heads % key.shape[1] == 0):
        return NotImplemented
    scores = batch, heads, queries, key.shape[2]
    if attn_mask is not None and torch.broadcast_shapes(attn_mask.shape, scores) != scores:  # type: ignore[no-untyped-call]
        return NotImplemented
    # What CUDA's kernel for float32 and masks returns: (batch, queries, heads, head_dim), seen transposed.
    return _empty((batch, queries, heads, value.shape[-1]), query).transpose(1, 2)


def attention_like_query(query: Tensor, *rest: Any, **options: Any) -> Any:
    """What all other fused kernels return: the result lies as the queries do."""
    out = _attention(query, *rest, **options)
    return out if out is NotImplemented else torch.empty_like(query)


@_override("add", "mul", "sub", "div")
def _binary(x: Any, y: Any, *rest: Any, **options: Any) -> Any:
    if rest or options or not isinstance(x, Tensor) or not x.dtype.is_floating_point or not x.is_contiguous():
        return NotImplemented
    if not isinstance(y, Tensor):
        return NotImplemented if isinstance(y, complex) else _empty(x.shape, x)
    if x.dtype != y.dtype or not y.is_contiguous():
        return NotImplemented
    if x.shape == y.shape:
        return _empty(x.shape, x)
    return _empty(torch.broadcast_shapes(x.shape, y.shape), x)  # type: ignore[no-untyped-call]


@_override("group_norm")
def _group_norm(x: Tensor, groups: int, weight: Tensor | None = None, *_: Any) -> Any:
    if x.dim() < 2 or x.shape[1] % groups or (weight is not None and tuple(weight.shape) != (x.shape[1],)):
        return NotImplemented
    return torch.empty_like(x)


def _convolution(convolve: Callable[..., Tensor], x: Tensor, weight: Tensor, *rest: Any) -> Any:
    layout = conv_format(x, weight)
    if layout is torch.contiguous_format:
        return NotImplemented
    made = convolve(x, weight, *rest)  # which on the meta device is contiguous
    return torch.empty(made.shape, dtype=x.dtype, device="meta", memory_format=layout)


for _name in _CONVOLUTIONS:
    _override(_name)(partial(_convolution, getattr(torch, _name)))


def conv_format(x: Tensor, weight: Tensor) -> torch.memory_format:
    """A convolution follows whichever of its two tensors lies channels-last."""
    formats = (layout_of(x), layout_of(weight)) if x.dim() == weight.dim() else ()
    return next((found for found in formats if found is not torch.contiguous_format), torch.contiguous_format)


def layout_of(tensor: Tensor) -> torch.memory_format:
    """The format that PyTorch takes a tensor to have, dense or not, from the order of its strides.

    Strides of sides of one tell it, too: filters of 1 x 1, or of one channel each, lie in one order in both formats.
    """
    if tensor.dim() not in (4, 5) or not tensor.stride(1):
        return torch.contiguous_format
    least = 0
    for side in (1, *range(tensor.dim() - 1, 1, -1), 0):
        if tensor.stride(side) < least or (side == 0 and least == tensor.stride(1)):
            return torch.contiguous_format
        least = tensor.stride(side) * tensor.shape[side]
    return torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d


@_override("_grouped_mm")  # of which torch's own takes bfloat16 alone
def _grouped_mm(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> Any:
    if x.dim() != 2 or weight.dim() != 3 or x.shape[-1] != weight.shape[-2]:
        return NotImplemented
    return _empty(x.shape[:-1] + weight.shape[-1:], x)


@_override("lstm", "gru", "rnn_tanh", "rnn_relu")
def _recurrent(x: Tensor, *given: Any) -> Any:
    packed = isinstance(given[2], (list, tuple))  # the sizes of batches come first
    hx, params, *options = given[packed:]
    if not isinstance(params, (list, tuple)):
        return NotImplemented
    states = [hx] if isinstance(hx, Tensor) else hx  # as wide as the results are
    *lead, _ = x.shape
    width = states[0].shape[-1] * (2 if options[4] else 1)
    turned = not packed and options[5]  # libraries go through the steps, whatever the order of the input
    out = _empty((*reversed(lead), width), x).transpose(0, 1) if turned else _empty((*lead, width), x)
    return (out, *map(torch.empty_like, states))


@_override("_transform_bias_rescale_qkv")
def _split_heads(qkv: Tensor, bias: Tensor, heads: int) -> Any:
    batch, length, width = qkv.shape
    shape = (batch, heads, length, width // 3 // heads)
    return tuple(_empty(shape, qkv) for _ in range(3))


def is_one_product(x: Tensor, y: Tensor) -> bool:
    """Whether torch can run a matmul as one product without copying an operand."""
    if x.dtype != y.dtype or min(x.dim(), y.dim()) < 2 or x.shape[-1] != y.shape[-2]:
        return False
    if y.dim() == 2:
        return _mergeable(x, x.dim() - 1)
    alike = x.dim() == y.dim() and x.shape[:-2] == y.shape[:-2]
    return alike and _mergeable(x, x.dim() - 2) and _mergeable(y, y.dim() - 2)


def _mergeable(tensor: Tensor, leading: int) -> bool:
    """Whether the leading dimensions collapse into one without a copy."""
    sides = [(n, s) for n, s in zip(tensor.shape[:leading], tensor.stride()[:leading], strict=True) if n != 1]
    return all(outer[1] == inner[0] * inner[1] for outer, inner in pairwise(sides))
