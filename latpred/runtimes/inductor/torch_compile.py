"""torch.compile: one step per library call or generated kernel, after the guards of each compiled graph.

What the steps are is found by `inductor` with torch's own tools on the CPU, and nothing is compiled before a model is
built to be measured. Shapes are static, as `torch.compile(dynamic=False)` takes them: a batch size has its own kernels.
"""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from difflib import SequenceMatcher
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from latpred.caches import IdentityCache
from latpred.errors import MissingPackageError
from latpred.graph.features import EFFORTS
from latpred.graph.graph import Affine, ModelGraph, Op
from latpred.graph.schedule import Schedule
from latpred.ops.families import root
from latpred.runtimes.base import FIRST_DIM, ExecutedOp, op_through
from latpred.runtimes.cuda_graphs import NO_CUDA, REPLAY
from latpred.runtimes.eager import Eager, one_step_per_op
from latpred.runtimes.inductor.front_end import Compiled, Forward
from latpred.tracing.op_record import OpRecord

if TYPE_CHECKING:
    from latpred.runtimes.source import Source

GUARDS = "guards"  # host class of what a compiled graph costs before its first kernel
EAGER = "eager"  # first part of the host class of an op that runs by itself between compiled graphs
_LIVE = FIRST_DIM - 1  # of the counts: an entry has the bytes of new storage there
_DONE = EFFORTS["generated"]


def calls_of(done: Forward) -> list[ExecutedOp]:
    """The host steps of one forward pass.

    A compiled graph begins with its guards and the checks of its inputs.
    """
    calls: list[ExecutedOp] = []
    carried = 0
    for event in done.events:
        base = live = done.input_bytes + carried
        if isinstance(event, OpRecord):
            calls.append(_call(event, f"{EAGER}.{event.host_class}", live + event.new_bytes))
            continue
        calls.append(_guards(event, live))
        for step in event.steps:
            live += step.entry.new_bytes
            calls.append(_call(step.entry, step.entry.host_class, live))
            live -= step.freed
        carried = max(0, live - base)
    return calls


def ops_through(two: Sequence[ExecutedOp], three: Sequence[ExecutedOp]) -> tuple[tuple[Op, ...], str]:
    """Ops for every batch size from the calls at batch 2 and 3, and a note where they differ in more than sizes."""
    kinds = tuple([call.kind for call in calls] for calls in (two, three))
    ops: list[Op] = []
    unmatched = 0
    for tag, first, last, start, _ in SequenceMatcher(None, kinds[0], kinds[1], autojunk=False).get_opcodes():
        for offset, call in enumerate(two[first:last]):
            if tag == "equal":
                ops.append(op_through(call, three[start + offset]))
            else:
                ops.append(_in_proportion(call))
                unmatched += 1
    if not unmatched and len(two) == len(three):
        return tuple(ops), ""
    counts = [sum(call.launches for call in calls) for calls in (two, three)]
    return tuple(ops), (
        f"Inductor makes {counts[0]} kernels at batch 2 and {counts[1]} at batch 3; "
        "those of batch 2 stand for all larger ones."
    )


def _call(entry: OpRecord, host_class: str, live: int) -> ExecutedOp:
    return ExecutedOp(
        name=entry.name,
        host_class=host_class,
        family=entry.family,
        dtype=entry.dtype,
        dims=tuple(entry.dims),
        counts=(*entry.counts[:_LIVE], live, *entry.counts[FIRST_DIM:]),
        launches=entry.launches if entry.family else 0,
        syncs=entry.syncs,
        estimated=entry.estimated,
    )


def _guards(graph: Compiled, live: int) -> ExecutedOp:
    """Guards and the wrapper go through a graph's inputs one by one, parameters included."""
    counts = (*(0,) * _LIVE, live)
    return ExecutedOp("inductor::guards", GUARDS, "", "", (), counts, 0, 0, False, python_calls=graph.inputs)


