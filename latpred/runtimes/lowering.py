"""The graph that a runtime's predictions start from: the eager trace, or what its own tools make of the model.

A model that those tools refuse, and a graph without a model, get the runtime's estimate, which says so in its notes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from latpred import host, runtimes
from latpred.errors import RuntimeRefusalError, UsageError, chain_of, raise_stop
from latpred.graph.graph import ModelGraph, all_ops
from latpred.graph.rewrites import REWRITTEN
from latpred.query import AMP, ERA
from latpred.runtimes import graph_store, legacy_torch
from latpred.runtimes.base import MOST_REAL, RuntimeTracer, out_of_memory
from latpred.storage import IdentityCache
from latpred.units import format_bytes

if TYPE_CHECKING:
    import torch

    from latpred.runtimes.source import Source

TARGETS = ("cpu", "cuda")
_REFUSED = "an estimate only: "  # how the note starts of a graph whose runtime would not take the model
_UNASKED = "at batch {batch} alone {runtime} was not asked what it makes of the model: estimated from the eager trace"
# How many times a model's weights a runtime's tools hold at once, as measured of BEiT-Large, VGG-19 and ViT-Huge.
_COPIES = {"torchscript": 2, "onnxruntime": 6, "compile": 2}
_DRAWS = re.compile(
    r"aten::(rand|normal|bernoulli|multinomial|poisson|exponential|uniform|geometric|cauchy|log_normal|rrelu|\w*dropout)"
)
_estimates: IdentityCache[ModelGraph, dict[tuple[str, str], ModelGraph]] = IdentityCache()


def is_onnx_file(model: object) -> bool:
    """Whether a model is named by the path of an .onnx file."""
    return isinstance(model, str | os.PathLike) and str(os.fspath(model)).lower().endswith(".onnx")


def traced_by(runtime: str, era: str = "") -> str:
    """Name of the runtime whose graphs a runtime lowers; eager maybe in an era, or within `legacy_torch.traced_for`."""
    tracer = _tracer(runtime)
    if tracer is None or legacy_torch.rewrites(era or ERA.get(), runtime):
        return "eager"
    return tracer.traced_by


def _tracer(runtime: str) -> RuntimeTracer | None:
    """A runtime that has graphs of its own."""
    named: Any = runtimes.get(runtime)
    return named if hasattr(named, "traced_by") else None


def target_of(device_kind: str) -> str:
    """Which kind of device a runtime's tools have to think of: "cuda" for everything that is asynchronous."""
    return "cpu" if device_kind == "cpu" else "cuda"


def unsuited(runtime: str, target: str) -> str | None:
    """None where a runtime can run on a kind of device, else why it cannot and what to ask for instead."""
    needs = getattr(runtimes.get(runtime), "needs", target)
    if needs == target:
        return None
    name = needs.upper()
    return (
        f"{runtime} needs a {name} device; ask for --device simulated or the profile of a {name} device "
        f"(latpred profiles list), or for another runtime, as runtime='eager'"
    )


def lacking(runtime: str, target: str) -> str | None:
    """None when a runtime can build models on a kind of device that is here, else what is missing and how to get it."""
    asked: Any = runtimes.get(runtime)
    missing: str | None = asked.available_on(target) if hasattr(asked, "available_on") else asked.available()
    return missing


def demand_suited(runtime: str, target: str) -> None:
    """Refuse a runtime that nobody knows, or that cannot run on a kind of device."""
    reason = unsuited(runtime, target)
    if reason is not None:
        raise UsageError(f"{reason}.")


def demand_autocast(runtime: str, precision: str | None) -> None:
    """Refuse autocast in a runtime whose tools take a model apart as it is written."""
    if precision in AMP and not getattr(runtimes.get(runtime), "autocast", _tracer(runtime) is None):
        raise RuntimeRefusalError(
            f"{runtime} does not run models under autocast; ask for precision={AMP[precision]!r}, or for eager, "
            "cuda-graphs or compile."
        )


