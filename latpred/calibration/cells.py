"""Cells: the unit of measurement, declared as data, and the ops that calibrations and their schedules draw on.

A cell names one thing to time; how it is timed is the device's business, so the same cell runs on a CPU, a GPU and the
simulated device, and its key finds it again in a journal. Shapes are drawn at random, log-uniformly over what published
networks use; no model that a profile is tested on is looked at.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec


class Cell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One thing to time.

    kind : "dispatch" (host cost of one small op, or of a chain of module or Python calls), "kernel" (device time of one
    op at given dims), "memory" (bandwidth, copies), "clock" (launch latency, gap, sync), "network" (a small generated
    network, end to end) or "model" (an ordinary one, that no fit sees).
    """

    kind: str
    name: str  # host class, kernel family or network name
    dims: dict[str, int] = {}
    precision: str = "fp32"
    runtime: str = "eager"

    @property
    def key(self) -> str:
        """Stable text that identifies the cell."""
        dims = ",".join(f"{name}={value}" for name, value in sorted(self.dims.items()))
        return f"{self.kind}/{self.runtime}/{self.precision}/{self.name}/{dims}"


CLOCK = Cell("clock", "constants")
READ_BYTES = tuple(1 << power for power in range(20, 29))
CHAINED_BYTES = READ_BYTES[:7]  # of weights; beyond them a shared cache counts as memory
COPIED_BYTES = 256 << 20
# Copied within the device, copied to memory that the system gives each time, and brought to the device from the host.
COPY, FRESH, UPLOAD = (Cell("memory", name, {"bytes": COPIED_BYTES}) for name in ("bandwidth", "fresh", "upload"))
LARGEST_BYTES = 512 << 20  # of one tensor of a kernel cell


def memory_cells() -> list[Cell]:
    """Reads, plain and by chains of products, of sizes that span the caches, and copies."""
    sizes = {"read": READ_BYTES, "weights": CHAINED_BYTES}
    reads = [Cell("memory", name, {"bytes": size}) for name, each in sizes.items() for size in each]
    return [*reads, COPY, UPLOAD, FRESH]


def log_uniform(rng: random.Random, low: int, high: int, step: int = 1) -> int:
    """A random number whose logarithm is uniform, rounded to a step."""
    value: float = low * (high / low) ** rng.random()
    return max(step, round(value / step) * step)


