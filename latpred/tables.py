"""Measurement and predicted tables: their columns, what may stand in them, CSV in and out, and how two of them join.

A table is a pandas DataFrame with one row per cell (a model at a batch size in a runtime). This module knows columns
and keys; it neither measures (`calibration.measurement.whole_models`) nor judges (`accuracy.comparison`).
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

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
KERNELS = "x_kernels"  # of one forward pass, as a profiler counted them
AT_SPEED = "at_speed_s"  # a prediction for the speed that the machine had while a table was measured
OK = "ok"


@dataclass(frozen=True, slots=True)
class Column:
    """One column: what stands in it, whether it may be empty, and the least value that makes sense."""

    kind: Kind
    empty: bool = False
    least: float = 0.0
    exclusive: bool = False


_TEXT = Column("text")
_COUNT = Column("count")
_SECONDS = Column("number", exclusive=True)
_NUMBER_OR_EMPTY = Column("number", empty=True)

_KEY_COLUMNS: dict[str, Column] = {
    "machine": _TEXT,
    "device": _TEXT,
    "runtime": _TEXT,
    "precision": _TEXT,
    "model": _TEXT,
    "batch": Column("count", least=1),
    "input_kind": _TEXT,
    "input_size": _COUNT,
    "protocol": _TEXT,
}
_WORK_COLUMNS: dict[str, Column] = {"macs": _NUMBER_OR_EMPTY, "bytes": _NUMBER_OR_EMPTY, "launches": _NUMBER_OR_EMPTY}

_SETUP_COLUMNS: dict[str, Column] = {
    "memory_format": _TEXT,  # "contiguous" or "channels_last"
    "attention": _TEXT,  # "eager" or "sdpa"; "" is as the model and its time have it
    "host": _TEXT,  # the processor that dispatched; "" where nobody says
}
_SPEED_COLUMNS: dict[str, Column] = {COLUMN.format(kind): _NUMBER_OR_EMPTY for kind in KINDS}


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


MEASURED = Schema(
    title="measurement table",
    required={
        **_KEY_COLUMNS,
        "latency_s": _SECONDS,
        "spread_s": _NUMBER_OR_EMPTY,
        "n": _COUNT,
        "run": _TEXT,
        "stack": _TEXT,
    },
    optional={
        "status": _TEXT,  # "ok", or why there is no latency
        "repeat_ratio": Column("number", empty=True, least=1.0),  # slower over faster of two interleaved halves
        "overhead_s": _NUMBER_OR_EMPTY,
        "compute_s": _NUMBER_OR_EMPTY,
        "regime": _TEXT,
        **_SETUP_COLUMNS,
        **_WORK_COLUMNS,
        **_SPEED_COLUMNS,
        SLOWED: Column("number", empty=True, least=1.0),
    },
)

PREDICTED = Schema(
    title="predicted table",
    required={**_KEY_COLUMNS, "latency_s": _SECONDS},
    optional={
        "low_s": _NUMBER_OR_EMPTY,
        "high_s": _NUMBER_OR_EMPTY,
        "overhead_s": _NUMBER_OR_EMPTY,
        "compute_s": _NUMBER_OR_EMPTY,
        "regime": _TEXT,
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

    >>> needs = Schema("list", {"model": Column("text"), "batch": Column("count")}, {})
    >>> check(pd.DataFrame({"model": ["bert"]}), needs)
    Traceback (most recent call last):
    latpred.errors.TableError: The list lacks batch. Add what is missing.
    """
    _check_columns(frame, schema)
    order = [name for name in (*schema.required, *schema.optional) if name in frame.columns]
    order += [name for name in frame.columns if name not in order]
    failed = frame["status"].astype(str).ne(OK).to_numpy() if "status" in order else np.zeros(len(frame), bool)
    typed: dict[str, pd.Series] = {}
    for name in order:
        column = schema.column(name)
        assert column is not None  # _check_columns refused every other name
        excused = failed if name == "latency_s" else np.zeros(len(frame), bool)
        typed[name] = _typed(frame[name].reset_index(drop=True), name, column, excused, schema.title, rows)
    return pd.DataFrame(typed, columns=order)


