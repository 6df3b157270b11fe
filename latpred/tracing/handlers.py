"""How a call is handled, by kind of op: make its result without computing it, and record what it amounts to.

A handler takes the recorder and the call; it records the op and returns the result. Which op is of which kind is
decided in `op_record`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial, reduce
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from latpred.errors import TraceError
from latpred.ops.families import lies_in_rows
from latpred.ops.pointwise import drawn, factory
from latpred.ops.products import grouped_mm_by_expert, suits_cpu, suits_kernels
from latpred.sandbox.own_thread import uncounted
from latpred.tracing import meta_module
from latpred.tracing.op_record import (
    ON_META,
    REAL,
    Call,
    OpInfo,
    allocation,
    attention_like_query,
    conv_format,
    describe,
    is_one_product,
    layout_of,
    no_launch,
    on_meta,
    sync,
)
from latpred.tracing.trace_pass import ASSUMED, model_asks

if TYPE_CHECKING:
    from latpred.tracing.tracer import TraceRecorder

Tensor = torch.Tensor

_MASKS = (torch.bool, torch.uint8)
_NEW = frozenset(f"aten::{new}{name}" for new in ("", "new_") for name in ("empty", "zeros", "ones", "full"))
# Composite ops that look whether all that they are given is on one device.
_ONE_DEVICE = frozenset(
    ("cdist", "inner", "linalg_multi_dot", "chain_matmul", "meshgrid", "quantile", "stft", "istft", "cholesky_solve")
)
_COMPOSITE = (
    torch._C.DispatchKey.CompositeImplicitAutograd,
    torch._C.DispatchKey.CompositeExplicitAutograd,
    torch._C.DispatchKey.CompositeExplicitAutogradNonFunctional,
)
# From this version on one value is written through a mask by `masked_fill_`.
_FILLS_MASKS = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 15)
_MOST_REAL_BYTES = 32 << 20  # of a tensor whose values a forward pass may come to ask for


class UnknowableError(TraceError):
    """The forward pass depends on values that only running it would tell."""


class UnknownValues:
    """Real tensors that something unknown was written into, by their storages."""

    def __init__(self) -> None:
        self._storages: dict[int, StorageWeakRef] = {}  # a reference keeps others from the address

    def add(self, tensor: Tensor) -> None:
        """Forget the values of a tensor, and of all that share its memory."""
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def hidden_in(self, call: Call) -> Call:
        """The call with meta tensors in place of these; what it writes into or only looks at stays itself."""
        if not self._storages or call.info.formula in (factory, drawn):
            return call
        kept = 1 if call.info.kind in ("mutable", "view", "free") else 0
        others, options = tree_map_only(Tensor, self._hidden, (list(call.args[kept:]), call.options))
        return call._replace(args=[*call.args[:kept], *others], options=options)

    def _hidden(self, tensor: Tensor) -> Tensor:
        return on_meta(tensor) if tensor.untyped_storage()._cdata in self._storages else tensor


def fresh(recorder: TraceRecorder, call: Call) -> Any:
    """An op whose results are new and whose shapes follow from its arguments' shapes."""
    key, places = call.signature()
    record = recorder.known.get(key)
    if record is not None and places & ON_META and record.make is not None:
        return recorder.record(record, record.make())
    if places == ON_META | REAL:
        call = call.on_meta()
    out: Any = NotImplemented
    if call.info.override is not None and places & ON_META:
        out = call.info.override(*call.args, **call.options)
    if out is NotImplemented:
        out = _valueless(recorder, call)
    if out is None:
        out = _drawn(recorder, call) if call.info.random else call.run()
    if record is None:
        record = recorder.known[key] = call.launching(out)
    return recorder.record(record, out)


def _valueless(recorder: TraceRecorder, call: Call) -> Tensor | None:
    """A large new tensor of floating-point numbers, as a cache of keys, on the meta device: nobody reads its values."""
    if not recorder.valueless or call.info.name not in _NEW or "out" in call.options:
        return None
    out: Tensor = call._replace(options=call.options | {"device": "meta"}).run()
    return out if out.is_floating_point() and out.nbytes > _MOST_REAL_BYTES else None


