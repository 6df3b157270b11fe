"""Measurement and predicted tables: their columns, what may stand in them, CSV in and out, and how two of them join.

A table is a pandas DataFrame with one row per cell (a model at a batch size in a runtime). This module knows columns
and keys; it neither measures (`calibration.measurement.whole_models`) nor judges (`accuracy.comparison`).
"""

from __future__ import annotations

import difflib
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from latpred import storage
from latpred.errors import TableError
from latpred.host import COLUMN, KINDS, SLOWED

if TYPE_CHECKING:
    from latpred.profile.document import Machine

Kind = Literal["text", "count", "number"]
Source = pd.DataFrame | str | os.PathLike[str]

KEYS = ("machine", "device", "runtime", "precision", "model", "batch", "input_kind", "input_size", "protocol")
"""What identifies a cell. Two tables join on all of them, but for `machine` where it says so (see `join`)."""

FURTHER_KEYS = ("memory_format", "attention")  # which tell cells apart too, where a table has them
CURVE_KEYS = tuple(key for key in (*KEYS, *FURTHER_KEYS) if key != "batch")
BASELINE_PREFIX = "baseline_"
NOTE_PREFIX = "x_"
SOURCE = "x_source"  # where a row comes from, as of several tables read as one
REPEATS = "x_repeats"  # how many rows a row is the median of; "" where it is one of the table's own
AT_SPEED = "at_speed_s"  # a prediction for the speed that the machine had while a table was measured
OK = "ok"
_PREDICTED = "It is a predicted one; give one of latpred measure."
SIZED = ("seq", "audio", "image")  # input kinds whose size a trace can be asked for
MOST_COUNT = 2**53  # from which on a float skips whole numbers


@dataclass(frozen=True, slots=True)
class Column:
    """One column: what stands in it, whether it may be empty, and the least value that makes sense."""

    kind: Kind
    empty: bool = False
    least: float = 0.0
    exclusive: bool = False


_TEXT, _COUNT, _SECONDS = Column("text"), Column("count"), Column("number", exclusive=True)
_NUMBER_OR_EMPTY, _RATIO_OR_EMPTY = Column("number", empty=True), Column("number", empty=True, least=1.0)
_KEY_COLUMNS = dict.fromkeys(KEYS, _TEXT) | {"batch": Column("count", least=1), "input_size": _COUNT}
_CLOCK_COLUMNS = {"overhead_s": _NUMBER_OR_EMPTY, "compute_s": _NUMBER_OR_EMPTY, "regime": _TEXT}
_SETUP_COLUMNS = {
    "memory_format": _TEXT,  # "contiguous" or "channels_last"
    "attention": _TEXT,  # "eager" or "sdpa"; "" is as the model and its time have it
    "host": _TEXT,  # the processor that dispatched; "" where nobody says
}
_WORK_COLUMNS = dict.fromkeys(("macs", "bytes", "launches"), _NUMBER_OR_EMPTY)
_SPELT = {*_KEY_COLUMNS, *_SETUP_COLUMNS, "latency_ms", *SIZED, "latency_s", "status", "gpu"}  # in any case


@dataclass(frozen=True, slots=True)
class Schema:
    """The columns of one kind of table: those it must have and those it may have."""

    title: str
    required: Mapping[str, Column]
    optional: Mapping[str, Column]

    def column(self, name: str) -> Column | None:
        """The rule of a column; None when the table has no such column."""
        if name.startswith(BASELINE_PREFIX):
            return _NUMBER_OR_EMPTY
        if name.startswith(NOTE_PREFIX):
            return _TEXT
        return self.required.get(name) or self.optional.get(name)


_TIMED = {"latency_s": _SECONDS, "spread_s": _NUMBER_OR_EMPTY, "n": _COUNT, "run": _TEXT, "stack": _TEXT}
MEASURED = Schema(
    title="measurement table",
    required=_KEY_COLUMNS | _TIMED,
    optional={
        "status": _TEXT,  # "ok", or why there is no latency
        "repeat_ratio": _RATIO_OR_EMPTY,  # slower over faster of two interleaved halves, or of repeats that were merged
        **_CLOCK_COLUMNS,
        **_SETUP_COLUMNS,
        **_WORK_COLUMNS,
        **{COLUMN.format(kind): _NUMBER_OR_EMPTY for kind in KINDS},
        SLOWED: _RATIO_OR_EMPTY,
    },
)
PREDICTED = Schema(
    title="predicted table",
    required=_KEY_COLUMNS | {"latency_s": _SECONDS},
    optional={
        "low_s": _NUMBER_OR_EMPTY,
        "high_s": _NUMBER_OR_EMPTY,
        **_CLOCK_COLUMNS,
        "run": _TEXT,
        "stack": _TEXT,
        **_SETUP_COLUMNS,
        **_WORK_COLUMNS,
        AT_SPEED: _NUMBER_OR_EMPTY,
    },
)

