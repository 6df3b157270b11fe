"""What every runtime offers: how it turns a graph into a schedule, and how to build what it really runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec

from latpred.errors import RuntimeRefusalError, chain_of
from latpred.graph.graph import COUNTS, ZERO, Affine, ModelGraph, Op, Schedule, combined, total_bytes
from latpred.storage import IdentityCache

if TYPE_CHECKING:
    from latpred.runtimes.source import Source

_NO_MEMORY = re.compile(
    "out of memory|can't allocate memory|not enough memory|STATUS_ALLOC_FAILED"  # PyTorch, by kind of device
    "|bad_alloc|Failed to allocate memory|BFCArena"  # onnxruntime
)
REPLAY = "replay"  # host class of the step that launches a captured graph
MOST_REAL = 64  # the largest batch that a runtime's tools run a model at
BATCHES = (1, 2, 3)  # 2 and 3 give a line; batch 1 may have ops of its own, as a reshape there needs no copy


@runtime_checkable
class Runtime(Protocol):
    """A way to run a model.

    Packages add one with an entry point in the group "latpred.runtimes" whose object is a Runtime, or a class or
    function that gives one when called without arguments. One whose steps are not aten ops offers what `RuntimeTracer`
    asks for as well.

    Attributes
    ----------
    name : str
        What `predict(..., runtime=name)` calls it, and the key of its dispatch costs in a profile.
    needs : str, optional
        The only kind of device it runs on, "cpu" or "cuda"; runtimes without this attribute run on any.
    own_stream : bool, optional
        Its kernels run in another stream than PyTorch's, whose events see nothing of them; on a CPU, in other threads.
    eager_kernels : bool, optional
        On CPUs its kernels are eager's, called in the same layouts: calibrating it looks for the host's costs alone.
    host_classes : tuple of str, optional
        Classes of steps that a model may take even where no network that it was calibrated on does.
    waits : bool, optional
        On CUDA a call of what it builds may return only when the device is done.
    autocast : bool, optional
        Whether it runs models under torch.autocast; without it, a runtime that has graphs of its own does not.
    predicted_only : bool, optional
        It is predicted for GPUs that were not measured, and neither calibrated nor measured.
    available_on : callable, optional
        As `available`, for a kind of device ("cpu" or "cuda") that not every installation serves.
    """

    name: str

    def lower(self, graph: ModelGraph, batch: int) -> Schedule:
        """The steps and kernels of one forward pass.

        Return the same object for the same graph wherever the schedule does not change with batch: the predictor then
        prices a whole curve at once. A model that the runtime cannot run is a RuntimeRefusalError that names the op.
        """
        ...

    def available(self) -> str | None:
        """None when models can be built here, else what is missing and how to get it."""
        ...

    def build(self, model: Any, inputs: Any) -> Callable[[], Any]:
        """The real thing: a call that runs one forward pass on inputs. For measuring, never for predicting.

        The model is on its device, in eval mode; inputs are a tuple of positional or a dict of keyword arguments. What
        takes long (an export, a compilation) is kept for as long as the model lives.
        """
        ...


class RuntimeTracer(Protocol):
    """A runtime that has its own graph of a model, found with its own tools; its `traced_by` says that it is one.

    Attributes
    ----------
    traced_by : str
        Name under which its graphs are kept: its own, or that of the runtime whose graphs it shares.
    options : str
        Whatever else its graphs depend on (versions, settings); part of the key they are kept by.
    trace_at : callable, optional
        As `trace`, with a batch size as a third argument: a graph for that batch alone, where that takes less time.
    """

    name: str
    traced_by: str
    options: str

    def trace(self, source: Source, target: str) -> ModelGraph:
        """What the runtime runs for a model on a kind of device ("cpu" or "cuda"), every op's work affine in batch.

        Nothing may be asked of a device of that kind. A model that the runtime's tools refuse is a RuntimeRefusalError
        that names the op; `estimate` is then used in its place.
        """
        ...

    def estimate(self, graph: ModelGraph, target: str) -> ModelGraph:
        """The best guess from an eager graph alone, with a note that says so."""
        ...


def graph_in(
    runtime: str,
    target: str,
    graph: ModelGraph,
    ops: Iterable[Op],
    ops_at_one: Iterable[Op] | None = None,
    *notes: str,
) -> ModelGraph:
    """The graph of a model with what a runtime runs for it on a kind of device in place of the eager ops."""
    return msgspec.structs.replace(
        graph,
        ops=tuple(ops),
        ops_at_one=None if ops_at_one is None else tuple(ops_at_one),
        runtime=runtime,
        target=target,
        notes=(*graph.notes, *filter(None, notes)),
    )


def built_of(cache: IdentityCache[Any, dict[str | None, dict[Any, Any]]], model: Any) -> dict[Any, Any]:
    """What a cache has of a model as it is now: nothing where it was changed since, or where nobody can tell."""
    from latpred.sandbox.fingerprint import fingerprint  # imports torch

    state, kept = fingerprint(model), cache.get(model, lambda _: {})
    if state is None or state not in kept:
        kept.clear()
    return kept.setdefault(state, {})


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: PyTorch and onnxruntime say so in errors of several classes, and wrap them in others."""
    import torch

    return any(
        isinstance(one, (MemoryError, torch.OutOfMemoryError)) or _NO_MEMORY.search(str(one)) for one in chain_of(error)
    )


