"""What a model that cannot be traced is told: one sentence that names the op, the module and the way out."""

from __future__ import annotations

import errno
import gc
import random
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from smallmodels import Function
from torch import nn

import latpred
from latpred.errors import TimeLimitError, TraceError, UnknownOpError, UsageError
from latpred.tracing.trace_pass import ASSUMED, DRAWN


class Projected(nn.Module):
    """A function of a projection of the input."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.project, self.function = nn.Linear(4, 4), function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.project(x))


def failing(x: torch.Tensor) -> None:
    raise KeyError("nothing here")


def unanswered(x: torch.Tensor) -> None:
    raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")  # as a socket does


def without_gpu(x: torch.Tensor) -> None:
    raise AssertionError("Torch not compiled with CUDA enabled")  # as x.cuda() does


def written(x: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor that is not made of others, which the values of one are then written into."""
    return torch.zeros(x.shape, dtype=dtype).copy_(x)


def looping(y: torch.Tensor) -> Any:
    from torch._higher_order_ops.while_loop import while_loop  # imports the compiler

    return while_loop(lambda n, x: n < 3, lambda n, x: (n + 1, x.sin()), (y[0, 0], y))


DECIDE = r"values or a compiler decide what torch.ops.higher_order.{} does in module '1' \(test_errors.py:\d+\), which"
READS = r"^the model's Python reads a value that aten::{} made in module '1' \(test_errors.py:\d+\), which no trace can"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda y: y if y.sum() > 0 else -y, READS.format("gt")),
        (lambda y: y * float(y.max()), READS.format("max")),
        (lambda y: y * y.max().tolist(), READS.format("to")),
        (lambda y: torch.from_numpy(y.relu().numpy()), READS.format("relu")),
        (lambda y: y[y > 0], "the result of aten::index has a shape that depends on the values of a mask in modul"),
        (lambda y: y.nonzero(), r"the result of aten::nonzero has a shape that depends on values in module '1'"),
        (failing, r"the forward pass failed in module '1' \(test_errors.py:\d+\) at batch 1: KeyError: 'nothing here'"),
        (unanswered, "the forward pass failed in module '1' .* at batch 1: TimeoutError: .*Connection timed out"),
        (without_gpu, "the model's code asks for a GPU, which no trace needs: have it use"),
        (lambda y: y if torch.allclose(y, y) else -y, "reads a value that aten::.* made in module '1'"),
        (lambda y: torch.cov(y, aweights=y[0]), r"^aten::cov reads a value that aten::\w+ made in module '1' \("),
        (lambda y: y if written(y[0])[0].item() > 0 else -y, "reads a value"),
        (lambda y: [x := written(y), y * (x + 1).max().item()], READS.format("max")),
        (lambda y: y * written(y).tolist()[0][0], "reads a value"),
        (lambda y: y[written(y > 0, torch.bool)], "result of aten::index has a shape that depends on the values of a"),
        (lambda y: y.masked_select(written(y > 0, torch.bool)), "result of aten::masked_select has a shape that"),
        (lambda y: written(y, torch.int64).nonzero(), "result of aten::nonzero has a shape that depends on values"),
        (lambda y: y[0].repeat_interleave(written(y[0], torch.int64)), "result of aten::repeat_interleave has a"),
        (lambda y: torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,)), DECIDE.format("cond")),
        (looping, DECIDE.format("while_loop")),
    ],
)
def test_dependence_on_data(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(TraceError, match=message) as caught:
        latpred.trace(nn.Sequential(nn.Linear(4, 4), Projected(function)), torch.zeros(1, 4))
    assert "\n" not in str(caught.value)


async def awaited(x: torch.Tensor) -> torch.Tensor:
    return x


async def streamed(x: torch.Tensor) -> AsyncIterator[torch.Tensor]:
    yield x


@pytest.mark.parametrize("forward", [awaited, streamed])
@pytest.mark.filterwarnings("error")  # as of a coroutine that nobody awaited
def test_a_forward_that_is_async_is_refused(forward: Callable[..., Any]) -> None:
    with pytest.raises(TraceError, match="forward is async"):
        latpred.trace(Projected(forward), torch.zeros(1, 4))


def searched(model: nn.Module, inputs: Any) -> Any:
    return latpred.predict_many([model], inputs=inputs, device="rtx-8000")


@pytest.mark.parametrize("where", ["forward", "inputs"])
@pytest.mark.parametrize("stop", [TimeLimitError("late"), TimeoutError("late")])
@pytest.mark.parametrize("asked", [latpred.trace, searched])
def test_a_time_limit_that_ends_a_pass_is_raised(asked: Callable[..., Any], where: str, stop: Exception) -> None:
    left = {where: stop}

    def once(place: str) -> None:
        if place in left:
            raise left.pop(place)

    def inputs(batch: int) -> torch.Tensor:
        once("inputs")
        return torch.zeros(batch, 4)

    with pytest.raises(type(stop), match=r"^late$"):
        asked(nn.Sequential(nn.Linear(4, 4), Projected(lambda y: once("forward"))), inputs)


NETWORK = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))