DEFAULTS: dict[str, str | int | float] = {
    "machine": "unknown",
    "device": "unknown",
    "runtime": "eager",
    "precision": "fp32",
    "input_kind": "default",
    "input_size": 0,
    "protocol": "single",
    "spread_s": np.nan,
    "n": 1,
    "run": "",
    "stack": "",
}
"""What `complete` puts where an outside table is silent."""


def check(frame: pd.DataFrame, schema: Schema, rows: Sequence[int] = ()) -> pd.DataFrame:
    """A copy with columns in order and typed, or an error that names the column, the row and the fix.

    `rows` are their numbers where they came from; default: 1, 2, 3, and so on.
    """
    columns = _columns(frame, schema)
    order = [name for name in (*schema.required, *schema.optional) if name in frame.columns]
    order += [name for name in frame.columns if name not in order]
    if "status" in order and "latency_s" in order:  # a latency that no status stands beside was measured
        said, timed = (frame[name].map(_as_text) for name in ("status", "latency_s"))
        frame = frame.assign(status=said.mask((said.str.lower() == OK) | ((said == "") & (timed != "")), OK))
    failed = frame["status"].ne(OK).to_numpy() if "status" in order else np.zeros(len(frame), bool)
    typed: dict[str, pd.Series] = {}
    for name in order:
        column = columns[name]
        may_be_empty = np.full(len(frame), column.empty) | (failed & (name == "latency_s"))
        values, bad = _typed(frame[name].reset_index(drop=True), column, may_be_empty)
        if bad.any():
            where = int(np.flatnonzero(bad)[0])
            bound = f"{'above' if column.exclusive else 'of at least'} {column.least:g}"
            raise TableError(
                f"The {schema.title} has {_as_text(frame[name].iloc[where])!r} as {name} in row "
                f"{rows[where] if rows else where + 1}. "
                f"Put a {'whole' if column.kind == 'count' else 'finite'} number {bound} there, or remove the row."
            )
        typed[name] = values.astype(np.int64) if column.kind == "count" else values
    return pd.DataFrame(typed, columns=order)


def _columns(frame: pd.DataFrame, schema: Schema) -> dict[Any, Column]:
    """The rule of each column of a table that has all it must and nothing that nobody knows."""
    missing = [name for name in schema.required if name not in frame.columns]
    if missing:
        how = "Add what is missing; of a measured table latpred evaluate needs model, batch and latency_s alone."
        if {"candidate", "latency_ms"} <= {*frame.columns}:
            how = "Rows of predict_many and rank are others; take latpred predict MODEL --csv or predict().to_frame()."
        if schema is MEASURED and "low_s" in frame:
            how = _PREDICTED
        raise TableError(f"The {schema.title} lacks {', '.join(missing)}. {how}")
    _demand_unique(frame, schema.title)
    columns = {}
    for name in frame.columns:
        column = schema.column(str(name))
        if column is None and MEASURED.column(str(name)) is not None:
            raise TableError(
                f"The {schema.title} has the column {name!r}, as a table of latpred measure has. "
                "Give the predicted table first, then the measured one."
            )
        if column is None:
            near = difflib.get_close_matches(str(name), [*schema.required, *schema.optional], n=1)
            hint = f"Did you mean {near[0]}? " if near else ""
            raise TableError(
                f"The {schema.title} has an unknown column {name!r}. {hint}"
                f"Rename it, drop it, or put {NOTE_PREFIX!r} before its name to carry it along."
            )
        columns[name] = column
    return columns


def _as_text(value: Any) -> str:
    # A list, as an encoding in a column that is carried along, would be asked element by element.
    return "" if pd.api.types.is_scalar(value) and pd.isna(value) else str(value).strip()


