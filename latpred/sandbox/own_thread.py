"""Changes to the process that only the calling thread sees: silence, and functions replaced.

Users predict beside threads that train, compile, log and print. Python and PyTorch keep warning filters, loggers and
the functions of their modules for the whole process; what is put there from here acts on the thread that asked for it
and passes everybody else through.
"""

from __future__ import annotations

import builtins
import gc
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FunctionType, SimpleNamespace
from typing import Any, TypeVar

import torch
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch.overrides import _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes

_INHERITED = object()
F = TypeVar("F", bound=Callable[..., Any])
# Code, by identity, that runs with a model and is not its own: its calls are no Python of the model.
UNCOUNTED: set[int] = set()


class ThreadLock:
    """A lock that threads of a process take turns with; a forked child, which has none of the others, finds it free."""

    def __init__(self) -> None:
        self._renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.RLock()

    def held(self) -> AbstractContextManager[bool]:
        """Within it, other threads wait."""
        return self._lock


_LOCK, _TURN = ThreadLock(), ThreadLock()
TOOLS = ThreadLock()  # exporters and compilers keep marks of being at work for the whole process


def uncounted(function: F) -> F:
    """Have calls of a function not count as the model's."""
    UNCOUNTED.add(id(function.__code__))
    return function


@contextmanager
def silenced() -> Iterator[None]:
    """Drop the warnings and log records of this thread; those of other threads come through."""
    here: Any = SimpleNamespace(thread=threading.get_ident())
    here.match = lambda _: threading.get_ident() == here.thread
    ignore: Any = ("ignore", here, Warning, None, 0)  # a filter of `warnings` matches whatever its `match` says
    filters: Any = warnings.filters
    with _LOCK.held():
        filters.insert(0, ignore)
    try:
        with replaced(logging.Logger, "callHandlers", lambda *_: None):
            yield
    finally:
        here.thread = None
        with _LOCK.held():
            # Another thread within `catch_warnings` works on a copy, and puts the original back.
            current: Any = warnings.filters
            for known in (filters, current):
                if ignore in known:
                    known.remove(ignore)


