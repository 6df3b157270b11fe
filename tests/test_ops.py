"""Cost formulas on bare shapes against numbers worked out by hand, and how they are registered."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from latpred.errors import UsageError
from latpred.ops import Work, cost, formula_of, generation, work_of


@dataclass
class DType:
    itemsize: int = 4


@dataclass
class Fake:
    """A tensor as formulas see it."""

    shape: tuple[int, ...]
    dtype: DType = field(default_factory=DType)
    strides: tuple[int, ...] | None = None

    def stride(self) -> tuple[int, ...]:
        if self.strides is not None:
            return self.strides
        steps, step = [], 1
        for size in reversed(self.shape):
            steps.append(step)
            step *= size
        return tuple(reversed(steps))


def t(*shape: int) -> Fake:
    return Fake(shape)


KEYS = t(1000)
LINE, MAP, WIDE, QUERY, KEY = t(1, 4, 99), t(1, 4, 8, 8), t(1, 8, 8, 8), t(2, 4, 10, 8), t(2, 4, 12, 8)
LAST = Fake((1, 4, 3, 3), strides=(36, 1, 12, 4))
ROWS, COLUMNS, KNOWN = t(2, 5, 8), Fake((4, 9, 8), strides=(72, 1, 9)), t(5)
HEADS, WIDER, TURNED = t(3, 2, 9, 8), t(3, 2, 9, 16), Fake((3, 2, 9, 8), strides=(144, 72, 1, 9))
ATTEND, PAIR = "scaled_dot_product_attention", t(2, 3, 4, 4)
MACS = 2 * 4 * 10 * 12 * (8 + 8)  # of these queries and keys
LYING = Fake((2, 8, 4, 4), strides=(128, 1, 32, 8))
POOLED = t(2, 8, 2, 2)
GATES = [t(64, 8), t(64, 16), t(64), t(64)]
INDEX, TABLE, MESSAGES = t(10), t(50, 64), t(10, 64)


def gemm(m: int, n: int, k: int) -> dict[str, object]:
    return {"family": "gemm", "macs": m * n * k, "m": m, "n": n, "k": k}


def of(family: str, macs: int | None = None, **dims: object) -> dict[str, object]:
    return {"family": family, **({} if macs is None else {"macs": macs}), **dims}


def put(rows: int, cols: int, read: int) -> dict[str, object]:
    return {"rows": rows, "cols": cols, "reads": {0: read}, "writes": 4 * rows * cols}


@pytest.mark.parametrize(
    ("name", "args", "out", "expected"),
    [
        ("linear", (ROWS, t(3, 8)), t(2, 5, 3), gemm(2 * 5, 3, 8)),
        ("mm", (t(4, 6), t(6, 5)), t(4, 5), gemm(4, 5, 6)),
        ("addmm", (t(5), t(4, 6), t(6, 5)), t(4, 5), gemm(4, 5, 6)),
        ("bmm", (t(3, 4, 6), t(3, 6, 5)), t(3, 4, 5), of("bmm", 3 * 4 * 6 * 5)),
        ("baddbmm", (t(3, 4, 5), t(3, 4, 6), t(3, 6, 5)), t(3, 4, 5), of("bmm", 3 * 4 * 6 * 5)),
        ("matmul", (t(2, 3, 4, 6), t(2, 3, 6, 5)), t(2, 3, 4, 5), of("bmm", 6 * 4 * 6 * 5)),
        ("matmul", (t(2, 3, 4), t(4, 5)), t(2, 3, 5), gemm(2 * 3, 5, 4)),
        ("mv", (t(4, 6), t(6)), t(4), gemm(4, 1, 6)),
        ("_int_mm", (t(4, 6), t(6, 5)), t(4, 5), gemm(4, 5, 6)),
        ("addmv", (t(4), t(4, 6), t(6)), t(4), gemm(4, 1, 6)),
        *((name, (t(6), t(6)), t(), gemm(1, 1, 6)) for name in ("dot", "vdot")),
        ("addr", (t(4, 5), t(4), t(5)), t(4, 5), gemm(4, 5, 1)),
        # of a triangle, half of a product; on the right of it rows of three
        ("linalg_solve_triangular", (t(2, 5, 5), t(2, 5, 3)), t(2, 5, 3), of("bmm", 75, batch=2, m=5, n=3, k=5)),
        ("linalg_solve_triangular", (t(5, 5), t(3, 5)), t(3, 5), of("gemm", 37, m=3, n=5, k=5)),
        # a mean is a kernel of its own
        ("mse_loss", (t(2, 5), t(2, 5)), t(), of("elementwise.mse_loss", numel=10, operands=2, launches=2)),
        ("mse_loss", (t(2, 5), t(2, 5), 0), t(2, 5), of("elementwise.mse_loss", launches=1)),
        ("nll_loss_forward", (t(2, 5), t(2)), (t(), t()), of("reduction.nll_loss", rows=1, cols=2, reads={0: 8})),
        ("nll_loss2d_forward", (t(2, 5, 3), t(2, 3)), (t(2, 3), t()), of("reduction.nll_loss", rows=6, cols=1)),
        ("_cdist_forward", (t(2, 5, 3), t(2, 7, 3), 2.0), t(2, 5, 7), of("reduction.cdist", rows=70, cols=3)),
        ("max_unpool2d", (PAIR, PAIR, [8, 8]), t(2, 3, 8, 8), of("index.put", rows=96, launches=2)),
        # queries of one batch meet keys of two; one head of scores, values of four
        (ATTEND, (t(2, 1, 4, 6, 8), t(1, 3, 4, 6, 8), t(1, 3, 4, 6, 8)), t(2, 3, 4, 6, 8), {"batch": 6, "heads": 4}),
        (ATTEND, (t(2, 1, 6, 8), t(2, 1, 6, 8), t(2, 4, 6, 8)), t(2, 4, 6, 8), {"macs": 36 * 8 * (2 + 8), "heads": 4}),
        *(
            ("_grouped_mm", (t(m, 6), t(4, 6, 5)), t(m, 5), of("gemm.grouped", m * 6 * 5) | {"reads": {1: read * 120}})
            for m, read in ((10, 4), (2, 2))
        ),
        ("conv2d", (t(2, 3, 8, 8), t(4, 3, 3, 3)), t(2, 4, 6, 6), of("conv", 2 * 4 * 36 * 27)),
        ("conv2d", (MAP, t(4, 1, 3, 3), None, 1, 1, 1, 4), MAP, of("conv_depthwise", 4 * 64 * 9)),
        ("conv2d", (MAP, t(8, 1, 3, 3), None, 1, 1, 1, 4), WIDE, of("conv_depthwise.multiplied", 8 * 64 * 9)),
        ("conv2d", (t(1, 4, 1, 1), t(4, 1, 5, 5), None, 1, 2, 1, 4), t(1, 4, 1, 1), of("conv_depthwise.padded", 100)),
        ("conv2d", (t(1, 4, 2, 2), t(4, 1, 5, 5), None, 1, 2, 1, 4), t(1, 4, 2, 2), of("conv_depthwise", 400)),
        (
            *("conv2d", (LAST, t(4, 1, 9, 9), None, 1, 4, 1, 4), LAST),
            of("conv_depthwise.channels_last", 4 * 9 * 81),
        ),
        ("gelu", (MAP,), MAP, of("elementwise.gelu", numel=256, operands=1)),
        ("gelu", (MAP, "tanh"), MAP, of("elementwise.gelu.tanh", numel=256, operands=1)),
        ("conv1d", (LINE, t(4, 1, 13), None, 1, 6, 1, 4), LINE, of("conv_depthwise", 4 * 99 * 13)),
        ("conv1d", (LINE, t(4, 1, 15), None, 1, 7, 1, 4), LINE, of("conv_depthwise.padded", 4 * 99 * 15)),
        # Windows with gaps are padded by as much as they reach.
        ("conv1d", (LINE, t(4, 1, 3), None, 1, 6, 6, 4), LINE, of("conv_depthwise", 4 * 99 * 3)),
        ("conv1d", (LINE, t(4, 1, 3), None, [1], [8], [8], 4), LINE, of("conv_depthwise.padded", 4 * 99 * 3)),
        (
            *("convolution", (LINE, t(4, 1, 3), None, [1], [8], [8], False, [0], 4), LINE),
            of("conv_depthwise.padded", 4 * 99 * 3),
        ),
        ("conv2d", (MAP, t(6, 2, 3, 3), None, 1, 1, 1, 2), t(1, 6, 8, 8), of("conv_grouped", 6 * 64 * 18)),
        ("conv1d", (t(2, 3, 10), t(4, 3, 5)), t(2, 4, 6), of("conv", 2 * 4 * 6 * 15)),
        # Of three dimensions the depth is part of the height. A convolution moves by its largest stride.
        (
            *("conv3d", (t(1, 3, 4, 8, 8), t(4, 3, 3, 1, 5), None, [1, 2, 1]), t(1, 4, 2, 4, 4)),
            of("conv", h_in=32, w_in=8, kernel_h=3, kernel_w=5, kernel_d=3, stride=2),
        ),
        ("conv2d", (MAP, t(8, 4, 1, 1), None, [2, 1]), t(1, 8, 4, 8), of("conv", stride=2)),
        # A library's own have the padding before the stride, one of them after the bias.
        *(
            (
                f"{library}_convolution",
                (t(1, 3, 8, 8), t(4, 3, 3, 3), *bias, [1, 1], [2, 2], [1, 1], 1),
                PAIR,
                of("conv", stride=2),
            )
            for library, *bias in (("mkldnn", None), ("cudnn",))
        ),
        # A convolution along a line has height one.
        (
            *("conv1d", (t(2, 3, 10), t(4, 3, 5), None, [2]), t(2, 4, 3)),
            of("conv", h_in=1, w_in=10, h_out=1, kernel_h=1, kernel_w=5, stride=2),
        ),
        ("conv_transpose2d", (t(1, 3, 4, 4), t(3, 2, 2, 2)), t(1, 2, 5, 5), of("conv_transpose", 3 * 16 * 8)),
        ("pad", (t(2, 4, 8), (1, 1), "reflect"), t(2, 4, 10), of("copy.pad.reflect.1d", 0)),
        ("pad", (t(4, 8, 8), (1, 1, 1, 1), "reflect"), t(4, 10, 10), of("copy.pad.reflect", 0)),
        # An LSTM meets every weight at every step.
        (
            *("lstm", (t(3, 10, 8), [t(1, 3, 16)] * 2, GATES, True, 1, 0.0, False, False, True), (t(3, 10, 16),)),
            of("rnn.lstm", 3 * 10 * (64 * 8 + 64 * 16), batch=3, steps=10, hidden=16, inputs=8, layers=1, calls=10)
            | {"reread": 10 * 4 * 16 * 16, "weights": 64 * 8 + 64 * 16},
        ),
        # A cell does one step of it.
        *(
            (name, (t(3, 8), state, t(rows, 8), t(rows, 16)), out, of("gemm.cell", 3 * rows * 24, m=3, n=rows, k=24))
            for name, state, out, rows in (
                ("lstm_cell", [t(3, 16)] * 2, (t(3, 16),) * 2, 4 * 16),
                ("gru_cell", t(3, 16), t(3, 16), 3 * 16),
                *((f"rnn_{kind}_cell", t(3, 16), t(3, 16), 16) for kind in ("tanh", "relu")),
            )
        ),
        ("glu", (t(4, 6),), t(4, 3), of("elementwise.glu", numel=12, operands=2)),
        ("layer_norm", (ROWS, [8]), ROWS, of("norm.layer_norm", rows=10, cols=8)),
        ("group_norm", (t(2, 6, 4, 4), 3), t(2, 6, 4, 4), of("norm.group_norm", rows=6, cols=32)),
        ("group_norm", (t(0, 6, 4, 4), 3), t(0, 6, 4, 4), of("norm.group_norm", rows=0, cols=32)),
        ("mean", (ROWS, [1]), t(2, 8), of("reduction.mean", rows=16, cols=5)),
        ("linalg_vector_norm", (ROWS, 2, [-1], True), t(2, 5, 1), of("reduction.linalg_vector_norm", rows=10, cols=8)),
        ("linalg_vector_norm", (ROWS, 2, [0]), t(5, 8), of("reduction.linalg_vector_norm.across", rows=40, cols=2)),
        ("norm", (ROWS,), t(), of("reduction.linalg_vector_norm", rows=1, cols=80)),
        ("cumsum", (ROWS, 1), ROWS, of("reduction.cumsum.across", rows=80, cols=1)),
        ("argmin", (ROWS, 1), t(2, 8), of("reduction.argmax.across", rows=16, cols=5)),
        ("pow", (ROWS, 2), ROWS, of("elementwise.pow", numel=80, operands=1)),
        ("pow", (ROWS, 1.5), ROWS, of("elementwise.pow.any", numel=80, operands=1)),
        ("rand_like", (ROWS,), ROWS, of("factory.random", numel=80)),
        ("topk", (t(4, 9), 2, 1), (t(4, 2), t(4, 2)), of("sort.topk", rows=4, cols=9)),
        ("sort", (t(4, 9), 0), (t(4, 9), t(4, 9)), of("sort.sort", rows=9, cols=4)),
        # A table of 1000 is halved ten times for each value, which may be no tensor.
        ("searchsorted", (KEYS, t(3, 4)), t(3, 4), of("sort.searchsorted", rows=12, cols=10) | {"reads": {0: 480}}),
        ("searchsorted", (KEYS, t(3, 4000)), t(3, 4000), {"reads": {0: 4000}}),
        ("searchsorted", (KEYS, 5), t(), of("sort.searchsorted", rows=1, cols=10)),
        ("bucketize", (5, KEYS), t(), of("sort.searchsorted", rows=1, cols=10) | {"reads": {1: 40}}),
        # A softmax over another dimension than the last, and of rows that lie in pieces, which it copies.
        ("softmax", (ROWS, 1), ROWS, of("softmax.softmax.across.ragged", rows=16, cols=5)),
        ("softmax", (t(4, 9), -1), t(4, 9), of("softmax.softmax")),
        ("softmax", (t(4, 9, 1), 1), t(4, 9, 1), of("softmax.softmax")),
        ("softmax", (t(4, 9, 32), 1), t(4, 9, 32), of("softmax.softmax.across")),
        ("softmax", (t(4, 9, 2, 12), 1), t(4, 9, 2, 12), of("softmax.softmax.across.ragged")),
        ("softmax", (COLUMNS, -1), COLUMNS, of("softmax.softmax.strided")),
        ("softmax", (COLUMNS, 1), COLUMNS, of("softmax.softmax.across.ragged")),
        ("_masked_softmax", (t(4, 2, 9), t(9)), t(4, 2, 9), of("softmax.masked", rows=8, cols=9)),
        ("_masked_softmax", (t(4, 2, 9), t(9), 1), t(4, 2, 9), of("softmax.masked", rows=36, cols=2)),
        # Attention is fused where rows are in one piece; on a CPU masks have two or four dimensions, too, and values
        # are as wide as keys.
        (ATTEND, (QUERY, KEY, KEY), QUERY, of("attention", MACS)),
        *((ATTEND, (HEADS, HEADS, HEADS, mask), HEADS, of("attention")) for mask in (t(9, 9), t(1, 1, 9, 9))),
        (ATTEND, (HEADS, HEADS, HEADS, t(2, 9, 9)), HEADS, of("attention.unfused")),
        (ATTEND, (HEADS, HEADS, WIDER), HEADS, of("attention.unfused")),
        (ATTEND, (HEADS, HEADS, HEADS, None, 0.1), HEADS, of("attention.unfused")),
        (ATTEND, (TURNED, HEADS, HEADS), HEADS, of("attention.unfused.math")),
        (ATTEND, (HEADS, TURNED, HEADS), HEADS, of("attention.unfused.math")),
        (ATTEND, (HEADS, HEADS, TURNED), HEADS, of("attention.unfused.math")),
        # One batch, or one head of keys, for several.
        (ATTEND, (QUERY, *[t(2, 1, 12, 8)] * 2, None, 0.0, True), QUERY, of("attention.causal.unfused.math", MACS)),
        (ATTEND, (t(1, 4, 10, 8), KEY, KEY), QUERY, of("attention.unfused.math", MACS)),
        # Of each backend's arguments another one says whether it is causal.
        *(
            (f"_scaled_dot_product_{backend}", (QUERY, KEY, KEY, *before, *given), QUERY, of(family))
            for backend, *before in (
                ("flash_attention", 0.0),
                ("flash_attention_for_cpu", 0.0),
                ("efficient_attention", None, False, 0.0),
                ("cudnn_attention", None, False, 0.0),
            )
            for given, family in (((), "attention"), ((False,), "attention"), ((True,), "attention.causal"))
        ),
        # Statistics of the values themselves.
        ("batch_norm", (ROWS, KNOWN, None, None, None, True, 0.0, 1e-6, True), ROWS, of("batch_norm.training")),
        ("batch_norm", (ROWS, KNOWN, KNOWN, KNOWN, KNOWN, False, 0.1, 1e-5, True), ROWS, of("batch_norm")),
        ("_native_batch_norm_legit_no_training", (ROWS, *[KNOWN] * 4, 1.0, 1e-5), ROWS, of("batch_norm")),
        # Maps that lie channels last have kernels of their own.
        ("max_pool2d", (WIDE, [2, 2]), POOLED, of("pooling.max")),
        ("max_pool2d", (LYING, [2, 2]), POOLED, of("pooling.max.channels_last")),
        ("max_pool2d", (t(2, 8, 1, 1), [2, 2]), POOLED, of("pooling.max")),
        ("upsample_bilinear2d", (WIDE,), POOLED, of("pooling.upsample_bilinear")),
        # Without aliasing, windows are as wide as what a result stands for.
        (
            *("_upsample_bilinear2d_aa", (t(1, 3, 1024, 512), [224, 512]), t(1, 3, 224, 512)),
            of("pooling.upsample_bilinear_aa", window=9 * 2) | {"reads": {0: 4 * 3 * 1024 * 512}},
        ),
        ("upsample_bilinear2d", (LYING,), POOLED, of("pooling.upsample_bilinear.channels_last")),
        ("upsample_bilinear2d", (t(2, 8, 1, 1),), POOLED, of("pooling.upsample_bilinear")),
        ("grid_sampler_2d", (WIDE, t(1, 4, 4, 2)), t(1, 8, 4, 4), of("pooling.grid_sample", h_out=4, window=4)),
        (
            *("grid_sampler_3d", (t(1, 2, 3, 4, 5), t(1, 6, 4, 5, 3)), t(1, 2, 6, 4, 5)),
            of("pooling.grid_sample", batch=1, channels=2, h_out=24, w_out=5, window=8),
        ),
        ("conv2d", (LYING, t(8, 1, 3, 3), None, 2, 1, 1, 8), POOLED, of("conv_depthwise.channels_last")),
        ("max_pool2d", (t(2, 3, 8, 8), [3, 3]), PAIR, of("pooling.max", window=9)),
        (
            *("adaptive_avg_pool2d", (t(2, 3, 7, 7), [1, 1]), t(2, 3, 1, 1)),
            of("pooling.adaptive_avg", batch=2, channels=3, h_out=1, w_out=1, window=49),
        ),
        (
            *("adaptive_max_pool2d", (t(2, 3, 7, 7), [1, 1]), (t(2, 3, 1, 1),) * 2),
            of("pooling.adaptive_max", batch=2, channels=3, h_out=1, w_out=1, window=49),
        ),
        # The maximum along a line is a kernel of its own unless its place is asked for.
        *(
            (name, (t(2, 3, 64), [4]), t(2, 3, 16), of(family, batch=2, channels=3, h_out=1, w_out=16, window=4))
            for name, family in (("max_pool1d", "pooling.max.1d"), ("max_pool1d_with_indices", "pooling.max"))
        ),
        # Only the rows that are picked are read.
        ("embedding", (t(1000, 8), t(2, 3)), t(2, 3, 8), {"reads": {0: 2 * 3 * 8 * 4}}),
        (
            *("_embedding_bag", (t(1000, 8), t(6), t(2)), (t(2, 8), t(6), t(2), t(2))),
            of("embedding.bag", rows=6, cols=8) | {"reads": {0: 6 * 8 * 4}},
        ),
        ("index_select", (t(100, 8), 0, t(5)), t(5, 8), {"reads": {0: 5 * 8 * 4}}),
        ("gather", (t(100, 8), 1, t(100, 2)), t(100, 2), {"reads": {0: 200 * 4}}),
        # Copies say how much moves together; a tensor that is copied into is not read.
        ("clone", (t(2, 3, 4),), t(2, 3, 4), of("copy.contiguous", run=24)),
        ("clone", (Fake((2, 4, 3), strides=(12, 1, 4)),), t(2, 4, 3), of("copy.strided", run=1)),
        ("clone", (Fake((2, 5, 3, 4), strides=(60, 4, 20, 1)),), t(2, 5, 3, 4), of("copy.strided", run=4)),
        ("clone", (Fake((2, 3, 4), DType(2)),), t(2, 3, 4), of("copy.cast", run=24)),
        ("clone", (LYING,), LYING, of("copy.contiguous", run=256)),
        ("clone", (t(2, 8, 4, 4),), LYING, of("copy.strided", run=1)),
        ("reshape", (Fake((2, 4, 3), strides=(12, 1, 4)),), t(8, 3), of("copy.strided", run=1)),
        ("copy_", (t(4), t(4)), t(4), {"reads": {0: 0}}),
        ("copy_", (COLUMNS, t(4, 9, 8)), COLUMNS, of("copy.strided", run=1)),
        ("copy_", (t(2, 3, 4), t(4)), t(2, 3, 4), of("copy.strided", run=4)),
        # What is put into a tensor.
        ("index_add_", (TABLE, 0, INDEX, MESSAGES), TABLE, put(10, 64, 4 * 640)),
        ("index_copy_", (t(2, 50, 64), 1, t(4), t(2, 4, 64)), t(2, 50, 64), put(4, 128, 0)),
        ("index_reduce_", (TABLE, 0, INDEX, MESSAGES, "mean"), TABLE, put(10, 64, 4 * 640)),
        ("index_fill_", (TABLE, 0, INDEX, 1.0), TABLE, put(10, 64, 0)),
        ("index_put_", (TABLE, [INDEX], MESSAGES), TABLE, put(10, 64, 0)),
        ("index_put_", (TABLE, [t(3, 1), t(4)], t(3, 4)), TABLE, put(12, 1, 0)),
        ("index_put_", (t(2, 50, 64), [None, INDEX], t(2, 10, 64)), t(2, 50, 64), put(10, 128, 0)),
        ("index_put_", (TABLE, [Fake((50, 64), DType(1))], t(1)), TABLE, put(3200, 1, 0)),
        ("masked_scatter_", (TABLE, Fake((50, 64), DType(1)), t(10)), TABLE, put(3200, 1, 0)),
        ("scatter_", (TABLE, 0, t(3, 64), t(3, 64)), TABLE, put(192, 1, 0)),
        # What is added to is read.
        ("index_put_", (TABLE, [INDEX], MESSAGES, True), TABLE, put(10, 64, 4 * 640)),
        ("scatter_add_", (TABLE, 0, t(3, 64), t(3, 64)), TABLE, put(192, 1, 4 * 192)),
        ("scatter_reduce_", (TABLE, 0, t(3, 64), t(3, 64), "sum"), TABLE, put(192, 1, 4 * 192)),
    ],
)
def test_work_by_hand(name: str, args: tuple[object, ...], out: object, expected: dict[str, object]) -> None:
    formula = formula_of(f"aten::{name}")
    assert formula is not None
    result = work_of(formula, name, *args, out=out)
    told = result._asdict() | {"reads": dict(result.reads)} | dict(result.dims)
    assert {part: told[part] for part in expected} == expected


@pytest.mark.parametrize(("beta", "reads"), [(0, {0: 0}), (1, {})])
def test_what_counts_nothing_in_a_sum_is_not_read(beta: float, reads: dict[int, int]) -> None:
    formula = formula_of("aten::baddbmm")
    assert formula is not None
    assert formula(t(3, 4, 5), t(3, 4, 6), t(3, 6, 5), out=t(3, 4, 5), beta=beta).reads == reads


@pytest.mark.parametrize("name", ["relu", "aten::relu.default"])
def test_a_name_needs_a_namespace_and_no_overload(name: str) -> None:
    with pytest.raises(UsageError, match=f"'{name}' is not a qualified op name .*; write it as namespace::op"):
        cost(name)


def test_a_formula_also_serves_the_in_place_form() -> None:
    assert formula_of("aten::hardswish_") is formula_of("aten::hardswish")
    assert formula_of("aten::fill_") is not None
    assert formula_of("nobody::knows_") is None
    for untagged in ("leaky_relu", "hardtanh_", "elu_", "celu_", "selu_", "hardsigmoid_"):  # by PyTorch 2.11
        assert formula_of(f"aten::{untagged}") is not None


@pytest.mark.usefixtures("own_formulas")
def test_registering_replaces_and_is_noticed() -> None:
    before = generation()

    @cost("testing::replaced")
    def first(x: object, *, out: object) -> Work:
        return Work("other", {"numel": 1})

    @cost("testing::replaced")
    def second(x: object, *, out: object) -> Work:
        return Work("other", {"numel": 2})

    assert formula_of("testing::replaced") is second
    assert generation() == before + 2


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (12, "returned int; it must return latpred.ops.Work"),
        (Work("gem", {"m": 1}), "unknown family 'gem'; known families: attention, batch_norm"),
        (Work("gemm", {"m": 1, "n": 1, "k": 1}, macs=0.5), r"gives \{'macs': 0\.5\}; give whole numbers"),  # type: ignore[arg-type]
        (Work("other", {"numel": -1}), r"gives \{'numel': -1\}; give whole numbers"),
        (Work("other", {"numel": 1}, reads={0: -4}), r"gives \{'reads\[0\]': -4\}; give whole numbers"),
        (Work("other", {"numel": 1}, reads={"x": 4}), "gives reads={'x': 4}; give {index of an argument"),  # type: ignore[dict-item]
        (Work("other", {"numel": 1}, writes=-4), r"gives \{'writes': -4\}; give whole numbers"),
        (Work("gemm", {"m": 1, "n": 1}), r"gives dims \('m', 'n'\); 'gemm' needs \('m', 'n', 'k'\)"),
    ],
)
def test_a_malformed_result_is_explained(returned: object, message: str) -> None:
    with pytest.raises(UsageError, match=f"the cost formula of mylib::op .*{message}"):
        work_of(lambda **_: returned, "mylib::op", out=None)  # type: ignore[arg-type, return-value]
