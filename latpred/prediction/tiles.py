"""Tiled products: what a matrix product takes on a GPU that cuts it into tiles and deals them to its multiprocessors.

For each way of cutting it (rows and columns of a tile, parts of the sum), the time follows from a few constants: rounds
of tiles, steps along the sum, bytes from memory and from the cache, and the price of adding parts up. A library takes a
cheap way, so the cheapest counts, softly. Nothing is fitted here; the constants of a device are `fit.roofline`'s to
find.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from latpred.graph.features import Floats

TILES = ((16, 64), (32, 64), (64, 32), (64, 64), (64, 128), (128, 64), (128, 128), (64, 256), (128, 256), (256, 128))
SPLITS = (1, 2, 3, 4, 6, 8, 16, 32)
_WAYS = np.array([(rows, cols, parts) for rows, cols in TILES for parts in SPLITS], dtype=float).T
EPILOGUE_TILE = 128.0 * 128.0  # results
STEP = 32  # depth of one step along the sum
SHARPNESS = 4.0  # of the fall in bandwidth where a product outgrows the cache
MOST_AT_ONCE = 2048  # rows that are evaluated together, so that a table takes little memory
ELEMENT_BYTES = 2.0  # what a tile reads again is counted in halves; `cache` makes up for the rest

# Constants that profiles of earlier versions lack, as they were then.
EARLIER = {"epilogue": 0.0, "softness": 0.05}
# Starting value of each constant beside the two rates, and how far (in logs) a device is believed to be from it.
PRIOR: dict[str, tuple[float, float]] = {
    "rows": (16.0, 1.0),  # rows and columns of a tile at which half the throughput is reached
    "cols": (16.0, 1.0),
    "prologue": (0.7, 1.0),  # us of a tile before its first step and after its last
    "epilogue": (1.0, 1.0),  # us of writing a tile of 128 by 128, beside that
    "step": (0.02, 1.0),  # us that a step takes however small the tile
    "single": (2.0, 0.7),  # multiprocessors' share: how many times its share of the bandwidth one can draw alone
    "hot": (0.5, 1.0),  # bytes of activations that come from memory, per byte
    "reread": (4.0, 0.7),  # bandwidth of the cache over the memory's
    "cached": (30e6, 0.7),  # bytes up to which a product stays in the cache between runs
    "gain": (1.0, 1.0),  # how much faster it is then
    "add": (0.5, 1.0),  # us of adding parts up, and how fast the cache takes them
    "partial": (1.0, 1.0),
    "power": (2.0, 0.5),  # of the norm that compute, memory and cache time are summed by; near 1 they add up
    "overlap": (0.3, 1.0),  # share of a last round's idle time that other rounds fill
    "softness": (0.03, 0.5),  # ways this much slower than the cheapest, as a share of its time, still count for a third
}


class Tiled(NamedTuple):
    """What a product takes above its floor.

    us : microseconds. memory_us : of the bytes from memory alone. logs : logarithms of the rows, columns and parts of
    the cheapest way.
    """

    us: Floats
    memory_us: Floats
    logs: Floats


def tiled(constants: Mapping[str, float], work: Floats, product: Floats, multiprocessors: int) -> Tiled:
    """Times of products."""
    constants = {**EARLIER, **constants}
    parts = [
        _tiled(constants, work[start : start + MOST_AT_ONCE], product[start : start + MOST_AT_ONCE], multiprocessors)
        for start in range(0, max(len(work), 1), MOST_AT_ONCE)
    ]
    return Tiled(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _tiled(constants: Mapping[str, float], work: Floats, product: Floats, multiprocessors: int) -> Tiled:
    m, n, k, copies = (column[:, None] for column in product.T)
    rows, cols, parts = _WAYS[:, None, :]
    tiles = np.ceil(m / rows) * np.ceil(n / cols) * parts * copies
    depth = np.ceil(k / parts / STEP) * STEP
    compute = _rounds(constants, tiles / multiprocessors) * _tile_us(constants, rows, cols, depth, multiprocessors)
    memory = _memory_us(constants, work)[:, None]
    # A few multiprocessors cannot draw the whole bandwidth.
    memory = memory * np.maximum(1.0, multiprocessors / (constants["single"] * tiles))
    cache = constants["bandwidth"] * constants["reread"]
    reread = ELEMENT_BYTES * tiles * (rows + cols) * depth / cache
    power = constants["power"]
    norm = (compute**power + memory**power + reread**power) ** (1.0 / power)
    added = constants["add"] + 8.0 * m * n * copies * parts / (cache * constants["partial"])
    us = norm + np.where(parts > 1, added, 0.0)
    least = us.min(axis=1, keepdims=True)
    likely = np.exp((1.0 - us / least) / constants["softness"])
    total = (likely * us).sum(axis=1) / likely.sum(axis=1)
    best = us.argmin(axis=1)
    return Tiled(total, np.minimum(memory[np.arange(len(best)), best], total), np.log(_WAYS.T[best]))


def _rounds(constants: Mapping[str, float], waves: Floats) -> Floats:
    overlap = min(1.0, constants["overlap"])
    rounds: Floats = (1.0 - overlap) * np.ceil(waves) + overlap * np.maximum(waves, 1.0)
    return rounds


def _tile_us(constants: Mapping[str, float], rows: Floats, cols: Floats, depth: Floats, count: int) -> Floats:
    """One tile on one multiprocessor."""
    idle = 1.0 + constants["rows"] / rows + constants["cols"] / cols
    busy = rows * cols * depth * idle * count / constants["rate"]
    least = depth / STEP * constants["step"]
    ends = constants["prologue"] + constants["epilogue"] * rows * cols / EPILOGUE_TILE
    time: Floats = ends + np.hypot(busy, least)
    return time


def _memory_us(constants: Mapping[str, float], work: Floats) -> Floats:
    """Bytes from memory at full bandwidth, which is the cache's for products that stay there."""
    moved = work[:, 1] + constants["hot"] * (work[:, 2] + work[:, 3])
    inside = 1.0 / (1.0 + (moved / constants["cached"]) ** SHARPNESS)
    time: Floats = moved / (constants["bandwidth"] * (1.0 + constants["gain"] * inside))
    return time
