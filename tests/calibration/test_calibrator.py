"""Calibration from end to end on the simulated device: what it finds out, and what it does when things go wrong."""

from __future__ import annotations

import gzip
import math
import runpy
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
from factories import machine
from guards import journals

from latpred import host, storage
from latpred.calibration import calibrate, calibrator, cells, fit_raw, schedules, session
from latpred.calibration.devices import conditions, constants
from latpred.calibration.devices.cpu import CpuDevice
from latpred.calibration.devices.simulated import SimulatedDevice, SimulatedSpec
from latpred.calibration.devices.simulated_costs import TrueCosts
from latpred.calibration.fitting import acceptance, profile_fit
from latpred.calibration.runtime_calibration import calibrate_runtimes
from latpred.calibration.session import Row, Session, directory, read_journal
from latpred.calibration.timing import visits
from latpred.calibration.timing.reference_speed import gauge_of
from latpred.calibration.workloads import networks
from latpred.errors import CalibrationError, ProfileError, UsageError
from latpred.profile import store
from latpred.profile.document import DeviceProfile
from latpred.progress import ProgressEvent

CELLS = 1000
FEW = 190  # cells after which every dispatch cell and tiny network and some kernels were timed
SEED = 3
PRECISIONS = ("fp32", "fp16")
RECOVERY = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "simulated_recovery.py"))
WAITING = ("deberta-base", "longformer-base-4096")  # read values back from the device while they run
MODELS = ("bert-base-uncased", "gpt2", "resnet-50", "mobilebert-uncased", *WAITING)


class Calibrated(NamedTuple):
    """A full calibration: the device, what came of it, what was told on the way, and its journal."""

    device: SimulatedDevice
    profile: DeviceProfile
    told: tuple[ProgressEvent, ...]
    rows: tuple[Row, ...]


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Calibrated]:
    """A calibration that the tests of its results share."""
    device, told = SimulatedDevice(SimulatedSpec(seed=SEED)), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(storage.VARIABLE, str(tmp_path_factory.mktemp("calibrated")))
        profile = calibrate(device, cells=CELLS, progress=told.append)
        rows = read_journal(directory(device.name) / session.LAST)[1]
        yield Calibrated(device, profile, tuple(told), tuple(rows))


@pytest.fixture(scope="module")
def errors(calibrated: Calibrated) -> Any:
    """What the calibration got wrong of costs and of whole models."""
    truths = {(name, precision): RECOVERY["truth_of"](name, precision) for name in MODELS for precision in PRECISIONS}
    assert {name for (name, _), truth in truths.items() if truth.graph.syncs(1)} == set(WAITING)
    return RECOVERY["errors_of"](calibrated.profile, calibrated.device, truths)


def test_every_cost_comes_back_within_two_percent(calibrated: Calibrated, errors: Any) -> None:
    assert len(errors.costs) > 70
    assert {name: error for name, error in errors.costs.items() if abs(error) > 0.02} == {}
    fit = calibrated.profile.runtimes["eager"]
    assert fit.costs_us["python"] == 0
    assert TrueCosts().dispatch_us.keys() - fit.costs_us.keys() == {"other"}  # which no op of a known class falls in


def test_whole_models_are_predicted_within_three_percent(errors: Any) -> None:
    assert {name: error for name, error in errors.models.items() if abs(error) > 0.03} == {}


def test_crossover_and_knee_lie_where_they_are(errors: Any) -> None:
    assert max(errors.steps.values()) <= 1
    assert sum(steps == 0 for steps in errors.steps.values()) >= 0.9 * len(errors.steps)


def test_holdout_networks_are_never_fitted(calibrated: Calibrated, monkeypatch: pytest.MonkeyPatch) -> None:
    def held_out(row: Row) -> bool:
        return row.cell.kind == "network" and schedules.network_spec(row.cell).holdout

    monkeypatch.setattr(profile_fit, "FEWEST_HALVES", 1000)  # half of those in half precision tell of the host
    rows, device = calibrated.rows[:600], calibrated.device
    holdouts = {row.cell.key for row in rows if held_out(row)}
    assert len(holdouts) >= 5
    apart = [msgspec.structs.replace(row, disturbed=visits.MOVED_APART if held_out(row) else "") for row in rows]
    fits, judged = [], []
    for several in (rows, [row for row in rows if not held_out(row)], apart):
        profile, errors = profile_fit.fit_profile(several, device.machine(), device.info(), "simulated")
        fits.append((msgspec.structs.replace(profile.runtimes["eager"], spread=0.0), profile.kernels, profile.device))
        judged.append({error.cell for error in errors})
    assert fits[0] == fits[1] == fits[2]
    assert judged == [holdouts, set(), holdouts]  # where all were timed with the processors apart they still judge


