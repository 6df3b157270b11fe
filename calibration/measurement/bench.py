"""A device with models built on it, what may go wrong there, and how far a run of visits is.

Whole models, recordings and baselines are all timed on it; how one visit is timed is `timing.timer`'s business.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from latpred import runtimes
from latpred.calibration.devices import Call, Device
from latpred.calibration.workloads.base import Workload
from latpred.errors import DeviceError, MissingPackageError, RuntimeRefusalError, UsageError
from latpred.graph.graph import ModelGraph
from latpred.runtimes.lowering import lacking, target_of

OUT_OF_MEMORY = "out of memory"
REFUSED = "refused: "
_KEPT_SHARE = 0.2  # of the device's memory, for models that stay built between rounds
_MOST_TEXT = 200
Result = TypeVar("Result")


class Bench:
    """A device with models built on it.

    `copies` says how often weights are held: each runtime that exports or traces a model holds them once more.
    """

    def __init__(self, device: Device, copies: int = 1) -> None:
        self.device, self.info = device, device.info()
        self.target = target_of(self.info.kind)
        self.simulated = self.info.kind == "simulated"  # which runs graphs, not models
        self._copies = copies
        self._built: dict[tuple[Workload, str], tuple[Any, Callable[[int, Any], Any]]] = {}

    def model(self, workload: Workload, batch: int, precision: str) -> tuple[Any, Any]:
        """A model on the device and its inputs at a batch size; built once as long as it is not let go."""
        key = (workload, precision)
        if key not in self._built:
            self._built[key] = workload.make(self.device.name, precision)
        model, inputs = self._built[key]
        return model, inputs(batch, self.device.name)

    def call(
        self, workload: Workload, batch: int, runtime: str, precision: str, graph: ModelGraph | None = None
    ) -> Call:
        """A forward pass as a runtime issues it; on the simulated device, that of its graph."""
        with self.device.errors():
            if self.simulated:
                graph = graph or workload.trace(precision, runtime, self.target)
                return self.device.prepare_model(graph, batch, runtime)
            return self.device.prepare_model(*self.model(workload, batch, precision), runtime)

    def attempt(self, visit: Callable[[], Result]) -> Result | str:
        """What a visit gives, or why it failed: a model's own forward may raise anything.

        Where memory is short it may be held by models that only wait for their next round, so it is tried once more
        without them.
        """
        try:
            return visit()
        except (UsageError, DeviceError):
            raise
        except Exception as error:
            failure = failure_of(error)
        if failure != OUT_OF_MEMORY:
            return failure
        others = len(self._built) > 1
        self.clear()
        return self.attempt(visit) if others else failure

    def leave(self, workload: Workload) -> None:
        """Free a model, unless it may stay for the next round."""
        kept = self._copies * sum(_weight_bytes(model) for model, _ in self._built.values())
        if kept > _KEPT_SHARE * self.info.memory_bytes:
            self._built = {key: built for key, built in self._built.items() if key[0] is not workload}
            gc.collect()

    def clear(self) -> None:
        """Free all models."""
        self._built.clear()
        gc.collect()
        if self.info.kind == "cuda":
            torch.cuda.empty_cache()


def _weight_bytes(model: Any) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters()) if isinstance(model, torch.nn.Module) else 0


def failure_of(error: Exception) -> str:
    """What stands as the status of a cell that raised an error."""
    if isinstance(error, RuntimeRefusalError):
        return f"{REFUSED}{error}"[:_MOST_TEXT]
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return OUT_OF_MEMORY
    text = " ".join(str(error).split())[:_MOST_TEXT]
    return f"{type(error).__name__}: {text}"


def demand_runtime(runtime: str, device: Device) -> None:
    """Make sure that a runtime can run on a device; the `MissingPackageError` says how to install it."""
    runtimes.get(runtime)  # a misspelt one is said even where everything is simulated
    kind = device.info().kind
    missing = None if kind == "simulated" else lacking(runtime, target_of(kind))
    if missing:
        raise MissingPackageError(f"{runtime} cannot run here: {missing}")