def complete(frame: pd.DataFrame, defaults: Mapping[str, str | int | float] | None = None) -> pd.DataFrame:
    """An outside table with the columns it lacks filled in: `defaults` first, then `DEFAULTS`.

    Only model, batch and latency_s must be there. Columns that mean nothing to latpred are kept, with
    an "x_" before their name.
    """
    needed = [name for name in ("model", "batch", "latency_s") if name not in frame.columns]
    if needed:
        raise TableError(f"The table lacks {', '.join(needed)}. Name those columns so; the others have defaults.")
    renamed = {name: NOTE_PREFIX + str(name) for name in frame.columns if MEASURED.column(str(name)) is None}
    out = frame.rename(columns=renamed).copy()
    for name, value in {**DEFAULTS, **(defaults or {})}.items():
        if name not in out.columns:
            out[name] = pd.Series([value] * len(out), index=out.index)
    return out


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
        return pd.read_csv(path, dtype=str, keep_default_na=False)
    except FileNotFoundError:
        raise TableError(
            f"There is no table at {path}. Give the path of a CSV file that `latpred measure` wrote."
        ) from None
    except OSError as error:
        raise TableError(f"cannot read {path}: {error.strerror or error}. Give the path of a CSV file.") from None
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise TableError(
            f"{path} is not a CSV table: {str(error).strip()}. Give a CSV file with a header line."
        ) from None


def write(frame: pd.DataFrame, path: str | os.PathLike[str]) -> Path:
    """Write a table as CSV, all of it or nothing: a reader never meets half a file."""
    storage.write(Path(path), to_csv(frame).encode())
    return Path(path)


def to_csv(frame: pd.DataFrame) -> str:
    """The text `write` puts into a file: numbers with ten significant digits, empty where there is none."""
    return frame.to_csv(index=False, float_format="%.10g", lineterminator="\n")


@dataclass(frozen=True, slots=True)
class Joined:
    """Two tables side by side, and what did not find its like.

    `rows` has the keys, then every other column twice, as `latency_s_predicted` and `latency_s_measured` where both
    tables have it, else under its own name.
    """

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
        notes.append(
            f"Predicted for {_listed(predicted['machine'])}, measured on {_listed(measured['machine'])}: "
            "another machine, whose host may be faster or slower."
        )
    good = measured[measured["status"] == OK] if "status" in measured else measured
    bad = measured[measured["status"] != OK] if "status" in measured else measured.iloc[:0]
    for frame, title in ((predicted, PREDICTED.title), (good, MEASURED.title)):
        _refuse_duplicates(frame, keys, title)
    rows = predicted.merge(good, on=keys, suffixes=("_predicted", "_measured"), validate="one_to_one")
    here = set(rows[keys].itertuples(index=False, name=None))
    tried = here | set(bad[keys].itertuples(index=False, name=None))
    return Joined(
        rows=rows,
        only_predicted=_outside(predicted, keys, tried),
        only_measured=_outside(good, keys, here),
        failed=tuple(f"{cell_name(row)}: {row['status']}" for _, row in bad.iterrows()),
        notes=tuple(notes),
    )


def merge_repeats(measured: pd.DataFrame) -> pd.DataFrame:
    """One row per cell from a table in which some cells were measured in several runs.

    latency_s becomes the median over runs, spread_s half their range, and repeat_ratio the slowest over the fastest.
    Rows of one cell in one run are duplicates, which `join` refuses.
    """
    keys = [*KEYS, *(name for name in (*FURTHER_KEYS, "status") if name in measured)]
    distinct = measured.groupby(keys, sort=False)["run"].transform("nunique")
    count = measured.groupby(keys, sort=False)["run"].transform("size")
    repeated = (distinct == count) & (count > 1) & measured["latency_s"].notna()
    if not repeated.any():
        return measured
    merged = [_merged(group) for _, group in measured[repeated].groupby(keys, sort=False)]
    return pd.concat([measured[~repeated], pd.DataFrame(merged)], ignore_index=True)[
        [*measured.columns, *(["repeat_ratio"] if "repeat_ratio" not in measured else [])]
    ]


def cell_name(row: Mapping[str, object] | pd.Series) -> str:
    """How messages call a cell.

    >>> cell_name({"model": "bert", "batch": 8, "runtime": "eager", "precision": "fp32", "device": "cpu",
    ...            "protocol": "single"})
    'bert batch 8 eager fp32 cpu single'
    """
    parts = (row["model"], f"batch {row['batch']}", row["runtime"], row["precision"], row["device"], row["protocol"])
    return " ".join(str(part) for part in parts)


