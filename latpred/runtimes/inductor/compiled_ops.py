"""What Inductor's scheduler decided to run: library calls and generated kernels, in order, as ops of one batch size.

Library calls ("extern" kernels) get the formula of the op they come from, so that they are priced like eager's.
Generated kernels get a family of their own: what limits them is the bytes they move, which follow from the
scheduler's dependencies. Nothing is generated or run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import msgspec
import torch
from torch.fx.graph import Graph
from torch.fx.node import Node, map_arg

try:
    from torch._inductor.sizevars import stride_at_vec_range
except ImportError:  # an older PyTorch
    from torch._inductor.codegen.cpp import stride_at_vec_range  # type: ignore[attr-defined]

from latpred.errors import RuntimeRefusalError
from latpred.graph.features import CHANNELS_LAST, VECTOR_VALUES
from latpred.graph.graph import Affine, Op
from latpred.ops.families import DIMS, root
from latpred.tracing.op_record import OpRecord, describe, dtype_name, launching, leaves, no_launch
from latpred.tracing.trace_pass import op_of

# Time of functions on a CPU over that of a vectorised exp: vectorised, and one value at a time. An EPYC of family 25
# with AVX-512, PyTorch 2.13, one thread; exp took 0.2 ns.
_MATH = {
    "exp": (1, 7),
    "exp2": (1, 7),
    "expm1": (1, 40),
    "sin": (1, 20),
    "cos": (1, 20),
    "sigmoid": (2, 9),
    "log": (2, 9),
    "log2": (2, 9),
    "log10": (2, 20),
    "log1p": (3, 40),
    "erf": (2, 15),
    "erfc": (15, 25),
    "asin": (3, 40),
    "acos": (4, 40),
    "tan": (4, 40),
    "atan": (5, 50),
    "atan2": (6, 50),
    "cosh": (6, 40),
    "sinh": (6, 50),
    "tanh": (7, 60),
    "pow": (12, 20),
    "lgamma": (30, 50),
    "erfinv": (160, 160),
}
_IRREGULAR = 10  # times as long as a step of several values: what a loop of single values takes to find one
_MOVES = frozenset({"load", "store", "get_index", "index_expr", "constant", "to_dtype", "output", "placeholder"})
GENERATED = "inductor::generated"
GUARDS = "guards"  # host class of what a compiled graph costs before its first kernel
EAGER_CLASS = "eager"  # first part of the host class of an op that runs by itself between compiled graphs
EXTERN_CLASS, GENERATED_CLASS = "kernel.extern", "kernel.generated"
# A generated kernel that C++ runs in the same call as the one before it.
JOINED_CLASS = f"{GENERATED_CLASS}.joined"

# Convolutions of images, which Inductor lays out channels last on a CPU, whatever the model does.
_LAID_OUT = frozenset({"conv", "conv_grouped", "conv_depthwise"})
# Extern nodes that stand for no call on the device.
_NO_CALL = frozenset({"MultiOutput", "AssertScalar", "DynamicScalar", "DynamicSelectStorageOffset", "DynamicSliceSize"})
_NESTED = frozenset({"Conditional", "WhileLoop", "InvokeSubgraph"})


def _count(graph: Any, sizes: Iterable[Any]) -> int:
    """Product of sizes, symbolic ones by their hint."""
    return prod(int(graph.sizevars.optimization_hint(size, fallback=1)) for size in sizes)


class KernelCall(NamedTuple):
    """One call of the wrapper that Inductor writes around its kernels; bytes alive are not known yet."""

    op: Op
    new_bytes: int
    freed_bytes: int  # of what is not read after it
    weight: tuple[int, int] | None  # number of the graph's input, and place in it, of the first parameters read


def guards(inputs: int, live_bytes: Affine) -> Op:
    """What comes before a compiled graph: guards and the wrapper go through its inputs, parameters included."""
    return Op("inductor::guards", "", GUARDS, "", "", {}, live_bytes=live_bytes, python_calls=inputs)


def executed_op(record: OpRecord, host_class: str) -> Op:
    """A recorded op under another host class."""
    op = op_of(record, list(map(Affine, record.counts)))
    return msgspec.structs.replace(op, host_class=host_class, launches=record.launches if record.family else 0)


def calls_of(graph: Any, static: Iterable[int], cpu: bool) -> list[KernelCall]:
    """The calls of a scheduled graph."""
    names = list(graph.graph_inputs)
    weights = frozenset(names[index] for index in static)
    calls: list[KernelCall] = []
    joined = False
    for node in graph.scheduler.nodes:
        extern = node.is_extern()
        if type(node).__name__ == "NopKernelSchedulerNode" or (extern and type(node.node).__name__ in _NO_CALL):
            joined = joined and not (extern and node.get_device())  # a library's second result ends a call, too
            continue
        if node.is_template() or (extern and type(node.node).__name__ in _NESTED):
            made = node.get_template_node() or node.node  # the kernel may do the ops around it as well
            kinds = (one.target for one in made.origins if getattr(one.target, "namespace", "") == "higher_order")
            kind = next(kinds, type(made).__name__)
            raise RuntimeRefusalError(f"torch.compile makes kernels of {kind} that are not counted.")
        moved = _moved(node, graph, weights)
        origin = _origin(node.node) if extern else None
        given = [] if origin is None else _weights_given(node, origin, weights)
        op = _extern(node, origin, given, moved) if extern else _generated(node, graph, moved, joined, cpu)
        if cpu and op.family in _LAID_OUT:
            stride = node.node.get_stride()
            if len(stride) == 4 and stride[1] == 1:
                op = msgspec.structs.replace(op, family=f"{op.family}.{CHANNELS_LAST}")
        joined = not extern
        freed = sum(_buffer_bytes(graph, name) for name in node.last_usage if name in graph.name_to_buffer)
        first = next((one for one in given if one is not None), None)
        place = None if first is None else (names.index(first[0]), int(first[1].meta["val"].storage_offset()))
        calls.append(KernelCall(op, moved.new if op.family else 0, freed, place))
    return calls


def _extern(node: Any, origin: Node | None, given: Sequence[tuple[str, Node] | None], moved: _Moved) -> Op:
    """A library call, by the formula of the op it comes from."""
    if origin is None:
        dtype = node.node.get_dtype() if node.node.has_tensor_output() else torch.float32
        largest = max(1, moved.from_weights, moved.read, moved.written) // dtype.itemsize
        name, host_class = f"aten::{_op_name(node.node)}", f"{EXTERN_CLASS}.other"
        unknown = _op(name, host_class, "other", dtype_name(dtype), (largest,), moved)
        return msgspec.structs.replace(unknown, estimated=True)
    info = describe(origin.target)  # type: ignore[arg-type]
    if info.kind == "boundary":
        raise RuntimeRefusalError(f"torch.compile leaves {info.name} as one call, whose own kernels are not counted.")
    if info.kind == "view":
        return executed_op(no_launch(info, view=True), f"{EXTERN_CLASS}.view")
    args: Any = map_arg(origin.args, lambda one: one.meta["val"])
    options: Any = map_arg(dict(origin.kwargs), lambda one: one.meta["val"])
    record = launching(info, args, options, origin.meta["val"], [one is not None for one in given])
    return executed_op(record, f"{EXTERN_CLASS}.{root(record.family)}")


def _op(name: str, host_class: str, family: str, dtype: str, sizes: tuple[int, ...], moved: _Moved) -> Op:
    return Op(
        name=name,
        module="",
        host_class=host_class,
        family=family,
        dtype=dtype,
        dims=dict(zip(DIMS[root(family)], map(Affine, sizes), strict=True)),
        weight_bytes=Affine(moved.from_weights),
        read_bytes=Affine(moved.read),
        write_bytes=Affine(moved.written),
        launches=1,
    )


def _op_name(kernel: Any) -> str:
    """Name of the aten op that a library call serves, without namespace and overload."""
    overload = getattr(kernel, "op_overload", None)
    if overload is not None:
        return str(overload).split(".")[1] if "." in str(overload) else str(overload)
    name = getattr(kernel, "python_kernel_name", None) or type(kernel).__name__
    parts = [part for part in name.split(".") if part not in ("default", "out")]
    return parts[-1].removeprefix("bias_")


def _origin(kernel: Any) -> Node | None:
    """The traced op a library call comes from."""
    origins = [one for one in kernel.origins if one.op == "call_function" and hasattr(one.target, "_schema")]
    said: Node | None = kernel.get_origin_node()
    short = _op_name(kernel)
    named: list[Node] = [one for one in origins if one.target._schema.name.rpartition("::")[2] == short]
    if said in named or not named:
        return said if said in origins else None
    return named[0]


def _weights_given(node: Any, origin: Node, weights: frozenset[str]) -> list[tuple[str, Node] | None]:
    """Of each tensor that an op was called with: the parameter it is, as it lies in memory or seen otherwise."""
    given: list[Node] = []  # each as often as it has tensors
    map_arg((origin.args, origin.kwargs), lambda one: given.extend([one] * len(leaves(one.meta["val"]))))
    read = weights & {dep.name for dep in node.read_writes.reads}
    bases = ((_base(one), one) for one in given)
    return [(base, one) if base in read else None for base, one in bases]


def _base(node: Node) -> str:
    """The input of a graph that a value is or is a view of; none where it was computed."""
    while node.op == "call_function" and getattr(node.target, "is_view", False) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node.name if node.op == "placeholder" else ""


def _operations(loops: Graph) -> Iterator[tuple[str, bool]]:
    """Operations of a loop's body, and whether each works on values from memory or only on where the loop is.

    C++ does those of the same values once. What depends on the place alone is worked out for a whole row.
    """
    values: dict[Node, str] = {}
    names: dict[str, str] = {}
    of_data: set[str] = set()
    for node in loops.nodes:
        formula = repr((node.target, map_arg((node.args, node.kwargs), values.get)))
        new = formula not in names
        values[node] = value = names.setdefault(formula, f"%{len(names)}")
        if (
            node.target == "load"
            or str(node.target).startswith("masked_subblock")
            or any(values[given] in of_data for given in node.all_input_nodes)
        ):
            of_data.add(value)
        if new and node.op == "call_method":
            yield str(node.target), value in of_data


def _loop_work(graph: Any, parts: Sequence[Any], points: Iterable[int], cpu: bool) -> tuple[int, int, int, int]:
    """What loops over so many points do.

    How many plain operations they evaluate, and how many exponentials and the like, on a CPU in the time of one; how
    many values they reach that lie apart from their neighbours, and how many they look up by an index.
    """
    reached = (dep for part in parts for dep in (*part.read_writes.reads, *part.read_writes.writes))
    single = cpu and any(map(_irregular, reached))
    plain = costly = apart = looked_up = 0
    for part, count in zip(parts, points, strict=True):
        for block in (part._body.root_block, *part._body.subblocks.values()):
            for name, of_data in _operations(block.graph):
                if name in _MATH:
                    costly += count * (_MATH[name][single] if cpu else 1)
                plain += count * (of_data and name not in _MATH and name not in _MOVES)
        for dep in (*part.read_writes.reads, *part.read_writes.writes):
            if type(dep).__name__ == "MemoryDep":
                # What an index reaches is as large as a table may be; it is looked up for every point.
                looked_up += count if dep.is_indirect() else 0
                apart += _count(graph, dep.size) * (_IRREGULAR if single else 1) if _apart(dep) else 0
    return plain, costly, apart, looked_up


def _irregular(dep: Any) -> bool:
    """Whether the innermost loop's index has no constant stride within a vector, as that of a reflected border."""
    if type(dep).__name__ != "MemoryDep" or dep.is_indirect() or not dep.var_names:
        return False
    return not stride_at_vec_range(dep.index, dep.var_names[-1], VECTOR_VALUES).is_number


