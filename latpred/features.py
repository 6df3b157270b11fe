"""What a kernel's time depends on: the columns of work and dimensions, and the log features made of them.

Every feature is a product of powers of dimensions, so all of them are one matrix product over log dimensions.
Convolutions and attention are also read as matrix products (m, n, k and a number of copies), which is what fills a
device. Nothing here knows how long anything takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from latpred.ops.families import CONV_DIMS, DIMS, root

Floats = NDArray[np.float64]
Powers = Mapping[str, Mapping[str, int]]

WORK = ("macs", "weight_bytes", "read_bytes", "write_bytes")
TILE = 128  # output rows and columns that one multiprocessor takes at a time in a large product

_CONV_FEATURES: Powers = {
    "batch": {"batch": 1},
    "pixels": {"h_out": 1, "w_out": 1},
    "c_in": {"c_in": 1},
    "c_out": {"c_out": 1},
    "window": {"kernel_h": 1, "kernel_w": 1},
    "stride": {"stride": 1},
    "groups": {"groups": 1},
}
_CONV_PRODUCT: Powers = {
    "m": {"batch": 1, "h_out": 1, "w_out": 1},
    "n": {"c_out": 1, "groups": -1},
    "k": {"c_in": 1, "groups": -1, "kernel_h": 1, "kernel_w": 1},
    "copies": {"groups": 1},
}
_CONVOLUTIONS = [family for family, dims in DIMS.items() if dims == CONV_DIMS]

_FEATURES: dict[str, Powers] = {
    **{family: {name: {name: 1} for name in dims} for family, dims in DIMS.items()},
    **dict.fromkeys(_CONVOLUTIONS, _CONV_FEATURES),
    "attention": {
        "heads": {"batch": 1, "heads": 1},
        **{name: {name: 1} for name in ("queries", "keys", "head_dim", "masked")},
    },
    "pooling": {
        "planes": {"batch": 1, "channels": 1},
        "pixels": {"h_out": 1, "w_out": 1},
        "window": {"window": 1},
    },
}
_PRODUCTS: dict[str, Powers] = {
    "gemm": {"m": {"m": 1}, "n": {"n": 1}, "k": {"k": 1}, "copies": {}},
    "bmm": {"m": {"m": 1}, "n": {"n": 1}, "k": {"k": 1}, "copies": {"batch": 1}},
    **dict.fromkeys(_CONVOLUTIONS, _CONV_PRODUCT),
    "attention": {"m": {"queries": 1}, "n": {"keys": 1}, "k": {"head_dim": 1}, "copies": {"batch": 1, "heads": 1}},
    "rnn": {"m": {"batch": 1}, "n": {"hidden": 1}, "k": {"inputs": 1}, "copies": {}},
}


class Layout(NamedTuple):
    """How the columns of a family become features.

    columns : work, then dimensions. names : features before the roofline's own. powers : (dims, features) exponents.
    product : (dims, 4) exponents of m, n, k and copies; None for families that multiply nothing.
    """

    columns: tuple[str, ...]
    names: tuple[str, ...]
    powers: Floats
    product: Floats | None


class Inputs(NamedTuple):
    """Rows of a family, ready for the roofline: work, log features, and m, n, k and copies."""

    work: Floats
    logs: Floats
    product: Floats | None


@cache
def layout(family: str) -> Layout:
    """The layout of a family, or of the family it is a special case of; "other" when it is unknown.

    >>> layout("gemm").columns
    ('macs', 'weight_bytes', 'read_bytes', 'write_bytes', 'm', 'n', 'k')
    >>> layout("norm.layer_norm").names
    ('rows', 'cols', 'bytes')
    """
    name = root(family) if root(family) in DIMS else "other"
    dims = DIMS[name]
    features, product = _FEATURES[name], _PRODUCTS.get(name)
    names = tuple(features) if product is not None else (*features, "bytes")
    return Layout(
        columns=(*WORK, *dims),
        names=names,
        powers=_matrix(dims, features),
        product=None if product is None else _matrix(dims, product),
    )


def read(family: str, rows: Floats) -> Inputs:
    """Split rows of columns into work, log features and the product they amount to.

    Parameters
    ----------
    family : str
        Kernel family.
    rows : ndarray, shape (n, columns)
        In the order of `layout(family).columns`.
    """
    form = layout(family)
    work = rows[:, : len(WORK)]
    # A dimension may be 0 or 1 as a flag (masked); half keeps both apart on a log axis.
    log_dims = np.log(np.maximum(rows[:, len(WORK) :], 0.5))
    logs = log_dims @ form.powers
    if form.product is None:
        moved = np.log(np.maximum(work[:, 1] + work[:, 2] + work[:, 3], 1.0))
        return Inputs(work, np.concatenate((logs, moved[:, None]), axis=1), None)
    return Inputs(work, logs, np.exp(log_dims @ form.product))


def waves(product: Floats, multiprocessors: int) -> Floats:
    """Rounds of tiles a product takes over all multiprocessors; below 1 some of them idle."""
    tiles = np.ceil(product[:, 0] / TILE) * np.ceil(product[:, 1] / TILE) * product[:, 3]
    return np.maximum(tiles, 1.0) / multiprocessors


def _matrix(dims: tuple[str, ...], features: Powers) -> Floats:
    matrix = np.zeros((len(dims), len(features)))
    for column, powers in enumerate(features.values()):
        for name, power in powers.items():
            matrix[dims.index(name), column] = power
    return matrix
