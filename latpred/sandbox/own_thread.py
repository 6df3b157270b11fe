"""Changes to the process that only the calling thread sees: silence, and functions replaced.

Users predict beside threads that train, compile, log and print. Python and PyTorch keep warning filters, loggers and
the functions of their modules for the whole process; what is put there from here acts on the thread that asked for it
and passes everybody else through.
"""

from __future__ import annotations

import builtins
import dis
import gc
import logging
import os
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from inspect import CO_VARARGS, getargs
from itertools import pairwise
from types import CellType, CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any, TypeVar

import torch
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch.overrides import _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes

_INHERITED = object()
_collector_off = False  # by `no_collection`
F = TypeVar("F", bound=Callable[..., Any])
# Code, by identity, that runs with a model and is not its own: its calls are no Python of the model.
UNCOUNTED: set[int] = set()


def _in_children(renew: Callable[[], None]) -> None:
    """Have something done in each process that is forked from this one, where it begins."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=renew)


class ThreadLock:
    """A lock that threads of a process take turns with; a forked child, which has none of the others, finds it free."""

    def __init__(self) -> None:
        self._renew()
        _in_children(self._renew)

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


def hooks_to_run(
    hooks: OrderedDict[int, Callable[..., Any]], held: Collection[int] = ()
) -> OrderedDict[int, Callable[..., Any]]:
    """The hooks that change what a module gives, or may write into what is `held`, by identity; others only observe."""
    needed = (number for number, hook in hooks.items() if _feeds_model(hook, held) or not _only_observes(hook))
    return OrderedDict((number, hooks[number]) for number in needed)


def _called(hook: Any) -> tuple[Any, list[Any], dict[str, Any]]:
    """What partial functions and methods call in the end, and what they give it before, and beside, their arguments."""
    first: list[Any] = []
    named: dict[str, Any] = {}
    while isinstance(hook, (partial, MethodType)):
        if isinstance(hook, partial):
            hook, first, named = hook.func, [*hook.args, *first], hook.keywords | named
        else:
            hook, first = hook.__func__, [hook.__self__, *first]
    if not isinstance(hook, FunctionType):  # a `__call__` that it inherits is rare, and then the hook runs
        hook, first = vars(type(hook)).get("__call__"), [hook, *first]
    return hook, first, named


def _feeds_model(hook: Any, held: Collection[int]) -> bool:
    """Whether a hook may keep something where the model finds it again, or hand tensors to what writes into them."""
    if not held:
        return False
    function, first, named = _called(hook)
    calls = [function] if isinstance(function, FunctionType) else []
    own = [*first, *named.values()]
    for one in calls:  # which functions of the same file join
        found = _found_by(one)
        own += found
        known = one.__globals__
        calls += (f for f in found if isinstance(f, FunctionType) and f.__globals__ is known and f not in calls)
    if any(id(one) in held for one in own):
        return True
    module = set(calls[0].__code__.co_varnames[len(first) :][:1]) if calls else set()
    return any(_writes(f.__code__, set(getargs(f.__code__).args) if n else module) for n, f in enumerate(calls))


def _found_by(function: FunctionType) -> list[Any]:
    """What a function closes over, its defaults, and the variables of its file that it names."""
    own = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    own += function.__defaults__ or ()
    return own + [function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__]


def _only_observes(hook: Any) -> bool:
    """Whether a hook can only observe: it returns nothing, writes in place into no tensor, and is not torch's own."""
    function, first, named = _called(hook)
    if not isinstance(function, FunctionType) or (function.__module__ or "").partition(".")[0] == "torch":
        return False
    code, before = function.__code__, len(first) + 1  # the module comes next
    given = set(code.co_varnames[before : code.co_argcount - len(function.__defaults__ or ())]) - set(named)
    if code.co_flags & CO_VARARGS:
        given.add(code.co_varnames[code.co_argcount + code.co_kwonlyargcount])
    return not _writes(code, given) and not _returns(code)


_STORES = ("STORE_SUBSCR", "STORE_SLICE", "STORE_ATTR")
_HANDED_ON = ("UNPACK_SEQUENCE", "GET_ITER", "FOR_ITER")  # what they give is of the same source
_PARTS = ("BINARY_SUBSCR", "BINARY_SLICE", "CALL", "CALL_KW", "CALL_FUNCTION_EX")  # of what their text begins with
_NO_VIEWS = frozenset(  # attributes that share nothing with the tensor
    {
        *("shape", "size", "numel", "ndim", "dim", "item", "tolist"),
        *("clone", "abs", "sum", "mean", "std", "var", "norm", "max", "min"),
    }
)


def _in_place(code: CodeType) -> bool:
    """Whether a function calls something that writes in place, by its name, as `add_`, or by those of arguments."""
    named = any(name.endswith("_") and not name.startswith("_") for name in code.co_names)
    return named or any(isinstance(part, tuple) and not {"out", "inplace"}.isdisjoint(part) for part in code.co_consts)


