"""TorchScript: the model traced and frozen, run by an interpreter in C++, one host step for each node.

Module calls and the model's own Python are gone; convolutions have taken in the normalisation after them. What the
interpreter runs, and what it fuses on CUDA, is found in `torchscript_graph`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import torch

from latpred.errors import RuntimeRefusalError
from latpred.graph.graph import Affine, ModelGraph, Op
from latpred.ops.families import root
from latpred.runtimes import StepPerOp, torchscript_graph
from latpred.runtimes.base import estimated_graph, first_difference, graph_in, op_through, unless_affine
from latpred.runtimes.source import Source, tensors_of
from latpred.runtimes.torchscript_graph import InterpreterRun, Node
from latpred.sandbox.own_thread import silenced
from latpred.storage import IdentityCache

NODE = "node"  # the most general host class of everything here
INTERPRETED = f"{NODE}.interpreter"  # what the interpreter does by itself: sizes, lists, tuples
# Calls after which the executor changes its code no more; one more than on the CPU, where nothing is fused.
SETTLING = 3
FUSION_NOTE = (
    "which pointwise ops TorchScript fuses on CUDA is estimated: only a CUDA build of PyTorch forms the groups itself"
)
ESTIMATE_NOTE = "TorchScript's own graph was not taken: its nodes are estimated from the eager ops"
_OF_OTHERS = frozenset({"free", "tensor"})  # classes of ops that launch nothing and yet are dispatched


class TorchScript(StepPerOp):
    """A frozen trace, as `torch.jit.trace` and `torch.jit.freeze` make it."""

    name = traced_by = "torchscript"
    options = "2"  # raise it whenever the graphs change that are made here
    host_classes = (INTERPRETED,)

    def __init__(self) -> None:
        super().__init__()
        self._built: IdentityCache[torch.nn.Module, dict[Any, Any]] = IdentityCache()

    def available(self) -> str | None:
        """None while PyTorch has TorchScript, which it calls deprecated."""
        if hasattr(torch.jit, "trace") and hasattr(torch.jit, "freeze"):
            return None
        return f"torch {torch.__version__} no longer has TorchScript. Install an earlier one: pip install 'torch<2.14'"

    def build(self, model: Any, inputs: Any) -> Callable[[], Any]:
        """A call of the frozen trace, made once for inputs of the same shapes and run until it has settled."""
        tensors = tensors_of(inputs)
        modules = self._built.get(model, lambda _: {})
        key = (_signature(inputs), next((weight.dtype for weight in model.parameters()), None))
        if key not in modules:
            modules[key] = torchscript_graph.frozen(model, inputs)
            with silenced(), torch.inference_mode():
                for _ in range(SETTLING):
                    modules[key](*tensors)
        module = modules[key]

        def run() -> Any:
            with torch.inference_mode():
                return module(*tensors)

        return run

    def trace(self, source: Source, target: str) -> ModelGraph:
        """The nodes that the interpreter runs, from traces at batch 2, 3 and 1."""
        two, three, one = _executed(source, (2, 3, 1))
        different = first_difference(two.ops, three.ops)
        if different is not None:
            raise RuntimeRefusalError(
                "TorchScript has no one graph for all batch sizes: the model issues different ops at batch 2 and 3, "
                f"first at {different}"
            )
        ops = [op_through(*pair) for pair in zip(two.ops, three.ops, strict=True)]
        exact = unless_affine(one.ops, ops)
        at_one = None if exact is None else _steps(one.nodes, exact, target)
        return self._graph(source, target, _steps(two.nodes, ops, target), at_one)

    def trace_at(self, source: Source, target: str, batch: int) -> ModelGraph:
        """The nodes that the interpreter runs at one batch size."""
        (run,) = _executed(source, (batch,))
        return self._graph(source, target, _steps(run.nodes, run.ops, target))

    def estimate(self, graph: ModelGraph, target: str) -> ModelGraph:
        """Eager's ops without the Python between them, normalisation folded into the convolution before it."""
        return estimated_graph(self.name, target, graph, _estimated, ESTIMATE_NOTE)

    def _graph(
        self, source: Source, target: str, ops: Iterable[Op], ops_at_one: Iterable[Op] | None = None
    ) -> ModelGraph:
        note = FUSION_NOTE if target == "cuda" else ""
        return graph_in(self.name, target, source.graph, ops, ops_at_one, note)


def _executed(source: Source, batches: Sequence[int]) -> Iterator[InterpreterRun]:
    """What runs at each batch size, traced at that very size: a trace of another may be wrong without saying so."""
    with torch.inference_mode(False), torch.no_grad():
        model = source.model().eval()
    for batch in batches:
        with torch.inference_mode(False):
            inputs = source.inputs(batch)
        frozen = torchscript_graph.frozen_for_tracing(model, inputs)
        yield torchscript_graph.executed(frozen, inputs, batch)


def _steps(nodes: Sequence[Node], ops: Sequence[Op], target: str) -> list[Op]:
    """The nodes as ops, those that never reach the dispatcher among them."""
    groups: list[list[Op]] = []
    live = Affine(0)
    for node in nodes:
        dispatched = [_as_node(op) for op in ops[node.first : node.first + node.calls]]
        groups.append(dispatched or [Op(node.kind, "", INTERPRETED, "", "", {}, live_bytes=live)])
        live = groups[-1][-1].live_bytes
    if target == "cuda":
        groups = torchscript_graph.fused(nodes, groups)
    return [op for group in groups for op in group]


def _as_node(op: Op) -> Op:
    return msgspec.structs.replace(op, module="", host_class=_class_of(op), module_calls=0, python_calls=0)


def _class_of(op: Op) -> str:
    """Host class of a node: its general class, and whether another op issued it from C++.

    What launches nothing and is no view is a factory here: memory without a launch.
    """
    general, *rest = op.host_class.split(".")
    general = "factory" if general in _OF_OTHERS else general
    return f"{NODE}.{general}.nested" if "nested" in rest else f"{NODE}.{general}"


def _estimated(ops: Sequence[Op]) -> list[Op]:
    kept: list[Op] = []
    for op in ops:
        before = next((root(other.family) for other in reversed(kept) if other.family), "")
        folded = root(op.family) == "batch_norm" and before.startswith("conv")
        if not (folded or op.name.startswith("python::") or root(op.host_class) == "free"):
            kept.append(_as_node(op))
    return kept


def _signature(inputs: Any) -> tuple[Any, ...]:
    """What a frozen trace holds for: shapes, dtypes and places of tensors, and all other values."""
    named = inputs.items() if hasattr(inputs, "items") else enumerate(inputs)
    return tuple(
        (name, tuple(value.shape), value.stride(), value.dtype, value.device)
        if isinstance(value, torch.Tensor)
        else (name, repr(value))
        for name, value in named
    )
