"""What a model's code reaches besides the model: put back as it was after a trace.

A forward pass may keep what it computes in a variable of its file, on its class, in a closure or in a function's
`lru_cache`. Nothing of that belongs to the model, so no copy of the model keeps a trace from writing there; and what it
writes are tensors without values. Followed are classes and functions of the user's, and those that they name; libraries
keep no tensors.
"""

from __future__ import annotations

import builtins
import dis
import gc
import importlib.util
import platform
import sys
import sysconfig
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from importlib import metadata
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from latpred.sandbox.copies import LIBRARIES, contents

MOST = 20_000  # objects that are looked after
_LARGEST = 1 << 20  # numbers of a tensor that is
_PLAIN = (str, int, float, complex, bytes, type(None))
_STATELESS = LIBRARIES - {"transformers"}  # which has caches of keys and values
_STATEFUL = (torch.nn.Module, SimpleNamespace, Namespace)
_SITES = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})
_CHANGEABLE = (list, dict, set, deque)
_CACHED = type(cache(id))
_ABSENT = object()


class _Code(NamedTuple):
    """Names that a function's code looks up, and variables of its file that it sets."""

    names: frozenset[str]
    sets: frozenset[str]


@contextmanager
def put_back(roots: Iterable[Any], *, numbers: bool = True) -> Iterator[None]:
    """Within it, code may change what it reaches; afterwards all of that is as before."""
    reached = _Reached(numbers)
    reached.look_after([*roots, *(hook for hooks in _GLOBAL_HOOKS for hook in list(hooks.values()))])
    try:
        yield
    finally:
        reached.undo()


_GLOBAL_HOOKS: tuple[dict[int, Any], ...] = (
    torch.nn.modules.module._global_forward_pre_hooks,
    torch.nn.modules.module._global_forward_hooks,
)


