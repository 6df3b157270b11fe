"""What is asked of host and device in each cell of a table: counts by host class, and rows of work by kernel family.

A cell is a walked model at one batch size. Everything that does not depend on fitted numbers is computed here, once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from latpred.calibration.published.priors import multiplies
from latpred.graph.features import CAT, Floats, kind, read
from latpred.graph.graph import Affine, ModelGraph, Op
from latpred.ops.families import root
from latpred.prediction.kernel_times import columns
from latpred.profile.gpus import Spec
from latpred.runtimes.legacy_torch import GROUP, fuser_of, scripted

Ints = NDArray[np.int64]

HALF = ".half"
PYTHON, MODULE, FIXED = "python", "module", "fixed"
WITHOUT_HALF = (PYTHON, MODULE, FIXED)
_STAND_INS = {"factory": "elementwise", "other": "elementwise", "sort": "elementwise", "fft": "elementwise"}


class CellKey(NamedTuple):
    """A model at an input size in one number format and runtime, at one batch size; `fuser` joins its kernels."""

    model: str
    size: int
    precision: str
    runtime: str
    fuser: str
    batch: int


@dataclass(frozen=True, slots=True)
class Work:
    """Kernels of one family in all cells; equal kernels of a cell are one row.

    Attributes
    ----------
    cell : ndarray of int
        Cell of each row, ascending.
    count : ndarray
        How many kernels each row stands for.
    work, product : ndarray, shape (rows, 4)
        Multiply-adds and bytes (weights, read, written); m, n, k and copies.
    """

    cell: Ints
    count: Floats
    work: Floats
    product: Floats


@dataclass(frozen=True, slots=True)
class Cells:
    """Cells of a table.

    Attributes
    ----------
    keys : tuple[CellKey, ...]
        Which they are.
    classes : tuple[str, ...]
        Host classes; one of half precision ends in ".half".
    counts : ndarray, shape (cells, classes)
        How often each is met in a forward pass.
    kernels : Mapping[str, Work]
        Work by family.
    """

    keys: tuple[CellKey, ...]
    classes: tuple[str, ...]
    counts: Floats
    kernels: Mapping[str, Work]

    def index(self) -> dict[CellKey, int]:
        """Position of each cell."""
        return {key: position for position, key in enumerate(self.keys)}


class _Kernels(NamedTuple):
    """Kernels of one family that a walk launches: how many of each, and their columns as lines in batch."""

    times: Floats
    constant: Floats
    per_sample: Floats


class _Walk(NamedTuple):
    """One graph at batch 1, or at any other batch; kernels by the law's family and by the one with their columns."""

    hosts: Counter[str]
    kernels: Mapping[tuple[str, str], _Kernels]


def family_of(op: Op) -> str:
    """The family whose parameters an op's kernel has in the law.

    >>> from latpred.graph.graph import ZERO
    >>> family_of(Op("aten::gelu", "", "elementwise.gelu", "elementwise.gelu", "float32", {"numel": ZERO}))
    'elementwise'
    """
    fine = kind(op.family, op.dims)
    base = root(fine)
    if base in ("conv", "conv_grouped", "cat") or fine == GROUP:
        return fine
    return "index" if base == "embedding" else _STAND_INS.get(base, base)


def host_class_of(op: Op) -> str:
    """The class whose cost an op has in the law, as "conv" or "conv.half"."""
    general, _, rest = op.host_class.partition(".")
    return general + HALF if rest.partition(".")[0] == HALF[1:] else general


