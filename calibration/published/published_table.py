"""Reads tables of published latencies: brings their columns to those of a measurement table and refuses what cannot be.

Two forms are read: measurement tables (`latpred.tables.MEASURED`; what is missing is taken from its defaults), and the
form of the framework-tax measurements, recognised by its column "gpu": gpu, runtime, precision, model, batch,
input_size, input_kind ("seq_len" or "image_px"), latency_s and run, pipelined, of PyTorch 1.12.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import joblib
import numpy as np
import pandas as pd

from latpred import tables
from latpred.errors import MissingPackageError, TableError, UnknownModelError
from latpred.graph.graph import ModelGraph
from latpred.runtimes import graph_store
from latpred.runtimes.legacy_torch import TORCH_1_12, as_run_in, attention_of

MODELS = {
    "albert": "albert-base-v2",
    "bert": "bert-base-uncased",
    "deberta": "deberta-base",
    "distilbert": "distilbert-base-uncased",
    "longformer": "longformer-base-4096",
    "roberta": "roberta-base",
    "squeeze_bert": "squeezebert-uncased",
    "alexnet": "torchvision:alexnet",
    "googlenet": "torchvision:googlenet",
    "inception": "torchvision:inception_v3",
    "mobilenet_v2": "torchvision:quantized_mobilenet_v2",  # in floating point, with ReLU for ReLU6
    "resnet18": "torchvision:resnet18",
    "resnet50": "torchvision:resnet50",
    "resnet152": "torchvision:resnet152",
    "resnext50_32x4d": "torchvision:resnext50_32x4d",
    "shufflenet": "torchvision:shufflenet_v2_x1_0",
    "squeezenet": "torchvision:squeezenet1_0",
    "wide_resnet50_2": "torchvision:wide_resnet50_2",
    "efficientnet_lite": "timm:efficientnet_lite1",
    "gernet": "timm:gernet_m",
}


NEEDED = ("gpu", "model", "batch", "latency_s", "run")
OPTIONAL: Mapping[str, str | int] = {
    "runtime": "eager",
    "precision": "fp32",
    "input_size": 0,
    "input_kind": "default",
    "protocol": "pipelined",
    "stack": "torch=1.12.1 cuda=11.6 transformers=4.9",
}
_KINDS = {"seq_len": "seq", "image_px": "image"}
SLOWEST_S = 60.0  # a forward pass of more is either a mistake of units or not what one asks latpred
_MILLISECONDS_AT_ONE = 0.5  # a median of batch 1 above this many seconds is one of milliseconds
CONTRADICTION = 10.0


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """A table that can be fitted.

    Attributes
    ----------
    cells : DataFrame
        Columns of a measurement table; `device` names the GPU. Repeats of a cell in one run are their median.
    weight : ndarray
        Of each row: below 1 where repeats contradict each other.
    torch_version : str
        Which PyTorch ran it (see `latpred.runtimes.legacy_torch`); "" is today's.
    notes : tuple of str
        What was found and done, as sentences.
    """

    cells: pd.DataFrame
    weight: np.ndarray
    torch_version: str
    notes: tuple[str, ...]

    def where(self, keep: np.ndarray) -> PublishedTable:
        """Some of its rows."""
        return replace(self, cells=self.cells[keep].reset_index(drop=True), weight=self.weight[keep])


def read(source: tables.Source) -> PublishedTable:
    """Read a table of latencies from a DataFrame or a CSV file (also gzipped).

    Raises
    ------
    TableError
        When columns are missing (with the nearest there are), a value is empty, not a number or impossible, or
        latencies look like milliseconds.

    Examples
    --------
    >>> row = {"gpu": "2080Ti", "model": "resnet18", "batch": 1, "latency_s": 0.003, "run": "a"}
    >>> read(pd.DataFrame([row])).cells[["device", "model", "protocol"]].iloc[0].tolist()
    ['2080Ti', 'torchvision:resnet18', 'pipelined']
    """
    frame = tables.load(source)
    if len(frame) == 0:
        raise TableError("The table has no rows. Give one with measured latencies.")
    published = "gpu" in frame.columns or "device" not in frame.columns
    outside = _mapped(frame) if published else tables.complete(frame)
    cells = tables.check(outside, tables.MEASURED)
    cells = cells[cells["status"] == tables.OK] if "status" in cells else cells
    _refuse_milliseconds(cells)
    merged, weight, notes = _without_repeats(cells.reset_index(drop=True))
    legacy = bool(merged["stack"].str.contains(r"torch=1\.").any())
    return PublishedTable(merged, weight, TORCH_1_12 if legacy else "", tuple(notes))


def _mapped(frame: pd.DataFrame) -> pd.DataFrame:
    """The columns of a measurement table from those of a published one; others are dropped."""
    missing = [name for name in NEEDED if name not in frame.columns]
    if missing:
        raise TableError(f"The table lacks {_with_nearest(missing, [str(name) for name in frame.columns])}.")
    out = pd.DataFrame({name: frame[name] for name in NEEDED})
    for name, value in OPTIONAL.items():
        given = frame[name] if name in frame.columns else pd.Series([value] * len(frame), index=frame.index)
        out[name] = given.where(given.notna() & (given.astype(str) != ""), value)
    out["input_kind"] = out["input_kind"].map(lambda kind: _KINDS.get(str(kind), str(kind)))
    out["model"] = out["model"].map(lambda model: MODELS.get(str(model), str(model)))
    out = out.rename(columns={"gpu": "device"})
    out["machine"] = out["run"]
    out["spread_s"] = np.nan
    out["n"] = 1
    return out


def _with_nearest(missing: list[str], there: list[str]) -> str:
    said = []
    for name in missing:
        near = difflib.get_close_matches(name, there, n=1, cutoff=0.5)
        said.append(f"the column {name}" + (f" (nearest: {near[0]!r}, rename it)" if near else ""))
    return f"{', '.join(said)}. It needs {', '.join(NEEDED)}"


def _refuse_milliseconds(cells: pd.DataFrame) -> None:
    latency = cells["latency_s"].to_numpy(float)
    small = latency[cells["batch"].to_numpy() <= 2]
    typical = float(np.median(small)) if small.size else float(latency.min())
    if typical > _MILLISECONDS_AT_ONE or float(np.median(latency)) > SLOWEST_S:
        raise TableError(
            f"latency_s looks like milliseconds: a forward pass of the smallest batches takes {typical:.3g} s in the "
            "median. Divide the column by 1000."
        )


def _without_repeats(cells: pd.DataFrame) -> tuple[pd.DataFrame, np.ndarray, list[str]]:
    """One row for each cell of each run, less weight where rows contradict each other, and sentences about both."""
    keys = [key for key in tables.KEYS if key != "machine"]
    of_cell = cells.groupby(keys, sort=False)["latency_s"]
    contrary = (of_cell.transform("max") >= CONTRADICTION * of_cell.transform("min")).to_numpy()
    of_run = cells.groupby([*keys, "run"], sort=False)["latency_s"]
    first = (~cells.duplicated([*keys, "run"])).to_numpy()
    notes = []
    if not first.all():
        notes.append(f"{int((~first).sum())} rows repeat a cell of their run; the median of each cell counts once")
    if contrary.any():
        worst = cells[contrary].iloc[0]
        notes.append(
            f"{int(contrary.sum())} rows contradict others of their cell tenfold or more (the first: "
            f"{tables.cell_name(worst)}, run {worst['run']}); they count a tenth"
        )
    merged = cells.assign(latency_s=of_run.transform("median"))[first].reset_index(drop=True)
    return merged, np.where(contrary[first], 0.1, 1.0), notes


Progress = Callable[[str], None]

# Fewer traces than that are over before a second process has imported PyTorch.
FEWEST_BESIDE = 16
MOST_PROCESSES = 4


class TraceKey(NamedTuple):
    """A model at an input size, in a number format."""

    model: str
    kind: str
    size: int
    precision: str


Graphs = MutableMapping[TraceKey, ModelGraph]
_Traced = dict[TraceKey, ModelGraph] | MissingPackageError


def keys_of(cells: pd.DataFrame) -> list[TraceKey]:
    """What the rows of a table need, row by row."""
    columns = (cells["model"], cells["input_kind"], cells["input_size"], cells["precision"])
    return [TraceKey(str(m), str(k), int(s), str(p)) for m, k, s, p in zip(*columns, strict=True)]


def trace_all(
    keys: Iterable[TraceKey],
    torch_version: str,
    graphs: Graphs | None = None,
    progress: Progress | None = None,
    lacking: MutableMapping[str, str] | None = None,
) -> Graphs:
    """Eager graphs of models, as a version of PyTorch ran them.

    Graphs there are already are not traced again; new ones are added to them. Models that need a package which is not
    there are put into `lacking`, with the reason; without it they end everything with a MissingPackageError.
    """
    graphs = {} if graphs is None else graphs
    missing: dict[str, list[TraceKey]] = {}
    for key in dict.fromkeys(keys):
        if key not in graphs:
            stored = graph_store.look_up(_store_key(key, torch_version))
            if stored is None:
                missing.setdefault(key.model, []).append(key)
            else:
                graphs[key] = stored
    for name, traced in _traced(missing, torch_version, progress or (lambda _: None)):
        if isinstance(traced, MissingPackageError):
            if lacking is None:
                raise traced
            lacking[name] = str(traced)
            continue
        for key, graph in traced.items():
            graph_store.keep(_store_key(key, torch_version), graph)
            graphs[key] = graph
    return graphs


def _traced(
    models: Mapping[str, Sequence[TraceKey]], torch_version: str, progress: Progress
) -> Iterator[tuple[str, _Traced]]:
    """Graphs of models, one model after the other; where there are many, several at a time."""
    processes = min(joblib.cpu_count(), MOST_PROCESSES) if sum(map(len, models.values())) >= FEWEST_BESIDE else 1
    # The models with most graphs come first, lest one process be left with one of them.
    ordered = sorted(models.values(), key=len, reverse=True)
    calls = (joblib.delayed(_trace_model)(keys, torch_version) for keys in ordered)
    for name, traced in joblib.Parallel(n_jobs=processes, batch_size=1, return_as="generator_unordered")(calls):
        if not isinstance(traced, MissingPackageError):
            progress(f"traced {name} ({len(traced)} combinations of input size and precision)")
        yield name, traced


def _trace_model(keys: Sequence[TraceKey], torch_version: str) -> tuple[str, _Traced]:
    name = keys[0].model
    try:
        return name, {key: as_run_in(torch_version, _trace(key, torch_version)) for key in keys}
    except MissingPackageError as error:
        return name, MissingPackageError(str(error))  # without what it was raised from, which may not leave a process


def _trace(key: TraceKey, torch_version: str) -> ModelGraph:
    from latpred.tracing import trace
    from latpred.zoo.names import attention

    size = key.size or None
    try:
        with attention(attention_of(torch_version)):
            return trace(
                key.model,
                seq=size if key.kind == "seq" else None,
                image=size if key.kind == "image" else None,
                precision=key.precision,
            )
    except UnknownModelError as error:
        raise UnknownModelError(f"the table's column model: {error}") from error


def _store_key(key: TraceKey, torch_version: str) -> tuple[str, ...] | None:
    return graph_store.key_of(key.model, kind=key.kind, size=key.size, precision=key.precision, run_in=torch_version)
