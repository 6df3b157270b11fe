"""A CUDA device that exists for Inductor only: what its passes ask of a GPU, answered on a machine without one.

Kernels are never generated for it, so the answers decide only how ops are fused. They are those of an H100 whatever
the machine has, so that a trace gives the same graph everywhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch._decomp.decompositions import pw_cast_for_opmath
from torch.utils._pytree import tree_map

from latpred.sandbox.own_thread import replaced
from latpred.tracing.op_record import conv_format

CAPABILITY = (9, 0)
_PROPERTIES = SimpleNamespace(
    name="NVIDIA H100",
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=80 << 30,
    gcnArchName="",
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
    L2_cache_size=50 << 20,
)
_CPU, _CUDA = torch.device("cpu"), torch.device("cuda", 0)
_ON_HOST = 8  # a constant vector up to this long keeps its values, because Inductor folds them into kernels


@contextlib.contextmanager
def present() -> Iterator[None]:
    """Answer this thread for the device while the context lasts."""
    import torch._dynamo.device_interface as interfaces
    import torch._inductor.compile_fx as compile_fx
    import torch._inductor.scheduler as scheduler

    interface: Any = interfaces.CudaInterface
    internals: Any = torch._C
    joint_passes: Any = compile_fx._recursive_joint_graph_passes
    asked: dict[str, Any] = {"get_device_properties": lambda *_, **__: _PROPERTIES, "current_device": lambda: 0}
    patches: tuple[tuple[Any, str, Any], ...] = (
        *((owner, *answer) for owner in (torch.cuda, interface, interface.Worker) for answer in asked.items()),
        (torch.cuda, "get_device_capability", lambda *_, **__: CAPABILITY),
        (torch.cuda, "device_count", lambda: 1),
        (interface, "get_compute_capability", lambda *_, **__: 10 * CAPABILITY[0] + CAPABILITY[1]),
        (scheduler, "has_triton", lambda *_, **__: True),
        (internals, "_select_conv_backend", lambda *_, **__: internals._ConvBackend.Cudnn),
        # What cudnn keeps to.
        (internals, "_conv_determine_backend_memory_format", lambda x, weight, _: conv_format(x, weight)),
        # Patterns are traced on a device that can hold a tensor; they match on any.
        (compile_fx, "_recursive_joint_graph_passes", lambda module, *_, **__: joint_passes(module, input_device=_CPU)),
    )
    with contextlib.ExitStack() as stack:
        _forget()
        stack.callback(_forget)
        for owner, name, value in patches:
            stack.enter_context(replaced(owner, name, value))
        yield


def _forget() -> None:
    """Drop what Inductor keeps of a device: this one's answers are not to serve a real one, nor the other way round."""
    from torch._inductor import utils
    from torch._inductor.runtime.hints import DeviceProperties

    for answer in (DeviceProperties.create, utils.is_big_gpu, utils.get_max_num_sms):
        clear: Any = getattr(answer, "cache_clear", None)
        if clear is not None:
            clear()


def decompositions() -> dict[Any, Callable[..., Any]]:
    """How Inductor takes ops apart on the device: AOTAutograd, which traces on the CPU, would do as one does there."""
    from torch._inductor.decomposition import select_decomp_table

    aten, table = torch.ops.aten, dict(select_decomp_table())
    batched = table[aten.bmm.default]
    table[aten.mm.default], table[aten.addmm.default] = _mm, _addmm
    table[aten.bmm.default] = lambda a, b: batched(a, b) if a.shape[-1] == 1 else NotImplemented
    return table


@pw_cast_for_opmath
def _mm(a: torch.Tensor, b: torch.Tensor) -> Any:
    return a * b if _is_outer(a, b) else NotImplemented


@pw_cast_for_opmath
def _addmm(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    return alpha * (a * b) + beta * c if _is_outer(a, b) else NotImplemented


def _is_outer(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a product of two matrices is one of a column and a row, neither of them a single number."""
    return a.shape[1] == 1 and a.shape[0] != 1 and b.shape[1] != 1


def move(module: fx.GraphModule, inputs: Sequence[Any]) -> tuple[list[Any], Any]:
    """Make CUDA ops of a graph's CPU ops, in place; gives fake inputs on the device and the mode they belong to."""
    import torch._inductor.compile_fx as compile_fx
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(
        shape_env=compile_fx.shape_env_from_inputs(inputs),  # type: ignore[attr-defined]
        allow_non_fake_inputs=True,
    )
    for node in list(module.graph.nodes):
        if node.op == "call_function":
            _move_call(module.graph, node)
    _move_constants(module, mode)
    module.recompile()
    return [_fake(value, mode) if isinstance(value, torch.Tensor) else value for value in inputs], mode


def _fake(tensor: torch.Tensor, mode: Any) -> Any:
    from torch._subclasses.fake_tensor import FakeTensor

    with torch.no_grad():
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return FakeTensor(mode, empty, _CUDA)


def _move_call(graph: fx.Graph, node: fx.Node) -> None:
    aten = torch.ops.aten
    node.args = tree_map(_on_cuda, node.args)
    node.kwargs = tree_map(_on_cuda, dict(node.kwargs))
    if node.target is aten.convolution.default and node.args[1].meta["val"].dim() == 3:  # type: ignore[union-attr]
        _flatten(graph, node)
    elif node.target is aten._scaled_dot_product_flash_attention_for_cpu.default:
        _attention(node)


def _on_cuda(value: Any) -> Any:
    return _CUDA if isinstance(value, torch.device) and value == _CPU else value


def _flatten(graph: fx.Graph, node: fx.Node) -> None:
    """A 1-d convolution as a 2-d one of height 1: the fake kernel of the former asks for a real device."""
    aten = torch.ops.aten
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = node.args
    ahead = ([1, *stride], [0, *padding], [1, *dilation], transposed, [0, *output_padding], groups)  # type: ignore[misc]
    with graph.inserting_before(node):
        wide = [graph.call_function(aten.unsqueeze.default, (value, 2)) for value in (x, weight)]
        for plane, line in zip(wide, (x, weight), strict=True):
            plane.meta["val"] = line.meta["val"].unsqueeze(2)  # type: ignore[union-attr]
        made = graph.call_function(aten.convolution.default, (*wide, bias, *ahead))
        made.meta["val"] = node.meta["val"].unsqueeze(2)
        back = graph.call_function(aten.squeeze.dim, (made, 2))
        back.meta = dict(node.meta)
    node.replace_all_uses_with(back)
    graph.erase_node(node)


def _attention(node: fx.Node) -> None:
    """The CPU's fused attention as CUDA's memory-efficient one; whichever backend serves, it is one library call."""
    query, key, value, *rest = node.args
    options = dict(node.kwargs)
    dropout = rest[0] if rest else 0.0
    causal = rest[1] if len(rest) > 1 else False
    node.target = torch.ops.aten._scaled_dot_product_efficient_attention.default
    node.args = (query, key, value, options.get("attn_mask"), False, dropout, causal)
    node.kwargs = {"scale": options["scale"]} if options.get("scale") is not None else {}


def _move_constants(module: fx.GraphModule, mode: Any) -> None:
    for node in module.graph.nodes:
        if node.op != "get_attr":
            continue
        constant = getattr(module, node.target, None)
        if isinstance(constant, torch.Tensor) and (constant.dim() > 1 or constant.numel() > _ON_HOST):
            module._buffers.pop(node.target, None)
            module._parameters.pop(node.target, None)
            setattr(module, node.target, _fake(constant, mode))
