"""Calibration from end to end on the simulated device: what it finds out, and what it does when things go wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import msgspec
import pytest

from latpred import storage
from latpred.calibration import calibrate, schedules, session
from latpred.calibration.calibrator import Progress
from latpred.calibration.devices.simulated import SimulatedDevice, SimulatedSpec
from latpred.calibration.devices.simulated_costs import TrueCosts
from latpred.calibration.fitting import profile_fit
from latpred.calibration.session import Row, Session, directory, read_rows
from latpred.errors import BusyError, CalibrationError, UsageError
from latpred.graph.graph import ModelGraph
from latpred.prediction.predictor import Predictor
from latpred.profile import store
from latpred.profile.document import DeviceProfile
from latpred.tracing import trace

CELLS = 1400
FEW = 190  # cells after which every dispatch cell and tiny network and some kernels were timed
SEED = 3
COSTS = TrueCosts()
GRID = tuple(2**power for power in range(11))
WAITING = ("deberta-base", "longformer-base-4096")  # read values back from the device while they run
MODELS = ("bert-base-uncased", "gpt2", "resnet-50", "mobilebert-uncased", *WAITING)


class Calibrated(NamedTuple):
    """A full calibration: the device, what came of it, what was told on the way, and its journal."""

    device: SimulatedDevice
    profile: DeviceProfile
    told: tuple[Progress, ...]
    rows: tuple[Row, ...]


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Calibrated]:
    """A calibration that the tests of its results share."""
    device, told = SimulatedDevice(SimulatedSpec(seed=SEED)), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(storage.VARIABLE, str(tmp_path_factory.mktemp("calibrated")))
        profile = calibrate(device, cells=CELLS, progress=told.append)
        rows = read_rows(directory(device.name) / session.LAST)
        yield Calibrated(device, profile, tuple(told), tuple(rows))


@cache
def graph_of(name: str, precision: str) -> ModelGraph:
    """A model's graph, walked once for all tests."""
    return trace(name, precision=precision)


def test_every_dispatch_cost_comes_back_within_two_percent(calibrated: Calibrated) -> None:
    fit = calibrated.profile.runtimes["eager"]
    assert len(fit.costs_us) > 60
    ratios = {name: us * fit.scale / COSTS.dispatch(name) for name, us in fit.costs_us.items() if name != "python"}
    del ratios[""]  # stands for ops of no class at all; the device has a number of its own for them
    assert {name: ratio for name, ratio in ratios.items() if ratio != pytest.approx(1, rel=0.02)} == {}
    assert fit.costs_us["python"] == 0


def test_every_class_of_the_device_is_priced(calibrated: Calibrated) -> None:
    priced = calibrated.profile.runtimes["eager"].costs_us.keys()
    assert COSTS.dispatch_us.keys() - priced == {"other"}  # which no op of a class that is known falls in


def test_call_costs_come_back_within_two_percent(calibrated: Calibrated) -> None:
    fit = calibrated.profile.runtimes["eager"]
    assert fit.scale == pytest.approx(1, rel=0.02)
    assert fit.module_call_us * fit.scale == pytest.approx(3.0, rel=0.02)
    assert fit.python_call_us * fit.scale == pytest.approx(0.22, rel=0.02)
    assert fit.fixed_us == pytest.approx(6.0, rel=0.02)


def test_clock_and_memory_come_back_within_two_percent(calibrated: Calibrated) -> None:
    found = calibrated.profile.device
    assert found.launch_us == pytest.approx(4.0, rel=0.02)
    assert found.gap_us == pytest.approx(1.2, rel=0.02)
    assert found.sync_us == pytest.approx(3.0, rel=0.02)
    assert found.queue == 1024
    assert found.bandwidth_bytes_per_us == pytest.approx(2.6e6 * 0.8, rel=0.02)
    assert found.copy_bytes_per_us == pytest.approx(2.4e4, rel=0.02)


