"""Graphs as an older PyTorch ran them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from smallmodels import Function
from torch import nn

import latpred
from latpred.graph.graph import ModelGraph
from latpred.graph.rewrites import OLDER
from latpred.ops.families import root
from latpred.prediction.predictor import Predictor
from latpred.profile import store
from latpred.profile.gpus import spec
from latpred.query import Options
from latpred.runtimes.legacy_torch import TORCH_1_12, TORCH_2, TORCH_2_4, as_run_in
from latpred.tracing import trace


def test_the_bias_of_a_convolution_is_a_kernel_of_its_own() -> None:
    graph = trace(nn.Conv2d(3, 8, 3), torch.zeros(1, 3, 16, 16))
    older = as_run_in(TORCH_1_12, graph)
    convolution, added = (op for op in older.ops if op.launches)
    assert older.macs(4) == graph.macs(4)
    assert sum(op.weight_bytes.constant for op in older.ops) == sum(op.weight_bytes.constant for op in graph.ops)
    assert convolution.weight_bytes.constant == 3 * 8 * 9 * 4
    assert (added.family, added.weight_bytes.constant) == ("elementwise.add", 8 * 4)
    assert added.read_bytes == added.write_bytes == convolution.write_bytes
    for alone in (nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(3, 3, 3, groups=3)):
        assert as_run_in(TORCH_1_12, trace(alone, torch.zeros(1, 3, 16, 16))).launches() == 1


def conv(groups: int = 1, **options: bool) -> nn.Module:
    return nn.Conv2d(8, 8, 3, groups=groups, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layer", "options", "added"),
    [
        (conv(), {}, 1),
        (conv(), {"precision": "amp-fp16"}, 1),
        (conv(), {"runtime": "torchscript"}, 1),
        (conv(bias=False), {}, 0),
        (conv(8), {}, 0),  # PyTorch's own kernel adds it
        (conv(8), {"memory_format": "channels_last"}, 1),
    ],
)
@pytest.mark.parametrize("device", ["h100-shared", "rtx-4090"])
def test_cudnn_leaves_biases_to_pytorch(layer: nn.Module, options: dict[str, str], added: int, device: str) -> None:
    asked = Options(torch.zeros(1, 8, 16, 16), **options)  # type: ignore[arg-type]
    predictor = Predictor(store.load(device))
    ran = [op.family for op in predictor.lowered(predictor.trace(layer, asked, [1]), asked.runtime).ops if op.launches]
    assert [family for family in ran if family != "copy.cast"][1:] == ["elementwise.add"] * added


def test_filters_that_each_sample_makes_are_no_bias() -> None:
    class Mixed(nn.Module):
        """As timm's EfficientNet-CondConv: one group of channels for each sample, with its own filters."""

        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.Parameter(torch.zeros(4, 8 * 3 * 9))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            filters = x.mean((1, 2, 3))[:, None].sigmoid().expand(-1, 4) @ self.experts
            joined = x.reshape(1, -1, *x.shape[2:])
            return nn.functional.conv2d(joined, filters.view(-1, 3, 3, 3), groups=len(x))

    graph = trace(Mixed(), torch.zeros(1, 3, 16, 16))
    older = as_run_in(TORCH_1_12, graph)
    for batch in (1, 2, 8):
        assert (older.macs(batch), older.launches(batch)) == (graph.macs(batch), graph.launches(batch))


def test_a_flat_convolution_goes_through_two_dimensions() -> None:
    older = as_run_in(TORCH_1_12, trace(nn.Conv1d(8, 8, 1, groups=4, bias=False), torch.zeros(1, 8, 16)))
    names = [op.name for op in older.ops if not op.name.startswith("python")]
    assert names == ["aten::unsqueeze", "aten::unsqueeze", "aten::conv1d", "aten::squeeze"]
    assert sum(op.module_calls for op in older.ops) == 1


class _Block(nn.Module):
    """A convolution with normalisation, a sum and an activation behind it."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm, self.activation = nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8), activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.norm(self.conv(x)) + x)


@pytest.mark.parametrize(
    ("gpu", "activation", "kernels"),
    [
        ("rtx-8000", nn.ReLU(), 2),
        ("rtx-8000", nn.ReLU6(), 3),  # which nvFuser cannot read
        ("titan-x-pascal", nn.ReLU(), 3),  # which nvFuser refuses
    ],
)
def test_what_torchscript_fuses_depends_on_the_op_and_the_gpu(gpu: str, activation: nn.Module, kernels: int) -> None:
    graph = trace(_Block(activation), torch.zeros(1, 8, 16, 16))
    found = as_run_in(TORCH_1_12, graph, "torchscript", spec(gpu))
    assert found.launches(1) == kernels
    assert Predictor(store.load(gpu)).lowered(graph, "torchscript").launches(1) == kernels
    plain = as_run_in(TORCH_1_12, graph, "eager", spec(gpu))
    assert plain.launches(1) == 4
    assert found.bytes(4) < plain.bytes(4)


class _Attention(nn.Module):
    """Self-attention as timm has it, fused or as it was before that could be done."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.fused, self.qkv, self.proj = fused, nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, 4, 16).permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused:
            mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        else:
            mixed = ((q @ k.transpose(-2, -1)) * 0.25).softmax(dim=-1) @ v
        return self.proj(mixed.transpose(1, 2).reshape(batch, tokens, width))


