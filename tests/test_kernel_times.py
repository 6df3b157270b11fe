"""Kernel times: which of a profile's fits prices a kernel, and few rows take the same whatever lies beside them."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from factories import device, dispatch, graph, kernel_fit, machine, profile

from latpred.graph.features import NATIVE, ROW_BY_ROW, Floats, layout
from latpred.graph.graph import Affine, Op
from latpred.ops.families import CONV_DIMS
from latpred.prediction.kernel_times import KernelModel, fresh_bytes
from latpred.prediction.predictor import Predictor
from latpred.profile import datasheet, gpus, store
from latpred.profile.document import DeviceProfile


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


def test_a_librarys_convolution_needs_memory_for_what_it_lays_out_as_well() -> None:
    mib, dims = 2**20, (8, 8, 4, 4, 4, 4, 1, 1, 1, 1, 0)
    given = np.array([[0, 40 * mib, 10 * mib, 50 * mib, batch, *dims] for batch in (2, 16)], dtype=float)
    # PyTorch's own has its result alone; of an input below 32 MiB nothing is to be seen.
    assert (fresh_bytes("conv", given, threads=1) / mib).tolist() == [50, 50 + 40 + 50]


def test_bytes_bind_a_kernel_no_longer_than_the_memory_of_its_gpu_needs_for_them() -> None:
    """A fit that puts down to bytes what a convolution does besides does not make it memory-bound."""
    limits = datasheet.limits_of(gpus.spec("t4"), "fp32", "gemm")
    given = np.array([[1e9, 0, 5e5, 5e5, 100, 100, 100], [1e6, 0, 5e5, 5e5, 100, 100, 100]], dtype=float)
    assert KernelModel(kernel_fit("gemm")).times(given).memory_bound.tolist() == [True, True]
    assert KernelModel(kernel_fit("gemm"), limits=limits).times(given).memory_bound.tolist() == [False, True]


CPU = device(asynchronous=False, kind="cpu", launch_us=0.0, gap_us=0.0, sync_us=0.0)


def convolution(family: str = "conv", side: int = 1) -> Op:
    """A small convolution that moves nothing to speak of."""
    sizes = {
        "batch": Affine(0, 1),
        "c_in": Affine(4),
        "c_out": Affine(4),
        "kernel_h": Affine(side),
        "kernel_w": Affine(side),
    }
    dims = {name: sizes.get(name, Affine(8 if name[1] == "_" else 1)) for name in CONV_DIMS}
    return Op("aten::conv2d", "", "conv", family, "float32", dims, launches=1)


def with_native(*names: str) -> DeviceProfile:
    """Kernels of 2 us each, those that PyTorch computes itself of 50, on one thread."""
    made = profile(CPU, (*(kernel_fit(name) for name in names), kernel_fit(NATIVE, floor_us=50.0)))
    return msgspec.structs.replace(made, machine=machine(threads=1))


def compute_us(made: DeviceProfile, *ops: Op, **changes: object) -> list[float]:
    predictor = Predictor(made)
    return [1e3 * predictor.predict(graph(op, **changes)).compute_ms for op in ops]


def test_what_pytorch_computes_itself_has_a_fit_of_its_own() -> None:
    theirs = msgspec.structs.replace(convolution(), name="ort::Conv")  # no matter of other libraries
    ops = convolution(), convolution(side=5), theirs, convolution()
    assert compute_us(with_native("conv"), *ops) == pytest.approx([50.0, 2.0, 2.0, 50.0])
    # Of a pointwise one fewer than 16 samples are PyTorch's own on one thread.
    curve = Predictor(with_native("conv")).curve(graph(convolution()), [*range(2, 10), *range(64, 72)])
    assert 1e3 * curve.compute_ms == pytest.approx([50.0] * 8 + [2.0] * 8)
    stand_in = convolution("conv_depthwise")  # changes nothing for those that the fit was measured for
    assert compute_us(with_native("conv"), stand_in, convolution()) == pytest.approx([50.0, 50.0])
    gpu = msgspec.structs.replace(with_native("conv"), device=device(kind="cuda", gap_us=0.0))
    assert compute_us(gpu, convolution()) == pytest.approx([2.0])


def test_a_special_convolution_keeps_the_fit_of_its_own() -> None:
    fits = {name: kernel_fit("conv", floor_us=us) for name, us in (("conv", 9.0), ("conv.nchwc", 3.0))}
    made = profile(CPU, (kernel_fit("conv"),), {"eager": dispatch(kernels={"fp32": fits})})
    ops = [convolution(name, side) for side in (1, 3, 5) for name in ("conv.nchwc", "conv")]
    assert compute_us(made, *ops) == pytest.approx([3.0, 9.0] * 3)


def test_a_runtime_scales_what_it_has_no_fit_of_in_the_precision_asked_for() -> None:
    shared = {"fp32": {"conv": kernel_fit("conv")}, "fp16": {"conv": kernel_fit("conv")}}
    runtime = dispatch(kernels={"fp16": {"conv": kernel_fit("conv", floor_us=7.0)}}, kernel_scales={"conv": 3.0})
    made = msgspec.structs.replace(profile(CPU, runtimes={"eager": runtime}), kernels=shared)
    half = msgspec.structs.replace(convolution(), dtype="float16")
    assert compute_us(made, half, precision="fp16") == pytest.approx([7.0])
    assert compute_us(made, convolution()) == pytest.approx([3 * 2.0])


def test_a_small_convolution_takes_a_gpu_of_a_datasheet_time_to_compute() -> None:
    ops = (msgspec.structs.replace(convolution(), macs=Affine(0, macs)) for macs in (10**3, 10**9))
    light, heavy = compute_us(datasheet.profile_of(gpus.spec("a100")), *ops)
    assert heavy > 2 * light
