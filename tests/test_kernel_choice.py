"""Which of a profile's fits prices a convolution: special families, kinds, and those that PyTorch computes itself."""

from __future__ import annotations

import msgspec
import pytest
from factories import device, dispatch, graph, kernel_fit, machine, profile

from latpred.graph.features import NATIVE
from latpred.graph.graph import Affine, Op
from latpred.ops.families import CONV_DIMS
from latpred.prediction.predictor import Predictor
from latpred.profile import datasheet, gpus
from latpred.profile.document import DeviceProfile

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
