"""What the loops of a generated kernel do, beside moving bytes: the counts that set its time on a CPU.

A kernel that C++ runs at the speed of memory does little for each value. It takes longer where exponentials and the
like are evaluated (a fused pooling does so for every value of its window), where values do not lie side by side, and
where they are looked up by indices that were read. Everything is read off the scheduler's loops; nothing here knows how
long anything takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

MATH = frozenset(
    {
        *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "erf", "erfc", "erfinv", "tanh", "sigmoid"),
        *("sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "pow", "lgamma"),
    }
)
MOVES = frozenset({"load", "store", "get_index", "index_expr", "constant", "to_dtype", "output", "placeholder"})


def number(graph: Any, sizes: Iterable[Any]) -> int:
    """Product of sizes, symbolic ones by their hint."""
    return prod(int(graph.sizevars.optimization_hint(size, fallback=1)) for size in sizes)


def evaluations(graph: Any, parts: Iterable[Any]) -> tuple[int, int]:
    """How many plain operations and how many exponentials and the like the loops evaluate."""
    plain = costly = 0
    for part in parts:
        points = _points(graph, part)
        for name, times in part._body.op_counts.items():
            if name in MATH:
                costly += times * points
            elif name not in MOVES:
                plain += times * points
    return plain, costly


def scattered(graph: Any, parts: Iterable[Any]) -> tuple[int, int]:
    """How many values the loops reach that lie apart from their neighbours, and how many they look up by an index."""
    apart = looked_up = 0
    for part in parts:
        for dep in (*part.read_writes.reads, *part.read_writes.writes):
            if type(dep).__name__ == "MemoryDep":
                # What an index reaches is as large as a table may be; it is looked up for every point.
                looked_up += _points(graph, part) if dep.is_indirect() else 0
                apart += number(graph, dep.size) if _apart(dep) else 0
    return apart, looked_up


def _points(graph: Any, part: Any) -> int:
    outer, inner = part.get_ranges()
    return number(graph, [*outer, *inner])


def _apart(dep: Any) -> bool:
    """Whether the innermost loop goes through memory in steps of more than one value."""
    if dep.is_indirect() or not dep.var_names:
        return False
    return dep.var_names[-1] in dep.index.free_symbols and not dep.stride1_for_last_dim(False)
