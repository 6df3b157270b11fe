"""Tensors and nodes of an ONNX graph as cost formulas see them: shapes, dtypes and attributes, without onnx itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

NCHWC = "com.microsoft.nchwc"


class Value(NamedTuple):
    """A tensor: shape, name of its dtype as onnxruntime writes it, whether it is a weight, a whole number's value."""

    shape: tuple[int, ...]
    dtype: str
    weight: bool = False
    scalar: int | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return prod(self.shape) * ITEMSIZE.get(self.dtype, 4)


class Node(NamedTuple):
    """An operator with its attributes."""

    op_type: str
    domain: str
    attributes: Mapping[str, Any]

    def number(self, name: str, default: int) -> int:
        """A whole-number attribute."""
        return int(self.attributes.get(name, default))

    def numbers(self, name: str, default: Sequence[int] = ()) -> tuple[int, ...]:
        """An attribute of several whole numbers."""
        return tuple(int(value) for value in self.attributes.get(name, default))


ITEMSIZE = {
    **dict.fromkeys(("bool", "int8", "uint8"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("double", "float64", "int64", "uint64"), 8),
}