def _drawn(recorder: TraceRecorder, call: Call) -> Any:
    """An op that draws random numbers: from the recorder's generator, whichever it is given.

    All threads draw from PyTorch's own. For meta tensors nothing is drawn, and some ops take no generator there.
    """
    func = call.func
    if isinstance(call.args[0], Tensor) and call.args[0].is_meta:
        return func(*call.args, **{name: value for name, value in call.options.items() if name != "generator"})
    own = func._overloadname
    for name in (own, "generator" if own == "default" else f"{own}_generator"):
        overload = getattr(func.overloadpacket, name, None)
        if overload is not None and any(argument.name == "generator" for argument in overload._schema.arguments):
            return overload(*call.args, **(call.options | {"generator": recorder.generator}))
    return call.run()


def view(recorder: TraceRecorder, call: Call) -> Any:
    """An op that launches nothing: its result is another look at its argument."""
    return recorder.record(no_launch(call.info, view=True), call.run())


def maybe(recorder: TraceRecorder, call: Call) -> Any:
    """A view where the strides allow it, else a copy."""
    x = call.args[0]
    if call.info.short == "resolve_neg" and not x.is_meta and not x.dtype.is_floating_point:
        return recorder.record(sync(call.info, x), x)  # the last that is seen of .tolist() and .numpy()
    key, places = call.signature()
    record = recorder.known.get(key)
    if record is not None and record.launches and places == ON_META and record.make is not None:
        return recorder.record(record, record.make())
    out = call.run()
    if record is None:
        record = no_launch(call.info, view=True) if _shares(out, x) else call.launching(out)
        recorder.known[key] = record
    return recorder.record(record, out)


def mutable(recorder: TraceRecorder, call: Call) -> Any:
    """An op that writes into its first argument."""
    _assigned(recorder, call.args)
    key, places = call.signature()
    record = recorder.known.get(key)
    first = call.args[0] if call.args else None
    inplace = call.info.name.startswith("aten::") and call.info.short.endswith("_")
    target = first if inplace and isinstance(first, Tensor) else None  # which the op gives back
    if record is not None and target is not None and places & ON_META:
        out = target
    elif places == ON_META | REAL:
        out = call.on_meta().run()
        out = out if target is None else target
    else:
        out = _drawn(recorder, call) if call.info.random else call.run()
    if target is not None and not target.is_meta and places & ON_META:
        recorder.unknown.add(target)
    if record is None:
        record = recorder.known[key] = call.launching(out)
    return recorder.record(record, out)


def free(recorder: TraceRecorder, call: Call) -> Any:
    """Memory without a launch, or an identity."""
    out, args = _valueless(recorder, call), call.args
    out = call.run() if out is None else out
    if call.info.short == "lift_fresh":
        return out  # a step of torch.tensor(...), which detach_ stands for: the meta device does without it
    if args and isinstance(args[0], Tensor) and (not isinstance(out, Tensor) or _shares(out, args[0])):
        return recorder.record(no_launch(call.info, view=False), out)
    return recorder.record(allocation(call.info, out), out)


def decompose(recorder: TraceRecorder, call: Call) -> Any:
    """A composite op: its parts are recorded instead."""
    if call.info.short in _ONE_DEVICE and call.signature()[1] == ON_META | REAL:
        call = call.on_meta()
    out = recorder.inside(_parts(call.func), *call.args, **call.options)
    return fresh(recorder, call) if out is NotImplemented else out


