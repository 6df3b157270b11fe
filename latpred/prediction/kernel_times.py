"""Kernel times: a `KernelFit` evaluated by numpy alone, and the rows of work that it is evaluated on.

A time is a roofline's (or that of tiles) times the exponential of a Gaussian process over log features. `fit.roofline`
finds the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from latpred.graph.features import (
    NATIVE,
    ROW_BY_ROW,
    WORK,
    Floats,
    Inputs,
    layout,
    multiplied,
    native,
    read,
    vector_padding,
    waves,
)
from latpred.graph.graph import ZERO, Affine, Op
from latpred.host import CACHE_MACS_PER_BYTE, CORE_CACHE_BYTES, Slowdown
from latpred.ops.families import MAY_LACK, root
from latpred.profile.datasheet import Limits
from latpred.profile.document import DeviceInfo, KernelFit, SizeCorrection

# Rows and columns of the tiles of cuBLAS and CUTLASS.
TILES = (
    *((16, 64), (32, 64), (32, 128), (64, 32), (64, 64), (64, 128), (64, 256)),
    *((128, 32), (128, 64), (128, 128), (128, 256), (256, 64), (256, 128)),
)
SPLITS = (1, 2, 3, 4, 6, 8, 16, 32)
_WAYS = np.array([(rows, cols, parts) for rows, cols in TILES for parts in SPLITS], dtype=float).T
EPILOGUE_TILE = 128.0 * 128.0  # results
WHOLE_DEPTH = 8192.0  # longer sums are cut, however small their product; cuBLAS on an L40S
_NEVER = 1e6  # times the cost, so that no such way is taken
STEP = 32  # depth of one step along the sum
SHARPNESS = 4.0  # of the fall in bandwidth where a product outgrows the cache
MOST_AT_ONCE = 2048  # rows that are evaluated together, so that a table takes little memory
ELEMENT_BYTES = 2.0  # what a tile reads again is counted in halves; `cache` makes up for the rest

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
    """What a product takes above its floor."""

    us: Floats
    memory_us: Floats  # of the bytes from memory alone
    logs: Floats  # logarithms of the rows, columns and parts of the cheapest way


def tiled(constants: Mapping[str, float], work: Floats, product: Floats, multiprocessors: int) -> Tiled:
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
    filled, overlap = tiles / multiprocessors, min(1.0, constants["overlap"])
    rounds = (1.0 - overlap) * np.ceil(filled) + overlap * np.maximum(filled, 1.0)
    compute = rounds * _tile_us(constants, rows, cols, depth, multiprocessors)
    memory = _memory_us(constants, work)[:, None]
    # A few multiprocessors cannot draw the whole bandwidth.
    memory = memory * np.maximum(1.0, multiprocessors / (constants["single"] * tiles))
    cache = constants["bandwidth"] * constants["reread"]
    reread = ELEMENT_BYTES * tiles * (rows + cols) * depth / cache
    power = constants["power"]
    norm = (compute**power + memory**power + reread**power) ** (1.0 / power)
    added = constants["add"] + 8.0 * m * n * copies * parts / (cache * constants["partial"])
    us = norm + np.where(parts > 1, added, 0.0)
    # Libraries do not cut every sum that it would pay to cut.
    left_whole = (m * n * k * copies < constants.get("whole_macs", 0.0)) & (k <= WHOLE_DEPTH) & (parts > 1)
    us = np.where(left_whole, _NEVER * us, us)
    least = us.min(axis=1, keepdims=True)
    likely = np.exp((1.0 - us / least) / constants["softness"])
    total = (likely * us).sum(axis=1) / likely.sum(axis=1)
    best = us.argmin(axis=1)
    return Tiled(total, np.minimum(memory[np.arange(len(best)), best], total), np.log(_WAYS.T[best]))


def _tile_us(constants: Mapping[str, float], rows: Floats, cols: Floats, depth: Floats, count: int) -> Floats:
    idle = 1.0 + constants["rows"] / rows + constants["cols"] / cols
    busy = rows * cols * depth * idle * count / constants["rate"]
    least = depth / STEP * constants["step"]
    ends = constants["prologue"] + constants["epilogue"] * rows * cols / EPILOGUE_TILE
    return ends + np.hypot(busy, least)


def _memory_us(constants: Mapping[str, float], work: Floats) -> Floats:
    """Bytes from memory at full bandwidth, which is the cache's for products that stay there."""
    moved = work[:, 1] + constants["hot"] * (work[:, 2] + work[:, 3])
    inside = 1.0 / (1.0 + (moved / constants["cached"]) ** SHARPNESS)
    return moved / (constants["bandwidth"] * (1.0 + constants["gain"] * inside))