class Untimed(NamedTuple):
    """A run that times no cell, and says that each took a second, the last one a minute, and a model no time."""

    rows: list[Row]
    last_s: float = 60.0
    disturbed: str = ""

    @property
    def seconds(self) -> float:
        return sum(row.seconds for row in self.rows)

    def tell(self, label: str) -> None:
        """Nobody listens."""

    def run(self, cell: cells.Cell) -> None:
        took_s = self.last_s if len(self.rows) == 3 * len(acceptance.models("fp32")) - 1 else 1.0
        took_s = 0.0 if cell.kind == "model" else took_s
        calls_us = (1.0,) if cell.kind == "network" else ()
        self.rows.append(Row(cell, {}, took_s, calls_us=calls_us, disturbed=self.disturbed))


def untimed(
    session: Session, seconds: float, visits: Untimed, longer: float = 1.0, precision: str = "fp32"
) -> calibrator._EagerCalibration:
    """A calibration of the CPU that times nothing."""
    reporter = calibrator._Reporter(session, seconds, None, calibrator._Effort(seconds, math.inf, longer))
    eager = calibrator._EagerCalibration(CpuDevice(), (precision,), session, "cpu", {}, reporter)
    eager._visits = visits  # type: ignore[assignment]
    return eager


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Session]:
    with Session(tmp_path, CpuDevice().machine(), {}) as one:
        yield one


