"""Which cells a calibration times: tiny ops and networks for dispatch, shapes for kernels, networks to be judged by.

Shapes are drawn at random, log-uniformly over what published networks use; `sampling` then picks those that the fit is
least sure of. Nothing here is timed, and no model that a profile is judged on is looked at.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import msgspec
import torch

from latpred.calibration.cells import Cell
from latpred.calibration.devices import constants
from latpred.calibration.devices.base import Device
from latpred.calibration.devices.conditions import cast
from latpred.calibration.sampling import Choice
from latpred.calibration.session import Sampled
from latpred.calibration.timing import in_network, timer
from latpred.calibration.timing.reference_speed import gauge_of
from latpred.calibration.timing.timer import Timing
from latpred.calibration.workloads import networks
from latpred.calibration.workloads.networks import NetworkSpec
from latpred.graph.dtypes import dtype_of
from latpred.graph.graph import ModelGraph
from latpred.profile.document import DeviceProfile

CLOCK = Cell("clock", "constants")
# Most work of a network, drawn for each: many small cells teach more than few large ones, but large ones must be seen.
LARGEST_MACS = (50_000_000, 4_000_000_000)
BYTES_PER_MAC = 1.0
CHAIN_CALLS = (8, 512)
READ_BYTES = tuple(1 << power for power in range(20, 29))
COPIED_BYTES = 256 << 20
LARGEST_BYTES = 512 << 20  # of one tensor of a kernel cell
_TINY = {
    "m": 4,
    "n": 8,
    "k": 8,
    "batch": 2,
    "heads": 2,
    "queries": 4,
    "steps": 2,
    "hidden": 8,
    "head_dim": 8,
    "masked": 0,
    "c_in": 8,
    "c_out": 8,
    "size": 8,
    "kernel": 3,
    "stride": 1,
    "groups": 1,
    "rows": 4,
    "cols": 8,
    "table": 16,
    "channels": 8,
}
_GEMM, _BMM = ("m", "n", "k"), ("batch", "m", "n", "k")
_CONV = ("batch", "c_in", "c_out", "size", "kernel", "stride", "groups")
_ATTENTION = ("batch", "heads", "queries", "head_dim", "masked")
_ROWS, _TABLE, _MAPS = ("rows", "cols"), ("rows", "cols", "table"), ("batch", "channels", "size")

_RECURRENT = ("batch", "steps", "hidden")
_SHAPED = {
    "gemm": _GEMM,
    "bmm": _BMM,
    "conv": _CONV,
    "attention": _ATTENTION,
    "lstm": _RECURRENT,
    "embedding": _TABLE,
    "index_select": _TABLE,
}
_ON_MAPS = ("batch_norm", "group_norm", "max_pool", "avg_pool", "global_pool")
_ON_ROWS = (
    *("layer_norm", "softmax", "mean", "sum", "cumsum", "topk", "add", "sub", "mul", "div", "add_scalar", "mul_vector"),
    *(
        "pow",
        "gelu",
        "relu",
        "silu",
        "tanh",
        "sigmoid",
        "exp",
        "rsqrt",
        "hardswish",
        "relu6",
        "neg",
        "cos",
        "gt",
        "where",
    ),
    *("masked_fill", "clone", "transpose_copy", "cast", "cat", "pad", "roll", "fft"),
)
_DISPATCHED = (
    *("view", "reshape", "flatten", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze"),
    *("split", "chunk", "dropout", "detach", "arange", "zeros", "ones", "full", "new_ones", "tensor", "addmm"),
    *("baddbmm", "matmul", "matmul_shared", "einsum", "einsum_outer", "broadcast", "conv1d", "gather", "index"),
    *("max_pool1d", "copy", "flip", "fft2", "sqrt", "clamp", "eq", "rsub", "tril", "bitwise_not", "any", "item"),
)
KERNELS = (*_SHAPED, *_ON_ROWS, *_ON_MAPS)
PRODUCTS = ("gemm", "bmm", "conv", "attention", "lstm")
# How often each op is drawn: what network time is mostly made of comes first.
_WEIGHTS = {"gemm": 10, "conv": 12, "bmm": 4, "attention": 5, "layer_norm": 2, "softmax": 2, "batch_norm": 2}


def dims_of(name: str) -> tuple[str, ...]:
    """Dimensions that the builder of a name reads."""
    if name in _SHAPED:
        return _SHAPED[name]
    return _MAPS if name in _ON_MAPS else _ROWS


def memory_cells() -> list[Cell]:
    """Reads and copies from a size that every cache holds to one that none does, and an upload from the host."""
    reads = [Cell("memory", "read", {"bytes": size}) for size in READ_BYTES]
    return [
        *reads,
        Cell("memory", "bandwidth", {"bytes": COPIED_BYTES}),
        Cell("memory", "upload", {"bytes": COPIED_BYTES}),
    ]


def dispatch_cells(runtime: str = "eager") -> list[Cell]:
    """One tiny op of every kind: what is left of its time is what issuing it costs."""
    names = (*KERNELS, *_DISPATCHED)
    return [Cell("dispatch", name, {dim: _TINY[dim] for dim in dims_of(name)}, "fp32", runtime) for name in names]


def kernel_cells(precision: str, seed: int, names: Sequence[str] = KERNELS) -> Iterator[Cell]:
    """Endless random kernel cells of a precision; every op comes once before any comes twice."""
    rng = random.Random(f"{seed}/{precision}")
    weights = [_WEIGHTS.get(name, 1) for name in names]
    for name in names:
        yield _kernel_cell(rng, name, precision)
    while True:
        yield _kernel_cell(rng, rng.choices(names, weights)[0], precision)


def _kernel_cell(rng: random.Random, name: str, precision: str) -> Cell:
    draw: Callable[[random.Random], dict[str, int]] = {
        "gemm": _draw_gemm,
        "bmm": _draw_bmm,
        "conv": _draw_conv,
        "attention": _draw_attention,
        "lstm": _draw_recurrent,
        "embedding": _draw_table,
        "index_select": _draw_table,
        "transpose_copy": _draw_transposed,
    }.get(name, _draw_map if name in _ON_MAPS else _draw_rows)
    return Cell("kernel", name, draw(rng), precision)


def network_cell(spec: NetworkSpec, precision: str = "fp32", runtime: str = "eager") -> Cell:
    """The cell that times a generated network."""
    dims = {"seed": spec.seed, "width": spec.width, "size": spec.size, "batch": spec.batch, "cold": int(spec.cold)}
    return Cell("network", spec.kind, dims, precision, runtime)


def network_spec(cell: Cell) -> NetworkSpec:
    """The generated network that a cell times."""
    dims = cell.dims
    return NetworkSpec(cell.name, dims["seed"], dims["width"], dims["size"], dims["batch"], bool(dims["cold"]))


def chain_networks() -> list[NetworkSpec]:
    """Networks that do nothing but call modules or functions, few times and often."""
    return [NetworkSpec(kind, 0, networks.TINY_WIDTH, size, 1) for kind in networks.CHAINS for size in CHAIN_CALLS]


def tiny_networks(number: int) -> list[NetworkSpec]:
    """Networks that only dispatch."""
    return [networks.draw(seed, tiny=True) for seed in range(number)]


def sized_networks(first_seed: int = 0) -> Iterator[NetworkSpec]:
    """Endless networks of every size that a calibration can afford, one kind after the other."""
    yield from _affordable(networks.draw(seed) for seed in count(first_seed))


def judging_networks() -> Iterator[NetworkSpec]:
    """Those of the sized networks that no fit sees."""
    yield from _affordable(spec for spec in map(networks.draw, count()) if spec.holdout)


def walked(spec: NetworkSpec) -> ModelGraph | None:
    """What a drawn network does; None where it cannot be walked.

    Choosing what to measure must not end a calibration over one network. Who measures it says in its row what is wrong.
    """
    try:
        return networks.graph(spec)
    except Exception:
        return None


def _affordable(drawn: Iterator[NetworkSpec]) -> Iterator[NetworkSpec]:
    """Networks at a batch that is little enough work; without those that never are.

    What cannot be walked is passed on as it was drawn.
    """
    for spec in drawn:
        graph = walked(spec)
        if graph is None:
            yield spec
            continue
        most = _log_uniform(random.Random(f"most/{spec.seed}"), *LARGEST_MACS)
        while spec.batch > 1 and _work(graph, spec.batch) > most:
            spec = msgspec.structs.replace(spec, batch=spec.batch // 2)
        if _work(graph, spec.batch) <= LARGEST_MACS[1]:
            yield spec


def _work(graph: ModelGraph, batch: int) -> float:
    """Multiply-adds, or what the bytes moved are worth in them."""
    return max(graph.macs(batch), BYTES_PER_MAC * graph.bytes(batch))


def _log_uniform(rng: random.Random, low: int, high: int, step: int = 1) -> int:
    value: float = low * (high / low) ** rng.random()
    return max(step, round(value / step) * step)


def _draw_gemm(rng: random.Random) -> dict[str, int]:
    m = _log_uniform(rng, 1, 16384)
    n, k = _log_uniform(rng, 16, 8192, 8), _log_uniform(rng, 16, 8192, 8)
    while 4 * max(m * n, m * k, n * k) > LARGEST_BYTES:
        m = max(1, m // 2)
    return {"m": m, "n": n, "k": k}


def _draw_bmm(rng: random.Random) -> dict[str, int]:
    batch, m = _log_uniform(rng, 1, 1024), _log_uniform(rng, 4, 1024, 4)
    n, k = rng.choice(
        ((m, 64), (64, m), (m, 32), (32, m), (_log_uniform(rng, 8, 1024, 8), _log_uniform(rng, 8, 512, 8)))
    )
    while 4 * batch * max(m * n, m * k, n * k) > LARGEST_BYTES // 4:
        batch = max(1, batch // 2)
    return {"batch": batch, "m": m, "n": n, "k": k}


def _draw_conv(rng: random.Random) -> dict[str, int]:
    size = rng.choice((7, 8, 14, 16, 28, 32, 56, 112, 224))
    kind = rng.choice(("pointwise", "dense", "dense", "depthwise", "grouped", "stem"))
    channels = _log_uniform(rng, 16, min(1024, max(32, 28672 // size)), 8)
    c_out = channels if kind in ("depthwise", "grouped") else _log_uniform(rng, 16, 1024, 8)
    kernel, groups = rng.choice((1, 3, 3, 5, 7) if kind == "grouped" else (3, 3, 3, 5, 7)), 1
    if kind == "pointwise":
        kernel = 1
    elif kind == "depthwise":
        groups = channels
    elif kind == "grouped":
        groups = rng.choice([g for g in (2, 4, 8, 32) if channels % g == 0])
    elif kind == "stem":
        channels, c_out, kernel, size = 3, _log_uniform(rng, 16, 128, 8), rng.choice((3, 7)), rng.choice((64, 112, 224))
    batch, stride = _log_uniform(rng, 1, 128), rng.choice((1, 1, 2))
    while 4 * batch * max(channels, c_out) * size * size > LARGEST_BYTES // 2:
        batch = max(1, batch // 2)
    dims = (batch, channels, c_out, size, kernel, stride, groups)
    return dict(zip(_CONV, dims, strict=True))


def _draw_attention(rng: random.Random) -> dict[str, int]:
    queries = _log_uniform(rng, 4, 1024, 4)
    batch, heads = _log_uniform(rng, 1, 128), rng.choice((1, 2, 4, 8, 12, 16, 32))
    while batch > 1 and batch * heads * queries * max(queries, 64) * 4 > LARGEST_BYTES:
        batch //= 2
    dims = (batch, heads, queries, rng.choice((32, 64, 64, 128)), int(rng.random() < 0.3))
    return dict(zip(_ATTENTION, dims, strict=True))


def _draw_recurrent(rng: random.Random) -> dict[str, int]:
    steps, hidden = _log_uniform(rng, 2, 512), _log_uniform(rng, 32, 1024, 32)
    return {"batch": _log_uniform(rng, 1, 64), "steps": steps, "hidden": hidden}


def _draw_rows(rng: random.Random) -> dict[str, int]:
    rows, cols = _log_uniform(rng, 1, 131072), _log_uniform(rng, 8, 8192, 8)
    while 4 * rows * cols > LARGEST_BYTES // 4:
        rows = max(1, rows // 2)
    return {"rows": rows, "cols": cols}


def _draw_transposed(rng: random.Random) -> dict[str, int]:
    """At least two rows: one row transposed lies in memory as before, and nothing would be copied."""
    dims = _draw_rows(rng)
    return dims | {"rows": max(2, dims["rows"])}


def _draw_table(rng: random.Random) -> dict[str, int]:
    return {"rows": _log_uniform(rng, 1, 16384), "cols": _log_uniform(rng, 16, 2048, 8), "table": 2048}


def _draw_map(rng: random.Random) -> dict[str, int]:
    batch, channels, size = _log_uniform(rng, 1, 128), _log_uniform(rng, 8, 1024, 8), rng.choice((7, 14, 28, 56, 112))
    while 4 * batch * channels * size * size > LARGEST_BYTES // 4:
        batch = max(1, batch // 2)
    return {"batch": batch, "channels": channels, "size": size}


TINY = 3 * len(networks.KINDS)
TINY_REPEATS, TINY_S = 15, 0.15
SIZED_REPEATS, SIZED_S = 5, 0.06
JUDGE_REPEATS, JUDGE_S = 7, 0.5
# Of the cells that come after the first ones, how many are of the first precision for each one of another.
PREFERENCE = 3


class Synchronous:
    """The campaign of a CPU.

    Parameters
    ----------
    device : Device
        A synchronous one.
    precisions : sequence of str
        The most important first.
    """

    def __init__(self, device: Device, precisions: Sequence[str]) -> None:
        self._device = device
        self._precisions = tuple(precisions)
        self._choice = Choice()
        self._filler = torch.zeros(networks.EVICTING_BYTES // 4)

    def learn(self, profile: DeviceProfile) -> None:
        """Prefer networks that this profile is unsure of."""
        self._choice.learn(profile)

    def cells(self) -> Iterator[Cell]:
        """Tiny networks, memory, then sized networks without end.

        Without some tiny networks there is no profile, so one of each kind comes first: a busy machine takes long.
        """
        tiny = list(map(network_cell, tiny_networks(TINY)))
        first = len(networks.KINDS)
        yield from map(network_cell, chain_networks())
        yield from (*tiny[:first], *memory_cells(), *tiny[first:])
        for number, spec in enumerate(self._choice.of_networks(sized_networks())):
            yield network_cell(spec, self._precision(number))

    def measure(self, cell: Cell) -> Sampled:
        """Time a network whole and call by call, or bytes being moved."""
        gauge = gauge_of(torch.get_num_threads())
        if cell.kind == "memory":
            call = self._device.prepare(cell)
            return Sampled({"single": timer.single(self._device, call, timer.QUICK, gauge)})
        spec = network_spec(cell)
        networks.graph(spec, cell.precision)  # one that cannot be traced is no use to any fit
        model = networks.build(spec).to(dtype_of(cell.precision))
        inputs = cast(networks.inputs(spec), cell.precision)
        repeats, budget_s = _effort(spec)
        between = self._evicting(spec, inputs, cell.precision) if spec.cold else None
        placed = in_network.time_ops(model, inputs, repeats=repeats, budget_s=budget_s, gauge=gauge, between=between)
        return Sampled({"single": placed.forward}, placed.calls_us)

    def _evicting(self, spec: NetworkSpec, inputs: tuple[torch.Tensor, ...], precision: str) -> Callable[[], None]:
        """What takes a network's weights out of the cache, and nothing else.

        A twin with weights of its own runs after the cache was filled: it brings back what the layers of a large model
        find in the cache, which are code and the memory of results.
        """
        meta_model = networks.build(spec).to(dtype_of(precision))

        def evict() -> None:
            self._filler.sum()
            meta_model(*inputs)

        return evict

    def _precision(self, number: int) -> str:
        main, *others = self._precisions
        if not others or number % (PREFERENCE + 1) < PREFERENCE:
            return main
        return others[number // (PREFERENCE + 1) % len(others)]


def _effort(spec: NetworkSpec) -> tuple[int, float]:
    """Forward passes and seconds to spend on a network."""
    if spec.tiny:
        return TINY_REPEATS, TINY_S
    return (JUDGE_REPEATS, JUDGE_S) if spec.holdout else (SIZED_REPEATS, SIZED_S)


JUDGES = 24
ROUND = 24  # kernel cells between two judges
# Short samples: one slow call in a hundred then leaves most of them, and so their median, untouched.
DISPATCH = timer.Plan(sample_s=5e-5, most=400, precision=0.002)
FINE = timer.Plan(loops=16, most=2000, precision=0.001)


class Asynchronous:
    """The campaign of a GPU, or of the simulated device.

    Parameters
    ----------
    device : Device
        An asynchronous one.
    precisions : sequence of str
        The most important first.
    """

    def __init__(self, device: Device, precisions: Sequence[str]) -> None:
        self._device = device
        self._precisions = tuple(precisions)
        self._choice = Choice()

    def learn(self, profile: DeviceProfile) -> None:
        """Prefer kernels that this profile is unsure of."""
        self._choice.learn(profile)

    def cells(self) -> Iterator[Cell]:
        """Clocks, dispatch, tiny networks; then kernels of every precision in turns, with a judge now and then."""
        yield CLOCK
        yield from (cell for cell in memory_cells() if cell.name != "read")
        yield from dispatch_cells()
        for spec in (*chain_networks(), *tiny_networks(TINY)):
            yield network_cell(spec)
        kernels = {precision: self._kernels(precision) for precision in self._precisions}
        judges = judging_networks()
        while True:
            for precision in self._precisions:
                yield from self._choice.of_kernels(kernels[precision], ROUND)
                yield network_cell(next(judges), precision)

    def measure(self, cell: Cell) -> Sampled:
        """Time one cell."""
        if cell == CLOCK:
            return Sampled(_constants(self._device))
        if cell.kind == "network":
            return Sampled(self._network(cell))
        call = self._device.prepare(cell)
        if cell.name == "upload":
            return Sampled({"single": timer.single(self._device, call)})
        if cell.kind == "dispatch":
            return Sampled({"issue": timer.issue(self._device, call, DISPATCH)})
        return Sampled({"queued": timer.queued(self._device, call, FINE if cell.kind == "memory" else None)})

    def _kernels(self, precision: str) -> Iterator[Cell]:
        # What multiplies nothing runs in TF32 as it does in fp32: `fitting` takes it from there.
        shared = precision == "tf32" and "fp32" in self._precisions
        return kernel_cells(precision, 0, PRODUCTS if shared else KERNELS)

    def _network(self, cell: Cell) -> dict[str, Timing]:
        spec = network_spec(cell)
        self._device.use_precision(cell.precision)
        with self._device.errors():
            workload = self._workload(cell)
        call = self._device.prepare_model(*workload, "eager")
        timings = {"single": timer.single(self._device, call)}
        syncs = networks.graph(spec, cell.precision).syncs(spec.batch)
        if spec.tiny and not syncs:
            timings["issue"] = timer.issue(self._device, call, timer.Plan(loops=1))
        return timings

    def _workload(self, cell: Cell) -> tuple[Any, Any]:
        """What the device runs: a module and its inputs, or for a simulation the graph and the batch."""
        spec = network_spec(cell)
        place = getattr(self._device, "torch_device", None)
        if place is None:
            return networks.graph(spec, cell.precision), spec.batch
        with torch.device(place):
            model = networks.build(spec).to(dtype_of(cell.precision))
        return model, cast(networks.inputs(spec, device=str(place)), cell.precision)


def _constants(device: Device) -> dict[str, Timing]:
    """Clock constants as timings, so that a journal holds them like any other cell.

    The queue is a number of launches, not a time.
    """
    found = constants.measure(device)
    values = {name: getattr(found, name) for name in found.__struct_fields__ if name not in ("queue", "stable")}
    timings = {name: Timing(us * 1e-6, 0.0, 1, found.stable) for name, us in values.items()}
    return timings | {"queue": Timing(float(found.queue), 0.0, 1, found.stable)}
