"""What the gate measures: ordinary models whole, and holdout networks a second time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from latpred.calibration import schedules
from latpred.calibration.cells import Cell
from latpred.calibration.devices import conditions
from latpred.calibration.devices.cpu import CpuDevice
from latpred.calibration.fitting import acceptance
from latpred.calibration.session import Row
from latpred.calibration.timing.timer import Timing
from latpred.calibration.workloads import networks
from latpred.calibration.workloads.gate_models import BATCHES, gate_models
from latpred.profile import store

SEEDS = range(6 * len(networks.KINDS))
HOLDOUTS = [schedules.network_cell(spec) for spec in map(networks.draw, SEEDS) if spec.holdout]


def row(cell: Cell, seconds: float = 1e-3, error: str = "") -> Row:
    return Row(cell, {} if error else {"single": Timing(seconds, 0.0, 5, True)}, 0.1, error)


def test_models_come_first_then_holdouts_again_of_every_kind() -> None:
    others = [schedules.network_cell(networks.draw(seed)) for seed in range(3)]
    cells = list(acceptance.cells([row(cell) for cell in (*HOLDOUTS, *others)]))
    models = len(gate_models()) * len(BATCHES)
    assert all(cell.kind == acceptance.MODEL and acceptance.AGAIN not in cell.dims for cell in cells[:models])
    repeated = [cell for cell in cells[models:] if cell.kind == "network"]
    assert {cell.name for cell in repeated} == set(networks.KINDS)
    assert all(schedules.network_spec(cell).holdout and cell.dims[acceptance.AGAIN] == 1 for cell in repeated)
    assert cells[models + len(repeated) :] == [acceptance.again(cell) for cell in cells[:models]]


def test_what_failed_or_was_repeated_is_not_repeated() -> None:
    rows = [row(HOLDOUTS[0], error="it raised"), row(acceptance.again(HOLDOUTS[1]))]
    assert not [cell for cell in acceptance.cells(rows) if cell.kind == "network"]


def test_a_model_is_timed_whole_and_becomes_a_run() -> None:
    cell = Cell(acceptance.MODEL, "gate/mlp", {"batch": 1})
    with conditions.stated(conditions.Options(threads=torch.get_num_threads())):
        sampled = acceptance.measure(cell, CpuDevice())
    (run,) = acceptance.model_runs([Row(cell, dict(sampled.timings), 0.1), row(HOLDOUTS[0])]).values()
    assert run.total_us == pytest.approx(1e6 * sampled.timings["single"].median_s)
    assert run.batch == 1
    assert run.graph.macs(1) == 745_600


def test_the_shift_is_the_second_time_over_the_first() -> None:
    rows = [row(HOLDOUTS[0], 1e-3), row(acceptance.again(HOLDOUTS[0]), 1.1e-3), row(HOLDOUTS[1], 1e-3)]
    assert acceptance.shift(rows) == pytest.approx([1.1])
    assert acceptance.shift([*rows[:1], row(acceptance.again(HOLDOUTS[0]), error="no")]) == []


def test_predictions_that_move_no_more_end_a_calibration() -> None:
    before = acceptance.predictions(store.load("epyc-shared"))
    assert before.shape == (len(gate_models()) * len(BATCHES),)
    assert acceptance.settled(before, 1.005 * before)
    assert not acceptance.settled(before, 1.02 * before)
    some = np.where(np.arange(len(before)) % 5 == 0, 1.2 * before, before)  # a fifth still moves
    assert not acceptance.settled(before, some)
    assert not acceptance.settled(before, np.where(np.arange(len(before)) == 0, np.nan, before))
