"""Calibrations of several runtimes on the simulated device: order, budgets, what is kept, resumed and refused."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from clidata import run
from factories import add, graph

from latpred import runtimes, storage
from latpred.calibration import calibrate, calibrator, fit_raw, runtime_calibration, session
from latpred.calibration.devices import open_device
from latpred.calibration.devices.simulated import SimulatedDevice
from latpred.calibration.fitting import acceptance, profile_fit
from latpred.calibration.measurement import whole_models
from latpred.calibration.runtime_calibration import base, calibrate_runtimes
from latpred.calibration.session import directory, read_journal
from latpred.errors import CalibrationError, LatpredError, MissingPackageError, ProfileError, UsageError
from latpred.graph.graph import ModelGraph, Schedule
from latpred.prediction.predictor import Predictor
from latpred.prediction.pricing import host_cost
from latpred.profile import store
from latpred.profile.document import DeviceInfo, DeviceProfile
from latpred.progress import ProgressEvent
from latpred.runtimes import one_step_per_op
from latpred.runtimes.onnx import onnx_session

FEW = 190  # cells after which eager has a profile
MORE = 26  # cells of another runtime
pytestmark = pytest.mark.usefixtures("third_party")


class Plain:
    name = "plain"

    def lower(self, graph: ModelGraph, batch: int) -> Schedule:
        return one_step_per_op(self.name, graph.at(batch))

    def available(self) -> str | None:
        return None

    def build(self, model: Any, inputs: Any) -> Callable[[], object]:
        return lambda: model(*inputs)


class Absent(Plain):
    name = "absent"

    def available(self) -> str:
        return "run: pip install absent"


@pytest.fixture
def third_party(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that registers runtimes and knows nothing of calibration."""
    found = {one.name: SimpleNamespace(name=one.name, value="", load=one) for one in (Plain, Absent)}
    monkeypatch.setattr(runtimes, "_registered", lambda: found)
    runtimes._made.cache_clear()
    yield
    runtimes._made.cache_clear()


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a finished calibration of eager in it."""
    place = tmp_path_factory.mktemp("calibrated")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(storage.VARIABLE, str(place))
        calibrate(SimulatedDevice(), cells=FEW, precisions=["fp32"])
    return place


@pytest.fixture
def finished(calibrated: Path, latpred_home: Path) -> DeviceProfile:
    """The same, for one test."""
    shutil.copytree(calibrated, latpred_home, dirs_exist_ok=True)
    return store.find("simulated")


def more(names: tuple[str, ...] = ("plain",), cells: int = MORE, **options: object) -> DeviceProfile:
    """Calibrate other runtimes on the simulated device."""
    return calibrate(SimulatedDevice(), runtimes=names, cells=cells, precisions=["fp32"], **options)  # type: ignore[arg-type]


def rows_kept(name: str = session.LAST) -> Counter[str]:
    """How many rows of each runtime a journal has."""
    return Counter(row.cell.runtime for row in read_journal(directory("simulated") / name)[1])


def test_a_third_partys_runtime_is_added_to_a_finished_profile(finished: DeviceProfile) -> None:
    told: list[ProgressEvent] = []
    profile = more(progress=told.append)
    assert list(profile.runtimes) == ["eager", "plain"]
    assert profile.runtimes["eager"] == finished.runtimes["eager"]
    assert (profile.kernels, profile.device, profile.created) == (finished.kernels, finished.device, finished.created)
    assert not [at.label for at in told if at.label.split("/")[1:2] == ["eager"]]
    assert rows_kept() == {"eager": FEW, "plain": MORE}
    assert len(profile.samples) == len(finished.samples) + MORE
    # The simulation runs a stranger's steps at the costs of eager ops.
    for name in ("view", "gemm", "elementwise"):
        assert host_cost(profile.runtimes["plain"], name) == pytest.approx(
            host_cost(finished.runtimes["eager"], name), rel=0.25
        )
    assert 0 < profile.runtimes["plain"].spread < 1
    assert profile.acceptance.passed == finished.acceptance.passed
    assert [name for name in profile.acceptance.checks if name.startswith("plain: ")]
    assert store.find("simulated") == store.load(store.file_of("simulated"))
    assert store.find("simulated").runtimes == profile.runtimes
    lines = run("profiles", "show", "simulated").stdout.splitlines()
    assert [line.split()[0] for line in lines if " us per call" in line] == ["eager", "plain"]


def interrupted(start: Callable[..., DeviceProfile], cells: int) -> list[ProgressEvent]:
    """What a calibration tells until it is interrupted after so many cells."""
    told: list[ProgressEvent] = []

    def stop(at: ProgressEvent) -> None:
        told.append(at)
        if at.cells == cells:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(progress=stop)
    return told


@pytest.mark.usefixtures("finished")
def test_an_extension_that_was_interrupted_goes_on_and_one_asked_for_again_starts_anew() -> None:
    interrupted(more, 12)
    assert rows_kept(session.JOURNAL) == {"plain": 12}
    assert rows_kept() == {"eager": FEW}
    assert list(store.find("simulated").runtimes) == ["eager"]
    told: list[ProgressEvent] = []
    first = more(progress=told.append)
    assert told[0].cells == 12
    assert list(first.runtimes) == ["eager", "plain"]
    assert rows_kept() == {"eager": FEW, "plain": MORE}
    assert not (directory("simulated") / session.JOURNAL).exists()
    again = more(cells=MORE + 4)
    assert rows_kept() == {"eager": FEW, "plain": MORE + 4}
    assert again.runtimes["eager"] == first.runtimes["eager"]
    assert Counter(sample.cell.split("/")[1] for sample in again.samples)["plain"] == MORE + 4
    assert [line for line in again.acceptance.checks if line.startswith("plain: networks")] == [
        "plain: networks to judge by at least 5"
    ]


@pytest.mark.usefixtures("finished")
def test_what_ends_a_calibration_of_several_runtimes_leaves_a_profile_of_those_that_were_finished() -> None:
    both = partial(more, ("plain", "torchscript"), 2 * MORE)
    interrupted(both, MORE + 5)
    assert list(store.find("simulated").runtimes) == ["eager", "plain"]
    assert list(both().runtimes) == ["eager", "plain", "torchscript"]
    assert rows_kept() == {"eager": FEW, "plain": MORE, "torchscript": 2 * MORE}


@pytest.mark.usefixtures("finished")
def test_a_runtime_joins_the_record_of_eager_whatever_precisions_that_has() -> None:
    device = SimulatedDevice()
    profile = calibrate(device, runtimes=["plain"], cells=MORE)  # whose default is two precisions
    assert profile.kernels.keys() == {"fp32"}
    assert rows_kept() == {"eager": FEW, "plain": MORE}
    assert fit_raw(directory("simulated")).kernels.keys() == {"fp32"}
    interrupted(partial(calibrate, device, runtimes=["plain"], cells=MORE), 5)
    told = interrupted(partial(calibrate, device, runtimes=["plain"], cells=MORE), 7)
    assert told[0].cells == 5
    assert fit_raw(directory("simulated")).kernels.keys() == {"fp32"}  # the journal under way has none of eager
    # A precision that it lacks cannot be added to it.
    assert calibrate_runtimes.kept("simulated", device, {}, ["fp16"]) is None
    assert calibrate_runtimes.kept("simulated", device, {"cudnn": "benchmark"}, ["fp32"]) is None
    assert calibrate_runtimes.kept("simulated", device, {}, ["fp32"]) == store.find("simulated")


@pytest.mark.usefixtures("finished")
def test_a_profile_of_a_newer_latpred_is_not_replaced_without_a_word() -> None:
    file = store.file_of("simulated")
    newer = file.read_text().replace('"schema": 2', '"schema": 3')
    file.write_text(newer)
    with pytest.raises(ProfileError, match=r"has schema 3 .* or choose another --name, or replace it with --fresh\.$"):
        calibrate(SimulatedDevice(), cells=9)
    assert file.read_text() == newer


@pytest.mark.usefixtures("finished")
@pytest.mark.parametrize("precisions", [["fp32"], None], ids=["as the profile's", "in more"])
def test_a_calibration_of_eager_under_way_goes_on_instead_of_extending(precisions: list[str] | None) -> None:
    interrupted(partial(calibrate, SimulatedDevice(), cells=FEW, precisions=precisions), 30)
    assert rows_kept(session.JOURNAL) == {"eager": 30}
    extending = partial(calibrate, SimulatedDevice(), runtimes=["plain"], cells=10 * FEW, precisions=precisions)
    told = interrupted(extending, 33)
    assert told[0].cells == 30
    assert {at.label.split("/")[1] for at in told if "/" in at.label} == {"eager"}


def test_eager_comes_first_and_its_fit_sees_no_other_rows() -> None:
    cells = FEW + 60
    profile = more(("plain", "eager"), cells=cells, quick=True)
    kept, rows = rows_kept(), read_journal(directory("simulated") / session.LAST)[1]
    assert [row.cell.runtime for row in rows] == ["eager"] * kept["eager"] + ["plain"] * kept["plain"]
    assert sum(kept.values()) in (cells, cells + 1)
    device = SimulatedDevice()
    for seen in (rows, rows[: kept["eager"]]):
        alone, _ = profile_fit.fit_profile(seen, device.machine(), device.info(), "simulated")
        assert alone.runtimes == {"eager": profile.runtimes["eager"]}


@pytest.mark.usefixtures("finished")
@pytest.mark.parametrize(
    ("runtime", "error", "said", "timed"),
    [
        ("plain", ValueError("it never works"), "ValueError: it never works", calibrate_runtimes.MOST_FAILURES),
        (
            "cuda-graphs",
            ValueError("it never works"),
            "ValueError: it never works",
            5 + calibrate_runtimes.MOST_FAILURES,
        ),
        ("plain", MissingPackageError("no CUDA"), "missing package: no CUDA", 1),
    ],
)
def test_a_runtime_that_never_works_stays_out_and_the_gate_says_why(
    runtime: str, error: Exception, said: str, timed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base.RuntimeCalibrator, "prepared", Mock(side_effect=error))
    profile = more((runtime,))
    assert list(profile.runtimes) == ["eager"]
    assert profile.acceptance.runtimes == {runtime: False}
    assert profile.acceptance.checks[f"{runtime}: costs"] == f"{said}: failed"
    assert rows_kept()[runtime] == timed
    shown = run("profiles", "show", "simulated").stdout
    assert f"{runtime}: costs: {said}: failed" in shown
    assert f"latpred calibrate --device simulated --runtimes {runtime}" in shown
    # Predictions carry the caveat of their own runtime only.
    both = dict.fromkeys(("eager", "plain"), profile.runtimes["eager"])
    passed = msgspec.structs.replace(profile.acceptance, passed=True, runtimes={"plain": False})
    predictor = Predictor(msgspec.structs.replace(profile, runtimes=both, acceptance=passed))
    said = "what the profile says of plain failed its acceptance gate; see: latpred profiles show simulated"
    carried = [predictor.predict(graph(add()), runtime=name).provenance.caveats for name in both]
    assert [said in caveats for caveats in carried] == [False, True]


@pytest.mark.usefixtures("finished")
def test_a_runtime_that_cannot_be_fitted_ends_no_calibration_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    fit, prepared = base.RuntimeCalibrator.fit, base.RuntimeCalibrator.prepared
    few = list[object]()

    def failing(self: base.RuntimeCalibrator, *given: Any) -> Any:
        return 1 / 0 if self.runtime == "plain" else fit(self, *given)

    monkeypatch.setattr(base.RuntimeCalibrator, "fit", failing)
    profile = more(("plain", "torchscript"), 2 * MORE)
    assert list(profile.runtimes) == ["eager", "torchscript"]
    assert profile.acceptance.checks["plain: costs"] == "ZeroDivisionError: division by zero: failed"
    monkeypatch.setattr(base.RuntimeCalibrator, "fit", fit)

    def once(*given: Any) -> Any:
        few.append(given)
        return prepared(*given) if len(few) == 1 else 1 / 0

    monkeypatch.setattr(base.RuntimeCalibrator, "prepared", once)
    profile = more()
    said = profile.acceptance.checks["plain: costs"]
    assert said.startswith(f"Of {MORE} cells {MORE - 1} could not be measured, most often for this: ZeroDivision")
    assert "1 networks were timed in plain, too few" in said
    assert profile.failures == {"plain: ZeroDivisionError: division by zero": MORE - 1}
    monkeypatch.setattr(base.RuntimeCalibrator, "prepared", prepared)
    assert more().failures == {}


@pytest.mark.usefixtures("finished")
def test_a_runtime_measured_again_in_vain_says_that_its_costs_are_older(monkeypatch: pytest.MonkeyPatch) -> None:
    older = more().runtimes["plain"]
    monkeypatch.setattr(base.RuntimeCalibrator, "fit", lambda *_: 1 / 0)
    profile = more()
    assert profile.runtimes["plain"] == older
    said = "ZeroDivisionError: division by zero; the profile keeps those of an earlier calibration: failed"
    assert profile.acceptance.checks["plain: costs"] == said


def test_a_runtime_goes_on_for_networks_to_judge_by(finished: DeviceProfile, tmp_path: Path) -> None:
    device, seen = SimulatedDevice(), list[int]()

    def goes_on(spent: float, networks: int) -> bool:
        seen.append(networks)
        return spent < math.inf and networks < 3

    with session.Session(tmp_path, device.machine(), {}) as one:
        run = calibrate_runtimes.RuntimeSession(one, ("fp32",), goes_on)
        plain = runtime_calibration.get("plain", device)
        gate = run.add(finished, plain, 1e-6, math.inf, lambda *_: None).acceptance
    assert sorted(set(seen)) == [0, 1, 2, 3]
    assert gate.checks["plain: networks to judge by at least 5"] == "3: failed"
    assert gate.advice[-1].endswith("--runtimes plain --budget 5m")


def test_budgets_are_shared_in_proportion_and_without_one_a_calibration_may_go_on() -> None:
    full = {"eager": calibrator.FULL_S, "plain": runtime_calibration.seconds_of("plain")}
    whole, longer, quick_longer = sum(full.values()), calibrator.LONGER, calibrator.LONGER_QUICK
    networks, judges, fewest = calibrator.ENOUGH_NETWORKS, acceptance.ENOUGH, acceptance.FEWEST
    for quick, budget, cells, share, goes_on, enough in (
        (False, None, None, [1.0, 1.0], longer, [networks, judges]),
        (True, None, None, [None, 1 / 3], quick_longer, [networks, fewest]),
        (False, whole / 2, None, [0.5, 0.5], 1.0, [networks, judges]),
        (False, None, 9, [None, None], 1.0, [networks, judges]),
    ):
        plan = calibrator._plan(("plain", "eager"), None, quick, budget, cells)
        assert list(plan) == ["eager", "plain"]
        assert [effort.longer for effort in plan.values()] == [goes_on] * 2
        assert [effort.enough for effort in plan.values()] == enough
        for (name, effort), part in zip(plan.items(), share, strict=True):
            assert part is None or effort.seconds == pytest.approx(part * full[name])


def test_all_are_those_that_the_device_can_run() -> None:
    able, reasons = calibrate_runtimes.offered(open_device("cpu"))
    asked = ["torchscript", "eager", "torchscript"]
    assert calibrate_runtimes.named(asked, open_device("cpu")) == ("torchscript", "eager")
    assert calibrate_runtimes.named("all", open_device("cpu")) == tuple(able)
    assert able[:2] == ["eager", "torchscript"]
    assert "cuda-graphs" in reasons
    assert sorted([*able, *reasons]) == sorted(runtimes.built_in())
    simulated, _ = calibrate_runtimes.offered(open_device("simulated"))
    assert {"eager", "torchscript", "cuda-graphs"} <= set(simulated)


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        (["torchscrip"], UsageError, r"No runtime is called 'torchscrip'\. Did you mean 'torchscript'\?"),
        (["cuda-graphs"], UsageError, "cuda-graphs needs a CUDA device"),
        (["absent"], MissingPackageError, "absent cannot be calibrated here: run: pip install absent"),
        ([], UsageError, "no runtime is named"),
    ],
)
def test_names_that_cannot_be_calibrated_are_refused(names: list[str], error: type[LatpredError], message: str) -> None:
    with pytest.raises(error, match=message):
        calibrate_runtimes.named(names, open_device("cpu"))


def test_the_command_line_says_what_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def caught(*_: object, runtimes: tuple[str, ...], **__: object) -> DeviceProfile:
        asked.append(runtimes)
        raise UsageError("caught")

    assert run("calibrate", "--device", "cpu", "--runtimes", "absent").exit_code == 3
    monkeypatch.setattr("latpred.calibration.calibrate", caught)
    shown = run("calibrate", "--device", "cpu", "--runtimes", "all")
    assert "leaving out cuda-graphs: cuda-graphs needs a CUDA device" in shown.stderr
    run("calibrate", "--device", "cpu", "--runtimes", "torchscript,eager", "--runtimes", "compile,eager")
    assert asked == [tuple(calibrate_runtimes.offered(open_device("cpu"))[0]), ("torchscript", "eager", "compile")]


def test_an_onnxruntime_without_cuda_is_left_out_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu(SimulatedDevice):
        def info(self) -> DeviceInfo:
            return msgspec.structs.replace(super().info(), kind="cuda")

    monkeypatch.setattr(onnx_session, "providers", lambda: (onnx_session.CPU,))
    assert "has no CUDA provider" in str(calibrate_runtimes.hindrance("onnxruntime", OnGpu()))
    assert calibrate_runtimes.hindrance("onnxruntime", open_device("cpu")) is None
    with pytest.raises(MissingPackageError, match="has no CUDA provider"):
        whole_models.demand_runtime("onnxruntime", OnGpu())


def test_without_a_kernel_no_other_runtime_is_studied(latpred_home: Path) -> None:
    with pytest.raises(CalibrationError, match=r"before a kernel was measured.*--budget 5m"):
        calibrate("simulated", cells=140, runtimes=("eager", "cuda-graphs"))
