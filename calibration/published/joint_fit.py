"""Fits the law to a table: the joint fit over all its runs, and what comes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import numpy as np
import pandas as pd
import scipy.linalg
from numpy.typing import NDArray

from latpred import tables
from latpred.accuracy.predicted import left_out
from latpred.calibration.published import published_table
from latpred.calibration.published.latency_model import Block, LatencyModel, Rows, evaluate, local_gradients
from latpred.calibration.published.parameters import EAGER
from latpred.calibration.published.priors import Hyperparameters
from latpred.calibration.published.row_counts import SCRIPTED, CellKey, Ints, as_run_by, cells_of, fuser_name
from latpred.errors import MissingPackageError, TableError, UnknownGpuError
from latpred.graph.features import Floats
from latpred.graph.graph import ModelGraph
from latpred.profile import gpus as specs
from latpred.units import US_PER_S

MOST_STEPS = 40
_MOST_TRIES = 8
_LARGEST_STEP = 1.0
_ENOUGH = 1e-4  # relative decrease of the loss below which a step was the last


class Solution(NamedTuple):
    """Parameters found, the loss there, and how many steps it took."""

    theta: Floats
    loss: float
    steps: int


class Priors(NamedTuple):
    """Means and widths of all parameters."""

    means: Floats
    widths: Floats


class _Point(NamedTuple):
    """Some parameters and the loss there, with its gradient and an approximation of its Hessian."""

    theta: Floats
    loss: float
    gradient: Floats
    hessian: Floats


class _Used(NamedTuple):
    """A block that has rows in use: their weights and latencies, and where in the Hessian its parameters stand."""

    block: Block
    weights: Floats
    log_us: Floats
    places: Ints
    squares: Ints


@dataclass(frozen=True, slots=True)
class _System:
    """The loss, over the parameters that rows in use bear on."""

    law: LatencyModel
    used: tuple[_Used, ...]
    free: Ints
    means: Floats  # of all parameters
    precision: Floats  # of the free ones

    @classmethod
    def of(cls, law: LatencyModel, weights: Floats, beliefs: Priors) -> _System:
        """The system of the rows that have weight."""
        blocks = [block for block in law.blocks if weights[block.rows].any()]
        free = np.unique(np.concatenate([block.needed for block in blocks]))
        used = []
        for block in blocks:
            places = np.searchsorted(free, block.needed)
            squares = (places[:, None] * len(free) + places).ravel()
            used.append(_Used(block, weights[block.rows], law.rows.log_us[block.rows], places, squares))
        return cls(law, tuple(used), free, beliefs.means, 1.0 / beliefs.widths[free] ** 2)

    def full(self, theta: Floats) -> Floats:
        """All parameters, from the free ones."""
        found = self.means.copy()
        found[self.free] = theta
        return found

    def point(self, theta: Floats) -> _Point:
        """The loss at some free parameters."""
        scale, noise = self.law.form.soft, self.law.form.noise
        away = theta - self.means[self.free]
        loss, gradient = float((self.precision * away**2).sum()), self.precision * away
        hessian = np.diag(self.precision)
        squares, everything = hessian.reshape(-1), self.full(theta)
        for used in self.used:
            state = evaluate(used.block, everything, derivatives=True)
            errors = state.log_us - used.log_us
            softness = np.sqrt(1.0 + (errors / scale) ** 2)
            # Twice the soft absolute value: quadratic near zero, linear far from it.
            loss += float((used.weights * (softness - 1.0)).sum()) * 2.0 * (scale / noise) ** 2
            pull = np.sqrt(used.weights / softness) / noise
            slopes = local_gradients(used.block, state)
            slopes *= pull[:, None]
            lead = used.block.short
            squares[used.squares] += (lead.T @ (lead.T @ (slopes.T @ slopes)).T).ravel()
            gradient[used.places] += lead.T @ (slopes.T @ (pull * errors))
        return _Point(theta, loss, gradient, hessian)

    def better(self, point: _Point, damping: float) -> tuple[_Point, float] | None:
        """A step that lowers the loss, with the damping it took; None when there is none."""
        diagonal = np.diag_indices(len(self.free))
        for _ in range(_MOST_TRIES):
            damped = point.hessian.copy()
            damped[diagonal] *= 1.0 + damping
            factor = scipy.linalg.cho_factor(damped, overwrite_a=True, check_finite=False)
            newton = scipy.linalg.cho_solve(factor, -point.gradient, check_finite=False)
            found = self.point(point.theta + np.clip(newton, -_LARGEST_STEP, _LARGEST_STEP))
            if found.loss < point.loss:
                return found, damping
            damping *= 5.0
        return None


def solve(law: LatencyModel, weights: Floats, beliefs: Priors | None = None, start: Floats | None = None) -> Solution:
    """The parameters that rows and beliefs together make likeliest.

    Parameters
    ----------
    law : Law
        With its rows.
    weights : ndarray
        Of each row; 0 leaves one out.
    beliefs : Beliefs, optional
        What is believed before any row is seen; default: the law's own.
    start : ndarray, optional
        Where the search begins; default: at what is believed.
    """
    beliefs = beliefs or Priors(law.parameters.means, law.parameters.widths)
    system = _System.of(law, weights, beliefs)
    point = system.point((beliefs.means if start is None else start)[system.free])
    damping, steps = 1e-3, 0
    while steps < MOST_STEPS:
        found = system.better(point, damping)
        if found is None:
            break
        before, (point, damping) = point.loss, found
        steps += 1
        if before - point.loss < _ENOUGH * point.loss:
            break
        damping = max(damping / 5.0, 1e-6)
    return Solution(system.full(point.theta), point.loss, steps)


Known = MutableMapping[published_table.TraceKey, ModelGraph]
TOKENS, PIXELS = "seq", "image"
FEWEST_MODELS = 2
HELD = 0.003  # standard deviation of what is as good as known
_ROW = ["device", "runtime", "precision", "model", "batch", "input_kind", "input_size", "run"]


@dataclass(frozen=True, slots=True)
class Problem:
    """A table ready to be fitted: its rows in the law, and the law itself.

    Attributes
    ----------
    table : Table
        What was read.
    law : Law
        With the table's rows.
    model, batch : ndarray
        Of each row.
    work : DataFrame
        macs, bytes and launches of each row.
    """

    table: published_table.Table
    law: LatencyModel
    model: NDArray[np.object_]
    batch: NDArray[np.int64]
    work: pd.DataFrame

    def weights(self, keep: NDArray[np.bool_] | None = None) -> Floats:
        """Weight of each row: 0 for those left out, and models with many rows count less for each."""
        used = np.ones(len(self.model), bool) if keep is None else keep
        counts = Counter(self.model[used].tolist())
        usual = float(np.median(list(counts.values()))) if counts else 1.0
        power = self.law.form.balance
        balance = np.array([(usual / max(counts.get(name, 1), 1)) ** power for name in self.model.tolist()])
        weights: Floats = self.table.weight * used * balance
        return weights

    def slowest(self, frame: pd.DataFrame) -> list[str]:
        """Of rows of this table: "host", or the kernel family that takes most of the device's time, by a fit to all."""
        named = pd.Series(self.law.slowest(self.solve().theta), index=pd.MultiIndex.from_frame(self.table.cells[_ROW]))
        named = named[~named.index.duplicated()]
        return [str(name) for name in named.reindex(pd.MultiIndex.from_frame(frame[_ROW]))]

    def solve(self, keep: NDArray[np.bool_] | None = None) -> Solution:
        """Fit to all rows, or to those of a mask."""
        return solve(self.law, self.weights(keep))

    def thetas(self, keep: NDArray[np.bool_] | None = None) -> dict[str, Floats]:
        """Parameters of every runtime, fitted to all rows or to those of a mask.

        Eager's come first. A scripted model runs the same kernels on the same hosts: its rows tell what is its own, and
        leave alone what eager's rows tell. An engine chooses kernels itself, and is fitted together with eager.
        """
        runtime = self.law.rows.runtime
        used = np.ones(len(runtime), bool) if keep is None else keep
        eager = used & (runtime == EAGER)
        found: dict[str, Floats] = {}
        for name in sorted(set(runtime), key=lambda name: (name != EAGER, name)):
            own = used & (runtime == name)
            if name in SCRIPTED and eager.any():
                found[name] = solve(self.law, self.weights(own), self._held(found[EAGER], eager)).theta
            else:
                found[name] = self.solve(own | eager).theta
        return found

    def _held(self, theta: Floats, used: NDArray[np.bool_]) -> Priors:
        """Beliefs in which everything that such rows bear on stays as they were fitted."""
        told = np.unique(np.concatenate([block.needed for block in self.law.blocks if used[block.rows].any()]))
        means, widths = self.law.parameters.means, self.law.parameters.widths
        means[told], widths[told] = theta[told], HELD
        return Priors(means, widths)


