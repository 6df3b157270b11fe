"""A graph as it would be of a wider model: more channels and more heads of the same size, everywhere but at the ends.

An estimate from the graph alone: every dimension that follows the width grows with it, the work of products with its
square. What stays: image channels, vocabularies, sequence lengths, and everything computed on integers. A real wider
model may differ by what it rounds to.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from latpred.graph.graph import Affine, ModelGraph, Op, rewritten
from latpred.ops.families import root

IMAGE_CHANNELS = 4  # a convolution of at most so many inputs reads an image, whose channels a wider model leaves alone


class _Growth(NamedTuple):
    """How the work of a family follows the width: exponents of its multiply-adds and weights, and which dims grow."""

    macs: int
    weights: int
    dims: tuple[str, ...]


_PRODUCT = _Growth(2, 2, ("n", "k"))
_CHANNELS = ("c_in", "c_out")
GROWTHS: dict[str, _Growth] = {
    "gemm": _PRODUCT,
    "bmm": _Growth(1, 1, ("batch",)),
    **dict.fromkeys(("conv", "conv_grouped", "conv_transpose"), _Growth(2, 2, _CHANNELS)),
    "conv_depthwise": _Growth(1, 1, (*_CHANNELS, "groups")),
    "attention": _Growth(1, 1, ("heads",)),
    "rnn": _Growth(2, 2, ("hidden", "inputs")),
    **dict.fromkeys(("batch_norm", "pooling"), _Growth(1, 1, ("channels",))),
    **dict.fromkeys(("norm", "index", "embedding", "fft"), _Growth(1, 1, ("cols",))),
    **dict.fromkeys(("softmax", "reduction"), _Growth(1, 1, ("rows",))),
    **dict.fromkeys(("elementwise", "copy", "cat", "other"), _Growth(1, 1, ("numel",))),
}
_INTEGERS = ("int", "uint", "bool")


def widened(graph: ModelGraph, factor: float) -> ModelGraph:
    """The graph of the same model, so many times as wide.

    >>> import torch, latpred
    >>> graph = latpred.trace(torch.nn.Linear(64, 64), torch.zeros(1, 64))
    >>> widened(graph, 2.0).macs() / graph.macs()
    4.0
    """
    parameters = sum(op.weight_bytes.constant for op in graph.ops)
    wide = rewritten(graph, lambda ops: [_wide(op, factor) for op in ops])
    grown = sum(op.weight_bytes.constant for op in wide.ops) / parameters if parameters else 1.0
    sizes = {"parameters": round(graph.parameters * grown), "parameter_bytes": round(graph.parameter_bytes * grown)}
    return msgspec.structs.replace(wide, **sizes)


def _wide(op: Op, factor: float) -> Op:
    growth = GROWTHS.get(root(op.family))
    if growth is None or op.dtype.startswith(_INTEGERS):
        return op
    first = growth.macs == 2 and "c_in" in op.dims and op.dims["c_in"].constant <= IMAGE_CHANNELS
    power = 1 if first else growth.macs
    return msgspec.structs.replace(
        op,
        dims={
            name: _times(size, factor) if name in growth.dims and not (first and name == "c_in") else size
            for name, size in op.dims.items()
        },
        macs=_times(op.macs, factor**power),
        weight_bytes=_times(op.weight_bytes, factor ** (1 if first else growth.weights)),
        read_bytes=op.read_bytes if first else _times(op.read_bytes, factor),
        write_bytes=_times(op.write_bytes, factor),
        live_bytes=_times(op.live_bytes, factor),
    )


def _times(count: Affine, factor: float) -> Affine:
    """A count so many times as large; nothing that there is becomes nothing."""
    constant, per_sample = round(count.constant * factor), round(count.per_sample * factor)
    return Affine(constant or int(count.constant > 0), per_sample or int(count.per_sample > 0))
