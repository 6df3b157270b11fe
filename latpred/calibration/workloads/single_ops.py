"""Single-op networks: what a dispatch or kernel cell runs.

A cell's op is an nn.Module of one op with an example input whose first dimension is the batch, so that the same trace
that counts a user's model counts the cell, and calibration and prediction can never disagree on what an op's work is.
Which shapes are worth timing is `latpred.calibration.schedules`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from itertools import cycle
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from latpred.calibration.cells import FRESH, Cell
from latpred.errors import CalibrationError
from latpred.graph.graph import ModelGraph
from latpred.tracing import trace
from latpred.tracing.inputs import cast, dtype_of

ROTATED_BYTES = 256 << 20  # copies of a cell's weights rotate over more than any last-level cache holds
MOST_COPIES = 64
CHAIN_WIDTH = 512  # inputs and outputs of the products of a chain, whose weights are 1 MiB
_CUDNN: Any = torch.backends.cudnn  # carries no types
_BROADCAST: Any = torch.broadcast_tensors

Dims = Mapping[str, int]


class Built(NamedTuple):
    """One op: a function of inputs, whose first dimension is the batch, and weights."""

    function: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    weights: tuple[Tensor, ...] = ()
    lay_out: Callable[[tuple[Tensor, ...]], None] | None = None  # weights as a module would have them on the device


class _OneOp(nn.Module):
    """A function of its inputs and its own parameters, called once."""

    def __init__(self, function: Callable[..., Any], weights: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.function = function
        self.held = nn.ParameterList(nn.Parameter(tensor, requires_grad=False) for tensor in weights)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs, *self.held)


def _conv(dims: Dims) -> Built:
    batch, kernel, groups, stride = dims["batch"], dims["kernel"], dims["groups"], dims["stride"]
    weight = torch.randn(dims["c_out"], dims["c_in"] // groups, kernel, kernel)

    def convolve(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(x, w, None, stride, kernel // 2, 1, groups)

    return Built(convolve, (torch.randn(batch, dims["c_in"], dims["size"], dims["size"]),), (weight,))


def _attention(dims: Dims) -> Built:
    batch, heads, queries, width = dims["batch"], dims["heads"], dims["queries"], dims["head_dim"]
    inputs = tuple(torch.randn(batch, queries, heads, width).transpose(1, 2) for _ in range(3))
    if dims["masked"]:
        inputs = (*inputs, torch.zeros(batch, 1, queries, queries))
    return Built(F.scaled_dot_product_attention, inputs)


def _shaped(
    function: Callable[..., Any],
    *inputs: str,
    weights: Sequence[str] = (),
    draw: Callable[[list[int]], Tensor] = torch.randn,
    hold: Callable[[list[int]], Tensor] = torch.randn,
) -> Callable[[Dims], Built]:
    """A builder over inputs and weights whose shapes are written as "rows 2 cols": names of dimensions, and numbers."""

    def make(dims: Dims) -> Built:
        def shape(text: str) -> list[int]:
            return [dims[part] if part in dims else int(part) for part in text.split()]

        drawn, held = (tuple(made(shape(text)) for text in texts) for made, texts in ((draw, inputs), (hold, weights)))
        return Built(function, drawn, held)

    return make


def _rows(function: Callable[..., Any], *, vectors: int = 0, operands: int = 1) -> Callable[[Dims], Built]:
    """A builder over (rows, cols) inputs and parameters of length cols."""
    inputs, weights = ["rows cols"] * operands, ["cols"] * vectors
    return _shaped(function, *inputs, weights=weights, draw=lambda shape: torch.rand(shape) + 0.5, hold=torch.ones)


def _maps(function: Callable[..., Any], *, per_channel: int = 0) -> Callable[[Dims], Built]:
    """A builder over (batch, channels, size, size) inputs and parameters of length channels."""
    weights = ["channels"] * per_channel
    return _shaped(function, "batch channels size size", weights=weights, draw=torch.rand, hold=torch.ones)


def _looked_up(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Dims], Built]:
    """A builder over row numbers and the table that they are looked up in."""

    def make(dims: Dims) -> Built:
        rows, table = dims["rows"], dims["table"]
        return Built(function, (torch.randint(0, table, (rows,)),), (torch.randn(table, dims["cols"]),))

    return make


def _lstm(dims: Dims) -> Built:
    batch, steps, hidden = dims["batch"], dims["steps"], dims["hidden"]
    gates = 4 * hidden
    weights = (torch.randn(gates, hidden), torch.randn(gates, hidden), torch.randn(gates), torch.randn(gates))

    def run(x: Tensor, state: Tensor, *held: Tensor) -> Any:
        start = state.unsqueeze(0)  # cuDNN takes a state that lies in one piece alone
        return torch.lstm(x, (start, start), list(held), True, 1, 0.0, False, False, True)

    def lay_out(held: tuple[Tensor, ...]) -> None:
        # As nn.LSTM does when it is moved: from separate weights, cuDNN would make one piece in every call.
        if held[0].is_cuda and _CUDNN.is_acceptable(held[0]):
            mode = _CUDNN.rnn.get_cudnn_mode("LSTM")
            torch._cudnn_rnn_flatten_weight(list(held), 4, hidden, mode, hidden, 0, 1, True, False)

    return Built(run, (torch.randn(batch, steps, hidden), torch.randn(batch, hidden)), weights, lay_out)


def _item(dims: Dims) -> Built:
    # What is read has to be there: beside tensors on the meta device it stays on the host.
    place = torch.get_default_device()
    numbers = torch.ones(dims["rows"], dtype=torch.int64, device="cpu" if place.type == "meta" else place)
    return Built(lambda x: x[0].item(), (numbers,))


_HEADS = "rows 2 cols cols"  # batch, heads, tokens and width, as explicit attention has them
_OF_TORCH = ("tanh", "sigmoid", "exp", "rsqrt", "neg", "cos", "clone", "sqrt", "tril", "detach", "flatten")
BUILDERS: dict[str, Callable[[Dims], Built]] = {
    "gemm": _shaped(F.linear, "m k", weights=("n k", "n")),
    "bmm": _shaped(torch.bmm, "batch m k", "batch k n"),
    "conv": _conv,
    "attention": _attention,
    "lstm": _lstm,
    "embedding": _looked_up(F.embedding),
    "index_select": _looked_up(lambda picked, table: table.index_select(0, picked)),
    # rows by cols
    **{name: _rows(getattr(torch, name)) for name in _OF_TORCH},
    **{name: _rows(getattr(F, name)) for name in ("gelu", "relu", "silu", "hardswish", "relu6")},
    **{name: _rows(getattr(torch, name), operands=2) for name in ("add", "sub", "mul")},
    "layer_norm": _rows(lambda x, weight, bias: F.layer_norm(x, weight.shape, weight, bias), vectors=2),
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
    "batch_norm": _maps(F.batch_norm, per_channel=4),
    "group_norm": _maps(lambda x, *held: F.group_norm(x, 8 if x.shape[1] % 8 == 0 else 1, *held), per_channel=2),
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
    "addmm": _shaped(lambda x, w, b: torch.addmm(b, x, w), "rows cols", weights=("cols cols", "cols")),
    "baddbmm": _shaped(torch.baddbmm, *["rows cols cols"] * 3),
    "matmul": _shaped(torch.matmul, _HEADS, _HEADS),
    "matmul_shared": _shaped(torch.matmul, _HEADS, weights=("2 cols cols",)),
    "einsum": _shaped(lambda x, y: torch.einsum("bhqd,bhkd->bhqk", x, y), _HEADS, _HEADS),
    "einsum_outer": _rows(lambda x, y: torch.einsum("bi,bj->bij", x, y), operands=2),
    "broadcast": _rows(lambda *tensors: _BROADCAST(*tensors)[0], vectors=8),
    "fft2": _rows(torch.fft.fft2),
    "conv1d": _shaped(F.conv1d, "rows cols cols", weights=("cols cols 3",)),
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
            "latpred is started anew with --fresh."
        )
    return BUILDERS[cell.name](cell.dims)


_GRAPHS: dict[str, tuple[ModelGraph, int]] = {}


def graph(cell: Cell) -> tuple[ModelGraph, int]:
    """What one call of a cell does, traced like any model, and the batch to read it at."""
    if cell.key not in _GRAPHS:
        with torch.device("meta"):
            built = make(cell)
        one_op = _OneOp(built.function, built.weights).eval()
        _GRAPHS[cell.key] = (trace(one_op, built.inputs, precision=cell.precision), built.inputs[0].shape[0])
    return _GRAPHS[cell.key]


def build(cell: Cell, place: torch.device) -> Callable[[], None]:
    """The call that issues a cell once on a real device; weights rotate from call to call so that they are cold.

    To be called under `torch.inference_mode()`, which costs too much to be entered for each call.
    """
    if cell.kind == "memory":
        return _memory(cell, place)
    with place:
        built = make(cell)
    inputs, weights = cast((built.inputs, built.weights), dtype_of(cell.precision))
    held = sum(tensor.nbytes for tensor in weights)
    cold = cell.kind != "dispatch" and held > 0
    copies = max(1, min(MOST_COPIES, ROTATED_BYTES // held)) if cold else 1
    sets = [weights, *(tuple(tensor.clone() for tensor in weights) for _ in range(copies - 1))]
    if built.lay_out is not None:
        for one in sets:
            built.lay_out(one)
    calls = [partial(built.function, *inputs, *one) for one in sets]
    rotation = cycle(calls)
    return (lambda: next(rotation)()) if cold else calls[0]


def _memory(cell: Cell, place: torch.device) -> Callable[[], Any]:
    """Bytes read ("read"; "weights": by products), copied ("bandwidth"; "fresh": to new memory) or uploaded."""
    zeros = partial(torch.zeros, dtype=torch.float32)
    source = zeros(cell.dims["bytes"] // 4, device="cpu" if cell.name == "upload" else place)
    if cell.name == "read":
        return source.sum
    if cell.name == "weights":
        row, matrices = zeros(1, CHAIN_WIDTH, device=place), source.view(-1, CHAIN_WIDTH, CHAIN_WIDTH)
        return partial(reduce, F.linear, matrices.unbind(), row)
    if cell.name == FRESH.name:
        return source.clone
    return partial(torch.empty_like(source, device=place).copy_, source)
