"""`latpred.adapt`: a few measured architectures correct a device's profile, as far as leaving each out shows a gain.

Rows become measured forward passes, and `fit.corrections` fits factors to them at several levels of freedom, weighed by
how likely each makes the rows. Their mean, or that of one factor alone, goes into a new profile, which says what was
done to it, if it gains on architectures left out.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np
import pandas as pd

from latpred import tables
from latpred.accuracy import metrics
from latpred.accuracy.metrics import Errors
from latpred.accuracy.predicted import (
    GraphKey,
    batches_of,
    counted,
    graph_key,
    graph_keys,
    graph_of,
    options_of,
    slowdown_of,
    trace_models,
)
from latpred.errors import TableError, UnknownModelError, UsageError
from latpred.fit.corrections import GENERAL, NONE, Factors, Fit, LatencyModel, Level, Row, corrected
from latpred.graph.features import Floats
from latpred.graph.graph import CONTIGUOUS, ModelGraph
from latpred.prediction.clocks import Z90
from latpred.prediction.fallbacks import as_wide_as_gate
from latpred.prediction.predictor import Predictor, untested
from latpred.profile import gpus, store
from latpred.profile.document import ADAPTED, DeviceProfile, DispatchFit
from latpred.query import Options
from latpred.render import WIDTH, Page, Table
from latpred.runtimes.legacy_torch import traced_for
from latpred.sandbox.fingerprint import fingerprint
from latpred.tracing.inputs import precision_name
from latpred.zoo import candidates

SCHEMA = "latpred.adaptation/1"
_MOST_SHOWN = 6
_WORTH_SAYING = 0.02  # factors nearer to 1 are not shown
_WORTH_CHECKING = math.log(1.5)  # errors left out that are larger are told with their row


@dataclass(frozen=True, slots=True)
class Bought:
    """Errors over the measured rows: of the profile as it was, and corrected without the same architecture's rows."""

    before: Errors
    after: Errors


@dataclass(frozen=True, slots=True)
class RuntimeAdaptation:
    """What was done for one runtime."""

    runtime: str
    architectures: int  # how many were measured
    level: str  # how much was corrected: "none" or the likeliest of `LEVELS`
    validated: bool  # whether there were enough architectures to leave one out; else nothing vouches for the correction
    bought: Bought  # over all rows; of no worth where it was not validated
    factors: Factors  # of host costs by class and kernel times by family; "" is for those that no row has
    interval: bool  # whether intervals now follow from the errors left out, where rows waited for the same clock
    furthest: str = ""  # the row that is off by most where its architecture is left out, if by half and more

    @property
    def rows(self) -> int:
        """How many rows were used."""
        return self.bought.before.cells