@contextmanager
def replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Let this thread find another function under an attribute of a module or class; others call the usual one."""
    thread = threading.get_ident()
    with _LOCK.held():
        switch = vars(owner).get(name)
        if not isinstance(switch, _Switch):
            usual = getattr(owner, name, None) or getattr(builtins, name)  # which a module finds as its own
            switch = _Switch(vars(owner).get(name, _INHERITED), usual)
            setattr(owner, name, switch)
        switch.own.setdefault(thread, []).append(function)
    try:
        yield
    finally:
        with _LOCK.held():
            switch.own[thread].pop()
            if not switch.own[thread]:
                del switch.own[thread]
            if not switch.own and vars(owner).get(name) is switch:
                if switch.before is _INHERITED:
                    delattr(owner, name)
                else:
                    setattr(owner, name, switch.before)


class _Switch:
    """Stands where a function was, and calls the function that the calling thread has there."""

    def __init__(self, before: Any, usual: Callable[..., Any]) -> None:
        self.before = before  # what the owner's dictionary held, as a staticmethod; `_INHERITED` where it held nothing
        self._usual = usual
        self.own: dict[int, list[Callable[..., Any]]] = {}  # functions of threads that replaced it, the last one valid
        self.__name__ = getattr(usual, "__name__", "")

    @uncounted
    def __call__(self, *args: Any, **options: Any) -> Any:
        mine = self.own.get(threading.get_ident())
        return (mine[-1] if mine else self._usual)(*args, **options)

    @uncounted
    def __get__(self, instance: Any, owner: type) -> Any:
        if not isinstance(self.before, FunctionType):
            return self
        mine: Any = self.own.get(threading.get_ident())  # other threads find the method itself, which Dynamo asks for
        return (mine[-1] if mine else self.before).__get__(instance, owner)


# Hooks on all modules of the process.
_HOOKS = tuple(f"_global_{kind}_hooks" for kind in ("forward_pre", "forward", "backward_pre", "backward"))


def hooked_everywhere() -> bool:
    """Whether there are hooks on all modules of the process."""
    return any(getattr(torch.nn.modules.module, name) for name in _HOOKS)


@contextmanager
def without_modes() -> Iterator[None]:
    """Within it, this thread is in none of the modes that it has entered."""
    with ExitStack() as away:
        if _len_torch_dispatch_stack():
            away.enter_context(_disable_current_modes())
        functions = [_pop_mode() for _ in range(_len_torch_function_stack())]  # type: ignore[no-untyped-call]
        for mode in functions:  # the lowest was taken off last, and is called back first
            away.callback(_push_mode, mode)
        yield


@contextmanager
def unhooked() -> Iterator[None]:
    """Within it, modules of this thread run without hooks on all modules, as a counter sets them.

    What calls them is PyTorch's own code, so that nothing else about a call is different.
    """
    if not hooked_everywhere():
        yield
        return
    usual: Any = torch.nn.Module._call_impl
    scope = usual.__globals__ | {name: {} for name in _HOOKS}
    with replaced(torch.nn.Module, "_call_impl", FunctionType(usual.__code__, scope, usual.__name__)):
        yield


@contextmanager
def no_autocast() -> Iterator[None]:
    """Within it, this thread is in no autocast that it has entered."""
    on = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    for kind in on:
        torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        for kind in on:
            torch.set_autocast_enabled(kind, True)


@uncounted
def profiled_by(profiler: Any) -> None:
    """Have this thread profiled by what `sys.getprofile` gave; one written in C may start by `enable` or not at all."""
    known = profiler is None or callable(profiler)
    sys.setprofile(profiler if known else None)
    if not known and hasattr(profiler, "enable"):
        profiler.enable()
    elif not known:
        message = f"the profiler {type(profiler).__name__} cannot go on after it was halted; start it anew"
        warnings.warn(message, RuntimeWarning, stacklevel=3)


@contextmanager
def unwatched() -> Iterator[None]:
    """Within it, no debugger or profiler watches this thread, under which calls from Python take much longer."""
    tracer, profiler = sys.gettrace(), sys.getprofile()
    monitoring: Any = getattr(sys, "monitoring", None)  # what they may use from Python 3.12 on
    tools = [tool for tool in range(6) if monitoring is not None and monitoring.get_tool(tool)]
    # Events are those of all threads: those that rest already are for another thread to bring back.
    events = {tool: seen for tool in tools if (seen := monitoring.get_events(tool))}
    sys.settrace(None)
    sys.setprofile(None)
    for tool in events:
        monitoring.set_events(tool, 0)
    try:
        yield
    finally:
        for tool, seen in events.items():
            monitoring.set_events(tool, seen)
        profiled_by(profiler)
        sys.settrace(tracer)


@contextmanager
def uncompiled() -> Iterator[set[str]]:
    """Within it, Dynamo leaves what this thread runs alone; a trace would make it compile the recorder.

    Gives a set that is empty as long as nothing was called that is compiled. The same for all threads would be
    `torch.compiler.set_stance("force_eager")`.
    """
    met: set[str] = set()
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None:  # nothing was compiled in this process
        yield met
        return

    def eager(callback: object) -> object:
        if callback in (None, False):  # of a function that is never to be compiled
            return callback
        operators: Any = sys.modules.get("torch._higher_order_ops.utils")  # which compile themselves where nothing does
        if not getattr(operators, "_in_hop_compile", bool)():
            met.add("compiled")
        count(-1)  # PyTorch 2.13 counts frames from 0 on where all is to be compiled, and fails where there were none
        return None

    count = getattr(frames, "set_fullgraph_compiled_frame_count", int)
    with replaced(frames, "_callback_from_stance", eager):
        yield met


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep the garbage collector away for a few milliseconds: what it frees, and when, would be counted as the model's.

    It has one switch for all threads, so those that want it off take turns.
    """
    with _TURN.held():
        enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if enabled:
                gc.enable()