@lru_cache
def _parts(func: OpOverload[..., Any]) -> Callable[..., Any]:
    """ATen's own code of a composite op: that in Python, for compilers, does other work."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    key = next((key for key in _COMPOSITE if has(func._name, key)), None)
    return func.decompose if key is None else partial(func._op_dk, key)


def boundary(recorder: TraceRecorder, call: Call) -> Any:
    """A whole layer in one op, replaced by the kernels it runs."""
    return recorder.inside(meta_module.REPLACEMENTS[call.info.short], *call.args, **call.options)


def item(recorder: TraceRecorder, call: Call) -> Any:
    """The host reads a value: one that is known, or whether something is too small, as an op such as istft asks."""
    known = not any(tensor.is_meta for tensor in call.tensors)
    within = recorder.depth and call.info.short == "equal"  # equal to a one, which is the last that was made
    if not known and not (within and recorder.records[-2].name in ("aten::lt", "aten::le")):
        raise UnknowableError(recorder.reading())
    return recorder.record(sync(call.info, call.args[0]), call.run() if known else False)


def move(recorder: TraceRecorder, call: Call) -> Any:
    """A cast, a copy or nothing: everything is on one device, wherever the model thinks it sends a tensor."""
    given = call.named
    x: Tensor = given["self"]
    other = given.get("other")
    dtype = given.get("dtype") or (other.dtype if other is not None else x.dtype)
    layout = given.get("memory_format") or torch.preserve_format
    wanted = given.get("copy") or call.info.short == "_to_copy"
    settled = layout in (torch.preserve_format, layout_of(x))  # of which PyTorch asks the order of strides alone
    if dtype == x.dtype and settled and not wanted:
        return recorder.record(no_launch(call.info, view=True), x)
    if x.is_meta:
        out = torch.empty_like(x, dtype=dtype, memory_format=layout)
    else:
        out = x.to(dtype, copy=True, memory_format=layout)
    call = call._replace(args=(x,), options={})
    key = (call.signature()[0], dtype, layout)
    record = recorder.known.get(key)
    if record is None:
        record = recorder.known[key] = call.launching(out)
    return recorder.record(record, out)


def dropout(recorder: TraceRecorder, call: Call) -> Any:
    """Nothing in evaluation mode, else noise and a product; the plainest form is one kernel on CUDA."""
    given = call.named
    if not (given["train"] and given["p"]):
        return recorder.record(no_launch(call.info, view=False), call.args[0])
    if call.info.short == "dropout":
        return fresh(recorder, call) if recorder.on_cuda() else recorder.inside(_dropped, *call.args[:2])
    return decompose(recorder, call)


def _dropped(x: Tensor, p: float) -> Tensor:
    return x * torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)


def linear(recorder: TraceRecorder, call: Call) -> Any:
    """One product; of an input of three dimensions or more that lies in pieces a product and a sum."""
    x = call.args[0]
    if x.dim() < 3 or x.is_contiguous():
        return fresh(recorder, call)
    return recorder.inside(_product_and_sum, *call.args, **call.options)


def _product_and_sum(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if weight.requires_grad:  # then PyTorch copies the input rather than repeating the weight, in inference, too
        out = x.reshape(-1, x.shape[-1]).mm(weight.t()).view(*x.shape[:-1], -1)
    else:
        out = torch.matmul(x, weight.t())
    return out if bias is None else out.add_(bias)


def laid_out(recorder: TraceRecorder, call: Call) -> Any:
    """An op that first copies its input, and the filters of a convolution, to where its kernels read them."""
    x, count, layout = call.args[0], 1, torch.contiguous_format
    if "conv" in call.info.short:
        count, layout = 2, conv_format(x, call.args[1])
    elif call.info.short == "group_norm" and layout_of(x) is not layout and not recorder.on_cuda():
        layout = layout_of(x)
    lying = [tensor.is_contiguous(memory_format=layout) for tensor in call.args[:count]]
    if all(lying):
        return fresh(recorder, call)

    def copied_first() -> Any:
        copies = (t if lies else t.contiguous(memory_format=layout) for t, lies in zip(call.args, lying, strict=False))
        return call.func(*copies, *call.args[count:], **call.options)

    return recorder.inside(copied_first)


def rms_norm(recorder: TraceRecorder, call: Call) -> Any:
    """One kernel, which CUDA alone has: others run its parts."""
    return (laid_out if recorder.on_cuda() else decompose)(recorder, call)


def roll(recorder: TraceRecorder, call: Call) -> Any:
    """One dimension after the other, each a copy of the whole."""
    x, shifts, dims = (*call.args, ())[:3]
    if len(dims) < 2:
        return fresh(recorder, call)
    return recorder.inside(lambda: reduce(lambda y, turn: torch.roll(y, *turn), zip(shifts, dims, strict=True), x))


def pad(recorder: TraceRecorder, call: Call) -> Any:
    """A larger copy; round a circle each margin is a copy of its own."""
    return (decompose if call.named.get("mode") == "circular" else fresh)(recorder, call)


def grouped_mm(recorder: TraceRecorder, call: Call) -> Any:
    """Rows sorted by expert: CUDA has a kernel for bfloat16, else the host asks where each expert's begin."""
    x, experts = call.args[:2]
    split = x.dim() == 2 and experts.dim() == 3
    if not split or (x.dtype is torch.bfloat16 and recorder.on_cuda()):
        return fresh(recorder, call)
    return fresh(recorder, call._replace(info=_changed(call.info, formula=grouped_mm_by_expert, syncs=1)))