@pytest.mark.parametrize(
    ("module", "shape", "message"),
    [
        (
            NETWORK,
            (1, 4, 8, 8),
            r"conv2d in module '0' at batch 1: RuntimeError: .*first dimension is taken as the batch",
        ),
        (NETWORK, (1, 3, 9, 9), r"linear in module '3' at batch 1: RuntimeError: .*inputs=, seq=, image="),
        (NETWORK, (1, 3, 1, 1), "conv2d in module '0'"),
        # Shortcuts around torch keep its checks.
        (nn.Linear(5, 4), (2, 4), ""),
        (nn.LayerNorm(5), (2, 4), ""),
        (nn.BatchNorm2d(5), (2, 4, 3, 3), ""),
        (nn.Conv1d(5, 4, 3), (2, 4, 9), ""),
        (nn.Bilinear(5, 5, 4), (2, 4), ""),
        (nn.Softmax(dim=3), (2, 4), ""),
    ],
)
def test_wrong_input_shapes_are_found_where_they_hurt(module: nn.Module, shape: tuple[int, ...], message: str) -> None:
    x = torch.zeros(shape)
    with pytest.raises(TraceError, match=f"the forward pass failed at aten::{message}"):
        latpred.trace(module, (x, x) if isinstance(module, nn.Bilinear) else x)


def test_an_op_whose_result_has_no_known_shape_gets_a_way_out() -> None:
    quantised = Projected(lambda y: torch.fake_quantize_per_tensor_affine(y, 0.1, 0, -128, 127))
    with pytest.raises(TraceError, match=r"_cachemask in .* Meta kernel registered; tell PyTorch the shape"):
        latpred.trace(quantised, torch.zeros(1, 4))
    for made, way in (
        (torch.Tensor.to_sparse, "with dense ones"),
        (lambda y: torch.eye(4).to_sparse_csr() @ y.T, "with dense ones"),
        (lambda y: torch.nested.nested_tensor([*y]), "padded"),
        (lambda y: y.SparseOrNested, "check the model"),
    ):
        with pytest.raises(TraceError, match=way):
            latpred.trace(Projected(made), torch.zeros(1, 4))
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1).eval()
    padded = {"src": torch.zeros(1, 4, 8), "src_key_padding_mask": torch.zeros(1, 4, dtype=torch.bool)}
    with pytest.raises(TraceError, match=r"give lengths=\[...\] in its place"):
        latpred.trace(encoder, padded)
    encoder.use_nested_tensor = False
    assert latpred.trace(encoder, padded).launches()


def test_checks_that_nothing_is_wrong_are_assumed_to_pass() -> None:
    def checked(y: torch.Tensor) -> torch.Tensor:
        shown = torch.ones_like(y, dtype=torch.bool)
        assert (shown.sum(1) == shown.numel()).shape == y.shape[:1]
        if torch.isnan(y).any() or not torch.isfinite(y).all() or not shown.sum() == shown.numel():
            raise ValueError("numbers went wrong")
        torch._check_tensor_all(y.sum() == 1.0)  # as transformers does
        if torch.isnan(y)._is_any_true():
            raise ValueError("numbers went wrong")
        return y

    assert latpred.trace(Projected(checked), torch.zeros(1, 4)).syncs() == 5


