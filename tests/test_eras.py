"""Graphs as an older PyTorch ran them."""

from __future__ import annotations

import torch
from torch import nn

from latpred.eras import TORCH_1_12, as_run_in
from latpred.tracing import trace
from latpred.tracing.names import attention


def test_todays_graphs_stay_what_they_are() -> None:
    graph = trace(nn.Conv2d(3, 8, 3), torch.zeros(1, 3, 16, 16))
    assert as_run_in("", graph) is graph


def test_the_bias_of_a_convolution_is_a_kernel_of_its_own() -> None:
    older = as_run_in(TORCH_1_12, trace(nn.Conv2d(3, 8, 3), torch.zeros(1, 3, 16, 16)))
    convolution, added = (op for op in older.ops if op.launches)
    assert convolution.weight_bytes.constant == 3 * 8 * 9 * 4
    assert (added.family, added.weight_bytes.constant) == ("elementwise.add", 8 * 4)
    assert added.read_bytes == added.write_bytes == convolution.write_bytes
    bare = as_run_in(TORCH_1_12, trace(nn.Conv2d(3, 8, 3, bias=False), torch.zeros(1, 3, 16, 16)))
    assert sum(op.launches for op in bare.ops) == 1


def test_a_flat_convolution_goes_through_two_dimensions() -> None:
    older = as_run_in(TORCH_1_12, trace(nn.Conv1d(8, 8, 1, groups=4, bias=False), torch.zeros(1, 8, 16)))
    names = [op.name for op in older.ops if not op.name.startswith("python")]
    assert names == ["aten::unsqueeze", "aten::unsqueeze", "aten::conv1d", "aten::squeeze"]
    assert sum(op.module_calls for op in older.ops) == 1


def test_host_classes_know_groups_and_half_precision() -> None:
    layers = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 3, groups=2), nn.BatchNorm2d(8))
    for precision, ending in (("fp32", ""), ("fp16", ".half")):
        older = as_run_in(TORCH_1_12, trace(layers, torch.zeros(1, 8, 16, 16), precision=precision))
        classes = [op.host_class for op in older.ops if op.launches]
        assert [name.rpartition(".")[0] for name in classes] == [
            f"{kind}{ending}" for kind in ("conv_depthwise", "elementwise", "conv_grouped", "elementwise", "batch_norm")
        ]


def test_work_does_not_change() -> None:
    graph = trace(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), torch.zeros(1, 3, 16, 16))
    older = as_run_in(TORCH_1_12, graph)
    assert older.macs(4) == graph.macs(4)
    assert sum(op.weight_bytes.constant for op in older.ops) == sum(op.weight_bytes.constant for op in graph.ops)


def test_attention_of_models_built_by_name() -> None:
    fused = trace("distilbert-base-uncased", seq=16)
    with attention("eager"):
        plain = trace("distilbert-base-uncased", seq=16)
    assert any(op.family.startswith("attention") for op in fused.ops)
    assert not any(op.family.startswith("attention") for op in plain.ops)
    assert sum(op.family == "bmm" for op in plain.ops) == 12
