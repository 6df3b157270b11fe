"""A table of finished predictions in a Parquet file, so that a run that was cut off goes on where it stopped.

Every row has a key: a digest of its candidate (see `latpred.fingerprints`), of what was asked, of the profile with all
its numbers, and of the versions of latpred, torch and transformers. Rows are read back only under the very same key;
others stay in the file. Candidates that failed are tried again. The file is replaced as a whole, so that a reader, or a
crash, never meets half of one.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from latpred import many, profile_codec
from latpred.errors import MissingPackageError, TableError
from latpred.fingerprints import fingerprint
from latpred.many import Question, Row
from latpred.pace import Pace
from latpred.predictor import Predictor
from latpred.storage import demand_writable, locked, replacing

if TYPE_CHECKING:
    import pandas as pd

KEY = "key"
WRITE_EVERY_S = 10.0
_PACKAGES = ("latpred", "torch", "transformers", "torchvision", "timm")  # whose models go by names too


@contextmanager
def opened(path: str | os.PathLike[str], predictor: Predictor, asked: Question) -> Iterator[Kept]:
    """The finished rows of a file, which is written every few seconds and at the end, however that comes."""
    if find_spec("pyarrow") is None:
        raise MissingPackageError("resume= needs pyarrow. Install it with: pip install 'latpred[search]'")
    demand_writable(path)
    busy = f"another process writes to {path}. Wait for it, or name another file."
    with locked(Path(f"{os.fspath(path)}.lock"), busy):
        kept = Kept(Path(path), _setting(predictor, asked))
        try:
            yield kept
        finally:
            kept.write()


class Kept:
    """Finished rows by key."""

    def __init__(self, path: Path, setting: str | None) -> None:
        self._path, self._setting = path, setting
        self._rows: dict[str, list[Row]] = {}
        self._pace, self._changed = Pace(""), False
        if path.exists():
            self._read()

    def key(self, candidate: Any) -> str | None:
        """Of a candidate; None where nothing tells it from others."""
        own = fingerprint(candidate)
        if own is None or self._setting is None:
            return None
        return hashlib.sha256(f"{self._setting} {own}".encode()).hexdigest()

    def rows(self, key: str | None, position: int) -> list[Row] | None:
        """Finished rows of a key, for a candidate that now has this position; None where there are none."""
        found = self._rows.get(key) if key is not None else None
        return None if found is None else [row._replace(candidate=position) for row in found]

    def add(self, key: str | None, rows: list[Row]) -> None:
        """Keep the rows of a candidate, unless it failed."""
        if key is None or any(row.error is not None for row in rows):
            return
        self._rows[key] = rows
        self._changed = True
        if self._pace.seconds > WRITE_EVERY_S:
            self.write()

    def write(self) -> None:
        """Put all rows into the file."""
        if not self._changed:
            return
        table = many.frame(row for rows in self._rows.values() for row in rows)
        table[KEY] = [key for key, rows in self._rows.items() for _ in rows]
        with replacing(self._path) as part:
            table.to_parquet(part, index=False)
        self._pace, self._changed = Pace(""), False

    def _read(self) -> None:
        for entry in _table(self._path).to_dict("records"):
            key = str(entry.pop(KEY))
            entry["error"] = None
            self._rows.setdefault(key, []).append(Row(**{str(name): value for name, value in entry.items()}))


def _table(path: Path) -> pd.DataFrame:
    import pandas as pd

    try:
        table = pd.read_parquet(path)
    except Exception as error:  # pyarrow raises what it likes
        text = " ".join(str(error).split())
        raise TableError(f"{path} is no Parquet table: {text}. Name another file, or remove this one.") from None
    if [*table.columns] != [*many.COLUMNS, KEY]:
        raise TableError(f"{path} holds another table than predictions of candidates. Name another file.")
    return table


def _setting(predictor: Predictor, asked: Question) -> str | None:
    """A digest of everything but the candidate; None where the inputs cannot be told."""
    inputs = fingerprint(asked.inputs)
    if inputs is None:
        return None
    question = [asked.batches, asked.runtimes, asked.precision, asked.protocol, asked.seq, asked.image]
    versions = [metadata.version(name) if find_spec(name) else "" for name in _PACKAGES]
    digest = hashlib.sha256(profile_codec.encode(predictor.profile))
    digest.update(msgspec.json.encode([question, versions, inputs]))
    return digest.hexdigest()