def op_key(op: Op) -> tuple[object, ...]:
    """What two executed ops must share to be the same op at two batch sizes."""
    return (op.name, op.host_class, op.family, op.dtype, tuple(op.dims), op.launches, op.syncs)


def _first_difference(ops: Sequence[Op], others: Sequence[Op]) -> str | None:
    """Name of the first op that is not the same in both, None where all are."""
    for op, other in zip_longest(ops, others):
        if op is None or other is None or op_key(op) != op_key(other):
            return str((op or other).name)
    return None


def op_through(two: Op, three: Op) -> Op:
    """The op of every batch size, from the same op as it was executed at 2 and at 3."""
    return combined((two, three), lambda a, b: Affine.through((2, a.constant), (3, b.constant)))


def ops_of(
    runtime: str, one: Sequence[Op], two: Sequence[Op], three: Sequence[Op]
) -> tuple[tuple[Op, ...], tuple[Op, ...] | None]:
    """The ops of every batch size, and those of batch 1 where they are others, from what was executed at 1, 2 and 3."""
    different = _first_difference(two, three)
    if different is not None:
        raise RuntimeRefusalError(f"{runtime} runs other ops at batch 2 and 3, first at {different}")
    ops = tuple(op_through(*pair) for pair in zip(two, three, strict=True))
    return ops, unless_affine(one, ops)


def rereading(ops: Sequence[Op], read: Sequence[Hashable]) -> tuple[Op, ...]:
    """Ops executed at one batch size; those that read parameters once more say what was touched since.

    `read` tells which parameters each op reads; None for few.
    """
    from latpred.tracing.trace_pass import touched_since  # imports torch

    again = touched_since((total_bytes(op, 1) for op in ops), read)
    return tuple(
        msgspec.structs.replace(op, reread_after=Affine(again[index])) if index in again else op
        for index, op in enumerate(ops)
    )


def unless_affine(one: Sequence[Op], ops: Sequence[Op]) -> tuple[Op, ...] | None:
    """What was executed at batch 1; None where `ops`, which hold for larger batches, give that as well."""
    affine = _first_difference(one, ops) is None and all(map(_gives, ops, one))
    return None if affine else tuple(one)


def _gives(op: Op, at_one: Op) -> bool:
    """Whether an op's counts at batch 1 are those that were seen.

    "operands" tells nothing: at batch 1 a tensor that is broadcast over the batch is as large as the result.
    """
    if op.dims.get("operands", ZERO).per_sample:
        return False
    counts = ((getattr(op, name), getattr(at_one, name)) for name in COUNTS)
    dims = ((size, at_one.dims[name]) for name, size in op.dims.items() if name != "operands")
    return all(count.at(1) == seen.constant for count, seen in (*counts, *dims))