@pytest.mark.parametrize("protocol", ["single", "pipelined"])
@pytest.mark.parametrize("name", MODELS)
def test_whole_models_are_predicted_within_three_percent(calibrated: Calibrated, name: str, protocol: str) -> None:
    graph = graph_of(name, "fp32")
    assert bool(graph.syncs(1)) == (name in WAITING)
    curve = Predictor(calibrated.profile).curve(graph, (1, 4, 16, 64), protocol=protocol)
    for point in curve.points:
        true_ms = calibrated.device.true_latency_s(graph, point.batch, protocol=protocol) * 1e3
        assert point.latency_ms == pytest.approx(true_ms, rel=0.03), point.batch


def test_half_precision_is_predicted_within_three_percent(calibrated: Calibrated) -> None:
    for name in ("bert-base-uncased", "resnet-50"):
        graph = graph_of(name, "fp16")
        for point in Predictor(calibrated.profile).curve(graph, (1, 8, 64)).points:
            true_ms = calibrated.device.true_latency_s(graph, point.batch) * 1e3
            assert point.latency_ms == pytest.approx(true_ms, rel=0.03), (name, point.batch)


def test_crossover_and_knee_lie_where_they_are(calibrated: Calibrated) -> None:
    predictor, off = Predictor(calibrated.profile), []
    for name in MODELS:
        for precision in ("fp32", "fp16"):
            graph = graph_of(name, precision)
            points = predictor.curve(graph, GRID).points
            crossover = next((point.batch for point in points if point.regime != "framework-bound"), None)
            knee = next((point.batch for point in points if point.latency_ms > 1.1 * points[0].latency_ms), None)
            off.append(steps(crossover, calibrated.device.true_crossover(graph, GRID)))
            off.append(steps(knee, calibrated.device.true_knee(graph, GRID, 1.1)))
    assert max(off) <= 1
    assert sum(distance == 0 for distance in off) >= 0.9 * len(off)


def steps(found: int | None, true: int | None) -> int:
    """Grid steps between two batches; None lies behind the grid's end."""
    places = [*GRID, None]
    return abs(places.index(found) - places.index(true))


def test_networks_that_judge_are_never_fitted(calibrated: Calibrated) -> None:
    judges = {row.cell.key for row in calibrated.rows if judging(row)}
    assert len(judges) >= 20
    info = calibrated.device.info()
    fits = []
    for rows in (calibrated.rows, without(calibrated.rows, judges), slower(calibrated.rows, judges)):
        profile, found = profile_fit.fit_profile(rows, calibrated.device.machine(), info, "simulated")
        fits.append((msgspec.structs.replace(profile.runtimes["eager"], spread=0.0), profile.kernels, profile.device))
        assert {verdict.cell for verdict in found} <= judges
    assert fits[0] == fits[1] == fits[2]
    assert fits[0][1] == calibrated.profile.kernels


def judging(row: Row) -> bool:
    """Whether a row is of a network that is kept out of every fit."""
    return row.cell.kind == "network" and schedules.network_spec(row.cell).holdout


def without(rows: Sequence[Row], keys: set[str]) -> list[Row]:
    """The rows of all other cells."""
    return [row for row in rows if row.cell.key not in keys]


def slower(rows: Sequence[Row], keys: set[str]) -> list[Row]:
    """The rows with some cells ten times as slow."""

    def changed(row: Row) -> Row:
        timings = {
            name: msgspec.structs.replace(timing, median_s=10 * timing.median_s) for name, timing in row.timings.items()
        }
        return msgspec.structs.replace(row, timings=timings)

    return [changed(row) if row.cell.key in keys else row for row in rows]


def test_profile_is_accepted_on_what_it_never_saw(calibrated: Calibrated) -> None:
    assert calibrated.profile.acceptance.passed, calibrated.profile.acceptance.checks
    assert calibrated.profile.provenance == "measured"
    assert calibrated.profile.kernels.keys() == {"fp32", "fp16"}


