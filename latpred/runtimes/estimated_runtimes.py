"""Estimates of runtimes that were not measured on a GPU, from what its profile says of eager PyTorch.

Profiles that were fitted to published latencies or come from a datasheet know eager, some TorchScript, and their GPU is
seldom at hand to calibrate more. Measured profiles get no estimates: their GPU can be measured.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.resources import files
from math import hypot

import msgspec

from latpred.ops.families import root
from latpred.profile.codec import decode
from latpred.profile.datasheet import LAUNCH_US, PROVENANCE, short
from latpred.profile.document import FITTED, DeviceProfile, DispatchFit
from latpred.runtimes.cuda_graphs import REPLAY

EAGER, TORCHSCRIPT = "eager", "torchscript"
# Standard deviation of the log error that an estimate has beside eager's, as published rows of ONNX Runtime and of
# captured graphs show (transformer-deploy, kernl and optimum-benchmark; see docs/published-tables.md).
SPREAD = 0.25
# What a node that launches nothing costs onnxruntime, over a view in eager: both measured on one CPU.
HOST_NODE = 0.15
HOST_NODES = ("node.view", "node.host", "node.shape")
# Any fit knows what TorchScript takes over eager: the fits share one ratio for each class of ops.
_RATIOS_FROM = "rtx-8000.json"
# Classes of a scripted graph whose costs the published tables do not tell apart from others.
_LIKE = {"bmm": "gemm", "attention": "gemm", "embedding": "index"}

_BASIS = {
    TORCHSCRIPT: "eager's dispatch times what TorchScript took of it on five other GPUs, and eager's kernels",
    "cuda-graphs": "eager's kernels, launched together",
    "onnxruntime": "its own graph, eager's kernels, and for each node the dispatch of an elementwise op in eager",
    "onnxruntime-cuda-graphs": "the graph of onnxruntime and eager's kernels, launched together",
}


def with_estimates(profile: DeviceProfile) -> DeviceProfile:
    """The profile with estimates of runtimes it lacks; a measured one, and one without eager, as it is.

    Examples
    --------
    >>> from latpred.profile import load
    >>> sorted(with_estimates(load("a100")).runtimes)
    ['cuda-graphs', 'eager', 'onnxruntime', 'onnxruntime-cuda-graphs', 'torchscript']
    """
    if profile.provenance not in (FITTED, PROVENANCE) or EAGER not in profile.runtimes:
        return profile
    eager = profile.runtimes[EAGER]
    estimates: dict[str, Callable[[DispatchFit], DispatchFit]] = {
        TORCHSCRIPT: _torchscript,
        "cuda-graphs": _replayed,
        "onnxruntime": _onnxruntime,
        "onnxruntime-cuda-graphs": _replayed,
    }
    missing = {name: make(eager) for name, make in estimates.items() if name not in profile.runtimes}
    return msgspec.structs.replace(profile, runtimes={**profile.runtimes, **missing})


def caveat(runtime: str) -> str:
    """What a prediction says of a runtime that is estimated."""
    return (
        f"{runtime} was not measured on this GPU: estimated from {_BASIS[runtime]}. "
        f"Where the GPU is, measure it: latpred calibrate --device cuda:0 --runtimes {runtime}"
    )


def _replayed(eager: DispatchFit) -> DispatchFit:
    """One launch, whatever it holds; kernels are eager's, as far as an adaptation has corrected those too."""
    return _like(eager, {"": 0.0, REPLAY: 0.0}, LAUNCH_US)


def _onnxruntime(eager: DispatchFit) -> DispatchFit:
    """Each node launches as an elementwise op does, without Python; nodes of shapes stay on the host."""
    launch, view = (eager.costs_us.get(name, eager.costs_us.get("", 0.0)) for name in ("elementwise", "view"))
    costs = {"": launch, "node": launch, **dict.fromkeys(HOST_NODES, short(HOST_NODE * view))}
    return _like(eager, costs, eager.fixed_us)


def _torchscript(eager: DispatchFit) -> DispatchFit:
    """Eager's classes times their ratios; the interpreter's own nodes are part of those."""
    ratios = _scripted_ratios()
    costs = {name: short(cost * ratios.get(root(name), ratios[""])) for name, cost in eager.costs_us.items()}
    costs |= {name: costs[like] for name, like in _LIKE.items() if like in costs}
    # Graphs of TorchScript's own tools have nodes, those of an era the classes of eager.
    nodes = {f"node.{name}" if name else "node": cost for name, cost in costs.items()}
    return _like(eager, {**costs, **nodes, "node.interpreter": 0.0}, eager.fixed_us * ratios["fixed"])


def _like(eager: DispatchFit, costs_us: dict[str, float], fixed_us: float) -> DispatchFit:
    """Dispatch without Python, over eager's kernels, with a wider interval than eager's."""
    busy = eager.spread if eager.busy_spread is None else eager.busy_spread
    return msgspec.structs.replace(
        eager,
        costs_us=costs_us,
        module_call_us=0.0,
        python_call_us=0.0,
        fixed_us=short(fixed_us),
        spread=short(hypot(eager.spread, SPREAD)),
        busy_spread=short(hypot(busy, SPREAD)),
    )


@cache
def _scripted_ratios() -> dict[str, float]:
    """TorchScript's host costs over eager's by class, as the fits to published latencies have them."""
    file = files("latpred.models") / "profiles" / _RATIOS_FROM
    fits = decode(file.read_bytes(), _RATIOS_FROM).runtimes
    eager, scripted = fits[EAGER], fits[TORCHSCRIPT]
    plain = {name: cost for name, cost in eager.costs_us.items() if root(name) == name}
    ratios = {name: scripted.costs_us[name] / cost for name, cost in plain.items()}
    return {**ratios, "fixed": scripted.fixed_us / eager.fixed_us}