def softmax(recorder: TraceRecorder, call: Call) -> Any:
    """What is given in another format is cast first; only on CUDA a kernel reads fp16 and writes fp32."""
    x, dtype = call.args[0], call.named.get("dtype")
    widens = (x.dtype, dtype) == (torch.float16, torch.float32)
    if dtype in (None, x.dtype) or (widens and recorder.on_cuda()):
        return fresh(recorder, call)
    return recorder.inside(lambda: call.func(x.to(dtype), call.args[1]))


def attention(recorder: TraceRecorder, call: Call) -> Any:
    """Attention, for which PyTorch first makes numbers of a mask of truth values.

    What is computed in parts, as with values of another width than keys on a CPU, comes out as products lay it.
    """
    mask, grouped = call.named.get("attn_mask"), bool(call.named.get("enable_gqa"))
    if mask is not None and mask.dtype is torch.bool:
        return recorder.inside(_masked_by_numbers, *call.args, **call.options)
    query, key, value = call.args[:3]
    suits = suits_cpu(query, value, mask, call.named.get("dropout_p", 0.0))
    if not (suits_kernels(query, key, value, grouped) and (suits or recorder.on_cuda())):
        return fresh(recorder, call._replace(info=_changed(call.info, override=None)))
    batch, head, token, _ = query.stride()
    if batch >= token >= head or query.shape[2] == 1:  # as they lie mostly, and so do the results of all kernels
        return fresh(recorder, call)
    flash = suits and mask is None and query.dtype in (torch.float16, torch.bfloat16)
    laid = flash or not recorder.on_cuda()
    return fresh(recorder, call._replace(info=_changed(call.info, override=attention_like_query)) if laid else call)


@lru_cache
def _changed(info: OpInfo, **changes: Any) -> OpInfo:
    """The same op handled otherwise; without an `override` PyTorch's own kernel makes its results."""
    return replace(info, **changes)


def _masked_by_numbers(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, *rest: Any, **options: Any) -> Any:
    hidden = torch.scalar_tensor(-torch.inf, dtype=query.dtype, device=attn_mask.device)
    numbers = torch.where(attn_mask, 0.0, hidden)
    if numbers.is_meta and not lies_in_rows(attn_mask):
        with _disable_current_modes():  # PyTorch chooses a kernel by the mask as it was given
            numbers = torch.empty_strided(attn_mask.shape, attn_mask.stride(), dtype=query.dtype, device="meta")
    return torch.ops.aten.scaled_dot_product_attention(query, key, value, numbers, *rest, **options)


@uncounted
def plain(func: HigherOrderOperator) -> Callable[..., Any]:
    """What an operator that is given functions does where nothing compiles it, unless values decide what that is."""
    found: Callable[..., Any] | None = func.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)
    if found is None or func._name in ("cond", "while_loop", "scan"):
        raise UnknowableError(f"values or a compiler decide what torch.ops.higher_order.{func._name} does")
    return found


