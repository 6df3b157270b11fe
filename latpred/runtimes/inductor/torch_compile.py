"""torch.compile: one step per library call or generated kernel, after the guards of each compiled graph.

What the steps are is found by `front_end` with torch's own tools on the CPU, and nothing is compiled before a model is
built to be measured. Shapes are static, as `torch.compile(dynamic=False)` takes them: a batch size has its own kernels.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from difflib import SequenceMatcher
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import torch

from latpred.errors import MissingPackageError
from latpred.graph.features import LOOP_COUNTS, WORK
from latpred.graph.graph import NO_PYTHON, ZERO, Affine, ModelGraph, Op, Schedule, rewritten
from latpred.graph.rewrites import itemsize
from latpred.ops.families import root
from latpred.query import AMP
from latpred.runtimes import Eager
from latpred.runtimes.base import built_of, graph_in, op_key, op_through, unless_affine
from latpred.runtimes.cuda_graphs import NO_CUDA, demand_cuda, refusing, replays
from latpred.runtimes.inductor.compiled_ops import EAGER_CLASS, EXTERN_CLASS, GENERATED, GENERATED_CLASS, guards
from latpred.runtimes.source import Source, device_of, weight_sharing_copy
from latpred.sandbox.own_thread import silenced
from latpred.storage import IdentityCache
from latpred.tracing.autocast import under_autocast

VERSION = "11"  # of what is traced; graphs of another one are made again
MOST_SHAPES = 256  # batch sizes and input sizes that one model may be compiled for
NOTE = (
    "What torch.compile runs is estimated from the eager graph: "
    "one generated kernel for all ops between two library calls."
)
# Variables of the environment that Dynamo and Inductor read; where folders are, torch says there by itself.
_VARIABLES = ("TORCHDYNAMO_", "TORCH_DYNAMO_", "TORCH_COMPILE_", "TORCHINDUCTOR_")
CASTS = "autocast's rules are those of a CPU: on a GPU it runs norms and softmax in fp32, which the kernels then write"
_GROWING = frozenset(LOOP_COUNTS["generated"])  # dimensions that say what the loops of a generated kernel do
_LIBRARY = frozenset(
    {
        *("gemm", "bmm", "attention", "conv", "conv_grouped", "conv_depthwise", "conv_transpose"),
        *("fft", "rnn", "sort", "other"),
    }
)
_REDUCING = frozenset({"norm", "batch_norm", "softmax", "reduction"})


class Compile(Eager):
    """torch.compile in its default mode, with static shapes."""

    name = "compile"
    traced_by = "compile"
    autocast = True
    mode: str | None = None
    warm_ups = 2

    def __init__(self) -> None:
        super().__init__()
        self._compiled: IdentityCache[Any, Any] = IdentityCache()

    @property
    def options(self) -> str:
        """The version, and what else decides: threads, determinism, backends of ops, settings of the compiler."""
        attention: Any = torch.backends.cuda
        onednn: Any = torch.backends.mkldnn
        decisive = (
            torch.get_num_threads() > 1,
            torch.are_deterministic_algorithms_enabled(),
            *(attention.flash_sdp_enabled(), attention.mem_efficient_sdp_enabled(), attention.math_sdp_enabled()),
            *(onednn.enabled, onednn.is_available()),
        )
        return f"{VERSION}; {decisive}; {_settings()}"

    def trace(self, source: Source, target: str) -> ModelGraph:
        """The calls that Inductor's scheduler decides on, counted at batches 1, 2 and 3."""
        two, three, one = _executed(source, target, (2, 3, 1))
        ops, note = ops_through(two, three)
        return _graph_of(source, target, ops, unless_affine(one, ops), note)

    def trace_at(self, source: Source, target: str, batch: int) -> ModelGraph:
        """As `trace`, for one batch size alone: a third of the time."""
        (ops,) = _executed(source, target, (batch,))
        return _graph_of(source, target, ops)

    def estimate(self, graph: ModelGraph, target: str) -> ModelGraph:
        """Library calls as in eager, and one generated kernel between two of them."""
        return rewritten(graph, fused, runtime=self.traced_by, target=target, notes=(*graph.notes, NOTE))

    def available(self) -> str | None:
        """None when code can be generated and compiled here, else what is missing."""
        return self.available_on(getattr(self, "needs", "cpu"))

    def available_on(self, target: str) -> str | None:
        """As `available`, for a kind of device: a GPU needs triton besides."""
        from torch._inductor import config

        given = config.cpp.cxx if isinstance(config.cpp.cxx, (tuple, list)) else (config.cpp.cxx,)
        if sys.platform == "win32":  # where Inductor asks for this compiler, whatever its settings say
            given = (os.environ.get("CXX", "cl"),)
        if not any(name and shutil.which(name) for name in given):
            return (
                "torch.compile needs a C++ compiler and there is none: install g++ (apt install g++, dnf install "
                "gcc-c++, xcode-select --install; on Windows cl, of the Visual Studio Build Tools), or name one in the "
                "environment variable CXX"
            )
        headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
        if not os.path.exists(headers):  # Path.exists raises where the folder cannot be looked into
            return f"torch.compile needs Python's headers and {headers} is missing: install python3-dev"
        if target == "cuda" and find_spec("triton") is None:
            return "torch.compile needs triton for a CUDA device and it is not installed; run 'pip install triton'"
        return None

    def build(self, model: Any, inputs: Any) -> Callable[[], Any]:
        """A call of the compiled model in inference mode, compiled for these inputs."""
        missing = self.available_on(device_of(model, inputs).type)
        if missing:
            raise MissingPackageError(missing)
        with silenced():  # Inductor advises TF32 on GPUs that have it: the precision is what was asked for
            run = super().build(self._compiled_form(model, inputs), inputs)
            for _ in range(self.warm_ups):
                run()
        return run

    def _compiled_form(self, model: Any, inputs: Any) -> Any:
        """What a model is compiled to, once while it is as it is: a copy, since what is kept may not hold the model."""
        from latpred.runtimes.inductor import front_end  # imports half of the compiler

        kept, device = built_of(self._compiled, model), device_of(model, inputs)
        if device not in kept:  # moving a model moves weights that the copy shares, and buffers of its own
            kept[device] = front_end.compiled(weight_sharing_copy(model), MOST_SHAPES, mode=self.mode)
        return kept[device]


