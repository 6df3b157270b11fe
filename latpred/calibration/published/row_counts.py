"""What host and device have to do in each cell of a table: counts by host class, and kernels by family.

A cell is a traced model at one batch size. Everything that does not depend on fitted numbers is computed here, once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from latpred.accuracy.predicted import GraphKey
from latpred.graph.features import Floats, finer_family, read
from latpred.graph.graph import Affine, Ints, ModelGraph, Op, rewritten
from latpred.ops.families import root
from latpred.prediction.kernel_times import columns
from latpred.profile.datasheet import STAND_INS
from latpred.profile.gpus import Spec
from latpred.query import AMP
from latpred.runtimes.engines import as_engine
from latpred.runtimes.legacy_torch import FUSED_FAMILY, LIBRARY_CLASSES, fuser_of, scripted

EAGER = "eager"
ALONE = "kernel"  # a kernel timed by itself, in a CUDA graph: no host, and no gap to the next
CAPTURED = "cuda-graphs"  # eager's kernels, launched together: what is left of its host is one launch
NO_HOST = (ALONE, CAPTURED)
ENGINES = ("tensorrt",)
SCRIPTED = ("torchscript",)
HALF = ".half"  # ends the host classes of half precision
PYTHON, MODULE, FIXED = "python", "module", "fixed"
PRODUCTS = frozenset({"gemm", "bmm", "attention", "rnn", "conv_depthwise"})
CONVOLUTIONS, MEMORY = "convolutions", "memory-bound"
_FORMATS = {"float16": "fp16", "bfloat16": "bf16"}


class CellKey(NamedTuple):
    """A traced model in one runtime, at one batch size; `fuser` joins its kernels."""

    traced: GraphKey
    runtime: str
    fuser: str
    batch: int


# Kernels of one family; under autocast those of one number format, which is "" for a model that has one only.
KernelGroup = tuple[str, str]


class FamilyWork(NamedTuple):
    """Kernels of one family in all cells, ordered by cell; equal kernels of a cell are one row."""

    cell: Ints
    times: Floats  # how many kernels a row stands for
    work: Floats  # its multiply-adds and bytes (weights, read, written)
    product: Floats  # its m, n, k and copies
    place: Ints  # of it among all of `columns`
    columns: tuple[tuple[str, Floats], ...]  # of kernels, by the family of their ops


@dataclass(frozen=True, slots=True)
class Cells:
    """Cells of a table: how often each host class is met in a forward pass, and its kernels by family."""

    keys: tuple[CellKey, ...]
    classes: tuple[str, ...]
    counts: Floats  # shape (cells, classes)
    kernels: Mapping[KernelGroup, FamilyWork]


# Host classes of a graph's ops; kernels by the latency model's family and by that of their ops: how many of each, and
# their columns as `Affine` numbers in batch.
_Counts = tuple[Counter[str], Mapping[tuple[KernelGroup, str], tuple[Floats, Floats]]]


def weights_of(graph: ModelGraph) -> tuple[tuple[int, ...], ...]:
    """Columns, length of sums and copies of the weights that a model multiplies by, sorted; those of its head left out.

    A head comes last and has one row of each sample; one that scores every word counts. Batch, input size, number
    format and attention change none.
    """
    met = [sizes for op in graph.ops if (sizes := _rows_and_weights(op))]
    last = max((place for place, sizes in enumerate(met) if sizes[0] > 1), default=len(met))
    return tuple(sorted(weights[1:] for weights in met[: last + 1]))


def _rows_and_weights(op: Op) -> tuple[int, ...]:
    """Rows of one sample that an op multiplies by weights, and these as `weights_of` has them; nothing of other ops."""
    size, base = {name: count.at(1) for name, count in op.dims.items()}, root(op.family)
    if base == "gemm":
        return size["m"], size["n"], size["k"], 1
    if base == "rnn":
        return size["batch"] * size["steps"], size["hidden"], size["inputs"], size["layers"]
    if base.startswith("conv"):
        window, groups = size["kernel_h"] * size["kernel_w"], size["groups"]
        rows = size["batch"] * size["h_out"] * size["w_out"]
        return rows, size["c_out"] // groups, size["c_in"] // groups * window, groups
    return ()


def group_of(family: str) -> str:
    """The group whose priors a family has: its own, or that of its like."""
    if root(family) in PRODUCTS:
        return root(family)
    return CONVOLUTIONS if family.startswith("conv") else MEMORY


def multiplies(family: str) -> bool:
    """Whether kernels of a family multiply matrices, or amount to that."""
    return group_of(family) != MEMORY


def family_of(op: Op) -> str:
    """The family whose parameters an op's kernel has in the latency model."""
    fine = finer_family(op.family, op.dims)
    base = root(fine)
    if base in ("conv", "conv_grouped", "bmm", "cat") or fine == FUSED_FAMILY:
        return fine
    return base if base == "attention" else STAND_INS.get(base, base)  # attention has rows of its own


