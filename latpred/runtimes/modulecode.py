"""A digest of the Python that a model's forward pass may run, so that a changed model is not taken for the one before.

Covers the methods of its modules' classes and the functions that they name, in whatever file; PyTorch's own are told by
its version. What is only reached through objects is not followed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_OWN = "torch"  # top-level package whose version is part of every key


def digest_of(model: torch.nn.Module) -> str:
    """Digest of the code of a model.

    >>> import torch
    >>> digest_of(torch.nn.Linear(2, 2)) == digest_of(torch.nn.Linear(4, 4))
    True
    """
    found: dict[CodeType, str] = {}
    waiting = list(_methods(model))
    while waiting:
        function = waiting.pop()
        code = function.__code__
        if code not in found and not _is_own(function.__module__):
            found[code] = _digest(code)
            waiting += (value for value in _named(function, code) if isinstance(value, FunctionType))
    return hashlib.sha256("".join(sorted(found.values())).encode()).hexdigest()


def _methods(model: torch.nn.Module) -> Iterator[FunctionType]:
    """Functions of the classes of all modules, and those put on a module itself."""
    classes: dict[type, None] = {}
    for module in model.modules():
        yield from _functions(vars(module).values())
        classes.update(dict.fromkeys(kind for kind in type(module).__mro__ if not _is_own(kind.__module__)))
    for kind in classes:
        yield from _functions(vars(kind).values())


def _functions(values: Any) -> Iterator[FunctionType]:
    for value in values:
        inner = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        while inner is not None:
            if isinstance(inner, FunctionType):
                yield inner
            inner = getattr(inner, "__wrapped__", None)


def _named(function: FunctionType, code: CodeType) -> Iterator[Any]:
    """What a function's code, and the code within it, names of the globals; what it was wrapped around."""
    for part in _codes(code):
        yield from (function.__globals__[name] for name in part.co_names if name in function.__globals__)
    yield from (cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _codes(value)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


@lru_cache(4096)
def _digest(code: CodeType) -> str:
    """Of what code does, wherever it is written."""
    constants = [_digest(value) if isinstance(value, CodeType) else _text(value) for value in code.co_consts]
    whole = (code.co_code.hex(), code.co_names, code.co_varnames, code.co_freevars, constants)
    return hashlib.sha256(repr(whole).encode()).hexdigest()


def _text(value: Any) -> str:
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _is_own(module: str | None) -> bool:
    return (module or "").partition(".")[0] == _OWN
