"""Predict every cell of a table with one profile, from graphs that were walked before or are traced now.

Gives predicted tables (`latpred.tables.PREDICTED`), which `latpred.accuracy.comparison` holds against measurements.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from latpred import host, tables
from latpred.errors import MissingPackageError, TableError, UsageError
from latpred.fit.corrections import Row
from latpred.graph.graph import ModelGraph
from latpred.prediction.predictor import Predictor
from latpred.runtimes import lowering
from latpred.runtimes.legacy_torch import attention_of

if TYPE_CHECKING:
    from latpred.profile.document import DeviceProfile


class GraphKey(NamedTuple):
    """What a walked model is found by; all precisions that compute in one dtype have walks of their own."""

    model: str
    input_kind: str
    input_size: int
    precision: str
    runtime: str = "eager"  # whose walk it is


def predict_table(
    cells: pd.DataFrame, graphs: Mapping[GraphKey, ModelGraph], profile: DeviceProfile, *, inputs_on: str = "device"
) -> pd.DataFrame:
    """One predicted row for each row of a table, with the same keys but the profile's own machine and device.

    Parameters
    ----------
    cells : DataFrame
        A checked table; only its keys are read, and rows that could not be measured are left out.
    graphs : mapping
        A walked model for each (model, input_kind, input_size, precision) and runtime of the table.
    profile : DeviceProfile
        What to predict with.
    inputs_on : str
        "device", or "host" to add the copy of the inputs.

    Raises
    ------
    TableError
        When a model of the table has no graph.
    """
    from latpred.prediction.predictor import Predictor

    predictor, slowed = Predictor(profile), _at_speed_of(cells, profile)
    wanted = cells[cells["status"] == tables.OK] if "status" in cells else cells
    rows: list[dict[str, Any]] = []
    for cell in wanted.to_dict("records"):
        graph = _graph(graphs, cell)
        batch = int(cell["batch"])
        asked: dict[str, Any] = {"runtime": str(cell["runtime"]), "protocol": str(cell["protocol"])}
        prediction = predictor.predict(graph, batch, **asked, inputs_on=inputs_on)
        then = None if slowed is None else slowed.predict(graph, batch, **asked, inputs_on=inputs_on)
        slow = float(cell.get(host.SLOWED, 1.0))
        slow = slow if slow > 1.0 else 1.0  # not a number where nobody looked
        rows.append(
            {
                **{name: cell[name] for name in tables.KEYS},
                "machine": tables.machine_name(profile.machine),
                "device": profile.device.name,
                "latency_s": prediction.latency_ms / 1e3,
                "low_s": prediction.interval_ms[0] / 1e3,
                "high_s": prediction.interval_ms[1] / 1e3,
                "overhead_s": prediction.overhead_ms / 1e3,
                "compute_s": prediction.compute_ms / 1e3,
                "regime": prediction.regime,
                "macs": graph.macs(batch),
                "bytes": graph.bytes(batch),
                "launches": graph.launches(batch),
                **({} if then is None else {tables.AT_SPEED: then.latency_ms / 1e3 * slow**host.SLOWED_POWER}),
            }
        )
    unsaid = {"run", "stack", *(() if slowed is not None else (tables.AT_SPEED,))}
    columns = [*tables.PREDICTED.required, *(c for c in tables.PREDICTED.optional if c not in unsaid)]
    return tables.check(pd.DataFrame(rows, columns=columns), tables.PREDICTED)


def _at_speed_of(cells: pd.DataFrame, profile: DeviceProfile) -> Predictor | None:
    """A predictor at the speed that the machine had while a table was measured; None where nobody says."""
    from latpred.prediction.predictor import Predictor

    now = tables.speed_of(cells)
    if not host.ratio(profile.speed, now):
        return None
    return Predictor(profile, slowdown=host.slowdown(profile.speed, now, asynchronous=profile.device.asynchronous))


def trace_models(
    cells: pd.DataFrame,
    graphs: MutableMapping[GraphKey, ModelGraph],
    progress: Callable[[str], None] | None = None,
    target: str = "cpu",
    lacking: MutableMapping[GraphKey, str] | None = None,
) -> MutableMapping[GraphKey, ModelGraph]:
    """Walk, by name, every model of a table that `graphs` lacks, and add it there.

    A model that lacks a package is put into `lacking` with the reason; without `lacking` it ends everything.

    Raises
    ------
    MissingPackageError
        When a model, or a runtime's walk of it, needs a package that is not there or cannot be imported.
    UnknownModelError
        When the name of a model means nothing to latpred.
    TraceError
        When a model cannot be walked.
    """
    from latpred.runtimes.lowering import trace_for_runtime

    for key in dict.fromkeys(graph_key(cell) for cell in cells.to_dict("records")):
        if key in graphs:
            continue
        if progress is not None:
            progress(f"tracing {key.model}")
        size = key.input_size or None
        try:
            graphs[key] = trace_for_runtime(
                key.model,
                runtime=key.runtime,
                target=target,
                seq=size if key.input_kind == "seq" else None,
                image=size if key.input_kind == "image" else None,
                precision=key.precision,
            )
        except MissingPackageError as error:
            if lacking is None:
                raise
            lacking[key] = str(error)
    return graphs


def left_out(models: Sequence[str], reasons: Sequence[str]) -> tuple[str, ...]:
    """Sentences on rows that were left out, one for each reason, from the model and the reason of each row.

    >>> left_out(["a", "a", "b"], ["there is no c"] * 3)
    ('3 rows of 2 models are left out (a, b): there is no c.',)
    """
    found: dict[str, list[str]] = {}
    for model, reason in zip(models, reasons, strict=True):
        found.setdefault(reason, []).append(model)
    return tuple(
        f"{_counted(len(rows), 'row')} of {_counted(len(set(rows)), 'model')} are left out "
        f"({', '.join(dict.fromkeys(rows))}): {reason.removesuffix('.')}."
        for reason, rows in found.items()
    )


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def graph_key(cell: Mapping[Any, Any]) -> GraphKey:
    """The key of the walked model that a row of a table needs."""
    from latpred.runtimes.lowering import traced_by

    return GraphKey(
        str(cell["model"]),
        str(cell["input_kind"]),
        int(cell["input_size"]),
        str(cell["precision"]),
        traced_by(str(cell["runtime"])),
    )


def graph_of(graphs: Mapping[GraphKey, ModelGraph], cell: Mapping[Any, Any]) -> ModelGraph | None:
    """The walked model of a row: that of its runtime, else the eager walk, from which the runtime can be estimated."""
    key = graph_key(cell)
    return graphs.get(key) or graphs.get(key._replace(runtime="eager"))


def _graph(graphs: Mapping[GraphKey, ModelGraph], cell: Mapping[Any, Any]) -> ModelGraph:
    found = graph_of(graphs, cell)
    if found is None:
        key = graph_key(cell)
        raise TableError(
            f"No graph for {key.model} at {key.input_kind} {key.input_size}, {key.precision}. "
            "Trace it, or use the recording that came with the table."
        )
    return found


COLUMNS = ("model", "batch", "runtime", "precision", "latency_ms")  # of rows that are plain sequences
_LARGEST_NOISE = 0.5


def read_rows(
    predictor: Predictor,
    measured: Any,
    graphs: Mapping[GraphKey, ModelGraph],
    inputs: Any,
    progress: Callable[[str], None] | None,
) -> dict[str, list[Row]]:
    """Rows by runtime; see `latpred.adapt` for what they may be given as."""
    frame, live = _named(_frame(measured))
    cells = tables.complete(frame, {"device": predictor.profile.device.name})
    cells = tables.merge_repeats(tables.check(cells, tables.MEASURED))
    cells = cells[cells["status"] == tables.OK] if "status" in cells else cells
    if cells.empty:
        raise TableError("The table holds no measured row. Give rows with model, batch and latency_s.")
    _demand_device(cells, predictor)
    for runtime, precision in dict.fromkeys(zip(cells["runtime"], cells["precision"], strict=True)):
        predictor.check(str(runtime), str(precision))
    walked = _walked(predictor, cells, graphs, live, inputs, progress)
    return _rows(cells, walked)


def _frame(measured: Any) -> pd.DataFrame:
    if isinstance(measured, (pd.DataFrame, str, os.PathLike)):
        frame = tables.load(measured)
    elif isinstance(measured, Iterable):
        rows = [row if isinstance(row, Mapping) else _row(row, number) for number, row in enumerate(measured, 1)]
        frame = pd.DataFrame(rows)
    else:
        raise UsageError(f"{type(measured).__name__} is no table; give a DataFrame, a CSV file or a list of rows.")
    if "latency_ms" in frame.columns:
        if "latency_s" in frame.columns:
            raise TableError("The table has both latency_s and latency_ms. Keep one of them.")
        frame = frame.rename(columns={"latency_ms": "latency_s"})
        frame["latency_s"] = pd.to_numeric(frame["latency_s"], errors="coerce") / 1e3
    return frame


def _row(row: Any, number: int) -> dict[str, Any]:
    if isinstance(row, str) or not hasattr(row, "__len__") or len(row) != len(COLUMNS):
        raise TableError(f"Row {number} is {row!r}. Give ({', '.join(COLUMNS)}), or a mapping with these names.")
    return dict(zip(COLUMNS, row, strict=True))


def _named(frame: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The table with names in place of live models, and those models by name; one object is one architecture."""
    if "model" not in frame.columns or all(isinstance(model, str) for model in frame["model"]):
        return frame, {}
    from latpred.zoo import candidates

    names: dict[int, str] = {}
    live: dict[str, Any] = {}
    for model in frame["model"]:
        if not isinstance(model, str) and id(model) not in names:
            name = names[id(model)] = f"{candidates.title(model)} #{len(names)}"
            live[name] = model
    out = frame.assign(model=[names.get(id(model), model) for model in frame["model"]])
    graphs = {name: model.precision for name, model in live.items() if isinstance(model, ModelGraph)}
    if graphs and "precision" not in out:
        out["precision"] = [graphs.get(name, tables.DEFAULTS["precision"]) for name in out["model"]]
    return out, live


