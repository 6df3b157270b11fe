"""Attention is counted in every form in which models write it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from smallmodels import Function
from torch import nn

import latpred
from latpred.errors import TraceError, UsageError
from latpred.graph.graph import ModelGraph, Op
from latpred.graph.rewrites import attended, math_attention_on_cuda, self_attention_on_cuda
from latpred.ops.families import root
from latpred.prediction.predictor import Predictor
from latpred.profile import store
from latpred.query import Options
from latpred.runtimes.source import source_of
from latpred.runtimes.torchscript import TorchScript
from latpred.tracing.tracer import TraceRecorder

Tensor = torch.Tensor
B, HEADS, TOKENS, SIZE = 1, 4, 10, 8
EXPECTED = 2 * HEADS * TOKENS**2 * SIZE


FORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "fused": F.scaled_dot_product_attention,
    "causal": partial(F.scaled_dot_product_attention, is_causal=True),
    "grouped": partial(F.scaled_dot_product_attention, enable_gqa=True),
    "products": lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2) / SIZE**0.5, -1) @ v,
    "einsum": lambda q, k, v: torch.einsum("bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1), v),
    "flat": lambda q, k, v: torch.bmm(
        torch.baddbmm(torch.zeros(1), q.flatten(0, 1), k.flatten(0, 1).mT).softmax(-1), v.flatten(0, 1)
    ),
}


def heads(batch: int = B, number: int = HEADS) -> Tensor:
    return torch.zeros(batch, number, TOKENS, SIZE)


@pytest.mark.parametrize("form", FORMS)
def test_in_every_form(form: str) -> None:
    key = value = heads(number=2 if form == "grouped" else HEADS)  # every query head counts
    assert latpred.trace(Function(FORMS[form]), (heads(), key, value)).macs() == EXPECTED


@pytest.mark.parametrize("mask", [torch.zeros(3, TOKENS), torch.ones(3, TOKENS, dtype=torch.bool)])
def test_a_mask_that_does_not_fit_the_scores_is_an_error(mask: Tensor) -> None:
    padded = Function(lambda q, mask: F.scaled_dot_product_attention(q, q, q, mask))
    with pytest.raises(TraceError, match="failed at aten::scaled_dot_product_attention"):
        latpred.trace(padded, lambda batch: (heads(batch), mask), batches=[3])


def test_masks_and_causality_are_kept_apart() -> None:
    masked = Function(lambda q, mask: F.scaled_dot_product_attention(q, q, q, attn_mask=mask))
    *made, op = latpred.trace(masked, (heads(), torch.ones(TOKENS, TOKENS) > 0)).ops
    assert (op.family, op.dims["masked"].at(1)) == ("attention", 1)
    launched = [each.name for each in made if each.launches]
    assert launched == ["aten::scalar_tensor"] * 2 + ["aten::where"], "PyTorch makes numbers of truth values"
    (op,) = latpred.trace(masked, (heads(), torch.ones(TOKENS, TOKENS))).ops
    assert (op.family, op.dims["masked"].at(1)) == ("attention", 1)
    causal = latpred.trace(Function(FORMS["causal"]), (heads(), heads(), heads()))
    (op,) = (op for op in causal.ops if op.launches)
    assert (op.family, op.dims["masked"].at(1)) == ("attention.causal", 0)


class Calling(nn.Module):
    """Calls an attention with its first input as queries and its last as keys and values."""

    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.attention, self.weights = nn.MultiheadAttention(32, 4, batch_first=True), weights

    def forward(self, *inputs: Tensor) -> Tensor:
        query, key = inputs[0], inputs[-1]
        return self.attention(query, key, key, need_weights=self.weights)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("weights", [True, False])
def test_multihead_attention_takes_its_fast_path(weights: bool) -> None:
    graph = latpred.trace(Calling(weights), torch.zeros(1, 10, 32))
    assert graph.macs() == 4 * 32 * 32 * 10 + 2 * 10 * 10 * 32
    names = [op.name for op in graph.ops if op.launches]
    products = ["aten::bmm", "aten::_softmax", "aten::bmm"]
    assert names[:5] == ["aten::mm", "aten::_transform_bias_rescale_qkv", *products]
    assert len(names) == (9 if weights else 7)


def test_autocast_makes_three_tensors_of_what_attends_to_itself() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    graph = latpred.trace(layer, torch.zeros(1, 10, 32), precision="amp-bf16", target="cpu")
    names = [op.name for op in graph.ops if op.launches]
    assert names[:11] == ["aten::to"] * 7 + ["aten::mm"] * 3 + ["aten::cat"]


class Projected(nn.Module):
    """What `_native_multi_head_attention` does on CUDA, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.packed, self.out = nn.Linear(32, 3 * 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.view(len(x), -1, 4, 8).transpose(1, 2) for part in self.packed(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))  # type: ignore[no-any-return]


