"""A table of latencies as a fitting problem: its rows in the latency model, and the parameters that explain them best.

table → traced models → cells → blocks with parameters → solve
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
import pandas as pd
import scipy.linalg
from numpy.typing import NDArray

from latpred import tables
from latpred.accuracy.predicted import GraphKey, batches_of, untraced
from latpred.calibration.published import published_table
from latpred.calibration.published.latency_model import Block, Objects, Rows, blocks_of, state_of
from latpred.calibration.published.parameters import Parameters
from latpred.calibration.published.published_table import Graphs, Progress, PublishedTable
from latpred.calibration.published.row_counts import (
    EAGER,
    ENGINES,
    NO_HOST,
    SCRIPTED,
    CellKey,
    Cells,
    as_run_by,
    cells_of,
    weights_of,
)
from latpred.errors import LatpredError, TableError, UnknownGpuError
from latpred.graph.features import Floats
from latpred.graph.graph import Ints
from latpred.profile import gpus, hosts
from latpred.profile.gpus import Spec
from latpred.runtimes.legacy_torch import TORCH_2, as_run_in, fuser_of
from latpred.units import US_PER_S

FEWEST_MODELS = 2
NOISE = 0.12  # log error that one row may have; rows of a model err together, so it exceeds the repeat noise
SOFT = 0.1  # log error from which on a row pulls less than quadratically
# 0 counts every row alike, 1 every model of a source, or every source; no row counts more or less than that.
BALANCE, SOURCE_BALANCE, LIGHTEST, HEAVIEST = 0.35, 0.15, 0.2, 5.0
MOST_RATIO = 50.0  # measured over predicted before any fit, beyond which it is the unit that is wrong
HELD = 0.003  # standard deviation of what is as good as known
MOST_STEPS = 40
_MOST_TRIES = 16
_LARGEST_STEP = 1.0
_ENOUGH = 1e-4  # relative decrease of the loss below which a step was the last

RUNTIMES = (EAGER, *SCRIPTED, *ENGINES, *NO_HOST)  # whose kernels are known from eager traces

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
        """Rows that eager's parameters are fitted to."""
        rows = self.rows
        own, scripted = np.isin(rows.runtime, (EAGER, *NO_HOST)), np.isin(rows.runtime, SCRIPTED)
        # Scripted ones run the same kernels, and where a source has few others of a GPU nothing else tells of these.
        counted = pd.DataFrame({"own": own, "scripted": scripted}, dtype=int)
        counts = counted.groupby([rows.source, rows.gpu]).transform("sum")
        few = (counts["scripted"] > counts["own"]) & (counts["own"] > 0)
        told: Mask = own | (scripted & few.to_numpy())
        return told

    def families(self, runtime: str) -> set[str]:
        """Kernel families that rows of a runtime have."""
        own = (block for block in self.blocks if self.rows.runtime[block.rows[0]] == runtime)
        return {kernels.family for block in own for kernels in block.kernels}

    def predict(self, theta: Floats) -> Floats:
        """Seconds of every row."""
        return np.exp(self._of_rows("log_us", theta)) / US_PER_S

    def host_shares(self, theta: Floats) -> Floats:
        """Of every row, how much of the slower clock is the host's: above a half it is the host that sets the pace."""
        return self._of_rows("host_share", theta)

    def _of_rows(self, name: str, theta: Floats) -> Floats:
        values = np.empty(len(self.rows))
        for block in self.blocks:
            values[block.rows] = getattr(state_of(block, theta), name)
        return values

    def slowest(self) -> Objects:
        """Of every row: "host", or the kernel family that takes most of the device's time, by a fit to all rows."""
        theta, names = self.solve(), np.empty(len(self.rows), dtype=object)
        for block in self.blocks:
            state, local = state_of(block, theta), block.local(theta)
            by_family = np.zeros((len(block.kernels), len(block.counts)))
            for row, kernels in zip(by_family, block.kernels, strict=True):
                row[kernels.cells] = kernels.us(local)[0]
            families = np.array([kernels.family for kernels in block.kernels], dtype=object)
            leading = families[np.argmax(by_family, axis=0)[block.cell]]
            names[block.rows] = np.where(state.host_us >= state.device_us, "host", leading)
        return names

    def weights(self, keep: Mask | None = None) -> Floats:
        """Weight of each row: 0 for those left out; models and sources with many rows count less for each."""
        rows = self.rows
        used = np.ones(len(rows), bool) if keep is None else keep
        if not used.any():
            return np.zeros(len(rows))
        models = np.array([", ".join(pair) for pair in zip(rows.source, rows.architecture, strict=True)], object)
        balance = np.ones(len(rows))
        for names, power in ((models, BALANCE), (rows.source, SOURCE_BALANCE)):
            counts = Counter(names[used].tolist())
            usual = float(np.median(list(counts.values())))
            balance *= [(usual / counts.get(name, 1)) ** power for name in names.tolist()]
        balance = np.clip(balance / balance[used].mean(), LIGHTEST, HEAVIEST)
        # Of mean 1, so that priors weigh against rows as in any other table.
        weights: Floats = self.table.weight * used * balance / balance[used].mean()
        return weights

    def solve(self, keep: Mask | None = None, priors: tuple[Floats, Floats] | None = None) -> Floats:
        """Parameters fitted to all rows, or to those of a mask; `priors` are other means and widths than usual."""
        means, widths = priors or (self.parameters.means, self.parameters.widths)
        weights = self.weights(keep)
        if not weights.any():  # as where the only model of a runtime is left out
            return means
        return _Loss(self.blocks, self.rows.log_us, weights, means, widths).lowest()

    def thetas(self, keep: Mask | None = None) -> dict[str, Floats]:
        """Parameters of every runtime, fitted to all rows or to those of a mask.

        Eager's come first. A scripted model runs the same kernels on the same hosts: its rows tell what is its own, and
        leave alone what eager's rows tell. An engine chooses kernels itself, and is fitted together with eager.
        """
        runtime = self.rows.runtime
        used = np.ones(len(runtime), bool) if keep is None else keep
        eager = used & self.telling
        thetas: dict[str, Floats] = {}
        for name in sorted(set(runtime) - {*NO_HOST}, key=lambda name: (name != EAGER, name)):
            own = used & (runtime == name)
            if name in SCRIPTED and EAGER in thetas and (eager & ~own).any():
                means, widths = self.parameters.means, self.parameters.widths
                told = [block.needed for block in self.blocks if (eager & ~own)[block.rows].any()]
                fixed = np.unique(np.concatenate(told))
                means[fixed], widths[fixed] = thetas[EAGER][fixed], HELD
                thetas[name] = self.solve(own, (means, widths))
            else:
                thetas[name] = self.solve(own | eager)
        return thetas