def _settings() -> list[str]:
    """What Dynamo and Inductor are set to: by variables, which they read where they are imported, and by programs."""
    read = (name for name in sorted(os.environ) if name.startswith(_VARIABLES) and not name.endswith("_DIR"))
    said = [f"{name}={os.environ[name]}" for name in read]
    for name in ("torch._dynamo.config", "torch._inductor.config"):
        config: Any = sys.modules.get(name)  # nobody has changed what nobody has imported
        for key, value in {} if config is None else config.get_config_copy().items():
            if key not in config._compile_ignored_keys and value != config._config[key].default:
                said.append(f"{key}={value}")
    return said


def _executed(source: Source, target: str, batches: Sequence[int]) -> list[tuple[Op, ...]]:
    """What a forward pass at each batch size runs, under autocast where that is asked for."""
    from latpred.runtimes.inductor import front_end

    front_end.supported()
    model = under_autocast(source.model(), source.graph.precision, "cpu")
    return [front_end.forward(weight_sharing_copy(model), source.inputs(batch), target) for batch in batches]


def _graph_of(
    source: Source, target: str, ops: Sequence[Op], at_one: Sequence[Op] | None = None, note: str = ""
) -> ModelGraph:
    """The graph, with a word where its casts are those of another kind of device."""
    casts = CASTS if source.graph.precision in AMP and target != "cpu" else ""
    return graph_in(Compile.traced_by, target, source.graph, ops, at_one, note, casts)


class CompileReduceOverhead(Compile):
    """torch.compile whose kernels are captured in CUDA graphs, one for each compiled graph."""

    name = "compile-reduce-overhead"
    needs = "cuda"
    mode = "reduce-overhead"
    warm_ups = 4  # run, run into the graphs' memory pool, capture, replay

    def schedule(self, graph: ModelGraph, ops: tuple[Op, ...]) -> Schedule:
        """Guards of each graph, then one step that launches all of its kernels."""
        return replays(self.name, ops, [op.host_class.startswith("kernel.") for op in ops])

    def available_on(self, target: str) -> str | None:
        return super().available_on(target) if torch.cuda.is_available() else NO_CUDA

    def build(self, model: Any, inputs: Any) -> Callable[[], Any]:
        """As `Compile` does; a model whose kernels cannot be captured is refused."""
        device = device_of(model, inputs)
        demand_cuda(device)
        with refusing(device, partial(_pool_of_graphs, device)):
            return super().build(model, inputs)


