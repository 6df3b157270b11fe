"""What one node of an ONNX graph does: which formula each operator has, and which operators launch nothing.

Covers the operators of ONNX and those that onnxruntime fuses them into. A type that is not here is estimated from its
bytes by whoever asks.
"""

from __future__ import annotations

from collections.abc import Sequence

from latpred.ops.families import root
from latpred.ops.registry import Work
from latpred.runtimes import onnx_formulas as f
from latpred.runtimes.onnx_values import Node, Value

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


def _named(formula: f.Formula, names: str) -> dict[str, f.Formula]:
    return dict.fromkeys(names.split(), formula)


_FORMULAS: dict[str, f.Formula] = {
    **dict.fromkeys(VIEWS, f.unmoved),
    **_named(f.matmul, "MatMul FusedMatMul TransposeMatMul MatMulInteger MatMulIntegerToFloat"),
    **_named(f.full_gemm, "Gemm FusedGemm"),
    **_named(f.quantised_matmul, "MatMulNBits MatMulBnb4 DynamicQuantizeMatMul"),
    **_named(f.einsum, "Einsum"),
    **_named(f.conv, "Conv FusedConv NhwcConv NhwcFusedConv ConvTranspose ConvInteger"),
    **_named(f.recurrent, "LSTM GRU RNN"),
    **_named(f.attention, "Attention MultiHeadAttention GroupQueryAttention"),
    **_named(f.over_rows("norm.layer_norm", -1), "LayerNormalization"),
    **_named(f.over_rows("norm.rms_norm", -1), "RMSNormalization SimplifiedLayerNormalization"),
    # With the addition before it fused in, a normalisation has a kernel of its own, on a CPU many times slower.
    **_named(f.over_rows("norm.skip_layer_norm", -1), "SkipLayerNormalization"),
    **_named(f.over_rows("norm.skip_rms_norm", -1), "SkipSimplifiedLayerNormalization"),
    **_named(f.over_rows("norm.lp", -1), "LpNormalization MeanVarianceNormalization"),
    **_named(f.per_channel, "InstanceNormalization GroupNormalization GroupNorm SkipGroupNorm"),
    **_named(f.batch_norm, "BatchNormalization"),
    **_named(f.softmax, "Softmax LogSoftmax BiasSoftmax Hardmax"),
    **_named(
        f.reduction,
        "ReduceMean ReduceSum ReduceMax ReduceMin ReduceProd ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp "
        "ReduceSumSquare ArgMax ArgMin",
    ),
    **_named(f.scan, "CumSum"),
    **_named(f.sort, "TopK"),
    **_named(f.distinct, "NonZero Unique Compress"),
    **_named(f.transform, "DFT STFT"),
    **_named(
        f.elementwise,
        "Add Sub Mul Div Pow Min Max Mean Sum Mod And Or Not Xor Equal Greater Less GreaterOrEqual "
        "LessOrEqual Where Abs Neg Exp Log Sqrt Reciprocal Erf Tanh Sigmoid Relu LeakyRelu PRelu Elu Selu "
        "Celu HardSigmoid HardSwish Softplus Softsign Gelu FastGelu QuickGelu BiasGelu BiasSplitGelu Mish "
        "ThresholdedRelu Clip Floor Ceil Round Sign Sin Cos Tan Asin Acos Atan Sinh Cosh IsNaN IsInf BitShift "
        "BitwiseAnd BitwiseOr BitwiseXor BitwiseNot Swish Trilu QuantizeLinear DequantizeLinear "
        "RotaryEmbedding BiasAdd ",
    ),
    **_named(
        f.moved, "Expand Tile Pad Slice Split DepthToSpace SpaceToDepth ReorderInput ReorderOutput ReverseSequence"
    ),
    **_named(f.cast, "Cast CastLike"),
    **_named(f.transpose, "Transpose"),
    **_named(f.concat, "Concat"),
    **_named(f.gather, "Gather"),
    **_named(f.picked, "GatherElements GatherND OneHot"),
    **_named(f.scattered, "ScatterND ScatterElements Scatter"),
    **_named(f.pooled, "MaxPool AveragePool LpPool GlobalAveragePool GlobalMaxPool GlobalLpPool"),
    **_named(f.resized, "Resize Upsample"),
    **_named(f.factory, "Range ConstantOfShape EyeLike RandomNormal RandomUniform RandomNormalLike RandomUniformLike"),
}
