"""Ops that torch takes apart for compilers, or runs otherwise on the meta device, are counted as devices run them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import latpred
from latpred.ops.classes import FREE

Tensor = torch.Tensor


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


class Dispatched(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def resampled(mode: str, **options: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: F.interpolate(x, mode=mode, **options)


def assigned(x: Tensor) -> Tensor:
    x = x.clone()
    for number, rows in enumerate((slice(0, 2), slice(2, 3))):
        x[rows, 1:2] = number
    return x


def assigned_by_a_mask(x: Tensor) -> Tensor:
    x = x.clone()
    x[torch.ones(x.shape, dtype=torch.bool)] = 0.0
    return x


def assigned_by_number(x: Tensor) -> Tensor:
    x = x.clone()
    x[..., [0, 1]] = 2.0
    x[0] = 1.5
    x[0, 0] = 1.0
    return x


IMAGE, IMAGES_3D, SERIES = (2, 4, 8, 8), (2, 4, 4, 4, 4), (2, 4, 8)
CASES = {
    "nearest": (resampled("nearest", scale_factor=2), IMAGE),
    "nearest-exact": (resampled("nearest-exact", size=(5, 9)), IMAGE),
    "bilinear": (resampled("bilinear", scale_factor=2), IMAGE),
    "bilinear, aligned": (resampled("bilinear", size=(5, 9), align_corners=True), IMAGE),
    "bicubic": (resampled("bicubic", scale_factor=2), IMAGE),
    "antialias": (resampled("bilinear", scale_factor=0.5, antialias=True), IMAGE),
    "linear": (resampled("linear", scale_factor=2), SERIES),
    "nearest, 1-d": (resampled("nearest", scale_factor=2), SERIES),
    "trilinear": (resampled("trilinear", scale_factor=2), IMAGES_3D),
    "nearest, 3-d": (resampled("nearest", scale_factor=2), IMAGES_3D),
    "area": (resampled("area", scale_factor=0.5), IMAGE),
    "assignment": (assigned, SERIES),
    "assignment by a mask": (assigned_by_a_mask, SERIES),
    "assignment by number": (assigned_by_number, SERIES),
    "kthvalue": (lambda x: x.kthvalue(2), SERIES),
    "topk": (lambda x: x.topk(2), SERIES),
    "multinomial": (lambda x: torch.multinomial(x.softmax(-1), 2), (2, 8)),
    "take_along_dim": (lambda x: x.take_along_dim(torch.zeros(2, 4, 1, dtype=torch.int64), 2), SERIES),
}


@pytest.mark.parametrize("case", CASES)
def test_kernels_are_those_that_a_device_is_given(case: str) -> None:
    function, shape = CASES[case]
    x = torch.rand(shape)
    with torch.inference_mode(), Dispatched() as seen:
        function(x)
    quiet = {f"aten::{name}" for name in (*FREE, "slice", "select", "lift_fresh")}
    launched = [op.name for op in latpred.trace(Function(function), x).ops if op.launches]
    assert launched == [name for name in seen.names if name not in quiet]


@pytest.mark.parametrize("case", ["nearest", "bilinear", "bicubic", "linear", "trilinear"])
def test_resampling_has_a_cost(case: str) -> None:
    function, shape = CASES[case]
    (op,) = (op for op in latpred.trace(Function(function), torch.rand(shape)).ops if op.launches)
    assert op.family.startswith(f"pooling.upsample_{case}")
    assert not op.estimated
    assert op.read_bytes.at(2) == 4 * torch.Size(shape).numel()
    assert op.write_bytes.at(2) == op.read_bytes.at(2) * 2 ** (len(shape) - 2)


def test_one_hot_is_two_kernels() -> None:
    class OneHot(nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            return F.one_hot(ids, 10)

    assert latpred.trace(OneHot(), torch.zeros(2, 4, dtype=torch.int64)).launches(2) == 2


def test_indices_that_are_broadcast_pick_all_combinations() -> None:
    def combinations(x: Tensor) -> Tensor:
        return x[torch.arange(2)[:, None], torch.arange(4)[None]]

    op = next(op for op in latpred.trace(Function(combinations), torch.zeros(1, 4, 8)).ops if op.family == "index")
    assert (op.dims["rows"].at(1), op.dims["cols"].at(1)) == (8, 8)


def test_a_value_that_is_used_as_a_tensor_is_launched() -> None:
    def scaled(x: Tensor) -> Tensor:
        return x * torch.scalar_tensor(2.0, device=x.device)

    graph = latpred.trace(Function(scaled), torch.zeros(1, 4))
    assert [op.name for op in graph.ops if op.launches] == ["aten::scalar_tensor", "aten::mul"]