def _typed(values: pd.Series, column: Column, may_be_empty: np.ndarray) -> tuple[pd.Series, np.ndarray]:
    """Values as texts or numbers, and which of them must not stand there."""
    text = values.map(_as_text).astype(object)
    if column.kind == "text":
        return text.astype(str), np.zeros(len(values), bool)
    numbers = pd.to_numeric(text.where(text != "", None), errors="coerce").astype(float)
    value = numbers.to_numpy()
    good = np.isfinite(value) & (value > column.least if column.exclusive else value >= column.least)
    if column.kind == "count":
        good &= (value == np.floor(value)) & (value < MOST_COUNT)
    return numbers, np.where(text == "", ~may_be_empty, ~good)


def complete(frame: pd.DataFrame, defaults: Mapping[str, str | int | float] | None = None) -> pd.DataFrame:
    """An outside table with the columns and values that it lacks filled in: `defaults` first, then `DEFAULTS`.

    Only model, batch and latency_s (or latency_ms) must be there; a column seq, audio or image stands for input_kind
    and input_size. Columns that mean nothing to latpred are kept, with an "x_" before their name.
    """
    if "spread_s" not in frame and {"low_s", "high_s"} <= {*frame.columns}:
        raise TableError(
            f"The table has low_s and high_s. {_PREDICTED} Of measured ones, give those columns other names."
        )
    frame = in_lower_case(frame)
    _demand_unique(frame, "table")
    frame = _with_sizes(_in_seconds(frame))
    needed = [name for name in ("model", "batch", "latency_s") if name not in frame.columns]
    renamed = {name: f"{NOTE_PREFIX}{name}" for name in frame.columns if MEASURED.column(str(name)) is None}
    if needed:
        own = f" Columns that mean nothing to latpred: {', '.join(map(str, renamed))}." if renamed else ""
        raise TableError(f"The table lacks {', '.join(needed)}. Name those columns so; the others have defaults.{own}")
    out = frame.rename(columns=renamed).copy()
    for name, value in {**DEFAULTS, **(defaults or {})}.items():
        given = out.get(name, pd.Series("", out.index)).astype(object)
        out[name] = given.where(given.map(_as_text) != "", value)
    return out


def _demand_unique(frame: pd.DataFrame, title: str) -> None:
    repeated = sorted({str(name) for name in frame.columns[frame.columns.duplicated()]})
    if repeated:
        raise TableError(f"The {title} has {', '.join(repeated)} more than once. Keep one column of each name.")


def unused(frame: pd.DataFrame, cells: pd.DataFrame) -> list[str]:
    """Sentences on what of an outside table, by now checked cells, is not used: rows that failed, unknown columns."""
    said = []
    if failed := cells.loc[~timed(cells), "status"].tolist() if "status" in cells else []:
        said.append(f"rows left out, since their status is not {OK}: {len(failed)}, as {failed[0]!r}")
    if names := [str(name) for name in frame if f"{NOTE_PREFIX}{name}" in cells]:
        said.append(f"columns that mean nothing to latpred, not used: {', '.join(names)}")
    return said


def in_lower_case(frame: pd.DataFrame) -> pd.DataFrame:
    """A table whose columns are spelt as latpred spells them, where predictions depend on these."""
    spelt = {name: str(name).strip().lower() for name in frame.columns}
    known = {name: own for name, own in spelt.items() if own in _SPELT and own not in frame.columns}
    return frame.rename(columns=known)


def _with_sizes(frame: pd.DataFrame) -> pd.DataFrame:
    """A table with input_kind and input_size in place of seq, audio and image, as `latpred.predict` calls them."""
    kinds = [kind for kind in SIZED if kind in frame.columns]
    if not kinds or {"input_kind", "input_size"} & {*frame.columns}:
        return frame
    given = pd.DataFrame({kind: ~frame[kind].map(_as_text).isin(("", "0", "0.0")) for kind in kinds})
    several = np.flatnonzero(given.sum(axis=1).to_numpy() > 1)
    if several.size:
        raise TableError(f"The table has {' and '.join(kinds)} in row {several[0] + 1}. Give each row the size of one.")
    kind, size = pd.Series("", frame.index, object), pd.Series("", frame.index, object)
    for name in kinds:
        kind, size = kind.mask(given[name], name), size.mask(given[name], frame[name])
    return frame.drop(columns=kinds).assign(input_kind=kind, input_size=size)


def _in_seconds(frame: pd.DataFrame) -> pd.DataFrame:
    """A table with latency_s in place of latency_ms."""
    if "latency_ms" not in frame.columns:
        return frame
    if "latency_s" in frame.columns:
        raise TableError("The table has latency_s and latency_ms. Keep one column.")
    ms = pd.to_numeric(frame["latency_ms"], errors="coerce")
    seconds = (ms / 1e3).where(ms.notna(), frame["latency_ms"])  # whose texts an error names
    return frame.drop(columns="latency_ms").assign(latency_s=seconds)


