"""Cost formulas of ONNX operators: kernel family, dimensions, multiply-adds and reads, from attributes and shapes.

Where an operator counts as an aten op does, it has the formula of that op. Which operator has which is the table below.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from string import digits
from typing import Any, NamedTuple

from latpred.ops import pointwise, products
from latpred.ops.families import Work, host_class

NCHWC = "com.microsoft.nchwc"
HALF_DTYPES = {"fp16": "float16", "bf16": "bfloat16"}  # by precision
_BYTES = {
    **dict.fromkeys(("int4", "uint4", "float4"), 0.5),
    **dict.fromkeys(("bool", "int8", "uint8", "float8"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float64", "int64", "uint64"), 8),
}


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor: shape, name of its dtype, whether it is a weight, a whole number's value."""

    shape: tuple[int, ...]
    dtype: str
    weight: bool = False
    scalar: int | None = None

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return ceil(prod(self.shape) * _BYTES.get(self.dtype.partition("_")[0], 4))


class Node(NamedTuple):
    """An operator with its attributes."""

    op_type: str
    domain: str
    attributes: Mapping[str, Any]

    def number(self, name: str, default: int) -> int:
        return int(self.attributes.get(name, default))

    def numbers(self, name: str, default: Sequence[int] = ()) -> tuple[int, ...]:
        return tuple(int(value) for value in self.attributes.get(name, default))

    @property
    def kind(self) -> str:
        """Its type as the special part of a family."""
        return self.op_type.lower()


Values = Sequence[Value]
Formula = Callable[[Node, Values, Values], Work]
_NOTHING = Value((0,), "float32")


