"""Shipped profiles of GPUs, fitted from published latencies: they read, predict and say what they are."""

from __future__ import annotations

import math

import pytest
import torch
from docblocks import ROOT
from smallmodels import build_small, inputs_of
from torch import nn

from latpred import Predictor, explain, predict, tables
from latpred.errors import ProfileError
from latpred.graph.graph import ModelGraph
from latpred.profile import gpus, store
from latpred.tracing import trace

NAMES = ("rtx-8000", "rtx-2080ti", "rtx-a6000", "titan-x-pascal")
# Fitted to tables of several sources together, with the PyTorch that most rows of each are of, and what its gate says.
JOINT = {
    "a100": ("torch-2", True),
    "a100-40gb": ("torch-1.12", False),
    "v100": ("torch-1.12", True),
    "v100-16gb": ("torch-1.12", True),
    "t4": ("torch-1.12", False),
    "rtx-3090": ("torch-2", True),
    "rtx-4090": ("torch-2", True),
}
BATCHES = (1, 8, 64, 512)


@pytest.fixture(scope="module")
def graphs() -> dict[str, ModelGraph]:
    tower = nn.Sequential(
        nn.Conv2d(3, 64, 7, stride=2), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 128, 3), nn.ReLU(), nn.Flatten()
    )
    return {precision: trace(tower, torch.zeros(1, 3, 64, 64), precision=precision) for precision in ("fp32", "fp16")}


@pytest.mark.parametrize("name", NAMES)
def test_profiles_of_one_source(name: str, graphs: dict[str, ModelGraph]) -> None:
    profile = store.load(name)
    assert profile.provenance == "fitted from published measurements"
    assert (profile.machine.stack["torch"], profile.machine.stack["cuda"]) == ("1.12.1", "11.6")
    assert "median" in profile.protocol["leave-one-model-out"]
    assert "median" in profile.protocol["leave-one-model-out, torchscript"]
    assert (profile.samples, profile.acceptance.passed) == ((), True)
    assert profile.acceptance.runtimes == {"torchscript": True}
    predictor = Predictor(profile)
    for graph in graphs.values():
        curve = predictor.curve(graph, BATCHES, protocol="pipelined")
        assert curve.regime[0] == "framework-bound"
        assert curve.regime[-1] != "framework-bound"
        assert (curve.latency_ms[1:] >= curve.latency_ms[:-1]).all()
        assert 0.1 < curve.latency_ms[0] < 5.0
        for (low, high), latency in zip(curve.interval_ms, curve.latency_ms, strict=True):
            assert 1.1 < high / latency < 2.5
            assert math.isclose(low * high, latency**2, rel_tol=1e-6)
    eager, scripted = (
        predictor.curve(graphs["fp32"], BATCHES, runtime=runtime, protocol="pipelined")
        for runtime in ("eager", "torchscript")
    )
    assert scripted.overhead_ms[0] < eager.overhead_ms[0]
    assert 0.5 < scripted.compute_ms[-1] / eager.compute_ms[-1] < 1.4


@pytest.mark.parametrize("name", JOINT)
def test_profiles_of_several_sources(name: str, graphs: dict[str, ModelGraph]) -> None:
    profile, (era, passed) = store.load(name), JOINT[name]
    assert (profile.name, profile.provenance) == (name, "fitted from published measurements")
    assert (profile.protocol["era"], profile.acceptance.passed) == (era, passed)
    assert profile.device.memory_bytes == gpus.spec(name).memory_bytes  # as under each other name of the GPU
    assert "fitted together with 12,786 of 12 GPUs" in profile.protocol["rows"]
    assert "These are 12,786 rows of twelve GPUs" in (ROOT / "docs/published-tables.md").read_text()
    assert {fit.host_spread for fit in profile.runtimes.values()} == {0.315012}  # of all their hosts
    for precision, graph in graphs.items():
        curve = Predictor(profile).curve(graph, BATCHES)
        assert (curve.latency_ms[1:] >= curve.latency_ms[:-1]).all()
        assert 0.1 < curve.latency_ms[0] < 5.0, precision
        assert any("failed its acceptance gate" in said for said in curve[0].provenance.caveats) != passed