class _Reached:
    """Everything that some code reaches, as it is now."""

    def __init__(self, numbers: bool) -> None:
        self._numbers = numbers
        self._undo: list[Callable[[], Any]] = []
        self._seen: dict[int, Any] = {}  # keeps ids from being reused
        self._left = MOST
        self._waiting: list[Any] = []
        self._own: frozenset[str] = frozenset()

    def undo(self) -> None:
        """Put everything back."""
        for step in self._undo:
            step()

    def look_after(self, roots: Sequence[Any]) -> None:
        """Remember what classes and functions, and all that these name, may change."""
        self._own = frozenset(_package(getattr(root, "__module__", None)) for root in roots)
        self._waiting.extend(roots)
        while self._waiting and self._left > 0:
            value = self._waiting.pop()
            if isinstance(value, _PLAIN) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            self._left -= 1
            self._one(value)

    def _one(self, value: Any) -> None:
        if isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, MethodType):
            self._waiting += (value.__func__, value.__self__)
        elif isinstance(value, _CACHED):
            self._undo.append(lambda: _forget(value))
            self._waiting.append(value.__wrapped__)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, torch.Tensor):
            self._tensor(value)
        elif isinstance(value, torch.Generator):
            state = value.get_state()
            if self._numbers:
                self._undo.append(partial(value.set_state, state))
        elif isinstance(value, (tuple, frozenset)):
            self._waiting += value
        else:
            self._object(value)

    def _class(self, kind: type) -> None:
        for base in kind.__mro__:
            if self._is_library(base.__module__) or (base is not kind and id(base) in self._seen):
                continue
            self._seen[id(base)] = base
            held = dict(vars(base))
            self._undo.append(lambda base=base, held=held: self._reset_class(base, held))  # type: ignore[misc]
            self._waiting += map(_inner, held.values())

    def _function(self, function: FunctionType) -> None:
        if "__wrapped__" in function.__dict__:
            self._waiting.append(function.__wrapped__)  # type: ignore[attr-defined]
        for cell in function.__closure__ or ():
            for content in contents(cell):
                self._undo.append(lambda cell=cell, content=content: self._refill(cell, content))  # type: ignore[misc]
                self._waiting.append(content)
        self._waiting += function.__defaults__ or ()
        self._waiting += (function.__kwdefaults__ or {}).values()
        if not self._is_library(function.__module__):
            self._keep(function.__dict__)
            code = _read(function.__code__)
            self._names(function.__globals__, code.names, code.sets)

    def _names(self, space: dict[str, Any], names: Iterable[str], sets: Iterable[str]) -> None:
        """Look after what is found under names of a file."""
        for name in sets:
            before = space.get(name, _ABSENT)
            self._undo.append(lambda name=name, before=before: self._rebind(space, name, before))  # type: ignore[misc]
        for name in names:
            value = space.get(name)
            if not isinstance(value, ModuleType):
                self._waiting.append(value)
            elif not self._is_library(value.__name__) and id(value) not in self._seen:
                self._seen[id(value)] = value
                inside = [other for other in names if other in vars(value)]
                self._names(vars(value), inside, inside)

    def _object(self, value: Any) -> None:
        if isinstance(value, _CHANGEABLE):
            self._keep(value)
        elif _package(type(value).__module__) in _STATELESS and not isinstance(value, _STATEFUL):
            return
        held = getattr(value, "__dict__", None)
        if isinstance(held, dict):
            self._keep(held)
            self._waiting.append(type(value))

    def _keep(self, value: Any) -> None:
        """Look after a container and what is in it."""
        if not isinstance(value, _CHANGEABLE) or len(value) > self._left:
            return
        self._left -= len(value)
        before = value.copy() if type(value) in _CHANGEABLE else _base(value)(value)
        self._undo.append(lambda: self._refill_container(value, before))
        self._waiting += list(value.values() if isinstance(value, dict) else value)

    def _tensor(self, tensor: torch.Tensor) -> None:
        if (
            not self._numbers
            or tensor.is_meta
            or tensor.requires_grad
            or tensor.is_inference()
            or tensor.numel() > _LARGEST
        ):
            return
        version, before = tensor._version, tensor.detach().clone()
        self._undo.append(lambda: None if tensor._version == version else _rewrite(tensor, before))

    def _is_library(self, module: str | None) -> bool:
        """Whether a module is of a package that has nothing to do with the model's own code."""
        package = _package(module)
        return package in LIBRARIES or (package not in self._own and _installed(package))

    def _ours(self, now: Any) -> bool:
        """Whether a value that was not there before is to go."""
        return self._numbers or _of_a_trace(now)

    def _reset_class(self, kind: type, before: dict[str, Any]) -> None:
        now = dict(vars(kind))
        for name, value in now.items():
            if name not in before and self._ours(value):
                type.__delattr__(kind, name)
        for name, value in before.items():
            if now.get(name, _ABSENT) is not value and self._ours(now.get(name)):
                type.__setattr__(kind, name, value)

    def _refill(self, cell: Any, before: Any) -> None:
        now = contents(cell)
        if not now or (now[0] is not before and self._ours(now[0])):
            cell.cell_contents = before

    def _rebind(self, space: dict[str, Any], name: str, before: Any) -> None:
        now = space.get(name, _ABSENT)
        if now is before or not self._ours(now):
            return
        if before is _ABSENT:
            del space[name]
        else:
            space[name] = before

    def _refill_container(self, value: Any, before: Any) -> None:
        """Give a container back what it held, touching nothing that is still there."""
        if isinstance(value, dict):
            for key, now in list(dict.items(value)):
                if key not in before and self._ours(now):
                    dict.__delitem__(value, key)
            for key, item in before.items():
                now = dict.get(value, key, _ABSENT)
                if now is not item and self._ours(now):
                    dict.__setitem__(value, key, item)
        elif len(value) == len(before) and all(new is old for new, old in zip(value, before, strict=True)):
            return
        elif self._numbers or any(_of_a_trace(now) for now in value):
            if isinstance(value, list):
                list.__setitem__(value, slice(None), before)
            else:
                value.clear()
                (set.update if isinstance(value, set) else deque.extend)(value, before)


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _inner(member: Any) -> Any:
    """The function of a method, a static method or a property."""
    if isinstance(member, (staticmethod, classmethod)):
        return member.__func__
    return member.fget if isinstance(member, property) else member