def test_time_left_follows_the_pace_of_the_run(empty: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[ProgressEvent] = []
    clock = iter([100.0, 110.0, 160.0, 140.0])
    reporter = calibrator._Reporter(empty, 90.0, told.append, calibrator._Effort(90.0, math.inf))
    monkeypatch.setattr(calibrator, "time", Mock(**{"monotonic.side_effect": clock}))
    for seconds in (30.0, 35.0, 60.0, 70.0):  # 30 of them in a run that this one goes on with
        reporter.tell("cell", seconds)
    # Too early to know; twice as long as the work, as much was waited; never sooner than planned.
    assert [event.left_s for event in told] == [60.0, 55.0, 30.0 * 60 / 30, 20.0]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_models_of_the_gate_are_spread_over_the_run(precision: str, empty: Session) -> None:
    models, run = acceptance.models(precision), Untimed([])
    for_fit = 1 - calibrator.FITTING_SHARE - calibrator.GATE_SHARE
    untimed(empty, (2 * len(models) - 0.5) / for_fit, run, precision=precision)._measure()  # the last cell outlasts it
    found = [number for number, row in enumerate(run.rows) if row.cell.kind == "model"]
    assert [run.rows[number].cell for number in found] == models
    between = np.diff([-1, *found, len(run.rows)]) - 1
    assert set(between[:-1].tolist()) == {1, 2}  # cells of the fit before each
    assert between[-1] <= 2


@pytest.mark.parametrize(
    ("longer", "disturbed", "goes_on"),
    [(calibrator.LONGER, "", "until it has enough"), (calibrator.LONGER, "busy", "as long again"), (1.0, "", "not")],
)
def test_a_run_goes_on_for_networks_but_it_ends(longer: float, disturbed: str, goes_on: str, empty: Session) -> None:
    run, seconds = Untimed([], 1.0, disturbed), 150.0  # the fit has 104 of these, for 80 networks and 58 other cells
    eager = untimed(empty, seconds, run, longer)
    eager._measure()
    networks = profile_fit.networks_seen(run.rows)
    if goes_on == "until it has enough":
        assert networks == calibrator.ENOUGH_NETWORKS
        assert 1.0 < eager._spent < longer
        assert eager._report.longer_s > 0.0  # so that nobody is told that no time is left, for other runtimes either
        longer_s = eager._report.longer_s
        eager._report.turn_to(calibrator._Effort(1.0, math.inf))
        assert eager._report.before_s == seconds + longer_s, "what is told of the next does not go back"
        eager._measure_for_gate()
        assert acceptance.AGAIN in run.rows[-1].cell.dims  # for the second look there is as much time as ever
    else:
        assert networks < calibrator.ENOUGH_NETWORKS
        assert eager._report.longer_s <= (longer - 1.0) * seconds
        assert longer <= eager._spent < longer + 1.01 / eager._fit_s


def test_predictions_settle_over_many_cells_and_not_over_one(empty: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    run, asked = Untimed([Row(cells.Cell("network", "mlp", {"seed": -1}), {}, 50.0)]), list[int]()
    eager = untimed(empty, 200.0, run)

    def learn() -> None:
        asked.append(len(run.rows))
        eager._predictions.append((len(run.rows), np.full(4, 2.0 ** len(asked))))

    monkeypatch.setattr(eager, "_learn", learn)
    eager._measure()
    assert len(asked) == 2, "one for the looks that what was resumed is beyond, and the second"
    assert eager._spent >= 1.0
    enough = calibrator.ENOUGH_NETWORKS
    for fewer, seen, settled in ((50, enough, False), (25, enough, True), (25, enough - 1, False)):
        monkeypatch.setattr(profile_fit, "networks_seen", lambda _, seen=seen: seen)
        eager._predictions = [(fewer, np.ones(4)), (50, np.ones(4))]
        assert eager._settled() is settled


def test_profile_is_accepted_on_what_it_never_saw(calibrated: Calibrated) -> None:
    assert calibrated.profile.acceptance.passed, calibrated.profile.acceptance.checks
    assert calibrated.profile.provenance == "measured"
    assert calibrated.profile.kernels.keys() == {"fp32", "fp16"}


def test_progress_and_learning_curve(calibrated: Calibrated) -> None:
    told = calibrated.told
    assert [at.done for at in told] == sorted(at.done for at in told)
    assert [at.cells for at in told] == sorted(at.cells for at in told)
    assert {at.total for at in told} == {0}  # of a run that is counted in cells nobody knows the seconds
    assert told[-1].cells == len(calibrated.rows) == len(calibrated.profile.samples) == CELLS
    assert {row.cell.key for row in calibrated.rows} < {at.label for at in told}
    learning = calibrated.profile.learning
    assert [step.cells for step in learning] == sorted({step.cells for step in learning})
    assert len(learning) == 3
    assert [at.error for at in told if at.error is not None] == pytest.approx([s.error for s in learning], abs=1e-4)
    assert learning[-1].error < 0.02


def test_counted_cells_measure_the_same_on_any_machine() -> None:
    first, second = (calibrate(SimulatedDevice(), cells=FEW, precisions=["fp16"], fresh=True) for _ in range(2))
    assert first.samples == second.samples
    assert first.runtimes == second.runtimes
    assert first.kernels == second.kernels
    assert first.kernels.keys() == {"fp16"}
    assert len(first.samples) == FEW


def test_other_settings_or_fresh_start_anew() -> None:
    def resumed(**options: object) -> int:
        told: list[ProgressEvent] = []

        def interrupt(event: ProgressEvent) -> None:
            told.append(event)
            if len(told) == 5:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            calibrate(SimulatedDevice(), cells=FEW, progress=interrupt, **options)  # type: ignore[arg-type]
        return told[0].cells

    assert [resumed(), resumed(), resumed(fresh=True), resumed(precisions=["fp16"])] == [0, 4, 0, 0]


def test_cells_that_do_not_fit_the_device_are_left_out_of_a_quick_calibration_which_takes_one_precision() -> None:
    small = SimulatedDevice(SimulatedSpec(memory_bytes=2**27))
    profile = calibrate(small, quick=True, cells=FEW, name="mine")
    found = store.find("simulated")
    assert profile.kernels.keys() == {"fp32"}
    assert (found.name, found.runtimes, found.kernels) == ("mine", profile.runtimes, profile.kernels)
    rows = read_journal(directory(small.name) / session.LAST)[1]
    failed = [row for row in rows if row.error]
    assert {row.error.partition(":")[0] for row in failed} == {session.OUT_OF_MEMORY}
    assert "bandwidth" in {row.cell.name for row in failed}
    assert profile.device.bandwidth_bytes_per_us == 0
    assert len(profile.samples) == FEW - len(failed)


def test_without_a_clock_nothing_else_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "measure", Mock(side_effect=CalibrationError("the host never waited for simulated")))
    for _ in range(3):  # twice it is tried
        with pytest.raises(CalibrationError, match="the clock of simulated could not be measured: the host"):
            calibrate(SimulatedDevice(), cells=60)
    assert all(row.cell == cells.CLOCK for row in read_journal(directory("simulated") / session.JOURNAL)[1])


def test_a_profile_of_that_name_of_another_machine_stays(calibrated: Calibrated) -> None:
    store.save(msgspec.structs.replace(calibrated.profile, machine=machine()))
    profile = calibrate(SimulatedDevice(), cells=FEW, precisions=["fp32"])
    assert store.load("simulated").machine == machine(), "the other stays"
    again = calibrate_runtimes.kept(store.name_here("simulated", "simulated"), SimulatedDevice(), {})
    assert again is not None
    assert again.name == profile.name == store.find("simulated").name


def test_too_little_for_a_profile_says_what_to_do() -> None:
    earlier = gauge_of(1)
    with pytest.raises(CalibrationError, match=r"0 tiny networks .* timed, too few.*--budget 5m"):
        calibrate(SimulatedDevice(), cells=20)
    assert gauge_of(1) is not earlier, "what the machine's full speed was hours ago counts no more"
    header, rows = read_journal(directory("simulated") / session.JOURNAL)
    busy = [msgspec.structs.replace(row, disturbed="other work used 1.9 processors") for row in rows]
    with pytest.raises(CalibrationError, match="Other work had the processors meanwhile; stop it"):
        profile_fit.fit_profile(busy, header.machine, SimulatedDevice().info(), "mine")
    broken = [row if row.cell == cells.CLOCK else msgspec.structs.replace(row, timings={}, error="no.") for row in rows]
    with pytest.raises(CalibrationError, match=r"Of 20 cells 19 could not .* for this: no\. Give the calibration"):
        profile_fit.fit_profile(broken, header.machine, SimulatedDevice().info(), "mine")


def test_where_no_network_can_be_timed_the_rest_is_not_tried(empty: Session) -> None:
    tiny = [schedules.network_cell(spec) for spec in schedules.tiny_networks(calibrate_runtimes.MOST_FAILURES)]
    chains = [Row(schedules.network_cell(spec), {}, 0.1) for spec in schedules.chain_networks()]
    run = Untimed([*chains, *(Row(cell, {}, 0.1, "its trace has 3") for cell in tiny)])
    eager = untimed(empty, 60.0, run)
    said = r"none of 12 networks .* on cpu\. Of 18 cells 12 could not .* this: its trace has 3\. .* with --fresh\."
    with pytest.raises(CalibrationError, match=said):
        eager._measure()
    for few in (run.rows[:-1], [*run.rows, Row(tiny[0], {}, 0.1)]):
        run.rows[:] = few
        eager._demand_success()


@pytest.mark.parametrize("start", [lambda: calibrate("cpu", budget_s=5.0), calibrator.calibrate_host])
def test_no_memory_for_any_cell_is_said_first(start: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "bytes_left", lambda: 3e8)
    with pytest.raises(CalibrationError, match=r"300 MB of memory are left .*, and measuring takes 334 MB"):
        start()
    assert not directory("cpu").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget_s": 1.0}, r"a budget of 1 s measures nothing\. Give at least 5 s"),
        ({"budget_s": 1.0, "cells": 100}, "a budget of 1 s measures nothing"),
        ({"budget_s": math.inf}, r"a budget of inf s never ends\. Give seconds"),
        ({"budget_s": math.nan, "cells": 100}, "budget_s=nan is not a number of seconds"),
        ({"cells": 0}, "cells=0 is not a number of cells; give a whole number of at least 1"),
        ({"cells": math.nan}, "cells=nan is not a number of cells"),
        ({"precisions": ["fp8"]}, r"simulated does not do fp8; it does fp32, fp16\."),
        ({"precisions": ["fp32", "tf32", "int8"]}, "does not do tf32, int8"),
        ({"precisions": "fp8"}, r"simulated does not do fp8; it does fp32, fp16\."),
        ({"precisions": []}, "does not do nothing; it does fp32, fp16"),
        ({"cells": FEW, "name": "a/b"}, "'a/b' cannot name a profile"),
    ],
)
def test_impossible_effort_precision_or_name_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises((UsageError, ProfileError), match=message):
        calibrate(SimulatedDevice(), **options)  # type: ignore[arg-type]
    assert not directory("simulated").exists()