def packed(recorder: TraceRecorder, call: Call) -> Any:
    """Sequences of unequal lengths laid one after the other, or back; their lengths say how."""
    if call.args[1].is_meta:
        raise UnknowableError(f"the result of {call.info.name} has a shape that depends on the lengths of sequences")
    out = call.run()
    return recorder.record(call.launching(out), out)


def matmul(recorder: TraceRecorder, call: Call) -> Any:
    """One product where no operand needs a copy, else the copies and the product."""
    return (fresh if is_one_product(*call.args) else decompose)(recorder, call)


def answer(recorder: TraceRecorder, call: Call) -> Any:
    """A check over a whole tensor: all() holds, any() does not, as in a forward pass where nothing is wrong.

    That a sum is the number of elements holds as well: transformers asks so whether a mask hides nothing.
    """
    assumed = _counts_all(recorder, *call.args) if call.info.short == "eq" else len(call.args) == 1
    if not assumed or call.options or not call.args[0].is_meta:
        return fresh(recorder, call)
    out = torch.tensor("any" not in call.info.short)
    if model_asks():
        recorder.notes.add(ASSUMED)
    return recorder.record(call.launching(out), out)


def _counts_all(recorder: TraceRecorder, x: Tensor, number: Any) -> bool:
    """Whether the sum of a whole tensor, which was just taken, is compared with how many elements that has."""
    counted = x.dtype == torch.int64 and not x.dim() and isinstance(number, int)
    last = recorder.records[-1] if recorder.records and counted else None
    return last is not None and last.name == "aten::sum" and prod(last.dims.values()) == number


def pick(recorder: TraceRecorder, call: Call) -> Any:
    """An op whose result's shape depends on values; unless it is told that shape, the host asks for it."""
    short, args = call.info.short, call.args
    if call.func._can_decompose():
        return decompose(recorder, call)
    told = call.options.get("output_size")
    if not any(tensor.is_meta for tensor in call.tensors):
        out = call.run()
    elif short == "masked_select" and not args[1].is_meta:
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
        out = torch.empty(int(args[1].expand(shape).sum()), dtype=args[0].dtype, device="meta")
    elif told is not None:
        out = torch.empty(told, dtype=args[0].dtype, device="meta")
    else:
        raise UnknowableError(f"the result of {call.info.name} has a shape that depends on values")
    record = call.launching(out)
    return recorder.record(replace(record, syncs=1) if told is None else record, out)


def one_hot(recorder: TraceRecorder, call: Call) -> Any:
    """Zeros, into which a one is put for each index; a CPU first asks whether there is a place for each."""
    x, classes = call.args[0], call.named.get("num_classes", -1)
    cuda = recorder.on_cuda()

    def ones_put() -> Tensor:
        ends = () if classes != -1 and (cuda or not x.numel()) else (x.max(),) if cuda else x.aminmax()
        width = classes
        for end in ends:
            if classes == -1:
                width = int(end) + 1
            else:  # which fits, whatever it is
                recorder.record(sync(describe(torch.ops.aten._local_scalar_dense.default), end), None)
        return torch.zeros(*x.shape, width, dtype=x.dtype, device=x.device).scatter_(-1, x.unsqueeze(-1), 1)

    return recorder.inside(ones_put)


def index(recorder: TraceRecorder, call: Call) -> Any:
    """The elements that tensors of places, or masks, pick."""
    return fresh(recorder, call._replace(args=(call.args[0], _without_masks(recorder, call.args[1])), options={}))


