"""Wider models: what grows, what stays, and how near that is to really building one."""

from __future__ import annotations

import pytest
import torch
from factories import add, graph, linear, view
from torch import nn

import latpred
from latpred.graph.graph import Affine
from latpred.graph.widen import GROWTHS, widened
from latpred.ops.families import DIMS


def test_products_grow_with_the_square_and_all_else_with_the_width() -> None:
    net = graph(view(), linear(8, 64), add(100))
    wide = widened(net, 2.0)
    assert wide.macs(3) == 4 * net.macs(3)
    assert wide.ops[0] == net.ops[0]
    assert wide.ops[1].dims == {"m": Affine(0, 8), "n": Affine(128), "k": Affine(128)}
    assert wide.ops[1].weight_bytes == Affine(4 * 4 * 64 * 64)
    assert wide.ops[2].write_bytes == Affine(0, 800)
    assert wide.launches() == net.launches()


def test_what_is_not_a_width_stays() -> None:
    mask = add(100, dtype="int64")
    assert widened(graph(mask), 3.0).ops[0] == mask


def test_nothing_becomes_nothing() -> None:
    narrow = widened(graph(linear(1, 2)), 0.01)
    assert narrow.ops[0].dims["n"].constant == 1
    assert narrow.macs() == 1


def test_every_family_with_a_width_has_its_dimensions() -> None:
    for family, growth in GROWTHS.items():
        assert set(growth.dims) <= set(DIMS[family])


def perceptron(width: int) -> nn.Module:
    layers = [nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, width)]
    return nn.Sequential(*layers)


def convolutions(width: int) -> nn.Module:
    depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
    return nn.Sequential(
        nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(), depthwise, nn.Conv2d(width, width, 1)
    )


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_wider_walk_is_what_a_wider_model_does(factor: float) -> None:
    def walk(width: int) -> latpred.ModelGraph:
        return latpred.trace(perceptron(width), torch.zeros(2, width))

    wide, real = widened(walk(64), factor), walk(int(64 * factor))
    for found, expected in zip(wide.ops, real.ops, strict=True):
        assert (found.dims, found.macs) == (expected.dims, expected.macs)
        assert found.weight_bytes.at(2) == pytest.approx(expected.weight_bytes.at(2), rel=0.05)  # biases
    assert wide.bytes(8) == pytest.approx(real.bytes(8), rel=0.02)


def test_image_channels_stay_and_depthwise_convolutions_stay_depthwise() -> None:
    def walk(width: int) -> latpred.ModelGraph:
        return latpred.trace(convolutions(width), torch.zeros(2, 3, 16, 16))

    wide, real = widened(walk(16), 2.0), walk(32)
    assert [(op.family, op.dims, op.macs) for op in wide.ops] == [(op.family, op.dims, op.macs) for op in real.ops]
