"""Datasheets agree with themselves, go by any name of a GPU, and make profiles that are said to be guesses."""

from __future__ import annotations

import factories
import msgspec
import numpy as np
import pytest
import torch

import latpred
from latpred.errors import ProfileError, UnknownGpuError
from latpred.prediction.kernel_times import evaluate
from latpred.prediction.predictor import Predictor
from latpred.prediction.pricing import PriceList
from latpred.profile import datasheet, gpus, store
from latpred.profile.document import decode, encode
from latpred.profile.profile_page import profile_page


def network(rows: int = 128) -> latpred.ModelGraph:
    return factories.graph(*[factories.linear(rows), factories.add(), factories.view()] * 12)


def test_a_gpu_without_a_profile_is_predicted_from_its_datasheet() -> None:
    found = latpred.predict(network(), device="h200")
    wide = network(rows=65536)
    slow, fast = (latpred.predict(wide, device=name) for name in ("titan-x-pascal", "h100"))
    assert slow.latency_ms > 3 * fast.latency_ms
    assert fast.overhead_ms == found.overhead_ms  # behind each of them the same host
    assert found.provenance.source == "datasheet"
    assert found.provenance.caveats[1:] == (datasheet.CAVEAT,)
    assert found.provenance.caveats[0].startswith("dispatch is that of the middle of the published hosts")
    assert (found.device, found.provenance.machine.accelerator) == ("h200", "NVIDIA H200")
    low, high = found.interval_ms
    assert high / low > 3.5


def test_host_classes_are_those_that_tables_of_whole_models_tell_apart() -> None:
    host = datasheet.shared().dispatch
    layer = torch.nn.Conv2d(64, 64, 3, groups=64, bias=False)
    graph = latpred.trace(layer, torch.zeros(1, 64, 56, 56))
    nobody_says = msgspec.structs.replace(store.load("a100"), protocol={})  # which PyTorch ran it
    for profile, own in ((store.load("h100"), True), (nobody_says, True), (store.load("h100-shared"), False)):
        (op,) = Predictor(profile).lowered(graph, "eager").ops
        assert (op.host_class == "conv_depthwise.conv2d") == own
    assert 1e3 * latpred.predict(graph, device="h100").overhead_ms < host.fixed_us + host.costs_us["conv"]


def test_a_datasheet_is_shown_without_threads_and_without_a_gate() -> None:
    text = profile_page(store.load("h100")).text()
    assert text.startswith("h100: h100, datasheet ")
    assert [line.split() for line in text.splitlines() if line.startswith("gate")] == [["gate", "none"]]


def test_a_profile_of_that_name_comes_before_the_datasheet() -> None:
    store.save(factories.profile(), store.file_of("rtx-3090"))
    assert store.load("rtx-3090").name == "example"
    assert store.load("NVIDIA GeForce RTX 3090").name == "example"
    assert store.find("3090").provenance == "measured"
    assert store.find("rtx-5090").provenance == "datasheet"


def test_a_datasheet_points_to_a_profile_of_its_gpu_under_another_name() -> None:
    said = [latpred.predict(network(), device=name).provenance.caveats[0] for name in ("h100", "h100-pcie")]
    assert said[0] == "there is a profile of this GPU: ask for it with --device h100-shared"
    assert "there is a profile" not in said[1]
    with pytest.raises(ProfileError, match=r"--device h100 has an estimate of it\."):
        latpred.predict(network(), device="h100-shared", runtime="tensorrt")


@pytest.mark.parametrize("gpu", gpus.SPECS, ids=lambda gpu: gpu.name)
def test_every_datasheet_makes_a_profile_that_can_be_kept(gpu: gpus.Spec) -> None:
    profile = datasheet.profile_of(gpu)
    again = decode(encode(profile), "memory")
    assert (again.name, again.device.multiprocessors) == (gpu.name, gpu.multiprocessors)
    assert set(again.kernels) == set(gpu.precisions)
    for precision, fits in profile.kernels.items():
        gemm = fits["gemm"]
        assert 0.2 < gemm.macs_per_us / gpu.peak_macs_per_us(precision) < 1.2
        # Some kernels find part of what they read in the cache.
        assert all(0.1 < fit.activation_bytes_per_us / gpu.bandwidth_bytes_per_us < 4.0 for fit in fits.values())


def test_half_precision_without_tensor_cores_runs_nearly_like_fp32() -> None:
    pascal = datasheet.profile_of(gpus.spec("1080ti"))
    rates = [pascal.kernels[precision]["conv"].macs_per_us for precision in ("fp16", "fp32")]
    assert rates[0] == pytest.approx(rates[1], rel=0.5)
    with pytest.raises(ProfileError, match="no kernels in bf16"):
        PriceList(pascal).fits("bf16")


def test_a_newer_design_is_taken_like_the_one_that_it_continues() -> None:
    common = datasheet.shared()
    assert set(common.kernels) == {datasheet.ANY, "6.1", "7.0", "8.0", "8.6"}
    reached = {design: kernels["gemm"]["fp16"]["compute"] for design, kernels in common.kernels.items()}
    assert len(set(reached.values())) == len(reached)
    # A board whose power is too little for its clocks is slower than its design.
    limited = {"t4": common.power_limited["compute"], "l4": common.power_limited["compute"]}
    assert max(common.power_limited.values()) > 1.2
    for name, design in {"t4": "7.0", "l4": "8.6", "h100": "8.0", "b200": "8.0", "rtx-5090": "8.6"}.items():
        gpu = gpus.spec(name)
        fit = datasheet.profile_of(gpu).kernels["fp16"]["gemm"]
        usual = datasheet.macs_per_us(gpu, "fp16") / reached[design]
        assert fit.macs_per_us == pytest.approx(usual / limited.get(name, 1.0), rel=1e-4)