def _without_masks(recorder: TraceRecorder, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Index tensors with each boolean mask replaced by the places where it holds."""
    plain: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in _MASKS:
            plain.append(index)
            continue
        if index.is_meta:
            raise UnknowableError("the result of aten::index has a shape that depends on the values of a mask")
        plain.extend(_found(recorder, index).unbind(1))
    return plain


def _found(recorder: TraceRecorder, mask: Tensor) -> Tensor:
    """The places where a mask holds, whose number the host waits for; all where nobody knows its values."""
    func = torch.ops.aten.nonzero.default
    out = torch.empty(mask.numel(), mask.dim(), dtype=torch.int64, device="meta") if mask.is_meta else mask.nonzero()
    places: Tensor = recorder.record(Call(func, describe(func), (mask,), {}).launching(out), out)
    recorder.nested[-1] = True  # by the op that is given the mask
    return places


def index_put(recorder: TraceRecorder, call: Call) -> Any:
    """Values written to such places; those of a mask have to be found unless one value fills it."""
    (x, places, values), in_place = call.args[:3], call.info.short.endswith("_")
    if _assigned(recorder, call.args) and _FILLS_MASKS and in_place and _is_known_mask(x, places):
        return recorder.inside(_filled, x, on_meta(places[-1]), x.dim() - len(places) + 1)
    masks = [index for index in places if index is not None and index.dtype in _MASKS]
    for mask in masks if values.numel() != 1 else ():
        _found(recorder, mask)
    return (mutable if in_place else fresh)(recorder, call)


def _is_known_mask(x: Tensor, places: Sequence[Tensor | None]) -> bool:
    """Whether places are those of one mask whose values a trace knows, while it knows none of the tensor's."""
    masks = [index for index in places if index is not None]
    return x.is_meta and len(masks) == 1 and masks[0] is places[-1] and masks[0].dtype in _MASKS and masks[0].is_cpu


def _filled(x: Tensor, mask: Tensor, dims: int) -> Tensor:
    """One value where a mask of so many dimensions holds, as PyTorch writes it where both are on one device."""
    for _ in range(dims - mask.dim()):
        mask = mask.unsqueeze(-1)
    return x.masked_fill_(mask, 0)  # whatever the value is


def lookup(recorder: TraceRecorder, call: Call) -> Any:
    """Rows of a table. A position beyond the last one fails on a device, so it fails here."""
    table, rows = call.args[:2]
    if not rows.is_meta and rows.numel():
        least, most = (int(end) for end in rows.aminmax())
        if least < 0 or most >= table.shape[0]:
            wrong = least if least < 0 else most
            raise IndexError(f"index {wrong} is not in a table of {table.shape[0]} rows")
    return fresh(recorder, call)


def scalar(recorder: TraceRecorder, call: Call) -> Any:
    """One value as a tensor. It stays on the host, where `x[i] = value` has it and fills `x[i]` with it."""
    if recorder.depth:
        return fresh(recorder, call)  # an op's own, which it keeps where its arguments are
    out = call.func(*call.args, **(call.options | {"device": "cpu"}))
    recorder.value = (len(recorder.records), out)
    return recorder.record(call._replace(options={}).launching(out), out)


def _assigned(recorder: TraceRecorder, args: Sequence[Any]) -> bool:
    """Whether an op writes a number of Python's, for which then nothing is launched: it takes it from the host."""
    if recorder.value is None:
        return False
    index, value = recorder.value
    if not any(isinstance(given, Tensor) and _shares(given, value) for given in args[1:]):
        return False
    recorder.records[index] = no_launch(recorder.infos[torch.ops.aten.scalar_tensor.default], view=False)
    recorder.value = None
    return True


def _shares(out: Tensor, source: Tensor) -> bool:
    return out is source or out.untyped_storage()._cdata == source.untyped_storage()._cdata


HANDLERS: dict[str, Callable[[TraceRecorder, Call], Any]] = {
    handler.__name__: handler
    for handler in (
        *(view, fresh, maybe, mutable, free, decompose, item, move, dropout, matmul, pick, answer, boundary, scalar),
        *(lookup, attention, packed, linear, laid_out, rms_norm, softmax, index, index_put, one_hot),
        *(roll, pad, grouped_mm),
    )
}
