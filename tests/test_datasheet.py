"""Datasheet profiles: found by a GPU's name, said to be guesses, and no narrower than guesses are."""

from __future__ import annotations

import factories
import numpy as np
import pytest

import latpred
from latpred import datasheet, profiles, specs
from latpred.errors import ProfileError, UnknownGpuError
from latpred.pricing import PriceList
from latpred.profile_codec import decode, encode


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("LATPRED_HOME", str(tmp_path))


def network(rows: int = 128) -> latpred.ModelGraph:
    return factories.graph(
        *[op for _ in range(12) for op in (factories.linear(rows), factories.add(), factories.view())]
    )


def test_a_gpu_without_a_profile_is_predicted_from_its_datasheet() -> None:
    found = latpred.predict(network(), device="a100")
    assert found.provenance.source == "datasheet"
    assert found.provenance.caveats == (datasheet.CAVEAT,)
    assert (found.device, found.provenance.machine.accelerator) == ("a100", "NVIDIA A100-SXM4-80GB")
    low, high = found.interval_ms
    assert high / low > 3.5


def test_a_profile_of_that_name_comes_before_the_datasheet() -> None:
    profiles.save(datasheet.profile_of(specs.spec("a100")))
    own = factories.profile()
    profiles.save(own, profiles.path("rtx-3090"))
    assert profiles.load("rtx-3090").name == "example"
    assert profiles.load("NVIDIA GeForce RTX 3090").name == "example"
    assert profiles.find("3090").provenance == "measured"
    assert profiles.find("rtx-4090").provenance == "datasheet"


def test_a_datasheet_is_no_file() -> None:
    with pytest.raises(ProfileError, match="'h200' is known from its datasheet only"):
        profiles.locate("h200")
    with pytest.raises(ProfileError, match=r"no profile is called 'rtx 4009'\. Did you mean .*rtx-4090"):
        profiles.load("rtx 4009")


def test_faster_devices_are_faster_where_the_device_rules() -> None:
    wide = network(rows=65536)
    times = [latpred.predict(wide, device=name).latency_ms for name in ("titan-x-pascal", "rtx-3090", "h200")]
    assert times == sorted(times, reverse=True)
    assert times[0] > 3 * times[2]


def test_the_host_is_the_same_behind_every_gpu() -> None:
    overheads = {latpred.predict(network(), device=name).overhead_ms for name in ("t4", "h100", "rtx-5090")}
    assert len(overheads) == 1


@pytest.mark.parametrize("gpu", specs.SPECS, ids=lambda gpu: gpu.name)
def test_every_datasheet_makes_a_profile_that_can_be_kept(gpu: specs.Spec) -> None:
    profile = datasheet.profile_of(gpu)
    again = decode(encode(profile), "memory")
    assert (again.name, again.device.multiprocessors) == (gpu.name, gpu.multiprocessors)
    assert set(again.kernels) == set(gpu.precisions)
    for precision, fits in profile.kernels.items():
        gemm = fits["gemm"]
        assert 0 < gemm.macs_per_us <= max(gpu.peak_macs_per_us(precision), gpu.peak_macs_per_us("fp32"))
        assert all(fit.activation_bytes_per_us < gpu.bandwidth_bytes_per_us for fit in fits.values())


def test_large_products_come_near_the_share_of_the_peak() -> None:
    gpu = specs.spec("a100")
    fit = datasheet.kernel_fit(gpu, "fp16", "gemm")
    side = 16384.0
    row = np.array([[side**3, 2 * side**2, 2 * side**2, 2 * side**2, side, side, side]])
    from latpred.roofline import evaluate

    reached = side**3 / evaluate(fit, row)[0] / gpu.peak_macs_per_us("fp16")
    assert reached == pytest.approx(datasheet.PRODUCTS["gemm"].tensor, rel=0.1)


def test_half_precision_without_tensor_cores_runs_like_fp32() -> None:
    pascal = datasheet.profile_of(specs.spec("1080ti"))
    assert pascal.kernels["fp16"]["conv"].macs_per_us == pascal.kernels["fp32"]["conv"].macs_per_us
    with pytest.raises(ProfileError, match="no kernels in bf16"):
        PriceList(pascal).fits("bf16")
    with pytest.raises(UnknownGpuError):
        specs.spec("cpu")