@pytest.mark.parametrize("tokens", [10, 1])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_multihead_attention_is_one_kernel_between_two_products_on_cuda(tokens: int, precision: str) -> None:
    x = torch.zeros(1, tokens, 32)
    graph, alike = (latpred.trace(model, x, precision=precision) for model in (Calling(weights=False), Projected()))
    graph = self_attention_on_cuda(graph)
    for batch in (1, 4):
        assert [work(op) for op in graph.at(batch) if op.launches] == [
            work(op) for op in alike.at(batch) if op.launches
        ]
        assert graph.peak_bytes(batch) == pytest.approx(alike.peak_bytes(batch), rel=0.05)


class Broadcast(nn.Module):
    """Attention under a mask that says one thing of each query, whatever the key: its rows repeat one value."""

    def __init__(self, *, repeated: bool = True) -> None:
        super().__init__()
        self.repeated = repeated

    def forward(self, x: Tensor) -> Tensor:
        mask = (torch.arange(TOKENS, device=x.device) >= 0)[:, None].expand(TOKENS, TOKENS)
        mask, q = mask if self.repeated else mask.contiguous(), x.transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask).transpose(1, 2).contiguous()


@pytest.mark.parametrize(("precision", "casts"), [("fp32", 0), ("fp16", 5)])
def test_a_mask_whose_rows_repeat_one_value_takes_cuda_many_kernels_in_fp32(precision: str, casts: int) -> None:
    side_by_side = heads().transpose(1, 2)
    graph = latpred.trace(Broadcast(), (side_by_side,), precision=precision)
    assert [op.family for op in graph.ops].count("attention.strided_mask") == 1
    parts = [op for op in math_attention_on_cuda(graph).ops if op.launches]
    roots = [root(op.family) for op in parts]
    assert (roots.count("bmm"), roots.count("softmax"), roots.count("attention")) == (2, 1, 0)
    assert [op.family for op in parts].count("copy.cast") == casts
    assert sum(op.macs.at(1) for op in parts) == EXPECTED
    assert {op.dtype for op in parts if root(op.family) == "bmm"} == {"float32"}
    # On a CPU it is one kernel, as under any other mask, and with rows in one piece it is one on CUDA, too.
    assert Predictor(store.load("epyc-shared")).lowered(graph, "eager").ops == graph.ops
    plain = latpred.trace(Broadcast(repeated=False), (side_by_side,), precision=precision)
    assert math_attention_on_cuda(plain).ops == plain.ops
    scripted = Predictor(store.load("h100-shared")).trace(
        Broadcast(), Options(side_by_side, runtime="torchscript"), [1]
    )
    lowered = [op for op in math_attention_on_cuda(scripted).ops if op.launches]
    assert {root(op.host_class) for op in lowered} == {"node"}
    assert [root(op.family) for op in lowered].count("bmm") == 2


class Attending(nn.Module):
    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=self.causal)


@pytest.mark.parametrize(("tokens", "share"), [(1024, 0.633), (4096, 0.536), (16384, 0.507), (128, 1.0)])
@pytest.mark.parametrize("profile", ["a100", "v100", "h100-shared"])
def test_kernels_of_cuda_pass_by_what_a_causal_mask_hides(tokens: int, share: float, profile: str) -> None:
    # Shares of the time without a mask are those of Triton's tutorial on fused attention (batch 4, heads 32 x 64).
    x, predictor = torch.empty(4, 32, tokens, 64, dtype=torch.half, device="meta"), Predictor(store.load(profile))
    full, causal = (
        predictor.trace(Attending(causal=causal), Options(x, precision="fp16", attention="sdpa"), [1])
        for causal in (False, True)
    )
    assert causal.macs(batch=1) == full.macs(batch=1)  # counted as other counters do
    whole, halved = (predictor.predict(graph).compute_ms for graph in (full, causal))
    assert halved / whole == pytest.approx(share, rel=0.1)
    on_cpu = Predictor(store.load("epyc-shared"))
    assert on_cpu.lowered(causal, "eager").macs(batch=1) == full.macs(batch=1)


MANY, FEW, ONE = (2, 8, 4, 16), (2, 8, 2, 16), (2, 8, 1, 16)  # batch, tokens, heads and width


