"""Walks the models of a table as the software of its era ran them, each input size and number format once.

Walks are kept in the user's cache, so that a table is walked once; many at a time are made in processes beside each
other, model by model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import joblib
import pandas as pd

import latpred
from latpred.eras import as_run_in, attention_of
from latpred.errors import MissingPackageError, UnknownModelError
from latpred.graph import ModelGraph
from latpred.runtimes import store

Progress = Callable[[str], None]

# Fewer walks than that are over before a second process has imported PyTorch.
FEWEST_BESIDE = 16
MOST_PROCESSES = 4


class WalkKey(NamedTuple):
    """A model at an input size, in a number format."""

    model: str
    kind: str
    size: int
    precision: str


Walks = Mapping[WalkKey, ModelGraph]
_Made = dict[WalkKey, ModelGraph] | MissingPackageError


def keys_of(cells: pd.DataFrame) -> list[WalkKey]:
    """What the rows of a table need, row by row."""
    columns = (cells["model"], cells["input_kind"], cells["input_size"], cells["precision"])
    return [WalkKey(str(m), str(k), int(s), str(p)) for m, k, s, p in zip(*columns, strict=True)]


def walk_all(
    keys: Iterable[WalkKey],
    era: str,
    known: MutableMapping[WalkKey, ModelGraph] | None = None,
    progress: Progress | None = None,
    lacking: MutableMapping[str, str] | None = None,
) -> MutableMapping[WalkKey, ModelGraph]:
    """Eager walks of models, as an era ran them.

    Parameters
    ----------
    keys : iterable of WalkKey
        Which models; repeats are walked once.
    era : str
        See `latpred.eras`.
    known : mapping, optional
        Walks there are already; new ones are added to it.
    progress : callable, optional
        Told what is being walked.
    lacking : mapping, optional
        Models that need a package which is not there are put into it, with the reason; without it they end everything.

    Raises
    ------
    MissingPackageError
        When a model needs a package that is not there, or cannot be imported.
    UnknownModelError
        When a name means nothing; says which row of the table has it and what is nearest.
    TraceError
        When a model cannot be walked.
    """
    walks = {} if known is None else known
    missing: dict[str, list[WalkKey]] = {}
    for key in dict.fromkeys(keys):
        if key not in walks:
            kept = store.look_up(_parts(key, era)) if _lasting(key.model) else None
            if kept is None:
                missing.setdefault(key.model, []).append(key)
            else:
                walks[key] = kept
    for name, made in _walked(missing, era, progress or (lambda _: None)):
        if isinstance(made, MissingPackageError):
            if lacking is None:
                raise made
            lacking[name] = str(made)
            continue
        for key, graph in made.items():
            if _lasting(key.model):
                store.keep(_parts(key, era), graph)
            walks[key] = graph
    return walks


def _walked(models: Mapping[str, Sequence[WalkKey]], era: str, progress: Progress) -> Iterator[tuple[str, _Made]]:
    """Walks of models, one model after the other; where there are many, several at a time."""
    processes = min(joblib.cpu_count(), MOST_PROCESSES) if sum(map(len, models.values())) >= FEWEST_BESIDE else 1
    # The models with most walks come first, lest one process be left with one of them.
    ordered = sorted(models.values(), key=len, reverse=True)
    calls = (joblib.delayed(_walk_model)(keys, era) for keys in ordered)
    for name, made in joblib.Parallel(n_jobs=processes, batch_size=1, return_as="generator_unordered")(calls):
        if not isinstance(made, MissingPackageError):
            progress(f"walked {name} ({len(made)} combinations of input size and precision)")
        yield name, made


def _walk_model(keys: Sequence[WalkKey], era: str) -> tuple[str, _Made]:
    name = keys[0].model
    try:
        return name, {key: as_run_in(era, _walk(key, era)) for key in keys}
    except MissingPackageError as error:
        return name, MissingPackageError(str(error))  # without what it was raised from, which may not leave a process


def _walk(key: WalkKey, era: str) -> ModelGraph:
    from latpred.tracing import trace
    from latpred.tracing.names import attention

    size = key.size or None
    try:
        with attention(attention_of(era)):
            return trace(
                key.model,
                seq=size if key.kind == "seq" else None,
                image=size if key.kind == "image" else None,
                precision=key.precision,
            )
    except UnknownModelError as error:
        raise UnknownModelError(f"the table's column model: {error}") from error


# -- the cache -----------------------------------------------------------------------------------------------------


def _lasting(name: str) -> bool:
    """Whether a name means the same tomorrow: one of a function in a user's file does not."""
    return ".py:" not in name


def _parts(key: WalkKey, era: str) -> tuple[str, ...]:
    """Everything that the walk of a published model depends on."""
    return (key.model, key.kind, str(key.size), key.precision, era, *_software())


@cache
def _software() -> tuple[str, ...]:
    """Versions of the packages that models come from, and a digest of the code that walks them."""
    versions = []
    for name in ("torch", "transformers", "torchvision", "timm"):
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            versions.append(f"no {name}")
    root = Path(latpred.__file__).parent
    sources = sorted([*root.glob("tracing/*.py"), *root.glob("ops/*.py"), root / "graph.py", root / "eras.py"])
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources))
    return (*versions, digest.hexdigest())
