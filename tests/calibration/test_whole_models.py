"""Measuring whole models: what the table holds, what becomes of failures, and that rounds interleave. No wall clock."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from factories import bare, graph
from gauges import FAST
from torch import nn

from latpred import host, runtimes, tables
from latpred.calibration.devices.cpu import CpuDevice
from latpred.calibration.devices.simulated import SimulatedDevice, SimulatedSpec
from latpred.calibration.measurement import whole_models
from latpred.calibration.measurement.whole_models import StoppedError, measure
from latpred.calibration.timing import disturbance, timer
from latpred.calibration.workloads.suites import Workload, module_workload
from latpred.errors import BusyWarning, DeviceError, MissingPackageError, RuntimeRefusalError, UsageError
from latpred.profile.document import DeviceInfo
from latpred.progress import ProgressEvent
from latpred.runtimes import Eager


def tiny() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)).eval()


class Choosy(nn.Module):
    """Raises from a batch size on."""

    def __init__(self, first: int, error: Exception) -> None:
        super().__init__()
        self.first, self.error = first, error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) >= self.first:
            raise self.error
        return x + 1


class Drifting(CpuDevice):
    """A processor whose every forward takes its batch in seconds, a thousandth longer each time it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.forwards, self.order = 0.0, 0, []

    def info(self) -> DeviceInfo:
        return msgspec.structs.replace(super().info(), kind="drifting")  # the host's speed says nothing of it

    def clock(self) -> float:
        return self.now

    def errors(self) -> AbstractContextManager[None]:
        return nullcontext()

    def prepare_model(self, model: Any, inputs: Any, runtime: str) -> Callable[[], None]:
        batch = len(inputs[0])
        self.order.append(batch)

        def forward() -> None:
            self.forwards += 1
            self.now += batch * 1.001**self.forwards

        return forward


def test_a_tiny_model_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_models, "MORE_ROUNDS", 0)  # which slow moments would ask for
    steps: list[ProgressEvent] = []
    threads = torch.get_num_threads()
    asked: dict[str, Any] = {"repeats": 2, "plan": FAST, "progress": steps.append, "threads": threads + 1}
    table = measure({"tiny": tiny()}, [1, 3], image=8, **asked)
    assert list(zip(table["batch"], table["n"], strict=True)) == [(1, 2), (3, 2)]
    columns = ["model", "status", "input_kind", "input_size"]
    assert table[columns].drop_duplicates().to_numpy().tolist() == [["tiny", tables.OK, "image", 8]]
    assert (table["latency_s"] > 0).all()
    assert (table["repeat_ratio"] >= 1).all()
    assert table["run"].nunique() == 1
    assert table["stack"][0].endswith(f"threads={threads + 1}")
    assert torch.get_num_threads() == threads
    assert [step.done for step in steps] == [0, 1, 2, 3]
    assert {step.total for step in steps} == {4}


