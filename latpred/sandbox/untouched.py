"""What a trace leaves untouched: what a model holds is copied, and what its code reaches besides is put back after it.

Modules, containers and objects written in Python are copied without calling anything of theirs, each once, so that
identity holds among the copies. Shared with the original is what has no copy: files, locks, generators that have
started, objects with a finalizer (a copy would run it once more), enumerations and sentinels, and whatever holds more
than `MOST` objects.

A forward pass may also keep tensors without values in a variable of its file, on its class, in a closure or in an
`lru_cache`. So classes and functions of the user's, and those that they name, are put back; libraries keep no tensors.
"""

from __future__ import annotations

import copy
import dis
import enum
import gc
import importlib.util
import itertools
import random
import site
import sys
import sysconfig
import weakref
from argparse import Namespace
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, cached_property, lru_cache, partial
from logging import Logger
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import numpy as np
import torch

from latpred.errors import TraceError
from latpred.sandbox.own_thread import hooks_to_run

Tensor = torch.Tensor

MOST = 50_000  # objects in one attribute of a module; with more of them it is a data set or a trainer
LIBRARIES = frozenset({"torch", "torchvision", "timm", "transformers", "numpy", "latpred", *sys.stdlib_module_names})
_STATELESS = sys.stdlib_module_names - {"argparse", "types", "collections"}
_LARGEST_ARRAY = 1 << 23  # bytes of a numpy array that is copied
_KEPT_NUMEL = 1 << 20
_SMALL_NUMEL = 1 << 14  # numbers in a helper of the model's, which Python may read as well
_IMMUTABLE = frozenset(
    {
        *(str, int, float, complex, bool, bytes, range, type(None), type(Ellipsis), type, object),
        *(BuiltinFunctionType, ModuleType),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
    }
)
_STATELESS_KINDS = _IMMUTABLE | {FunctionType, Logger}  # of what a function names
_CONTAINERS = frozenset({list, tuple, set, dict, OrderedDict})
_PLAIN_CONTAINERS = frozenset({list, set, dict})  # which have no attributes
_REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})
_UNUSED = frozenset({"_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks"})
_OF_EACH = frozenset(vars(torch.nn.Module()))
SPREAD = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)  # what spreads a model over devices
_COMPILED = "_compiled_call_impl"  # what nn.Module.compile() sets
WITH_STATE = (random.Random, np.random.Generator, np.random.RandomState, itertools.count, itertools.cycle)
_ITERATORS = frozenset({type(iter(())), type(iter([])), type(iter(range(0)))})
# What an object is laid out as in memory, the most special first.
_LAYOUTS = (defaultdict, OrderedDict, dict, list, set, deque, tuple, frozenset, SimpleNamespace, object)


class _TooMuchError(Exception):
    """There is more than anybody wants to have copied."""


