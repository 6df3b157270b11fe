"""What the cells of a raw folder run, so that the walk that counts a user's model counts them too.

Each cell is the op that was sampled, with its shapes as they were, whatever they have to do with a batch: the walk is
given the same tensors at every batch size. What those ops cost is `rawfit`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from latpred.calibration.builders import OneOp
from latpred.graph import Line, Op
from latpred.tracing import trace

Shape = tuple[int, ...]
Dims = tuple[int | bool | str, ...]
_SAME_WORK = {"tf32": "fp32", "bf16": "fp16"}  # precisions that move the same bytes


class Sampled(NamedTuple):
    """A sampled call: a function of activations and parameters, by their shapes.

    reused : how often the function reads each activation's memory as if it were another tensor's (`x + x`). The second
    reading comes from the nearest cache, so only one of them is counted.
    """

    function: Callable[..., Any]
    activations: tuple[Shape, ...] = ()
    parameters: tuple[Shape, ...] = ()
    reused: int = 1


def ops_of(cell: Sampled | nn.Module, precision: str) -> tuple[Op, ...]:
    """The ops of one call, in order, the Python that follows the last one included."""
    with torch.device("meta"):
        if isinstance(cell, nn.Module):
            model: nn.Module = cell
            inputs: tuple[Tensor, ...] = (torch.empty(8, 64),)
        else:
            model = OneOp(cell.function, tuple(torch.empty(shape) for shape in cell.parameters))
            inputs = tuple(torch.empty(shape) for shape in cell.activations)
    reused = 1 if isinstance(cell, nn.Module) else cell.reused
    graph = trace(model.eval(), lambda _: inputs, precision=precision)
    return tuple(_read_once(op, reused) for op in graph.at(1))


@cache
def dispatched(name: str) -> tuple[Op, ...]:
    """The ops of a dispatch cell.

    Raises
    ------
    KeyError
        When no cell goes by the name.
    """
    if name in MODULES:
        return ops_of(MODULES[name](), "fp32")
    if name == "item_sync":
        return _item_ops()
    return ops_of(OPS[name], "fp32")


def kernel(family: str, dims: Dims, precision: str) -> tuple[Op, ...]:
    """The ops of a kernel cell that launch anything.

    Raises
    ------
    KeyError, TypeError
        When no cell goes by the family, or its dims are not what the family has.
    TraceError
        When such a call is not possible.
    """
    return _kernel(family, dims, _SAME_WORK.get(precision, precision))


@cache
def _kernel(family: str, dims: Dims, precision: str) -> tuple[Op, ...]:
    return tuple(op for op in ops_of(SHAPED[family](*dims), precision) if op.launches)


def lookup(family: str, dims: Dims, precision: str) -> Op | None:
    """The embedding that runs the same kernel as a cell that picks rows; None for all other cells."""
    if family != "rows" or dims[0] != "index":
        return None
    rows, cols = int(dims[1]), int(dims[2])
    picked = torch.zeros((rows + 1) // 2, dtype=torch.int64)
    cell = Sampled(lambda table: F.embedding(picked, table), (), ((rows, cols),))
    return next(op for op in ops_of(cell, precision) if op.launches)


def _read_once(op: Op, reused: int) -> Op:
    if reused == 1:
        return op
    return msgspec.structs.replace(op, read_bytes=Line(op.read_bytes.at(1) // reused))


def _item_ops() -> tuple[Op, ...]:
    """A reduction whose result Python reads: of integers, since only their values survive a walk."""
    values = torch.ones(8, 64, dtype=torch.int64)
    graph = trace(OneOp(lambda x: x.sum().item(), ()).eval(), lambda _: (values,), precision="fp32")
    return graph.at(1)


def _attend(q: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, q, q)


def _norm(x: Tensor, v: Tensor) -> Tensor:
    return F.layer_norm(x, v.shape, v, v)


def _normalise(x: Tensor, one: Tensor, zero: Tensor) -> Tensor:
    return F.batch_norm(x, zero, one, one, zero)


_X, _IM, _Q = (8, 64), (1, 32, 8, 8), (1, 4, 16, 32)
_W, _V, _C = (64, 64), (64,), (32,)
_K1, _K3, _DW = (32, 32, 1, 1), (32, 32, 3, 3), (32, 1, 3, 3)


_IDS = torch.zeros(8, 16, dtype=torch.int64)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "module_identity": nn.Identity,
    "module_sequential1": lambda: nn.Sequential(nn.Identity()),
    "module_linear": lambda: nn.Linear(64, 64),
}
OPS: dict[str, Sampled] = {
    "view": Sampled(lambda x: x.view(4, 128), (_X,)),
    "transpose": Sampled(lambda x: x.transpose(0, 1), (_X,)),
    "expand": Sampled(lambda v: v.expand(8, 64), (_V,)),
    "slice": Sampled(lambda x: x[:, :32], (_X,)),
    "permute4d": Sampled(lambda q: q.permute(0, 2, 1, 3), (_Q,)),
    "unsqueeze": Sampled(lambda x: x.unsqueeze(0), (_X,)),
    "add": Sampled(lambda x, y: x + y, (_X, _X)),
    "add_scalar": Sampled(lambda x: x + 1.0, (_X,)),
    "mul": Sampled(lambda x, y: x * y, (_X, _X)),
    "relu": Sampled(F.relu, (_X,)),
    "gelu": Sampled(F.gelu, (_X,)),
    "tanh": Sampled(torch.tanh, (_X,)),
    "silu": Sampled(F.silu, (_X,)),
    "contiguous_t": Sampled(lambda x: x.t().contiguous(), (_X,)),
    "clone": Sampled(torch.clone, (_X,)),
    "to_float": Sampled(lambda x: x.to(torch.float64), (_X,)),
    "cat4": Sampled(lambda *parts: torch.cat(parts, 1), ((8, 16),) * 4),
    "softmax": Sampled(lambda x: F.softmax(x, -1), (_X,)),
    "layer_norm": Sampled(_norm, (_X,), (_V,)),
    "mean": Sampled(lambda x: x.mean(-1), (_X,)),
    "sum": Sampled(torch.sum, (_X,)),
    "linear": Sampled(F.linear, (_X,), (_W, _V)),
    "linear3d": Sampled(F.linear, ((4, 16, 64),), (_W, _V)),
    "mm": Sampled(lambda x, w: x @ w, (_X,), (_W,)),
    "bmm": Sampled(torch.bmm, ((4, 16, 64), (4, 64, 16))),
    "matmul4d": Sampled(lambda q: q @ q.transpose(-1, -2), (_Q,)),
    "sdpa": Sampled(_attend, (_Q,)),
    "embedding": Sampled(lambda w: F.embedding(_IDS, w), (), (_W,)),
    "index_select": Sampled(lambda w: w.index_select(0, _IDS[0]), (), (_W,)),
    "masked_fill": Sampled(lambda x: x.masked_fill(x > 0, 0.0), (_X,)),
    "where": Sampled(lambda x, y: torch.where(x > 0, x, y), (_X, _X)),
    "conv1x1": Sampled(F.conv2d, (_IM,), (_K1,)),
    "conv3x3": Sampled(lambda x, k: F.conv2d(x, k, padding=1), (_IM,), (_K3,)),
    "conv3x3_bias": Sampled(lambda x, k, b: F.conv2d(x, k, b, padding=1), (_IM,), (_K3, _C)),
    "depthwise3x3": Sampled(lambda x, k: F.conv2d(x, k, padding=1, groups=32), (_IM,), (_DW,)),
    "batch_norm": Sampled(_normalise, (_IM,), (_C, _C)),
    "max_pool": Sampled(lambda x: F.max_pool2d(x, 2), (_IM,)),
    "adaptive_avg_pool": Sampled(lambda x: F.adaptive_avg_pool2d(x, 1), (_IM,)),
    "arange": Sampled(lambda x: torch.arange(16, device=x.device), (_X,)),
    "zeros": Sampled(lambda x: torch.zeros(8, 16, device=x.device), (_X,)),
    "dropout_eval": Sampled(lambda x: F.dropout(x, 0.1, False), (_X,)),
    "group_norm": Sampled(lambda x, one, zero: F.group_norm(x, 4, one, zero), (_IM,), (_C, _C)),
    "cumsum": Sampled(lambda x: x.cumsum(-1), (_X,)),
    "topk": Sampled(lambda x: x.topk(4), (_X,)),
}


def _gemm(m: int, n: int, k: int) -> Sampled:
    return Sampled(F.linear, ((m, k),), ((n, k), (n,)))


def _bmm(batch: int, m: int, n: int, k: int) -> Sampled:
    return Sampled(torch.bmm, ((batch, m, k), (batch, k, n)))


def _conv(batch: int, c_in: int, c_out: int, size: int, kernel: int, stride: int, groups: int) -> Sampled:
    def convolve(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(x, w, None, stride, kernel // 2, 1, groups)

    return Sampled(convolve, ((batch, c_in, size, size),), ((c_out, c_in // groups, kernel, kernel),))


def _sdpa(batch: int, heads: int, length: int, width: int, causal: bool) -> Sampled:
    def attend(x: Tensor) -> Tensor:
        q = x.transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, is_causal=bool(causal))

    return Sampled(attend, ((batch, length, heads, width),), reused=3)


# Vectors along a row, as parameters, and how often the row itself is read.
_ROWS: Mapping[str, tuple[Callable[..., Any], int, int]] = {
    "layer_norm": (_norm, 1, 1),
    "softmax": (lambda x: F.softmax(x, -1), 0, 1),
    "gelu": (F.gelu, 0, 1),
    "relu": (F.relu, 0, 1),
    "add": (lambda x: x + x, 0, 2),
    "mul_vec": (lambda x, v: x * v, 1, 1),
    "copy": (torch.clone, 0, 1),
    "tanh": (torch.tanh, 0, 1),
    "transpose_copy": (lambda x: x.t().contiguous(), 0, 1),
    "mean": (lambda x: x.mean(-1), 0, 1),
    "cat": (lambda x: torch.cat((x, x), 1), 0, 2),
    "index": (lambda x: x.index_select(0, torch.arange(0, x.shape[0], 2, device=x.device)), 0, 1),
}
_MAPS: Mapping[str, tuple[Callable[..., Any], int]] = {
    "batch_norm": (_normalise, 2),
    "max_pool": (lambda x: F.max_pool2d(x, 3, 2, 1), 0),
    "avg_pool": (lambda x: F.adaptive_avg_pool2d(x, 1), 0),
    "relu4d": (F.relu, 0),
}


def _rows(op: str, rows: int, cols: int) -> Sampled:
    function, vectors, reused = _ROWS[op]
    return Sampled(function, ((rows, cols),), ((cols,),) * vectors, reused)


def _maps(op: str, batch: int, channels: int, size: int) -> Sampled:
    function, vectors = _MAPS[op]
    return Sampled(function, ((batch, channels, size, size),), ((channels,),) * vectors)


SHAPED: Mapping[str, Callable[..., Sampled]] = {
    "gemm": _gemm,
    "bmm": _bmm,
    "conv": _conv,
    "sdpa": _sdpa,
    "rows": _rows,
    "maps": _maps,
}
