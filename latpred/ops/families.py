"""Kernel families with the dimensions that set their time, dispatch classes, and the registry of cost formulas.

A family name goes from general to special: "elementwise.gelu" is fitted on its own where it was measured and falls back
to "elementwise" where it was not. Dimensions are whole numbers, in the order given here.

A formula is called with the op's own arguments and `out`, the op's result, and returns a `Work`. Of tensors it may use
`.shape` and `.dtype.itemsize` only. Nothing here imports torch, so a third party can register formulas anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate, takewhile
from math import prod
from typing import Any, NamedTuple, Protocol, TypeVar

from latpred.errors import UsageError

CONV_DIMS = (
    *("batch", "c_in", "c_out", "h_in", "w_in", "h_out", "w_out"),
    *("kernel_h", "kernel_w", "stride", "groups", "kernel_d"),
)

DIMS: dict[str, tuple[str, ...]] = {
    "gemm": ("m", "n", "k"),  # linear, addmm, mm
    "bmm": ("batch", "m", "n", "k"),
    # groups == 1; a 1-d convolution has height 1, a 3-d one its depth in the height, and a depth of the kernel besides
    "conv": CONV_DIMS,
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
    # run = contiguous elements that move together; matrices = those that a library turns over one after the other
    "copy": ("numel", "run", "matrices"),
    "cat": ("numel", "parts"),
    "index": ("rows", "cols"),
    "embedding": ("rows", "cols"),
    "pooling": ("batch", "channels", "h_out", "w_out", "window"),
    "fft": ("rows", "cols"),
    "rnn": ("batch", "steps", "hidden", "inputs", "layers", "calls", "reread", "weights"),
    "sort": ("rows", "cols"),
    "factory": ("numel",),
    # What a compiler fused: points, results of how many, ops fused; then what its loops do: see `inductor_loops`.
    "generated": ("numel", "cols", "parts", "plain", "math", "strided", "looked_up"),
    "other": ("numel",),
}
CAUSAL = "attention.causal"
# What a family of attention ends in that not every device takes in one kernel: CPUs have none; no device has one; rows
# of a mask in pieces, which CPUs alone take; heads of keys that serve several of queries, which CUDA takes in half
# precision without a mask.
UNFUSED, MATH, STRIDED_MASK, GROUPED = ".unfused", ".unfused.math", ".strided_mask", ".grouped"
MAY_LACK = frozenset({"matrices", "kernel_d"})  # dimensions that are 0 where a formula does not give them


def parent(name: str) -> str | None:
    """The next more general family or host class; None at the top.

    >>> parent("elementwise.gelu")
    'elementwise'
    """
    head, dot, _ = name.rpartition(".")
    return head if dot else None


def lineage(name: str) -> Iterator[str]:
    """A family or host class, then each more general one.

    >>> list(lineage("pooling.max.1d"))
    ['pooling.max.1d', 'pooling.max', 'pooling']
    """
    while name:
        yield name
        name = parent(name) or ""


def nearest(costs: Mapping[str, float], name: str, unknown: float = 0.0) -> float:
    """The cost of a class: its own, that of the nearest more general one, or that of any ("").

    >>> nearest({"view": 1.0, "view.transpose": 2.0, "": 3.0}, "view.transpose.nested")
    2.0
    """
    return next((costs[known] for known in lineage(name) if known in costs), costs.get("", unknown))


def root(name: str) -> str:
    """The most general family, a key of `DIMS`.

    >>> root("norm.layer_norm")
    'norm'
    """
    return name.partition(".")[0]


def takes_images(family: str) -> bool:
    """Whether its kernels differ where images lie channels last: products of rows and elementwise ones do not.

    >>> takes_images("conv_depthwise"), takes_images("batch_norm"), takes_images("gemm")
    (True, True, False)
    """
    return root(family).startswith("conv") or root(family) in ("batch_norm", "pooling")


_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")
# Launch nothing, whatever their schema says: allocation without initialisation, and identities.
FREE = frozenset(
    {
        *_EMPTY,
        *("resize_", "dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"),
        *("detach", "detach_", "alias", "lift_fresh", "lift", "record_stream", "set_", "is_same_size"),
        *("_has_same_storage_numel", "_efficientzerotensor"),  # of derivatives forward through a model
        *("_assert_async", "_assert_scalar", "_assert_tensor_metadata"),
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


def host_class(op: str, family: str) -> str:
    """Dispatch class of an op that launches a kernel of `family`; "sync" is that of one that makes the host wait.

    >>> host_class("add_", "elementwise.add"), host_class("batch_norm", "batch_norm")
    ('elementwise.add', 'norm.batch_norm')
    >>> host_class("conv2d", "conv_depthwise"), host_class("_local_scalar_dense", "sync")
    ('conv.conv2d', 'sync.item')
    """
    general = root(family)
    return f"{_GENERAL.get(general, general)}.{_LEAF.get(op, op.rstrip('_'))}"


def no_launch_class(op: str, view: bool) -> str:
    """Dispatch class of an op that launches nothing.

    >>> no_launch_class("transpose", view=True)
    'view.transpose'
    >>> no_launch_class("empty", view=False), no_launch_class("dropout", view=False)
    ('factory.empty', 'free.dropout')
    """
    return host_class(op, "factory" if op in _FACTORIES else "view" if view and op not in FREE else "free")


def nested_class(name: str) -> str:
    """Dispatch class of an op that another op issues, rather than Python.

    >>> nested_class("bmm.bmm")
    'bmm.nested.bmm'
    """
    return name.replace(".", ".nested.", 1)


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


def runtime_prefixes(name: str) -> Iterator[str]:
    """What a host class may begin with that is the runtime's own, nothing first.

    >>> list(runtime_prefixes("kernel.extern.gemm")), list(runtime_prefixes("gemm.linear"))
    (['', 'kernel.', 'kernel.extern.'], [''])
    """
    own = takewhile(_RUNTIMES_OWN.__contains__, name.split("."))
    return accumulate((f"{part}." for part in own), initial="")


Formula = Callable[..., "Work"]
F = TypeVar("F", bound=Formula)

_NOTHING: Mapping[int, int] = {}


class Work(NamedTuple):
    """What one call of an op does on the device.

    Attributes
    ----------
    family : str
        Kernel family, most general part first; its first part is a key of `DIMS`.
    dims : Mapping[str, int]
        The family's dimensions, in the order `DIMS` gives them; those of `MAY_LACK` may be left out.
    macs : int
        Multiply-adds.
    reads : Mapping[int, int]
        Bytes really read of the positional argument at an index, where that is not the whole tensor.
    writes : int or None
        Bytes written, where that is not the whole result.
    launches : int
        Device launches.
    """

    family: str
    dims: Mapping[str, int]
    macs: int = 0
    reads: Mapping[int, int] = _NOTHING
    writes: int | None = None
    launches: int = 1


_FORMULAS: dict[str, Formula] = {}
_REGISTERED: list[str] = []  # names in the order of their registrations


def cost(*names: str) -> Callable[[F], F]:
    """Give an op, or several, a cost formula.

    A later registration replaces an earlier one, so a built-in formula can be overruled. A formula of "aten::relu" also
    serves "aten::relu_".

    Parameters
    ----------
    *names : str
        Qualified op names without overload, as "mylib::fused_mlp".

    Raises
    ------
    UsageError
        When a name has no namespace, or names an overload.

    Examples
    --------
    >>> from latpred.ops import Work, cost
    >>> @cost("mylib::scaled_matmul")
    ... def scaled_matmul(a, b, scale, *, out):
    ...     (m, k), n = a.shape, b.shape[1]
    ...     return Work("gemm", {"m": m, "n": n, "k": k}, macs=m * n * k)
    """
    for name in names:
        namespace, separator, op = str(name).partition("::")
        if not (namespace and separator and op) or "." in op:
            raise UsageError(
                f"{name!r} is not a qualified op name without overload; write it as namespace::op, such as "
                "'mylib::fused_mlp'"
            )

    def register(formula: F) -> F:
        for name in names:
            _FORMULAS[name] = formula
            _REGISTERED.append(name)
        return formula

    return register


def registered(after: int) -> tuple[tuple[str, Formula], ...]:
    """Names and formulas of all registrations but the first so many, in order."""
    return tuple((name, _FORMULAS[name]) for name in _REGISTERED[after:] if name in _FORMULAS)


def lend(formulas: Iterable[tuple[str, Formula]]) -> Callable[[], None]:
    """Register formulas, and give what takes them back where nobody has replaced them since."""
    lent = [(name, formula, _FORMULAS.get(name)) for name, formula in formulas]
    for name, formula, _ in lent:
        cost(name)(formula)

    def take_back() -> None:
        for name, formula, before in lent:
            if _FORMULAS.get(name) is formula:
                del _FORMULAS[name]
                if before is not None:
                    _FORMULAS[name] = before
                _REGISTERED.append(name)  # so that caches of results can tell

    return take_back


def formula_of(name: str) -> Formula | None:
    """The formula of an op, or of the op that it is the in-place form of; None when nobody gave one."""
    formula = _FORMULAS.get(name)
    if formula is None and name.endswith("_"):
        formula = _FORMULAS.get(name.rstrip("_"))
    return formula


def generation() -> int:
    """A number that changes whenever a formula is registered, so that caches of their results can tell."""
    return len(_REGISTERED)


def work_of(formula: Formula, name: str, *args: Any, **options: Any) -> Work:
    """What a formula says of one call, well formed; what one of a user's raises is told of the formula."""
    try:
        work = formula(*args, **options)
    except Exception as error:
        if getattr(formula, "func", formula).__module__.startswith("latpred."):  # or a partial of ours
            raise
        raise UsageError(
            f"the cost formula of {name} failed: {type(error).__name__}: {error}; it is called with the op's own "
            "arguments and with its result as out=, and may read shapes and item sizes only"
        ) from error
    return _checked(work, name, len(args))