def _demand_device(cells: pd.DataFrame, predictor: Predictor) -> None:
    own = predictor.profile.device.name
    others = sorted(set(cells["device"]) - {own})
    if others:
        raise UsageError(
            f"The table has rows of {', '.join(others)}, the profile is of {own}. Keep the rows of one device and "
            "adapt its own profile; if they are the same device, name it so in the column device."
        )


def _walked(
    predictor: Predictor,
    cells: pd.DataFrame,
    graphs: Mapping[GraphKey, ModelGraph],
    live: Mapping[str, Any],
    inputs: Any,
    progress: Callable[[str], None] | None,
) -> Mapping[GraphKey, ModelGraph]:
    from latpred.zoo import candidates
    from latpred.zoo.names import attention

    found = dict(graphs)
    target = lowering.target_of(predictor.profile.device.kind)
    with attention(attention_of(predictor.profile.protocol.get("era", ""))):
        batches: dict[GraphKey, list[int]] = {}
        for cell in cells.to_dict("records"):
            batches.setdefault(graph_key(cell), []).append(int(cell["batch"]))
        for key, sizes in batches.items():
            if key.model not in live or key in found:
                continue
            model = candidates.traceable(live[key.model])
            if not isinstance(model, ModelGraph):
                model = lowering.trace_for_runtime(
                    model, inputs, runtime=key.runtime, target=target, precision=key.precision, batches=sizes
                )
            found[key] = model
        wanted = cells[[graph_of(found, cell) is None for cell in cells.to_dict("records")]]
        return trace_models(wanted, found, progress, target)


