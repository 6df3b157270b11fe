"""What a user has set to watch everything that a thread runs, kept away from walks: modes, and hooks on all modules.

`FlopCounterMode`, `with torch.device(...)`, `torch.set_default_device` and modes of one's own see each op, or stand
between it and PyTorch. A walk is no work of the user's: it is to give what it gives elsewhere, and a counter is not to
count it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes

from latpred.tracing.hooks import running

_MODULE = torch.nn.modules.module
_FORWARD = ("_global_forward_pre_hooks", "_global_forward_hooks")
_BACKWARD = ("_global_backward_pre_hooks", "_global_backward_hooks")  # of which no forward pass makes use


@contextmanager
def without_modes() -> Iterator[None]:
    """Within it, this thread is in none of the modes that it has entered.

    >>> with torch.device("meta"), without_modes():
    ...     torch.zeros(1).device
    device(type='cpu')
    """
    with ExitStack() as away:
        modes: list[Any] = []
        if _len_torch_dispatch_stack():
            modes += away.enter_context(_disable_current_modes())
        functions = [_pop_mode() for _ in range(_len_torch_function_stack())]  # type: ignore[no-untyped-call]
        away.callback(_enter_again, functions)
        if modes or functions:
            _unhook([*modes, *functions], away)
        yield


def _enter_again(modes: list[TorchFunctionMode]) -> None:
    for mode in reversed(modes):
        _push_mode(mode)  # type: ignore[no-untyped-call]


def _unhook(modes: Sequence[Any], away: ExitStack) -> None:
    """Take away the hooks on all modules that belong to some modes, as a counter's which follows modules by them."""
    held = [part for mode in modes for part in _parts(mode)]
    owners = {id(part) for one in (*modes, *held) for part in (one, *_parts(one))}
    for name in (*_FORWARD, *_BACKWARD):
        hooks: OrderedDict[int, Any] = getattr(_MODULE, name)
        theirs = {key: hook for key, hook in hooks.items() if id(getattr(hook, "__self__", None)) in owners}
        for key in theirs:
            del hooks[key]
        if theirs:
            away.callback(_hook_again, hooks, theirs)


def _parts(holder: Any) -> list[Any]:
    return list(getattr(holder, "__dict__", {}).values())


def _hook_again(hooks: OrderedDict[int, Any], theirs: dict[int, Any]) -> None:
    hooks.update(theirs)
    for key in sorted(hooks):  # the order in which they were set
        hooks.move_to_end(key)


def leave_hooks_out(module: torch.nn.Module) -> None:
    """Have a copy of a module run without the hooks on all modules that only look on, as a counter's."""
    call = _call()
    if call is not None:
        module.__dict__["_call_impl"] = MethodType(call, module)


def _call() -> Callable[..., Any] | None:
    """What calls a module, with other hooks on all modules; None where there are none to leave out.

    It is PyTorch's own code, so that nothing else about a call is different.
    """
    hooks: dict[str, OrderedDict[int, Any]] = {name: getattr(_MODULE, name) for name in (*_FORWARD, *_BACKWARD)}
    kept = {name: OrderedDict[int, Any]() for name in _BACKWARD}
    for name in _FORWARD:
        kept[name] = running(OrderedDict((key, hook) for key, hook in hooks[name].items() if not _of_torch(hook)))
    if kept == hooks:
        return None
    usual: Any = torch.nn.Module._call_impl
    return FunctionType(usual.__code__, {**usual.__globals__, **kept}, usual.__name__, usual.__defaults__)


def _of_torch(hook: Any) -> bool:
    """Whether a hook on all modules is PyTorch's own: one of its counters follows through it where it is."""
    return (getattr(hook, "__module__", None) or "").partition(".")[0] == "torch"
