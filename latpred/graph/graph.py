"""ModelGraph: what one forward pass of a model does, op by op, as a function of batch; Schedule: its steps.

Work is affine in batch, not proportional (Funnel has gigaMACs that no sample adds to), so every count is an `Affine`.
Some models differ at batch 1, where a reshape needs no copy; those carry exact rows for it. Nothing here traces a model
(see `latpred.tracing`) or knows how long anything takes.
"""

from __future__ import annotations

import builtins
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from numbers import Integral
from operator import attrgetter
from struct import Struct
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from latpred.errors import UsageError
from latpred.storage import hash_of

if TYPE_CHECKING:
    import pandas as pd

KEPT_OPS = 20_000  # of which is kept what was made of each
T = TypeVar("T")


class Affine(NamedTuple):
    """A whole number affine in batch: `constant + per_sample * batch`.

    >>> Affine.through((2, 8), (5, 17)), (Affine(2, 3) - Affine(1, 1) * 2).at(10)
    (Affine(constant=2, per_sample=3), 10)
    """

    constant: int
    per_sample: int = 0

    @classmethod
    def through(cls, one: tuple[int, int], other: tuple[int, int]) -> Affine:
        """The line through two points, each a batch size and the value there."""
        slope = (other[1] - one[1]) // (other[0] - one[0])
        return cls(one[1] - one[0] * slope, slope)

    def at(self, batch: int) -> int:
        """Value at one batch size."""
        return self.constant + self.per_sample * batch

    def __add__(self, other: Affine) -> Affine:  # type: ignore[override]
        return Affine(self.constant + other.constant, self.per_sample + other.per_sample)

    def __sub__(self, other: Affine) -> Affine:
        return Affine(self.constant - other.constant, self.per_sample - other.per_sample)

    def __mul__(self, other: Affine | int) -> Affine:  # type: ignore[override]
        """Product with a number, or with a count of which one does not grow with batch.

        >>> Affine(2, 3) * 4, Affine(2, 3) * Affine(5)
        (Affine(constant=8, per_sample=12), Affine(constant=10, per_sample=15))
        """
        constant, per_sample = other if isinstance(other, Affine) else (other, 0)
        return Affine(self.constant * constant, self.constant * per_sample + self.per_sample * constant)

    def __floordiv__(self, divisor: int) -> Affine:
        """A count of groups of so many."""
        return Affine(self.constant // divisor, self.per_sample // divisor)

    def __rmul__(self, times: int) -> Affine:  # type: ignore[override]
        return self * times


class Calls(NamedTuple):
    """What Python does before an op: calls of modules, other calls, and which of these read a module's attribute.

    Parameters, buffers and submodules are no ordinary attributes: `Module.__getattr__` looks for them in Python.
    """

    module_calls: int = 0
    python_calls: int = 0
    attribute_reads: int = 0

    def __add__(self, other: Calls) -> Calls:  # type: ignore[override]
        return Calls(self[0] + other[0], self[1] + other[1], self[2] + other[2])

    def __sub__(self, other: Calls) -> Calls:
        left = Calls(self[0] - other[0], self[1] - other[1], self[2] - other[2])
        return left if any(left) else NO_CALLS


ZERO, NO_CALLS = Affine(0, 0), Calls()
NO_PYTHON = NO_CALLS._asdict()  # fields of an op that no Python precedes
CONTIGUOUS = "contiguous"
COUNTS = ("macs", "weight_bytes", "read_bytes", "write_bytes", "live_bytes")  # fields of an op that are affine in batch


class Op(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One aten (or custom) op of a forward pass; a node or a kernel of another runtime."""

    name: str  # qualified, as "aten::linear"; "python::return" closes a graph whose Python goes on after its last op
    module: str  # dotted path of the module that issued it ("" for the root)
    host_class: str  # of dispatch cost, most general part first, as "view.transpose" or "gemm.linear"
    family: str  # of its kernel, most general part first, as "elementwise.gelu"; "" when nothing is launched
    dtype: str  # torch name of the computation's, as "float32"
    dims: dict[str, Affine]  # that set the kernel's time (m, n, k; rows, cols …); names per family in `latpred.ops`
    macs: Affine = ZERO  # multiply-adds
    weight_bytes: Affine = ZERO  # of parameters read
    read_bytes: Affine = ZERO  # of activations
    write_bytes: Affine = ZERO
    live_bytes: Affine = ZERO  # of activations alive just after the op, inputs and outputs included
    launches: int = 0  # 0 for views and host-only ops
    syncs: int = 0  # of the host with the device, as `.item()` makes
    # Since the previous op; see `Calls`.
    module_calls: int = 0
    python_calls: int = 0
    attribute_reads: int = 0
    estimated: bool = False  # no formula knows the op, and only its bytes are counted
    reread_after: Affine | None = None  # bytes touched since the same parameters were last read in this forward pass

    @property
    def calls(self) -> Calls:
        """What Python does before it."""
        return Calls(self.module_calls, self.python_calls, self.attribute_reads)

    __hash__ = hash_of


class Coverage(msgspec.Struct, frozen=True):
    """How much of a graph rests on formulas: shares in [0, 1], and the names of the ops that do not."""

    launches: float
    bytes: float
    estimated_ops: dict[str, int]

    __hash__ = hash_of


class ModelGraph(msgspec.Struct, frozen=True, forbid_unknown_fields=True, weakref=True):
    """One forward pass of a model for every batch size.

    `ops` holds for batch >= 2; `ops_at_one` serves batch 1 where it is off the line, else it is None. Where the work
    is not affine in batch, `exact` has graphs of single batches, and the line is no more than a guess for the others.
    A model that takes certain batch sizes alone has these in `only`, and no line at all.

    The ops are what `runtime` runs: aten ops in eager, nodes or fused kernels elsewhere. Where those depend on the kind
    of device, as under autocast or in RMSNorm, `target` says which it is ("cpu" or "cuda"). `notes` are
    sentences about what in it is an estimate.
    """

    model: str
    input_kind: str  # "seq", "image", "audio" or "custom"
    input_size: int  # tokens, pixels or samples; 0 for custom inputs
    precision: str  # fp32, tf32, fp16, bf16; amp-fp16 and amp-bf16 under autocast
    memory_format: str  # `CONTIGUOUS` or channels_last
    parameters: int
    parameter_bytes: int
    input_bytes: Affine
    ops: tuple[Op, ...]
    ops_at_one: tuple[Op, ...] | None = None
    stack: dict[str, str] = {}
    runtime: str = "eager"
    target: str = ""
    notes: tuple[str, ...] = ()
    only: tuple[int, ...] = ()  # the batch sizes that it holds for; empty where it holds for all
    # Graphs of single batch sizes, where the line does not serve them; files have them under their first name.
    exact: dict[int, ModelGraph] = msgspec.field(default_factory=dict, name="walked")
    attention: str = ""  # "eager" or "sdpa", where that was asked for

    def __hash__(self) -> int:
        """Of what tells it from others without looking at all of its ops."""
        return hash(
            (self.model, self.input_size, self.precision, self.runtime, self.parameters, self.ops[:1], self.only)
        )

    def __repr__(self) -> str:
        """One line; the ops themselves are in `ops`."""
        size = f", {self.input_kind} {self.input_size}" if self.input_size else ""
        batch = self.only[0] if self.only else 1
        return (
            f"ModelGraph({self.model}{size}, {self.precision}, {self.runtime}: {self.macs(batch) / 1e9:.3f} GMACs and "
            f"{self.launches(batch)} launches at batch {batch})"
        )

    def own(self, batch: int) -> int:
        """The batch itself where it has ops of its own, 0 where the line serves it: a key for what is made of them."""
        return batch if batch in self.exact or (batch == 1 and self.ops_at_one is not None) else 0

    def at(self, batch: int) -> tuple[Op, ...]:
        """The ops that serve a batch size."""
        if batch in self.exact:
            return self.exact[batch].ops
        return self.ops_at_one if batch == 1 and self.ops_at_one is not None else self.ops

    def check_batches(self, batches: Iterable[int]) -> None:
        """Refuse batch sizes of which nothing is known, naming those that were traced."""
        wrong = [int(batch) for batch in batches if self.only and int(batch) not in self.only]
        if wrong:
            taken = ", ".join(map(str, self.only))
            again = "" if self.model.lower().endswith(".onnx") else f"trace the model with batches=[{wrong[0]}], "
            raise UsageError(
                f"what {self.model} does is known at batch {taken} alone, not at batch {wrong[0]}. Ask for "
                f"batch={self.only[0]}, {again}or give a model, or an export of it, with an open first dimension."
            )

    def _counted(self, batch: int) -> tuple[Op, ...]:
        if isinstance(batch, bool) or not isinstance(batch, Integral) or batch < 1:
            raise UsageError(f"Batch {batch!r} is not a whole number of at least 1.")
        self.check_batches([batch])
        return self.at(batch)

    def macs(self, batch: int = 1) -> int:
        """Multiply-adds of one forward pass."""
        return sum([op.macs[0] + batch * op.macs[1] for op in self._counted(batch)])

    def launches(self, batch: int = 1) -> int:
        """Device launches of one forward pass."""
        return sum([op.launches for op in self._counted(batch)])

    def syncs(self, batch: int = 1) -> int:
        """Host synchronisations inside one forward pass."""
        return sum(op.syncs for op in self._counted(batch))

    def bytes(self, batch: int = 1) -> int:
        """Bytes read and written by one forward pass, weights included."""
        return sum(total_bytes(op, batch) for op in self._counted(batch))

    def peak_bytes(self, batch: int = 1) -> int:
        """Parameters and the most activations alive at once."""
        ops = self._counted(batch)
        live = max((op.live_bytes.at(batch) for op in ops), default=0)
        return self.parameter_bytes + max(live, self.input_bytes.at(batch))

    def coverage(self, batch: int = 1) -> Coverage:
        """Share of launches and bytes that cost formulas cover."""
        ops = [op for op in self._counted(batch) if op.launches]
        unknown = [op for op in ops if op.estimated]
        return Coverage(
            launches=_share_left(sum(o.launches for o in unknown), sum(o.launches for o in ops)),
            bytes=_share_left(*(sum(total_bytes(op, batch) for op in some) for some in (unknown, ops))),
            estimated_ops=dict(Counter(op.name for op in unknown)),
        )

    def to_frame(self, batch: int | Sequence[int] = 1) -> pd.DataFrame:
        """One row per op: its name, module, family, class, dtype, work, bytes, launches and synchronisations.

        Of several batch sizes, one table below the other.
        """
        import pandas as pd

        return pd.DataFrame(
            {
                "op": op.name,
                "module": op.module,
                "family": op.family,
                "host_class": op.host_class,
                "dtype": op.dtype,
                "batch": size,
                "macs": op.macs.at(size),
                "weight_bytes": op.weight_bytes.at(size),
                "read_bytes": op.read_bytes.at(size),
                "write_bytes": op.write_bytes.at(size),
                "launches": op.launches,
                "syncs": op.syncs,
                "estimated": op.estimated,
            }
            for size in np.atleast_1d(batch).tolist()
            for op in self._counted(size)
        )

    def to_json(self) -> str:
        """JSON text that `from_json` reads back."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str | builtins.bytes) -> ModelGraph:
        """Read what `to_json` wrote."""
        try:
            return msgspec.json.decode(text, type=cls)
        except ValueError as error:
            raise UsageError(f"this is no graph that this latpred wrote: {error}. Trace the model again.") from None


host_class_of: Callable[[Op], str] = attrgetter("host_class")


def alone_at(graphs: dict[int, ModelGraph]) -> ModelGraph:
    """The graph of a model of which nothing is known but what it does at some batches."""
    taken, exact = tuple(sorted(graphs)), graphs if len(graphs) > 1 else {}
    note = f"traced at batch {written(taken)} alone: nothing is known of any other batch"
    first = graphs[taken[0]]
    return msgspec.structs.replace(first, only=taken, exact=exact, notes=(*first.notes, note))


def no_line(seen: str) -> str:
    """The note on a graph that is exact at some batches alone."""
    return f"the model's work is not affine in batch: traced at {seen}; what is said of any other batch is a guess"


def written(batches: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(batches)))


def rewritten(graph: ModelGraph, rewrite: Callable[[tuple[Op, ...]], Iterable[Op]], **changes: Any) -> ModelGraph:
    """The graph with other ops in place of its own, also at the batch sizes that have ops of their own."""
    at_one = None if graph.ops_at_one is None else tuple(rewrite(graph.ops_at_one))
    exact = {batch: rewritten(alone, rewrite, **changes) for batch, alone in graph.exact.items()}
    return msgspec.structs.replace(graph, ops=tuple(rewrite(graph.ops)), ops_at_one=at_one, exact=exact, **changes)


class PerOp(Generic[T]):
    """What a function makes of each op; the same objects for ops that graphs share, as those of a supernet do."""

    def __init__(self, make: Callable[[Op], T]) -> None:
        self._make = make
        # By identity, with the ops themselves, so that nothing else gets their identities; threads see both or neither.
        self._kept: tuple[dict[int, T], list[Op]] = {}, []

    def __call__(self, ops: Sequence[Op]) -> list[T]:
        by_op, known = self._kept
        if len(known) > KEPT_OPS:
            by_op, known = self._kept = {}, []
        try:
            return [by_op[id(op)] for op in ops]  # a search prices the same ops again and again
        except KeyError:
            return [by_op.get(id(op)) or self._made(op, by_op, known) for op in ops]

    def _made(self, op: Op, by_op: dict[int, T], known: list[Op]) -> T:
        made = self._make(op)
        known.append(op)
        return by_op.setdefault(id(op), made)


def op_by_op(rewrite: Callable[[Op], Iterable[Op]]) -> Callable[[Sequence[Op]], Iterator[Op]]:
    """The same rewriting for many ops; each is rewritten once."""
    parts = PerOp(lambda op: tuple(rewrite(op)))
    return lambda ops: chain.from_iterable(parts(ops))


class OpFacts:
    """What is known of ops by themselves, as rows of an array; each is looked at once, and kept as its row's bytes.

    Fields have names and codes of `struct`, as "q" and "2d": whole numbers and floats of 8 bytes.
    """

    def __init__(self, fields: dict[str, str], look: Callable[[Op], tuple[float, ...]]) -> None:
        self._dtype, pack = np.dtype(list(fields.items())), Struct("".join(fields.values())).pack
        self._rows = PerOp(lambda op: pack(*look(op)))

    def __call__(self, ops: Sequence[Op]) -> NDArray[np.void]:
        return np.frombuffer(b"".join(self._rows(ops)), self._dtype)


def all_ops(graph: ModelGraph) -> tuple[Op, ...]:
    """The ops of a graph, those of single batch sizes among them."""
    alone = (op for one in graph.exact.values() for op in all_ops(one))
    return (*graph.ops, *(graph.ops_at_one or ()), *alone)


def combined(ops: Sequence[Op], count: Callable[..., Affine], size: Callable[..., Affine] | None = None) -> Op:
    """The first of some alike ops, its counts made of the same counts of all; `size` makes the dimensions if given."""
    first, size = ops[0], size or count
    again = [op.reread_after for op in ops]
    return msgspec.structs.replace(
        first,
        dims={name: size(*(op.dims[name] for op in ops)) for name in first.dims},
        reread_after=None if None in again else count(*again),
        **{name: count(*(getattr(op, name) for op in ops)) for name in COUNTS},
    )


def total_bytes(op: Op, batch: int) -> int:
    """Bytes one op moves: weights, activations read and activations written."""
    return op.weight_bytes.at(batch) + op.read_bytes.at(batch) + op.write_bytes.at(batch)


def grows(graph: ModelGraph) -> bool:
    """Whether there is more work in a larger batch; not where the inputs are the same whatever the batch."""
    return any(getattr(op, name).per_sample for op in graph.ops for name in COUNTS)


def _share_left(part: int, whole: int) -> float:
    return 1.0 if whole == 0 else 1.0 - part / whole


Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Schedule:
    """n host steps launching m kernels, in order."""

    runtime: str  # that lowered it
    ops: tuple[Op, ...]  # the graph's
    # Of each of the n steps: dispatch class, `Calls` before it (shape (n, 3)), host synchronisations.
    host_class: tuple[str, ...]
    calls: Ints
    sync: Ints
    # Of each of the m kernels: the step that launches it, never decreasing; the op, by its index, whose work it does;
    # its share of that work (1.0 unless an op takes several kernels).
    kernel_step: Ints
    kernel_op: Ints
    kernel_share: NDArray[np.float64]

    @property
    def kernel_family(self) -> tuple[str, ...]:
        """The family of each kernel."""
        return tuple([self.ops[index].family for index in self.kernel_op.tolist()])


@lru_cache(maxsize=64)
def numbered(names: tuple[str, ...]) -> tuple[tuple[str, ...], Ints]:
    """Distinct names in order of appearance, and which of them each is; who prices a schedule asks several times.

    >>> numbered(("view", "gemm", "view"))
    (('view', 'gemm'), array([0, 1, 0]))
    """
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return tuple(numbers), np.fromiter(map(numbers.__getitem__, names), np.int64, len(names))
