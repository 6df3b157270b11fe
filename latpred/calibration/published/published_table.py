"""Reads tables of published latencies and traces their models.

Columns are brought to those of a measurement table, and what cannot be meant is refused.

Two forms are read as they are: measurement tables (`latpred.tables.MEASURED`; what is missing is taken from its
defaults), and the form of the framework-tax measurements, recognised by its column "gpu": gpu, runtime, precision,
model, batch, input_size, input_kind ("seq_len" or "image_px"), latency_s and run. Where such a table does not say, its
rows are taken to be pipelined and of PyTorch 1.12, and a note tells. Tables of any other form need a mapping
(`calibration.published.mapping`).
"""

from __future__ import annotations

import difflib
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from latpred import tables
from latpred.accuracy.predicted import GraphKey, batches_of, counted, graph_keys, options_of
from latpred.calibration.published import mapping as mappings
from latpred.calibration.published.mapping import TableMapping
from latpred.errors import LatpredError, TableError, UnknownModelError
from latpred.graph.graph import Affine, ModelGraph, Op
from latpred.profile import gpus
from latpred.query import AMP, ATTENTIONS, PROTOCOLS
from latpred.runtimes import graph_store
from latpred.runtimes.legacy_torch import TORCH_1_12, TORCH_2, TORCH_2_4, attention_of
from latpred.tracing.inputs import DTYPES
from latpred.zoo.names import full_name

MODELS = {
    "albert": "albert-base-v2",
    "bert": "bert-base-uncased",
    "deberta": "deberta-base",
    "distilbert": "distilbert-base-uncased",
    "longformer": "longformer-base-4096",
    "roberta": "roberta-base",
    "squeeze_bert": "squeezebert-uncased",
    "inception": "torchvision:inception_v3",
    "mobilenet_v2": "torchvision:quantized_mobilenet_v2",  # in floating point, with ReLU for ReLU6
    "shufflenet": "torchvision:shufflenet_v2_x1_0",
    "squeezenet": "torchvision:squeezenet1_0",
    "efficientnet_lite": "timm:efficientnet_lite1",
    "gernet": "timm:gernet_m",
}
_BY_NAME = ("alexnet", "googlenet", "resnet18", "resnet50", "resnet152", "resnext50_32x4d", "wide_resnet50_2")
MODELS |= {name: f"torchvision:{name}" for name in _BY_NAME}

NEEDED = ("gpu", "model", "batch", "latency_s", "run")
# What rows of the framework-tax measurements are taken for that do not say.
FRAMEWORK_TAX = {"protocol": "pipelined", "stack": "torch=1.12.1 cuda=11.6 transformers=4.9"}
PRODUCT = "product"  # input kind of rows that are one matrix product
_KINDS = {"seq_len": "seq", "image_px": "image"}
CONTRADICTION = 10.0
_NEWEST = 99  # minor version of a release that tells its major one alone
Progress = Callable[[str], None]

# And rows of any form, beside what `tables.DEFAULTS` says.
_DEFAULTS = {"memory_format": "contiguous", "attention": "", "host": ""}
_WORDS = {
    "precision": tuple(DTYPES),
    "protocol": PROTOCOLS,
    "memory_format": ("contiguous", "channels_last"),
    "attention": ATTENTIONS,
}


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """A table that can be fitted."""

    # A measurement table whose `device` names the GPU, `x_source` where a row comes from. Repeats of a cell in one run
    # are their median, and `repeat_ratio` says how far they lie apart.
    cells: pd.DataFrame
    weight: np.ndarray  # of each row: below 1 where repeats contradict each other
    notes: tuple[str, ...]  # what was found and done, as sentences

    def where(self, keep: np.ndarray) -> PublishedTable:
        """Some of its rows."""
        return replace(self, cells=self.cells[keep].reset_index(drop=True), weight=self.weight[keep])

    def kept(self) -> list[str]:
        """What is in it, a sentence for each source, GPU and runtime."""
        columns = (self.cells[name] for name in (tables.SOURCE, "device", "runtime"))
        counts = Counter(zip(*columns, strict=True))
        return [
            f"{counted(count, 'row')} of {source} on {device} in {runtime}"
            for (source, device, runtime), count in sorted(counts.items())
        ]