def _checked(work: Any, name: str, arguments: int) -> Work:
    """Return a formula's result, for a call with so many positional arguments, when it is well formed."""
    if not isinstance(work, Work):
        raise UsageError(f"the cost formula of {name} returned {type(work).__name__}; it must return latpred.ops.Work")
    expected = DIMS.get(root(work.family))
    if expected is None:
        known = ", ".join(sorted(DIMS))
        raise UsageError(
            f"the cost formula of {name} names the unknown family {work.family!r}; known families: {known}"
        )
    given, needed = tuple(work.dims), tuple(dim for dim in expected if dim not in MAY_LACK)
    if given not in (expected, needed):
        raise UsageError(f"the cost formula of {name} gives dims {given}; {work.family!r} needs {expected}")
    # A factory may be called without arguments, and then reads none.
    if not isinstance(work.reads, Mapping) or any(index not in range(max(1, arguments)) for index in work.reads):
        raise UsageError(f"the cost formula of {name} gives reads={work.reads!r}; give {{index of an argument: bytes}}")
    touched = {f"reads[{index}]": size for index, size in work.reads.items()} | {"writes": work.writes or 0}
    counts = {"macs": work.macs, "launches": work.launches, **touched, **work.dims}
    broken = {what: count for what, count in counts.items() if not (isinstance(count, int) and count >= 0)}
    if broken:
        raise UsageError(
            f"the cost formula of {name} gives {broken}; give whole numbers of 0 and more, as int(...) does"
        )
    return work