def _fewer(count: int, each: int, most: int = LARGEST_BYTES // 4) -> int:
    """So many things of `each` numbers, halved until they take no more bytes than that."""
    while count > 1 and 4 * count * each > most:
        count //= 2
    return count


def _draw_gemm(rng: random.Random) -> dict[str, int]:
    m = log_uniform(rng, 1, 16384)
    n, k = log_uniform(rng, 16, 8192, 8), log_uniform(rng, 16, 8192, 8)
    return {"m": _fewer(m, max(n, k), LARGEST_BYTES), "n": n, "k": k}


def _draw_bmm(rng: random.Random) -> dict[str, int]:
    batch, m = log_uniform(rng, 1, 1024), log_uniform(rng, 4, 1024, 4)
    n, k = rng.choice(((m, 64), (64, m), (m, 32), (32, m), (log_uniform(rng, 8, 1024, 8), log_uniform(rng, 8, 512, 8))))
    return {"batch": _fewer(batch, max(m * n, m * k, n * k)), "m": m, "n": n, "k": k}


def _draw_conv(rng: random.Random) -> dict[str, int]:
    size = rng.choice((7, 8, 14, 16, 28, 32, 56, 112, 224))
    kind = rng.choice(("pointwise", "dense", "dense", "depthwise", "grouped", "stem"))
    channels = log_uniform(rng, 16, min(1024, max(32, 28672 // size)), 8)
    c_out = channels if kind in ("depthwise", "grouped") else log_uniform(rng, 16, 1024, 8)
    kernel, groups = rng.choice((1, 3, 3, 5, 7) if kind == "grouped" else (3, 3, 3, 5, 7)), 1
    if kind == "pointwise":
        kernel = 1
    elif kind == "depthwise":
        groups = channels
    elif kind == "grouped":
        groups = rng.choice([g for g in (2, 4, 8, 32) if channels % g == 0])
    elif kind == "stem":
        channels, c_out, kernel, size = 3, log_uniform(rng, 16, 128, 8), rng.choice((3, 7)), rng.choice((64, 112, 224))
    batch, stride = log_uniform(rng, 1, 128), rng.choice((1, 1, 2))
    batch = _fewer(batch, max(channels, c_out) * size * size, LARGEST_BYTES // 2)
    map_dims = {"batch": batch, "c_in": channels, "c_out": c_out, "size": size}
    return map_dims | {"kernel": kernel, "stride": stride, "groups": groups}


def _draw_attention(rng: random.Random) -> dict[str, int]:
    queries = log_uniform(rng, 4, 1024, 4)
    batch, heads = log_uniform(rng, 1, 128), rng.choice((1, 2, 4, 8, 12, 16, 32))
    batch = _fewer(batch, heads * queries * max(queries, 64), LARGEST_BYTES)
    head_dim, masked = rng.choice((32, 64, 64, 128)), int(rng.random() < 0.3)
    return {"batch": batch, "heads": heads, "queries": queries, "head_dim": head_dim, "masked": masked}


def _draw_recurrent(rng: random.Random) -> dict[str, int]:
    steps, hidden = log_uniform(rng, 2, 512), log_uniform(rng, 32, 1024, 32)
    return {"batch": log_uniform(rng, 1, 64), "steps": steps, "hidden": hidden}


def _draw_rows(rng: random.Random) -> dict[str, int]:
    rows, cols = log_uniform(rng, 1, 131072), log_uniform(rng, 8, 8192, 8)
    return {"rows": _fewer(rows, cols), "cols": cols}


def _draw_table(rng: random.Random) -> dict[str, int]:
    return {"rows": log_uniform(rng, 1, 16384), "cols": log_uniform(rng, 16, 2048, 8), "table": 2048}


def _draw_map(rng: random.Random) -> dict[str, int]:
    batch, channels, size = log_uniform(rng, 1, 128), log_uniform(rng, 8, 1024, 8), rng.choice((7, 14, 28, 56, 112))
    return {"batch": _fewer(batch, channels * size * size), "channels": channels, "size": size}


_DRAWN: Mapping[str, Callable[[random.Random], dict[str, int]]] = {
    "gemm": _draw_gemm,
    "bmm": _draw_bmm,
    "conv": _draw_conv,
    "attention": _draw_attention,
    "lstm": _draw_recurrent,
    "embedding": _draw_table,
    "index_select": _draw_table,
}
_ON_MAPS = ("batch_norm", "group_norm", "max_pool", "avg_pool", "global_pool")
_ON_ROWS = (
    *("layer_norm", "softmax", "mean", "sum", "cumsum", "topk", "add", "sub", "mul", "div", "add_scalar", "mul_vector"),
    *("pow", "gelu", "relu", "silu", "tanh", "sigmoid", "exp", "rsqrt", "hardswish", "relu6", "neg", "cos", "gt"),
    *("where", "masked_fill", "clone", "transpose_copy", "cast", "cat", "pad", "roll", "fft"),
)
_DISPATCHED = (
    *("view", "reshape", "flatten", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze"),
    *("split", "chunk", "dropout", "detach", "arange", "zeros", "ones", "full", "new_ones", "tensor", "addmm"),
    *("baddbmm", "matmul", "matmul_shared", "einsum", "einsum_outer", "broadcast", "conv1d", "gather", "index"),
    *("max_pool1d", "copy", "flip", "fft2", "sqrt", "clamp", "eq", "rsub", "tril", "bitwise_not", "any", "item"),
)
KERNELS = (*_DRAWN, *_ON_ROWS, *_ON_MAPS)  # this order and that of the names above set what is drawn
PRODUCTS = ("gemm", "bmm", "conv", "attention", "lstm")
# How often each op is drawn: what network time is mostly made of comes first.
_WEIGHTS = {"gemm": 10, "conv": 12, "bmm": 4, "attention": 5, "layer_norm": 2, "softmax": 2, "batch_norm": 2}
_TINY = (
    dict.fromkeys(("m", "queries", "rows"), 4)
    | dict.fromkeys(("n", "k", "hidden", "head_dim", "c_in", "c_out", "size", "cols", "channels"), 8)
    | dict.fromkeys(("batch", "heads", "steps"), 2)
    | {"kernel": 3, "stride": 1, "groups": 1, "masked": 0, "table": 16}
)


def draw_dims(name: str, rng: random.Random) -> dict[str, int]:
    """Random dimensions of an op: those that its builder reads."""
    dims = _DRAWN.get(name, _draw_map if name in _ON_MAPS else _draw_rows)(rng)
    if name == "transpose_copy":
        dims["rows"] = max(2, dims["rows"])  # one row transposed lies in memory as before: nothing would be copied
    return dims


def dispatch_cells() -> list[Cell]:
    """One tiny op of every kind: what is left of its time is what issuing it costs."""
    dims = {name: draw_dims(name, random.Random(0)) for name in (*KERNELS, *_DISPATCHED)}
    return [Cell("dispatch", name, {dim: _TINY[dim] for dim in dims[name]}) for name in dims]


def kernel_cells(precision: str, names: Sequence[str] = KERNELS) -> Iterator[Cell]:
    """Endless random kernel cells of a precision; every op comes once before any comes twice."""
    rng = random.Random(f"0/{precision}")
    weights = [_WEIGHTS.get(name, 1) for name in names]
    for name in names:
        yield Cell("kernel", name, draw_dims(name, rng), precision)
    while True:
        name = rng.choices(names, weights)[0]
        yield Cell("kernel", name, draw_dims(name, rng), precision)
