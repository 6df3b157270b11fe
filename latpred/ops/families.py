"""Kernel families and the dimensions that set their time: the vocabulary that tracing, calibration and fitting share.

A family name goes from general to special: "elementwise.gelu" is fitted on its own where it was measured and falls back
to "elementwise" where it was not. Dimensions are whole numbers, in the order given here.
"""

from __future__ import annotations

from collections.abc import Mapping

CONV_DIMS = (
    *("batch", "c_in", "c_out", "h_in", "w_in", "h_out", "w_out"),
    *("kernel_h", "kernel_w", "stride", "groups"),
)

DIMS: dict[str, tuple[str, ...]] = {
    "gemm": ("m", "n", "k"),  # linear, addmm, mm
    "bmm": ("batch", "m", "n", "k"),
    "conv": CONV_DIMS,  # groups == 1; a 1-d convolution has height 1
    "conv_grouped": CONV_DIMS,
    "conv_depthwise": CONV_DIMS,
    "conv_transpose": CONV_DIMS,
    "conv_native": CONV_DIMS,  # convolutions on a CPU that PyTorch computes with loops of its own: see `features`
    "attention": ("batch", "heads", "queries", "keys", "head_dim", "masked"),
    "norm": ("rows", "cols"),  # layer, rms and group norm: statistics over cols
    "batch_norm": ("batch", "channels", "spatial"),
    "softmax": ("rows", "cols"),
    "reduction": ("rows", "cols"),  # rows results, each of cols elements
    "elementwise": ("numel", "operands"),  # numel of the result; operands = full-size tensors read
    "copy": ("numel", "run"),  # run = contiguous elements that move together
    "cat": ("numel", "parts"),
    "index": ("rows", "cols"),
    "embedding": ("rows", "cols"),
    "pooling": ("batch", "channels", "h_out", "w_out", "window"),
    "fft": ("rows", "cols"),
    "rnn": ("batch", "steps", "hidden", "inputs", "layers", "calls", "reread"),
    "sort": ("rows", "cols"),
    "factory": ("numel",),
    # What a compiler fused: points, results of how many, ops fused; then what its loops do: see `inductor_loops`.
    "generated": ("numel", "cols", "parts", "plain", "math", "strided", "looked_up"),
    "other": ("numel",),
}


def parent(name: str) -> str | None:
    """The next more general family or host class; None at the top.

    >>> parent("elementwise.gelu")
    'elementwise'
    """
    head, dot, _ = name.rpartition(".")
    return head if dot else None


def nearest(costs: Mapping[str, float], name: str, unknown: float = 0.0) -> float:
    """The cost of a class: its own, that of the nearest more general one, or that of any ("").

    >>> nearest({"view": 1.0, "view.transpose": 2.0, "": 3.0}, "view.transpose.nested")
    2.0
    """
    known: str | None = name
    while known:
        if known in costs:
            return costs[known]
        known = parent(known)
    return costs.get("", unknown)


def root(name: str) -> str:
    """The most general family, a key of `DIMS`.

    >>> root("norm.layer_norm")
    'norm'
    """
    return name.partition(".")[0]