def problem(
    source: tables.Source | published_table.Table,
    form: Hyperparameters | None = None,
    known: Known | None = None,
    progress: published_table.Progress | None = None,
    partial: bool = False,
) -> Problem:
    """Read a table, walk its models and set up the law.

    Parameters
    ----------
    source : DataFrame, path or Table
        See `latpred.calibration.published.published_table`.
    form : Form, optional
        What is believed of costs.
    known : mapping, optional
        Walks there are already.
    progress : callable, optional
        Told what is being walked.
    partial : bool
        Leave out models that need a package which is not there, with a note of the table's; otherwise they end it.

    Raises
    ------
    MissingPackageError
        When a model needs a package that is not there, or cannot be imported.
    TableError
        When the table cannot be used, or has a single model.
    UnknownGpuError
        When a GPU has no datasheet.
    UnknownModelError
        When a model's name means nothing.
    """
    table = source if isinstance(source, published_table.Table) else published_table.read(source)
    gpus = _datasheets(table)
    _demand_models(table)
    lacking: dict[str, str] = {}
    graphs = published_table.trace_all(
        published_table.keys_of(table.cells), table.era, known, progress, lacking if partial else None
    )
    if lacking:
        table = _without(table, lacking)
        gpus = _datasheets(table)
        _demand_models(table)
    keys = published_table.keys_of(table.cells)
    frame = table.cells
    on = [gpus[name] for name in _objects(frame["device"])]
    wanted = [
        CellKey(*_place(key), runtime, fuser_name(runtime, gpu), batch)
        for key, runtime, gpu, batch in zip(keys, _objects(frame["runtime"]), on, frame["batch"].tolist(), strict=True)
    ]
    # Any GPU with the same fuser will do.
    placed = {cell[:5]: (cell.runtime, key, gpu) for cell, key, gpu in zip(wanted, keys, on, strict=True)}
    run = {place: as_run_by(runtime, graphs[key], gpu) for place, (runtime, key, gpu) in placed.items()}
    cells = cells_of(sorted(set(wanted)), run)
    index = cells.index()
    rows = Rows(
        cell=np.array([index[cell] for cell in wanted], dtype=np.int64),
        gpu=_objects(frame["device"]),
        precision=_objects(frame["precision"]),
        runtime=_objects(frame["runtime"]),
        run=_objects(frame["run"]),
        group=_objects(frame["input_kind"]),
        log_us=np.log(frame["latency_s"].to_numpy(float) * US_PER_S),
    )
    law = LatencyModel(cells, rows, gpus, form or Hyperparameters())
    work = _work([graphs[key] for key in keys], frame["batch"].tolist())
    return Problem(table, law, _objects(frame["model"]), frame["batch"].to_numpy(np.int64), work)