class Copier:
    """Copies objects, each once.

    `make` copies a tensor; it is told whether an object holds it that is neither a module nor a container. Where hooks
    are not `feeding`, those that keep something in what the model has are taken to observe only.
    """

    def __init__(self, make: Callable[[Tensor, bool], Tensor], *, feeding: bool = True) -> None:
        self.compiled = False  # whether `torch.compile` was at a module or function; the copy is as it was before
        self.kinds: set[type] = set()  # classes of the modules and objects that were copied
        self.functions: list[Any] = []  # that were met, copied or not, and objects that are called like one
        self.fed = False  # whether a hook runs that keeps something in what the model has
        self._make, self._feeding = make, feeding
        self._root: torch.nn.Module | None = None  # the first module that is copied
        self._done: dict[int, tuple[Any, Any]] = {}  # by identity: what was copied, which keeps it unique, and its copy
        self._left, self._within_object = MOST, False

    @property
    def roots(self) -> tuple[Any, ...]:
        """Classes and functions whose code runs with the copy."""
        return (*self.kinds, *self.functions)

    def module(self, source: torch.nn.Module) -> torch.nn.Module:
        """A module in evaluation mode, its parts and everything they hold."""
        if isinstance(source, torch.jit.ScriptModule):
            raise TraceError(
                "the model is or has a TorchScript module, whose ops cannot be watched; give the nn.Module behind it"
            )
        inner = source.__dict__.get("_modules", {}).get("_orig_mod")  # of torch.compile's wrapper
        self.compiled = self.compiled or inner is not None
        inner = source.module if self._root is None and isinstance(source, SPREAD) else inner
        if inner is not None:
            return self._remember(source, self.any(inner))  # type: ignore[no-any-return]
        self._root = self._root or source
        self.kinds.add(type(source))
        module: torch.nn.Module = self._remember(source, object.__new__(_without_finalizer(type(source))))
        state = module.__dict__
        state.update(source.__dict__)
        for name, value in source.__dict__.items():
            kind = type(value)
            if kind in _IMMUTABLE or (kind is tuple and _IMMUTABLE.issuperset(map(type, value))):
                continue
            if kind in _CONTAINERS and not value:
                # The hooks that a module does not have are a dozen; anything else may be shared with one of them.
                state[name] = kind() if name in _OF_EACH else self.any(value)
            elif name in _REGISTERED:
                state[name] = kind([(key, self.any(part)) for key, part in value.items()])
            elif name in _UNUSED:
                state[name] = kind(value)
            elif name == _COMPILED:
                state[name] = None
                self.compiled = True
            else:
                state[name] = self.attribute(self._running(value) if name == "_forward_hooks" else value)
        for slot in slots(type(source)):
            with suppress(AttributeError):  # it has no value
                slot.__set__(module, self.attribute(slot.__get__(source)))
        state["training"] = False
        if isinstance(source, torch.nn.DataParallel):
            state["device_ids"] = []  # it then calls what it spreads, wherever that is
        return module

    def _running(self, hooks: OrderedDict[int, Any]) -> OrderedDict[int, Any]:
        """The hooks that run with the copy."""
        changing = hooks_to_run(hooks)
        if not self._feeding or self._root is None or len(changing) == len(hooks):
            return changing
        parts = list(self._root.modules())
        held = [one for part in parts for one in (part, *part.__dict__.values()) if type(one) not in _IMMUTABLE]
        held += [one for kind in {type(part) for part in parts} for one in _variables(kind.forward)]
        kept = hooks_to_run(hooks, {id(one) for one in held})
        self.fed = self.fed or len(kept) > len(changing)
        return kept

    def attribute(self, value: Any) -> Any:
        """The copy of what a module has under a name; the very same where it holds too much."""
        outer = self._left, self._within_object
        self._left, self._within_object, before = MOST, False, len(self._done)
        try:
            return self.any(value)
        except (_TooMuchError, RecursionError):
            for key in list(self._done)[before:]:
                del self._done[key]
            return value
        finally:
            self._left, self._within_object = outer

    def any(self, value: Any) -> Any:
        """The copy of anything, or the thing itself where it has none."""
        kind = type(value)
        if kind in _IMMUTABLE:
            return value
        known = self._done.get(id(value))
        if known is not None:
            return known[1]
        if issubclass(kind, Tensor):
            return self._remember(value, self._make(value, self._within_object))
        if issubclass(kind, torch.nn.Module):
            return self.module(value)
        self._left -= len(value) if kind in _CONTAINERS else 1
        if self._left < 0:
            raise _TooMuchError
        if kind in _PLAIN_CONTAINERS and _holds_no_objects(value):
            return self._remember(value, value.copy())
        if kind is FunctionType:
            return self._function(value)
        if kind is MethodType:
            return self._remember(value, MethodType(self.any(value.__func__), self.any(value.__self__)))
        if kind is weakref.ref:
            return value if value() is None else self._remember(value, weakref.ref(self.any(value())))
        if kind in (weakref.ProxyType, weakref.CallableProxyType):
            with suppress(ReferenceError):  # what it stood for is gone
                return self._remember(value, weakref.proxy(self.any(value.__repr__.__self__)))
            return value
        if kind is partial:
            given = self.any(value.args), self.any(value.keywords)
            return self._remember(value, partial(self.any(value.func), *given[0], **given[1]))
        return self._object(value, kind)

    def _object(self, value: Any, kind: type) -> Any:
        if kind is torch.Generator:
            return self._remember(value, value.clone_state())
        if kind is np.ndarray:
            return self._remember(value, value.copy()) if value.nbytes <= _LARGEST_ARRAY else value
        if isinstance(value, WITH_STATE) or kind in _ITERATORS or hasattr(kind, "__deepcopy__"):
            with suppress(Exception):
                return self._remember(value, copy.deepcopy(value))
            return value
        if issubclass(kind, (type, enum.Enum)) or hasattr(kind, "__del__"):
            return value
        layout = layout_of(kind)
        if layout is object and package(kind.__module__) in _STATELESS:
            return value  # a logger holds all loggers
        if layout in (tuple, frozenset):
            return self._frozen(value, kind, layout)
        try:
            made = layout.__new__(kind)
        except TypeError:  # of a class written in C, or an abstract one
            if callable(value):
                self.functions.append(value)
            return value
        if layout is object and _is_sentinel(value, kind):
            return value
        self.kinds.add(kind)
        self._remember(value, made)
        outer = self._within_object
        self._within_object = outer or layout is object
        self._fill(value, made, layout)
        self._within_object = outer
        return made

    def _fill(self, value: Any, made: Any, layout: Any) -> None:
        """Put copies of what an object has into one that is empty."""
        if layout in (dict, OrderedDict, defaultdict):
            for key, item in layout.items(value):
                layout.__setitem__(made, self.any(key), self.any(item))
            if layout is defaultdict:
                made.default_factory = self.any(value.default_factory)
        elif layout is deque:
            deque.__init__(made, map(self.any, deque.__iter__(value)), value.maxlen)
        elif layout in (list, set):
            layout.__init__(made, map(self.any, layout.__iter__(value)))
        self._settle(value, made)

    def _frozen(self, value: Any, kind: type, layout: Any) -> Any:
        items = [self.any(item) for item in layout.__iter__(value)]
        if all(new is old for new, old in zip(items, layout.__iter__(value), strict=True)):
            return value
        make = kind if hasattr(kind, "n_fields") else partial(layout.__new__, kind)  # as C's structures demand it
        return self._settle(value, self._remember(value, make(items)))

    def _settle(self, value: Any, made: Any) -> Any:
        """Give a copy the attributes of the original, and return it."""
        for name, item in getattr(value, "__dict__", {}).items():
            made.__dict__[name] = self.any(item)
        for slot in slots(type(value)):
            with suppress(AttributeError):  # it has no value
                slot.__set__(made, self.any(slot.__get__(value)))
        return made

    def _function(self, value: FunctionType) -> Any:
        """A function over copies of what it closes over."""
        inner = value.__dict__.get("_torchdynamo_orig_callable")
        if inner is not None:
            # `torch.compiler.disable` wraps what is not to be compiled in the same way.
            self.compiled = self.compiled or not value.__dict__.get("_torchdynamo_disable")
            return self._remember(value, self.any(inner))
        self.functions.append(value)
        alone = not (value.__closure__ or value.__dict__ or value.__defaults__ or value.__kwdefaults__)
        if alone or package(value.__module__) in LIBRARIES:
            return value
        cells = tuple(self._done.get(id(cell), (cell, None))[1] or CellType() for cell in value.__closure__ or ())
        made = FunctionType(value.__code__, value.__globals__, value.__name__, None, cells)
        self._remember(value, made)
        for cell, new in zip(value.__closure__ or (), cells, strict=True):
            if id(cell) not in self._done:
                self._remember(cell, new)
                for content in contents(cell):
                    new.cell_contents = self.any(content)
        made.__defaults__, made.__kwdefaults__ = self.any(value.__defaults__), self.any(value.__kwdefaults__)
        made.__dict__.update(self.any(value.__dict__))
        made.__qualname__, made.__module__ = value.__qualname__, value.__module__
        return made if _differ(made, value) else self._remember(value, value)

    def _remember(self, source: Any, made: Any) -> Any:
        self._done[id(source)] = source, made
        return made


