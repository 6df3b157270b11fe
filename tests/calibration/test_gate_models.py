"""Gate models: small, walkable and runnable anywhere, and in no suite."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from latpred.calibration.workloads import suites
from latpred.calibration.workloads.base import Workload
from latpred.calibration.workloads.gate_models import BATCHES, gate_models

GATE = gate_models()
LITTLE = 1.2e9  # MACs of 60 ms, where two slow cores do some 20 GMAC a second


@pytest.mark.parametrize("subject", GATE, ids=lambda workload: workload.name)
def test_every_model_walks_and_is_little_work(workload: Workload) -> None:
    graph = workload.walk("fp32")
    assert graph.model == workload.name
    assert graph.coverage(2).launches == 1.0
    assert graph.macs(max(BATCHES)) < LITTLE


@pytest.mark.parametrize("subject", GATE, ids=lambda workload: workload.name)
def test_every_model_runs_at_one_sample_and_at_two(workload: Workload) -> None:
    model, inputs = workload.make("cpu", "fp32")
    for batch in (1, 2):
        with torch.inference_mode():
            output = model(*inputs(batch, "cpu"))
        first = output if isinstance(output, torch.Tensor) else output[0]
        assert first.shape[0] == batch
        assert bool(torch.isfinite(first).all())


def test_they_are_of_many_kinds() -> None:
    assert len({workload.name for workload in GATE}) == len(GATE) >= 12
    assert {workload.input_kind for workload in GATE} == {"seq", "image", "audio", "custom"}


@pytest.mark.slow
def test_no_suite_holds_one() -> None:
    theirs = [workload for name in suites.names() for workload in suites.get(name).workloads()]
    assert not {workload.name for workload in GATE} & {workload.name for workload in theirs}
    alike = {parameters(workload) for workload in GATE} & {parameters(workload) for workload in theirs}
    works = {work(workload) for workload in GATE if parameters(workload) in alike}
    assert not works & {work(workload) for workload in theirs if parameters(workload) in alike}


def test_they_need_torch_alone() -> None:
    script = """
import sys
sys.modules.update(dict.fromkeys(("transformers", "torchvision", "timm")))
from latpred.calibration.workloads.gate_models import gate_models
for subject in gate_models():
    subject.make("meta", "fp32")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def parameters(workload: Workload) -> int:
    """Numbers that a model has learned."""
    return sum(weight.numel() for weight in workload.make("meta", "fp32")[0].parameters())


def work(workload: Workload) -> tuple[int, int]:
    """Multiply-adds of one sample, and parameters."""
    return workload.walk("fp32").macs(1), parameters(workload)
