"""Suites and gate models: traced without a device, runnable, and nothing that a calibration fits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from latpred.calibration.workloads import suites
from latpred.calibration.workloads.suites import Workload
from latpred.errors import UsageError

PUBLISHED = [suites.get(name) for name in ("blind", "recent", "sealed")]
EVERYDAY, GATE = suites.get("everyday"), suites.get(suites.GATE)
SUITES = {suite.name: suite for suite in (*PUBLISHED, EVERYDAY)}
ASSORTED = suites.get("assorted").ready  # of usual image sizes
SMALL = [workload for suite in SUITES.values() for workload in suite.ready]
LITTLE = 1.2e9  # MACs of 60 ms, where two slow cores do some 20 GMAC a second


# Two suites hold it, which their purpose says.
TWICE = ("timm:cs3darknet_s", "{}", "[3, 96, 96]")


def test_no_model_comes_again_in_another_suite() -> None:
    models: Counter[tuple[str, ...]] = Counter()
    for name in (*suites.NAMES, suites.GATE):
        text = (files("latpred.models") / "suites" / f"{name}.json").read_text()
        for row in json.loads(text)["models"]:
            known = {"model": row} if isinstance(row, str) else row
            models[known["model"], json.dumps(known.get("config", {}), sort_keys=True), str(known.get("shape"))] += 1
    assert {model for model, count in models.items() if count > 1} == {TWICE}


@pytest.mark.parametrize("workload", [*SMALL, *ASSORTED, *GATE.ready], ids=lambda workload: workload.name)
def test_every_model_for_a_cpu_is_traced(workload: Workload) -> None:
    graph = workload.trace("fp32")
    assert graph.model == workload.name
    assert graph.coverage(2).launches == 1.0
    if workload in GATE.ready:
        assert graph.macs(max(GATE.batches)) < LITTLE
    elif workload not in ASSORTED:  # half a second at batch 32
        assert graph.macs(32) < 13e9


class Denormals(TorchDispatchMode):
    """Counts results too small for the processor's fast path."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype is torch.float32:
            self.count += int(((out != 0) & (out.abs() < torch.finfo(torch.float32).tiny)).sum())
        return out


@pytest.mark.parametrize("workload", [*EVERYDAY.ready, *GATE.ready], ids=lambda workload: workload.name)
def test_models_run_where_they_are_built_on_ordinary_numbers(workload: Workload) -> None:
    model, inputs = workload.make("cpu", "fp32")
    with torch.inference_mode(), Denormals() as seen:
        outputs = [model(*inputs(batch, "cpu")) for batch in (1, 2)]
    one, two = (out if isinstance(out, torch.Tensor) else out[0] for out in outputs)
    assert (one.shape[0], two.shape[0]) == (1, 2)
    assert one.shape[1:] == two.shape[1:]
    assert bool(torch.isfinite(two).all())
    assert seen.count == 0


def parameters(workload: Workload) -> int:
    model, _ = workload.make("meta", "fp32")
    return sum(weight.numel() for weight in model.parameters())


@pytest.mark.slow
def test_no_suite_holds_a_gate_model() -> None:
    theirs = [workload for name in suites.NAMES for workload in suites.get(name).workloads()]
    assert not {workload.name for workload in GATE.ready} & {workload.name for workload in theirs}
    assert not set(map(parameters, GATE.ready)) & set(map(parameters, theirs))


def test_an_unknown_suite() -> None:
    known = "blind, everyday, recent, sealed, assorted, varied, drawn, redrawn, heldout"
    with pytest.raises(UsageError, match=rf"no suite 'gpu'\. Use one of {known}"):
        suites.get("gpu")


GATE_BUILT = """
import sys
sys.modules.update(dict.fromkeys(("transformers", "torchvision", "timm")))
from latpred.calibration.workloads import suites
for workload in suites.get(suites.GATE).ready:
    workload.make("meta", "fp32")
    print(workload.name)
"""
NAMED_BUILT = """
import sys
from latpred.zoo import names
print(names.build("resnet-18").name)
assert "torchvision" not in sys.modules
from latpred.calibration.workloads import suites
for name in ("blind", "recent", "sealed"):
    workload = next(one for one in suites.get(name).workloads() if "bert" in one.name)
    workload.make("meta", "fp32")
    print(workload.name)
"""


@pytest.mark.parametrize(("script", "built"), [(GATE_BUILT, len(GATE.ready)), (NAMED_BUILT, 4)], ids=["gate", "named"])
def test_models_are_built_without_packages_or_beside_a_bad_torchvision(script: str, built: int, tmp_path: Path) -> None:
    (tmp_path / "torchvision").mkdir()
    broken = 'raise RuntimeError("operator torchvision::nms does not exist")\n'
    (tmp_path / "torchvision" / "__init__.py").write_text(broken)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == built
