"""Datasheets: they agree with themselves, and a GPU is found by any of its names."""

from __future__ import annotations

import pytest

from latpred.errors import UnknownGpuError
from latpred.profile import gpus

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