def _in_proportion(call: ExecutedOp) -> Op:
    """Work, bytes alive, what loops do and the first dimension grow with batch; weights and other dimensions do not."""
    grows = {0, 2, 3, _LIVE, FIRST_DIM} | {FIRST_DIM + at for at, name in enumerate(call.dims) if name in _DONE}
    return call.with_lines(
        [Affine(count % 2, count // 2) if at in grows else Affine(count) for at, count in enumerate(call.counts)]
    )


NOTE = (
    "What torch.compile runs is estimated from the eager graph: "
    "one generated kernel for all ops between two library calls."
)
_LIBRARY = frozenset(
    {
        *("gemm", "bmm", "attention", "conv", "conv_grouped", "conv_depthwise", "conv_transpose"),
        *("fft", "rnn", "sort", "other"),
    }
)
_REDUCING = frozenset({"norm", "batch_norm", "softmax", "reduction"})


def estimated(graph: ModelGraph, target: str, walked_by: str) -> ModelGraph:
    """A graph of `walked_by` from an eager one."""
    one = None if graph.ops_at_one is None else fused(graph.ops_at_one)
    return msgspec.structs.replace(
        graph, ops=fused(graph.ops), ops_at_one=one, runtime=walked_by, target=target, notes=(*graph.notes, NOTE)
    )


def fused(ops: Sequence[Op]) -> tuple[Op, ...]:
    """Library calls, one generated kernel for each run of ops between them, and guards ahead of each graph.

    A synchronisation with the host ends a graph, as Dynamo cannot see past it.
    """
    found: list[Op] = []
    graph: list[Op] = []
    for op in ops:
        if not op.syncs:
            graph.append(op)
            continue
        found += _graph(graph)
        found.append(_quiet(op, f"{EAGER}.{op.host_class}"))
        graph = []
    return (*found, *_graph(graph))


def _graph(ops: Sequence[Op]) -> Iterator[Op]:
    launched = [op for op in ops if op.launches and op.family]
    if not launched:
        return
    weights = sum(1 for op in launched if op.weight_bytes.at(1))
    yield Op("inductor::guards", "", GUARDS, "", "", {}, live_bytes=ops[0].live_bytes, python_calls=1 + 2 * weights)
    run: list[Op] = []
    for op in launched:
        if root(op.family) not in _LIBRARY:
            run.append(op)
            continue
        if run:
            yield _one(run)
        run = []
        yield msgspec.structs.replace(_quiet(op, f"kernel.extern.{root(op.family)}"), launches=1)
    if run:
        yield _one(run)


def _quiet(op: Op, host_class: str) -> Op:
    return msgspec.structs.replace(op, host_class=host_class, module_calls=0, python_calls=0)


def _one(run: Sequence[Op]) -> Op:
    """One kernel for a run: it reads what its hungriest op reads, and all of the weights."""
    widest = max(run, key=lambda op: op.read_bytes.at(2) + op.write_bytes.at(2))
    reducing = [op for op in run if root(op.family) in _REDUCING]
    kind = "reduction" if reducing else "pointwise"
    itemsize = 2 if widest.dtype in ("float16", "bfloat16") else 4
    weights = Affine(sum(op.weight_bytes.constant for op in run), sum(op.weight_bytes.per_sample for op in run))
    return Op(
        name="inductor::generated",
        module=run[0].module,
        host_class="kernel.generated",
        family=f"generated.{kind}",
        dtype=widest.dtype,
        dims={
            "numel": Affine(widest.write_bytes.constant // itemsize, widest.write_bytes.per_sample // itemsize),
            "cols": reducing[0].dims.get("cols", Affine(1)) if reducing else Affine(1),
            "parts": Affine(len(run)),
        },
        weight_bytes=weights,
        read_bytes=widest.read_bytes,
        write_bytes=run[-1].write_bytes,
        live_bytes=run[-1].live_bytes,
        launches=1,
        estimated=True,
    )


VERSION = "3"  # of what a walk records; graphs of another one are made again
MOST_SHAPES = 256  # batch sizes and input sizes that one model may be compiled for
_KEPT = "_latpred_compiled"


class Compile(Eager):
    """torch.compile in its default mode, with static shapes."""

    name = "compile"
    walked_by = "compile"
    options = VERSION
    mode: str | None = None
    warm_ups = 2

    def walk(self, source: Source, target: str) -> ModelGraph:
        """The calls that Inductor's scheduler decides on, counted at batches 1, 2 and 3.

        Raises
        ------
        RuntimeRefusalError
            When Dynamo or Inductor cannot take the model, or torch is of another version than is known here.
        """
        from latpred.runtimes.base import is_affine, ops_exactly
        from latpred.runtimes.inductor import front_end

        front_end.supported()
        model = source.model()
        two, three, one = (calls_of(front_end.forward(model, source.inputs(batch), target)) for batch in (2, 3, 1))
        ops, note = ops_through(two, three)
        return msgspec.structs.replace(
            source.graph,
            ops=ops,
            ops_at_one=None if is_affine(ops, one) else ops_exactly(one),
            runtime=self.walked_by,
            target=target,
            notes=(*source.graph.notes, note) if note else source.graph.notes,
        )

    def walk_at(self, source: Source, target: str, batch: int) -> ModelGraph:
        """As `walk`, for one batch size alone: a third of the time."""
        from latpred.runtimes.base import ops_exactly
        from latpred.runtimes.inductor import front_end

        front_end.supported()
        ops = ops_exactly(calls_of(front_end.forward(source.model(), source.inputs(batch), target)))
        return msgspec.structs.replace(source.graph, ops=ops, ops_at_one=None, runtime=self.walked_by, target=target)

    def estimate(self, graph: ModelGraph, target: str) -> ModelGraph:
        """Library calls as in eager, and one generated kernel between two of them."""
        return estimated(graph, target, self.walked_by)

    def available(self) -> str | None:
        """None when code can be generated and compiled here, else what is missing."""
        return _no_compiler() or _no_triton()

    def build(self, model: Any, inputs: Any) -> Callable[[], Any]:
        """A call of the compiled model in inference mode, compiled for these inputs.

        The compiled model is kept in an attribute of the model, which copies of it do not take over.

        Raises
        ------
        MissingPackageError
            When nothing can be compiled here.
        """
        missing = self.available()
        if missing:
            raise MissingPackageError(missing)
        run = super().build(self._compiled(model), inputs)
        for _ in range(self.warm_ups):
            run()
        return run

    def _compiled(self, model: Any) -> Any:
        from latpred.runtimes.inductor import front_end  # imports torch

        kept = model.__dict__.setdefault(_KEPT, _Kept())
        if self.name not in kept.by_runtime:
            kept.by_runtime[self.name] = front_end.compiled(model, MOST_SHAPES, mode=self.mode)
        return kept.by_runtime[self.name]


class CompileReduceOverhead(Compile):
    """torch.compile whose kernels are captured in CUDA graphs, one for each compiled graph."""

    name = "compile-reduce-overhead"
    needs = "cuda"
    mode = "reduce-overhead"
    warm_ups = 4  # run, run into the graphs' memory pool, capture, replay

    def __init__(self) -> None:
        super().__init__()
        self._replays: IdentityCache[ModelGraph, dict[int, Schedule]] = IdentityCache()

    def lower(self, graph: ModelGraph, batch: int) -> Schedule:
        """Guards of each graph, then one step that launches all of its kernels."""
        schedules = self._replays.get(graph, lambda _: {})
        own = graph.own(batch)
        if own not in schedules:
            schedules[own] = _replayed(self.name, graph.at(batch))
        return schedules[own]

    def available(self) -> str | None:
        """None where there is a CUDA device that code can be generated for."""
        import torch

        if not torch.cuda.is_available():
            return NO_CUDA
        return super().available()


class _Kept:
    """A model's compiled forms; a copy of the model starts with none."""

    def __init__(self) -> None:
        self.by_runtime: dict[str, Any] = {}

    def __deepcopy__(self, _: Any) -> _Kept:
        return _Kept()

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()


def _replayed(runtime: str, ops: tuple[Op, ...]) -> Schedule:
    """One step for the kernels of each compiled graph; guards, and ops between graphs, are dispatched as ever."""
    each = one_step_per_op(runtime, ops)
    inside = np.array([name.startswith("kernel.") for name in each.host_class], dtype=bool)
    starts = ~inside | np.concatenate(([True], ~inside[:-1]))  # steps that begin something new
    step_of = np.cumsum(starts) - 1
    first = np.flatnonzero(starts)
    classes = [REPLAY if inside[index] else each.host_class[index] for index in first]
    return Schedule(
        runtime=runtime,
        ops=each.ops,
        host_class=tuple(classes),
        module_calls=each.module_calls[first],
        python_calls=each.python_calls[first],
        sync=each.sync[first],
        kernel_step=step_of[each.kernel_step],
        kernel_op=each.kernel_op,
        kernel_share=each.kernel_share,
        kernel_family=each.kernel_family,
    )


def _no_compiler() -> str | None:
    """What C++ code needs that is not here."""
    from torch._inductor import config

    given = config.cpp.cxx if isinstance(config.cpp.cxx, (tuple, list)) else (config.cpp.cxx,)
    if not any(name and shutil.which(name) for name in given):
        return (
            "torch.compile needs a C++ compiler and there is none: install g++ (apt install g++, dnf install gcc-c++, "
            "xcode-select --install), or name one in the environment variable CXX"
        )
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not headers.exists():
        return f"torch.compile needs Python's headers and {headers} is missing: install python3-dev"
    return None


def _no_triton() -> str | None:
    import torch

    if torch.cuda.is_available() and find_spec("triton") is None:
        return "torch.compile needs triton for a CUDA device and it is not installed; run 'pip install triton'"
    return None
