"""Ops are counted as devices run them, whatever the meta device, compilers or nobody makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from smallmodels import ARCHITECTURES, Dispatched, Function, build_small, inputs_of
from torch import nn
from torch._prims_common import suggest_memory_format

import latpred
from latpred.errors import RuntimeRefusalError, TraceError, UnknownOpError, UsageError
from latpred.graph.rewrites import math_attention_on_cuda
from latpred.ops import Work
from latpred.ops.families import FREE
from latpred.runtimes.cuda_graphs import CudaGraphs
from latpred.tracing import handlers
from latpred.tracing.meta_module import fast_paths_on_meta
from latpred.tracing.op_record import OpRecord, layout_of
from latpred.tracing.tracer import OPERATORS, TraceRecorder

Tensor = torch.Tensor


def resampled(mode: str, **options: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: F.interpolate(x, mode=mode, **options)


def assigned(*places: Any, value: float = 2.0) -> Callable[[Tensor], Tensor]:
    def assign(x: Tensor) -> Tensor:
        x = x.clone()
        for place in places:
            x[place] = value
        return x

    return assign


IMAGE, IMAGES_3D, SERIES = (2, 4, 8, 8), (2, 4, 4, 4, 4), (2, 4, 8)
CASES = {
    "nearest": (resampled("nearest", scale_factor=2), IMAGE),
    "nearest-exact": (resampled("nearest-exact", size=(5, 9)), IMAGE),
    "bilinear": (resampled("bilinear", scale_factor=2), IMAGE),
    "bilinear, aligned": (resampled("bilinear", size=(5, 9), align_corners=True), IMAGE),
    "bicubic": (resampled("bicubic", scale_factor=2), IMAGE),
    "antialias": (resampled("bilinear", scale_factor=0.5, antialias=True), IMAGE),
    "linear": (resampled("linear", scale_factor=2), SERIES),
    "nearest, 1-d": (resampled("nearest", scale_factor=2), SERIES),
    "trilinear": (resampled("trilinear", scale_factor=2), IMAGES_3D),
    "nearest, 3-d": (resampled("nearest", scale_factor=2), IMAGES_3D),
    "area": (resampled("area", scale_factor=0.5), IMAGE),
    "assignment": (assigned((slice(0, 2), slice(1, 2)), (slice(2, 3), slice(1, 2))), SERIES),
    "assignment by a mask": (assigned(torch.ones(SERIES, dtype=torch.bool)), SERIES),
    "assignment by number": (assigned((..., [0, 1]), 0, (0, 0)), SERIES),
    "kthvalue": (lambda x: x.kthvalue(2), SERIES),
    "topk": (lambda x: x.topk(2), SERIES),
    "take_along_dim": (lambda x: x.take_along_dim(torch.zeros(2, 4, 1, dtype=torch.int64), 2), SERIES),
    "numbers between two bounds": (lambda x: x * torch.randint(2, 5, (2, 4, 8)), SERIES),
}


@pytest.mark.parametrize("case", CASES)
def test_kernels_are_those_that_a_device_is_given(case: str) -> None:
    function, shape = CASES[case]
    x = torch.rand(shape)
    with torch.inference_mode(), Dispatched() as seen:
        function(x)
    quiet = {f"aten::{name}" for name in (*FREE, "slice", "select", "lift_fresh")}
    launched = [op.name for op in latpred.trace(Function(function), x).ops if op.launches]
    assert launched == [name for name, _, _ in seen.calls if name not in quiet]


@pytest.mark.parametrize("mask", [(2, 4, 8), (2, 4), (4,)])
def test_a_number_is_written_through_a_mask_as_from_pytorch_2_15_on(
    mask: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "_FILLS_MASKS", True)
    written = torch.ones(mask, dtype=torch.bool)
    place = (slice(None), written) if len(mask) == 1 else written
    ops = [op for op in latpred.trace(Function(assigned(place)), torch.zeros(SERIES)).ops if op.launches]
    assert [op.name for op in ops] == ["aten::clone", "aten::masked_fill_"]
    put = Function(lambda x: x.index_put((torch.ones(SERIES, dtype=torch.bool),), torch.scalar_tensor(2.0)))
    assert "aten::index_put" in [op.name for op in latpred.trace(put, torch.zeros(SERIES)).ops], "no assignment"


def test_distances_of_many_rows_are_a_product_also_with_a_tensor_that_forward_makes() -> None:
    graph = latpred.trace(Function(lambda x: torch.cdist(x, torch.zeros(40, 8))), torch.zeros(1, 30, 8), strict=True)
    assert graph.macs(2) == 2 * 30 * 40 * (8 + 2)  # each row with its square and a one beside it


@pytest.mark.parametrize("case", ["nearest", "bilinear", "bicubic", "linear", "trilinear"])
def test_resampling_has_a_cost(case: str) -> None:
    function, shape = CASES[case]
    (op,) = (op for op in latpred.trace(Function(function), torch.rand(shape)).ops if op.launches)
    assert op.family.startswith(f"pooling.upsample_{case}")
    assert not op.estimated
    assert op.read_bytes.at(2) == 4 * torch.Size(shape).numel()
    assert op.write_bytes.at(2) == op.read_bytes.at(2) * 2 ** (len(shape) - 2)


def test_indices_that_are_broadcast_pick_all_combinations() -> None:
    combinations = Function(lambda x: x[torch.arange(2)[:, None], torch.arange(4)[None]])
    op = next(op for op in latpred.trace(combinations, torch.zeros(1, 4, 8)).ops if op.family == "index")
    assert (op.dims["rows"].at(1), op.dims["cols"].at(1)) == (8, 8)


@pytest.mark.parametrize(
    ("function", "syncs"),
    [
        (lambda ids: ids.repeat_interleave(ids.flatten(), 1), 1),
        (lambda ids: ids.repeat_interleave(ids.flatten(), 1, output_size=8), 0),
        (lambda ids: ids.repeat_interleave(2, 1), 0),
        (lambda ids: F.one_hot(ids), 1),
        (lambda ids: F.one_hot(ids, 5), 0),
    ],
)
def test_the_host_asks_how_large_a_result_is_unless_it_is_told(function: Callable[..., Tensor], syncs: int) -> None:
    graph = latpred.trace(Function(function), lambda batch: torch.full((1, 4), 2))
    assert graph.syncs() == syncs
    lowered = CudaGraphs().schedule
    if syncs:
        with pytest.raises(RuntimeRefusalError, match="makes the host wait"):
            lowered(graph, graph.ops)
    else:
        assert len(lowered(graph, graph.ops).host_class) == 1


@pytest.mark.parametrize(
    ("precision", "target", "launches"), [("fp32", "cuda", 4), ("bf16", "cuda", 1), ("bf16", "cpu", 4)]
)
def test_experts_take_rows_one_by_one_but_in_bfloat16_on_cuda(precision: str, target: str, launches: int) -> None:
    experts = nn.ParameterList([torch.zeros(4, 16, 8)])
    ends = torch.tensor([2, 4, 6, 8], dtype=torch.int32)
    model = Function(lambda x: F.grouped_mm(x, experts[0].to(x.dtype), offs=ends))
    graph = latpred.trace(model, torch.zeros(8, 16), precision=precision, target=target, batches=[8])
    op = next(op for op in graph.at(8) if op.family == "gemm.grouped")
    assert (op.launches, op.syncs, op.macs.at(8)) == (launches, int(launches > 1), 8 * 16 * 8)
    assert math_attention_on_cuda(graph).ops == graph.ops


def test_a_value_that_is_used_as_a_tensor_is_launched() -> None:
    graph = latpred.trace(Function(lambda x: x * torch.scalar_tensor(2.0, device=x.device)), torch.zeros(1, 4))
    assert [op.name for op in graph.ops if op.launches] == ["aten::scalar_tensor", "aten::mul"]


def stream(model: nn.Module, inputs: Any, device: str) -> list[OpRecord]:
    """The ops of an inference whose floating-point activations are on a device."""

    def place(tensor: Tensor) -> Tensor:
        return torch.zeros(tensor.shape, device=device) if tensor.dtype.is_floating_point else tensor.clone()

    recorder = TraceRecorder()
    with torch.inference_mode(), fast_paths_on_meta():
        named = {key: place(tensor) for key, tensor in inputs.items()} if isinstance(inputs, dict) else {}
        positional = [] if named else [place(tensor) for tensor in inputs]
        with recorder:
            model(*positional, **named)
    return recorder.records


def seen(op: OpRecord) -> tuple[object, ...]:
    return op.name, op.host_class, op.launches, op.syncs, op.family, op.counts


def test_formats_are_those_that_pytorch_takes_tensors_to_have() -> None:
    for shape in product((1, 2, 3), repeat=4):
        for order in permutations(range(4)):
            plain = torch.empty(shape).permute(order)
            for tensor in (plain, plain.to(memory_format=torch.channels_last)):
                assert layout_of(tensor) is suggest_memory_format(tensor)


TURNED, FROZEN = (2, 16, 5), nn.Linear(16, 8).requires_grad_(False)
LINEAR, CONV, LINE = nn.Linear(16, 8), nn.Conv2d(8, 8, 3), nn.Conv1d(5, 8, 3)
RMS, RNN = nn.RMSNorm(16), nn.RNN(16, 8, batch_first=True)
BATCH_NORM = nn.BatchNorm1d(5).eval()
LYING = nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last)
POINT, DEPTHWISE = (
    conv.to(memory_format=torch.channels_last) for conv in (nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, groups=8))
)
NORMS = ["pow", "mean", "add_", "rsqrt", "mul", "mul"]
RANDOM = ["bernoulli_", "div_", "mul"]
LARGEST = ["amax", "abs", "eq", "masked_fill_", "sub", "exp_", "sum", "log_", "add_"]
SIMILAR = ["linalg_vector_norm", "clone", "linalg_vector_norm", "clone", "scalar_tensor", "clamp_min_", "clamp_min_"]
QUOTIENTS = ["div", "div", "mul", "sum"]
GUMBEL = ["exponential_", "log", "neg", "add", "div", "softmax"]
ONES = ["zeros", "scatter_"]
OVERLAPPED = ["ones", "_fft_c2r", "mul", "unfold_backward", "pow", "unfold_backward", "abs", "min", "lt", "new_ones"]


def parts(*names: str) -> list[str]:
    return [f"aten::{name}" for name in names]


@pytest.mark.parametrize(
    ("function", "shape", "cuda", "cpu"),
    [
        # A linear layer merges the rows of what lies in one piece. Of what does not it has a product, and a sum.
        (lambda x: LINEAR(x.transpose(1, 2)), TURNED, parts("reshape", "mm", "add_"), None),
        (lambda x: FROZEN(x.transpose(1, 2)), TURNED, parts("bmm", "add_"), None),
        (lambda x: LINEAR(x[..., :16]), (2, 5, 20), parts("mm", "add_"), None),
        # ATen's own code of composite ops: PyTorch's in Python repeats this input, and pads each sequence.
        (lambda x: LINEAR.bias @ x, (2, 8, 5), parts("reshape", "mv"), None),
        # Norms and convolutions copy what lies otherwise than their kernels read it.
        (lambda x: F.layer_norm(x.transpose(1, 2), (16,)), TURNED, parts("contiguous", "layer_norm"), None),
        (lambda x: F.instance_norm(x.transpose(1, 2)), TURNED, parts("contiguous", "batch_norm"), None),
        # The results of a batch norm lie in one piece, whatever its input did.
        (lambda x: BATCH_NORM(x.mT).mT.reshape_as(x.flatten()), TURNED, parts("batch_norm", "reshape_as"), None),
        (
            lambda x: F.instance_norm(x, None, None, x[0, :, 0], x[0, :, 1]),
            TURNED,
            parts("repeat", "repeat", "batch_norm"),
            None,
        ),
        (lambda x: LINE(x.transpose(1, 2)), TURNED, parts("contiguous", "conv1d"), None),
        (lambda x: CONV(x[:, :8]), (2, 16, 9, 9), parts("contiguous", "conv2d"), None),
        (lambda x: CONV(x.permute(0, 3, 1, 2)), (2, 9, 9, 8), parts("contiguous", "conv2d"), None),
        (lambda x: LYING(x.permute(0, 3, 1, 2)), (2, 9, 9, 8), parts("conv2d"), None),
        # Filters of one pixel or channel lie in one piece in both formats; their strides tell which they were given.
        *(
            (lambda x, conv=conv: conv(x).contiguous(), (2, 8, 9, 9), parts("contiguous", "conv2d", "contiguous"), None)
            for conv in (POINT, DEPTHWISE)
        ),
        (lambda x: F.group_norm(x[:, :8], 2), (2, 16, 9, 9), parts("contiguous", "group_norm"), None),
        (
            lambda x: F.group_norm(x.permute(0, 3, 1, 2), 2),
            *((2, 9, 9, 8), parts("contiguous", "group_norm"), parts("group_norm")),
        ),
        # What CUDA alone has a kernel for.
        (lambda x: RMS(x), (2, 16), parts("rms_norm"), parts(*NORMS)),
        (lambda x: RMS(x.transpose(1, 2)), TURNED, parts("contiguous", "rms_norm"), parts(*NORMS, "contiguous")),
        (
            lambda x: F.rms_norm(x.half(), (16,)),
            *((2, 16), parts("to", "rms_norm"), parts("to", "to", *NORMS[:5], "type_as")),
        ),
        (
            lambda x: F.softmax(x.half(), -1, dtype=torch.float32),
            *((2, 16), parts("to", "softmax"), parts("to", "to", "softmax")),
        ),
        (lambda x: F.dropout(x, 0.1, True), (2, 16), parts("dropout"), parts(*RANDOM)),
        (
            lambda x: F.dropout(x + 1, 0.1, True, inplace=True),
            (2, 16),
            parts("add", "bernoulli_", "div_", "mul_"),
            None,
        ),
        # A product with values of another width than keys comes out as CPUs' products lay it.
        (
            lambda x: F.scaled_dot_product_attention(x, x, x[..., :4]).transpose(1, 2).contiguous(),
            *((2, 3, 5, 8), parts("scaled_dot_product_attention"), parts("scaled_dot_product_attention", "contiguous")),
        ),
        (
            lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1).transpose(1, 2).contiguous(),
            *((2, 3, 5, 8), parts("scaled_dot_product_attention"), parts("scaled_dot_product_attention", "contiguous")),
        ),
        # A fused kernel's result lies as queries do, but CUDA's for float32, which lays heads side by side.
        (
            lambda x: F.scaled_dot_product_attention(x, x, x).transpose(1, 2).contiguous(),
            *((2, 3, 5, 8), parts("scaled_dot_product_attention"), parts("scaled_dot_product_attention", "contiguous")),
        ),
        (
            lambda x: F.scaled_dot_product_attention(*[x.bfloat16()] * 3).transpose(1, 2).contiguous(),
            *((2, 3, 5, 8), parts("to", "scaled_dot_product_attention", "contiguous"), None),
        ),
        # Layers of several steps give a look at what they computed step by step.
        (lambda x: RNN(x)[0].contiguous(), (2, 5, 16), parts("zeros", "rnn_tanh", "contiguous"), None),
        # A cast to the dtype and the format that the strides' order stands for is none, even of what lies turned.
        (lambda x: x.mT.to(x.dtype, memory_format=torch.contiguous_format).flatten(), TURNED, parts("flatten"), None),
        # What C++ makes of several ops.
        (lambda x: x[0, :, 0] @ x, (2, 5, 3), parts("bmm"), None),
        (
            lambda x: torch.hann_window(8, dtype=x.dtype),
            *((2, 8), parts("arange", "mul_", "cos_", "mul_", "add_"), None),
        ),
        (lambda x: x.roll(1), (2, 16), parts("roll"), None),
        (lambda x: x.roll((1, 2), (0, 1)), (2, 16), parts("roll", "roll"), None),
        (lambda x: F.pad(x, (1, 1), "circular"), (2, 4, 8), parts("copy_", "copy_", "copy_"), None),
        (lambda x: x.logsumexp(-1), (2, 16), parts(*LARGEST), None),
        (lambda x: F.cosine_similarity(x, x), (2, 16), parts(*SIMILAR, *QUOTIENTS), None),
        (lambda x: torch.where(x > 0, 0.0, x), (2, 16), parts("gt", "scalar_tensor", "where"), None),
        (lambda x: F.gumbel_softmax(x), (2, 16), parts(*GUMBEL), None),
        (lambda x: F.one_hot(x.argmax(-1), 3), (2, 16), parts("argmax", *ONES), parts("argmax", "aminmax", *ONES)),
        # What one code makes of other ops for all devices.
        (lambda x: torch.istft(torch.complex(x, x), 8), (2, 5, 9), parts("complex", *OVERLAPPED, "div"), None),
        # Of what has kernels nevertheless they are counted.
        (lambda x: torch.ops.aten.silu_backward(x, x), (2, 16), parts("silu_backward"), None),
        # What a mask picks is looked for first.
        (lambda x: x[torch.tensor([True, False])], (2, 16), parts("nonzero", "index"), None),
        (lambda x: x.index_put_((x > 0,), x[0]), (2, 16), parts("gt", "nonzero", "index_put_"), None),
    ],
)
def test_parts_are_those_that_a_kind_of_device_runs(
    function: Callable[[Tensor], Tensor], shape: tuple[int, ...], cuda: list[str], cpu: list[str] | None
) -> None:
    for target, expected in (("cuda", cuda), ("cpu", cpu or cuda)):
        graph = latpred.trace(Function(function), torch.zeros(shape), strict=True, batches=[2], target=target)
        assert [op.name for op in graph.at(2) if op.launches] == expected
        assert graph.target == (target if cpu else "")


@pytest.mark.parametrize("function", [torch.linalg.inv, torch.cov, lambda x: torch.istft(torch.complex(x, x), 8)])
def test_the_host_waits_where_an_op_asks_whether_something_is_wrong(function: Callable[[Tensor], Tensor]) -> None:
    assert latpred.trace(Function(lambda x: function(x[0])), torch.zeros(2, 5, 5)).syncs(2) == 1


def test_a_one_goes_where_values_say_only_within_a_known_width() -> None:
    graph = latpred.trace(Function(lambda x: F.one_hot(x.argmax(-1), 3)), torch.zeros(2, 16), target="cpu")
    assert (graph.syncs(2), graph.at(2)[-1].write_bytes.at(2)) == (2, 2 * 8)
    nowhere = Function(lambda x: F.one_hot(x[:0].argmax(-1), 3))
    assert latpred.trace(nowhere, torch.zeros(2, 16), target="cpu").syncs(2) == 0
    with pytest.raises(TraceError, match="aten::one_hot reads a value"):
        latpred.trace(Function(lambda x: F.one_hot(x.argmax(-1))), torch.zeros(2, 16))


def test_what_a_mask_picks_makes_the_host_wait_once() -> None:
    keep = torch.tensor([[True, False, True], [True, True, True]])
    graph = latpred.trace(Function(lambda x, keep: x[keep]), (torch.zeros(2, 3, 4), keep))
    assert graph.syncs(2) == 1
    assert [op.host_class for op in graph.at(2)] == ["sort.nested.nonzero", "index.index"]
    assert graph.at(2)[-1].write_bytes.at(2) == 5 * 4 * 4


def test_a_graph_for_another_kind_of_device_is_refused() -> None:
    norm, x = nn.RMSNorm(64), torch.zeros(1, 64)
    graph = latpred.trace(norm, x, target="cpu")
    assert latpred.predict(graph, device="epyc-shared") == latpred.predict(norm, inputs=x, device="epyc-shared")
    with pytest.raises(UsageError, match="trace the model for cuda: target='cuda'"):
        latpred.predict(graph, device="a100")


@pytest.mark.parametrize("inplace", [True, False])
def test_dropout_that_is_off_is_dispatched(inplace: bool) -> None:
    (op,) = latpred.trace(nn.Dropout(inplace=inplace), torch.zeros(1, 4)).ops
    assert (op.host_class, op.launches) == ("free.dropout", 0)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("batch", [1, 2])
def test_meta_and_cpu_issue_the_same_ops(name: str, batch: int) -> None:
    inputs = inputs_of(name, batch)
    real = [seen(op) for op in stream(build_small(name, "cpu"), inputs, "cpu")]
    meta = [seen(op) for op in stream(build_small(name, "meta"), inputs, "meta")]
    if name == "longformer":
        # Writing a number through a mask makes a tensor of it: on the device, except where the device is the CPU.
        real, meta = ([row for row in rows if row[0] != "aten::scalar_tensor"] for rows in (real, meta))
    assert meta == real


@pytest.fixture(scope="module")
def library() -> Iterator[torch.library.Library]:
    made = torch.library.Library("latpred_testing", "DEF")
    made.define("fused_mlp(Tensor x, Tensor w1, Tensor w2) -> Tensor")
    made.define("whole(Tensor x) -> Tensor")
    made.impl("fused_mlp", lambda x, w1, w2: torch.empty_like(x), "Meta")
    made.impl("whole", lambda x: torch.relu(x) + 1, "CompositeImplicitAutograd")
    yield made
    made._destroy()


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.zeros(8, 32))
        self.w2 = nn.Parameter(torch.zeros(32, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.latpred_testing.fused_mlp(x, self.w1, self.w2)  # type: ignore[no-any-return]


@pytest.mark.usefixtures("own_formulas")
def test_a_formula_makes_a_custom_op_known(library: torch.library.Library) -> None:
    model, example = Mlp(), torch.zeros(1, 5, 8)
    unknown = latpred.trace(model, example)
    assert unknown.coverage().launches == 0.0
    assert unknown.bytes(2) == 2 * 8 * 32 * 4 + 2 * (2 * 5 * 8 * 4)
    with pytest.raises(UnknownOpError, match=r"register one with @latpred.cost\('latpred_testing::fused_mlp'\)"):
        latpred.trace(model, example, strict=True)

    @latpred.cost("latpred_testing::fused_mlp")
    def fused_mlp(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, *, out: torch.Tensor) -> Work:
        m, (k, n) = x.shape[0] * x.shape[1], w1.shape
        return Work("gemm.fused_mlp", {"m": m, "n": n, "k": k}, macs=2 * m * n * k)

    known = latpred.trace(model, example, strict=True)
    assert known.macs(3) == 3 * 5 * 2 * 8 * 32
    (op,) = (op for op in known.ops if op.launches)
    assert (op.family, op.host_class, op.module) == ("gemm.fused_mlp", "gemm.fused_mlp", "")
    assert op.weight_bytes.at(3) == 2 * 8 * 32 * 4


@pytest.mark.usefixtures("own_formulas")
def test_a_composite_op_falls_apart_until_a_formula_says_that_it_is_one_kernel(library: torch.library.Library) -> None:
    whole_op = Function(lambda x: torch.ops.latpred_testing.whole(x))
    parts = latpred.trace(whole_op, torch.zeros(1, 4))
    assert [op.name for op in parts.ops if op.launches] == ["aten::relu", "aten::add"]
    assert [op.host_class for op in parts.ops if op.launches] == ["elementwise.relu", "elementwise.nested.add"]

    @latpred.cost("latpred_testing::whole")
    def whole(x: torch.Tensor, *, out: torch.Tensor) -> Work:
        return Work("elementwise.whole", {"numel": x.shape[0] * x.shape[1], "operands": 1})

    kept = latpred.trace(whole_op, torch.zeros(1, 4))
    assert [op.name for op in kept.ops if op.launches] == ["latpred_testing::whole"]


@pytest.mark.usefixtures("own_formulas")
def test_a_wrong_formula_is_named(library: torch.library.Library) -> None:
    @latpred.cost("latpred_testing::fused_mlp")
    def wrong(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, *, out: torch.Tensor) -> Work:
        return Work("gemm", {"m": 1})

    with pytest.raises(UsageError, match=r"the cost formula of latpred_testing::fused_mlp gives dims \('m',\)"):
        latpred.trace(Mlp(), torch.zeros(1, 5, 8))

    @latpred.cost("latpred_testing::fused_mlp")
    def reading(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, *, out: torch.Tensor) -> Work:
        return Work("gemm", {"m": 1, "n": 1, "k": 1}, reads=4)  # type: ignore[arg-type]

    with pytest.raises(UsageError, match=r"gives reads=4; give \{index of an argument: bytes\}"):
        latpred.trace(Mlp(), torch.zeros(1, 5, 8))
    with pytest.raises(UsageError, match="is not a qualified op name"):
        latpred.cost(torch.ops.aten.mm)  # type: ignore[arg-type]


def turned_in_place(x: Tensor) -> Tensor:
    """Two tensors of one shape, each given another one in place."""
    parts = [x * factor for factor in (2, 3)]
    return torch.cat([part.unsqueeze_(1).transpose_(0, 1) for part in parts], 1)


def test_views_in_place_change_the_shape_each_time_and_launch_nothing() -> None:
    for _ in range(2):  # what was learnt in one trace serves the next
        graph = latpred.trace(Function(turned_in_place), torch.zeros(2, 8))
        assert [op.name for op in graph.ops if op.launches] == ["aten::mul", "aten::mul", "aten::cat"]
        assert not any(op.estimated for op in graph.ops)


def test_a_result_that_is_given_is_written_and_neither_read_nor_made() -> None:
    def added(x: Tensor) -> Tensor:
        made = torch.empty_like(x)
        return torch.add(x, x, out=made)

    add = next(op for op in latpred.trace(Function(added), torch.zeros(1, 64)).ops if op.name == "aten::add")
    assert (add.read_bytes.at(2), add.write_bytes.at(2), add.live_bytes.at(2)) == (2 * 2 * 256, 2 * 256, 2 * 2 * 256)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_sequences_of_unequal_lengths_are_packed(kind: type[nn.RNNBase]) -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = kind(8, 16, 2, batch_first=True, bidirectional=True), nn.Linear(32, 4)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            out, _ = nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)
            return self.head(out)  # type: ignore[no-any-return]

    model = Packed()
    graph = latpred.trace(model, lambda batch: (torch.zeros(batch, 9, 8), torch.tensor([9] + [5] * (batch - 1))))
    (layer,) = (op for op in graph.ops if op.family.startswith("rnn"))
    weights = sum(weight.numel() for weight in model.layer.parameters() if weight.dim() == 2)
    assert layer.macs.at(2) == (9 + 5) * weights
    assert layer.dims["steps"].at(2) == 9
    assert graph.macs(2) == (9 + 5) * weights + 2 * 9 * 32 * 4
    assert not any(op.estimated for op in graph.ops)


def test_a_generator_is_run_to_its_end() -> None:
    class Yielding(nn.Module):
        def forward(self, x: Tensor) -> Iterator[Tensor]:
            for _ in range(2):
                yield x + 1

    assert latpred.trace(Yielding(), torch.zeros(1, 4)).launches() == 2


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_runs_as_products_where_nothing_compiles_it() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    def attend(x: Tensor) -> Any:
        return flex_attention(x, x, x, score_mod=lambda score, batch, head, query, key: score + (query - key))

    graph = latpred.trace(Function(attend), torch.zeros(1, 2, 8, 16))
    assert (graph.macs(3), graph.notes) == (2 * 3 * 2 * 8 * 8 * 16, (OPERATORS,))
    assert [op.name for op in graph.ops].count("aten::bmm") + [op.name for op in graph.ops].count("aten::matmul") == 2


def test_a_large_cache_that_a_forward_pass_makes_takes_no_memory() -> None:
    def cached(tokens: Tensor) -> Tensor:
        made = torch.zeros(tokens.shape[0], 1 << 12, 1 << 20, device=tokens.device)  # 16 GiB for each of a batch
        return torch.cat([made, torch.empty_like(made)], 1) + tokens[:, :, None]

    graph = latpred.trace(Function(cached), torch.zeros(1, 1, dtype=torch.int64))
    assert [(op.family, op.write_bytes.at(3) >> 30) for op in graph.ops if op.launches][:2] == [
        ("factory", 48),
        ("cat", 96),
    ]