def _work(graphs: list[ModelGraph], batches: list[int]) -> pd.DataFrame:
    known: dict[tuple[int, bool], NDArray[np.int64]] = {}
    rows = np.empty((len(graphs), 3), dtype=np.int64)
    for row, graph, batch in zip(rows, graphs, batches, strict=True):
        where = id(graph), batch == 1
        if where not in known:
            # What moves is a line in batch, so that two batch sizes of the same ops tell all others.
            ops = msgspec.structs.replace(graph, ops=graph.at(batch), ops_at_one=None)
            known[where] = np.array([(ops.macs(at), ops.bytes(at), ops.launches(at)) for at in (0, 1)])
        at_none, at_one = known[where]
        row[:] = at_none + batch * (at_one - at_none)
    return pd.DataFrame(rows, columns=["macs", "bytes", "launches"])


def _place(key: published_table.TraceKey) -> tuple[str, int, str]:
    """A walk in the terms of a cell; the kind of input is part of the model's name there."""
    return f"{key.model} {key.kind}", key.size, key.precision


def _objects(column: Iterable[object]) -> NDArray[np.object_]:
    return np.array([str(value) for value in column], dtype=np.object_)


def _without(table: published_table.Table, lacking: Mapping[str, str]) -> published_table.Table:
    """A table without the rows of some models, and a note of each reason."""
    model = table.cells["model"].astype(str)
    out = model.isin(list(lacking)).to_numpy()
    if out.all():
        raise MissingPackageError(f"none of the table's models can be walked: {next(iter(lacking.values()))}")
    notes = left_out(model[out].tolist(), [lacking[name] for name in model[out]])
    return replace(
        table,
        cells=table.cells[~out].reset_index(drop=True),
        weight=table.weight[~out],
        notes=(*table.notes, *notes),
    )


def _datasheets(table: published_table.Table) -> dict[str, specs.Spec]:
    found = {}
    for name in dict.fromkeys(table.cells["device"].astype(str)):
        try:
            found[name] = specs.spec(name)
        except UnknownGpuError as error:
            raise UnknownGpuError(
                f"{error} The fit starts from datasheets: correct the name in the table's column of GPUs, or leave out "
                "its rows."
            ) from None
    return found


def _demand_models(table: published_table.Table) -> None:
    models = sorted(set(table.cells["model"].astype(str)))
    if len(models) < FEWEST_MODELS:
        raise TableError(
            f"The table has one model only ({models[0]}), from which host and device cannot be told apart for others. "
            "Add rows of other models, of any GPU, run or precision."
        )
