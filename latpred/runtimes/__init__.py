"""Runtimes by name: those of latpred and those that other packages register under "latpred.runtimes"."""

from __future__ import annotations

import difflib
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from latpred.errors import UsageError
from latpred.runtimes.base import Runtime

__all__ = ["GROUP", "Runtime", "built_in", "get", "names"]

GROUP = "latpred.runtimes"
# Name, and where its class is; each is imported when it is asked for.
_BUILT_IN = {
    "eager": "latpred.runtimes.eager:Eager",
    "torchscript": "latpred.runtimes.torchscript:TorchScript",
    "onnxruntime": "latpred.runtimes.onnx.onnxruntime:OnnxRuntime",
    "cuda-graphs": "latpred.runtimes.cuda_graphs:CudaGraphs",
    "onnxruntime-cuda-graphs": "latpred.runtimes.onnx.onnxruntime:OnnxRuntimeCudaGraphs",
    "onnxruntime-optimized": "latpred.runtimes.engines:OnnxRuntimeOptimized",
    "compile": "latpred.runtimes.inductor.torch_compile:Compile",
    "compile-reduce-overhead": "latpred.runtimes.inductor.torch_compile:CompileReduceOverhead",
    "tensorrt": "latpred.runtimes.engines:TensorRT",
}


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

    Raises
    ------
    UsageError
        When no runtime goes by the name, or the package that offers it cannot be imported.

    Examples
    --------
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
    near = difflib.get_close_matches(name, names(), n=1, cutoff=0.5)
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
