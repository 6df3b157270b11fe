"""What some code looks up outside of itself, a digest of it, and what stands for all code of a library."""

from __future__ import annotations

import builtins
import dis
import hashlib
import platform
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache, partial
from importlib import metadata
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

from latpred import host
from latpred.sandbox.untouched import code_names, contents, installed, package, slots

if TYPE_CHECKING:
    import torch

READS_ELSEWHERE = {"open", "input", "exec", "eval", "compile", "globals", "vars", "__import__"}
VERSIONED = ("torch", "transformers", "torchvision", "timm")  # the version stands for all of the package
MOST, DEEPEST = 50_000, 50  # objects that are told apart, and how deep within each other
_PLAIN = frozenset({str, int, float, complex, bool, bytes, range, type(None), type(Ellipsis)})
_STATELESS = sys.stdlib_module_names - {"argparse", "builtins", "collections", "dataclasses", "types"}
_OF_MODULES = frozenset({"_parameters", "_buffers", "_modules", "training"})
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
    top = package(module)
    if top in sys.stdlib_module_names and top not in ("__main__", "test"):
        return f"python {platform.python_version()}"
    if top in VERSIONED:
        return f"{top} {version(top)}"
    if not installed(top):
        return None
    parts = [metadata.distribution(name) for name in sorted(set(_distributions().get(top, ())))]
    records = [f"{part.name} {part.version} {part.read_text('RECORD')}" for part in parts if part.read_text("RECORD")]
    return "\n".join(records) or None


def version(package: str) -> str:
    """The version of an installed package; "" of others, importable or not."""
    return host.versions(package).get(package, "")


_distributions = cache(metadata.packages_distributions)


def digest_of(model: torch.nn.Module, inputs: Any = None) -> str:
    """Digest of the code of a model and of all that steers it: settings of its modules, and inputs but their values."""
    state = _State()
    told = repr(state.of((model, inputs))) + _code_of(model, state.functions)
    return hashlib.sha256(told.encode()).hexdigest()


class _State:
    """What values amount to, as plain ones; functions that are met count by their code."""

    def __init__(self) -> None:
        self.functions: list[FunctionType] = []
        self._seen: dict[int, tuple[int, Any]] = {}  # keeps ids from being reused
        self._depth = 0

    def of(self, value: Any) -> Any:
        """A value without addresses: each object once, afterwards its number."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, type):
            return f"{value.__module__}.{value.__qualname__}"
        if id(value) in self._seen or len(self._seen) > MOST:
            return self._seen.get(id(value), (MOST, None))[0]
        self._seen[id(value)] = len(self._seen), value
        if self._depth > DEEPEST:
            return f"{kind.__module__}.{kind.__qualname__}"
        self._depth += 1
        told = self._object(value, kind, f"{kind.__module__}.{kind.__qualname__}")
        self._depth -= 1
        return told

    def _object(self, value: Any, kind: type, name: str) -> Any:
        """What an object amounts to that was not met before."""
        if isinstance(value, FunctionType):
            self.functions.append(value)
            return (name, value.__qualname__, self.of(value.__defaults__), self.of(value.__kwdefaults__))
        if isinstance(value, MethodType):
            return (name, self.of(value.__func__), self.of(value.__self__))
        if hasattr(kind, "untyped_storage"):
            return (name, tuple(value.shape), str(value.dtype))
        if hasattr(kind, "named_modules"):
            return (name, self._module(value))
        if isinstance(value, partial):
            return (name, self.of(value.func), self.of(value.args), self.of(value.keywords))
        if kind.__module__ in _STATELESS:  # a logger holds all loggers
            return name
        held = [self.of(getattr(value, "__dict__", None))]
        held += [self.of(getattr(value, slot.__name__, None)) for slot in slots(kind)]
        if isinstance(value, dict):
            return (name, [(self.of(key), self.of(item)) for key, item in dict.items(value)], held)
        if isinstance(value, (list, tuple, deque)):
            return (name, [self.of(item) for item in value], held)
        if isinstance(value, (set, frozenset)):
            return (name, sorted(repr(self.of(item)) for item in value), held)
        return (name, str(value) if kind.__module__ in ("torch", "numpy") else "", held)

    def _module(self, module: torch.nn.Module) -> list[Any]:
        """The classes of a module and its parts, and what these hold beside tensors."""
        parts = list(module.named_modules())
        for _, part in parts:
            self._seen.setdefault(id(part), (len(self._seen), part))
        told = []
        for path, part in parts:
            settings = []
            for name, each in vars(part).items():
                if "_hooks" in name and isinstance(each, dict):
                    each = [*each.values()]  # they are numbered through the whole process
                if name not in _OF_MODULES and not (isinstance(each, (dict, list)) and not each):
                    settings.append((name, self.of(each)))
            code = getattr(part, "code", "")  # of a GraphModule
            told.append((path, self.of(type(part)), code if isinstance(code, str) else "", settings))
        return told


def _code_of(model: torch.nn.Module, functions: Iterable[FunctionType]) -> str:
    """What the code of a model's classes, of functions that it holds, and of all that these call amounts to."""
    told: set[str] = set()
    seen: set[FunctionType] = set()
    waiting = [*_methods(model), *functions]
    while waiting:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        known = library(function.__module__ or "")
        told.add(known or _digest(function.__code__))
        waiting += (value for value in _held(function) if known is None and isinstance(value, FunctionType))
    return "".join(sorted(told))


def _methods(model: torch.nn.Module) -> Iterator[FunctionType]:
    """Functions of the classes of all modules, and those put on a module itself."""
    classes: dict[type, None] = {}
    for module in model.modules():
        yield from _functions(vars(module).values())
        classes.update(dict.fromkeys(kind for kind in type(module).__mro__ if package(kind.__module__) != "torch"))
    for kind in classes:
        yield from _functions(vars(kind).values())


def _functions(values: Iterable[Any]) -> Iterator[FunctionType]:
    for value in values:
        inner = value.fget if isinstance(value, property) else value
        inner = inner.__func__ if isinstance(inner, (staticmethod, classmethod, MethodType)) else inner
        while inner is not None:
            if isinstance(inner, FunctionType):
                yield inner
            inner = getattr(inner, "__wrapped__", None)


def _held(function: FunctionType) -> Iterator[Any]:
    """What a function's code, and the code within it, names of the globals; what it was wrapped around."""
    names = code_names(function.__code__)[0]
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType) and library(value.__name__) is None:
            yield from (vars(value)[inner] for inner in names if inner in vars(value))
        yield value
    for cell in function.__closure__ or ():
        yield from contents(cell)


@lru_cache(4096)
def _digest(code: CodeType) -> str:
    """Of what code does, wherever it is written."""
    constants = [_digest(value) if isinstance(value, CodeType) else _text(value) for value in code.co_consts]
    whole = (code.co_code.hex(), code.co_names, code.co_varnames, code.co_freevars, constants)
    return hashlib.sha256(repr(whole).encode()).hexdigest()


def _text(value: Any) -> str:
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)