def seconds(point: Any) -> dict[str, float]:
    """The times of a predicted row, from a record that has them in milliseconds."""
    times = {"latency_s": point.latency_ms, "low_s": point.interval_ms[0], "high_s": point.interval_ms[1]}
    times |= {"overhead_s": point.overhead_ms, "compute_s": point.compute_ms}
    return {name: ms / 1e3 for name, ms in times.items()}


def machine_name(machine: Machine) -> str:
    """What stands in the column machine: the host without its name, and its accelerator, as far as they are known.

    Clouds call several processors the same, and start machines of different ones from an image with one id.
    """
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


def _merged(group: pd.DataFrame) -> pd.Series:
    latency = group["latency_s"].to_numpy(float)
    row = group.iloc[0].copy()
    row["latency_s"] = float(np.median(latency))
    row["spread_s"] = float(latency.max() - latency.min()) / 2
    row["n"] = int(group["n"].sum())
    row["run"] = "+".join(dict.fromkeys(group["run"]))
    row["repeat_ratio"] = float(latency.max() / latency.min())
    return row


def _check_columns(frame: pd.DataFrame, schema: Schema) -> None:
    missing = [name for name in schema.required if name not in frame.columns]
    if missing:
        raise TableError(f"The {schema.title} lacks {', '.join(missing)}. Add what is missing.")
    repeated = sorted({str(name) for name in frame.columns[frame.columns.duplicated()]})
    if repeated:
        raise TableError(f"The {schema.title} has {', '.join(repeated)} more than once. Keep one column of each name.")
    known = [*schema.required, *schema.optional]
    for name in frame.columns:
        if schema.column(str(name)) is None:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"Did you mean {near[0]}? " if near else ""
            raise TableError(
                f"The {schema.title} has an unknown column {name!r}. {hint}"
                f"Rename it, drop it, or put {NOTE_PREFIX!r} before its name to carry it along."
            )


def _typed(
    values: pd.Series, name: str, column: Column, excused: np.ndarray, title: str, rows: Sequence[int]
) -> pd.Series:
    text = values.map(lambda value: "" if pd.isna(value) else str(value).strip()).astype(object)
    if column.kind == "text":
        return text.astype(str)
    numbers = pd.to_numeric(text.where(text != "", None), errors="coerce").astype(float)
    empty = (text == "").to_numpy()
    value = numbers.to_numpy()
    with np.errstate(invalid="ignore"):
        low = value <= column.least if column.exclusive else value < column.least
        broken = column.kind == "count"
        fraction = np.isfinite(value) & (value != np.floor(value)) if broken else np.zeros(len(value), bool)
    bad = np.where(empty, not column.empty, ~np.isfinite(value) | low | fraction) & ~(excused & empty)
    if bad.any():
        where = int(np.flatnonzero(bad)[0])
        raise TableError(
            f"The {title} has {text.iloc[where]!r} as {name} in row {rows[where] if rows else where + 1}. "
            f"Put {_wanted(column)} there, or remove the row."
        )
    return numbers.astype(np.int64) if column.kind == "count" else numbers


def _wanted(column: Column) -> str:
    bound = f"{'above' if column.exclusive else 'of at least'} {column.least:g}"
    return f"a {'whole' if column.kind == 'count' else 'finite'} number {bound}"


def _refuse_duplicates(frame: pd.DataFrame, keys: Sequence[str], title: str) -> None:
    twice = frame[frame.duplicated(subset=list(keys), keep="first")]
    if len(twice):
        raise TableError(
            f"The {title} has {cell_name(twice.iloc[0])} more than once ({len(twice)} such rows). "
            "Keep one row per cell, or give repeats of a cell different names in the column run."
        )


def _outside(frame: pd.DataFrame, keys: Sequence[str], matched: set[tuple[object, ...]]) -> tuple[str, ...]:
    names = frame[list(keys)].itertuples(index=False, name=None)
    return tuple(
        cell_name(row) for key, (_, row) in zip(names, frame.iterrows(), strict=True) if tuple(key) not in matched
    )


def _listed(values: pd.Series) -> str:
    return ", ".join(sorted({str(value) for value in values}))
