"""Eager PyTorch: one host step for each op, in the order in which Python calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from latpred.caches import IdentityCache
from latpred.graph.graph import ModelGraph, Op, Schedule


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
        """None: wherever latpred is, PyTorch is."""
        return None

    def build(self, model: Any, inputs: Any) -> Callable[[], Any]:
        """A call of the model in inference mode."""
        import torch

        positional, named = ((), inputs) if isinstance(inputs, dict) else (inputs, {})

        def run() -> Any:
            with torch.inference_mode():
                return model(*positional, **named)

        return run


def one_step_per_op(runtime: str, ops: tuple[Op, ...]) -> Schedule:
    """The schedule that dispatches every op by itself; one that takes several kernels shares its work among them."""
    launches = np.array([op.launches if op.family else 0 for op in ops], dtype=np.int64)
    kernel_op = np.repeat(np.arange(len(ops)), launches)
    return Schedule(
        runtime=runtime,
        ops=ops,
        host_class=tuple(op.host_class for op in ops),
        module_calls=np.array([op.module_calls for op in ops], dtype=np.int64),
        python_calls=np.array([op.python_calls for op in ops], dtype=np.int64),
        sync=np.array([op.syncs for op in ops], dtype=np.int64),
        kernel_step=kernel_op,
        kernel_op=kernel_op,
        kernel_share=1.0 / launches[kernel_op],
        kernel_family=tuple(ops[index].family for index in kernel_op.tolist()),
    )