class _Point(NamedTuple):
    """Some free parameters and the loss there, with its gradient and an approximation of its Hessian."""

    theta: Floats
    loss: float
    gradient: Floats
    hessian: Floats


class _Loss:
    """Minus twice the log likelihood of rows and priors, over the parameters that rows in use bear on."""

    def __init__(self, blocks: Iterable[Block], log_us: Floats, weights: Floats, means: Floats, widths: Floats) -> None:
        used = [block for block in blocks if weights[block.rows].any()]
        self._free = np.unique(np.concatenate([block.needed for block in used]))
        self._means, self._precision = means, 1.0 / widths[self._free] ** 2
        self._blocks = []
        for block in used:
            places = np.searchsorted(self._free, block.needed)
            self._blocks.append((block, weights[block.rows], log_us[block.rows], places))

    def lowest(self) -> Floats:
        """All parameters where the loss is lowest, found by damped Gauss-Newton steps from the priors' means."""
        point, damping = self._at(self._means[self._free]), 1e-3
        for _ in range(MOST_STEPS):
            for _ in range(_MOST_TRIES):
                there = self._at(point.theta + self._step(point, damping))
                if there.loss < point.loss:
                    break
                damping *= 5.0
            else:
                break
            before, point = point.loss, there
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
        hessian, theta = np.diag(self._precision), self._all(free)
        for block, weights, log_us, places in self._blocks:
            state = state_of(block, theta)
            errors = state.log_us - log_us
            softness = np.sqrt(1.0 + (errors / SOFT) ** 2)
            # Twice the soft absolute value: quadratic near zero, linear far from it.
            loss += float((weights * (softness - 1.0)).sum()) * 2.0 * (SOFT / NOISE) ** 2
            pull = np.sqrt(weights / softness) / NOISE
            slopes = state.slopes * pull[:, None]
            hessian[np.ix_(places, places)] += block.sums.T @ (block.sums.T @ (slopes.T @ slopes)).T
            gradient[places] += block.sums.T @ (slopes.T @ (pull * errors))
        return _Point(free, loss, gradient, hessian)

    def _step(self, point: _Point, damping: float) -> Floats:
        damped = point.hessian.copy()
        damped[np.diag_indices(len(damped))] *= 1.0 + damping
        factor = scipy.linalg.cho_factor(damped, overwrite_a=True, check_finite=False)
        newton = scipy.linalg.cho_solve(factor, -point.gradient, check_finite=False)
        return np.clip(newton, -_LARGEST_STEP, _LARGEST_STEP)


