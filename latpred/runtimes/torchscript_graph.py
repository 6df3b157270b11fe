"""What TorchScript's interpreter runs for a model: a frozen trace, watched op by op while it computes nothing.

The model is traced and frozen on the CPU at each batch size by itself: what a trace knows of shapes it may hold for
constant. The frozen graph then runs on the meta device until its executor has settled on its code, and once more under
the walk. Nodes that never reach PyTorch's dispatcher (sizes, lists) are found in the executed graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from latpred.errors import RuntimeRefusalError, TraceError
from latpred.sandbox.own_thread import silenced
from latpred.tracing.affine_ops import TracePass
from latpred.tracing.inputs import nbytes
from latpred.tracing.op_record import OpRecord
from latpred.tracing.python_calls import PassWatcher
from latpred.tracing.tracer import TraceRecorder

SETTLING = 2  # runs after which the executor changes its code no more
_MOST_TEXT = 200
_CONSTANT = "prim::Constant"
_READS = frozenset({"aten::item", "aten::_local_scalar_dense"})
_HALVES = (torch.float16, torch.bfloat16)
_PRODUCTS = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
    }
)


@dataclass(frozen=True, slots=True)
class Node:
    """One node of the executed graph: its kind, the values it takes and gives, and how many dispatched calls it made.

    `first` is the first of its entries in the walk, `entries` their number; nodes that never reach the dispatcher
    have none.
    """

    kind: str
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    first: int
    entries: int


@dataclass(frozen=True, slots=True)
class Executed:
    """One forward pass of a frozen module, and the nodes in the order in which they ran."""

    walk: TracePass
    nodes: tuple[Node, ...]


class Flat(torch.nn.Module):
    """A model that takes positional tensors and gives a tuple of them, as a trace wants it."""

    def __init__(self, model: torch.nn.Module, inputs: Any) -> None:
        super().__init__()
        self.model = model
        named = inputs if _is_mapping(inputs) else dict(enumerate(inputs))
        self._named = _is_mapping(inputs)
        self._places = [key for key, value in named.items() if isinstance(value, torch.Tensor)]
        self._others = {key: value for key, value in named.items() if not isinstance(value, torch.Tensor)}

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Call the model; what it gives beside tensors is dropped."""
        given = dict(zip(self._places, tensors, strict=True)) | self._others
        out = self.model(**given) if self._named else self.model(*(given[index] for index in sorted(given)))
        return tuple(_tensors(out))


def tensors_of(inputs: Any) -> tuple[torch.Tensor, ...]:
    """The tensors among a model's inputs, in the order in which `Flat` takes them."""
    values = inputs.values() if _is_mapping(inputs) else inputs
    return tuple(value for value in values if isinstance(value, torch.Tensor))


def frozen(model: torch.nn.Module, inputs: Any) -> Any:
    """Trace a model on inputs and freeze what comes of it.

    Raises
    ------
    RuntimeRefusalError
        When TorchScript cannot take the model; says what stands in the way.
    """
    with silenced(), torch.inference_mode(False), torch.no_grad():
        try:
            flat = Flat(model, inputs).eval()
            traced = torch.jit.trace(flat, tensors_of(inputs), check_trace=False, strict=False)  # type: ignore[no-untyped-call]
            return torch.jit.freeze(traced)
        except Exception as error:  # a tracer and a model's own Python may raise anything
            text = " ".join(str(error).split())[:_MOST_TEXT] or "no message"
            raise RuntimeRefusalError(
                f"TorchScript cannot trace {type(model).__name__}: {type(error).__name__}: {text}"
            ) from error


def frozen_for_a_walk(model: torch.nn.Module, inputs: Any) -> Any:
    """As `frozen`, on the CPU, where products in half precision are many times slower than in single.

    Models with convolutions are traced as they are.
    """
    dtype = next((weight.dtype for weight in model.parameters() if weight.dtype in _HALVES), None)
    if dtype is not None:
        with suppress(RuntimeRefusalError), _InSinglePrecision(dtype):
            return frozen(model, inputs)
    return frozen(model, inputs)