SQRT3 = 3.0**0.5
FEW_ROWS = "few"  # rows below which a product's rows become hardly any slower
# Winograd's algorithm F(4 x 4, 3 x 3) makes 36 multiply-adds of 144. It serves dense windows that move by one.
WINOGRAD = 4.0
# Recurrent weights that one multiprocessor holds, so that one launch takes all steps, and the share of a step's least
# time that is then left: an H100 took 0.32 us for each, of LSTMs of up to 64 channels. With 192 it launched each.
HELD_WEIGHTS, HELD = 1 << 16, 0.14
_WINDOW = [layout("conv").columns.index(name) for name in ("kernel_h", "kernel_w", "stride")]
_ENDS = ("_in", "_out")
UNCOUNTABLE = 2.0**31  # values, which 32 bits with a sign cannot count
TINY_US = 1e-6
LARGE_BLOCK = 32 << 20  # bytes from which on malloc keeps nothing: DEFAULT_MMAP_THRESHOLD_MAX of glibc, 64 bits
MOST_IN_CACHE = 256  # rows whose residuals are worked out together: what they share with the samples stays in the cache
RESIDENT_STEPS = 8  # so few that batches and models share their prices


class KernelEstimate(NamedTuple):
    """Of each row: microseconds, standard deviation of their logarithm, whether memory takes longer than compute."""

    us: Floats
    log_std: Floats
    memory_bound: NDArray[np.bool_]


class Roofline(NamedTuple):
    """Microseconds of floor (one for all rows), compute and memory; logs of how products are cut into tiles."""

    floor: float
    compute: Floats
    memory: Floats
    tiles: Floats | None = None

    @property
    def above(self) -> Floats:
        """Microseconds above the floor."""
        return np.hypot(self.compute, self.memory)

    @property
    def us(self) -> Floats:
        """Microseconds in all."""
        return np.maximum(self.floor + self.above, TINY_US)