def problem(
    source: tables.Source | PublishedTable,
    graphs: Graphs | None = None,
    progress: Progress | None = None,
    partial: bool = False,
) -> Problem:
    """Read a table, trace its models and set up the latency model.

    `graphs` are traced models there are already, and takes up new ones. With `partial`, rows whose model cannot be
    traced are left out, with a note of the table's; otherwise the first error ends it.
    """
    table = fitted_rows(published_table.read(source))
    datasheets = _datasheets(table)
    keys, failed = published_table.trace_keys(table.cells), dict[GraphKey, LatpredError]()
    asked = batches_of(keys, table.cells["batch"])
    traced = published_table.trace_all(asked, graphs, progress, failed if partial else None)
    if failed:
        out, notes = untraced(table.cells["model"], keys, failed)
        table = replace(table.where(~out), notes=(*table.notes, *notes))
        datasheets, keys = _datasheets(table), [key for key in keys if key not in failed]
    frame = table.cells
    # Where nobody says which PyTorch ran it, as a profile without an era predicts it.
    ran = {key: as_run_in(key.era or TORCH_2, traced[key]) for key in set(keys)}
    cells, cell = _cells(frame, keys, ran, datasheets)
    known = {text: host.name if (host := hosts.find(text)) else "" for text in frame["host"].unique()}
    named = frame.rename(columns={"device": "gpu", "input_kind": "group", tables.SOURCE: "source"}).assign(
        host=frame["host"].map(known),
        design=frame["device"].map(lambda name: datasheets[name].design),
        architecture=_architectures(keys, traced),
        release=published_table.releases(frame),
    )
    texts = [field.name for field in fields(Rows) if field.name not in ("cell", "batch", "log_us")]
    rows = Rows(
        cell=cell,
        batch=frame["batch"].to_numpy(np.int64),
        log_us=np.log(frame["latency_s"].to_numpy(float) * US_PER_S),
        **{name: named[name].to_numpy(object) for name in texts},
    )
    parameters = Parameters()
    blocks = blocks_of(cells, rows, datasheets, parameters)
    work = _work(cells, ran).iloc[cell].reset_index(drop=True)
    made = Problem(table, rows, cells, datasheets, parameters, blocks, work)
    _demand_seconds(made)
    return made


def _architectures(keys: Sequence[GraphKey], graphs: Graphs) -> pd.Series:
    """Of each row the first name of its architecture: models are one that multiply by the same weights.

    All graphs of a name belong to one, whatever builds it. A model without such weights goes by its name.
    """
    weights = {key: weights_of(graphs[key]) for key in set(keys)}
    models = pd.Series([key.model.rpartition(":")[2] for key in keys], dtype=object)
    known = [weights[key] or name for key, name in zip(keys, models, strict=True)]
    kind, _ = pd.factorize(pd.Series(known, dtype=object))
    names = models
    while True:
        shared = names.groupby(kind).transform("min").groupby(models).transform("min")
        if shared.equals(names):
            return names
        names = shared


