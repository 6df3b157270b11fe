"""What users hold can be put into sets and dictionaries: equal records have equal hashes."""

from __future__ import annotations

import copy

import pytest
import torch
from profiledata import profile
from tabledata import measured, predicted
from torch import nn
from tracing.test_text_generation import gpt2

import latpred
from latpred.tracing.text_generation import trace_generation

DEVICE = "epyc-shared"
X = torch.zeros(1, 8)
CELLS = [("a", 1, 0.01), ("a", 2, 0.02)]

RECORDS = {
    "Prediction": lambda: latpred.predict(nn.Linear(8, 8), 4, inputs=X, device=DEVICE),
    "Curve": lambda: latpred.predict(nn.Linear(8, 8), [1, 4], inputs=X, device=DEVICE),
    "Provenance": lambda: latpred.predict(nn.Linear(8, 8), 4, inputs=X, device=DEVICE).provenance,
    "Explanation": lambda: latpred.explain(nn.Linear(8, 8), 4, inputs=X, device=DEVICE, runtimes=["eager"]),
    "GenerationCurve": lambda: latpred.predict_generation(gpt2(), 4, 3, [1, 2], device=DEVICE),
    "GenerationPrediction": lambda: latpred.predict_generation(gpt2(), 4, 3, device=DEVICE),
    "GenerationGraph": lambda: trace_generation(gpt2(), 4, 3).prefill.graph,
    "ModelGraph": lambda: latpred.trace(nn.Linear(8, 8), X),
    "Op": lambda: latpred.trace(nn.Linear(8, 8), X).ops[0],
    "DeviceProfile": profile,
    "KernelFit": lambda: next(iter(profile().kernels["fp32"].values())),
    "DispatchFit": lambda: profile().runtimes["eager"],
    "Acceptance": lambda: profile().acceptance,
    "Lengths": lambda: latpred.Lengths(mean=4, std=1, padded_to=8),
    "LatencyBudget": lambda: latpred.LatencyBudget(5.0, device=DEVICE),
    "Spent": lambda: latpred.LatencyBudget(5.0, device=DEVICE, inputs=X).check(nn.Linear(8, 8)),
}


@pytest.mark.parametrize("kind", RECORDS)
def test_equal_records_have_equal_hashes(kind: str) -> None:
    one, other = RECORDS[kind](), RECORDS[kind]()
    assert one is not other
    assert one == other
    assert hash(one) == hash(other)
    assert len({one, other}) == 1


def test_a_report_has_a_hash() -> None:
    report = latpred.compare(predicted(CELLS), measured(CELLS))
    assert hash(copy.copy(report)) == hash(report)
