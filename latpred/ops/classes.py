"""Dispatch classes: what an op costs the host, whatever it does on the device.

The general class follows from the kernel family, or from launching nothing at all; the op's own name refines it, so
that "elementwise.add" is looked up before "elementwise". An op that a composite op issues from C++ never passes
through the Python binding: its class has "nested" between the two ("view.nested.expand").
"""

from __future__ import annotations

from functools import cache

from latpred.ops.families import root

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
