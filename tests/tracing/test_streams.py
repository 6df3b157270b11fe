"""The ops found on the meta device are the ops that a run on real CPU tensors issues."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from smallmodels import ARCHITECTURES, build_small, inputs_of
from torch import nn

from latpred.tracing.meta_module import fast_paths_on_meta
from latpred.tracing.op_record import OpRecord
from latpred.tracing.tracer import TraceRecorder


def placed(inputs: Any, device: str) -> Any:
    """Activations of an inference: made under inference mode, floating-point ones on the device."""

    def place(tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros(tensor.shape, device=device) if tensor.dtype.is_floating_point else tensor.clone()

    if isinstance(inputs, dict):
        return {key: place(tensor) for key, tensor in inputs.items()}
    return tuple(place(tensor) for tensor in inputs)


def stream(model: nn.Module, inputs: Any, device: str) -> list[OpRecord]:
    recorder = TraceRecorder()
    with torch.inference_mode(), fast_paths_on_meta():
        given = placed(inputs, device)
        with recorder:
            model(**given) if isinstance(given, dict) else model(*given)
    return recorder.records


def seen(op: OpRecord) -> tuple[object, ...]:
    return op.name, op.host_class, op.launches, op.syncs, op.family, op.counts


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("batch", [1, 2])
def test_meta_and_cpu_issue_the_same_ops(name: str, batch: int) -> None:
    inputs = inputs_of(name, batch)
    real = [seen(op) for op in stream(build_small(name, "cpu"), inputs, "cpu")]
    meta = [seen(op) for op in stream(build_small(name, "meta"), inputs, "meta")]
    if name == "longformer":
        # Writing a number through a mask makes a tensor of it: on the device, except where the device is the CPU.
        meta = [row for row in meta if row[0] != "aten::scalar_tensor"]
    assert meta == real
