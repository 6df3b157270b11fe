"""torch.autocast in a trace: which ops it casts the arguments of, and its casts, which are ops like any other.

The meta device has no dispatch key for autocast, so what the keys of CPU and CUDA do is done here, at the ops that they
do it at: those that Python or a composite op calls, and nothing inside of these. Which ops are known to a key, the
installed torch says; what is done about them is `aten/src/ATen/autocast_mode.h`'s. A model that enters autocast in its
forward pass is traced as it runs: its trace starts anew with torch's own switches followed, which no other trace does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload

from latpred.query import ERA
from latpred.sandbox.own_thread import replaced, uncounted
from latpred.tracing.inputs import AUTOCAST
from latpred.tracing.op_record import leaves

if TYPE_CHECKING:
    from latpred.tracing.tracer import TraceRecorder

Tensor = torch.Tensor
Arguments = tuple[Sequence[Any], dict[str, Any]]
aten = torch.ops.aten

OWN = "the model enters torch.autocast in its own forward pass: its casts are those of a {} device"
_USUAL = {"cpu": torch.bfloat16, "cuda": torch.float16}
_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
# Run in the lower precision.
_LOWER = frozenset(
    {
        *("conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        *("_convolution", "convolution", "cudnn_convolution", "cudnn_convolution_transpose", "prelu"),
        *("linear", "matmul", "mm", "bmm", "mv", "addmm", "addmv", "addr", "addbmm", "baddbmm", "_addmm_activation"),
        *("einsum", "chain_matmul", "linalg_multi_dot", "linalg_vecdot", "_thnn_fused_lstm_cell"),
        *("_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "mkldnn_rnn_layer"),
        *("scaled_dot_product_attention", "_scaled_dot_product_flash_attention", "_native_multi_head_attention"),
    }
)
# Composite ops that a trace keeps whole though no key knows them: what they consist of is run in the lower precision.
_LAYERS = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
_LOWER_WITHIN = _LAYERS | {"lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"}
# Are told to give fp32 where nothing else is said; most read the lower precision and convert as they go.
_STATED = frozenset(
    {*("softmax", "log_softmax", "sum", "prod", "cumsum", "cumprod"), *("linalg_vector_norm", "linalg_matrix_norm")}
)
# Run in the widest precision among their arguments. All others that a key knows run in fp32.
_WIDEST = {
    "cpu": frozenset({"stack", "cat", "index_copy"}),
    "cuda": frozenset(
        {
            *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put"),
            *("tensordot", "scatter_add"),
        }
    ),
}


class EntersAutocastError(BaseException):
    """The model makes use of torch.autocast, whose switches this pass does not follow; no model is to catch it."""


def means_autocast(error: Exception) -> bool:
    """Whether torch.autocast refused a device, as it does where its switches are not followed."""
    said = ("unsupported autocast", "unknown device type for autocast", "Disabling autocast", "unsupported scalarType")
    return any(words in str(error) for words in said)


class Autocast:
    """What torch.autocast is set to on one kind of device, "cpu" or "cuda", and what it then does to a pass's ops."""

    def __init__(self, target: str, *, follows: bool) -> None:
        self.target = target
        self._mine = (target, "meta")  # the devices that a model may name for it
        self.entered = False  # whether it was ever switched on
        # Whether torch's switches are followed: where autocast is asked for, and where the caller is in one itself.
        self.follows = follows or _nesting() > 0
        self._enabled, self._dtype, self._caching = False, _USUAL[target], True
        self._nesting = 0
        self._casts: dict[int, tuple[Tensor, Tensor]] = {}  # weights by their identity, and what they were cast to
        self._recorder: TraceRecorder  # of the pass
        self._within = False  # whether an op is at work inside of which nothing is cast

    @contextmanager
    def of(self, recorder: TraceRecorder, dtype: torch.dtype | None) -> Iterator[None]:
        """The context of one pass; within it everything runs under autocast to `dtype`, if that is given."""
        self._recorder, self._dtype = recorder, dtype or _USUAL[self.target]
        if not self.follows:
            recorder.intercept = self._refuse
            try:
                yield
            finally:
                recorder.intercept = None
            return
        self._nesting = int(dtype is not None)
        with ExitStack() as stack:  # this thread's calls of torch's switches come here; meta stands for the target
            for owner, name, function in self._switches():
                stack.enter_context(replaced(owner, name, function))
            self._switch(dtype is not None)
            try:
                yield
            finally:
                self._switch(False)
                self._nesting, self._caching = 0, True
                self._casts.clear()

    def _switches(self) -> list[tuple[Any, str, Callable[..., Any]]]:
        found: list[tuple[Any, str, Callable[..., Any]]] = [
            (torch, "is_autocast_enabled", self._is_enabled),
            (torch, "set_autocast_enabled", self._set_enabled),
            (torch, "get_autocast_dtype", self._dtype_on),
            (torch, "set_autocast_dtype", self._set_dtype),
            (torch, "is_autocast_cache_enabled", self._is_caching),
            (torch, "set_autocast_cache_enabled", partial(setattr, self, "_caching")),
            (torch, "autocast_increment_nesting", partial(self._nest, 1)),
            (torch, "autocast_decrement_nesting", partial(self._nest, -1)),
            (torch, "clear_autocast_cache", self._casts.clear),
            (torch.amp.autocast_mode, "is_autocast_available", lambda device: device in (*_USUAL, "meta")),
            (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
            (torch.cuda, "is_bf16_supported", lambda: True),
            (sys.modules.get("transformers.utils.generic"), "nullcontext", self._off),
        ]
        return [row for row in found if hasattr(row[0], row[1])]

    @uncounted
    def _is_enabled(self, device: str = "cuda") -> bool:
        return self._enabled and device in self._mine

    @uncounted
    def _set_enabled(self, device: str, enabled: bool) -> None:
        if device in self._mine:
            self._switch(enabled)
        else:
            self._recorder.asked_target |= enabled  # on that kind of device other ops would run

    @uncounted
    def _dtype_on(self, device: str) -> torch.dtype:
        return self._dtype if device in self._mine else _USUAL.get(device, torch.bfloat16)

    @uncounted
    def _set_dtype(self, device: str, dtype: torch.dtype) -> None:
        if device in self._mine:
            self._dtype = dtype

    @uncounted
    def _is_caching(self) -> bool:
        return self._caching

    @uncounted
    def _off(self) -> Any:
        """What transformers enters on the meta device, where it would do nothing, to have no autocast."""
        return torch.autocast("meta", enabled=False) if self._enabled else nullcontext()

    @uncounted
    def _nest(self, more: int) -> int:
        self._nesting += more
        return self._nesting

    @uncounted
    def _switch(self, enabled: bool) -> None:
        self._enabled = enabled
        self.entered = self.entered or enabled
        self._recorder.asked_target |= enabled
        self._recorder.intercept = self._cast_first if enabled else None

    def _refuse(self, func: OpOverload[..., Any], args: Sequence[Any], options: dict[str, Any]) -> Any:
        """End a pass whose model has entered autocast."""
        if _nesting():
            raise EntersAutocastError
        return self._recorder.handle(func, args, options)

    def _cast_first(self, func: OpOverload[..., Any], args: Sequence[Any], options: dict[str, Any]) -> Any:
        """Record the casts of an op's arguments, then the op."""
        rule = None if self._within else _rule(_reached(func, args, options), self.target)
        if rule is None:
            return self._recorder.handle(func, args, options)
        self._within = True
        try:
            return self._recorder.handle(func, *self._under(rule, func, args, options))
        finally:
            self._within = False

    def _under(self, rule: str, func: OpOverload[..., Any], args: Sequence[Any], options: dict[str, Any]) -> Arguments:
        """The arguments of an op as autocast hands them on."""
        if rule == "stated":
            return self._stated(func, args, options)
        given = [leaf for value in (*args, *options.values()) for leaf in leaves(value)]
        wide = rule == "single" or (rule == "widest" and any(tensor.dtype is torch.float32 for tensor in given))
        dtype, caching = torch.float32 if wide else self._dtype, self._caching
        self._caching = caching and rule != "flattened"
        try:
            options = {name: self._in(value, dtype) for name, value in options.items()}
            return [self._in(value, dtype) for value in args], options
        finally:
            self._caching = caching

    def _stated(self, func: OpOverload[..., Any], args: Sequence[Any], options: dict[str, Any]) -> Arguments:
        """The arguments with fp32 as what it is to give; softmax converts fp16 itself, and nothing else."""
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | options
        x = args[0]
        if not _eligible(x) or given.get("dtype") is not None:
            return args, options
        if x.dtype is torch.bfloat16 and func._schema.name.endswith("softmax"):
            x = self._cast(x, torch.float32)
        return (x, *args[1 : names.index("dtype")]), options | {"dtype": torch.float32}

    def _in(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, Tensor):
            return self._cast(value, dtype)
        return [self._in(item, dtype) for item in value] if isinstance(value, (list, tuple)) else value

    def _cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if not _eligible(tensor) or tensor.dtype is dtype:
            return tensor
        # In inference mode the torch of today casts weights at each use; that of other eras kept the casts of what
        # requires gradients until the context ended, as today's does under no_grad.
        kept = ERA.get() and self._caching and dtype is self._dtype and tensor.dtype is torch.float32
        if not (kept and tensor.requires_grad and tensor.is_leaf) or tensor._is_view():
            return self._recorded(tensor, dtype)
        if id(tensor) not in self._casts:
            self._casts[id(tensor)] = tensor, self._recorded(tensor, dtype)
        return self._casts[id(tensor)][1]

    def _recorded(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        made: Tensor = self._recorder.handle(aten.to.dtype, (tensor, dtype), {})
        self._recorder.nested[-1] = True  # no Python calls it
        return made


class _UnderAutocast(torch.nn.Module):
    """A model whose every forward pass runs in a `torch.autocast` of its own."""

    def __init__(self, model: torch.nn.Module, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self._context = model, (device, dtype)

    def forward(self, *args: Any, **options: Any) -> Any:
        with torch.autocast(*self._context):
            return self.model(*args, **options)


def under_autocast(model: torch.nn.Module, precision: str, device: str) -> torch.nn.Module:
    """The model as a precision has it run on a kind of device: itself, but for those under autocast."""
    dtype = AUTOCAST.get(precision)
    return model if dtype is None else _UnderAutocast(model, device, dtype).eval()


def _eligible(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype.is_floating_point and value.dtype is not torch.float64


def _nesting() -> int:
    """How many contexts of torch.autocast this thread is in, those included that are switched off."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


_PADS = {"reflect": "reflection", "replicate": "replication"}


def _reached(func: OpOverload[..., Any], args: Sequence[Any], options: dict[str, Any]) -> OpOverload[..., Any]:
    """The op that keys of autocast know of one which a trace keeps whole: what that calls."""
    name, overload = func._schema.name, func._schema.overload_name
    if overload == "vec":  # of resampling
        return func.overloadpacket.default  # type: ignore[no-any-return]
    if name == "aten::pad":
        mode = options.get("mode", args[2] if len(args) > 2 else "constant")
        if mode in _PADS:
            return getattr(aten, f"{_PADS[mode]}_pad{len(args[1]) // 2}d").default  # type: ignore[no-any-return]
    return func


@cache
def _rule(func: OpOverload[..., Any], target: str) -> str | None:
    """What autocast does to calls of an op on a kind of device; None where it leaves them alone.

    "lower": in the lower precision; "flattened": the same of recurrent layers, for which cudnn wants weights of its own
    that are not kept; "single": in fp32; "widest": in fp32 where an argument is, else in the lower; "stated": told to
    give fp32.
    """
    name, overload = func._schema.name, func._schema.overload_name
    short = name.removeprefix("aten::")
    if short in _LAYERS and target == "cuda":
        return "flattened"
    if short in _LOWER_WITHIN or (short in _LOWER and overload == "padding"):
        return "lower"
    if short == "square" and target == "cuda":
        return "single"  # which is pow
    full = f"{name}.{overload}" if overload else name
    if short == "norm" or not torch._C._dispatch_has_kernel_for_dispatch_key(full, _KEYS[target]):
        return None
    if short in _LOWER:
        return "lower"
    if short in _WIDEST[target]:
        return "widest"
    return "stated" if short in _STATED and target == "cuda" else "single"
