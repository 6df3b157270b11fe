"""How the walk handles a call, by kind of op: make its result without computing it, and say what it amounts to.

A handler takes the walk, the overload, what is known of it and the call's arguments; it records entries and returns the
result. Which op is of which kind is decided in `opinfo`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload

from latpred.errors import TraceError
from latpred.tracing import meta_module
from latpred.tracing.meta_shapes import whole_matmul
from latpred.tracing.op_record import Kind, OpInfo, allocation, launching, leaves, no_launch, sync

if TYPE_CHECKING:
    from latpred.tracing.tracer import TraceRecorder

Tensor = torch.Tensor
Overload = OpOverload[..., Any]
Args = Sequence[Any]
Options = dict[str, Any]
Handler = Callable[["TraceRecorder", Overload, OpInfo, Args, Options], Any]

_ON_META, _REAL = 1, 2
_PLAIN = frozenset({int, float, bool, type(None), torch.dtype})


class UnknowableError(TraceError):
    """The forward pass depends on values that only running it would tell."""


def _sign(values: Iterable[Any], key: list[Any]) -> int:
    """Append what decides an op's shapes to `key`; tell where its tensors are."""
    places = 0
    for value in values:
        kind = value.__class__
        if kind in _PLAIN:
            key += (value, kind)  # 1, 1.0 and True are equal, but promote differently
        elif isinstance(value, Tensor):
            key += (value.shape, value.stride(), value.dtype, value.is_inference())
            places |= _ON_META if value.is_meta else _REAL
        elif isinstance(value, (list, tuple)):
            key.append(len(value))
            places |= _sign(value, key)
        else:
            key += (value, kind)
    return places


def _signature(info: OpInfo, args: Args, options: Options) -> tuple[Hashable, int]:
    key: list[Any] = [info]
    places = _sign(args, key)
    if options:
        key += options
        places |= _sign(options.values(), key)
    return tuple(key), places


def _weights(args: Args, options: Options) -> list[bool]:
    """Which tensors are parameters or buffers: only those were made outside inference mode."""
    return [not tensor.is_inference() for value in (*args, *options.values()) for tensor in leaves(value)]


def _on_meta(value: Any) -> Any:
    """The same arguments, real tensors replaced by meta ones."""
    if isinstance(value, Tensor):
        if value.is_meta:
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return [_on_meta(item) for item in value]
    return value


def _moved(args: Args, options: Options) -> tuple[Args, Options]:
    return [_on_meta(value) for value in args], {name: _on_meta(value) for name, value in options.items()}


def fresh(walk: TraceRecorder, func: Overload, info: OpInfo, args: Args, options: Options) -> Any:
    """An op whose results are new and whose shapes follow from its arguments' shapes."""
    key, places = _signature(info, args, options)
    entry = walk.known.get(key)
    if entry is not None and places & _ON_META and entry.specs is not None:
        return walk.record(entry, entry.make())
    weights = _weights(args, options) if entry is None else []
    if places == _ON_META | _REAL:
        args, options = _moved(args, options)
    out = NotImplemented
    if info.override is not None and places & _ON_META:
        out = info.override(*args, **options)
    if out is NotImplemented:
        out = _drawn(walk, func, args, options) if info.random else func(*args, **options)
    if entry is None:
        entry = walk.known[key] = launching(info, args, options, out, weights)
    return walk.record(entry, out)


def _drawn(walk: TraceRecorder, func: Overload, args: Args, options: Options) -> Any:
    """An op that draws random numbers: from the walk's generator, since all threads draw from PyTorch's own."""
    if options.get("generator") is not None:
        return func(*args, **options)
    for name in (func._overloadname, "generator", f"{func._overloadname}_generator"):
        overload = getattr(func.overloadpacket, name, None)
        if overload is not None and any(argument.name == "generator" for argument in overload._schema.arguments):
            return overload(*args, **(options | {"generator": walk.generator}))
    return func(*args, **options)


def view(walk: TraceRecorder, func: Overload, info: OpInfo, args: Args, options: Options) -> Any:
    """An op that launches nothing: its result is another look at its argument."""
    entry = walk.known.get(info)
    if entry is None:
        entry = walk.known[info] = no_launch(info, view=True)
    return walk.record(entry, func(*args, **options))


def maybe(walk: TraceRecorder, func: Overload, info: OpInfo, args: Args, options: Options) -> Any:
    """A view where the strides allow it, else a copy."""
    if info.short == "resolve_neg" and not args[0].is_meta and not args[0].dtype.is_floating_point:
        return walk.record(sync(info, args[0]), args[0])  # the last that is seen of .tolist() and .numpy()
    key, places = _signature(info, args, options)
    entry = walk.known.get(key)
    if entry is None:
        out = func(*args, **options)
        shared = _shares(out, args[0])
        entry = no_launch(info, view=True) if shared else launching(info, args, options, out, _weights(args, options))
        walk.known[key] = entry
        return walk.record(entry, out)
    if entry.alias or places & _REAL or entry.specs is None:
        return walk.record(entry, func(*args, **options))
    return walk.record(entry, entry.make())