def eras(cells: pd.DataFrame) -> list[str]:
    """Of each row: which PyTorch ran it (see `latpred.runtimes.legacy_torch`); "" where nobody says.

    >>> eras(pd.DataFrame({"stack": ["torch=1.13 cuda=11.7", "torch==2.4.1", "torch=2.9", "torch=2", ""]}))
    ['torch-1.12', 'torch-2.4', 'torch-2', 'torch-2', '']
    """
    return list(map(_era_of, map(_version_of, cells["stack"])))


def releases(cells: pd.DataFrame) -> list[str]:
    """Of each row: the release of PyTorch that ran it, if it is before 2.0; those before 1.12 count as one.

    >>> releases(pd.DataFrame({"stack": ["torch=1.10 cuda=11.3", "torch==1.13.1", "torch=2.4", ""]}))
    ['1.11', '1.13', '', '']
    """
    versions = map(_version_of, cells["stack"])
    return ["" if of is None or of >= (2,) else f"1.{min(max(of[1], 11), 13)}" for of in versions]


def _version_of(stack: object) -> tuple[int, int] | None:
    """PyTorch's major and minor version; "torch=2" may be the newest."""
    found = re.search(r"torch=+(\d+)(?:\.(\d+))?", str(stack))
    return (int(found[1]), int(found[2] or _NEWEST)) if found else None


def _era_of(version: tuple[int, int] | None) -> str:
    if version is None:
        return ""
    if version < (2,):
        return TORCH_1_12
    return TORCH_2_4 if version < (2, 5) else TORCH_2


def read(source: tables.Source | PublishedTable) -> PublishedTable:
    """Read a table of latencies from a DataFrame or a CSV file (also gzipped); one that was read stays as it is."""
    return source if isinstance(source, PublishedTable) else read_all([source])


def read_all(sources: Sequence[tables.Source], mapping: str | os.PathLike[str] | None = None) -> PublishedTable:
    """Read several tables of latencies as one; those of another form than latpred's go through the mapping of a file.

    A row with words that nobody knows is a TableError.
    """
    rules = None if mapping is None else mappings.load(mapping)
    notes: list[str] = []
    frames = [tables.load(source) for source in sources]
    mapped = [frame for frame in frames if not _of_known_form(frame)]
    if rules is not None and not mapped:
        raise TableError(
            f"No table goes through the mapping {mapping}: each has the columns of a form that is read as it is. Leave "
            "the mapping out, or give a column another name and let the mapping set it."
        )
    if rules is not None:
        notes += filter(None, [mappings.without_column(rules, mapped)])
    parts = [_part(frame, name, rules, notes) for frame, name in zip(frames, _names_of(sources), strict=True)]
    parts = [part for part in parts if len(part)]
    if not parts:
        raise TableError(f"No row of the tables can be used. {' '.join(notes)}")
    cells = pd.concat(parts, ignore_index=True)
    named = cells.assign(device=cells["device"].map(gpus.one_name_each(cells["device"].unique())))
    return _without_repeats(named, notes)


def names_gpus(source: tables.Source) -> bool:
    """Whether a table has the form of the framework-tax measurements, or a GPU among its devices."""
    frame = tables.in_lower_case(tables.load(source))
    devices = frame["device"].unique() if "device" in frame else ()
    return "gpu" in frame or any(gpus.find(str(name)) for name in devices)


def _of_known_form(frame: pd.DataFrame) -> bool:
    """Whether a table needs no mapping."""
    columns = set(map(str, frame.columns))
    return columns.issuperset(NEEDED) or columns.issuperset(tables.MEASURED.required)


def _names_of(sources: Sequence[tables.Source]) -> list[str]:
    """The name of each table; a number tells files of one name in several folders apart, as their rows are."""
    names = ["table" if isinstance(one, pd.DataFrame) else Path(one).name.partition(".")[0] for one in sources]
    counts = [names[: place + 1].count(name) for place, name in enumerate(names)]
    return [name if count == 1 else f"{name} {count}" for name, count in zip(names, counts, strict=True)]


