"""Suites: wide enough, walkable without a device, and nothing that a calibration trains on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from latpred.calibration.workloads import suites
from latpred.calibration.workloads.base import Workload, workloads_of
from latpred.errors import UsageError

CPU = suites.get("cpu")
EVERYDAY = [suites.get("ordinary"), suites.get("sealed")]
SMALL = [s for name in ("cpu", "unseen", "fresh", "blind", "ordinary", "sealed") for s in suites.get(name).ready]


def test_the_cpu_suite_is_wide_enough() -> None:
    assert len(CPU.workloads()) >= 12
    assert len({workload.family for workload in CPU.ready}) >= 8
    assert {1, 2, 4, 8, 16, 32} <= set(CPU.batches)
    assert len(CPU.ready) * len(CPU.batches) >= 200
    assert len({workload.name for workload in CPU.ready}) == len(CPU.ready)


def test_no_model_is_in_two_suites() -> None:
    assert len({workload.name.split("/")[1] for workload in SMALL}) == len(SMALL)


def test_the_blind_suite_shares_no_family_with_an_earlier_one() -> None:
    blind = {workload.family for workload in suites.get("blind").ready}
    others = {workload.family for name in ("cpu", "unseen", "fresh") for workload in suites.get(name).ready}
    assert len(blind) >= 20
    assert not blind & others
    assert suites.get("blind").batches == CPU.batches


@pytest.mark.parametrize("suite", EVERYDAY, ids=lambda suite: suite.name)
def test_suites_of_everyday_networks_are_wide_and_have_many_small_models(suite: suites.Suite) -> None:
    assert len(suite.workloads()) >= 24
    assert len({workload.family for workload in suite.ready}) >= 20
    assert suite.batches == (1, 2, 4, 8, 16, 32)
    assert sum(workload.walk("fp32").macs(1) < 5e6 for workload in suite.ready) > len(suite.ready) / 4


@pytest.mark.parametrize("subject", [s for suite in EVERYDAY for s in suite.ready], ids=lambda workload: workload.name)
def test_ordinary_models_run_on_ordinary_numbers_at_one_sample_and_at_two(workload: Workload) -> None:
    model, inputs = workload.make("cpu", "fp32")
    with torch.inference_mode(), Denormals() as seen:
        one, two = (model(*inputs(batch, "cpu")) for batch in (1, 2))
    assert (one.shape[0], two.shape[0]) == (1, 2)
    assert one.shape[1:] == two.shape[1:]
    assert bool(torch.isfinite(two).all())
    assert seen.count == 0


@pytest.mark.parametrize("subject", SMALL, ids=lambda workload: workload.name)
def test_every_model_for_a_cpu_walks(workload: Workload) -> None:
    graph = workload.walk("fp32")
    assert graph.model == workload.name
    assert graph.coverage(2).launches == 1.0
    # two slow cores do some 20 GMAC a second: half a second at batch 32
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


@pytest.mark.parametrize("subject", CPU.ready, ids=lambda workload: workload.name)
def test_models_run_where_they_are_built_on_ordinary_numbers(workload: Workload) -> None:
    model, inputs = workload.make("cpu", "fp32")
    with torch.inference_mode(), Denormals() as seen:
        output = model(*inputs(2, "cpu"))
    first = output if isinstance(output, torch.Tensor) else output[0]
    assert first.shape[0] == 2
    assert bool(torch.isfinite(first).all())
    assert seen.count == 0


def test_the_heldout_suite_holds_names_and_builds_nothing() -> None:
    suite = suites.get("heldout")
    assert len(suite.names) == 12
    assert suite.ready == ()


@pytest.mark.parametrize("name", suites.get("heldout").names)
def test_every_name_of_the_heldout_suite_is_known(name: str) -> None:
    workload = workloads_of(name)[0]
    assert workload.input_size > 0
    assert workload.input_kind in {"seq", "image", "audio"}


def test_an_unknown_suite() -> None:
    known = "cpu, unseen, fresh, blind, ordinary, sealed, heldout"
    with pytest.raises(UsageError, match=rf"no suite 'gpu'\. Use one of {known}"):
        suites.get("gpu")


BROKEN = 'raise RuntimeError("operator torchvision::nms does not exist")\n'
BUILDS = """
from latpred.calibration.workloads import suites

for name in ("cpu", "blind", "fresh"):
    for workload in suites.get(name).workloads():
        if workload.family == "encoder" or "bert" in workload.name:
            workload.make("meta", "fp32")
            print(workload.name)
            break
"""


def test_suites_are_built_beside_a_torchvision_that_does_not_fit_torch(tmp_path: Path) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(BROKEN)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))}
    done = subprocess.run([sys.executable, "-c", BUILDS], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3
