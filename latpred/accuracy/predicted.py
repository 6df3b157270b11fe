"""Predict every cell of a table with one profile, from graphs that were traced before or are traced now.

Gives predicted tables (`latpred.tables.PREDICTED`), which `latpred.accuracy.comparison` holds against measurements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from latpred import host, tables
from latpred.errors import LatpredError, TableError
from latpred.graph.graph import ModelGraph
from latpred.prediction.predictor import Predictor
from latpred.profile.document import DeviceProfile
from latpred.query import ERA, Options
from latpred.render import listed
from latpred.runtimes import graph_store, lowering

_SHOWN = 8  # models that are named of those left out
Key = TypeVar("Key", bound=Hashable)


class GraphKey(NamedTuple):
    """What a traced model is found by; all precisions that compute in one dtype have traces of their own."""

    model: str
    input_kind: str
    input_size: int
    precision: str
    runtime: str = "eager"  # whose trace it is
    memory_format: str = "contiguous"
    attention: str = ""  # as the model has it, unless the table says otherwise
    era: str = ""  # of the PyTorch that ran it, as `runtimes.legacy_torch` names it; "" for the one that is installed


def graph_key(cell: Mapping[Any, Any]) -> GraphKey:
    """The key of the traced model that a row of a table needs."""
    return GraphKey(
        model=str(cell["model"]),
        input_kind=str(cell["input_kind"]),
        input_size=int(cell["input_size"]),
        precision=str(cell["precision"]),
        runtime=lowering.traced_by(str(cell["runtime"])),
        memory_format=str(cell.get("memory_format") or "contiguous"),
        attention=str(cell.get("attention") or ""),
    )


def graph_keys(cells: pd.DataFrame) -> list[GraphKey]:
    """The keys of the traced models that the rows of a table need."""
    return [graph_key(cell) for cell in cells.to_dict("records")]


def graph_of(graphs: Mapping[GraphKey, ModelGraph], key: GraphKey) -> ModelGraph | None:
    """The traced model of a key: that of its runtime, else eager's, from which the runtime can be estimated."""
    return graphs.get(key) or graphs.get(key._replace(runtime="eager"))


def predict_table(cells: pd.DataFrame, graphs: Mapping[GraphKey, ModelGraph], profile: DeviceProfile) -> pd.DataFrame:
    """One predicted row for each row of a table that was measured, with the profile's own machine and device.

    A model without a graph is a TableError.
    """
    predictor = Predictor(profile)
    speed_known = bool(host.ratio(profile.speed, tables.speed_of(cells)))
    rows: list[dict[str, Any]] = []
    for cell in cells[tables.timed(cells)].to_dict("records"):
        key = graph_key(cell)
        graph = graph_of(graphs, key)
        if graph is None:
            raise TableError(
                f"No graph for {key.model} at {key.input_kind} {key.input_size}, {key.precision}. "
                "Trace it, or use the recording that came with the table."
            )
        batch = int(cell["batch"])
        options: dict[str, Any] = {"runtime": str(cell["runtime"]), "protocol": str(cell["protocol"])}
        prediction = predictor.predict(graph, batch, **options)
        row = {
            **{name: cell[name] for name in (*tables.KEYS, *tables.FURTHER_KEYS) if name in cell},
            "machine": tables.machine_name(profile.machine),
            "device": profile.device.name,
            **tables.seconds(prediction),
            "regime": prediction.regime,
            "macs": graph.macs(batch),
            "bytes": graph.bytes(batch),
            "launches": graph.launches(batch),
        }
        if speed_known:
            slower = predictor.at(slowdown_of(cell, profile))
            row[tables.AT_SPEED] = slower.predict(graph, batch, **options).latency_ms / 1e3
        rows.append(row)
    return tables.check(pd.DataFrame(rows, columns=None if rows else [*tables.PREDICTED.required]), tables.PREDICTED)


def slowdown_of(cell: Mapping[Hashable, Any], profile: DeviceProfile) -> host.Slowdown:
    """How much slower the machine was for a cell than when the profile was measured, to two digits.

    A cell that does not say counts as measured in a usual moment.
    """
    speed = {kind: float(cell.get(host.COLUMN.format(kind)) or math.nan) for kind in host.KINDS}
    if not host.ratio(profile.speed, speed):
        return host.Slowdown.usual(profile.usual)
    ratios = host.slowdown(profile.speed, speed, asynchronous=profile.device.asynchronous)
    return host.Slowdown(*(round(ratio, 2) for ratio in ratios))


def batches_of(keys: Iterable[Key], batches: Iterable[int]) -> dict[Key, tuple[int, ...]]:
    """The batch sizes that each key is asked for, from those of rows; keys are in order of appearance.

    >>> batches_of(["bert", "vit", "bert"], [8, 1, 1])
    {'bert': (1, 8), 'vit': (1,)}
    """
    sizes: dict[Key, set[int]] = {}
    for key, batch in zip(keys, batches, strict=True):
        sizes.setdefault(key, set()).add(int(batch))
    return {key: tuple(sorted(asked)) for key, asked in sizes.items()}