def _rows(family: str, elements: int, cols: int, **bytes_moved: Any) -> Work:
    return Work(family, {"rows": elements // cols, "cols": cols}, **bytes_moved)


# -- products ------------------------------------------------------------------------------------------------------


def matmul(node: Node, ins: Values, outs: Values) -> Work:
    """A product over the last two dimensions; a single matrix on the right makes it one gemm."""
    a, b, out = ins[0].shape, ins[1].shape, outs[0]
    k = (a[-2] if node.number("transA", 0) else a[-1]) if len(a) > 1 else a[0]
    n = out.shape[-1] if len(b) > 1 else 1
    if len(b) <= 2:
        return products.gemm(out.numel // n, n, k)
    m = out.shape[-2] if len(a) > 1 else 1
    return products.bmm(out.numel // (m * n), m, n, k)


def quantised_matmul(node: Node, ins: Values, outs: Values) -> Work:
    """A product with packed weights, whose sizes are attributes."""
    n, k = node.number("N", outs[0].shape[-1]), node.number("K", ins[0].shape[-1])
    return products.gemm(outs[0].numel // n, n, k)


def _of_bytes(formula: Formula) -> Formula:
    """Formula of a product of quantised tensors: each is followed by its scale and its zero."""
    return lambda node, ins, outs: formula(node, (ins[0], ins[3]), outs)


def einsum(node: Node, ins: Values, outs: Values) -> Work:
    """A product of two tensors, or a rearrangement of one."""
    equation = str(node.attributes.get("equation", "")).replace(" ", "")
    terms, arrow, result = equation.partition("->")
    labels = terms.split(",")
    if len(labels) == 1:
        return _copy("einsum", outs[0])
    if len(labels) > 2:
        raise ValueError(f"{equation} is no product of two tensors")
    if not arrow:
        result = "..." + "".join(one for one in {*terms} - {*".,"} if terms.count(one) == 1)
    more = [len(value.shape) - len(term.replace(".", "")) for term, value in zip(labels, ins, strict=False)]
    names = [digits[len(digits) - count :] for count in (*more, max(more))]  # of dimensions that "..." stands for
    spelled = [term.replace("...", name) for term, name in zip((*labels, result), names, strict=True)]
    sizes: dict[str, int] = {}
    for term, value in zip(spelled, ins, strict=False):
        for label, size in zip(term, value.shape, strict=True):
            sizes[label] = max(size, sizes.get(label, 1))  # those of "..." may be broadcast
    left, right, kept = map(set, spelled)
    summed = (left | right) - kept
    shared = (left & right) - summed
    groups = (shared, left - shared - summed, right - shared - summed, summed)
    return products.bmm(*(prod(sizes[label] for label in group) for group in groups))


def conv(node: Node, ins: Values, outs: Values) -> Work:
    """A convolution: dense, grouped, depthwise or transposed; channels in blocks are another kernel's."""
    x, y = _channels_first(node, ins[0], outs[0])
    strides, groups = node.numbers("strides", (1,)), node.number("group", 1)
    transposed = "Transpose" in node.op_type
    work = products.convolution(x, ins[1], None, strides, 0, 1, transposed, 0, groups, out=y)
    return _in_blocks(work, node)


def _channels_first(node: Node, *values: Value) -> Values:
    """Values whose channels follow the batch, wherever they lie."""
    if not (node.number("channels_last", 0) or node.op_type.startswith("Nhwc")):
        return values
    return [replace(one, shape=(one.shape[0], one.shape[-1], *one.shape[1:-1])) for one in values]


def _in_blocks(work: Work, node: Node) -> Work:
    """The work, of a family of its own where channels lie in blocks: a library has other code for those."""
    return work._replace(family=f"{work.family}.nchwc") if node.domain == NCHWC else work


_GATES = {"LSTM": "rnn.lstm", "DynamicQuantizeLSTM": "rnn.lstm", "GRU": "rnn.gru"}


def recurrent(node: Node, ins: Values, outs: Values) -> Work:
    """All steps of a recurrent layer in one or both directions."""
    steps, batch, width = ins[0].shape
    directions, _, _ = ins[1].shape
    hidden = node.number("hidden_size", ins[2].shape[-1])
    dims = {"batch": batch, "steps": steps, "hidden": hidden, "inputs": width, "layers": directions}
    matrices = ins[1].numel + ins[2].numel
    dims |= {"calls": steps * directions, "reread": steps * ins[2].numel, "weights": matrices}
    return Work(_GATES.get(node.op_type, "rnn.plain"), dims, macs=steps * batch * matrices)


# Of operators: which of their inputs are masks, and which holds the keys of earlier tokens.
_ATTENTION: dict[tuple[str, str], tuple[set[int], int]] = {
    ("com.microsoft", "Attention"): ({3, 5}, 4),
    ("com.microsoft", "QAttention"): ({5}, 8),
    ("com.microsoft", "MultiHeadAttention"): ({4, 5}, 6),
    ("com.microsoft", "GroupQueryAttention"): ({10}, 3),
    ("", "Attention"): ({3}, 4),
}


def attention(node: Node, ins: Values, outs: Values) -> Work:
    """Fused attention to earlier tokens and new ones, with or without the projections in it."""
    masks, past = _ATTENTION[node.domain.removeprefix("ai.onnx"), node.op_type]
    given = {index for index, value in enumerate(ins) if value.numel}
    projects = node.op_type == "QAttention" or (node.domain == "com.microsoft" and node.op_type == "Attention")
    heads = node.number("num_heads", 0) or node.number("q_num_heads", 1)
    if len(ins[0].shape) == 4:
        batch, heads, queries, width = ins[0].shape
    else:
        batch, queries, hidden = ins[0].shape
        if projects or 1 not in given:  # queries, keys and values are in one tensor
            hidden = (*node.numbers("qkv_hidden_sizes"), outs[0].shape[-1])[0]
        width = hidden // heads
    if len(outs) > 1:  # keys and values of all tokens
        keys = outs[1].shape[-2]
    else:
        keys = ins[past].shape[-2] if past in given else 0
        keys += queries if projects or 1 not in given else ins[1].shape[-2 if len(ins[1].shape) == 4 else 1]
    query, key = (Value((batch, heads, tokens, width), "float32") for tokens in (queries, keys))
    wide = outs[0].shape[-1] // (1 if len(outs[0].shape) == 4 else heads)  # values may be wider than queries
    work = products.attention(
        query, key, replace(key, shape=(batch, heads, keys, wide)), not masks.isdisjoint(given), causal=False
    )
    return work._replace(macs=work.macs + ins[0].numel * ins[1].shape[-1]) if projects else work


# -- rows ----------------------------------------------------------------------------------------------------------


def over_last(family: str) -> Formula:
    """Formula of statistics over the axes from one on, which is the last by default."""
    return lambda node, ins, _: _rows(family, ins[0].numel, prod(ins[0].shape[node.number("axis", -1) :]))


def along_axis(general: str) -> Formula:
    """Formula of an operator that goes along one axis, the last by default."""
    return lambda node, ins, _: _rows(f"{general}.{node.kind}", ins[0].numel, ins[0].shape[node.number("axis", -1)])


def _embedded(node: Node, ins: Values, outs: Values) -> Work:
    """Sums of rows of tables, and statistics over each."""
    return over_last("norm.layer_norm")(node, outs, outs)._replace(reads=dict.fromkeys((2, 3, 4), outs[0].nbytes))


def per_channel(node: Node, ins: Values, outs: Values) -> Work:
    """Statistics over each group of channels of each sample."""
    batch, channels = ins[0].shape[:2]
    groups = node.number("num_groups", 0) or node.number("groups", 0) or channels
    return _rows("norm.group_norm", ins[0].numel, ins[0].numel // (batch * groups))


def reduction(node: Node, ins: Values, outs: Values) -> Work:
    """Every result stands for several elements."""
    return _rows(
        f"reduction.{node.kind.removeprefix('qlinear').removeprefix('reduce')}",
        ins[0].numel,
        ins[0].numel // outs[0].numel,
    )


def transform(node: Node, ins: Values, outs: Values) -> Work:
    """A Fourier transform along an axis: halves of halves where its length is a power of two, else a chirp's."""
    given = [value.scalar for value in ins] + [None] * 2  # lengths and axes are inputs; before opset 20 attributes
    axis = node.number("axis", -2) if given[2] is None else given[2]
    cols = given[1] or max(one.shape[axis] for one in (ins[0], outs[0]))
    kind = "dft" if cols & (cols - 1) == 0 else "chirp"
    # Where only half of each result is kept, all of it is computed.
    return Work(f"fft.{kind}", {"rows": outs[0].numel // (outs[0].shape[axis] * outs[0].shape[-1]), "cols": cols})


def gather(node: Node, ins: Values, outs: Values) -> Work:
    """Rows picked by index; from a table of weights that is an embedding."""
    axis, shape = node.number("axis", 0) % len(ins[0].shape), ins[0].shape
    family = "embedding" if ins[0].weight and axis == 0 and len(shape) == 2 else "index.select"
    return _rows(family, outs[0].numel, prod(shape[axis + 1 :]), reads={0: outs[0].nbytes})


def gather_quantised(node: Node, ins: Values, outs: Values) -> Work:
    """Rows picked by index from a table of weights in blocks, and dequantised."""
    reads = {index: ceil(ins[index].nbytes * ins[1].numel / ins[0].shape[0]) for index in range(len(ins)) if index != 1}
    return _rows("embedding", outs[0].numel, outs[0].shape[-1], reads=reads)


def _slices(family: str, indices: Value, moved: Value, **bytes_moved: Any) -> Work:
    """Slices picked or placed, one for each row of indices."""
    return _rows(family, moved.numel, max(1, moved.numel // max(1, prod(indices.shape[:-1]))), **bytes_moved)


# -- elements ------------------------------------------------------------------------------------------------------


def _copy(kind: str, out: Value, run: int | None = None, reads: Mapping[int, int] | None = None) -> Work:
    length = run if run is not None else (out.shape[-1] if out.shape else 1)
    return Work(f"copy.{kind}", {"numel": out.numel, "run": max(1, length)}, reads=reads or {})


def moved(node: Node, ins: Values, outs: Values) -> Work:
    """Copies of what is picked, row by row; what is not picked is not read."""
    written = sum(value.nbytes for value in outs)
    biggest = max(outs, key=lambda value: value.numel)
    total = replace(biggest, shape=(sum(value.numel for value in outs),))
    run = biggest.shape[-1] if biggest.shape else 1
    return _copy(node.kind, total, run, {0: min(written, ins[0].nbytes) if ins else 0})


def in_order(kind: str) -> Formula:
    """Formula of a copy that moves everything in order."""
    return lambda _, __, outs: _copy(kind, outs[0], outs[0].numel)


def transpose(node: Node, ins: Values, outs: Values) -> Work:
    """A copy that gathers as many elements at a time as stay together, or turns over one matrix after the other."""
    shape = ins[0].shape
    order = node.numbers("perm", tuple(reversed(range(len(shape)))))
    while order and shape[-1] == 1 and order[-1] == len(order) - 1:  # of no matter
        shape, order = shape[:-1], order[:-1]
    run = 1
    for place, axis in zip(reversed(range(len(shape))), reversed(order), strict=True):
        if axis != place:
            break
        run *= shape[axis]
    matrices, moving = _matrices(shape, order), [axis for axis in order if shape[axis] > 1]
    scattered = run == 1 and not matrices and moving != sorted(moving)  # value by value, 20 times as long
    copy = _copy("transpose.scattered" if scattered else "transpose", outs[0], run)
    return copy._replace(dims={**copy.dims, "matrices": matrices})


def _matrices(shape: Sequence[int], order: Sequence[int]) -> int:
    """How many matrices are turned over, where one axis passes all that follow it; 0 for other orders.

    transpose_helper.cc of onnxruntime calls MlasTranspose for each; threads share it, and meet again after it.
    """
    last = len(order) - 1
    kept = next((place for place, axis in enumerate(order) if axis != place), last)
    passing = {(*range(kept + 1, last + 1), kept), (last, *range(kept, last))}
    return prod(shape[:kept]) if kept < last and tuple(order[kept:]) in passing else 0


def pooled(node: Node, ins: Values, outs: Values) -> Work:
    """A window, or a whole plane, reduced to one element."""
    x, y = _channels_first(node, ins[0], outs[0])
    window = prod(x.shape[2:] if "Global" in node.op_type else node.numbers("kernel_shape"))
    kind = re.sub("^(qlinear|nhwc)?(global)?|pool$", "", node.kind)
    work = _over_plane(kind, y.shape, window)
    return _in_blocks(work, node)


def resized(node: Node, ins: Values, outs: Values) -> Work:
    mode = str(node.attributes.get("mode", "nearest"))
    return _over_plane(f"resize_{mode}", outs[0].shape, {"nearest": 1, "linear": 4, "cubic": 16}.get(mode, 4))


def _over_plane(kind: str, out: Sequence[int], window: int) -> Work:
    height, width = (prod(out[2:-1]), out[-1]) if len(out) > 2 else (1, 1)
    dims = {"batch": out[0], "channels": out[1], "h_out": height, "w_out": width, "window": max(1, window)}
    return Work(f"pooling.{kind}", dims)


# Only the shape changes: the memory stays where it is.
VIEWS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Dropout"})
# Read no element, or run other nodes.
HOST = frozenset({"Shape", "Size"})
CONTROL = frozenset({"If", "Loop", "Scan"})
TRANSFERS = frozenset({"MemcpyToHost", "MemcpyFromHost"})
# Multiply bytes, although scales or results of theirs are floating-point numbers.
OF_BYTES = frozenset({"QLinearMatMul", "QGemm", "QLinearConv", "DynamicQuantizeMatMul", "MatMulIntegerToFloat"})
OF_BYTES |= {"DynamicQuantizeLSTM"}


def class_of(family: str, op_type: str) -> str:
    """Class of host cost of a node whose kernel is of a family, as "node.conv.Conv"."""
    return f"node.{host_class(op_type, family)}"


def work_of(node: Node, inputs: Sequence[Value | None], outputs: Values) -> Work | None:
    """What a node does on the device; None when its type is not known or its shapes are not those of its type."""
    formula = _FORMULAS.get(node.op_type)
    if formula is None or not outputs:
        return None
    given = [value if value is not None else _NOTHING for value in inputs]
    try:
        return formula(node, given, outputs)
    except (LookupError, ValueError, ZeroDivisionError):  # packed inputs, or dimensions that have no name
        return None


_OPERATORS: dict[Formula, str] = {
    matmul: "Gemm FusedGemm MatMul FusedMatMul TransposeMatMul MatMulInteger MatMulIntegerToFloat",
    quantised_matmul: "MatMulNBits MatMulBnb4 DynamicQuantizeMatMul",
    _of_bytes(matmul): "QLinearMatMul QGemm",
    _of_bytes(conv): "QLinearConv",
    einsum: "Einsum",
    conv: "Conv FusedConv NhwcConv NhwcFusedConv ConvTranspose ConvInteger",
    recurrent: "LSTM DynamicQuantizeLSTM GRU RNN",
    attention: "Attention QAttention MultiHeadAttention GroupQueryAttention",
    over_last("norm.layer_norm"): "LayerNormalization",
    over_last("norm.rms_norm"): "RMSNormalization SimplifiedLayerNormalization",
    # With the addition before it fused in, a normalisation has a kernel of its own, on a CPU many times slower.
    over_last("norm.skip_layer_norm"): "SkipLayerNormalization",
    over_last("norm.skip_rms_norm"): "SkipSimplifiedLayerNormalization",
    _embedded: "EmbedLayerNormalization",
    over_last("norm.lp"): "LpNormalization MeanVarianceNormalization",
    per_channel: "InstanceNormalization GroupNormalization GroupNorm SkipGroupNorm",
    lambda _, ins, outs: pointwise.batch_norm(ins[0], out=outs[0]): "BatchNormalization",
    along_axis("softmax"): "Softmax LogSoftmax BiasSoftmax Hardmax QLinearSoftmax",
    along_axis("sort"): "TopK",
    reduction: (
        "ReduceMean ReduceSum ReduceMax ReduceMin ReduceProd ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp "
        "ReduceSumSquare ArgMax ArgMin QLinearReduceMean"
    ),
    lambda node, ins, _: Work(f"sort.{node.kind}", {"rows": 1, "cols": ins[0].numel}): "NonZero Unique Compress",
    transform: "DFT",
    lambda node, ins, outs: pointwise.elementwise(node.kind)(*ins, out=outs[0]): (
        "Add Sub Mul Div Pow Min Max Mean Sum Mod And Or Not Xor Equal Greater Less GreaterOrEqual "
        "LessOrEqual Where Abs Neg Exp Log Sqrt Reciprocal Erf Tanh Sigmoid Relu LeakyRelu PRelu Elu Selu "
        "Celu Shrink HardSigmoid HardSwish Softplus Softsign Gelu FastGelu QuickGelu BiasGelu BiasSplitGelu Mish "
        "ThresholdedRelu Clip Floor Ceil Round Sign Sin Cos Tan Asin Acos Atan Sinh Cosh Asinh Acosh Atanh IsNaN "
        "IsInf BitShift BitwiseAnd BitwiseOr BitwiseXor BitwiseNot Swish Trilu QuantizeLinear DequantizeLinear "
        "RotaryEmbedding BiasAdd "
        "DynamicQuantizeLinear QLinearAdd QLinearMul QLinearSigmoid QLinearLeakyRelu QLinearWhere"
    ),
    moved: "Expand Tile Pad Slice Split DepthToSpace SpaceToDepth ReorderInput ReorderOutput ReverseSequence",
    in_order("cast"): "Cast CastLike",
    in_order("concat"): "QLinearConcat",
    in_order("contiguous"): " ".join(VIEWS),  # where a change of shape has to be a copy
    transpose: "Transpose",
    gather: "Gather",
    gather_quantised: "GatherBlockQuantized",
    pooled: (
        "MaxPool AveragePool LpPool GlobalAveragePool GlobalMaxPool GlobalLpPool NhwcMaxPool QLinearAveragePool "
        "QLinearGlobalAveragePool"
    ),
    resized: "Resize Upsample",
    lambda _, ins, outs: pointwise.cat(ins, out=outs[0]): "Concat",
    lambda _, ins, outs: _rows("reduction.cumsum", outs[0].numel, 1): "CumSum",
    lambda _, ins, outs: _rows("index.gather", outs[0].numel, 1, reads={0: outs[0].nbytes}): "GatherElements",
    lambda _, ins, outs: _rows("index.gather", outs[0].numel, 1): "OneHot",
    lambda _, ins, outs: _slices("index.gather", ins[1], outs[0], reads={0: outs[0].nbytes}): "GatherND",
    lambda _, ins, outs: _rows("index.put", ins[2].numel, 1): "ScatterElements Scatter",
    lambda _, ins, outs: _slices("index.put", ins[1], ins[2]): "ScatterND",
    lambda _, ins, outs: Work("factory", {"numel": outs[0].numel}, reads={0: 0}): (
        "Range ConstantOfShape EyeLike RandomNormal RandomUniform RandomNormalLike RandomUniformLike"
    ),
}
_FORMULAS = {name: formula for formula, names in _OPERATORS.items() for name in names.split()}
