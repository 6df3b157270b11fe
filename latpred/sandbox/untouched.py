"""What a trace leaves untouched: what a model holds is copied, and what its code keeps besides is taken out again.

Modules, containers, functions over variables and objects written in Python are copied, each once, so that identity
holds among the copies. Everything else is shared with the original: files, locks and what else is written in C, objects
with a finalizer (a copy would run it once more), and containers of more than `MOST` things.

A forward pass may also keep tensors without values in a variable of its file, on its class, in a closure or in an
`lru_cache`. Those are taken out again where classes and functions of the user's reach them; libraries keep no tensors.
"""

from __future__ import annotations

import copy
import enum
import gc
import importlib.util
import itertools
import random
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, cached_property, lru_cache, partial
from pathlib import Path
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

from latpred.errors import LatpredError, TraceError

Tensor = torch.Tensor

MOST = 10_000  # things in a container; with more of them it is a data set or a vocabulary
LIBRARIES = frozenset({"torch", "torchvision", "timm", "transformers", "numpy", "latpred", *sys.stdlib_module_names})
_STATELESS = sys.stdlib_module_names - {"argparse", "types", "collections"}  # a logger holds all loggers
_LARGEST_ARRAY = 1 << 23  # bytes of a numpy array that is copied
_KEPT_NUMEL = 1 << 20
_SMALL_NUMEL = 1 << 14  # numbers in a helper of the model's, which Python may read as well
_IMMUTABLE = frozenset(
    {
        *(str, int, float, complex, bool, bytes, range, type(None), type(Ellipsis), type, object),
        *(BuiltinFunctionType, ModuleType, weakref.ProxyType, weakref.CallableProxyType),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
    }
)
CONTAINERS = (dict, list, set, deque, tuple)
_REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})
_OF_EACH = frozenset(vars(torch.nn.Module()))
SPREAD = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)  # what spreads a model over devices
_COMPILED = "_compiled_call_impl"  # what nn.Module.compile() sets
WITH_STATE = (random.Random, np.random.Generator, np.random.RandomState, itertools.count, itertools.cycle)