def _rows(cells: pd.DataFrame, graphs: Mapping[GraphKey, ModelGraph]) -> dict[str, list[Row]]:
    rows: dict[str, list[Row]] = {}
    numbers: dict[tuple[Any, ...], int] = {}
    for cell in cells.to_dict("records"):
        graph = graph_of(graphs, cell)
        assert graph is not None  # `_walked` made all of them
        own = rows.setdefault(str(cell["runtime"]), [])
        which = (cell["runtime"], cell["model"], cell["input_kind"], cell["input_size"])
        number = numbers.setdefault(which, sum(other[0] == which[0] for other in numbers))
        latency_s, protocol = float(cell["latency_s"]), str(cell["protocol"])
        own.append(Row(number, graph, int(cell["batch"]), protocol, latency_s * 1e6, _noise(cell)))
    return rows


def _noise(cell: Mapping[Any, Any]) -> float:
    """Standard deviation of the log of a measurement, as far as it was repeated; 0 where nothing is said."""
    spread = float(cell["spread_s"]) / float(cell["latency_s"])
    ratio = float(cell.get("repeat_ratio", math.nan))
    known = [value for value in (spread, math.log(ratio) / 2 if ratio >= 1 else math.nan) if math.isfinite(value)]
    return min(max(known, default=0.0), _LARGEST_NOISE)
