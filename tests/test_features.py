"""Features against dimensions worked out by hand, and what grows in a wider model."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from factories import add, graph
from torch import nn

import latpred
from latpred.graph.features import layout, native, read, waves
from latpred.graph.graph import Affine
from latpred.graph.rewrites import GROWTHS, widened
from latpred.ops.families import DIMS
from latpred.prediction.kernel_times import columns


def test_every_family_has_a_layout() -> None:
    for family, dims in DIMS.items():
        form = layout(family)
        assert form.columns == ("macs", "weight_bytes", "read_bytes", "write_bytes", *dims)
        assert form.powers.shape[0] == len(dims)
        inputs = read(family, np.ones((3, len(form.columns))))
        assert inputs.logs.shape == (3, len(form.names))


@pytest.mark.parametrize(
    ("family", "dims", "counts"),
    [
        ("pooling.avg", [[2, 3, 4, 5, 9]], [[120, 1080]]),  # results, and values in windows of 3 x 3
        # A thread computes 32768 values before the next helps.
        ("elementwise.sin", [[8, 1], [32768, 1], [32769, 1], [131072, 1]], [[8], [32768], [16384.5], [32768]]),
        ("conv_depthwise.padded", [[16, *[1] * 9, 88, 0]], [[1408]]),  # channels of all samples
        # Groups, and weights where pixels fill no vector: 16 of them do, and 1 needs none.
        (
            "conv_native",
            [[4, 32, 64, *[side] * 4, 1, 1, 1, 2, 0] for side in (1, 2, 3, 4)],
            [[2, 0], [2, 4 * 64 * 16], [2, 4 * 64 * 16], [2, 0]],
        ),
    ],
)
def test_loops_on_a_processor_take_time_for(family: str, dims: list[list[int]], counts: list[list[float]]) -> None:
    rows = np.column_stack((np.ones((len(dims), 4)), np.array(dims, dtype=float)))
    assert read(family, rows).loop_counts == pytest.approx(np.array(counts))


def test_sizes_of_products_are_whole_numbers() -> None:
    rows, cols = (side.ravel() for side in np.meshgrid(*[128.0 * np.arange(1, 65)] * 2))
    product = read("gemm", np.column_stack((*[np.ones(len(rows))] * 4, rows, cols, rows))).product
    assert product is not None
    assert product.tolist() == np.column_stack((rows, cols, rows, np.ones(len(rows)))).tolist()
    assert waves(product, 1).tolist() == (rows * cols / 128**2).tolist()


def test_a_convolution_is_a_product() -> None:
    # ResNet's 3 x 3 layer at 56 x 56, batch 2, in 4 groups of 16 channels.
    dims = {"batch": 2, "c_in": 64, "c_out": 128, "h_in": 56, "w_in": 56, "h_out": 28, "w_out": 28}
    dims |= {"kernel_h": 3, "kernel_w": 3, "stride": 2, "groups": 4, "kernel_d": 0}
    row = np.array([[1.0, 1.0, 1.0, 1.0, *(dims[name] for name in DIMS["conv_grouped"])]])
    inputs = read("conv_grouped", row)
    assert inputs.product is not None
    assert inputs.product[0] == pytest.approx([2 * 28 * 28, 128 / 4, 64 / 4 * 9, 4])
    features = dict(zip(layout("conv_grouped").names, np.exp(inputs.logs[0]), strict=True))
    assert features == pytest.approx(
        {"batch": 2, "pixels": 784, "c_in": 64, "c_out": 128, "window": 9, "stride": 2, "groups": 4}
    )


@pytest.mark.parametrize(
    ("module", "shape", "threads", "expected"),
    [
        # As r3d_18 has them: N * C * D * H is 14336, for which oneDNN is not asked at batch 1.
        (nn.Conv3d(256, 256, 3, padding=1), (1, 256, 4, 14, 14), 2, True),
        (nn.Conv3d(256, 256, 3, padding=1), (2, 256, 4, 14, 14), 2, False),
        (nn.Conv3d(256, 256, 3, padding=1), (1, 256, 6, 14, 14), 2, False),
        # Along the time alone, as r2plus1d_18 has them: one thread is not worth oneDNN, unless it moves by two.
        (nn.Conv3d(64, 64, (3, 1, 1), padding=(1, 0, 0)), (2, 64, 16, 56, 56), 1, True),
        (nn.Conv3d(64, 64, (3, 1, 1), (2, 1, 1), (1, 0, 0)), (2, 64, 16, 56, 56), 1, False),
        (nn.Conv3d(64, 64, (3, 1, 1), padding=(1, 0, 0)), (2, 64, 16, 56, 56), 2, False),
        (nn.Conv2d(8, 8, 1, (2, 1)), (2, 8, 8, 8), 1, False),
        (nn.Conv1d(8, 8, 1), (2, 8, 64), 1, True),
    ],
)
def test_pytorch_computes_a_convolution_itself_by_its_sizes(
    module: nn.Module, shape: tuple[int, ...], threads: int, expected: bool
) -> None:
    (op,) = (op for op in latpred.trace(module, torch.zeros(shape), batches=shape[:1]).ops if op.launches)
    row = np.array([[count.at(shape[0]) for count in columns(op, "conv")]], dtype=float)
    assert native("conv", row, threads).tolist() == [expected]


def test_a_flag_of_zero_stays_finite_and_apart_from_one() -> None:
    plain, masked = (
        read("attention", np.array([[1.0, 0.0, 1.0, 1.0, 2.0, 12.0, 128.0, 128.0, 64.0, flag]])) for flag in (0.0, 1.0)
    )
    assert np.isfinite(plain.logs).all()
    assert masked.logs[0, -1] - plain.logs[0, -1] == pytest.approx(np.log(2))


def test_a_generated_kernel_does_more_in_a_wider_model() -> None:
    sizes = dict(zip(DIMS["generated"], map(Affine, (800, 4, 2, 3200, 800, 0, 0)), strict=True))
    op = msgspec.structs.replace(add(100), family="generated.math", dims=sizes)
    (wide,) = widened(graph(op), 2.0).ops
    assert [size.constant for size in wide.dims.values()] == [1600, 4, 2, 6400, 1600, 0, 0]
    assert wide.write_bytes == op.write_bytes * 2


def test_every_family_with_a_width_has_its_dimensions() -> None:
    for family, (_, growing) in GROWTHS.items():
        assert set(growing) <= set(DIMS[family])


def network(width: int) -> nn.Module:
    convolutions = (nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU())
    depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
    pooled = (nn.Conv2d(width, width, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, width))
    return nn.Sequential(*convolutions, depthwise, *pooled, nn.GELU(), nn.LayerNorm(width), nn.Linear(width, width))


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_wider_graph_is_what_a_wider_model_does(factor: float) -> None:
    usual, real = (latpred.trace(network(width), torch.zeros(2, 3, 16, 16)) for width in (64, int(64 * factor)))
    wide = widened(usual, factor)
    for found, expected in zip(wide.ops, real.ops, strict=True):
        assert (found.family, found.dims, found.macs) == (expected.family, expected.dims, expected.macs)
        assert found.weight_bytes.at(2) == pytest.approx(expected.weight_bytes.at(2), rel=0.05)  # biases
    assert wide.bytes(8) == pytest.approx(real.bytes(8), rel=0.02)