class KernelModel:
    """A `KernelFit` ready to evaluate: its Cholesky factor is computed once.

    `native` takes over for the convolutions that PyTorch computes itself on a CPU with so many `threads`. No time is
    shorter than `limits` allow.
    """

    caveat = ""  # what may not hold of its times

    def __init__(
        self, fit: KernelFit, native: KernelModel | None = None, threads: int = 0, limits: Limits | None = None
    ) -> None:
        self.fit = fit
        self._native, self._threads, self._limits = native, threads, limits
        self._scales = np.array(fit.length_scales)
        count = len(fit.points)
        self._points = np.array(fit.points).reshape(count, len(self._scales)) / self._scales
        if count:
            covariance = fit.amplitude * correlation(self._points, self._points, fit.jumps)
            covariance += np.diag(fit.noise * np.array(fit.noise_factors))
            self._whiten = np.linalg.inv(np.linalg.cholesky(covariance)).T
            self._weights = self._whiten @ (np.array(fit.targets) @ self._whiten)
            self._whiten_single = self._whiten.astype(np.float32)

    def times(self, rows: Floats, leaf_scales: Floats | float = 1.0) -> KernelEstimate:
        """Times of rows of `layout(family).columns`; `leaf_scales` multiply what is above the floor.

        Those of up to `ROW_BY_ROW` are the same to the last bit whatever rows lie beside them.
        """
        scales = np.broadcast_to(leaf_scales, len(rows))
        if self._native is None:
            return self._times(rows, scales)
        by_pytorch = native(self.fit.family, rows, self._threads)
        if not by_pytorch.any():
            return self._times(rows, scales)
        parts = self._times(rows[~by_pytorch], scales[~by_pytorch]), self._native.times(rows[by_pytorch])
        order = np.argsort(np.concatenate((np.flatnonzero(~by_pytorch), np.flatnonzero(by_pytorch))))
        return KernelEstimate(*(np.concatenate(columns)[order] for columns in zip(*parts, strict=True)))

    def _times(self, rows: Floats, scales: Floats) -> KernelEstimate:
        inputs = read(self.fit.family, rows)
        roof = roofline(self.fit, inputs)
        log_residual, log_std = self._residual(inputs, roof)
        us = np.maximum(roof.floor + scales * roof.above, TINY_US) * np.exp(log_residual) * self.fit.scale
        memory = roof.memory
        if self._limits is not None:
            us = np.maximum(us, least_us(self.fit.family, rows, self._limits))
        if self._limits is not None and np.isfinite(self._limits.cache_bytes_per_us):  # those of a datasheet
            # A fit's time of bytes may hold what a kernel does to them besides, as convolutions that lay inputs out.
            memory = np.minimum(memory, _moved(rows) / self._limits.bytes_per_us)
        return KernelEstimate(us, log_std, memory >= roof.compute)

    def _residual(self, inputs: Inputs, roof: Roofline) -> tuple[Floats, Floats]:
        count = len(inputs.work)
        if not len(self._points):
            return np.zeros(count), np.full(count, self.fit.spread)
        features = residual_features(self.fit, inputs, roof) / self._scales
        mean, explained = np.empty((2, count))
        for start in range(0, count, MOST_IN_CACHE):
            part = slice(start, start + MOST_IN_CACHE)
            covariance = self.fit.amplitude * correlation(features[part], self._points, self.fit.jumps)
            # Of many rows half as much is read: single precision is enough for the variances of long curves.
            whitened = (
                multiplied(covariance, self._whiten)
                if len(covariance) <= ROW_BY_ROW
                else covariance.astype(np.float32) @ self._whiten_single
            )
            mean[part] = np.einsum("ij,j->i", covariance, self._weights)
            explained[part] = np.einsum("ij,ij->i", whitened, whitened)
        return mean, np.sqrt(np.maximum(self.fit.amplitude - explained, 0.0) + self.fit.noise)


def correlation(left: Floats, right: Floats, jumps: bool) -> Floats:
    """How far residuals go together: Matern 3/2, or where times jump, the exponential of a sum of distances.

    Both sides are features over length scales.
    """
    if jumps:
        apart = sum(np.abs(ours[:, None] - theirs) for ours, theirs in zip(left.T, right.T, strict=True))
        return np.asarray(np.exp(-apart))
    squares = np.einsum("ij,ij->i", left, left)[:, None] + np.einsum("ij,ij->i", right, right)
    far = SQRT3 * np.sqrt(np.maximum(squares - 2.0 * multiplied(left, right.T), 0.0))
    correlated: Floats = (1.0 + far) * np.exp(-far)
    return correlated


def evaluate(fit: KernelFit, rows: Floats) -> Floats:
    """Microseconds of rows, whose columns are `latpred.graph.features.layout(fit.family).columns`."""
    return KernelModel(fit).times(np.asarray(rows, dtype=float)).us


def slower_kernels(slowdown: Slowdown, family: str, rows: Floats) -> Floats:
    """How many times longer a family's kernels take on a machine that is slower."""
    moved = _moved(rows)
    # With the reference that reads from the shared cache, as far as they read as many bytes per MAC; not at all where
    # the core's own cache holds them.
    waiting = np.minimum(CACHE_MACS_PER_BYTE * moved / np.maximum(rows[..., 0], 1.0), 1.0)
    far = np.where(moved > CORE_CACHE_BYTES, waiting, 0.0)
    near = slowdown.near(family)
    return near + far * (slowdown.cache - near)


def size_corrected(correction: SizeCorrection, size: Floats) -> Floats:
    """What kernels of such sizes are multiplied by.

    >>> correction = SizeCorrection("time", exponent=0.5, centre=4.0, low=1.0, high=16.0)
    >>> size_corrected(correction, np.array([1.0, 4.0, 16.0, 100.0])).tolist()
    [0.5, 1.0, 2.0, 2.0]
    """
    return (np.clip(size, correction.low, correction.high) / correction.centre) ** correction.exponent