def _part(frame: pd.DataFrame, name: str, mapping: TableMapping | None, notes: list[str]) -> pd.DataFrame:
    """The rows of one table that can be used; sentences about others are added to the notes."""
    if len(frame) == 0:
        raise TableError(f"{name} has no rows. Give a table with measured latencies.")
    numbers: Sequence[int] = range(1, len(frame) + 1)
    defaults = {**_DEFAULTS, tables.SOURCE: name}
    rules = None if _of_known_form(frame) else mapping
    frame = frame if rules else tables.in_lower_case(frame)
    if rules is not None:
        frame, omitted = mappings.apply(rules, frame, name)
        for why, count in omitted.most_common():
            notes.append(f"{name}: {count:,} {'row is' if count == 1 else 'rows are'} left out: {why}")
        if frame.empty:
            return frame
        numbers = frame.index.tolist()
    elif "gpu" in frame:
        notes += _assumed(frame, name)
        frame, defaults = _from_framework_tax(frame), defaults | FRAMEWORK_TAX
    frame = tables.complete(frame, defaults)
    cells = tables.check(frame, tables.MEASURED, numbers)
    _demand_known(cells, numbers, name)
    timed = tables.timed(cells)
    if not timed.all():
        notes.append(f"{name}: {(~timed).sum():,} of its rows could not be measured")
    cells = cells[timed]
    # Rows of one run share a host: without its name, those of a machine do, or those of a file.
    nameless = cells["machine"].isin(("", tables.DEFAULTS["machine"]))
    run = cells["run"].where(cells["run"] != "", cells["machine"].where(~nameless, name))
    return cells.assign(run=run, machine=cells["machine"].where(~nameless, run)).reset_index(drop=True)


def _assumed(frame: pd.DataFrame, name: str) -> list[str]:
    """A sentence on what rows are taken for that do not say how they were timed, or with which software."""
    silent = [one for one in FRAMEWORK_TAX if one not in frame or frame[one].fillna("").eq("").any()]
    taken = " and ".join(f"{one} {FRAMEWORK_TAX[one]}" for one in silent)
    said = f"{name}: rows that name none are taken for {taken}, as the framework-tax measurements are"
    return [said] if silent else []


def _demand_known(cells: pd.DataFrame, numbers: Sequence[int], name: str) -> None:
    """Refuse words that nobody knows, in columns where only some make sense."""
    for column, words in _WORDS.items():
        for number, word in zip(numbers, cells[column], strict=True):
            if word and word not in words:
                near = difflib.get_close_matches(word, words, n=1)
                hint = f"Did you mean {near[0]!r}? " if near else ""
                raise TableError(
                    f"{name}, row {number}, column {column}: {word!r} is not known. {hint}Put one of "
                    f"{', '.join(words)} there, or leave the row out."
                )


def _from_framework_tax(frame: pd.DataFrame) -> pd.DataFrame:
    """The columns of a measurement table from those of the framework-tax measurements."""
    return frame.astype(object).rename(columns={"gpu": "device"}).replace({"model": MODELS, "input_kind": _KINDS})


def _without_repeats(cells: pd.DataFrame, notes: Sequence[str]) -> PublishedTable:
    """One row for each cell of each run and its software, with less weight where rows contradict each other."""
    keys = [key for key in (*tables.KEYS, *tables.FURTHER_KEYS) if key != "machine"]
    repeated = [*keys, "run", "stack"]
    of_cell = cells.groupby(keys, sort=False)["latency_s"]
    contrary = (of_cell.transform("max") >= CONTRADICTION * of_cell.transform("min")).to_numpy()
    of_run = cells.groupby(repeated, sort=False)["latency_s"]
    first = (~cells.duplicated(repeated)).to_numpy()
    said = [*notes]
    if not first.all():
        said.append(f"{int((~first).sum())} rows repeat a cell of their run; the median of each cell counts once")
    if contrary.any():
        worst = cells[contrary].iloc[0]
        said.append(
            f"{int(contrary.sum())} rows contradict others of their cell tenfold or more (the first: "
            f"{tables.cell_name(worst)}, run {worst['run']}); they count a tenth"
        )
    size = of_run.transform("size")
    repeats = {} if first.all() else {tables.REPEATS: size.astype(str).where(size > 1, "")}
    own = cells.get("repeat_ratio", np.nan)
    merged = cells.assign(
        latency_s=of_run.transform("median"),
        n=cells.groupby(repeated, sort=False)["n"].transform("sum"),
        repeat_ratio=(of_run.transform("max") / of_run.transform("min")).where(size > 1, own),
        **repeats,
    )
    weight = np.where(contrary, 0.1, 1.0)
    return PublishedTable(merged[first].reset_index(drop=True), weight[first], tuple(said))