def test_channels_last_has_kernels_of_its_own_where_it_was_measured() -> None:
    tower = nn.Sequential(nn.Conv2d(64, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU())
    last = trace(tower, torch.zeros(1, 64, 56, 56), precision="amp-fp16", memory_format="channels_last")
    plain = trace(tower, torch.zeros(1, 64, 56, 56), precision="amp-fp16")
    predictor = Predictor(store.load("rtx-4090"))
    faster = predictor.predict(last, 256).compute_ms / predictor.predict(plain, 256).compute_ms
    assert faster < 1.0
    assert not [said for said in predictor.predict(last, 256).provenance.caveats if "contiguous format" in said]
    assert [
        said for said in Predictor(store.load("rtx-8000")).predict(last, 8).provenance.caveats if "contiguous" in said
    ]


@pytest.mark.parametrize("name", JOINT)
def test_products_and_elementwise_ops_take_as_long_in_any_memory_format(name: str) -> None:
    layers = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.LayerNorm(512))
    plain, last = (trace(layers, torch.zeros(1, 512), memory_format=one) for one in ("contiguous", "channels_last"))
    predictor = Predictor(store.load(name))
    assert predictor.predict(last, 4096).compute_ms == predictor.predict(plain, 4096).compute_ms


def test_runtimes_have_the_kernels_of_channels_last_or_say_that_they_lack_them() -> None:
    tower, image = nn.Sequential(nn.Conv2d(64, 128, 3, padding=1), nn.ReLU()), torch.zeros(1, 64, 56, 56)
    plain, last = (trace(tower, image, precision="fp16", memory_format=one) for one in ("contiguous", "channels_last"))
    predictor = Predictor(store.load("t4"))
    for runtime, known in (("eager", True), ("compile", True), ("tensorrt", True), ("torchscript", False)):
        before, found = (predictor.predict(graph, 256, runtime=runtime) for graph in (plain, last))
        assert (found.compute_ms < before.compute_ms) == known, runtime
        assert any("contiguous format" in said for said in found.provenance.caveats) != known, runtime
    with pytest.raises(ProfileError, match=r"no kernels in bf16 \(it has: fp32, fp16\)"):
        predictor.check("eager", "bf16")


def test_the_table_behind_them_is_named_plainly() -> None:
    assert tables.machine_name(store.load("rtx-8000").machine) == "11 published hosts + Quadro RTX 8000"
    said = {host: predict("resnet-18", device="rtx-8000", host=host).provenance.caveats for host in (None, 1.2)}
    assert said[None][0] == "fitted to published latencies of a Quadro RTX 8000"
    assert said[1.2][1] == "kernel times were fitted to published latencies of a Quadro RTX 8000"


def test_intervals_cover_the_hosts_until_one_is_named() -> None:
    """How far models are off does not depend on the GPU, nor does how far hosts lie apart."""
    fits = [store.load(name).runtimes["eager"] for name in NAMES]
    assert len({(fit.spread, fit.busy_spread, fit.host_spread) for fit in fits}) == 1
    factor = {}
    for host in (None, 1.0):
        curve = predict("resnet-18", batch=[1, 512], device="rtx-3090", host=host, protocol="pipelined")
        factor[host] = [high / latency for (_, high), latency in zip(curve.interval_ms, curve.latency_ms, strict=True)]
    assert factor[None][0] > 1.75  # the slowest of the table's hosts of this GPU, over its middle one
    assert factor[1.0][0] < 1.45
    assert factor[None][1] == pytest.approx(factor[1.0][1], rel=0.02)  # the device rules: no host matters


def test_explain_compares_the_runtimes_as_they_ran_then_and_says_what_the_others_lack() -> None:
    found = explain(
        build_small("distilbert", "cpu"),
        inputs=lambda batch: inputs_of("distilbert", batch),
        device="rtx-8000",
        precision="fp16",
        protocol="pipelined",
        runtimes=("torchscript", "cuda-graphs", "compile"),
    )
    assert [choice.runtime for choice in found.choices] == ["cuda-graphs", "compile", "torchscript", "eager"]
    for choice in found.choices:
        fused = choice.runtime == "compile"  # which nobody had then: its graph is today's
        assert ("attention" in choice.prediction.costs.names) == fused
        assert ("softmax" in choice.prediction.costs.names) != fused
    assert not found.excluded
