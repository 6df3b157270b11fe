"""Fingerprints of candidates: what tells whether a row was predicted for this very architecture.

A name is its own fingerprint, with the contents of the file it names. A config counts by its values, a graph by its
ops, a module by its classes, their bytecode, its settings and the shapes of its tensors, a function by its bytecode,
its defaults, what it closes over, and the functions, classes and plain values that it names. Libraries count by their
versions. What none of this fits has no fingerprint, and is predicted anew each time.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import msgspec
import torch

from latpred.graph import ModelGraph

LIBRARIES = ("builtins", "torch", "transformers", "torchvision", "timm")  # their versions stand for them
_FOLLOWED = (FunctionType, type, bool, int, float, str, tuple, frozenset)


class _NoneError(Exception):
    """There is something that no fingerprint can be taken of."""


def fingerprint(candidate: Any) -> str | None:
    """What tells a candidate from all others, the same in every process; None where nothing does.

    Examples
    --------
    >>> fingerprint("bert-base-uncased") == fingerprint("bert-base-uncased")
    True
    >>> one, other = (lambda: torch.nn.Linear(4, 4)), (lambda: torch.nn.Linear(4, 8))
    >>> fingerprint(one) == fingerprint(other)
    False
    """
    digest = hashlib.sha256()
    try:
        for part in _parts(candidate, set()):
            digest.update(len(part).to_bytes(8, "little") + part)
    except (_NoneError, RecursionError):
        return None
    return digest.hexdigest()


def _parts(value: Any, seen: set[int]) -> Iterator[bytes]:
    """What a value consists of, as bytes; functions and classes that were `seen` are only named again."""
    yield type(value).__qualname__.encode()
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        yield from _plain(value)
    elif isinstance(value, os.PathLike):
        yield from _plain(os.fspath(value))
    elif isinstance(value, ModelGraph):
        yield msgspec.json.encode(value)
    elif isinstance(value, torch.nn.Module):
        yield from _module(value, seen)
    elif isinstance(value, torch.Tensor):
        yield from _tensor(value)
    elif isinstance(value, (torch.dtype, torch.device, range)):
        yield repr(value).encode()
    elif hasattr(value, "to_json_string"):  # a transformers config
        yield value.to_json_string(use_diff=False).encode()
    elif isinstance(value, partial):
        yield from _each((value.func, value.args, value.keywords), seen)
    elif isinstance(value, (FunctionType, MethodType)):
        yield from _function(value, seen)
    elif isinstance(value, type):
        yield from _class(value, seen)
    elif isinstance(value, CodeType):
        yield from _each((value.co_code, value.co_consts, value.co_names, value.co_freevars), seen)
    elif isinstance(value, Mapping):
        yield from _each(value.items(), seen)
    elif isinstance(value, (list, tuple)):
        yield from _each(value, seen)
    elif isinstance(value, (set, frozenset)):
        yield from sorted(b"".join(_parts(item, seen)) for item in value)
    elif callable(value) and hasattr(value, "__dict__"):  # an object that is called to build
        yield from _each((type(value), vars(value)), seen)
    else:
        raise _NoneError


def _plain(value: Any) -> Iterator[bytes]:
    yield repr(value).encode()
    if isinstance(value, str) and value:
        path = Path(value.partition(":")[0] if ".py:" in value else value)
        if path.suffix in (".py", ".onnx") and path.is_file():
            yield path.read_bytes()


def _each(values: Iterable[Any], seen: set[int]) -> Iterator[bytes]:
    for value in values:
        yield b"next"
        yield from _parts(value, seen)


def _module(module: torch.nn.Module, seen: set[int]) -> Iterator[bytes]:
    yield repr(module).encode()
    classes = dict.fromkeys(type(part) for part in module.modules())
    yield from _each(classes, seen)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        yield f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode()
    for part in module.modules():
        settings = {name: value for name, value in vars(part).items() if _is_setting(name, value)}
        yield repr(sorted(settings.items())).encode()


def _is_setting(name: str, value: Any) -> bool:
    return not name.startswith("_") and isinstance(value, (bool, int, float, str, tuple, type(None)))


def _tensor(value: torch.Tensor) -> Iterator[bytes]:
    yield f"{tuple(value.shape)} {value.dtype} {value.device.type}".encode()
    if value.device.type == "cpu" and not value.is_floating_point():  # token ids and masks may steer a model
        yield value.contiguous().numpy().tobytes()


def _class(value: type, seen: set[int]) -> Iterator[bytes]:
    yield f"{value.__module__}.{value.__qualname__}".encode()
    if id(value) in seen or value.__module__.partition(".")[0] in LIBRARIES:
        return
    seen.add(id(value))
    for name, member in sorted(vars(value).items()):
        if isinstance(member, FunctionType):
            yield name.encode()
            yield from _function(member, seen)
    yield from _each(value.__bases__, seen)


def _function(value: FunctionType | MethodType, seen: set[int]) -> Iterator[bytes]:
    if isinstance(value, MethodType):
        yield from _each((value.__self__, value.__func__), seen)
        return
    yield f"{value.__module__}.{value.__qualname__}".encode()
    if id(value) in seen or (value.__module__ or "").partition(".")[0] in LIBRARIES:
        return
    seen.add(id(value))
    cells = [cell.cell_contents for cell in value.__closure__ or ()]
    yield from _each((value.__code__, value.__defaults__, value.__kwdefaults__, cells), seen)
    for name in sorted(_names(value.__code__)):
        named = value.__globals__.get(name)
        if not isinstance(named, FunctionType):  # a decorator written in Python is followed itself, to what it wraps
            named = getattr(named, "__wrapped__", named)  # what `functools.cache` was put around
        if isinstance(named, _FOLLOWED):
            yield name.encode()
            yield from _parts(named, seen)


def _names(code: CodeType) -> set[str]:
    """Names that some code looks up, functions within it included."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _names(constant)
    return found