def test_every_cell_says_how_its_shared_cache_was(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Drifting()

    def read() -> dict[str, float]:
        return {host.PRODUCT: 500.0, host.CACHE: 1000.0 * device.order[-1]}

    monkeypatch.setattr(whole_models, "reference_on", lambda _: SimpleNamespace(read=read))
    workload = module_workload("any", nn.Identity(), torch.zeros(1, 2))
    table = measure(workload, [1, 2], device=device, repeats=2, plan=timer.Plan(least=3, most=3, warmup_s=0.0))
    assert table.set_index("batch")[host.COLUMN.format(host.CACHE)].to_dict() == {1: 1000.0, 2: 2000.0}


@pytest.mark.parametrize(
    ("error", "said"),
    [(MemoryError("no room"), "out of memory: no room"), (ValueError("wrong\n shape"), "ValueError: wrong shape")],
)
def test_a_batch_that_fails_is_a_row_and_costs_smaller_ones_nothing(error: Exception, said: str) -> None:
    workload = module_workload("choosy", Choosy(4, error), torch.zeros(1, 2))
    table = measure(workload, [1, 2, 4, 8], repeats=3, plan=FAST)
    assert table["status"].tolist() == [*[tables.OK] * 2, *[said] * 2]
    assert table["latency_s"][2:].isna().all()
    assert (table["n"] > 0).tolist() == [True, True, False, False]


class Ending(SimulatedDevice):
    """Raises an error instead of preparing any more forward passes."""

    def __init__(self, passes: int, error: BaseException) -> None:
        super().__init__()
        self.left, self.error = passes, error

    def prepare_model(self, model: Any, inputs: Any, runtime: str = "eager") -> Callable[[], None]:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return super().prepare_model(model, inputs, runtime)


@pytest.mark.parametrize(("passes", "counts"), [(5, [1, 2, 2]), (2, [0, 1, 1])])
def test_ctrl_c_leaves_what_was_measured(passes: int, counts: list[int]) -> None:
    device = Ending(passes, KeyboardInterrupt())
    with pytest.raises(StoppedError) as raised:
        measure({"view": graph(bare("view"))}, [1, 2, 3], device=device, plan=FAST, repeats=3)
    table = tables.check(raised.value.table, tables.MEASURED)
    assert sorted(table["n"]) == counts
    assert table["latency_s"].notna().tolist() == (table["n"] > 0).tolist()
    assert table["status"].tolist() == ["ok" if n else "interrupted before it was measured" for n in table["n"]]


def test_a_device_that_fails_for_good_ends_the_run_with_the_cell() -> None:
    with pytest.raises(DeviceError, match=r"view at batch \d in eager: cuda:0 failed: CUDA error"):
        measure({"view": graph(bare("view"))}, 1, device=Ending(0, DeviceError("cuda:0 failed: CUDA error")), plan=FAST)


class FullLater(Drifting):
    """Has no room for batches from 4 on in any but the first round."""

    def prepare_model(self, model: Any, inputs: Any, runtime: str) -> Callable[[], None]:
        if len(inputs[0]) >= 4 and len(inputs[0]) in self.order:
            raise MemoryError("no room")
        return super().prepare_model(model, inputs, runtime)


def test_what_was_timed_before_a_failure_counts() -> None:
    workload = module_workload("any", nn.Identity(), torch.zeros(1, 2))
    table = measure(workload, [1, 4, 8], device=FullLater(), repeats=3, plan=FAST)
    assert table["status"].tolist() == [tables.OK] * 3
    assert table["n"].tolist() == [3, 1, 1]
    assert table["latency_s"].notna().all()


def test_without_time_nothing_is_measured_and_the_table_says_so() -> None:
    table = measure(tiny(), [1, 2], image=8, budget_s=-1.0, plan=FAST)
    assert set(table["status"]) == {"not reached in the time budget"}
    assert set(table["model"]) == {"Sequential"}
    assert table["latency_s"].isna().all()


def test_other_work_meanwhile_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disturbance.Watch, "lap", lambda _: disturbance.Disturbance(busy=1.3))
    with pytest.warns(BusyWarning, match="other work used 1.3 processors") as said:
        measure(tiny(), 1, image=8, repeats=1, plan=FAST)
    assert said[0].filename == __file__


def test_rounds_spread_a_drift_over_all_cells() -> None:
    device = Drifting()
    workload = module_workload("any", nn.Identity(), torch.zeros(1, 2))
    table = measure(workload, range(1, 9), device=device, repeats=4, plan=timer.Plan(least=3, most=3, warmup_s=0.0))
    visits = [sorted(device.order[start : start + 8]) for start in range(0, 32, 8)]
    assert visits == [list(range(1, 9))] * 4  # every round visits every cell once
    slowdown = table["latency_s"] / table["batch"]
    assert slowdown.max() / slowdown.min() < 1.001 ** (device.forwards / 4)  # less than one round's worth of drift