def _differ(made: FunctionType, value: FunctionType) -> bool:
    """Whether anything of a function was really copied."""
    if made.__defaults__ is not value.__defaults__ or value.__kwdefaults__ or value.__dict__:
        return True
    cells = zip(made.__closure__ or (), value.__closure__ or (), strict=True)
    return any(new is not old for one, other in cells for new, old in zip(contents(one), contents(other), strict=True))


def copied(value: Any, make: Callable[[Tensor], Tensor]) -> Any:
    """The copy of anything, with a function for its tensors; the thing itself where it holds too much."""
    return Copier(lambda tensor, _: make(tensor)).attribute(value)


def keeps_values(tensor: Tensor, within_object: bool) -> bool:
    """Whether a model's tensor has its values in a trace too, as Python may read them; others have none there."""
    fractions = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    few = tensor.numel() <= (_SMALL_NUMEL if within_object else 1)
    return (few or not fractions) and not tensor.is_meta and tensor.numel() <= _KEPT_NUMEL


def layout_of(kind: type) -> Any:
    """What an object of a class is laid out as in memory."""
    return next(base for base in kind.__mro__ if base in _LAYOUTS)


def _holds_no_objects(value: Any) -> bool:
    """Whether a list, set or dictionary has nothing in it that would need a copy: a config names a thousand labels."""
    parts = (value, value.values()) if isinstance(value, dict) else (value,)
    return all(_IMMUTABLE.issuperset(map(type, part)) for part in parts)


