"""TorchScript: the model traced and frozen, run by an interpreter in C++, one host step for each node.

Module calls and the model's own Python are gone; convolutions have taken in the normalisation after them. The model is
traced and frozen on the CPU at each batch size by itself: what a trace knows of shapes it may hold for constant. The
frozen graph then runs on the meta device until its executor has settled on its code, and once more while it is
recorded. Nodes that never reach PyTorch's dispatcher (sizes, lists) are found in the executed graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import msgspec
import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from latpred.errors import RuntimeRefusalError, TraceError, is_stop, one_line, raising_stops
from latpred.graph.graph import NO_PYTHON, ZERO, Affine, ModelGraph, Op, rewritten
from latpred.graph.rewrites import NODE, attention_on_cuda
from latpred.ops.families import root
from latpred.runtimes import StepPerOp
from latpred.runtimes.base import built_of, graph_in, ops_of, out_of_memory
from latpred.runtimes.legacy_torch import FUSED_FAMILY
from latpred.runtimes.source import FlatModel, Source, flattened, tensors_of, weight_sharing_copy
from latpred.sandbox.own_thread import silenced, unhooked
from latpred.storage import IdentityCache
from latpred.tracing.inputs import nbytes
from latpred.tracing.op_record import OpRecord
from latpred.tracing.trace_pass import PassWatcher, ops_exactly
from latpred.tracing.tracer import TraceRecorder

INTERPRETED = f"{NODE}.interpreter"  # what the interpreter does by itself: sizes, lists, tuples
# Calls after which the executor changes its code no more: one more where it may fuse, as on CUDA, than on meta.
_SETTLING, _SETTLING_ON_META = 3, 2
FUSION_NOTE = (
    "which pointwise ops TorchScript fuses on CUDA is estimated: only a CUDA build of PyTorch forms the groups itself"
)
_NOTES = {"cpu": "", "cuda": FUSION_NOTE}
ESTIMATE_NOTE = "TorchScript's own graph was not taken: its nodes are estimated from the eager ops"
_OF_OTHERS = frozenset({"free", "tensor"})  # classes of ops that launch nothing and yet are dispatched
_MOST_TEXT = 200
_CONSTANT = "prim::Constant"
_READS = frozenset({"aten::item", "aten::_local_scalar_dense"})
_HALVES = (torch.float16, torch.bfloat16)
_PRODUCTS = frozenset(
    {*("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"), "aten::_scaled_dot_product_flash_attention_for_cpu"}
)


class TorchScript(StepPerOp):
    """A frozen trace, as `torch.jit.trace` and `torch.jit.freeze` make it."""

    name = traced_by = "torchscript"
    options = "11"  # version of what is traced; graphs of another one are made again
    host_classes = (INTERPRETED,)
    eager_kernels = True

    def __init__(self) -> None:
        super().__init__()
        self._built: IdentityCache[torch.nn.Module, Any] = IdentityCache()

    def available(self) -> str | None:
        """None: PyTorch has TorchScript, though it calls it deprecated."""

    @raising_stops()
    def build(self, model: Any, inputs: Any) -> Callable[[], Any]:
        """A call of the frozen trace, made once for inputs of the same shapes and run until it has settled."""
        tensors, modules, key = tensors_of(inputs), built_of(self._built, model), _signature(inputs)
        if key not in modules:
            modules[key] = frozen(model, inputs)
            with silenced(), torch.inference_mode():
                for _ in range(_SETTLING):
                    modules[key](*tensors)
        module = modules[key]

        def run() -> Any:
            with torch.inference_mode():
                return module(*tensors)

        return run

    def trace(self, source: Source, target: str) -> ModelGraph:
        """The nodes that the interpreter runs, from traces at batch 2, 3 and 1."""
        two, three, one = _runs_at(source, target, (2, 3, 1))
        ops, exact = ops_of("TorchScript", one.ops, two.ops, three.ops)
        steps = partial(_steps, target=target, attention=source.graph.attention)
        at_one = None if exact is None else steps(one.nodes, exact)
        return graph_in(self.name, target, source.graph, steps(two.nodes, ops), at_one, _NOTES[target])

    def trace_at(self, source: Source, target: str, batch: int) -> ModelGraph:
        (run,) = _runs_at(source, target, (batch,))
        steps = _steps(run.nodes, run.ops, target, source.graph.attention)
        return graph_in(self.name, target, source.graph, steps, None, _NOTES[target])

    def estimate(self, graph: ModelGraph, target: str) -> ModelGraph:
        """Eager's ops without the Python between them, normalisation folded into the convolution before it."""
        notes = (*graph.notes, ESTIMATE_NOTE)
        return rewritten(graph, _estimated, runtime=self.name, target=target, notes=notes)


