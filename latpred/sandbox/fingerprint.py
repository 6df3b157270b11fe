"""Fingerprints: what tells a model, or a candidate of a search, from all others, the same in every process.

Code counts by what it does and by all that it looks up outside of itself; code of a library by the library's version.
What nobody can tell, such as code that reads a file, has none.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import hashlib
import os
import platform
import sys
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from importlib import metadata
from inspect import CO_VARARGS, CO_VARKEYWORDS
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import msgspec
import torch

from latpred import host
from latpred.errors import is_stop
from latpred.sandbox.untouched import (
    CACHED,
    CONTAINERS,
    WITH_STATE,
    contents,
    function_of,
    installed,
    keeps_values,
    package,
)

READS_ELSEWHERE = {"input", "exec", "eval", "compile", "globals", "vars", "__import__"}
# Functions and methods of libraries that read files and the environment, by whatever they are reached.
READS_FILES = {
    *("open", "read_text", "read_bytes", "getenv", "environ", "load", "loadtxt", "genfromtxt", "fromfile", "memmap"),
    *("read_csv", "read_table", "read_json", "read_parquet", "safe_load", "safe_open", "load_file", "urlopen"),
    *("read_pickle", "read_excel", "read", "from_pretrained", "from_json_file", "check_output", "Popen"),
    *("listdir", "scandir", "iterdir", "glob", "rglob", "exists", "is_file", "is_dir", "import_module", "run_path"),
}
# Functions that draw whole numbers, by whatever they are reached, and modules in which all others do.
DRAWS = {"randint", "randperm", "multinomial", "random", "numpy.random"}
VERSIONED = ("torch", "transformers", "torchvision", "timm")  # the version stands for all of the package
MOST_PARTS = 200_000
MOST_BYTES = 2**26  # of one tensor, by whose values a candidate is told
_OF_MODULES = frozenset(vars(torch.nn.Module())) - {"_forward_hooks", "_forward_pre_hooks"}
_CODE = (FunctionType, staticmethod, classmethod, property)
_SLOTS = (GetSetDescriptorType, MemberDescriptorType)
_REST = CO_VARARGS | CO_VARKEYWORDS


class NoFingerprintError(Exception):
    """Some code reads what nobody can tell."""


def fingerprint(candidate: Any, *, builds: bool = False) -> str | None:
    """What tells a candidate from all others, the same in every process; None where nothing does.

    Nothing does where code that `builds` something draws a whole number or goes on with an object that counts: what it
    builds is another each time.

    >>> fingerprint("bert-base-uncased") == fingerprint("bert-base-uncased")
    True
    >>> one, other = (lambda: torch.nn.Linear(4, 4)), (lambda: torch.nn.Linear(4, 8))
    >>> fingerprint(one) == fingerprint(other)
    False
    """
    digest = hashlib.sha256()
    try:
        for count, part in enumerate(_Encoder(builds).of(candidate)):
            if count > MOST_PARTS:
                return None
            digest.update(len(part).to_bytes(8, "little") + part)
    except Exception as error:  # whatever an object that nobody knows raises when it is looked at
        if is_stop(error):
            raise
        return None
    return digest.hexdigest()


class _Encoder:
    """What values consist of, as bytes. Functions, classes and objects that were seen are only numbered again."""

    def __init__(self, builds: bool) -> None:
        self._builds = builds
        self._refused = READS_FILES | DRAWS if builds else READS_FILES
        self._seen: dict[int, tuple[int, Any]] = {}  # with the object itself, whose identity would be used again
        self._in_code = 0
        self._in_object = False  # one that is neither a module nor a container

    def of(self, value: Any) -> Iterator[bytes]:
        yield type(value).__qualname__.encode()
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
            yield from self._plain(value)
        elif isinstance(value, os.PathLike):
            yield from self._plain(os.fspath(value))
        elif isinstance(value, msgspec.Struct):
            yield msgspec.json.encode(value)
        elif isinstance(value, torch.Tensor):
            yield from self._tensor(value)
        elif isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format, range, type(...))):
            yield repr(value).encode()
        elif isinstance(value, CodeType):
            taken = value.co_varnames[: value.co_argcount + value.co_kwonlyargcount]
            how = value.co_names, value.co_freevars, taken, value.co_argcount, value.co_flags & _REST
            yield from self._each((value.co_code, value.co_consts, *how))
        elif type(value) in (list, tuple):
            yield from self._each(value)
        elif isinstance(value, (set, frozenset)):
            yield from sorted(b"".join(self.of(item)) for item in value)
        elif id(value) in self._seen:
            yield b"again %d" % self._seen[id(value)][0]
        else:
            self._seen[id(value)] = (len(self._seen), value)
            yield from self._held(value)

    def _held(self, value: Any) -> Iterator[bytes]:
        """What a value that others may hold too consists of."""
        if isinstance(value, torch.nn.Module):
            yield from self._module(value)
        elif _is_config(value):
            yield value.to_json_string(use_diff=False).encode()
            held = vars(value).items()  # of which that leaves out how attention and experts are computed
            yield from self._each((name, one) for name, one in held if name.endswith("_internal") or _is_config(one))
        elif isinstance(value, torch.fx.Graph):
            yield str(value).encode()
        elif isinstance(value, weakref.ref):  # recurrent layers hold their weights by some
            yield from self.of(value())
        elif isinstance(value, functools.partial):
            yield from self._each((value.func, value.args, value.keywords))
        elif isinstance(value, CACHED):
            yield from self.of(value.__wrapped__)
        elif isinstance(value, MethodType):
            yield from self._each((value.__self__, value.__func__))
        elif isinstance(value, (FunctionType, BuiltinFunctionType)):
            yield from self._function(value)
        elif isinstance(value, type):
            yield from self._class(value)
        elif type(value) in (dict, MappingProxyType):
            yield from self._each(value.items())
        elif isinstance(value, (staticmethod, classmethod, property, functools.cached_property)):
            yield from self.of(function_of(value))
        else:
            yield from self._object(value)

    def _each(self, values: Iterable[Any]) -> Iterator[bytes]:
        for value in values:
            yield b"next"
            yield from self.of(value)
        yield b"end"

    def _module(self, module: torch.nn.Module) -> Iterator[bytes]:
        yield repr(module).encode()
        yield from self._each(dict.fromkeys(type(part) for part in module.modules()))
        # Python reads no weights of PyTorch's own layers, whose biases of one value are drawn.
        layers = (part for part in module.modules() if type(part).__module__.startswith("torch.nn."))
        owned = (tensor for part in layers for tensor in (*part._parameters.values(), *part._buffers.values()))
        unread = {id(tensor) for tensor in owned if tensor is not None and tensor.dim() and tensor.is_floating_point()}
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            # Layouts decide which kernels run, and so does whether a weight is one to train.
            told = tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad
            yield f"{name} {told}".encode()
            if keeps_values(tensor, self._in_object) and id(tensor) not in unread:
                yield _values(tensor)
        outer, self._in_object = self._in_object, False
        for part in module.modules():
            self._seen.setdefault(id(part), (len(self._seen), part))
        for part in module.modules():
            held = {name: _without_hook_numbers(value) for name, value in vars(part).items() if name not in _OF_MODULES}
            own = sorted(held.items())
            # Settings go as one text: one by one they would double the time of a model.
            yield repr([setting for setting in own if _is_setting(setting[1])]).encode()
            yield from self._each(setting for setting in own if not _is_setting(setting[1]))
        self._in_object = outer

    def _tensor(self, value: torch.Tensor) -> Iterator[bytes]:
        if value.is_nested:
            raise NoFingerprintError("a nested tensor")
        yield f"{tuple(value.shape)} {value.stride()} {value.dtype} {value.device.type}".encode()
        # Token ids and masks may steer a model, and so may anything that the code which builds it reads.
        steers = self._in_code or not value.is_floating_point() or keeps_values(value, self._in_object)
        if steers and not value.is_meta:
            yield _values(value)

    def _class(self, value: type) -> Iterator[bytes]:
        yield f"{value.__module__}.{value.__qualname__}".encode()
        known = library(value.__module__)
        if known is not None:
            yield known.encode()
            return
        for name, member in sorted(vars(value).items()):
            if not isinstance(member, _SLOTS) and (not _is_special(name) or isinstance(member, _CODE)):
                yield name.encode()
                yield from self._inside(member)
        yield from self._each(value.__bases__)

    def _inside(self, value: Any) -> Iterator[bytes]:
        """What belongs to code: there the values of tensors count."""
        self._in_code += 1
        yield from self.of(value)
        self._in_code -= 1

    def _plain(self, value: Any) -> Iterator[bytes]:
        yield repr(value).encode()
        if isinstance(value, str) and value:
            path = Path(value.rpartition(":")[0] if ".py:" in value else value)
            if path.suffix in (".py", ".onnx") and path.is_file():
                yield path.read_bytes()
                if path.suffix == ".py":  # what it imports of the user's own, and reads, counts as that of functions
                    yield from self._named(compile(path.read_bytes(), path, "exec", dont_inherit=True), {})

    def _function(self, value: FunctionType | BuiltinFunctionType) -> Iterator[bytes]:
        if self._builds and value.__name__ in self._refused:
            raise NoFingerprintError(value.__qualname__)
        yield f"{value.__module__}.{value.__qualname__}".encode()
        owner = getattr(value, "__self__", None)  # of a method written in C, as [].append
        if owner is not None and not isinstance(owner, ModuleType):
            yield from self._inside(owner)
        known = library(value.__module__) if value.__module__ else "built in"
        if known is not None:
            yield known.encode()
            if isinstance(value, FunctionType) and not _is_under_its_name(value):  # a factory made it
                yield from self._inside(_parts_of(value))
            return
        if not isinstance(value, FunctionType):
            raise NoFingerprintError(value.__qualname__)
        yield from self._inside(_parts_of(value))
        yield from self._named(value.__code__, value.__globals__)

    def _named(self, code: CodeType, scope: dict[str, Any]) -> Iterator[bytes]:
        """What some code looks up outside of itself."""
        for name, used in _names_looked_up(code, scope, self._refused):
            yield name.encode()
            if not isinstance(used, ModuleType):
                yield from self._inside(used)
                continue
            known = library(used.__name__)
            if known is None:  # a module that is used as a whole: whatever may be read of another
                raise NoFingerprintError(used.__name__)
            yield f"{used.__name__} {known}".encode()

    def _object(self, value: Any) -> Iterator[bytes]:
        """An object by its class and by the state that a copy of it would be made from."""
        if self._builds and isinstance(value, WITH_STATE):
            raise NoFingerprintError(type(value).__qualname__)
        yield from self.of(type(value))
        state = value.__reduce_ex__(4)
        if isinstance(state, str):
            yield state.encode()
            return
        make, arguments, *rest = state
        held, *items = (*rest, None, None, None)[:3]
        outer = self._in_object
        self._in_object = outer or not isinstance(value, CONTAINERS)
        yield from self._each((make, arguments, held, *(None if part is None else tuple(part) for part in items)))
        self._in_object = outer


def _values(tensor: torch.Tensor) -> bytes:
    """All numbers of a tensor."""
    if tensor.layout != torch.strided or tensor.nbytes > MOST_BYTES:
        raise NoFingerprintError("a tensor")
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.flatten().view(torch.uint8).numpy().tobytes()


def _parts_of(function: FunctionType) -> tuple[Any, ...]:
    """The code of a function, its defaults, and what it closes over."""
    held = tuple(map(contents, function.__closure__ or ()))
    return function.__code__, function.__defaults__, function.__kwdefaults__, held


def _is_under_its_name(function: FunctionType) -> bool:
    """Whether a function is the one that its module has under its name."""
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def _is_config(value: Any) -> bool:
    """Whether a value is a configuration of transformers."""
    return hasattr(type(value), "to_json_string")


def _without_hook_numbers(value: Any) -> Any:
    """Hooks without their numbers, which run through the whole process."""
    return [*value.values()] if type(value) is OrderedDict and all(type(key) is int for key in value) else value


def _is_special(name: str) -> bool:
    """Names that Python gives a meaning; `_abc_impl` is its too."""
    return name == "_abc_impl" or (name.startswith("__") and name.endswith("__"))


def _is_plain(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, str)


def _is_setting(value: Any) -> bool:
    return _is_plain(value) or (type(value) is tuple and all(map(_is_plain, value)))


def _names_looked_up(code: CodeType, scope: dict[str, Any], refused: set[str]) -> Iterator[tuple[str, Any]]:
    """Everything that some code, functions within it included, looks up in a module's `scope`: dotted name and value.

    An attribute of a module stands for itself. Code that has a `refused` name has no fingerprint, nor has any that
    imports what is no library: a file's code, which has no scope yet, will import modules anew.
    """
    found = refused.intersection(code.co_names)
    if found:
        raise NoFingerprintError(min(found))
    steps = list(dis.get_instructions(code))
    for index, step in enumerate(steps):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            name = step.argval
            if name in scope:
                yield _attribute_read(name, scope[name], steps[index + 1 :])
            elif name in READS_ELSEWHERE:
                raise NoFingerprintError(name)
        elif step.opname == "IMPORT_NAME" and (steps[index - 2].argval or library(step.argval) is None):
            raise NoFingerprintError(step.argval)  # by a relative name, or of the user's own
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_looked_up(constant, scope, refused)


def _attribute_read(name: str, value: Any, following: list[dis.Instruction]) -> tuple[str, Any]:
    """A value, or what the attributes read of it right afterwards lead to."""
    for step in following:
        reads = step.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(value, ModuleType)
        if not reads or not hasattr(value, step.argval):
            break
        name, value = f"{name}.{step.argval}", getattr(value, step.argval)
    return name, value


@functools.cache
def library(module: str) -> str | None:
    """What stands for all code of an installed package, by the name of one of its modules; None of anybody's own code.

    The standard library counts by Python's version, an installed package by its own.
    """
    top = package(module)
    if top in sys.stdlib_module_names and top not in ("__main__", "test"):
        return f"python {platform.python_version()}"
    if top in VERSIONED:
        return f"{top} {version(top)}"
    names = sorted(set(_distributions().get(top, ()))) if installed(top) else ()
    return " ".join(f"{name} {version(name)}" for name in names) or None


def version(package: str) -> str:
    """The version of an installed package, and where it came from if not from an index; "" of others."""
    came_from = None
    with contextlib.suppress(metadata.PackageNotFoundError):  # two commits of a repository may have one version
        came_from = metadata.distribution(package).read_text("direct_url.json")
    return host.versions(package).get(package, "") + (came_from or "")


_distributions = functools.cache(metadata.packages_distributions)