def _without_finalizer(kind: type) -> type:
    """The class; where it has a `__del__`, one that is the same without: a copy owns none of what that would close."""
    if not hasattr(kind, "__del__"):
        return kind
    below: list[type] = type.__subclasses__(kind)  # of which Python keeps none alive
    known = (made for made in below if vars(made).get("__del__") is object.__init__)
    namespace = {"__del__": object.__init__, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    try:  # with a finalizer that does nothing
        return next(known, None) or type(kind)(kind.__name__, (kind,), namespace)
    except Exception:  # a class that allows no other below it
        return kind


def _is_sentinel(value: Any, kind: type) -> bool:
    """Whether an object without anything in it stands for something by being the one under some name."""
    if getattr(value, "__dict__", None) or next(slots(kind), None) is not None:
        return False
    home = sys.modules.get(kind.__module__)
    return home is not None and any(known is value for known in list(vars(home).values()))


def slots(kind: type) -> Iterator[MemberDescriptorType]:
    """The slots that a class and its bases have."""
    for base in kind.__mro__:
        if "__slots__" in vars(base):
            yield from (slot for slot in vars(base).values() if isinstance(slot, MemberDescriptorType))


MOST_REACHED = 20_000  # objects that are looked after
_LARGEST = 1 << 20  # numbers of a tensor that is
_PLAIN = (str, int, float, complex, bytes, type(None))
_CHANGEABLE = (dict, list, set, deque)
_TENSORLESS = LIBRARIES - {"transformers", "collections"}  # which have caches of keys and values, and UserDict
_STATEFUL = (torch.nn.Module, SimpleNamespace, Namespace)
CACHED = type(cache(id))
_ABSENT = object()


@contextmanager
def put_back(roots: Iterable[Any], *, numbers: bool = True) -> Iterator[None]:
    """Within it, code may change what it reaches from classes and functions; afterwards all of that is as before.

    Without `numbers`, tensors without values alone are taken out again.
    """
    hooks = torch.nn.modules.module
    everywhere = (*hooks._global_forward_pre_hooks.values(), *hooks._global_forward_hooks.values())
    reached = _Snapshot([*roots, *everywhere], numbers)
    try:
        yield
    finally:
        for step in reached.undo:
            step()


class _Snapshot:
    """Everything that classes and functions reach by what they name, as it is now."""

    def __init__(self, roots: list[Any], numbers: bool) -> None:
        self.undo: list[Callable[[], Any]] = []
        self._numbers = numbers
        self._seen: dict[int, Any] = {}  # keeps ids from being reused
        self._left = MOST_REACHED
        self._own = frozenset(package(getattr(root, "__module__", None)) for root in roots)
        self._waiting = roots
        while self._waiting and self._left > 0:
            value = self._waiting.pop()
            if isinstance(value, _PLAIN) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            self._left -= 1
            self._visit(value)

    def _visit(self, value: Any) -> None:
        if isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, MethodType):
            self._waiting += (value.__func__, value.__self__)
        elif isinstance(value, CACHED):
            self.undo.append(lambda: _forget(value))
            self._waiting.append(value.__wrapped__)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, torch.Tensor):
            self._tensor(value)
        elif isinstance(value, torch.Generator) and self._numbers:
            self.undo.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, (tuple, frozenset)):
            self._waiting += value
        else:
            self._object(value)

    def _class(self, kind: type) -> None:
        for base in kind.__mro__:
            if self._is_library(base.__module__) or (base is not kind and id(base) in self._seen):
                continue
            self._seen[id(base)] = base
            names = partial(type.__setattr__, base), partial(type.__delattr__, base)
            self._entries(partial(dict, vars(base)), *names)
            self._waiting += map(function_of, vars(base).values())

    def _function(self, function: FunctionType) -> None:
        if "__wrapped__" in function.__dict__:
            self._waiting.append(function.__wrapped__)  # type: ignore[attr-defined]
        for cell in function.__closure__ or ():
            if contents(cell):
                self._entries(partial(_cell, cell), partial(setattr, cell), partial(delattr, cell))
                self._waiting += contents(cell)
        self._waiting += function.__defaults__ or ()
        self._waiting += (function.__kwdefaults__ or {}).values()
        if not self._is_library(function.__module__):
            self._keep(function.__dict__)
            self._variables(function.__globals__, *_code_names(function.__code__))

    def _variables(self, space: dict[str, Any], names: Iterable[str], sets: Iterable[str]) -> None:
        """Look after what is found under names of a file."""
        if sets:
            self._entries(
                lambda: {name: space[name] for name in sets if name in space}, space.__setitem__, space.__delitem__
            )
        for name in names:
            value = space.get(name)
            if not isinstance(value, ModuleType):
                self._waiting.append(value)
            elif not self._is_library(value.__name__) and id(value) not in self._seen:
                self._seen[id(value)] = value
                inside = [other for other in names if other in vars(value)]
                self._variables(vars(value), inside, inside)

    def _object(self, value: Any) -> None:
        if isinstance(value, _CHANGEABLE):
            self._keep(value)
        elif package(type(value).__module__) in _TENSORLESS and not isinstance(value, _STATEFUL):
            return
        held = getattr(value, "__dict__", None)
        if isinstance(held, dict):
            self._keep(held)
            self._waiting.append(type(value))

    def _keep(self, value: Any) -> None:
        """Look after a container and what is in it."""
        if len(value) > self._left:
            return
        self._left -= len(value)
        if isinstance(value, dict):
            put = partial(dict.__setitem__, value), partial(dict.__delitem__, value)
            self._entries(lambda: dict(dict.items(value)), *put)
            self._waiting += list(dict.values(value))
        else:
            before = list(value)
            self.undo.append(lambda: self._refill(value, before))
            self._waiting += before

    def _tensor(self, tensor: torch.Tensor) -> None:
        small = self._numbers and tensor.numel() <= _LARGEST
        if not small or tensor.is_meta or tensor.requires_grad or tensor.is_inference():
            return
        version, before = tensor._version, tensor.detach().clone()

        def rewrite() -> None:
            if tensor._version != version:
                with torch.inference_mode(False), torch.no_grad():
                    tensor.copy_(before)

        self.undo.append(rewrite)

    def _is_library(self, module: str | None) -> bool:
        """Whether a module is of a package that has nothing to do with the model's own code."""
        name = package(module)
        return name in LIBRARIES or (name not in self._own and installed(name))

    def _entries(
        self, look: Callable[[], dict[Any, Any]], put: Callable[[Any, Any], Any], drop: Callable[[Any], Any]
    ) -> None:
        """Have what is under names, or keys, put back, touching nothing that is still there."""
        before = look()

        def restore() -> None:
            now = look()
            for name, value in now.items():
                if name not in before and self._is_undone(value):
                    drop(name)
            for name, value in before.items():
                found = now.get(name, _ABSENT)
                if found is not value and self._is_undone(found):
                    put(name, value)

        self.undo.append(restore)

    def _refill(self, value: Any, before: list[Any]) -> None:
        """Give a list, a set or a deque back what it held."""
        same = len(value) == len(before) and all(new is old for new, old in zip(value, before, strict=True))
        if same or not (self._numbers or any(map(_of_a_trace, value))):
            return
        if isinstance(value, list):
            list.__setitem__(value, slice(None), before)
        else:
            value.clear()
            (set.update if isinstance(value, set) else deque.extend)(value, before)

    def _is_undone(self, now: Any) -> bool:
        """Whether a value that was not there before is to go."""
        return self._numbers or _of_a_trace(now)


