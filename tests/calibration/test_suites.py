"""Suites: wide enough, walkable without a device, and nothing that a calibration trains on."""

from __future__ import annotations

import pytest
import torch

from latpred.calibration import suites
from latpred.calibration.subjects import Subject
from latpred.errors import UsageError

CPU = suites.get("cpu")


def test_the_cpu_suite_is_wide_enough() -> None:
    assert len(CPU.subjects()) >= 12
    assert len({subject.family for subject in CPU.ready}) >= 8
    assert {1, 2, 4, 8, 16, 32} <= set(CPU.batches)
    assert len(CPU.ready) * len(CPU.batches) >= 200
    assert len({subject.name for subject in CPU.ready}) == len(CPU.ready)


@pytest.mark.parametrize("subject", CPU.ready, ids=lambda subject: subject.name)
def test_every_model_of_the_cpu_suite_walks(subject: Subject) -> None:
    graph = subject.walk("fp32")
    assert graph.model == subject.name
    assert graph.coverage(2).launches == 1.0
    # two slow cores do some 20 GMAC a second: half a second at batch 32
    assert graph.macs(32) < 13e9


@pytest.mark.parametrize("name", ["cpu/mobilebert", "cpu/swin", "cpu/vgg-11", "cpu/wav2vec2"])
def test_models_run_where_they_are_built(name: str) -> None:
    subject = next(one for one in CPU.ready if one.name == name)
    model, inputs = subject.make("cpu", "fp32")
    with torch.inference_mode():
        output = model(*inputs(2, "cpu"))
    first = output if isinstance(output, torch.Tensor) else output[0]
    assert first.shape[0] == 2


def test_the_heldout_suite_holds_names_and_builds_nothing() -> None:
    suite = suites.get("heldout")
    assert len(suite.names) == 12
    assert suite.ready == ()


def test_an_unknown_suite() -> None:
    with pytest.raises(UsageError, match=r"no suite 'gpu'\. Use one of cpu, heldout"):
        suites.get("gpu")
