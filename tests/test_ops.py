"""Cost formulas on bare shapes against numbers worked out by hand, and how they are registered."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from latpred.errors import UsageError
from latpred.ops import Work, checked, cost, formula_of, generation
from latpred.ops.families import host_class, nested_class, no_launch_class


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


def work(name: str, *args: object, out: object, **options: object) -> Work:
    formula = formula_of(name)
    assert formula is not None
    return checked(formula(*args, out=out, **options), name)


def t(*shape: int) -> Fake:
    return Fake(shape)


LINE, MAP, WIDE, QUERY, KEY = t(1, 4, 99), t(1, 4, 8, 8), t(1, 8, 8, 8), t(2, 4, 10, 8), t(2, 4, 12, 8)


@pytest.mark.parametrize(
    ("name", "args", "out", "family", "macs"),
    [
        ("aten::linear", (t(2, 5, 8), t(3, 8)), t(2, 5, 3), "gemm", 2 * 5 * 8 * 3),
        ("aten::mm", (t(4, 6), t(6, 5)), t(4, 5), "gemm", 4 * 6 * 5),
        ("aten::addmm", (t(5), t(4, 6), t(6, 5)), t(4, 5), "gemm", 4 * 6 * 5),
        ("aten::bmm", (t(3, 4, 6), t(3, 6, 5)), t(3, 4, 5), "bmm", 3 * 4 * 6 * 5),
        ("aten::baddbmm", (t(3, 4, 5), t(3, 4, 6), t(3, 6, 5)), t(3, 4, 5), "bmm", 3 * 4 * 6 * 5),
        ("aten::matmul", (t(2, 3, 4, 6), t(2, 3, 6, 5)), t(2, 3, 4, 5), "bmm", 6 * 4 * 6 * 5),
        ("aten::matmul", (t(2, 3, 4), t(4, 5)), t(2, 3, 5), "gemm", 2 * 3 * 4 * 5),
        ("aten::mv", (t(4, 6), t(6)), t(4), "gemm", 24),
        ("aten::_grouped_mm", (t(10, 6), t(4, 6, 5)), t(10, 5), "gemm.grouped", 10 * 6 * 5),
        ("aten::conv2d", (t(2, 3, 8, 8), t(4, 3, 3, 3)), t(2, 4, 6, 6), "conv", 2 * 4 * 36 * 27),
        ("aten::conv2d", (t(1, 4, 8, 8), t(4, 1, 3, 3), None, 1, 1, 1, 4), t(1, 4, 8, 8), "conv_depthwise", 4 * 64 * 9),
        ("aten::conv2d", (MAP, t(8, 1, 3, 3), None, 1, 1, 1, 4), WIDE, "conv_depthwise.multiplied", 8 * 64 * 9),
        ("aten::conv2d", (t(1, 4, 1, 1), t(4, 1, 5, 5), None, 1, 2, 1, 4), t(1, 4, 1, 1), "conv_depthwise.padded", 100),
        ("aten::conv2d", (t(1, 4, 2, 2), t(4, 1, 5, 5), None, 1, 2, 1, 4), t(1, 4, 2, 2), "conv_depthwise", 400),
        ("aten::conv1d", (LINE, t(4, 1, 13), None, 1, 6, 1, 4), LINE, "conv_depthwise", 4 * 99 * 13),
        ("aten::conv1d", (LINE, t(4, 1, 15), None, 1, 7, 1, 4), LINE, "conv_depthwise.padded", 4 * 99 * 15),
        ("aten::pad", (t(2, 4, 8), (1, 1), "reflect"), t(2, 4, 10), "copy.pad.reflect.1d", 0),
        ("aten::pad", (t(4, 8, 8), (1, 1, 1, 1), "reflect"), t(4, 10, 10), "copy.pad.reflect", 0),
        ("aten::conv2d", (t(1, 4, 8, 8), t(6, 2, 3, 3), None, 1, 1, 1, 2), t(1, 6, 8, 8), "conv_grouped", 6 * 64 * 18),
        ("aten::conv1d", (t(2, 3, 10), t(4, 3, 5)), t(2, 4, 6), "conv", 2 * 4 * 6 * 15),
        ("aten::conv_transpose2d", (t(1, 3, 4, 4), t(3, 2, 2, 2)), t(1, 2, 5, 5), "conv_transpose", 3 * 16 * 8),
        ("aten::scaled_dot_product_attention", (QUERY, KEY, KEY), QUERY, "attention", 2 * 4 * 10 * 12 * (8 + 8)),
    ],
)
def test_products(name: str, args: tuple[object, ...], out: Fake, family: str, macs: int) -> None:
    result = work(name, *args, out=out)
    assert (result.family, result.macs) == (family, macs)


def test_a_one_dimensional_convolution_has_height_one() -> None:
    dims = work("aten::conv1d", t(2, 3, 10), t(4, 3, 5), None, [2], out=t(2, 4, 3)).dims
    assert (dims["h_in"], dims["w_in"], dims["h_out"], dims["kernel_h"], dims["kernel_w"]) == (1, 10, 1, 1, 5)
    assert dims["stride"] == 2


def test_lstm_meets_every_weight_at_every_step() -> None:
    params = [t(64, 8), t(64, 16), t(64), t(64)]
    args = (t(3, 10, 8), [t(1, 3, 16), t(1, 3, 16)], params, True, 1, 0.0, False, False, True)
    result = work("aten::lstm", *args, out=(t(3, 10, 16),))
    assert result.macs == 3 * 10 * (64 * 8 + 64 * 16)
    assert dict(result.dims) == {
        "batch": 3,
        "steps": 10,
        "hidden": 16,
        "inputs": 8,
        "layers": 1,
        "calls": 10,
        "reread": 10 * 4 * 16 * 16,
        "weights": 64 * 8 + 64 * 16,
    }


ROWS, COLUMNS, KNOWN = t(2, 5, 8), Fake((4, 9, 8), strides=(72, 1, 9)), t(5)
HEADS, WIDER, TURNED = t(3, 2, 9, 8), t(3, 2, 9, 16), Fake((3, 2, 9, 8), strides=(144, 72, 1, 9))
ATTEND = "aten::scaled_dot_product_attention"


@pytest.mark.parametrize(
    ("name", "args", "out", "rows", "cols"),
    [
        ("layer_norm", (ROWS, [8]), ROWS, 10, 8),
        ("group_norm", (t(2, 6, 4, 4), 3), t(2, 6, 4, 4), 6, 32),
        ("softmax", (ROWS, 1), ROWS, 16, 5),
        ("mean", (ROWS, [1]), t(2, 8), 16, 5),
        ("topk", (t(4, 9), 2, 1), (t(4, 2), t(4, 2)), 4, 9),
    ],
)
def test_norms_softmax_and_reductions_split_rows_and_columns(
    name: str, args: tuple[object, ...], out: object, rows: int, cols: int
) -> None:
    assert dict(work(f"aten::{name}", *args, out=out).dims) == {"rows": rows, "cols": cols}


@pytest.mark.parametrize(
    ("name", "args", "family"),
    [
        # A softmax over another dimension than the last, and of rows that lie in pieces, which it copies.
        ("aten::softmax", (t(4, 9), -1), "softmax.softmax"),
        ("aten::softmax", (t(4, 9, 1), 1), "softmax.softmax"),
        ("aten::softmax", (t(4, 9, 32), 1), "softmax.softmax.across"),
        ("aten::softmax", (t(4, 9, 2, 12), 1), "softmax.softmax.across.ragged"),
        ("aten::softmax", (COLUMNS, -1), "softmax.softmax.strided"),
        ("aten::softmax", (COLUMNS, 1), "softmax.softmax.across.ragged"),
        # Attention is fused where its mask has two or four dimensions, values are as wide as keys, rows in one piece.
        *((ATTEND, (HEADS, HEADS, HEADS, *mask), "attention") for mask in ((), (t(9, 9),), (t(1, 1, 9, 9),))),
        (ATTEND, (HEADS, HEADS, HEADS, t(2, 9, 9)), "attention.unfused"),
        (ATTEND, (HEADS, HEADS, WIDER), "attention.unfused"),
        (ATTEND, (TURNED, HEADS, HEADS), "attention.unfused"),
        (ATTEND, (HEADS, TURNED, HEADS), "attention.unfused"),
        (ATTEND, (HEADS, HEADS, TURNED), "attention.unfused"),
        # Statistics of the values themselves.
        ("aten::batch_norm", (ROWS, KNOWN, None, None, None, True, 0.0, 1e-6, True), "batch_norm.training"),
        ("aten::batch_norm", (ROWS, KNOWN, KNOWN, KNOWN, KNOWN, False, 0.1, 1e-5, True), "batch_norm"),
        ("aten::_native_batch_norm_legit_no_training", (ROWS, *[KNOWN] * 4, 1.0, 1e-5), "batch_norm"),
    ],
)
def test_kernels_of_their_own(name: str, args: tuple[Any, ...], family: str) -> None:
    assert work(name, *args, out=args[0]).family == family


def test_maps_that_lie_channels_last_have_kernels_of_their_own() -> None:
    lying = Fake((2, 8, 4, 4), strides=(128, 1, 32, 8))
    out = t(2, 8, 2, 2)
    for maps, family in ((t(2, 8, 4, 4), ""), (lying, ".channels_last"), (t(2, 8, 1, 1), "")):
        assert work("aten::max_pool2d", maps, [2, 2], out=out).family == f"pooling.max{family}"
        assert work("aten::upsample_bilinear2d", maps, out=out).family == f"pooling.upsample_bilinear{family}"
        if maps.shape[2] > 1:
            convolution = work("aten::conv2d", maps, t(8, 1, 3, 3), None, 2, 1, 1, 8, out=out)
            assert convolution.family == f"conv_depthwise{family}"


def test_only_the_rows_that_are_picked_are_read() -> None:
    result = work("aten::embedding", t(1000, 8), t(2, 3), out=t(2, 3, 8))
    assert dict(result.reads) == {0: 2 * 3 * 8 * 4}
    assert dict(work("aten::index_select", t(100, 8), 0, t(5), out=t(5, 8)).reads) == {0: 5 * 8 * 4}
    assert dict(work("aten::gather", t(100, 8), 1, t(100, 2), out=t(100, 2)).reads) == {0: 200 * 4}


@pytest.mark.parametrize(
    ("source", "family", "run"),
    [
        (Fake((2, 3, 4)), "copy.contiguous", 24),
        (Fake((2, 4, 3), strides=(12, 1, 4)), "copy.strided", 1),
        (Fake((2, 5, 3, 4), strides=(60, 4, 20, 1)), "copy.strided", 4),
        (Fake((2, 3, 4), DType(2)), "copy.cast", 24),
    ],
)
def test_copies_say_how_much_moves_together(source: Fake, family: str, run: int) -> None:
    result = work("aten::clone", source, out=Fake(source.shape, DType(4) if family == "copy.cast" else source.dtype))
    assert (result.family, result.dims["run"]) == (family, run)


def test_copying_into_a_tensor_does_not_read_it() -> None:
    assert work("aten::copy_", t(4), t(4), out=t(4)).reads == {0: 0}


def test_pooling_windows() -> None:
    assert work("aten::max_pool2d", t(2, 3, 8, 8), [3, 3], out=t(2, 3, 4, 4)).dims["window"] == 9
    assert work("aten::max_pool2d", t(2, 3, 8, 8), [3, 3], out=t(2, 3, 4, 4)).family == "pooling.max"
    dims = work("aten::adaptive_avg_pool2d", t(2, 3, 7, 7), [1, 1], out=t(2, 3, 1, 1)).dims
    assert dict(dims) == {"batch": 2, "channels": 3, "h_out": 1, "w_out": 1, "window": 49}


@pytest.mark.parametrize(("op", "family"), [("max_pool1d", "max.1d"), ("max_pool1d_with_indices", "max")])
def test_the_maximum_along_a_line_is_a_kernel_of_its_own_unless_its_place_is_asked_for(op: str, family: str) -> None:
    result = work(f"aten::{op}", t(2, 3, 64), [4], out=t(2, 3, 16))
    assert result.family == f"pooling.{family}"
    assert dict(result.dims) == {"batch": 2, "channels": 3, "h_out": 1, "w_out": 16, "window": 4}


def test_dispatch_classes_go_from_general_to_special() -> None:
    assert host_class("linear", "gemm") == "gemm.linear"
    assert host_class("add_", "elementwise.add") == "elementwise.add"
    assert host_class("batch_norm", "batch_norm") == "norm.batch_norm"
    assert nested_class(host_class("bmm", "bmm")) == "bmm.nested.bmm"
    assert no_launch_class("transpose", view=True) == "view.transpose"
    assert no_launch_class("empty_like", view=False) == "factory.empty_like"
    assert no_launch_class("dropout", view=False) == "free.dropout"
    assert host_class("_local_scalar_dense", "sync") == "sync.item"


def test_a_name_needs_a_namespace() -> None:
    with pytest.raises(UsageError, match=r"'relu' is not a qualified op name; write it as namespace::op"):
        cost("relu")


def test_a_formula_also_serves_the_in_place_form() -> None:
    assert formula_of("aten::hardswish_") is formula_of("aten::hardswish")
    assert formula_of("aten::fill_") is not None
    assert formula_of("nobody::knows_") is None


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
        (Work("gemm", {"m": 1, "n": 1}), r"gives dims \('m', 'n'\); 'gemm' needs \('m', 'n', 'k'\)"),
    ],
)
def test_a_malformed_result_is_explained(returned: object, message: str) -> None:
    with pytest.raises(UsageError, match=f"the cost formula of mylib::op .*{message}"):
        checked(returned, "mylib::op")


def test_a_leaf_family_takes_its_root_s_dims() -> None:
    made = Work("gemm.sparse", {"m": 1, "n": 2, "k": 3}, macs=6)
    assert checked(made, "mylib::op") is made


INDEX, TABLE, MESSAGES = t(10), t(50, 64), t(10, 64)


@pytest.mark.parametrize(
    ("name", "args", "rows", "cols", "reads"),
    [
        ("index_add_", (TABLE, 0, INDEX, MESSAGES), 10, 64, 4 * 640),
        ("index_copy_", (t(2, 50, 64), 1, t(4), t(2, 4, 64)), 4, 128, 0),
        ("index_put_", (TABLE, [INDEX], MESSAGES), 10, 64, 0),
        ("index_put_", (TABLE, [t(3, 1), t(4)], t(3, 4)), 12, 1, 0),
        ("index_put_", (t(2, 50, 64), [None, INDEX], t(2, 10, 64)), 10, 128, 0),
        ("index_put_", (t(50, 64), [Fake((50, 64), DType(1))], t(1)), 3200, 1, 0),
        ("scatter_", (TABLE, 0, t(3, 64), t(3, 64)), 192, 1, 0),
    ],
)
def test_what_is_put_into_a_tensor(name: str, args: tuple[Any, ...], rows: int, cols: int, reads: int) -> None:
    result = work(f"aten::{name}", *args, out=args[0])
    assert (result.dims["rows"], result.dims["cols"]) == (rows, cols)
    assert (result.writes, result.reads[0]) == (4 * rows * cols, reads)
