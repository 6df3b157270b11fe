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


def test_what_pytorch_computes_itself_has_a_fit_of_its_own() -> None:
    predictor = Predictor(with_native("conv"))
    assert predictor.predict(graph(convolution())).compute_ms == pytest.approx(0.050)
    assert predictor.predict(graph(convolution(side=5))).compute_ms == pytest.approx(0.002)


def test_a_stand_in_changes_nothing_for_those_it_was_measured_for() -> None:
    predictor = Predictor(with_native("conv"))
    stand_in = predictor.predict(graph(convolution("conv_depthwise")))
    assert stand_in.compute_ms == pytest.approx(0.050)
    assert predictor.predict(graph(convolution())).compute_ms == pytest.approx(0.050)


def test_a_special_convolution_keeps_the_fit_of_its_own() -> None:
    fits = {name: kernel_fit("conv", floor_us=us) for name, us in (("conv", 9.0), ("conv.nchwc", 3.0))}
    runtime = dispatch(kernels={"fp32": fits})
    predictor = Predictor(profile(CPU, (kernel_fit("conv"),), {"eager": runtime}))
    for side in (1, 3, 5):
        assert predictor.predict(graph(convolution("conv.nchwc", side))).compute_ms == pytest.approx(0.003)
        assert predictor.predict(graph(convolution("conv", side))).compute_ms == pytest.approx(0.009)


def test_what_pytorch_computes_itself_is_no_matter_of_other_libraries() -> None:
    predictor = Predictor(with_native("conv"))
    theirs = msgspec.structs.replace(convolution(), name="ort::Conv")
    assert predictor.predict(graph(theirs)).compute_ms == pytest.approx(0.002)
    assert predictor.predict(graph(convolution())).compute_ms == pytest.approx(0.050)


def test_a_runtime_scales_what_it_has_no_fit_of_in_the_precision_asked_for() -> None:
    shared = {"fp32": {"conv": kernel_fit("conv")}, "fp16": {"conv": kernel_fit("conv")}}
    runtime = dispatch(kernels={"fp16": {"conv": kernel_fit("conv", floor_us=7.0)}}, kernel_scales={"conv": 3.0})
    made = msgspec.structs.replace(profile(CPU, runtimes={"eager": runtime}), kernels=shared)
    half = msgspec.structs.replace(convolution(), dtype="float16")
    assert Predictor(made).predict(graph(half, precision="fp16")).compute_ms == pytest.approx(0.007)
    assert Predictor(made).predict(graph(convolution())).compute_ms == pytest.approx(3 * 0.002)


def test_gpus_have_libraries_for_all_convolutions() -> None:
    made = msgspec.structs.replace(with_native("conv"), device=device(kind="cuda", gap_us=0.0))
    assert Predictor(made).predict(graph(convolution())).compute_ms == pytest.approx(0.002)


def test_a_small_convolution_takes_a_gpu_of_a_datasheet_time_to_compute() -> None:
    predictor = Predictor(datasheet.profile_of(gpus.spec("a100")))
    light, heavy = (msgspec.structs.replace(convolution(), macs=Affine(0, macs)) for macs in (10**3, 10**9))
    assert predictor.predict(graph(heavy)).compute_ms > 2 * predictor.predict(graph(light)).compute_ms
