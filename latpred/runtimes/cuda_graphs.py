"""CUDA graphs: the kernels of an eager forward pass, captured once and launched together ever after.

What is captured is what the model does while it is captured, which may differ from what it does otherwise: transformers
leaves out checks that read values back. Inputs stay where they lay when the graph was captured: replaying copies none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from itertools import repeat
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from latpred.caches import IdentityCache
from latpred.errors import DeviceError, RuntimeRefusalError
from latpred.graph.graph import ModelGraph, Op
from latpred.graph.schedule import Schedule
from latpred.runtimes.eager import Eager, one_step_per_op

if TYPE_CHECKING:
    import torch

    from latpred.runtimes.source import Source

REPLAY = "replay"  # host class of the step that launches a captured graph
# What decides while it runs how large its result is: by name, without the namespace.
DATA_DEPENDENT = frozenset(
    {
        *("nonzero", "masked_select", "argwhere", "bincount", "histc", "combinations"),
        *("unique", "_unique", "_unique2", "unique_dim", "unique_consecutive"),
        *("repeat_interleave.Tensor", "NonZero", "Unique", "Compress"),
    }
)


def one_replay(runtime: str, ops: Iterable[Op], first: Iterable[Op] = ()) -> Schedule:
    """The schedule that launches every kernel of some ops in one step."""
    ahead, captured = tuple(first), tuple(op for op in ops if op.launches and op.family)
    each = one_step_per_op(runtime, (*ahead, *captured))
    steps = len(ahead) + 1
    replay = len(ahead)
    return Schedule(
        runtime=runtime,
        ops=each.ops,
        host_class=(*each.host_class[:replay], REPLAY),
        module_calls=np.append(each.module_calls[:replay], 0),
        python_calls=np.append(each.python_calls[:replay], 0),
        sync=np.append(each.sync[:replay], 0),
        kernel_step=np.minimum(each.kernel_step, steps - 1),
        kernel_op=each.kernel_op,
        kernel_share=each.kernel_share,
        kernel_family=each.kernel_family,
    )


def refuse_uncapturable(runtime: str, model: str, ops: Iterable[Op], *, unsure: bool = False) -> None:
    """Refuse ops that no graph can hold."""
    for op in ops:
        where = f" in {op.module}" if op.module else ""
        short = op.name.rpartition("::")[2]
        if op.syncs:
            raise RuntimeRefusalError(
                f"{runtime} cannot capture {model}: {op.name}{where} makes the host wait for the device. "
                f"Ask for runtime='eager', or {_other_way(unsure)}."
            )
        if short in DATA_DEPENDENT or short.partition(".")[0] in DATA_DEPENDENT:
            raise RuntimeRefusalError(
                f"{runtime} cannot capture {model}: the size of what {op.name}{where} gives depends on the data. "
                "Ask for runtime='eager'."
            )


def _other_way(unsure: bool) -> str:
    if unsure:
        return "pass the model itself instead of its walk: some leave such checks out while they are captured"
    return "take that call out of the model's forward"


WARM_UPS = 3  # calls before a capture: libraries set themselves up in the first ones, which a graph cannot hold
NO_CUDA = "there is no CUDA device here; predict with --device simulated or with the profile of a GPU"
_UNSURE = "taken from the eager walk, where the host waits for the device"


class CudaGraphs:
    """Eager PyTorch's kernels, launched as one captured graph."""

    name = "cuda-graphs"
    walked_by = "cuda-graphs"
    needs = "cuda"

    def __init__(self) -> None:
        self._schedules: IdentityCache[ModelGraph, dict[int, Schedule]] = IdentityCache()

    @property
    def options(self) -> str:
        """The version of transformers: what its models leave out while they are captured changes with it."""
        try:
            return f"transformers {metadata.version('transformers')}"
        except metadata.PackageNotFoundError:
            return ""

    def walk(self, source: Source, target: str) -> ModelGraph:
        """The eager walk; where the host waits for the device in it, what the model does while it is captured."""
        if not waits(source.graph):
            return _captured_on(source.graph, source.graph, target)
        from latpred.tracing import trace

        given = source.graph
        with seen_as_capturing():
            seen = trace(source.model(), source.inputs, precision=given.precision, memory_format=given.memory_format)
        return _captured_on(seen, given, target)

    def walk_at(self, source: Source, target: str, batch: int) -> ModelGraph:
        """The eager walk of one batch size."""
        return self.estimate(source.graph, target)

    def estimate(self, graph: ModelGraph, target: str) -> ModelGraph:
        """The eager walk as it is."""
        noted = _captured_on(graph, graph, target)
        return msgspec.structs.replace(noted, notes=(*noted.notes, _UNSURE)) if waits(graph) else noted

    def lower(self, graph: ModelGraph, batch: int) -> Schedule:
        """One step that launches every kernel.

        Raises
        ------
        RuntimeRefusalError
            When some op cannot be captured; names it and its module.
        """
        schedules = self._schedules.get(graph, lambda _: {})
        own = graph.own(batch)
        if own not in schedules:
            refuse_uncapturable(self.name, graph.model, graph.at(batch), unsure=_UNSURE in graph.notes)
            schedules[own] = one_replay(self.name, graph.at(batch))
        return schedules[own]

    def available(self) -> str | None:
        """None where there is a CUDA device."""
        import torch

        return None if torch.cuda.is_available() else NO_CUDA

    def build(self, model: Any, inputs: Any) -> Callable[[], Any]:
        """A call that replays the model's captured graph and gives the outputs, which the next call overwrites.

        Raises
        ------
        RuntimeRefusalError
            When the model cannot be captured.
        DeviceError
            When there is no CUDA device, or the model is not on one.
        """
        forward = Eager().build(model, inputs)
        graph, output = capture(forward, _device_of(model, inputs))
        replay = graph.replay

        def run() -> Any:
            replay()
            return output

        run.inputs = inputs  # type: ignore[attr-defined]  # the graph reads them, so they live as long as it does
        return run


