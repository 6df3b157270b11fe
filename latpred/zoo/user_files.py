"""Models of a user's own files: a file is imported as it is now, and what its code raises is told of that code."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType
from typing import Any

from latpred.errors import LatpredError, UnknownModelError, UsageError, one_line

_OWN = "latpred_user_"  # begins the names of modules that are models' files
NO_GPU = ("not compiled with CUDA", "Found no NVIDIA driver", "NVTX functions not installed")  # errors of PyTorch
_beside = ""  # the folder of the model's file that was imported last, where imports look as well
_before = frozenset[str]()  # modules that were there before that file was imported
_MAIN_GUARD = "put what is not for importing below 'if __name__ == \"__main__\":'"


class _AsWritten(SourceFileLoader):
    """Compiles a file as it is now: Python's cache tells versions of it apart by length and whole seconds alone."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


def _look_beside(folder: str) -> None:
    """Have imports look in a model's folder last of all, and no longer in that of the model before it.

    Modules that the folder before gave are forgotten: some of the same names may lie here, or may have been edited.
    """
    global _beside, _before
    if _beside:
        for name in [name for name in sys.modules if name not in _before and _lies_in(_beside, name)]:
            del sys.modules[name]
        with suppress(ValueError):
            sys.path.remove(_beside)
    _beside, _before = "" if folder in sys.path else folder, frozenset(sys.modules)
    if _beside:
        sys.path.append(folder)


def _lies_in(folder: str, name: str) -> bool:
    """Whether a module, or the package that it is of, lies in a folder itself; models' files are none."""
    module = sys.modules.get(name.partition(".")[0])
    places = (*getattr(module, "__path__", ()), getattr(module, "__file__", None))
    return not name.startswith(_OWN) and any(Path(place).parent == Path(folder) for place in places if place)


def function_of(path: Path, function: str) -> Callable[[], Any]:
    """The function of that name in a user's file, imported as the file is now."""
    if not path.is_file():
        raise UnknownModelError(f"there is no file {str(path)!r}; give path/file.py:function")
    digest = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:16]
    _look_beside(str(path.resolve().parent))
    loader = _AsWritten(f"{_OWN}{path.stem}_{digest}", str(path))
    spec = spec_from_file_location(loader.name, path, loader=loader)
    assert spec is not None  # with a loader there is one
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses and torch.compile look for what a class is from
    try:
        with errors_of(f"importing {str(path)!r}", "the file", _MAIN_GUARD):
            loader.exec_module(module)
    except BaseException:
        sys.modules.pop(spec.name, None)
        raise
    build = getattr(module, function, None)
    if not callable(build):
        own = (key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__)
        offered = [key for key in own if callable(getattr(module, key)) and not key.startswith("_")]
        raise UnknownModelError(f"{str(path)!r} has no function {function!r}; it offers {', '.join(offered) or 'none'}")
    return build  # type: ignore[no-any-return]


@contextmanager
def errors_of(code: str, checked: str, instead_of_exit: str = "let it raise an error instead") -> Iterator[None]:
    """Have what a user's code raises say which code that was, and what to do about it."""
    try:
        yield
    except LatpredError:
        raise
    except SystemExit as end:
        raise UsageError(f"{code} ended in sys.exit({end.code!r}); {instead_of_exit}") from end
    except Exception as error:
        how = f"check {checked}"
        if isinstance(error, ModuleNotFoundError):
            how = f"install it, or {how} and PYTHONPATH"
        elif any(words in str(error) for words in NO_GPU):
            how = "no prediction needs the GPU that it asks for: build the model on the CPU"
        raise UsageError(f"{code} failed: {type(error).__name__}: {one_line(error)}; {how}") from error