@pytest.mark.parametrize(
    ("shapes", "options", "precision", "whole"),
    [
        ([(2, 3, 8, 4, 16)] * 3, {}, "fp32", False),
        ([(8, 2, 16)] * 3, {}, "fp32", False),
        ([MANY] * 3, {}, "fp32", True),
        ([MANY, MANY, (2, 8, 4, 32)], {}, "fp32", True),
        ([MANY, MANY, MANY, (8, 4, 8)], {}, "fp32", True),
        ([MANY, FEW, FEW], {"enable_gqa": True}, "fp32", False),
        ([MANY, FEW, FEW], {"enable_gqa": True, "is_causal": True}, "fp32", False),
        ([MANY, FEW, FEW], {"enable_gqa": True}, "fp16", True),
        ([MANY, FEW, FEW, (2, 8, 1, 8)], {"enable_gqa": True}, "fp16", False),
        ([MANY, ONE, ONE], {}, "fp32", False),
        ([(1, 8, 4, 16), MANY, MANY], {}, "fp32", False),
    ],
)
def test_what_no_kernel_of_cuda_takes_is_in_parts_there(
    shapes: list[tuple[int, ...]], options: dict[str, bool], precision: str, whole: bool
) -> None:
    math = torch.ops.aten._scaled_dot_product_attention_math

    def side_by_side(attention: Callable[..., Any]) -> nn.Module:
        return Function(lambda *given: attention(*(tensor.transpose(-3, -2) for tensor in given), **options))

    def traced(attention: Callable[..., Any], target: str = "cuda") -> list[Op]:
        inputs = tuple(map(torch.zeros, shapes))
        graph = latpred.trace(side_by_side(attention), lambda _: inputs, precision=precision, target=target)
        device = "h100-shared" if target == "cuda" else "epyc-shared"
        return [op for op in Predictor(store.load(device)).lowered(graph, "eager").ops if op.launches]

    (on_a_cpu,), ran = traced(F.scaled_dot_product_attention, "cpu"), traced(F.scaled_dot_product_attention)
    if whole:
        assert [op.name for op in ran] == [on_a_cpu.name]
        return
    expected = traced(math)
    if options:  # heads come out as products lay them, and not side by side
        assert ran.pop().name == "aten::reshape"
    alike = {"aten::matmul": "aten::bmm", "aten::add": "aten::add_"}  # C++ adds in place unless it is traced
    assert [op.name for op in ran] == [alike.get(op.name, op.name) for op in expected]
    assert sum(op.macs.at(1) for op in ran) == sum(op.macs.at(1) for op in expected)


def work(op: Op) -> tuple[object, ...]:
    return op.family, op.dtype, op.dims, op.macs, op.weight_bytes, op.read_bytes, op.write_bytes


def encoder(width: int = 32, **options: bool) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(width, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 2, **options).eval()