def _base(value: Any) -> Any:
    return next(kind for kind in _CHANGEABLE if isinstance(value, kind))


@lru_cache(MOST)
def _read(code: CodeType) -> _Code:
    """The names in some code, functions within it included."""
    names, sets = set(code.co_names), set()
    for step in dis.get_instructions(code):
        if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            sets.add(str(step.argval))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _read(constant).names
            sets |= _read(constant).sets
    return _Code(frozenset(names), frozenset(sets))


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


def _rewrite(tensor: torch.Tensor, before: torch.Tensor) -> None:
    with torch.inference_mode(False), torch.no_grad():
        tensor.copy_(before)


READS_ELSEWHERE = {"open", "input", "exec", "eval", "compile", "globals", "vars", "__import__"}
VERSIONED = ("torch", "transformers", "torchvision", "timm")  # the version stands for all of the package
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")


class UntoldError(Exception):
    """Some code reads what nobody can tell."""


def named(code: CodeType, scope: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Everything that some code, functions within it included, looks up in a module's `scope`: dotted name and value.

    An attribute of a module stands for itself, and so does one that an object simply holds; anything else for the
    whole object.
    """
    steps = list(dis.get_instructions(code))
    for index, step in enumerate(steps):
        if step.opname in _GLOBAL:
            name = step.argval
            if name in scope:
                yield _attribute(name, scope[name], steps[index + 1 :])
            elif name in READS_ELSEWHERE and hasattr(builtins, name):
                raise UntoldError(name)
        elif step.opname == "IMPORT_NAME":
            yield from _imported(steps, index)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from named(constant, scope)


def _attribute(name: str, value: Any, following: list[dis.Instruction]) -> tuple[str, Any]:
    """A value, or what the attributes read of it right afterwards lead to."""
    for step in following:
        if step.opname not in _ATTRIBUTE:
            break
        if isinstance(value, ModuleType):
            if not hasattr(value, step.argval):
                break
            value = getattr(value, step.argval)
        elif not isinstance(value, type) and step.argval in getattr(value, "__dict__", ()):
            value = value.__dict__[step.argval]
        else:
            break
        name = f"{name}.{step.argval}"
    return name, value


def _imported(steps: list[dis.Instruction], index: int) -> Iterator[tuple[str, Any]]:
    """What an import within a function brings; of modules that are no library only names, as in `from x import y`."""
    name = steps[index].argval
    absolute = steps[index - 2].argval == 0
    if absolute and library(name) is not None:
        return
    module = sys.modules.get(name) if absolute else None
    taken = []
    for step in steps[index + 1 :]:
        if step.opname == "IMPORT_FROM":
            taken.append(step.argval)
        elif not step.opname.startswith("STORE_"):
            break
    if module is None or not taken or not all(hasattr(module, wanted) for wanted in taken):
        raise UntoldError(name)
    for wanted in taken:
        yield f"{name}.{wanted}", getattr(module, wanted)


@cache
def library(module: str) -> str | None:
    """What stands for all code of an installed package, by the name of one of its modules; None of anybody's own code.

    The standard library counts by Python's version. An installed package counts by its version and its list of
    files with their digests, so that one that is installed anew without a new version counts as another.
    """
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names and top not in ("__main__", "test"):
        return f"python {platform.python_version()}"
    if top in VERSIONED:
        return f"{top} {_version(top)}"
    if not _installed(top):
        return None
    parts = [metadata.distribution(name) for name in sorted(set(_distributions().get(top, ())))]
    records = [f"{part.name} {part.version} {part.read_text('RECORD')}" for part in parts if part.read_text("RECORD")]
    return "\n".join(records) or None


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


@cache
def _installed(package: str) -> bool:
    """Whether a package lies where pip puts them; one that is installed to be edited does not."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None and spec.origin.startswith(_SITES)


@cache
def _distributions() -> dict[str, list[str]]:
    return dict(metadata.packages_distributions())
