"""Kernel times: what is evaluated of a few rows does not depend on those beside them."""

from __future__ import annotations

import numpy as np
import pytest
from factories import kernel_fit

from latpred.graph.features import ROW_BY_ROW, Floats, layout
from latpred.prediction.kernel_times import KernelModel, fresh_bytes
from latpred.profile import store


def rows(count: int, family: str = "gemm") -> Floats:
    return np.random.default_rng(0).integers(1, 512, (count, len(layout(family).columns))).astype(float)


@pytest.mark.parametrize("device", ["epyc-shared", "rtx-8000", "titan-x-pascal"])
@pytest.mark.parametrize("family", ["gemm", "conv.3x3", "bmm"])
def test_few_rows_take_the_same_to_the_bit_with_others_and_alone(device: str, family: str) -> None:
    fits = store.load(device).kernels["fp32"]
    model = KernelModel(fits.get(family, fits["conv"]))
    given = rows(ROW_BY_ROW, model.fit.family)
    together = model.times(given, np.arange(1.0, ROW_BY_ROW + 1.0))
    for count in (1, 3, 16, ROW_BY_ROW - 1):
        for first in range(ROW_BY_ROW - count + 1):
            part = slice(first, first + count)
            alone = model.times(given[part], np.arange(1.0, ROW_BY_ROW + 1.0)[part])
            assert [column.tobytes() for column in alone] == [column[part].tobytes() for column in together]


def test_no_rows_take_no_time() -> None:
    assert [len(column) for column in KernelModel(kernel_fit("gemm")).times(rows(0))] == [0, 0, 0]


def test_each_convolution_is_evaluated_by_the_fit_of_who_computes_it() -> None:
    fits = [kernel_fit(family, floor_us=floor) for family, floor in (("conv", 2.0), ("conv_native", 500.0))]
    model = KernelModel(fits[0], KernelModel(fits[1]), threads=1)
    # Pointwise convolutions of fewer than 16 samples are PyTorch's own on one thread.
    given = np.array([[0, 0, 0, 0, batch, 8, 8, 4, 4, 4, 4, 1, 1, 1, 1] for batch in (2, 64, 3, 128)], dtype=float)
    assert (model.times(given).us > 100.0).tolist() == [True, False, True, False]
    for both, alone in zip(model.times(np.repeat(given, 8, axis=0)), model.times(given), strict=True):
        assert both[::8].tolist() == alone.tolist()


def test_a_librarys_convolution_needs_memory_for_what_it_lays_out_as_well() -> None:
    mib, dims = 2**20, (8, 8, 4, 4, 4, 4, 1, 1, 1, 1)
    given = np.array([[0, 40 * mib, 10 * mib, 50 * mib, batch, *dims] for batch in (2, 16)], dtype=float)
    # PyTorch's own has its result alone; of an input below 32 MiB nothing is to be seen.
    assert (fresh_bytes("conv", given, threads=1) / mib).tolist() == [50, 50 + 40 + 50]
