"""Formats that no profile was measured in, priced by what is known; and intervals of a profile whose gate failed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch
from factories import add, graph, linear
from profiledata import profile
from smallmodels import Function
from torch import nn

import latpred
from latpred.errors import ProfileError, TraceError
from latpred.graph.graph import Op
from latpred.ops.families import root
from latpred.prediction.clocks import Z90
from latpred.prediction.fallbacks import FP64_OVER_FP32, least_log_std
from latpred.prediction.prediction import Prediction
from latpred.prediction.predictor import Predictor
from latpred.profile import gpus, store
from latpred.profile.document import Acceptance, DeviceProfile
from latpred.runtimes import lowering

WIDTH = 2048


class Product(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(WIDTH, WIDTH, dtype=dtype, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def predicted(dtype: torch.dtype, device: str = "epyc-shared", batch: int = 512, runtime: str = "eager") -> Prediction:
    x = torch.ones(1, WIDTH, dtype=dtype)
    return latpred.predict(Product(dtype), batch, runtime, inputs=x, device=device)


def said(prediction: Prediction) -> str:
    return " | ".join(prediction.provenance.caveats)


@pytest.fixture
def doubles() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("device", "slower"), [("epyc-shared", 2.0), ("rtx-8000", 32.0), ("rtx-3090", 64.0), ("a30", 1.0)]
)
def test_doubles_take_as_much_longer_as_is_known(device: str, slower: float) -> None:
    single, double = predicted(torch.float32, device), predicted(torch.float64, device)
    assert double.precision == "fp64"
    assert "products in float64 were not measured" in said(double)
    assert double.compute_ms / single.compute_ms == pytest.approx(slower, rel=0.1 if slower == 1.0 else 0.4)
    assert double.interval_ms[1] / double.latency_ms >= 1.5


@pytest.mark.parametrize(("device", "window"), [("a100", 3), ("h100-shared", 3), ("h100-shared", 5)])
def test_convolutions_in_doubles_do_without_tf32(device: str, window: int) -> None:
    def convolved(dtype: torch.dtype, precision: str | None = None) -> Prediction:
        layer = nn.Conv2d(256, 256, window, dtype=dtype, device="meta")
        inputs = torch.zeros(1, 256, 56, 56)
        return latpred.predict(layer, 64, inputs=inputs, device=device, precision=precision)

    single, double = convolved(torch.float32), convolved(torch.float64)
    assert double.compute_ms > 4 * single.compute_ms
    assert "of the rate of tf32" in said(double)
    if device == "h100-shared":  # which says of fp32 what it says of tf32, as datasheets do
        assert single.compute_ms == convolved(torch.float32, "tf32").compute_ms


def test_every_architecture_has_a_rate_of_doubles() -> None:
    assert {spec.compute_capability for spec in gpus.SPECS} <= set(FP64_OVER_FP32)


@pytest.mark.parametrize("runtime", ["torchscript", "compile", "onnxruntime"])
def test_other_runtimes_run_doubles(runtime: str) -> None:
    graph = lowering.trace_for_runtime(nn.Linear(8, 8, dtype=torch.float64), torch.zeros(1, 8), runtime=runtime)
    assert graph.precision == "fp64"
    assert {op.dtype for op in graph.ops if root(op.family) == "gemm"} == {"float64"}
    asked = latpred.trace(nn.Linear(8, 8), torch.zeros(1, 8), precision="fp64")
    assert (asked.precision, asked.parameter_bytes) == ("fp64", 8 * 72)


def test_a_complex_multiply_add_is_four() -> None:
    single, found = predicted(torch.float32), predicted(torch.complex64)
    assert found.precision == "complex64"
    assert "priced as 4 in float32" in said(found)
    assert found.compute_ms / single.compute_ms == pytest.approx(4, rel=0.1)
    graph = latpred.trace(Product(torch.complex64), torch.ones(1, WIDTH, dtype=torch.complex64))
    assert graph.macs(3) == 4 * 3 * WIDTH * WIDTH


def test_products_of_integers_are_slow_or_refused_and_of_8_bit_floats_refused() -> None:
    found = predicted(torch.int64)
    assert found.compute_ms > 6 * predicted(torch.float32).compute_ms
    assert found.interval_ms[1] > 2.5 * found.latency_ms
    assert "aten::matmul in int64 was not measured: its speed is a guess" in said(found)
    with pytest.raises(ProfileError, match=r"PyTorch has no aten::matmul in int64 on rtx-8000.* Convert the operands"):
        predicted(torch.int64, "rtx-8000")
    with pytest.raises(ProfileError, match="no kernels in float8_e4m3fn"):
        predicted(torch.float8_e4m3fn)


@pytest.mark.parametrize("op", [linear(dtype="float16"), add(dtype="float16")])
def test_halves_that_were_not_measured_are_a_guess(op: Op) -> None:
    """A part in half precision of a model in fp32: that profile knows fp32 and bf16."""
    known, guessed = (
        latpred.predict(graph(msgspec.structs.replace(op, dtype=dtype)), 64, device="epyc-genoa")
        for dtype in ("bfloat16", "float16")
    )
    assert guessed.interval_ms[1] / guessed.latency_ms > 1.3 * known.interval_ms[1] / known.latency_ms
    assert "kernels in float16 were not measured: their speed is a guess" in said(guessed)
    assert "were not measured" not in said(known)


@pytest.mark.parametrize(
    ("sorts", "comparisons"),
    [(lambda x: x.sort()[1], 10), (lambda x: x.topk(5)[1], 1), (lambda x: torch.bucketize(x, torch.zeros(1000)), 10)],
    ids=["sort", "topk", "bucketize"],
)
def test_what_sorts_on_a_cpu_takes_its_time_to_compare(
    sorts: Callable[[torch.Tensor], torch.Tensor], comparisons: int
) -> None:
    """Sorting 64 times 1000 values took 3.2 ms where their bytes take 0.05."""
    traced = latpred.trace(Function(sorts), torch.zeros(64, 1024))
    found = latpred.predict(traced, 64, device="epyc-genoa")
    assert 1e3 * found.compute_ms == pytest.approx(0.005 * 64 * 1024 * comparisons, rel=0.2)
    assert "the profile has no measurements of sort." in said(found)


@pytest.mark.parametrize(("device", "longer"), [("epyc-genoa", True), ("h100-shared", False)])
def test_a_guess_of_a_recurrent_layer_on_a_cpu_knows_its_steps(device: str, longer: bool) -> None:
    """Steps of next to no work, one after the other: each takes a product and an activation of PyTorch's."""
    whole = store.load(device)
    kernels = {
        precision: {family: fit for family, fit in fits.items() if root(family) != "rnn"}
        for precision, fits in whole.kernels.items()
    }
    predictor = Predictor(msgspec.structs.replace(whole, kernels=kernels))
    layer = nn.GRU(8, 8)

    def compute_ms(steps: int) -> float:
        traced = latpred.trace(layer, lambda batch: torch.zeros(steps, batch, 8))
        return predictor.predict(traced, 1).compute_ms

    more_us = 1e3 * (compute_ms(101) - compute_ms(1)) / 100
    costs_us = whole.runtimes["eager"].costs_us
    least_us = costs_us["gemm"] + costs_us["elementwise"]
    assert (0.9 * least_us < more_us < 1.5 * least_us) == longer


