"""Recording a plan: resumed after any kind of end, replayed without tracing anything, and honest about what failed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from gauges import FAST
from profiledata import profile
from torch import nn

from latpred import host, tables, tracing
from latpred.accuracy import recording
from latpred.calibration.devices.cuda import launching_ops
from latpred.calibration.devices.simulated import SimulatedDevice
from latpred.calibration.measurement import recorder
from latpred.calibration.measurement.recorder import (
    JOURNAL_FOLDER,
    Plan,
    RecordingSession,
    Setting,
    plan,
)
from latpred.calibration.session import JOURNAL, Row
from latpred.calibration.timing.timer import Timing
from latpred.calibration.workloads.suites import Workload, module_workload
from latpred.errors import BusyError, CalibrationError, ProfileError, RuntimeRefusalError, UsageError
from latpred.profile.document import DeviceInfo, DeviceProfile
from latpred.progress import ProgressEvent


def workload(name: str, width: int = 32) -> Workload:
    return module_workload(name, nn.Sequential(nn.Linear(width, width), nn.GELU()), torch.zeros(1, width))


def on_the_simulated_device() -> DeviceProfile:
    device = DeviceInfo(name="simulated", kind="simulated", asynchronous=True, memory_bytes=80 << 30)
    return profile("simulated", device=device)


A, B = workload("a"), workload("b", 64)
FIRST = tuple(Setting(one, batch, "fp32", "eager") for one in (A, B) for batch in (1, 4))
AGAIN = tuple(Setting(one, 1, "fp32", "eager", number=2) for one in (A, B))
COUNTS = tuple(Setting(one, 1, "fp32", "eager", recorder.COUNTED) for one in (A, B))
CAPTURED = (Setting(A, 1, "fp32", "cuda-graphs"),)
SMALL = Plan("small", {"first": FIRST, "again": AGAIN, "launches": COUNTS, "captured": CAPTURED})


@pytest.fixture(autouse=True)
def small_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "plan", lambda name: SMALL)
    monkeypatch.setattr(recorder, "VISIT", FAST)


def run(folder: Path, device: SimulatedDevice | None = None, **given: object) -> recorder.Done:
    return recorder.record("small", folder, device or SimulatedDevice(), **given)  # type: ignore[arg-type]


def test_a_recording_holds_everything_that_was_planned(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.stages == {"first": (4, 4), "again": (2, 2), "launches": (2, 2), "captured": (1, 1)}
    assert done.complete
    table = recording.load(tmp_path).table
    assert len(table) == 14  # each in both protocols
    assert set(table["status"]) == {tables.OK}
    assert set(table["regime"]) == {"framework-bound"}
    assert (table["overhead_s"] > table["compute_s"]).all()
    assert table["launches"].dropna().tolist() == [2.0] * 4  # at batch 1, as it was timed first
    assert done.failed == {}
    merged = tables.merge_repeats(table)
    assert (merged["repeat_ratio"].notna().sum(), len(merged)) == (4, 10)


def test_a_replay_traces_nothing_and_omits_what_profiles_lack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path)
    run(tmp_path / "captured", stages=["captured"])
    for place in (tracing, Workload):
        monkeypatch.setattr(place, "trace", lambda *_, **__: pytest.fail("a replay must not trace anything"))
    known = on_the_simulated_device()
    report = recording.load(tmp_path).replay(known)
    assert report.overall.cells == 8
    assert report.regime == 1.0
    assert report.launches["eager"].exact == 1.0
    assert any(note.startswith("2 rows of 1 model are left out (a): ") for note in report.notes)
    with pytest.raises(ProfileError, match="cuda-graphs"):
        recording.load(tmp_path / "captured").replay(known)


def test_a_run_that_was_ended_goes_on_where_it_was(tmp_path: Path) -> None:
    labels: list[str] = []

    def end_at_third(step: ProgressEvent) -> None:
        labels.append(step.label)
        if step.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, progress=end_at_third)
    assert len(recording.load(tmp_path).table) == 4
    lines = tmp_path / JOURNAL_FOLDER / JOURNAL
    lines.write_bytes(lines.read_bytes() + b'{"cell":{"kind":"torn')
    done = run(tmp_path, progress=lambda step: labels.append(step.label))
    assert done.complete
    assert len(labels) == 10  # nine settings, one of them begun twice
    assert len(recording.load(tmp_path).table) == 14


def test_what_was_profiled_comes_last_and_is_no_row_of_its_own(tmp_path: Path) -> None:
    labels: list[str] = []
    run(tmp_path, stages=["launches"])
    assert not (tmp_path / recording.MANIFEST).exists()  # nothing was timed yet
    run(tmp_path / "all", progress=lambda step: labels.append(step.label))
    numbers = [label.partition("number=")[2][0] for label in labels]
    assert numbers == ["1"] * 4 + ["2"] * 2 + ["1"] + ["0"] * 2


def test_a_profiler_that_sees_nothing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedDevice, "profiled_launches", lambda *_: 0.0)
    done = run(tmp_path, stages=["first", "launches"])
    assert {reason: len(keys) for reason, keys in done.failed.items()} == {"the profiler sees no launch": 2}
    assert set(recording.load(tmp_path).table["status"]) == {tables.OK}


def test_a_spent_budget_says_how_far_it_came(tmp_path: Path) -> None:
    done = run(tmp_path, budget_s=1e-9, stages=["first", "again"])
    assert done.stages["first"][0] + done.stages["again"][0] <= 1
    assert not done.complete


class Broken(SimulatedDevice):
    """Fails at some models in a way of its own, and counts how often it was asked for them."""

    def __init__(self, failure: BaseException, models: tuple[str, ...] = ("b",)) -> None:
        super().__init__()
        self.failure, self.models, self.asked = failure, models, 0

    def prepare_model(self, model: object, inputs: object, runtime: str = "eager") -> object:  # type: ignore[override]
        if getattr(model, "model", "") in self.models:
            self.asked += 1
            raise self.failure
        return super().prepare_model(model, inputs, runtime)


def test_tf32_is_left_out_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Older(SimulatedDevice):
        def info(self) -> DeviceInfo:
            return msgspec.structs.replace(super().info(), kind="cuda")

    both = tuple(Setting(A, 1, precision, "eager") for precision in ("fp32", "tf32"))
    monkeypatch.setattr(recorder, "plan", lambda name: Plan("small", {"first": both}))
    done = run(tmp_path, Older(), budget_s=-1.0)
    assert done.stages == {"first": (0, 1)}
    assert done.notes == ("tf32 is left out: simulated has none",)
    assert run(tmp_path, budget_s=-1.0).stages == {"first": (0, 2)}


def test_another_plan_or_machine_needs_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, stages=["captured"])
    machine = SimulatedDevice().machine()
    with pytest.raises(UsageError, match="holds the plan small"), RecordingSession(tmp_path, "paper", machine):
        pass
    renamed = msgspec.structs.replace(machine, hostname_hash="elsewhere")
    with RecordingSession(tmp_path, "small", renamed) as session:
        assert len(session.rows) == 1
        with pytest.raises(BusyError, match="another recording"), RecordingSession(tmp_path, "small", machine):
            pass
    other = msgspec.structs.replace(machine, accelerator="another GPU")
    with pytest.raises(UsageError, match="which this machine is not"), RecordingSession(tmp_path, "small", other):
        pass


def test_what_a_runtime_refused_is_not_asked_again_at_other_batches(tmp_path: Path) -> None:
    refusing = Broken(RuntimeRefusalError("it has a branch"), models=("a", "b"))
    done = run(tmp_path, refusing, stages=["first"])
    assert {reason: len(keys) for reason, keys in done.failed.items()} == {"refused: it has a branch": 4}
    assert refusing.asked == 2  # once for each model


def test_unknown_plans_stages_and_runtimes(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no plan to measure 'gpu' by\. Use one of paper, heldout, check\."):
        plan("gpu")
    with pytest.raises(UsageError, match=r"no stage 'last'\. Use one of first, again, launches, captured\."):
        run(tmp_path, stages=["last"])
    with pytest.raises(UsageError, match=r"no runtime 'magic'\. Use some of eager, cuda-graphs\."):
        run(tmp_path, runtimes=["magic"])
    with pytest.raises(
        CalibrationError, match="nothing of the plan small that was asked for can be measured: the stages"
    ):
        run(tmp_path, stages=["captured"], runtimes=["eager"])


def test_the_paper_plan_and_the_heldout_one_are_complete_repeat_nothing_and_share_no_model() -> None:
    names: list[set[str]] = []
    for stages in (plan(name).stages for name in ("paper", "heldout")):
        settings = [setting for stage in stages.values() for setting in stage]
        assert len({setting.cell.key for setting in settings}) == len(settings)
        first = stages["core"]
        assert len({setting.workload.name for setting in first}) == 12
        assert len(first) == 12 * 4 * 3
        assert {setting.precision for setting in first} == {"fp16"}
        assert not any(setting.counted for setting in first)
        assert sum(setting.counted for setting in settings) == 12
        assert {setting.batch for setting in settings} == set(recorder.BATCHES)
        assert {setting.precision for setting in settings} == {"fp32", "tf32", "fp16", "bf16"}
        assert len({setting.runtime for setting in settings}) == 7
        names.append({setting.workload.name for setting in settings})
    assert not names[0] & names[1]
    tried = plan("check").stages["every-runtime"]
    assert len(tried) == 2 * 7  # every runtime once
    assert {setting.batch for setting in tried} == {1}


def test_a_profiler_counts_ops_that_launch() -> None:
    names = ("gemm", "Memcpy DtoD (Device -> Device)", "Memcpy HtoD (Pageable -> Device)", "Memset (Device)")
    gemm, within, brought, fill = (SimpleNamespace(name=name) for name in names)
    launched = ((gemm, gemm), (within,), (brought, fill), ())
    device, host = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    events = [SimpleNamespace(device_type=host, kernels=kernels) for kernels in launched]
    events.append(SimpleNamespace(device_type=device, kernels=()))
    assert launching_ops(events) == 2


def test_each_protocol_says_how_slow_the_host_of_a_gpu_was() -> None:
    timings = {name: Timing(1e-3, 0.0, 5, True, slow) for name, slow in (("single", 1.0), ("pipelined", 1.5))}
    row = Row(Setting(A, 1, "fp16", "eager").cell, timings, 1.0, speed={host.DISPATCH: 100.0})
    told = host.COLUMN.format(host.DISPATCH)
    columns = list(recorder._columns(row, "now"))
    assert [(one["protocol"], one[host.SLOWED], one[told]) for one in columns] == [
        ("single", 1.0, 100.0),
        ("pipelined", 1.5, 150.0),
    ]
    assert told not in next(recorder._columns(msgspec.structs.replace(row, speed={}), "now"))
    sides = {"issue": Timing(1.8e-3, 0.0, 5, True, 1.8), "queued": Timing(1.2e-3, 0.0, 5, True)}
    columns = list(recorder._columns(msgspec.structs.replace(row, timings=timings | sides), "now"))
    assert [one["overhead_s"] for one in columns] == pytest.approx(
        [1.8e-3 / 1.8**host.LAUNCH_POWER, 1.8e-3 * (1.5 / 1.8) ** host.LAUNCH_POWER]
    )  # in moments as slow as those of the latency beside it
    assert [one["regime"] for one in columns] == ["compute-bound", "framework-bound"]


def test_a_journal_that_cannot_be_read_is_left_as_it_is(tmp_path: Path) -> None:
    run(tmp_path, stages=["captured"])
    journal = tmp_path / JOURNAL_FOLDER / JOURNAL
    head, *rows = journal.read_bytes().splitlines(keepends=True)
    for other in (head.replace(b'"journal":1', b'"journal":2'), head[1:]):
        journal.write_bytes(other + b"".join(rows))
        with pytest.raises(UsageError, match=r"damaged, or of another version .* Name another folder with --record"):
            run(tmp_path)
        assert journal.read_bytes() == other + b"".join(rows)
