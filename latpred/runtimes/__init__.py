"""Runtimes by name, those that other packages register under "latpred.runtimes" as well; and eager, the plainest.

Eager PyTorch dispatches one op after the other, in the order in which Python calls them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import numpy as np

from latpred.errors import UsageError
from latpred.graph.graph import ModelGraph, Op, OpFacts, Schedule, host_class_of
from latpred.runtimes.base import Runtime
from latpred.storage import IdentityCache

__all__ = ["GROUP", "Runtime", "built_in", "get", "names"]

GROUP = "latpred.runtimes"
# Name, and where its class is; each is imported when it is asked for.
_BUILT_IN = {
    "eager": "latpred.runtimes:Eager",
    "torchscript": "latpred.runtimes.torchscript:TorchScript",
    "onnxruntime": "latpred.runtimes.onnx.onnxruntime:OnnxRuntime",
    "cuda-graphs": "latpred.runtimes.cuda_graphs:CudaGraphs",
    "onnxruntime-cuda-graphs": "latpred.runtimes.onnx.onnxruntime:OnnxRuntimeCudaGraphs",
    "onnxruntime-optimized": "latpred.runtimes.engines:OnnxRuntimeOptimized",
    "compile": "latpred.runtimes.inductor.torch_compile:Compile",
    "compile-reduce-overhead": "latpred.runtimes.inductor.torch_compile:CompileReduceOverhead",
    "tensorrt": "latpred.runtimes.engines:TensorRT",
}
_ELSEWHERE = {"ort": "onnxruntime", "jit": "torchscript", "inductor": "compile", "trt": "tensorrt"}


def names() -> list[str]:
    """Every runtime that can be asked for, latpred's own first.

    >>> names()[0]
    'eager'
    """
    return [*_BUILT_IN, *sorted(name for name in _registered() if name not in _BUILT_IN)]


def built_in() -> list[str]:
    """The runtimes that latpred itself brings, installed here or not.

    >>> built_in()[:2]
    ['eager', 'torchscript']
    """
    return list(_BUILT_IN)


def get(name: str) -> Runtime:
    """The runtime of a name; always the same object.

    >>> get("eager").name
    'eager'
    """
    if not isinstance(name, str):
        raise UsageError(f"{name!r} is no runtime; give the name of one: {', '.join(names())}.")
    return _made(name)


@cache
def _made(name: str) -> Runtime:
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        made: Runtime = getattr(import_module(module), attribute)()
        return made
    registered = _registered()
    if name in registered:
        return _load(registered[name])
    called = name.lower()
    near = [_ELSEWHERE[called]] if called in _ELSEWHERE else difflib.get_close_matches(called, names(), n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise UsageError(f"No runtime is called {name!r}. {hint}There are: {', '.join(names())}.")


def _registered() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def _load(point: EntryPoint) -> Runtime:
    try:
        loaded = point.load()
        runtime = loaded if isinstance(loaded, Runtime) and not isinstance(loaded, type) else loaded()
    except Exception as error:
        raise UsageError(
            f"Runtime {point.name!r} is registered as {point.value} but cannot be loaded: {error}. "
            "Repair or uninstall the package that registers it."
        ) from error
    if not isinstance(runtime, Runtime):
        raise UsageError(
            f"Runtime {point.name!r} is registered as {point.value}, which gives a {type(runtime).__name__}, "
            "not a Runtime. It needs a name, lower(), available() and build()."
        )
    return runtime


class StepPerOp:
    """A runtime that dispatches each op of its graph by itself; one that does not has a `schedule` of its own."""

    name: str

    def __init__(self) -> None:
        self._schedules: IdentityCache[ModelGraph, dict[int, Schedule]] = IdentityCache()

    def lower(self, graph: ModelGraph, batch: int) -> Schedule:
        """The steps and kernels of one forward pass: the same object for all batch sizes that share their ops."""
        schedules = self._schedules.get(graph, lambda _: {})
        own = graph.own(batch)
        if own not in schedules:
            schedules[own] = self.schedule(graph, graph.at(batch))
        return schedules[own]

    def schedule(self, graph: ModelGraph, ops: tuple[Op, ...]) -> Schedule:
        """The schedule of a graph's ops for some batch sizes."""
        return one_step_per_op(self.name, ops)


class Eager(StepPerOp):
    """Plain PyTorch: every op is dispatched by itself and launches its own kernels."""

    name = "eager"

    def available(self) -> str | None:
        return None

    def build(self, model: Any, inputs: Any) -> Callable[[], Any]:
        import torch

        positional, named = ((), inputs) if isinstance(inputs, dict) else (inputs, {})

        def run() -> Any:
            with torch.inference_mode():
                return model(*positional, **named)

        return run


_steps = OpFacts(
    {"launches": "q", "calls": "3q", "sync": "q"},
    lambda op: (op.launches if op.family else 0, *op.calls, op.syncs),
)


def one_step_per_op(runtime: str, ops: tuple[Op, ...]) -> Schedule:
    """The schedule that dispatches every op by itself; one that takes several kernels shares its work among them."""
    steps = _steps(ops)
    launches = steps["launches"]
    kernel_op = np.repeat(np.arange(len(ops)), launches)
    return Schedule(
        runtime=runtime,
        ops=ops,
        host_class=tuple(map(host_class_of, ops)),
        calls=steps["calls"],
        sync=steps["sync"],
        kernel_step=kernel_op,
        kernel_op=kernel_op,
        kernel_share=1.0 / launches[kernel_op],
    )