def trace_models(
    asked: Mapping[GraphKey, Sequence[int]],
    target: str,
    progress: Callable[[str], None] | None = None,
    failed: MutableMapping[GraphKey, LatpredError] | None = None,
    *,
    keep: bool = False,
) -> dict[GraphKey, ModelGraph]:
    """Trace models by name for a kind of device, each for the batch sizes that it is asked for.

    What cannot be traced is put into `failed` with its error; without `failed` it ends everything. `keep` reads and
    writes eager traces as `graph_store.trace_by_name` does, for processes in which nobody patches PyTorch.
    """
    graphs: dict[GraphKey, ModelGraph] = {}
    for key, batches in asked.items():
        before = None if progress is None else partial(progress, f"tracing {key.model} for {key.runtime}")
        try:
            options: dict[str, Any] = {"target": target, "batches": batches, **options_of(key).tracing}
            if keep and key.runtime == "eager":
                graphs[key] = graph_store.trace_by_name(key.model, ERA.get(), before=before, **options)
            else:
                if before is not None:
                    before()
                graphs[key] = lowering.trace_for_runtime(key.model, runtime=key.runtime, **options)
        except LatpredError as error:
            if failed is None:
                raise
            failed[key] = error
    return graphs


def options_of(key: GraphKey, inputs: Any = None) -> Options:
    """What a trace is asked for; a TableError where no trace of one forward pass is what the table is about."""
    kind, size = key.input_kind, key.input_size or None
    if kind.startswith("prompt+"):
        raise TableError(
            f"Rows of {key.model} have the input_kind {kind}: they measure a generation, not one forward pass. Leave "
            "them out, or compare them with what latpred.predict_generation gives."
        )
    if size is not None and kind not in tables.SIZED:
        raise TableError(
            f"Rows of {key.model} have the input_size {size} with the input_kind {kind}, which does not say of what. "
            f"Put one of {', '.join(tables.SIZED)} into the column input_kind, or 0 into input_size for the usual size."
        )
    return Options(
        inputs,
        runtime=key.runtime,
        seq=size if key.input_kind in ("seq", "audio") else None,
        image=size if key.input_kind == "image" else None,
        precision=key.precision,
        memory_format=key.memory_format,
        attention=key.attention or None,
    )


def refusals(cells: pd.DataFrame, predictor: Predictor) -> list[LatpredError | None]:
    """Why a profile predicts nothing in the runtime and the precision of each row; None where it does."""
    setups = list(zip(cells["runtime"], cells["precision"], strict=True))
    errors: dict[tuple[str, str], LatpredError | None] = dict.fromkeys(setups)
    for setup in errors:
        try:
            predictor.check(*setup)
        except LatpredError as error:
            errors[setup] = error
    return [errors[setup] for setup in setups]


def answered(cells: pd.DataFrame, predictor: Predictor) -> tuple[pd.DataFrame, list[str]]:
    """The rows in runtimes and precisions that a profile has, and sentences on the others; an error if it has none."""
    errors = refusals(cells, predictor)
    out, notes = left_out(cells["model"], errors)
    if len(cells) and out.all():
        raise next(filter(None, errors))
    return cells[~out], notes


def left_out(
    models: Iterable[str], errors: Sequence[LatpredError | None], of: str = ""
) -> tuple[NDArray[np.bool_], list[str]]:
    """Which rows have an error, and sentences on them by what it says, from the model of each row.

    The sentences name what they are `of`, if anything.
    """
    table = pd.DataFrame({"model": list(models), "reason": [f"{of}{error}" if error else "" for error in errors]})
    out = (table["reason"] != "").to_numpy(bool)
    notes = []
    for reason, rows in table[out].groupby("reason", sort=False)["model"]:
        names = rows.unique().tolist()
        counts = f"{counted(len(rows), 'row')} of {counted(len(names), 'model')}"
        are = "is" if len(rows) == 1 else "are"
        notes.append(f"{counts} {are} left out ({listed(names, _SHOWN)}): {str(reason).removesuffix('.')}.")
    return out, notes


def untraced(
    models: Iterable[str], keys: Iterable[Key], failed: Mapping[Key, LatpredError]
) -> tuple[NDArray[np.bool_], list[str]]:
    """Which rows cannot be traced, and sentences on them; an error as the first where that is all."""
    errors = [failed.get(key) for key in keys]
    out, notes = left_out(models, errors)
    if out.all():
        first = next(filter(None, errors))
        raise type(first)(f"none of the table's models can be traced: {first}")
    return out, notes


def counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