def fitted_rows(table: PublishedTable) -> PublishedTable:
    """The rows that can be fitted.

    No parameter tells what a GPU's fp64 units take. Runtimes but these have steps of their own, which no table tells.
    """
    runtime = table.cells["runtime"]
    unfitted = runtime.mask(runtime.isin(RUNTIMES), "").mask(table.cells["precision"] == "fp64", "fp64")
    counts = unfitted[unfitted != ""].value_counts(sort=False)
    notes = tuple(f"rows in {name} were left out ({count:,})" for name, count in counts.items())
    if counts.sum() == len(unfitted):
        raise TableError(f"No row of the table can be fitted: {'; '.join(notes)}. Add rows in {', '.join(RUNTIMES)}.")
    return replace(table.where((unfitted == "").to_numpy()), notes=(*table.notes, *notes))


def _demand_seconds(problem: Problem) -> None:
    """Refuse a source whose latencies are so far from what any GPU takes that they can be no seconds."""
    log_ratio = problem.rows.log_us - np.log(problem.predict(problem.parameters.means) * US_PER_S)
    for source, median in pd.Series(log_ratio).groupby(problem.rows.source).median().items():
        if abs(median) > np.log(MOST_RATIO):
            raise TableError(
                f"latency_s of {source} is {np.exp(median):.3g} times what such GPUs take, in the median. Give "
                "seconds: divide milliseconds by 1000."
            )


def _cells(
    frame: pd.DataFrame, keys: Sequence[GraphKey], graphs: Graphs, datasheets: Mapping[str, Spec]
) -> tuple[Cells, Ints]:
    """The cells of a table, and which of them each row measures."""
    on = [datasheets[name] for name in frame["device"]]
    wanted = [
        CellKey(key, runtime, fuser_of(gpu).name if runtime in SCRIPTED else "", batch)
        for key, runtime, gpu, batch in zip(keys, frame["runtime"], on, frame["batch"].tolist(), strict=True)
    ]
    # Any GPU with the same fuser will do.
    places = {cell[:3]: gpu for cell, gpu in zip(wanted, on, strict=True)}
    run = {place: as_run_by(place[1], graphs[place[0]], gpu) for place, gpu in places.items()}
    cells = cells_of(sorted(set(wanted)), run)
    position = {key: index for index, key in enumerate(cells.keys)}
    return cells, np.array([position[cell] for cell in wanted], dtype=np.int64)


def _work(cells: Cells, graphs: Graphs) -> pd.DataFrame:
    """What each cell counts of work, in eager."""
    asked = ((graphs[key.traced], key.batch) for key in cells.keys)
    work = [(graph.macs(batch), graph.bytes(batch), graph.launches(batch)) for graph, batch in asked]
    return pd.DataFrame(work, columns=["macs", "bytes", "launches"])


def _datasheets(table: PublishedTable) -> dict[str, Spec]:
    """Datasheets of a table's GPUs; an error where one has none, or where the table has too few models."""
    datasheets = {}
    for name in dict.fromkeys(table.cells["device"].astype(str)):
        try:
            datasheets[name] = gpus.spec(name)
        except UnknownGpuError as error:
            how = f"{error} The fit starts from datasheets: correct the name in its column, or leave out its rows."
            if name == tables.DEFAULTS["device"]:
                how = "Rows of the table name no GPU, from whose datasheet a fit starts. Add a column device, as a100."
            raise UnknownGpuError(how) from None
    models = sorted(set(table.cells["model"].astype(str)))
    if len(models) < FEWEST_MODELS:
        raise TableError(
            f"The table has one model only ({models[0]}), from which host and device cannot be told apart for others. "
            "Add rows of other models, of any GPU, run or precision."
        )
    return datasheets