def _moved(rows: Floats) -> Floats:
    """Bytes that rows read and write, weights included."""
    moved: Floats = rows[..., 1 : len(WORK)].sum(axis=-1)
    return moved


def _missed(moved: Floats, cache_bytes: float) -> Floats:
    """Share of the bytes that kernels move which comes from memory.

    Where a kernel touches less than half of what the cache holds, all of it may lie there already. Where it touches
    more than the cache holds, its own bytes have pushed out what lay there.
    """
    return np.clip(2.0 * moved / cache_bytes - 1.0, 0.0, 1.0)


def least_us(family: str, rows: Floats, limits: Limits) -> Floats:
    """What rows take at least: bytes from memory, or from the cache where they lie in it, multiply-adds and steps."""
    macs, moved = rows[:, 0], _moved(rows)
    if root(family) == "conv":
        height, width, stride = rows[:, _WINDOW].T
        macs = macs / np.where((np.minimum(height, width) > 1) & (stride == 1), WINOGRAD, 1.0)
    busy = macs / limits.macs_per_us
    if root(family) == "conv_depthwise":
        size = dict(zip(layout("conv").columns, rows.T, strict=True))
        # A third dimension is folded into the height.
        side = np.maximum(size["kernel_h"] / np.maximum(size["kernel_d"], 1.0), size["kernel_w"])
        wide = (side > limits.widest) & (size["groups"] >= limits.many_channels)
        busy = np.where(wide, macs / limits.wide_macs_per_us, busy)
        values = size["batch"] * np.maximum(*(size["c" + end] * size["h" + end] * size["w" + end] for end in _ENDS))
        busy = np.where(values >= UNCOUNTABLE, np.maximum(busy, macs / limits.uncountable_macs_per_us), busy)
    if root(family) == "pooling":
        batch, channels, height, width, window = rows[:, len(WORK) :].T
        # A result that is the mean of its whole plane is a reduction.
        planes, places = batch * channels, height * width
        busy = np.where(
            places > 1, np.maximum(planes * places * window / limits.taps_per_us, planes * limits.plane_us), busy
        )
    if family.startswith("rnn"):
        counts = dict(zip(layout("rnn").columns, rows.T, strict=True))
        held = counts["reread"] <= HELD_WEIGHTS * counts["calls"]
        busy = np.maximum(busy, counts["steps"] * limits.step_us * np.where(held, HELD, 1.0))
    missed = _missed(moved, limits.cache_bytes)
    memory = moved * (missed / limits.bytes_per_us + (1.0 - missed) / limits.cache_bytes_per_us)
    return np.maximum(memory, busy)


def fresh_bytes(family: str, rows: Floats, threads: int) -> Floats:
    """Bytes of memory that the system gives a CPU's kernels each time they run, and that are as many page faults.

    Glibc's malloc keeps what a process gives back, but for blocks of 32 MiB and more. Such a block is a large result;
    oneDNN lays large weights, inputs and results of a convolution out in memory of their own, too.

    >>> rows = np.array([[0, 0, megabytes << 20, megabytes << 20, 1] for megabytes in (31, 32)], dtype=float)
    >>> (fresh_bytes("elementwise", rows, 1) / 2**20).tolist()
    [0.0, 32.0]
    """
    large = np.where(rows[:, 1 : len(WORK)] < LARGE_BLOCK, 0.0, rows[:, 1 : len(WORK)])
    fresh: Floats = large[:, -1]  # what it writes
    if root(family).startswith("conv"):
        fresh = fresh + np.where(native(family, rows, threads), 0.0, large.sum(axis=1))
    return fresh


