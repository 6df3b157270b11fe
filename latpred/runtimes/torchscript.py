"""TorchScript: the model traced and frozen, run by an interpreter in C++, one host step for each node.

Module calls and the model's own Python are gone; convolutions have taken in the normalisation after them. What the
interpreter runs is found out in `torchscript_graph`, what it fuses on CUDA in `torchscript_fusion`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from latpred.caches import IdentityCache
from latpred.errors import RuntimeRefusalError, TraceError
from latpred.graph.graph import Affine, ModelGraph, Op
from latpred.graph.schedule import Schedule
from latpred.ops.families import root
from latpred.runtimes import torchscript_graph as scripted
from latpred.runtimes.eager import one_step_per_op
from latpred.runtimes.source import Source
from latpred.runtimes.torchscript_graph import Executed, Node
from latpred.sandbox.own_thread import silenced
from latpred.tracing.affine_ops import demand_same, is_affine, ops_exactly, ops_through, same_ops

FEWEST = 2  # ops that make a group
FUSED = "elementwise.fused"


def fused(nodes: Sequence[Node], groups: Sequence[list[Op]]) -> list[list[Op]]:
    """The ops of each node, those of a fused group in the place of its last member and gone from all others."""
    makers = {name: index for index, node in enumerate(nodes) for name in node.gives}
    needs = [[makers[name] for name in node.takes if name in makers] for node in nodes]
    out = [list(group) for group in groups]
    for members in _groups(needs, [_pointwise(group) for group in groups]):
        if len(members) >= FEWEST:
            for index in members:
                out[index] = []
            out[members[-1]] = [_kernel(members, needs, groups)]
    return out


def _pointwise(group: Sequence[Op]) -> bool:
    return len(group) == 1 and root(group[0].family) == "elementwise" and group[0].dtype.startswith(("float", "bfloat"))


def _groups(needs: Sequence[Sequence[int]], pointwise: Sequence[bool]) -> list[list[int]]:
    """Members of each group in order; sets of nodes are the bits of whole numbers."""
    above: list[int] = []  # everything that a node needs, directly or not
    group_of: dict[int, int] = {}
    members: list[list[int]] = []
    masks: list[int] = []
    for index, direct in enumerate(needs):
        mine = 0
        for other in direct:
            mine |= 1 << other | above[other]
        above.append(mine)
        if not pointwise[index]:
            continue
        for other in direct:
            group = group_of.get(other)
            if group is not None and not _blocked(direct, group, group_of, above, masks[group]):
                break
        else:
            group = len(members)
            members.append([])
            masks.append(0)
        group_of[index] = group
        members[group].append(index)
        masks[group] |= 1 << index
    return members


def _blocked(direct: Sequence[int], group: int, group_of: dict[int, int], above: Sequence[int], mask: int) -> bool:
    """Whether another argument needs a result of the group, which then must be done before."""
    return any(above[other] & mask for other in direct if group_of.get(other) != group)


def _kernel(members: Sequence[int], needs: Sequence[Sequence[int]], groups: Sequence[list[Op]]) -> Op:
    """One op that does the work of all members and keeps what only they read to itself."""
    inside = set(members)
    ops = [groups[index][0] for index in members]
    leaving = {other for index, direct in enumerate(needs) if index not in inside for other in direct} & inside
    used = {other for index in members for other in needs[index]} & inside
    leaving |= inside - used  # what no other node takes is a result
    reads, writes = Affine(0), Affine(0)
    for index, op in zip(members, ops, strict=True):
        reads = _sum(reads, op.read_bytes)
        for other in needs[index]:
            if other in inside:
                reads = _sum(reads, groups[other][0].write_bytes, -1)
        if index in leaving:
            writes = _sum(writes, op.write_bytes)
    largest = max(ops, key=lambda op: op.dims["numel"].at(2))
    outside = {other for index in members for other in needs[index]} - inside
    return msgspec.structs.replace(
        largest,
        name="prim::TensorExprGroup",
        host_class="node.fused",
        family=FUSED,
        dims={"numel": largest.dims["numel"], "operands": Affine(max(1, len(outside)))},
        macs=_total([op.macs for op in ops]),
        weight_bytes=_total([op.weight_bytes for op in ops]),
        read_bytes=Affine(max(0, reads.constant), max(0, reads.per_sample)),
        write_bytes=writes,
        live_bytes=ops[-1].live_bytes,
        launches=1,
        estimated=False,
    )


def _sum(line: Affine, other: Affine, sign: int = 1) -> Affine:
    return Affine(line.constant + sign * other.constant, line.per_sample + sign * other.per_sample)


def _total(lines: Sequence[Affine]) -> Affine:
    total = Affine(0)
    for line in lines:
        total = _sum(total, line)
    return total


NODE = "node"  # the most general host class of everything here
INTERPRETED = f"{NODE}.interpreter"  # what the interpreter does by itself: sizes, lists, tuples
# Calls after which the executor changes its code no more; one more than on the CPU, where nothing is fused.
SETTLING = 3
FUSION_NOTE = (
    "which pointwise ops TorchScript fuses on CUDA is estimated: only a CUDA build of PyTorch forms the groups itself"
)
ESTIMATE_NOTE = "TorchScript's own graph was not taken: its nodes are estimated from the eager ops"
_OF_OTHERS = frozenset({"free", "tensor"})  # classes of ops that launch nothing and yet are dispatched


class TorchScript:
    """A frozen trace, as `torch.jit.trace` and `torch.jit.freeze` make it."""

    name = "torchscript"
    walked_by = "torchscript"
    options = "2"  # raise it whenever the graphs change that are made here
    host_classes = (INTERPRETED,)

    def __init__(self) -> None:
        self._schedules: IdentityCache[ModelGraph, dict[int, Schedule]] = IdentityCache()
        self._built: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()

    def lower(self, graph: ModelGraph, batch: int) -> Schedule:
        """One step for each node; a node that takes several kernels shares its work among them evenly."""
        schedules = self._schedules.get(graph, lambda _: {})
        own = graph.own(batch)
        if own not in schedules:
            schedules[own] = one_step_per_op(self.name, graph.at(batch))
        return schedules[own]

    def available(self) -> str | None:
        """None while PyTorch has TorchScript, which it calls deprecated."""
        if hasattr(torch.jit, "trace") and hasattr(torch.jit, "freeze"):
            return None
        return f"torch {torch.__version__} no longer has TorchScript. Install an earlier one: pip install 'torch<2.14'"

    def build(self, model: Any, inputs: Any) -> Callable[[], Any]:
        """A call of the frozen trace, made once for inputs of the same shapes and run until it has settled.

        Raises
        ------
        RuntimeRefusalError
            When TorchScript cannot take the model.
        """
        tensors = scripted.tensors_of(inputs)
        modules = self._built.setdefault(model, {})
        key = (_signature(inputs), next((weight.dtype for weight in model.parameters()), None))
        if key not in modules:
            modules[key] = scripted.frozen(model, inputs)
            with silenced(), torch.inference_mode():
                for _ in range(SETTLING):
                    modules[key](*tensors)
        module = modules[key]

        def run() -> Any:
            with torch.inference_mode():
                return module(*tensors)

        return run

    def walk(self, source: Source, target: str) -> ModelGraph:
        """The nodes that the interpreter runs, from traces at batch 2, 3 and 1."""
        with torch.inference_mode(False), torch.no_grad():
            model = source.model().eval()
        two, three, one = (_at(model, source, batch) for batch in (2, 3, 1))
        try:
            demand_same(two.walk, three.walk)
        except TraceError as error:
            raise RuntimeRefusalError(f"TorchScript has no one graph for all batch sizes: {error}") from error
        ops = ops_through(two.walk, three.walk)
        exact = None
        if not (same_ops(one.walk.records, two.walk.records) and is_affine(ops, one.walk, two.walk, three.walk)):
            exact = _steps(one.nodes, ops_exactly(one.walk), target)
        return msgspec.structs.replace(
            source.graph,
            ops=_steps(two.nodes, ops, target),
            ops_at_one=exact,
            runtime=self.name,
            target=target,
            notes=(*source.graph.notes, *((FUSION_NOTE,) if target == "cuda" else ())),
        )

    def walk_at(self, source: Source, target: str, batch: int) -> ModelGraph:
        """The nodes that the interpreter runs at one batch size."""
        with torch.inference_mode(False), torch.no_grad():
            model = source.model().eval()
        one = _at(model, source, batch)
        return msgspec.structs.replace(
            source.graph,
            ops=_steps(one.nodes, ops_exactly(one.walk), target),
            ops_at_one=None,
            runtime=self.name,
            target=target,
            notes=(*source.graph.notes, *((FUSION_NOTE,) if target == "cuda" else ())),
        )

    def estimate(self, graph: ModelGraph, target: str) -> ModelGraph:
        """Eager's ops without the Python between them, normalisation folded into the convolution before it."""
        return msgspec.structs.replace(
            graph,
            ops=_estimated(graph.ops),
            ops_at_one=None if graph.ops_at_one is None else _estimated(graph.ops_at_one),
            runtime=self.name,
            target=target,
            notes=(*graph.notes, ESTIMATE_NOTE),
        )