class AcrossTheBatch(nn.Module):
    """Attends from sample to sample, then from token to token."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = encoder()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.layers(x.transpose(0, 1)).transpose(0, 1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("runtime", ["eager", "cuda-graphs", "torchscript"])
@pytest.mark.parametrize("device", ["a100", "l40s"])
def test_each_layer_of_an_encoder_has_one_kernel_of_attention_on_a_gpu(device: str, runtime: str) -> None:
    predictor = Predictor(store.load(device))
    for model, layers in ((encoder(), 2), (AcrossTheBatch(), 4)):
        graph = predictor.trace(model, Options(torch.zeros(1, 6, 32), runtime=runtime), [1, 2])
        for batch in (1, 2):
            ran = predictor.lowered(graph.exact.get(batch, graph), runtime).at(batch)
            assert [op.family for op in ran].count("attention") == layers
            assert "softmax" not in {root(op.family) for op in ran}


def test_graphs_of_single_batches_have_the_attention_that_was_asked_for() -> None:
    asked = Options(torch.zeros(1, 6, 32), attention="eager")
    predictor = Predictor(store.load("l40s"))
    graph = predictor.trace(AcrossTheBatch(), asked, [2, 4])
    assert graph.exact
    assert predictor.predict(graph, 2).setting.attention == "eager"
    assert "softmax" in {root(op.family) for op in predictor.lowered(graph.exact[2], "eager").ops}
    fused = latpred.trace(AcrossTheBatch(), torch.zeros(1, 6, 32), batches=[2, 4])
    assert attended(fused, "eager").exact[4].attention == "eager"


def test_with_pytorch_1_12_and_on_a_cpu_it_stays_in_parts() -> None:
    graph = latpred.trace(Calling(weights=False), torch.zeros(1, 10, 32))
    for device in ("v100", "epyc-shared"):
        assert Predictor(store.load(device)).lowered(graph, "eager").launches() == 7


class Masked(nn.Module):
    """An encoder whose tokens see none that come later, or not those that are padding."""

    def __init__(self, padding: bool) -> None:
        super().__init__()
        self.layers, self.padding = encoder(enable_nested_tensor=False), padding

    def forward(self, x: Tensor) -> Tensor:
        if self.padding:
            return self.layers(x, src_key_padding_mask=x[..., 0] > 0)  # type: ignore[no-any-return]
        return self.layers(x, mask=torch.ones(10, 10, device=x.device).triu(1).bool())  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "width", "options"),
    [
        (Calling(weights=True), 32, {}),
        (Calling(weights=False), 32, {"attention": "eager"}),
        (Calling(weights=False), 32, {"precision": "fp64"}),
        (encoder(48), 48, {}),  # heads of 12
        (Masked(padding=True), 32, {}),
        (Masked(padding=False), 32, {}),
    ],
    ids=["weights", "eager", "fp64", "heads of 12", "padded", "causal"],
)
def test_multihead_attention_stays_in_parts_on_cuda(model: nn.Module, width: int, options: dict[str, str]) -> None:
    graph = latpred.trace(model, torch.zeros(1, 10, width), **options)
    assert "aten::_transform_bias_rescale_qkv" in {op.name for op in graph.ops}
    assert self_attention_on_cuda(graph).ops == graph.ops
    scripted = TorchScript().trace(source_of(model.eval(), torch.zeros(1, 10, width), **options), "cuda")
    assert "aten::_transform_bias_rescale_qkv" in {op.name for op in scripted.ops}


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_replaced_layers_compute_the_same_numbers(norm_first: bool, activation: str) -> None:
    torch.manual_seed(0)
    options = {"batch_first": True, "norm_first": norm_first, "activation": activation}
    layer = nn.TransformerEncoderLayer(32, 4, 64, **options).eval()  # type: ignore[arg-type]
    x = torch.randn(2, 10, 32)
    with torch.inference_mode():
        direct = layer(x)
        with TraceRecorder():
            recorded = layer(x)
    torch.testing.assert_close(recorded, direct)


def small_bert(attention: str) -> nn.Module:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    return BertModel(BertConfig(**sizes, vocab_size=100, attn_implementation=attention)).eval()


def launched(graph: ModelGraph) -> list[str]:
    return [op.name for op in graph.at(2) if op.launches]


@pytest.mark.parametrize(("written", "asked"), [("sdpa", "eager"), ("eager", "sdpa"), ("sdpa", "sdpa")])
def test_a_model_of_transformers_computes_attention_as_asked(written: str, asked: str) -> None:
    model = small_bert(written)
    graph = latpred.trace(model, seq=16, attention=asked)
    assert launched(graph) == launched(latpred.trace(small_bert(asked), seq=16))
    assert graph.attention == asked
    assert not graph.notes
    assert model.config._attn_implementation == written, "the user's model is left alone"


def test_calls_of_fused_attention_are_taken_apart() -> None:
    inputs = (heads(2), heads(2), heads(2))
    fused = latpred.trace(Function(F.scaled_dot_product_attention), inputs)
    graph = latpred.trace(Function(F.scaled_dot_product_attention), inputs, attention="eager")
    assert launched(graph).count("aten::softmax") == 1
    assert graph.macs(2) == fused.macs(2)
    assert any("worked out from the fused calls" in note for note in graph.notes)
    assert attended(fused, "eager") == graph
    assert attended(fused, "sdpa").ops == fused.ops
    causal, masked = (
        latpred.trace(Function(partial(F.scaled_dot_product_attention, **given)), inputs, attention="eager")
        for given in ({"is_causal": True}, {"attn_mask": torch.zeros(TOKENS, TOKENS)})
    )
    assert launched(causal) == launched(masked), "either mask is added to the scores"
    for batch in (1, 2):
        times = [latpred.predict(fused, batch, device="a100", attention=how).latency_ms for how in ("sdpa", "eager")]
        assert times[0] < times[1]


def test_attention_in_parts_is_not_fused_by_latpred() -> None:
    inputs = (heads(2), heads(2), heads(2))
    with pytest.raises(UsageError, match="scaled_dot_product_attention"):
        latpred.trace(Function(FORMS["products"]), inputs, attention="sdpa")
    with pytest.raises(UsageError, match="attention='flash'"):
        latpred.trace(Function(FORMS["products"]), inputs, attention="flash")
    assert latpred.trace(nn.Linear(4, 4), torch.zeros(1, 4), attention="sdpa").launches() == 1


def test_an_option_overrides_the_attention_of_an_era() -> None:
    predictor = Predictor(store.load("rtx-8000"))
    names = {}
    for asked in (None, "eager", "sdpa"):
        graph = predictor.trace("distilbert-base-uncased", Options(seq=16, attention=asked))
        names[asked] = [op.name for op in predictor.lowered(graph, "eager").ops]
    assert names[None] == names["eager"]
    assert "aten::softmax" in names["eager"]
    assert "aten::scaled_dot_product_attention" in names["sdpa"]