def trimmed_bytes(live: Floats) -> Floats:
    """Bytes that glibc's malloc gives back and asks for anew in each forward pass, from those alive after each op.

    `live` has a row for each op, a column for each batch. What is free at the end of the heap goes back where it is
    more than twice the largest block that malloc keeps. Blocks that it never keeps are `fresh_bytes`, and lie
    elsewhere: a batch that has some is left to those.

    >>> megabytes = np.array([[10.0, 10.0], [39.0, 40.0], [68.0, 70.0], [10.0, 2.0]])
    >>> (trimmed_bytes(megabytes * 2**20) / 2**20).tolist()
    [0.0, 68.0]
    """
    end = np.zeros(live.shape[1])
    for _ in range(2):  # what the first pass finds, later ones do not
        trimmed = np.zeros(live.shape[1])
        for now in live:
            trimmed += np.maximum(now - end, 0.0)
            end = np.where(end - now > 2 * LARGE_BLOCK, now, np.maximum(end, now))
    return np.where(np.diff(live, axis=0).max(axis=0, initial=0.0) < LARGE_BLOCK, trimmed, 0.0)


def roofline(fit: KernelFit, inputs: Inputs) -> Roofline:
    """Floor, compute and memory time of each row, without the residual."""
    work = inputs.work
    if fit.tiling and inputs.product is not None:
        us, memory, tiles = tiled(fit.tiling, work, inputs.product, fit.multiprocessors)
        # Their quadrature is the time of the tiles again.
        return Roofline(fit.floor_us, np.sqrt(us**2 - memory**2), memory, tiles)
    # One bandwidth stands in for the other where it was never seen.
    weights = inverse(fit.weight_bytes_per_us or fit.activation_bytes_per_us)
    activations = inverse(fit.activation_bytes_per_us or fit.weight_bytes_per_us)
    hot = work[:, 2] + work[:, 3]
    if fit.cache_bytes:
        missed = _missed(_moved(work), fit.cache_bytes)
        hot = hot * (missed + (1.0 - missed) / fit.cache_gain)
    memory = work[:, 1] * weights + hot * activations
    compute = work[:, 0] * inverse(fit.macs_per_us)
    if inputs.product is not None:
        compute = compute * inefficiency(fit.saturation, inputs.product, fit.multiprocessors, "one_row" in fit.features)
    if fit.loop_us:
        known = inputs.loop_counts[:, : len(fit.loop_us)]  # shipped fits may lack the last ones
        compute = compute + np.einsum("ij,j->i", known, np.array(fit.loop_us))
    return Roofline(fit.floor_us, compute, memory)


def inefficiency(half_sizes: dict[str, float], product: Floats, multiprocessors: int, one_row: bool = False) -> Floats:
    """How many times longer a product takes than at full throughput: 1 when it is large in every direction.

    On a CPU a product of `one_row` has code of its own, which waits for nothing but the weights.

    However few its results are, each is a sum that takes one step after the other: that part adds to the others.
    """
    factor = 1.0 + half_sizes.get("m", 0.0) / (product[:, 0] + half_sizes.get(FEW_ROWS, 0.0))
    for column, name in enumerate(("n", "k"), 1):
        factor *= 1.0 + half_sizes.get(name, 0.0) / product[:, column]
    if multiprocessors:
        factor *= 1.0 + half_sizes.get("waves", 0.0) / waves(product, multiprocessors)
        factor += half_sizes.get("outputs", 0.0) / (product[:, 0] * product[:, 1] * product[:, 3])
    return np.where(product[:, 0] <= 1.0, 1.0, factor) if one_row else factor


def residual_features(fit: KernelFit, inputs: Inputs, roof: Roofline) -> Floats:
    """Inputs of the residual: the logs of dimensions, then what `feature_names` adds to them."""
    extras = [np.log(roof.us)]
    if inputs.product is None:
        return np.column_stack((inputs.logs, *extras))
    rows, results, _, copies = inputs.product.T
    if fit.multiprocessors:
        rounds = waves(inputs.product, fit.multiprocessors, whole=True)
        extras.append(np.log(np.ceil(rounds) / rounds))
    if roof.tiles is not None:
        extras += list(roof.tiles.T)
    if "one_row" in fit.features:
        extras.append((rows <= 1.0).astype(float))
    if "resident" in fit.features:
        extras.append((inputs.work[:, 1] == 0.0).astype(float))
    if "channel_padding" in fit.features:
        # Libraries compute as many channels as fill whole vectors; those of a depthwise convolution are its groups.
        extras.append(vector_padding(np.where(results > 1.0, results, copies)))
    return np.column_stack((inputs.logs, *extras))