@pytest.fixture
def unfinished(tmp_path: Path) -> Path:
    """A folder with the journal of a calibration of the simulated device that was not finished."""
    device = SimulatedDevice(SimulatedSpec(seed=2))
    schedule = schedules.schedule_of(device, ("fp32",))
    with Session(tmp_path, device.machine(), "any") as running:
        for cell in (*cells.memory_cells(), *islice(schedule.cells(), 140)):
            running.run(cell, schedule.measure)
    return tmp_path


def test_a_journal_is_fitted_whether_or_not_its_calibration_was_finished(unfinished: Path) -> None:
    profile = fit_raw(unfinished, name="journalled")
    assert (profile.name, profile.device.name) == ("journalled", "simulated")
    assert profile.device.sync_us == pytest.approx(TrueCosts().sync_us, rel=0.03)
    (unfinished / session.JOURNAL).rename(unfinished / session.LAST)
    again = fit_raw(unfinished)
    assert again.name == "simulated"
    assert (again.runtimes, again.kernels, again.device) == (profile.runtimes, profile.kernels, profile.device)


def test_a_profile_of_a_journal_says_how_that_was_measured(unfinished: Path) -> None:
    journal, options = unfinished / session.JOURNAL, conditions.Options(threads=1)
    calibrate(SimulatedDevice(), cells=FEW, precisions=["fp32"])
    about = read_journal(directory("simulated") / session.LAST)[0].about
    assert (about["options"], about["protocol"]) == (conditions.Options()._asdict(), {})
    header, rows = read_journal(journal)
    said = options.protocol("simulated", "simulated")
    header = msgspec.structs.replace(header, about=about | {"options": options._asdict(), "protocol": said})
    journal.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in (header, *rows)))
    profile = fit_raw(unfinished)
    assert profile.name == "simulated-1-thread"
    assert said.items() <= profile.protocol.items()
    assert fit_raw(unfinished, name="mine").name == "mine"


