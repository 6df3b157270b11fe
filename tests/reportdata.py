"""Models and a profile for reports: small, with two runtimes, and one with operations that no formula knows."""

from __future__ import annotations

import msgspec
from factories import add, device, dispatch, graph, kernel_fits, linear, machine, profile

from latpred import report
from latpred.graph.graph import ModelGraph
from latpred.profile import store
from latpred.profile.document import Acceptance

BATCHES = (1, 4, 16, 64, 256)
CHECKS = {"median error of networks that no fit saw at most 15%": "4.2%: passed"}


def saved(name: str = "gpu") -> str:
    """A profile of a GPU with eager and CUDA graphs, kept under a name."""
    rates = {"weight_bytes_per_us": 1e5, "activation_bytes_per_us": 1e5, "macs_per_us": 2e6}
    fits = kernel_fits("gemm", "elementwise", **rates, spread=0.1)
    replayed = dispatch(costs_us={"": 3.0}, module_call_us=0.0, python_call_us=0.0, fixed_us=5.0, spread=0.05)
    costs = {"eager": dispatch(spread=0.05), "cuda-graphs": replayed}
    made = msgspec.structs.replace(
        profile(device(), fits, costs),
        name=name,
        machine=machine(accelerator="Example GPU", stack={"torch": "2.13.0"}),
        acceptance=Acceptance(passed=True, checks=CHECKS, advice=()),
    )
    store.save(made)
    return name


def network(model: str = "example-net", layers: int = 8) -> ModelGraph:
    """Between small layers the host does most of the work."""
    return graph(*[op for _ in range(layers) for op in (linear(4, 256, module_calls=3), add(256))], model=model)


def half_unknown(model: str = "half-known") -> ModelGraph:
    """As many layers that no formula knows as there are others."""
    strange = linear(4, 256, name="mylib::secret", estimated=True, macs=linear().macs._replace(per_sample=0))
    return graph(*[op for _ in range(6) for op in (linear(4, 256), strange)], model=model)


def studied(*models: ModelGraph) -> list[report.Studied]:
    """What a report needs of each."""
    name = saved()
    return [report.gather(model, BATCHES, device=name) for model in models]
