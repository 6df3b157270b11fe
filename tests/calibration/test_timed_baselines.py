"""Baselines that need a device: what isolated ops add up, and why torch's estimator has no answer on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tabledata import measured
from torch import nn
from torch.distributed._tools.runtime_estimator import RuntimeEstimator
from torch.utils.flop_counter import flop_registry

from latpred.calibration.devices import conditions
from latpred.calibration.devices.cpu import CpuDevice
from latpred.calibration.devices.simulated import SimulatedDevice
from latpred.calibration.measurement import timed_baselines
from latpred.calibration.measurement.whole_models import Bench
from latpred.calibration.timing import timer
from latpred.calibration.workloads.suites import Workload, module_workload


@pytest.fixture(autouse=True)
def measuring() -> Iterator[None]:
    """What is set around everything that is measured."""
    with conditions.stated(dtype=None):
        yield


def workload() -> Workload:
    """Three equal layers and one relu."""
    layer = nn.Linear(8, 8)
    return module_workload("layers", nn.Sequential(layer, layer, layer, nn.ReLU()).eval(), torch.zeros(1, 8))


def test_each_distinct_op_is_timed_once_and_counted_as_often_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[Any] = []

    def one_millisecond(device: Any, call: Any, plan: Any) -> timer.Timing:
        timed.append(call())
        return timer.Timing(1e-3, 0.0, 3, True)

    monkeypatch.setattr(timer, "queued", one_millisecond)
    seconds = timed_baselines.isolated_ops(Bench(CpuDevice()), workload(), 4, "fp32")
    assert seconds == pytest.approx(4e-3)  # three layers and a relu
    assert [tuple(result.shape) for result in timed] == [(4, 8), (4, 8)]


def test_torchs_estimator_counts_the_flops_of_products_within_composite_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_millisecond_if_counted(func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
        return func(*args, **kwargs or {}), float(func._overloadpacket in flop_registry)

    monkeypatch.setattr(RuntimeEstimator, "_roofline_estimate", one_millisecond_if_counted)
    layers = nn.Sequential(nn.Linear(8, 8), nn.Conv1d(4, 2, 3), nn.BatchNorm1d(2)).eval()
    both = module_workload("layers", layers, torch.zeros(1, 4, 8))
    assert timed_baselines.runtime_estimator(Bench(CpuDevice()), both, 4, "fp32") == 2e-3


def test_columns_and_reasons() -> None:
    table = measured([("layers", 1, 1e-4), ("layers", 2, 1e-4)], status="ok")
    said: list[str] = []

    def announce(label: str) -> bool:
        said.append(label)
        return True

    out, reasons = timed_baselines.with_baselines(
        table, [workload()], Bench(CpuDevice()), tuple(timed_baselines.BASELINES), announce
    )
    assert (out["baseline_isolated_ops_s"] > 0).all()
    assert "baseline_runtime_estimator_s" not in out
    assert reasons.keys() == {"runtime_estimator"}
    assert "Roofline estimation needs to access CUDA" in reasons["runtime_estimator"]
    assert said == ["isolated_ops: layers batch 1", "isolated_ops: layers batch 2", "runtime_estimator: layers batch 1"]


@pytest.mark.parametrize(
    ("device", "time", "reason"),
    [
        (CpuDevice, False, "the time budget was spent"),
        (SimulatedDevice, True, "the simulated device runs graphs, not ops"),
    ],
)
def test_why_there_is_no_column(device: type[Any], time: bool, reason: str) -> None:
    table = measured([("layers", 1, 1e-4)], status="ok")
    bench = Bench(device())
    out, reasons = timed_baselines.with_baselines(table, [workload()], bench, ["isolated_ops"], lambda label: time)
    assert list(out.columns) == list(table.columns)
    assert reasons["isolated_ops"] == reason
    assert reasons.get("runtime_estimator", "left out") == "left out"