def flags_of(family: str, multiprocessors: int) -> tuple[str, ...]:
    """Names of the flags that fits of a family know.

    They are what products of a CPU differ by beside their sizes: libraries have other code for one row, weights that
    lie in the cache take another way than those that come from memory, and channels are computed in whole vectors.

    >>> flags_of("gemm", 0), flags_of("conv", 0), flags_of("gemm", 108)
    (('resident', 'one_row'), ('resident', 'channel_padding'), ())
    """
    if multiprocessors or layout(family).product is None:
        return ()
    by_library = root(family) != NATIVE and root(family).startswith("conv")
    special = ("one_row",) if root(family) == "gemm" else ("channel_padding",) if by_library else ()
    return ("resident", *special)


def feature_names(family: str, multiprocessors: int, tiles: bool) -> tuple[str, ...]:
    """Names of what `residual_features` gives: logs of dimensions, the roofline's time, how full the last wave is."""
    names = ("roofline", "last_wave") if layout(family).product is not None and multiprocessors else ("roofline",)
    cut = ("tile_rows", "tile_cols", "parts") if tiles else ()
    return (*layout(family).names, *names, *cut, *flags_of(family, multiprocessors))


def inverse(rate: float) -> float:
    """The time of a rate, or the rate of a time; 0 stands for one that is not known."""
    return 1.0 / rate if rate else 0.0


def resident_share(parameter_bytes: int, touched_bytes: float, device: DeviceInfo) -> float:
    """How much of its weights a forward pass finds in the cache where it left them, in steps of an eighth.

    What a pass touches in all decides, since activations push weights out: all is found up to `resident_bytes`, nothing
    from twice that. Where nobody measured `resident_bytes`, as of GPUs, weights alone decide, against the whole cache.

    >>> from latpred.profile.document import DeviceInfo
    >>> cpu = DeviceInfo(name="cpu", kind="cpu", asynchronous=False, memory_bytes=0, resident_bytes=8 << 20)
    >>> [resident_share(1 << 20, megabytes << 20, cpu) for megabytes in (4, 10, 20)]
    [1.0, 0.75, 0.0]
    """
    if parameter_bytes <= 0:
        return 0.0
    if not device.resident_bytes:
        return float(parameter_bytes <= device.cache_bytes)
    most = max(parameter_bytes, touched_bytes) / device.resident_bytes
    return round(RESIDENT_STEPS * min(max(2.0 - most, 0.0), 1.0)) / RESIDENT_STEPS


def reread_share(touched_bytes: Floats, device: DeviceInfo) -> Floats:
    """How much of its weights an op finds in the cache that were read in the same pass, so many bytes ago.

    >>> from latpred.profile.document import DeviceInfo
    >>> cpu = DeviceInfo(name="cpu", kind="cpu", asynchronous=False, memory_bytes=0, resident_bytes=8 << 20)
    >>> reread_share(np.array([1 << 20, 12 << 20, 40 << 20]), cpu).tolist()
    [1.0, 0.5, 0.0]
    """
    if not device.resident_bytes:
        return (touched_bytes <= device.cache_bytes).astype(float)
    return np.clip(2.0 - touched_bytes / device.resident_bytes, 0.0, 1.0)


def columns(op: Op, family: str, *, resident: float = 0.0) -> tuple[Affine, ...]:
    """An op's work and dimensions, in the columns of a family.

    Weights come from memory each time, but for the share that is `resident` in the cache: that is read as activations.

    An op priced by another family than its own lacks some of its dimensions: elements are then counted as 4 bytes each,
    and everything else as 1.
    """
    missing = {"numel": op.write_bytes // 4, **dict.fromkeys(MAY_LACK, ZERO)}
    dims = layout(family).columns[len(WORK) :]
    cached = Affine(*(round(resident * amount) for amount in op.weight_bytes))
    work = (op.macs, op.weight_bytes - cached, op.read_bytes + cached, op.write_bytes)
    return (*work, *(op.dims.get(name) or missing.get(name) or Affine(1) for name in dims))
