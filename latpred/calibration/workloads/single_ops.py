"""Single-op networks: what a dispatch or kernel cell runs.

A cell's op is an nn.Module of one op with an example input whose first dimension is the batch, so that the same trace
that counts a user's model counts the cell, and calibration and prediction can never disagree on what an op's work is.
Which shapes are worth timing is `latpred.calibration.schedules`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, reduce
from itertools import cycle
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from latpred.calibration.cells import FRESH, Cell
from latpred.calibration.devices.conditions import cast
from latpred.errors import CalibrationError
from latpred.graph.graph import ModelGraph

ROTATED_BYTES = 256 << 20  # copies of a cell's weights rotate over more than any last-level cache holds
MOST_COPIES = 64
CHAIN_WIDTH = 512  # inputs and outputs of the products of a chain, whose weights are 1 MiB
_CUDNN: Any = torch.backends.cudnn  # carries no types
_BROADCAST: Any = torch.broadcast_tensors

Dims = Mapping[str, int]


class Built(NamedTuple):
    """One op: a function of inputs (whose first dimension is `batch`) and weights."""

    function: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    batch: int
    weights: tuple[Tensor, ...] = ()
    lay_out: Callable[[tuple[Tensor, ...]], None] | None = None  # weights as a module would have them on the device

    def module(self) -> nn.Module:
        """The op as a network of its own, to be traced."""
        return _OneOp(self.function, self.weights).eval()


class _OneOp(nn.Module):
    """A function of its inputs and its own parameters, called once."""

    def __init__(self, function: Callable[..., Any], weights: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.function = function
        self.held = nn.ParameterList(nn.Parameter(tensor, requires_grad=False) for tensor in weights)

    def forward(self, *inputs: Tensor) -> Any:
        """The function's result."""
        return self.function(*inputs, *self.held)


def _gemm(dims: Dims) -> Built:
    m, n, k = dims["m"], dims["n"], dims["k"]
    return Built(F.linear, (torch.randn(m, k),), m, (torch.randn(n, k), torch.randn(n)))


def _bmm(dims: Dims) -> Built:
    b, m, n, k = dims["batch"], dims["m"], dims["n"], dims["k"]
    return Built(torch.bmm, (torch.randn(b, m, k), torch.randn(b, k, n)), b)