def trace_for_runtime(
    model: torch.nn.Module | str | os.PathLike[str],
    inputs: Any = None,
    *,
    runtime: str = "eager",
    target: str = "cpu",
    **options: Any,
) -> ModelGraph:
    """What a runtime runs for a model on a kind of device, "cpu" or "cuda".

    The other arguments and the errors are those of `latpred.trace`; for a runtime that runs ONNX, `model` may be the
    path of an .onnx file.

    >>> import torch
    >>> trace_for_runtime(torch.nn.Linear(64, 10), torch.zeros(1, 64)).launches()
    1
    """
    from latpred.sandbox.own_thread import without_modes

    if isinstance(model, os.PathLike):
        model = os.fspath(model)
    with without_modes():
        demand_suited(runtime, target)  # said before anything takes time
        demand_autocast(runtime, options.get("precision"))
        if isinstance(model, str) and is_onnx_file(model):
            from latpred.runtimes.onnx import onnx_file

            graph = onnx_file.trace_file(model, inputs, runtime, target, **options)
        elif traced_by(runtime) == "eager":
            from latpred.tracing import trace

            return trace(model, inputs, target=target, **options)
        else:
            from latpred.runtimes.source import source_of

            graph = of_source(source_of(model, inputs, target=target, **options), runtime, target)
        if options.get("strict"):
            from latpred.tracing.op_record import demand_known

            demand_known(graph)
        return graph


def of_source(source: Source, runtime: str, target: str, batch: int | None = None) -> ModelGraph:
    """As `trace_for_runtime`, for a source; models of one structure and one code are taken apart once.

    Where `batch` is the only batch size that will be asked for, a runtime with a `trace_at` need not find out about
    others.
    """
    from latpred.sandbox.own_thread import hooked_everywhere

    demand_suited(runtime, target)
    tracer, eager = _tracer(runtime), source.graph
    demand_autocast(runtime, eager.precision)
    if tracer is None:
        return eager
    if REWRITTEN in eager.notes:  # the runtime's own tools would find the fused calls
        return tracer.estimate(eager, target)
    if eager.exact:
        return _at_each(source, runtime, target)
    trace_at = getattr(tracer, "trace_at", None)
    if eager.only:
        (batch,) = eager.only
        if trace_at is None or batch > MOST_REAL:
            return _guess(tracer, eager, target, _UNASKED.format(batch=batch, runtime=runtime))
    options, trace = tracer.options, partial(tracer.trace, source, target)
    if batch is not None and trace_at is not None:
        options, trace = f"{options}@{batch}", partial(trace_at, source, target, batch)
    try:
        make = partial(_traced_or_refused, tracer, source, target, trace)
        code = None if hooked_everywhere() else source.code  # tools run such hooks, or refuse the model for them
        return graph_store.kept(eager, tracer.traced_by, target, options, make, code)
    except RuntimeRefusalError as error:
        return _guess(tracer, eager, target, f"{_REFUSED}{error}")
    except Exception as error:
        if not out_of_memory(error):
            raise
        said = f"memory ran out while {tracer.traced_by}'s tools were at the model"
        return _guess(tracer, eager, target, f"{_REFUSED}{said}")


def _traced_or_refused(
    tracer: RuntimeTracer, source: Source, target: str, trace: Callable[[], ModelGraph]
) -> ModelGraph:
    """What a runtime's tools make of a model, or its estimate where they will never take the model: what is kept."""
    from latpred.sandbox.own_thread import TOOLS, no_autocast, without_modes
    from latpred.sandbox.untouched import put_back

    eager = source.graph
    try:
        _demand_casts(tracer.traced_by, eager, target)
        demand_memory(tracer.traced_by, eager)
        with without_modes(), TOOLS.held(), put_back(source.roots), no_autocast(), _undrawn(eager):
            return trace()
    except RuntimeRefusalError as error:
        raise_stop(error)
        if _is_temporary(error):
            raise
        return _guess(tracer, eager, target, f"{_REFUSED}{error}")


def _undrawn(graph: ModelGraph) -> AbstractContextManager[None]:
    """Where tools run a model that draws from PyTorch's generator, which then goes on as if it had not.

    Of any other model nothing is put back: other threads may draw meanwhile.
    """
    import torch

    draws = any(op.launches and _DRAWS.match(op.name) for op in all_ops(graph))
    return torch.random.fork_rng(devices=[], enabled=draws)