def _apart(dep: Any) -> bool:
    """Whether the innermost loop goes through memory in steps of more than one value."""
    if dep.is_indirect() or not dep.var_names:
        return False
    return dep.var_names[-1] in dep.index.free_symbols and not dep.stride1_for_last_dim(False)


def _generated(node: Any, graph: Any, moved: _Moved, joined: bool, cpu: bool) -> Op:
    parts = [part for part in node.get_nodes() if hasattr(part, "get_ranges")]
    ranges = [[_count(graph, loop) for loop in part.get_ranges()] for part in parts]
    points = [outer * inner for outer, inner in ranges]
    cols = max((inner for _, inner in ranges), default=1)
    sizes = (max(points, default=1), cols, len(parts), *_loop_work(graph, parts, points, cpu))
    host_class = JOINED_CLASS if joined and cpu else GENERATED_CLASS
    return _op(GENERATED, host_class, f"generated.{_kind(parts)}", dtype_name(_dtype(node, parts, graph)), sizes, moved)


def _kind(parts: list[Any]) -> str:
    """What sets a generated kernel's speed beside its bytes."""
    used = {name for part in parts for name in part._body.op_counts}
    reduces, costly = any(part.is_reduction() for part in parts), bool(used & _MATH.keys())
    if reduces:
        return "softmax" if costly else "reduction"
    if costly:
        return "math"
    return "pointwise" if used - _MOVES else "copy"


