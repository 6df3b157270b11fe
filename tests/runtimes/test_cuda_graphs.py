"""CUDA graphs without a GPU: what would be captured, what is refused, and on which devices one can ask for them."""

from __future__ import annotations

import pytest
import torch
from factories import add, device, dispatch, linear, profile
from factories import graph as make_graph

import latpred
from latpred import runtimes
from latpred.errors import DeviceError, RuntimeRefusalError, UsageError
from latpred.prediction.predictor import Predictor
from latpred.runtimes import cuda_graphs, lowering
from latpred.runtimes.cuda_graphs import CudaGraphs
from latpred.runtimes.source import source_of


def capturing() -> bool:
    """Whether a stream is being captured; a build without CUDA cannot be asked."""
    try:
        return torch.cuda.is_current_stream_capturing()
    except RuntimeError:
        return False


class Checking(torch.nn.Module):
    """Looks at its input's values unless it is being captured, as some models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        if not capturing() and keep.sum().item() == keep.numel():
            return self.layer(x)
        return self.layer(x).masked_fill(keep == 0, 0.0)


class Waiting(Checking):
    """Looks at its input's values whatever happens."""

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * float(keep.sum().item())


INPUTS = (torch.randn(2, 8), torch.ones(2, 1, dtype=torch.long))


def test_the_eager_walk_serves_where_nobody_waits() -> None:
    graph = latpred.trace(torch.nn.Linear(8, 8), torch.zeros(1, 8))
    walked = lowering.trace_for_runtime(torch.nn.Linear(8, 8), torch.zeros(1, 8), runtime="cuda-graphs", target="cuda")
    assert (walked.ops, walked.runtime, walked.target, walked.notes) == (graph.ops, "cuda-graphs", "cuda", ())
    schedule = CudaGraphs().lower(walked, 4)
    assert schedule.host_class == ("replay",)
    assert schedule.kernel_family == ("gemm",)


def test_a_model_is_walked_as_it_is_while_captured() -> None:
    eager = latpred.trace(Checking(), INPUTS)
    assert eager.syncs() == 1
    walked = lowering.trace_for_runtime(Checking(), INPUTS, runtime="cuda-graphs", target="cuda")
    assert walked.syncs() == 0
    assert "aten::masked_fill" in [op.name for op in walked.ops]
    assert len(CudaGraphs().lower(walked, 2).kernel_step) == walked.launches(2)
    assert not capturing()


def test_a_model_that_waits_is_refused_by_name() -> None:
    walked = lowering.trace_for_runtime(Waiting(), INPUTS, runtime="cuda-graphs", target="cuda")
    with pytest.raises(RuntimeRefusalError, match=r"cannot capture Waiting: aten::\w+ makes the host wait.*eager"):
        CudaGraphs().lower(walked, 2)


def test_an_eager_walk_that_waits_may_be_wrong_about_it() -> None:
    graph = latpred.trace(Checking(), INPUTS)
    predictor = Predictor(profile(runtimes={"eager": dispatch(), "cuda-graphs": dispatch()}))
    with pytest.raises(RuntimeRefusalError, match="or pass the model itself instead of its walk"):
        predictor.predict(graph, 2, runtime="cuda-graphs")


def test_a_graph_lowers_once_per_form() -> None:
    net, runtime = make_graph(linear(), add()), CudaGraphs()
    assert runtime.lower(net, 2) is runtime.lower(net, 64)
    assert runtime.lower(net, 1) is runtime.lower(net, 2)


def test_overhead_is_one_replay_and_gaps_are_those_of_a_graph() -> None:
    costs = {"eager": dispatch(), "cuda-graphs": dispatch(costs_us={"replay": 7.0}, fixed_us=3.0, gap_us=0.25)}
    predictor = Predictor(profile(device(gap_us=1.0), runtimes=costs))
    net = make_graph(*[linear(rows=1, width=10)] * 40)
    eager, replayed = (predictor.predict(net, 1, runtime=name) for name in ("eager", "cuda-graphs"))
    assert replayed.overhead_ms * 1e3 == pytest.approx(10.0)
    assert eager.compute_ms - replayed.compute_ms == pytest.approx(40 * 0.75e-3)
    assert replayed.latency_ms < eager.latency_ms


def test_a_cpu_has_no_graphs() -> None:
    layer, x = torch.nn.Linear(8, 8), torch.zeros(1, 8)
    message = r"cuda-graphs needs a CUDA device; ask for --device simulated or.*eager"
    with pytest.raises(UsageError, match=message):
        lowering.trace_for_runtime(layer, x, runtime="cuda-graphs", target="cpu")
    predictor = Predictor(profile(device(kind="cpu", asynchronous=False)))
    with pytest.raises(UsageError, match=message):
        predictor.predict(latpred.trace(layer, x), 1, runtime="cuda-graphs")
    assert lowering.unsuited("cuda-graphs", "cuda") is None
    assert lowering.unsuited("eager", "cpu") is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_nothing_is_built_without_cuda() -> None:
    assert "no CUDA device here" in str(runtimes.get("cuda-graphs").available())
    with pytest.raises(DeviceError, match="CUDA graphs are captured on CUDA devices, not on cpu"):
        CudaGraphs().build(torch.nn.Linear(8, 8), (torch.zeros(1, 8),))


def test_the_reason_of_a_failed_capture_is_the_first_one() -> None:
    first = RuntimeError("CUDA error: operation not permitted when stream is capturing\nfor debugging ...")
    last = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    last.__context__ = first
    assert cuda_graphs._forbidden(last) == "CUDA error: operation not permitted when stream is capturing"
    assert cuda_graphs._forbidden(RuntimeError("CUDA error: an illegal memory access")) is None


def test_a_capture_that_ran_out_of_memory_is_not_taken_for_one_that_is_forbidden() -> None:
    first = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    last = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    last.__context__ = first
    assert cuda_graphs._of_memory(last) is first
    assert cuda_graphs._of_memory(RuntimeError("CUDA error: operation not permitted when stream is capturing")) is None


def test_what_a_source_says_of_itself_stays() -> None:
    source = source_of(Checking(), INPUTS)
    walked = CudaGraphs().walk(source, "cuda")
    assert (walked.model, walked.parameter_bytes) == (source.graph.model, source.graph.parameter_bytes)