@dataclass(frozen=True, slots=True)
class Adaptation:
    """A corrected profile with the evidence for it.

    Attributes
    ----------
    profile : DeviceProfile
        `latpred.Predictor(profile)` predicts with it; `latpred.profile.store.save(profile)` keeps it, by its name.
    adapted_from : str
        The profile that it was made from.
    runtimes : tuple[RuntimeAdaptation, ...]
        What was done for each runtime that was measured.
    notes : tuple[str, ...]
        Which rows and columns of the table were not used.
    """

    profile: DeviceProfile = field(repr=False)
    adapted_from: str  # the profile it was made from
    created: str  # ISO 8601, UTC
    runtimes: tuple[RuntimeAdaptation, ...]  # those that were measured; others are as they were
    notes: tuple[str, ...] = ()  # what of the table was not used

    def page(self) -> Page:
        """What it bought, and what is missing."""
        parts: list[Table | str] = [_table(self.runtimes)]
        for each in self.runtimes:
            parts += [f"{each.runtime}: {said}" for said in _sentences(each, self.profile.runtimes[each.runtime])]
        untouched = [name for name in self.profile.runtimes if name not in {each.runtime for each in self.runtimes}]
        if untouched:
            parts.append(f"unchanged, for want of rows: {', '.join(untouched)}")
        parts += self.notes
        title = f"{self.adapted_from} adapted to measured architectures: errors of each, itself left out"
        return Page(title, parts)

    def text(self, width: int = WIDTH) -> str:
        """The page as plain text."""
        return self.page().text(width)

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return self.page().html()

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON can hold it, without the profile."""
        return {
            "schema": SCHEMA,
            "profile": self.profile.name,
            "adapted_from": self.adapted_from,
            "created": self.created,
            "runtimes": [_document(each) for each in self.runtimes],
            "notes": [*self.notes],
        }

    def to_frame(self) -> pd.DataFrame:
        """One row per runtime, with errors before and after."""
        rows = [
            {
                "runtime": each.runtime,
                "level": each.level,
                "architectures": each.architectures,
                "rows": each.rows,
                "median_before": each.bought.before.median,
                "median_after": each.bought.after.median,
                "p90_before": each.bought.before.p90,
                "p90_after": each.bought.after.p90,
            }
            for each in self.runtimes
        ]
        return pd.DataFrame(rows)


def _table(runtimes: Sequence[RuntimeAdaptation]) -> Table:
    """Errors before and after, of runtimes whose architectures were left out."""
    rows = []
    for each in runtimes:
        if each.validated:
            before, after = each.bought.before, each.bought.after
            errors = (f"{error:.1%}" for error in (before.median, after.median, before.p90, after.p90))
            rows.append((each.runtime, str(each.rows), *errors))
    return Table(("runtime", "rows", "median before", "after", "p90 before", "p90 after"), rows)


def _sentences(each: RuntimeAdaptation, fit: DispatchFit) -> Iterator[str]:
    yield f"{counted(each.architectures, 'architecture')}, {counted(each.rows, 'row')}; corrected: {each.level}"
    if each.level == NONE:
        yield "no correction gains more than the noise of these rows; add architectures, or repeat their measurement"
    elif not each.validated:
        yield f"median error {each.bought.before.median:.1%} before the correction; intervals grow by it"
    if each.furthest:
        yield each.furthest
    yield from untested(fit)
    for title, factors in (("host", each.factors.host), ("device", each.factors.kernel)):
        if said := _said(factors):
            yield f"{title} factors: {said}"
    sizes = [one for one in each.factors.size_corrections if abs(one.exponent) >= _WORTH_SAYING]
    if sizes:
        yield "device times go with " + ", ".join(f"{one.of}^{one.exponent:+.2f}" for one in sizes)


def _said(factors: Mapping[str, float]) -> str:
    """The factors furthest from 1."""
    told = sorted(factors.items(), key=lambda item: -abs(item[1] - 1.0))
    told = [(name, factor) for name, factor in told if abs(factor - 1.0) >= _WORTH_SAYING][:_MOST_SHOWN]
    if len({f"{factor:.2f}" for factor in factors.values()}) == 1:
        return f"{told[0][1]:.2f} for all" if told else ""
    return ", ".join(f"{name if name != GENERAL else 'all others'} {factor:.2f}" for name, factor in told)


def _document(each: RuntimeAdaptation) -> dict[str, Any]:
    return {
        **{
            name: getattr(each, name) for name in ("runtime", "architectures", "rows", "level", "validated", "interval")
        },
        "bought": asdict(each.bought),
        "host_factors": dict(each.factors.host),
        "kernel_factors": dict(each.factors.kernel),
        "kernel_tilts": [msgspec.to_builtins(size_correction) for size_correction in each.factors.size_corrections],
    }


MISFITS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16)
ONE_FACTOR = tuple(Level("one factor", 0.0, 0.0, misfit) for misfit in MISFITS)
LEVELS = (
    *ONE_FACTOR,
    *(
        Level("classes and sizes" if sizes else "classes", parts, sizes, misfit)
        for parts in (0.1, 0.3, 1.0)
        for sizes in (0.0, 0.15)
        for misfit in MISFITS
    ),
)
FEWEST = 4  # architectures that a choice by leaving one out takes
FEWEST_FOR_INTERVALS = 8
LEAST_GAIN = 0.001  # in mean log error; less than that is nobody's gain
STANDARD_ERRORS = (0.5, 1.5)  # that one factor, and the mean of all levels, must gain: what moves more has to be surer
MOST_RATIO = 50.0  # measured over predicted, beyond which a unit is wrong rather than a profile
COLUMNS = ("model", "batch", "runtime", "precision", "latency_ms")  # of rows that are plain sequences
_LARGEST_NOISE = 0.5


def adapt(
    profile: DeviceProfile | str | os.PathLike[str],
    measured: Any,
    *,
    graphs: Mapping[GraphKey, ModelGraph] | None = None,
    inputs: Any = None,
    name: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Adaptation:
    """Correct a profile with measured architectures, and say by leaving each out what that bought.

    Host costs and kernel times get factors: one for everything, one for each clock, or one for each host class and
    kernel family, and powers of kernels' sizes too; all are believed to be near 1, and follow the rows more or less
    closely. How free they are and how closely they follow is weighed by how likely that makes the rows. The mean of
    all, or of one factor alone, is taken, whichever errs least on architectures left out, if it gains enough there for
    its freedom; else nothing is changed. A model is one architecture at whatever batches and sizes of its inputs. For
    fewer than four nothing vouches: they move everything by one factor, or by what leaving out each of four sizes
    chooses, and intervals grow by that; rows of one batch say nothing of others. Predictions say so. Runtimes without
    rows stay as they are.

    Parameters
    ----------
    profile : DeviceProfile, str or path
        Of the device that was measured, or of one like it; by name or path as `latpred.predict` takes its device.
    measured : DataFrame, path or iterable
        Columns of a measurement table, of which model, batch and latency_s (or latency_ms) must be there; what
        `latpred.measure` gives of names will do. Or rows (model, batch, runtime, precision, latency_ms). A model is a
        name, a `ModelGraph`, a module, a config or a function that builds one. All but graphs are traced at the size in
        a column seq, audio or image, or at input_size with one of these as input_kind; rows without, at the usual one.
        Ten architectures are plenty. Rows of one cell are repeats, of which the median counts. Rows that say how fast
        the machine was are brought to the profile's usual speed.
    graphs : mapping, optional
        Traced models by `accuracy.predicted.GraphKey`, as a recording holds them; names that are not in it are traced.
    inputs : optional
        What modules are called with, where it does not follow from them.
    name : str, optional
        Of the new profile; default: the old one's with "-adapted".
    progress : callable, optional
        Told in a line what is being traced.

    Raises
    ------
    TableError
        When the rows are not usable.
    UsageError
        When they are of another device, or of another unit by all signs, or the name is a device's.
    ProfileError
        When the profile does not cover their runtime or precision, or the name cannot name one.

    Examples
    --------
    >>> import torch
    >>> from latpred.profile import load
    >>> layers = [torch.nn.Conv2d(3, 64 * n, 3) for n in (1, 2, 3)]
    >>> rows = [(layer, 2, "eager", "fp32", ms) for layer, ms in zip(layers, (26.0, 47.0, 63.0))]
    >>> better = adapt(load("epyc-shared"), rows)
    >>> better.profile.name, better.runtimes[0].level
    ('epyc-shared-adapted', 'one factor')
    """
    if not isinstance(profile, (DeviceProfile, str, os.PathLike)):
        raise UsageError(
            f"{type(profile).__name__} is no profile; give a name, a path or a DeviceProfile, as Predictor.profile."
        )
    profile = profile if isinstance(profile, DeviceProfile) else store.find(profile)
    new_name = f"{profile.name}-adapted" if name is None else name
    store.file_of(new_name)  # a bad name must not cost the traces
    if new_name == profile.name or store.is_live(new_name) or gpus.find(new_name):
        raise UsageError(
            f"{new_name!r} is the name of a device, or of the profile that is corrected. Choose another one."
        )
    predictor = Predictor(profile)
    rows_by_runtime, notes = _read_rows(predictor, measured, graphs or {}, inputs, progress)
    # Of runtimes that were only estimated, those that have rows now are kept.
    runtimes = {**profile.runtimes, **{name: predictor.profile.runtimes[name] for name in rows_by_runtime}}
    # The errors of a failed gate go into the spreads, where errors left out can replace them.
    runtimes = {name: as_wide_as_gate(profile, name, fit) for name, fit in runtimes.items()}
    adapted, records = msgspec.structs.replace(profile, runtimes=runtimes), []
    for runtime, (rows, models) in rows_by_runtime.items():
        adapted, record = _adapt_runtime(predictor, adapted, runtime, rows, models)
        records.append(record)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    protocol = {**profile.protocol, ADAPTED: f"from {profile.name} on {now[:10]}: {'; '.join(map(_sentence, records))}"}
    adapted = msgspec.structs.replace(adapted, name=new_name, protocol=protocol, sha256="")
    return Adaptation(adapted, profile.name, now, tuple(records), notes)


def _adapt_runtime(
    predictor: Predictor, profile: DeviceProfile, runtime: str, rows: list[Row], models: int
) -> tuple[DeviceProfile, RuntimeAdaptation]:
    """The profile with one runtime corrected by its rows, and the evidence for that."""
    predictions = [predictor.predict(row.graph, row.batch, runtime=runtime, protocol=row.protocol) for row in rows]
    host_bound = np.array([prediction.regime == "framework-bound" for prediction in predictions])
    architecture = np.array([row.architecture for row in rows])
    unchanged, chosen = _fits(LatencyModel(predictor, rows, runtime), architecture)
    validated = models >= FEWEST
    if chosen.level != NONE:
        profile = corrected(profile, runtime, chosen.factors)
    widths = _widths(chosen.left_out, architecture, host_bound) if validated else None
    fit = profile.runtimes[runtime]
    host, busy = widths or _widened(fit, chosen, validated=validated)
    # Rows that wait for one clock alone tell nothing of the other.
    told = bool(host_bound.any())
    host = host if told else max(host, fit.spread)
    busy = max(busy, fit.device_spread) if host_bound.all() else busy
    fit = msgspec.structs.replace(
        fit,
        spread=host,
        busy_spread=None if busy == host else busy,
        host_spread=0.0 if told and (widths or chosen.level != NONE) else fit.host_spread,
        untested=0 if validated or chosen.level == NONE else models,
        tested_batches=() if chosen.level == NONE else tuple(sorted({row.batch for row in rows})),
    )
    record = RuntimeAdaptation(
        runtime=runtime,
        architectures=models,
        level=chosen.level,
        validated=validated,
        bought=_bought(unchanged, chosen, architecture),
        factors=chosen.factors,
        interval=widths is not None,
        furthest=_furthest(rows, chosen) if len(np.unique(architecture)) > 1 else "",
    )
    return msgspec.structs.replace(profile, runtimes={**profile.runtimes, runtime: fit}), record


def _fits(model: LatencyModel, architecture: Any) -> tuple[Fit, Fit]:
    """The unchanged profile, and the fit to use, by leaving architectures out where there are enough."""
    unchanged = model.unchanged()
    _demand_unit(unchanged.left_out)
    if len(np.unique(architecture)) < FEWEST:
        return unchanged, model.fit(ONE_FACTOR)
    before = _by_architecture(unchanged, architecture)
    chosen, least = unchanged, before.mean()
    for levels, sureness in zip((ONE_FACTOR, LEVELS), STANDARD_ERRORS, strict=True):
        fit = model.fit(levels)
        after = _by_architecture(fit, architecture)
        gain = before - after
        enough = max(LEAST_GAIN, sureness * float(gain.std(ddof=1)) / math.sqrt(len(gain)))
        if gain.mean() > enough and after.mean() < least:
            chosen, least = fit, after.mean()
    return unchanged, chosen


def _bought(unchanged: Fit, chosen: Fit, architecture: Any) -> Bought:
    models = [str(number) for number in architecture]
    before, after = (metrics.errors(np.exp(-fit.left_out), np.ones(len(models)), models) for fit in (unchanged, chosen))
    return Bought(before, after)


def _furthest(rows: Sequence[Row], chosen: Fit) -> str:
    """What to say of the row that is off by most without its architecture; nothing where none is far off."""
    row, error = max(zip(rows, chosen.left_out.tolist(), strict=True), key=lambda each: abs(each[1]))
    if abs(error) < _WORTH_CHECKING:
        return ""
    expected = "the profile predicts" if chosen.level == NONE else "the others make of it"
    said = f"{row.graph.model} at batch {row.batch} took {math.exp(error):.2g} times what {expected}"
    return f"{said}: check that row, and that all are times of a whole batch"


def _by_architecture(fit: Fit, architecture: Any) -> Floats:
    """Mean absolute error of each architecture, left out."""
    sizes = np.abs(fit.left_out)
    return np.array([sizes[architecture == one].mean() for one in np.unique(architecture)])


def _demand_unit(errors: Floats) -> None:
    ratio = math.exp(float(np.median(errors)))
    if not 1 / MOST_RATIO < ratio < MOST_RATIO:
        raise UsageError(
            f"The rows take {ratio:.3g} times what the profile predicts, in the median: check the unit of their "
            "latencies (latency_s is seconds, latency_ms milliseconds) and that the profile is of their device."
        )


def _widths(errors: Floats, architecture: Any, host_bound: Any) -> tuple[float, float] | None:
    """Spreads where the host sets the pace and where the device does; None where rows are too few to tell.

    They are as narrow as the errors left out vouch for, and no narrower for what so few of them can tell.
    """
    spreads = []
    for rows in (host_bound, ~host_bound, np.ones(len(errors), bool)):
        enough = len(np.unique(architecture[rows])) >= FEWEST_FOR_INTERVALS
        spreads.append(metrics.half_width(errors[rows], architecture[rows]) / Z90 if enough else None)
    host, device, both = spreads
    if both is None:
        return None
    return (host, device) if host is not None and device is not None else (both, both)


def _widened(fit: DispatchFit, chosen: Fit, *, validated: bool) -> tuple[float, float]:
    """Spreads from too few rows to tell them from: those of before, made as wide as what speaks against them.

    That is the largest error left out. Without any, it is the correction itself, as it may be of no good at all.
    """
    host, busy = fit.spread, fit.device_spread
    if validated:
        least = float(np.abs(chosen.left_out).max()) / Z90
        return max(host, least), max(busy, least)
    factors = (*chosen.factors.host.values(), *chosen.factors.kernel.values())
    sigma = max((abs(math.log(factor)) for factor in factors), default=0.0) / Z90
    return math.hypot(host, sigma), math.hypot(busy, sigma)


def _sentence(record: RuntimeAdaptation) -> str:
    before, after = (errors.median for errors in (record.bought.before, record.bought.after))
    rows = f"{counted(record.rows, 'row')} of {counted(record.architectures, 'architecture')}"
    said = f"{record.runtime} by {rows}, corrected {record.level}, "
    if not record.validated:
        return f"{said}median error before {before:.1%}; too few to leave one out, nothing vouches for it"
    return f"{said}median error left out {before:.1%} -> {after:.1%}"


def _read_rows(
    predictor: Predictor,
    measured: Any,
    graphs: Mapping[GraphKey, ModelGraph],
    inputs: Any,
    progress: Callable[[str], None] | None,
) -> tuple[dict[str, tuple[list[Row], int]], tuple[str, ...]]:
    """Measured forward passes by runtime, and of how many models, and what was left out; see `adapt`."""
    frame, live = _named(_frame(measured))
    device = predictor.profile.device.name
    cells = tables.check(tables.complete(frame, {"device": device}), tables.MEASURED)
    names = gpus.one_name_each([device, *cells["device"].unique()])
    # Within a run, too: repeats that count as rows of their own make a correction look surer than it is.
    runs = [str(number) for number in range(len(cells))]
    cells = tables.merge_repeats(cells.assign(device=cells["device"].map(names), run=runs))
    notes = tables.unused(frame, cells)
    cells = cells[tables.timed(cells)]
    if cells.empty:
        raise TableError("; ".join(["The table holds no measured row", *notes]) + ". Give model, batch and latency_s.")
    others = sorted(set(cells["device"]) - {device})
    if others:
        raise UsageError(
            f"The table has rows of {', '.join(others)}, the profile is of {device}. Keep the rows of one device and "
            "adapt its own profile; if they are the same device, name it so in the column device."
        )
    for runtime, precision in dict.fromkeys(zip(cells["runtime"], cells["precision"], strict=True)):
        predictor.check(str(runtime), str(precision))
    traced = _traced(predictor, cells, graphs, live, inputs, progress)
    rows_by_runtime: dict[str, tuple[list[Row], int]] = {}
    for runtime, group in cells.groupby("runtime", sort=False):
        sized, models = ["model", "input_kind", "input_size"], group["model"].nunique()
        # Sizes of few models choose a correction, though they vouch for no other model.
        architecture = group.groupby(sized if models < FEWEST else "model", sort=False).ngroup()
        rows: list[Row] = []
        rows_by_runtime[str(runtime)] = rows, models
        for number, cell in zip(architecture, group.to_dict("records"), strict=True):
            graph = graph_of(traced, graph_key(cell))
            assert graph is not None  # `_traced` made all of them
            latency_us = float(cell["latency_s"]) * 1e6 / _slower(predictor, graph, cell)
            rows.append(Row(number, graph, int(cell["batch"]), str(cell["protocol"]), latency_us, _noise(cell)))
    return rows_by_runtime, tuple(notes)


def _slower(predictor: Predictor, graph: ModelGraph, cell: Mapping[Any, Any]) -> float:
    """How many times longer a row took, by the speed of the machine then, than at the profile's usual speed.

    A row that does not say counts as measured at that.
    """
    at = predictor.at(slowdown_of(cell, predictor.profile))
    usual, then = (
        one.predict(graph, int(cell["batch"]), runtime=str(cell["runtime"]), protocol=str(cell["protocol"]))
        for one in (predictor, at)
    )
    return then.latency_ms / usual.latency_ms


def _frame(measured: Any) -> pd.DataFrame:
    if isinstance(measured, (pd.DataFrame, str, os.PathLike)):
        frame = tables.load(measured)
    elif isinstance(measured, Iterable):
        rows = [row if isinstance(row, Mapping) else _row(row, number) for number, row in enumerate(measured, 1)]
        frame = pd.DataFrame(rows)
    else:
        raise UsageError(f"{type(measured).__name__} is no table; give a DataFrame, a CSV file or a list of rows.")
    frame = tables.in_lower_case(frame)
    return frame if "device" in frame.columns else frame.rename(columns={"gpu": "device"})


def _row(row: Any, number: int) -> dict[str, Any]:
    sized = hasattr(row, "__len__") and not isinstance(row, str)
    if not sized or len(row) != len(COLUMNS):
        found = f"has {counted(len(row), 'value')}" if sized else f"is {row!r}"
        raise TableError(f"Row {number} {found}. Give ({', '.join(COLUMNS)}), or a mapping with these names.")
    return dict(zip(COLUMNS, row, strict=True))


def _named(frame: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The table with names in place of live models, and those models by name; what nothing tells apart is one."""
    if "model" not in frame.columns or all(isinstance(model, str) for model in frame["model"]):
        return frame, {}
    names: dict[int, str] = {}  # of each object
    alike: dict[str | int, str] = {}
    live: dict[str, Any] = {}
    for model in frame["model"]:
        if isinstance(model, str) or id(model) in names:
            continue
        own = fingerprint(model) or id(model)
        if own not in alike:
            alike[own] = f"{candidates.title(model)} #{len(alike)}"
            live[alike[own]] = model
        names[id(model)] = alike[own]
    out = frame.assign(model=[names.get(id(model), model) for model in frame["model"]])
    precisions = {name: _own_precision(model) for name, model in live.items()}
    usual = pd.Series([precisions.get(name, tables.DEFAULTS["precision"]) for name in out["model"]], out.index, object)
    given = out["precision"].astype(object) if "precision" in out else usual
    out["precision"] = given.where(given.notna(), usual)
    if "memory_format" not in out:
        formats = {name: model.memory_format for name, model in live.items() if isinstance(model, ModelGraph)}
        out["memory_format"] = [formats.get(name, CONTIGUOUS) for name in out["model"]]
    return out, live