Graphs = MutableMapping[GraphKey, ModelGraph]


def trace_keys(cells: pd.DataFrame) -> list[GraphKey]:
    """The key of each row's model in eager, with the era of the PyTorch that ran it."""
    keys = graph_keys(cells.assign(runtime="eager"))
    return [key._replace(era=era) for key, era in zip(keys, eras(cells), strict=True)]


def trace_all(
    asked: Mapping[GraphKey, Sequence[int]],
    graphs: Graphs | None = None,
    progress: Progress | None = None,
    failed: MutableMapping[GraphKey, LatpredError] | None = None,
    *,
    target: str = "cuda",
) -> Graphs:
    """Eager traces of models on a kind of device for the batch sizes of each key; none is rewritten for its era.

    Graphs there are already are not traced again; new ones are added to them. What cannot be traced is put into
    `failed` with its error; without it the error ends everything.
    """
    graphs = {} if graphs is None else graphs
    plain = {key: _as_traced(key) for key in asked if key not in graphs}
    rows = [(today, batch) for key, today in plain.items() for batch in asked[key]]
    made: dict[GraphKey, ModelGraph | LatpredError] = {}
    for today, batches in batches_of((today for today, _ in rows), (batch for _, batch in rows)).items():
        try:
            made[today] = _traced(today, batches, target, progress)
        except LatpredError as error:
            if failed is None:
                raise
            made[today] = error
    for key, today in plain.items():
        graph = made[today]
        if isinstance(graph, ModelGraph):
            graphs[key] = graph
        elif failed is not None:
            failed[key] = graph
    return graphs


def _as_traced(key: GraphKey) -> GraphKey:
    """What is traced with today's PyTorch for a key: of an era, only transformers and autocast differ in a trace."""
    attention = key.attention or (attention_of(key.era) if full_name(key.model) else None) or ""
    kept = TORCH_2 if key.era == TORCH_2_4 else key.era  # traces of which differ in nothing
    return key._replace(attention=attention, era=kept if key.precision in AMP else "")


def _traced(key: GraphKey, batches: Sequence[int], target: str, progress: Progress | None) -> ModelGraph:
    """The graph of a matrix product, or the trace of a model, which is read where it was kept."""
    if key.input_kind == PRODUCT:
        return _product(key)
    before = None if progress is None else partial(progress, f"tracing {key.model} in {key.precision}")
    options = {"batches": batches, "target": target, **options_of(key).tracing}
    try:
        return graph_store.trace_by_name(key.model, key.era, before=before, **options)
    except UnknownModelError as error:
        raise UnknownModelError(f"the table's column model: {error}") from None


def _product(key: GraphKey) -> ModelGraph:
    """The graph of one matrix product "n x k", whose batch is its number of rows."""
    try:
        n, k = (int(side) for side in key.model.split(" x "))
    except ValueError:
        raise TableError(
            f"{key.model!r} is no matrix product: its columns and the length of its sums, as '4096 x 1024', with as "
            "many rows as its batch."
        ) from None
    size, dtype = (4, "float32") if key.precision in ("fp32", "tf32") else (2, "half")
    op = Op(
        name="aten::mm",
        module="",
        host_class="gemm",
        family="gemm",
        dtype=dtype,
        dims={"m": Affine(0, 1), "n": Affine(n), "k": Affine(k)},
        macs=Affine(0, n * k),
        weight_bytes=Affine(size * n * k),
        read_bytes=Affine(0, size * k),
        write_bytes=Affine(0, size * n),
        launches=1,
    )
    return ModelGraph(
        key.model, "custom", 0, key.precision, key.memory_format, n * k, size * n * k, Affine(0, size * k), (op,)
    )