def _cell(cell: CellType) -> dict[str, Any]:
    held = contents(cell)
    return {"cell_contents": held[0]} if held else {}


def package(module: str | None) -> str:
    """The package that a module of some name belongs to."""
    return (module or "").partition(".")[0]


def _variables(function: Any) -> Iterator[Any]:
    """What a function, and those that it wraps, may keep in variables of their files."""
    while isinstance(function, FunctionType):
        own = (function.__globals__.get(name) for name in function.__code__.co_names)
        yield from (one for one in own if type(one) not in _STATELESS_KINDS and not isinstance(one, type))
        function = function.__dict__.get("__wrapped__")


def contents(cell: CellType) -> list[Any]:
    """What a variable that functions share holds; nothing where it has no value yet."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


@cache
def installed(package: str) -> bool:
    """Whether a package lies where pip puts them; one that is installed to be edited does not."""
    own = (sysconfig.get_path(name) for name in ("purelib", "platlib"))
    # A virtual environment may let in what its base and the user have.
    sites = (*own, *site.getsitepackages(), site.getusersitepackages())
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(package)
        return spec is not None and spec.origin is not None and spec.origin.startswith(sites)
    return False


def function_of(member: Any) -> Any:
    """The function of a method, a static method or a property; anything else as it is."""
    if isinstance(member, property):
        return member.fget
    if isinstance(member, cached_property):
        return member.func
    return member.__func__ if isinstance(member, (staticmethod, classmethod)) else member


@lru_cache(MOST_REACHED)
def _code_names(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The names in some code, functions within it included, and those of the variables of its file that it sets."""
    names, sets = set(code.co_names), set()
    for step in dis.get_instructions(code):
        if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            sets.add(str(step.argval))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner_names, inner_sets = _code_names(constant)
            names |= inner_names
            sets |= inner_sets
    return frozenset(names), frozenset(sets)


def _forget(cached: Any) -> None:
    """Empty an `lru_cache` that holds tensors of a trace; single results cannot be taken out of it."""
    if any(_of_a_trace(held) for held in gc.get_referents(cached)):
        cached.cache_clear()


def _of_a_trace(held: Any, depth: int = 3) -> bool:
    """Whether there is a tensor that no other forward pass can use."""
    if isinstance(held, torch.Tensor):
        return held.is_meta or held.is_inference() or type(held).__module__.startswith("torch._subclasses")
    if not depth or not isinstance(held, (list, tuple, dict)):
        return False
    return any(_of_a_trace(one, depth - 1) for one in (held.values() if isinstance(held, dict) else held))
