"""torch.compile: one step per library call or generated kernel, after the guards of each compiled graph.

What the steps are is found by `inductor` with torch's own tools on the CPU, and nothing is compiled before a model is
built to be measured. Shapes are static, as `torch.compile(dynamic=False)` takes them: a batch size has its own kernels.
"""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from latpred.errors import MissingPackageError
from latpred.graph import ModelGraph, Op
from latpred.identity import IdentityCache
from latpred.runtimes.compile_estimate import estimated
from latpred.runtimes.cuda_graphs import NO_CUDA
from latpred.runtimes.eager import Eager, one_step_per_op
from latpred.runtimes.replay import REPLAY
from latpred.schedule import Schedule

if TYPE_CHECKING:
    from latpred.runtimes.source import Source

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
        from latpred.runtimes import inductor
        from latpred.runtimes.executed import on_the_line, ops_exactly
        from latpred.runtimes.inductor_lines import calls_of, ops_through

        inductor.supported()
        model = source.model()
        two, three, one = (calls_of(inductor.forward(model, source.inputs(batch), target)) for batch in (2, 3, 1))
        ops, note = ops_through(two, three)
        return msgspec.structs.replace(
            source.graph,
            ops=ops,
            ops_at_one=None if on_the_line(ops, one) else ops_exactly(one),
            runtime=self.walked_by,
            target=target,
            notes=(*source.graph.notes, note) if note else source.graph.notes,
        )

    def walk_at(self, source: Source, target: str, batch: int) -> ModelGraph:
        """As `walk`, for one batch size alone: a third of the time."""
        from latpred.runtimes import inductor
        from latpred.runtimes.executed import ops_exactly
        from latpred.runtimes.inductor_lines import calls_of

        inductor.supported()
        ops = ops_exactly(calls_of(inductor.forward(source.model(), source.inputs(batch), target)))
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
        from latpred.runtimes import apart  # imports torch

        kept = model.__dict__.setdefault(_KEPT, _Kept())
        if self.name not in kept.by_runtime:
            kept.by_runtime[self.name] = apart.compiled(model, MOST_SHAPES, mode=self.mode)
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