def _writes(code: CodeType, given: set[str]) -> bool:
    """Whether a function may write in place into the tensors that it is `given` under these names."""
    steps = list(dis.get_instructions(code))
    after = [other.argval for one, other in pairwise(steps) if one.argval == "setattr"]
    # Python 3.13 loads two variables in one step.
    set_by_name = any(given.intersection(names[:1] if isinstance(names, tuple) else (names,)) for names in after)
    if set_by_name or _in_place(code):
        return True
    source: str | None = None  # the variable that the latest value is taken from
    begins: dict[tuple[int | None, int | None], str | None] = {}  # of each place in the text: the variable there
    for step in steps:
        place = (step.positions.lineno, step.positions.col_offset) if step.positions else (None, None)
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        if "_FAST" in step.opname:
            first, last = names[0], names[-1]
            if step.opname.startswith("STORE_FAST"):
                given |= {first} if source in given else set()
            else:
                begins[place] = source = first
            if len(names) > 1 and step.opname.endswith("STORE_FAST"):  # the second value is of the same source
                given |= {last} if source in given else set()
            elif len(names) > 1:  # Python 3.13 loads it in the same step, which has the place of the first alone
                begins[place[0], None] = source = last
        elif step.opname in _STORES or (step.opname == "BINARY_OP" and step.argrepr.endswith("=")):
            if begins.get(place, begins.get((place[0], None))) in given:
                return True
            source = None
        elif step.opname == "LOAD_GLOBAL":
            begins[place] = source = None
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            begins[place] = source = None if step.argval in _NO_VIEWS else begins.get(place, source)
        elif step.opname not in _HANDED_ON:
            part = step.opname in _PARTS or step.argrepr == "[]"  # as Python 3.14 says BINARY_SUBSCR
            source = begins.get(place) if part else None
    return False


def _returns(code: CodeType) -> bool:
    """Whether a function may return anything but None."""
    returned = [
        step if step.opname == "RETURN_CONST" else before
        for before, step in pairwise(dis.get_instructions(code))
        if step.opname in ("RETURN_CONST", "RETURN_VALUE")
    ]
    return any(step.opname not in ("RETURN_CONST", "LOAD_CONST") or step.argval is not None for step in returned)


_MODULE = torch.nn.modules.module
_FORWARD = ("_global_forward_pre_hooks", "_global_forward_hooks")
_BACKWARD = ("_global_backward_pre_hooks", "_global_backward_hooks")  # of which no forward pass makes use


@contextmanager
def without_modes() -> Iterator[None]:
    """Within it, this thread is in none of the modes that it has entered."""
    with ExitStack() as away:
        modes: list[Any] = []
        if _len_torch_dispatch_stack():
            modes += away.enter_context(_disable_current_modes())
        functions = [_pop_mode() for _ in range(_len_torch_function_stack())]  # type: ignore[no-untyped-call]
        for mode in functions:  # the lowest was taken off last, and is called back first
            away.callback(_push_mode, mode)
        if modes or functions:
            _mute_hooks_of([*modes, *functions], away)
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


class _Muted:
    """A hook on all modules that does nothing in one thread.

    It takes the hook's place, so that other threads' modules call the hook as ever, and may iterate over all of them.
    """

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook, self._thread = hook, threading.get_ident()

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or threading.get_ident() == self._thread:
            return None
        return self.hook(*args)


def _mute_hooks_of(modes: Sequence[Any], away: ExitStack) -> None:
    """Have this thread not call the hooks on all modules that belong to some modes, as a counter's."""
    held = [part for mode in modes for part in vars(mode).values()]
    owners = {id(part) for one in (*modes, *held) for part in (one, *getattr(one, "__dict__", {}).values())}
    for name in (*_FORWARD, *_BACKWARD):
        hooks: OrderedDict[int, Any] = getattr(_MODULE, name)
        for key, hook in list(hooks.items()):
            if id(getattr(hook, "__self__", None)) in owners:
                hooks[key] = _Muted(hook)
                away.callback(_unmute, hooks, key, hooks[key])


def _unmute(hooks: OrderedDict[int, Any], key: int, silent: _Muted) -> None:
    if hooks.get(key) is silent:  # else it was removed meanwhile
        hooks[key] = silent.hook


@contextmanager
def unhooked() -> Iterator[None]:
    """Within it, modules of this thread run without the hooks on all modules that only observe, as a counter's.

    What calls them is PyTorch's own code, so that nothing else about a call is different.
    """
    hooks: dict[str, OrderedDict[int, Any]] = {name: getattr(_MODULE, name) for name in (*_FORWARD, *_BACKWARD)}
    kept = {name: OrderedDict[int, Any]() for name in _BACKWARD}
    for name in _FORWARD:
        kept[name] = hooks_to_run(OrderedDict((key, hook) for key, hook in hooks[name].items() if not _left_out(hook)))
    if kept == hooks:
        yield
        return
    usual: Any = torch.nn.Module._call_impl
    call = FunctionType(usual.__code__, {**usual.__globals__, **kept}, usual.__name__, usual.__defaults__)
    with replaced(torch.nn.Module, "_call_impl", call):
        yield


def _left_out(hook: Any) -> bool:
    """Whether a hook on all modules is that of a mode, or PyTorch's own: one of its counters follows where it is."""
    return isinstance(hook, _Muted) or (getattr(hook, "__module__", None) or "").partition(".")[0] == "torch"


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
    global _collector_off
    with _TURN.held():
        enabled = gc.isenabled()
        _collector_off = _collector_off or enabled
        gc.disable()
        try:
            yield
        finally:
            if enabled:
                gc.enable()
                _collector_off = False


def _collect_again() -> None:
    """Switch the collector on where a thread that is not in this process switched it off for a moment."""
    global _collector_off
    if _collector_off:
        gc.enable()
        _collector_off = False


_in_children(_collect_again)
