"""What the acceptance gate measures at the end of a calibration: holdout networks again, and ordinary models whole.

The second look comes apart from the first, so that the gate sees what the machine did in between. Ordinary models are
timed as a user would time them: called again and again, whole. No fit sees either; `judging` says what they amount to.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache

import msgspec
import numpy as np
import torch

from latpred.calibration import suite, timing
from latpred.calibration.cells import Cell
from latpred.calibration.device import Device
from latpred.calibration.dispatchfit import NetworkRun
from latpred.calibration.gate_models import BATCHES, gate_models
from latpred.calibration.reference_speed import gauge_of
from latpred.calibration.session import Row, Sampled
from latpred.calibration.subjects import Subject
from latpred.errors import LatpredError
from latpred.features import Floats
from latpred.graph import ModelGraph
from latpred.predictor import Predictor
from latpred.profile import DeviceProfile
from latpred.units import US_PER_S

MODEL = "model"
AGAIN = "again"  # a dimension of cells that are timed for the second time
HOLDOUTS_AGAIN = 20
# Shares by which predictions may still move, in the median and at p90, when more cells would tell nothing new.
SETTLED = 0.01, 0.03
VISIT = timing.Plan(least=3, most=60, precision=0.005, budget_s=0.15, warmup_s=0.1)


def cells(rows: Sequence[Row], runtime: str = "eager") -> Iterator[Cell]:
    """Ordinary models, holdout networks again, and the models again: what matters most comes first."""
    models = [_model_cell(subject, batch) for batch in BATCHES for subject in gate_models()]
    yield from models
    yield from _holdouts_again(rows, runtime)
    yield from (again(cell) for cell in models)


def again(cell: Cell) -> Cell:
    """The same cell, to be timed a second time."""
    return msgspec.structs.replace(cell, dims={**cell.dims, AGAIN: 1})


def _holdouts_again(rows: Sequence[Row], runtime: str) -> Iterator[Cell]:
    """Some of the holdout networks that were timed, kinds in turn."""
    by_kind: dict[str, list[Cell]] = {}
    for row in rows:
        cell = row.cell
        mine = cell.kind == "network" and (cell.runtime, cell.precision) == (runtime, "fp32") and AGAIN not in cell.dims
        if mine and not row.error and suite.network_spec(cell).judge:
            by_kind.setdefault(cell.name, []).append(cell)
    each = -(-HOLDOUTS_AGAIN // max(len(by_kind), 1))
    for number in range(each):
        yield from (again(found[number]) for found in by_kind.values() if number < len(found))


def measure(cell: Cell, device: Device) -> Sampled:
    """Time an ordinary model whole, called again and again."""
    subject, batch = _subject(cell.name), cell.dims["batch"]
    graph_of_model(cell.name, cell.precision)  # one that cannot be traced is no use to the gate
    model, inputs = subject.make(device.name, cell.precision)
    call = device.prepare_model(model, inputs(batch, device.name), cell.runtime)
    gauge = None if device.asynchronous else gauge_of(torch.get_num_threads())
    return Sampled({"single": timing.single(device, call, VISIT, gauge)})


def model_runs(rows: Iterable[Row]) -> dict[str, NetworkRun]:
    """The ordinary models among a journal's rows, by the keys of their cells."""
    found = {}
    for row in rows:
        if row.cell.kind == MODEL and not row.error:
            graph = graph_of_model(row.cell.name, row.cell.precision)
            latency_us = row.timings["single"].median_s * US_PER_S
            found[row.cell.key] = NetworkRun(graph, row.cell.dims["batch"], latency_us)
    return found


def shift(rows: Iterable[Row]) -> list[float]:
    """Ratio of the second to the first timing of each cell that was timed twice."""
    latency: Mapping[str, float] = {
        row.cell.key: row.timings["single"].median_s for row in rows if "single" in row.timings and not row.error
    }
    firsts = {again(row.cell).key: row.cell.key for row in rows if AGAIN not in row.cell.dims}
    return [latency[key] / latency[firsts[key]] for key in latency if key in firsts and firsts[key] in latency]


def predictions(profile: DeviceProfile) -> Floats:
    """Latencies of the ordinary models, in milliseconds; no number where the profile knows too little."""
    predictor, found = Predictor(profile), []
    for subject in gate_models():
        try:
            points = predictor.curve(graph_of_model(subject.name, "fp32"), BATCHES).points
            found += [point.latency_ms for point in points]
        except LatpredError:
            found += [math.nan] * len(BATCHES)
    return np.array(found)


def settled(before: Floats, now: Floats) -> bool:
    """Whether predictions have moved by next to nothing; one without a number settles nothing.

    >>> settled(np.array([1.0, 2.0]), np.array([1.004, 2.01])), settled(np.array([1.0, 2.0]), np.array([1.0, 2.4]))
    (True, False)
    """
    moved = np.abs(np.log(now / before))
    return bool(np.median(moved) <= SETTLED[0] and np.quantile(moved, 0.9) <= SETTLED[1])


@lru_cache(maxsize=64)
def graph_of_model(name: str, precision: str) -> ModelGraph:
    """What an ordinary model does."""
    return _subject(name).walk(precision)


@cache
def _subjects() -> dict[str, Subject]:
    return {subject.name: subject for subject in gate_models()}


def _subject(name: str) -> Subject:
    return _subjects()[name]


def _model_cell(subject: Subject, batch: int) -> Cell:
    return Cell(MODEL, subject.name, {"batch": batch})
