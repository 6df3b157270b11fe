"""Walks the models of a table as the software of its era ran them, each input size and number format once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import NamedTuple

import pandas as pd

from latpred.eras import as_run_in, attention_of
from latpred.errors import UnknownModelError
from latpred.graph import ModelGraph

Progress = Callable[[str], None]


class WalkKey(NamedTuple):
    """A model at an input size, in a number format."""

    model: str
    kind: str
    size: int
    precision: str


Walks = Mapping[WalkKey, ModelGraph]


def keys_of(cells: pd.DataFrame) -> list[WalkKey]:
    """What the rows of a table need, row by row."""
    columns = (cells["model"], cells["input_kind"], cells["input_size"], cells["precision"])
    return [WalkKey(str(m), str(k), int(s), str(p)) for m, k, s, p in zip(*columns, strict=True)]


def walk_all(
    keys: Iterable[WalkKey],
    era: str,
    known: MutableMapping[WalkKey, ModelGraph] | None = None,
    progress: Progress | None = None,
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

    Raises
    ------
    UnknownModelError
        When a name means nothing; says which row of the table has it and what is nearest.
    TraceError
        When a model cannot be walked.
    """
    walks = {} if known is None else known
    for key in dict.fromkeys(keys):
        if key not in walks:
            if progress is not None:
                progress(f"walking {key.model} ({key.kind} {key.size}, {key.precision})")
            walks[key] = as_run_in(era, _walk(key, era))
    return walks


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
