"""Fits the law to a table: the joint fit over all its runs, and what comes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from latpred import specs, tables
from latpred.calibration.tablefit import reading, walks
from latpred.calibration.tablefit.blocks import Rows
from latpred.calibration.tablefit.cells import CellKey, cells_of
from latpred.calibration.tablefit.engines import SCRIPTED, as_run_by, fuser_name
from latpred.calibration.tablefit.law import Law
from latpred.calibration.tablefit.parameters import EAGER
from latpred.calibration.tablefit.priors import Form
from latpred.calibration.tablefit.solving import Beliefs, Solution, solve
from latpred.errors import MissingPackageError, TableError, UnknownGpuError
from latpred.features import Floats
from latpred.graph import ModelGraph
from latpred.predicted import left_out
from latpred.units import US_PER_S

Known = MutableMapping[walks.WalkKey, ModelGraph]
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

    table: reading.Table
    law: Law
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

    def _held(self, theta: Floats, used: NDArray[np.bool_]) -> Beliefs:
        """Beliefs in which everything that such rows bear on stays as they were fitted."""
        told = np.unique(np.concatenate([block.needed for block in self.law.blocks if used[block.rows].any()]))
        means, widths = self.law.parameters.means, self.law.parameters.widths
        means[told], widths[told] = theta[told], HELD
        return Beliefs(means, widths)


def problem(
    source: tables.Source | reading.Table,
    form: Form | None = None,
    known: Known | None = None,
    progress: walks.Progress | None = None,
    partial: bool = False,
) -> Problem:
    """Read a table, walk its models and set up the law.

    Parameters
    ----------
    source : DataFrame, path or Table
        See `latpred.calibration.tablefit.reading`.
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
    table = source if isinstance(source, reading.Table) else reading.read(source)
    gpus = _datasheets(table)
    _demand_models(table)
    lacking: dict[str, str] = {}
    graphs = walks.walk_all(walks.keys_of(table.cells), table.era, known, progress, lacking if partial else None)
    if lacking:
        table = _without(table, lacking)
        gpus = _datasheets(table)
        _demand_models(table)
    keys = walks.keys_of(table.cells)
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
    law = Law(cells, rows, gpus, form or Form())
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


def _place(key: walks.WalkKey) -> tuple[str, int, str]:
    """A walk in the terms of a cell; the kind of input is part of the model's name there."""
    return f"{key.model} {key.kind}", key.size, key.precision


def _objects(column: Iterable[object]) -> NDArray[np.object_]:
    return np.array([str(value) for value in column], dtype=np.object_)


def _without(table: reading.Table, lacking: Mapping[str, str]) -> reading.Table:
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


def _datasheets(table: reading.Table) -> dict[str, specs.Spec]:
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


def _demand_models(table: reading.Table) -> None:
    models = sorted(set(table.cells["model"].astype(str)))
    if len(models) < FEWEST_MODELS:
        raise TableError(
            f"The table has one model only ({models[0]}), from which host and device cannot be told apart for others. "
            "Add rows of other models, of any GPU, run or precision."
        )