def test_what_is_no_journal_or_one_of_another_version_is_told_apart(unfinished: Path) -> None:
    journal = unfinished / session.JOURNAL
    before, (header, rows) = journal.read_text(), read_journal(journal)
    networks_then = msgspec.structs.replace(header, about={"networks": networks.VERSION - 1})
    journal.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in (networks_then, *rows)))
    with pytest.raises(CalibrationError, match="another version of latpred, which had other networks"):
        fit_raw(unfinished)
    journal.write_text(before.replace('"cold":', '"warmth":'))
    with pytest.raises(CalibrationError, match=r"could not be fitted \('cold'\)"):
        fit_raw(unfinished)
    journal.write_text("not a journal\n")
    with pytest.raises(CalibrationError, match="no calibration journal"):
        fit_raw(unfinished)
    with pytest.raises(CalibrationError, match=r"no journal\.jsonl or last\.jsonl in .*nowhere"):
        fit_raw(unfinished / "nowhere")


def test_a_neighbour_of_the_host_slows_no_kernel_of_another_device(calibrated: Calibrated) -> None:
    rows, device = calibrated.rows[:600], calibrated.device
    usual = {host.DISPATCH: 100.0, host.PRODUCT: 500.0, host.CACHE: 3000.0}
    fits = []
    for most in (1.0, 3.0):
        said = [usual | {host.CACHE: 3000.0 * (most if n % 2 else 1.0), host.PRODUCT: 500.0 + n} for n in range(600)]
        read = [msgspec.structs.replace(row, speed=speed) for row, speed in zip(rows, said, strict=True)]
        profile, errors = profile_fit.fit_profile(read, device.machine(), device.info(), "simulated")
        fits.append((profile.kernels, profile.runtimes, errors))
    assert fits[0] == fits[1]


@pytest.fixture(scope="module")
def h100(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an H100's journal, which is not here."""
    folder = tmp_path_factory.mktemp("h100")
    (folder / session.JOURNAL).write_bytes(gzip.decompress(journals.H100.read_bytes()))
    return folder


def test_a_gpu_that_is_not_here_is_as_large_as_its_datasheet_has_it(h100: Path) -> None:
    info = calibrator.device_of(read_journal(h100 / session.JOURNAL)[0].machine)
    assert (info.name, info.multiprocessors, info.memory_bytes >> 30) == ("nvidia-h100-80gb-hbm3", 132, 80)
    assert calibrator.device_of(machine(accelerator="NVIDIA Nothing 1")).multiprocessors == 0


def test_a_few_networks_tell_what_half_precision_takes_a_gpus_host_longer(h100: Path) -> None:
    header, rows = read_journal(h100 / session.JOURNAL)
    rows = [row for row in rows if row.cell.runtime == "eager"]

    def half_scale(longer: float) -> float:
        taken = [visits.shortened(row, 1 / longer) if is_half(row) else row for row in rows]
        info = calibrator.device_of(header.machine)
        profile, _ = profile_fit.fit_profile(taken, header.machine, info, "h100")
        return profile.runtimes["eager"].half_scale

    measured = half_scale(1.0)
    assert 1.05 < measured < 1.3
    assert half_scale(1.5) / measured == pytest.approx(1.5 ** (4 / 5), rel=0.05)  # of four networks, drawn to 1


def is_half(row: Row) -> bool:
    return row.cell.kind == "network" and row.cell.precision in ("fp16", "bf16")