def _dtype(node: Any, parts: list[Any], graph: Any) -> torch.dtype:
    """The floating-point dtype a kernel writes or reads in memory, else that of anything it touches."""
    written = [dep.name for part in parts for dep in part.read_writes.writes if _used_outside(node, dep.name)]
    names = (*written, *(dep.name for part in parts for dep in part.read_writes.reads))
    touched = [graph.get_dtype(name) for name in names]
    return next((dtype for dtype in touched if dtype.is_floating_point), touched[0] if touched else torch.float32)


class _Moved(NamedTuple):
    """Bytes of parameters and of activations that a kernel reads, bytes written, and bytes of new storage."""

    from_weights: int
    read: int
    written: int
    new: int


def _moved(node: Any, graph: Any, weights: frozenset[str]) -> _Moved:
    """What a scheduled node moves.

    A buffer that only the kernel itself uses never reaches memory. Of each other one a kernel reads what its
    indices reach, but no element twice: the rows that a lookup picks, not the whole table.
    """
    inside = {name for part in node.get_nodes() for name in part.get_buffer_names()}
    kept = {name for name in inside if _used_outside(node, name)}
    reads = _reached(node, graph, "reads", inside)
    writes = _reached(node, graph, "writes", inside - kept)
    from_weights = sum(size for name, size in reads.items() if name in weights)
    new = sum(_buffer_bytes(graph, name) for name in kept)
    return _Moved(from_weights, sum(reads.values()) - from_weights, sum(writes.values()), new)


