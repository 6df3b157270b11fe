"""Rows of candidates, and the Parquet file of finished ones from which a run that was cut off goes on.

Every row has a key: a digest of its candidate's fingerprint, of what was asked, of the default dtype, of the profile
with all numbers and what may not hold of it here, of latpred's own code, and of the versions of Python, torch and the
libraries of models. Rows are read back only under the very same key; others stay in the file. Candidates that failed
are tried again. The file is replaced as a whole, so that a reader, or a crash, never meets half of one.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import product
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from latpred import runtimes
from latpred.api import predictor_of
from latpred.errors import (
    CandidateError,
    LatpredError,
    MissingPackageError,
    TableError,
    UsageError,
    chain_of,
    one_line,
    raise_stop,
)
from latpred.graph.graph import ModelGraph
from latpred.ops import BUILT_IN
from latpred.ops.families import registered
from latpred.prediction.prediction import Prediction
from latpred.prediction.prediction_page import too_large
from latpred.prediction.predictor import Predictor
from latpred.profile import document
from latpred.progress import ProgressCounter
from latpred.query import AMP, DeviceQuery, Options, checked_batches
from latpred.runtimes import graph_store, lowering
from latpred.runtimes.legacy_torch import traced_for
from latpred.sandbox.fingerprint import VERSIONED, fingerprint, version
from latpred.sandbox.own_thread import without_modes
from latpred.search.spaces import SearchSpace
from latpred.storage import demand_writable, locked, replacing
from latpred.tracing.inputs import demand_one, dtype_of, whole_sizes
from latpred.tracing.layer_extrapolation import STACKS
from latpred.tracing.meta_module import usual_dtype
from latpred.zoo.candidates import title, traceable
from latpred.zoo.names import is_config, registered_function
from latpred.zoo.spaces import named

if TYPE_CHECKING:
    import pandas as pd


class CandidateRow(NamedTuple):
    """One candidate at one batch size in one runtime; the numbers are NaN where `error` says what went wrong.

    `latpred.predict_many` says what each column holds.
    """

    candidate: int
    name: str
    device: str
    batch: int
    runtime: str
    precision: str
    latency_ms: float = nan
    low_ms: float = nan
    high_ms: float = nan
    overhead_ms: float = nan
    compute_ms: float = nan
    regime: str = ""
    macs: float = nan
    parameters: float = nan
    launches: float = nan
    caveats: tuple[str, ...] = ()
    error: str | None = None


COLUMNS = CandidateRow._fields
_TYPES = {"candidate": "int64", "batch": "int64"} | {
    name: "float64" for name, default in CandidateRow._field_defaults.items() if isinstance(default, float)
}


def frame(rows: Iterable[CandidateRow]) -> pd.DataFrame:
    """Rows as a table; one without rows has the columns as well.

    >>> frame([]).columns[:2].tolist()
    ['candidate', 'name']
    """
    import pandas as pd

    return pd.DataFrame([*rows], columns=list(COLUMNS), dtype=object).astype(_TYPES)


@dataclass(frozen=True, slots=True)
class Evaluator:
    """What is asked of every candidate, and what predicts it; workers get one and give rows."""

    predictors: tuple[Predictor, ...]
    options: Options
    batches: tuple[int, ...]
    runtimes: tuple[str, ...]

    @classmethod
    def of(cls, device: Any, batch: Any, runtime: Any, options: Options, host: float | str | None = None) -> Evaluator:
        """Check what is asked of all candidates before any of them takes time."""
        dtype_of(options.precision)  # a misspelt one is said before a profile that lacks it
        runtimes = (runtime,) if isinstance(runtime, str) else tuple(dict.fromkeys(runtime))
        if not runtimes:
            raise UsageError("no runtime was named; give one, as in runtime='eager'.")
        predictors = _predictors_of(device, host, runtimes)
        batches = checked_batches(batch)
        for predictor in predictors:
            for name in runtimes:
                predictor.check(name, options.precision)
        demand_one(options.inputs, *whole_sizes(options.seq, options.image))
        return cls(predictors, options, batches, runtimes)

    def rows(self, position: int, candidate: Any, errors: str = "record") -> list[CandidateRow]:
        """Rows of one candidate: each device, within it each batch, and within that each runtime.

        With errors="raise" a candidate that fails is a CandidateError, else a row that says why.
        """
        asked = _Candidate(position, candidate, self)
        rows: list[CandidateRow] = []
        for predictor in self.predictors:
            of_runtimes = [self._of(asked, predictor, runtime, errors) for runtime in self.runtimes]
            for of_batch in zip(*of_runtimes, strict=True):
                rows += of_batch
        return rows

    def failed(self, position: int, name: str, reason: str) -> list[CandidateRow]:
        precision = self.options.precision or ""
        cells = product([each.profile.name for each in self.predictors], self.batches, self.runtimes)
        return [CandidateRow(position, name, *cell, precision, error=reason) for cell in cells]

    def _of(self, candidate: _Candidate, predictor: Predictor, runtime: str, errors: str) -> list[CandidateRow]:
        """Rows of one candidate on one device in one runtime, one for each batch."""
        precision, handled = self.options.precision or "", sys.exc_info()[1]  # by the caller
        found = candidate.graph(predictor, runtime)
        if isinstance(found, ModelGraph):
            precision = found.precision
            try:
                curve = predictor.curve(found, self.batches, runtime=runtime, protocol=self.options.protocol)
            except LatpredError as error:
                raise_stop(error)
                found = error
            else:
                return [_row(candidate, predictor, found, point) for point in curve.points]
        if errors == "raise":
            raise CandidateError(f"candidate {candidate.position} ({candidate.name}): {_reason(found)}") from found
        cells = product([predictor.profile.name], self.batches, [runtime])
        reason = _reason(found)
        for cause in chain_of(found, until=handled):
            cause.__traceback__ = None  # its frames hold the candidate's model, and this error
        return [CandidateRow(candidate.position, candidate.name, *cell, precision, error=reason) for cell in cells]


def _predictors_of(device: Any, host: float | str | None, runtimes: Sequence[str]) -> tuple[Predictor, ...]:
    """One for each device, whose profiles' names tell their rows apart."""
    devices = [*device] if isinstance(device, Sequence) and not isinstance(device, str) else [device]
    if not devices:
        raise UsageError("no device was named; give one, as in device='rtx-8000', or leave it out.")
    if host is not None and any(isinstance(one, Predictor) for one in devices):
        raise UsageError("a Predictor has its host already; give its device by name, as in device='a100', or no host.")
    predictors = tuple(
        one if isinstance(one, Predictor) else predictor_of(DeviceQuery(one, host), beside=runtimes) for one in devices
    )
    ((name, count),) = Counter(predictor.profile.name for predictor in predictors).most_common(1)
    if count > 1:
        raise UsageError(
            f"{count} of the devices have the profile {name!r}; give each once. Profiles of two machines need "
            "names of their own: latpred calibrate --name"
        )
    return predictors


