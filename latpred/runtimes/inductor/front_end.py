"""The calls of one forward pass under torch.compile, found with its own front end and Inductor's own scheduler.

Dynamo and AOTAutograd trace a real model on the CPU; Inductor's passes, lowering and scheduler then decide what to run,
and nothing is generated. For a CUDA device the traced graph is moved to a fake one in between. While the traced graphs
run in the model's place, every call of one is counted, and every op that runs between them: graph breaks cost what they
cost. What the calls mean for other batch sizes is `torch_compile`'s business.

Dynamo keeps its results on code objects. A trace removes its own when it ends, and no setting of torch is different
afterwards. What other threads compile meanwhile is compiled once more; traces themselves take turns
(`latpred.runtimes.lowering`).
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from latpred.errors import RuntimeRefusalError
from latpred.graph.graph import Affine, Op
from latpred.runtimes.base import rereading
from latpred.runtimes.inductor import fake_cuda
from latpred.runtimes.inductor.compiled_ops import EAGER_CLASS, KernelCall, calls_of, executed_op, guards
from latpred.sandbox.fingerprint import fingerprint
from latpred.sandbox.own_thread import replaced, silenced
from latpred.sandbox.untouched import copied
from latpred.tracing.op_record import OpInfo, OpRecord, describe, launching, leaves, no_launch, sync
from latpred.tracing.trace_pass import read_of

# Raise the VERSION of `compile` with it: what was refused is kept as an estimate.
SUPPORTED = ("2.11", "2.12", "2.13", "2.14", "2.15")
MANY = 1_000_000  # compilations of one function: models whose layers each break off a graph of their own
_DYNAMO = {
    "accumulated_recompile_limit": MANY,
    "disable": False,
    "fail_on_recompile_limit_hit": True,
    "suppress_errors": False,
}
_INDUCTOR = {
    "force_disable_caches": True,
    "joint_graph_constant_folding": False,
    "shape_padding": False,  # would time products with and without it on the device
}


def compiled(model: torch.nn.Module, most: int, **options: Any) -> Any:
    """`torch.compile` with static shapes; from now on one function may be compiled at least so many times."""
    import torch._dynamo.config as dynamo

    dynamo.recompile_limit = max(dynamo.recompile_limit, most)
    return torch.compile(model, dynamic=False, **options)


@contextlib.contextmanager
def _isolated() -> Iterator[None]:
    """What is compiled within it is forgotten when it ends, as are all settings made in it.

    Results on code objects that were compiled before stay with those of the user's own models.
    """
    import torch._dynamo.config as dynamo
    import torch._dynamo.eval_frame as frames
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    backends, limit = set(frames.cached_backends), dynamo.recompile_limit
    before = {code for code in _codes() if _entries(code)}
    with (
        dynamo.patch(_DYNAMO),
        functorch.patch(enable_autograd_cache=False),
        inductor.patch(_INDUCTOR),
        replaced(frames, "_callback_from_stance", lambda callback: callback),  # whatever `set_stance` said
    ):
        try:
            yield
        finally:
            dynamo.recompile_limit = limit
            for code in _codes():
                if _entries(code) and code not in before:
                    frames.reset_code(code)  # type: ignore[attr-defined]
            for backend in set(frames.cached_backends) - backends:
                del frames.cached_backends[backend]


def _codes() -> list[Any]:
    """Code objects that Dynamo has looked at and that still live."""
    from torch._dynamo.convert_frame import input_codes

    return [code for code in (reference() for reference in input_codes.seen) if code is not None]


def _entries(code: Any) -> int:
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    return len(_debug_get_cache_entry_list(code))


def supported() -> None:
    """Refuse a torch whose Inductor nobody looked into, and one that compiles nothing or freezes what it compiles."""
    version = ".".join(torch.__version__.split(".")[:2])
    if version not in SUPPORTED:
        raise RuntimeRefusalError(
            f"What torch.compile runs is counted with torch {SUPPORTED[0]} to {SUPPORTED[-1]}, and this is "
            f"{torch.__version__}. Install torch=={SUPPORTED[-1]}.* to have it counted."
        )
    import torch._inductor.config as inductor

    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        raise RuntimeRefusalError("TORCHDYNAMO_DISABLE=1 keeps torch.compile from compiling anything; unset it.")
    if inductor.freezing:
        raise RuntimeRefusalError(
            "Inductor's freezing is on, which latpred does not follow; set torch._inductor.config.freezing = False, or "
            "unset TORCHINDUCTOR_FREEZING."
        )


def forward(model: torch.nn.Module, inputs: Any, target: str) -> tuple[Op, ...]:
    """What one forward pass executes: kernels and library calls of compiled graphs, and ops between these graphs.

    The model is on the CPU in evaluation mode, and run on real inputs; `target` ("cpu" or "cuda") is the kind of device
    to lower for. Of one that keeps what it computes the second pass counts: the first may do what no other does. One
    that Dynamo or Inductor cannot take is refused, with the reason.
    """
    again = copied(inputs, torch.clone)  # as a pass may write into a cache that it is given
    recorder = _Recorder(sum(tensor.nbytes for tensor in leaves(inputs)))
    try:
        with silenced(), _isolated(), torch.inference_mode():
            from torch._inductor.compile_fx import compile_fx

            table = fake_cuda.decompositions() if target == "cuda" else None
            backend = partial(compile_fx, inner_compile=recorder.inner, decompositions=table)
            with _capturing(recorder, target):
                followed, before = compiled(model, MANY, backend=backend), fingerprint(model)
                recorder.watch(followed, inputs)
                if before is None or fingerprint(model) != before:
                    recorder.watch(followed, again)
    except RuntimeRefusalError:
        raise
    except Exception as error:
        raise _refusal(error, target) from error
    return recorder.ops()


class _Recorder(TorchDispatchMode):
    """Sees the ops that run between compiled graphs, and is told of the graphs."""

    def __init__(self, input_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ops: list[Op] = []  # what was executed, with the bytes that were alive then
        self._weights: list[tuple[int, int, int] | None] = []  # parameters that each of them reads
        self.lowered: list[KernelCall] = []  # calls of the graph that was lowered last
        self._input_bytes = input_bytes
        self._carried = 0  # bytes that the last graph left to what follows

    def watch(self, model: Any, inputs: Any) -> None:
        """See one forward pass, in place of any before it."""
        self._ops, self._weights, self._carried = [], [], 0
        with self:
            model(**inputs) if isinstance(inputs, dict) else model(*inputs)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def inner(self, module: Any, inputs: Sequence[Any], **options: Any) -> Any:
        """Takes the place of Inductor's own inner compiler: everything but the generation of code."""
        self.lowered = _lower(module, inputs, options.get("static_input_idxs", ()))
        return lambda *_: None

    def run(self, calls: Sequence[KernelCall], inputs: int, function: Callable[..., Any], values: Sequence[Any]) -> Any:
        """Run a captured graph of so many inputs as a compiled one would be."""
        from torch.utils._python_dispatch import _disable_current_modes

        before = live = self._input_bytes + self._carried
        self._add(guards(inputs, Affine(live)), live)
        for call in calls:
            live += call.new_bytes
            place, offset = call.weight or (None, None)
            self._add(call.op, live, None if place is None else values[place], offset)
            live -= call.freed_bytes
        self._carried = max(0, live - before)
        with _disable_current_modes():
            return function(*values)

    def __torch_dispatch__(
        self, func: OpOverload[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        info = describe(func)
        if info.kind in ("decompose", "matmul") and func._can_decompose():
            with self:
                return func.decompose(*args, **options)
        out = func(*args, **options)
        given = leaves([*args, *options.values()])
        record = _record(info, args, options, out, given)
        op = executed_op(record, f"{EAGER_CLASS}.{record.host_class}")
        weight = next((tensor for tensor in given if isinstance(tensor, torch.nn.Parameter)), None)
        self._add(op, self._input_bytes + self._carried + record.new_bytes, weight)
        return out

    def ops(self) -> tuple[Op, ...]:
        """What was executed; those that read parameters once more say what was touched since."""
        return rereading(self._ops, self._weights)

    def _add(self, op: Op, live_bytes: int, weight: torch.Tensor | None = None, offset: int | None = None) -> None:
        self._ops.append(msgspec.structs.replace(op, live_bytes=Affine(live_bytes)))
        self._weights.append(read_of(weight, op.weight_bytes.constant, offset))


def _record(
    info: OpInfo, args: Sequence[Any], options: dict[str, Any], out: Any, given: Sequence[torch.Tensor]
) -> OpRecord:
    if info.kind == "item":
        return sync(info, given[0])
    storages = {tensor.untyped_storage()._cdata for tensor in given}
    shared = all(tensor.untyped_storage()._cdata in storages for tensor in leaves(out))
    if info.kind == "free" or (shared and info.kind != "mutable"):
        return no_launch(info, view=info.kind != "free")
    return launching(info, args, options, out, [isinstance(one, torch.nn.Parameter) for one in given])


@contextlib.contextmanager
def _capturing(recorder: _Recorder, target: str) -> Iterator[None]:
    """Let Inductor lower a copy of each traced graph, and run the graph itself."""
    import torch._inductor.compile_fx as compile_fx

    original = compile_fx.compile_fx_forward

    def forward_compiler(gm: Any, example_inputs: Sequence[Any], *rest: Any, **options: Any) -> Callable[..., Any]:
        copied, fakes = _copied(gm), list(example_inputs)
        with contextlib.ExitStack() as stack:
            if target == "cuda":
                fakes, mode = fake_cuda.move(copied, fakes)
                stack.enter_context(fake_cuda.present())
                stack.enter_context(_own_fake_mode(mode))
            original(copied, fakes, *rest, **options)
        calls, tensors = recorder.lowered, sum(isinstance(one, torch.Tensor) for one in fakes)

        def run(values: list[Any]) -> Any:
            taken = list(values)
            values.clear()
            return recorder.run(calls, tensors, gm.forward, taken)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    with replaced(compile_fx, "compile_fx_forward", forward_compiler):
        yield


def _copied(module: Any) -> Any:
    """A graph module of its own over the same constants."""
    copied = torch.fx.GraphModule(module, copy.deepcopy(module.graph))
    copied.meta = dict(module.meta)
    for old, new in zip(module.graph.nodes, copied.graph.nodes, strict=True):
        new.meta = dict(old.meta)
    return copied


@contextlib.contextmanager
def _own_fake_mode(mode: Any) -> Iterator[None]:
    """Make the fake tensors' own mode Inductor's and AOTAutograd's."""
    from torch._guards import TracingContext, tracing
    from torch._inductor.virtualized import V

    context, outer = TracingContext(mode), TracingContext.try_get()
    context.fw_metadata = None if outer is None else outer.fw_metadata  # says which inputs are parameters
    with tracing(context), V.set_fake_mode(mode):
        yield


def _lower(module: Any, inputs: Sequence[Any], static: Sequence[int]) -> list[KernelCall]:
    """Passes, lowering and scheduling of one graph, as Inductor goes about them before it generates code."""
    import torch._inductor.compile_fx as inductor
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes.post_grad import view_to_reshape
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), V.set_debug_handler(DebugContext()), torch.no_grad():
        view_to_reshape(module)  # type: ignore[no-untyped-call]
        mode = inductor.fake_tensor_prop(module, inputs)
        inductor._recursive_record_original_output_strides(module)
        with V.set_fake_mode(mode), inductor.maybe_disable_comprehensive_padding(inputs):
            inductor._recursive_post_grad_passes(module, is_inference=True)
            graph = GraphLowering(
                module,
                example_inputs=inputs,
                shape_env=inductor.shape_env_from_inputs(inputs),  # type: ignore[attr-defined]
                is_inference=True,
            )
            graph.freeze_runtime_asserts()
            with V.set_graph_handler(graph), V.set_extern_kernel_nodes([]):
                graph.run(*inputs)
                graph.init_wrapper_code()
                graph._update_scheduler()
                return calls_of(graph, static, cpu=graph.device_type == "cpu")


def _refusal(error: Exception, target: str) -> RuntimeRefusalError:
    """What went wrong in one sentence: Dynamo and Inductor wrap errors, and explain them further down."""
    cause: BaseException = getattr(error, "inner_exception", None) or error
    if isinstance(cause, RuntimeRefusalError):
        return cause
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    told = next((line for line in lines if line.startswith("Explanation:")), lines[0] if lines else "")
    said = f"{type(cause).__name__}: {told.removeprefix('Explanation: ')}".strip()
    return RuntimeRefusalError(f"torch.compile could not be followed through this model for {target}: {said[:300]}")
