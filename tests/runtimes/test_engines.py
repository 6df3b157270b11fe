"""What an engine leaves of a model, and that engines are predicted but never run."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from factories import add, device, dispatch, graph, linear, profile
from smallmodels import Function
from torch import nn

import latpred
from latpred import runtimes
from latpred.calibration.devices import open_device
from latpred.calibration.runtime_calibration import calibrate_runtimes
from latpred.errors import MissingPackageError, ProfileError, UsageError
from latpred.graph.graph import ModelGraph, Op
from latpred.graph.rewrites import attended
from latpred.ops.families import root
from latpred.prediction.predictor import Predictor
from latpred.runtimes.engines import JOINED, as_engine

ENGINES = ("tensorrt", "onnxruntime-optimized")
WIDTH, HEADS, TOKENS = 64, 4, 8


class Layer(nn.Module):
    """A layer of BERT, its attention in one call or in parts."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (of(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for of in (self.query, self.key, self.value))
        if self.fused:
            seen = nn.functional.scaled_dot_product_attention(q, k, v)
        else:
            seen = (q @ k.transpose(-1, -2) / 4.0).softmax(-1) @ v
        x = self.first(x + self.out(seen.transpose(1, 2).flatten(-2)))
        return self.second(x + self.down(nn.functional.gelu(self.up(x))))


def of_layer(fused: bool) -> ModelGraph:
    return latpred.trace(Layer(fused), torch.zeros(2, TOKENS, WIDTH))


def kinds(ops: tuple[Op, ...]) -> list[str]:
    return [root(op.family) for op in ops]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_layer_of_a_transformer_is_a_few_kernels(fused: bool, batch: int) -> None:
    eager = of_layer(fused)
    found = as_engine(eager.at(batch))
    assert kinds(found) == ["gemm", "attention", "gemm", "norm", "gemm", "gemm", "norm"]
    projections, attention = found[:2]
    assert projections.dims["n"].at(batch) == 3 * WIDTH
    assert attention.macs.at(batch) == 2 * batch * TOKENS * TOKENS * WIDTH
    assert sum(op.macs.at(batch) for op in found) == eager.macs(batch)
    assert sum(op.weight_bytes.at(batch) for op in found) == sum(op.weight_bytes.at(batch) for op in eager.at(batch))
    ops = runtimes.get("onnxruntime-optimized").estimate(eager, "cuda").at(batch)
    assert kinds(ops) == ["gemm", "attention", "gemm", "norm", "gemm", "elementwise", "gemm", "norm"]
    assert {op.host_class.partition(".")[0] for op in ops} == {"node"}


def test_both_forms_of_attention_come_to_the_same() -> None:
    fused, parts = (as_engine(of_layer(form).ops)[1] for form in (True, False))
    assert (fused.macs, fused.dims["keys"]) == (parts.macs, parts.dims["keys"])
    assert (fused.read_bytes, fused.write_bytes) == (parts.read_bytes, parts.write_bytes)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ENGINES)
def test_attention_that_is_asked_for_in_parts_stays_in_parts(name: str, fused: bool) -> None:
    engine, eager = runtimes.get(name), of_layer(fused)
    whole, parts = (engine.estimate(each, "cuda").at(2) for each in (eager, attended(eager, "eager")))
    assert kinds(parts)[:5] == ["gemm", "bmm", "softmax", "bmm", "gemm"]
    assert sum(op.macs.at(2) for op in parts) == sum(op.macs.at(2) for op in whole)
    moved = [sum(op.read_bytes.at(2) + op.write_bytes.at(2) for op in ops) for ops in (parts, whole)]
    assert moved[0] - moved[1] == 4 * (2 * HEADS * TOKENS * TOKENS) * 4  # scores are written and read twice


def test_convolutions_take_what_follows_along() -> None:
    one, two, norm = nn.Conv2d(4, 4, 7, padding=3, groups=4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4).eval()
    larger = partial(nn.functional.interpolate, scale_factor=2.0, mode="bilinear")
    block = Function(lambda x: larger(torch.cat([nn.functional.relu(norm(one(x)) + x), two(x)], 1)))
    found = as_engine(latpred.trace(block, torch.zeros(1, 4, 8, 8)).ops)
    resized = "pooling.upsample_bilinear.engine"  # not PyTorch's kernel, nor its loop over wide windows
    assert [op.family for op in found] == ["conv_depthwise.engine", "conv", JOINED, resized]


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_is_predicted_and_never_run(name: str) -> None:
    engine = runtimes.get(name)
    assert str(engine.available()).startswith(f"latpred predicts {name}")
    with pytest.raises(MissingPackageError, match="To run it: p"):
        engine.build(nn.Linear(2, 2), (torch.zeros(1, 2),))
    eager = latpred.predict(Layer(True), inputs=torch.zeros(1, TOKENS, WIDTH), device="a100")
    found = latpred.predict(Layer(True), 1, name, inputs=torch.zeros(1, TOKENS, WIDTH), device="a100")
    assert 0 < found.latency_ms < eager.latency_ms
    said = " ".join(found.provenance.caveats)
    assert f"{name} was not asked: its kernels are estimated from the eager graph" in said
    assert "latpred calibrate" not in said.partition(f"{name} was not measured")[2]


@pytest.mark.parametrize("name", ENGINES)
def test_no_profile_that_was_measured_has_an_engine(name: str) -> None:
    measured = Predictor(profile(device(kind="cuda"), runtimes={"eager": dispatch()}))
    with pytest.raises(ProfileError, match=f"'example' was measured. latpred predicts {name}"):
        measured.predict(graph(linear(), add()), runtime=name)
    with pytest.raises(UsageError, match=f"{name} needs a CUDA device"):
        latpred.predict(nn.Linear(2, 2), 1, name, inputs=torch.zeros(1, 2), device="epyc-shared")
    with pytest.raises(MissingPackageError, match=f"{name} cannot be calibrated here"):
        calibrate_runtimes.named([name], open_device("simulated"))