def _host_class_of(op: Op) -> str:
    """The class whose cost an op has in the latency model, as "conv" or "conv.half"."""
    general, _, rest = op.host_class.partition(".")
    general = LIBRARY_CLASSES.get(root(op.family), general)
    return general + HALF if rest.partition(".")[0] == HALF[1:] else general


def cells_of(keys: Sequence[CellKey], graphs: Mapping[tuple[GraphKey, str, str], ModelGraph]) -> Cells:
    """Cells of traced models, by all of `CellKey` but the batch."""
    counted: dict[tuple[object, ...], _Counts] = {}
    hosts: list[Counter[str]] = []
    kernels: dict[tuple[KernelGroup, str], list[tuple[int, Floats, Floats]]] = {}
    for position, key in enumerate(keys):
        graph = graphs[key[:3]]
        graph_key = (*key[:3], graph.own(key.batch))
        if graph_key not in counted:
            counted[graph_key] = _counts(graph.at(key.batch), mixed=key.traced.precision in AMP)
        of_host, of_device = counted[graph_key]
        hosts.append(Counter() if key.runtime in NO_HOST else of_host)
        for names, (count, affine) in of_device.items():
            values = affine[:, :, 0] + affine[:, :, 1] * key.batch
            kernels.setdefault(names, []).append((position, count, values))
    classes = tuple(sorted({name for counter in hosts for name in counter}))
    counts = np.array([[counter[name] for name in classes] for counter in hosts], dtype=float)
    work = {
        group: _work(group[0], {names[1]: kernels[names] for names in kernels if names[0] == group})
        for group in sorted({group for group, _ in kernels})
    }
    return Cells(tuple(keys), classes, counts, work)


def _counts(ops: Sequence[Op], *, mixed: bool) -> _Counts:
    hosts: Counter[str] = Counter({FIXED: 1})
    kernels: dict[tuple[KernelGroup, str], Counter[tuple[Affine, ...]]] = {}
    for op in ops:
        hosts[MODULE] += op.module_calls
        hosts[PYTHON] += op.python_calls
        if not op.name.startswith("python::"):
            hosts[_host_class_of(op)] += 1
        if op.family and op.launches:
            group = family_of(op), _FORMATS.get(op.dtype, "fp32") if mixed else ""
            kernels.setdefault((group, op.family), Counter())[columns(op, root(op.family))] += 1
    return hosts, {
        names: (np.array(list(rows.values()), dtype=float), np.array(list(rows), dtype=float))
        for names, rows in kernels.items()
    }


def _work(family: str, parts: Mapping[str, Sequence[tuple[int, Floats, Floats]]]) -> FamilyWork:
    """Kernels of a family, from cells with their counts and columns, by the family of their ops."""
    joined = {name: np.concatenate([values for _, _, values in cells]) for name, cells in parts.items()}
    cells = [cell for each in parts.values() for cell in each]
    cell = np.repeat([position for position, _, _ in cells], [len(count) for _, count, _ in cells])
    order = np.argsort(cell, kind="stable")
    inputs = [read(root(name), rows) for name, rows in joined.items()]
    work = np.concatenate([one.work for one in inputs])
    products = [one.product for one in inputs if one.product is not None]
    return FamilyWork(
        cell=cell[order],
        times=np.concatenate([count for _, count, _ in cells])[order],
        work=work[order],
        product=np.concatenate(products)[order] if multiplies(family) else np.ones_like(work),
        place=order,
        columns=tuple(joined.items()),
    )


def as_run_by(runtime: str, graph: ModelGraph, gpu: Spec) -> ModelGraph:
    """An eager graph as another runtime is known to run it on a GPU."""
    if runtime in ENGINES:
        return rewritten(graph, as_engine)
    return scripted(graph, fuser_of(gpu)) if runtime in SCRIPTED else graph