class _InSinglePrecision(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes products of half precision in single precision, unseen by the tracer above."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dtype = dtype

    def __torch_dispatch__(
        self, func: OpOverload[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = _with_tensors(func, args), kwargs or {}
        if func is torch.ops.aten.convolution.default:
            raise NotImplementedError("the tracer sees convolutions only further below: they would be lost")
        if func._schema.name not in _PRODUCTS or not any(_is_half(value, self._dtype) for value in args):
            return func(*args, **kwargs)
        args = [value.float() if _is_half(value, self._dtype) else value for value in args]
        out = func(*args, **kwargs)
        return tree_map_only(torch.Tensor, lambda t: t.to(self._dtype) if t.dtype == torch.float32 else t, out)


def _is_half(value: Any, dtype: torch.dtype) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == dtype


def executed(module: Any, inputs: Any, batch: int) -> Executed:
    """Run a frozen module without computing anything, and say what its interpreter did.

    One that reads back values which were not computed is run again, computing everything.
    """
    with torch.inference_mode(), silenced():
        try:
            return _run(module, inputs, batch, _weightless)
        except (TraceError, RuntimeError):
            pass  # a value that only computing tells, or an op that the meta device does not have
        try:
            return _run(module, inputs, batch, _activation)
        except (TraceError, RuntimeError) as error:
            text = " ".join(str(error).split())[-_MOST_TEXT:]
            raise RuntimeRefusalError(f"TorchScript's graph cannot be run: {text}") from error


def _run(module: Any, inputs: Any, batch: int, keep: Callable[[torch.Tensor], torch.Tensor]) -> Executed:
    tensors = tuple(keep(tensor) for tensor in tensors_of(inputs))
    for _ in range(SETTLING):
        with Interpreted(keep):
            module(*tensors)
    watcher = PassWatcher({})
    walk = Interpreted(keep, watcher)
    with walk, watcher:
        module(*tensors)
    graph = torch._C._last_executed_optimized_graph()
    nodes = _nodes(list(graph.nodes()), walk.calls, len(walk.records))
    return Executed(walk.finished(batch, nbytes(tensors, {})), tuple(nodes))


class Interpreted(TraceRecorder):  # type: ignore[no-untyped-call]
    """A walk of real weights.

    Parameters
    ----------
    keep : callable
        What becomes of each new tensor: `_weightless` ones go on without values, so that nothing is computed.
    watcher : PassWatcher or None
        As for any walk.

    Attributes
    ----------
    calls : list[tuple[str, int]]
        Each op that the interpreter called, and how many entries there were before it.
    """

    def __init__(self, keep: Callable[[torch.Tensor], torch.Tensor], watcher: PassWatcher | None = None) -> None:
        super().__init__(watcher)
        self._keep = keep
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self, func: OpOverload[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(isinstance(value, (int, float)) for value in args):
            if func._schema.name in _READS and not isinstance(args[0], torch.Tensor):
                return args[0]  # a number that the interpreter had put into a tensor, and the host never left
            args = _with_tensors(func, args)
        if not self._depth:
            self.calls.append((func._schema.name, len(self.records)))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def record(self, record: OpRecord, out: Any) -> Any:
        """As in any walk; what becomes of a new tensor is `keep`'s to say."""
        out = super().record(record, out)
        return out if record.alias else _each(out, self._keep)


def _with_tensors(func: OpOverload[..., Any], args: Sequence[Any]) -> list[Any]:
    """The arguments, numbers put back into tensors where the op takes those: Python sees them without."""
    wanted = (argument.type.kind() == "TensorType" for argument in func._schema.arguments)
    return [
        torch.tensor(value) if tensor and isinstance(value, (int, float)) else value
        for tensor, value in zip(wanted, args, strict=False)
    ]


def _activation(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as one that was made in inference mode, which tells it from a weight."""
    return tensor if tensor.is_inference() else tensor.clone()


def _weightless(tensor: torch.Tensor) -> torch.Tensor:
    """An activation without values where it is of floating point; single numbers keep theirs, Python may ask."""
    if tensor.is_meta or not tensor.dim() or not tensor.is_floating_point():
        return _activation(tensor)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _each(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_each(item, change) for item in value)
    return value


def _nodes(nodes: Sequence[Any], calls: Sequence[tuple[str, int]], total: int) -> Iterator[Node]:
    """Nodes with the entries that each made: calls come in the order of the nodes, but not every node calls."""
    kinds = {node.kind() for node in nodes}
    starts = [first for _, first in calls] + [total]
    at = 0
    for node in nodes:
        kind, begin = node.kind(), at
        if kind == _CONSTANT:
            continue
        if at < len(calls) and calls[at][0] == kind and _of_tensors(node):
            at += 1
        else:
            # What no node is called after is part of how the interpreter serves one, as reading a number from a tensor.
            while at < len(calls) and calls[at][0] not in kinds:
                at += 1
        takes, gives = (tuple(v.debugName() for v in values) for values in (node.inputs(), node.outputs()))
        yield Node(kind, takes, gives, starts[begin], starts[at] - starts[begin])
    if at < len(calls):  # a loop or a branch: what its nodes did is one last step
        yield Node("prim::Loop", (), (), starts[at], total - starts[at])


def _of_tensors(node: Any) -> bool:
    """Whether a node takes or gives tensors; arithmetic of numbers has the same names and is no dispatched op."""
    return any("Tensor" in value.type().kind() or "Tensor" in str(value.type()) for value in _values(node))


def _values(node: Any) -> list[Any]:
    return [*node.inputs(), *node.outputs()]


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if _is_mapping(value):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _is_mapping(value: Any) -> bool:
    return isinstance(value, dict) or hasattr(value, "items")