class Scaled(nn.Module):
    """Operands of 8 bits, a result of 16."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(WIDTH, WIDTH, dtype=torch.float8_e4m3fn, device="meta"))
        self.register_buffer("scale", torch.ones((), device="meta"))
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.bfloat16, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        short = self.norm(x).to(torch.float8_e4m3fn)
        return torch._scaled_mm(short, self.weight.t(), self.scale, self.scale, out_dtype=torch.bfloat16)


@pytest.mark.parametrize("device", ["h100", "h100-shared", "rtx-3090", "rtx-8000"])
def test_recurrent_steps_wait_for_each_other_on_gpus(device: str) -> None:
    def compute_us(steps: int, channels: int) -> float:
        layer = nn.LSTM(channels, channels)
        graph = latpred.trace(layer, lambda batch: torch.zeros(steps, batch, channels), precision="fp16")
        return latpred.predict(graph, 7, device=device).compute_ms * 1e3

    assert compute_us(1000, 512) > 2000.0, "far more than its multiply-adds take"
    assert compute_us(194, 64) < 300.0, "an H100 took 94 us, since one multiprocessor holds the weights"


@pytest.mark.parametrize("device", ["h100", "l40s", "rtx-4090", "b200"])
def test_scaled_products_of_8_bits_take_the_rate_of_the_datasheet(device: str) -> None:
    def product_ms(model: nn.Module) -> float:
        x = torch.ones(1, WIDTH, dtype=torch.bfloat16)
        found = latpred.predict(model, 65536, inputs=x, device=device)
        assert ("in float8_e4m3fn were not measured: priced at 2.0 times" in said(found)) == isinstance(model, Scaled)
        assert found.precision == "bf16"
        return next(share.compute_ms for share in found.breakdown if share.name == "gemm")

    assert product_ms(Scaled()) / product_ms(Product(torch.bfloat16)) == pytest.approx(0.5, abs=0.15)


def test_scaled_products_of_8_bits_are_refused_where_the_datasheet_has_none() -> None:
    with pytest.raises(ProfileError, match=r"A30 multiplies nothing in float8_e4m3fn.* Name a GPU that does"):
        latpred.predict(Scaled(), 8, inputs=torch.ones(1, WIDTH, dtype=torch.bfloat16), device="a30")


def test_quantised_modules_are_refused_but_those_that_may_be_quantised_one_day_are_not() -> None:
    class Linear(nn.Linear):
        __module__ = "torch.ao.nn.quantized.dynamic.modules.linear"

    with pytest.raises(
        TraceError, match=r"quantised modules \(Linear\), whose kernels nobody measured; give the model"
    ):
        latpred.trace(nn.Sequential(Linear(8, 8)), torch.zeros(1, 8))

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sum = torch.ao.nn.quantized.FloatFunctional()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.sum.add(x, x)

    found = latpred.trace(Joined(), torch.zeros(1, 8))
    assert [(op.name, op.dtype) for op in found.ops if op.launches] == [("aten::add", "float32")]


@pytest.mark.parametrize("name", ["resnet-18", "bert-base-uncased"])
def test_named_models_are_single_whatever_the_process_does(name: str, doubles: None) -> None:
    found = latpred.trace(name)
    assert torch.get_default_dtype() == torch.float64
    assert latpred.trace(nn.Linear(4, 4), torch.zeros(1, 4)).precision == "fp64"  # a model of one's own
    torch.set_default_dtype(torch.float32)
    assert found == latpred.trace(name)
    assert found.precision == "fp32"
    assert "float64" not in {op.dtype for op in found.ops}


P90 = "p90 error of ordinary models that no fit saw at most 40%"
SHIFT = "median shift between two timings at most 10%"


def accepted(passed: bool, checks: dict[str, str], runtimes: dict[str, bool] | None = None) -> DeviceProfile:
    return profile(acceptance=Acceptance(passed, checks, (), runtimes or {}))


def factor(made: DeviceProfile) -> float:
    """Upper end of an interval over the prediction."""
    found = Predictor(made).predict(graph(linear()))
    return found.interval_ms[1] / found.latency_ms


@pytest.mark.parametrize(
    ("checks", "wanted"),
    [
        ({P90: "212.0%: failed"}, 3.12),  # three times too long
        ({P90: "80.0%: failed"}, 5.0),  # or five times too short
        ({P90: "inf%: failed", "networks to judge by at least 5": "0: failed"}, 10.0),
        ({"cells": "1 of 9"}, 10.0),
        ({P90: "60.0%: failed", SHIFT: "8.0%: passed"}, 2.5),
        ({P90: "20.0%: passed", SHIFT: "60.0%: failed"}, 4.39),  # times that moved between two timings
    ],
)
def test_an_interval_holds_the_errors_that_the_gate_found(checks: dict[str, str], wanted: float) -> None:
    assert factor(accepted(False, checks)) == pytest.approx(wanted, rel=1e-3)
    assert factor(accepted(True, checks)) == pytest.approx(math.exp(0.05 * Z90), rel=0.02)


def test_each_runtime_has_its_own_verdict() -> None:
    failed = accepted(True, {P90: "9.0%: passed", f"torchscript: {P90}": "100.0%: failed"}, {"torchscript": False})
    assert least_log_std(failed, "eager") == 0.0
    assert least_log_std(failed, "torchscript") == pytest.approx(math.log(2) / Z90)
    both = accepted(False, {P90: "300.0%: failed", f"torchscript: {P90}": "100.0%: failed"}, {"torchscript": False})
    assert least_log_std(both, "torchscript") == pytest.approx(math.log(4) / Z90)
    assert least_log_std(msgspec.structs.replace(both, provenance="datasheet"), "eager") == 0.0


def test_a_fit_to_published_tables_that_failed_its_gate_is_as_wide_as_its_errors() -> None:
    t4 = store.load("t4")  # 60.6 % at p90
    for runtime in ("eager", "onnxruntime"):
        assert least_log_std(t4, runtime) == pytest.approx(-math.log1p(-0.606) / Z90)
    passed = Acceptance(True, {}, (), {"torchscript": False})
    assert [least_log_std(t4, "torchscript"), least_log_std(store.load("a100"), "eager")] == [0.0, 0.0]
    assert least_log_std(msgspec.structs.replace(t4, acceptance=passed), "torchscript") > 0.0
    assert least_log_std(msgspec.structs.replace(t4, protocol={}), "eager") == 0.0