def test_a_graph_runs_on_the_simulated_device_and_nowhere_else() -> None:
    net = graph(*[bare("elementwise", "elementwise", 1 << 20)] * 20)
    quiet = SimulatedDevice(SimulatedSpec(noise=0.0, spikes=0.0))
    single = measure(net, [1, 64], device=quiet, plan=FAST, repeats=2)
    flowing = measure(net, [1, 64], device=quiet, plan=FAST, repeats=2, protocol="pipelined")
    assert set(single["device"]) == {"simulated"}
    assert set(single["protocol"]) == {"single"}
    assert (flowing["latency_s"] < single["latency_s"]).all()
    assert single["repeat_ratio"].max() < 1.01
    # 64 times the bytes of 20 kernels that one sample already keeps busy with 8 MiB each
    assert 30 < single["latency_s"][1] / single["latency_s"][0] <= 65
    with pytest.raises(UsageError, match="is a graph, which cpu cannot run"):
        measure(graph(bare("view")), [1], plan=FAST)
    with pytest.raises(UsageError, match="was traced in fp32; ask for precision='fp32'"):
        measure(net, [1], device=quiet, precision="fp16", plan=FAST)
    with pytest.raises(UsageError, match="has its inputs already; leave out seq and image"):
        measure(net, [1], device=quiet, seq=64, plan=FAST)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": [0]}, "Batch 0 is not possible"),
        ({"batch": [2.0]}, r"Batch 2\.0 is not a whole number"),
        ({"batch": []}, "names no batch size"),
        ({"batch": [1], "repeats": 0}, "repeats=0 is not a number of repeats; give a whole number of at least 1"),
        ({"batch": [1], "repeats": 1.5}, "repeats=1.5 is not a number of repeats"),
        ({"batch": [1], "budget_s": float("nan")}, "budget_s=nan is not a number of seconds"),
        ({"batch": [1], "protocol": "parallel"}, "no protocol 'parallel'. Use one of single, pipelined"),
        ({"batch": [1], "runtime": []}, "no runtime is named. Give one or more of eager, "),
        ({"batch": [1], "runtime": "eagr"}, r"No runtime is called 'eagr'\. Did you mean 'eager'"),
        ({"batch": [1], "threads": 0}, "threads=0 is not a number of threads"),
        ({"batch": [1], "precision": "int4"}, "precision 'int4' is not known"),
        ({"batch": [1], "precision": "tf32"}, "cpu has no tf32; it does fp32"),
    ],
)
def test_bad_requests(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        measure({"tiny": tiny()}, image=8, plan=FAST, **arguments)


def test_a_path_is_measured_on_a_device_of_pytorch(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("import torch\ndef build():\n    return torch.nn.Linear(4, 4), torch.zeros(1, 4)\n")
    table = measure(Path(f"{file}:build"), 1, device=torch.device("cpu"), plan=FAST, repeats=1)
    assert table["status"].tolist() == ["ok"]


def test_a_runtime_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Eager, "available", lambda _: "Eager is elsewhere; run 'pip install eager'")
    with pytest.raises(MissingPackageError, match="eager cannot run here: Eager is elsewhere; run 'pip install eager'"):
        measure({"tiny": tiny()}, [1], image=8, plan=FAST)


@pytest.mark.parametrize(
    ("memory_bytes", "runtime", "times"),
    [
        (0, "eager", 2),  # not every system says how much there is
        (20_100_000, "eager", 3),  # a fifth holds one model of 4.004 MB, and the other is built anew in each round
        (20_100_000, ("eager", "torchscript"), 4),  # two runtimes hold the weights twice: too much for either
    ],
)
def test_models_are_built_once_when_they_fit_and_again_when_not(
    memory_bytes: int, runtime: str | tuple[str, ...], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []

    def make(device: str, precision: str) -> Any:
        built.extend(["one"] * (device != "meta"))
        return nn.Linear(1000, 1000), lambda batch, where: (torch.zeros(batch, 1000),)

    class Sized(CpuDevice):
        def info(self) -> Any:
            return msgspec.structs.replace(super().info(), memory_bytes=memory_bytes)

    monkeypatch.setattr(whole_models, "MORE_ROUNDS", 0)  # which slow moments would ask for
    models = [Workload(name, "custom", 0, make) for name in "ab"]
    measure(models, 1, runtime=runtime, device=Sized(), repeats=2, plan=FAST)
    assert len(built) == times


@pytest.mark.parametrize(
    ("named", "left", "said"),
    [
        (True, 4_000_000, ["out of memory: it needs 3.83 MiB, and 3.81 MiB are free", "out of memory: it needs"]),
        (True, 5_000_000, [tables.OK, "out of memory: it needs 7.63 MiB, and 4.77 MiB are free"]),
        (False, 100_000, [tables.OK, "out of memory: it needs 7.63 MiB, and 97.7 KiB are free"]),
    ],
    ids=["weights", "activations", "weights that are there"],
)
def test_what_memory_has_no_room_for_is_not_begun(
    named: bool, left: float, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(device: str, precision: str) -> Any:
        assert device == "meta" or left > 4_004_000, "its weights are not allocated"
        with torch.device(device):
            return nn.Linear(1000, 1000).eval(), lambda batch, where: (torch.zeros(batch, 1000, device=where),)

    there = module_workload("wide", nn.Linear(1000, 1000).eval(), torch.zeros(1, 1000))
    monkeypatch.setattr(host, "bytes_left", lambda: left)
    table = measure(Workload("wide", "custom", 0, make) if named else there, [1, 1000], repeats=2, plan=FAST)
    assert [status[: len(start)] for status, start in zip(table["status"], said, strict=True)] == said


class Awaited(nn.Module):
    async def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_a_forward_whose_call_does_nothing_is_not_timed() -> None:
    (status,) = measure(Awaited(), 1, inputs=torch.zeros(1, 4), plan=FAST)["status"]
    assert "Awaited has a forward that is async or yields" in status


class Refusing(Eager):
    """A runtime that takes nothing, and counts how often it was asked."""

    name = "refusing"
    asked = 0

    def build(self, model: Any, inputs: Any) -> Callable[[], Any]:
        self.asked += 1
        raise RuntimeRefusalError("refusing runs nothing at all")


def test_runtimes_side_by_side_and_one_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing, known = Refusing(), runtimes.get
    monkeypatch.setattr(runtimes, "get", lambda name: refusing if name == "refusing" else known(name))
    table = measure({"tiny": tiny()}, [1, 2, 4], runtime=("eager", "refusing"), image=8, plan=FAST, repeats=2)
    rows = {(row.runtime, row.batch): row.status for row in table.itertuples()}
    assert len(rows) == 6
    assert {status for (runtime, _), status in rows.items() if runtime == "eager"} == {tables.OK}
    refused = {status for (runtime, _), status in rows.items() if runtime == "refusing"}
    assert refused == {"refused: refusing runs nothing at all"}
    assert refusing.asked == 1  # not again for every batch and round


class Noting(nn.Linear):
    """Notes the formats of what it gives."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.formats: set[torch.dtype] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        self.formats.add(out.dtype)
        return out


def test_models_are_measured_under_autocast() -> None:
    model = Noting().eval()
    noting = module_workload("noting", model, (torch.zeros(1, 4),))
    table = measure(noting, [2], precision="amp-bf16", runtime=["eager", "torchscript"], plan=FAST, repeats=1)
    assert model.formats == {torch.bfloat16}
    assert model.weight.dtype is torch.float32
    assert table["precision"].unique().tolist() == ["amp-bf16"]
    assert table["repeat_ratio"].notna().tolist() == (table["n"] > 1).tolist()  # a slowed cell is visited again
    assert table["status"][0] == "ok"
    assert "does not run models under autocast" in table["status"][1]
