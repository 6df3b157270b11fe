"""A table of latencies as a fitting problem: its rows in the latency model, and the parameters that explain them best.

table → traced models → cells → blocks with parameters → solve
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import numpy as np
import pandas as pd
import scipy.linalg
from numpy.typing import NDArray

from latpred import tables
from latpred.accuracy.predicted import left_out
from latpred.calibration.published import latency_model, published_table
from latpred.calibration.published.latency_model import Block, Objects, Rows, evaluate, local_gradients
from latpred.calibration.published.parameters import Parameters
from latpred.calibration.published.published_table import Graphs, Progress, PublishedTable, TraceKey
from latpred.calibration.published.row_counts import (
    ALONE,
    EAGER,
    SCRIPTED,
    CellKey,
    Cells,
    Ints,
    as_run_by,
    cells_of,
    fuser_name,
)
from latpred.errors import MissingPackageError, TableError, UnknownGpuError
from latpred.graph.features import Floats
from latpred.graph.graph import ModelGraph
from latpred.profile import gpus
from latpred.profile.gpus import Spec
from latpred.units import US_PER_S

FEWEST_MODELS = 2
NOISE = 0.12  # log error that one row may have; rows of a model err together, so it exceeds the repeat noise
SOFT = 0.1  # log error from which on a row pulls less than quadratically
# 0 counts every row alike, 1 every model of a source, or every source; no row counts more or less than that.
BALANCE, SOURCE_BALANCE, LIGHTEST, HEAVIEST = 0.35, 0.15, 0.2, 5.0
HELD = 0.003  # standard deviation of what is as good as known
MOST_STEPS = 40
_MOST_TRIES = 16
_LARGEST_STEP = 1.0
_ENOUGH = 1e-4  # relative decrease of the loss below which a step was the last

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Problem:
    """A table ready to be fitted."""

    table: PublishedTable
    rows: Rows
    cells: Cells  # what each of them has to do
    gpus: Mapping[str, Spec]  # datasheets by the table's name of a GPU
    parameters: Parameters  # with the blocks, the latency model over the rows
    blocks: Sequence[Block]
    work: pd.DataFrame  # macs, bytes and launches of each row

    @property
    def telling(self) -> Mask:
        """Rows that eager's parameters are fitted to.

        Its own, kernels timed by themselves, and scripted ones where a source has few others of a GPU: those run the
        same kernels, and nothing else tells what these take there.
        """
        runtime = self.rows.runtime
        place = np.array([f"{source}, {gpu}" for source, gpu in zip(self.rows.source, self.rows.gpu, strict=True)])
        own, few = np.isin(runtime, (EAGER, ALONE)), np.zeros(len(runtime), bool)
        for one in set(place):
            here = place == one
            few |= here & ((here & np.isin(runtime, SCRIPTED)).sum() > (here & own).sum() > 0)
        told: Mask = own | (few & np.isin(runtime, SCRIPTED))
        return told

    def families(self, runtime: str) -> set[str]:
        """Kernel families that rows of a runtime have."""
        own = (block for block in self.blocks if self.rows.runtime[block.rows[0]] == runtime)
        return {kernels.family for block in own for kernels in block.kernels}

    def predict(self, theta: Floats) -> Floats:
        """Seconds of every row."""
        log_us = np.empty(len(self.rows))
        for block in self.blocks:
            log_us[block.rows] = evaluate(block, theta).log_us
        return np.exp(log_us) / US_PER_S

    def host_shares(self, theta: Floats) -> Floats:
        """Of every row, how much of the slower clock is the host's: above a half it is the host that sets the pace."""
        shares = np.empty(len(self.rows))
        for block in self.blocks:
            shares[block.rows] = evaluate(block, theta).host_share
        return shares

    def slowest(self) -> Objects:
        """Of every row: "host", or the kernel family that takes most of the device's time, by a fit to all rows."""
        theta, names = self.solve(), np.empty(len(self.rows), dtype=object)
        for block in self.blocks:
            names[block.rows] = latency_model.slowest(block, theta)
        return names

    def weights(self, keep: Mask | None = None) -> Floats:
        """Weight of each row: 0 for those left out; models and sources with many rows count less for each."""
        rows = self.rows
        used = np.ones(len(rows), bool) if keep is None else keep
        models = np.array([f"{source}, {model}" for source, model in zip(rows.source, rows.model, strict=True)], object)
        balance = _balance(models, used, BALANCE) * _balance(rows.source, used, SOURCE_BALANCE)
        balance = np.clip(balance / balance[used].mean(), LIGHTEST, HEAVIEST)
        # Of mean 1, so that priors weigh against rows as in any other table.
        weights: Floats = self.table.weight * used * balance / balance[used].mean()
        return weights

    def solve(self, keep: Mask | None = None) -> Floats:
        """Parameters fitted to all rows, or to those of a mask."""
        return self._solve(self.weights(keep), self.parameters.means, self.parameters.widths)

    def thetas(self, keep: Mask | None = None) -> dict[str, Floats]:
        """Parameters of every runtime, fitted to all rows or to those of a mask.

        Eager's come first. A scripted model runs the same kernels on the same hosts: its rows tell what is its own, and
        leave alone what eager's rows tell. An engine chooses kernels itself, and is fitted together with eager.
        """
        runtime = self.rows.runtime
        used = np.ones(len(runtime), bool) if keep is None else keep
        eager = used & self.telling
        thetas: dict[str, Floats] = {}
        for name in sorted(set(runtime) - {ALONE}, key=lambda name: (name != EAGER, name)):
            own = used & (runtime == name)
            if name in SCRIPTED and eager.any():
                thetas[name] = self._solve_beside(thetas[EAGER], eager & ~own, own)
            else:
                thetas[name] = self.solve(own | eager)
        return thetas

    def _solve_beside(self, theta: Floats, fitted: Mask, own: Mask) -> Floats:
        """Parameters by more rows, where everything that the fitted rows bear on stays as it was fitted."""
        told = np.unique(np.concatenate([block.needed for block in self.blocks if fitted[block.rows].any()]))
        means, widths = self.parameters.means, self.parameters.widths
        means[told], widths[told] = theta[told], HELD
        return self._solve(self.weights(own), means, widths)

    def _solve(self, weights: Floats, means: Floats, widths: Floats) -> Floats:
        loss = _Loss(self.blocks, self.rows.log_us, weights, means, widths)
        return loss.lowest()