def timed(frame: pd.DataFrame) -> NDArray[np.bool_]:
    """Which rows have a latency; the others say in `status` why they have none."""
    return frame["status"].eq(OK).to_numpy(bool) if "status" in frame else np.ones(len(frame), bool)


def speed_of(measured: pd.DataFrame) -> dict[str, float]:
    """What each reference took while a table was measured, in microseconds; empty where it does not say."""
    columns = {kind: COLUMN.format(kind) for kind in KINDS if COLUMN.format(kind) in measured}
    values = {kind: float(pd.to_numeric(measured[name], errors="coerce").median()) for kind, name in columns.items()}
    return {kind: us for kind, us in values.items() if us > 0}


def read(source: Source, schema: Schema) -> pd.DataFrame:
    """A checked table from a DataFrame or a CSV file."""
    return check(load(source), schema)


def load(source: Source) -> pd.DataFrame:
    """A DataFrame as it is, or a CSV file as text that nothing has judged yet."""
    if isinstance(source, pd.DataFrame):
        return source
    if not isinstance(source, str | os.PathLike):
        kind = type(source).__name__
        raise TableError(f"an object of type {kind} is no table; give a DataFrame or the path of a CSV file.")
    path = Path(source)
    try:
        table = pd.read_csv(path, dtype=str, keep_default_na=False, skipinitialspace=True).rename(columns=str.strip)
    except FileNotFoundError:
        raise TableError(
            f"There is no table at {path}. Give the path of a CSV file that `latpred measure` wrote."
        ) from None
    except OSError as error:
        raise TableError(f"cannot read {path}: {error.strerror or error}. Give the path of a CSV file.") from None
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError, EOFError, zlib.error) as error:
        raise TableError(
            f"{path} is not a CSV table: {str(error).strip()}. Give a CSV file with a header line."
        ) from None
    others = [mark for mark in (";", "\t", "|") if mark in table.columns[0]] if len(table.columns) == 1 else []
    if others:
        raise TableError(f"{path} has {others[0]!r} between its columns. Put commas there, and points in its numbers.")
    if not isinstance(table.index, pd.RangeIndex):  # which pandas made of the values too many
        raise TableError(f"{path} has rows with more values than its header has names. Give each value a column.")
    return table


def write(frame: pd.DataFrame, path: str | os.PathLike[str]) -> Path:
    """Write a table as CSV, all of it or nothing: a reader never meets half a file."""
    storage.write(Path(path), to_csv(frame).encode())
    return Path(path)


def to_csv(frame: pd.DataFrame) -> str:
    """The text `write` puts into a file: numbers with ten significant digits, empty where there is none."""
    return frame.to_csv(index=False, float_format="%.10g", lineterminator="\n")


@dataclass(frozen=True, slots=True)
class Joined:
    """Two tables side by side, and what did not find its like."""

    # The keys, then every other column: `latency_s_predicted` and `latency_s_measured` where both tables have it.
    rows: pd.DataFrame
    only_predicted: tuple[str, ...]
    only_measured: tuple[str, ...]
    failed: tuple[str, ...]
    notes: tuple[str, ...]


def join(predicted: pd.DataFrame, measured: pd.DataFrame) -> Joined:
    """Match predicted with measured cells on `KEYS`.

    Where the two tables share no machine they are matched without it, and a note says so.
    """
    notes: list[str] = []
    keys = [*KEYS, *(name for name in FURTHER_KEYS if name in predicted and name in measured)]
    if len(measured) and len(predicted) and not set(predicted["machine"]) & set(measured["machine"]):
        keys.remove("machine")
        there, here = (", ".join(sorted(set(map(str, table["machine"])))) for table in (predicted, measured))
        notes.append(f"Predicted for {there}, measured on {here}: another machine, whose host may be faster or slower.")
    good, bad = measured[timed(measured)], measured[~timed(measured)]
    # What is measured twice is predicted twice, in a table that nobody gave.
    for frame, title in ((good, MEASURED.title), (predicted, PREDICTED.title)):
        twice = frame[frame.duplicated(subset=keys)]
        if len(twice):
            raise TableError(
                f"The {title} has {cell_name(twice.iloc[0])} more than once ({len(twice)} such rows). "
                "Keep one row per cell, or give repeats of a cell different names in the column run."
            )
    rows = predicted.merge(good, on=keys, suffixes=("_predicted", "_measured"), validate="one_to_one")
    return Joined(
        rows=rows,
        only_predicted=_outside(predicted, measured, keys),
        only_measured=_outside(good, predicted, keys),
        failed=tuple(f"{cell_name(row)}: {row['status']}" for _, row in bad.iterrows()),
        notes=tuple(notes),
    )


