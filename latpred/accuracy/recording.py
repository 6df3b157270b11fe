"""A recording: measured cells and the models as they were traced where they were measured.

Replaying one predicts every cell again and compares, with no device and without tracing anything, so the figures do not
depend on the stack that replays. On disk it is a folder of three files: `recording.json` (what it is, and checksums),
`table.csv` (the measurement table) and `graphs.json.gz` (the traced models).
"""

from __future__ import annotations

import gzip
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path

import msgspec
import pandas as pd

from latpred import storage, tables
from latpred.accuracy.accuracy_report import Report
from latpred.accuracy.comparison import compare
from latpred.accuracy.predicted import GraphKey, answered, graph_keys, graph_of, predict_table
from latpred.errors import RecordingError, TableError
from latpred.graph.graph import ModelGraph
from latpred.prediction.predictor import Predictor
from latpred.profile.document import DeviceProfile

SCHEMA = "latpred.recording"
VERSION = 1
MANIFEST, TABLE, GRAPHS = "recording.json", "table.csv", "graphs.json.gz"


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `recording.json` says."""

    schema: str
    version: int
    name: str
    created: str  # ISO 8601, UTC
    about: str
    cells: int
    models: int
    reasons: dict[str, str]  # why a baseline that needs the device could not be had there
    sha256: dict[str, str]  # by file name, and of this document under "recording.json" with that entry left out


class TracedModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One entry of the graphs file: the key that a table finds it by, and the graph."""

    model: str
    input_kind: str
    input_size: int
    precision: str
    graph: ModelGraph
    runtime: str = "eager"
    memory_format: str = "contiguous"
    attention: str = ""
    era: str = ""

    @property
    def key(self) -> GraphKey:
        """What a table finds it by."""
        return GraphKey(*(getattr(self, name) for name in GraphKey._fields))


@dataclass(frozen=True, slots=True)
class Recording:
    """Measured cells and traced models."""

    name: str
    about: str  # a line for people: device, stack, what was measured and how
    table: pd.DataFrame = field(repr=False, compare=False)  # the measurement table
    graphs: Mapping[GraphKey, ModelGraph] = field(repr=False)  # a traced model for every measured cell
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    # Why a baseline that needs the device could not be had, by its name.
    reasons: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the table, and that every measured cell has its graph."""
        object.__setattr__(self, "table", tables.check(self.table, tables.MEASURED))
        keys = graph_keys(self.table[tables.timed(self.table)])
        missing = sorted({key.model for key in keys if graph_of(self.graphs, key) is None})
        if missing:
            raise RecordingError(f"No graph for {', '.join(missing)}. Trace every model that the table holds.")

    def replay(self, profile: DeviceProfile) -> Report:
        """Predict every cell with a profile and hold it against what was measured.

        Cells in a runtime or a precision that the profile lacks are left out, and a note says so. Where it lacks all
        of them, its error says what to do.
        """
        measured, notes = answered(tables.merge_repeats(self.table), Predictor(profile))
        predicted = predict_table(measured, self.graphs, profile)
        return compare(predicted, measured, reasons=self.reasons, notes=notes)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the three files into a folder."""
        target = Path(folder)
        traced = [TracedModel(**key._asdict(), graph=graph) for key, graph in sorted(self.graphs.items())]
        packed = gzip.compress(msgspec.json.encode(traced), mtime=0)
        files = {TABLE: tables.to_csv(self.table).encode(), GRAPHS: packed}
        manifest = Manifest(
            schema=SCHEMA,
            version=VERSION,
            name=self.name,
            created=self.created,
            about=self.about,
            cells=len(self.table),
            models=len({key.model for key in self.graphs}),
            reasons=dict(self.reasons),
            sha256={name: _digest(body) for name, body in files.items()},
        )
        files[MANIFEST] = _encode(_signed(manifest))
        try:
            target.mkdir(parents=True, exist_ok=True)
            for name, body in files.items():
                storage.write(target / name, body)
        except OSError as error:
            raise RecordingError(f"Cannot write {target}: {error.strerror or error}. Name another folder.") from error
        return target


def load(source: str | os.PathLike[str]) -> Recording:
    """Read a recording from a folder, or a shipped one by its name; one that was changed is a RecordingError.

    >>> load("epyc-shared-runtimes").table["model"].nunique()
    26
    """
    folder = _shipped() / source if profile_of(source) else Path(source)
    manifest = _manifest(folder)
    body = {name: _verified(folder, name, manifest) for name in (TABLE, GRAPHS)}
    try:
        table = tables.read(folder / TABLE, tables.MEASURED)
        traced = msgspec.json.decode(gzip.decompress(body[GRAPHS]), type=list[TracedModel])
    except (TableError, msgspec.DecodeError, OSError, EOFError) as error:
        raise RecordingError(f"{folder} holds what no recording may hold: {error} Make it anew.") from error
    graphs = {one.key: one.graph for one in traced}
    return Recording(manifest.name, manifest.about, table, graphs, manifest.created, manifest.reasons)


def profile_of(source: str | os.PathLike[str]) -> str | None:
    """The shipped profile that a shipped recording was measured with; None for a folder.

    >>> profile_of("epyc-shared-runtimes")
    'epyc-shared'
    """
    folder = Path(source)
    ships = not folder.exists() and str(source) == folder.name and (_shipped() / folder.name).exists()
    return folder.name.rpartition("-")[0] if ships else None


def _shipped() -> Path:
    return Path(str(resources.files("latpred.models"))) / "recordings"


def _manifest(source: Path) -> Manifest:
    try:
        body = (source / MANIFEST).read_bytes()
    except OSError:
        names = ", ".join(sorted(folder.name for folder in _shipped().iterdir()))
        raise RecordingError(
            f"There is no recording in {source}. Give a folder that holds {MANIFEST}, or a shipped one: {names}."
        ) from None
    try:
        manifest = msgspec.json.decode(body, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordingError(
            f"{source / MANIFEST} is damaged, or a newer latpred wrote it: {error}. Copy or make the recording anew."
        ) from error
    if (manifest.schema, manifest.version) != (SCHEMA, VERSION):
        raise RecordingError(
            f"{source} is a {manifest.schema} of version {manifest.version}; latpred reads a {SCHEMA} of {VERSION}."
        )
    if _signed(manifest) != manifest:
        raise RecordingError(f"{source / MANIFEST} was changed since it was saved. Copy or make the recording anew.")
    return manifest


def _verified(source: Path, name: str, manifest: Manifest) -> bytes:
    try:
        body = (source / name).read_bytes()
    except OSError:
        raise RecordingError(f"{source} lacks {name}. Copy or make the recording anew.") from None
    if _digest(body) != manifest.sha256.get(name):
        raise RecordingError(f"{source / name} was changed since it was saved. Copy or make the recording anew.")
    return body


def _signed(manifest: Manifest) -> Manifest:
    bare = {name: digest for name, digest in manifest.sha256.items() if name != MANIFEST}
    unsigned = msgspec.structs.replace(manifest, sha256=bare)
    return msgspec.structs.replace(manifest, sha256={**bare, MANIFEST: _digest(_encode(unsigned))})


def _encode(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()
