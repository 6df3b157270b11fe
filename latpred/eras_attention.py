"""Attention before it was one op: what a fused call of today amounted to in PyTorch 1.12.

Models of transformers have that code still and are built with it (see `latpred.eras.attention_of`). Others, as timm's,
call `scaled_dot_product_attention`, which did not exist: its place was taken by two products, a scaling and a softmax.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from latpred.graph import Line, Op

_CALL = "scaled_dot_product_"
_NEEDED = frozenset({"batch", "heads", "queries", "keys", "head_dim"})
_HALF_BYTES = ("float16", "bfloat16")


def is_fused(op: Op) -> bool:
    """Whether an op is attention in one call."""
    return _CALL in op.name and op.dims.keys() >= _NEEDED


def unfused(op: Op, *, at_one: bool) -> Iterator[Op]:
    """The ops that did the work of one call; any other op as it is.

    Heads lie beside each other in queries, keys and values. A batch of several is copied to where the products want it,
    and what they give is copied back; a batch of one (`at_one`) has those products without copies.
    """
    if not is_fused(op):
        yield op
        return
    steps = _Steps(op)
    yield steps.elementwise("mul", steps.queries, op)
    yield steps.view("transpose")
    if at_one:
        yield steps.product("matmul", "keys", "head_dim")
    else:
        yield from steps.copied(("expand", "copy", "nested.expand"), steps.queries, steps.head_dim)
        yield steps.copy("nested.reshape", steps.keys, Line(1))
        yield steps.product("nested.bmm", "keys", "head_dim")
        yield steps.view("nested.view")
    if op.dims.get("masked", Line(0)).constant:
        yield steps.elementwise("add", steps.scores)
    yield steps.softmax()
    if at_one:
        yield steps.product("matmul", "head_dim", "keys")
    else:
        yield from steps.copied(("expand", "nested.reshape", "nested.expand", "copy"), steps.keys, steps.head_dim)
        yield steps.product("nested.bmm", "head_dim", "keys")
        yield steps.view("nested.view")
    yield steps.copy("reshape", steps.queries, steps.head_dim)  # which a view does where heads come out side by side


class _Steps:
    """Ops of one attention, by what they do."""

    def __init__(self, op: Op) -> None:
        self._op = op
        self.head_dim = op.dims["head_dim"]
        self.queries, self.keys = self._elements("queries", "head_dim"), self._elements("keys", "head_dim")
        self.scores = self._elements("queries", "keys")

    def elementwise(self, name: str, elements: Line, called: Op | None = None) -> Op:
        """One pass over elements; the calls of modules and Python before it are those of `called`."""
        calls = (called.module_calls, called.python_calls) if called else (0, 0)
        dims = {"numel": elements, "operands": Line(1)}
        made = self._kernel(f"elementwise.{name}", f"elementwise.{name}", dims, elements, elements)
        return msgspec.structs.replace(made, module_calls=calls[0], python_calls=calls[1])

    def view(self, leaf: str) -> Op:
        """Another look at a tensor."""
        name = f"aten::{leaf.rpartition('.')[2]}"
        return Op(name, self._op.module, f"view.{leaf}", "", "", {}, live_bytes=self._op.live_bytes)

    def copied(self, leaves: tuple[str, ...], elements: Line, run: Line) -> Iterator[Op]:
        """Views by their names, and a copy where one is called so."""
        for leaf in leaves:
            yield self.copy("nested.reshape", elements, run) if leaf == "copy" else self.view(leaf)

    def copy(self, leaf: str, elements: Line, run: Line) -> Op:
        """A copy to contiguous memory."""
        return self._kernel(f"copy.{leaf}", "copy.strided", {"numel": elements, "run": run}, elements, elements)

    def product(self, leaf: str, columns: str, inner: str) -> Op:
        """A product for each head, of as many columns as one dimension and summed over another."""
        dims = self._op.dims
        each, m, n, k = _times(dims["batch"], dims["heads"]), dims["queries"], dims[columns], dims[inner]
        read = _plus(_times(each, m, k), _times(each, n, k))
        made = self._kernel(f"bmm.{leaf}", "bmm", {"batch": each, "m": m, "n": n, "k": k}, read, _times(each, m, n))
        return msgspec.structs.replace(made, macs=_times(each, m, n, k))

    def softmax(self) -> Op:
        """Over each row of scores, while those and the result are both there."""
        rows = _times(*(self._op.dims[name] for name in ("batch", "heads", "queries")))
        dims = {"rows": rows, "cols": self._op.dims["keys"]}
        made = self._kernel("softmax.softmax", "softmax.softmax", dims, self.scores, self.scores)
        both = self._bytes(_plus(self.scores, self.scores))
        return msgspec.structs.replace(made, live_bytes=_plus(self._op.live_bytes, both))

    def _kernel(self, host_class: str, family: str, dims: dict[str, Line], read: Line, written: Line) -> Op:
        return Op(
            name=f"aten::{host_class.rpartition('.')[2]}",
            module=self._op.module,
            host_class=host_class,
            family=family,
            dtype=self._op.dtype,
            dims=dims,
            read_bytes=self._bytes(read),
            write_bytes=self._bytes(written),
            live_bytes=self._op.live_bytes,
            launches=1,
        )

    def _elements(self, rows: str, columns: str) -> Line:
        return _times(*(self._op.dims[name] for name in ("batch", "heads", rows, columns)))

    def _bytes(self, elements: Line) -> Line:
        size = 2 if self._op.dtype in _HALF_BYTES else 4
        return Line(size * elements.constant, size * elements.per_sample)


def _plus(one: Line, other: Line) -> Line:
    return Line(one.constant + other.constant, one.per_sample + other.per_sample)


def _times(*lines: Line) -> Line:
    """The product of lines, of which at most one rises with the batch."""
    found = Line(1)
    for line in lines:
        rising = found.constant * line.per_sample + found.per_sample * line.constant
        found = Line(found.constant * line.constant, rising)
    return found