def _outside(frame: pd.DataFrame, other: pd.DataFrame, keys: list[str]) -> tuple[str, ...]:
    """Cells of a table that another does not have."""
    shared = pd.MultiIndex.from_frame(frame[keys]).isin(pd.MultiIndex.from_frame(other[keys]))
    return tuple(cell_name(row) for _, row in frame[~shared].iterrows())


def merge_repeats(measured: pd.DataFrame) -> pd.DataFrame:
    """One row per cell from a table in which some cells were measured in several runs.

    Numbers become the median over runs, n their sum, spread_s half the range of the latencies, and repeat_ratio the
    slowest over the fastest. Texts that differ stand beside each other; a regime that does is not known. Rows of one
    cell in one run are duplicates, which `join` refuses.
    """
    keys = [*KEYS, *(name for name in (*FURTHER_KEYS, "status") if name in measured)]
    runs = measured.groupby(keys, sort=False)["run"]
    count = runs.transform("size")
    repeated = (runs.transform("nunique") == count) & (count > 1) & measured["latency_s"].notna()
    if not repeated.any():
        return measured
    measured = measured.assign(**{REPEATS: measured.get(REPEATS, "")})
    cells = measured[repeated].groupby(keys, sort=False)
    together: dict[str, Any] = {"text": _beside_each_other, "count": "sum", "number": "median"}
    columns = {name: MEASURED.column(str(name)) for name in measured if name not in keys}
    merged = cells.agg({name: together[column.kind] for name, column in columns.items() if column is not None})
    fastest, slowest = cells["latency_s"].min(), cells["latency_s"].max()
    merged = merged.assign(
        spread_s=(slowest - fastest) / 2, repeat_ratio=slowest / fastest, **{REPEATS: cells.size().astype(str)}
    )
    if "regime" in merged:
        merged["regime"] = merged["regime"].mask(merged["regime"].str.contains("+", regex=False), "")
    return pd.concat([measured[~repeated], merged.reset_index()], ignore_index=True)


def _beside_each_other(texts: pd.Series) -> str:
    """What several rows say, each once."""
    return "+".join(dict.fromkeys(filter(None, texts)))


def cell_name(row: Mapping[str, object] | pd.Series) -> str:
    """How messages call a cell, by all that tells it from others but the machine."""
    size = f"{row['input_kind']} {row['input_size']}" if row["input_size"] else ""
    keys = (row["runtime"], row["precision"], row["device"], row["protocol"])
    attention = f"{row['attention']} attention" if row.get("attention") else ""
    parts = (row["model"], size, f"batch {row['batch']}", *keys, row.get("memory_format", ""), attention)
    return " ".join(str(part) for part in parts if part not in ("", "contiguous"))


def seconds(point: Any) -> dict[str, float]:
    """The times of a predicted row, from a record that has them in milliseconds."""
    times = {"latency_s": point.latency_ms, "low_s": point.interval_ms[0], "high_s": point.interval_ms[1]}
    times |= {"overhead_s": point.overhead_ms, "compute_s": point.compute_ms}
    return {name: ms / 1e3 for name, ms in times.items()}


def machine_name(machine: Machine) -> str:
    """What stands in the column machine: the host without its name, and its accelerator, as far as they are known."""
    # Clouds call several processors the same, and start machines of different ones from an image with one id.
    model = machine.cpu_model.split()[1:2]
    cpu = " ".join([machine.cpu, *model])
    cores = f" x{machine.cores}" if machine.cores else ""
    device = f" + {machine.accelerator}" if machine.accelerator else ""
    identity = machine.machine_id or machine.hostname_hash
    host = f" #{identity[:8]}" if identity else ""
    return f"{cpu}{cores}{device}{host}"


def stack_text(machine: Machine) -> str:
    """What stands in the column stack: versions by name, and the thread count."""
    versions = [f"{name}={version}" for name, version in sorted(machine.stack.items())]
    return " ".join([*versions, f"threads={machine.threads}"])