class Tensor(Protocol):
    """The two things a formula asks of a tensor; of its dtype, only the `itemsize`."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> Any: ...


def numel(tensor: Tensor) -> int:
    return prod(tensor.shape)


def nbytes(tensor: Tensor) -> int:
    return prod(tensor.shape) * int(tensor.dtype.itemsize)


def is_tensor(value: object) -> bool:
    """Whether an argument is tensor-like."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def first(out: Any) -> Any:
    """The (first) tensor of an op's result."""
    return out[0] if isinstance(out, (tuple, list)) else out


def run_length(shape: Sequence[int], source: Sequence[int], target: Sequence[int]) -> int:
    """Elements that lie next to each other on both sides of a copy, by the strides of each.

    >>> run_length((2, 3, 4), (12, 4, 1), (12, 4, 1)), run_length((2, 4, 3), (12, 1, 4), (12, 3, 1))
    (24, 1)
    >>> run_length((2, 4, 3), (12, 1, 4), (12, 1, 4)), run_length((2, 3, 4), (24, 8, 1), (12, 4, 1))
    (24, 4)
    """
    run = 1
    for step, other, size in sorted(zip(target, source, shape, strict=True)):
        if size == 1:
            continue
        if step != run or other != run:
            break
        run *= size
    return run


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor that lies in one piece.

    >>> row_major((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(prod(shape[place + 1 :]) for place in range(len(shape)))


def memory_format(tensor: Any) -> str:
    """What is added to the family of an op on maps that lie channels last, for which a CPU has other code."""
    shape, stride = tuple(tensor.shape), tuple(getattr(tensor, "stride", tuple)())
    channels_last = len(stride) == 4 and stride[1] == 1 and shape[1] > 1 and shape[2] * shape[3] > 1
    return ".channels_last" if channels_last else ""


def lies_in_rows(tensor: Any) -> bool:
    """Whether the values of its last dimension lie side by side, as loops over rows want them."""
    shape, stride = tuple(tensor.shape), tuple(getattr(tensor, "stride", tuple)())
    return not stride or stride[-1] == 1 or shape[-1] == 1


def stored_numel(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements that really lie in memory: an expanded dimension repeats the same ones, and windows share theirs.

    >>> stored_numel((8, 128, 128), (0, 128, 1)), stored_numel((2, 7, 512), (2048, 256, 1))
    (16384, 4096)
    >>> stored_numel((3, 3), (2, 4)), stored_numel((2, 31, 8, 4), (1536, 48, 1, 24))
    (7, 1024)
    """
    count = span = run = 1
    unit = 0  # elements from one to the next of the latest `run` of them; there are `count` of what it consists of
    for step, size in sorted(zip(stride, shape, strict=True)):
        if unit and step % unit == 0 and step < run * unit:  # windows over the run, which make it longer
            run += (size - 1) * (step // unit)
        elif step:
            count, unit, run = min(count * run, span), step, size
        span += (size - 1) * step
    return min(count * run, span) if all(shape) else 0