def _at(model: torch.nn.Module, source: Source, batch: int) -> Executed:
    """What runs at one batch size; a trace of another may be wrong for it without saying so."""
    with torch.inference_mode(False):
        inputs = source.inputs(batch)
    return scripted.executed(scripted.frozen_for_a_walk(model, inputs), inputs, batch)


def _steps(nodes: Sequence[Node], ops: Sequence[Op], target: str) -> tuple[Op, ...]:
    """The nodes as ops, those that never reach the dispatcher among them."""
    groups: list[list[Op]] = []
    live = Affine(0)
    for node in nodes:
        own = [_as_node(op) for op in ops[node.first : node.first + node.entries]]
        groups.append(own or [interpreted(node.kind, live)])
        live = groups[-1][-1].live_bytes
    if target == "cuda":
        groups = fused(nodes, groups)
    return tuple(op for group in groups for op in group)


def interpreted(kind: str, live_bytes: Affine) -> Op:
    """A node that the interpreter serves by itself."""
    return Op(name=kind, module="", host_class=INTERPRETED, family="", dtype="", dims={}, live_bytes=live_bytes)


def _as_node(op: Op) -> Op:
    return msgspec.structs.replace(op, module="", host_class=_class_of(op), module_calls=0, python_calls=0)


def _class_of(op: Op) -> str:
    """Host class of a node: its general class, and whether another op issued it from C++.

    What launches nothing and is no view is a factory here: memory without a launch.
    """
    general, *rest = op.host_class.split(".")
    general = "factory" if general in _OF_OTHERS else general
    return f"{NODE}.{general}.nested" if "nested" in rest else f"{NODE}.{general}"


def _estimated(ops: Sequence[Op]) -> tuple[Op, ...]:
    kept: list[Op] = []
    for op in ops:
        before = next((root(other.family) for other in reversed(kept) if other.family), "")
        folded = root(op.family) == "batch_norm" and before.startswith("conv")
        if not (folded or op.name.startswith("python::") or root(op.host_class) == "free"):
            kept.append(_as_node(op))
    return tuple(kept)


def _signature(inputs: Any) -> tuple[Any, ...]:
    """What a frozen trace holds for: shapes, dtypes and places of tensors, and all other values."""
    named = inputs.items() if hasattr(inputs, "items") else enumerate(inputs)
    return tuple(
        (name, tuple(value.shape), value.stride(), value.dtype, value.device)
        if isinstance(value, torch.Tensor)
        else (name, repr(value))
        for name, value in named
    )
