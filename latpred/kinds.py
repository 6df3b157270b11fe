"""Kinds of kernels that are finer than families, since libraries have algorithms of their own for each.

A profile may hold fits of kinds ("conv.pointwise"); where it does, pricing takes them before those of the family.
Nothing is measured by kind during a calibration, whose regressors learn such differences from the sizes themselves.
"""

from __future__ import annotations

from collections.abc import Mapping

from latpred.graph import Line

POINTWISE, SQUARE, MANY = "pointwise", "3x3", "many"
CAT = "cat"


def kind(family: str, dims: Mapping[str, Line]) -> str:
    """The kind of an op's kernel: its family where there is nothing finer, or where it is a special one already.

    >>> one, three = Line(1), Line(3)
    >>> kind("conv", {"kernel_h": three, "kernel_w": three, "stride": one})
    'conv.3x3'
    >>> kind("cat", {"numel": Line(8), "parts": Line(3)})
    'cat.many'
    >>> kind("elementwise.add", {"numel": Line(8)})
    'elementwise.add'
    >>> kind("conv.nchwc", {"kernel_h": three, "kernel_w": three, "stride": one})
    'conv.nchwc'
    """
    if family == CAT and "parts" in dims:
        # PyTorch gives every part as many threads as the largest, most of which have nothing to do.
        return f"{CAT}.{MANY}" if dims["parts"].constant > 2 else CAT
    if family not in ("conv", "conv_grouped") or "kernel_h" not in dims:
        return family
    window = dims["kernel_h"].constant, dims["kernel_w"].constant
    if window == (1, 1):
        return f"{family}.{POINTWISE}"
    # Winograd's algorithm and its like serve only this one.
    if window == (3, 3) and dims["stride"].constant == 1 and family == "conv":
        return f"{family}.{SQUARE}"
    return family