def test_small_work_draws_from_a_large_cache_where_memory_is_slow() -> None:
    def sped_up(name: str, rows: float) -> float:
        fit = datasheet.profile_of(gpus.spec(name)).kernels["bf16"]["gemm"]
        uncached = msgspec.structs.replace(fit, cache_bytes=0.0)
        row = np.array([[rows * 2**20, 2**21, rows * 2**11, rows * 2**11, rows, 1024, 1024]])
        return float(evaluate(uncached, row)[0] / evaluate(fit, row)[0])

    assert sped_up("l40s", 4096) > 1.15
    assert sped_up("l40s", 65536) == sped_up("h100", 4096) == 1.0
    kept = {name: datasheet.profile_of(gpus.spec(name)).device.resident_bytes for name in ("l40s", "h100", "rtx-3090")}
    assert kept == {"l40s": gpus.spec("l40s").l2_bytes // 2, "h100": 0, "rtx-3090": 0}


# fp32 lanes of a multiprocessor, by compute capability
LANES = {(7, 0): 64, (7, 5): 64, (8, 0): 64}
LANES |= dict.fromkeys(((6, 1), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)), 128)
# half-precision multiply-adds of a multiprocessor's tensor cores in a clock, accumulated in fp32
TENSOR = {(7, 0): 512, (7, 5): 512, (8, 0): 1024, (8, 6): 512, (8, 9): 512, (9, 0): 2048, (10, 0): 4096, (12, 0): 512}


@pytest.mark.parametrize("gpu", gpus.SPECS, ids=lambda gpu: gpu.name)
def test_a_datasheet_agrees_with_itself(gpu: gpus.Spec) -> None:
    fp32_macs = gpu.multiprocessors * LANES[gpu.compute_capability] * gpu.boost_mhz
    assert gpu.peak_macs_per_us("fp32") == pytest.approx(fp32_macs, rel=0.02)
    if gpu.tensor_cores:
        # GeForce cards accumulate in fp32 at half the rate of the same chip on other boards
        width = TENSOR[gpu.compute_capability] / (2 if "GeForce" in gpu.title else 1)
        fp16_macs = gpu.multiprocessors * width * gpu.tensor_clock_hz / 1e6
        assert gpu.peak_macs_per_us("fp16") == pytest.approx(fp16_macs, rel=0.03)
        doubled = 2 * gpu.tflops["fp16"] if gpu.compute_capability >= (8, 9) else 0.0
        assert gpu.tflops.get("fp8", 0.0) == pytest.approx(doubled, rel=0.02)
    else:
        assert gpu.peak_macs_per_us("fp16") == gpu.peak_macs_per_us("fp32")
    if "tf32" in gpu.tflops:
        assert gpu.tflops["fp16"] == pytest.approx(2 * gpu.tflops["tf32"], rel=0.02)
        assert gpu.tflops["bf16"] == gpu.tflops["fp16"]
    assert 250e3 < gpu.bandwidth_bytes_per_us < 10e6
    assert 10 * gpus.GIB < gpu.memory_bytes < 256 * gpus.GIB
    assert 2 < gpu.l2_kib / 1024 < 256
    assert gpu.l2_kib / 1024 < gpu.memory_gib * 1024 / 100
    assert any(year in gpu.source for year in map(str, range(2016, 2026)))
    assert ("tf32" in gpu.precisions) == ("bf16" in gpu.precisions) == (gpu.compute_capability >= (8, 0))
    assert {"fp32", "fp16"} <= set(gpu.precisions)
    assert {gpus.spec(name).name for name in (gpu.name, gpu.title, *gpu.aliases)} == {gpu.name}


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("RTX-8000", "rtx-8000"),
        ("Quadro RTX 8000", "rtx-8000"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("nvidia-h200", "h200"),
    ],
)
def test_a_gpu_has_many_names(asked: str, name: str) -> None:
    assert gpus.spec(asked).name == name


def test_an_unknown_gpu_is_told_what_is_near() -> None:
    with pytest.raises(UnknownGpuError, match=r"'rtx 4009 at 900 MHz'.*Did you mean .*rtx-4090"):
        gpus.spec("rtx 4009 at 900 MHz")
    with pytest.raises(UnknownGpuError, match=r"There are: titan-x-pascal, .*rtx-5090"):
        gpus.spec("zzz")
    assert gpus.find("") is None


@pytest.mark.parametrize("asked", ["t4 at 900 MHz", "Tesla T4 (locked 900 MHz)", "T4 900MHz"])
def test_a_clock_that_is_held_slows_what_computes_alone(asked: str) -> None:
    t4, held = gpus.spec("t4"), gpus.spec(asked)
    assert (held.name, held.tensor_clock_hz, held.power_limited) == ("t4 at 900 MHz", 900e6, False)
    assert held.tflops["fp16"] / t4.tflops["fp16"] == pytest.approx(900 / t4.boost_mhz)
    assert (held.gb_per_s, gpus.spec(held.name)) == (t4.gb_per_s, held)
    with pytest.raises(UnknownGpuError, match=r"a Tesla T4 has no clock of 5001 MHz: its boost clock is 1590"):
        gpus.spec(asked.replace("900", "5001"))


def test_tensor_cores_that_are_held_at_the_clock_of_their_peak_reach_it() -> None:
    h100, held = gpus.spec("h100"), gpus.spec("h100 at 1830 MHz")
    assert (held.tflops["fp16"], held.tensor_clock_hz) == (pytest.approx(h100.tflops["fp16"]), 1830e6)
    assert held.tflops["fp32"] / h100.tflops["fp32"] == pytest.approx(1830 / 1980)