class _Candidate:
    """One candidate and its graphs; it is built once for each era, and runtimes and devices share what they can."""

    def __init__(self, position: int, given: Any, asked: Evaluator) -> None:
        self.position, self.name = position, title(given)
        self._given, self._asked = given, asked
        self._graphs: dict[tuple[str, str, str], ModelGraph | Exception] = {}
        self._models: dict[str, Any] = {}  # by the era that they were built for, whose attention they have

    def graph(self, predictor: Predictor, runtime: str) -> ModelGraph | Exception:
        """What a runtime lowers on a device, or what went wrong; models are traced for the era of its profile."""
        traced_by = lowering.traced_by(runtime, predictor.era)
        key = (traced_by, predictor.era, predictor.target)
        if key not in self._graphs:
            try:
                graph = self._graphs[key] = self._traced(predictor, runtime)
            except Exception as error:  # whatever a searcher's code raises concerns this candidate alone
                raise_stop(error)
                self._graphs[key] = error
            else:
                if traced_by == "eager" and not graph.target:  # every kind of device runs the same
                    self._graphs |= {(traced_by, predictor.era, target): graph for target in lowering.TARGETS}
        return self._graphs[key]

    def _traced(self, predictor: Predictor, runtime: str) -> ModelGraph:
        if isinstance(self._given, ModelGraph):
            return self._checked(self._given, predictor)
        with without_modes(), traced_for(predictor.era):
            put_together = self._put_together(predictor) if lowering.traced_by(runtime) == "eager" else None
            if put_together is not None:
                return put_together
            model = self._model(predictor.era)
            if isinstance(model, ModelGraph):
                return self._checked(model, predictor)
            return predictor.trace(model, replace(self._asked.options, runtime=runtime), self._asked.batches)

    def _checked(self, graph: ModelGraph, predictor: Predictor) -> ModelGraph:
        """A graph that was given, which may stand beside modules that are traced at the size that is asked."""
        kind, size = graph.input_kind, graph.input_size
        asked = {"seq": self._asked.options.seq, "image": self._asked.options.image}.get(kind)
        if asked not in (None, size):
            raise UsageError(f"This graph was traced at {kind}={size}; trace it again to predict {kind}={asked}.")
        return predictor.trace(graph, replace(self._asked.options, inputs=None, seq=None, image=None))

    def _model(self, era: str) -> Any:
        if era not in self._models:
            self._models[era] = traceable(self._given)
        return self._models[era]

    def _put_together(self, predictor: Predictor) -> ModelGraph | None:
        """The graph of a config or of a network of a published space, from traces of others."""
        options = self._asked.options
        if options.inputs is not None:
            return None
        if is_config(self._given):
            asked = {name: getattr(options, name) for name in ("seq", "image", "precision", "attention")}
            graph = STACKS.graph(self._given, target=predictor.target, **asked)
            return None if graph.exact or graph.only else graph
        if options.seq is None and options.precision not in AMP and (found := named(self._given)):
            space, architecture = found
            with usual_dtype():  # as whatever goes by a name is built
                return SearchSpace(space.name).graph(architecture, image=options.image, precision=options.precision)
        return None


