"""Predict every cell of a table with one profile, from graphs that were walked before or are traced now.

Gives predicted tables (`latpred.tables.PREDICTED`), which `latpred.accuracy` holds against measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from latpred import speed, tables
from latpred.errors import MissingPackageError, TableError

if TYPE_CHECKING:
    from latpred.graph import ModelGraph
    from latpred.predictor import Predictor
    from latpred.profile import DeviceProfile


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
    from latpred.predictor import Predictor

    predictor, slowed = Predictor(profile), _at_speed_of(cells, profile)
    wanted = cells[cells["status"] == tables.OK] if "status" in cells else cells
    rows: list[dict[str, Any]] = []
    for cell in wanted.to_dict("records"):
        graph = _graph(graphs, cell)
        batch = int(cell["batch"])
        asked: dict[str, Any] = {"runtime": str(cell["runtime"]), "protocol": str(cell["protocol"])}
        prediction = predictor.predict(graph, batch, **asked, inputs_on=inputs_on)
        then = None if slowed is None else slowed.predict(graph, batch, **asked, inputs_on=inputs_on)
        slow = float(cell.get(speed.SLOWED, 1.0))
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
                **({} if then is None else {tables.AT_SPEED: then.latency_ms / 1e3 * slow**speed.SLOWED_POWER}),
            }
        )
    unsaid = {"run", "stack", *(() if slowed is not None else (tables.AT_SPEED,))}
    columns = [*tables.PREDICTED.required, *(c for c in tables.PREDICTED.optional if c not in unsaid)]
    return tables.check(pd.DataFrame(rows, columns=columns), tables.PREDICTED)


def _at_speed_of(cells: pd.DataFrame, profile: DeviceProfile) -> Predictor | None:
    """A predictor at the speed that the machine had while a table was measured; None where nobody says."""
    from latpred.predictor import Predictor

    now = tables.speed_of(cells)
    if not speed.ratio(profile.speed, now):
        return None
    return Predictor(profile, slowdown=speed.slowdown(profile.speed, now, asynchronous=profile.device.asynchronous))


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
    from latpred.runtimes.walking import walk

    for key in dict.fromkeys(graph_key(cell) for cell in cells.to_dict("records")):
        if key in graphs:
            continue
        if progress is not None:
            progress(f"tracing {key.model}")
        size = key.input_size or None
        try:
            graphs[key] = walk(
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
    from latpred.runtimes.walking import walked_by

    return GraphKey(
        str(cell["model"]),
        str(cell["input_kind"]),
        int(cell["input_size"]),
        str(cell["precision"]),
        walked_by(str(cell["runtime"])),
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
