"""What the gate measures: ordinary models whole, and holdout networks a second time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from latpred import profiles
from latpred.calibration import conditions, gate, networks, suite
from latpred.calibration.cells import Cell
from latpred.calibration.cpu import CpuDevice
from latpred.calibration.gate_models import BATCHES, gate_models
from latpred.calibration.session import Row
from latpred.calibration.timing import Timing

SEEDS = range(6 * len(networks.KINDS))
HOLDOUTS = [suite.network_cell(spec) for spec in map(networks.draw, SEEDS) if spec.judge]


def row(cell: Cell, seconds: float = 1e-3, error: str = "") -> Row:
    return Row(cell, {} if error else {"single": Timing(seconds, 0.0, 5, True)}, 0.1, error)


def test_models_come_first_then_holdouts_again_of_every_kind() -> None:
    others = [suite.network_cell(networks.draw(seed)) for seed in range(3)]
    cells = list(gate.cells([row(cell) for cell in (*HOLDOUTS, *others)]))
    models = len(gate_models()) * len(BATCHES)
    assert all(cell.kind == gate.MODEL and gate.AGAIN not in cell.dims for cell in cells[:models])
    repeated = [cell for cell in cells[models:] if cell.kind == "network"]
    assert {cell.name for cell in repeated} == set(networks.KINDS)
    assert all(suite.network_spec(cell).judge and cell.dims[gate.AGAIN] == 1 for cell in repeated)
    assert cells[models + len(repeated) :] == [gate.again(cell) for cell in cells[:models]]


def test_what_failed_or_was_repeated_is_not_repeated() -> None:
    rows = [row(HOLDOUTS[0], error="it raised"), row(gate.again(HOLDOUTS[1]))]
    assert not [cell for cell in gate.cells(rows) if cell.kind == "network"]


def test_a_model_is_timed_whole_and_becomes_a_run() -> None:
    cell = Cell(gate.MODEL, "gate/mlp", {"batch": 1})
    with conditions.stated(conditions.Options(threads=torch.get_num_threads())):
        sampled = gate.measure(cell, CpuDevice())
    (run,) = gate.model_runs([Row(cell, dict(sampled.timings), 0.1), row(HOLDOUTS[0])]).values()
    assert run.total_us == pytest.approx(1e6 * sampled.timings["single"].median_s)
    assert run.batch == 1
    assert run.graph.macs(1) == 745_600


def test_the_shift_is_the_second_time_over_the_first() -> None:
    rows = [row(HOLDOUTS[0], 1e-3), row(gate.again(HOLDOUTS[0]), 1.1e-3), row(HOLDOUTS[1], 1e-3)]
    assert gate.shift(rows) == pytest.approx([1.1])
    assert gate.shift([*rows[:1], row(gate.again(HOLDOUTS[0]), error="no")]) == []


def test_predictions_that_move_no_more_end_a_calibration() -> None:
    before = gate.predictions(profiles.load("epyc-shared"))
    assert before.shape == (len(gate_models()) * len(BATCHES),)
    assert gate.settled(before, 1.005 * before)
    assert not gate.settled(before, 1.02 * before)
    some = np.where(np.arange(len(before)) % 5 == 0, 1.2 * before, before)  # a fifth still moves
    assert not gate.settled(before, some)
    assert not gate.settled(before, np.where(np.arange(len(before)) == 0, np.nan, before))