def test_assumed_answers_are_said_where_the_user_s_own_code_asks() -> None:
    def decoded(y: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            y = y + 1
            if (y.argmax(-1) == 3).all():
                break
        return y

    def drawn(y: torch.Tensor) -> torch.Tensor:  # of valid arguments, which PyTorch looks at
        return torch.distributions.Normal(y, y.exp()).rsample()

    for function, notes in ((decoded, (ASSUMED,)), (drawn, ())):
        assert latpred.trace(Projected(function), torch.zeros(1, 4)).notes == notes


@pytest.mark.parametrize("cast", [torch.Tensor.half, torch.Tensor.long])
@pytest.mark.parametrize("layer", [nn.Linear(4, 4), nn.Linear(4, 4, bias=False)])
def test_a_product_of_two_dtypes_fails_as_on_every_device(layer: nn.Linear, cast: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(TraceError, match=r"aten::linear in the model's own.* one dtype, but got torch\.\w+ and"):
        latpred.trace(Projected(lambda y: layer(cast(y))), torch.zeros(1, 4))


def test_a_forward_pass_that_draws_its_layers_is_said_to_be_one_draw() -> None:
    layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    drawn = Projected(lambda y: random.choice(layers)(y))
    assert latpred.trace(drawn, torch.zeros(1, 4)).notes == (DRAWN,)
    assert latpred.trace(Projected(lambda y: layers[0](y)), torch.zeros(1, 4)).notes == ()


def test_values_that_are_known_may_be_read() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.slope = nn.Parameter(torch.tensor(3.0)), nn.Parameter(torch.ones(1))
            self.register_buffer("repeats", torch.tensor([2, 1]))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            if ids.max().item() > 6 and float(self.scale) == 3.0 and self.slope > 0:
                return torch.ones(int(self.repeats.sum())) * self.scale
            return torch.ones(50)

    graph = latpred.trace(Reads(), torch.tensor([[7, 1], [2, 3]]))
    assert next(op for op in graph.ops if op.name == "aten::ones").dims["numel"].at(1) == 3
    assert graph.syncs() == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "int3"}, "precision 'int3' is not known; choose one of fp32, tf32, fp16, bf16"),
        ({"precision": ["fp16"]}, r"precision \['fp16'\] is not known"),
        ({"memory_format": "tiled"}, "memory_format 'tiled' is not known; choose one of contiguous, channels_last"),
        ({"target": "gpu"}, "target 'gpu' is not known; choose one of cuda, cpu"),
        ({"seq": 0}, "seq=0 is not a length"),
        ({"image": True}, "image=True is not a length"),
        ({"image": (48, 64)}, r"image=\(48, 64\) is not a length: it is one side of a square; .* inputs=torch.zeros"),
        ({"inputs": 5}, "inputs hold no tensor whose first dimension could be the batch"),
        ({}, "nothing tells what Linear takes: .*; say what it is called with: inputs=torch.zeros.*file.py:function"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        latpred.trace(nn.Linear(4, 4), **options)


@pytest.mark.parametrize("inputs", [{"rgb": torch.zeros(1, 4)}, [torch.zeros(1, 4), torch.zeros(1, 4)]])
def test_one_argument_of_many_tensors(inputs: Any) -> None:
    def first(given: Any) -> torch.Tensor:
        return (given["rgb"] if isinstance(given, dict) else given[0]).relu()

    with pytest.raises(TraceError, match=r"as one argument, put it into a tuple: inputs=\(example,\)"):
        latpred.trace(Function(first), inputs)
    assert latpred.trace(Function(first), (inputs,)).launches() == 1


def test_weights_that_lie_channels_last_and_are_priced_as_contiguous() -> None:
    layer, image = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), torch.zeros(1, 3, 8, 8)
    (note,) = latpred.trace(layer, image).notes
    assert "ask for memory_format='channels_last' (--channels-last), or give latpred.trace(" in note
    assert latpred.trace(layer, image, memory_format="channels_last").notes == ()
    assert latpred.trace(nn.Conv2d(3, 4, 1).to(memory_format=torch.channels_last), image).notes == ()


def test_a_graph_is_not_traced_again_but_checked() -> None:
    attention = Function(torch.nn.functional.scaled_dot_product_attention)
    graph = latpred.trace(attention, (torch.zeros(1, 2, 4, 8),) * 3)
    assert latpred.trace(graph) is graph
    parts = latpred.trace(graph, attention="eager")
    assert "softmax.softmax" in {op.family for op in parts.ops}
    for options in ({"precision": "fp16"}, {"memory_format": "channels_last"}, {"seq": 4}):
        with pytest.raises(UsageError, match="trace"):
            latpred.trace(graph, **options)  # type: ignore[arg-type]


def test_lazy_and_scripted_models() -> None:
    with pytest.raises(TraceError, match="lazy parameters without a shape; run it once on real inputs"):
        latpred.trace(nn.LazyLinear(4), torch.zeros(1, 4))
    with pytest.warns((DeprecationWarning, FutureWarning), match="deprecated"):
        scripted = torch.jit.script(nn.Linear(4, 4))
    for model in (scripted, nn.Sequential(scripted, nn.ReLU())):
        with pytest.raises(TraceError, match=r"TorchScript module, whose ops cannot be watched; give the nn\.Module"):
            latpred.trace(model, torch.zeros(1, 4))


def test_strict_refuses_what_no_formula_knows() -> None:
    rare, example = Function(lambda x: torch.linalg.cholesky_ex(x)[0]), torch.zeros(1, 4, 4)
    graph = latpred.trace(rare, example)
    assert graph.coverage().estimated_ops == {"aten::linalg_cholesky_ex": 1}
    (op,) = (op for op in graph.ops if op.launches)
    assert (op.family, op.estimated) == ("other", True)
    assert op.read_bytes.at(3) == 3 * 16 * 4
    said = "no cost formula knows aten::linalg_cholesky_ex, called in the model's"
    for asked in ((rare, example), (graph,)):
        with pytest.raises(UnknownOpError, match=said):
            latpred.trace(*asked, strict=True)


def test_a_model_that_cannot_be_traced_is_freed_at_once() -> None:
    gc.collect()
    gc.disable()
    try:
        model = Projected(lambda x: x if float(x.sum()) > 0 else -x)
        watched = weakref.ref(model)
        with suppress(TraceError):
            latpred.trace(model, torch.zeros(1, 4))
        assert latpred.predict_many([model], inputs=torch.zeros(1, 4), device="rtx-8000").error.notna().all()
        del model
        assert watched() is None
    finally:
        gc.enable()
