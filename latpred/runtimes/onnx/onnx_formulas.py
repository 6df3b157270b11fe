"""Cost formulas of ONNX operators: kernel family, dimensions, multiply-adds and reads, from attributes and shapes.

Pure functions; which operator has which is `onnx_nodes`' table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from latpred.ops.families import root
from latpred.ops.registry import Work

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


Formula = Callable[[Node, Sequence[Value], Sequence[Value]], Work]

# -- products ------------------------------------------------------------------------------------------------------


def _gemm(m: int, n: int, k: int) -> Work:
    return Work("gemm", {"m": m, "n": n, "k": k}, macs=m * n * k)


def matmul(node: Node, ins: Sequence[Value], outs: Sequence[Value]) -> Work:
    """A product over the last two dimensions; a single matrix on the right makes it one gemm."""
    a, b, out = ins[0].shape, ins[1].shape, outs[0]
    k = (a[-2] if node.number("transA", 0) else a[-1]) if len(a) > 1 else a[0]
    n = out.shape[-1] if len(b) > 1 else 1
    if len(b) <= 2:
        return _gemm(out.numel // n, n, k)
    m = out.shape[-2] if len(a) > 1 else 1
    batch = out.numel // (m * n)
    return Work("bmm", {"batch": batch, "m": m, "n": n, "k": k}, macs=batch * m * n * k)


def full_gemm(node: Node, ins: Sequence[Value], outs: Sequence[Value]) -> Work:
    """One product of two matrices, either of which may come transposed."""
    m, n = outs[0].shape
    return _gemm(m, n, ins[0].shape[0 if node.number("transA", 0) else 1])


def quantised_matmul(node: Node, ins: Sequence[Value], outs: Sequence[Value]) -> Work:
    """A product with packed weights, whose sizes are attributes."""
    n, k = node.number("N", outs[0].shape[-1]), node.number("K", ins[0].shape[-1])
    return _gemm(outs[0].numel // n, n, k)


def einsum(node: Node, ins: Sequence[Value], outs: Sequence[Value]) -> Work:
    """A product of two tensors, or a rearrangement of one."""
    equation = str(node.attributes.get("equation", "")).replace(" ", "")
    terms, arrow, result = equation.partition("->")
    labels = terms.split(",")
    if len(labels) == 1:
        return _copy("einsum", outs[0])
    if len(labels) > 2 or not arrow or "." in equation:
        raise ValueError(f"{equation} is no product of two tensors whose every dimension has a name")
    sizes = {
        label: size
        for term, value in zip(labels, ins, strict=False)
        for label, size in zip(term, value.shape, strict=False)
    }
    left, right = set(labels[0]), set(labels[1])
    summed = (left | right) - set(result)
    shared = (left & right) - summed
    batch, k = (prod(sizes[one] for one in group) for group in (shared, summed))
    m, n = (prod(sizes[one] for one in side - shared - summed) for side in (left, right))
    return Work("bmm", {"batch": batch, "m": m, "n": n, "k": k}, macs=batch * m * n * k)


# -- convolutions --------------------------------------------------------------------------------------------------


def plane(shape: Sequence[int]) -> tuple[int, int]:
    """Height and width of a spatial shape, as the eager walk has them."""
    return (1, shape[0]) if len(shape) == 1 else (prod(shape[:-1]), shape[-1])


def conv(node: Node, ins: Sequence[Value], outs: Sequence[Value]) -> Work:
    """A convolution: dense, grouped, depthwise or transposed; channels in blocks make another family."""
    x, weight, y = ins[0].shape, ins[1].shape, outs[0].shape
    groups = node.number("group", 1)
    transposed = "Transpose" in node.op_type
    last = node.attributes.get("channels_last", 0) or node.op_type.startswith("Nhwc")
    if last:
        x, y = (x[0], x[-1], *x[1:-1]), (y[0], y[-1], *y[1:-1])
    kernel = plane(weight[2:])
    dims = dict(
        zip(
            ("batch", "c_in", "c_out", "h_in", "w_in", "h_out", "w_out", "kernel_h", "kernel_w"),
            (x[0], x[1], y[1], *plane(x[2:]), *plane(y[2:]), *kernel),
            strict=True,
        )
    )
    dims |= {"stride": node.numbers("strides", (1,))[-1], "groups": groups}
    macs = prod(x if transposed else y) * prod(weight[1:])
    return Work(_conv_family(transposed, groups, x[1]) + _blocked(node), dims, macs)


def _conv_family(transposed: bool, groups: int, c_in: int) -> str:
    if transposed:
        return "conv_transpose"
    return "conv" if groups == 1 else "conv_depthwise" if groups == c_in else "conv_grouped"


def _blocked(node: Node) -> str:
    """Special family of kernels whose channels lie in blocks: they are other code than the plain ones."""
    return ".nchwc" if node.domain == NCHWC else ""


def recurrent(node: Node, ins: Sequence[Value], outs: Sequence[Value]) -> Work:
    """All steps of a recurrent layer in one or both directions."""
    steps, batch, width = ins[0].shape
    directions, _, _ = ins[1].shape
    hidden = node.number("hidden_size", ins[2].shape[-1])
    dims = {"batch": batch, "steps": steps, "hidden": hidden, "inputs": width, "layers": directions}
    dims |= {"calls": steps * directions, "reread": steps * ins[2].numel}
    return Work("rnn", dims, macs=steps * batch * (ins[1].numel + ins[2].numel))


# -- attention -----------------------------------------------------------------------------------------------------


def attention(node: Node, ins: Sequence[Value], outs: Sequence[Value]) -> Work:
    """Fused attention, with or without the projections in it."""
    if node.op_type == "Attention" and node.domain == "com.microsoft":
        return _attention_with_weights(node, ins, outs)
    query, key = ins[0].shape, ins[1].shape
    if len(query) == 4:
        batch, heads, queries, width = query
        keys = key[-2]
    else:
        batch, queries, hidden = query
        heads = node.number("num_heads", 0) or node.number("q_num_heads", 1)
        width, keys = hidden // heads, key[1] if len(key) > 1 else queries
    masked = len(ins) > 3 and any(value.numel for value in ins[3:])
    return _attended(batch, heads, queries, keys, width, masked)


def _attention_with_weights(node: Node, ins: Sequence[Value], outs: Sequence[Value]) -> Work:
    """The projections of query, key and value are part of it."""
    batch, queries, hidden = ins[0].shape
    heads, projected = node.number("num_heads", 1), ins[1].shape[-1]
    work = _attended(batch, heads, queries, queries, projected // 3 // heads, len(ins) > 3)
    return work._replace(macs=work.macs + batch * queries * hidden * projected)


def _attended(batch: int, heads: int, queries: int, keys: int, width: int, masked: bool) -> Work:
    dims = {
        "batch": batch,
        "heads": heads,
        "queries": queries,
        "keys": keys,
        "head_dim": width,
        "masked": int(masked),
    }
    return Work("attention", dims, macs=2 * batch * heads * queries * keys * width)


# -- rows ----------------------------------------------------------------------------------------------------------


def over_rows(family: str, default_axis: int) -> Formula:
    """Formula of statistics over the axes from one on."""

    def formula(node: Node, ins: Sequence[Value], outs: Sequence[Value]) -> Work:
        axis = node.number("axis", default_axis)
        cols = prod(ins[0].shape[axis:])
        return Work(family, {"rows": ins[0].numel // cols, "cols": cols})

    return formula


def softmax(node: Node, ins: Sequence[Value], outs: Sequence[Value]) -> Work:
    """Softmax along one axis."""
    cols = ins[0].shape[node.number("axis", -1)]
    return Work(f"softmax.{node.op_type.lower()}", {"rows": ins[0].numel // cols, "cols": cols})


def per_channel(node: Node, ins: Sequence[Value], outs: Sequence[Value]) -> Work:
    """Statistics over each group of channels of each sample."""
    x = ins[0].shape
    groups = node.number("num_groups", 0) or node.number("groups", 0) or x[1]
    rows = x[0] * groups
    return Work("norm.group_norm", {"rows": rows, "cols": ins[0].numel // rows})


def batch_norm(node: Node, ins: Sequence[Value], outs: Sequence[Value]) -> Work:
    """Scale and shift by running statistics."""
    x = ins[0].shape
    return Work("batch_norm", {"batch": x[0], "channels": x[1], "spatial": prod(x[2:])})


def reduction(node: Node, ins: Sequence[Value], outs: Sequence[Value]) -> Work:
    """Every result stands for several elements."""
    rows = outs[0].numel
    family = f"reduction.{node.op_type.removeprefix('Reduce').lower()}"
    return Work(family, {"rows": rows, "cols": ins[0].numel // rows})


def scan(node: Node, ins: Sequence[Value], outs: Sequence[Value]) -> Work:
    """A running sum."""
    return Work("reduction.cumsum", {"rows": outs[0].numel, "cols": 1})


def sort(node: Node, ins: Sequence[Value], outs: Sequence[Value]) -> Work:
    """The largest along an axis."""
    cols = ins[0].shape[node.number("axis", -1)]
    return Work(f"sort.{node.op_type.lower()}", {"rows": ins[0].numel // cols, "cols": cols})


def distinct(node: Node, ins: Sequence[Value], outs: Sequence[Value]) -> Work:
    """Values or places picked out of a whole tensor."""
    return Work(f"sort.{node.op_type.lower()}", {"rows": 1, "cols": ins[0].numel})


def transform(node: Node, ins: Sequence[Value], outs: Sequence[Value]) -> Work:
    """A Fourier transform along an axis: halves of halves where its length is a power of two, else a chirp's."""
    given = ins[2].scalar if len(ins) > 2 else None  # an input since opset 20, an attribute before
    cols = ins[0].shape[node.number("axis", -2) if given is None else given]
    kind = "dft" if cols & (cols - 1) == 0 else "chirp"
    return Work(f"fft.{kind}", {"rows": max(1, outs[0].numel // 2 // cols), "cols": cols})


# -- elements ------------------------------------------------------------------------------------------------------


def elementwise(node: Node, ins: Sequence[Value], outs: Sequence[Value]) -> Work:
    """Each result from one element of each input."""
    size = outs[0].numel
    operands = sum(value.numel == size for value in ins)
    return Work(f"elementwise.{node.op_type.lower()}", {"numel": size, "operands": operands})


def _copy(kind: str, out: Value, run: int | None = None, reads: Mapping[int, int] | None = None) -> Work:
    length = run if run is not None else (out.shape[-1] if out.shape else 1)
    return Work(f"copy.{kind}", {"numel": out.numel, "run": max(1, length)}, reads=reads or {})


def moved(node: Node, ins: Sequence[Value], outs: Sequence[Value]) -> Work:
    """Copies of what is picked, row by row; what is not picked is not read."""
    written = sum(value.nbytes for value in outs)
    biggest = max(outs, key=lambda value: value.numel)
    total = biggest._replace(shape=(sum(value.numel for value in outs),)) if len(outs) > 1 else biggest
    run = biggest.shape[-1] if biggest.shape else 1
    return _copy(node.op_type.lower(), total, run, {0: min(written, ins[0].nbytes) if ins else 0})


def cast(node: Node, ins: Sequence[Value], outs: Sequence[Value]) -> Work:
    """A copy in another dtype."""
    return _copy("cast", outs[0], outs[0].numel)


def transpose(node: Node, ins: Sequence[Value], outs: Sequence[Value]) -> Work:
    """A copy that gathers as many elements at a time as stay together."""
    shape = ins[0].shape
    order = node.numbers("perm", tuple(reversed(range(len(shape)))))
    run = 1
    for place, axis in zip(reversed(range(len(shape))), reversed(order), strict=True):
        if axis != place:
            break
        run *= shape[axis]
    return _copy("transpose", outs[0], run)


def concat(node: Node, ins: Sequence[Value], outs: Sequence[Value]) -> Work:
    """Several tensors written behind each other."""
    return Work("cat", {"numel": outs[0].numel, "parts": len(ins)})


def gather(node: Node, ins: Sequence[Value], outs: Sequence[Value]) -> Work:
    """Rows picked by index; from a table of weights that is an embedding."""
    axis, shape = node.number("axis", 0), ins[0].shape
    axis += len(shape) if axis < 0 else 0
    cols = prod(shape[axis + 1 :])
    dims = {"rows": outs[0].numel // cols, "cols": cols}
    table = ins[0].weight and axis == 0 and len(shape) == 2
    return Work("embedding" if table else "index.select", dims, reads={0: outs[0].nbytes})


def picked(node: Node, ins: Sequence[Value], outs: Sequence[Value]) -> Work:
    """Single elements picked by index."""
    return Work("index.gather", {"rows": outs[0].numel, "cols": 1}, reads={0: outs[0].nbytes})


def scattered(node: Node, ins: Sequence[Value], outs: Sequence[Value]) -> Work:
    """Elements put into a copy of a tensor."""
    return Work("index.put", {"rows": ins[2].numel, "cols": 1})


def pooled(node: Node, ins: Sequence[Value], outs: Sequence[Value]) -> Work:
    """A window, or a whole plane, reduced to one element."""
    x, y = ins[0].shape, outs[0].shape
    window = prod(node.numbers("kernel_shape")) if not node.op_type.startswith("Global") else prod(x[2:])
    kind = node.op_type.removeprefix("Global").removesuffix("Pool").lower()
    return _over_plane(kind, y, window)


def resized(node: Node, ins: Sequence[Value], outs: Sequence[Value]) -> Work:
    """A plane at another size."""
    mode = node.attributes.get("mode", "nearest")
    taps = {"nearest": 1, "linear": 4, "cubic": 16}.get(str(mode), 4)
    return _over_plane(f"resize_{mode}", outs[0].shape, taps)


def _over_plane(kind: str, out: Sequence[int], window: int) -> Work:
    height, width = plane(out[2:]) if len(out) > 2 else (1, 1)
    dims = {"batch": out[0], "channels": out[1], "h_out": height, "w_out": width, "window": max(1, window)}
    return Work(f"pooling.{kind}", dims)


def unmoved(node: Node, ins: Sequence[Value], outs: Sequence[Value]) -> Work:
    """A change of shape that has to be a copy."""
    return _copy("contiguous", outs[0], outs[0].numel)


def factory(node: Node, ins: Sequence[Value], outs: Sequence[Value]) -> Work:
    """A new tensor, written once."""
    return Work("factory", {"numel": outs[0].numel}, reads={0: 0})


# Only the shape changes: the memory stays where it is.
VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Dropout"})
# Read no element, or run other nodes.
HOST = frozenset({"Shape", "Size"})
CONTROL = frozenset({"If", "Loop", "Scan"})
TRANSFERS = frozenset({"MemcpyToHost", "MemcpyFromHost"})
# Families that share a general class of host cost with another.
_GENERAL = {"conv_grouped": "conv", "conv_depthwise": "conv", "conv_transpose": "conv", "batch_norm": "norm"}
Values = Sequence[Value | None]


def class_of(family: str, op_type: str) -> str:
    """Class of host cost of a node whose kernel is of a family.

    >>> class_of("conv_grouped.nchwc", "Conv")
    'node.conv.Conv'
    """
    return f"node.{_GENERAL.get(root(family), root(family))}.{op_type}"


def work_of(node: Node, inputs: Values, outputs: Sequence[Value]) -> Work | None:
    """What a node does on the device; None when its type is not known or its shapes are not those of its type.

    Examples
    --------
    >>> a, b = Value((8, 64), "float"), Value((64, 32), "float", weight=True)
    >>> work_of(Node("MatMul", "", {}), (a, b), (Value((8, 32), "float"),)).dims
    {'m': 8, 'n': 32, 'k': 64}
    """
    formula = _FORMULAS.get(node.op_type)
    if formula is None or not outputs:
        return None
    given = [value if value is not None else _NOTHING for value in inputs]
    try:
        return formula(node, given, outputs)
    except (LookupError, ValueError, ZeroDivisionError):  # packed inputs, or dimensions that have no name
        return None


_NOTHING = Value((0,), "float")


def _named(formula: Formula, names: str) -> dict[str, Formula]:
    return dict.fromkeys(names.split(), formula)


_FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(VIEWS, unmoved),
    **_named(matmul, "MatMul FusedMatMul TransposeMatMul MatMulInteger MatMulIntegerToFloat"),
    **_named(full_gemm, "Gemm FusedGemm"),
    **_named(quantised_matmul, "MatMulNBits MatMulBnb4 DynamicQuantizeMatMul"),
    **_named(einsum, "Einsum"),
    **_named(conv, "Conv FusedConv NhwcConv NhwcFusedConv ConvTranspose ConvInteger"),
    **_named(recurrent, "LSTM GRU RNN"),
    **_named(attention, "Attention MultiHeadAttention GroupQueryAttention"),
    **_named(over_rows("norm.layer_norm", -1), "LayerNormalization"),
    **_named(over_rows("norm.rms_norm", -1), "RMSNormalization SimplifiedLayerNormalization"),
    # With the addition before it fused in, a normalisation has a kernel of its own, on a CPU many times slower.
    **_named(over_rows("norm.skip_layer_norm", -1), "SkipLayerNormalization"),
    **_named(over_rows("norm.skip_rms_norm", -1), "SkipSimplifiedLayerNormalization"),
    **_named(over_rows("norm.lp", -1), "LpNormalization MeanVarianceNormalization"),
    **_named(per_channel, "InstanceNormalization GroupNormalization GroupNorm SkipGroupNorm"),
    **_named(batch_norm, "BatchNormalization"),
    **_named(softmax, "Softmax LogSoftmax BiasSoftmax Hardmax"),
    **_named(
        reduction,
        "ReduceMean ReduceSum ReduceMax ReduceMin ReduceProd ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp "
        "ReduceSumSquare ArgMax ArgMin",
    ),
    **_named(scan, "CumSum"),
    **_named(sort, "TopK"),
    **_named(distinct, "NonZero Unique Compress"),
    **_named(transform, "DFT STFT"),
    **_named(
        elementwise,
        "Add Sub Mul Div Pow Min Max Mean Sum Mod And Or Not Xor Equal Greater Less GreaterOrEqual "
        "LessOrEqual Where Abs Neg Exp Log Sqrt Reciprocal Erf Tanh Sigmoid Relu LeakyRelu PRelu Elu Selu "
        "Celu HardSigmoid HardSwish Softplus Softsign Gelu FastGelu QuickGelu BiasGelu BiasSplitGelu Mish "
        "ThresholdedRelu Clip Floor Ceil Round Sign Sin Cos Tan Asin Acos Atan Sinh Cosh IsNaN IsInf BitShift "
        "BitwiseAnd BitwiseOr BitwiseXor BitwiseNot Swish Trilu QuantizeLinear DequantizeLinear "
        "RotaryEmbedding BiasAdd ",
    ),
    **_named(moved, "Expand Tile Pad Slice Split DepthToSpace SpaceToDepth ReorderInput ReorderOutput ReverseSequence"),
    **_named(cast, "Cast CastLike"),
    **_named(transpose, "Transpose"),
    **_named(concat, "Concat"),
    **_named(gather, "Gather"),
    **_named(picked, "GatherElements GatherND OneHot"),
    **_named(scattered, "ScatterND ScatterElements Scatter"),
    **_named(pooled, "MaxPool AveragePool LpPool GlobalAveragePool GlobalMaxPool GlobalLpPool"),
    **_named(resized, "Resize Upsample"),
    **_named(factory, "Range ConstantOfShape EyeLike RandomNormal RandomUniform RandomNormalLike RandomUniformLike"),
}
