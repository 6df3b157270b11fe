"""What a kernel's time depends on: the columns of work and dimensions, and the log features made of them.

Every feature is a product of powers of dimensions, so all of them are one matrix product over log dimensions.
Convolutions and attention are also read as matrix products (m, n, k and a number of copies), which is what fills a
device. Nothing here knows how long anything takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from latpred.graph.graph import Affine
from latpred.ops.families import CONV_DIMS, DIMS, root

Floats = NDArray[np.float64]
Powers = Mapping[str, Mapping[str, int]]

WORK = ("macs", "weight_bytes", "read_bytes", "write_bytes")
ROW_BY_ROW = 64  # rows up to which each is evaluated as if it were alone
TILE = 128  # output rows and columns that one multiprocessor takes at a time in a large product


def _plain(*names: str) -> dict[str, dict[str, int]]:
    """Features that are dimensions as they are."""
    return {name: {name: 1} for name in names}


_CONV_FEATURES: Powers = {
    **_plain("batch"),
    "pixels": {"h_out": 1, "w_out": 1},
    **_plain("c_in", "c_out"),
    "window": {"kernel_h": 1, "kernel_w": 1},
    **_plain("stride", "groups"),
}
_CONV_PRODUCT: Powers = {
    "m": {"batch": 1, "h_out": 1, "w_out": 1},
    "n": {"c_out": 1, "groups": -1},
    "k": {"c_in": 1, "groups": -1, "kernel_h": 1, "kernel_w": 1},
    "copies": {"groups": 1},
}
# PyTorch's own loops take the samples of a batch one after the other.
_NATIVE_PRODUCT: Powers = {**_CONV_PRODUCT, "m": {"h_out": 1, "w_out": 1}, "copies": {"batch": 1, "groups": 1}}
_CONVOLUTIONS = [family for family, dims in DIMS.items() if dims == CONV_DIMS]
# Counts of what a family's loops do to each value, which take time of their own.
NATIVE = "conv_native"
LOOP_COUNTS = {
    "generated": ("plain", "math", "strided", "looked_up"),
    "rnn": ("calls", "reread", "weights"),
    "copy": ("matrices",),
    # PyTorch's own loops take these one after the other, too, each with ops of its own. `read` adds what maps of few
    # pixels take, which is no dimension.
    NATIVE: ("groups",),
}
_GRAIN = 32768  # at::internal::GRAIN_SIZE
VECTOR_VALUES = 16  # that one instruction of a CPU takes
_MAYBE_NATIVE = {"conv", "conv_grouped", "conv_depthwise"}
_LIBRARY_BATCH = 16  # pointwise convolutions of fewer samples are not worth oneDNN to one thread
_LIBRARY_PIXELS = 20480  # nor are single images of fewer values, on any number of threads

_FEATURES: dict[str, Powers] = {
    **{family: _plain(*dims) for family, dims in DIMS.items()},
    **dict.fromkeys(_CONVOLUTIONS, _CONV_FEATURES),
    # What its loops do is in the roofline.
    "generated": _plain("numel", "cols", "parts"),
    "rnn": _plain("batch", "steps", "hidden", "inputs", "layers"),
    "copy": _plain("numel", "run"),
    "attention": {"heads": {"batch": 1, "heads": 1}, **_plain("queries", "keys", "head_dim", "masked")},
    "pooling": {"planes": {"batch": 1, "channels": 1}, "pixels": {"h_out": 1, "w_out": 1}, "window": {"window": 1}},
}
_PRODUCTS: dict[str, Powers] = {
    "gemm": {**_plain("m", "n", "k"), "copies": {}},
    "bmm": {**_plain("m", "n", "k"), "copies": {"batch": 1}},
    **dict.fromkeys(_CONVOLUTIONS, _CONV_PRODUCT),
    NATIVE: _NATIVE_PRODUCT,
    "attention": {"m": {"queries": 1}, "n": {"keys": 1}, "k": {"head_dim": 1}, "copies": {"batch": 1, "heads": 1}},
    "rnn": {"m": {"batch": 1}, "n": {"hidden": 1}, "k": {"inputs": 1}, "copies": {}},
}


class Layout(NamedTuple):
    """How the columns of a family become features."""

    family: str  # the key of `DIMS` that describes it
    columns: tuple[str, ...]  # work, then dimensions
    names: tuple[str, ...]  # features before the roofline's own
    powers: Floats  # (dims, features) exponents
    product: Floats | None  # (dims, 4) exponents of m, n, k and copies; None for families that multiply nothing
    loop_columns: slice  # of the counts that `LOOP_COUNTS` names


class Inputs(NamedTuple):
    """Rows of a family, ready for the roofline: work, log features, m, n, k and copies, and what loops count."""

    work: Floats
    logs: Floats
    product: Floats | None
    loop_counts: Floats


@cache
def layout(family: str) -> Layout:
    """The layout of a family, or of the family it is a special case of; "other" when it is unknown.

    >>> layout("gemm").columns
    ('macs', 'weight_bytes', 'read_bytes', 'write_bytes', 'm', 'n', 'k')
    >>> layout("norm.layer_norm").names, layout("flash.custom").names
    (('rows', 'cols', 'bytes'), ('numel', 'bytes'))
    """
    name = root(family) if root(family) in DIMS else "other"
    dims = DIMS[name]
    features, product = _FEATURES[name], _PRODUCTS.get(name)
    names = tuple(features) if product is not None else (*features, "bytes")
    counted = LOOP_COUNTS.get(name, ())
    first = len(WORK) + (dims.index(counted[0]) if counted else len(dims))
    return Layout(
        family=name,
        columns=(*WORK, *dims),
        names=(*names, "padding") if name == NATIVE else names,
        powers=_matrix(dims, features),
        product=None if product is None else _matrix(dims, product),
        loop_columns=slice(first, first + len(counted)),
    )


def read(family: str, rows: Floats) -> Inputs:
    """Split rows of columns into work, log features and the product they amount to."""
    form = layout(family)
    work = rows[:, : len(WORK)]
    # A dimension may be 0 or 1 as a flag (masked); half keeps both apart on a log axis.
    log_dims = np.log(np.maximum(rows[:, len(WORK) :], 0.5))
    logs = multiplied(log_dims, form.powers)
    loop_counts = ON_CPU[form.family](rows) if form.family in ON_CPU else rows[:, form.loop_columns]
    if form.product is None:
        moved = np.log(np.maximum(work[:, 1] + work[:, 2] + work[:, 3], 1.0))
        return Inputs(work, np.column_stack((logs, moved)), None, loop_counts)
    product = np.exp(multiplied(log_dims, form.product)).round(3)  # else 768 fills more than 6 tiles of 128
    if form.family == NATIVE:
        logs = np.column_stack((logs, vector_padding(product[:, 0])))
        loop_counts = np.column_stack((loop_counts, _weights_on_short_maps(product)))
    return Inputs(work, logs, product, loop_counts)


def _pooled(rows: Floats) -> Floats:
    """Results of pooling, and the values in their windows, which neighbours share."""
    batch, channels, height, width, window = rows[:, len(WORK) :].T
    results = batch * channels * height * width
    return np.column_stack((results, results * window))


def _chunks(rows: Floats) -> Floats:
    """Values that one thread computes where there are threads enough: PyTorch gives each at least `_GRAIN`."""
    values = rows[:, len(WORK)]
    return (values / np.ceil(np.maximum(values, 1.0) / _GRAIN))[:, None]


def _planes(rows: Floats) -> Floats:
    """Planes: channels of all samples. Where oneDNN has no depthwise kernel, each takes a time of its own."""
    groups = layout("conv_depthwise").columns.index("groups")
    return (rows[:, len(WORK)] * rows[:, groups])[:, None]


def _recurrent(rows: Floats) -> Floats:
    """What `LOOP_COUNTS` names, and the calls where a batch has several rows: products of one row have other code."""
    counts = rows[:, layout("rnn").loop_columns]
    return np.column_stack((counts, np.where(rows[:, len(WORK)] > 1.0, counts[:, 0], 0.0)))


def _compared(rows: Floats) -> Floats:
    """Comparisons of what looks at each value once, and of what sorts them."""
    lines, values = rows[:, len(WORK) :].T
    return np.column_stack((lines * values, lines * values * np.log2(np.maximum(values, 1.0))))


# Counts of loops on a CPU: those that `LOOP_COUNTS` names, and others that are no dimensions.
ON_CPU: dict[str, Callable[[Floats], Floats]] = {
    "pooling": _pooled,
    "elementwise": _chunks,
    "conv_depthwise": _planes,
    "rnn": _recurrent,
    "sort": _compared,
}


def _weights_on_short_maps(product: Floats) -> Floats:
    """How many weights all samples meet whose maps have fewer pixels than fill a vector; else 0.

    PyTorch's own convolutions leave products to MKL, whose vectors hold pixels. For 2 to 11 of them it takes 2.5 to 4
    times as long as for 16, whatever their number (an EPYC of family 25). A single pixel has code of its own.
    """
    pixels, results, depth, copies = product.T
    return np.where((pixels > 1.5) & (pixels < VECTOR_VALUES - 0.5), results * depth * copies, 0.0)


def multiplied(rows: Floats, matrix: Floats) -> Floats:
    """The product of rows with a matrix; that of few is the same to the last bit whatever rows lie beside them.

    Libraries take rows in groups and sum another way in what is left over.
    """
    return rows @ matrix if len(rows) > ROW_BY_ROW else (rows[:, None] @ matrix)[:, 0]


def vector_padding(count: Floats) -> Floats:
    """Log of how many more values there are in whole vectors: small maps and few channels leave most of one empty."""
    return np.log(np.ceil(np.round(count) / VECTOR_VALUES) * VECTOR_VALUES / count)


def native(family: str, rows: Floats, threads: int) -> NDArray[np.bool_]:
    """Which convolutions in float32 PyTorch computes itself on a CPU, where it gives all others to oneDNN.

    The choice falls by shape and number of threads (`use_mkldnn` in ATen's Convolution.cpp), so it changes with batch,
    and with it the time, by up to several times.

    >>> batches = (2, 15, 16)
    >>> pointwise = np.array([[0, 0, 0, 0, batch, 8, 8, 4, 4, 4, 4, 1, 1, 1, 1, 0] for batch in batches], dtype=float)
    >>> native("conv", pointwise, threads=1).tolist(), native("conv", pointwise, threads=2).tolist()
    ([True, True, False], [False, False, False])
    """
    if root(family) not in _MAYBE_NATIVE:
        return np.zeros(len(rows), dtype=bool)
    batch, c_in, _, h_in, w_in, _, _, kernel_h, kernel_w, stride, groups, kernel_d = rows[:, len(WORK) :].T
    # Of three dimensions PyTorch looks at the sizes of the input without the last, and at the window without the first.
    kernel_h = kernel_h / np.maximum(kernel_d, 1.0)
    values = c_in * h_in * np.where(kernel_d > 0.0, 1.0, w_in)
    pointwise = (kernel_h == 1) & (kernel_w == 1) & (stride == 1) & (batch < _LIBRARY_BATCH)
    large_window = (kernel_h > 3) & (kernel_w > 3)
    small = (batch == 1) & (groups == 1) & ~large_window & (values <= _LIBRARY_PIXELS)
    chosen: NDArray[np.bool_] = pointwise | small if threads == 1 else small
    return chosen


def waves(product: Floats, multiprocessors: int, *, whole: bool = False) -> Floats:
    """Rounds of tiles a product takes over all multiprocessors; below 1 some of them idle.

    Behind the first, a tile that is filled in part counts in part, so that one row more takes no less time; `whole`
    counts it as a whole one.

    >>> waves(np.array([[384.0, 384.0, 64.0, 2.0], [192.0, 1.0, 64.0, 2.0]]), 4).tolist()  # 3 x 3 tiles, twice; 1.5
    [4.5, 0.75]
    """
    sides = np.maximum(product[:, :2] / TILE, 1.0)
    tiles: Floats = np.prod(np.ceil(sides) if whole else sides, axis=1) * product[:, 3]
    return np.maximum(tiles, 1.0) / multiprocessors


def _matrix(dims: tuple[str, ...], features: Powers) -> Floats:
    matrix = np.zeros((len(dims), len(features)))
    for column, powers in enumerate(features.values()):
        for name, power in powers.items():
            matrix[dims.index(name), column] = power
    return matrix


POINTWISE, SQUARE, UNEVEN, MANY, ODD = "pointwise", "3x3", "uneven", "many", "odd"
CHANNELS_LAST = "channels_last"
_ALIGNED = 8  # values of half precision that tensor cores load at once
CAT = "cat"


def finer_family(family: str, dims: Mapping[str, Affine]) -> str:
    """The finer family of an op: its own where there is nothing finer, or where it is a special one already.

    >>> one, three = Affine(1), Affine(3)
    >>> finer_family("conv", {"kernel_h": three, "kernel_w": three, "stride": one})
    'conv.3x3'
    >>> finer_family("cat", {"numel": Affine(8), "parts": Affine(3)})
    'cat.many'
    >>> finer_family("bmm", {"m": Affine(197), "n": Affine(197), "k": Affine(64)})
    'bmm.odd'
    >>> finer_family("bmm", {"m": Affine(1), "n": Affine(197), "k": Affine(64)})
    'bmm'
    >>> finer_family("elementwise.add", {"numel": Affine(8)})
    'elementwise.add'
    >>> finer_family("conv.nchwc", {"kernel_h": three, "kernel_w": three, "stride": one})
    'conv.nchwc'
    >>> finer_family("conv.channels_last", {"kernel_h": one, "kernel_w": one, "stride": one})
    'conv.channels_last.pointwise'
    >>> finer_family("conv_grouped", {"kernel_h": three, "kernel_w": three, "c_in": Affine(48), "groups": Affine(2)})
    'conv_grouped.uneven'
    """
    if family == CAT and "parts" in dims:
        # PyTorch gives every part as many threads as the largest, most of which have nothing to do.
        return f"{CAT}.{MANY}" if dims["parts"].constant > 2 else CAT
    if family == "bmm":
        m, n, k = (dims[side].at(1) for side in ("m", "n", "k"))
        # A matrix times a vector has kernels of its own, which stream the matrix and use no tensor cores.
        return f"{family}.{ODD}" if min(m, n) > 1 and (n % _ALIGNED or k % _ALIGNED) else family
    general, _, layout = family.partition(".")
    if general not in ("conv", "conv_grouped") or layout not in ("", CHANNELS_LAST) or "kernel_h" not in dims:
        return family
    window = dims["kernel_h"].constant, dims["kernel_w"].constant
    if window == (1, 1):
        return f"{family}.{POINTWISE}"
    # Winograd's algorithm and its like serve only this one.
    if general == "conv":
        return f"{family}.{SQUARE}" if window == (3, 3) and dims["stride"].constant == 1 else family
    # Libraries have kernels for groups of so many channels as a power of two. Where each sample has weights of its own,
    # groups are samples.
    width = dims["c_in"].at(2) // dims["groups"].at(2)
    return f"{family}.{UNEVEN}" if width & (width - 1) else family
