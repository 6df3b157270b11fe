"""Kernel families, the dimensions that set their time, and dispatch classes: the words that all rooms share.

A family name goes from general to special: "elementwise.gelu" is fitted on its own where it was measured and falls back
to "elementwise" where it was not. Dimensions are whole numbers, in the order given here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

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


_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")
# Launch nothing, whatever their schema says: allocation without initialisation, and identities.
FREE = frozenset(
    {
        *_EMPTY,
        *("resize_", "dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"),
        *("detach", "detach_", "alias", "lift_fresh", "lift", "requires_grad_", "record_stream", "set_"),
        *("_assert_async", "_assert_scalar", "_assert_tensor_metadata", "sym_size", "sym_numel", "sym_stride"),
        *("is_nonzero", "item", "result_type", "can_cast", "_has_compatible_shallow_copy_type", "is_same_size"),
    }
)

_FACTORIES = frozenset({*_EMPTY, "detach_"})
_GENERAL = {**dict.fromkeys(("conv_grouped", "conv_depthwise", "conv_transpose"), "conv"), "batch_norm": "norm"}
_RUNTIMES_OWN = frozenset({"node", "kernel", "extern"})  # parts of a class that say how a runtime runs things
# torch.tensor(...) ends in detach_, whatever it goes through before.
_LEAF = {
    "_local_scalar_dense": "item",
    "scaled_dot_product_attention": "sdpa",
    "detach_": "tensor",
    "resolve_neg": "tolist",
}


def host_class(op: str, family: str, nested: bool = False) -> str:
    """Dispatch class of an op that launches a kernel of `family`.

    >>> host_class("add_", "elementwise.add"), host_class("conv2d", "conv_depthwise")
    ('elementwise.add', 'conv.conv2d')
    """
    general = root(family)
    return _join(_GENERAL.get(general, general), op, nested)


def no_launch_class(op: str, view: bool, nested: bool = False) -> str:
    """Dispatch class of an op that launches nothing.

    >>> no_launch_class("transpose", view=True), no_launch_class("empty", view=False)
    ('view.transpose', 'factory.empty')
    """
    general = "factory" if op in _FACTORIES else "free" if op in FREE else "view" if view else "free"
    return _join(general, op, nested)


def sync_class(op: str, nested: bool = False) -> str:
    """Dispatch class of an op that makes the host wait for the device."""
    return _join("sync", op, nested)


@cache
def kind_of(name: str) -> str:
    """What a host class is about, whichever runtime dispatches it: its most general part but for the runtime's own.

    >>> kind_of("gemm.linear"), kind_of("node.gemm.MatMul"), kind_of("kernel.extern.conv"), kind_of("kernel.generated")
    ('gemm', 'gemm', 'conv', 'generated')
    """
    parts = name.split(".")
    while len(parts) > 1 and parts[0] in _RUNTIMES_OWN:
        del parts[0]
    return parts[0]


def _join(general: str, op: str, nested: bool) -> str:
    leaf = _LEAF.get(op, op.rstrip("_"))
    return f"{general}.nested.{leaf}" if nested else f"{general}.{leaf}"