class Copier:
    """Copies objects, each once.

    `make` copies a tensor; it is told whether an object holds it that is neither a module nor a container. Without
    `hooks` the copies have no forward hooks.
    """

    def __init__(self, make: Callable[[Tensor, bool], Tensor], *, hooks: bool = True) -> None:
        self.compiled = False  # whether `torch.compile` was at a module or function; the copy is as it was before
        self.hooked = False  # whether a module has forward hooks
        self.kinds: set[type] = set()  # classes of the modules and objects that were copied
        self.functions: list[FunctionType] = []  # that were met, copied or not
        self._make, self._hooks = make, hooks
        self._done: dict[int, tuple[Any, Any]] = {}  # by identity: what was copied, which keeps it unique, and its copy
        self._within_object = False

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
        inner = source.module if isinstance(source, SPREAD) else inner
        if inner is not None:
            return self._remember(source, self.any(inner))  # type: ignore[no-any-return]
        self.kinds.add(type(source))
        module: torch.nn.Module = self._remember(source, object.__new__(type(source)))
        state = module.__dict__
        state.update(source.__dict__)
        outer, self._within_object = self._within_object, False
        for name, value in source.__dict__.items():
            kind = type(value)
            if kind in _IMMUTABLE:
                continue
            if name in _OF_EACH and not value:  # the hooks that a module does not have are a dozen
                state[name] = kind()
            elif name in _REGISTERED:
                state[name] = kind([(key, self.any(part)) for key, part in value.items()])
            elif name == _COMPILED:
                state[name] = None
                self.compiled = True
            elif name == "_forward_hooks":
                self.hooked = True
                state[name] = self.any(value) if self._hooks else kind()
            else:
                state[name] = self.any(value)
        self._fill_slots(source, module)
        self._within_object = outer
        state["training"] = False
        return module

    def any(self, value: Any) -> Any:
        """The copy of anything, or the thing itself where it has none."""
        kind = type(value)
        if kind in _IMMUTABLE:
            return value
        known = self._done.get(id(value))
        if known is not None:
            return known[1]
        if issubclass(kind, torch.nn.Module):
            return self.module(value)
        if kind is FunctionType:
            return self._function(value)
        if issubclass(kind, Tensor):
            made: Any = self._make(value, self._within_object)
        elif kind is MethodType:
            made = MethodType(self.any(value.__func__), self.any(value.__self__))
        elif kind is weakref.ref:
            made = value if value() is None else weakref.ref(self.any(value()))
        elif kind is partial:
            made = partial(self.any(value.func), *self.any(value.args), **self.any(value.keywords))
        elif kind is torch.Generator:
            made = value.clone_state()
        else:
            return self._object(value, kind)
        return self._remember(value, made)

    def _object(self, value: Any, kind: type) -> Any:
        large = value.nbytes > _LARGEST_ARRAY if kind is np.ndarray else kind in CONTAINERS and len(value) > MOST
        if large or issubclass(kind, (type, enum.Enum)) or hasattr(kind, "__del__"):
            return value
        if isinstance(value, WITH_STATE) or hasattr(kind, "__deepcopy__"):
            with suppress(Exception):
                return self._remember(value, copy.deepcopy(value))
        if isinstance(value, tuple):
            items = [self.any(item) for item in value]
            # As C's structures demand it.
            make: Callable[..., Any] = kind if hasattr(kind, "n_fields") else partial(tuple.__new__, kind)  # type: ignore[type-var]
            return self._remember(value, make(items))
        if package(kind.__module__) in _STATELESS and kind not in CONTAINERS:
            return value
        made = value
        with suppress(Exception):  # of a class written in C, or whatever else cannot be copied
            # Nothing of a plain object's is called: to be copied, some tokenizers read their files anew.
            called = isinstance(value, (*CONTAINERS, SimpleNamespace)) or hasattr(kind, "__slots__")
            made = copy.copy(value) if called else object.__new__(kind)
        known = len(self._done)
        self._remember(value, made)
        if made is value:
            return value
        self.kinds.add(kind)
        outer = self._within_object
        self._within_object = outer or not isinstance(value, CONTAINERS)
        try:
            self._fill(value, made)
        except LatpredError:
            raise
        except Exception:  # of a container that lets nobody write into it, or of nesting deeper than Python calls
            while len(self._done) > known:
                self._done.popitem()
            made = self._remember(value, value)
        finally:
            self._within_object = outer
        return made

    def _fill(self, value: Any, made: Any) -> None:
        """Put copies of what an object has in the place of that."""
        if isinstance(value, dict):
            made.clear()
            for key, item in value.items():
                made[self.any(key)] = self.any(item)
        elif isinstance(value, (list, deque)):
            for place, item in enumerate(value):
                made[place] = self.any(item)
        elif isinstance(value, set):
            made.clear()
            made.update(map(self.any, value))
        for name, item in getattr(value, "__dict__", {}).items():
            made.__dict__[name] = self.any(item)
        self._fill_slots(value, made)

    def _fill_slots(self, value: Any, made: Any) -> None:
        for kind in type(value).__mro__:
            for slot in vars(kind).values() if "__slots__" in vars(kind) else ():
                if isinstance(slot, MemberDescriptorType):
                    with suppress(AttributeError):  # it has no value
                        slot.__set__(made, self.any(slot.__get__(value)))

    def _function(self, value: FunctionType) -> Any:
        """A function over copies of what it closes over."""
        inner = value.__dict__.get("_torchdynamo_orig_callable")
        if inner is not None:
            # `torch.compiler.disable` wraps what is not to be compiled in the same way.
            self.compiled = self.compiled or not value.__dict__.get("_torchdynamo_disable")
            return self._remember(value, self.any(inner))
        self.functions.append(value)
        if not value.__closure__ or package(value.__module__) in LIBRARIES:
            return self._remember(value, value)
        cells = tuple(self._done.get(id(cell), (cell, None))[1] or CellType() for cell in value.__closure__)
        made = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        made.__kwdefaults__, made.__qualname__, made.__module__ = (
            value.__kwdefaults__,
            value.__qualname__,
            value.__module__,
        )
        self._remember(value, made)
        for cell, new in zip(value.__closure__, cells, strict=True):
            if id(cell) not in self._done:
                self._remember(cell, new)
                for content in contents(cell):
                    new.cell_contents = self.any(content)
        made.__dict__.update(self.any(value.__dict__))
        return made

    def _remember(self, source: Any, made: Any) -> Any:
        self._done[id(source)] = source, made
        return made


def copied(value: Any, make: Callable[[Tensor], Tensor]) -> Any:
    """The copy of anything, with what a function makes of each tensor; one that is there twice stays one."""
    return Copier(lambda tensor, _: make(tensor)).any(value)


def keeps_values(tensor: Tensor, within_object: bool) -> bool:
    """Whether a model's tensor has its values in a trace too, as Python may read them; others have none there."""
    fractions = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    few = tensor.numel() <= (_SMALL_NUMEL if within_object else 1)
    return (few or not fractions) and not tensor.is_meta and tensor.numel() <= _KEPT_NUMEL


MOST_REACHED = 20_000  # objects that are looked after
CACHED = type(cache(id))
_ABSENT = object()
_UNCHANGING = _IMMUTABLE - {type}  # classes have variables


@contextmanager
def put_back(roots: Iterable[Any]) -> Iterator[None]:
    """Within it, code may keep tensors of a trace in what it reaches from classes and functions; then they are gone."""
    reached = _Reached(list(roots))
    try:
        yield
    finally:
        for step in reached.undo:
            step()


