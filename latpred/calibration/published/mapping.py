"""Brings tables of any columns to those of a measurement table, by rules that are data: a JSON file of the user's.

A rule says which rows it is for (`where`: a regular expression for each column, found anywhere in its text), and what
columns of a measurement table they get (`set`) or why they are left out (`omit`). Rules are tried in their order on
every row, and a later one overrides an earlier one. What a rule sets may contain columns of the table and named groups
of its own expressions in braces; the table's own columns stay what they were for all rules.
"""

from __future__ import annotations

import difflib
import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec
import pandas as pd

from latpred import tables
from latpred.errors import TableError

SOURCE = "source"  # column that a rule sets to name where a row comes from
TABLE = "table"  # name of the file, and
FOLDER = "folder"  # folder of the mapping: columns that every table has
_TIME = re.compile(r"\s*(?P<number>[-+]?\d*\.?\d+(?:[eE][-+]?\d+)?)\s*(?P<unit>[a-zµ]*)\s*")
_IN_BRACES = re.compile(r"\{([^{}]*)\}|[{}]")
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


class _Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rule; without `where` it is for every row. `why` is for whoever reads the file."""

    where: dict[str, str] = {}
    set: dict[str, str] = {}
    omit: str = ""
    why: str = ""


class TableMapping(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rules of a file, in their order, and the folder it lies in."""

    schema: Literal["latpred.mapping/1"]
    rules: tuple[_Rule, ...]
    folder: str = ""


def load(path: str | os.PathLike[str]) -> TableMapping:
    """Read a mapping and check that everything in it can be meant."""
    try:
        mapping = msgspec.json.decode(Path(path).read_bytes(), type=TableMapping)
    except OSError as error:
        raise TableError(f"cannot read the mapping {path}: {error.strerror or error}. Give a JSON file.") from None
    except msgspec.DecodeError as error:
        raise TableError(
            f"{path} is not a mapping: {error}. See docs/profile-format.md for what stands in one."
        ) from None
    columns = (*tables.MEASURED.required, *tables.MEASURED.optional)
    for number, rule in enumerate(mapping.rules, 1):
        for column, pattern in rule.where.items():
            try:
                re.compile(pattern)
            except re.error as error:
                raise TableError(
                    f"{path}, rule {number}: {pattern!r} for the column {column} is no regular expression: {error}."
                ) from None
        for column in rule.set:
            if column != SOURCE and tables.MEASURED.column(column) is None:
                near = difflib.get_close_matches(column, columns, n=1)
                hint = f"Did you mean {near[0]}? " if near else ""
                raise TableError(
                    f"{path}, rule {number} sets {column}, which no measurement table has. {hint}"
                    f"Its columns are {', '.join(columns)}."
                )
    return msgspec.structs.replace(mapping, folder=os.fspath(Path(path).parent))


def apply(mapping: TableMapping, frame: pd.DataFrame, name: str) -> tuple[pd.DataFrame, Counter[str]]:
    """Rows in the columns of a measurement table, as text and by their numbers, and how many are left out for what."""
    rows: dict[int, dict[str, str]] = {}
    omitted: Counter[str] = Counter()
    own = [column for column in frame.columns if tables.MEASURED.column(str(column)) is not None]
    for number, texts in enumerate(frame.fillna("").astype(str).to_dict("records"), 1):
        given = {**{str(column): text for column, text in texts.items()}, TABLE: name, FOLDER: mapping.folder}
        made, reason = _ruled(mapping, given, f"{name}, row {number}")
        if reason:
            omitted[reason] += 1
            continue
        row = {column: given[column] for column in own} | made
        rows[number] = {column: _in_seconds(column, text, name, number) for column, text in row.items()}
    return pd.DataFrame(list(rows.values()), index=list(rows)).fillna(""), omitted


def without_column(mapping: TableMapping, frames: Iterable[pd.DataFrame]) -> str:
    """A sentence on columns that rules ask for and no table has, as a misspelt one; "" where there are none."""
    known = {TABLE, FOLDER}.union(*(map(str, frame.columns) for frame in frames))
    missing = dict.fromkeys(column for rule in mapping.rules for column in rule.where if column not in known)
    near = {name: difflib.get_close_matches(name, known, n=1) for name in missing}
    named = ", ".join(name + (f" (nearest: {near[name][0]!r})" if near[name] else "") for name in missing)
    return f"rules of the mapping apply to no row, for no table has the column they ask for: {named}" if named else ""


def _ruled(mapping: TableMapping, given: dict[str, str], where: str) -> tuple[dict[str, str], str]:
    """What the rules set of a row, and why they leave it out; "" where they do not."""
    made: dict[str, str] = {}
    reason = ""
    for rule in mapping.rules:
        if not rule.where.keys() <= given.keys():
            continue
        matches = [re.search(pattern, given[column]) for column, pattern in rule.where.items()]
        if not all(matches):
            continue
        known = given | {key: value or "" for match in matches if match for key, value in match.groupdict().items()}
        made |= {column: _filled(template, known, f"{where}, column {column}") for column, template in rule.set.items()}
        reason = _filled(rule.omit, known, where) or reason
    return made, reason


def _filled(template: str, known: dict[str, str], where: str) -> str:
    """A template with what a row has in the place of names in braces."""

    def text_of(match: re.Match[str]) -> str:
        name = match[1] or match[0]  # the braces themselves where they hold nothing, or one stands alone
        if name in known:
            return known[name]
        near = difflib.get_close_matches(name, list(known), n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise TableError(f"{where}: the row has no {name!r} for the mapping's {template!r}.{hint}")

    return _IN_BRACES.sub(text_of, template).strip()


def _in_seconds(column: str, text: str, name: str, number: int) -> str:
    """A time with its unit as a number of seconds; what stands in other columns as it is."""
    if not column.endswith("_s") or column.startswith(tables.NOTE_PREFIX) or not text:
        return text
    match = _TIME.fullmatch(text.replace("\N{GREEK SMALL LETTER MU}", "µ"))
    if match is None or match["unit"] not in _SECONDS:
        raise TableError(
            f"{name}, row {number}: {text!r} as {column} is no time. Let the mapping set a number with its unit, as "
            f"'{{latency}} ms'; units are {', '.join(filter(None, _SECONDS))}."
        )
    return text if not match["unit"] else repr(float(match["number"]) * _SECONDS[match["unit"]])
