"""Entry: what one call of an op amounts to, for one signature of shapes; and the cache that finds it again.

Identical layers make identical calls, within a walk and between walks, so formulas and meta kernels run once per
signature.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from latpred.errors import UnknownOpError
from latpred.ops import Work, checked, generation
from latpred.ops.classes import host_class, quiet_class, sync_class
from latpred.ops.shapes import is_tensor, stored_numel
from latpred.tracing.opinfo import OpInfo

LIMIT = 50_000
_META = torch.device("meta")

Spec = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
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

    def with_syncs(self, syncs: int) -> Entry:
        """The same entry with host synchronisations."""
        return replace(self, syncs=syncs)

    def make(self) -> Any:
        """The op's result on the meta device."""
        assert self.specs is not None
        if self.container is None:
            return _made(self.specs[0])
        return self.container([_made(spec) for spec in self.specs])


class EntryCache:
    """What was learnt of ops and their calls; dropped when a formula is registered, or when there is too much."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, Entry] = {}
        self._infos: dict[Any, OpInfo] = {}
        self._generation = -1

    def tables(self) -> tuple[dict[Hashable, Entry], dict[Any, OpInfo]]:
        """Entries by signature, and op infos by overload, for one walk to read and extend."""
        if self._generation != generation() or len(self._entries) > LIMIT:
            self._entries, self._infos = {}, {}
            self._generation = generation()
        return self._entries, self._infos


CACHE = EntryCache()


def quiet(info: OpInfo, view: bool) -> Entry:
    """Entry of a call that launches nothing."""
    return Entry(
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


def allocation(info: OpInfo, out: Any) -> Entry:
    """Entry of a call that makes memory without launching anything."""
    entry = quiet(info, view=False)
    return _with_specs(entry, out, (0, 0, 0, 0, _new_bytes(out)))


def sync(info: OpInfo, tensor: torch.Tensor) -> Entry:
    """Entry of a call by which the host reads a value."""
    return Entry(
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


def launching(info: OpInfo, args: Sequence[Any], options: dict[str, Any], out: Any, weights: Sequence[bool]) -> Entry:
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
    entry = Entry(
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


def _with_specs(entry: Entry, out: Any, counts: tuple[int, ...]) -> Entry:
    container = type(out) if isinstance(out, (tuple, list)) else None
    parts = [out] if container is None else list(out)
    if container is not None and container is not list:
        container = tuple
    simple = all(part is None or isinstance(part, torch.Tensor) for part in parts)
    specs = tuple(_spec(part) for part in parts) if simple else None
    return replace(entry, counts=counts, specs=specs, container=container)


def _made(spec: Spec | None) -> torch.Tensor | None:
    return None if spec is None else torch.empty_strided(spec[0], spec[1], dtype=spec[2], device=_META)


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