def _own_precision(model: Any) -> str:
    """The precision of a graph or a module, as `latpred.predict` takes it; the default of what is yet to be built."""
    if isinstance(model, ModelGraph):
        return model.precision
    tensors = (*model.parameters(), *model.buffers()) if hasattr(model, "parameters") else ()
    formats = (tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point)
    return next(map(precision_name, formats), str(tables.DEFAULTS["precision"]))


def _traced(
    predictor: Predictor,
    cells: pd.DataFrame,
    graphs: Mapping[GraphKey, ModelGraph],
    live: Mapping[str, Any],
    inputs: Any,
    progress: Callable[[str], None] | None,
) -> Mapping[GraphKey, ModelGraph]:
    """The graphs that were given, and those of the models and names that these lack."""
    traced = dict(graphs)
    with traced_for(predictor.era):
        asked = batches_of(graph_keys(cells), cells["batch"])
        for key, sizes in asked.items():
            if key.model in live and key not in traced:
                model = candidates.traceable(live[key.model])
                options = _options_of_graph(key, model) if isinstance(model, ModelGraph) else options_of(key, inputs)
                traced[key] = predictor.trace(model, options, sizes)
        untraced = {key: sizes for key, sizes in asked.items() if graph_of(traced, key) is None}
        try:
            return traced | trace_models(untraced, predictor.target, progress)
        except UnknownModelError as error:
            raise UnknownModelError(
                f"{str(error).rstrip('.')}. Models without a name go into the column model themselves: in Python "
                "table.assign(model=table.model.map(models)), with the mapping that was measured."
            ) from error


def _options_of_graph(key: GraphKey, graph: ModelGraph) -> Options:
    """What rows say of a graph that came with them; a TableError where it was traced at another size."""
    if key.input_size not in (0, graph.input_size):
        raise TableError(
            f"Rows of {key.model} have the input_size {key.input_size}, and its graph was traced at "
            f"{graph.input_size or 'inputs of its own'}. Give each size its own graph, or 0 as input_size."
        )
    return Options(precision=key.precision, memory_format=key.memory_format, attention=key.attention or None)


def _noise(cell: Mapping[Any, Any]) -> float:
    """Standard deviation of the log of a measurement, as far as it was repeated; 0 where nothing is said."""
    log_std = float(cell["spread_s"]) / float(cell["latency_s"])
    ratio = float(cell.get("repeat_ratio", math.nan))
    estimates = [value for value in (log_std, math.log(ratio) / 2 if ratio >= 1 else math.nan) if math.isfinite(value)]
    return min(max(estimates, default=0.0), _LARGEST_NOISE)
