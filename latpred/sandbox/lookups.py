"""What some code looks up outside of itself, a digest of it, and what stands for all code of a library."""

from __future__ import annotations

import builtins
import dis
import hashlib
import platform
import sys
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from importlib import metadata
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from latpred.sandbox.untouched import code_names, contents, installed, package

if TYPE_CHECKING:
    import torch

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
    top = package(module)
    if top in sys.stdlib_module_names and top not in ("__main__", "test"):
        return f"python {platform.python_version()}"
    if top in VERSIONED:
        return f"{top} {_version(top)}"
    if not installed(top):
        return None
    parts = [metadata.distribution(name) for name in sorted(set(_distributions().get(top, ())))]
    records = [f"{part.name} {part.version} {part.read_text('RECORD')}" for part in parts if part.read_text("RECORD")]
    return "\n".join(records) or None


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


_distributions = cache(metadata.packages_distributions)


def digest_of(model: torch.nn.Module) -> str:
    """Digest of the code of a model.

    >>> import torch
    >>> digest_of(torch.nn.Linear(2, 2)) == digest_of(torch.nn.Linear(4, 4))
    True
    """
    digests: dict[CodeType, str] = {}
    waiting = list(_methods(model))
    while waiting:
        function = waiting.pop()
        code = function.__code__
        if code not in digests and package(function.__module__) != "torch":  # whose version is told elsewhere
            digests[code] = _digest(code)
            waiting += (value for value in _held(function) if isinstance(value, FunctionType))
    return hashlib.sha256("".join(sorted(digests.values())).encode()).hexdigest()


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
        inner = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        while inner is not None:
            if isinstance(inner, FunctionType):
                yield inner
            inner = getattr(inner, "__wrapped__", None)


def _held(function: FunctionType) -> Iterator[Any]:
    """What a function's code, and the code within it, names of the globals; what it was wrapped around."""
    for name in code_names(function.__code__)[0]:
        if name in function.__globals__:
            yield function.__globals__[name]
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