def _runs_at(source: Source, target: str, batches: Sequence[int]) -> Iterator[InterpreterRun]:
    """What runs at each batch size, traced at that very size: a trace of another may be wrong without saying so."""
    with torch.inference_mode(False), torch.no_grad():
        model = source.model()
    for batch in batches:
        with torch.inference_mode(False):
            inputs = source.inputs(batch)
        module = frozen_for_tracing(model, inputs)
        if target == "cuda":
            join_linears(module.graph)
        yield executed(module, inputs, batch, target)


def _steps(nodes: Sequence[Node], ops: Sequence[Op], target: str, attention: str) -> list[Op]:
    """The nodes as ops, those that never reach the dispatcher among them; `attention` is that of the eager graph."""
    groups: list[list[Op]] = []
    live = Affine(0)
    for node in nodes:
        own = ops[node.first : node.first + node.calls]
        dispatched = list(map(_as_node, attention_on_cuda(own) if target == "cuda" and attention != "eager" else own))
        groups.append(dispatched or [Op(node.kind, "", INTERPRETED, "", "", {}, live_bytes=live)])
        live = groups[-1][-1].live_bytes
    if target == "cuda":
        groups = fused(nodes, groups)
    return [op for group in groups for op in group]


def _as_node(op: Op) -> Op:
    return msgspec.structs.replace(op, module="", host_class=_class_of(op), **NO_PYTHON)


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
    leaves, form = flattened(inputs)
    told = ((tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors_of(inputs))
    return str(form), *told, *(repr(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor))


class Node(NamedTuple):
    """One node of the executed graph, and the first and the number of the ops that it dispatched, maybe none."""

    kind: str
    takes: tuple[str, ...]  # names of values
    gives: tuple[str, ...]
    first: int
    calls: int


class InterpreterRun(NamedTuple):
    """One forward pass of a frozen module: the ops it dispatched, and the nodes in the order in which they ran."""

    ops: tuple[Op, ...]
    nodes: tuple[Node, ...]


def frozen(model: torch.nn.Module, inputs: Any) -> Any:
    """Trace a model on inputs and freeze what comes of it; a model that TorchScript cannot take is refused."""
    with silenced(), torch.inference_mode(False), torch.no_grad():
        try:
            flat = FlatModel(model, inputs).eval()
            traced = torch.jit.trace(flat, tuple(tensors_of(inputs)), check_trace=False, strict=False)  # type: ignore[no-untyped-call]
            # Freezing drops methods of submodules that call stacks of inlined ops would still name, and an error in a
            # call then ends the process. Inlined before, these name the methods of `traced`, which stay.
            torch._C._jit_pass_inline(traced.graph)
            return torch.jit.freeze(traced)
        except Exception as error:  # a tracer and a model's own Python may raise anything
            if out_of_memory(error) or isinstance(error, RuntimeRefusalError):
                raise
            said = f"{type(error).__name__}: {one_line(error)[:_MOST_TEXT]}"
            raise RuntimeRefusalError(f"TorchScript cannot trace {type(model).__name__}: {said}") from error


def frozen_for_tracing(model: torch.nn.Module, inputs: Any) -> Any:
    """As `frozen`, on the CPU, where products in half precision are many times slower than in single.

    Models with convolutions are traced as they are. What a pass keeps for the next one is in no other trace.
    """
    dtype = next((weight.dtype for weight in model.parameters() if weight.dtype in _HALVES), None)
    if dtype is not None:
        with suppress(RuntimeRefusalError), _InSinglePrecision(dtype):
            return frozen(weight_sharing_copy(model), inputs)
    return frozen(weight_sharing_copy(model), inputs)


def join_linears(graph: Any) -> None:
    """Make one product of linear layers with biases that read one tensor, as freezing does where weights lie on CUDA.

    Each takes its columns of the result, which launches nothing. PyTorch's `FrozenConcatLinear` skips weights on a CPU.
    """
    alias, found = graph.alias_db(), []
    for nodes in list(_linears_of_one_input(graph)):
        while nodes:  # what cannot be computed as early as the first may be with others of its kind
            first, *others = nodes
            early = [node for node in others if alias.move_before_topologically_valid(node, first)]
            found.append([first, *early])
            nodes = [node for node in others if node not in early]
    for nodes in found:  # what is put in now, `alias` knows nothing of
        if len(nodes) > 1:
            _join(graph, nodes)


def _linears_of_one_input(block: Any) -> Iterator[list[Any]]:
    """Nodes that may be joined: of one input, one width of it and one dtype; within inner blocks, too."""
    alike: dict[Any, list[Any]] = {}
    for node in block.nodes():
        for inner in node.blocks():
            yield from _linears_of_one_input(inner)
        if node.kind() == "aten::linear":
            taken, *parameters = node.inputs()
            weight, bias = (value.toIValue() for value in parameters)
            if isinstance(weight, torch.Tensor) and isinstance(bias, torch.Tensor):
                alike.setdefault((taken.unique(), weight.shape[1:], weight.dtype, bias.dtype), []).append(node)
    yield from alike.values()


def _join(graph: Any, nodes: Sequence[Any]) -> None:
    """Put one linear layer in the place of several, and slices of its result in that of theirs."""
    graph.setInsertPoint(nodes[0])  # whatever reads a result of theirs comes later
    parameters = [[value.toIValue() for value in list(node.inputs())[1:]] for node in nodes]
    with torch.inference_mode(False), torch.no_grad():
        held = [graph.insertConstant(torch.cat(tensors)) for tensors in zip(*parameters, strict=True)]
    whole = graph.insertNode(graph.create("aten::linear", [next(nodes[0].inputs()), *held], 1)).output()
    columns = accumulate((len(weight) for weight, _ in parameters), initial=0)
    for node, (begin, end) in zip(nodes, pairwise(columns), strict=True):
        places = [graph.insertConstant(number) for number in (-1, begin, end, 1)]
        part = graph.insertNode(graph.create("aten::slice", [whole, *places], 1)).output()
        node.output().replaceAllUsesWith(part)
    for node in nodes:
        node.destroy()


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


def executed(module: Any, inputs: Any, batch: int, target: str) -> InterpreterRun:
    """Run a frozen module without computing anything, and say what its interpreter does on a kind of device.

    One that reads back values which were not computed is run again, computing everything.
    """
    with torch.inference_mode(), silenced():
        # A value may be one that only computing tells, or an op one that the meta device does not have.
        with suppress(TraceError, RuntimeError):
            return _run(module, inputs, batch, target, _weightless)
        try:
            return _run(module, inputs, batch, target, _activation)
        except (TraceError, RuntimeError) as error:
            if out_of_memory(error):
                raise
            text = one_line(error.__cause__ or error)[-_MOST_TEXT:]
            raise RuntimeRefusalError(f"TorchScript's graph cannot be run: {text}") from error


def _run(
    module: Any, inputs: Any, batch: int, target: str, keep: Callable[[torch.Tensor], torch.Tensor]
) -> InterpreterRun:
    tensors = tuple(keep(tensor) for tensor in tensors_of(inputs))
    for _ in range(_SETTLING_ON_META):
        # The executor first compares all constants with one another, hundreds of thousands of times in a deep network,
        # and the recorder would see each of these. A call that fails at the first op with a weight has it do just that.
        with suppress(Exception):
            module(*(tensor.to("meta") for tensor in tensors))
        settling = _Interpreted(keep)
        with settling:
            settling.call(module, tensors)
    watcher = PassWatcher({})
    recorder = _Interpreted(keep, watcher)
    recorder.target = target
    with unhooked(), recorder, watcher:
        recorder.call(module, tensors)
    graph = torch._C._last_executed_optimized_graph()
    ran = len(recorder.records)
    ops = ops_exactly(recorder.finished(batch, nbytes(tensors, {})))[:ran]  # without what Python does after the last
    return InterpreterRun(ops, tuple(_nodes(list(graph.nodes()), recorder.calls, ran)))


class _Interpreted(TraceRecorder):  # type: ignore[no-untyped-call]
    """Records a model with real weights."""

    def __init__(self, keep: Callable[[torch.Tensor], torch.Tensor], watcher: PassWatcher | None = None) -> None:
        """What `keep` makes of each new tensor goes on: `_weightless` ones have no values, so nothing is computed."""
        super().__init__(watcher)
        self._keep, self.valueless = keep, keep is _weightless
        # Each op that the interpreter called, and how many records there were before it.
        self.calls: list[tuple[str, int]] = []
        self._raised: BaseException | None = None  # the last error in here, of which the interpreter keeps no word

    def call(self, module: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Call a frozen module within this mode; errors say what they come from, what ends work is raised as it was."""
        try:
            module(*tensors)
        except Exception as error:
            cause, self._raised = self._raised, None
            if cause is None or (isinstance(cause, Exception) and not is_stop(cause)):
                raise error from cause
            raise cause from None

    def __torch_dispatch__(
        self, func: OpOverload[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            return self._dispatched(func, types, args, kwargs)
        except BaseException as error:
            self._raised = error
            raise

    def _dispatched(
        self, func: OpOverload[..., Any], types: Any, args: Sequence[Any], kwargs: dict[str, Any] | None
    ) -> Any:
        if any(isinstance(value, (int, float)) for value in args):
            if func._schema.name in _READS and not isinstance(args[0], torch.Tensor):
                return args[0]  # a number that the interpreter had put into a tensor, and the host never left
            args = _with_tensors(func, args)
        if not self.depth:
            self.calls.append((func._schema.name, len(self.records)))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def record(self, record: OpRecord, out: Any) -> Any:
        """As in any trace; what becomes of a new tensor is `keep`'s to say."""
        out = super().record(record, out)
        return tree_map_only(torch.Tensor, self._keep, out) if record.launches else out


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
    types = [value.type() for value in (*node.inputs(), *node.outputs())]
    return any("Tensor" in kind.kind() or "Tensor" in str(kind) for kind in types)


def fused(nodes: Sequence[Node], groups: Sequence[list[Op]]) -> list[list[Op]]:
    """The ops of each node, those of a fused group in the place of its last member and gone from all others."""
    makers = {name: index for index, node in enumerate(nodes) for name in node.gives}
    needs = [[makers[name] for name in node.takes if name in makers] for node in nodes]
    out = [list(group) for group in groups]
    for members in _groups(needs, [_pointwise(group) for group in groups]):
        if len(members) > 1:
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
            if group is None:
                continue
            # Another argument that needs a result of the group must be there before.
            if not any(above[one] & masks[group] for one in direct if group_of.get(one) != group):
                break
        else:
            group = len(members)
            members.append([])
            masks.append(0)
        group_of[index] = group
        members[group].append(index)
        masks[group] |= 1 << index
    return members


def _kernel(members: Sequence[int], needs: Sequence[Sequence[int]], groups: Sequence[list[Op]]) -> Op:
    """One op that does the work of all members and keeps what only they read to itself."""
    inside = set(members)
    ops = [groups[index][0] for index in members]
    leaving = {other for index, direct in enumerate(needs) if index not in inside for other in direct} & inside
    needed = {other for index in members for other in needs[index]}
    leaving |= inside - needed  # what no other node takes is a result
    kept = [groups[other][0].write_bytes for index in members for other in needs[index] if other in inside]
    reads = sum((op.read_bytes for op in ops), ZERO) - sum(kept, ZERO)
    largest = max(ops, key=lambda op: op.dims["numel"].at(2))
    return msgspec.structs.replace(
        largest,
        name="prim::TensorExprGroup",
        host_class="node.fused",
        family=FUSED_FAMILY,
        dims={"numel": largest.dims["numel"], "operands": Affine(max(1, len(needed - inside)))},
        macs=sum((op.macs for op in ops), ZERO),
        weight_bytes=sum((op.weight_bytes for op in ops), ZERO),
        read_bytes=Affine(max(0, reads.constant), max(0, reads.per_sample)),
        write_bytes=sum((groups[index][0].write_bytes for index in members if index in leaving), ZERO),
        live_bytes=ops[-1].live_bytes,
        launches=1,
        estimated=False,
    )
