"""Measured rows as users have them, in tables or lists, of names or live models, brought to walked forward passes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pandas as pd

from latpred import tables
from latpred.corrections import Row
from latpred.eras import attention_of
from latpred.errors import TableError, UsageError
from latpred.graph import ModelGraph
from latpred.predicted import GraphKey, graph_key, graph_of, trace_models
from latpred.predictor import Predictor
from latpred.runtimes import walking

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
    from latpred.tracing import candidates

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
    from latpred.tracing import candidates
    from latpred.tracing.names import attention

    found = dict(graphs)
    target = walking.target_of(predictor.profile.device.kind)
    with attention(attention_of(predictor.profile.protocol.get("era", ""))):
        batches: dict[GraphKey, list[int]] = {}
        for cell in cells.to_dict("records"):
            batches.setdefault(graph_key(cell), []).append(int(cell["batch"]))
        for key, sizes in batches.items():
            if key.model not in live or key in found:
                continue
            model = candidates.walkable(live[key.model])
            if not isinstance(model, ModelGraph):
                model = walking.walk(
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
