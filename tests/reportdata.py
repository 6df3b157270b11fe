"""Models and profiles for reports and explanations: small, with two runtimes, one with ops that no formula knows."""

from __future__ import annotations

import msgspec
from factories import add, device, dispatch, graph, kernel_fits, linear, machine, profile

from latpred import report
from latpred.graph.graph import ModelGraph
from latpred.profile import store
from latpred.profile.document import Acceptance, DeviceInfo, DispatchFit

BATCHES = (1, 4, 16, 64, 256)
CHECKS = {"median error of networks that no fit saw at most 15%": "4.2%: passed"}
RATES = {"weight_bytes_per_us": 1e5, "activation_bytes_per_us": 1e5, "macs_per_us": 2e6}
FITS = kernel_fits("gemm", "elementwise", **RATES, spread=0.1)
EAGER = dispatch(spread=0.05)
REPLAYED = dispatch(costs_us={"": 3.0}, module_call_us=0.0, python_call_us=0.0, fixed_us=5.0, spread=0.05)


def saved(name: str = "gpu", info: DeviceInfo | None = None, **runtimes: DispatchFit) -> str:
    """A profile of a device with some runtimes, eager and CUDA graphs unless others are given, kept under a name."""
    costs = {runtime.replace("_", "-"): fit for runtime, fit in runtimes.items()}
    made = msgspec.structs.replace(
        profile(info or device(), FITS, costs or {"eager": EAGER, "cuda-graphs": REPLAYED}),
        name=name,
        machine=machine(accelerator="Example GPU", stack={"torch": "2.13.0"}),
        acceptance=Acceptance(passed=True, checks=CHECKS, advice=()),
    )
    store.save(made)
    return name


def network(layers: int = 8, **changes: object) -> ModelGraph:
    """Between small layers the host does most of the work."""
    return graph(*[op for _ in range(layers) for op in (linear(4, 256, module_calls=3), add(256))], **changes)


def half_unknown(model: str = "half-known") -> ModelGraph:
    """As many layers that no formula knows as there are others."""
    strange = linear(4, 256, name="mylib::secret", estimated=True, macs=linear().macs._replace(per_sample=0))
    return graph(*[op for _ in range(6) for op in (linear(4, 256), strange)], model=model)


def studied(*models: ModelGraph) -> list[report.Studied]:
    """What a report needs of each."""
    name = saved()
    return [report.gather(model, BATCHES, device=name) for model in models]