def _kernels(graph: ModelGraph, batch: int) -> list[tuple[object, ...]]:
    ops = [op for op in graph.at(batch) if op.launches]
    counts = [(op.family, op.macs, op.read_bytes, op.write_bytes, *op.dims.values()) for op in ops]
    return [(name, *(line.at(batch) for line in lines)) for name, *lines in counts]


def test_fused_attention_is_what_its_parts_are() -> None:
    """Models of timm call what PyTorch 1.12 did not have: two products, scaling, softmax and copies stand for it."""
    for precision, casts in {"fp32": 0, "fp16": 0, "amp-fp16": 6, "amp-bf16": 7}.items():
        fused, parts = (
            as_run_in(TORCH_1_12, trace(_Attention(fused=one), torch.zeros(1, 10, 64), precision=precision))
            for one in (True, False)
        )
        for batch in (1, 3):
            assert _kernels(fused, batch) == _kernels(parts, batch)
            views = [sum(op.host_class.startswith("view") for op in each.at(batch)) for each in (fused, parts)]
            assert views[0] == views[1] + 1  # joining heads is a view behind fused attention, and a copy otherwise
        assert fused.macs(5) == parts.macs(5)
        assert (fused.launches(1), fused.launches(2)) == (7 + casts, 10 + casts)


def test_a_mask_is_added_to_the_scores() -> None:
    masked = Function(lambda x: nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=x.new_zeros(8, 8)))
    found = as_run_in(TORCH_1_12, trace(masked, torch.zeros(1, 2, 8, 16)))
    families = [op.family for op in found.at(1) if op.family.startswith(("bmm", "elementwise", "softmax"))]
    assert families == ["elementwise.mul", "bmm", "elementwise.add", "softmax.softmax", "bmm"]


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        ("distilbert-base-uncased", {}, True),
        (_Attention(fused=True), {"inputs": torch.zeros(1, 10, 64)}, True),
        (_Attention(fused=False), {"inputs": torch.zeros(1, 10, 64)}, False),
        ("distilbert-base-uncased", {"attention": "sdpa"}, False),
        ("distilbert-base-uncased", {"attention": "eager"}, False),
        ("distilbert-base-uncased", {"runtime": "tensorrt"}, False),
        ("distilbert-base-uncased", {"device": "a100"}, False),
    ],
)
def test_attention_in_parts_is_said_where_newer_torch_fuses_it(model: Any, options: dict[str, Any], said: bool) -> None:
    assert (OLDER in latpred.predict(model, **{"device": "t4", **options}).provenance.caveats) == said


def test_under_autocast_each_op_has_a_host_class_of_its_own_format() -> None:
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8))
    graph = trace(layers, torch.zeros(1, 3, 16, 16), precision="amp-fp16")
    older = as_run_in(TORCH_1_12, graph)
    names = [(op.host_class, op.dtype) for op in older.ops if op.launches]
    cast = ("copy.nested.to", "float32")
    bias = ("elementwise.half.add", "float16")
    assert names[:6] == [cast, cast, cast, ("conv.half.conv2d", "float16"), bias, ("copy.half.nested.to", "float16")]
    assert names[6:] == [("norm.group_norm", "float32")]
    convolution, added = (op for op in older.ops if op.host_class in ("conv.half.conv2d", bias[0]))
    assert convolution.read_bytes.constant == 3 * 8 * 9 * 2
    assert added.weight_bytes.constant == 8 * 2


@pytest.mark.parametrize("era", [TORCH_1_12, TORCH_2])
def test_ops_that_graphs_share_are_rewritten_once(era: str) -> None:
    graph = trace(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1, groups=2)), image=16)
    first, second = (as_run_in(era, msgspec.structs.replace(graph)).ops for _ in range(2))  # which share their ops
    assert first == second != graph.ops
    assert all(one is other for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize(("shape", "parts"), [((2, 3, 8, 16), 0), ((6, 8, 16), 2), ((2, 3, 5, 8, 16), 2)])
@pytest.mark.parametrize(("era", "dtype", "casts"), [(TORCH_2, "float32", 5), (TORCH_2_4, "float16", 0)])
def test_attention_of_other_than_four_dimensions_is_in_parts(
    shape: tuple[int, ...], parts: int, era: str, dtype: str, casts: int
) -> None:
    attention = Function(lambda x: nn.functional.scaled_dot_product_attention(x, x, x))
    graph = trace(attention, torch.zeros(shape), precision="fp16")
    ran, *others = (
        as_run_in(era, msgspec.structs.replace(graph, runtime=runtime)).ops
        for runtime in ("eager", "cuda-graphs", "torchscript")
    )
    assert [[op.family for op in one] for one in others] == [[op.family for op in ran]] * 2
    products = [op for op in ran if root(op.family) == "bmm"]
    assert [op.dtype for op in products] == [dtype] * parts
    assert [op.family for op in ran].count("copy.cast") == (casts if parts else 0)
    assert [root(op.family) for op in ran].count("attention") == (not parts)