def _row(candidate: _Candidate, predictor: Predictor, graph: ModelGraph, point: Prediction) -> CandidateRow:
    low, high = point.interval_ms
    return CandidateRow(
        candidate=candidate.position,
        name=candidate.name,
        device=predictor.profile.name,
        batch=point.batch,
        runtime=point.runtime,
        precision=point.precision,
        latency_ms=point.latency_ms,
        low_ms=low,
        high_ms=high,
        overhead_ms=point.overhead_ms,
        compute_ms=point.compute_ms,
        regime=point.regime,
        macs=float(graph.macs(point.batch)),
        parameters=float(graph.parameters),
        launches=float(graph.launches(point.batch)),
        caveats=(*point.provenance.caveats, *too_large(point)),
    )


def _reason(error: Exception) -> str:
    text = one_line(error)
    return text if isinstance(error, LatpredError) else f"{type(error).__name__}: {text}"


def tool_options(runtime: str) -> str:
    """What else a runtime's graphs depend on in this process: versions and settings of its tools."""
    return str(getattr(runtimes.get(runtime), "options", ""))


KEY = "key"
WRITE_EVERY_S = 10.0


@contextmanager
def opened(path: str | os.PathLike[str] | None, evaluator: Evaluator) -> Iterator[_ResultStore]:
    """The rows of a run; those of its file, if it has one, are written every few seconds and at the end."""
    if path is None:
        yield _ResultStore()
        return
    if find_spec("pyarrow") is None:
        raise MissingPackageError("resume= needs pyarrow. Install it with: pip install 'latpred[search]'")
    demand_writable(path)
    busy = f"another process writes to {path}. Wait for it, or name another file."
    with locked(Path(f"{os.fspath(path)}.lock"), busy):
        store = _ResultStore(Path(path), _question_key(evaluator))
        try:
            yield store
        finally:
            store.write()


