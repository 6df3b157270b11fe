"""CUDA graphs: the kernels of an eager forward pass, captured once and launched together ever after.

What is captured is what the model does while it is captured, which may differ from what it does otherwise: transformers
leaves out checks that read values back. Inputs stay where they lay when the graph was captured: replaying copies none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from latpred import host
from latpred.errors import DeviceError, RuntimeRefusalError, chain_of
from latpred.graph.graph import ModelGraph, Op, Schedule
from latpred.runtimes import Eager, one_step_per_op
from latpred.runtimes.base import REPLAY, graph_in
from latpred.runtimes.source import Source, device_of
from latpred.sandbox.own_thread import replaced

WARM_UPS = 3  # calls before a capture: libraries set themselves up in the first ones, which a graph cannot hold
VERSION = "4"  # of what is traced; graphs of another one are made again
# What CUDA and PyTorch say of what capturing forbids; Dynamo's errors name options with words of that kind.
OF_CAPTURE = re.compile(r"\b(un)?captur(e|ing)\b|\bbe captured\b|StreamCapture", re.IGNORECASE)
NO_CUDA = "there is no CUDA device here; predict with --device simulated or with the profile of a GPU"
# What decides while it runs how large its result is: by name, without the namespace.
DATA_DEPENDENT = frozenset(
    {
        *("nonzero", "masked_select", "bincount", "histc"),
        *("_unique", "_unique2", "unique_dim", "unique_consecutive"),
        *("NonZero", "Unique", "Compress"),
    }
)
# What onnxruntime captures no graph with.
_UNCAPTURED = {
    **dict.fromkeys(("If", "Loop", "Scan"), "is control flow"),
    **dict.fromkeys(("MemcpyToHost", "MemcpyFromHost"), "copies between host and device"),
}


def replays(runtime: str, ops: tuple[Op, ...], captured: Sequence[bool]) -> Schedule:
    """The schedule that launches each run of captured ops as one graph; every other op is dispatched by itself."""
    each = one_step_per_op(runtime, ops)
    inside = np.array(captured, dtype=bool)
    starts = ~inside | np.concatenate(([True], ~inside[:-1]))  # ops that begin a step
    step_of, first = np.cumsum(starts) - 1, np.flatnonzero(starts)
    alone = ~inside[first]  # what Python did before a captured op, it did only once
    return replace(
        each,
        host_class=tuple(REPLAY if inside[index] else each.host_class[index] for index in first),
        calls=each.calls[first] * alone[:, None],
        sync=each.sync[first],
        kernel_step=step_of[each.kernel_step],
    )


def one_replay(runtime: str, ops: tuple[Op, ...]) -> Schedule:
    """The schedule that launches every kernel of some ops as one graph."""
    launching = tuple(op for op in ops if op.launches and op.family) or ops[:1]  # an empty graph is launched as well
    return replays(runtime, launching, [True] * len(launching))


def refuse_uncapturable(runtime: str, model: str, ops: Iterable[Op]) -> None:
    """Refuse ops that no graph can hold."""
    for op in ops:
        where = f" in {op.module}" if op.module else ""
        short = op.name.rpartition("::")[2].partition(".")[0]
        if short in _UNCAPTURED:
            raise RuntimeRefusalError(
                f"{runtime} cannot capture {model}: {op.name} {_UNCAPTURED[short]}. Ask for runtime='onnxruntime'."
            )
        if op.syncs:
            raise RuntimeRefusalError(
                f"{runtime} cannot capture {model}: {op.name}{where} makes the host wait for the device. "
                "Ask for runtime='eager', take that call out of the model's forward, or pass the model itself instead "
                "of its trace: some leave such checks out while they are captured."
            )
        if short in DATA_DEPENDENT:
            raise RuntimeRefusalError(
                f"{runtime} cannot capture {model}: the size of what {op.name}{where} gives depends on the data. "
                "Ask for runtime='eager'."
            )


def as_captured() -> AbstractContextManager[None]:
    """While it is entered, models that this thread traces believe that they are being captured."""
    return replaced(torch.cuda, "is_current_stream_capturing", lambda: True)  # as models ask


class CudaGraphs(Eager):
    """Eager PyTorch's kernels, launched as one captured graph."""

    name = traced_by = "cuda-graphs"
    needs = "cuda"
    autocast = True

    @property
    def options(self) -> str:
        """The version of transformers: what its models leave out while they are captured changes with it."""
        return ", ".join((VERSION, *map(" ".join, host.versions("transformers").items())))

    def trace(self, source: Source, target: str) -> ModelGraph:
        """What the model does while it is captured, when some make masks that they leave out otherwise."""
        seen = self._captured(source, target)
        return graph_in(self.name, target, source.graph, seen.ops, seen.ops_at_one)

    def trace_at(self, source: Source, target: str, batch: int) -> ModelGraph:
        """As `trace`, of a model that takes this batch alone or does other work at each.

        All others that are asked for so are networks of calibrations, which do while they are captured what they do
        otherwise, and need no second trace.
        """
        if not source.graph.only:
            return self.estimate(source.graph, target)
        return graph_in(self.name, target, source.graph, self._captured(source, target, batch).at(batch))

    def _captured(self, source: Source, target: str, *batches: int) -> ModelGraph:
        """An eager trace of a model that believes that it is being captured."""
        with as_captured():
            return source.retrace(target=target, batches=batches)

    def estimate(self, graph: ModelGraph, target: str) -> ModelGraph:
        """The eager trace as it is."""
        return graph_in(self.name, target, graph, graph.ops, graph.ops_at_one)

    def schedule(self, graph: ModelGraph, ops: tuple[Op, ...]) -> Schedule:
        """One step that launches every kernel; an op that cannot be captured is refused by name."""
        refuse_uncapturable(self.name, graph.model, ops)
        return one_replay(self.name, ops)

    def available(self) -> str | None:
        return None if torch.cuda.is_available() else NO_CUDA

    def build(self, model: Any, inputs: Any) -> Callable[[], Any]:
        """A call that replays the model's captured graph and gives the outputs, which the next call overwrites."""
        forward = super().build(model, inputs)
        graph, output = capture(forward, device_of(model, inputs))
        replay = graph.replay

        def run() -> Any:
            replay()
            return output

        run.inputs = inputs  # type: ignore[attr-defined]  # the graph reads them, so they live as long as it does
        return run


