"""Workloads: recipes from names, modules and graphs, which leave the user's model and random state alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from latpred.calibration.workloads.suites import (
    Workload,
    dense_inputs,
    module_workload,
    seeded,
    token_inputs,
    workloads_of,
)
from latpred.errors import UsageError


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2))


def test_a_module_is_copied_unless_it_is_ready() -> None:
    mine = conv().train()
    made, inputs = module_workload("mine", mine, image=4).make("cpu", "bf16")
    assert made is not mine
    assert mine.training
    assert next(mine.parameters()).dtype is torch.float32
    assert not made.training
    given = inputs(5, "cpu")
    assert given[0].shape == (5, 3, 4, 4)
    assert given[0].dtype is torch.bfloat16
    ready = conv().eval()
    assert module_workload("mine", ready, image=4).make("cpu", "fp32")[0] is ready


def test_a_trace_has_the_name_and_size_of_the_workload() -> None:
    mine = Workload("mine", "image", 8, lambda device, precision: (conv(), dense_inputs((3, 8, 8), precision)))
    graph = mine.trace("fp16")
    assert (graph.model, graph.input_kind, graph.input_size, graph.precision) == ("mine", "image", 8, "fp16")
    assert graph.macs(2) == 2 * 64 * 3 * 2


def test_seeded_weights_repeat_and_leave_the_generator_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first, second = seeded(conv, "cpu", "fp32"), seeded(conv, "cpu", "fp32")
    assert torch.equal(first[0].weight, second[0].weight)
    assert torch.equal(torch.get_rng_state(), before)
    assert seeded(conv, "meta", "fp32")[0].weight.is_meta


def test_token_inputs_are_real_even_on_the_meta_device() -> None:
    ids = token_inputs(6, 100)(4, "meta")[0]
    assert ids.shape == (4, 6)
    assert not ids.is_meta
    assert int(ids.min()) >= 16
    assert int(ids.max()) < 100


def test_a_mapping_names_its_modules_and_what_is_refused() -> None:
    assert [s.name for s in workloads_of({"a": conv(), "b": conv()}, image=4)] == ["a", "b"]
    again = workloads_of({"mine": workloads_of({"a": conv()}, image=4)[0], "by name": "resnet-18"})
    assert [workload.name for workload in again] == ["mine", "by name"]
    for nothing in (nn.Linear, None, [1], {"a": conv}):
        with pytest.raises(UsageError, match=r"is no model to measure\. Give a name, a module, a graph"):
            workloads_of(nothing)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="There is no model to measure"):
        workloads_of([])
    with pytest.raises(UsageError, match="Two models are called Sequential"):
        workloads_of([conv(), conv()], image=4)
    with pytest.raises(UsageError, match=r"say what it is called with"):
        workloads_of(nn.Linear(2, 2))