class _ResultStore:
    """Rows of a run by position; those that a file keeps also by the key of question and candidate."""

    def __init__(self, path: Path | None = None, question_key: str | None = None) -> None:
        self._path, self._question_key = path, question_key
        self._finished: dict[int, list[CandidateRow]] = {}
        self._keys: dict[int, str] = {}  # of candidates under way that can be told from others
        self._kept: dict[str, list[CandidateRow]] = _read(path) if path is not None and path.exists() else {}
        self._since_written, self._changed = ProgressCounter(""), False

    def unfinished(self, candidates: Iterable[Any], progress: ProgressCounter) -> Iterator[tuple[int, Any]]:
        """Candidates that need work, with their positions; finished ones are taken from the file."""
        for position, candidate in enumerate(candidates):
            key = self._key(candidate)
            if key in self._kept:
                self._finished[position] = [row._replace(candidate=position) for row in self._kept[key]]
                progress.count(worked=False)
                continue
            if key is not None:
                self._keys[position] = key
            yield position, candidate

    def take(self, rows: list[CandidateRow]) -> None:
        """The rows of a candidate are there, which the file keeps unless it failed."""
        position = rows[0].candidate
        self._finished[position] = rows
        key = self._keys.pop(position, None)
        if key is not None and all(row.error is None for row in rows):
            self._kept[key] = rows
            self._changed = True
        if self._changed and self._since_written.seconds > WRITE_EVERY_S:
            self.write()

    def in_order(self) -> list[CandidateRow]:
        """All rows of the run, candidate after candidate."""
        return [row for position in sorted(self._finished) for row in self._finished[position]]

    def write(self) -> None:
        """Put all rows that are kept into the file, if there are new ones."""
        if self._path is None or not self._changed:
            return
        self._since_written = ProgressCounter("")
        table = frame(row for rows in self._kept.values() for row in rows)
        table[KEY] = [key for key, rows in self._kept.items() for _ in rows]
        try:
            with replacing(self._path) as part:
                table.to_parquet(part, index=False)
            self._changed = False
        except OSError as error:  # what was predicted must not be lost over it
            warnings.warn(f"cannot write {self._path}: {error.strerror or error}", stacklevel=2)

    def _key(self, candidate: Any) -> str | None:
        """None where no file is kept, or nothing tells the candidate from others."""
        if self._question_key is None:
            return None
        # A library's name may be that of a user's own function.
        told = (candidate, registered_function(candidate)) if isinstance(candidate, str) else candidate
        candidate_key = fingerprint(told, builds=not isinstance(candidate, torch.nn.Module))
        if candidate_key is None:
            return None
        return hashlib.sha256(f"{self._question_key} {candidate_key}".encode()).hexdigest()


def _read(path: Path) -> dict[str, list[CandidateRow]]:
    import pandas as pd

    try:
        table = pd.read_parquet(path)
    except Exception as error:  # pyarrow raises what it likes
        text = " ".join(str(error).split())
        raise TableError(f"{path} is no Parquet table: {text}. Name another file, or remove this one.") from None
    if [*table.columns] != [*COLUMNS, KEY]:
        raise TableError(f"{path} holds another table than predictions of candidates. Name another file.")
    kept: dict[str, list[CandidateRow]] = {}
    table["caveats"] = table["caveats"].map(tuple)  # which Parquet has as arrays
    for key, *values in table[[KEY, *COLUMNS[:-1]]].itertuples(index=False, name=None):
        kept.setdefault(key, []).append(CandidateRow(*values))
    return kept


def _question_key(evaluator: Evaluator) -> str | None:
    """A digest of everything but the candidate; None where inputs or the user's formulas cannot be told.

    The default dtype is what builders and configs get where nothing else is asked.
    """
    options = evaluator.options
    inputs, formulas = fingerprint(options.inputs), fingerprint(registered(BUILT_IN))
    if inputs is None or formulas is None:
        return None
    settings = ("precision", "attention", "protocol", "seq", "image")
    asked = [evaluator.batches, evaluator.runtimes, *(getattr(options, name) for name in settings)]
    # What builds a model that goes by its name is told by no fingerprint.
    own_code = graph_store.digest_of("**/*.py", "models/*.json")
    software = [platform.python_version(), own_code, *map(version, VERSIONED)]
    tools = [*map(tool_options, evaluator.runtimes)]
    dtype = str(torch.get_default_dtype())
    digest = hashlib.sha256(msgspec.json.encode([asked, software, tools, inputs, formulas, dtype]))
    for predictor in evaluator.predictors:
        digest.update(document.encode(predictor.profile) + repr((predictor.slowdown, predictor.caveats)).encode())
    return digest.hexdigest()
