"""Runtimes that nobody measured on a GPU are estimated from eager's costs, with an interval and a caveat to match."""

from __future__ import annotations

import math

import factories
import msgspec
import pytest
import torch
from clidata import run
from smallmodels import Function

import latpred
from latpred import Predictor
from latpred.errors import ProfileError
from latpred.ops.families import nearest
from latpred.prediction.fallbacks import ESTIMATES, STREAM_GAP_US, caveat, with_estimates
from latpred.profile import datasheet, gpus, store
from latpred.profile.document import FITTED, DeviceProfile
from latpred.runtimes.inductor import compiled_ops

FITTED_GPUS = ("rtx-8000", "rtx-2080ti", "rtx-3090", "rtx-a6000", "titan-x-pascal")
DATASHEETS = ("l4", "a30", "a10", "h100", "rtx-5090")
RUNTIMES = (
    *("torchscript", "cuda-graphs", "onnxruntime", "onnxruntime-cuda-graphs", "onnxruntime-optimized"),
    *("compile", "compile-reduce-overhead", "tensorrt"),
)

SOURCE = """
import torch
from torch import nn


def build():
    layers = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(16, 10)), (torch.zeros(1, 3, 32, 32),)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("models") / "models.py"
    file.write_text(SOURCE)
    return f"{file}:build"


@pytest.mark.parametrize("device", [*FITTED_GPUS, *DATASHEETS])
def test_every_gpu_answers_for_every_runtime(device: str, model: str) -> None:
    known = store.load(device).runtimes
    eager = latpred.predict(model, batch=1, device=device)
    for runtime in RUNTIMES:
        small, large = latpred.predict(model, [1, 4096], runtime, device=device)
        assert 0 < small.latency_ms < eager.latency_ms
        assert large.latency_ms > small.latency_ms
        assert (caveat(runtime) in small.provenance.caveats) == (runtime not in known)
        if runtime not in known:
            half_width = math.log(large.interval_ms[1] / large.latency_ms) / 1.645
            assert half_width > ESTIMATES[runtime].log_std  # wider than what kernels alone deserve


def test_the_command_says_what_an_estimate_rests_on(model: str) -> None:
    runtime = "onnxruntime"
    found = run("predict", model, "--batch", "1,8", "--device", "h100", "--runtime", runtime)
    assert found.exit_code == 0
    printed = " ".join(found.stdout.split())
    assert f"{runtime} was not measured on this GPU: estimated from" in printed
    assert f"latpred calibrate --device cuda:0 --runtimes {runtime}" in printed


@pytest.mark.parametrize("device", ["rtx-8000", "h100"])
def test_explain_sets_all_of_them_side_by_side(device: str, model: str) -> None:
    found = latpred.explain(model, device=device)
    assert {choice.runtime for choice in found.choices} == {"eager", *RUNTIMES}
    assert "not measured on this GPU" in " ".join(str(found).split())


def fitted() -> DeviceProfile:
    costs = {"": 7.0, "gemm": 20.0, "elementwise": 8.0, "view": 4.0}
    eager = factories.dispatch(costs_us=costs, spread=0.1, busy_spread=0.08, host_spread=0.3)
    return msgspec.structs.replace(factories.profile(runtimes={"eager": eager}), provenance=FITTED)


def test_estimates_follow_from_eagers_costs() -> None:
    eager = fitted().runtimes["eager"]
    found = with_estimates(fitted()).runtimes
    assert found["eager"] == eager
    assert set(found) == {"eager", *RUNTIMES}
    assert found["cuda-graphs"].fixed_us == datasheet.LAUNCH_US
    assert set(found["cuda-graphs"].costs_us.values()) == {0.0}
    assert found["onnxruntime"].costs_us["node"] == eager.costs_us["elementwise"]
    assert found["onnxruntime"].costs_us["node.attention"] > found["onnxruntime"].costs_us["node"]
    assert 0 < found["onnxruntime"].costs_us["node.view"] < eager.costs_us["view"]
    shipped = store.load("rtx-2080ti").runtimes
    ratio = shipped["torchscript"].costs_us["gemm"] / shipped["eager"].costs_us["gemm"]
    assert found["torchscript"].costs_us["node.gemm"] == pytest.approx(20.0 * ratio, rel=1e-4)
    assert found["torchscript"].costs_us["node.bmm"] == found["torchscript"].costs_us["node.gemm"]
    compiled = found["compile"]
    assert nearest(compiled.costs_us, f"{compiled_ops.EXTERN_CLASS}.gemm") == found["torchscript"].costs_us["gemm"]
    assert nearest(compiled.costs_us, compiled_ops.GENERATED_CLASS) == eager.costs_us["elementwise"]
    assert nearest(compiled.costs_us, f"{compiled_ops.EAGER_CLASS}.gemm.linear") == eager.costs_us["gemm"]
    assert nearest(compiled.costs_us, compiled_ops.GUARDS) > eager.costs_us["elementwise"]
    assert found["tensorrt"].costs_us[""] < found["onnxruntime"].costs_us["node"]
    for name in RUNTIMES:
        assert found[name].module_call_us == 0.0
        assert found[name].host_spread == eager.host_spread
        assert found[name].spread == pytest.approx(math.hypot(0.1, ESTIMATES[name].log_std), rel=1e-4)


def test_kernels_that_are_launched_one_by_one_follow_each_other_later_than_in_a_graph(model: str) -> None:
    alone, replayed = (
        latpred.predict(model, 1, runtime, device="h100") for runtime in ("onnxruntime", "onnxruntime-cuda-graphs")
    )
    gaps = (alone.compute_ms - replayed.compute_ms) * 1e3 / STREAM_GAP_US
    assert round(gaps) > 1
    assert gaps == pytest.approx(round(gaps))
    found = with_estimates(fitted()).runtimes
    assert {name for name in found if found[name].gap_us} == {"onnxruntime", "onnxruntime-optimized", "tensorrt"}


def test_what_is_known_is_not_estimated() -> None:
    shipped = store.load("rtx-8000")
    assert with_estimates(shipped).runtimes["torchscript"] is shipped.runtimes["torchscript"]
    measured = factories.profile()
    assert with_estimates(measured) is measured
    with pytest.raises(ProfileError, match="latpred calibrate --device cuda:0 --runtimes cuda-graphs"):
        Predictor(factories.profile(factories.device(kind="cuda"))).check("cuda-graphs")


def test_measured_rows_turn_an_estimate_into_a_runtime_of_the_profile() -> None:
    sheet = datasheet.profile_of(gpus.spec("a100"))
    graphs = [factories.graph(*[factories.linear(32, 64 * n)] * n, model=f"tower {n}") for n in range(1, 11)]
    predictor = Predictor(sheet)
    rows = [
        (graph, 4, "cuda-graphs", "fp32", 1.5 * predictor.predict(graph, 4, runtime="cuda-graphs").latency_ms)
        for graph in graphs
    ]
    adapted = latpred.adapt(sheet, rows).profile
    assert set(adapted.runtimes) == {"eager", "cuda-graphs"}
    found = Predictor(adapted).predict(graphs[3], 4, runtime="cuda-graphs")
    assert found.latency_ms == pytest.approx(rows[3][-1], rel=0.05)
    assert caveat("cuda-graphs") not in found.provenance.caveats


def test_graphs_of_an_era_are_captured_with_its_kernels() -> None:
    """CUDA graphs hold the kernels that eager of the time ran; onnxruntime makes a graph of its own."""
    attention = Function(lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x))
    captured, exported = (
        latpred.predict(attention, inputs=torch.zeros(1, 2, 8, 16), runtime=runtime, device="rtx-8000")
        for runtime in ("cuda-graphs", "onnxruntime-cuda-graphs")
    )
    assert {"gemm", "softmax"} <= set(captured.costs.names)
    assert "attention" not in captured.costs.names
    assert captured.overhead_ms == exported.overhead_ms == datasheet.LAUNCH_US / 1e3