def _balance(names: Objects, used: Mask, power: float) -> Floats:
    """Weights by which names with many rows count less for each, those in use counted."""
    counts = Counter(names[used].tolist())
    usual = float(np.median(list(counts.values()))) if counts else 1.0
    return np.array([(usual / max(counts.get(name, 1), 1)) ** power for name in names.tolist()])


class _Point(NamedTuple):
    """Some free parameters and the loss there, with its gradient and an approximation of its Hessian."""

    theta: Floats
    loss: float
    gradient: Floats
    hessian: Floats


class _Weighted(NamedTuple):
    """A block that has rows in use: their weights and latencies, and where in the Hessian its parameters stand."""

    block: Block
    weights: Floats
    log_us: Floats
    places: Ints
    squares: Ints


class _Loss:
    """Minus twice the log likelihood of rows and priors, over the parameters that rows in use bear on."""

    def __init__(self, blocks: Iterable[Block], log_us: Floats, weights: Floats, means: Floats, widths: Floats) -> None:
        used = [block for block in blocks if weights[block.rows].any()]
        self._free = np.unique(np.concatenate([block.needed for block in used]))
        self._means, self._precision = means, 1.0 / widths[self._free] ** 2
        self._blocks = []
        for block in used:
            places = np.searchsorted(self._free, block.needed)
            squares = (places[:, None] * len(self._free) + places).ravel()
            self._blocks.append(_Weighted(block, weights[block.rows], log_us[block.rows], places, squares))

    def lowest(self) -> Floats:
        """All parameters where the loss is lowest, found by damped Gauss-Newton steps from the priors' means."""
        point = self._at(self._means[self._free])
        damping = 1e-3
        for _ in range(MOST_STEPS):
            step = self._lower(point, damping)
            if step is None:
                break
            before, (point, damping) = point.loss, step
            if before - point.loss < _ENOUGH * point.loss:
                break
            damping = max(damping / 5.0, 1e-6)
        return self._all(point.theta)

    def _all(self, free: Floats) -> Floats:
        theta = self._means.copy()
        theta[self._free] = free
        return theta

    def _at(self, free: Floats) -> _Point:
        away = free - self._means[self._free]
        loss, gradient = float((self._precision * away**2).sum()), self._precision * away
        hessian = np.diag(self._precision)
        squares, theta = hessian.reshape(-1), self._all(free)
        for used in self._blocks:
            state = evaluate(used.block, theta, derivatives=True)
            errors = state.log_us - used.log_us
            softness = np.sqrt(1.0 + (errors / SOFT) ** 2)
            # Twice the soft absolute value: quadratic near zero, linear far from it.
            loss += float((used.weights * (softness - 1.0)).sum()) * 2.0 * (SOFT / NOISE) ** 2
            pull = np.sqrt(used.weights / softness) / NOISE
            slopes = local_gradients(used.block, state)
            slopes *= pull[:, None]
            sums = used.block.sums
            squares[used.squares] += (sums.T @ (sums.T @ (slopes.T @ slopes)).T).ravel()
            gradient[used.places] += sums.T @ (slopes.T @ (pull * errors))
        return _Point(free, loss, gradient, hessian)

    def _lower(self, point: _Point, damping: float) -> tuple[_Point, float] | None:
        """A step that lowers the loss, with the damping it took; None when there is none."""
        diagonal = np.diag_indices(len(self._free))
        for _ in range(_MOST_TRIES):
            damped = point.hessian.copy()
            damped[diagonal] *= 1.0 + damping
            factor = scipy.linalg.cho_factor(damped, overwrite_a=True, check_finite=False)
            newton = scipy.linalg.cho_solve(factor, -point.gradient, check_finite=False)
            there = self._at(point.theta + np.clip(newton, -_LARGEST_STEP, _LARGEST_STEP))
            if there.loss < point.loss:
                return there, damping
            damping *= 5.0
        return None