def _pool_of_graphs(device: torch.device) -> Any:
    """Where Inductor keeps what its graphs of a device compute."""
    from torch._inductor.cudagraph_trees import get_manager

    manager = get_manager(device.index or 0, create_if_none_exists=False)
    return torch.cuda.graph_pool_handle() if manager is None else manager.cuda_graphs_thread_pool


def ops_through(two: Sequence[Op], three: Sequence[Op]) -> tuple[list[Op], str]:
    """Ops for every batch size from those executed at 2 and 3, and a note where they differ in more than sizes."""
    matcher = SequenceMatcher(None, [op_key(op) for op in two], [op_key(op) for op in three], autojunk=False)
    ops: list[Op] = []
    matched = 0
    for tag, first, last, start, _ in matcher.get_opcodes():
        for offset, op in enumerate(two[first:last]):
            paired = tag == "equal" and _same_layer(op, three[start + offset])
            ops.append(op_through(op, three[start + offset]) if paired else _in_proportion(op))
            matched += paired
    if matched == len(two) == len(three):
        return ops, ""
    at_two, at_three = (sum(op.launches for op in executed) for executed in (two, three))
    return ops, (
        f"Inductor makes {at_two} kernels at batch 2 and {at_three} at batch 3; "
        "those of batch 2 stand for all larger ones."
    )


def _same_layer(two: Op, three: Op) -> bool:
    """Whether an op executed at batch 3 may be the one executed at 2: no count grows faster than the batch."""
    counts = ((getattr(two, name).constant, getattr(three, name).constant) for name in WORK)
    return all(2 * at_three <= 3 * at_two and at_two <= at_three for at_two, at_three in counts)


def _in_proportion(op: Op) -> Op:
    """Work, bytes alive, what loops do and the first dimension grow with batch; weights and other dimensions do not."""

    def grown(count: Affine) -> Affine:
        return Affine(count.constant % 2, count.constant // 2)

    growing = _GROWING | set(list(op.dims)[:1])
    counts = {name: grown(getattr(op, name)) for name in ("macs", "read_bytes", "write_bytes", "live_bytes")}
    dims = {name: grown(size) if name in growing else size for name, size in op.dims.items()}
    return msgspec.structs.replace(op, dims=dims, **counts)


def fused(ops: Sequence[Op]) -> Iterator[Op]:
    """Library calls, one generated kernel for each run of ops between them, and guards ahead of each graph."""
    for waits, group in groupby(ops, lambda op: op.syncs > 0):
        if waits:  # a synchronisation with the host ends a graph, as Dynamo cannot see past it
            for op in group:
                yield msgspec.structs.replace(op, host_class=f"{EAGER_CLASS}.{op.host_class}", **NO_PYTHON)
        else:
            yield from _graph(list(group))


def _graph(ops: Sequence[Op]) -> Iterator[Op]:
    launched = [op for op in ops if op.launches and op.family]
    if not launched:
        return
    weights = sum(1 for op in launched if op.weight_bytes.at(1))
    yield guards(1 + 2 * weights, ops[0].live_bytes)
    for library, run in groupby(launched, lambda op: root(op.family) in _LIBRARY):
        if library:
            for op in run:
                called = f"{EXTERN_CLASS}.{root(op.family)}"
                yield msgspec.structs.replace(op, host_class=called, launches=1, **NO_PYTHON)
        else:
            yield _generated(list(run))


def _generated(run: Sequence[Op]) -> Op:
    """One kernel for a run: it reads what its hungriest op reads, and all of the weights."""
    widest = max(run, key=lambda op: op.read_bytes.at(2) + op.write_bytes.at(2))
    reducing = [op for op in run if root(op.family) in _REDUCING]
    return Op(
        name=GENERATED,
        module=run[0].module,
        host_class=GENERATED_CLASS,
        family="generated.reduction" if reducing else "generated.pointwise",
        dtype=widest.dtype,
        dims={
            "numel": widest.write_bytes // itemsize(widest),
            "cols": reducing[0].dims.get("cols", Affine(1)) if reducing else Affine(1),
            "parts": Affine(len(run)),
        },
        weight_bytes=sum((op.weight_bytes for op in run), ZERO),
        read_bytes=widest.read_bytes,
        write_bytes=run[-1].write_bytes,
        live_bytes=run[-1].live_bytes,
        launches=1,
        estimated=True,
    )