def _conv(dims: Dims) -> Built:
    batch, kernel, groups, stride = dims["batch"], dims["kernel"], dims["groups"], dims["stride"]
    weight = torch.randn(dims["c_out"], dims["c_in"] // groups, kernel, kernel)

    def convolve(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(x, w, None, stride, kernel // 2, 1, groups)

    return Built(convolve, (torch.randn(batch, dims["c_in"], dims["size"], dims["size"]),), batch, (weight,))


def _attention(dims: Dims) -> Built:
    batch, heads, queries, width = dims["batch"], dims["heads"], dims["queries"], dims["head_dim"]
    inputs = tuple(torch.randn(batch, queries, heads, width).transpose(1, 2) for _ in range(3))
    if dims["masked"]:
        inputs = (*inputs, torch.zeros(batch, 1, queries, queries))
    return Built(F.scaled_dot_product_attention, inputs, batch)


def _rows(function: Callable[..., Any], *, vectors: int = 0, operands: int = 1) -> Callable[[Dims], Built]:
    """A builder over (rows, cols) inputs and parameters of length cols."""

    def make(dims: Dims) -> Built:
        rows, cols = dims["rows"], dims["cols"]
        inputs = tuple(torch.rand(rows, cols) + 0.5 for _ in range(operands))
        return Built(function, inputs, rows, tuple(torch.ones(cols) for _ in range(vectors)))

    return make


def _maps(function: Callable[..., Any], *, per_channel: int = 0) -> Callable[[Dims], Built]:
    """A builder over (batch, channels, size, size) inputs and parameters of length channels."""

    def make(dims: Dims) -> Built:
        batch, channels, size = dims["batch"], dims["channels"], dims["size"]
        inputs = (torch.rand(batch, channels, size, size),)
        return Built(function, inputs, batch, tuple(torch.ones(channels) for _ in range(per_channel)))

    return make


def _embedding(dims: Dims) -> Built:
    rows, table = dims["rows"], dims["table"]
    return Built(F.embedding, (torch.randint(0, table, (rows,)),), rows, (torch.randn(table, dims["cols"]),))


def _index_select(dims: Dims) -> Built:
    rows, table = dims["rows"], dims["table"]

    def select(picked: Tensor, weight: Tensor) -> Tensor:
        return weight.index_select(0, picked)

    return Built(select, (torch.randint(0, table, (rows,)),), rows, (torch.randn(table, dims["cols"]),))


def _lstm(dims: Dims) -> Built:
    batch, steps, hidden = dims["batch"], dims["steps"], dims["hidden"]
    gates = 4 * hidden
    weights = (torch.randn(gates, hidden), torch.randn(gates, hidden), torch.randn(gates), torch.randn(gates))

    def run(x: Tensor, *held: Tensor) -> Any:
        start = x.select(1, 0).unsqueeze(0)
        return torch.lstm(x, (start, start), list(held), True, 1, 0.0, False, False, True)

    def lay_out(held: tuple[Tensor, ...]) -> None:
        # As nn.LSTM does when it is moved: from separate weights, cuDNN would make one piece in every call.
        if held[0].is_cuda and _CUDNN.is_acceptable(held[0]):
            mode = _CUDNN.rnn.get_cudnn_mode("LSTM")
            torch._cudnn_rnn_flatten_weight(list(held), 4, hidden, mode, hidden, 0, 1, True, False)

    return Built(run, (torch.randn(batch, steps, hidden),), batch, weights, lay_out)


def _addmm(dims: Dims) -> Built:
    rows, cols = dims["rows"], dims["cols"]
    weights = torch.randn(cols, cols), torch.randn(cols)
    return Built(lambda x, w, b: torch.addmm(b, x, w), (torch.randn(rows, cols),), rows, weights)


def _baddbmm(dims: Dims) -> Built:
    rows, cols = dims["rows"], dims["cols"]
    return Built(torch.baddbmm, tuple(torch.randn(rows, cols, cols) for _ in range(3)), rows)


def _heads(function: Callable[..., Any], *, shared: bool = False) -> Callable[[Dims], Built]:
    """A builder over (batch, heads, tokens, width) inputs, as explicit attention has them, or one `shared` by all."""

    def make(dims: Dims) -> Built:
        rows, cols = dims["rows"], dims["cols"]
        left, right = torch.randn(rows, 2, cols, cols), torch.randn(*(() if shared else (rows,)), 2, cols, cols)
        return Built(function, (left,), rows, (right,)) if shared else Built(function, (left, right), rows)

    return make


def _conv1d(dims: Dims) -> Built:
    rows, cols = dims["rows"], dims["cols"]
    return Built(F.conv1d, (torch.randn(rows, cols, cols),), rows, (torch.randn(cols, cols, 3),))


def _item(dims: Dims) -> Built:
    # What is read has to be there: beside tensors on the meta device it stays on the host.
    place = torch.get_default_device()
    numbers = torch.ones(dims["rows"], dtype=torch.int64, device="cpu" if place.type == "meta" else place)
    return Built(lambda x: x[0].item(), (numbers,), dims["rows"])


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias)


def _batch_norm(x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(x, mean, variance, weight, bias)


def _group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.group_norm(x, 8 if x.shape[1] % 8 == 0 else 1, weight, bias)


_OF_TORCH = ("tanh", "sigmoid", "exp", "rsqrt", "neg", "cos", "clone", "sqrt", "tril", "detach", "flatten")
BUILDERS: dict[str, Callable[[Dims], Built]] = {
    "gemm": _gemm,
    "bmm": _bmm,
    "conv": _conv,
    "attention": _attention,
    "lstm": _lstm,
    "embedding": _embedding,
    "index_select": _index_select,
    # rows by cols
    **{name: _rows(getattr(torch, name)) for name in _OF_TORCH},
    **{name: _rows(getattr(F, name)) for name in ("gelu", "relu", "silu", "hardswish", "relu6")},
    **{name: _rows(getattr(torch, name), operands=2) for name in ("add", "sub", "mul")},
    "layer_norm": _rows(_layer_norm, vectors=2),
    "softmax": _rows(lambda x: F.softmax(x, -1)),
    "mean": _rows(lambda x: x.mean(-1)),
    "sum": _rows(lambda x: x.sum(-1)),
    "cumsum": _rows(lambda x: x.cumsum(-1)),
    "topk": _rows(lambda x: x.topk(1)),
    "div": _rows(lambda x: x / 8.0),
    "add_scalar": _rows(lambda x: x + 1.0),
    "mul_vector": _rows(torch.mul, vectors=1),
    "pow": _rows(lambda x: x.pow(2)),
    "gt": _rows(lambda x: x > 0),
    "where": _rows(lambda x, y: torch.where(x > y, x, y), operands=2),
    "masked_fill": _rows(lambda x: x.masked_fill(x > 1, 0.0)),
    "transpose_copy": _rows(lambda x: x.t().contiguous()),
    "cast": _rows(lambda x: x.to(torch.float64)),
    "cat": _rows(lambda x, y: torch.cat((x, y), 1), operands=2),
    "pad": _rows(lambda x: F.pad(x, (0, 1))),
    "roll": _rows(lambda x: torch.roll(x, 1, 0)),
    "fft": _rows(lambda x: torch.fft.fft(x.float())),
    # images
    "batch_norm": _maps(_batch_norm, per_channel=4),
    "group_norm": _maps(_group_norm, per_channel=2),
    "max_pool": _maps(lambda x: F.max_pool2d(x, 3, 2, 1)),
    "avg_pool": _maps(lambda x: F.avg_pool2d(x, 2)),
    "global_pool": _maps(lambda x: F.adaptive_avg_pool2d(x, 1)),
    # launch nothing: host cost only
    "view": _rows(lambda x: x.view(-1)),
    "reshape": _rows(lambda x: x.reshape(-1)),
    "transpose": _rows(lambda x: x.transpose(0, 1)),
    "permute": _rows(lambda x: x.permute(1, 0)),
    "expand": _rows(lambda x: x[None].expand(2, -1, -1)),
    "slice": _rows(lambda x: x[:, :1]),
    "select": _rows(lambda x: x.select(0, 0)),
    "unsqueeze": _rows(lambda x: x.unsqueeze(0)),
    "squeeze": _rows(lambda x: x.squeeze(0)),
    "chunk": _rows(lambda x: x.chunk(2, 1)[0]),
    "dropout": _rows(lambda x: F.dropout(x, 0.1, False)),
    "split": _rows(lambda x: x.split(1, 0)[0]),
    "arange": _rows(lambda x: torch.arange(x.shape[0], device=x.device)),
    "zeros": _rows(torch.zeros_like),
    "ones": _rows(lambda x: torch.ones(x.shape[0], device=x.device)),
    "full": _rows(lambda x: torch.full_like(x, 2.0)),
    "new_ones": _rows(lambda x: x.new_ones(8)),
    "tensor": _rows(lambda x: torch.tensor(2.0)),
    # dispatched otherwise than what does the same work
    "addmm": _addmm,
    "baddbmm": _baddbmm,
    "matmul": _heads(torch.matmul),
    "matmul_shared": _heads(torch.matmul, shared=True),
    "einsum": _heads(lambda x, y: torch.einsum("bhqd,bhkd->bhqk", x, y)),
    "einsum_outer": _rows(lambda x, y: torch.einsum("bi,bj->bij", x, y), operands=2),
    "broadcast": _rows(lambda *tensors: _BROADCAST(*tensors)[0], vectors=8),
    "fft2": _rows(torch.fft.fft2),
    "conv1d": _conv1d,
    "max_pool1d": _rows(lambda x: F.max_pool1d(x, 2)),
    "gather": _rows(lambda x, y: x.gather(1, y.long()), operands=2),
    "index": _rows(lambda x, y: x[y.long()[:, 0]], operands=2),
    "copy": _rows(torch.Tensor.copy_, operands=2),
    "flip": _rows(lambda x: x.flip(0)),
    "clamp": _rows(lambda x: x.clamp(0.0, 1.0)),
    "eq": _rows(lambda x: x == 1),
    "rsub": _rows(lambda x: 1.0 - x),
    "bitwise_not": _rows(lambda x: ~(x > 1)),
    "any": _rows(lambda x: (x > 1).any()),
    # waits for the device
    "item": _item,
}


def make(cell: Cell) -> Built:
    """A dispatch or kernel cell's op on the default device, in fp32."""
    if cell.name not in BUILDERS:
        raise CalibrationError(
            f"no cell is called {cell.name!r}; known: {', '.join(BUILDERS)}. A journal written by another version of "
            "latpred is started anew with `latpred calibrate --fresh`."
        )
    return BUILDERS[cell.name](cell.dims)


_GRAPHS: dict[str, tuple[ModelGraph, int]] = {}


def graph(cell: Cell) -> tuple[ModelGraph, int]:
    """What one call of a cell does, traced like any model, and the batch to read it at."""
    from latpred.tracing import trace

    if cell.key not in _GRAPHS:
        with torch.device("meta"):
            built = make(cell)
        _GRAPHS[cell.key] = (trace(built.module(), built.inputs, precision=cell.precision), built.batch)
    return _GRAPHS[cell.key]


def build(cell: Cell, device: Any) -> Callable[[], None]:
    """The call that issues a cell once on a real device; weights rotate from call to call so that they are cold.

    To be called under `torch.inference_mode()`, which costs too much to be entered for each call.
    """
    if cell.kind == "memory":
        return _memory(cell, device.torch_device)
    with torch.device(device.torch_device):
        built = make(cell)
    inputs, weights = cast(built.inputs, cell.precision), cast(built.weights, cell.precision)
    held = sum(tensor.numel() * tensor.element_size() for tensor in weights)
    if cell.kind == "dispatch" or held == 0:
        if built.lay_out is not None:
            built.lay_out(weights)
        return partial(built.function, *inputs, *weights)
    copies = max(1, min(MOST_COPIES, ROTATED_BYTES // held))
    sets = [tuple(tensor.clone() for tensor in weights) for _ in range(copies)]
    if built.lay_out is not None:
        for one in sets:
            built.lay_out(one)
    rotation = cycle([partial(built.function, *inputs, *one) for one in sets])
    return lambda: next(rotation)()


def _memory(cell: Cell, place: torch.device) -> Callable[[], Any]:
    """Bytes read ("read"; "weights": by products), copied ("bandwidth"; "fresh": to new memory) or uploaded."""
    source = torch.zeros(cell.dims["bytes"] // 4, device="cpu" if cell.name == "upload" else place)
    if cell.name == "read":
        return source.sum
    if cell.name == "weights":
        row, matrices = torch.zeros(1, CHAIN_WIDTH, device=place), source.view(-1, CHAIN_WIDTH, CHAIN_WIDTH)
        return partial(reduce, F.linear, matrices.unbind(), row)
    if cell.name == FRESH.name:
        return source.clone
    return partial(torch.empty_like(source, device=place).copy_, source)
