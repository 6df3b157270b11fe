"""Journals: a header and rows in JSON lines, which survive any end of the process that writes them.

A row is on the disk when `Journal.append` returns, so a kill loses at most what was being measured. A torn last line is
cut off when the journal is opened again, and a damaged line costs only itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import msgspec

from latpred import storage

HeaderT = TypeVar("HeaderT", bound=msgspec.Struct)
RowT = TypeVar("RowT", bound=msgspec.Struct)
T = TypeVar("T")


class Contents(NamedTuple, Generic[HeaderT, RowT]):
    """What a journal holds: its header, None without a readable one, its rows, and the bytes of its whole lines."""

    header: HeaderT | None
    rows: list[RowT]
    length: int


def read(path: Path, header: type[HeaderT], row: type[RowT]) -> Contents[HeaderT, RowT]:
    """The contents of a journal whose rows are of a type, or of one type of a union; nothing where there is no file."""
    data = path.read_bytes() if path.exists() else b""
    length = data.rfind(b"\n") + 1
    first, *others = data[:length].splitlines() or [b""]
    rows = [decoded for line in others if (decoded := _decoded(line, row)) is not None]
    return Contents(_decoded(first, header), rows, length)


def _decoded(line: bytes, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.MsgspecError:
        return None


class Journal(Generic[HeaderT, RowT]):
    """A journal that is open for more rows; `header` and `rows` are what it held when it was opened.

    `goes_on` says of the header that a file has whether its rows count; else the journal is started anew.
    """

    def __init__(self, path: Path, header: HeaderT, row: type[RowT], goes_on: Callable[[HeaderT], bool]) -> None:
        contents = read(path, type(header), row)
        if contents.header is not None and goes_on(contents.header):
            os.truncate(path, contents.length)
            self.header, self.rows = contents.header, contents.rows
        else:
            storage.write(path, msgspec.json.encode(header) + b"\n")
            self.header, self.rows = header, []
        self._file = path.open("ab")

    def append(self, row: RowT) -> None:
        """Write a row and force it to the disk."""
        self._file.write(msgspec.json.encode(row) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    @property
    def closed(self) -> bool:
        """Whether no row can be written any more."""
        return self._file.closed

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


def now() -> str:
    """The time of day in UTC as headers note it, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")
