"""Channels in blocks: graphs and counts are the same whatever the width of the CPU's vectors."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from factories import graph as make_graph
from onnx import helper, numpy_helper
from torch import nn

from latpred.graph.graph import ModelGraph
from latpred.runtimes.onnx import onnx_graph
from latpred.runtimes.onnx.onnx_formulas import NCHWC, Node, Value, work_of
from latpred.runtimes.onnx.onnx_session import Event, Watched
from latpred.runtimes.onnx.onnxruntime import OnnxRuntime
from latpred.runtimes.source import source_of

BATCH, OWN, SIDE = 2, 20, 8  # 20 channels fill neither blocks of 8 nor of 16
X = np.zeros((BATCH, 3, SIDE, SIDE), dtype=np.float32)


def model(nodes: list[Any], **weights: tuple[int, ...]) -> onnx.ModelProto:
    tensors = [numpy_helper.from_array(np.zeros(shape, dtype=np.float32), name) for name, shape in weights.items()]
    return helper.make_model(helper.make_graph(nodes, "graph", [], [helper.make_empty_tensor_value_info("y")], tensors))


def before() -> onnx.ModelProto:
    """A graph whose layout onnxruntime has not touched."""
    node = helper.make_node
    nodes = [
        node("FusedConv", ["x", "w1", "b1"], ["a"], domain="com.microsoft"),
        node("Conv", ["a", "w2"], ["b"], group=OWN),
        node("BatchNormalization", ["b", "scale", "shift", "mean", "var"], ["c"]),
        node("Conv", ["c", "w4"], ["d"]),
    ]
    shapes = {"w1": (OWN, 3, 3, 3), "b1": (OWN,), "w2": (OWN, 1, 3, 3), "w4": (OWN, OWN, 1, 1)}
    return model(nodes, **shapes, **dict.fromkeys(("scale", "shift", "mean", "var"), (OWN,)))


def laid_out(width: int) -> onnx.ModelProto:
    """What onnxruntime makes of it, and of what follows, on a CPU whose vectors hold so many channels."""
    full, node = -(-OWN // width) * width, helper.make_node
    nodes = [
        node("Conv", ["x", "v1", "u1"], ["r1"], "a_nchwc", domain=NCHWC),
        node("Conv", ["r1", "v2"], ["r2"], "b_nchwc", domain=NCHWC, group=full),
        node("Conv", ["r2", "v3", "u3"], ["r3"], "c_bn_nchwc", domain=NCHWC, group=full),
        node("Conv", ["r3", "v4", "", "r1"], ["r4"], "d_nchwc_token_7", domain=NCHWC),
        node("Sigmoid", ["r4"], ["r5"], "gate"),
        node("Reshape", ["r5", "split"], ["r6"], "split"),
        node("Add", ["r6", "r6"], ["r7"], "add"),
        node("Reshape", ["r7", "joined"], ["r8"], "join"),
        node("MaxPool", ["r8"], ["r9"], "pool", domain=NCHWC, kernel_shape=(2, 2)),
        node("ReorderOutput", ["r9"], ["s"], "out", domain=NCHWC, channels=OWN),
        node("Tanh", ["s"], ["t"], "tanh"),
        node("ReorderInput", ["t"], ["r10"], "in", domain=NCHWC),
        node("Concat", ["r9", "r10"], ["r11"], "cat", axis=1),
        node("ReorderOutput", ["r11"], ["y"], "end", domain=NCHWC, channels=2 * OWN, channels_last=1),
    ]
    shapes = {"v1": (full, 3, 3, 3), "v2": (full, 1, 3, 3), "v3": (full, 1, 1, 1), "v4": (full, full, 1, 1)}
    return model(nodes, **shapes, u1=(full,), u3=(full,))


def executed(width: int) -> Watched:
    """A run of it, with the shapes that onnxruntime's profile would have."""
    full, half = -(-OWN // width) * width, SIDE // 2
    wide, pooled = (BATCH, full, SIDE, SIDE), (BATCH, full, half, half)
    split, own = (BATCH, full // width, SIDE, SIDE, width), (BATCH, OWN, half, half)
    ends = ((BATCH, 2 * full, half, half), (BATCH, half, half, 2 * OWN))
    shapes = (*(wide,) * 5, split, split, wide, pooled, own, own, pooled, *ends)
    proto = laid_out(width)
    run = tuple(
        Event(node.name, node.op_type, 1.0, (("float", shape),))
        for node, shape in zip(proto.graph.node, shapes, strict=True)
    )
    return Watched(proto, (run,), before())


def traced(watched: Watched) -> ModelGraph:
    return onnx_graph.graph_of(make_graph(), watched, [{"x": X}], "cpu")


@pytest.mark.parametrize("width", [4, 8, 16])
def test_counts_are_those_of_the_models_channels_at_any_width(width: int) -> None:
    found = traced(executed(width))
    assert found == traced(executed(1))  # where nothing is filled up
    convolutions = [op for op in found.ops if op.name == "ort::Conv"]
    pixels = BATCH * OWN * SIDE * SIDE
    assert [op.macs.at(1) for op in convolutions] == [27 * pixels, 9 * pixels, pixels, OWN * pixels]
    assert [op.family for op in convolutions] == [
        *("conv.nchwc", "conv_depthwise.nchwc", "conv_depthwise.nchwc", "conv.nchwc")
    ]
    assert {op.write_bytes.at(1) for op in convolutions} == {4 * pixels}
    assert convolutions[3].read_bytes.at(1) == 2 * 4 * pixels
    add, joined = (next(op for op in found.ops if op.name == name) for name in ("ort::Add", "ort::Concat"))
    assert add.dims["numel"].at(1) == pixels
    assert joined.dims["numel"].at(1) == 2 * pixels // 4
    assert found.parameter_bytes == 4 * (OWN * 27 + OWN + OWN * 9 + 2 * OWN + OWN * OWN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_convolutions_of_few_channels_count_what_eager_does(dtype: torch.dtype) -> None:
    class Narrow(nn.Module):
        """Channels that fill no block, and additions and a gate that stay in blocks."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.deep = nn.Conv2d(3, 20, 3, padding=1), nn.Conv2d(20, 20, 3, padding=1, groups=20)
            self.point, self.last = nn.Conv2d(20, 20, 1), nn.Conv2d(20, 12, 3, stride=2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.relu(self.first(x))
            z = torch.relu(self.point(torch.relu(self.deep(y))) + y)
            return torch.relu(self.last(z * torch.sigmoid(z)))

    source = source_of(Narrow().eval().to(dtype), torch.zeros(2, 3, 16, 16, dtype=dtype))
    graph = OnnxRuntime().trace(source, "cpu")
    assert [graph.macs(batch) for batch in (1, 4)] == [source.graph.macs(batch) for batch in (1, 4)]
    written = {op.dims["c_out"].at(1) for op in graph.ops if op.family.startswith("conv")}
    assert written == {20, 12}


def test_fused_attention_counts_values_wider_than_queries() -> None:
    query, key, value = (Value((2, 4, *sizes), "float32") for sizes in ((16, 16), (20, 16), (20, 32)))
    work = work_of(Node("Attention", "", {}), [query, key, value], [Value((2, 4, 16, 32), "float32")])
    assert work is not None
    assert work.macs == 2 * 4 * 16 * 20 * (16 + 32)
    packed, widths = [Value((2, 5, 64), "float32"), Value((64, 128), "float32")], {"qkv_hidden_sizes": (32, 32, 64)}
    node = Node("Attention", "com.microsoft", {"num_heads": 4, **widths})
    work = work_of(node, packed, [Value((2, 5, 64), "float32")])
    assert work is not None
    assert work.macs == 2 * 5 * 64 * 128 + 2 * 4 * 5 * 5 * (8 + 16)


@pytest.mark.parametrize(("dtype", "size"), [("int4", 16), ("float8_e4m3fn", 32), ("float32", 128)])
def test_bytes_of_narrow_numbers(dtype: str, size: int) -> None:
    assert Value((4, 8), dtype).nbytes == size