def mutable(walk: TraceRecorder, func: Overload, info: OpInfo, args: Args, options: Options) -> Any:
    """An op that writes into its first argument."""
    _assigned(walk, args)
    key, places = _signature(info, args, options)
    entry = walk.known.get(key)
    target = args[0] if args and isinstance(args[0], Tensor) else None
    inplace = target is not None and info.name.startswith("aten::") and info.short.endswith("_")
    if entry is not None and inplace and places & _ON_META:
        out = target
    elif places == _ON_META | _REAL:
        args_there, options_there = _moved(args, options)
        out = func(*args_there, **options_there)
        out = target if inplace else out
    else:
        out = _drawn(walk, func, args, options) if info.random else func(*args, **options)
    if inplace and target is not None and places & _ON_META and not target.is_meta:
        walk.stale.add(target.untyped_storage()._cdata)
    if entry is None:
        entry = walk.known[key] = launching(info, args, options, out, _weights(args, options))
    return walk.record(entry, out)


def free(walk: TraceRecorder, func: Overload, info: OpInfo, args: Args, options: Options) -> Any:
    """Memory without a launch, or an identity."""
    out = func(*args, **options)
    if info.short == "lift_fresh":
        return out  # a step of torch.tensor(...), which detach_ stands for: the meta device does without it
    if args and isinstance(args[0], Tensor) and (not isinstance(out, Tensor) or _shares(out, args[0])):
        return walk.record(no_launch(info, view=False), out)
    return walk.record(allocation(info, out), out)


def decompose(walk: TraceRecorder, func: Overload, info: OpInfo, args: Args, options: Options) -> Any:
    """A composite op: its parts are recorded instead."""
    out = walk.inside(func.decompose, args, options)
    return fresh(walk, func, info, args, options) if out is NotImplemented else out


def boundary(walk: TraceRecorder, func: Overload, info: OpInfo, args: Args, options: Options) -> Any:
    """A whole layer in one op, replaced by the kernels it runs."""
    return walk.inside(meta_module.REPLACEMENTS[info.short], args, options)


def item(walk: TraceRecorder, func: Overload, info: OpInfo, args: Args, options: Options) -> Any:
    """The host reads a value: it must be one that can be known."""
    for tensor in args:
        if tensor.is_meta or (walk.stale and tensor.untyped_storage()._cdata in walk.stale):
            source = f" that {walk.entries[-1].name} made" if walk.entries else ""
            raise UnknowableError(f"the model's Python reads a value{source}")
    return walk.record(sync(info, args[0]), func(*args, **options))


def move(walk: TraceRecorder, func: Overload, info: OpInfo, args: Args, options: Options) -> Any:
    """A cast, a copy or nothing: everything is on one device, wherever the model thinks it sends a tensor."""
    given = dict(zip(info.arguments, args, strict=False)) | options
    x: Tensor = given["self"]
    other = given.get("other")
    dtype = given.get("dtype") or (other.dtype if other is not None else x.dtype)
    layout = given.get("memory_format") or torch.preserve_format
    wanted = given.get("copy") or info.short == "_to_copy"
    settled = layout is torch.preserve_format or x.is_contiguous(memory_format=layout)
    if dtype == x.dtype and settled and not wanted:
        return walk.record(no_launch(info, view=True), x)
    if x.is_meta:
        out = torch.empty_like(x, dtype=dtype, memory_format=layout)
    else:
        out = x.to(dtype, copy=True, memory_format=layout)
    return walk.record(launching(info, (x,), {}, out, _weights((x,), {})), out)


def dropout(walk: TraceRecorder, func: Overload, info: OpInfo, args: Args, options: Options) -> Any:
    """Nothing in evaluation mode."""
    given = dict(zip(info.arguments, args, strict=False)) | options
    if given["train"] and given["p"]:
        return fresh(walk, func, info, args, options)
    entry = walk.known.get(info)
    if entry is None:
        entry = walk.known[info] = no_launch(info, view=False)
    return walk.record(entry, given["input"])


def matmul(walk: TraceRecorder, func: Overload, info: OpInfo, args: Args, options: Options) -> Any:
    """One product where no operand needs a copy, else the copies and the product."""
    x, y = args
    shape = whole_matmul(x, y)
    if shape is None:
        return decompose(walk, func, info, args, options)
    key, places = _signature(info, args, options)
    entry = walk.known.get(key)
    out = torch.empty(shape, dtype=x.dtype, device="meta") if places & _ON_META else func(*args)
    if entry is None:
        entry = walk.known[key] = launching(info, args, options, out, _weights(args, options))
    return walk.record(entry, out)


def answer(walk: TraceRecorder, func: Overload, info: OpInfo, args: Args, options: Options) -> Any:
    """A check over a whole tensor: all() holds, any() does not, as in a forward pass where nothing is wrong."""
    if len(args) > 1 or options or not args[0].is_meta:
        return fresh(walk, func, info, args, options)
    out = torch.tensor(info.short == "all")
    return walk.record(launching(info, args, options, out, _weights(args, options)), out)


