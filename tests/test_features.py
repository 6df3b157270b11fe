"""Features against dimensions worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from latpred.graph.features import TILE, layout, read, waves
from latpred.ops.families import DIMS


def test_every_family_has_a_layout() -> None:
    for family, dims in DIMS.items():
        form = layout(family)
        assert form.columns == ("macs", "weight_bytes", "read_bytes", "write_bytes", *dims)
        assert form.powers.shape[0] == len(dims)
        inputs = read(family, np.ones((3, len(form.columns))))
        assert inputs.logs.shape == (3, len(form.names))


def test_special_and_unknown_families_borrow_a_layout() -> None:
    assert layout("norm.layer_norm").columns == layout("norm").columns
    assert layout("flash.custom").columns == layout("other").columns


def test_a_convolution_is_a_product() -> None:
    # ResNet's 3 x 3 layer at 56 x 56, batch 2, in 4 groups of 16 channels.
    dims = {"batch": 2, "c_in": 64, "c_out": 128, "h_in": 56, "w_in": 56, "h_out": 28, "w_out": 28}
    dims |= {"kernel_h": 3, "kernel_w": 3, "stride": 2, "groups": 4}
    row = np.array([[1.0, 1.0, 1.0, 1.0, *(dims[name] for name in DIMS["conv_grouped"])]])
    inputs = read("conv_grouped", row)
    assert inputs.product is not None
    assert inputs.product[0] == pytest.approx([2 * 28 * 28, 128 / 4, 64 / 4 * 9, 4])
    features = dict(zip(layout("conv_grouped").names, np.exp(inputs.logs[0]), strict=True))
    assert features == pytest.approx(
        {"batch": 2, "pixels": 784, "c_in": 64, "c_out": 128, "window": 9, "stride": 2, "groups": 4}
    )


def test_a_flag_of_zero_stays_finite_and_apart_from_one() -> None:
    plain, masked = (
        read("attention", np.array([[1.0, 0.0, 1.0, 1.0, 2.0, 12.0, 128.0, 128.0, 64.0, flag]])) for flag in (0.0, 1.0)
    )
    assert np.isfinite(plain.logs).all()
    assert masked.logs[0, -1] - plain.logs[0, -1] == pytest.approx(np.log(2))


def test_waves() -> None:
    # 300 x 300 needs 3 x 3 tiles; two copies on 4 multiprocessors are 4.5 rounds.
    assert TILE == 128
    assert waves(np.array([[300.0, 300.0, 64.0, 2.0]]), 4) == pytest.approx([4.5])