def problem(
    source: tables.Source | PublishedTable,
    graphs: Graphs | None = None,
    progress: Progress | None = None,
    partial: bool = False,
) -> Problem:
    """Read a table, trace its models and set up the latency model.

    `graphs` are traced models there are already, and takes up new ones. With `partial`, models that need a package
    which is not there are left out, with a note of the table's; otherwise they end it with a MissingPackageError.
    """
    table = published_table.read(source)
    datasheets = _datasheets(table)
    _demand_models(table)
    lacking: dict[str, str] = {}
    graphs = published_table.trace_all(
        published_table.keys_of(table.cells), graphs, progress, lacking if partial else None
    )
    if lacking:
        table = _without(table, lacking)
        datasheets = _datasheets(table)
        _demand_models(table)
    keys, frame = published_table.keys_of(table.cells), table.cells
    cells, cell = _cells(frame, keys, graphs, datasheets)
    rows = Rows(
        cell=cell,
        gpu=_objects(frame["device"]),
        precision=_objects(frame["precision"]),
        runtime=_objects(frame["runtime"]),
        run=_objects(frame["run"]),
        host=_objects(frame["host"]),
        protocol=_objects(frame["protocol"]),
        memory_format=_objects(frame["memory_format"]),
        group=_objects(frame["input_kind"]),
        model=_objects(frame["model"]),
        source=_objects(frame[tables.SOURCE]),
        batch=frame["batch"].to_numpy(np.int64),
        log_us=np.log(frame["latency_s"].to_numpy(float) * US_PER_S),
    )
    parameters = Parameters()
    blocks = latency_model.blocks_of(cells, rows, datasheets, parameters)
    work = _work([graphs[key] for key in keys], frame["batch"].tolist())
    return Problem(table, rows, cells, datasheets, parameters, blocks, work)


def _cells(
    frame: pd.DataFrame, keys: Sequence[TraceKey], graphs: Graphs, datasheets: Mapping[str, Spec]
) -> tuple[Cells, Ints]:
    """The cells of a table, and which of them each row measures."""
    on = [datasheets[name] for name in _objects(frame["device"])]
    wanted = [
        CellKey(key, runtime, fuser_name(runtime, gpu), batch)
        for key, runtime, gpu, batch in zip(keys, _objects(frame["runtime"]), on, frame["batch"].tolist(), strict=True)
    ]
    # Any GPU with the same fuser will do.
    places = {cell[:3]: gpu for cell, gpu in zip(wanted, on, strict=True)}
    run = {place: as_run_by(place[1], graphs[place[0]], gpu) for place, gpu in places.items()}
    cells = cells_of(sorted(set(wanted)), run)
    position = {key: index for index, key in enumerate(cells.keys)}
    return cells, np.array([position[cell] for cell in wanted], dtype=np.int64)


def _work(graphs: list[ModelGraph], batches: list[int]) -> pd.DataFrame:
    known: dict[tuple[int, bool], NDArray[np.int64]] = {}
    rows = np.empty((len(graphs), 3), dtype=np.int64)
    for row, graph, batch in zip(rows, graphs, batches, strict=True):
        where = id(graph), batch == 1
        if where not in known:
            # What moves is affine in batch, so that two batch sizes of the same ops tell all others.
            ops = msgspec.structs.replace(graph, ops=graph.at(batch), ops_at_one=None)
            known[where] = np.array([(ops.macs(at), ops.bytes(at), ops.launches(at)) for at in (0, 1)])
        at_none, at_one = known[where]
        row[:] = at_none + batch * (at_one - at_none)
    return pd.DataFrame(rows, columns=["macs", "bytes", "launches"])


def _objects(column: Iterable[object]) -> Objects:
    return np.array([str(value) for value in column], dtype=np.object_)


def _without(table: PublishedTable, lacking: Mapping[str, str]) -> PublishedTable:
    """A table without the rows of some models, and a note of each reason."""
    model = table.cells["model"].astype(str)
    out = model.isin(list(lacking)).to_numpy()
    if out.all():
        raise MissingPackageError(f"none of the table's models can be traced: {next(iter(lacking.values()))}")
    notes = left_out(model[out].tolist(), [lacking[name] for name in model[out]])
    return replace(table.where(~out), notes=(*table.notes, *notes))


def _datasheets(table: PublishedTable) -> dict[str, Spec]:
    datasheets = {}
    for name in dict.fromkeys(table.cells["device"].astype(str)):
        try:
            datasheets[name] = gpus.spec(name)
        except UnknownGpuError as error:
            raise UnknownGpuError(
                f"{error} The fit starts from datasheets: correct the name in the table's column of GPUs, or leave out "
                "its rows."
            ) from None
    return datasheets


def _demand_models(table: PublishedTable) -> None:
    models = sorted(set(table.cells["model"].astype(str)))
    if len(models) < FEWEST_MODELS:
        raise TableError(
            f"The table has one model only ({models[0]}), from which host and device cannot be told apart for others. "
            "Add rows of other models, of any GPU, run or precision."
        )
