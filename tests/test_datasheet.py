"""Datasheet profiles: found by a GPU's name, said to be guesses, and no narrower than guesses are."""

from __future__ import annotations

import factories
import msgspec
import numpy as np
import pytest
import torch

import latpred
from latpred.errors import ProfileError, UnknownGpuError
from latpred.prediction.kernel_times import evaluate
from latpred.prediction.pricing import PriceList
from latpred.profile import datasheet, gpus, store
from latpred.profile.document import decode, encode


def network(rows: int = 128) -> latpred.ModelGraph:
    return factories.graph(
        *[op for _ in range(12) for op in (factories.linear(rows), factories.add(), factories.view())]
    )


def test_a_gpu_without_a_profile_is_predicted_from_its_datasheet() -> None:
    found = latpred.predict(network(), device="h100")
    wide = network(rows=65536)
    slow, fast = (latpred.predict(wide, device=name) for name in ("titan-x-pascal", "h200"))
    assert slow.latency_ms > 3 * fast.latency_ms
    assert fast.overhead_ms == found.overhead_ms  # behind each of them the same host
    assert found.provenance.source == "datasheet"
    assert found.provenance.caveats[1:] == (datasheet.CAVEAT,)
    assert found.provenance.caveats[0].startswith("dispatch is that of the middle of the published hosts")
    assert (found.device, found.provenance.machine.accelerator) == ("h100", "NVIDIA H100 80GB HBM3")
    low, high = found.interval_ms
    assert high / low > 3.5


def test_a_profile_of_that_name_comes_before_the_datasheet() -> None:
    store.save(datasheet.profile_of(gpus.spec("h100")))
    own = factories.profile()
    store.save(own, store.file_of("rtx-3090"))
    assert store.load("rtx-3090").name == "example"
    assert store.load("NVIDIA GeForce RTX 3090").name == "example"
    assert store.find("3090").provenance == "measured"
    assert store.find("rtx-5090").provenance == "datasheet"
    with pytest.raises(ProfileError, match="'h200' is known from its datasheet only"):
        store.locate("h200")
    with pytest.raises(ProfileError, match=r"no profile is called 'rtx 4009'\. Did you mean .*rtx-4090"):
        store.load("rtx 4009")


def test_joining_many_tensors_is_slower_than_joining_two() -> None:
    """The same bytes: the published latencies of Inception and GoogLeNet against SqueezeNet and ShuffleNet."""

    def joined(parts: int) -> latpred.ModelGraph:
        x = torch.zeros(1, 960 // parts, 56, 56)
        return latpred.trace(_Joined(parts), x)

    for device in ("rtx-8000", "titan-x-pascal"):
        two, many = (latpred.predict(joined(parts), 64, device=device).compute_ms for parts in (2, 4))
        assert many > 1.1 * two


class _Joined(torch.nn.Module):
    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x] * self.parts, 1)


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
    with pytest.raises(UnknownGpuError):
        gpus.spec("cpu")


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

    assert sped_up("l40s", 4096) > 1.2
    assert sped_up("l40s", 65536) == sped_up("h100", 4096) == 1.0
    kept = {name: datasheet.profile_of(gpus.spec(name)).device.resident_bytes for name in ("l40s", "h100", "rtx-3090")}
    assert kept == {"l40s": gpus.spec("l40s").l2_bytes // 2, "h100": 0, "rtx-3090": 0}