def capture(call: Callable[[], Any], device: torch.device, count: int = 1) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of some calls, and what the last of them gave.

    The calls are made on the stream that captures first: handles of libraries belong to a stream. Whatever happens, the
    stream that was current is current again, which a capture that fails would not see to.
    """
    import torch

    if device.type != "cuda" or not torch.cuda.is_available():
        raise DeviceError(f"CUDA graphs are captured on CUDA devices, not on {device}: {NO_CUDA}.")
    before = torch.cuda.current_stream(device)
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(before)
    with torch.cuda.stream(side):
        for _ in repeat(None, WARM_UPS):
            call()
    before.wait_stream(side)
    torch.cuda.synchronize(device)
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    try:
        # Other threads may do as they please: only what this one does can end up in the graph.
        with torch.cuda.graph(graph, pool, stream=side, capture_error_mode="thread_local"):
            for _ in repeat(None, count):
                output = call()
    except RuntimeError as error:
        torch.cuda.set_stream(before)
        _recover(device, pool)
        short = _of_memory(error)
        if short is not None:
            raise short from None
        reason = _forbidden(error)
        if reason is None:  # only what capturing forbids is an answer; the rest is an error
            raise
        raise RuntimeRefusalError(
            f"this cannot be captured into a CUDA graph: {reason}. Ask for runtime='eager'."
        ) from error
    finally:
        torch.cuda.set_stream(before)
    graph.replay()  # the first replay uploads the graph
    torch.cuda.synchronize(device)
    return graph, output


def _recover(device: torch.device, pool: tuple[int, int]) -> None:
    """Put PyTorch back to where it was before a capture that failed, which it does not do by itself.

    Its generator of random numbers still believes that a graph is being captured, so that nothing random works any
    more, and its allocator asks before every block whether that goes into the graph. Another capture, which succeeds,
    frees the generator.
    """
    import torch

    own: Any = torch._C
    with suppress(RuntimeError):  # the allocator's word that the capture was ended in good order after all
        own._cuda_endAllocateToPool(device.index or 0, pool)
        own._cuda_releasePool(device.index or 0, pool)  # else nobody would: only a graph that is whole gives it back
    number = torch.zeros(1, device=device)
    torch.cuda.synchronize(device)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        number.add_(1.0)
    torch.cuda.synchronize(device)


def _of_memory(error: BaseException | None) -> BaseException | None:
    """The lack of memory that made a capture fail, if that did; ending the capture is then an error of its own."""
    import torch

    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__context__
    return error


def waits(graph: ModelGraph) -> bool:
    """Whether the host waits for the device somewhere in a forward pass."""
    return bool(graph.syncs(1) or graph.syncs(2))


@contextmanager
def seen_as_capturing() -> Iterator[None]:
    """Let models that ask whether they are being captured believe so, in this thread; for a walk on the meta device."""
    import torch

    from latpred.sandbox.own_thread import replaced

    with replaced(torch.cuda, "is_current_stream_capturing", lambda: True):
        yield


def _captured_on(seen: ModelGraph, given: ModelGraph, target: str) -> ModelGraph:
    """The ops of one walk under everything else that another says."""
    return msgspec.structs.replace(
        given, ops=seen.ops, ops_at_one=seen.ops_at_one, runtime=CudaGraphs.walked_by, target=target
    )


def _forbidden(error: BaseException | None) -> str | None:
    """What capturing forbade, in the words of the first error that says so.

    Ending a capture that failed is an error of its own, which follows from the one that tells what went wrong.
    """
    found = None
    while error is not None:
        lines = str(error).splitlines() or [""]
        if "captur" in str(error).lower():
            found = next(line for line in lines if line).strip().rstrip(".")
        error = error.__context__
    return found


def _device_of(model: Any, inputs: Any) -> torch.device:
    """The device of a model's weights, else of its inputs."""
    import torch

    given = inputs.values() if isinstance(inputs, dict) else inputs
    for tensor in (*model.parameters(), *model.buffers(), *given):
        if isinstance(tensor, torch.Tensor):
            return tensor.device
    return torch.device("cpu")