def test_progress_and_learning_curve(calibrated: Calibrated) -> None:
    told = calibrated.told
    assert [at.seconds for at in told] == sorted(at.seconds for at in told)
    assert [at.cells for at in told] == sorted(at.cells for at in told)
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


def test_quick_calibration_takes_one_precision_and_is_found() -> None:
    saved = calibrate(SimulatedDevice(), quick=True, cells=FEW, name="mine")
    assert saved.kernels.keys() == {"fp32"}
    found = store.find("simulated")
    assert (found.name, found.runtimes, found.kernels) == ("mine", saved.runtimes, saved.kernels)


def test_interrupted_calibration_goes_on_where_it_stopped() -> None:
    stop, before = 60, []

    def interrupt(at: Progress) -> None:
        if at.cells == stop:
            raise KeyboardInterrupt
        if "/" in at.label:  # a cell, not a fit in between
            before.append(at.label)

    with pytest.raises(KeyboardInterrupt):
        calibrate(SimulatedDevice(), cells=FEW, progress=interrupt)
    kept = read_rows(directory("simulated") / session.JOURNAL)
    assert [row.cell.key for row in kept] == before
    assert len(before) == stop
    after: list[Progress] = []
    profile = calibrate(SimulatedDevice(), cells=FEW, progress=after.append)
    assert not {at.label for at in after} & set(before)
    assert after[0].cells == stop
    assert [sample.cell for sample in profile.samples][:stop] == before
    assert len(profile.samples) == FEW
    assert after[0].seconds >= sum(row.seconds for row in kept)


def test_other_settings_or_fresh_start_anew() -> None:
    def told_first(**options: object) -> int:
        at: list[Progress] = []

        def interrupt(progress: Progress) -> None:
            at.append(progress)
            if len(at) == 5:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            calibrate(SimulatedDevice(), cells=FEW, progress=interrupt, **options)  # type: ignore[arg-type]
        return at[0].cells

    assert [told_first() for _ in range(2)] == [0, 4]
    assert told_first(fresh=True) == 0
    assert told_first(precisions=["fp16"]) == 0


def test_cells_that_do_not_fit_the_device_are_left_out() -> None:
    small = SimulatedDevice(SimulatedSpec(memory_bytes=2**27))
    profile = calibrate(small, cells=FEW)
    rows = read_rows(directory(small.name) / session.LAST)
    failed = [row for row in rows if row.error]
    assert {row.error.partition(":")[0] for row in failed} == {session.OUT_OF_MEMORY}
    assert "bandwidth" in {row.cell.name for row in failed}
    assert profile.device.bandwidth_bytes_per_us == 0
    assert len(profile.samples) == FEW - len(failed)


def test_calibration_under_way_keeps_another_out() -> None:
    device = SimulatedDevice()
    message = r"another calibration of simulated is under way \(process \d+.*kill -INT"
    with Session(directory(device.name), device.machine(), {}), pytest.raises(BusyError, match=message):
        calibrate(device, cells=FEW)


def test_too_little_for_a_profile_says_what_to_do() -> None:
    with pytest.raises(CalibrationError, match=r"0 tiny networks .* timed, too few.*--budget 5m"):
        calibrate(SimulatedDevice(), cells=20)
    assert (directory("simulated") / session.JOURNAL).exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget_s": 1.0}, r"a budget of 1 s measures nothing\. Give at least 5 s"),
        ({"budget_s": 1.0, "cells": 100}, "a budget of 1 s measures nothing"),
        ({"cells": 0}, r"0 cells measure nothing\. Give at least 1"),
        ({"precisions": ["fp8"]}, r"simulated does not do fp8; it does fp32, fp16\."),
        ({"precisions": ["fp32", "tf32", "int8"]}, "does not do tf32, int8"),
        ({"precisions": []}, "does not do nothing; it does fp32, fp16"),
    ],
)
def test_impossible_effort_or_precision_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        calibrate(SimulatedDevice(), **options)  # type: ignore[arg-type]
    assert not directory("simulated").exists()