def _reached(node: Any, graph: Any, which: str, unseen: set[str]) -> dict[str, int]:
    """Bytes of each buffer that reads or writes reach, but of those that are `unseen`."""
    deps: dict[str, dict[Any, int]] = {}
    for part in node.get_nodes():
        for dep in getattr(part.read_writes, which):
            if dep.name not in unseen and type(dep).__name__ in ("MemoryDep", "StarDep"):
                deps.setdefault(dep.name, {})[dep] = _dep_bytes(dep, graph)
    return {name: min(_buffer_bytes(graph, name), sum(sizes.values())) for name, sizes in deps.items()}


def _dep_bytes(dep: Any, graph: Any) -> int:
    if type(dep).__name__ == "MemoryDep" and dep.is_indirect():
        return _count(graph, dep.size) * int(graph.get_dtype(dep.name).itemsize)
    return int(dep.numbytes_hint())


def _used_outside(node: Any, name: str) -> bool:
    inside = {id(part) for part in node.get_nodes()}
    buffer = node.scheduler.name_to_buf.get(name)
    return buffer is None or any(id(user.node) not in inside for user in buffer.users)


def _buffer_bytes(graph: Any, name: str) -> int:
    if name in graph.removed_buffers:
        return 0
    try:
        return _count(graph, [graph.get_numel(name)]) * int(graph.get_dtype(name).itemsize)
    except (KeyError, NotImplementedError):  # several results, whose own nodes are counted
        return 0