def pick(walk: TraceRecorder, func: Overload, info: OpInfo, args: Args, options: Options) -> Any:
    """An op whose result's shape may depend on values."""
    if func._can_decompose():
        return decompose(walk, func, info, args, options)
    if info.short.startswith("_index_put") or info.short.startswith("index_put"):
        return _place(walk, func, info, args, options)
    if info.short in ("index", "_unsafe_index"):
        return _index(walk, func, info, args)
    if all(not tensor.is_meta for value in (*args, *options.values()) for tensor in leaves(value)):
        out = func(*args, **options)
    elif info.short == "masked_select" and not args[1].is_meta:
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
        out = torch.empty(int(args[1].expand(shape).sum()), dtype=args[0].dtype, device="meta")
    elif info.short == "repeat_interleave" and options.get("output_size") is not None:
        out = torch.empty(options["output_size"], dtype=args[0].dtype, device="meta")
    else:
        raise UnknowableError(f"the result of {info.name} has a shape that depends on values")
    return walk.record(launching(info, args, options, out, _weights(args, options)), out)


def _index(walk: TraceRecorder, func: Overload, info: OpInfo, args: Args) -> Any:
    indices, masked = _without_masks(args[1])
    key, places = _signature(info, (args[0], indices, masked), {})
    entry = walk.known.get(key)
    if entry is not None and places & _ON_META:
        return walk.record(entry, entry.make())
    weights = _weights((args[0], indices), {})
    call: Args = (args[0], indices)
    if places == _ON_META | _REAL:
        call, _ = _moved(call, {})
    out = func(*call)
    if entry is None:
        entry = launching(info, call, {}, out, weights)
        entry = walk.known[key] = entry.with_syncs(int(masked))
    return walk.record(entry, out)


def _without_masks(indices: Sequence[Tensor | None]) -> tuple[list[Tensor | None], bool]:
    """Index tensors with each boolean mask replaced by the places where it holds."""
    plain: list[Tensor | None] = []
    masked = False
    for item_ in indices:
        if item_ is None or item_.dtype not in (torch.bool, torch.uint8):
            plain.append(item_)
            continue
        if item_.is_meta:
            raise UnknowableError("the result of aten::index has a shape that depends on the values of a mask")
        masked = True
        plain.extend(item_.nonzero().unbind(1))
    return plain, masked


def _place(walk: TraceRecorder, func: Overload, info: OpInfo, args: Args, options: Options) -> Any:
    """Writing through indices: a mask makes the host wait unless one value fills it."""
    _assigned(walk, args)
    masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
    handle = mutable if info.short.endswith("_") else fresh
    before = len(walk.entries)
    out = handle(walk, func, info, args, options)
    if masks and args[2].numel() != 1:
        walk.entries[before] = walk.entries[before].with_syncs(1)
    return out


def lookup(walk: TraceRecorder, func: Overload, info: OpInfo, args: Args, options: Options) -> Any:
    """Rows of a table. A position beyond the last one fails on a device, so it fails here."""
    table, rows = args[:2]
    if not rows.is_meta and rows.numel() and rows.untyped_storage()._cdata not in walk.stale:
        least, most = (int(end) for end in rows.aminmax())
        if least < 0 or most >= table.shape[0]:
            wrong = least if least < 0 else most
            raise IndexError(f"index {wrong} is not in a table of {table.shape[0]} rows")
    return fresh(walk, func, info, args, options)


def scalar(walk: TraceRecorder, func: Overload, info: OpInfo, args: Args, options: Options) -> Any:
    """One value as a tensor. It stays on the host, where `x[i] = value` has it and fills `x[i]` with it."""
    if walk.within:
        return fresh(walk, func, info, args, options)  # an op's own, which it keeps where its arguments are
    out = func(*args, **(options | {"device": "cpu"}))
    walk.value = (len(walk.entries), out)
    return walk.record(launching(info, args, {}, out, []), out)


def _assigned(walk: TraceRecorder, args: Args) -> None:
    """Launch nothing for the value that an op writes: it takes it from the host."""
    if walk.value is None:
        return
    index, value = walk.value
    if any(isinstance(given, Tensor) and _shares(given, value) for given in args[1:]):
        walk.entries[index] = no_launch(walk.infos[torch.ops.aten.scalar_tensor.default], view=False)
        walk.value = None


def _shares(out: Tensor, source: Tensor) -> bool:
    return out is source or out.untyped_storage()._cdata == source.untyped_storage()._cdata


HANDLERS: dict[Kind, Handler] = {
    Kind.VIEW: view,
    Kind.FRESH: fresh,
    Kind.MAYBE: maybe,
    Kind.MUTABLE: mutable,
    Kind.FREE: free,
    Kind.DECOMPOSE: decompose,
    Kind.ITEM: item,
    Kind.MOVE: move,
    Kind.DROPOUT: dropout,
    Kind.MATMUL: matmul,
    Kind.PICK: pick,
    Kind.ANSWER: answer,
    Kind.BOUNDARY: boundary,
    Kind.SCALAR: scalar,
    Kind.LOOKUP: lookup,
}