class _Reached:
    """Everything that classes and functions reach by what they name, and how tensors of a trace are taken out of it."""

    def __init__(self, roots: list[Any]) -> None:
        self.undo: list[Callable[[], Any]] = []
        self._seen: dict[int, Any] = {}  # keeps ids from being reused
        self._own = frozenset(package(getattr(root, "__module__", None)) for root in roots)
        self._waiting = roots
        while self._waiting and len(self._seen) < MOST_REACHED:
            value = self._waiting.pop()
            if type(value) not in _UNCHANGING and self._is_new(value):
                self._visit(value)

    def _is_new(self, value: Any) -> bool:
        new = id(value) not in self._seen
        self._seen[id(value)] = value
        return new

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
        elif isinstance(value, tuple):
            self._waiting += value
        elif isinstance(value, CONTAINERS):
            if len(value) <= MOST:
                self._container(value)
        elif package(type(value).__module__) not in _STATELESS:
            self._waiting += (type(value), getattr(value, "__dict__", None))

    def _container(self, value: Any) -> None:
        if isinstance(value, dict):
            self._entries(partial(dict.items, value), value.__setitem__, value.__delitem__)
            self._waiting += list(value.values())
        else:
            before = list(value)
            self.undo.append(lambda: _refill(value, before))
            self._waiting += before

    def _class(self, kind: type) -> None:
        for base in kind.__mro__:
            if not self._is_library(base.__module__) and (base is kind or self._is_new(base)):
                put, drop = partial(type.__setattr__, base), partial(type.__delattr__, base)
                self._entries(vars(base).items, put, drop)
                self._waiting += map(function_of, vars(base).values())

    def _function(self, function: FunctionType) -> None:
        self._waiting += (function.__dict__, function.__defaults__, function.__kwdefaults__)
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        if cells:
            self._entries(
                lambda: [(name, held) for name, cell in cells.items() for held in contents(cell)],
                lambda name, value: setattr(cells[name], "cell_contents", value),
                lambda name: delattr(cells[name], "cell_contents"),
            )
        for cell in cells.values():
            self._waiting += contents(cell)
        if not self._is_library(function.__module__):
            self._variables(function.__globals__, _names_in(function.__code__))

    def _variables(self, space: dict[str, Any], names: Iterable[str]) -> None:
        """Look after a file's variables, and what is found under names there."""
        if self._is_new(space):
            self._entries(space.items, space.__setitem__, space.__delitem__)
        for name in names:
            value = space.get(name)
            if not isinstance(value, ModuleType):
                self._waiting.append(value)
            elif not self._is_library(value.__name__) and self._is_new(value):
                self._variables(vars(value), names)

    def _is_library(self, module: str | None) -> bool:
        """Whether a module is of a package that has nothing to do with the model's own code."""
        name = package(module)
        return name in LIBRARIES or (name not in self._own and installed(name))

    def _entries(
        self,
        items: Callable[[], Iterable[tuple[Any, Any]]],
        put: Callable[[Any, Any], Any],
        drop: Callable[[Any], Any],
    ) -> None:
        """Have names, or keys, that come or change have their values of before, if one of the new is of a trace.

        A number among them may say how far the tensors reach.
        """
        before = dict(items())

        def restore() -> None:
            changed = {name: value for name, value in [*items()] if value is not before.get(name, _ABSENT)}
            for name in changed if any(map(_of_a_trace, changed.values())) else ():
                if name in before:
                    put(name, before[name])
                else:
                    drop(name)

        self.undo.append(restore)


def package(module: str | None) -> str:
    """The package that a module of some name belongs to."""
    return (module or "").partition(".")[0]


def contents(cell: CellType) -> list[Any]:
    """What a variable that functions share holds; nothing where it has no value yet."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


@cache
def installed(package: str) -> bool:
    """Whether a package lies where pip puts them; one that is installed to be edited does not."""
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(package)
        return spec is not None and not {"site-packages", "dist-packages"}.isdisjoint(Path(spec.origin or "").parts)
    return False


def function_of(member: Any) -> Any:
    """The function of a method, a static method or a property; anything else as it is."""
    if isinstance(member, property):
        return member.fget
    if isinstance(member, cached_property):
        return member.func
    return member.__func__ if isinstance(member, (staticmethod, classmethod)) else member


@lru_cache(MOST_REACHED)
def _names_in(code: CodeType) -> frozenset[str]:
    """The names in some code, functions within it included."""
    within = (_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*within)


def _refill(held: Any, before: list[Any]) -> None:
    """Give a list, a set or a deque back what it held, where it holds tensors of a trace."""
    if any(map(_of_a_trace, held)):
        held.clear()
        (held.update if isinstance(held, set) else held.extend)(before)


def _forget(cached: Any) -> None:
    """Empty an `lru_cache` that holds tensors of a trace; single results cannot be taken out of it."""
    if any(_of_a_trace(held) for held in gc.get_referents(cached)):
        cached.cache_clear()


def _of_a_trace(held: Any, depth: int = 3) -> bool:
    """Whether there is a tensor that no other forward pass can use."""
    if isinstance(held, Tensor):
        return held.is_meta or held.is_inference() or type(held).__module__.startswith("torch._subclasses")
    if not depth or isinstance(held, (type, ModuleType)):
        return False
    parts = held if isinstance(held, CONTAINERS) else getattr(held, "__dict__", {})
    return any(_of_a_trace(one, depth - 1) for one in (parts.values() if isinstance(parts, dict) else parts))
