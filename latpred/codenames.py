"""What a function's code looks up outside itself: globals, with the attributes read of them, and imports.

Bytecode says so exactly: names of local variables and of methods are not taken for globals. Only what stands in the
code is found, not what a string that is evaluated, a file or the network would say; such code cannot be told.
"""

from __future__ import annotations

import builtins
import dis
import importlib.util
import platform
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

READS_ELSEWHERE = {"open", "input", "exec", "eval", "compile", "globals", "vars", "__import__"}
LIBRARIES = ("torch", "transformers", "torchvision", "timm")  # the version stands for all of the package
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")


class UntoldError(Exception):
    """Some code reads what nobody can tell."""


def named(code: CodeType, scope: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Everything that some code, functions within it included, looks up in a module's `scope`: dotted name and value.

    An attribute of a module stands for itself, and so does one that an object simply holds; anything else for the
    whole object.

    Raises
    ------
    UntoldError
        When it reads what is not there to be looked at.
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
    if top in LIBRARIES:
        return f"{top} {_version(top)}"
    if not _installed(top):
        return None
    found = [metadata.distribution(name) for name in sorted(set(_distributions().get(top, ())))]
    records = [f"{each.name} {each.version} {each.read_text('RECORD')}" for each in found if each.read_text("RECORD")]
    return "\n".join(records) or None


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _installed(top: str) -> bool:
    """Whether a package lies where packages are installed; one that is installed to be edited does not."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    if spec is None or spec.origin is None:
        return False
    paths = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    return any(Path(spec.origin).is_relative_to(path) for path in paths)


@cache
def _distributions() -> dict[str, list[str]]:
    return dict(metadata.packages_distributions())