def _guess(tracer: RuntimeTracer, eager: ModelGraph, target: str, reason: str) -> ModelGraph:
    """A runtime's estimate, which says why it is one."""
    guessed = tracer.estimate(eager, target)
    return msgspec.structs.replace(guessed, notes=(reason, *guessed.notes))


def _at_each(source: Source, runtime: str, target: str) -> ModelGraph:
    """The graphs of the batches at which a model was traced eagerly whose work is not affine in batch."""
    eager = source.graph
    noted = {batch: msgspec.structs.replace(graph, notes=eager.notes) for batch, graph in eager.exact.items()}
    graphs = {batch: of_source(replace(source, graph=graph), runtime, target) for batch, graph in noted.items()}
    notes = dict.fromkeys(note for graph in graphs.values() for note in graph.notes)
    first = graphs[min(graphs)]
    return msgspec.structs.replace(first, only=eager.only, exact=graphs, notes=tuple(notes))


def fitting(graph: ModelGraph, runtime: str, target: str) -> ModelGraph:
    """The graph that a runtime can lower: this one, or an estimate from it where it is an eager trace.

    One that was traced for another runtime or kind of device is refused.
    """
    demand_suited(runtime, target)
    wanted = traced_by(runtime)
    if graph.target not in ("", target):
        raise UsageError(
            f"This graph is what {graph.runtime} runs on a {graph.target} device; trace the model for {target}: "
            f"target={target!r}."
        )
    if graph.runtime == wanted:
        return graph
    if graph.runtime != "eager":
        raise UsageError(
            f"This graph is what {graph.runtime} runs, which says nothing of {runtime}. Pass the model itself, "
            "or its eager trace (latpred.trace)."
        )
    estimates = _estimates.get(graph, lambda _: {})
    if (wanted, target) not in estimates:
        tracer = _tracer(runtime)
        assert tracer is not None
        demand_autocast(runtime, graph.precision)
        from latpred.tracing.tracer import as_written

        estimates[wanted, target] = tracer.estimate(as_written(graph), target)
    return estimates[wanted, target]


def refusal(graph: ModelGraph) -> str | None:
    """Why the graph's runtime would not take the model, which was then estimated; None where it took it."""
    return next((note.removeprefix(_REFUSED) for note in graph.notes if note.startswith(_REFUSED)), None)


def _demand_casts(runtime: str, graph: ModelGraph, target: str) -> None:
    """Refuse a model whose own casts are those of CUDA where a runtime's tools run it: they run it on the CPU."""
    from latpred.tracing.autocast import OWN

    if runtime in _COPIES and target == "cuda" and OWN.format(target) in graph.notes:
        raise RuntimeRefusalError(
            f"the model enters torch.autocast for CUDA, which does nothing on the CPU, where {runtime}'s tools run it"
        )


def demand_memory(runtime: str, graph: ModelGraph) -> None:
    """Refuse to build a model with weights for a runtime's tools where they find no room for it."""
    weights, copies, left = graph.parameter_bytes, _COPIES.get(runtime, 0), host.bytes_left()
    if runtime == "onnxruntime":
        from latpred.runtimes.onnx.onnx_export import LARGEST_IN_MEMORY

        weights = max(weights, 4 * graph.parameters)  # exported in single precision
        copies = copies if weights < LARGEST_IN_MEMORY else copies // 2  # larger ones go through files
    needed = copies * weights
    if needed > left:
        raise RuntimeRefusalError(
            f"{runtime}'s tools need about {format_bytes(needed)} of memory for this model, "
            f"and {format_bytes(left)} are free"
        ) from MemoryError()


def _is_temporary(error: RuntimeRefusalError) -> bool:
    """Whether the machine was what stood in the way, as by a full disk, and not the model: nothing to keep for ever."""
    return out_of_memory(error) or any(isinstance(one, OSError) and one.errno is not None for one in chain_of(error))