def demand_cuda(device: torch.device) -> None:
    """Refuse to capture anywhere but on a CUDA device."""
    if device.type != "cuda" or not torch.cuda.is_available():
        raise DeviceError(f"CUDA graphs are captured on CUDA devices, not on {device}: {NO_CUDA}.")


def capture(call: Callable[[], Any], device: torch.device, count: int = 1) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of some calls, and what the last of them gave.

    The calls are made on the stream that captures first: handles of libraries belong to a stream.
    """
    demand_cuda(device)
    before = torch.cuda.current_stream(device)
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(before)
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            call()
    before.wait_stream(side)
    torch.cuda.synchronize(device)
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    # Other threads may do as they please: only what this one does can end up in the graph.
    captured = torch.cuda.graph(graph, pool, stream=side, capture_error_mode="thread_local")
    with refusing(device, lambda: pool), captured:
        for _ in range(count):
            output = call()
    graph.replay()  # the first replay uploads the graph
    torch.cuda.synchronize(device)
    return graph, output


@contextmanager
def refusing(device: torch.device, pool: Callable[[], tuple[int, int]]) -> Iterator[None]:
    """Refuse what cannot be captured within it into a graph whose memory comes from a pool.

    Whatever happens, the stream that was current is current again, which a capture that fails would not see to.
    """
    before = torch.cuda.current_stream(device)
    try:
        yield
    except RuntimeError as error:
        reason = _forbidden(error)
        if reason is None:  # only what capturing forbids is an answer; the rest is an error
            raise
        torch.cuda.set_stream(before)
        _recover(device, pool())
        for one in chain_of(error):
            if isinstance(one, torch.OutOfMemoryError):
                raise one from None
        raise RuntimeRefusalError(
            f"this cannot be captured into a CUDA graph: {reason}. Ask for runtime='eager'."
        ) from error
    finally:
        torch.cuda.set_stream(before)


def _recover(device: torch.device, pool: tuple[int, int]) -> None:
    """Put PyTorch back to where it was before a capture that failed, which it does not do by itself.

    Its generator of random numbers still believes that a graph is being captured, so that nothing random works any
    more, and its allocator asks before every block whether that goes into the graph. Another capture, which succeeds,
    frees the generator.
    """
    internals: Any = torch._C
    with suppress(RuntimeError):  # the allocator's word that the capture was ended in good order after all
        internals._cuda_endAllocateToPool(device.index or 0, pool)
        internals._cuda_releasePool(device.index or 0, pool)  # which only a graph that is whole does by itself
    number = torch.zeros(1, device=device)
    torch.cuda.synchronize(device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
        number.add_(1.0)
    torch.cuda.synchronize(device)


def _forbidden(error: BaseException) -> str | None:
    """What capturing forbade, in the words of the first error that says so.

    Ending a capture that failed is an error of its own, which follows from the one that tells what went wrong.
    """
    said = [str(one) for one in chain_of(error) if OF_CAPTURE.search(str(one))]
    return next(line for line in said[-1].splitlines() if line).strip().rstrip(".") if said else None