def cells_of(keys: Sequence[CellKey], graphs: Mapping[tuple[str, int, str, str, str], ModelGraph]) -> Cells:
    """Cells of walked models, by (model, size, precision, runtime, fuser)."""
    walks: dict[tuple[object, ...], _Walk] = {}
    hosts: list[Counter[str]] = []
    found: dict[tuple[str, str], list[tuple[int, Floats, Floats]]] = {}
    for position, key in enumerate(keys):
        graph = graphs[key[:5]]
        special = key.batch == 1 and graph.ops_at_one is not None
        walk = walks.get((*key[:5], special))
        if walk is None:
            walk = walks[*key[:5], special] = _walk(graph.at(key.batch))
        hosts.append(walk.hosts)
        for names, launched in walk.kernels.items():
            values = launched.constant + launched.per_sample * key.batch
            found.setdefault(names, []).append((position, launched.times, values))
    classes = tuple(sorted({name for counter in hosts for name in counter}))
    counts = np.array([[counter[name] for name in classes] for counter in hosts], dtype=float)
    families = sorted({family for family, _ in found})
    kernels = {
        family: _joined([_work(*names, found[names]) for names in found if names[0] == family]) for family in families
    }
    return Cells(tuple(keys), classes, counts, kernels)


def _walk(ops: Sequence[Op]) -> _Walk:
    hosts: Counter[str] = Counter({FIXED: 1})
    kernels: dict[tuple[str, str], Counter[tuple[Affine, ...]]] = {}
    for op in ops:
        hosts[MODULE] += op.module_calls
        hosts[PYTHON] += op.python_calls
        if not op.name.startswith("python::"):
            hosts[host_class_of(op)] += 1
        if op.family and op.launches:
            base = root(op.family)
            kernels.setdefault((family_of(op), base), Counter())[columns(op, base)] += 1
    return _Walk(hosts, {names: _kernels(lines) for names, lines in kernels.items()})


def _kernels(lines: Counter[tuple[Affine, ...]]) -> _Kernels:
    values = np.array(list(lines), dtype=float)
    return _Kernels(np.array(list(lines.values()), dtype=float), values[:, :, 0], values[:, :, 1])


def _work(family: str, base: str, found: Sequence[tuple[int, Floats, Floats]]) -> Work:
    inputs = read(base, np.concatenate([values for _, _, values in found]))
    product = np.ones_like(inputs.work) if inputs.product is None or not multiplies(family) else inputs.product
    return Work(
        cell=np.repeat([position for position, _, _ in found], [len(count) for _, count, _ in found]),
        count=np.concatenate([count for _, count, _ in found]),
        work=inputs.work,
        product=product,
    )


def _joined(parts: Sequence[Work]) -> Work:
    cell = np.concatenate([part.cell for part in parts])
    order = np.argsort(cell, kind="stable")
    count, work, product = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("count", "work", "product")
    )
    return Work(cell[order], count[order], work[order], product[order])


ENGINES = ("tensorrt",)
SCRIPTED = ("torchscript",)
_POINTWISE = ("batch_norm", "elementwise")
_JOINED = f"{CAT}.engine"


def fuser_name(runtime: str, gpu: Spec) -> str:
    """What joins kernels in a runtime on a GPU; graphs of one runtime differ by no more than that."""
    return fuser_of(gpu).name if runtime in SCRIPTED else ""


def as_run_by(runtime: str, graph: ModelGraph, gpu: Spec) -> ModelGraph:
    """An eager graph as another runtime is known to run it on a GPU."""
    if runtime in ENGINES:
        exact = graph.ops_at_one
        return msgspec.structs.replace(
            graph, ops=_launched(graph.ops), ops_at_one=None if exact is None else _launched(exact)
        )
    return scripted(graph, fuser_of(gpu)) if runtime in SCRIPTED else graph


def _launched(ops: tuple[Op, ...]) -> tuple[Op, ...]:
    kept: list[Op] = []
    for op in ops:
        if op.launches and op.family and not (kept and root(op.family) in _POINTWISE):
            # However many tensors an engine joins, it is not PyTorch's kernel that does it.
            family = _JOINED if root(op.family) == CAT else op.family
            kept.append(msgspec.structs.replace(op, family=family, module_calls=0, python_calls=0))
    return tuple(kept)
