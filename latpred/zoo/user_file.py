"""Models from a user's own file: "path/file.py:function".

The file is imported and its function called, so this runs the user's code; nothing else in latpred does.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

from latpred.errors import UnknownModelError, UsageError
from latpred.tracing.inputs import demand_one, derived, from_example, placed
from latpred.tracing.meta_module import Unweighted

Example = Callable[[int, str], Any]

# Files that somebody may take for a model. A name may have a dot as well: "Qwen/Qwen2.5-0.5B".
_SUFFIXES = frozenset(
    (".py", ".json", ".yaml", ".yml", ".onnx", ".pt", ".pt2", ".pth", ".ckpt", ".bin", ".pkl", ".safetensors")
)
_PATHS = ("/", "./", "../", "~/")


def build_from_file(
    name: str, device: str, seq: int | None, image: int | None
) -> tuple[torch.nn.Module, Example, str, int]:
    """Call the function that "path/file.py:function" names."""
    path, _, function = name.rpartition(":")
    build = _function(Path(path), function)
    made = _call(build, name, device)
    model, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"{name} returned {type(model).__name__}; it must return an nn.Module, or a module and an example of its "
            "inputs"
        )
    demand_one(example, seq, image)
    inputs = derived(model, seq, image) if example is None else from_example(example)
    return model, lambda batch, where: _arguments(placed(inputs.make(batch), where)), inputs.kind, inputs.size


def demand_there(path: str) -> None:
    """Refuse the path of a file that is not there."""
    if not Path(path).exists():
        raise UnknownModelError(f"there is no file {path!r}; check the path, and the folder that it starts from")


def demand_no_path(name: str) -> None:
    """Refuse what is no name but the path of a file, there or not."""
    path = Path(name)
    if path.suffix.lower() not in _SUFFIXES and not name.startswith(_PATHS):
        return
    demand_there(name)
    if path.suffix == ".py":
        found = [f"{name}:{function}" for function in _functions(path)]
        given = f"give one of {', '.join(found)}" if found else f"give one that returns it, as {name}:build"
        raise UnknownModelError(f"{name!r} is a Python file, of which one function builds the model; {given}")
    raise UnknownModelError(
        f"{name!r} is nothing that latpred can read a model from; give the function that builds the model, as "
        "path/file.py:function, or an .onnx file"
    )


def _functions(path: Path) -> list[str]:
    """Functions of a file that take no arguments, as it is written: nothing of it runs."""
    try:
        parts = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return []
    return [
        part.name
        for part in parts
        if isinstance(part, ast.FunctionDef)
        and not part.name.startswith("_")
        and len(part.args.defaults) == len([*part.args.posonlyargs, *part.args.args])
        and None not in part.args.kw_defaults
    ]


def _arguments(value: Any) -> Any:
    return value if isinstance(value, (tuple, dict)) else (value,)


def _function(path: Path, function: str) -> Callable[[], Any]:
    if not path.is_file():
        raise UnknownModelError(f"there is no file {str(path)!r}; give path/file.py:function")
    spec = spec_from_file_location(f"latpred_user_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UnknownModelError(f"{str(path)!r} is not a Python file; give path/file.py:function")
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except SystemExit as end:
        raise UsageError(
            f"importing {str(path)!r} ended in sys.exit({end.code!r}); put what is not for importing below "
            "'if __name__ == \"__main__\":'"
        ) from end
    except Exception as error:
        raise UsageError(f"importing {str(path)!r} failed: {type(error).__name__}: {error}; check the file") from error
    build = getattr(module, function, None)
    if not callable(build):
        offered = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UnknownModelError(f"{str(path)!r} has no function {function!r}; it offers {', '.join(offered) or 'none'}")
    return build  # type: ignore[no-any-return]


def _call(build: Callable[[], Any], name: str, device: str) -> Any:
    if device == "meta":
        try:
            with Unweighted():
                return build()
        except (Exception, SystemExit):
            pass  # it is called once more, and what it then says counts
    try:
        return build()
    except SystemExit as end:
        raise UsageError(f"{name} ended in sys.exit({end.code!r}); let it raise an error instead") from end
    except Exception as error:
        raise UsageError(f"{name} failed: {type(error).__name__}: {error}; check the function") from error
